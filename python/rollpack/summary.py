"""``summarize``: one small row a sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from rollpack import _core
from rollpack._errors import PlanError
from rollpack._sources import Request, Source, reading


@dataclass(frozen=True, eq=False, repr=False)
class Summary:
    """What planning needs to know of the data: one row a sample, without its tokens.

    It speaks the Arrow PyCapsule protocol (``polars.DataFrame(summary)``, ``pyarrow.table(summary)``). Columns:
    ``row``, ``total_length``, ``response_length`` and ``mask_sum`` (int64), ``rollout_id`` as the data has it (the row
    itself, where the data has none; under a key of several columns those columns), and ``group_index`` where groups were
    read.

    Attributes:
        rollout_key: the columns of the summary that tell rollouts apart; empty: each row is a rollout.
        groups: whether groups were read.
        request: what was read, under which names; a plan hands the names on to ``pack``.
    """

    _batch: pa.RecordBatch
    rollout_key: tuple[str, ...]
    groups: bool
    request: Request

    def __len__(self) -> int:
        return int(self._batch.num_rows)

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        return pa.Table.from_batches([self._batch]).__arrow_c_stream__(requested_schema)

    def column(self, name: str) -> np.ndarray[Any, Any]:
        """A column as a numpy array."""
        return self._batch.column(name).to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        tokens, trained = int(self.column("total_length").sum()), int(self.column("mask_sum").sum())
        groups = "with groups" if self.groups else "without groups"
        return f"Summary({len(self):,} samples, {tokens:,} tokens, {trained:,} trained, {groups})"


def summarize(
    data: Any,
    *,
    groups: bool = False,
    columns: Mapping[str, str | None] | None = None,
    rollout_key: str | Sequence[str] = "rollout_id",
) -> Summary:
    """Read rollouts once and keep one small row a sample.

    Args:
        data: what speaks the Arrow PyCapsule protocol, a list of those with one schema, or a path or glob of Parquet,
            Arrow IPC or JSON-lines files. A reader that can be read only once will do.
        groups: read ``group_index`` too, which ``prompt_mean`` and ``prompts_per_step`` need.
        columns: names in the data that differ, as ``{"tokens": "input_ids"}``; ``{"loss_mask": None}`` leaves one out.
        rollout_key: the column, or the columns together, that tell rollouts apart. ``("group_index", "rollout_id")``
            where rollout ids are unique only within their prompt.

    Returns:
        A :class:`Summary`. Mask sums are exact int64.

    Raises:
        SchemaError: a column is missing or has a type that cannot be read.
        DataError: a value is wrong (it names column, row and value), or there is no row at all.
    """
    request = Request.make(columns, rollout_key, groups=groups)
    streams = Source.of(data).streams(request)
    with reading(streams):
        batch, key = _core.summarize(streams, request)
    return Summary(batch, tuple(key), request.groups, request)


def summary_of(
    data_or_summary: Any, *, groups: bool, columns: Mapping[str, str | None] | None, rollout_key: str | Sequence[str]
) -> Summary:
    """The summary itself, or that of the data.

    Raises:
        PlanError: names of columns are given for a summary, which has its own.
        SchemaError, DataError: as for :func:`summarize`.
    """
    if not isinstance(data_or_summary, Summary):
        return summarize(data_or_summary, groups=groups, columns=columns, rollout_key=rollout_key)
    if columns is not None or rollout_key != "rollout_id":
        raise PlanError("columns= and rollout_key= belong to summarize; this summary was made with its own")
    return data_or_summary
