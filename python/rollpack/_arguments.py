"""What an argument has to be: a word, an integer, a number, a flag."""

from __future__ import annotations

import operator
from typing import Any, SupportsFloat, SupportsIndex

import numpy as np

from rollpack._errors import PlanError, is_printable


def word(value: object) -> str:
    """An argument that has to be a word, for the core, which says of any other which ones it may be."""
    return value if isinstance(value, str) and is_printable(value) else ascii(value)


def integer(name: str, value: SupportsIndex, *, least: int | None = None) -> int:
    """An argument that has to be an integer, of Python's or of numpy's types, and of at least so much."""
    try:
        found = operator.index(_not(value))
    except TypeError:
        raise PlanError(f"{name} is {value!r}; it has to be an integer") from None
    if not -(2**63) <= found < 2**63:
        raise PlanError(f"{name} is {found}; it has to fit an int64")
    if least is not None and found < least:
        raise PlanError(f"{name} is {found}; it has to be at least {least}")
    return found


def number(name: str, value: SupportsFloat) -> float:
    """An argument that has to be a number. A text that reads like one is none."""
    try:
        return float(_not(value, str, bytes, bytearray))
    except (TypeError, ValueError, OverflowError):
        raise PlanError(f"{name} is {value!r}; it has to be a number") from None


#: A tuple: torch 2.6 cannot compile a union.
_FLAGS = (bool, np.bool_)


def flag(name: str, value: object) -> bool:
    """An argument that has to be True or False: any text, "no" too, would count as True."""
    if not isinstance(value, _FLAGS):
        raise PlanError(f"{name} is {value!r}; it has to be True or False")
    return bool(value)


def _not(value: Any, *others: type) -> Any:
    """The value, if it is none of these, neither True or False nor an array of one value: they would pass for numbers."""
    flagged = isinstance(value, bool) or "bool" in str(getattr(value, "dtype", ""))
    if flagged or isinstance(value, others) or getattr(value, "ndim", None):
        raise TypeError
    return value
