"""miles (radixark/miles), Megatron and FSDP: its reducer's signature, else as :mod:`rollpack.integrations.slime`.

Written against the call signatures of miles at 0b3ae66 (objective.py), 01c59ee and later (train_data_conversion.py) and
044f7c8 (torch_native/actor.py, the FSDP path). The fourth positional argument of its reducer is
``calculate_per_token_loss``, as slime's was before it took denominators. miles is imported only where its own functions are
called.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import torch

from rollpack._errors import PlanError
from rollpack.integrations import _sum_of_sample_mean as shared
from rollpack.integrations._samples import convert_samples_to_train_data, samples_from_arrow, samples_to_arrow
from rollpack.integrations._schedule import build_dp_schedule, columns_of_steps, prompt_columns
from rollpack.integrations._sum_of_sample_mean import PROMPT_KEYS, Reducer, Share, add_arguments, hook
from rollpack.integrations.slime import with_reducer

__all__ = [
    "PROMPT_KEYS",
    "add_arguments",
    "build_dp_schedule",
    "convert_samples_to_train_data",
    "fsdp_prompt_columns",
    "get_sum_of_sample_mean",
    "hook",
    "pg_loss_reducer",
    "policy_loss",
    "prompt_columns",
    "samples_from_arrow",
    "samples_to_arrow",
    "validate",
]

#: Where miles has had its policy loss, and its reducer, the newest first.
_LOSSES = ("miles.backends.training_utils.loss.hub.losses", "miles.backends.training_utils.loss_hub.losses")
_REDUCERS = ("miles.backends.training_utils.data.context_parallel", "miles.backends.training_utils.cp_utils")


def validate(args: Namespace, *, custom_loss: bool = True) -> None:
    """As :func:`rollpack.integrations.slime.validate`.

    Raises:
        PlanError: see there. Also: ``prompt_mean`` or ``constant`` with ``--train-backend fsdp`` and context parallelism,
            where miles averages gradients over dp ranks without cp, so that no factor makes them those of the step loss.
    """
    fsdp = getattr(args, "train_backend", "megatron") == "fsdp"
    if fsdp and args.loss_aggregation not in shared.OWN and getattr(args, "context_parallel_size", 1) > 1:
        raise PlanError(
            f"--loss-aggregation {args.loss_aggregation} with --train-backend fsdp and --context-parallel-size "
            f"{args.context_parallel_size}: miles' FSDP averages gradients over a group without cp. Use megatron, or cp 1"
        )
    shared.validate(args, f"{__name__}.policy_loss" if custom_loss else None)


def get_sum_of_sample_mean(
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    loss_masks: Sequence[torch.Tensor],
    calculate_per_token_loss: bool = False,
    qkv_format: str = "thd",
    max_seq_lens: Sequence[int] | None = None,
    *,
    denominators: Sequence[torch.Tensor] | torch.Tensor | None = None,
    loss_aggregation: str = "sample_mean",
    divisor: float | None = None,
    prompt_mask_sums: Sequence[int] | torch.Tensor | None = None,
    num_rollouts: int | None = None,
    num_prompts: int | None = None,
    own: Reducer | None = None,
    share: tuple[int, int] | None = None,
) -> Reducer:
    """``get_sum_of_sample_mean`` of miles with modes; see :func:`rollpack.integrations.slime.get_sum_of_sample_mean`.

    ``denominators`` are miles' own, for its own reducer alone; older ones of miles and slime do not know them.
    """
    if not isinstance(calculate_per_token_loss, bool):
        raise PlanError(
            f"the fourth argument is calculate_per_token_loss, and this is a {type(calculate_per_token_loss).__name__}: for "
            "slime's denominators call rollpack.integrations.slime.get_sum_of_sample_mean"
        )

    def make_own() -> Reducer:
        if own is not None:
            return own
        known = {} if denominators is None else {"denominators": denominators}
        made: Reducer = _first(_REDUCERS).get_sum_of_sample_mean(
            total_lengths, response_lengths, loss_masks, calculate_per_token_loss, qkv_format, max_seq_lens, **known
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
    """As :func:`rollpack.integrations.slime.pg_loss_reducer`."""
    return shared.of_batch(get_sum_of_sample_mean, args, batch, own, loss_masks)


def policy_loss(args: Namespace, batch: Mapping[str, Any], logits: torch.Tensor, sum_of_sample_mean: Reducer) -> Any:
    """The policy loss of miles with the policy-gradient term in the chosen mode; as that of slime."""
    loss = _first(_LOSSES).policy_loss_function
    return with_reducer(args, batch, logits, sum_of_sample_mean, loss, pg_loss_reducer)


def fsdp_prompt_columns(args: Namespace, data: Mapping[str, Sequence[Any]]) -> dict[str, list[int]]:
    """:func:`prompt_columns` of the FSDP path, which has no schedule: a step is ``global_batch_size`` samples in a row.

    It deals rows out to dp ranks in turn, and each rank takes an equal run of its own for a step. It divides by
    ``global_batch_size``, whatever rollouts there are.

    Raises:
        PlanError: ``balance_data`` deals rows out otherwise, so that with several steps theirs are not known here.
        DataError: a step cuts a prompt group.
    """
    size, rows = args.global_batch_size, len(data["tokens"])
    if getattr(args, "balance_data", False) and rows > size:
        raise PlanError(
            "--balance-data with several steps per rollout: which rows a step has is then not known; leave it out"
        )
    steps = [range(first, first + size) for first in range(0, rows - size + 1, size)]
    return columns_of_steps(data, steps, [size] * len(steps))


def _first(names: Sequence[str]) -> Any:
    """The first of these modules that there is."""
    for name in names[:-1]:
        try:
            return import_module(name)
        except ModuleNotFoundError:
            continue
    return import_module(names[-1])


def _share() -> Share:
    cp = import_module("miles.backends.training_utils.parallel").get_parallel_state().cp
    return Share(cp.rank, cp.size)
