"""Rollouts that are still arriving: the same loss and gradient as those of the whole step, and totals that are known."""

import gc
import weakref
from itertools import chain

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rollpack
from rollpack._reference import step_gradient, step_loss
from rollpack.torch import LossReducer, Metrics

#: The hand example of the README: a row an arrival.
ROWS = [
    {"tokens": [7, 1], "loss_mask": [1], "rollout_id": 0, "group_index": 0, "loss": [4.0]},
    {"tokens": [7, 1, 2, 3], "loss_mask": [1, 1, 1], "rollout_id": 1, "group_index": 0, "loss": [1.0, 2.0, 3.0]},
    {"tokens": [8, 1, 2], "loss_mask": [1, 1], "rollout_id": 2, "group_index": 1, "loss": [10.0, 20.0]},
    {
        "tokens": [8, 1, 2, 3, 4],
        "loss_mask": [1, 0, 1, 1],
        "rollout_id": 3,
        "group_index": 1,
        "loss": [1.0, 100.0, 2.0, 3.0],
    },
]


def singles(rows):
    return [[row] for row in rows]


def losses_of(arrivals, *, dp_size=1, cp_size=1, **arguments):
    """The loss of each step, summed over the ranks."""
    reducer, losses = LossReducer(backend="none"), {}
    for dp_rank in range(dp_size):
        for cp_rank in range(cp_size):
            steps = rollpack.pack_online(
                iter(arrivals),
                dp_size=dp_size,
                cp_size=cp_size,
                dp_rank=dp_rank,
                cp_rank=cp_rank,
                token_columns=["loss"],
                **arguments,
            )
            for step, packed in enumerate(steps):
                with reducer.step():
                    for micro_batch in packed:
                        moved = micro_batch.to("cpu")
                        assert moved.step == step
                        loss = reducer(moved.columns["loss"].double(), moved).item()
                        losses[step] = losses.get(step, 0.0) + loss
    return list(losses.values())


@pytest.mark.parametrize(("dp_size", "cp_size"), [(1, 1), (2, 1), (2, 2)])
@pytest.mark.parametrize(
    ("mode", "totals", "expected"),
    [
        ("sample_mean", {}, 5.75),
        ("prompt_mean", {"prompts_per_step": 2}, 4.85),
        ("token_mean", {"num_tokens": [9]}, 46 / 9),
        ("constant", {"divisor": 10.0}, 1.15),
    ],
)
def test_four_samples_by_hand(mode, totals, expected, dp_size, cp_size):
    # Groups come whole; rollouts may come alone.
    arrivals = [ROWS[:2], ROWS[2:]] if mode == "prompt_mean" else singles(ROWS)
    found = losses_of(
        arrivals,
        loss_aggregation=mode,
        global_batch_size=4,
        max_tokens_per_gpu=8,
        look_ahead=1,
        dp_size=dp_size,
        cp_size=cp_size,
        **totals,
    )
    assert found == pytest.approx([expected], abs=1e-12)


def test_full_micro_batches_go_out_while_others_are_still_to_come():
    asked_for = []

    def arriving():
        for row in range(12):
            asked_for.append(row)
            yield {"tokens": [[row] * 4], "response_length": [2]}

    (packed,) = (list(step) for step in rollpack.pack_online(arriving(), global_batch_size=12, max_tokens_per_gpu=8))
    assert [batch.rows.tolist() for batch in packed] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]

    asked_for.clear()
    step = next(rollpack.pack_online(arriving(), global_batch_size=12, max_tokens_per_gpu=8, look_ahead=1))
    first = next(step)
    assert first.rows.tolist() == [0, 1]
    assert asked_for == [0, 1, 2, 3]  # four samples of 4 tokens are two full micro-batches
    assert first.sample_weights.tolist() == [1 / (12 * 2)] * 2
    assert (first.num_rollouts, first.num_micro_batches, first.num_tokens) == (12, None, None)
    assert repr(first) == "MicroBatch(2 samples, 8 positions, sample_mean, step 0, dp_rank 0, cp_rank 0, 0)"


