"""slime (THUDM/slime): its flags, its reducer with ``prompt_mean`` and ``constant``, its samples, its schedule.

Written against the call signatures of slime at 00c2d6d (loss.py) and 00b5ed0 (model.py), where the fourth positional
argument of the reducer is the denominators. Where it is ``calculate_per_token_loss`` (slime before these denominators, and
miles), use :mod:`rollpack.integrations.miles`. slime is imported only where its own functions are called.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from copy import copy
from importlib import import_module
from typing import Any

import torch

from rollpack._errors import PlanError
from rollpack.integrations import _sum_of_sample_mean as shared
from rollpack.integrations._samples import convert_samples_to_train_data, samples_from_arrow, samples_to_arrow
from rollpack.integrations._schedule import build_dp_schedule, prompt_columns
from rollpack.integrations._sum_of_sample_mean import PROMPT_KEYS, Reducer, Share, add_arguments, hook

__all__ = [
    "PROMPT_KEYS",
    "add_arguments",
    "build_dp_schedule",
    "convert_samples_to_train_data",
    "get_sum_of_sample_mean",
    "hook",
    "pg_loss_reducer",
    "policy_loss",
    "prompt_columns",
    "samples_from_arrow",
    "samples_to_arrow",
    "validate",
]


def validate(args: Namespace, *, custom_loss: bool = True) -> None:
    """Check the flags against each other and settle ``args``. With the default mode nothing changes.

    ``token_mean`` sets ``calculate_per_token_loss``, and that flag makes the default mode a ``token_mean``. ``prompt_mean``
    and ``constant`` set ``loss_type`` and ``custom_loss_function_path`` to :func:`policy_loss`; a
    ``custom_pg_loss_reducer_function_path`` of yours keeps its precedence, with a warning.

    Args:
        args: the trainer's, with those of :func:`add_arguments`.
        custom_loss: False where you call :func:`pg_loss_reducer` in the trainer's policy loss, or in a loss of your own:
            ``loss_type`` then stays, and so does what the trainer does for ``policy_loss`` alone.

    Raises:
        PlanError: per-token loss with ``prompt_mean`` or ``constant``; a divisor that is missing, not finite, not above 0 or
            given for another mode; steps that cut prompt groups; another loss than the policy loss.
    """
    shared.validate(args, f"{__name__}.policy_loss" if custom_loss else None)


def get_sum_of_sample_mean(
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    loss_masks: Sequence[torch.Tensor],
    sample_denoms: Sequence[torch.Tensor] | torch.Tensor | None = None,
    calculate_per_token_loss: bool = False,
    qkv_format: str = "thd",
    max_seq_lens: Sequence[int] | None = None,
    *,
    loss_aggregation: str = "sample_mean",
    divisor: float | None = None,
    prompt_mask_sums: Sequence[int] | torch.Tensor | None = None,
    num_rollouts: int | None = None,
    num_prompts: int | None = None,
    own: Reducer | None = None,
    share: tuple[int, int] | None = None,
) -> Reducer:
    """``get_sum_of_sample_mean`` of slime with modes: what it returns is N times the step loss, as slime divides by N.

    Args:
        total_lengths: tokens of each sample of the micro-batch.
        response_lengths: of its response.
        loss_masks: a mask each, as long as the whole response, on whatever device.
        sample_denoms: slime's denominators, for its own reducer alone.
        calculate_per_token_loss: as slime has it.
        qkv_format: ``thd``, or ``bshd``, whose sequences are padded to ``max_seq_lens``.
        max_seq_lens: see there.
        loss_aggregation: the mode. ``sample_mean`` and ``token_mean`` give slime's own reducer, untouched.
        divisor: L of ``constant``.
        prompt_mask_sums: M_g of each sample's prompt group, for ``prompt_mean``.
        num_rollouts: N of the step, for ``prompt_mean``.
        num_prompts: P of the step, for ``prompt_mean``.
        own: slime's own reducer, if there is one already; else its function is imported and called.
        share: cp rank and cp size; Megatron is asked if they are left out.

    Returns:
        A callable: a value per response token that this cp rank owns (zigzag), one sample behind the other, in; a 0-d
        tensor out. What is masked is selected out.

    Raises:
        RollpackError: lists that differ in length, or a mask that is not as long as its response.
        PlanError: denominators are missing under ``prompt_mean``, or per-token loss goes with another mode than
            ``token_mean``.
    """
    if isinstance(sample_denoms, bool):
        raise PlanError(
            "the fourth argument is slime's denominators, and this is calculate_per_token_loss: call "
            "rollpack.integrations.miles.get_sum_of_sample_mean"
        )

    def make_own() -> Reducer:
        if own is not None:
            return own
        layout = () if qkv_format == "thd" else (qkv_format, max_seq_lens)  # newer ones know thd alone
        made: Reducer = import_module("slime.backends.megatron_utils.cp_utils").get_sum_of_sample_mean(
            total_lengths, response_lengths, loss_masks, sample_denoms, calculate_per_token_loss, *layout
        )
        return made

    return shared.reducer(
        {
            "total_lengths": total_lengths,
            "response_lengths": response_lengths,
            "loss_masks": loss_masks,
            "prompt_mask_sums": prompt_mask_sums,
        },
        lambda: _share() if share is None else Share(*share),
        make_own,
        loss_aggregation=loss_aggregation,
        divisor=divisor,
        per_token=calculate_per_token_loss,
        num_rollouts=num_rollouts,
        num_prompts=num_prompts,
        padded_length=shared.padded_length(qkv_format, max_seq_lens),
    )


def pg_loss_reducer(
    args: Namespace, batch: Mapping[str, Any], own: Reducer, loss_masks: Sequence[torch.Tensor] | None = None
) -> Reducer:
    """The reducer of the policy-gradient term: the line ``pg_loss_reducer = ...`` of slime's policy loss, or of your own.

    Args:
        args: slime's, after :func:`validate`.
        batch: the micro-batch; under ``prompt_mean`` it has to carry :data:`PROMPT_KEYS`.
        own: slime's ``sum_of_sample_mean``, which metrics stay on. It is what the default mode gives back.
        loss_masks: masks that were changed since (rejection): numerators take them, denominators stay.

    Raises:
        DataError: ``prompt_mean`` without its denominators in the batch.
    """
    return shared.of_batch(get_sum_of_sample_mean, args, batch, own, loss_masks)


def policy_loss(args: Namespace, batch: Mapping[str, Any], logits: torch.Tensor, sum_of_sample_mean: Reducer) -> Any:
    """The policy loss of slime with the policy-gradient term in the chosen mode; for ``--custom-loss-function-path``.

    It calls slime's own, whose hook for a custom reducer then gives ours: clipping, entropy, KL and metrics are slime's,
    the last three on its default reducer. A custom reducer of yours in ``args`` stays the one that is called.
    """
    loss = import_module("slime.backends.megatron_utils.loss").policy_loss_function
    return with_reducer(args, batch, logits, sum_of_sample_mean, loss, pg_loss_reducer)


def with_reducer(args: Namespace, batch: Mapping[str, Any], logits: torch.Tensor, own: Reducer, loss: Any, make: Any) -> Any:
    """Calls the trainer's policy loss so that its hook for a custom reducer gives ``make``'s."""
    if getattr(args, "custom_pg_loss_reducer_function_path", None) is not None:
        return loss(args, batch, logits, own)
    args = copy(args)
    args.custom_pg_loss_reducer_function_path = f"{__name__}.hook"
    with shared.reducing(lambda masks: make(args, batch, own, masks)):
        return loss(args, batch, logits, own)


def _share() -> Share:
    mpu = import_module("megatron.core").mpu
    return Share(mpu.get_context_parallel_rank(), mpu.get_context_parallel_world_size())
