"""Watching over a step: what is left out, comes twice or belongs elsewhere; and weights are worked out once."""

import pickle
import warnings
import weakref

import pytest
import torch
from examples import FOUR_SAMPLES

import rollpack
from rollpack.torch import LossReducer, weights


def batches(*, step=None, dp_rank=0, **arguments):
    table = FOUR_SAMPLES.table()
    plan = rollpack.plan(table, **({"micro_batch_size": 1} | arguments))
    return list(rollpack.pack(table, plan, step=step, dp_rank=dp_rank))


def ones(batch):
    return torch.ones(len(batch.tokens), requires_grad=True)


def test_a_step_in_which_each_micro_batch_comes_once_is_fine_and_so_is_the_next():
    reducer = LossReducer()
    for _ in range(2):
        with reducer.step():
            # Several terms of the loss for one micro-batch, and any order of micro-batches.
            losses = [
                reducer(ones(b), b) + 0 * reducer(ones(b), b, loss_aggregation="token_mean") for b in reversed(batches())
            ]
        assert sum(losses).item() == pytest.approx(1.0)


def test_what_was_left_out_is_told():
    reducer = LossReducer()
    with pytest.raises(rollpack.PlanError, match="micro-batches 1, 3 of this rank's 4 in step 0 did not come"):
        with reducer.step():
            for batch in batches()[::2]:
                reducer(ones(batch), batch)
    with pytest.raises(rollpack.PlanError, match="without a micro-batch"):
        with reducer.step():
            pass


def test_what_comes_twice_is_told():
    reducer = LossReducer()
    first, second, *_ = batches()
    with pytest.raises(rollpack.PlanError, match="micro-batch 0 comes a second time in this step"):
        with reducer.step():
            for batch in (first, second, first):
                reducer(ones(batch), batch)


def test_a_second_epoch_in_one_step_is_told_be_it_over_a_single_micro_batch():
    """It is packed anew for each epoch; what is the same object is another term of the loss."""
    reducer = LossReducer()
    with pytest.raises(rollpack.PlanError, match="micro-batch 0 comes a second time in this step, and would be trained on"):
        with reducer.step():
            for _ in range(2):
                for batch in batches(micro_batch_size=4):
                    reducer(ones(batch), batch)
    for _ in range(2):
        with reducer.step():
            for batch in batches(micro_batch_size=4):
                reducer(ones(batch), batch)
                reducer(ones(batch), batch)


def test_a_step_holds_no_micro_batch_that_went_by():
    reducer, gone = LossReducer(), []
    with reducer.step():
        for index in range(4):
            batch = batches()[index]
            reducer(ones(batch), batch)
            assert [held() for held in gone] == [None] * index
            gone.append(weakref.ref(batch))
            del batch


@pytest.mark.parametrize(
    ("other", "text"),
    [
        ({"global_batch_size": 2, "step": 0}, "plan_id"),
        ({"dp_size": 2, "dp_rank": 1}, "plan_id"),
    ],
)
def test_a_micro_batch_of_another_plan_is_told(other, text):
    reducer = LossReducer(backend="none")
    mine, theirs = batches(), batches(**other)
    with pytest.raises(rollpack.PlanError, match=f"this micro-batch has {text} .*, and the step under way is of {text}"):
        with reducer.step():
            reducer(ones(mine[0]), mine[0])
            reducer(ones(theirs[0]), theirs[0])


def test_a_micro_batch_of_another_step_or_rank_is_told():
    reducer = LossReducer(backend="none")
    for name, one, other in (
        ("step", batches(global_batch_size=2, step=0), batches(global_batch_size=2, step=1)),
        ("dp_rank", batches(dp_size=2, dp_rank=0), batches(dp_size=2, dp_rank=1)),
    ):
        with pytest.raises(rollpack.PlanError, match=f"{name} 1, and the step under way is of {name} 0"):
            with reducer.step():
                reducer(ones(one[0]), one[0])
                reducer(ones(other[0]), other[0])


def test_a_step_that_nobody_enters_is_told():
    """As one writes ``optimizer.step()``: it would watch over nothing."""
    with pytest.warns(UserWarning, match="reducer.step\\(\\) alone does nothing: write `with reducer.step\\(\\):`") as told:
        LossReducer().step()
    assert told[0].filename == __file__  # where to write it
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step = LossReducer().step()
        with pytest.raises(rollpack.PlanError, match="without a micro-batch"), step:
            pass
        del step


def test_an_error_inside_a_step_is_not_hidden_and_ends_it():
    reducer = LossReducer()
    with pytest.raises(ZeroDivisionError):
        with reducer.step():
            raise ZeroDivisionError
    with reducer.step():
        with pytest.raises(rollpack.PlanError, match="under way already"):
            with reducer.step():
                pass
        for batch in batches():
            reducer(ones(batch), batch)


