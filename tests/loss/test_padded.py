"""Weights of padded rows, and the adapters that need no trainer to be run: values by hand."""

import warnings
from dataclasses import dataclass, field
from fractions import Fraction as F

import numpy as np
import pytest
import torch

from rollpack import DataError, PlanError, RollpackError
from rollpack.integrations import skyrl, tinker, verl
from rollpack.integrations.padded import padded_token_weights, row_weights
from rollpack.testing import check_reducer, padded_rows

LOSSES = torch.tensor([[4.0, 0, 0, 0], [1, 2, 3, 0], [10, 20, 0, 0], [1, 100, 2, 3]], dtype=torch.float64)
MASK = torch.tensor([[1, 0, 0, 0], [1, 1, 1, 0], [1, 1, 0, 0], [1, 0, 1, 1]])
GROUPS = ["a", "a", "b", "b"]
BY_HAND = {"sample_mean": 5.75, "prompt_mean": 4.85, "token_mean": 46 / 9, "constant": 1.15}


def loss(weights, losses=LOSSES, mask=MASK):
    return float(padded_token_weights(mask, weights) @ losses.reshape(-1))


@pytest.mark.parametrize("mode", BY_HAND)
def test_four_rows_by_hand(mode):
    divisor = 10 if mode == "constant" else None
    weights = row_weights(MASK.sum(-1), mode, prompt_ids=GROUPS, divisor=divisor)
    assert loss(weights) == pytest.approx(BY_HAND[mode], rel=1e-14)
    parts = [
        verl.agg_loss(LOSSES[rows], MASK[rows], mode, dp_size=2, weights=weights[rows]) / 2 for rows in ([3], [0, 2], [1])
    ]
    assert float(sum(parts)) == pytest.approx(BY_HAND[mode], rel=1e-14)


def test_fan_out_and_empty_rows_by_hand():
    """Rollout A has rows of 1 and 3 tokens, B one of 2, C one without a trained token."""
    sums = torch.tensor([1, 3, 2, 0])
    ids = ["A", "A", "B", "C"]
    assert row_weights(sums, "sample_mean", rollout_ids=ids).tolist() == pytest.approx([1 / 12, 1 / 12, 1 / 6, 0])
    tuples = [(0, 0), (0, 0), (0, 1), (1, 0)]
    assert row_weights(sums, "sample_mean", rollout_ids=tuples).tolist() == pytest.approx([1 / 12, 1 / 12, 1 / 6, 0])
    skipped = row_weights(sums, "sample_mean", rollout_ids=ids, empty="skip")
    assert skipped.tolist() == pytest.approx([1 / 8, 1 / 8, 1 / 4, 0])
    assert row_weights(sums, "trl:grpo").tolist() == pytest.approx([1 / 4, 1 / 12, 1 / 8, 0])


def test_each_optimizer_step_has_weights_of_its_own():
    weights = row_weights([1, 3, 2, 2], "prompt_mean", prompt_ids=[5, 6, 5, 6], steps=[0, 1, 0, 1])
    assert weights.tolist() == pytest.approx([1 / 3, 1 / 5, 1 / 3, 1 / 5])


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"prompt_ids": [0, 1, 0, 1], "steps": [0, 0, 1, 1]}, "prompt group 0 is cut: row 2 is in step 1"),
        ({"prompt_ids": [0, 1, 2]}, "there are 3 of group_index for 4 rows"),
        ({}, "nothing says which rows are of one: pass their ids"),
    ],
)
def test_what_row_weights_refuse(options, told):
    with pytest.raises(RollpackError, match=told):
        row_weights([1, 1, 1, 1], "prompt_mean", **options)


def test_ids_that_differ_in_kind_are_two_and_tokens_are_counted_in_integers():
    assert row_weights([1, 1], "prompt_mean", prompt_ids=["1", 1]).tolist() == [0.5, 0.5]
    assert row_weights([1, 1, 1], "prompt_mean", prompt_ids=[(0, "a"), (0, "b"), (0, "a")]).tolist() == [0.25, 0.5, 0.25]
    with pytest.raises(RollpackError, match="mask_sums is float64"):
        row_weights([1.5, 2], "token_mean")


def test_a_mean_of_micro_batches_is_none_of_rows():
    with pytest.raises(PlanError, match="depends on the trainer's micro-batches"):
        row_weights([1, 2], "skyrl:token_mean_legacy")


def test_a_rollout_cut_over_steps_is_refused():
    with pytest.raises(PlanError, match="rollout x is cut: row 1 is in step 1"):
        row_weights([1, 1], "sample_mean", rollout_ids=["x", "x"], steps=[0, 1])


def test_agg_loss_keeps_the_promise():
    def reduce(x, m):
        rows, mask = padded_rows(x, m), padded_rows(m.loss_mask, m)
        return verl.agg_loss(rows, mask, "prompt_mean", dp_size=m.dp_size * m.cp_size, weights=m.sample_weights)

    report = check_reducer(reduce, loss_aggregation="prompt_mean", backend="fsdp")
    assert report.ok, report