def test_arrivals_need_not_end_with_a_step():
    # Steps of two rollouts; the second arrival is of three steps. Ids may come again in another step.
    arrivals = [
        {"tokens": [[1, 1]], "response_length": [1], "rollout_id": [5], "loss": [[1.0]]},
        {
            "tokens": [[1, 1], [1, 1, 1], [1, 1], [1, 1], [1, 1]],
            "response_length": [1, 2, 1, 1, 1],
            "rollout_id": [6, 7, 7, 8, 5],
            "loss": [[3.0], [6.0, 0.0], [3.0], [5.0], [9.0]],
        },
        {"tokens": [[1, 1]], "response_length": [1], "rollout_id": [9], "loss": [[7.0]]},
    ]
    # By hand: (1 + 3) / 2; ((6 + 0 + 3) / 3 + 5) / 2; (9 + 7) / 2
    assert losses_of(arrivals, global_batch_size=2, micro_batch_size=1) == pytest.approx([2.0, 4.0, 8.0], abs=1e-12)
    rows = [
        [row for batch in step for row in batch.rows]
        for step in rollpack.pack_online(arrivals, global_batch_size=2, micro_batch_size=1, look_ahead=1)
    ]
    assert [sorted(step) for step in rows] == [[0, 1], [2, 3, 4], [5, 6]]


def test_what_is_packed_is_what_pack_gives():
    table = pa.table(
        {
            "tokens": [[10 + row, *range(row % 5 + 1)] for row in range(40)],
            "response_length": [row % 5 + 1 for row in range(40)],
            "advantage": [[float(row)] * (row % 5 + 1) for row in range(40)],
            "reward": [float(row) for row in range(40)],
        }
    )
    carried = {"token_columns": ["advantage"], "sample_columns": ["reward"]}
    (step,) = (
        list(step)
        for step in rollpack.pack_online(
            [table.slice(at, 7) for at in range(0, 40, 7)], global_batch_size=40, max_tokens_per_gpu=20, **carried
        )
    )
    for batch in step:
        plan = rollpack.plan(table.take(batch.rows), max_tokens_per_gpu=20)
        (expected,) = rollpack.pack(table.take(batch.rows), plan, **carried)
        for name in ("tokens", "labels", "position_ids", "segment_ids", "loss_mask", "cu_seqlens", "rollout_mask_sums"):
            np.testing.assert_array_equal(getattr(batch, name), getattr(expected, name), err_msg=name)
        np.testing.assert_array_equal(batch.columns["advantage"], expected.columns["advantage"])
        np.testing.assert_array_equal(batch.sample_columns["reward"], expected.sample_columns["reward"])


@st.composite
def arriving_steps(draw):
    """Groups of rollouts of samples, in arrivals of whole groups."""
    steps, per_step, prompts = draw(st.integers(1, 3)), draw(st.integers(1, 6)), []
    mask = st.lists(st.booleans(), min_size=1, max_size=6)
    for step in range(steps):
        left = per_step
        while left:
            size = draw(st.integers(1, left))
            left -= size
            fan_out = st.lists(mask, min_size=1, max_size=3)
            prompts.append((step, [draw(fan_out) for _ in range(size)]))
    return per_step, prompts


