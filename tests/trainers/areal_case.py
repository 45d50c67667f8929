"""In AReaL's environment: its actor loss, weighted as its engines do, beside ours."""

import json

import torch
from padded_case import REAL, as_policy_loss, bare_packages, chosen_case, kit, off, unused

bare_packages("areal", "areal.utils", "areal.utils.functional", "areal.api")
unused("areal.api.cli_args", "RejectionSamplingConfig")
unused("areal.utils.data", "KLEstimator")
from areal.utils.functional.functional import ppo_actor_loss_fn, sapo_loss_fn  # noqa: E402

from rollpack.testing import padded_rows  # noqa: E402

CASE = chosen_case()


def gradient(sapo, cut):
    """The loss of a micro-batch times its share of the tokens and the ranks; averaged over ranks."""
    log_probs = torch.zeros_like(CASE.losses).requires_grad_()
    for rank in cut:
        for rows in rank:
            mask, zeros = CASE.mask[rows], torch.zeros_like(CASE.losses[rows])
            given = {"old_logprobs": zeros, "advantages": zeros - 1, "loss_mask": mask}
            if sapo:
                loss, _ = sapo_loss_fn(log_probs[rows], tau_pos=1.0, tau_neg=1.05, **given)
            else:
                loss, _ = ppo_actor_loss_fn(log_probs[rows], proximal_logprobs=zeros, eps_clip=0.2, **given)
            (loss * int(mask.sum()) / int(CASE.sums.sum()) * len(cut) / len(cut)).backward()
    return log_probs.grad


def reducer(x, m):
    """For the kit."""
    assert m.num_tokens > 0, "no trained token in the step"  # as its engine does
    rows, mask = padded_rows(x, m), padded_rows(m.loss_mask, m)
    log_probs, advantages = as_policy_loss(rows)
    zeros = torch.zeros_like(rows)
    given = {"proximal_logprobs": zeros, "old_logprobs": zeros, "advantages": advantages, "loss_mask": mask}
    loss, _ = ppo_actor_loss_fn(log_probs, eps_clip=0.2, **given)
    return loss * int(mask.sum()) / m.num_tokens * m.dp_size


if __name__ == "__main__":
    told = [
        {
            "function": "AReaL loss functions",
            "mode": mode,
            "cut": name,
            "off": off(gradient(mode == "sapo", cut), CASE.weights("token_mean")),
        }
        for mode in ("grpo", "sapo")
        for name, cut in CASE.cuts().items()
    ]
    checked = ("AReaL ppo_actor_loss_fn", "grpo", reducer, "token_mean")
    found = [kit(*checked, takes_losses=False, backend="fsdp")] if REAL else []
    print(json.dumps({"compared": told, "kit": found}))
