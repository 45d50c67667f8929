"""SkyRL (tried with 0.3.0): advantages scaled so that its sums are any mode, and what of its losses does not follow them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from statistics import fmean

import numpy as np
import torch

from rollpack._errors import PlanError
from rollpack.integrations.padded import Ids, padded_token_weights, row_weights
from rollpack.names import MODES
from rollpack.torch.weights import scale_advantages

#: Policy losses that are not proportional to a factor on the advantages of a row.
_OTHERWISE = {
    "clip_cov": "compares covariances with the advantages to thresholds",
    "kl_cov": "adds a KL term, to the tokens of the largest covariances with the advantages",
    "cross_entropy": "does not read advantages",
}


def apply_loss_reduction_to_advantages_minibatch(
    advantages: torch.Tensor,
    loss_mask: torch.Tensor,
    loss_reduction: str,
    micro_batch_size: int,
    max_seq_len: int | None,
    prompt_boundaries: Sequence[tuple[int, int]] | None = None,
    *,
    rollout_ids: Ids | None = None,
) -> torch.Tensor:
    """As SkyRL's function of this name, which its trainer calls for each optimizer step; with our modes too.

    Args:
        advantages: [B, W], of the rows of one optimizer step over all ranks.
        loss_mask: [B, W], 1 where a token is trained.
        loss_reduction: a name of SkyRL, or a mode of ours: ``sample_mean`` averages rollouts, which ``sequence_mean`` does
            with rows (one turn each, under step-wise training). ``constant`` divides by ``max_seq_len``.
        micro_batch_size: rows of a micro-batch, for ``token_mean_legacy``.
        max_seq_len: L.
        prompt_boundaries: (start, end) rows of each prompt, one after the other.
        rollout_ids: [B], which rollout each row belongs to; None: each is its own.

    Returns:
        [B, W], 0 where nothing is trained; float64 for float64 advantages, else float32.

    Raises:
        PlanError: no such mode, or something that it needs is missing.
    """
    rows = len(advantages)
    sums = loss_mask.bool().sum(-1)
    name = f"skyrl:{loss_reduction}" if f"skyrl:{loss_reduction}" in MODES else loss_reduction
    prompts = None
    if prompt_boundaries is not None:
        ends = [0, *(end for _, end in prompt_boundaries)]
        if [start for start, _ in prompt_boundaries] != ends[:-1] or ends != sorted(set(ends)) or ends[-1] != rows:
            raise PlanError(f"prompt_boundaries {list(prompt_boundaries)} do not cut {rows} rows one after the other")
        prompts = np.repeat(np.arange(len(prompt_boundaries)), [end - start for start, end in prompt_boundaries])
    if name == "skyrl:token_mean_legacy":
        if micro_batch_size < 1 or rows % micro_batch_size:
            raise PlanError(f"{rows} rows are no multiple of micro_batch_size {micro_batch_size}: SkyRL drops the last ones")
        # A mean over micro-batches of their token means: a micro-batch is the unit here.
        name, rollout_ids = "sample_mean", np.arange(rows) // micro_batch_size
    elif name.startswith("skyrl:") and MODES[name].per_row:
        rollout_ids = None
    divisor = float(max_seq_len) if max_seq_len and name in {"constant", "skyrl:seq_mean_token_sum_norm"} else None
    weights = row_weights(sums, name, rollout_ids=rollout_ids, prompt_ids=prompts, divisor=divisor)
    scaled = scale_advantages(advantages.reshape(-1), padded_token_weights(loss_mask, weights))
    return scaled.reshape(advantages.shape)


def warn_of_loss(policy_loss_type: str, *, use_kl_loss: bool = False, use_entropy_loss: bool = False) -> None:
    """Warn where scaled advantages are not a scaled loss.

    Args:
        policy_loss_type: ``trainer.algorithm.policy_loss_type``.
        use_kl_loss: whether there is a KL term.
        use_entropy_loss: whether there is an entropy term.
    """
    if policy_loss_type in _OTHERWISE:
        warnings.warn(
            f"{policy_loss_type} {_OTHERWISE[policy_loss_type]}: scaling advantages is not scaling this loss",
            stacklevel=2,
        )
    terms = [name for name, used in (("KL", use_kl_loss), ("entropy", use_entropy_loss)) if used]
    if terms:
        warnings.warn(
            f"SkyRL's {' and '.join(terms)} term stays a mean of micro-batch means, whatever advantages are scaled by",
            stacklevel=2,
        )


def logged_loss(steps: Sequence[Sequence[float]]) -> float:
    """The loss to log: summed over an optimizer step's micro-batches of all ranks, averaged over optimizer steps.

    Args:
        steps: for each optimizer step the losses of its micro-batches, without the dp size that the gradient is multiplied
            by.
    """
    return fmean(sum(step) for step in steps)
