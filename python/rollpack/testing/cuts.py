"""Ways to cut a batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from rollpack._text import counted
from rollpack.names import LAYOUTS
from rollpack.planning import plan
from rollpack.plans import Plan


class Cut(NamedTuple):
    """One way to cut a batch over ranks and micro-batches."""

    dp_size: int
    cp_size: int
    layout: str
    max_tokens_per_gpu: int

    def plan(self, data_or_summary: Any, **arguments: Any) -> Plan:
        """The plan of this cut: samples over the budget are alone, and placeholders fill up."""
        return plan(data_or_summary, oversize="alone", placeholders=True, **self._asdict(), **arguments)

    def __str__(self) -> str:
        return f"dp {self.dp_size} x cp {self.cp_size}, {self.layout}, {counted(self.max_tokens_per_gpu, 'token')} per GPU"


def cuts(
    budgets: Sequence[int],
    *,
    dp_sizes: Sequence[int] = (1, 2, 4, 8),
    cp_sizes: Sequence[int] = (1, 2, 4),
    layouts: Sequence[str] = LAYOUTS,
) -> Iterator[Cut]:
    """All combinations; without context parallelism the layouts are one."""
    for budget in budgets:
        for dp_size in dp_sizes:
            for cp_size in cp_sizes:
                for layout in layouts if cp_size > 1 else layouts[:1]:
                    yield Cut(dp_size, cp_size, layout, budget)
