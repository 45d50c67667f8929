"""Every way to read data: Arrow objects, what can be turned into one, and files."""

from __future__ import annotations

import glob
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.ipc as paipc
import pyarrow.json as pajson

from rollpack import _core
from rollpack._errors import DataError, RollpackError, SchemaError

T = TypeVar("T")

#: The columns that a role can be mapped to, in the order of the documentation.
ROLES = ("tokens", "response_length", "loss_mask", "rollout_id", "group_index")


@dataclass(frozen=True)
class Request:
    """What to read, and under which names. The core knows what it means."""

    columns: Mapping[str, str | None] = field(default_factory=dict)
    rollout_key: tuple[str, ...] = ("rollout_id",)
    groups: bool = False
    token_columns: tuple[str, ...] = ()
    sample_columns: tuple[str, ...] = ()

    @classmethod
    def make(
        cls,
        columns: Mapping[str, str | None] | None,
        rollout_key: str | Sequence[str],
        *,
        groups: bool = False,
        token_columns: Sequence[str] = (),
        sample_columns: Sequence[str] = (),
    ) -> Request:
        """From the arguments of the public functions. A key that names the group reads the groups."""
        key = _names("rollout_key", rollout_key)
        return cls(
            columns=dict(columns or {}),
            rollout_key=key,
            groups=groups or "group_index" in key,
            token_columns=_names("token_columns", token_columns),
            sample_columns=_names("sample_columns", sample_columns),
        )

    def names(self) -> set[str]:
        """The columns of the data that may be read."""
        roles = {"tokens", "response_length", "loss_mask", *self.rollout_key}
        if self.groups:
            roles.add("group_index")
        names = {self.columns.get(role, role) for role in roles}
        return {name for name in names if name is not None} | {*self.token_columns, *self.sample_columns}


def _names(argument: str, names: str | Sequence[str]) -> tuple[str, ...]:
    names = (names,) if isinstance(names, str) else tuple(names)
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"{argument} holds {name!r}; column names are strings")
    return names


class Source:
    """Data that can be read as Arrow streams, as often as what is behind it allows."""

    def __init__(self, parts: Sequence[_Part]) -> None:
        if not parts:
            raise DataError("the data has no rows: it is an empty list")
        self._parts = parts

    @classmethod
    def of(cls, data: Any) -> Source:
        """A source for whatever the public functions take as ``data``."""
        if isinstance(data, Source):
            return data
        if isinstance(data, np.ndarray) and data.dtype == object and data.ndim == 1:
            data = data.tolist()
        if isinstance(data, list | tuple):
            if data and all(isinstance(part, Mapping) for part in data):
                names = list(dict.fromkeys(name for row in data for name in row))
                return cls([_columns(names, lambda name: [row.get(name) for row in data], len(data))])
            return cls([part for item in data for part in cls.of(item)._parts])
        if isinstance(data, str | os.PathLike):
            return cls([_file(path) for path in _paths(os.fspath(data))])
        return cls([_object(data)])

    def watched(self, watch: Watch) -> Source:
        """The same data; ``watch`` notes what is read of it."""
        return Source([watch.part(number, part) for number, part in enumerate(self._parts)])

    def column_names(self) -> list[str]:
        """The names of all columns of the first part; reads no row."""
        names = self._parts[0].names
        return names() if names else []

    def streams(self, request: Request, *, project: bool = True) -> list[Any]:
        """One Arrow stream a part. With ``project``, of the columns that are read only, where a part can choose."""
        return [part.stream(self._projection(part, request) if project else None, None) for part in self._parts]

    def holding(self, rows: npt.NDArray[np.int64] | None) -> set[Piece]:
        """The pieces that hold these rows, None for all. One at least, for the types of its columns.

        From a part on that does not know how many rows it has, nothing is known of where a row lies.
        """
        pieces: list[Piece] = []
        starts: list[int] = []
        start: int | None = 0
        for number, part in enumerate(self._parts):
            lengths = part.lengths() if part.lengths else None
            if lengths is None or start is None:
                start = None
                pieces += [(number, piece) for piece in range(len(lengths or [0]))]
                continue
            pieces += [(number, piece) for piece in range(len(lengths))]
            starts += [start + before for before in accumulate(lengths[:-1], initial=0)] if lengths else []
            start += sum(lengths)
        if rows is None:
            return set(pieces)
        known, unknown = pieces[: len(starts)], pieces[len(starts) :]
        inside = rows if start is None else rows[rows < start]
        found = np.unique(np.searchsorted(starts, inside, side="right") - 1).tolist() if starts else []
        return {known[piece] for piece in found} | set(unknown) or set(pieces[:1])

    def take(self, request: Request, pieces: set[Piece] | None = None) -> _core.Rows:
        """The rows of these pieces (None: all), held, ready for packing. Of the others the number is known."""
        streams: list[Any] = []
        gaps = [0]
        for number, part in enumerate(self._parts):
            lengths = part.lengths() if part.lengths and pieces is not None else [0]
            wanted = [pieces is None or (number, i) in pieces for i in range(len(lengths))]
            names = self._projection(part, request)
            for here, run in groupby(range(len(lengths)), wanted.__getitem__):
                if here:
                    streams.append(part.stream(names, None if all(wanted) else list(run)))
                    gaps.append(0)
                else:
                    gaps[-1] += sum(lengths[i] for i in run)
        with reading(streams):
            return _core.Rows(streams, request, gaps)

    @staticmethod
    def _projection(part: _Part, request: Request) -> list[str] | None:
        if part.names is None:
            return None
        names = part.names()
        # All names are checked first, so that a missing column is told from a misspelt one.
        _core.Rows([no_rows(_plausible(names, request))], request, [0, 0])
        wanted = request.names()
        return [name for name in names if name in wanted]


