"""``pack``: planned rows become contiguous arrays."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from rollpack import _core
from rollpack._arguments import integer
from rollpack._errors import DataError
from rollpack._sources import Request, Shards, Source
from rollpack._text import counted
from rollpack.plans import Plan, as_plan

if TYPE_CHECKING:
    import torch

#: numpy arrays as packed, torch tensors after :meth:`MicroBatch.to`.
Array = TypeVar("Array")


@dataclass(frozen=True, eq=False, repr=False)
class MicroBatch(Generic[Array]):
    """What one rank runs forward and backward at once: T positions of S samples, as contiguous arrays.

    ``loss_mask[t]``, ``labels[t]`` and the token columns speak of the token *after* ``tokens[t]``, where its logit is.

    Attributes:
        tokens: [T] int32, 0 on padding.
        labels: [T] int32, the next token where it is trained, else -100.
        position_ids: [T] int32, from 0 in each sequence, running on in its padding.
        segment_ids: [T] int32, which of the S samples; -1 on padding.
        loss_mask: [T] bool, whether the next token is trained.
        cu_seqlens: [S + 1] int32, the true lengths summed up, of the whole micro-batch over its cp ranks.
        cu_seqlens_padded: [S + 1] int32, where each sequence lies; the last entry is T * C, and padding at the end of the
            micro-batch belongs to the last sequence.
        rows: [S] int64, the input rows; [-1] for a placeholder.
        mask_sums: [S] int64, trained tokens of each sample.
        rollout_mask_sums: [S] int64, of its whole rollout.
        prompt_mask_sums: [S] int64, of its whole prompt group; None but under ``prompt_mean``.
        rollout_indices: [S] int64, which rollout of the plan's data each sample belongs to, from 0; -1 for a placeholder.
        prompt_indices: [S] int64, which prompt group; None but under ``prompt_mean``.
        sample_weights: [S] float64, what each trained token of the sample weighs in the step loss.
        mode_weights: the weights of the other modes that the plan allows for, by mode, [S] float64; filled in by :meth:`to`,
            so that a device need not be asked for what they are made of.
        columns: the token columns by name, [T] float32, 0 where no response token follows.
        sample_columns: the sample columns by name, [S]: float32 of floats, float64 of integers and booleans; NaN for null.
        max_seqlen: the longest padded sequence.
        is_placeholder: whether this is one masked dummy sequence.
        step, dp_rank, cp_rank, index: which micro-batch this is; ``index`` counts from 0 within rank and step.
        num_indices: how many rollouts, and under ``prompt_mean`` prompt groups, the two columns of indices count.
        num_rollouts, num_prompts, num_tokens: N, P (None where groups were not read) and T (None where :func:`pack_online`
            was not told) of the whole step.
        loss_aggregation, divisor: the mode that ``sample_weights`` are of.
        num_micro_batches: K, on each rank in this step; None where the step was still arriving (:func:`pack_online`).
        dp_size, cp_size, layout: D, C, and how sequences are cut over cp ranks.
        plan_id: the plan's id.
    """

    tokens: Array
    labels: Array
    position_ids: Array
    segment_ids: Array
    loss_mask: Array
    cu_seqlens: Array
    cu_seqlens_padded: Array
    rows: Array
    mask_sums: Array
    rollout_mask_sums: Array
    prompt_mask_sums: Array | None
    rollout_indices: Array
    prompt_indices: Array | None
    sample_weights: Array
    max_seqlen: int
    is_placeholder: bool
    step: int
    dp_rank: int
    cp_rank: int
    index: int
    num_indices: tuple[int, int | None]
    num_rollouts: int
    num_prompts: int | None
    num_tokens: int | None
    loss_aggregation: str
    divisor: float | None
    num_micro_batches: int | None
    dp_size: int
    cp_size: int
    layout: str
    plan_id: str
    columns: dict[str, Array] = field(default_factory=dict)
    sample_columns: dict[str, Array] = field(default_factory=dict)
    mode_weights: dict[str, Array] = field(default_factory=dict)

    def to(self, device: str | torch.device) -> MicroBatch[torch.Tensor]:
        """The micro-batch as torch tensors on ``device``.

        Everything that is an index or a label becomes int64, ``cu_seqlens`` and ``cu_seqlens_padded`` stay int32, masks
        bool and weights float64. On a CPU, what keeps its dtype shares its memory with this micro-batch.
        """
        from rollpack.torch.batches import to_device

        return to_device(self, device)

    def __repr__(self) -> str:
        place = f"step {self.step}, dp_rank {self.dp_rank}, cp_rank {self.cp_rank}, {self.index}"
        place += "" if self.num_micro_batches is None else f" of {self.num_micro_batches}"
        what = "placeholder" if self.is_placeholder else counted(len(self.rows), "sample")  # type: ignore[arg-type]
        positions = counted(len(self.tokens), "position")  # type: ignore[arg-type]
        return f"MicroBatch({what}, {positions}, {self.loss_aggregation}, {place})"


def pack(
    data: Any,
    plan: Plan,
    *,
    step: int | None = None,
    dp_rank: int = 0,
    cp_rank: int = 0,
    token_columns: Sequence[str] = (),
    sample_columns: Sequence[str] = (),
    num_threads: int = 1,
) -> Iterator[MicroBatch[npt.NDArray[Any]]]:
    """Pack the micro-batches of one rank in one step, in the order in which it runs them.

    Args:
        data: the rollouts that were planned, as for :func:`rollpack.summarize`, readable once more. Of files, the row groups
            and batches are read that hold rows of this rank. Where shards were joined, they follow each other in the order
            of ``plan.sources``, or are passed by name, ``{source: data}``: then those that hold no row of this rank are not
            opened, and need not be there. The data of a shard may be a Ray ObjectRef.
        plan: the plan.
        step: the optimizer step; may be left out where the plan has only one.
        dp_rank: the data-parallel rank.
        cp_rank: the context-parallel rank.
        token_columns: columns to carry along that hold a list of numbers as long as the response.
        sample_columns: columns to carry along that hold a number.
        num_threads: how many micro-batches are packed at the same time, by threads of this call alone. Up to as many are
            packed ahead of the one that is asked for. Packing runs at the speed of memory, so that one thread is often
            enough.

    Yields:
        ``plan.steps[step].num_micro_batches`` micro-batches, each with arrays of its own. Where each is dropped before the
        next, the next takes over its memory.

    Raises:
        PlanError: no such step or rank, no step given where there are several, less than one thread, or this is no plan.
        DataError: a row is not what was planned (the number of rows, and each one's lengths and mask sum, are compared: a
            shuffle of rows that are alike in these is not seen), or a value cannot be packed.
        SchemaError: a column is missing or has a type that cannot be read.
    """
    step = as_plan(plan)._checked(step, dp_rank, cp_rank)
    num_threads = integer("num_threads", num_threads, least=1)
    rows = plan._rows_of(step, dp_rank)
    packer = Packer(data, plan.columns, token_columns, sample_columns, sources=plan.sources, rows=rows)
    return packer.rank(plan, step, dp_rank, cp_rank, num_threads=num_threads)


#: Gives an int32, a bool, a float32 and a float64 array of these lengths.
Buffers = Callable[[Sequence[int]], tuple[npt.NDArray[Any], ...]]


def fresh(lengths: Sequence[int]) -> tuple[npt.NDArray[Any], ...]:
    """Buffers of their own."""
    return tuple(np.empty(n, dtype) for n, dtype in zip(lengths, (np.int32, np.bool_, np.float32, np.float64), strict=True))


#: The plan's columns that packing checks or passes on, each with what a placeholder has there, and those of groups.
PLANNED = {
    "row": -1,
    "total_length": 0,
    "response_length": 0,
    "mask_sum": 0,
    "rollout_mask_sum": 0,
    "rollout_index": -1,
    "sample_weight": 0,
}
PLANNED_PROMPTS = {"prompt_mask_sum": 0, "prompt_index": -1}


class Packer:
    """Data that is held to pack ranks, steps and plans of it."""

    def __init__(
        self,
        data: Any,
        columns: Mapping[str, str | None],
        token_columns: Sequence[str] = (),
        sample_columns: Sequence[str] = (),
        *,
        sources: Sequence[tuple[Any, int]] = (),
        rows: npt.NDArray[np.int64] | None = None,
    ) -> None:
        """``sources``: those of the plan, by which data may be passed. ``rows``: as for :meth:`hold`."""
        # Ids were settled by the plan: no key and no groups are read.
        self._request = Request.make(columns, (), token_columns=token_columns, sample_columns=sample_columns)
        self._shards = Shards.of(data, sources)
        self._source = self._shards.opened(rows) if self._shards else Source.of(data)
        self._pieces = self._source.holding(rows)
        self._rows = self._source.take(self._request, self._pieces)

    def hold(self, rows: npt.NDArray[np.int64] | None) -> None:
        """Hold what is needed to pack these rows, None for all: of files the row groups or batches that they lie in.

        What is held already is not read again; else all is let go of and read anew.
        """
        if self._shards:
            self._source = self._shards.opened(rows)
        pieces = self._source.holding(rows)
        if self._shards or not pieces <= self._pieces:
            del self._rows  # so that never both are held
            self._rows = self._source.take(self._request, pieces)
            self._pieces = pieces

    def rank(
        self,
        plan: Plan,
        step: int,
        dp_rank: int,
        cp_rank: int,
        *,
        buffers: Buffers | None = None,
        indices: Sequence[int] | None = None,
        num_threads: int = 1,
    ) -> Iterator[MicroBatch[npt.NDArray[Any]]]:
        """The micro-batches of one rank in one step, those of these indices (None: all), each in buffers of its own.

        ``buffers``: gives other buffers to pack a micro-batch into; its arrays are views of them. With one thread.
        """
        if self._rows.num_rows != plan.num_rows:
            raise DataError(
                f"{plan.num_rows} rows were planned, and the data now has {self._rows.num_rows}: it is not the data that "
                "was planned, or a reader that was read before (pass a table or a path)"
            )
        # What all micro-batches share is worked out once: it takes longer than the packing of a small one.
        settings, counts = plan.settings, plan.steps[step]
        shared = {
            "step": step,
            "dp_rank": dp_rank,
            "cp_rank": cp_rank,
            "num_rollouts": counts.num_rollouts,
            "num_prompts": counts.num_prompts,
            "num_tokens": counts.num_tokens,
            "loss_aggregation": settings.loss_aggregation,
            "divisor": settings.divisor,
            "num_micro_batches": counts.num_micro_batches,
            "dp_size": settings.dp_size,
            "cp_size": settings.cp_size,
            "layout": settings.layout,
            "num_indices": plan._unit_counts,
            "plan_id": plan.id,
        }
        columns = {name: plan._slice(name, slice(None)) for name in PLANNED}
        if settings.loss_aggregation == "prompt_mean":
            columns |= {name: plan._slice(name, slice(None)) for name in PLANNED_PROMPTS}
        places = plan._bounds_of_rank(step, dp_rank)
        wanted = range(len(places)) if indices is None else indices

        def packed(index: int) -> MicroBatch[npt.NDArray[Any]]:
            placed = {name: column[places[index]] for name, column in columns.items()}
            return pack_rows(
                self._rows, self._request, placed, settings.cut, cp_rank, buffers or fresh, shared | {"index": index}
            )

        if num_threads == 1:
            yield from map(packed, wanted)
            return
        from concurrent.futures import ThreadPoolExecutor  # with logging and more, a tenth of `import rollpack`

        # A pool of this call alone: threads of a global one would be missing in a forked child.
        with ThreadPoolExecutor(num_threads) as pool:
            ahead = deque(pool.submit(packed, index) for index in wanted[:num_threads])
            for index in wanted[num_threads:]:
                ahead.append(pool.submit(packed, index))
                yield ahead.popleft().result()  # without a name, which would keep it while the next one is packed
            while ahead:
                yield ahead.popleft().result()


def pack_rows(
    rows: _core.Rows,
    request: Request,
    placed: Mapping[str, npt.NDArray[Any]],
    cut: tuple[int, str, int, int],
    cp_rank: int,
    buffers: Buffers,
    shared: Any,
) -> MicroBatch[npt.NDArray[Any]]:
    """Pack one micro-batch. ``placed``: the plan's columns for it. ``shared``: what else it is to hold."""
    planned = placed["row"], placed["total_length"], placed["response_length"], placed["mask_sum"]
    samples, positions, max_seqlen, lengths = rows.size(planned, cut)
    ints, mask, floats, doubles = buffers(lengths)
    rows.pack(planned, cut, cp_rank, ints, mask, floats, doubles)

    by_position = _views(ints, [positions] * 4 + [samples + 1] * 2)
    is_placeholder = len(placed["row"]) == 0
    if is_placeholder:
        nothing = PLANNED | PLANNED_PROMPTS
        own = {name: np.full(1, nothing[name], column.dtype) for name, column in placed.items()}
    else:  # copies: a micro-batch has arrays of its own, and does not keep the plan
        own = {name: column.copy() for name, column in placed.items()}
    float_columns = rows.float_columns
    singles = iter(_views(floats[positions * len(request.token_columns) :], [samples] * sum(float_columns)))
    others = iter(_views(doubles, [samples] * (len(float_columns) - sum(float_columns))))
    return MicroBatch(
        tokens=by_position[0],
        labels=by_position[1],
        position_ids=by_position[2],
        segment_ids=by_position[3],
        loss_mask=mask,
        cu_seqlens=by_position[4],
        cu_seqlens_padded=by_position[5],
        rows=own["row"],
        mask_sums=own["mask_sum"],
        rollout_mask_sums=own["rollout_mask_sum"],
        prompt_mask_sums=own.get("prompt_mask_sum"),
        rollout_indices=own["rollout_index"],
        prompt_indices=own.get("prompt_index"),
        sample_weights=own["sample_weight"],
        max_seqlen=max_seqlen,
        is_placeholder=is_placeholder,
        **shared,
        columns=dict(zip(request.token_columns, _views(floats, [positions] * len(request.token_columns)), strict=True)),
        sample_columns={
            name: next(singles if single else others)
            for name, single in zip(request.sample_columns, float_columns, strict=True)
        },
    )


def _views(buffer: npt.NDArray[Any], lengths: list[int]) -> list[npt.NDArray[Any]]:
    """Pieces of these lengths from the start of a buffer, without a copy."""
    return [buffer[a:b] for a, b in pairwise(accumulate(lengths, initial=0))]
