"""A schedule drawn in text: ranks down, time along."""

from __future__ import annotations

import numpy as np

from rollpack.planning import Plan


def picture(plan: Plan, step: int = 0, width: int = 72) -> list[str]:
    """One line a dp rank; a micro-batch is a block as long as its tokens, and dots are where a rank waits.

    Args:
        plan: the plan.
        step: the step that is drawn.
        width: characters of the longest rank.
    """
    per_rank = plan.steps[step].num_micro_batches
    placed = plan.to_arrow()
    of_step = placed["step"].to_numpy() == step
    tokens = np.zeros((plan.settings.dp_size, per_rank))
    at = placed["dp_rank"].to_numpy()[of_step], placed["micro_batch"].to_numpy()[of_step]
    np.add.at(tokens, at, placed["total_length"].to_numpy()[of_step])
    # Ranks that meet at each micro-batch begin the next one together; else each goes on as it can.
    together = plan.settings.sync == "micro_batch"
    lengths = np.broadcast_to(tokens.max(axis=0), tokens.shape) if together else tokens
    starts = np.cumsum(lengths, axis=1) - lengths
    end = (starts + lengths).max()
    lines = []
    for rank in range(len(tokens)):
        cells = ["·"] * width
        for k in range(per_rank):
            first, last = (round(width * x / end) for x in (starts[rank, k], starts[rank, k] + tokens[rank, k]))
            cells[first:last] = "█▓"[k % 2] * (last - first)
        lines.append(f"dp rank {rank:>3} |{''.join(cells)}| {int(tokens[rank].sum()):>9,} tokens")
    waits = "at each micro-batch" if together else "at the end of the step"
    return [*lines, f"█▓ micro-batches, {per_rank} on each rank; ·· waiting for the others {waits}"]