@contextmanager
def reading(streams: Sequence[Any]) -> Iterator[None]:
    """Raises what stopped one of the streams, in place of the text that the core makes of it."""
    try:
        yield
    except Exception as error:
        for failure in (stream.failure for stream in streams if isinstance(stream, _Batches)):
            if isinstance(failure, RollpackError) or not isinstance(failure, Exception | None):
                raise failure from None  # one of ours, or Ctrl-C
            if failure is not None:
                raise error from failure
        raise


def _plausible(names: Sequence[str], request: Request) -> pa.Schema:
    """Columns of these names and of types that suit their roles, for a check of the names alone."""
    lists = {request.columns.get(role, role) for role in ("tokens", "loss_mask")} | {*request.token_columns}
    return pa.schema([(name, pa.list_(pa.int32()) if name in lists else pa.int64()) for name in names])


def no_rows(schema: pa.Schema) -> _Batches:
    """A batch without rows, for checks of columns. As a table or a batch pyarrow would hand over none."""
    return _Batches(schema, [pa.RecordBatch.from_arrays([pa.nulls(0, field.type) for field in schema], schema=schema)])


#: The number of a part, and of what can be read of it alone: a row group of a Parquet file, a batch of an Arrow file.
Piece: TypeAlias = tuple[int, int]


@dataclass(frozen=True)
class _Part:
    """One object or file.

    Attributes:
        stream: the columns of these names (None: all) in these pieces (None: all), as an Arrow stream.
        names: its columns, None where only the stream itself can tell.
        lengths: the rows of each piece, None where only the stream itself can tell how many there are.
    """

    stream: Callable[[list[str] | None, list[int] | None], Any]
    names: Callable[[], list[str]] | None = None
    lengths: Callable[[], list[int]] | None = None


class _Batches:
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
        return pa.RecordBatchReader.from_batches(self.schema, self._sound()).__arrow_c_stream__(requested_schema)

    def _sound(self) -> Iterator[pa.RecordBatch]:
        try:
            for batch in self._batches:
                yield _sound(batch)
        except GeneratorExit:  # nobody wants the rest
            raise
        except BaseException as error:
            self.failure = error
            raise


def _sound(data: T) -> T:
    """Pyarrow knows the sizes of its buffers, and the C interface does not tell them: whether they suffice is asked here."""
    try:
        data.validate()  # type: ignore[attr-defined]
    except pa.ArrowException as error:
        raise DataError(f"the Arrow data is corrupt: {error}") from error
    return data


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

    def part(self, number: int, part: _Part) -> _Part:
        """``part``, with what is read of it noted down here as the part of this number."""
        self.rows.append(0)
        self.finished.append(False)

        def open_stream(names: list[str] | None, pieces: list[int] | None) -> _Batches:
            self.current = number
            stream = part.stream(names, pieces)
            reader = pa.RecordBatchReader.from_stream(stream)
            self.rows[number], self.finished[number] = 0, False
            return _Batches(reader.schema, self._batches(number, reader, stream))

        def current(read: Callable[[], T]) -> T:
            self.current = number
            return read()

        names = partial(current, part.names) if part.names else None
        return _Part(open_stream, names, partial(current, part.lengths) if part.lengths else None)

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