def test_verl_without_counts_of_the_step_takes_these_rows():
    """As verl: on one rank only. Rows without a trained token do not count."""
    mask = torch.cat([MASK, torch.zeros(1, 4, dtype=torch.long)])
    losses = torch.cat([LOSSES, torch.full((1, 4), float("nan"), dtype=torch.float64)])
    for mode, expected in {
        "token-mean": 46 / 9,
        "token-sum": 46,
        "seq-mean-token-mean": 5.75,
        "seq-mean-token-sum": 11.5,
        "seq-mean-token-sum-norm": 11.5 / 4,
    }.items():
        assert float(verl.agg_loss(losses, mask, mode)) == pytest.approx(expected, rel=1e-12)
    with pytest.raises(PlanError, match="token-mean needs batch_num_tokens, of all 2 ranks"):
        verl.agg_loss(losses, mask, "token-mean", dp_size=2)
    with pytest.raises(PlanError, match="a mode of ours needs weights="):
        verl.agg_loss(losses, mask, "prompt_mean")


def test_weights_are_added_for_the_steps_that_verl_makes():
    """Two ranks hold rows 0 1 and 2 3; the first step is of rows 0 and 2, the second of 1 and 3."""
    batch = {"response_mask": MASK, "rollout_is_weights": torch.full((4, 4), 2.0)}
    verl.add_weights(batch, "token_mean", mini_batch_size=2, dp_size=2)
    expected = 2 * MASK / torch.tensor([3, 6, 3, 6])[:, None]
    torch.testing.assert_close(batch["rollout_is_weights"], expected)
    with pytest.raises(PlanError, match="4 rows, steps of 3 and 1 ranks do not divide"):
        verl.add_weights(batch, "token_mean", mini_batch_size=3)


def test_skyrl_scales_advantages_to_any_mode():
    ones = torch.ones_like(LOSSES)
    for mode, expected in BY_HAND.items():
        scaled = skyrl.apply_loss_reduction_to_advantages_minibatch(ones, MASK, mode, 1, 10, [(0, 2), (2, 4)])
        assert float((scaled * LOSSES).sum()) == pytest.approx(expected, rel=1e-14)
    # Micro-batches of two rows: 10/4 and 36/5.
    legacy = skyrl.apply_loss_reduction_to_advantages_minibatch(ones, MASK, "token_mean_legacy", 2, None)
    assert float((legacy * LOSSES).sum()) == pytest.approx(float((F(10, 4) + F(36, 5)) / 2), rel=1e-14)


@pytest.mark.parametrize("boundaries", [[(3, 4), (0, 3)], [(0, 3), (2, 4)], [(0, 2), (2, 2), (2, 4)], [(0, 3)]])
def test_skyrl_prompts_follow_one_another(boundaries):
    with pytest.raises(PlanError, match="do not cut 4 rows one after the other"):
        skyrl.apply_loss_reduction_to_advantages_minibatch(torch.ones_like(LOSSES), MASK, "prompt_mean", 1, 10, boundaries)


def test_weights_are_for_a_mode_of_ours():
    for mode in ("nonsense", "token-mean"):
        with pytest.raises(PlanError, match=f"loss_agg_mode is '{mode}', and weights= are for a mode of ours"):
            verl.agg_loss(LOSSES, MASK, mode, weights=torch.ones(4))
    with pytest.raises(PlanError, match="3 weights for 4 rows"):
        verl.agg_loss(LOSSES, MASK, "prompt_mean", weights=torch.ones(3))


def test_skyrl_warns_of_terms_that_do_not_follow():
    with pytest.warns(UserWarning, match="kl_cov adds a KL term"):
        skyrl.warn_of_loss("kl_cov")
    with pytest.warns(UserWarning, match="KL and entropy term stays a mean of micro-batch means"):
        skyrl.warn_of_loss("regular", use_kl_loss=True, use_entropy_loss=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        skyrl.warn_of_loss("regular")


class Tensor:
    """As much of ``tinker.TensorData`` as is read."""

    def __init__(self, array):
        self.array = np.asarray(array, np.float32)

    @classmethod
    def from_numpy(cls, array):
        return cls(array)

    def to_numpy(self):
        return self.array


@dataclass(frozen=True)
class Datum:
    loss_fn_inputs: dict = field(default_factory=dict)


def test_tinker_scales_data_to_any_mode():
    data = [Datum({"advantages": Tensor(values), "mask": Tensor(mask)}) for values, mask in zip(LOSSES, MASK, strict=True)]
    for mode, expected in BY_HAND.items():
        scaled = tinker.scale_advantages(
            data, mode, prompt_ids=GROUPS, divisor=10 if mode == "constant" else None, loss_fn="ppo"
        )
        assert sum(float(d.loss_fn_inputs["advantages"].array.sum()) for d in scaled) == pytest.approx(expected, rel=1e-6)
    with pytest.raises(DataError, match="has no 'mask'") as caught:
        tinker.scale_advantages([Datum({"advantages": Tensor([1.0])})], "token_mean")
    assert (caught.value.column, caught.value.row) == ("mask", 0)
    with pytest.warns(UserWarning, match="'dro' is not known to be proportional"):
        tinker.scale_advantages(data, "token_mean", loss_fn="dro")


def test_losses_to_log_are_summed_in_a_step_and_averaged_over_steps():
    assert skyrl.logged_loss([[1.0, 2.0], [4.0, 1.0]]) == 4.0
