"""What the reference makes of a batch, and what a reducer made of it, token by token."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rollpack import _reference
from rollpack._errors import PlanError
from rollpack.names import OURS
from rollpack.packing import MicroBatch
from rollpack.testing.rollouts import Rollouts, token_losses
from rollpack.torch.mesh import num_processes

Floats = npt.NDArray[np.float64]


def check_mode(mode: str) -> None:
    """Refuse a mode that the reference does not know.

    Raises:
        PlanError: it is none of ours, or depends on the cut.
    """
    if mode not in OURS:
        raise PlanError(f"loss_aggregation is {mode!r}; what is held against the reference is one of {', '.join(OURS)}")


def check_one_process() -> None:
    """Refuse a run of several processes, where a reducer of a trainer takes each for a rank of its own.

    Raises:
        PlanError: there are several.
    """
    if (number := num_processes() or 1) > 1:
        raise PlanError(
            f"all ranks are gone through in one process, and {number} processes of torch.distributed run: call this before "
            "init_process_group, or in a program of its own"
        )


class Truth:
    """The token losses of all samples, and what the reference makes of them.

    Arrays about tokens are [n + 1]: the n tokens of all samples one behind the other, and one entry for all positions that
    no token follows (the last of each sequence, and padding).

    Args:
        rollouts: the samples.
        divisor: L of ``constant``.
        empty: as for :func:`rollpack.plan`.
    """

    def __init__(self, rollouts: Rollouts, divisor: float | None, empty: str) -> None:
        self.rollouts = rollouts
        self.starts = rollouts.starts
        self.losses: Floats = np.append(token_losses(rollouts.lengths), 1.0)
        self._arguments: dict[str, Any] = {"divisor": divisor, "empty": empty}
        self._gradients: dict[str, Floats] = {}

    def loss(self, mode: str) -> float:
        """The step loss."""
        r = self.rollouts
        losses = r.split(self.losses[:-1])
        return _reference.step_loss(mode, losses, r.masks, r.rollouts, r.groups, **self._arguments)

    def gradient(self, mode: str) -> Floats:
        """[n + 1], the derivative of the step loss with respect to each token's loss."""
        if mode not in self._gradients:
            r = self.rollouts
            parts = _reference.step_gradient(mode, r.masks, r.rollouts, r.groups, **self._arguments)
            self._gradients[mode] = np.concatenate([*parts, [0.0]])
        return self._gradients[mode]

    def tokens(self, micro_batch: MicroBatch[Any]) -> npt.NDArray[np.int64]:
        """[T], the token that each position of a packed micro-batch speaks of: the one after it."""
        none = len(self.losses) - 1
        if micro_batch.is_placeholder:
            return np.full(len(micro_batch.tokens), none)
        rows = micro_batch.rows[micro_batch.segment_ids]
        position = micro_batch.position_ids.astype(np.int64) + 1
        known = (micro_batch.segment_ids >= 0) & (position < self.rollouts.lengths[rows])
        return np.where(known, self.starts[rows] + position, none)


class Observed:
    """The summed loss of micro-batches, and its derivative with respect to each token's loss, [n + 1]."""

    def __init__(self, num_tokens: int) -> None:
        self.loss = 0.0
        self.gradient: Floats = np.zeros(num_tokens + 1)

    def add(self, loss: float, gradient: torch.Tensor, tokens: npt.NDArray[np.int64]) -> None:
        """Take in the loss of a micro-batch and its gradient [T] with respect to the losses of these tokens [T]."""
        self.loss += loss
        np.add.at(self.gradient, tokens, gradient.double().numpy())
