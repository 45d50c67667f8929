"""The examples of the README and of the design, worked out by hand: data, and the loss under each mode."""

from fractions import Fraction as F
from typing import NamedTuple

import pyarrow as pa


class Example(NamedTuple):
    """One step. ``losses`` and ``masks`` hold a list per sample, of its response; every prompt is two tokens."""

    losses: list[list[float]]
    masks: list[list[int]]
    rollouts: list[int]
    groups: list[int]
    expected: dict[str, F]
    divisor: float = 10.0

    def table(self) -> pa.Table:
        return pa.table(
            {
                "tokens": [[7] * (2 + len(mask)) for mask in self.masks],
                "response_length": [len(mask) for mask in self.masks],
                "loss_mask": self.masks,
                "rollout_id": self.rollouts,
                "group_index": self.groups,
                "loss": self.losses,
            }
        )


#: 4 + (1+2+3)/3 + (10+20)/2 + (1+2+3)/3 = 23 over 4; groups (4+6)/4 and (30+6)/5 over 2; 46/9; 46/(10*4).
FOUR_SAMPLES = Example(
    losses=[[4], [1, 2, 3], [10, 20], [1, 100, 2, 3]],
    masks=[[1], [1, 1, 1], [1, 1], [1, 0, 1, 1]],
    rollouts=[0, 1, 2, 3],
    groups=[0, 0, 1, 1],
    expected={
        "sample_mean": F(23, 4),
        "prompt_mean": F(97, 20),
        "token_mean": F(46, 9),
        "constant": F(46, 40),
    },
)

#: Rollout A has samples [8] and [1 1 1], so a mean of 11/4; rollout B a mean of 5.
FAN_OUT = Example(
    losses=[[8], [1, 1, 1], [5, 5]],
    masks=[[1], [1, 1, 1], [1, 1]],
    rollouts=[0, 0, 1],
    groups=[0, 0, 0],
    expected={
        "sample_mean": F(31, 8),
        "prompt_mean": F(21, 6),
        "token_mean": F(21, 6),
        "constant": F(21, 20),
    },
)

#: Groups of 4, 3 and 4 one-token samples with losses 1, 2 and 6.
UNEVEN_GROUPS = Example(
    losses=[[1]] * 4 + [[2]] * 3 + [[6]] * 4,
    masks=[[1]] * 11,
    rollouts=list(range(11)),
    groups=[0] * 4 + [1] * 3 + [2] * 4,
    expected={
        "sample_mean": F(34, 11),
        "prompt_mean": F(3),
        "token_mean": F(34, 11),
        "constant": F(34, 110),
    },
)

#: All four modes apart.
ALL_APART = Example(
    losses=[[10], [2, 2, 2], [4, 4], [1] * 6],
    masks=[[1], [1, 1, 1], [1, 1], [1] * 6],
    rollouts=[0, 1, 2, 3],
    groups=[0, 0, 1, 1],
    expected={
        "sample_mean": F(17, 4),
        "prompt_mean": F(23, 8),
        "token_mean": F(5, 2),
        "constant": F(15, 32),
    },
    divisor=16.0,
)

EXAMPLES = {"four_samples": FOUR_SAMPLES, "fan_out": FAN_OUT, "uneven_groups": UNEVEN_GROUPS, "all_apart": ALL_APART}
MODES = ("sample_mean", "prompt_mean", "token_mean", "constant")
