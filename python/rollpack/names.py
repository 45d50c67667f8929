"""What other trainers' mode names mean, and the names of our own modes and layouts.

``plan``, the adapters, the page on trainers and the tests go by the one table here. A trainer's name also says what the
units are and which of them count, so it is for planning. The plan is of a mode of ours: micro-batches, reducers and
``sample_weights`` know no other.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rollpack._arguments import word
from rollpack._errors import PlanError

#: The trainers, and the release, commit or year of the code that each was read in.
VERSIONS = {
    "verl": "0.9.1",
    "trl": "1.16.0",
    "skyrl": "0.3.0",
    "nemo-rl": "006907a",
    "openrlhf": "0.11.2",
    "areal": "1.0.4",
    "prime-rl": "004274e",
    "slime": "00c2d6d",
    "miles": "0b3ae66",
    "tinker": "0.38.0",
}

#: Our own names.
OURS = ("sample_mean", "prompt_mean", "token_mean", "constant")

#: How context parallelism cuts: the names that rust/core/src/cut.rs knows.
LAYOUTS = ("zigzag", "contiguous")

_TOKENS = "Σ m x / T"
_ROWS = "(1/R) Σ_i ( Σ m x / M_i )"
_CONSTANT = "Σ m x / (L R)"
_PROMPTS = "(1/P) Σ_g ( Σ m x / M_g )"
_MICRO_BATCHES = "(1/K) Σ_k ( Σ m x / T_k )"


@dataclass(frozen=True)
class TrainerMode:
    """One mode of one trainer.

    Attributes:
        name: the trainer's prefix and its own name, as ``trl:dapo``.
        formula: the step loss there: R rows i with M_i trained tokens, P prompt groups g, T trained tokens, K
            micro-batches k of all ranks, N rollouts r, L a constant.
        mode: the mode of ours that it is; None if none is.
        note: under which conditions, or why none is.
        per_row: whether its units are rows: then it is ours only where each rollout is one row.
        divisor: L where the mode is ``constant``: a number that is fixed there, or the setting of the trainer that holds it.
        empty: whether units without a trained token count there (``count``) or not (``skip``); None where that is the same.
    """

    name: str
    formula: str
    mode: str | None
    note: str = ""
    per_row: bool = False
    divisor: float | str | None = None
    empty: str | None = None


def _row_mean(name: str, empty: str = "count", note: str = "") -> TrainerMode:
    return TrainerMode(name, _ROWS, "sample_mean", note, per_row=True, empty=empty)


def _rollout_mean(name: str) -> TrainerMode:
    note = "of rows where the batch has no rollout_mask_sums, as before 2026"
    return TrainerMode(name, "(1/N) Σ_r ( Σ m x / M_r )", "sample_mean", note, empty="count")


def _constant(name: str, divisor: float | str, note: str = "") -> TrainerMode:
    formula = _CONSTANT if isinstance(divisor, str) else "Σ m x / R"
    return TrainerMode(name, formula, "constant", note, per_row=True, divisor=divisor, empty="count")


_TRL_WINDOW = "T is the generation batch's, per step"

MODES = {
    mode.name: mode
    for mode in (
        TrainerMode("verl:token-mean", _TOKENS, "token_mean"),
        TrainerMode("verl:token-sum", "Σ m x", None, "a sum, which grows with the batch"),
        _constant("verl:seq-mean-token-sum", 1.0),
        _constant("verl:seq-mean-token-sum-norm", "loss_scale_factor", "where that is null: the padded response width"),
        _row_mean("verl:seq-mean-token-mean"),
        _row_mean("trl:grpo"),
        TrainerMode("trl:bnpo", _MICRO_BATCHES, "token_mean_legacy", "depends on the cut; empty micro-batches count there"),
        _constant("trl:dr_grpo", "max_completion_length"),
        TrainerMode("trl:dapo", _TOKENS, "token_mean", _TRL_WINDOW),
        TrainerMode("trl:cispo", _TOKENS, "token_mean", f"another token loss; {_TRL_WINDOW}"),
        TrainerMode("trl:vespo", _TOKENS, "token_mean", f"another token loss; {_TRL_WINDOW}"),
        _row_mean("trl:sapo", note="another token loss"),
        _constant("trl:luspo", 1.0, "another token loss"),
        TrainerMode("skyrl:token_mean", _TOKENS, "token_mean"),
        TrainerMode(
            "skyrl:token_mean_legacy",
            _MICRO_BATCHES,
            "token_mean_legacy",
            "depends on the cut; empty micro-batches count there",
        ),
        _row_mean("skyrl:sequence_mean"),
        _constant("skyrl:seq_mean_token_sum_norm", "max_seq_len"),
        TrainerMode("skyrl:prompt_mean", _PROMPTS, "prompt_mean", empty="count"),
        TrainerMode("nemo-rl:token_level", _TOKENS, "token_mean", "token_level_loss: true"),
        _row_mean("nemo-rl:sequence_level", "skip", "token_level_loss: false; rows with sample_mask 0 do not count"),
        TrainerMode("openrlhf:token-mean", _TOKENS, "token_mean"),
        _row_mean("openrlhf:seq-mean-token-mean", "skip"),
        TrainerMode("areal:grpo", _TOKENS, "token_mean", "ppo_actor_loss_fn; it has no other"),
        TrainerMode("areal:sapo", _TOKENS, "token_mean", "sapo_loss_fn"),
        TrainerMode("prime-rl:default", _TOKENS, "token_mean"),
        TrainerMode(
            "prime-rl:token", "(1/D) Σ_d ( Σ m x / T_d )", None, "ratio_type of 2025: a mean of the D ranks' token means"
        ),
        TrainerMode(
            "prime-rl:sequence",
            "(1/K) Σ_i ( Σ m x / M_i )",
            None,
            "ratio_type of 2025: divided by micro-batches, not by rows",
        ),
        _rollout_mean("slime:default"),
        TrainerMode("slime:calculate_per_token_loss", _TOKENS, "token_mean", "an empty row counts as one token in its T"),
        _rollout_mean("miles:default"),
        TrainerMode("miles:calculate_per_token_loss", _TOKENS, "token_mean", "an empty row counts as one token in its T"),
        TrainerMode(
            "tinker:sum", "Σ m x", None, "every loss_fn is a sum; plan a mode and scale the advantages by its weights"
        ),
    )
}


def resolve(loss_aggregation: str, divisor: float | None, empty: str) -> tuple[str, float | None]:
    """The mode of ours and its divisor; names without a prefix that no trainer has are handed back as they are.

    Raises:
        PlanError: no such name, none of ours is equal to it, or the arguments do not go with it.
    """
    name = word(loss_aggregation)
    known = _known(name) if isinstance(loss_aggregation, str) else None
    if known is None:
        _hint(name)
        return name, divisor
    if known.mode is None:
        raise PlanError(f"{known.name} is {known.formula}, and no mode of ours is that: {known.note}")
    if isinstance(known.divisor, float):
        if divisor is not None:
            raise PlanError(f"{known.name} takes no divisor: it is 'constant' with a divisor of {known.divisor:g}")
        divisor = known.divisor
    elif known.divisor is not None and divisor is None:
        raise PlanError(f"{known.name} is 'constant' with {known.divisor} for divisor: pass divisor={known.divisor}")
    if known.empty not in {None, empty}:
        counted = "do not count" if known.empty == "skip" else "count"
        raise PlanError(
            f"under {known.name} units without a trained token {counted}: pass empty={known.empty!r}, or take "
            f"{known.mode!r} instead"
        )
    return known.mode, divisor


def mode_of(loss_aggregation: str) -> str | None:
    """The mode of ours that another trainer's name stands for, None if none; any other name as it is."""
    known = MODES.get(loss_aggregation)
    return loss_aggregation if known is None else known.mode


