"""The numbers of a report that neither an inspection nor a plan has: histograms, and who weighs how much in the loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rollpack._errors import RollpackError
from rollpack.names import OURS
from rollpack.planning import plan
from rollpack.plans import Plan
from rollpack.summary import Summary

#: The most bars of a histogram.
_BARS = 40
#: The most bins of rollouts by their trained tokens.
_BINS = 24
#: Groups that are named.
_NAMED = 10

_Floats = npt.NDArray[np.float64]
_Ints = npt.NDArray[np.int64]


def histogram(values: _Ints) -> dict[str, list[int]]:
    """Integers counted in at most 40 bins of one width: ``counts[i]`` are in [``edges[i]``, ``edges[i + 1]``)."""
    low, high = int(values.min()), int(values.max())
    width = -(-(high - low + 1) // _BARS)
    counts = np.bincount((values - low) // width)
    return {"edges": [low + width * i for i in range(len(counts) + 1)], "counts": counts.tolist()}


def histograms(summary: Summary) -> dict[str, dict[str, list[int]] | None]:
    """Of tokens and trained tokens a sample, of samples a rollout and of rollouts a group (None without groups)."""
    units = _Units.of(summary)
    return {
        "total_length": histogram(summary.column("total_length")),
        "mask_sum": histogram(summary.column("mask_sum")),
        "fan_out": histogram(np.bincount(units.rollouts)),
        "group_size": None if units.groups is None else histogram(np.bincount(units.group_of_rollout)),
    }


def weights(summary: Summary, made: Plan | None, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """How the loss is spread over rollouts, groups and tokens, under each mode.

    A sample's mass is its weight times its mask sum, and a share is a mass over that of all steps.

    Args:
        summary: the samples, with groups where there are any.
        made: the plan, if there is one.
        arguments: those of :func:`rollpack.plan` that were given; what makes up steps and counts is taken from them.

    Returns:
        ``modes`` has for each mode that is possible: ``longest_tenth``, the share of the tenth of the rollouts with the
        longest responses; ``curve``, the share of the longest 0, 1, ... 100 % of them; ``token``, the weight of a trained
        token over the mean of all, its least, largest and percentiles; ``by_length``, the same mean for the bins
        ``trained_edges`` of rollouts by their trained tokens (None where a bin has none); and where there are groups
        ``largest_group``, ``largest_tenth_of_groups`` and ``group_curve``. ``why_not`` has the reason for each that is not.
    """
    divisor = arguments.get("divisor") if made is None else made.settings.divisor
    longest = float(max(1, summary.column("response_length").max()))
    found, why_not = _masses(summary, made, arguments, longest if divisor is None else divisor)
    units = _Units.of(summary)
    edges = _edges(units.sum(summary.column("mask_sum")))
    return {
        "divisor": longest if divisor is None else divisor,
        "divisor_given": divisor is not None,
        "rollouts_in_tenth": -(-units.num_rollouts // 10),
        "groups_in_tenth": None if units.groups is None else -(-units.num_groups // 10),
        "trained_edges": edges.tolist(),
        "modes": {mode: _shares(mass, summary, units, edges) for mode, mass in found.items()},
        "why_not": why_not,
        "groups": None if units.groups is None else _named_groups(found, summary, units),
    }


class _Units(NamedTuple):
    """Which rollout and which group (None without groups) each sample is of, from 0."""

    rollouts: _Ints
    groups: _Ints | None

    @classmethod
    def of(cls, summary: Summary) -> _Units:
        placed = _placed(summary, "prompt_mean" if summary.groups else "sample_mean", {})
        return cls(placed["rollout_index"], placed.get("prompt_index"))

    @property
    def num_rollouts(self) -> int:
        return int(self.rollouts.max()) + 1

    @property
    def num_groups(self) -> int:
        return 0 if self.groups is None else int(self.groups.max()) + 1

    @property
    def group_of_rollout(self) -> _Ints:
        assert self.groups is not None
        return self.groups[np.unique(self.rollouts, return_index=True)[1]]

    def sum(self, values: npt.NDArray[Any]) -> _Floats:
        """[rollouts]: the sum over the samples of each."""
        return np.bincount(self.rollouts, weights=values).astype(np.float64, copy=False)


def _placed(summary: Summary, mode: str, arguments: Mapping[str, Any]) -> dict[str, npt.NDArray[Any]]:
    """What a plan under a mode says of each sample that is in it, in the order of the rows."""
    return _columns(plan(summary, loss_aggregation=mode, micro_batch_size=1, **arguments))


def _columns(made: Plan) -> dict[str, npt.NDArray[Any]]:
    batch: pa.RecordBatch = made._placements
    order = made.inverse
    return {name: batch.column(name).to_numpy()[order] for name in batch.schema.names}


def _masses(
    summary: Summary, made: Plan | None, arguments: Mapping[str, Any], divisor: float
) -> tuple[dict[str, _Floats], dict[str, str]]:
    """[samples] under each mode, 0 where a sample was dropped; or why not."""
    steps = {
        name: arguments[name]
        for name in ("empty", "global_batch_size", "prompts_per_step", "remainder")
        if name in arguments
    }
    chosen = () if made is None or made.settings.loss_aggregation in OURS else (made.settings.loss_aggregation,)
    masses, why_not = {}, {}
    for mode in (*OURS, *chosen):
        try:
            if mode == "prompt_mean" and not summary.groups:
                raise RollpackError("there is no group column")
            options = steps | ({"divisor": divisor} if mode == "constant" else {})
            # Other modes' weights depend on the cut.
            placed = _columns(made) if made is not None and mode in chosen else _placed(summary, mode, options)
            mass = np.zeros(len(summary))
            at = np.searchsorted(summary.column("row"), placed["row"])
            mass[at] = placed["sample_weight"] * placed["mask_sum"]
            if not mass.any():
                raise RollpackError("no token is trained")
            masses[mode] = mass / mass.sum()
        except RollpackError as error:
            why_not[mode] = str(error)
    return masses, why_not


def _shares(mass: _Floats, summary: Summary, units: _Units, edges: _Ints) -> dict[str, Any]:
    """``mass``: [samples], 1 in all."""
    trained = summary.column("mask_sum")
    of_rollout, response = units.sum(mass), units.sum(summary.column("response_length"))
    descending = of_rollout[np.argsort(-response, kind="stable")]
    tokens = units.sum(trained)
    in_bin = np.digitize(tokens, edges) - 1
    has = tokens > 0
    masses, counts = (np.bincount(in_bin[has], weights=x[has], minlength=len(edges) - 1) for x in (of_rollout, tokens))
    relative = masses / np.maximum(counts, 1) * trained.sum()
    shares: dict[str, Any] = {
        "longest_tenth": float(descending[: -(-len(descending) // 10)].sum()),
        "curve": _curve(descending),
        "token": _token_weights(mass, trained),
        "by_length": [float(x) if count else None for x, count in zip(relative, counts, strict=True)],
        "largest_group": None,
        "largest_tenth_of_groups": None,
        "group_curve": None,
    }
    if units.groups is not None:
        of_group = np.sort(np.bincount(units.groups, weights=mass).astype(np.float64))[::-1]
        shares["largest_group"] = float(of_group[0])
        shares["largest_tenth_of_groups"] = float(of_group[: -(-len(of_group) // 10)].sum())
        shares["group_curve"] = _curve(of_group)
    return shares


def _curve(shares: _Floats) -> list[float]:
    """The share of the first 0, 1, ... 100 % of them together, in between interpolated."""
    sums = np.concatenate([[0.0], np.cumsum(shares)])
    levels: list[float] = np.interp(np.linspace(0, len(shares), 101), np.arange(len(shares) + 1), sums).tolist()
    return levels


def _token_weights(mass: _Floats, trained: _Ints) -> dict[str, float]:
    """How trained tokens' weights are spread, over their mean. Percentiles are values that occur."""
    has = trained > 0
    weight, count = mass[has] / trained[has] * trained.sum(), trained[has]
    order = np.argsort(weight, kind="stable")
    weight, reached = weight[order], np.cumsum(count[order])
    levels = {"min": 0.0, "p10": 0.1, "p50": 0.5, "p90": 0.9, "max": 1.0}
    at = np.searchsorted(reached, [level * reached[-1] for level in levels.values()])
    return dict(zip(levels, weight[at].tolist(), strict=True))


