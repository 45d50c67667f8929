"""How messages and pages put things."""

from __future__ import annotations


def noun(number: int, singular: str) -> str:
    """The noun that follows the number: ``row`` after 1, else ``rows``."""
    if number == 1:
        return singular
    return f"{singular}es" if singular.endswith("ch") else f"{singular}s"


def counted(number: int, singular: str) -> str:
    """A number of things.

    >>> counted(1, "micro-batch"), counted(1200, "micro-batch")
    ('1 micro-batch', '1,200 micro-batches')
    """
    return f"{number:,} {noun(number, singular)}"
