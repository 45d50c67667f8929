"""Masks that were changed since the plan, and the denominators that go with them."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from rollpack._arguments import flag
from rollpack._errors import PlanError, RollpackError
from rollpack._text import counted
from rollpack.packing import MicroBatch
from rollpack.torch.batches import as_tensor
from rollpack.torch.mesh import Mesh, check_all_reduce, collective_device, reducing_groups
from rollpack.torch.weights import check_tensor, host_array
from rollpack.weights import sample_weights


def check_mask(name: str, mask: torch.Tensor, length: int) -> torch.Tensor:
    """``mask``, if it is [length] bool."""
    check_tensor(name, mask)
    if mask.dtype != torch.bool or mask.shape != (length,):
        raise RollpackError(
            f"{name} is {mask.dtype} of shape {list(mask.shape)}; it has to be bool [{length}]. Importance weights go into "
            "token_loss"
        )
    return mask


def check_changed(mask: torch.Tensor, trained: torch.Tensor) -> torch.Tensor:
    """``mask``, if it is [T] bool and has no token beside those of ``trained``.

    The second is looked at on a CPU only: on a device the host would wait for it, and under compile the graph would break.
    """
    check_mask("loss_mask", mask, len(trained))
    if mask.device.type == "cpu" and not torch.compiler.is_compiling():
        added = int((mask & ~trained.to("cpu")).sum())
        if added:
            raise RollpackError(
                f"loss_mask is True at {added} positions that are not trained: a changed mask takes tokens out and adds "
                "none. Where it says what to keep, pass loss_mask & micro_batch.loss_mask; like that one, it is about the "
                "token after each position"
            )
    return mask


class StepMasks:
    """The masks of one step, with the mask sums of their rollouts and groups over all ranks.

    See :meth:`rollpack.torch.LossReducer.set_masks` for the arguments.
    """

    def __init__(
        self,
        micro_batches: Sequence[MicroBatch[Any]],
        masks: Sequence[torch.Tensor],
        *,
        cut: bool,
        mesh: Mesh | None,
        fault: Exception | None = None,
    ) -> None:
        """``fault``: what is wrong with this rank's step already."""
        self._masks: dict[int, torch.Tensor] = {}
        sums = torch.zeros(0)
        try:
            if fault is not None:
                raise fault
            flag("cut", cut)
            sums = self._sums(micro_batches, masks, cut=cut)
            check_all_reduce(mesh, micro_batches[0].dp_size * micro_batches[0].cp_size)
        except Exception as error:  # noqa: BLE001 - whatever it is, the others are told
            fault = error
        groups = reducing_groups(mesh)
        step = None if fault is not None else (micro_batches[0].plan_id, micro_batches[0].step)
        _share_faults(fault, step, groups)
        for group in groups:
            torch.distributed.all_reduce(sums, group=group)
        self._step = step
        rollouts, prompts = micro_batches[0].num_indices
        *of_units, new = np.split(sums.cpu().numpy(), [rollouts, -1])
        if new[0]:
            raise RollpackError(
                f"the masks of all ranks have {counted(new[0], 'token')} that the plan does not train: changed masks take "
                "tokens out and add none. Is cut= right? True: of the token after each position, as micro_batch.loss_mask, "
                "to which a mask of what to keep is joined by &. False: of the tokens themselves"
            )
        self._rollout_sums, self._prompt_sums = of_units[0], None if prompts is None else of_units[1]
        self._num_tokens = int(self._rollout_sums.sum())

    def _sums(self, micro_batches: Sequence[MicroBatch[Any]], masks: Sequence[torch.Tensor], *, cut: bool) -> torch.Tensor:
        """Keeps the masks. Gives this rank's mask sums of rollouts and groups, and how many tokens it adds to the plan's.

        It is one tensor, so that one collective a group is enough.
        """
        if len(micro_batches) != len(masks):
            raise RollpackError(
                f"there are {counted(len(micro_batches), 'micro-batch')} and {counted(len(masks), 'mask')}; one each"
            )
        for n, mask in enumerate(masks):
            check_tensor(f"masks[{n}]", mask)
        rollouts, prompts = micro_batches[0].num_indices
        device = masks[0].device
        sums = torch.zeros(rollouts + (prompts or 0) + 1, dtype=torch.int64, device=device)
        for n, (micro_batch, mask) in enumerate(zip(micro_batches, masks, strict=True)):
            local, per_sample, more = _local(f"masks[{n}]", micro_batch, mask, cut=cut)
            sums[-1] += more
            self._masks[micro_batch.index] = local
            if not micro_batch.is_placeholder:
                sums.index_add_(0, as_tensor(micro_batch.rollout_indices, device), per_sample)
                if prompts is not None:
                    sums.index_add_(0, as_tensor(micro_batch.prompt_indices, device) + rollouts, per_sample)
        return sums

    def of(self, micro_batch: MicroBatch[Any], mode: str) -> tuple[torch.Tensor, Any]:
        """The mask [T] of this rank, and the sample weights [S] of ``mode``."""
        if (micro_batch.plan_id, micro_batch.step) != self._step:
            raise PlanError("the masks that were set are of another step: call reducer.set_masks(...) for each step")
        if mode == "token_mean_legacy":
            raise PlanError("token_mean_legacy knows no current denominators: use LossReducer(denominators='original')")
        at = host_array(micro_batch.rollout_indices)
        prompts = self._prompt_sums
        weights = sample_weights(
            mode,
            rollout_mask_sums=self._rollout_sums[at],
            prompt_mask_sums=None if prompts is None else prompts[host_array(micro_batch.prompt_indices)],
            num_rollouts=micro_batch.num_rollouts,
            num_prompts=micro_batch.num_prompts,
            num_tokens=self._num_tokens,
            divisor=micro_batch.divisor if mode == micro_batch.loss_aggregation else None,
        )
        return self._masks[micro_batch.index], weights


