"""``sample_weights``: the meaning of every mode, one weight per sample."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rollpack import _core
from rollpack._arguments import integer, number, word
from rollpack._errors import PlanError


def sample_weights(
    loss_aggregation: str,
    *,
    rollout_mask_sums: npt.ArrayLike | None = None,
    prompt_mask_sums: npt.ArrayLike | None = None,
    num_rollouts: int | None = None,
    num_prompts: int | None = None,
    num_tokens: int | None = None,
    divisor: float | None = None,
) -> npt.NDArray[np.float64]:
    """The weight of each sample's trained tokens, so that the step loss is Σ weight × mask × token loss.

    ===============  ==================  =========================================================
    mode             weight              source
    ===============  ==================  =========================================================
    ``sample_mean``  1 / (N M_r)         GRPO's sample average (arXiv:2402.03300), per rollout
    ``prompt_mean``  1 / (P M_g)         ScaleRL's prompt average (arXiv:2510.13786, section 3.2)
    ``token_mean``   1 / T               one mean over all tokens
    ``constant``     1 / (L N)           Dr. GRPO (arXiv:2503.20783); L is ``divisor``
    ===============  ==================  =========================================================

    Args:
        loss_aggregation: the mode.
        rollout_mask_sums: [S] integers, M_r of each sample's rollout. ``token_mean`` and ``constant`` take from either of
            the two how many samples there are.
        prompt_mask_sums: [S] integers, M_g of each sample's prompt group.
        num_rollouts: N of the step.
        num_prompts: P of the step.
        num_tokens: T of the step.
        divisor: L, finite and above 0, for ``constant`` and no other.

    Returns:
        float64 [S]; 0 where the mean is over no trained token.

    Raises:
        PlanError: something is missing, negative or does not go together.

    Two samples of one rollout, with 2 and 3 trained tokens, and one of another:

    >>> sample_weights("sample_mean", rollout_mask_sums=[5, 5, 1], num_rollouts=2).tolist()
    [0.1, 0.1, 0.5]
    """
    rollouts, prompts = _int64("rollout_mask_sums", rollout_mask_sums), _int64("prompt_mask_sums", prompt_mask_sums)
    given = rollouts if rollouts is not None else prompts
    weights = _core.sample_weights(
        word(loss_aggregation),
        0 if given is None else len(given),
        rollouts,
        prompts,
        _count("num_rollouts", num_rollouts),
        _count("num_prompts", num_prompts),
        _count("num_tokens", num_tokens),
        None if divisor is None else number("divisor", divisor),
    )
    if given is None:
        raise PlanError("pass rollout_mask_sums or prompt_mask_sums, which also tell how many samples there are")
    return weights


def _count(name: str, value: int | None) -> int | None:
    return None if value is None else integer(name, value)


def _int64(name: str, values: npt.ArrayLike | None) -> npt.NDArray[np.int64] | None:
    if values is None:
        return None
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise PlanError(f"{name} has shape {array.shape} and dtype {array.dtype}; it has to be [S] integers")
    if array.dtype.kind == "u" and array.size and array.max() > np.iinfo(np.int64).max:
        raise PlanError(f"{name} holds {array.max()}; it has to fit an int64")
    return np.ascontiguousarray(array, dtype=np.int64)