def _table(table: pa.Table | pa.RecordBatch) -> _Part:
    return _Part(
        lambda names, _: _sound(table if names is None else table.select(names)),
        lambda: list(table.schema.names),
        lambda: [table.num_rows],
    )


def _columns(names: Sequence[str], column: Callable[[str], Any], num_rows: int | None = None) -> _Part:
    """Columns of Python or numpy values. Those that are not read need not fit into Arrow."""

    def convert(name: str) -> Any:
        values = column(name)
        if isinstance(values, np.ndarray) and values.ndim > 1:
            values = list(values)
        try:
            return pa.array(values)
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            raise SchemaError(f"column '{name}': its values cannot be made Arrow: {error}", name) from error

    def stream(wanted: list[str] | None, _: object) -> pa.Table:
        chosen = names if wanted is None else wanted
        arrays = {name: convert(name) for name in chosen}
        lengths = {name: len(array) for name, array in arrays.items()}
        if len(set(lengths.values())) > 1:
            raise DataError(f"the columns have different lengths: {lengths}")
        return pa.table(arrays)

    return _Part(stream, lambda: list(names), None if num_rows is None else lambda: [num_rows])


def _object(data: Any) -> _Part:
    library = type(data).__module__.partition(".")[0]
    readers = {"pyarrow": _of_pyarrow, "polars": _of_polars, "datasets": _of_hugging_face}
    part = readers[library](data) if library in readers else None
    if part is not None:
        return part
    if library == "pandas" and hasattr(data, "columns"):
        return _columns([name for name in data.columns if isinstance(name, str)], data.__getitem__, len(data))
    if hasattr(data, "__arrow_c_stream__"):
        return _Part(lambda *_: data)
    if hasattr(data, "__arrow_c_array__"):
        return _table(pa.record_batch(data))
    if isinstance(data, Mapping) and all(isinstance(name, str) for name in data):
        return _columns(list(data), data.__getitem__)
    raise TypeError(
        f"{type(data).__name__} is no data that rollpack reads: pass what speaks the Arrow PyCapsule protocol (a pyarrow "
        "Table or reader, a polars or pandas DataFrame, a DuckDB result), a list of those, a Hugging Face dataset, a list "
        "of dicts or a dict of columns, or the path of Parquet, Arrow IPC or JSON-lines files"
    )


def _of_pyarrow(data: Any) -> _Part | None:
    # Importing pyarrow.dataset takes pandas along, and a second; hence names instead of types.
    kinds = {kind.__name__ for kind in type(data).__mro__}
    if kinds & {"Table", "RecordBatch"}:
        return _table(data)
    if "RecordBatchReader" in kinds:
        return _Part(lambda *_: _Batches(data.schema, data))
    if "_RecordBatchFileReader" in kinds:
        return _arrow_file(lambda _: data, nullcontext)
    if "ParquetFile" in kinds:
        return _parquet(lambda: nullcontext(data), lambda: data.metadata, nullcontext)
    if "Dataset" in kinds:
        return _Part(lambda names, _: _scan(data, names), lambda: list(data.schema.names))
    return _Part(lambda *_: _Batches(data.projected_schema, data.to_batches())) if "Scanner" in kinds else None


def _of_polars(data: Any) -> _Part | None:
    if hasattr(data, "collect"):
        raise TypeError("a polars LazyFrame has no rows yet; pass frame.collect()")
    if not hasattr(data, "columns"):
        return None
    # Only the columns that are read are converted: others may hold what Arrow cannot.
    return _Part(lambda names, _: data if names is None else data[names], lambda: list(data.columns), lambda: [len(data)])


def _of_hugging_face(data: Any) -> _Part | None:
    if not hasattr(data, "with_format"):
        return None
    if not hasattr(data, "num_rows"):
        raise TypeError("a streaming Hugging Face dataset has no fixed rows; load it without streaming=True")
    if isinstance(data, Mapping):
        raise TypeError(f"this is a dict of datasets; pass one of {list(data)}, such as data['train']")

    def stream(names: list[str] | None, _: object) -> _Batches:
        # Formatting applies the indices that select, shuffle and filter leave behind.
        rows = data.with_format("arrow")
        rows = rows if names is None else rows.select_columns(names)
        batches = (batch for table in rows.iter(batch_size=4096) for batch in table.to_batches())
        return _Batches(rows[:0].schema, batches)

    return _Part(stream, lambda: list(data.column_names), lambda: [data.num_rows])


