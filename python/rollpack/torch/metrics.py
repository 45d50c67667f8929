"""``Metrics``: diagnostics that are added up on the device, and gathered once per log."""

from __future__ import annotations

import math
import numbers
import zlib
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rollpack._errors import PlanError, RollpackError
from rollpack._text import counted
from rollpack.names import OURS
from rollpack.packing import MicroBatch
from rollpack.torch.batches import as_tensor
from rollpack.torch.masks import check_changed
from rollpack.torch.mesh import collective_device, num_processes
from rollpack.torch.weights import mode_weights, token_weights, weighted_sum

_EXTREMES = {"min": math.inf, "max": -math.inf}
#: How a metric can be normalised.
NORMALISERS = (*OURS, "count", "none", *_EXTREMES)


class Metrics:
    """Detached diagnostics of training, the same at every layout and backend.

    Names and normalisers are declared up front, so that ranks cannot disagree, and values are added per micro-batch on its
    device. :meth:`log` makes one collective of all of them.

    ==================  =============================================================================================
    normaliser          what is logged, over the trained tokens of all ranks and micro-batches
    ==================  =============================================================================================
    one of the modes    Σ w x, with the weights of that mode for the step and no backend factor; averaged over the
                        optimizer steps of the log. With the token loss, and the plan's mode, it is the step loss
    ``none``            Σ x, averaged over the optimizer steps of the log
    ``count``           Σ x over the number of tokens that x was added for, of the whole log
    ``min``, ``max``    the smallest and the largest x of the whole log
    ==================  =============================================================================================

    ``sample_mean`` is the one to take where nothing else is wanted: it stays comparable when the mode of the loss changes.
    ``prompt_mean`` and ``constant`` can be had where the plan is of that mode.

    Call :meth:`add` for each micro-batch of each rank, placeholders too: that is how steps are counted, and a log to which
    some did not come is refused. A name may be left out, or all of them; it adds nothing there. Where it was added for no
    trained token at all, on no rank, a sum is logged as 0 and ``count``, ``min`` and ``max``, which then have no value, are
    left out of the log. A NaN at a trained token is logged.

    Args:
        normalisers: the normaliser of each name, the same on every rank.

    Raises:
        RollpackError: there is no such normaliser.
    """

    def __init__(self, normalisers: Mapping[str, str]) -> None:
        for name, normaliser in normalisers.items():
            if normaliser not in NORMALISERS:
                raise RollpackError(f"metric {name!r} has normaliser {normaliser!r}, none of {', '.join(NORMALISERS)}")
        self._normalisers = dict(normalisers)
        self.reset()

    def __repr__(self) -> str:
        return f"Metrics({self._normalisers})"

    def reset(self) -> None:
        """Throw away what was added since the last log, as after a step that failed half way. Every rank has to."""
        # 0-d float64 on the device: Σ (w) x, or the extreme so far, and the number of tokens that it is of.
        self._values: dict[str, torch.Tensor] = {}
        self._tokens: dict[str, torch.Tensor] = {}
        self._times: Counter[tuple[Any, ...]] = Counter()
        self._passes: Counter[tuple[str, int]] = Counter()
        self._calls: dict[tuple[Any, ...], Counter[int]] = {}
        self._expected: dict[tuple[str, int], int | None] = {}
        self._size = 0

    @torch.no_grad()
    def add(
        self,
        micro_batch: MicroBatch[Any],
        values: Mapping[str, torch.Tensor | float],
        *,
        loss_mask: torch.Tensor | None = None,
    ) -> None:
        """Take in values of one micro-batch. The host does not wait for the device (if both are on the same one).

        A micro-batch may come in several calls, with other names. The same name once more is another pass over the data,
        such as a second epoch over one plan: another optimizer step.

        Args:
            micro_batch: as packed, or on a device.
            values: by name. [T] of any real dtype: a value per position, of the token after it; positions that are not
                trained may hold anything. A 0-d tensor or a number stands for that value at every trained token; under
                ``none`` it is this rank's share of the sum, added as it is. Gradients do not flow, and nothing is shared
                with what is passed.
            loss_mask: [T] bool, a mask that was changed since, as for the reducer: it takes tokens out and adds none, and
                the denominators of the modes stay.

        Raises:
            RollpackError: a name was not declared, a value has another shape or dtype, or, on a CPU, the mask adds tokens.
            PlanError: a mode that the plan has no weights for, or a plan for another number of ranks.
        """
        size = micro_batch.dp_size * micro_batch.cp_size
        if self._size not in {0, size}:
            raise PlanError(
                f"this log has micro-batches for {counted(self._size, 'rank')}, and this one is for {size}: log first"
            )
        device = next((v.device for v in values.values() if isinstance(v, torch.Tensor)), None)
        mask = as_tensor(micro_batch.loss_mask, device or "cpu")
        if loss_mask is not None:
            mask = mask & check_changed(loss_mask, mask)
        of_mode = _Weights(micro_batch, mask)
        added = {name: self._reduced(name, value, mask, of_mode) for name, value in values.items()}
        # All is well with them: only now does anything change.
        tokens = mask.sum(dtype=torch.float64)
        for name, value in added.items():
            self._values[name] = self._joined(name, value)
            self._tokens[name] = self._tokens[name] + tokens if name in self._tokens else tokens
        self._note(micro_batch, added)

    def _reduced(self, name: str, value: torch.Tensor | float, mask: torch.Tensor, of_mode: _Weights) -> torch.Tensor:
        """What this micro-batch adds: 0-d float64."""
        if name not in self._normalisers:
            raise RollpackError(f"metric {name!r} was not declared; those that were are {sorted(self._normalisers)}")
        normaliser = self._normalisers[name]
        if isinstance(value, numbers.Real | np.bool_):  # numpy's numbers too
            value = torch.tensor(float(value), dtype=torch.float64, device=mask.device)
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"metric {name!r} is a {type(value).__name__}; it has to be a tensor or a number")
        if value.is_complex() or value.shape not in {(), mask.shape}:
            raise RollpackError(
                f"metric {name!r} is {value.dtype} of shape {list(value.shape)}; it has to be real, and of shape "
                f"[{len(mask)}] (masked and padded positions included) or a single number"
            )
        value = value.detach().to(mask.device, torch.float64)
        if normaliser == "none" and value.ndim == 0:
            return value.clone()
        if normaliser in OURS:
            return weighted_sum(value.expand(mask.shape), of_mode(normaliser))
        # Selected, not multiplied: an untrained position may hold NaN or infinity.
        selected = torch.where(mask, value, _EXTREMES.get(normaliser, 0.0))
        reduce = {"min": torch.amin, "max": torch.amax}.get(normaliser, torch.sum)
        return reduce(selected)

    def _joined(self, name: str, value: torch.Tensor) -> torch.Tensor:
        if name not in self._values:
            return value
        join = {"min": torch.minimum, "max": torch.maximum}.get(self._normalisers[name], torch.add)
        return join(self._values[name], value)

    def _note(self, micro_batch: MicroBatch[Any], names: Mapping[str, Any]) -> None:
        """Count passes over the step: as often as any of its micro-batches came with the same name."""
        self._size = micro_batch.dp_size * micro_batch.cp_size
        rank = micro_batch.dp_rank, micro_batch.cp_rank
        step = micro_batch.plan_id, micro_batch.step
        self._passes[step] = max(self._passes[step], 1)
        self._calls.setdefault((step, rank), Counter())[micro_batch.index] += 1
        self._expected[step] = micro_batch.num_micro_batches
        for name in names:
            key = (name, step, rank, micro_batch.index)
            self._times[key] += 1
            self._passes[step] = max(self._passes[step], self._times[key])

    @property
    def _ranks(self) -> set[tuple[int, int]]:
        """For which ranks this process added."""
        return {rank for _, rank in self._calls}

    def _complete(self) -> int:
        """In how many passes over the steps each micro-batch may have come; -1 where one is missing.

        Names may be left out, so that calls say no more than at most how many passes there were.
        """
        passes = 0
        for step, needed in self._passes.items():
            of_ranks = [calls for (of, _), calls in self._calls.items() if of == step]
            # While a step arrives, nobody knows how many there are to be.
            least = min(calls[i] for calls in of_ranks for i in range(self._expected[step] or max(calls) + 1))
            if least < needed or len(of_ranks) < len(self._ranks):
                return -1
            passes += least
        return passes

    def log(self, *, group: torch.distributed.ProcessGroup | None = None) -> dict[str, float]:
        """What was added since the last log, over all ranks, as a flat dict. Then a new log begins.

        It makes one collective, an all-gather of one float64 tensor of 7 + 2 numbers a name (sums, extremes and counts
        travel together), and adds up in the order of ranks, so every rank has the same bits. There is room for 64 names in
        it; what is beyond makes a second one.

        Args:
            group: the process group of the dp x cp ranks; all processes if left out. Every rank of it has to call.

        Returns:
            A float per name, in the order of declaration.

        Raises:
            PlanError: the group is not that of the dp x cp ranks, or this process is not in it; ranks declared different
                metrics, two processes packed for the same rank, ranks added micro-batches of different plans or steps, or
                some of the K micro-batches of a rank were not added. Every rank of the group raises, and what was added
                stays: :meth:`reset` throws it away.
        """
        packed = self._packed()
        gathered = _gather(packed[:_FIRST], group)
        digests, steps, ranks, sizes, places, plans, complete = gathered[:, :_HEADER].T
        if (digests != digests[0]).any():
            raise PlanError("ranks declared different metrics; names and normalisers have to be the same on all of them")
        if len(packed) > _FIRST:  # on every rank, as they declared the same
            gathered = np.concatenate([gathered, _gather(packed[_FIRST:], group)], axis=1)
        size, seen = int(sizes.max()), int(ranks.sum())
        # Processes that add nothing may be there beside those that do, such as all but the last stage of a pipeline.
        added = ranks > 0
        if seen != size:
            raise PlanError(
                f"the plan is for {size} dp x cp ranks, and the {len(gathered)} processes that were gathered added "
                f"micro-batches of {seen}: call add for each rank's, and pass the process group of the dp x cp ranks, "
                "log(group=...)"
            )
        if len(np.unique(plans[added])) > 1:
            raise PlanError(
                "ranks added micro-batches of different plans or steps: plan alike on all of them (check_same_plan), and "
                "log after the same step"
            )
        known = places[places >= 0]
        if len(np.unique(known)) < len(known):
            raise PlanError(
                "several processes added micro-batches of the same dp_rank and cp_rank: pass each process's own to pack"
            )
        # Every rank runs every step, so any that added something at all has counted them all.
        num_steps = max(int(steps.max()), 1)
        behind = np.flatnonzero(added & (complete < steps.max()))
        if len(behind):
            raise PlanError(
                f"processes {', '.join(map(str, behind))} did not add each of their micro-batches in each step, or pass "
                "over it: call add for all K of them, placeholders too, and log when the step has ended on every rank"
            )
        values, tokens = gathered[:, _HEADER::2], gathered[:, _HEADER + 1 :: 2]
        logged = {
            name: _normalised(self._normalisers[name], values[:, i], float(tokens[:, i].sum()), num_steps)
            for i, name in enumerate(sorted(self._normalisers))
        }
        self.reset()
        return {name: value for name in self._normalisers if (value := logged[name]) is not None}

    def _packed(self) -> torch.Tensor:
        """[7 + 2 names] float64: see :data:`_HEADER`; then a value and a count each; zeros up to :data:`_FIRST`."""
        declared = sorted(self._normalisers.items())
        place = next(iter(self._ranks)) if len(self._ranks) == 1 and self._size > 1 else None
        at = -1 if place is None else place[0] * self._size + place[1]
        digests = [zlib.crc32(repr(of).encode()) for of in (declared, sorted(self._passes))]
        header = [digests[0], sum(self._passes.values()), len(self._ranks), self._size, at, digests[1], self._complete()]
        device = next((v.device for v in self._values.values()), torch.device("cpu"))
        zero = torch.zeros((), dtype=torch.float64, device=device)
        values = [
            self._values[name].to(device) if name in self._values else torch.full_like(zero, _EXTREMES.get(normaliser, 0.0))
            for name, normaliser in declared
        ]
        tokens = [self._tokens.get(name, zero).to(device) for name, _ in declared]
        numbers = [number for pair in zip(values, tokens, strict=True) for number in pair]
        spare = [zero] * (_FIRST - _HEADER - len(numbers))
        return torch.cat([torch.tensor(header, dtype=torch.float64, device=device), torch.stack([*numbers, *spare])])