@settings(deadline=None, max_examples=60)
@given(
    data=arriving_steps(),
    mode=st.sampled_from(["sample_mean", "prompt_mean", "token_mean", "constant"]),
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 2), st.integers(1, 3), st.integers(7, 30)),
    layout=st.sampled_from(["zigzag", "contiguous"]),
    together=st.integers(1, 4),
    seed=st.integers(0, 2**32 - 1),
)
def test_loss_and_gradient_are_those_of_the_reference(data, mode, sizes, layout, together, seed):
    per_step, prompts = data
    dp_size, cp_size, look_ahead, budget = sizes
    if mode == "prompt_mean":  # needs the same number of groups in each step
        prompts = [prompts[0]] * 2 if prompts[0][0] == 0 and len(prompts[0][1]) == per_step else prompts[:1]
        per_step = len(prompts[0][1])
        prompts = [(step, rollouts) for step, (_, rollouts) in enumerate(prompts)]
    rng = np.random.default_rng(seed)
    rows, rollout = [], 0
    for group, (step, rollouts) in enumerate(prompts):
        for samples in rollouts:
            rows += [(step, group, rollout, mask, rng.normal(size=len(mask))) for mask in samples]
            rollout += 1
    by_group = [
        [
            {"tokens": [0, *[1] * len(mask)], "loss_mask": mask, "rollout_id": r, "group_index": g, "loss": x}
            for _, g, r, mask, x in rows
            if g == group
        ]
        for group in range(len(prompts))
    ]
    arrivals = [list(chain(*by_group[at : at + together])) for at in range(0, len(by_group), together)]
    steps = [[row for row in rows if row[0] == step] for step in range(prompts[-1][0] + 1)]
    totals = {
        "prompt_mean": {"prompts_per_step": 1},
        "token_mean": {"num_tokens": [sum(sum(row[3]) for row in step) for step in steps]},
        "constant": {"divisor": 7.0},
    }.get(mode, {})
    reducer = LossReducer(backend="fsdp")
    losses = [torch.tensor(np.concatenate([row[4] for row in step]), requires_grad=True) for step in steps]
    found = [0.0] * len(steps)
    # Where the losses of each row begin among those of its step.
    ends = [np.cumsum([len(row[4]) for row in step]) for step in steps]
    starts = np.concatenate([end - [len(row[4]) for row in step] for end, step in zip(ends, steps, strict=True)])
    for dp_rank in range(dp_size):
        for cp_rank in range(cp_size):
            for at, packed in enumerate(
                rollpack.pack_online(
                    arrivals,
                    loss_aggregation=mode,
                    global_batch_size=per_step,
                    max_tokens_per_gpu=budget,
                    look_ahead=look_ahead,
                    dp_size=dp_size,
                    cp_size=cp_size,
                    layout=layout,
                    dp_rank=dp_rank,
                    cp_rank=cp_rank,
                    **totals,
                )
            ):
                for micro_batch in packed:
                    # The place of the token after each position among the losses of the step.
                    place = starts[micro_batch.rows][micro_batch.segment_ids] + micro_batch.position_ids
                    chosen = losses[at][np.where(micro_batch.loss_mask, place, 0)]
                    loss = reducer(chosen, micro_batch) / (dp_size * cp_size)
                    loss.backward()
                    found[at] += loss.item()
    for at, step in enumerate(steps):
        masks = [np.array(row[3]) for row in step]
        arguments = {"rollouts": [row[2] for row in step], "groups": [row[1] for row in step], "divisor": 7.0}
        assert found[at] == pytest.approx(step_loss(mode, [row[4] for row in step], masks, **arguments), abs=1e-12)
        gradient = np.concatenate(step_gradient(mode, masks, **arguments))
        np.testing.assert_allclose(losses[at].grad.numpy(), gradient, atol=1e-14)


# In the second every third arrival goes out as it comes, beside one that has waited.
@pytest.mark.parametrize("lengths", [[1000] * 50, [1200, 1200, 800] * 17])
def test_the_data_of_arrivals_that_went_out_is_let_go(lengths):
    kept = []

    def arriving():
        for row, length in enumerate(lengths):
            values = np.full(length, row, np.int32)
            owner = pa.py_buffer(values)
            kept.append(weakref.ref(values))
            flat = pa.Array.from_buffers(pa.int32(), length, [None, owner])
            tokens = pa.ListArray.from_arrays(pa.array([0, length], pa.int32()), flat)
            table = pa.table({"tokens": tokens, "response_length": [10]})
            del values, owner, flat, tokens
            yield table
            del table

    most = 0
    for step in rollpack.pack_online(arriving(), global_batch_size=len(lengths), max_tokens_per_gpu=2000, look_ahead=1):
        for batch in step:
            assert batch.tokens[0] == batch.rows[0]
            gc.collect()
            most = max(most, sum(ref() is not None for ref in kept))
    # Two rounds of two samples wait, and the arrival that came last.
    assert most <= 6


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"loss_aggregation": "token_mean"}, "token_mean divides by the trained tokens of the whole step.*num_tokens="),
        ({"loss_aggregation": "prompt_mean"}, "prompts_per_step= goes with loss_aggregation 'prompt_mean'"),
        ({"prompts_per_step": 2}, "prompts_per_step= goes with loss_aggregation 'prompt_mean'"),
        ({"loss_aggregation": "prompt_mean", "prompts_per_step": 5}, "from 1 to global_batch_size, 4"),
        ({"loss_aggregation": "token_mean_legacy"}, "number of micro-batches"),
        ({"loss_aggregation": "constant"}, "divisor"),
        ({"global_batch_size": 0}, "global_batch_size is 0"),
        ({"global_batch_size": None}, "global_batch_size is None; it has to be an integer of at least 1"),
        ({"look_ahead": 0}, "look_ahead is 0"),
        ({"max_tokens_per_gpu": None}, "exactly one of max_tokens_per_gpu and micro_batch_size"),
        ({"dp_rank": 1}, "dp_rank is 1; it has to be from 0 to 0"),
        ({"cp_rank": -1}, "cp_rank is -1"),
    ],
)
def test_what_is_not_known_or_wrong_is_an_error_before_anything_is_read(arguments, text):
    def never():
        raise AssertionError("nothing should be read")
        yield

    with pytest.raises(rollpack.PlanError, match=text):
        rollpack.pack_online(never(), **({"global_batch_size": 4, "max_tokens_per_gpu": 8} | arguments))


