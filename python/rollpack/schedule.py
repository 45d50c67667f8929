"""A schedule as a picture: who runs which micro-batch when, and who waits."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec

import numpy as np
import numpy.typing as npt

from rollpack._text import counted, noun
from rollpack.plans import Plan

#: Ranks that the text has a line for.
_SHOWN = 64


@dataclass(frozen=True, eq=False, repr=False)
class Schedule:
    """One step of a plan: a row a dp rank, time along, a micro-batch as a block, with gaps where ranks wait.

    Shown by a notebook it is drawn (which needs the extra ``report``), printed it is text. Time is what the plan's cost
    model makes of the samples' lengths, without padding: under ``cost="tokens"`` a block is as long as its tokens.

    Attributes:
        plan: the plan.
        step: the step that is shown.
        tokens: [D, K] int64, true tokens of each micro-batch; 0 for a placeholder.
        fills: [D, K] float64, tokens over the budget of all cp ranks (for ``micro_batch_size``: over the largest
            micro-batch of the step); above 1 where a sample is over it.
        starts, lengths: [D, K] float64, when each begins and how long it takes.
        end: when the last rank has finished.
    """

    plan: Plan
    step: int
    tokens: npt.NDArray[np.int64]
    fills: npt.NDArray[np.float64]
    starts: npt.NDArray[np.float64]
    lengths: npt.NDArray[np.float64]
    end: float

    @classmethod
    def of(cls, plan: Plan, step: int = 0) -> Schedule:
        """The schedule of a step.

        Raises:
            PlanError: there is no such step.
        """
        settings, shape = plan.settings, (plan.settings.dp_size, plan._step(step).num_micro_batches)
        placed = plan.to_arrow()
        of_step = placed["step"].to_numpy() == step
        at = tuple(placed[name].to_numpy()[of_step] for name in ("dp_rank", "micro_batch"))
        totals = placed["total_length"].to_numpy()[of_step]
        tokens = np.zeros(shape, dtype=np.int64)
        np.add.at(tokens, at, totals)
        linear, quadratic = (float(factor) for factor in settings.cost)
        lengths = np.zeros(shape)
        np.add.at(lengths, at, linear * totals + quadratic * totals.astype(np.float64) ** 2)
        # Ranks that meet at each micro-batch begin the next one together; else each goes on as it can.
        together = settings.sync == "micro_batch"
        slots = np.broadcast_to(lengths.max(axis=0), shape) if together else lengths
        starts = np.cumsum(slots, axis=1) - slots
        budget = settings.max_tokens_per_gpu
        room = int(tokens.max()) if budget is None else budget * settings.cp_size
        return cls(plan, step, tokens, tokens / max(room, 1), starts, lengths, float((starts + lengths).max()))

    def text(self, width: int = 72) -> list[str]:
        """One line a dp rank (at most 64 of them), and one that says what is what.

        Args:
            width: characters of the longest rank.
        """
        ends = self.starts + self.lengths
        lines = []
        for rank in range(min(len(self.tokens), _SHOWN)):
            cells = ["·"] * width
            for k in range(self.tokens.shape[1]):
                first, last = (round(width * x / (self.end or 1)) for x in (self.starts[rank, k], ends[rank, k]))
                cells[first:last] = "█▓"[k % 2] * (last - first)
            total = int(self.tokens[rank].sum())
            lines.append(f"dp rank {rank:>3} |{''.join(cells)}| {total:>9,} {noun(total, 'token')}")
        if len(self.tokens) > _SHOWN:
            lines.append(f"... and {counted(len(self.tokens) - _SHOWN, 'more rank')}")
        waits = "at each micro-batch" if self.plan.settings.sync == "micro_batch" else "at the end of the step"
        return [*lines, f"█▓ micro-batches, {self.tokens.shape[1]} on each rank; ·· waiting for the others {waits}"]

    @cached_property
    def svg(self) -> str:
        """The picture, an ``<svg>`` element. What a micro-batch holds is told where the pointer rests on it."""
        from rollpack.report.plots import schedule

        return schedule(self)

    def _repr_svg_(self) -> str | None:
        # A notebook shows the text where there is nothing to draw with.
        return self.svg if find_spec("matplotlib") else None

    # In the page itself, not as an image of its own, a notebook shows what the pointer rests on.
    _repr_html_ = _repr_svg_

    def __repr__(self) -> str:
        return "\n".join(self.text())