def takes_divisor(loss_aggregation: str) -> bool:
    """Whether a mode, of ours or another trainer's, is given its divisor."""
    known = MODES.get(loss_aggregation)
    return loss_aggregation == "constant" if known is None else isinstance(known.divisor, str)


def check_units(loss_aggregation: str, rows: npt.NDArray[np.int64], rollouts: npt.NDArray[np.int64]) -> None:
    """Under a name whose units are rows, refuse a rollout of several rows.

    Args:
        loss_aggregation: the name.
        rows: [n] input rows.
        rollouts: [n] which rollout each belongs to, from 0.

    Raises:
        PlanError: a rollout has several rows.
    """
    known = _known(loss_aggregation)
    if known is None or not known.per_row:
        return
    counts = np.bincount(rollouts)
    if counts.max() > 1:
        same = np.sort(rows[rollouts == int(np.argmax(counts > 1))])
        raise PlanError(
            f"{known.name} averages rows, and rows {same[0]} and {same[1]} are one rollout. Make each row a rollout, with "
            f"columns={{'rollout_id': None}}, or take {known.mode!r}, which averages rollouts"
        )


def _hint(name: str) -> None:
    """Of a name that only trainers have, says under which names with a prefix it is known here."""
    named = [mode for mode in MODES.values() if mode.name.partition(":")[2] == name.lower()]
    if named and name not in {mode.mode for mode in named}:
        raise PlanError(
            f"loss_aggregation is {name!r}, which is no mode of ours; other trainers' have their prefix: did you mean "
            f"{' or '.join(mode.name for mode in named)}?"
        )


def _known(name: str) -> TrainerMode | None:
    trainer, colon, own = str(name).partition(":")
    if not colon:
        return None
    if name in MODES:
        return MODES[name]
    if trainer not in VERSIONS:
        raise PlanError(f"loss_aggregation is {name!r}; trainers are {', '.join(VERSIONS)}")
    names = ", ".join(known for known in MODES if known.startswith(f"{trainer}:"))
    raise PlanError(f"loss_aggregation is {name!r}, and {trainer} ({VERSIONS[trainer]}) has no {own!r}; it has {names}")
