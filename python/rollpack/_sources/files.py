"""Files of Parquet, Arrow IPC and JSON lines."""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.ipc as paipc
import pyarrow.json as pajson

from rollpack._errors import DataError
from rollpack._sources.parts import Batches, Part

#: The kinds of files, and how their names end. ``.json`` is none of them: beside data it is mostly a description of it.
_KINDS = {
    "Parquet": (".parquet", ".pq"),
    "Arrow IPC": (".arrow", ".arrows", ".ipc", ".feather"),
    "JSON lines": (".jsonl", ".ndjson"),
}


def paths(pattern: str) -> list[Path]:
    """The files that a path or glob names, in the order of their names as text: part-10 comes before part-2.

    Of a directory these are the files of rollouts right in it, by their names, which have to be of one kind. Directories in
    it are passed over, whatever they are called, and names that begin with a dot or an underscore, as other readers do.
    What a glob finds are files only.
    """
    path = Path(pattern)
    if not pattern:
        raise DataError("the path is empty")
    if path.is_dir():
        return _in_directory(path)
    found = [path] if path.exists() else [Path(p) for p in sorted(glob.glob(pattern, recursive=True))]
    _check_regular(path)
    found = [p for p in found if p.is_file()]
    if not found:
        raise DataError(f"no file is called {pattern}" if not glob.has_magic(pattern) else f"no file matches {pattern}")
    return found


def _in_directory(directory: Path) -> list[Path]:
    try:
        shown = sorted(path for path in directory.iterdir() if path.name[0] not in "._")
    except OSError as error:
        raise DataError(f"{directory}: {error.strerror}") from error
    kinds = {suffix: kind for kind, suffixes in _KINDS.items() for suffix in suffixes}
    # A directory may be called as a file is: Spark and others write partitions so. A link to nowhere is no directory.
    deeper = {path for path in shown if path.is_dir()}
    found = {path: kinds[path.suffix.lower()] for path in shown if path.suffix.lower() in kinds and path not in deeper}
    if not found:
        hint = f"; what lies deeper is found by a glob: {directory}/**/*.parquet" if deeper else ""
        raise DataError(f"{directory} is a directory without files of rollouts ({', '.join(kinds)}){hint}")
    for path in found:
        _check_regular(path)
    of_kind = {kind: path for path, kind in found.items()}
    if len(of_kind) > 1:
        # One may be made from the other: then rows would count twice.
        named = " and ".join(f"{kind} ({path.name})" for kind, path in of_kind.items())
        raise DataError(f"{directory} holds files of several kinds, {named}; pass a glob, such as {directory}/*.parquet")
    return list(found)


def _check_regular(path: Path) -> None:
    """Refuses a pipe, a socket or a device. What is not there is found out where it is opened."""
    if path.exists() and not path.is_file():
        raise DataError(f"{path} is no regular file, and files are read more than once; save it first")


def of_file(path: Path) -> Part:
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

        @cache
        def metadata() -> Any:
            with on_disk(path) as file:
                return papq.read_metadata(file)

        # Files may be many: each is open only while it is read.
        @contextmanager
        def opened() -> Iterator[Any]:
            # Checksums are rare and cheap. Without a buffer whole columns of a row group would be read at once.
            how = {"buffer_size": 1 << 20, "pre_buffer": False, "page_checksum_verification": True}
            with on_disk(path) as file, papq.ParquetFile(file, metadata=metadata(), **how) as parquet:
                yield parquet

        return of_parquet(opened, metadata, partial(_readable, path, "Parquet"))
    if start == b"ARROW1":
        return of_arrow_file(partial(_opened_arrow_file, path), partial(_readable, path, "Arrow IPC"))
    if start[:4] == b"\xff\xff\xff\xff" or path.suffix in _KINDS["Arrow IPC"]:
        return Part(lambda *_: _arrow_stream(path))
    if start.lstrip()[:1] == b"{" or path.suffix in {*_KINDS["JSON lines"], ".json"}:

        def read(*_: object) -> pa.Table:
            with _readable(path, "JSON lines"):
                return _json(path)

        return Part(read)
    raise DataError(f"{path}: this is no Parquet, Arrow IPC or JSON-lines file")


def on_disk(path: str | os.PathLike[str], mode: str = "rb") -> pa.OSFile:
    """A file for pyarrow. A name need not be UTF-8, as what pyarrow makes of text always is."""
    return pa.OSFile(os.fsencode(path), mode)


def mapped(path: str | os.PathLike[str]) -> pa.MemoryMappedFile:
    """As :func:`on_disk`, mapped into memory."""
    return pa.memory_map(os.fsencode(path))


#: As ``_readable`` of a path and a kind, or nothing of the sort.
_Guard: TypeAlias = Callable[[], AbstractContextManager[None]]


