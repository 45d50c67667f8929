"""Every way to read data: Arrow objects, what can be turned into one, and files."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.dataset as pads
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
        if isinstance(data, list | tuple):
            if data and all(isinstance(part, Mapping) for part in data):
                return cls([_table(pa.Table.from_pylist(list(data)))])
            return cls([part for item in data for part in cls.of(item)._parts])
        if isinstance(data, str | os.PathLike):
            return cls([_file(path) for path in _paths(os.fspath(data))])
        return cls([_object(data)])

    def column_names(self) -> list[str]:
        """The names of all columns of the first part; reads no row."""
        return list(self._parts[0].schema().names) if self._parts[0].schema else []

    def streams(self, request: Request, *, project: bool = True) -> list[Any]:
        """One Arrow stream a part. With ``project``, of the columns that are read only, where a part can choose."""
        return [part.stream(self._projection(part, request) if project else None) for part in self._parts]

    def take(self, request: Request) -> _core.Rows:
        """The rows, held in place, ready for packing."""
        return _core.Rows(self.streams(request), request)

    @staticmethod
    def _projection(part: _Part, request: Request) -> list[str] | None:
        if part.schema is None:
            return None
        schema = part.schema()
        # The whole schema is checked first, so that a missing column is told from a misspelt one.
        _core.Rows([schema.empty_table()], request)
        wanted = request.names()
        return [name for name in schema.names if name in wanted]


@dataclass(frozen=True)
class _Part:
    """One object or file. ``schema`` is None where only the stream itself can tell."""

    stream: Callable[[list[str] | None], Any]
    schema: Callable[[], pa.Schema] | None = None


def _table(table: pa.Table | pa.RecordBatch) -> _Part:
    return _Part(lambda names: table if names is None else table.select(names), lambda: table.schema)


def _object(data: Any) -> _Part:
    library = type(data).__module__.partition(".")[0]
    if isinstance(data, pa.Table | pa.RecordBatch):
        return _table(data)
    if isinstance(data, pads.Dataset):
        return _Part(lambda names: data.scanner(columns=names).to_reader(), lambda: data.schema)
    if isinstance(data, pads.Scanner):
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
        return _Part(lambda names: data if names is None else data[names])
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
        return _Part(
            lambda names: _readable(path, "Parquet", lambda: _parquet(path, names)),
            lambda: _readable(path, "Parquet", lambda: papq.read_schema(path)),
        )
    if start == b"ARROW1":
        return _Part(lambda _: _readable(path, "Arrow IPC", lambda: paipc.open_file(pa.memory_map(str(path))).read_all()))
    if path.suffix in {".arrow", ".ipc", ".arrows", ".feather"}:
        return _Part(lambda _: _readable(path, "Arrow IPC", lambda: paipc.open_stream(pa.memory_map(str(path)))))
    if start.lstrip()[:1] == b"{" or path.suffix in {".jsonl", ".ndjson", ".json"}:
        return _Part(lambda _: _readable(path, "JSON lines", lambda: pajson.read_json(path)))
    raise DataError(f"{path}: this is no Parquet, Arrow IPC or JSON-lines file")


def _parquet(path: Path, names: list[str] | None) -> pa.RecordBatchReader:
    file = papq.ParquetFile(path)
    schema = file.schema_arrow if names is None else pa.schema([file.schema_arrow.field(name) for name in names])
    return pa.RecordBatchReader.from_batches(schema, file.iter_batches(batch_size=4096, columns=names))


def _readable(path: Path, kind: str, read: Callable[[], T]) -> T:
    try:
        return read()
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: cannot be read as {kind}: {error}") from error
