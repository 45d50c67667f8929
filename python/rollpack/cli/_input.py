"""Reading FILEs as one input, and saying in which of them something is wrong."""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import accumulate
from typing import Any

import pyarrow as pa

from rollpack._errors import DataError, SchemaError, printable
from rollpack._sources import Source, Watch, of_file
from rollpack.cli._output import Bar
from rollpack.cli._spool import expand


class Input:
    """Files that are read one after the other as one input.

    Attributes:
        paths: the files, globs and directories expanded.
        source: their rows, for whatever takes data.
    """

    def __init__(self, files: list[Any], progress: Bar | None = None) -> None:
        """As :func:`expand` does, ``files`` is changed where it names what can be read only once."""
        self.paths = expand(files, progress.note if progress else None)
        twice = [path for path, times in Counter(path.resolve() for path in self.paths).items() if times > 1]
        if twice:
            raise DataError(f"{twice[0]} is named twice, and its rows would count twice")
        self._watch = Watch(progress)
        parts = [of_file(path) for path in self.paths]
        if progress is not None and all(part.lengths for part in parts):
            with suppress(DataError):  # reading comes to it again
                progress.expect(sum(sum(part.lengths()) for part in parts if part.lengths))
        self.source = Source(parts).watched(self._watch)

    @contextmanager
    def located(self) -> Iterator[None]:
        """Adds to an error about the data which file, and which row of it, it is about."""
        try:
            with self._watch.telling():
                yield
        except (DataError, SchemaError) as error:
            where = self._where(error)
            if str(error).startswith(printable(where)):  # it names the file already
                raise
            raise type(error)(f"{where}: {error}", error.column, error.row) from error
        except (pa.ArrowException, OSError) as error:
            if error is self._watch.failure:
                raise DataError(f"{self.paths[self._watch.current]}: cannot be read: {error}") from error
            raise

    def _where(self, error: DataError | SchemaError) -> str:
        if error.row is None or len(self.paths) == 1:
            return str(self.paths[self._watch.current])
        ends = list(accumulate(self._watch.rows))
        part = min(bisect.bisect_right(ends, error.row), len(ends) - 1)
        return f"{self.paths[part]}, row {error.row - (ends[part - 1] if part else 0)} there"