def _scan(data: Any, names: list[str] | None) -> _Batches:
    # By default it reads far ahead, and makes batches of 131,072 rows, which may be gigabytes of tokens.
    options: dict[str, Any] = {"columns": names, "batch_size": 1024, "batch_readahead": 1, "fragment_readahead": 1}
    chosen = getattr(getattr(data, "format", None), "default_fragment_scan_options", None)
    parquet = getattr(sys.modules["pyarrow.dataset"], "ParquetFragmentScanOptions", None)
    if parquet and isinstance(chosen, parquet) and chosen == parquet():
        options["fragment_scan_options"] = parquet(use_buffered_stream=True, buffer_size=1 << 20, pre_buffer=False)
    scanner = data.scanner(**options)
    return _Batches(scanner.projected_schema, scanner.to_batches())


def _paths(pattern: str) -> list[Path]:
    """The files that a path or glob names, in sorted order."""
    path = Path(pattern)
    if path.is_dir():
        raise DataError(f"{pattern} is a directory; pass its files as a glob, such as {pattern.rstrip('/')}/*.parquet")
    found = [path] if path.exists() else [Path(p) for p in sorted(glob.glob(pattern, recursive=True))]
    found = [p for p in found if p.is_file()]
    if not found:
        raise DataError(f"no file is called {pattern}" if not glob.has_magic(pattern) else f"no file matches {pattern}")
    return found


def _file(path: Path) -> _Part:
    """A file, its kind told by its first bytes, or else by its name."""
    try:
        with path.open("rb") as file:
            start = file.read(6)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error
    if not start:
        raise DataError(f"{path}: the file is empty")
    if start[:4] == b"PAR1":
        import pyarrow.parquet as papq  # imported where it is used: it makes `import rollpack` slow

        # Files may be many: each is open only while it is read.
        metadata = cache(partial(papq.read_metadata, path))
        # Checksums are rare and cheap. Without a buffer whole columns of a row group would be read at once.
        opened = partial(papq.ParquetFile, path, buffer_size=1 << 20, pre_buffer=False, page_checksum_verification=True)
        return _parquet(lambda: opened(metadata=metadata()), metadata, partial(_readable, path, "Parquet"))
    if start == b"ARROW1":
        return _arrow_file(
            lambda options: paipc.open_file(pa.memory_map(str(path)), options=options), partial(_readable, path, "Arrow IPC")
        )
    if path.suffix in {".arrow", ".ipc", ".arrows", ".feather"}:
        return _Part(lambda *_: _arrow_stream(path))
    if start.lstrip()[:1] == b"{" or path.suffix in {".jsonl", ".ndjson", ".json"}:

        def read(*_: object) -> pa.Table:
            with _readable(path, "JSON lines"):
                return _json(path)

        return _Part(read)
    raise DataError(f"{path}: this is no Parquet, Arrow IPC or JSON-lines file")


#: As ``_readable`` of a path and a kind, or nothing of the sort.
_Guard: TypeAlias = Callable[[], AbstractContextManager[None]]


def _parquet(opened: Callable[[], AbstractContextManager[Any]], metadata: Callable[[], Any], readable: _Guard) -> _Part:
    """Row groups can be read alone."""

    def schema() -> pa.Schema:
        with readable():
            return metadata().schema.to_arrow_schema()

    def names() -> list[str]:
        with readable():
            return list(schema().names)

    def lengths() -> list[int]:
        with readable():
            return [metadata().row_group(i).num_rows for i in range(metadata().num_row_groups)]

    def stream(wanted: list[str] | None, pieces: list[int] | None) -> _Batches:
        columns = schema() if wanted is None else pa.schema([schema().field(name) for name in wanted])

        def batches() -> Iterator[pa.RecordBatch]:
            with readable(), opened() as file:
                size = _batch_size(file.metadata)
                for run in _runs(lengths(), pieces, size):
                    yield from file.iter_batches(batch_size=size, columns=wanted, row_groups=run)

        return _Batches(columns, batches())

    return _Part(stream, names, lengths)


def _runs(lengths: Sequence[int], pieces: Iterable[int] | None, rows: int) -> Iterator[list[int]]:
    """Row groups, in runs of so many rows at least: a reader of many row groups holds more than it gives."""
    run: list[int] = []
    for piece in range(len(lengths)) if pieces is None else pieces:
        run.append(piece)
        if sum(lengths[i] for i in run) >= rows:
            yield run
            run = []
    if run:
        yield run