@pytest.mark.parametrize(
    ("arrivals", "arguments", "error", "text"),
    [
        (singles(ROWS)[:3], {}, rollpack.DataError, "the arrivals ended, and 1 of the 4 rollouts of step 0 did not come"),
        (
            [*singles(ROWS[:2]), [ROWS[0]]],
            {},
            rollpack.DataError,
            "arrival 2: row 0 is of rollout 0, of which an earlier arrival of this step had samples",
        ),
        (
            singles(ROWS),
            {"loss_aggregation": "prompt_mean", "prompts_per_step": 2},
            rollpack.DataError,
            "arrival 1: row 0 is of prompt group 0, of which an earlier arrival",
        ),
        (
            [ROWS],
            {"loss_aggregation": "prompt_mean", "prompts_per_step": 1, "global_batch_size": 3},
            rollpack.DataError,
            "arrival 0: global_batch_size 3 cuts prompt group 1 between two steps",
        ),
        (
            [ROWS[:2], ROWS[2:]],
            {"loss_aggregation": "prompt_mean", "prompts_per_step": 3},
            rollpack.DataError,
            "step 0 has 2 prompt groups, and prompts_per_step said 3",
        ),
        (
            singles(ROWS),
            {"loss_aggregation": "token_mean", "num_tokens": [8]},
            rollpack.DataError,
            "step 0 has 9 trained tokens, and num_tokens said 8",
        ),
        (
            singles(ROWS) * 2,
            {"loss_aggregation": "token_mean", "num_tokens": [9]},
            rollpack.DataError,
            "num_tokens= has no number for step 1",
        ),
        (singles(ROWS), {"max_tokens_per_gpu": 4}, rollpack.PlanError, "arrival 3: row 0 has 5 tokens"),
        ([[ROWS[0]], None], {}, TypeError, "arrival 1: NoneType is no data"),
        (
            [{"tokens": [1, 2], "loss_mask": [1], "rollout_id": 7}],
            {},
            rollpack.SchemaError,
            r"'rollout_id': is 7, .*\[row\]",
        ),
        ([[ROWS[0]], [ROWS[1] | {"loss_mask": [1, 0, 2]}]], {}, rollpack.DataError, "arrival 1: column 'loss_mask', row 0"),
        (
            [[ROWS[0]], [ROWS[1] | {"rollout_id": "1"}]],
            {},
            rollpack.SchemaError,
            "arrival 1: column 'rollout_id' is string, and was int64",
        ),
        ([[ROWS[0]], pa.table({"tokens": [[1, 2]]})], {}, rollpack.SchemaError, "arrival 1: "),
        (
            [pa.Table.from_pylist(ROWS).to_reader()],
            {},
            rollpack.DataError,
            "arrival 0: it had 4 rows and now 0: a reader gives them only once",
        ),
        ([[]], {}, rollpack.DataError, "arrival 0: "),
    ],
)
def test_bad_arrivals_are_errors(arrivals, arguments, error, text):
    with pytest.raises(error, match=text):
        for step in rollpack.pack_online(
            arrivals, **({"global_batch_size": 4, "max_tokens_per_gpu": 8, "look_ahead": 1} | arguments)
        ):
            for _ in step:
                pass


def test_a_step_ends_before_the_next_begins():
    steps = rollpack.pack_online(singles(ROWS), global_batch_size=2, max_tokens_per_gpu=8)
    next(next(steps))
    with pytest.raises(rollpack.PlanError, match="step 0 was left before its end"):
        next(steps)


