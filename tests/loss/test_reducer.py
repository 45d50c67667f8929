"""The reducer's own rules: what is masked, what is empty, what is wrong, and which dtype comes out."""

import copy
import math
import pickle

import numpy as np
import pyarrow as pa
import pytest
import torch
from examples import EXAMPLES, FOUR_SAMPLES

import rollpack
from rollpack.torch import LossReducer, Metrics, scale_advantages, token_weights, weighted_sum


def micro_batches(table=None, **arguments):
    table = FOUR_SAMPLES.table() if table is None else table
    plan = rollpack.plan(table, **({"max_tokens_per_gpu": 100} | arguments))
    settings = plan.settings
    return [
        micro_batch
        for d in range(settings.dp_size)
        for c in range(settings.cp_size)
        for micro_batch in rollpack.pack(table, plan, dp_rank=d, cp_rank=c)
    ]


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_what_is_masked_touches_neither_loss_nor_gradient(poison, dtype):
    (micro_batch,) = micro_batches(pad_to_multiple_of=4)
    mask = torch.from_numpy(micro_batch.loss_mask)
    clean = torch.ones(len(mask), dtype=dtype, requires_grad=True)
    dirty = torch.where(mask, 1.0, poison).to(dtype).requires_grad_()
    losses = []
    for token_loss in (clean, dirty):
        loss = LossReducer()(token_loss, micro_batch)
        loss.backward()
        losses.append(loss.item())
    # A loss of 1 everywhere gives a mean of 1.
    assert losses == [pytest.approx(1.0, rel=1e-6)] * 2
    assert torch.equal(dirty.grad, clean.grad)
    assert torch.equal(dirty.grad[~mask], torch.zeros(int((~mask).sum()), dtype=dtype))


def test_a_step_without_a_trained_token_is_zero_and_joined_to_the_graph():
    table = pa.table({"tokens": [[1, 2], [3, 4, 5]], "loss_mask": [[0], [0, 0]], "group_index": [0, 1]})
    for mode, divisor in [("sample_mean", None), ("prompt_mean", None), ("token_mean", None), ("constant", 2.0)]:
        for empty in ("count", "skip"):
            (micro_batch,) = micro_batches(table, loss_aggregation=mode, divisor=divisor, empty=empty)
            weight = torch.full((), math.pi, requires_grad=True)
            loss = LossReducer()(weight * torch.ones(len(micro_batch.tokens)), micro_batch)
            assert loss.item() == 0.0
            loss.backward()
            assert weight.grad.item() == 0.0


def test_a_rank_that_owns_no_trained_token_returns_a_connected_zero():
    table = pa.table({"tokens": [[1, 2, 3, 4, 5, 6, 7, 8]], "loss_mask": [[1]]})
    batches = micro_batches(table, cp_size=2, layout="contiguous")
    owned = [int(b.loss_mask.sum()) for b in batches]
    assert owned == [0, 1]  # the logit of the last token is at position 6
    for micro_batch, expected in zip(batches, [0.0, 3.0], strict=True):
        weight = torch.tensor(3.0, requires_grad=True)
        loss = LossReducer(backend="none")(weight * torch.ones(len(micro_batch.tokens)), micro_batch)
        loss.backward()
        assert loss.item() == expected
        assert weight.grad.item() == expected / 3.0


def test_placeholders_add_nothing():
    table = pa.table({"tokens": [[1, 2, 3]], "loss_mask": [[1, 1]]})
    first, second = micro_batches(table, dp_size=2, placeholders=True)
    assert not first.is_placeholder
    assert second.is_placeholder
    reducer = LossReducer(backend="none")
    losses = [reducer(torch.full((len(b.tokens),), 5.0, requires_grad=True), b) for b in (first, second)]
    assert [loss.item() for loss in losses] == [5.0, 0.0]
    losses[1].backward()


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
    ],
)
def test_accumulation_dtype(dtype, expected):
    (micro_batch,) = micro_batches()
    token_loss = torch.ones(len(micro_batch.tokens), dtype=dtype, requires_grad=True)
    loss = LossReducer()(token_loss, micro_batch)
    assert loss.dtype == expected
    assert loss.ndim == 0
    loss.backward()
    assert token_loss.grad.dtype == dtype


def test_float64_weights_are_not_rounded_to_float32():
    # 1/3 in float32 differs from 1/3 in float64 at the ninth digit.
    table = pa.table({"tokens": [[1, 2, 3, 4]], "loss_mask": [[1, 1, 1]]})
    (micro_batch,) = micro_batches(table)
    token_loss = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    LossReducer()(token_loss, micro_batch).backward()
    assert token_loss.grad.tolist() == [1 / 3, 1 / 3, 1 / 3, 0.0]


