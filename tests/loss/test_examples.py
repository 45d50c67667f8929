"""The hand examples through every layer: Arrow in, loss and gradient out, at every layout of ranks."""

import numpy as np
import pytest
import torch
from examples import EXAMPLES, MODES, Example

import rollpack
from rollpack import _reference
from rollpack.torch import LossReducer

LAYOUTS = [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (1, 4)]


def arguments(example: Example, mode: str) -> dict:
    return {"loss_aggregation": mode, "divisor": example.divisor if mode == "constant" else None}


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("mode", MODES)
def test_reference_gives_the_numbers_worked_out_by_hand(name, mode):
    example = EXAMPLES[name]
    losses = [np.array(x, dtype=np.float64) for x in example.losses]
    masks = [np.array(m, dtype=bool) for m in example.masks]
    loss = _reference.step_loss(mode, losses, masks, example.rollouts, example.groups, divisor=example.divisor)
    assert loss == pytest.approx(float(example.expected[mode]), rel=1e-15)
    gradient = _reference.step_gradient(mode, masks, example.rollouts, example.groups, divisor=example.divisor)
    # Every mode is linear in the token losses, so the loss is the gradient times the losses.
    assert sum(float(g[m] @ x[m]) for g, x, m in zip(gradient, losses, masks, strict=True)) == pytest.approx(loss, rel=1e-15)


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("dp_size", "cp_size"), LAYOUTS)
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("limit", [{"max_tokens_per_gpu": 8}, {"max_tokens_per_gpu": 1000}, {"micro_batch_size": 1}])
def test_loss_and_gradient_do_not_depend_on_the_cut(name, mode, dp_size, cp_size, layout, limit):
    example = EXAMPLES[name]
    table = example.table()
    try:
        plan = rollpack.plan(table, dp_size=dp_size, cp_size=cp_size, layout=layout, **limit, **arguments(example, mode))
    except rollpack.PlanError as error:
        if " missing. Lower" not in str(error):
            raise
        plan = rollpack.plan(
            table, dp_size=dp_size, cp_size=cp_size, layout=layout, placeholders=True, **limit, **arguments(example, mode)
        )
    reducer = LossReducer(backend="none")
    total, gradient = 0.0, [np.zeros(len(m)) for m in example.masks]
    for dp_rank in range(dp_size):
        for cp_rank in range(cp_size):
            for packed in rollpack.pack(table, plan, dp_rank=dp_rank, cp_rank=cp_rank, token_columns=["loss"]):
                micro_batch = packed.to("cpu")
                token_loss = micro_batch.columns["loss"].double().requires_grad_()
                loss = reducer(token_loss, micro_batch)
                loss.backward()
                total += loss.item()
                for t in torch.nonzero(micro_batch.segment_ids >= 0)[:, 0].tolist():
                    row = int(micro_batch.rows[micro_batch.segment_ids[t]])
                    response_position = int(micro_batch.position_ids[t]) + 1 - 2  # the token after it, after a prompt of two
                    if row >= 0 and 0 <= response_position < len(gradient[row]):
                        gradient[row][response_position] += token_loss.grad[t].item()
    assert total == pytest.approx(float(example.expected[mode]), rel=1e-14)
    masks = [np.array(m, dtype=bool) for m in example.masks]
    expected = _reference.step_gradient(mode, masks, example.rollouts, example.groups, divisor=example.divisor)
    for found, wanted in zip(gradient, expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-15, atol=0)


@pytest.mark.parametrize("mode", MODES)
def test_several_steps_each_have_their_own_counts(mode):
    """Two of the examples one behind the other, as two steps: each step has its own loss."""
    first, second = EXAMPLES["four_samples"], EXAMPLES["all_apart"]
    both = Example(
        first.losses + second.losses,
        first.masks + second.masks,
        first.rollouts + [4 + r for r in second.rollouts],
        first.groups + [2 + g for g in second.groups],
        {},
    )
    table = both.table()
    plan = rollpack.plan(table, global_batch_size=4, max_tokens_per_gpu=8, **arguments(both, mode))
    assert len(plan.steps) == 2
    for step, expected in enumerate((first, second)):
        losses = [
            LossReducer()(torch.from_numpy(mb.columns["loss"]).double(), mb).item()
            for mb in rollpack.pack(table, plan, step=step, token_columns=["loss"])
        ]
        # `both` divides by 10 under "constant" where the second example alone divides by 16.
        scale = expected.divisor / both.divisor if mode == "constant" else 1.0
        assert sum(losses) == pytest.approx(float(expected.expected[mode]) * scale, rel=1e-14)
