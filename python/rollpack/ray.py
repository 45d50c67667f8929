"""Ray: a Dataset is summarized where its blocks lie, and each trainer rank fetches the rows that it packs.

.. code-block:: python

    plan = rollpack.plan(rollpack.ray.summarize(ds, groups=True), max_tokens_per_gpu=16_384, dp_size=8)
    shards = rollpack.ray.shards(ds, plan)  # one a dp rank, to be handed to the workers

    for micro_batch in shards[dp_rank].micro_batches(device="cuda"):  # in a worker of Ray Train
        ...
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import ray
from ray.exceptions import RayTaskError

from rollpack._errors import DataError, PlanError, RollpackError, SchemaError
from rollpack._sources import Request, Shards, Source
from rollpack._sources.parts import Part
from rollpack._text import counted
from rollpack.packing import MicroBatch, pack
from rollpack.plans import Plan, as_plan
from rollpack.summary import Summary, key_of_groups
from rollpack.summary import summarize as _summarize

__all__ = ["RankShard", "shards", "summarize"]


def summarize(
    ds: ray.data.Dataset,
    *,
    groups: bool | Sequence[str] = False,
    columns: Mapping[str, str | None] | None = None,
    rollout_key: str | Sequence[str] = "rollout_id",
) -> Summary:
    """Summarize a Ray Dataset block by block, each where it lies: no token leaves its worker.

    A worker that dies is replaced by Ray, and its blocks are read again: every row counts once. Rows count through the
    blocks in the order of the dataset, and blocks are the sources, by number.

    Args:
        ds: rollouts. A dataset that is not materialized is read once here and again by :func:`shards`; its rows have to come
            in the same order (no random shuffle), or ``ds = ds.materialize()`` keeps them.
        groups: as for :func:`rollpack.summarize`.
        columns: as for :func:`rollpack.summarize`.
        rollout_key: as for :func:`rollpack.summarize`. Neither key takes ``"source"``: where Ray cuts blocks says nothing of
            ids. What tells the shards of the data apart has to be a column, under another name.

    Raises:
        SchemaError, DataError: as for :func:`rollpack.summarize`; ``row`` counts over the whole dataset. Blocks that differ
            in the columns that are read are an error, too.
        RollpackError: a key has ``"source"``, or ``groups`` is none of the above.
        TypeError: this is no Ray Dataset.
    """
    _check_dataset(ds)
    group_key = key_of_groups(groups)
    request = Request.make(columns, rollout_key, groups=bool(group_key))
    if "source" in (*group_key, *request.rollout_key):
        raise RollpackError(
            "'source' is the block of a dataset, and where Ray cuts blocks says nothing of ids: leave it out of the key, or "
            "give the column that tells the shards of the data apart another name, ds.rename_columns({'source': 'shard'}), "
            "for rollout_key=('shard', 'rollout_id')"
        )
    arguments = {"groups": groups, "columns": columns, "rollout_key": rollout_key}
    names = ds.columns(fetch_if_missing=False)
    if names is not None and (wanted := Source.projection(Part(lambda *_: None, lambda: list(names)), request)) is not None:
        with suppress(RayTaskError):  # a block lacks one of them, which says neither the block nor the column
            return _summarized(ds.select_columns(wanted), arguments)
    return _summarized(ds, arguments)


def _summarized(ds: ray.data.Dataset, arguments: Mapping[str, Any]) -> Summary:
    of_block: Any = _of_block  # ray's types know no function of further arguments
    blocks = ds.map_batches(of_block, batch_size=None, batch_format="pyarrow", fn_kwargs={"arguments": arguments})
    made, row = list[Summary](), 0
    with _in_order(blocks):
        for number, found in enumerate(blocks.iter_rows()):
            if found["error"]:
                raise _located(pickle.loads(found["error"]), number, row)  # noqa: S301 - a worker of ours made it
            summary = Summary.from_bytes(found["summary"])
            made.append(replace(summary, sources=((number, len(summary)),)))
            row += len(summary)
    if not made:
        raise DataError("the dataset has no rows")
    try:
        return Summary.concat(made)
    except SchemaError as error:
        raise SchemaError(f"{error} (the sources are the blocks of the dataset, by number)", error.column) from None


def _check_dataset(ds: Any) -> None:
    from ray.data import Dataset

    if not isinstance(ds, Dataset):
        raise TypeError(
            f"{type(ds).__name__} is no Ray Dataset; pass ray.data.from_arrow(table), or take rollpack.summarize"
        )


def _of_block(block: pa.Table, arguments: Mapping[str, Any]) -> pa.Table:
    if block.num_rows == 0:
        return pa.table({"summary": pa.array([], pa.binary()), "error": pa.array([], pa.binary())})
    try:
        summary, error = _summarize(block, **arguments).to_bytes(), b""
    except RollpackError as fault:  # as a value: Ray would wrap it, and may try again
        summary, error = b"", pickle.dumps(fault)
    return pa.table({"summary": [summary], "error": [error]})


def _located(error: RollpackError, block: int, first_row: int) -> RollpackError:
    if not isinstance(error, DataError | SchemaError):
        return error
    if error.row is None:
        return type(error)(f"block {block}: {error}", error.column, None)
    row = first_row + error.row
    return type(error)(f"row {row} of the dataset, in block {block} there: {error}", error.column, row)


@contextmanager
def _in_order(ds: ray.data.Dataset) -> Iterator[None]:
    """Blocks come in the order of the dataset, not as they are ready."""
    options = ds.context.execution_options
    before, options.preserve_order = options.preserve_order, True
    try:
        yield
    finally:
        options.preserve_order = before


@dataclass(frozen=True)
class RankShard:
    """What one dp rank packs: of each block the rows that are its own. It can be sent to any worker.

    Attributes:
        dp_rank: the rank.
        num_rows: how many rows of the dataset it packs, over all steps.
    """

    dp_rank: int
    num_rows: int
    _shards: Shards
    _plan: ray.ObjectRef[Plan]

    @cached_property
    def plan(self) -> Plan:
        """The plan, fetched at first use."""
        return ray.get(self._plan)

    def micro_batches(self, *, step: int | None = None, cp_rank: int = 0, **options: Any) -> Iterator[MicroBatch[Any]]:
        """The micro-batches of this rank in one step, in the order in which it runs them.

        Args:
            step: the optimizer step; may be left out where the plan has only one.
            cp_rank: the context-parallel rank.
            options: with ``device``, all others of :func:`rollpack.torch.micro_batches`, and micro-batches of tensors; else
                those of :func:`rollpack.pack`, and micro-batches of numpy arrays.

        Raises:
            PlanError: as for :func:`rollpack.pack`, or another ``dp_rank`` was passed.
            DataError, SchemaError: as for :func:`rollpack.pack`.
            ray.exceptions.ObjectLostError: a block is lost, and Ray cannot make it again.
        """
        if options.setdefault("dp_rank", self.dp_rank) != self.dp_rank:
            raise PlanError(
                f"this shard is what dp_rank {self.dp_rank} packs, and dp_rank {options['dp_rank']} was asked for; take the "
                "shard of that one"
            )
        options |= {"step": step, "cp_rank": cp_rank}
        if "device" in options:
            from rollpack.torch import micro_batches

            return micro_batches(self._shards, self.plan, **options)
        return pack(self._shards, self.plan, **options)

    def __repr__(self) -> str:
        rows = counted(self.num_rows, "row")
        return f"RankShard(dp_rank {self.dp_rank}, {rows} in {counted(len(self._shards.data), 'block')})"


def shards(ds: ray.data.Dataset, plan: Plan) -> list[RankShard]:
    """Hand the rows of a dataset out to dp ranks, without moving them.

    Pass the list to the workers (with Ray Train in ``train_loop_config``); each fetches, as it packs, the rows that are its
    own from the blocks that hold them. The driver has to live as long as they do.

    Args:
        ds: the dataset that was summarized. It is materialized in Ray's object store here, where it is not already.
        plan: the plan of its summary.

    Returns:
        One :class:`RankShard` for each dp rank.

    Raises:
        DataError: the dataset has another number of rows than was planned.
        PlanError: this is no plan.
        TypeError: this is no Ray Dataset.
    """
    _check_dataset(ds)
    plan = as_plan(plan)
    with _in_order(ds):
        refs = ds.to_arrow_refs()
    count = ray.remote(num_cpus=0)(_num_rows)
    sizes = list(enumerate(ray.get([count.remote(ref) for ref in refs])))
    if (found := sum(rows for _, rows in sizes)) != plan.num_rows:
        raise DataError(f"{plan.num_rows} rows were planned, and the dataset has {found}")
    starts = np.cumsum([0, *(rows for _, rows in sizes)])
    held = ray.put(plan)
    made = []
    for dp_rank in range(plan.settings.dp_size):
        rows = np.sort(np.concatenate([plan._rows_of(step, dp_rank) for step in range(len(plan.steps))]))
        own = np.flatnonzero(np.diff(np.searchsorted(rows, starts)))
        # A rank of placeholders only takes a block for the types of its columns.
        blocks = own.tolist() or [next(number for number, size in sizes if size)]
        made.append(RankShard(dp_rank, len(rows), Shards({number: refs[number] for number in blocks}, sizes), held))
    return made


def _num_rows(block: Any) -> int:
    return int(pa.table(block).num_rows)