def test_a_changed_mask_keeps_the_original_denominators():
    (micro_batch,) = micro_batches()
    mask = torch.from_numpy(micro_batch.loss_mask)
    values = torch.zeros(len(mask))
    # Losses of the example at the logit of each response token; then the 20 of sample 2 is rejected.
    values[mask] = torch.tensor([4.0, 1, 2, 3, 10, 20, 1, 2, 3])
    kept = (values != 20) & mask
    loss = LossReducer()(values, micro_batch, loss_mask=kept)
    assert loss.item() == pytest.approx((4 + 2 + 10 / 2 + 2) / 4)  # 10 is still divided by the two tokens of its rollout
    everything = LossReducer()(values, micro_batch, loss_mask=mask)
    assert everything.item() == pytest.approx(5.75)


@pytest.mark.parametrize("of", ["numpy", "torch"])
def test_a_changed_mask_that_adds_tokens_is_told(of):
    (packed,) = micro_batches()
    micro_batch = packed if of == "numpy" else packed.to("cpu")
    values, mask = torch.ones(len(packed.tokens)), torch.from_numpy(packed.loss_mask)
    for loss_mask in (torch.ones_like(mask), mask.roll(1), values != 20):  # at the tokens instead of their logits; to keep
        with pytest.raises(
            rollpack.RollpackError, match=r"positions that are not trained: .* loss_mask & micro_batch.loss_mask"
        ):
            LossReducer()(values, micro_batch, loss_mask=loss_mask)
    with pytest.raises(rollpack.RollpackError, match="loss_mask is True at 9 positions that are not trained"):
        Metrics({"x": "sample_mean"}).add(micro_batch, {"x": values}, loss_mask=torch.ones_like(mask))


def test_a_changed_mask_is_not_waited_for_on_a_device():
    """A tensor on "meta" has no value: whoever asks for one is told off."""
    (packed,) = micro_batches()
    micro_batch = packed.to("meta")
    values = torch.ones(len(packed.tokens), device="meta")
    assert LossReducer()(values, micro_batch, loss_mask=values > 0).shape == ()


def test_another_mode_for_a_regulariser():
    (micro_batch,) = micro_batches(loss_aggregation="prompt_mean")
    values = torch.zeros(len(micro_batch.tokens), dtype=torch.float64)
    values[torch.from_numpy(micro_batch.loss_mask)] = torch.tensor([4.0, 1, 2, 3, 10, 20, 1, 2, 3], dtype=torch.float64)
    for batch in (micro_batch, micro_batch.to("cpu")):
        for mode in ("sample_mean", "prompt_mean", "token_mean"):
            loss = LossReducer()(values, batch, loss_aggregation=mode)
            assert loss.item() == pytest.approx(float(FOUR_SAMPLES.expected[mode]), rel=1e-14)
        with pytest.raises(rollpack.PlanError, match="divisor"):
            LossReducer()(values, batch, loss_aggregation="constant")
    (micro_batch,) = micro_batches()
    with pytest.raises(rollpack.PlanError, match="needs num_prompts.*plan with loss_aggregation='prompt_mean'"):
        LossReducer()(values, micro_batch, loss_aggregation="prompt_mean")


def test_skipping_empty_rollouts_and_groups():
    table = pa.table(
        {
            "tokens": [[1, 2], [1, 2, 3], [1, 2]],
            "loss_mask": [[1], [0, 0], [1]],
            "rollout_id": [0, 1, 2],
            "group_index": [0, 1, 0],
        }
    )
    expected = {
        ("sample_mean", "count"): (4 + 8) / 3,
        ("sample_mean", "skip"): (4 + 8) / 2,
        ("prompt_mean", "count"): (4 + 8) / 2 / 2,
        ("prompt_mean", "skip"): (4 + 8) / 2,
        ("constant", "count"): (4 + 8) / (2 * 3),
        ("constant", "skip"): (4 + 8) / (2 * 2),
        ("token_mean", "count"): (4 + 8) / 2,
        ("token_mean", "skip"): (4 + 8) / 2,
    }
    for (mode, empty), wanted in expected.items():
        (batch,) = micro_batches(table, loss_aggregation=mode, empty=empty, divisor=2.0 if mode == "constant" else None)
        values = torch.where(torch.from_numpy(batch.rows[batch.segment_ids] == 0), 4.0, 8.0)
        assert LossReducer()(values, batch).item() == pytest.approx(wanted), (mode, empty)


