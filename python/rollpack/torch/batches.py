"""Micro-batches as torch tensors."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch

from rollpack.packing import MicroBatch
from rollpack.torch.weights import mode_weights

#: These stay int32, as varlen attention kernels take them.
_STAY_INT32 = frozenset({"cu_seqlens", "cu_seqlens_padded"})


def to_device(micro_batch: MicroBatch[Any], device: str | torch.device) -> MicroBatch[torch.Tensor]:
    """What :meth:`rollpack.MicroBatch.to` does."""
    if not micro_batch.mode_weights:
        micro_batch = dataclasses.replace(micro_batch, mode_weights=_mode_weights(micro_batch))
    changed: dict[str, Any] = {}
    for field in dataclasses.fields(micro_batch):
        value = getattr(micro_batch, field.name)
        widen = field.name not in _STAY_INT32
        if isinstance(value, np.ndarray | torch.Tensor):
            changed[field.name] = _tensor(value, device, widen=widen)
        elif isinstance(value, dict):
            changed[field.name] = {name: _tensor(array, device, widen=widen) for name, array in value.items()}
    moved: MicroBatch[torch.Tensor] = dataclasses.replace(micro_batch, **changed)
    return moved


def _mode_weights(micro_batch: MicroBatch[Any]) -> dict[str, Any]:
    """The weights of the modes that need no more than a micro-batch has, but for its own."""
    modes = {"sample_mean", "token_mean"} | ({"prompt_mean"} if micro_batch.prompt_mask_sums is not None else set())
    return {mode: mode_weights(micro_batch, mode) for mode in sorted(modes - {micro_batch.loss_aggregation})}


def as_tensor(value: Any, device: str | torch.device) -> torch.Tensor:
    """An array or tensor as a tensor on ``device``, without a copy where there need be none."""
    if isinstance(value, np.ndarray):
        # torch warns of memory that it may not write to, such as that of a mapped file.
        value = torch.from_numpy(value if value.flags.writeable else value.copy())
    moved: torch.Tensor = value.to(device)
    return moved


def _tensor(value: Any, device: str | torch.device, *, widen: bool) -> torch.Tensor:
    # int32 travels, and is widened where it arrives.
    moved = as_tensor(value, device)
    return moved.to(torch.int64) if widen and moved.dtype == torch.int32 else moved