def _share_faults(
    fault: Exception | None, step: tuple[str, int] | None, groups: Sequence[torch.distributed.ProcessGroup | None]
) -> None:
    """Raises on every rank where one cannot go on: the others would wait for it in a collective; or has another step."""
    digest = zlib.crc32(repr(step).encode())
    told = torch.tensor([fault is not None, digest, -digest], dtype=torch.int64)
    for group in groups:
        told = told.to(collective_device(group))
        torch.distributed.all_reduce(told, torch.distributed.ReduceOp.MAX, group=group)
    failed, largest, smallest = told.tolist()
    if fault is not None:
        raise fault
    if failed:
        raise RollpackError("set_masks failed on another rank: the error there says why")
    if largest != -smallest:
        raise PlanError(
            "ranks set the masks of different plans or steps: plan alike on all of them (check_same_plan), and set those of "
            "the same step"
        )


def _local(
    name: str, micro_batch: MicroBatch[Any], mask: torch.Tensor, *, cut: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The mask at this rank's positions [T], its sum per sample [S], and the number of tokens that are not in the plan's.

    Each trained token is on one cp rank.
    """
    trained, segment_ids = (as_tensor(x, mask.device) for x in (micro_batch.loss_mask, micro_batch.segment_ids))
    if cut:
        told, beside = check_mask(name, mask, len(trained)), torch.zeros((), dtype=torch.int64, device=mask.device)
    else:
        starts, position_ids = (as_tensor(x, mask.device) for x in (micro_batch.cu_seqlens, micro_batch.position_ids))
        check_mask(name, mask, int(starts[-1]))
        segments = segment_ids.clamp(min=0).long()
        following = starts[segments].long() + position_ids + 1
        told = mask[following.clamp(max=len(mask) - 1)] & (following < starts[segments + 1]) & (segment_ids >= 0)
        beside = mask[starts[:-1].long()].sum()  # no position has the first token of a sample after it
    local = told & trained
    sums = torch.zeros(len(micro_batch.rows), dtype=torch.int64, device=mask.device)
    sums.index_add_(0, segment_ids.clamp(min=0).long(), local.long())
    return local, sums, (told & ~trained).sum() + beside