def test_the_backend_may_be_left_out_in_one_process_only():
    for ranks in ({"dp_size": 2}, {"cp_size": 2}):
        batch = micro_batches(**ranks)[0]
        with pytest.raises(rollpack.PlanError, match=r"there are 2 ranks.*pass LossReducer\(backend="):
            LossReducer()(torch.zeros(len(batch.tokens)), batch)
    with pytest.raises(rollpack.PlanError, match="backend is 'fdsp'.*fsdp"):
        LossReducer(backend="fdsp")


@pytest.fixture
def group_of_one():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield torch.distributed.group.WORLD
    torch.distributed.destroy_process_group()


def test_a_process_that_is_alone_in_its_group_is_one_process(group_of_one):
    (batch,) = micro_batches()
    assert LossReducer()(torch.ones(len(batch.tokens)), batch).item() == pytest.approx(1.0)


def test_changed_masks_of_ranks_that_are_not_in_the_group_are_refused(group_of_one):
    """The sums of their rollouts would be those of this rank alone."""
    reducer = LossReducer(backend="ddp", mesh=group_of_one, denominators="current")
    batch, _ = micro_batches(dp_size=2)
    with pytest.raises(rollpack.PlanError, match="the process group has 1 rank, and the plan is for dp 2 x cp 1"):
        reducer.set_masks([batch], [torch.from_numpy(batch.loss_mask)], cut=True)
    reducer = LossReducer(backend="ddp", mesh=group_of_one)
    with pytest.raises(rollpack.PlanError, match="the process group has 1 rank, and the plan is for dp 2 x cp 1"):
        reducer(torch.ones(len(batch.tokens)), batch)


def test_wrong_arguments_are_told():
    with pytest.raises(TypeError, match="mesh is a int; it has to be a DeviceMesh or a process group"):
        LossReducer(mesh=8)
    (batch,) = micro_batches()
    size = len(batch.tokens)
    for wrong in (torch.zeros(size + 1), torch.zeros(1, size), torch.zeros(())):
        with pytest.raises(rollpack.RollpackError, match=f"this micro-batch has {size} positions"):
            LossReducer()(wrong, batch)
    with pytest.raises(rollpack.RollpackError, match="floating"):
        LossReducer()(torch.zeros(size, dtype=torch.int64), batch)
    with pytest.raises(rollpack.RollpackError, match="^loss_mask is torch.float32 .* has to be bool"):
        LossReducer()(torch.zeros(size), batch, loss_mask=torch.ones(size))
    with pytest.raises(TypeError, match="^token_loss is a ndarray; it has to be a torch tensor"):
        LossReducer()(np.zeros(size), batch)
    with pytest.raises(TypeError, match="^loss_mask is a ndarray; it has to be a torch tensor"):
        LossReducer()(torch.zeros(size), batch, loss_mask=np.ones(size, bool))
    for wrong in ([batch], torch.zeros(size)):
        with pytest.raises(TypeError, match=f"^micro_batch is a {type(wrong).__name__}; it has to be a rollpack.MicroBatch"):
            LossReducer()(torch.zeros(size), wrong)
    with pytest.raises(rollpack.PlanError, match="loss_aggregation is ''; it has to be one of"):
        LossReducer()(torch.zeros(size), batch, loss_aggregation="")


def test_loss_and_count_for_megatron_per_token():
    """Over all ranks the counts add up to T, and the losses over them to the step loss."""
    batches = micro_batches(loss_aggregation="sample_mean", dp_size=2, cp_size=2, max_tokens_per_gpu=4)
    reducer = LossReducer(backend="megatron_per_token")
    losses, counts = [], []
    for batch in batches:
        values = torch.zeros(len(batch.tokens), dtype=torch.float64)
        loss, count = reducer.loss_and_count(values + 1.0, batch, loss_mask=torch.from_numpy(batch.loss_mask))
        assert (loss.ndim, count.ndim, count.dtype) == (0, 0, torch.int32)
        losses.append(loss.item())
        counts.append(int(count))
    assert sum(counts) == 9
    assert sum(losses) / sum(counts) == pytest.approx(1.0, rel=1e-14)
    with pytest.raises(rollpack.PlanError, match="loss_and_count"):
        reducer(values, batches[-1])
    with pytest.raises(rollpack.PlanError, match="megatron_per_token"):
        LossReducer(backend="megatron").loss_and_count(values, batches[-1])


