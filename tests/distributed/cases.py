"""What is run: which trainer, which cut, which mode, which precision."""

from __future__ import annotations

import os
from importlib.util import find_spec
from itertools import cycle, product
from typing import NamedTuple

MODES = ("sample_mean", "prompt_mean", "token_mean", "constant")

#: The trainers of trainers.py, and the library that each needs.
TRAINERS = {
    "none": "torch",
    "ddp": "torch",
    "ddp_no_sync": "torch",
    "fsdp": "torch",
    "fsdp_sum": "torch",
    "hsdp": "torch",
    "accelerate": "accelerate",
    "deepspeed_0": "deepspeed",
    "deepspeed_1": "deepspeed",
    "deepspeed_2": "deepspeed",
    "hf_trainer": "transformers",
    "hf_trainer_window": "transformers",
    "hf_trainer_scaled": "transformers",
    "hf_trainer_num_items": "transformers",
    "megatron": "megatron",
    "megatron_legacy": "megatron",
    "megatron_per_token": "megatron",
}

#: DeepSpeed refuses float64 gradients (ZeRO 0) or keeps float32 master weights (ZeRO 1 and 2).
FLOAT32_ONLY = {"deepspeed_0", "deepspeed_1", "deepspeed_2"}

LAYOUTS = [
    (1, 1, "zigzag"),
    (2, 1, "zigzag"),
    (1, 2, "zigzag"),
    (1, 2, "contiguous"),
    (2, 2, "zigzag"),
    (2, 2, "contiguous"),
    (4, 1, "zigzag"),
    (1, 4, "zigzag"),
    (1, 4, "contiguous"),
    (4, 2, "zigzag"),
    (4, 2, "contiguous"),
]
#: Tokens per GPU: about ten micro-batches in all, a few, and one per rank.
BUDGETS = (64, 160, 1024)

#: The largest deviation that counts as agreement, of the gradient and of the weights after three steps.
TOLERANCES = {"float64": 1e-12, "float32": 1e-5}


class Case(NamedTuple):
    """One training run, compared with one process in float64."""

    trainer: str
    dp_size: int
    cp_size: int
    layout: str
    max_tokens_per_gpu: int
    mode: str
    dtype: str
    critic: bool = False  # with an entropy and a value term beside the policy gradient

    @property
    def ranks(self) -> int:
        return self.dp_size * self.cp_size

    @property
    def cut(self) -> str:
        return f"{self.dp_size}x{self.cp_size}" + ("" if self.cp_size == 1 else f" {self.layout}")

    def __str__(self) -> str:
        return "-".join([self.trainer, self.cut.replace(" ", "-"), str(self.max_tokens_per_gpu), self.mode, self.dtype]) + (
            "-critic" if self.critic else ""
        )


def missing(trainer: str) -> str | None:
    """Why this trainer cannot run here."""
    library = TRAINERS.get(trainer, "torch")
    return None if find_spec(library) else f"{library} is not installed"


def cases(full: bool = os.environ.get("ROLLPACK_ALL") == "1") -> list[Case]:
    """All of them, or what a test run can afford: every trainer under every cut, with modes and budgets taking turns."""
    chosen = []
    turns = cycle([(mode, budget) for budget in BUDGETS[:2] for mode in MODES])
    for (dp_size, cp_size, layout), trainer in product(LAYOUTS, TRAINERS):
        at = (trainer, dp_size, cp_size, layout)
        best = "float32" if trainer in FLOAT32_ONLY else "float64"
        if full:
            chosen += [Case(*at, budget, mode, best) for budget in BUDGETS for mode in MODES]
            chosen += [Case(*at, BUDGETS[0], mode, best, critic=True) for mode in MODES]
            chosen += [Case(*at, BUDGETS[0], mode, "float32") for mode in MODES if best != "float32"]
            continue
        mode, budget = next(turns)
        if (dp_size, cp_size, layout) == (2, 2, "zigzag"):
            chosen += [Case(*at, budget, mode, best) for mode in MODES]
            chosen += [Case(*at, budget, mode, best, critic=True)]
            chosen += [Case(*at, budget, mode, "float32")] if best != "float32" else []
        else:
            chosen += [Case(*at, budget, mode, best)]
    # Megatron sets up its groups once per cp_size.
    return sorted(chosen, key=lambda case: (case.ranks, case.cp_size, case.trainer))
