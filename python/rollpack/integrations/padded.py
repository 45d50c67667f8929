"""What the adapters for trainers with padded rows share: the weight of each row of a batch, and tables of its lengths."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from rollpack._errors import PlanError, RollpackError
from rollpack._text import counted
from rollpack.names import resolve
from rollpack.planning import plan
from rollpack.torch.weights import token_weights

#: [B] of numbers, text or tuples of one of these, as a tensor, an array or a list.
Ids = torch.Tensor | npt.NDArray[Any] | Sequence[Hashable]


def row_weights(
    mask_sums: Ids,
    loss_aggregation: str,
    *,
    rollout_ids: Ids | None = None,
    prompt_ids: Ids | None = None,
    steps: Ids | None = None,
    divisor: float | None = None,
    empty: str = "count",
) -> torch.Tensor:
    """The weight of each row's trained tokens, as :func:`rollpack.plan` gives it: Σ weight × mask × loss is the step loss.

    Args:
        mask_sums: [B], trained tokens of each row, of all rows of the step (or steps) over all ranks and micro-batches.
        loss_aggregation: a mode of ours, or another trainer's name.
        rollout_ids: [B], which rollout each row belongs to; None: each is its own.
        prompt_ids: [B], which prompt group; for ``prompt_mean``.
        steps: [B], which optimizer step each row is in; None: all are in one.
        divisor: L of ``constant``.
        empty: whether units without a trained token count in the mean (``count``) or not (``skip``).

    Returns:
        [B] float64 on the CPU.

    Raises:
        PlanError: as for :func:`rollpack.plan`, a rollout or group is cut over steps, or the mode is a mean of
            micro-batches.
    """
    if resolve(loss_aggregation, divisor, empty)[0] == "token_mean_legacy":
        raise PlanError(f"{loss_aggregation} depends on the trainer's micro-batches, which these rows do not tell")
    sums = _host(mask_sums)
    if sums.dtype.kind not in "iub":
        raise RollpackError(f"mask_sums is {sums.dtype}; trained tokens are counted in integers")
    sums = sums.astype(np.int64)
    columns = {"rollout_id": rollout_ids, "group_index": prompt_ids}
    if prompt_ids is None and resolve(loss_aggregation, divisor, empty)[0] == "prompt_mean":
        raise PlanError(f"{loss_aggregation} is a mean of prompts, and nothing says which rows are of one: pass their ids")
    ids = {name: _numbered(given) for name, given in columns.items() if given is not None}
    for name, given in ids.items():
        if len(given) != len(sums):
            raise RollpackError(f"there are {len(given)} of {name} for {counted(len(sums), 'row')}")
    at = np.zeros(len(sums), np.int64) if steps is None else np.unique(_host(steps), return_inverse=True)[1]
    if prompt_ids is not None and resolve(loss_aggregation, divisor, empty)[0] == "prompt_mean":
        _refuse_cut("prompt group", prompt_ids, ids["group_index"], at)
    if rollout_ids is not None:
        _refuse_cut("rollout", rollout_ids, ids["rollout_id"], at)
    weights = np.zeros(len(sums))
    for step in range(int(at.max(initial=-1)) + 1):
        (rows,) = np.nonzero(at == step)
        table = lengths_table(sums[rows] + 1)
        for name, given in ids.items():
            table = table.append_column(name, pa.array(given[rows]))
        planned = plan(
            table, loss_aggregation=loss_aggregation, divisor=divisor, empty=empty, micro_batch_size=len(rows)
        ).to_arrow()
        weights[rows[planned["row"].to_numpy()]] = planned["sample_weight"].to_numpy()
    return torch.from_numpy(weights)


def padded_token_weights(loss_mask: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """[B * W] on the device of the mask: the weight of each position of padded rows, flattened, float64.

    Args:
        loss_mask: [B, W], 1 where a token is trained.
        weights: [B], of each row.
    """
    rows = torch.arange(len(loss_mask), device=loss_mask.device).repeat_interleave(loss_mask.shape[1])
    return token_weights(loss_mask.reshape(-1).bool(), rows, weights.to(loss_mask.device, torch.float64))


def lengths_table(lengths: npt.NDArray[np.int64]) -> pa.Table:
    """A table for :func:`rollpack.plan` of rows of these lengths, all but the first token trained; tokens mean nothing."""
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int64())
    tokens = pa.LargeListArray.from_arrays(offsets, pa.array(np.zeros(int(lengths.sum()), np.int8)))
    return pa.table({"tokens": tokens, "response_length": (lengths - 1).clip(min=0)})


def _numbered(ids: Ids) -> npt.NDArray[np.int64]:
    """Which unit each row is of. What Python tells apart, such as 1 and "1", are two; a tuple is one id."""
    values = ids.tolist() if isinstance(ids, torch.Tensor | np.ndarray) else ids
    known: dict[Hashable, int] = {}
    keys = (tuple(value) if isinstance(value, list) else value for value in values)
    return np.array([known.setdefault(key, len(known)) for key in keys], np.int64)


def _host(values: Any) -> npt.NDArray[Any]:
    return values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)


def _refuse_cut(what: str, ids: Ids, units: npt.NDArray[np.int64], steps: npt.NDArray[np.int64]) -> None:
    """A mean over what two steps share is of neither."""
    first = np.full(len(units), -1)
    first[units[::-1]] = steps[::-1]
    cut = np.flatnonzero(first[units] != steps)
    if len(cut):
        row = int(cut[0])
        raise PlanError(
            f"{what} {ids[row]} is cut: row {row} is in step {steps[row]}, and others of it in step {first[units[row]]}. "
            "Order the rows so that whole ones are in a step"
        )
