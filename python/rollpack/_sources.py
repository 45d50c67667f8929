"""Every way to read data: Arrow objects, what can be turned into one, and files."""

from __future__ import annotations

import glob
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.ipc as paipc
import pyarrow.json as pajson
import pyarrow.parquet as papq

from rollpack import _core
from rollpack._errors import DataError

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
        if isinstance(data, list | tuple):
            if data and all(isinstance(part, Mapping) for part in data):
                names = list(dict.fromkeys(name for row in data for name in row))
                return cls([_table(pa.table({name: [row.get(name) for row in data] for name in names}))])
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
        return [part.stream(self._projection(part, request) if project else None) for part in self._parts]

    def take(self, request: Request) -> _core.Rows:
        """The rows, held in place, ready for packing."""
        return _core.Rows(self.streams(request), request)

    @staticmethod
    def _projection(part: _Part, request: Request) -> list[str] | None:
        if part.names is None:
            return None
        names = part.names()
        # All names are checked first, so that a missing column is told from a misspelt one.
        _core.Rows([no_rows(_plausible(names, request))], request)
        wanted = request.names()
        return [name for name in names if name in wanted]


def _plausible(names: Sequence[str], request: Request) -> pa.Schema:
    """Columns of these names and of types that suit their roles, for a check of the names alone."""
    lists = {request.columns.get(role, role) for role in ("tokens", "loss_mask")} | {*request.token_columns}
    return pa.schema([(name, pa.list_(pa.int32()) if name in lists else pa.int64()) for name in names])


def no_rows(schema: pa.Schema) -> pa.RecordBatch:
    """A batch without rows, for checks of columns. An empty table will not do: it has no batch to check."""
    return pa.RecordBatch.from_arrays([pa.nulls(0, field.type) for field in schema], schema=schema)


@dataclass(frozen=True)
class _Part:
    """One object or file. ``names``: its columns, None where only the stream itself can tell."""

    stream: Callable[[list[str] | None], Any]
    names: Callable[[], list[str]] | None = None


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

        def open_stream(names: list[str] | None) -> pa.RecordBatchReader:
            self.current = number
            stream = part.stream(names)
            reader = stream if isinstance(stream, pa.RecordBatchReader) else pa.table(stream).to_reader()
            self.rows[number], self.finished[number] = 0, False
            return pa.RecordBatchReader.from_batches(reader.schema, self._batches(number, reader))

        def read_names() -> list[str]:
            self.current = number
            return part.names() if part.names else []

        return _Part(open_stream, read_names if part.names else None)

    def _batches(self, number: int, reader: pa.RecordBatchReader) -> Iterator[pa.RecordBatch]:
        self.current = number
        try:
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
    return _Part(lambda names: table if names is None else table.select(names), lambda: list(table.schema.names))


def _object(data: Any) -> _Part:
    library = type(data).__module__.partition(".")[0]
    if isinstance(data, pa.Table | pa.RecordBatch):
        return _table(data)
    # Importing it takes pandas along, and a second. Where nobody did, nobody has its objects.
    datasets = sys.modules.get("pyarrow.dataset")
    if datasets is not None and isinstance(data, datasets.Dataset):
        return _Part(lambda names: data.scanner(columns=names).to_reader(), lambda: list(data.schema.names))
    if datasets is not None and isinstance(data, datasets.Scanner):
        return _Part(lambda _: data.to_reader())
    if library == "datasets" and hasattr(data, "with_format"):
        if not hasattr(data, "num_rows"):
            raise TypeError("a streaming Hugging Face dataset has no fixed rows; load it without streaming=True")
        if isinstance(data, Mapping):
            raise TypeError(f"this is a dict of datasets; pass one of {list(data)}, such as data['train']")
        # Formatting applies the indices that select, shuffle and filter leave behind.
        return _table(data.with_format("arrow")[:])
    if library == "polars" and hasattr(data, "collect"):
        raise TypeError("a polars LazyFrame has no rows yet; pass frame.collect()")
    if library in {"pandas", "polars"} and hasattr(data, "columns"):
        # Only the columns that are read are converted: others may hold what Arrow cannot.
        return _Part(lambda names: data if names is None else data[names], lambda: list(data.columns))
    if hasattr(data, "__arrow_c_stream__") or hasattr(data, "__arrow_c_array__"):
        return _Part(lambda _: data)
    raise TypeError(
        f"{type(data).__name__} is no data that rollpack reads: pass what speaks the Arrow PyCapsule protocol (a pyarrow "
        "Table or reader, a polars or pandas DataFrame, a DuckDB result), a list of those, a Hugging Face dataset, or the "
        "path of Parquet, Arrow IPC or JSON-lines files"
    )


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

        return _Part(
            lambda names: _readable(path, "Parquet", lambda: _parquet(path, names)),
            lambda: _readable(path, "Parquet", lambda: list(papq.read_schema(path).names)),
        )
    if start == b"ARROW1":
        return _Part(lambda _: _readable(path, "Arrow IPC", lambda: paipc.open_file(pa.memory_map(str(path))).read_all()))
    if path.suffix in {".arrow", ".ipc", ".arrows", ".feather"}:
        return _Part(lambda _: _readable(path, "Arrow IPC", lambda: paipc.open_stream(pa.memory_map(str(path)))))
    if start.lstrip()[:1] == b"{" or path.suffix in {".jsonl", ".ndjson", ".json"}:
        return _Part(lambda _: _readable(path, "JSON lines", lambda: _json(path)))
    raise DataError(f"{path}: this is no Parquet, Arrow IPC or JSON-lines file")


def _parquet(path: Path, names: list[str] | None) -> pa.RecordBatchReader:

    file = papq.ParquetFile(path)
    schema = file.schema_arrow if names is None else pa.schema([file.schema_arrow.field(name) for name in names])
    return pa.RecordBatchReader.from_batches(schema, file.iter_batches(batch_size=4096, columns=names))


def _json(path: Path) -> pa.Table:
    # A block has to hold the longest line whole: a long rollout with its log-probabilities is many MiB of text.
    with path.open("rb") as file:
        longest = max((len(line) for line in file), default=0)
    block = max(1 << 20, longest + 1)
    try:
        table = _json_blocks(path, block)
    except pa.ArrowInvalid:
        # The row that the message names is counted from the start of its block; read as one block, from the file's.
        table = _json_blocks(path, min(path.stat().st_size + 1, 2**31 - 1))
    # An id such as "2026-01-31" is text, and the reader makes a time of it.
    times = [pa.field(f.name, pa.string()) for f in table.schema if pa.types.is_temporal(f.type)]
    return _json_blocks(path, block, pa.schema(times)) if times else table


def _json_blocks(path: Path, size: int, known: pa.Schema | None = None) -> pa.Table:

    return pajson.read_json(
        path,
        read_options=pajson.ReadOptions(block_size=size),
        parse_options=pajson.ParseOptions(explicit_schema=known) if known else None,
    )


def _readable(path: Path, kind: str, read: Callable[[], T]) -> T:
    try:
        return read()
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: cannot be read as {kind}: {error}") from error