def test_to_device_gives_the_dtypes_that_torch_wants():
    table = FOUR_SAMPLES.table().append_column("reward", pa.array([0.5, None, 1.0, 2.0], pa.float32()))
    plan = rollpack.plan(table, max_tokens_per_gpu=100, loss_aggregation="prompt_mean")
    (packed,) = rollpack.pack(table, plan, token_columns=["loss"], sample_columns=["reward"])
    batch = packed.to("cpu")
    dtypes = {
        torch.int64: (
            *("tokens", "labels", "position_ids", "segment_ids"),
            *("rows", "mask_sums", "rollout_mask_sums", "prompt_mask_sums"),
        ),
        torch.int32: ("cu_seqlens", "cu_seqlens_padded"),
        torch.bool: ("loss_mask",),
        torch.float64: ("sample_weights",),
    }
    for dtype, names in dtypes.items():
        for name in names:
            tensor = getattr(batch, name)
            assert tensor.dtype == dtype, name
            np.testing.assert_array_equal(tensor.numpy(), getattr(packed, name))
    assert batch.columns["loss"].dtype == batch.sample_columns["reward"].dtype == torch.float32
    np.testing.assert_array_equal(batch.sample_columns["reward"].numpy(), [0.5, np.nan, 1.0, 2.0])
    assert (batch.num_rollouts, batch.num_prompts, batch.num_tokens, batch.max_seqlen) == (4, 2, 9, 6)
    assert batch.to("cpu").tokens.dtype == torch.int64  # what is on a device already can be moved again
    assert batch.plan_id == packed.plan_id == plan.id


def test_micro_batches_and_reducers_can_be_sent_to_other_processes():
    (batch,) = micro_batches()
    again = pickle.loads(pickle.dumps(batch))
    np.testing.assert_array_equal(again.tokens, batch.tokens)
    reducer = copy.deepcopy(LossReducer(backend="accelerate", accumulation_steps=1))
    for same in (again, again.to("cpu")):
        assert reducer(torch.ones(len(same.tokens)), same).item() == pytest.approx(1.0)


# --- the pure functions, for those who bring their own batches


def test_token_weights_and_weighted_sum_by_hand():
    mask = torch.tensor([True, False, True, True, False])
    segment_ids = torch.tensor([0, 0, 1, 1, -1])
    weights = token_weights(mask, segment_ids, torch.tensor([0.5, 0.25], dtype=torch.float64))
    assert weights.tolist() == [0.5, 0.0, 0.25, 0.25, 0.0]
    assert weights.dtype == torch.float64
    loss = torch.tensor([2.0, math.nan, 4.0, 8.0, math.inf], requires_grad=True)
    total = weighted_sum(loss, weights)
    assert total.item() == 0.5 * 2 + 0.25 * 4 + 0.25 * 8
    total.backward()
    assert loss.grad.tolist() == [0.5, 0.0, 0.25, 0.25, 0.0]


def test_padding_that_is_marked_as_trained_weighs_nothing():
    weights = token_weights(torch.tensor([True, True]), torch.tensor([0, -1]), torch.tensor([0.5]))
    assert weights.tolist() == [0.5, 0.0]


@pytest.mark.parametrize("name", EXAMPLES)
def test_scaled_advantages_make_a_plain_sum_the_step_loss(name):
    example = EXAMPLES[name]
    for mode, expected in example.expected.items():
        plan = rollpack.plan(
            example.table(),
            loss_aggregation=mode,
            divisor=example.divisor if mode == "constant" else None,
            micro_batch_size=2,
        )
        total = 0.0
        for batch in rollpack.pack(example.table(), plan, token_columns=["loss"]):
            mb = batch.to("cpu")
            weights = token_weights(mb.loss_mask, mb.segment_ids, mb.sample_weights)
            total += scale_advantages(mb.columns["loss"].double(), weights).sum().item()
        assert total == pytest.approx(float(expected), rel=1e-14)