def _edges(tokens: _Floats) -> _Ints:
    """Bounds of at most 24 bins, each as many times as wide as the one before, of the numbers above 0."""
    some = tokens[tokens > 0]
    low, high = (int(some.min()), int(some.max())) if len(some) else (1, 1)
    return np.unique(np.round(np.geomspace(low, high + 1, _BINS + 1)).astype(np.int64))


def _named_groups(masses: Mapping[str, _Floats], summary: Summary, units: _Units) -> list[dict[str, Any]]:
    """The groups with the largest shares under any mode."""
    assert units.groups is not None
    shares = {mode: np.bincount(units.groups, weights=mass) for mode, mass in masses.items()}
    if not shares:
        return []
    largest: _Floats = np.maximum.reduce(list(shares.values()))
    first = np.unique(units.groups, return_index=True)[1]
    rollouts = np.bincount(units.group_of_rollout)
    trained = np.bincount(units.groups, weights=summary.column("mask_sum")).astype(np.int64)
    ids = pa.table(summary)["group_index"]
    return [
        {
            "group": _plain(ids[int(first[group])].as_py()),
            "rollouts": int(rollouts[group]),
            "trained_tokens": int(trained[group]),
            "share": {mode: float(share[group]) for mode, share in shares.items()},
        }
        for group in np.argsort(-largest, kind="stable")[:_NAMED]
    ]


def _plain(value: Any) -> int | str:
    """An id as JSON can hold it."""
    return value if isinstance(value, int | str) else repr(value)
