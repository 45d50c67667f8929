"""What a formula makes every token weigh, worked out over all positions of all ranks at once, in numpy.

A reducer is described by a :class:`Formula`: which positions are added up, what their sum is divided by, what of that is
counted within a micro-batch or rank only, and which factor of K, D and C is left over.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rollpack.packing import MicroBatch
from rollpack.testing.truth import Floats, Truth

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Formula:
    """How much a token weighs: 1 / (measure of its unit × number of units), times what is left over.

    Attributes:
        unit: what a mean is over: ``row``, ``rollout``, ``group``, ``chunk`` (so many rows of a micro-batch) or ``step``.
        measure: what of a unit is counted: a name of :attr:`Layout.measures`, ``selected``, ``divisor`` or ``one``.
        nested: multiplied by how many of these (``row``, ``rollout``) are in the prompt group.
        count: units of which kind are counted; None: their means are added up.
        per: the count is divided by this, rounded down if ``floor``.
        floor: see ``per``.
        empties: units without a trained token ``count``, or not (``skip``); or ``placeholders`` count besides.
        select: a name of :attr:`Layout.selects`.
        measure_scope: within what the measure is taken: letters of ``d``, ``k``, ``c`` for a rank, micro-batch, cp rank.
        count_scope: within what units are counted; the loss is then averaged over these.
        keep: a name of :attr:`Layout.kept`.
        scale: exponents of K, D and C.
    """

    unit: str
    measure: str
    count: str | None
    nested: str = ""
    per: float = 1.0
    floor: bool = False
    empties: str = "count"
    select: str = "trained"
    measure_scope: str = ""
    count_scope: str = ""
    keep: str = "all"
    scale: tuple[int, int, int] = (0, 0, 0)


MODES: dict[str, dict[str, Any]] = {
    "sample_mean": {"unit": "rollout", "measure": "trained", "count": "rollout"},
    "prompt_mean": {"unit": "group", "measure": "trained", "count": "group"},
    "token_mean": {"unit": "step", "measure": "trained", "count": None},
    "constant": {"unit": "step", "measure": "divisor", "count": "rollout"},
}


def right_formula(mode: str, empty: str) -> Formula:
    """What the mode means."""
    return Formula(**MODES[mode], empties=empty)


class Layout:
    """Every position of every rank of one cut, and every sample of every micro-batch (an entry), as flat arrays.

    Attributes:
        tokens: [T] the token that each position speaks of, n where there is none.
        entries: [T] the entry that each position is in; padding belongs to the one before it.
        selects: [T] bool by name: which positions may be added up.
        kept: [T] bool by name.
        measures: [E] by name: how much of each entry there is.
        sizes: K, D, C by the letter of their dimension.
    """

    def __init__(self, ranks: list[list[MicroBatch[Any]]], truth: Truth, divisor: float | None, group_size: int) -> None:
        self.divisor = divisor
        self.num_tokens = len(truth.losses)
        parts = [_Part(mb, truth, group_size, mb is rank[-1]) for rank in ranks for mb in rank]
        first = ranks[0][0]
        self.sizes = {"k": len(ranks[0]), "d": first.dp_size, "c": first.cp_size}
        offsets = np.cumsum([0, *(len(part.ids["row"]) for part in parts)])
        self.entries = np.concatenate([part.entries + at for part, at in zip(parts, offsets, strict=False)])
        self.tokens = np.concatenate([part.tokens for part in parts])
        self.selects = _joined([part.selects for part in parts])
        self.kept = _joined([part.kept for part in parts])
        self.measures = _joined([part.measures for part in parts])
        self._ids = _joined([part.ids for part in parts])
        self._placeholder = self._ids["row"] < 0
        # No placeholder shares a unit with another.
        for ids in self._ids.values():
            ids[self._placeholder] = ids.max() + 1 + np.flatnonzero(self._placeholder)
        self._ids |= {"step": np.zeros_like(self._ids["row"])}
        # A chunk is of one micro-batch, and the same one on all its cp ranks.
        self._ids["chunk"] = self._key("chunk", "dk")
        self._keys: dict[tuple[str, str], Ints] = {}

    def weights(self, formula: Formula) -> Floats:
        """[n + 1], what each token weighs, summed over all positions that speak of it."""
        f = formula
        select = self.selects[f.select]
        per_unit = self._measure(f, select)
        number = np.ones(1)
        scope = f.measure_scope
        if f.count is not None:
            number, scope = self._number(f.count, f.count_scope, f.empties), f.count_scope
            number = np.floor(number / f.per) if f.floor else number / f.per
        if f.nested:
            per_unit = per_unit * self._number(f.nested, "", "count", within="group")
        denominator = per_unit * number
        per_entry = np.divide(1.0, denominator, out=np.zeros_like(denominator), where=denominator > 0)
        for size, exponent in zip(self.sizes.values(), f.scale, strict=True):
            per_entry = per_entry * float(size) ** exponent
        for letter in scope:
            per_entry = per_entry / self.sizes[letter]
        per_entry = np.broadcast_to(per_entry, len(self._placeholder))
        weights = np.where(select & self.kept[f.keep], per_entry[self.entries], 0.0)
        return _summed(self.tokens, weights, self.num_tokens)

    def _measure(self, f: Formula, select: npt.NDArray[np.bool_]) -> Floats:
        if f.measure in {"divisor", "one"}:
            return np.array([1.0 if f.measure == "one" else float(self.divisor or 0.0)])
        of_entry = self.measures.get(f.measure)
        if of_entry is None:
            of_entry = _summed(self.entries, select, len(self._placeholder))
        keys = self._key(f.unit, f.measure_scope)
        return _summed(keys, of_entry)[keys]

    def _number(self, unit: str, scope: str, empties: str, within: str = "step") -> Floats:
        """[E], how many units there are in the scope that each entry is in."""
        units, scopes = self._key(unit, scope, within), self._key(within, scope)
        counted = np.ones(len(units), bool) if empties == "placeholders" else ~self._placeholder
        if empties == "skip":
            counted &= np.bincount(units, self.measures["trained"])[units] > 0
        _, firsts = np.unique(np.where(counted, units, -1), return_index=True)
        firsts = firsts[counted[firsts]]
        return np.bincount(scopes[firsts], minlength=int(scopes.max()) + 1)[scopes].astype(np.float64)

    def _key(self, unit: str, scope: str, within: str = "step") -> Ints:
        """[E], a number for each combination of unit and scope, from 0."""
        key = self._ids[unit] * (int(self._ids[within].max()) + 1) + self._ids[within]
        for letter in scope:
            key = key * self.sizes[letter] + self._ids[letter]
        inverse: Ints = np.unique(key, return_inverse=True)[1]
        return inverse


class _Part:
    """The arrays of :class:`Layout` for one micro-batch."""

    def __init__(self, micro_batch: MicroBatch[Any], truth: Truth, group_size: int, is_last: bool) -> None:
        mb = micro_batch
        rollouts = truth.rollouts
        samples = len(mb.rows)
        self.tokens = truth.tokens(mb)
        padding = mb.segment_ids < 0
        # Padding lies behind the sequence that it belongs to, unless a rank begins with it.
        self.entries = np.maximum.accumulate(mb.segment_ids).clip(min=0).astype(np.int64)
        lengths = rollouts.lengths[mb.rows]
        responses = np.nan_to_num(mb.sample_columns["response_length"]).astype(np.int64)
        follows = self.tokens < len(truth.losses) - 1
        at = mb.position_ids + 1
        response = follows & (at >= (lengths - responses)[self.entries])
        mask = mb.loss_mask
        self.selects = {
            "trained": mask,
            "later": np.roll(mask, 1),
            "earlier": np.roll(mask, -1),
            "response": response,
            "sequence": follows,
            "tokens": ~padding & (not mb.is_placeholder),
            "positions": np.ones_like(mask),
            "but the last": mask & (at < (lengths - 1)[self.entries]),
            "but the first": mask & (at > (lengths - responses)[self.entries]),
        }
        everything = np.ones_like(mask)
        self.kept = {
            "all": everything,
            "last": everything & is_last,
            "first": everything & (mb.index == 0),
            "rank": everything & (mb.dp_rank == mb.cp_rank == 0),
            "dp rank": everything & (mb.dp_rank == 0),
            "cp rank": everything & (mb.cp_rank == 0),
        }

        def per_sample(chosen: npt.NDArray[np.bool_]) -> Floats:
            return _summed(self.entries, chosen, samples)

        trained, local = per_sample(mask), per_sample(~padding)
        widths = {
            "width": float(local.max()),
            "width with padding": float(per_sample(everything).max()),
            "width of max_seqlen": mb.max_seqlen / mb.cp_size,
            "width of responses": float(per_sample(response).max()),
            "width of true lengths": float(lengths.max()) / mb.cp_size,
            "width of response lengths": float(responses.max()) / mb.cp_size,
        }
        self.measures = {
            "trained": trained,
            "clamped": np.maximum(trained, 1.0),
            "clamped over cp": np.maximum(mb.mask_sums, 1.0) / mb.cp_size,
            "clamped but for placeholders": np.maximum(mb.mask_sums, float(not mb.is_placeholder)) / mb.cp_size,
            "response": per_sample(response),
            "sequence": per_sample(follows),
            "tokens": local,
            "positions": per_sample(everything),
            **{name: np.full(samples, width) for name, width in widths.items()},
        }
        group, rollout = (
            np.nan_to_num(mb.sample_columns[name], nan=0.0).astype(np.int64) for name in ("group_index", "rollout_id")
        )
        self.ids = {
            "row": mb.rows.astype(np.int64),
            "rollout": rollout,
            "group": group,
            "chunk": np.arange(samples) // group_size,
            "d": np.full(samples, mb.dp_rank),
            "k": np.full(samples, mb.index),
            "c": np.full(samples, mb.cp_rank),
        }


def _summed(keys: Ints, values: npt.NDArray[Any], size: int = 0) -> Floats:
    """[max(size, largest key + 1)], the sum of the values of each key."""
    return np.bincount(keys, values, minlength=size).astype(np.float64)


def _joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
