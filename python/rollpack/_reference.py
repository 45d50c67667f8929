"""What every mode means, in plain float64. The oracle of the tests, and the first file to read.

A step is a list of samples. Sample i has token losses ``losses[i]`` and a mask ``masks[i]`` of the same length, and
belongs to rollout ``rollouts[i]`` and prompt group ``groups[i]``. Nothing here knows of micro-batches or ranks.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from math import fsum

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
Ids = Sequence[Hashable]


def step_loss(
    loss_aggregation: str,
    losses: Sequence[Floats],
    masks: Sequence[Mask],
    rollouts: Ids,
    groups: Ids | None = None,
    *,
    divisor: float | None = None,
    empty: str = "count",
) -> float:
    """The loss of a step."""
    total = [float(np.sum(x[m], dtype=np.float64)) for x, m in zip(losses, masks, strict=True)]  # Σ m x of each sample
    trained = [int(m.sum()) for m in masks]
    match loss_aggregation:
        case "sample_mean":  # (1/N) Σ_r ( Σ_{t in r} m x / M_r )
            return _mean_of_means(total, trained, rollouts, empty)
        case "prompt_mean":  # (1/P) Σ_g ( Σ_{t in g} m x / M_g )
            assert groups is not None
            return _mean_of_means(total, trained, groups, empty)
        case "token_mean":  # Σ m x / T
            return fsum(total) / sum(trained) if any(trained) else 0.0
        case "constant":  # Σ m x / (L N)
            assert divisor is not None
            return fsum(total) / (divisor * _count(trained, rollouts, empty)) if any(trained) else 0.0
    raise ValueError(loss_aggregation)


def step_gradient(
    loss_aggregation: str,
    masks: Sequence[Mask],
    rollouts: Ids,
    groups: Ids | None = None,
    *,
    divisor: float | None = None,
    empty: str = "count",
) -> list[Floats]:
    """The derivative of the step loss with respect to each token loss: what stands before x in the formulas above."""
    trained = [int(m.sum()) for m in masks]
    units = groups if loss_aggregation == "prompt_mean" and groups is not None else rollouts
    tokens, count = _sums(trained, units), _count(trained, units, empty)
    weights = []
    for unit in units:
        denominator: float = {
            "sample_mean": count * tokens[unit],
            "prompt_mean": count * tokens[unit],
            "token_mean": sum(trained),
            "constant": (divisor or 0.0) * count,
        }[loss_aggregation]
        weights.append(1.0 / denominator if denominator else 0.0)
    return [np.where(m, w, 0.0) for m, w in zip(masks, weights, strict=True)]


def _mean_of_means(total: Sequence[float], trained: Sequence[int], units: Ids, empty: str) -> float:
    sums, tokens, count = _sums(total, units), _sums(trained, units), _count(trained, units, empty)
    return fsum(sums[u] / tokens[u] for u in sums if tokens[u]) / count if count else 0.0


def _sums(values: Sequence[float], units: Ids) -> dict[Hashable, float]:
    sums: dict[Hashable, float] = {}
    for value, unit in zip(values, units, strict=True):
        sums[unit] = sums.get(unit, 0) + value
    return sums


def _count(trained: Sequence[int], units: Ids, empty: str) -> int:
    """How many rollouts or groups the mean is over. ``empty="skip"`` leaves out those without a trained token."""
    return sum(1 for tokens in _sums(trained, units).values() if tokens or empty == "count")