def test_weights_are_worked_out_once_and_go_with_their_micro_batch(monkeypatch):
    calls = []
    real = weights.token_weights
    monkeypatch.setattr("rollpack.torch.reducer.token_weights", lambda *a: calls.append(1) or real(*a))
    reducer = LossReducer()
    batch = batches(micro_batch_size=4)[0].to("cpu")
    mask = batch.loss_mask
    losses = [reducer(ones(batch), batch).item() for _ in range(3)]
    assert (losses, len(calls)) == ([pytest.approx(1.0)] * 3, 1)
    reducer(ones(batch), batch, loss_aggregation="token_mean")
    reducer(ones(batch).double(), batch)
    assert len(calls) == 3
    # A changed mask does not change what is kept.
    assert reducer(ones(batch), batch, loss_mask=torch.zeros_like(mask)).item() == 0.0
    assert reducer(ones(batch), batch).item() == pytest.approx(1.0)
    assert len(calls) == 3
    del batch
    assert len(reducer._weights) == 0


def test_a_reducer_that_was_used_can_be_pickled():
    reducer = LossReducer(backend="none")
    (batch,) = batches(micro_batch_size=4)
    reducer(ones(batch), batch)
    again = pickle.loads(pickle.dumps(reducer))
    assert again(ones(batch), batch).item() == pytest.approx(1.0)


def test_what_is_returned_shares_no_memory_with_what_is_kept():
    """Megatron divides the returned loss in place."""
    reducer = LossReducer(backend="none")
    (batch,) = batches(micro_batch_size=4)
    first = reducer(ones(batch), batch).detach()
    first /= 7
    assert reducer(ones(batch), batch).item() == pytest.approx(1.0)


@pytest.mark.filterwarnings("ignore:Guards may run slower on Python 3.13.0:RuntimeWarning")  # torch's own
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_it_compiles_without_a_graph_break(dtype):
    reducer = LossReducer(backend="none")
    (packed,) = batches(micro_batch_size=4, pad_to_multiple_of=4)
    batch = packed.to("cpu")

    def loss(token_loss):
        return reducer(token_loss, batch)

    values = torch.where(batch.loss_mask, 2.0, torch.nan).to(dtype).requires_grad_()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    found = compiled(values)
    assert found.item() == pytest.approx(2.0, rel=1e-6)
    found.backward()
    gradient, values.grad = values.grad, None
    loss(values).backward()
    torch.testing.assert_close(gradient, values.grad)
    assert (gradient[~batch.loss_mask] == 0).all()


def test_an_upstream_gradient_that_overflowed_leaves_masked_positions_at_zero():
    """A loss scaler multiplies by a huge factor; infinity times a weight of 0 would be NaN."""
    (batch,) = batches(micro_batch_size=4)
    values = ones(batch)
    LossReducer()(values, batch).backward(torch.tensor(float("inf")))
    mask = torch.from_numpy(batch.loss_mask)
    assert torch.isinf(values.grad[mask]).all()
    assert (values.grad[~mask] == 0).all()


def test_large_sums_in_float32_are_as_exact_as_one_may_expect():
    values = torch.rand(1 << 22, generator=torch.Generator().manual_seed(0))
    w = torch.full_like(values, 1 / len(values))
    exact = values.double().mean().item()
    assert rollpack.torch.weighted_sum(values, w).item() == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [8192, 1 << 18, 1 << 22])
def test_losses_that_are_all_alike_add_up_exactly(tokens, dtype):
    """As GRPO's are at a ratio of 1. Added one after the other in float32, 2^22 of them are off by one in ten thousand."""
    values = torch.full((tokens,), 0.7, dtype=dtype)
    weights = torch.full((tokens,), 1 / tokens)
    assert rollpack.torch.weighted_sum(values, weights).item() == pytest.approx(values[0].item(), rel=1e-6)


@pytest.mark.parametrize("kind", ["tensors", "arrays"])
def test_a_mask_that_was_changed_in_place_counts_from_then_on(kind):
    """Losses 1 of four samples: of masks of 1, 3, 2 and 3 trained tokens the first loses its only one."""
    reducer, (batch,) = LossReducer(), batches(micro_batch_size=4)
    batch = batch.to("cpu") if kind == "tensors" else batch
    assert reducer(ones(batch), batch).item() == pytest.approx(1.0)
    batch.loss_mask[(batch.segment_ids == batch.rows.tolist().index(0))] = False
    assert reducer(ones(batch), batch).item() == pytest.approx(3 / 4)
    assert LossReducer()(ones(batch), batch).item() == pytest.approx(3 / 4)
    batch.sample_weights[:] = 2 * batch.sample_weights
    assert reducer(ones(batch), batch).item() == pytest.approx(3 / 2)


def test_weights_are_worked_out_in_inference_mode_too():
    with torch.inference_mode():
        batch = batches(micro_batch_size=4)[0].to("cpu")
        assert LossReducer()(torch.ones(len(batch.tokens)), batch).item() == pytest.approx(1.0)