def of_parquet(opened: Callable[[], AbstractContextManager[Any]], metadata: Callable[[], Any], readable: _Guard) -> Part:
    """Row groups can be read alone."""

    def schema() -> pa.Schema:
        with readable():
            return metadata().schema.to_arrow_schema()

    def names() -> list[str]:
        with readable():
            return list(schema().names)

    @cache
    def lengths() -> list[int]:
        with readable():
            found = [metadata().row_group(i).num_rows for i in range(metadata().num_row_groups)]
            if sum(found) != metadata().num_rows:
                raise pa.ArrowInvalid(f"its footer says {metadata().num_rows} rows, and its row groups have {sum(found)}")
            return found

    def stream(wanted: list[str] | None, pieces: list[int] | None) -> Batches:
        columns = schema() if wanted is None else pa.schema([schema().field(name) for name in wanted])

        def batches() -> Iterator[pa.RecordBatch]:
            with readable(), opened() as file:
                size = _batch_size(file.metadata)
                for run in _runs(lengths(), pieces, size):
                    yield from file.iter_batches(batch_size=size, columns=wanted, row_groups=run)

        return Batches(columns, batches())

    return Part(stream, names, lengths)


def _runs(lengths: Sequence[int], pieces: Iterable[int] | None, rows: int) -> Iterator[list[int]]:
    """Row groups, in runs of so many rows at least: a reader of many row groups holds more than it gives."""
    run: list[int] = []
    held = 0
    for piece in range(len(lengths)) if pieces is None else pieces:
        run.append(piece)
        held += lengths[piece]
        if held >= rows:
            yield run
            run, held = [], 0
    if run:
        yield run


def _batch_size(metadata: Any) -> int:
    """Rows of about 8 MiB: a row may hold a few tokens, or a hundred thousand."""
    size = sum(metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups))
    return int(min(max((8 << 20) * metadata.num_rows // max(size, 1), 1), 4096))


def _opened_arrow_file(path: Path, options: paipc.IpcReadOptions | None) -> Any:
    reader = paipc.open_file(mapped(path), options=options)
    # What is packed has tokens and masks too, and would be taken for rollouts.
    if any(key.startswith(b"rollpack.") for key in reader.schema.metadata or {}):
        raise DataError(f"{path}: rollpack wrote this: it holds a plan or packed micro-batches, and no rollouts")
    return reader


def of_arrow_file(opened: Callable[[paipc.IpcReadOptions | None], Any], readable: _Guard) -> Part:
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

    def stream(wanted: list[str] | None, pieces: list[int] | None) -> Batches:
        columns = schema() if wanted is None else pa.schema([schema().field(name) for name in wanted])

        def batches() -> Iterator[pa.RecordBatch]:
            with readable():
                included = [] if wanted is None else [schema().get_field_index(name) for name in wanted]
                file = opened(paipc.IpcReadOptions(included_fields=included))
                for i in range(file.num_record_batches) if pieces is None else pieces:
                    batch = file.get_batch(i)
                    yield batch if wanted is None else batch.select(wanted)

        return Batches(columns, batches())

    return Part(stream, names, lengths)


def _arrow_stream(path: Path) -> Batches:
    with _readable(path, "Arrow IPC"):
        with path.open("rb") as file:
            file.seek(max(path.stat().st_size - 8, 0))
            if file.read() != b"\xff\xff\xff\xff\0\0\0\0":
                raise DataError(f"{path}: the Arrow stream has no end: it was cut short, or is still being written")
        reader = paipc.open_stream(mapped(path))

    def batches() -> Iterator[pa.RecordBatch]:
        with _readable(path, "Arrow IPC"):
            yield from reader

    return Batches(reader.schema, batches())


#: What may stand before the first value of JSON lines: white space, and the mark that editors of Windows put there.
_BLANK = b" \t\r\n\xef\xbb\xbf"


def _json(path: Path) -> pa.Table:
    # A block has to hold the longest line whole: a long rollout with its log-probabilities is many MiB of text.
    longest = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            longest = max(longest, len(line))
            # pyarrow dies of a null where a block begins with one.
            if (line[:64].lstrip(_BLANK) or line.lstrip(_BLANK))[:4] == b"null":
                raise DataError(f"{path}, line {number}: holds null, and each line has to be one object (JSON lines)")
    block = max(1 << 20, longest + 1)
    try:
        table = _json_blocks(path, block)
    except pa.ArrowInvalid as error:
        raise DataError(f"{path}, {_json_fault(path, error)}") from error
    # An id such as "2026-01-31" is text, and the reader makes a time of it.
    times = [pa.field(f.name, pa.string()) for f in table.schema if pa.types.is_temporal(f.type)]
    return _json_blocks(path, block, pa.schema(times)) if times else table


def _json_blocks(path: Path, size: int, known: pa.Schema | None = None) -> pa.Table:
    with on_disk(path) as file:
        return pajson.read_json(
            file,
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