def test_a_micro_batch_that_was_left_out_before_the_last_is_told():
    # How many there are is not known, only that the one numbered 2 came, and 1 did not.
    step = list(next(rollpack.pack_online(singles(ROWS), global_batch_size=4, micro_batch_size=1)))
    reducer = LossReducer()
    with pytest.raises(rollpack.PlanError, match="micro-batch 1 of this rank's 3 in step 0 did not come"):
        with reducer.step():
            for micro_batch in (step[0], step[2]):
                reducer(torch.zeros(len(micro_batch.tokens)), micro_batch)


def test_what_needs_the_number_of_micro_batches_is_refused_and_metrics_work():
    (step,) = (
        list(s)
        for s in rollpack.pack_online(singles(ROWS), global_batch_size=4, max_tokens_per_gpu=8, token_columns=["loss"])
    )
    moved = [micro_batch.to("cpu") for micro_batch in step]
    for backend in ("megatron", "megatron_legacy"):
        with pytest.raises(rollpack.PlanError, match=f"'{backend}' needs the number of micro-batches"):
            LossReducer(backend=backend)(torch.zeros(len(moved[0].tokens)), moved[0])
    with pytest.raises(rollpack.PlanError, match="'accelerate' needs the number of micro-batches"):
        LossReducer(backend="accelerate", accumulation_steps=2)(torch.zeros(len(moved[0].tokens)), moved[0])
    per_token = LossReducer(backend="megatron_per_token")
    with pytest.raises(rollpack.PlanError, match="needs num_tokens"):
        per_token.loss_and_count(torch.zeros(len(moved[0].tokens)), moved[0])
    with pytest.raises(rollpack.PlanError, match="num_tokens"):
        LossReducer()(torch.zeros(len(moved[0].tokens)), moved[0], loss_aggregation="token_mean")
    metrics = Metrics({"loss": "sample_mean"})
    for micro_batch in moved:
        metrics.add(micro_batch, {"loss": micro_batch.columns["loss"]})
    assert metrics.log()["loss"] == pytest.approx(5.75)


def test_an_arrival_without_ids_that_others_have_is_refused():
    # Its rows would count as rollouts of their own.
    without = [{name: value for name, value in ROWS[2].items() if name != "rollout_id"}]
    steps = rollpack.pack_online([ROWS[:2], without, ROWS[3:]], global_batch_size=4, max_tokens_per_gpu=8)
    with pytest.raises(rollpack.SchemaError, match="arrival 1: column 'rollout_id' is absent, and was int64") as caught:
        list(next(steps))
    assert caught.value.column == "rollout_id"
    as_text = [ROWS[2] | {"rollout_id": "2"}]
    with pytest.raises(rollpack.SchemaError, match="arrival 1: column 'rollout_id' is string, and was int64"):
        list(next(rollpack.pack_online([ROWS[:2], as_text], global_batch_size=4, max_tokens_per_gpu=8)))


def test_prompt_groups_have_ids_of_one_type():
    """Text and numbers are never equal, and a group that was cut would count as two."""
    arrivals = [ROWS[:2], [row | {"group_index": str(row["group_index"])} for row in ROWS[2:]]]
    steps = rollpack.pack_online(
        arrivals, global_batch_size=4, max_tokens_per_gpu=8, loss_aggregation="prompt_mean", prompts_per_step=2
    )
    with pytest.raises(rollpack.SchemaError, match="arrival 1: column 'group_index' is string, and was int64") as caught:
        list(next(steps))
    assert caught.value.column == "group_index"


def test_a_sample_column_is_of_integers_or_of_floats_in_all_arrivals():
    """It would be float64 in one micro-batch and float32 in the next."""
    arrivals = [[ROWS[0] | {"reward": 0.5}], [ROWS[1] | {"reward": 1}]]
    for order, text in ((1, "integers, and was floats"), (-1, "floats, and was integers")):
        steps = rollpack.pack_online(arrivals[::order], global_batch_size=2, max_tokens_per_gpu=8, sample_columns=["reward"])
        with pytest.raises(rollpack.SchemaError, match=f"arrival 1: column 'reward' is {text} in arrivals before"):
            list(next(steps))


