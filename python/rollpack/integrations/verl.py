"""verl (tried with 0.9.1): its aggregation with our modes added, and its micro-batches under a hard token cap."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch

from rollpack._errors import PlanError
from rollpack._text import counted
from rollpack.integrations.padded import Ids, lengths_table, padded_token_weights, row_weights
from rollpack.names import MODES, OURS, resolve
from rollpack.planning import plan
from rollpack.torch.backends import gradient_factor
from rollpack.torch.weights import weighted_sum
from rollpack.weights import sample_weights

#: Policy losses that do not end in Σ rollout_is_weights × loss under ``token-sum``.
_OTHERWISE = {
    "sapo": "always takes seq-mean-token-mean",
    "geo_mean": "takes the weights into the ratio",
    "bypass_mode": "makes weights of its own",
}


def agg_loss(
    loss_mat: torch.Tensor,
    loss_mask: torch.Tensor,
    loss_agg_mode: str,
    dp_size: int = 1,
    batch_num_tokens: int | None = None,
    global_batch_size: int | None = None,
    loss_scale_factor: float | None = None,
    *,
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """As verl's ``agg_loss``, its arguments and modes included; masked positions are selected out.

    Args:
        loss_mat: [b, W], the token losses of a micro-batch.
        loss_mask: [b, W], 1 where a token is trained.
        loss_agg_mode: a mode of verl, or one of ours, whose ``weights`` have to be given.
        dp_size: ranks whose gradients are averaged.
        batch_num_tokens: T over all ranks and micro-batches of the step; None: of these rows, on one rank only.
        global_batch_size: rows of the step, as the above; None: those here that have a trained token.
        loss_scale_factor: L of ``seq-mean-token-sum-norm``; None: W.
        weights: [b], of these rows, as :func:`rollpack.integrations.padded.row_weights` gives them for the whole step.

    Returns:
        The loss to back-propagate, 0-d: this micro-batch's part of the step loss times ``dp_size``.

    Raises:
        PlanError: no such mode, or what it needs of the step is missing.
    """
    if weights is None:
        counts = {"batch_num_tokens": batch_num_tokens, "global_batch_size": global_batch_size}
        weights = _weights(loss_mask, loss_agg_mode, dp_size, loss_scale_factor, **counts)
    elif loss_agg_mode not in OURS:
        raise PlanError(f"loss_agg_mode is {loss_agg_mode!r}, and weights= are for a mode of ours: {', '.join(OURS)}")
    elif len(weights) != len(loss_mask):
        raise PlanError(f"there are {counted(len(weights), 'weight')} for {counted(len(loss_mask), 'row')}")
    loss = weighted_sum(loss_mat.reshape(-1), padded_token_weights(loss_mask, weights))
    return loss * gradient_factor("fsdp", dp_size=dp_size, cp_size=1, num_micro_batches=1)


def _weights(
    loss_mask: torch.Tensor,
    name: str,
    dp_size: int,
    loss_scale_factor: float | None,
    *,
    batch_num_tokens: int | None,
    global_batch_size: int | None,
) -> torch.Tensor:
    """[b] for a mode of verl."""
    sums = loss_mask.bool().sum(-1).cpu().numpy()
    divisor: float | None
    if name == "token-sum":
        mode, divisor, global_batch_size = "constant", 1.0, 1
    elif f"verl:{name}" in MODES:
        norm = loss_scale_factor or loss_mask.shape[-1]
        mode, divisor = resolve(f"verl:{name}", float(norm) if name.endswith("norm") else None, "count")
    else:
        raise PlanError(f"{name!r} is no mode of verl; a mode of ours needs weights=, of row_weights(...)")
    needed, given = (
        ("batch_num_tokens", batch_num_tokens) if mode == "token_mean" else ("global_batch_size", global_batch_size)
    )
    if given is None and dp_size > 1:
        raise PlanError(f"{name} needs {needed}, of all {counted(dp_size, 'rank')}")
    made = sample_weights(
        mode,
        rollout_mask_sums=sums,
        num_rollouts=int(np.count_nonzero(sums) if global_batch_size is None else global_batch_size),
        num_tokens=int(sums.sum() if batch_num_tokens is None else batch_num_tokens),
        divisor=divisor,
    )
    return torch.from_numpy(made)


def add_weights(
    batch: Any,
    loss_aggregation: str,
    *,
    uids: Ids | None = None,
    rollout_ids: Ids | None = None,
    divisor: float | None = None,
    empty: str = "count",
    mini_batch_size: int | None = None,
    dp_size: int = 1,
) -> None:
    """Put what each token weighs into ``batch["rollout_is_weights"]``, times what is there, for :func:`register`.

    Args:
        batch: the whole batch before ``update_actor``, a mapping with ``response_mask`` [B, W].
        loss_aggregation: a mode of ours, or another trainer's name.
        uids: [B], the prompt of each row (``non_tensor_batch["uid"]``), for ``prompt_mean``.
        rollout_ids: [B], which rollout each row belongs to; None: each is its own.
        divisor: L of ``constant``.
        empty: as for :func:`rollpack.plan`.
        mini_batch_size: rows of an optimizer step (``ppo_mini_batch_size`` times ``rollout.n``); None: all. Rows of a step
            are those that verl gives it, with ``actor.shuffle`` off: ranks hold equal runs of the batch, and steps equal
            runs of each of them.
        dp_size: the ranks that the batch is dealt to.

    Raises:
        PlanError: sizes do not divide, or a prompt group or rollout is cut over optimizer steps.
    """
    mask = batch["response_mask"]
    rows, per_step = len(mask), mini_batch_size or len(mask)
    if rows % per_step or per_step % dp_size:
        raise PlanError(f"{rows} rows, steps of {per_step} and {dp_size} ranks do not divide")
    steps = np.arange(rows) % (rows // dp_size) // (per_step // dp_size)
    weights = row_weights(
        mask.sum(-1), loss_aggregation, rollout_ids=rollout_ids, prompt_ids=uids, steps=steps, divisor=divisor, empty=empty
    )
    per_token = padded_token_weights(mask, weights).reshape(mask.shape).float()
    try:
        batch["rollout_is_weights"] = batch["rollout_is_weights"] * per_token
    except KeyError:
        batch["rollout_is_weights"] = per_token


def register(base: str = "vanilla") -> str:
    """Register ``rollpack_<base>`` with verl: its policy loss ``base``, added up with the weights of :func:`add_weights`.

    Its KL and entropy terms keep ``loss_agg_mode``.

    Returns:
        The name, for ``actor.policy_loss.loss_mode``.
    """
    from verl.trainer.ppo import core_algos

    if base in _OTHERWISE:
        raise PlanError(f"verl's policy loss {base!r} {_OTHERWISE[base]}; weights cannot be put into it")
    inner, name = core_algos.get_policy_loss_fn(base), f"rollpack_{base}"

    def policy_loss(
        old_log_prob: torch.Tensor,
        log_prob: torch.Tensor,
        advantages: torch.Tensor,
        response_mask: torch.Tensor,
        loss_agg_mode: str = "token-sum",  # noqa: ARG001
        config: Any = None,
        rollout_is_weights: torch.Tensor | None = None,
    ) -> Any:
        if rollout_is_weights is None:
            raise PlanError(f"{name} needs the weights of the batch: call rollpack.integrations.verl.add_weights first")
        return inner(
            old_log_prob=old_log_prob,
            log_prob=log_prob,
            advantages=advantages,
            response_mask=response_mask,
            loss_agg_mode="token-sum",
            config=config,
            rollout_is_weights=rollout_is_weights,
        )

    core_algos.register_policy_loss(name)(policy_loss)
    return name


def rearrange_micro_batches(
    batch: Any,
    max_token_len: int,
    dp_group: Any = None,
    num_batches_divided_by: int | None = None,
    same_micro_num_in_dp: bool = True,
    min_num_micro_batch: int | None = None,
    use_dynamic_bsz_balance: bool = True,
    force_group_size: int = 1,
) -> tuple[list[Any], list[list[int]]]:
    """As verl's function of this name: as few micro-batches as hold ``max_token_len``, never more tokens in one.

    Args:
        batch: a TensorDict of this rank with ``input_ids``, nested, or padded with ``attention_mask`` [B, S].
        max_token_len: the most true tokens of a micro-batch.
        dp_group: with ``same_micro_num_in_dp``, all its ranks get as many as the one that needs most.
        num_batches_divided_by: their number is a multiple of this.
        same_micro_num_in_dp: see ``dp_group``.
        min_num_micro_batch: or more.
        use_dynamic_bsz_balance: balance their FLOPs of attention, not their tokens.
        force_group_size: rows that stay together, each so many that follow each other.

    Returns:
        The micro-batches, and the rows of each.

    Raises:
        PlanError: a row or group is over the cap, or a rank has fewer of them than micro-batches are wanted.
    """
    from verl.utils import tensordict_utils

    ids = batch["input_ids"]
    lengths = (ids.offsets().diff() if ids.is_nested else batch["attention_mask"].sum(1)).cpu().numpy()
    if len(lengths) % force_group_size:
        raise PlanError(f"{len(lengths)} rows are no multiple of force_group_size {force_group_size}")
    # A group is one long row here.
    grouped = lengths.reshape(-1, force_group_size).sum(1)
    cost = "attention" if use_dynamic_bsz_balance else "tokens"
    made = partial(plan, lengths_table(grouped), max_tokens_per_gpu=max_token_len, cost=cost)
    wanted: tuple[int | PlanError, int]
    try:
        wanted = max(made().steps[0].num_micro_batches, min_num_micro_batch or 1), len(grouped)
    except PlanError as error:
        wanted = error, 0
    of_ranks: list[Any] = [wanted]
    if same_micro_num_in_dp and dp_group is not None and torch.distributed.is_initialized():
        of_ranks = [None] * torch.distributed.get_world_size(dp_group)
        torch.distributed.all_gather_object(of_ranks, wanted, group=dp_group)
    # What one rank cannot do no rank does: the others would wait for it.
    for number, _ in of_ranks:
        if isinstance(number, PlanError):
            raise number
    multiple = num_batches_divided_by or 1
    number = -(-max(number for number, _ in of_ranks) // multiple) * multiple
    fewest = min(rows for _, rows in of_ranks)
    if number > fewest:
        raise PlanError(f"{number} micro-batches are wanted on each rank, and one has {fewest} rows or groups to fill them")
    planned = made(micro_batch_multiple=number)
    groups = [planned.rows(0, 0, index) for index in range(number)]
    indices = [(rows[:, None] * force_group_size + np.arange(force_group_size)).reshape(-1).tolist() for rows in groups]
    return [tensordict_utils.index_select_tensor_dict(batch, rows) for rows in indices], indices
