"""Reduce one batch under many cuts, and measure how far losses and gradients are from float64."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from rollpack.names import OURS
from rollpack.packing import MicroBatch, Packer
from rollpack.summary import summarize
from rollpack.testing.cuts import Cut
from rollpack.testing.rollouts import Rollouts
from rollpack.testing.truth import Observed, Truth, check_mode, check_one_process
from rollpack.torch import LossReducer

#: The largest deviation that counts as agreement.
TOLERANCES = {torch.float32: 1e-6, torch.float64: 1e-12}

#: Gives the part of the step loss of one micro-batch; the parts of all ranks are summed.
Reduce = Callable[[torch.Tensor, MicroBatch[Any]], torch.Tensor]


@dataclass
class Agreement:
    """How one mode compares with the reference over all cuts.

    Attributes:
        loss_aggregation: the mode.
        reference: its step loss in float64.
        loss: per dtype the largest |a - b| / Σ w|x| of the loss.
        gradient: per dtype the largest max|g - g0| / max|g0| of the gradient with respect to the token losses.
        worst: per dtype the cut of the largest of both.
    """

    loss_aggregation: str
    reference: float
    loss: dict[torch.dtype, float] = field(default_factory=dict)
    gradient: dict[torch.dtype, float] = field(default_factory=dict)
    worst: dict[torch.dtype, Cut] = field(default_factory=dict)

    @property
    def agrees(self) -> bool:
        """Whether all deviations are within :data:`TOLERANCES`. A NaN is not."""
        return all(
            deviation <= TOLERANCES[dtype] for measure in (self.loss, self.gradient) for dtype, deviation in measure.items()
        )

    def __repr__(self) -> str:
        worst = ", ".join(f"{str(d).removeprefix('torch.')} {max(x, self.gradient[d]):.1e}" for d, x in self.loss.items())
        held = "agrees" if self.agrees else "does NOT agree"
        return (
            f"Agreement({self.loss_aggregation} {held}, loss {self.reference:.6g}, worst deviation {worst or 'of no cut'})"
        )

    def add(self, dtype: torch.dtype, cut: Cut, loss: float, gradient: float) -> None:
        """Take in the deviations of one cut. A NaN stays."""
        so_far = self.loss.get(dtype, 0.0), self.gradient.get(dtype, 0.0)
        if not max(loss, gradient) < max(so_far):
            self.worst[dtype] = cut
        self.loss[dtype], self.gradient[dtype] = np.maximum(so_far, (loss, gradient)).tolist()


def verify(
    data: Any,
    cuts: Iterable[Cut],
    *,
    modes: Sequence[str] = OURS,
    divisor: float = 1024.0,
    empty: str = "count",
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.float64),
    columns: Mapping[str, str | None] | None = None,
    rollout_key: str | Sequence[str] = "rollout_id",
    reduce: Reduce | None = None,
    progress: Callable[[int], object] | None = None,
) -> list[Agreement]:
    """Reduce a fixed pseudo-random token loss under every mode and cut, all ranks in this process.

    Args:
        data: rollouts, as for :func:`rollpack.summarize`, readable more than once.
        cuts: the cuts, such as of :func:`rollpack.testing.cuts`.
        modes: the modes; ``prompt_mean`` needs a group column.
        divisor: L of ``constant``.
        empty: as for :func:`rollpack.plan`.
        dtypes: the dtypes of the token loss.
        columns: as for :func:`rollpack.summarize`.
        rollout_key: as for :func:`rollpack.summarize`.
        reduce: what turns token losses into a micro-batch's part of the loss; rollpack's reducer if left out.
        progress: called with 1 after each cut.

    Returns:
        One :class:`Agreement` a mode.

    Raises:
        PlanError: the reference knows no such mode, several processes run, or as for :func:`rollpack.plan`.
    """
    check_one_process()
    for mode in modes:
        check_mode(mode)
    reduce = reduce or LossReducer(backend="none")
    truth = Truth(Rollouts.read(data, columns=columns, rollout_key=rollout_key), divisor, empty)
    summary = summarize(data, groups="prompt_mean" in modes, columns=columns, rollout_key=rollout_key)
    packer = Packer(data, summary.request.columns)
    agreements = [Agreement(mode, truth.loss(mode)) for mode in modes]
    for cut in cuts:
        plans = [
            cut.plan(summary, loss_aggregation=mode, divisor=divisor if mode == "constant" else None, empty=empty)
            for mode in modes
        ]
        ranks = [(d, c) for d in range(cut.dp_size) for c in range(cut.cp_size)]
        same = (zip(*(packer.rank(p, 0, d, c) for p in plans), strict=True) for d, c in ranks)
        with _one_thread():
            reduced = _reduce(itertools.chain.from_iterable(same), len(modes), truth, dtypes, reduce)
        for agreement, per_dtype in zip(agreements, reduced, strict=True):
            for dtype, observed in per_dtype.items():
                agreement.add(dtype, cut, *_deviations(truth, agreement, observed))
        if progress is not None:
            progress(1)
    return agreements


@contextmanager
def _one_thread() -> Iterator[None]:
    """Micro-batches are small: threads would wait for each other far longer than they compute."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _deviations(truth: Truth, agreement: Agreement, observed: Observed) -> tuple[float, float]:
    """Of the loss and of the gradient. A masked position has no gradient at all: if it has one, the loss is NaN."""
    expected, found = truth.gradient(agreement.loss_aggregation), observed.gradient
    scale, largest = float(np.abs(truth.losses) @ expected), float(expected.max(initial=0.0))
    off, worst = abs(observed.loss - agreement.reference), float(np.abs(found - expected).max(initial=0.0))
    if found[expected == 0.0].any():
        off = float("nan")
    return off / (scale or 1.0), worst / (largest or 1.0)


def _reduce(
    micro_batches: Iterable[tuple[MicroBatch[Any], ...]],
    num_modes: int,
    truth: Truth,
    dtypes: Sequence[torch.dtype],
    reduce: Reduce,
) -> list[dict[torch.dtype, Observed]]:
    """What comes of each mode and dtype. ``micro_batches`` holds one micro-batch a mode, of the same rows."""
    observed = [{dtype: Observed(len(truth.losses) - 1) for dtype in dtypes} for _ in range(num_modes)]
    for same in micro_batches:
        tokens = truth.tokens(same[0])
        values = torch.from_numpy(truth.losses[tokens])
        for dtype in dtypes:
            for mode, micro_batch in enumerate(same):
                token_loss = values.to(dtype, copy=True).requires_grad_()
                loss = reduce(token_loss, micro_batch)
                (gradient,) = torch.autograd.grad(loss, token_loss)
                observed[mode][dtype].add(loss.item(), gradient, tokens)
    return observed
