"""What is in a set of rollouts, and everything that is wrong with it: the computing part of ``rollpack inspect``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rollpack import _core
from rollpack._errors import DataError, RollpackError
from rollpack._sources import Request, Source, Watch, no_rows
from rollpack._text import counted
from rollpack.summary import Summary

_Raw = tuple[str, str | None, int | None, str]


#: Of faults of one kind, how many are shown to a person.
SHOWN = 20


class Fault(NamedTuple):
    """One thing that is wrong."""

    #: ``schema``: a column; ``data``: a value; ``ids``: rollout ids that do not tell rollouts apart; ``input``: the rest.
    kind: str
    #: The column in the data, None where the fault is not in one.
    column: str | None
    #: The row, from 0 over the whole input, None where the fault is not in one.
    row: int | None
    #: Which part of the input (which file), from 0, None where that cannot be told.
    part: int | None
    #: The row, from 0 in its part.
    part_row: int | None
    message: str


def kinds(faults: Sequence[Fault]) -> list[list[Fault]]:
    """Faults of a kind together: those of one column whose messages differ in their values only."""
    alike: dict[tuple[str | None, str], list[Fault]] = {}
    for fault in faults:
        pattern = re.sub(r"'[^']*'|-?\d[\d.]*(?:e[-+]?\d+)?", "#", fault.message)
        alike.setdefault((fault.column, pattern), []).append(fault)
    return list(alike.values())


@dataclass(frozen=True)
class Spread:
    """How integers are spread. Percentiles are values that occur: the smallest that so many percent do not exceed."""

    min: int
    p10: int
    p25: int
    p50: int
    p75: int
    p90: int
    p99: int
    max: int
    mean: float

    @classmethod
    def of(cls, values: npt.NDArray[np.int64]) -> Spread | None:
        """The spread of ``values``; None of none."""
        if len(values) == 0:
            return None
        levels = np.percentile(values, [0, 10, 25, 50, 75, 90, 99, 100], method="inverted_cdf")
        low, p10, p25, p50, p75, p90, p99, high = (int(level) for level in levels)
        return cls(low, p10, p25, p50, p75, p90, p99, high, float(values.mean()))


@dataclass(frozen=True, repr=False)
class Inspection:
    """What was found. All numbers but ``rows`` and ``part_rows`` are of the rows without a fault.

    Attributes:
        rows: the rows of the input; None where a column that cannot be read ended the reading.
        part_rows: the rows read of each part (each file).
        sound_rows: the rows without a fault.
        rollouts, groups: how many there are; groups None where the data has no column of them.
        tokens, response_tokens, trained_tokens: of all samples.
        trained_of_response, trained_of_all: the mask density, from 0 to 1; None where there is no such token.
        total_length, response_length, trained_length: tokens a sample.
        group_size: rollouts a group.
        groups_of_one: groups of one rollout, in which nothing can be compared.
        fan_out: samples a rollout.
        fanned_out: rollouts of more than one sample.
        fanned_out_share: their share of all rollouts.
        untrained_samples, untrained_rollouts, untrained_groups: those without a trained token.
        rollout_key: the columns that rollouts were told apart by; empty: each row is a rollout.
        ids_unique_within_prompt_only: whether rollout ids seem to be so; ``rollout_key`` then has the group in it, and
            ``faults`` says what to pass.
        faults: all of them, first those of the columns, then by row.
        summary: the rows without a fault, with groups where there are any.
    """

    rows: int | None
    part_rows: list[int]
    sound_rows: int
    rollouts: int
    groups: int | None
    tokens: int
    response_tokens: int
    trained_tokens: int
    trained_of_response: float | None
    trained_of_all: float | None
    total_length: Spread | None
    response_length: Spread | None
    trained_length: Spread | None
    group_size: Spread | None
    groups_of_one: int | None
    fan_out: Spread | None
    fanned_out: int
    fanned_out_share: float | None
    untrained_samples: int
    untrained_rollouts: int
    untrained_groups: int | None
    rollout_key: tuple[str, ...]
    ids_unique_within_prompt_only: bool
    faults: list[Fault]
    summary: Summary

    def __repr__(self) -> str:
        groups = "without groups" if self.groups is None else counted(self.groups, "group")
        return (
            f"Inspection({counted(self.sound_rows, 'sound row')}, {counted(self.rollouts, 'rollout')}, {groups}, "
            f"{counted(len(self.faults), 'fault')})"
        )


def inspect(
    data: Any, *, columns: Mapping[str, str | None] | None = None, rollout_key: str | Sequence[str] = "rollout_id"
) -> Inspection:
    """Look at rollouts. Groups are read where every part of the data has them.

    Args:
        data: as for :func:`rollpack.summarize`, but readable twice.
        columns: as for :func:`rollpack.summarize`.
        rollout_key: as for :func:`rollpack.summarize`.

    Raises:
        RollpackError: there is nothing to read. What is wrong in the data is no error here, but a fault.
        OSError, pyarrow.ArrowException: a part cannot be read to its end.
    """
    watch = Watch()
    source = Source.of(data).watched(watch)
    request = Request.make(columns, rollout_key)
    streams = source.streams(request, project=False)
    schemas = [stream.schema for stream in streams]
    group_name = request.columns.get("group_index", "group_index")
    have_groups = [group_name in schema.names for schema in schemas]
    faults = _schema_faults(schemas, replace(request, groups=request.groups or any(have_groups)))
    request = replace(request, groups=request.groups or all(have_groups))
    if not any(schema.names for schema in schemas):
        raise DataError("the data has no rows, and no columns")
    try:
        with watch.telling():
            # Under a key that is not there, or not in order, ids tell nothing.
            known = [request.columns.get(part, part) for part in request.rollout_key]
            has_key = not faults and all(name in schema.names for schema in schemas for name in known)
            read = _read(source, streams, request, has_key=has_key)
    except RollpackError as error:
        if not faults:
            raise
        # Where columns are missing or mistyped, the parts cannot be read as one. The columns are the thing to tell.
        nothing = pa.RecordBatch.from_pydict({name: pa.array([], pa.int64()) for name in _COLUMNS})
        read = _Read(nothing, (), [("input", None, None, str(error))], None)
    if read.batch.num_rows == 0 and not faults and all(kind == "input" for kind, *_ in read.faults):
        raise DataError("; ".join(message for *_, message in read.faults))
    if read.ids is not None:
        faults.append(read.ids)
    # What is wrong with columns was found above, and there with its part.
    told = {(fault.column, fault.message) for fault in faults}
    faults += _with_parts([fault for fault in read.faults if (fault[1], fault[3]) not in told], watch.rows)
    rows = sum(watch.rows) if all(watch.finished) else None
    groups = ("group_index",) if "group_index" in read.batch.schema.names else ()
    summary = Summary(read.batch, read.key, groups, request)
    return _measure(read, summary, rows, watch.rows, faults)


#: The columns of the summary that every input has.
_COLUMNS = ("total_length", "response_length", "mask_sum", "rollout_id")


class _Read(NamedTuple):
    """The summary of the sound rows, its key columns, the faults, and what there is to say about rollout ids."""

    batch: pa.RecordBatch
    key: tuple[str, ...]
    faults: list[_Raw]
    ids: Fault | None


def _schema_faults(schemas: Sequence[pa.Schema], request: Request) -> list[Fault]:
    """What is wrong with the columns of each part; needs no row."""
    return [
        Fault(kind, column, None, part, None, message)
        for part, schema in enumerate(schemas)
        for kind, column, _, message in _core.inspect([no_rows(schema)], request)[2]
        if kind == "schema"
    ]


def _read(source: Source, streams: Sequence[Any], request: Request, *, has_key: bool) -> _Read:
    """Reads all rows, of ``streams`` at first.

    Ids that are unique only within their prompt would put every row in two groups. So rows are read under a key that has
    the group in it; where only few ids lie in several groups these are mistakes, and are read again one by one.
    """
    key = request.rollout_key
    if not (has_key and key and request.groups) or "group_index" in key:
        return _summarize(streams, request)
    read = _summarize(streams, replace(request, rollout_key=("group_index", *key)))
    if read.key != ("group_index", *key):
        return read  # a column of nothing but nulls; the faults say so
    shared = _ids_in_several_groups(read.batch, key)
    if shared is None:
        return read._replace(key=key)
    if not shared.many:
        return _summarize(source.streams(request, project=False), request)
    return read._replace(ids=Fault("ids", request.columns.get(key[0], key[0]), None, None, None, shared.message(key)))


def _summarize(streams: Sequence[Any], request: Request) -> _Read:
    batch, key, faults = _core.inspect(streams, request)
    # What is wrong with the group column is found twice where it is a part of the key.
    return _Read(batch, tuple(key), list(dict.fromkeys(faults)), None)


class _Shared(NamedTuple):
    """Rollout ids that lie in several groups."""

    num_ids: int
    num_shared: int
    num_placed: int
    example: str

    @property
    def many(self) -> bool:
        """Whether the ids look as if each prompt counted its own: an id lies in more than 1.5 groups on average."""
        return 2 * self.num_placed > 3 * self.num_ids

    def message(self, key: tuple[str, ...]) -> str:
        return (
            f"{self.num_shared:,} of {self.num_ids:,} rollout ids lie in several groups, such as {self.example}: they seem "
            f"to be unique only within their prompt, and rollouts of different prompts would be taken for one. Pass "
            f"rollout_key={('group_index', *key)}, as was done for the numbers here"
        )


def _ids_in_several_groups(read: pa.RecordBatch, key: tuple[str, ...]) -> _Shared | None:
    ids, groups = _numbered(read, key), _numbered(read, ("group_index",))
    # Each id once for each group that it lies in.
    placed, rows = np.unique(ids * len(groups) + groups, return_index=True)
    times = np.bincount(ids[rows])
    shared = np.flatnonzero(times > 1)
    if len(shared) == 0:
        return None
    row = int(np.argmax(ids == shared[0]))
    example = ", ".join(f"{name} {read.column(name)[row].as_py()!r}" for name in key)
    return _Shared(len(times), len(shared), len(placed), f"{example} in {times[shared[0]]:,} of them")


def _numbered(read: pa.RecordBatch, names: Sequence[str]) -> npt.NDArray[np.int64]:
    """[rows], from 0: the same number where all these columns hold the same."""
    numbers = np.zeros(read.num_rows, dtype=np.int64)
    for name in names:
        here = read.column(name).dictionary_encode().indices.to_numpy().astype(np.int64)
        numbers = np.unique(numbers * len(here) + here, return_inverse=True)[1]
    return numbers


def _with_parts(faults: Sequence[_Raw], part_rows: Sequence[int]) -> list[Fault]:
    """The faults with their places in the parts. ``part_rows``: the rows of each part."""
    starts = np.cumsum([0, *part_rows])
    rows = np.array([-1 if row is None else row for _, _, row, _ in faults], dtype=np.int64)
    parts = np.searchsorted(starts, rows, side="right") - 1
    within = rows - starts[np.maximum(parts, 0)]
    return [
        Fault(kind, column, row, None if row is None else part, None if row is None else part_row, message)
        for (kind, column, row, message), part, part_row in zip(faults, parts.tolist(), within.tolist(), strict=True)
    ]


def _measure(read: _Read, summary: Summary, rows: int | None, part_rows: list[int], faults: list[Fault]) -> Inspection:
    """The numbers of the sound rows."""
    total, response, trained = (
        read.batch.column(name).to_numpy() for name in ("total_length", "response_length", "mask_sum")
    )
    tokens, responses, masked = int(total.sum()), int(response.sum()), int(trained.sum())

    rollout_of = _numbered(read.batch, read.key or ("rollout_id",))
    samples = np.bincount(rollout_of)
    rollout_trained = np.bincount(rollout_of, weights=trained)
    fanned_out = int((samples > 1).sum())
    sizes = untrained_groups = None
    if "group_index" in read.batch.schema.names:
        group_of = _numbered(read.batch, ("group_index",))
        # A rollout lies in one group: that of its first sample.
        sizes = np.bincount(group_of[np.unique(rollout_of, return_index=True)[1]])
        untrained_groups = int((np.bincount(group_of, weights=trained) == 0).sum())
    return Inspection(
        rows=rows,
        part_rows=part_rows,
        sound_rows=read.batch.num_rows,
        rollouts=len(samples),
        groups=None if sizes is None else len(sizes),
        tokens=tokens,
        response_tokens=responses,
        trained_tokens=masked,
        trained_of_response=_ratio(masked, responses),
        trained_of_all=_ratio(masked, tokens),
        total_length=Spread.of(total),
        response_length=Spread.of(response),
        trained_length=Spread.of(trained),
        group_size=None if sizes is None else Spread.of(sizes),
        groups_of_one=None if sizes is None else int((sizes == 1).sum()),
        fan_out=Spread.of(samples),
        fanned_out=fanned_out,
        fanned_out_share=_ratio(fanned_out, len(samples)),
        untrained_samples=int((trained == 0).sum()),
        untrained_rollouts=int((rollout_trained == 0).sum()),
        untrained_groups=untrained_groups,
        rollout_key=summary.request.rollout_key if len(read.key) == 1 else read.key,
        ids_unique_within_prompt_only=read.ids is not None,
        faults=faults,
        summary=summary,
    )


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None
