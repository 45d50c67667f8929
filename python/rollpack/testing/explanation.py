"""Why a reducer fails: which mistakes of the catalogue do exactly what was observed."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from rollpack.packing import MicroBatch
from rollpack.testing import faults
from rollpack.testing.faults import Fault
from rollpack.testing.formulas import Layout, right_formula
from rollpack.testing.probes import Batch, Probe, Target
from rollpack.testing.truth import Floats

MULTIPLIED = "masked positions multiplied by zero instead of selected"
ZERO_BY_ZERO = "0/0 where nothing is trained"
NOT_JOINED = "not joined to the graph where nothing is trained"
DETACHED = "no gradient: the loss is not joined to the token losses"
OTHER_VALUE = "the value returned is not that of the gradient"
UNKNOWN = "no usual mistake"


@dataclass
class Result:
    """What came of a probe: weights by token, in the order of the batch that it is compared with; or what went wrong.

    ``value`` is the loss returned over the loss that has this gradient (all that is checked here is linear), 1.0 if it is
    that one.
    """

    probe: Probe
    target: Target
    batch: Batch
    ranks: list[list[MicroBatch[Any]]]
    weights: Floats = field(default_factory=lambda: np.full(1, np.nan))
    value: float = 1.0
    trouble: str | None = None
    #: The result that it is compared with; None for the reference.
    base: Result | None = None

    @cached_property
    def _layout(self) -> Layout:
        return Layout(self.ranks, self.batch.truth, self.target.divisor, self.batch.group_size)

    def predicted(self, fault: Fault) -> Floats:
        """[n + 1], the weights of a reducer with this fault."""
        right = right_formula(self.target.loss_aggregation, self.target.empty)
        return self.batch.unshuffled(self._layout.weights(fault.of(right)))

    @property
    def truth(self) -> Floats:
        """[n + 1], the reference."""
        return self.batch.unshuffled(self.batch.truth.gradient(self.target.loss_aggregation))

    @property
    def wanted(self) -> Floats:
        """[n + 1], the weights that it has to agree with."""
        return self.truth if self.base is None else self.base.weights

    @property
    def known(self) -> bool:
        """Whether there are weights that a mistake could explain: where nothing is trained, any clamp may be beside it."""
        return self.trouble is None and self.probe.poison is None and bool(self.truth.any())


def agree(found: Floats, wanted: Floats, tolerance: float) -> bool:
    """Whether no weight is further off than this share of the largest."""
    return bool(np.abs(found - wanted).max() <= tolerance * (np.abs(wanted).max() or 1.0))


def _strays(result: Result) -> bool:
    """Whether a token has weight that ought to have none."""
    return bool(result.weights[result.truth == 0.0].any())


class Explanation:
    """Which mistakes of the catalogue do exactly what was observed."""

    def __init__(
        self, results: list[Result], failing: list[Result], target: Target, group_size: int, tolerance: float
    ) -> None:
        self._tolerance = tolerance
        self._singles = faults.single_faults(target.loss_aggregation, target.empty, group_size)
        # A mistake shows best where all is hard and all is cut.
        self._known = sorted((r for r in results if r.known), key=lambda r: r.probe.invariance != "all cuts together")
        self._weights: dict[tuple[int, Fault], Floats] = {}
        self._fault: tuple[Fault, float] | None = None
        if any(result.known and not agree(result.weights, result.wanted, tolerance) for result in failing):
            mistakes = itertools.chain(self._one_mistake(), self._two_mistakes(), self._three_mistakes())
            self._fault = self._match(self._known, mistakes)

    def __call__(self, result: Result) -> str:
        """The cause of one failure."""
        if result.trouble == MULTIPLIED and result.base is not None and _strays(result.base):
            result = result.base  # what is masked counts anyway, and that it may hold anything shows it once more
        if result.trouble is not None:
            return result.trouble
        causes = () if agree(result.weights, result.wanted, self._tolerance) else self._causes(result)
        return " + ".join(causes if result.value == 1.0 else (*causes, OTHER_VALUE))

    def _causes(self, result: Result) -> tuple[str, ...]:
        """Why the weights are not those that are wanted."""
        fault = self._fault
        if fault is None:  # more mistakes at once: one that explains this one thing may be among them
            together = [result] if result.base is None else [result.base, result]
            fault = self._match(together, self._one_mistake())
        return (UNKNOWN,) if fault is None else self._relevant(result, *fault)

    def _one_mistake(self) -> Iterator[tuple[Fault, bool]]:
        """Mistakes, and whether a constant factor comes on top."""
        yield from ((fault, False) for fault in self._singles)
        yield Fault((), ()), True

    def _two_mistakes(self) -> Iterator[tuple[Fault, bool]]:
        yield from ((fault, True) for fault in self._singles)
        for a, b in itertools.combinations(self._singles, 2):
            if (both := a & b) is not None:
                yield both, False

    def _three_mistakes(self) -> Iterator[tuple[Fault, bool]]:
        """Two, and a leftover factor of K, D and C. Tried where all but a factor is explained by the two."""
        factors = [fault for fault in self._singles if dict(fault.change).keys() == {"scale"}]
        hardest = self._known[0]
        for a, b in itertools.combinations(self._singles, 2):
            if (two := a & b) is not None and "scale" not in dict(two.change):
                predicted = self._constant(hardest, two) * self._predicted(hardest, two)
                if agree(hardest.weights, predicted, self._tolerance):
                    yield from ((three, False) for factor in factors if (three := two & factor) is not None)

    def _match(self, results: list[Result], hypotheses: Iterable[tuple[Fault, bool]]) -> tuple[Fault, float] | None:
        for fault, scaled in hypotheses:
            constant = self._constant(results[0], fault) if scaled else 1.0
            if all(agree(r.weights, constant * self._predicted(r, fault), self._tolerance) for r in results):
                return fault, constant
        return None

    def _constant(self, result: Result, fault: Fault) -> float:
        predicted = self._predicted(result, fault)
        return float(result.weights @ predicted) / (float(predicted @ predicted) or 1.0)

    def _predicted(self, result: Result, fault: Fault) -> Floats:
        key = (id(result), fault)
        if key not in self._weights:
            self._weights[key] = result.predicted(fault)
        return self._weights[key]

    def _relevant(self, result: Result, fault: Fault, constant: float) -> tuple[str, ...]:
        """The causes that make this one thing fail, of those that were found."""
        causes = fault.causes
        if constant == 0.0:
            return (DETACHED,)
        if abs(constant - 1.0) > self._tolerance:
            assumed = causes == (faults.SUM,) and "unit" not in dict(fault.change)
            causes = (faults.ASSUMED_NUMBER,) if assumed else (*causes, faults.CONSTANT)
        if len(causes) == 1:
            return causes
        relevant = [cause for part in fault.parts if self._shows(result, part) for cause in part.causes]
        return tuple(dict.fromkeys(relevant)) or causes

    def _shows(self, result: Result, fault: Fault) -> bool:
        wanted = self._predicted(result.base, fault) if result.base is not None else result.wanted
        return not agree(self._predicted(result, fault), wanted, self._tolerance)