def _batch_size(metadata: Any) -> int:
    """Rows of about 8 MiB: a row may hold a few tokens, or a hundred thousand."""
    size = sum(metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups))
    return int(min(max((8 << 20) * metadata.num_rows // max(size, 1), 1), 4096))


def _arrow_file(opened: Callable[[paipc.IpcReadOptions | None], Any], readable: _Guard) -> _Part:
    """Batches can be read alone."""

    def schema() -> pa.Schema:
        with readable():
            return opened(None).schema

    def names() -> list[str]:
        with readable():
            return list(schema().names)

    @cache
    def lengths() -> list[int]:
        # The number of rows is known where a batch is read: of its first flat column only, which may be compressed.
        flat = [i for i, field in enumerate(schema()) if not pa.types.is_nested(field.type)]
        with readable():
            file = opened(paipc.IpcReadOptions(included_fields=flat[:1]))
            return [file.get_batch(i).num_rows for i in range(file.num_record_batches)]

    def stream(wanted: list[str] | None, pieces: list[int] | None) -> _Batches:
        columns = schema() if wanted is None else pa.schema([schema().field(name) for name in wanted])

        def batches() -> Iterator[pa.RecordBatch]:
            with readable():
                included = [] if wanted is None else [schema().get_field_index(name) for name in wanted]
                file = opened(paipc.IpcReadOptions(included_fields=included))
                for i in range(file.num_record_batches) if pieces is None else pieces:
                    batch = file.get_batch(i)
                    yield batch if wanted is None else batch.select(wanted)

        return _Batches(columns, batches())

    return _Part(stream, names, lengths)


def _arrow_stream(path: Path) -> _Batches:
    with _readable(path, "Arrow IPC"):
        with path.open("rb") as file:
            file.seek(max(path.stat().st_size - 8, 0))
            if file.read() != b"\xff\xff\xff\xff\0\0\0\0":
                raise DataError(f"{path}: the Arrow stream has no end: it was cut short, or is still being written")
        reader = paipc.open_stream(pa.memory_map(str(path)))

    def batches() -> Iterator[pa.RecordBatch]:
        with _readable(path, "Arrow IPC"):
            yield from reader

    return _Batches(reader.schema, batches())


def _json(path: Path) -> pa.Table:
    # A block has to hold the longest line whole: a long rollout with its log-probabilities is many MiB of text.
    with path.open("rb") as file:
        longest = max((len(line) for line in file), default=0)
    block = max(1 << 20, longest + 1)
    try:
        table = _json_blocks(path, block)
    except pa.ArrowInvalid as error:
        raise DataError(f"{path}, {_json_fault(path, error)}") from error
    # An id such as "2026-01-31" is text, and the reader makes a time of it.
    times = [pa.field(f.name, pa.string()) for f in table.schema if pa.types.is_temporal(f.type)]
    return _json_blocks(path, block, pa.schema(times)) if times else table


def _json_blocks(path: Path, size: int, known: pa.Schema | None = None) -> pa.Table:
    return pajson.read_json(
        path,
        read_options=pajson.ReadOptions(block_size=size),
        parse_options=pajson.ParseOptions(explicit_schema=known) if known else None,
    )


def _json_fault(path: Path, error: pa.ArrowInvalid) -> str:
    """What is wrong with JSON lines that pyarrow refused, and in which line, counted from 1."""
    types: dict[str, tuple[str, int]] = {}
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as wrong:
                return f"line {number}: is no JSON: {wrong.msg} at character {wrong.pos + 1}"
            except UnicodeDecodeError as wrong:
                return f"line {number}: is no UTF-8: {wrong.reason} at byte {wrong.start + 1}"
            if not isinstance(row, dict):
                return f"line {number}: holds a {type(row).__name__}, and each line has to be one object (JSON lines)"
            for name, value in row.items():
                kind = "number" if type(value) in (int, float) else type(value).__name__
                first, at = types.setdefault(name, (kind, number)) if value is not None else (kind, number)
                if first != kind:
                    return f"line {number}: column '{name}' holds a {kind}, and in line {at} a {first}"
    return f"which cannot be read as JSON lines: {error}"


@contextmanager
def _readable(path: Path, kind: str) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:  # the last of a column's name
        raise DataError(f"{path}: cannot be read as {kind}: {error}") from error
