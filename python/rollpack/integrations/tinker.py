"""Tinker (tried with tinker 0.38.0 and tinker-cookbook 0.6.1): Datum lists whose plain sums are any mode."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rollpack._errors import DataError
from rollpack.integrations.padded import Ids, row_weights
from rollpack.integrations.skyrl import logged_loss
from rollpack.torch.weights import scale_advantages as scale

#: Losses that are proportional to a factor on the advantages (or weights) of a datum.
_PROPORTIONAL = frozenset({"cross_entropy", "importance_sampling", "ppo", "cispo"})


def scale_advantages(
    data: Sequence[Any],
    loss_aggregation: str,
    *,
    loss_fn: str = "importance_sampling",
    rollout_ids: Ids | None = None,
    prompt_ids: Ids | None = None,
    divisor: float | None = None,
    empty: str = "count",
) -> list[Any]:
    """Data for ``forward_backward`` whose summed loss, over all calls before an ``optim_step``, is the step loss.

    Args:
        data: the ``tinker.Datum`` of one optimizer step. ``loss_fn_inputs["mask"]`` says what is trained, as the cookbook
            has it (it takes it out before it sends them); for ``cross_entropy``, the ``weights`` other than 0 do.
        loss_aggregation: a mode of ours, or another trainer's name.
        loss_fn: what they are for: ``cross_entropy`` has its ``weights`` scaled, the others their ``advantages``. A warning
            where the loss is not proportional to them.
        rollout_ids: one a datum, which rollout it belongs to (``group_idx, traj_idx`` of the cookbook); None: each its own.
        prompt_ids: one a datum (``group_idx``), for ``prompt_mean``.
        divisor: L of ``constant``.
        empty: as for :func:`rollpack.plan`.

    Returns:
        New data, the given ones untouched. Advantages are float32, as Tinker takes them, and 0 where nothing is trained.

    Raises:
        DataError: a datum has no mask, or none of its length.
        PlanError: as for :func:`rollpack.plan`.
    """
    if loss_fn not in _PROPORTIONAL:
        warnings.warn(
            f"loss_fn {loss_fn!r} is not known to be proportional to the advantages (dro is not), and scaling them not to "
            "scale it",
            stacklevel=2,
        )
    scaled = "weights" if loss_fn == "cross_entropy" else "advantages"
    values = [_array(datum, row, scaled) for row, datum in enumerate(data)]
    masks = []
    for row, datum in enumerate(data):
        named = "mask" if "mask" in datum.loss_fn_inputs or scaled == "advantages" else scaled
        mask = _array(datum, row, named) != 0
        if mask.shape != values[row].shape:
            raise DataError(f"it has shape {mask.shape}, and {scaled} {values[row].shape}", named, row)
        masks.append(mask)
    sums = np.array([mask.sum() for mask in masks])
    weights = row_weights(
        sums, loss_aggregation, rollout_ids=rollout_ids, prompt_ids=prompt_ids, divisor=divisor, empty=empty
    )
    out = []
    for datum, value, mask, weight in zip(data, values, masks, weights, strict=True):
        of_tokens = torch.from_numpy(mask) * weight
        changed = scale(torch.from_numpy(value).double(), of_tokens).float().numpy()
        tensor = type(datum.loss_fn_inputs[scaled]).from_numpy(changed)
        out.append(replace(datum, loss_fn_inputs={**datum.loss_fn_inputs, scaled: tensor}))
    return out


def logged(steps: Sequence[Sequence[Any]]) -> float:
    """The loss to log, from the results of ``forward_backward``: for each optimizer step those of its calls."""
    return logged_loss([[result.metrics["loss:sum"] for result in step] for step in steps])


def _array(datum: Any, row: int, name: str) -> npt.NDArray[Any]:
    if name not in datum.loss_fn_inputs:
        raise DataError(f"this datum has no {name!r} in its loss_fn_inputs", name, row)
    array: npt.NDArray[Any] = datum.loss_fn_inputs[name].to_numpy()
    return array
