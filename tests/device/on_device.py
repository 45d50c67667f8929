"""A pytest plugin, ``-p tests.device.on_device``: all that is reduced is reduced on the device ROLLPACK_DEVICE."""

from __future__ import annotations

import os
from typing import Any

import torch

from rollpack.packing import MicroBatch
from rollpack.torch import LossReducer

DEVICE = torch.device(os.environ["ROLLPACK_DEVICE"])
_reduce = LossReducer._reduce


def _on_device(self: LossReducer, token_loss: Any, micro_batch: Any, mode: str | None, mask: Any) -> Any:
    """What a test has elsewhere stays there, and what it passes that is wrong goes on as it is."""
    known = isinstance(token_loss, torch.Tensor) and isinstance(micro_batch, MicroBatch)
    if not known or not token_loss.is_cpu or not isinstance(mask, torch.Tensor | None):
        return _reduce(self, token_loss, micro_batch, mode, mask)
    there = token_loss.to(DEVICE), micro_batch.to(DEVICE)
    return _reduce(self, *there, mode, mask if mask is None else mask.to(DEVICE)).to(token_loss.device)


LossReducer._reduce = _on_device  # type: ignore[method-assign]
