"""In SkyRL's environment: its scaling of advantages and its policy losses beside ours."""

import ast
import inspect
import json
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from padded_case import bare_packages, chosen_case, off, unused

bare_packages("skyrl", "skyrl.backends", "skyrl.train")
unused("skyrl.train.config", "AlgorithmConfig")
from skyrl.backends.skyrl_train.utils import ppo_utils  # noqa: E402

from rollpack import PlanError  # noqa: E402
from rollpack.integrations import skyrl as ours  # noqa: E402

CASE = chosen_case()
MAX_SEQ_LEN = 1024
MICRO_BATCH = CASE.rows // 8
STARTS = np.flatnonzero(np.diff(CASE.groups, prepend=CASE.groups[0] - 1))
BOUNDARIES = list(zip(STARTS.tolist(), [*STARTS[1:].tolist(), CASE.rows], strict=True))
MODES = {
    "token_mean": ("token_mean", None),
    "sequence_mean": ("sample_mean", None),
    "seq_mean_token_sum_norm": ("constant", float(MAX_SEQ_LEN)),
    "prompt_mean": ("prompt_mean", None),
    "token_mean_legacy": ("token_mean", None),
}


def scaled(function, mode):
    """The advantages of the whole step, with a 1 for each token."""
    ones = torch.ones_like(CASE.losses)
    return function(ones, CASE.mask.double(), mode, MICRO_BATCH, MAX_SEQ_LEN, BOUNDARIES)


def compared():
    """Each reduction: what a token weighs is its scaled advantage, however the step is cut later."""
    rows, same = [], 0.0
    theirs = ppo_utils.apply_loss_reduction_to_advantages_minibatch
    mine = ours.apply_loss_reduction_to_advantages_minibatch
    for mode, (ours_is, divisor) in MODES.items():
        expected = CASE.weights(ours_is, divisor=divisor)
        found = scaled(theirs, mode) * CASE.mask
        same = max(same, off(scaled(mine, mode), found))
        cut = "micro-batches of an eighth of the rows" if mode == "token_mean_legacy" else "any"
        rows.append({"function": "SkyRL apply_loss_reduction", "mode": mode, "cut": cut, "off": off(found, expected)})
    return rows, same


def of_rollouts():
    """sample_mean averages rollouts of several rows, which sequence_mean does not."""
    ones, two = torch.ones_like(CASE.losses), np.arange(CASE.rows) // 2
    found = ours.apply_loss_reduction_to_advantages_minibatch(ones, CASE.mask, "sample_mean", 1, None, rollout_ids=two)
    sums = CASE.sums.reshape(-1, 2).sum(1).repeat_interleave(2)
    expected = CASE.mask / (len(sums) / 2 * sums.clamp(min=1)[:, None])
    return off(found, expected)


def proportional():
    """For each policy loss: whether twice the advantages of a row are twice the gradient of its tokens."""
    torch.manual_seed(0)
    config = SimpleNamespace(
        eps_clip_low=0.2, eps_clip_high=0.2, clip_ratio_c=3.0, loss_reduction="sequence_mean", policy_loss_type="dual_clip",
        clip_cov=SimpleNamespace(clip_ratio=0.5, clip_cov_lb=-0.1, clip_cov_ub=0.5),
        kl_cov=SimpleNamespace(kl_cov_frac=0.5, ppo_kl_coef=1.0),
        cispo=SimpleNamespace(cispo_eps_clip_low=0.2, cispo_eps_clip_high=0.2),
        sapo=SimpleNamespace(tau_pos=1.0, tau_neg=1.05),
        dppo=SimpleNamespace(dppo_type="binary_tv", delta_low=0.1, delta_high=0.1),
        off_policy_correction=SimpleNamespace(
            tis_ratio_type=None, sequence_mask_metric=None, outlier_token_is_threshold_low=None,
            outlier_token_is_threshold_high=None, token_mask_is_threshold_low=None, token_mask_is_threshold_high=None,
        ),
    )  # fmt: skip
    rows, width = 4, 6
    log_probs, old = (torch.randn(rows, width, dtype=torch.float64) * 0.3 - 1 for _ in range(2))
    advantages = torch.randn(rows, 1, dtype=torch.float64).expand(-1, width)
    factors = torch.tensor([[0.5], [2.0], [0.1], [1.0]], dtype=torch.float64)
    mask = torch.ones(rows, width, dtype=torch.float64)

    def gradient(function, advantages):
        torch.manual_seed(1)
        parameter = log_probs.clone().requires_grad_()
        loss, _ = function(parameter, old, advantages.clone(), config, loss_mask=mask, rollout_logprobs=old)
        return torch.autograd.grad(loss, parameter)[0]

    told = {}
    for name in ppo_utils.PolicyLossType:
        function = FUNCTIONS[str(name)]
        told[str(name)] = bool(
            off(gradient(function, advantages * factors), gradient(function, advantages) * factors) < 1e-6
        )
    return told


FUNCTIONS = {
    "regular": ppo_utils.ppo_policy_loss,
    "dual_clip": ppo_utils.ppo_policy_loss,
    "gspo": ppo_utils.gspo_policy_loss,
    "cispo": ppo_utils.compute_policy_loss_cispo,
    "rollout_is": ppo_utils.rollout_is_policy_loss,
    "clip_cov": ppo_utils.compute_policy_loss_clip_cov,
    "kl_cov": ppo_utils.compute_policy_loss_kl_cov,
    "sapo": ppo_utils.sapo_policy_loss,
    "cross_entropy": ppo_utils.cross_entropy_loss,
    "importance_sampling": ppo_utils.importance_sampling_loss,
    "dppo": ppo_utils.dppo_policy_loss,
}


def warned():
    """The losses that are warned of."""
    names = []
    for name in ppo_utils.PolicyLossType:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ours.warn_of_loss(str(name))
        names += [str(name)] if caught else []
    return names


def called_as():
    """The trainer calls the function that it imports by this name, with arguments that ours takes."""
    (home,) = sys.modules["skyrl.train"].__path__
    calls = [
        node
        for node in ast.walk(ast.parse(Path(home, "trainer.py").read_text()))
        if isinstance(node, ast.Call)
        and getattr(node.func, "id", "") == ours.apply_loss_reduction_to_advantages_minibatch.__name__
    ]
    parameters = inspect.signature(ours.apply_loss_reduction_to_advantages_minibatch).parameters
    return [not call.args and {word.arg for word in call.keywords} <= set(parameters) for call in calls]


def refused():
    """Rows that SkyRL would leave out, and modes without what they need."""
    ones = torch.ones_like(CASE.losses)
    for arguments in (
        ("token_mean_legacy", CASE.rows - 1, None),
        ("seq_mean_token_sum_norm", 1, None),
        ("token_sum", 1, None),
    ):
        with pytest.raises(PlanError):
            ours.apply_loss_reduction_to_advantages_minibatch(ones, CASE.mask, *arguments)


if __name__ == "__main__":
    rows, same = compared()
    refused()
    assert called_as() == [True]
    print(
        json.dumps(
            {
                "compared": rows,
                "same": same,
                "of_rollouts": of_rollouts(),
                "proportional": proportional(),
                "warned": warned(),
            }
        )
    )