def test_scaled_advantages_leave_the_value_loss_alone():
    """Of the example, prompt_mean weighs tokens of group 0 by 1/8 and of group 1 by 1/10; sample_mean by 1/(4 M_r)."""
    policy, value = {}, {}
    for batch in micro_batches(loss_aggregation="prompt_mean", max_tokens_per_gpu=None, micro_batch_size=1):
        mb = batch.to("cpu")
        weights = token_weights(mb.loss_mask, mb.segment_ids, mb.sample_weights)
        logprobs, values = (torch.zeros(len(mb.tokens), dtype=torch.float64, requires_grad=True) for _ in range(2))
        advantages, returns = torch.full((2, len(mb.tokens)), 3.0, dtype=torch.float64)
        loss = -(scale_advantages(advantages, weights) * logprobs).sum()
        loss += LossReducer(backend="none")((values - returns).square(), mb, loss_aggregation="sample_mean")
        loss.backward()
        (row,) = mb.rows.tolist()
        policy[row] = logprobs.grad[mb.loss_mask].tolist()
        value[row] = values.grad[mb.loss_mask].tolist()
    assert policy == {row: pytest.approx([-3 / n] * m) for row, n, m in ((0, 8, 1), (1, 8, 3), (2, 10, 2), (3, 10, 3))}
    assert value == {row: pytest.approx([-6 / (4 * m)] * m) for row, m in ((0, 1), (1, 3), (2, 2), (3, 3))}


def test_scaled_advantages_are_exactly_zero_where_masked():
    scaled = scale_advantages(torch.tensor([math.nan, 2.0]), torch.tensor([0.0, 0.5]))
    assert scaled.tolist() == [0.0, 1.0]


def test_the_pure_functions_tell_what_is_wrong():
    with pytest.raises(rollpack.RollpackError, match="loss_mask is torch.float32; it has to be bool"):
        token_weights(torch.ones(2), torch.zeros(2, dtype=torch.int64), torch.ones(1))
    with pytest.raises(rollpack.RollpackError, match="loss_mask has 2 positions and segment_ids 3"):
        token_weights(torch.ones(2, dtype=torch.bool), torch.zeros(3, dtype=torch.int64), torch.ones(1))
    parts = {"loss_mask": torch.ones(2).bool(), "segment_ids": torch.zeros(2).long(), "sample_weights": torch.ones(1)}
    for name, right in parts.items():
        with pytest.raises(rollpack.RollpackError, match=rf"^{name} has shape \[1, {len(right)}\]; .* one dimension"):
            token_weights(**parts | {name: right[None]})
        with pytest.raises(TypeError, match=f"^{name} is a ndarray; it has to be a torch tensor"):
            token_weights(**parts | {name: right.numpy()})
    for name, function in (("token_loss", weighted_sum), ("advantages", scale_advantages)):
        with pytest.raises(rollpack.RollpackError, match=f"^{name} has 2 positions and the weights 3"):
            function(torch.ones(2), torch.ones(3))
        with pytest.raises(rollpack.RollpackError, match=rf"^{name} has shape \[1, 2\]"):
            function(torch.ones(1, 2), torch.ones(2))
        with pytest.raises(rollpack.RollpackError, match=r"^weights has shape \[1, 2\]"):
            function(torch.ones(2), torch.ones(1, 2))
        with pytest.raises(rollpack.RollpackError, match=f"^{name} is torch.int64; it has to be floating"):
            function(torch.ones(2).long(), torch.ones(2))
        with pytest.raises(TypeError, match=f"^{name} is a ndarray"):
            function(np.ones(2), torch.ones(2))


@pytest.mark.parametrize("of_loss", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("of_weights", [torch.float64, torch.float32])
def test_the_sum_has_the_accumulation_dtype_of_the_loss(of_loss, of_weights):
    loss = torch.tensor([2.0, 4.0], dtype=of_loss, requires_grad=True)
    total = weighted_sum(loss, torch.tensor([0.5, 0.25], dtype=of_weights))
    assert (total.dtype, total.item()) == (torch.float64 if of_loss == torch.float64 else torch.float32, 2.0)
    total.backward()
    assert (loss.grad.dtype, loss.grad.tolist()) == (of_loss, [0.5, 0.25])


def test_weights_may_need_a_gradient_themselves():
    loss = torch.tensor([2.0, math.nan, 4.0], requires_grad=True)
    weights = torch.tensor([0.5, 0.0, 0.25], requires_grad=True)
    total = weighted_sum(loss, weights)
    assert total.item() == 2.0
    total.backward()
    assert loss.grad.tolist() == [0.5, 0.0, 0.25]
    assert weights.grad.tolist() == [2.0, 0.0, 4.0]


# Interpreted (test_kernel.py), the kernel's product of infinity and 0, which is selected out, makes numpy warn.
@pytest.mark.filterwarnings("ignore:invalid value encountered in multiply:RuntimeWarning")
def test_an_infinite_gradient_from_above_leaves_untrained_positions_at_zero():
    loss = torch.tensor([2.0, 3.0], requires_grad=True)
    (weighted_sum(loss, torch.tensor([0.5, 0.0])) * math.inf).backward()
    assert loss.grad.tolist() == [math.inf, 0.0]
