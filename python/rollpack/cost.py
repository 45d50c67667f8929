"""What a sample costs a rank."""

from __future__ import annotations

import operator
from typing import NamedTuple, SupportsIndex

from rollpack._errors import PlanError


class CostModel(NamedTuple):
    """A sample of s padded tokens costs ``linear * s + quadratic * s * s``; both are integers of at least 0.

    Pass a model's FLOPs per token and per token pair to balance by them.
    """

    linear: int
    quadratic: int = 0


#: ``cost="attention"`` is a transformer whose attention costs as much as all else at 24,576 tokens.
NAMED = {"tokens": CostModel(1, 0), "attention": CostModel(24_576, 1)}


def cost_model(cost: str | CostModel) -> CostModel:
    """The model that ``cost=`` names."""
    if isinstance(cost, str):
        if cost not in NAMED:
            raise PlanError(f"cost is {cost!r}; it has to be {', '.join(NAMED)} or a CostModel")
        return NAMED[cost]
    if not isinstance(cost, tuple) or len(cost) != len(CostModel._fields):
        raise PlanError(f"cost is {cost!r}; it has to be {', '.join(NAMED)} or a CostModel")
    linear, quadratic = (integer(name, value) for name, value in zip(CostModel._fields, CostModel(*cost), strict=True))
    for name, value in (("linear", linear), ("quadratic", quadratic)):
        if value < 0:
            raise PlanError(f"{name} of the cost model is {value}; it has to be at least 0")
    return CostModel(linear, quadratic)


def integer(name: str, value: SupportsIndex) -> int:
    """An argument that has to be an integer, of Python's or of numpy's types."""
    try:
        number = operator.index(value)
    except TypeError:
        raise PlanError(f"{name} is {value!r}; it has to be an integer") from None
    if not -(2**63) <= number < 2**63:
        raise PlanError(f"{name} is {number}; it has to fit an int64")
    return number
