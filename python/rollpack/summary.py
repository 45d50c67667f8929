"""``summarize``: one small row a sample."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Self, TypeAlias

import numpy as np
import pyarrow as pa

from rollpack import _core
from rollpack._arrow import int64_array
from rollpack._errors import DataError, PlanError, RollpackError, SchemaError, is_printable
from rollpack._files import Saved, digest
from rollpack._sources import Request, Source, reading
from rollpack._text import counted

#: What a shard is called: its place in the order of shards.
SourceName: TypeAlias = str | int

_METADATA = b"rollpack.summary"
_LENGTHS = ("total_length", "response_length", "mask_sum")


@dataclass(frozen=True, eq=False, repr=False)
class Summary(Saved):
    """What planning needs to know of the data: one row a sample, without its tokens.

    It speaks the Arrow PyCapsule protocol as :meth:`to_arrow` does (``polars.DataFrame(summary)``,
    ``pyarrow.table(summary)``), can be pickled, saved and sent, and joined with those of other shards.

    Attributes:
        rollout_key: the columns of the summary that tell rollouts apart; empty: each row is a rollout.
        group_key: the columns of the summary that tell prompt groups apart; empty: groups were not read.
        request: what was read, under which names; a plan hands the names on to ``pack``.
        sources: the shards by name, in the order of their rows, and how many rows each has; empty where none was named.
    """

    _batch: pa.RecordBatch
    rollout_key: tuple[str, ...]
    group_key: tuple[str, ...]
    request: Request
    sources: tuple[tuple[SourceName, int], ...] = ()
    #: The columns of the data that were read. Where there was no loss mask, every token of a response is trained.
    _read: tuple[str, ...] = ()

    @property
    def groups(self) -> bool:
        """Whether groups were read."""
        return bool(self.group_key)

    def __len__(self) -> int:
        return int(self._batch.num_rows)

    def to_arrow(self) -> pa.Table:
        """One row a sample.

        Columns: ``row`` (within its source), ``total_length``, ``response_length`` and ``mask_sum`` (int64),
        ``rollout_id`` as the data has it (the row itself, where the data has none; under a key of several columns those
        columns), ``group_index`` where groups were read, and ``source`` where it was named (a dictionary of strings, or
        int64).
        """
        table = pa.Table.from_batches([self._batch])
        return table.append_column("source", self._source_column()) if self.sources else table

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        return self.to_arrow().__arrow_c_stream__(requested_schema)

    def column(self, name: str) -> np.ndarray[Any, Any]:
        """A column of :meth:`to_arrow` as a numpy array."""
        column = self._batch.column(name) if name != "source" or not self.sources else self._source_column()
        return column.to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]

    def _source_column(self) -> pa.Array:
        names, sizes = zip(*self.sources, strict=True)
        which = np.repeat(np.arange(len(names), dtype=np.int32), sizes)
        return (
            int64_array(np.array(names)[which]) if _integers(names) else pa.DictionaryArray.from_arrays(which, list(names))
        )

    def _planned_batch(self) -> pa.RecordBatch:
        """With rows that count through all sources, and with the source where a key has it."""
        batch = self._batch
        if len(self.sources) > 1:
            batch = batch.set_column(batch.schema.get_field_index("row"), "row", int64_array(np.arange(len(self))))
        if self.sources and "source" in self.rollout_key + self.group_key:
            batch = batch.append_column("source", self._source_column())
        return batch

    @classmethod
    def concat(cls, shards: Iterable[Summary]) -> Summary:
        """The summary of all shards, in the order of their sources and, within each, of its rows.

        It does not matter where the shards were summarized, nor in which order they come: the plan is that of the whole.
        Rollouts and groups may be cut across shards; ids that are unique only within their source take the source into
        their key (see :func:`summarize`).

        Args:
            shards: summaries that were made with ``source=``, with the same columns and keys, or that are joined
                already.

        Raises:
            DataError: there is none, one has no source, or a source is there twice.
            SchemaError: shards differ in the columns that they were read from (one has a loss mask and one has none), in
                their keys, in ``columns=``, or in the types of their ids.
        """
        shards = list(shards)
        for shard in shards:
            if not isinstance(shard, Summary):
                raise DataError(f"a {type(shard).__name__} is no summary; summarize each shard: summarize(..., source=...)")
        pieces = [piece for shard in shards for piece in shard._by_source()]
        if not pieces:
            raise DataError("there are no summaries to join")
        names = [name for name, _, _ in pieces]
        if not (_integers(names) or all(isinstance(name, str) for name in names)):
            raise DataError("some sources are strings and some integers, and have no order; name all in one way")
        pieces.sort(key=lambda piece: piece[0])
        first_name, first, _ = pieces[0]
        for (before, _, _), (name, _, _) in pairwise(pieces):
            if before == name:
                raise DataError(f"source {name!r} is there twice, and its rows would count twice")
        for name, shard, _ in pieces:
            first._same_kind(first_name, shard, name)
        table = pa.Table.from_batches([batch for _, _, batch in pieces])
        if len(table.combine_chunks().to_batches()) > 1:  # ids of more than 2 GiB of text
            table = table.cast(pa.schema([_large(field) for field in table.schema]))
        return cls(
            _batch=table.combine_chunks().to_batches()[0],
            rollout_key=first.rollout_key,
            group_key=first.group_key,
            request=first.request,
            sources=tuple((name, batch.num_rows) for name, _, batch in pieces),
            _read=first._read,
        )

    def _by_source(self) -> list[tuple[SourceName, Summary, pa.RecordBatch]]:
        if not self.sources:
            raise DataError(
                "a summary has no source, and its place among the others would depend on the order in which they come; "
                "name it: summarize(..., source=...)"
            )
        starts = accumulate((rows for _, rows in self.sources), initial=0)
        return [
            (name, self, self._batch.slice(start, rows)) for (name, rows), start in zip(self.sources, starts, strict=False)
        ]

    def _same_kind(self, own_name: SourceName, other: Summary, name: SourceName) -> None:
        """Refuses to join what was read in different ways."""
        for what in ("rollout_key", "group_key"):
            if getattr(self, what) != getattr(other, what):
                mine, theirs = (", ".join(getattr(s, what)) or "none" for s in (self, other))
                raise SchemaError(
                    f"the {what} is {mine} in source {own_name!r} and {theirs} in source {name!r}; summarize all shards "
                    "with the same arguments, from data that has the same columns",
                    _unlike(getattr(self, what), getattr(other, what)),
                )
        if self.request.columns != other.request.columns:
            raise SchemaError(
                f"source {own_name!r} was summarized with columns={dict(self.request.columns)} and source {name!r} with "
                f"columns={dict(other.request.columns)}: name the columns alike"
            )
        if self._read != other._read:
            mine, theirs = (", ".join(s._read) for s in (self, other))
            raise SchemaError(
                f"the columns that were read are {mine} in source {own_name!r} and {theirs} in source {name!r}; give all "
                "shards the same columns, and summarize them with the same arguments",
                _unlike(self._read, other._read),
            )
        for mine, theirs in zip(self._batch.schema, other._batch.schema, strict=True):
            if mine.type != theirs.type:
                raise SchemaError(
                    f"column {mine.name!r}: has type {mine.type} in source {own_name!r} and {theirs.type} in source "
                    f"{name!r}; cast all shards to one type",
                    mine.name,
                )

    def to_bytes(self) -> bytes:
        """The summary as an Arrow IPC stream: 12 bytes a sample and its ids, before compression."""
        described = {
            "rollout_key": self.rollout_key,
            "group_key": self.group_key,
            "columns": dict(self.request.columns),
            "read_key": self.request.rollout_key,
            "sources": self.sources or None,
            "read": self._read,
        }
        # What the receiver can tell by itself stays here: rows, and ids that are rows.
        left_out = ["row"] if self.rollout_key else ["row", "rollout_id"]
        names = [name for name in self._batch.schema.names if name not in left_out]
        kinds = {name: pa.int32() if name in _LENGTHS else self._batch.schema.field(name).type for name in names}
        batch = self._batch.select(names).cast(pa.schema(kinds, metadata={_METADATA: json.dumps(described).encode()}))
        sink = pa.BufferOutputStream()
        codec = "lz4" if pa.Codec.is_available("lz4") else None
        with pa.ipc.new_stream(sink, batch.schema, options=pa.ipc.IpcWriteOptions(compression=codec)) as writer:
            writer.write_batch(batch)
        stream: bytes = sink.getvalue().to_pybytes()
        return stream + digest(stream)  # readers of Arrow stop where the stream ends

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """The inverse of :meth:`to_bytes`.

        Raises:
            DataError: this is no summary, or it was damaged.
        """
        size = len(digest())
        if data[-size:] != digest(data[:-size]):
            raise DataError("this is no summary that rollpack saved, or it was damaged")
        try:
            reader = pa.ipc.open_stream(pa.BufferReader(data))
            described = json.loads((reader.schema.metadata or {})[_METADATA])
            batch = reader.read_next_batch().replace_schema_metadata(None)
            batch.validate(full=True)
            sources = tuple((name, rows) for name, rows in described["sources"] or ())
            rows = int64_array(np.concatenate([np.arange(n) for _, n in sources or [("", batch.num_rows)]]))
            columns = {"row": rows} | {
                name: column.cast(pa.int64()) if name in _LENGTHS else column
                for name, column in zip(batch.schema.names, batch.columns, strict=True)
            }
            if not described["rollout_key"]:
                lengths = {name: columns.pop(name) for name in ("row", *_LENGTHS)}
                columns = lengths | {"rollout_id": rows} | columns
            groups = bool(described["group_key"])
            return cls(
                _batch=pa.RecordBatch.from_pydict(
                    columns, schema=pa.schema([pa.field(n, c.type, False) for n, c in columns.items()])
                ),
                rollout_key=tuple(described["rollout_key"]),
                group_key=tuple(described["group_key"]),
                request=Request.make(described["columns"], described["read_key"], groups=groups),
                sources=sources,
                _read=tuple(described["read"]),
            )
        except Exception as error:  # what another version wrote, say, fails in many ways
            raise DataError(f"this is no summary that rollpack saved: {type(error).__name__}: {error}") from error

    def __reduce__(self) -> tuple[Any, ...]:
        return Summary.from_bytes, (self.to_bytes(),)

    def __repr__(self) -> str:
        tokens, trained = int(self.column("total_length").sum()), int(self.column("mask_sum").sum())
        groups = "with groups" if self.groups else "without groups"
        sources = f", {counted(len(self.sources), 'source')}" if len(self.sources) > 1 else ""
        return f"Summary({counted(len(self), 'sample')}, {counted(tokens, 'token')}, {trained:,} trained, {groups}{sources})"


def summarize(
    data: Any,
    *,
    groups: bool | Sequence[str] = False,
    columns: Mapping[str, str | None] | None = None,
    rollout_key: str | Sequence[str] = "rollout_id",
    source: SourceName | os.PathLike[str] | None = None,
) -> Summary:
    """Read rollouts once and keep one small row a sample.

    Args:
        data: what speaks the Arrow PyCapsule protocol, a list of those with one schema, or a path, glob or
            directory of Parquet, Arrow IPC or JSON-lines files. A reader that can be read only once will do.
        groups: read ``group_index`` too, which ``prompt_mean`` and ``prompts_per_step`` need. ``("source", "group_index")``
            where group indices are unique only within their source.
        columns: names in the data that differ, as ``{"tokens": "input_ids"}``; ``{"loss_mask": None}`` leaves one out.
        rollout_key: the column, or the columns together, that tell rollouts apart. ``("group_index", "rollout_id")``
            where rollout ids are unique only within their prompt, ``("source", "rollout_id")`` where they are only within
            their source. Of an empty sequence, as of ``columns={"rollout_id": None}``, each row is its own rollout.
        source: what this shard of the data is called (a path, a host, a number), for :meth:`Summary.concat`: shards are
            ordered by it. Where it is given, ``"source"`` in a key means this name, and no column of the data.

    Returns:
        A :class:`Summary`. Mask sums are exact int64.

    Raises:
        SchemaError: a column is missing or has a type that cannot be read.
        DataError: a value is wrong (it names column, row and value), or there is no row at all.
        RollpackError: ``source`` or ``groups`` is none of the above.

    >>> pa.table(summarize({"tokens": [[7, 1, 2], [7, 3]], "loss_mask": [[1, 0], [1]]})).to_pydict()
    {'row': [0, 1], 'total_length': [3, 2], 'response_length': [2, 1], 'mask_sum': [1, 1], 'rollout_id': [0, 1]}
    """
    name = _source_name(source)
    group_key = key_of_groups(groups)
    if "source" in group_key and source is None:
        raise RollpackError("groups asks for the source, and there is none; pass source=")
    request = Request.make(columns, rollout_key, groups=bool(group_key))
    group_key = group_key or (("group_index",) if request.groups else ())
    by_source = name is not None and "source" in request.rollout_key
    if by_source:
        own = tuple(part for part in request.rollout_key if part != "source")
        request = Request.make(columns, own, groups=request.groups)
    try:
        streams = Source.of(data).streams(request)
        with reading(streams):
            batch, key, read = _core.summarize(streams, request)
    except SchemaError as error:
        if error.column != "source" or name is not None:
            raise
        raise SchemaError(f"{error}. For the name of the shard in a key, pass it as source=", "source") from None
    # A rollout of a group of a source is one of that source.
    if by_source or ("source" in group_key and "group_index" in key):
        if not key:
            raise SchemaError(
                "column 'rollout_id': is missing, and rollout_key asks for an id within the source", "rollout_id"
            )
        key = ["source", *key]
    sources = () if name is None else ((name, batch.num_rows),)
    return Summary(batch, tuple(key), group_key, request, sources, tuple(read))


def summary_of(
    data_or_summary: Any, *, groups: bool, columns: Mapping[str, str | None] | None, rollout_key: str | Sequence[str]
) -> Summary:
    """The summary itself, or that of the data.

    Raises:
        PlanError: names of columns are given for a summary, which has its own.
        SchemaError, DataError: as for :func:`summarize`.
    """
    if not isinstance(data_or_summary, Summary):
        if isinstance(data_or_summary, list | tuple) and any(isinstance(part, Summary) for part in data_or_summary):
            raise PlanError("these are several summaries; join them: rollpack.Summary.concat(...)")
        return summarize(data_or_summary, groups=groups, columns=columns, rollout_key=rollout_key)
    if columns is not None or rollout_key != "rollout_id":
        raise PlanError("columns= and rollout_key= belong to summarize; this summary was made with its own")
    return data_or_summary


def _source_name(source: Any) -> SourceName | None:
    if source is None:
        return None
    if isinstance(source, str | os.PathLike) and isinstance(path := os.fspath(source), str):
        if not is_printable(path):
            raise RollpackError(f"source is {path!r}, which is no text that UTF-8 can hold; give it another name")
        return path
    if isinstance(source, int | np.integer) and not isinstance(source, bool):
        if not -(2**63) <= source < 2**63:
            raise RollpackError(f"source is {source}, which does not fit int64; give it another number, or a string")
        return int(source)
    raise RollpackError(f"source is {source!r}; it has to be a string, a path or an integer")


def key_of_groups(groups: bool | Sequence[str]) -> tuple[str, ...]:
    """The key that ``groups=`` asks for; empty: none.

    Raises:
        RollpackError: it is none of the keys that there are.
    """
    if isinstance(groups, bool | np.bool_):
        return ("group_index",) if groups else ()
    key = (groups,) if isinstance(groups, str) else groups
    if not isinstance(key, Sequence) or sorted(map(str, key)) not in (["group_index"], ["group_index", "source"]):
        raise RollpackError(f"groups is {groups!r}; it has to be True, False or ('source', 'group_index')")
    return tuple(sorted(key, reverse=True))


def _unlike(mine: Sequence[str], theirs: Sequence[str]) -> str | None:
    """A column that only one of the two has."""
    return next((name for name in (*mine, *theirs) if (name in mine) != (name in theirs)), None)


def _integers(names: Iterable[SourceName]) -> bool:
    return all(isinstance(name, int) for name in names)


def _large(field: pa.Field) -> pa.Field:
    """The field with offsets of 64 bits."""
    large = {pa.string(): pa.large_string(), pa.binary(): pa.large_binary()}
    return field.with_type(large.get(field.type, field.type))