def test_columns_of_other_names_and_rollouts_of_several_columns():
    """The last two samples are of one rollout, whose number is that of the first in another group."""
    rows = [row | {"ids": row["tokens"], "n": n} for row, n in zip(ROWS, (0, 1, 0, 0), strict=True)]
    for row in rows:
        del row["tokens"], row["rollout_id"]
    named = {"columns": {"tokens": "ids"}, "rollout_key": ["group_index", "n"]}
    found = losses_of([rows[:1], rows[1:2], rows[2:]], global_batch_size=3, max_tokens_per_gpu=8, **named)
    # By hand: rollouts of 4, (1 + 2 + 3) / 3 and (10 + 20 + 1 + 2 + 3) / 5.
    assert found == pytest.approx([13.2 / 3], abs=1e-12)
    with pytest.raises(rollpack.DataError, match=r"arrival 3: row 0 is of rollout \(1, 0\), of which an earlier arrival"):
        losses_of(singles(rows), global_batch_size=4, max_tokens_per_gpu=8, **named)


@pytest.mark.parametrize(
    ("arrivals", "totals", "expected"),
    [
        # As in test_masks.py. Samples: 4/1, (1+3)/2, 30/2, 0. Groups: (4+4)/3, 30/2.
        (singles(ROWS), {"loss_aggregation": "sample_mean"}, 21 / 4),
        ([ROWS[:2], ROWS[2:]], {"loss_aggregation": "prompt_mean", "prompts_per_step": 2}, (8 / 3 + 15) / 2),
    ],
)
def test_masks_that_are_changed_when_the_step_has_come(arrivals, totals, expected):
    masks = [[1], [1, 0, 1], [1, 1], [0, 0, 0, 0]]
    steps = rollpack.pack_online(
        arrivals, global_batch_size=4, max_tokens_per_gpu=8, look_ahead=1, token_columns=["loss"], **totals
    )
    batches = [batch.to("cpu") for batch in next(steps)]
    assert len(batches) > 1
    reducer = LossReducer(backend="none", denominators="current")
    whole = [[x for row in batch.rows for x in [0, *masks[row]]] for batch in batches]  # a prompt token each
    reducer.set_masks(batches, [torch.tensor(mask).bool() for mask in whole], cut=False)
    with reducer.step():
        loss = sum(reducer(batch.columns["loss"].double(), batch).item() for batch in batches)
    assert loss == pytest.approx(expected, rel=1e-14)


def test_a_placeholder_after_arrivals_that_went_out():
    """It has a dummy's columns, though the data that came first is let go."""
    rows = [{"tokens": [[1, 2]] * n, "response_length": [1] * n, "loss": [[float(n)]] * n} for n in (1, 1, 1, 4)]
    arguments = {"global_batch_size": 7, "micro_batch_size": 1, "look_ahead": 1, "dp_size": 2}
    (last,) = (list(step) for step in rollpack.pack_online(rows, dp_rank=1, token_columns=["loss"], **arguments))
    assert [batch.rows.tolist() for batch in last] == [[1], [3], [5], [-1]]
    assert last[-1].columns["loss"].tolist() == [0.0] * len(last[-1].tokens)
    assert losses_of(rows, **arguments) == pytest.approx([(1 + 1 + 1 + 4 * 4) / 7], abs=1e-12)
    # The arrival that came last goes out beside the first, when another round is still to come.
    rows = [{"tokens": [[1] * n], "response_length": [1], "loss": [[float(n)]]} for n in (3, 8, 8, 8, 3, 4)]
    arguments = {"global_batch_size": 6, "max_tokens_per_gpu": 8, "look_ahead": 1, "dp_size": 2}
    (last,) = (list(step) for step in rollpack.pack_online(rows, dp_rank=0, **arguments))
    assert [batch.rows.tolist() for batch in last] == [[1], [3], [-1]]
    assert losses_of(rows, **arguments) == pytest.approx([34 / 6], abs=1e-12)


@pytest.mark.parametrize("data", [pa.Table.from_pylist(ROWS), {"tokens": [[1, 2]]}, "rollouts.parquet"])
def test_data_in_the_place_of_arrivals_is_refused(data):
    with pytest.raises(TypeError, match="arrivals is a .*, and has to be an iterable of such: pass \\[data\\]"):
        rollpack.pack_online(data, global_batch_size=4, max_tokens_per_gpu=8)


@pytest.mark.parametrize(("num_tokens", "text"), [(9, "pass \\[9\\]"), ([-4], "num_tokens of step 0 is -4")])
def test_num_tokens_is_a_number_a_step(num_tokens, text):
    with pytest.raises(rollpack.PlanError, match=text):
        steps = rollpack.pack_online(
            [ROWS], global_batch_size=4, max_tokens_per_gpu=8, loss_aggregation="token_mean", num_tokens=num_tokens
        )
        list(next(steps))
