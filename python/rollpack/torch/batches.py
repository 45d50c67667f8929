"""Micro-batches as torch tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from rollpack.packing import MicroBatch
from rollpack.torch.weights import mode_weights

#: These stay int32, as varlen attention kernels take them.
STAY_INT32 = frozenset({"cu_seqlens", "cu_seqlens_padded"})


def to_device(micro_batch: MicroBatch[Any], device: str | torch.device) -> MicroBatch[torch.Tensor]:
    """What :meth:`rollpack.MicroBatch.to` does."""

    def moved(name: str, value: Any) -> torch.Tensor:
        tensor = as_tensor(value, device)
        # int32 travels, and is widened where it arrives.
        return tensor.to(torch.int64) if name not in STAY_INT32 and tensor.dtype == torch.int32 else tensor

    return map_arrays(with_mode_weights(micro_batch), moved)


def map_arrays(micro_batch: MicroBatch[Any], change: Callable[[str, Any], Any]) -> MicroBatch[Any]:
    """The micro-batch with ``change(name of the field, array)`` in the place of each array or tensor."""
    changed: dict[str, Any] = {}
    for field in dataclasses.fields(micro_batch):
        value = getattr(micro_batch, field.name)
        if isinstance(value, np.ndarray | torch.Tensor):
            changed[field.name] = change(field.name, value)
        elif isinstance(value, dict):
            changed[field.name] = {name: change(field.name, array) for name, array in value.items()}
    return dataclasses.replace(micro_batch, **changed)


def with_mode_weights(micro_batch: MicroBatch[Any]) -> MicroBatch[Any]:
    """The micro-batch with ``mode_weights`` filled in."""
    return (
        micro_batch
        if micro_batch.mode_weights
        else dataclasses.replace(micro_batch, mode_weights=_mode_weights(micro_batch))
    )


def _mode_weights(micro_batch: MicroBatch[Any]) -> dict[str, Any]:
    """The weights of the modes that need no more than a micro-batch has, but for its own."""
    known = {
        "sample_mean": True,
        "prompt_mean": micro_batch.prompt_mask_sums is not None,
        "token_mean": micro_batch.num_tokens is not None,
    }
    modes = {mode for mode, is_known in known.items() if is_known}
    return {mode: mode_weights(micro_batch, mode) for mode in sorted(modes - {micro_batch.loss_aggregation})}


def as_tensor(value: Any, device: str | torch.device) -> torch.Tensor:
    """An array or tensor as a tensor on ``device``, without a copy where there need be none."""
    if isinstance(value, np.ndarray):
        # torch warns of memory that it may not write to, such as that of a mapped file.
        value = torch.from_numpy(value if value.flags.writeable else value.copy())
    moved: torch.Tensor = value.to(device)
    return moved
