"""``pack``: planned rows become contiguous arrays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from rollpack._errors import DataError
from rollpack._sources import Request, Source
from rollpack.planning import Plan

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
        num_rollouts, num_prompts, num_tokens: N, P (None where groups were not read) and T of the whole step.
        loss_aggregation, divisor: the mode that ``sample_weights`` are of.
        num_micro_batches: K, on each rank in this step.
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
    num_tokens: int
    loss_aggregation: str
    divisor: float | None
    num_micro_batches: int
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
        place = f"step {self.step}, dp_rank {self.dp_rank}, cp_rank {self.cp_rank}, {self.index} of {self.num_micro_batches}"
        what = "placeholder" if self.is_placeholder else f"{len(self.rows)} samples"  # type: ignore[arg-type]
        return f"MicroBatch({what}, {len(self.tokens)} positions, {self.loss_aggregation}, {place})"  # type: ignore[arg-type]


def pack(
    data: Any,
    plan: Plan,
    *,
    step: int | None = None,
    dp_rank: int = 0,
    cp_rank: int = 0,
    token_columns: Sequence[str] = (),
    sample_columns: Sequence[str] = (),
) -> Iterator[MicroBatch[npt.NDArray[Any]]]:
    """Pack the micro-batches of one rank in one step, in the order in which it runs them.

    Args:
        data: the rollouts that were planned, as for :func:`rollpack.summarize`, readable once more.
        plan: the plan.
        step: the optimizer step; may be left out where the plan has only one.
        dp_rank: the data-parallel rank.
        cp_rank: the context-parallel rank.
        token_columns: columns to carry along that hold a list of numbers as long as the response.
        sample_columns: columns to carry along that hold a number.

    Yields:
        ``plan.steps[step].num_micro_batches`` micro-batches, each with arrays of its own.

    Raises:
        PlanError: no such step or rank, or no step given where there are several.
        DataError: a row is not what was planned, or a value cannot be packed.
        SchemaError: a column is missing or has a type that cannot be read.
    """
    step = plan._only_step() if step is None else step
    plan._bounds(step, dp_rank, 0)
    plan._check("cp_rank", cp_rank, plan.settings.cp_size)
    packer = Packer(data, plan.columns, token_columns, sample_columns)
    return packer.rank(plan, step, dp_rank, cp_rank)


class Packer:
    """Data that was read once, to pack any number of ranks, steps and plans of it."""

    def __init__(
        self,
        data: Any,
        columns: Mapping[str, str | None],
        token_columns: Sequence[str] = (),
        sample_columns: Sequence[str] = (),
    ) -> None:
        # Ids were settled by the plan: no key and no groups are read.
        request = Request.make(columns, (), token_columns=token_columns, sample_columns=sample_columns)
        self._request = request
        self._rows = Source.of(data).take(request)

    def rank(self, plan: Plan, step: int, dp_rank: int, cp_rank: int) -> Iterator[MicroBatch[npt.NDArray[Any]]]:
        """The micro-batches of one rank in one step."""
        if self._rows.num_rows != plan.num_rows:
            raise DataError(
                f"{plan.num_rows} rows were planned, and the data now has {self._rows.num_rows}: it is not the data that "
                "was planned, or a reader that was read before (pass a table or a path)"
            )
        for index in range(plan.steps[step].num_micro_batches):
            yield self._pack(plan, step, dp_rank, cp_rank, index)

    def _pack(self, plan: Plan, step: int, dp_rank: int, cp_rank: int, index: int) -> MicroBatch[npt.NDArray[Any]]:
        settings, counts, rows, request = plan.settings, plan.steps[step], self._rows, self._request
        at = plan._bounds(step, dp_rank, index)
        row, total, response, mask_sum = (
            plan._slice(column, at).copy() for column in ("row", "total_length", "response_length", "mask_sum")
        )
        planned = (row, total, response, mask_sum)
        samples, positions, max_seqlen, lengths = rows.size(planned, settings.cut)
        ints = np.empty(lengths[0], np.int32)
        mask = np.empty(lengths[1], np.bool_)
        floats = np.empty(lengths[2], np.float32)
        doubles = np.empty(lengths[3], np.float64)
        rows.pack(planned, settings.cut, cp_rank, ints, mask, floats, doubles)

        by_position = _views(ints, [positions] * 4 + [samples + 1] * 2)
        prompts = settings.loss_aggregation == "prompt_mean"
        is_placeholder = len(row) == 0

        def per_sample(column: str, dummy: npt.NDArray[Any]) -> npt.NDArray[Any]:
            values: npt.NDArray[Any] = plan._slice(column, at)
            return dummy if is_placeholder else values.copy()

        nothing, nowhere = np.zeros(1, np.int64), np.full(1, -1)
        singles = iter(_views(floats[positions * len(request.token_columns) :], [samples] * sum(rows.float_columns)))
        others = iter(_views(doubles, [samples] * (len(rows.float_columns) - sum(rows.float_columns))))
        return MicroBatch(
            tokens=by_position[0],
            labels=by_position[1],
            position_ids=by_position[2],
            segment_ids=by_position[3],
            loss_mask=mask,
            cu_seqlens=by_position[4],
            cu_seqlens_padded=by_position[5],
            rows=nowhere if is_placeholder else row,
            mask_sums=nothing if is_placeholder else mask_sum,
            rollout_mask_sums=per_sample("rollout_mask_sum", nothing),
            prompt_mask_sums=per_sample("prompt_mask_sum", nothing) if prompts else None,
            rollout_indices=per_sample("rollout_index", nowhere),
            prompt_indices=per_sample("prompt_index", nowhere) if prompts else None,
            sample_weights=per_sample("sample_weight", np.zeros(1)),
            max_seqlen=max_seqlen,
            is_placeholder=is_placeholder,
            step=step,
            dp_rank=dp_rank,
            cp_rank=cp_rank,
            index=index,
            num_indices=plan._unit_counts,
            num_rollouts=counts.num_rollouts,
            num_prompts=counts.num_prompts,
            num_tokens=counts.num_tokens,
            loss_aggregation=settings.loss_aggregation,
            divisor=settings.divisor,
            num_micro_batches=counts.num_micro_batches,
            dp_size=settings.dp_size,
            cp_size=settings.cp_size,
            layout=settings.layout,
            plan_id=plan.id,
            columns=dict(
                zip(request.token_columns, _views(floats, [positions] * len(request.token_columns)), strict=True)
            ),
            sample_columns={
                name: next(singles if single else others)
                for name, single in zip(request.sample_columns, rows.float_columns, strict=True)
            },
        )


def _views(buffer: npt.NDArray[Any], lengths: list[int]) -> list[npt.NDArray[Any]]:
    """Pieces of these lengths from the start of a buffer, without a copy."""
    return [buffer[a:b] for a, b in pairwise(accumulate(lengths, initial=0))]
