"""A catalogue of the usual mistakes, each a change of the right formula, so that what was observed can be named."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollpack.testing.formulas import MODES, Formula, right_formula

MEAN_OF_MEANS = "mean of micro-batch means"
OF_THE_RANK = "denominators of the rank"
OF_THE_CP_RANK = "denominators of the cp rank"
OF_THE_MICRO_BATCH = "denominators of the micro-batch"
DP_SIZE = "dp-size dependence"
CP_TWICE = "cp counted twice"
CP_MISSING = "factor C missing"
K_MISSING = "factor K missing"
K_EXTRA = "factor K too much"
PER_ROW = "per-row instead of per-rollout mean"
PER_ROLLOUT = "mean of rollout means instead of all tokens of the prompt"
PHANTOM = "phantom tokens from clamping each row's count to 1"
GROUP_SIZE = "an assumed group size"
PADDED_WIDTH = "a divisor taken from the padded width"
SUM = "sum instead of mean"
CONSTANT = "a constant factor"
ASSUMED_NUMBER = "an assumed number of rollouts"
PLACEHOLDERS = "placeholders counted as rollouts"
SHIFTED = "mask shifted by one"
PROMPT = "prompt tokens counted"
RESPONSE = "untrained response tokens counted"
PADDING = "padding counted"
LAST_LEFT_OUT = "last token of each sequence left out"
ONE_MICRO_BATCH = "only one micro-batch of each rank counts"
ONE_RANK = "only one rank counts"
EMPTY = {"count": "empty rollouts not counted", "skip": "empty rollouts counted"}


@dataclass(frozen=True)
class Fault:
    """A change of the right formula, and what it is called.

    Attributes:
        causes: its names; several where it is several mistakes at once.
        change: attributes of :class:`Formula` with their values.
        parts: if it is several faults, these.
    """

    causes: tuple[str, ...]
    change: tuple[tuple[str, Any], ...]
    parts: tuple[Fault, ...] = ()

    def of(self, formula: Formula) -> Formula:
        """The formula with this fault."""
        return dataclasses.replace(formula, **dict(self.change))

    def __and__(self, other: Fault) -> Fault | None:
        """Both; None where one would undo the other."""
        if {name for name, _ in self.change} & {name for name, _ in other.change}:
            return None
        causes = tuple(dict.fromkeys(self.causes + other.causes))
        return Fault(causes, self.change + other.change, (self.parts or (self,)) + (other.parts or (other,)))


def single_faults(mode: str, empty: str, group_size: int) -> list[Fault]:
    """The catalogue for reducers that are meant to compute ``mode``, the likeliest first."""
    found: dict[tuple[tuple[str, Any], ...], Fault] = {}
    for causes, change in itertools.chain(
        _scopes(mode), _scales(), _units(mode, group_size), _measures(mode), _selections(mode), _rest(mode, empty)
    ):
        fault = Fault((causes,) if isinstance(causes, str) else causes, tuple(change.items()))
        if set(change) == {"scale"}:
            fault = dataclasses.replace(fault, parts=_scale_parts(fault))
        found.setdefault(fault.change, fault)
    right = right_formula(mode, empty)
    return [fault for fault in found.values() if fault.of(right) != right]


_Change = tuple[str | tuple[str, ...], dict[str, Any]]
_SCOPES = {
    "c": OF_THE_CP_RANK,
    "d": OF_THE_RANK,
    "dc": OF_THE_RANK,
    "k": MEAN_OF_MEANS,
    "dk": MEAN_OF_MEANS,
    "dkc": MEAN_OF_MEANS,
}


def _scopes(mode: str) -> Iterator[_Change]:
    """Denominators of less than the step: ``dk`` is a micro-batch over its cp ranks, ``dkc`` what one cp rank has of it."""
    for scope, cause in _SCOPES.items():
        if mode != "constant":
            yield cause, {"measure_scope": scope, "count_scope": scope if mode != "token_mean" else ""}
        if mode != "token_mean" and scope != "c":  # all cp ranks have the same samples
            yield cause, {"count_scope": scope}
    for scope, cause in _SCOPES.items():
        # As above, but added up and not averaged.
        own, scale = OF_THE_MICRO_BATCH if "k" in scope else cause, tuple(int(letter in scope) for letter in "kdc")
        if mode != "constant":
            yield own, {"measure_scope": scope, "count_scope": scope if mode != "token_mean" else "", "scale": scale}
        if mode != "token_mean" and scope != "c":
            yield own, {"count_scope": scope, "scale": scale}
        if mode in {"sample_mean", "prompt_mean"}:
            yield own, {"measure_scope": scope}
    if mode in {"sample_mean", "prompt_mean"}:
        for scope in ("dk", "k", "d"):
            yield (_SCOPES[scope], OF_THE_CP_RANK), {"measure_scope": scope + "c", "count_scope": scope}


def _scales() -> Iterator[_Change]:
    names = ({-1: K_MISSING, 1: K_EXTRA}, dict.fromkeys((-2, -1, 1), DP_SIZE), {-2: CP_MISSING, -1: CP_MISSING, 1: CP_TWICE})
    exponents = itertools.product((0, -1, 1), (0, -1, 1, -2), (0, 1, -1, -2))
    for scale in sorted(exponents, key=lambda s: (np.count_nonzero(s), sum(map(abs, s)))):
        if any(scale):
            causes = tuple(name[e] for name, e in zip(names, scale, strict=True) if e)
            yield causes, {"scale": scale}


def _scale_parts(fault: Fault) -> tuple[Fault, ...]:
    """A leftover factor of several of K, D and C, as one fault each."""
    scale = dict(fault.change)["scale"]
    exponents = [tuple(e if i == at else 0 for i, e in enumerate(scale)) for at in range(3) if scale[at]]
    return tuple(Fault((cause,), (("scale", e),)) for cause, e in zip(fault.causes, exponents, strict=True))


def _units(mode: str, group_size: int) -> Iterator[_Change]:
    if mode in {"sample_mean", "prompt_mean"}:
        yield PER_ROW, {"unit": "row", "count": "row"}
        if mode == "sample_mean":
            yield PER_ROW, {"unit": "row"}
            yield PER_ROW, {"count": "row"}
    if mode == "prompt_mean":
        yield PER_ROLLOUT, {"unit": "rollout", "nested": "rollout"}
        yield PER_ROW, {"unit": "row", "nested": "row"}
        for count, floor in itertools.product(("rollout", "row"), (False, True)):
            yield GROUP_SIZE, {"count": count, "per": float(group_size), "floor": floor}
        yield GROUP_SIZE, {"unit": "chunk", "count": "chunk"}
        yield GROUP_SIZE, {"unit": "chunk"}
    if mode == "constant":
        yield PER_ROW, {"count": "row"}
    if mode in {"sample_mean", "constant"}:
        yield GROUP_SIZE, {"count": "group", "per": 1.0 / group_size}
    for other, formula in MODES.items():
        if other not in {mode, "constant"}:
            yield f"{other} instead of {mode}", formula
    yield SUM, {"unit": "step", "measure": "one", "count": None}
    if mode != "token_mean":
        yield SUM, {"count": None}
    if mode == "constant":
        yield SUM, {"measure": "one"}


def _measures(mode: str) -> Iterator[_Change]:
    for measure in ("clamped", "clamped over cp", "clamped but for placeholders"):
        yield PHANTOM, {"measure": measure}
    widths = [
        *("width", "width with padding", "width of max_seqlen"),
        *("width of true lengths", "width of responses", "width of response lengths"),
    ]
    for measure in widths:
        for scope in ("", "c"):  # a tensor of a cp rank has the width of that rank
            yield PADDED_WIDTH, {"measure": measure, "measure_scope": scope}
            if mode in {"sample_mean", "constant"}:
                yield PADDED_WIDTH, {"measure": measure, "measure_scope": scope, "unit": "row"}
    if mode != "constant":
        yield RESPONSE, {"measure": "response"}
        yield PROMPT, {"measure": "sequence"}
        yield PROMPT, {"measure": "tokens"}
        yield PADDING, {"measure": "positions"}


def _selections(mode: str) -> Iterator[_Change]:
    for select, cause in (
        ("later", SHIFTED),
        ("earlier", SHIFTED),
        ("response", RESPONSE),
        ("sequence", PROMPT),
        ("tokens", PROMPT),
        ("positions", PADDING),
        ("but the last", LAST_LEFT_OUT),
        ("but the first", "first token of each response left out"),
    ):
        yield cause, {"select": select}
        if mode != "constant":
            yield cause, {"select": select, "measure": "selected"}


def _rest(mode: str, empty: str) -> Iterator[_Change]:
    if mode != "token_mean":
        yield EMPTY[empty], {"empties": "skip" if empty == "count" else "count"}
        yield PLACEHOLDERS, {"empties": "placeholders"}
    for keep in ("last", "first"):
        yield ONE_MICRO_BATCH, {"keep": keep}
    for keep in ("rank", "dp rank", "cp rank"):
        yield ONE_RANK, {"keep": keep}
