"""``token_mean_legacy``: a mean of micro-batch means, for doing old runs again. It depends on the cut, and says so."""

import warnings
from fractions import Fraction as F

import pytest
import torch
from examples import EXAMPLES, FOUR_SAMPLES

import rollpack
from rollpack import planning
from rollpack.testing import Cut
from rollpack.torch import LossReducer, scale_advantages, token_weights

ignored = pytest.mark.filterwarnings("ignore:token_mean_legacy is a mean of micro-batch means")


def by_hand(example, plan):
    """(1 / micro-batches with trained tokens) Σ of the token mean of each."""
    settings, (step,) = plan.settings, plan.steps
    means = []
    for dp_rank in range(settings.dp_size):
        for index in range(step.num_micro_batches):
            rows = plan.rows(0, dp_rank, index)
            trained = [F(x) for r in rows for x, m in zip(example.losses[r], example.masks[r], strict=True) if m]
            means += [sum(trained) / len(trained)] if trained else []
    return sum(means) / len(means)


def reduced(example, plan, reduce):
    return sum(
        reduce(m.columns["loss"].double(), m)
        for dp_rank in range(plan.settings.dp_size)
        for cp_rank in range(plan.settings.cp_size)
        for packed in rollpack.pack(example.table(), plan, dp_rank=dp_rank, cp_rank=cp_rank, token_columns=["loss"])
        for m in [packed.to("cpu")]
    )


def planned(example, **cut):
    return rollpack.plan(example.table(), loss_aggregation="token_mean_legacy", placeholders=True, **cut)


@ignored
@pytest.mark.parametrize(
    "cut", [Cut(1, 1, "zigzag", 8), Cut(2, 1, "zigzag", 16), Cut(2, 2, "zigzag", 8), Cut(3, 2, "contiguous", 6)]
)
@pytest.mark.parametrize("name", EXAMPLES)
def test_it_is_the_mean_over_micro_batches_of_their_token_means(name, cut):
    example = EXAMPLES[name]
    plan = planned(example, **cut._asdict())
    expected = pytest.approx(float(by_hand(example, plan)), rel=1e-14)
    assert reduced(example, plan, lambda x, m: LossReducer(backend="none")(x, m).item()) == expected

    def plain_sum(advantages, m):
        weights = token_weights(m.loss_mask, m.segment_ids, m.sample_weights)
        return scale_advantages(advantages, weights).sum().item()

    assert reduced(example, plan, plain_sum) == expected


@ignored
def test_it_depends_on_the_cut():
    """Of the four samples: all at once it is the token mean 46/9, one by one the mean 23/4 of sample means."""
    losses = {}
    for size in (1, 2, 4):
        plan = planned(FOUR_SAMPLES, micro_batch_size=size)
        losses[size] = reduced(FOUR_SAMPLES, plan, lambda x, m: LossReducer()(x, m).item())
    assert losses[4] == pytest.approx(46 / 9)
    assert losses[1] == pytest.approx(23 / 4)
    assert len({round(loss, 9) for loss in losses.values()}) == 3


@ignored
def test_a_micro_batch_without_a_trained_token_does_not_count():
    rows = [{"tokens": [1, 2, 3], "loss_mask": mask} for mask in ([1, 1], [0, 0], [0, 1])]
    plan = rollpack.plan(rows, micro_batch_size=1, loss_aggregation="token_mean_legacy")
    assert sorted(plan.to_arrow()["sample_weight"].to_pylist()) == [0.0, 1 / 4, 1 / 2]


def test_it_warns_once():
    planning._warn_of_legacy.cache_clear()
    with pytest.warns(UserWarning, match="loss and gradient change with the budget") as caught:
        rollpack.plan(FOUR_SAMPLES.table(), loss_aggregation="token_mean_legacy", micro_batch_size=2)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        planned(FOUR_SAMPLES, micro_batch_size=2)


@ignored
def test_where_it_cannot_be_had_the_reason_is_told():
    with pytest.raises(rollpack.PlanError, match="depends on the cut: plan with loss_aggregation='token_mean_legacy'"):
        rollpack.sample_weights("token_mean_legacy", rollout_mask_sums=[1, 2])
    (packed,) = rollpack.pack(FOUR_SAMPLES.table(), rollpack.plan(FOUR_SAMPLES.table(), micro_batch_size=4))
    x = torch.ones(len(packed.tokens))
    with pytest.raises(rollpack.PlanError, match="plan with loss_aggregation='token_mean_legacy'"):
        LossReducer()(x, packed.to("cpu"), loss_aggregation="token_mean_legacy")
    plan = planned(FOUR_SAMPLES, micro_batch_size=4)
    (packed,) = rollpack.pack(FOUR_SAMPLES.table(), plan)
    reducer = LossReducer(denominators="current")
    reducer.set_masks([packed], [torch.from_numpy(packed.loss_mask)], cut=True)
    with pytest.raises(rollpack.PlanError, match="token_mean_legacy knows no current denominators"):
        reducer(x, packed.to("cpu"))
