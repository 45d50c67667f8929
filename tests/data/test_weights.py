"""``sample_weights``, called by those who bring their own batches. What modes mean is tested in the core and the losses."""

import numpy as np
import pytest

import rollpack


def test_each_mode_by_hand():
    """Three samples: two of a rollout with 4 trained tokens, one of a rollout with 2; groups of 5 and 1."""
    rollouts, prompts = [4, 4, 2], [5, 5, 1]
    expected = {
        "sample_mean": [1 / 8, 1 / 8, 1 / 4],
        "prompt_mean": [1 / 10, 1 / 10, 1 / 2],
        "token_mean": [1 / 6] * 3,
        "constant": [1 / 20] * 3,
    }
    for mode, wanted in expected.items():
        weights = rollpack.sample_weights(
            mode,
            rollout_mask_sums=rollouts,
            prompt_mask_sums=prompts,
            num_rollouts=2,
            num_prompts=2,
            num_tokens=6,
            divisor=10.0 if mode == "constant" else None,
        )
        assert weights.dtype == np.float64
        np.testing.assert_array_equal(weights, wanted)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.int64, np.uint64])
def test_any_integers_do_contiguous_or_not(dtype):
    every_other = np.array([4, 9, 2, 9], dtype=dtype)[::2]
    weights = rollpack.sample_weights("sample_mean", rollout_mask_sums=every_other, num_rollouts=2)
    assert weights.tolist() == [1 / 8, 1 / 4]


@pytest.mark.parametrize("wrong", [None, 3, ["token_mean"], b"token_mean", "\udcff"])
def test_what_is_no_mode_is_told_the_modes(wrong):
    with pytest.raises(
        rollpack.PlanError, match=r"^loss_aggregation is '.*'; it has to be one of sample_mean, prompt_mean,"
    ):
        rollpack.sample_weights(wrong, rollout_mask_sums=[1], num_rollouts=1)


def test_a_mask_sum_beyond_int64_is_told():
    with pytest.raises(rollpack.PlanError, match="rollout_mask_sums holds 18446744073709551615; it has to fit an int64"):
        rollpack.sample_weights("token_mean", rollout_mask_sums=np.array([1, 2**64 - 1], np.uint64), num_tokens=4)


def test_either_of_the_mask_sums_tells_how_many_samples_there_are():
    assert rollpack.sample_weights("token_mean", prompt_mask_sums=[1, 3], num_tokens=4).tolist() == [0.25, 0.25]
    assert rollpack.sample_weights("token_mean", rollout_mask_sums=[1, 3, 3], num_tokens=4).tolist() == [0.25] * 3
    with pytest.raises(rollpack.PlanError, match="pass rollout_mask_sums or prompt_mask_sums.*how many samples"):
        rollpack.sample_weights("token_mean", num_tokens=4)
    # An empty list has no dtype of its own, and is none of the wrong ones.
    assert rollpack.sample_weights("sample_mean", rollout_mask_sums=[], num_rollouts=1).shape == (0,)


@pytest.mark.parametrize("name", ["rollout_mask_sums", "prompt_mask_sums"])
def test_what_is_no_row_of_integers_is_named(name):
    mode = {"rollout_mask_sums": "sample_mean", "prompt_mask_sums": "prompt_mean"}[name]
    for wrong, shown in [
        ([[1, 2]], r"shape \(1, 2\) and dtype int64"),
        (3, r"shape \(\) and dtype int64"),
        ([1.0, 2.0], r"shape \(2,\) and dtype float64"),
        ([True, False], r"shape \(2,\) and dtype bool"),
        (["1"], r"shape \(1,\) and dtype <U1"),
    ]:
        with pytest.raises(rollpack.PlanError, match=rf"^{name} has {shown}; it has to be \[S\] integers"):
            rollpack.sample_weights(mode, **{name: wrong}, num_rollouts=2, num_prompts=2)
