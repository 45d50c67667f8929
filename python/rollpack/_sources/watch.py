"""How far a source was read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import pyarrow as pa

from rollpack._sources.parts import Batches, Part, reading

T = TypeVar("T")


class Watch:
    """How far a source was read, for progress and to tell in which part a row lies or reading failed.

    Attributes:
        rows: the rows drawn so far, one entry a part.
        finished: whether a part was read to its end, one entry a part.
        current: the part that was touched last.
        failure: what stopped a part's own reader.
    """

    def __init__(self, progress: Callable[[int], object] | None = None) -> None:
        self.rows: list[int] = []
        self.finished: list[bool] = []
        self.current = 0
        self.failure: BaseException | None = None
        self._progress = progress

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Raises what stopped a part's own reader, be it Ctrl-C, in place of the text that the core makes of it."""
        try:
            yield
        except Exception:
            if self.failure is not None:
                raise self.failure from None
            raise

    def part(self, number: int, part: Part) -> Part:
        """``part``, with what is read of it noted down here as the part of this number."""
        self.rows.append(0)
        self.finished.append(False)

        def open_stream(names: list[str] | None, pieces: list[int] | None) -> Batches:
            self.current = number
            stream = part.stream(names, pieces)
            reader = pa.RecordBatchReader.from_stream(stream)
            self.rows[number], self.finished[number] = 0, False
            return Batches(reader.schema, self._batches(number, reader, stream))

        def current(read: Callable[[], T]) -> T:
            self.current = number
            return read()

        names = partial(current, part.names) if part.names else None
        return Part(open_stream, names, partial(current, part.lengths) if part.lengths else None)

    def _batches(self, number: int, reader: pa.RecordBatchReader, stream: Any) -> Iterator[pa.RecordBatch]:
        self.current = number
        try:
            with reading([stream]):
                for batch in reader:
                    self.current = number
                    self.rows[number] += batch.num_rows
                    if self._progress is not None:
                        self._progress(batch.num_rows)
                    yield batch
        except GeneratorExit:  # nobody wants the rest
            raise
        except BaseException as error:
            self.failure = error
            raise
        self.finished[number] = True