#: A digest of the declaration, the passes over steps, how many ranks this process was, D·C, which rank if it was one of
#: several, a digest of the plans and steps, and in how many passes each micro-batch came.
_HEADER = 7
#: How many numbers are gathered first, for 64 names: ranks that declared more or fewer gather as many, and are told.
_FIRST = _HEADER + 2 * 64


class _Weights:
    """The token weights of each mode for one micro-batch, made once."""

    def __init__(self, micro_batch: MicroBatch[Any], mask: torch.Tensor) -> None:
        self._micro_batch, self._mask = micro_batch, mask
        self._made: dict[str, torch.Tensor] = {}

    def __call__(self, mode: str) -> torch.Tensor:
        """[T] float64."""
        if mode not in self._made:
            per_sample = as_tensor(mode_weights(self._micro_batch, mode), self._mask.device)
            segment_ids = as_tensor(self._micro_batch.segment_ids, self._mask.device)
            self._made[mode] = token_weights(self._mask, segment_ids, per_sample)
        return self._made[mode]


def _normalised(normaliser: str, values: npt.NDArray[np.float64], tokens: float, num_steps: int) -> float | None:
    """What the values [ranks] of all ranks come to; None where there is no such number."""
    if normaliser in {*OURS, "none"}:
        return float(values.sum()) / num_steps
    if tokens == 0:
        return None
    if normaliser == "count":
        return float(values.sum()) / tokens
    return float(values.min() if normaliser == "min" else values.max())


def _gather(packed: torch.Tensor, group: torch.distributed.ProcessGroup | None) -> npt.NDArray[np.float64]:
    """[ranks, n] from [n] on each rank."""
    size = num_processes(group)
    if size is None:
        return packed.cpu().numpy()[None]
    # A rank that added nothing has no device of its own to go by, and all have to take the same.
    packed = packed.to(collective_device(group))
    gathered = packed.new_empty(size * len(packed))
    torch.distributed.all_gather_into_tensor(gathered, packed, group=group)
    return gathered.cpu().numpy().reshape(-1, len(packed))
