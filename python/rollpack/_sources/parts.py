"""One object or file as Arrow streams."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeAlias, TypeVar

import pyarrow as pa

from rollpack._errors import DataError, RollpackError

T = TypeVar("T")

#: The number of a part, and of what can be read of it alone: a row group of a Parquet file, a batch of an Arrow file.
Piece: TypeAlias = tuple[int, int]


@dataclass(frozen=True)
class Part:
    """One object or file.

    Attributes:
        stream: the columns of these names (None: all) in these pieces (None: all), as an Arrow stream.
        names: its columns, None where only the stream itself can tell.
        lengths: the rows of each piece, None where only the stream itself can tell how many there are.
        closed: whether it is not to be read.
    """

    stream: Callable[[list[str] | None, list[int] | None], Any]
    names: Callable[[], list[str]] | None = None
    lengths: Callable[[], list[int]] | None = None
    closed: bool = False


def closed(rows: int) -> Part:
    """A part of which nobody wants a row."""
    return Part(lambda *_: pa.table({}), None, lambda: [rows], closed=True)


def chained(parts: Sequence[Part], names: list[str] | None) -> Batches:
    """The rows of several parts, as one stream."""
    readers = [pa.RecordBatchReader.from_stream(part.stream(names, None)) for part in parts]
    return Batches(readers[0].schema, chain.from_iterable(readers))


class Batches:
    """Batches that Python hands over one by one, as an Arrow stream.

    Attributes:
        schema: of the batches.
        failure: what stopped them, of which the C interface passes on the text alone.
    """

    def __init__(self, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> None:
        self.schema = schema
        self.failure: BaseException | None = None
        self._batches = batches

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        # A name ends at a NUL in the C interface: a damaged one could become that of another column.
        try:
            damaged = [name for name in self.schema.names if "\0" in name]
        except UnicodeDecodeError as error:
            raise DataError(f"the Arrow data is corrupt: the name of a column is no UTF-8: {error}") from error
        if damaged:
            raise DataError(f"the Arrow data is corrupt: {damaged[0]!r} is no name of a column")
        return pa.RecordBatchReader.from_batches(self.schema, self._sound()).__arrow_c_stream__(requested_schema)

    def _sound(self) -> Iterator[pa.RecordBatch]:
        try:
            for batch in self._batches:
                yield sound(batch)
        except GeneratorExit:  # nobody wants the rest
            raise
        except BaseException as error:
            self.failure = error
            raise


def sound(data: T) -> T:
    """Pyarrow knows the sizes of its buffers, and the C interface does not tell them: whether they suffice is asked here."""
    try:
        data.validate()  # type: ignore[attr-defined]
    except pa.ArrowException as error:
        raise DataError(f"the Arrow data is corrupt: {error}") from error
    whole: T = _with_buffers_of_views(data)
    return whole


def _with_buffers_of_views(data: Any) -> Any:
    """A cast of short strings to views leaves out the buffer of long ones; handing that over crashes pyarrow before 25."""
    for at, field in enumerate(data.schema):
        if field.type in (pa.string_view(), pa.binary_view()):
            column = data.column(at)
            chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
            if any(buffer is None for chunk in chunks for buffer in chunk.buffers()[2:]):
                data = data.set_column(at, field, pa.array(column.to_pylist(), field.type))
    return data


@contextmanager
def reading(streams: Sequence[Any]) -> Iterator[None]:
    """Raises what stopped one of the streams, in place of the text that the core makes of it."""
    try:
        yield
    except Exception as error:
        for failure in (stream.failure for stream in streams if isinstance(stream, Batches)):
            if isinstance(failure, RollpackError) or not isinstance(failure, Exception | None):
                raise failure from None  # one of ours, or Ctrl-C
            if failure is not None:
                raise error from failure
        raise
