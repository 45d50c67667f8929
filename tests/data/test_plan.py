"""Where a plan puts samples, what it counts, and what it refuses."""

import copy
import math
import os
import pickle
import re
import subprocess
import sys
from collections import Counter
from itertools import product

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rollpack


def of_lengths(lengths, **columns):
    """One sample a length; all but the first token are trained, where nothing else is said."""
    columns = {"response_length": [n - 1 for n in lengths]} | columns
    return pa.table({"tokens": pa.array([[7] * n for n in lengths], pa.list_(pa.int32())), **columns})


def of_masks(masks, **columns):
    """One sample a mask, each with a prompt of one token."""
    return pa.table({"tokens": [[7] * (len(mask) + 1) for mask in masks], "loss_mask": masks, **columns})


def placed(plan):
    """{(step, dp_rank): [rows of each micro-batch]}."""
    return {
        (step, rank): [plan.rows(step, rank, k).tolist() for k in range(counts.num_micro_batches)]
        for step, counts in enumerate(plan.steps)
        for rank in range(plan.settings.dp_size)
    }


def rows_of_steps(plan):
    rows = [[] for _ in plan.steps]
    for (step, _), micro_batches in placed(plan).items():
        rows[step] += [row for micro_batch in micro_batches for row in micro_batch]
    return [sorted(of_step) for of_step in rows]


def micro_batches_of(plan, table):
    """The lengths that lie together, over all ranks and steps."""
    lengths = [len(tokens) for tokens in table["tokens"].to_pylist()]
    return sorted(sorted(lengths[row] for row in m) for ranks in placed(plan).values() for m in ranks)


# ---------------------------------------------------------------------------------------------------------- steps


def test_without_a_step_size_all_data_is_one_step():
    plan = rollpack.plan(of_lengths([3, 2, 4]), micro_batch_size=1)
    assert plan.steps == (rollpack.Step(num_rollouts=3, num_prompts=None, num_tokens=6, num_micro_batches=3),)
    assert rows_of_steps(plan) == [[0, 1, 2]]
    assert plan.num_rows == 3
    assert plan.dropped_rows.tolist() == []
    assert plan.dropped_rows.dtype == np.int64
    assert plan.rows(0, 0, 0).dtype == np.int64


FAN_OUT = of_masks(
    [[1], [1, 1], [0], [1, 1, 1], [1, 0], [0, 0], [1]],
    rollout_id=["a", "b", "a", "c", "b", "d", "e"],
    group_index=[10, 10, 10, 10, 10, 20, 20],
)


def test_a_step_has_so_many_rollouts_in_first_seen_order_with_all_their_samples():
    plan = rollpack.plan(FAN_OUT, global_batch_size=2, remainder="keep", micro_batch_size=2)
    assert rows_of_steps(plan) == [[0, 1, 2, 4], [3, 5], [6]]
    assert [step[:3] for step in plan.steps] == [(2, None, 4), (2, None, 3), (1, None, 1)]
    sums = dict(zip(plan.to_arrow()["row"].to_pylist(), plan.to_arrow()["rollout_mask_sum"].to_pylist(), strict=True))
    assert sums == {0: 1, 2: 1, 1: 3, 4: 3, 3: 3, 5: 0, 6: 1}


def test_an_incomplete_last_step_is_an_error_or_dropped_or_kept():
    with pytest.raises(rollpack.PlanError, match=r"5 rollouts .* 2: 1 .*remainder='drop'.*remainder='keep'"):
        rollpack.plan(FAN_OUT, global_batch_size=2, micro_batch_size=2)
    dropped = rollpack.plan(FAN_OUT, global_batch_size=2, micro_batch_size=2, remainder="drop")
    assert rows_of_steps(dropped) == [[0, 1, 2, 4], [3, 5]]
    assert dropped.dropped_rows.tolist() == [6]
    more = rollpack.plan(FAN_OUT, global_batch_size=4, micro_batch_size=2, remainder="drop")
    assert more.dropped_rows.tolist() == [6]
    interleaved = rollpack.plan(FAN_OUT.take([6, 0, 1, 2, 3, 4]), global_batch_size=3, micro_batch_size=2, remainder="drop")
    assert rows_of_steps(interleaved) == [[0, 1, 2, 3, 5]]  # e, a and b, with row 5, the last one of b
    assert interleaved.dropped_rows.tolist() == [4]
    for remainder in ("error", "drop", "keep"):
        whole = rollpack.plan(FAN_OUT, global_batch_size=5, micro_batch_size=2, remainder=remainder)
        assert rows_of_steps(whole) == [[0, 1, 2, 3, 4, 5, 6]]
        assert whole.dropped_rows.tolist() == []


def test_dropping_everything_is_an_error():
    with pytest.raises(rollpack.PlanError, match=r"global_batch_size.*keep"):
        rollpack.plan(FAN_OUT, global_batch_size=6, micro_batch_size=2, remainder="drop")


def test_a_step_may_have_so_many_whole_prompt_groups():
    data = of_masks(
        [[1], [1], [1, 1], [0], [1], [1]], rollout_id=[0, 1, 2, 3, 4, 5], group_index=["x", "y", "x", "z", "y", "w"]
    )
    plan = rollpack.plan(data, prompts_per_step=2, micro_batch_size=2)
    assert rows_of_steps(plan) == [[0, 1, 2, 4], [3, 5]]
    assert [step[:3] for step in plan.steps] == [(4, 2, 5), (2, 2, 1)]
    with pytest.raises(rollpack.PlanError, match="4 prompt groups"):
        rollpack.plan(data, prompts_per_step=3, micro_batch_size=2)
    dropped = rollpack.plan(data, prompts_per_step=3, micro_batch_size=2, remainder="drop")
    assert dropped.dropped_rows.tolist() == [5]


def test_under_prompt_mean_a_group_that_a_boundary_would_cut_is_named():
    names = ["alpha", "alpha", "beta", "beta", "gamma", "gamma"]
    data = of_lengths([2] * 6, rollout_id=list(range(6)), group_index=names)
    plan = rollpack.plan(data, loss_aggregation="prompt_mean", global_batch_size=2, micro_batch_size=2)
    assert [step.num_prompts for step in plan.steps] == [1, 1, 1]
    rollpack.plan(data, loss_aggregation="prompt_mean", global_batch_size=4, remainder="keep", micro_batch_size=2)
    for size, remainder, cut in ((3, "error", "beta"), (5, "drop", "gamma"), (5, "keep", "gamma")):
        with pytest.raises(rollpack.PlanError, match=f"{cut}.*prompts_per_step"):
            rollpack.plan(
                data, loss_aggregation="prompt_mean", global_batch_size=size, remainder=remainder, micro_batch_size=2
            )
    assert len(rollpack.plan(data, global_batch_size=3, micro_batch_size=2).steps) == 2  # another mode may cut


def test_what_is_empty_counts_or_not_and_moves_no_boundary():
    data = of_masks([[0], [1], [0], [0], [1], [1]], rollout_id=list("abcdef"), group_index=[0, 0, 1, 1, 2, 2])
    counted = rollpack.plan(data, prompts_per_step=1, micro_batch_size=2)
    assert [step[:3] for step in counted.steps] == [(2, 1, 1), (2, 1, 0), (2, 1, 2)]
    skipped = rollpack.plan(data, prompts_per_step=1, micro_batch_size=2, empty="skip")
    assert [step[:3] for step in skipped.steps] == [(1, 1, 1), (0, 0, 0), (2, 1, 2)]
    assert rows_of_steps(skipped) == rows_of_steps(counted) == [[0, 1], [2, 3], [4, 5]]
    assert skipped.to_arrow()["sample_weight"].to_pylist() == [0.0, 1.0, 0.0, 0.0, 0.5, 0.5]
    assert counted.to_arrow()["sample_weight"].to_pylist() == [0.0, 0.5, 0.0, 0.0, 0.5, 0.5]


# ------------------------------------------------------------------------------------------- the table of a plan


def test_the_table_of_a_plan_by_hand():
    """The design's four samples, each in a step with the other one of its group."""
    data = of_masks([[1], [1, 1, 1], [1, 1], [1, 0, 1, 1]], group_index=[0, 0, 1, 1])
    plan = rollpack.plan(data, loss_aggregation="prompt_mean", global_batch_size=2, micro_batch_size=1, dp_size=2)
    table = plan.to_arrow()
    assert table.column_names == [
        "step", "dp_rank", "micro_batch", "position", "row", "total_length", "mask_sum", "rollout_mask_sum",
        "prompt_mask_sum", "sample_weight",
    ]  # fmt: skip
    assert [str(field.type) for field in table.schema] == ["int64"] * 9 + ["double"]
    assert not any(field.nullable for field in table.schema)
    expected = {
        0: (0, 2, 1, 1, 4, 1 / 4),
        1: (0, 4, 3, 3, 4, 1 / 4),
        2: (1, 3, 2, 2, 5, 1 / 5),
        3: (1, 5, 3, 3, 5, 1 / 5),
    }
    columns = ["row", "step", "total_length", "mask_sum", "rollout_mask_sum", "prompt_mask_sum", "sample_weight"]
    found = {row: tuple(rest) for row, *rest in zip(*(table[c].to_pylist() for c in columns), strict=True)}
    assert found == expected
    for place in table.select(["step", "dp_rank", "micro_batch", "position", "row"]).to_pylist():
        where = plan.rows(place["step"], place["dp_rank"], place["micro_batch"])
        assert where[place["position"]] == place["row"]
    assert "prompt_mask_sum" not in rollpack.plan(data, micro_batch_size=1).to_arrow().column_names
    assert pa.table(plan).equals(table)
    assert pl.DataFrame(plan).equals(pl.from_arrow(table))


def test_places_of_steps_with_different_numbers_of_micro_batches_by_hand():
    arguments = {"global_batch_size": 3, "remainder": "keep", "micro_batch_size": 2, "dp_size": 2, "placeholders": True}
    plan = rollpack.plan(of_lengths([5, 5, 5, 5], rollout_id=[0, 0, 1, 2]), **arguments)
    places = plan.to_arrow().select(["step", "dp_rank", "micro_batch", "position"]).to_pylist()
    assert [tuple(place.values()) for place in places] == [(0, 0, 0, 0), (0, 0, 0, 1), (0, 1, 0, 0), (0, 1, 0, 1)]
    arguments |= {"global_batch_size": 2, "micro_batch_size": 1}  # three samples, then one
    plan = rollpack.plan(of_lengths([5, 5, 5, 5], rollout_id=[0, 0, 1, 2]), **arguments)
    places = plan.to_arrow().select(["step", "dp_rank", "micro_batch", "position"]).to_pylist()
    assert [step.num_micro_batches for step in plan.steps] == [2, 1]
    assert [tuple(place.values()) for place in places] == [(0, 0, 0, 0), (0, 0, 1, 0), (0, 1, 0, 0), (1, 0, 0, 0)]
    again = rollpack.Plan.from_bytes(plan.to_bytes())
    assert again.to_arrow().equals(plan.to_arrow())
    assert again.rows(0, 1, 1).tolist() == []  # a placeholder


def test_outputs_go_back_to_input_order():
    plan = rollpack.plan(of_lengths([3, 9, 5, 7, 2]), max_tokens_per_gpu=9, dp_size=2, global_batch_size=4, remainder="drop")
    placed = plan.to_arrow()["row"].to_numpy()
    assert sorted(placed.tolist()) == [0, 1, 2, 3]
    outputs = np.array([10 * row for row in placed])  # one a sample, in the order of the plan
    assert plan.inverse.dtype == np.int64
    assert outputs[plan.inverse].tolist() == [0, 10, 20, 30]
    assert pickle.loads(pickle.dumps(plan)).inverse.tolist() == plan.inverse.tolist()


@pytest.mark.parametrize("sync", ["step", "micro_batch"])
@pytest.mark.parametrize("limit", [{"max_tokens_per_gpu": 8}, {"micro_batch_size": 2}])
def test_rollouts_and_groups_are_kept_on_one_rank(limit, sync):
    # Rollouts a to d of two samples each, in two groups.
    data = of_lengths([4] * 8, rollout_id=list("abcdabcd"), group_index=[0, 0, 1, 1] * 2)

    def ranks(**arguments):
        plan = rollpack.plan(data, sync=sync, **limit, **arguments)
        return sorted(sorted(row for m in micro_batches for row in m) for micro_batches in placed(plan).values())

    assert ranks(dp_size=4, keep_together="rollout") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert ranks(dp_size=2, keep_together="group") == [[0, 1, 4, 5], [2, 3, 6, 7]]
    with pytest.raises(rollpack.PlanError, match=r"2 whole groups for dp_size 4.*keep_together='group'.*Lower dp_size"):
        ranks(dp_size=4, keep_together="group")
    with pytest.raises(rollpack.PlanError, match="groups=True"):
        rollpack.plan(rollpack.summarize(data), keep_together="group", **limit)


HAND = of_masks([[1], [1, 1, 1], [1, 1], [1, 0, 1, 1]], group_index=[0, 0, 1, 1])
HAND_LOSSES = [[4], [1, 2, 3], [10, 20], [1, 100, 2, 3]]


@pytest.mark.parametrize(
    ("mode", "divisor", "weights", "loss"),
    [
        ("sample_mean", None, [1 / 4, 1 / 12, 1 / 8, 1 / 12], 5.75),
        ("prompt_mean", None, [1 / 8, 1 / 8, 1 / 10, 1 / 10], 4.85),
        ("token_mean", None, [1 / 9] * 4, 46 / 9),
        ("constant", 10, [1 / 40] * 4, 1.15),
    ],
)
@pytest.mark.parametrize("dp_size", [1, 2, 4])
def test_the_weights_of_the_design_by_hand(mode, divisor, weights, loss, dp_size):
    plan = rollpack.plan(HAND, loss_aggregation=mode, divisor=divisor, micro_batch_size=1, dp_size=dp_size)
    table = plan.to_arrow()
    found = dict(zip(table["row"].to_pylist(), table["sample_weight"].to_pylist(), strict=True))
    assert found == pytest.approx(dict(enumerate(weights)), rel=1e-15)
    masks = HAND["loss_mask"].to_pylist()
    total = sum(found[r] * m * x for r in range(4) for m, x in zip(masks[r], HAND_LOSSES[r], strict=True))
    assert total == pytest.approx(loss, rel=1e-14)


def test_fan_out_shares_the_weight_of_a_rollout():
    data = of_masks([[1], [1, 1, 1], [1, 1]], rollout_id=["A", "A", "B"])
    plan = rollpack.plan(data, max_tokens_per_gpu=100)
    assert plan.to_arrow()["rollout_mask_sum"].to_pylist() == [4, 4, 2]
    assert plan.to_arrow()["sample_weight"].to_pylist() == [1 / 8, 1 / 8, 1 / 4]
    # 8/8 + 3/8 + 10/4 = 3.875, as in the design


def test_uneven_groups_are_counted_as_they_are():
    data = of_masks([[1]] * 11, group_index=[0] * 4 + [1] * 3 + [2] * 4)
    plan = rollpack.plan(data, loss_aggregation="prompt_mean", micro_batch_size=11)
    assert plan.steps[0][:3] == (11, 3, 11)
    weights = plan.to_arrow()["sample_weight"].to_pylist()
    assert weights == pytest.approx([1 / 12] * 4 + [1 / 9] * 3 + [1 / 12] * 4, rel=1e-15)
    assert sum(w * x for w, x in zip(weights, [1] * 4 + [2] * 3 + [6] * 4, strict=True)) == pytest.approx(3.0)


def test_the_weights_of_dropped_samples_count_nowhere():
    data = of_masks([[1], [1, 1], [1] * 50], group_index=[0, 0, 1])
    plan = rollpack.plan(data, loss_aggregation="token_mean", global_batch_size=2, remainder="drop", micro_batch_size=2)
    assert plan.steps[0][:3] == (2, None, 3)
    assert plan.to_arrow()["sample_weight"].to_pylist() == [1 / 3, 1 / 3]


# -------------------------------------------------------------------------------------------------------- budget


@pytest.mark.parametrize(
    ("lengths", "arguments", "expected"),
    [
        ([7] * 8, {"max_tokens_per_gpu": 8}, [[7]] * 8),
        ([7, 5, 3, 5], {"max_tokens_per_gpu": 10}, [[3, 7], [5, 5]]),
        ([3, 3, 3, 7, 7, 7], {"max_tokens_per_gpu": 10}, [[3, 7]] * 3),
        ([15, 3, 3], {"max_tokens_per_gpu": 10, "oversize": "alone"}, [[3, 3], [15]]),
        ([3, 15], {"max_tokens_per_gpu": 10, "oversize": "alone"}, [[3], [15]]),
        ([10], {"max_tokens_per_gpu": 10}, [[10]]),
        ([5, 5], {"max_tokens_per_gpu": 10}, [[5, 5]]),
        ([5, 5], {"max_tokens_per_gpu": 5, "cp_size": 2, "layout": "contiguous"}, [[5, 5]]),
        ([5, 5], {"max_tokens_per_gpu": 10, "pad_to_multiple_of": 4}, [[5], [5]]),
        ([5, 4], {"max_tokens_per_gpu": 10, "pad_micro_batch_to_multiple_of": 4}, [[4], [5]]),
        ([3, 3], {"max_tokens_per_gpu": 11, "pad_micro_batch_to_multiple_of": 8}, [[3, 3]]),
        ([7, 7], {"max_tokens_per_gpu": 12, "cp_size": 2, "pad_to_multiple_of": 6}, [[7, 7]]),  # lcm(4, 6): 12 + 12
        ([7, 7], {"max_tokens_per_gpu": 11, "cp_size": 2, "pad_to_multiple_of": 6}, [[7], [7]]),
    ],
)
def test_micro_batches_under_a_budget_by_hand(lengths, arguments, expected):
    table = of_lengths(lengths)
    plan = rollpack.plan(table, **arguments)
    assert micro_batches_of(plan, table) == expected
    assert plan.steps[0].num_micro_batches == len(expected)


def test_the_budget_holds_padded_tokens_over_all_cp_ranks():
    """5 5 5 are padded to 8 8 8 under zigzag, and two of them fill 8 tokens on each of 2 GPUs."""
    table = of_lengths([5, 5, 5])
    plan = rollpack.plan(table, max_tokens_per_gpu=8, cp_size=2, layout="zigzag")
    assert plan.steps[0].num_micro_batches == 2
    assert micro_batches_of(plan, table) == [[5], [5, 5]]
    assert plan.fill == pytest.approx(15 / 32)
    unpadded = rollpack.plan(table, max_tokens_per_gpu=8, cp_size=2, layout="contiguous")
    assert unpadded.steps[0].num_micro_batches == 1


def test_two_ranks_share_what_fits_the_budget():
    table = of_lengths([4, 4, 4, 1, 1, 1])
    plan = rollpack.plan(table, max_tokens_per_gpu=4, dp_size=2)
    assert plan.steps[0].num_micro_batches == 2
    assert micro_batches_of(plan, table) == [[1, 1, 1], [4], [4], [4]]


@pytest.mark.parametrize("sync", ["step", "micro_batch"])
@pytest.mark.parametrize("limit", [{"micro_batch_size": 2}, {"micro_batch_size": 8}, {"max_tokens_per_gpu": 64}])
def test_206_samples_over_4_ranks_are_as_many_micro_batches_on_each(limit, sync):
    lengths = [3 + (17 * i) % 29 for i in range(206)]
    plan = rollpack.plan(of_lengths(lengths), dp_size=4, sync=sync, **limit)
    k = plan.steps[0].num_micro_batches
    ranks = [placed(plan)[0, rank] for rank in range(4)]
    assert [len(rank) for rank in ranks] == [k] * 4
    assert all(all(rank) for rank in ranks)  # none is empty
    if "micro_batch_size" in limit:
        assert max(len(m) for rank in ranks for m in rank) <= limit["micro_batch_size"]
        assert sorted(sum(map(len, rank)) for rank in ranks) == [51, 51, 52, 52]
    else:
        assert max(sum(lengths[row] for row in m) for rank in ranks for m in rank) <= 64


def test_206_samples_one_a_micro_batch_are_two_too_few_for_4_ranks():
    table = of_lengths([5] * 206)
    with pytest.raises(rollpack.PlanError, match=r"206 samples.*208.*2 missing.*placeholders=True"):
        rollpack.plan(table, dp_size=4, micro_batch_size=1)
    plan = rollpack.plan(table, dp_size=4, micro_batch_size=1, placeholders=True)
    assert plan.steps[0].num_micro_batches == 52
    counts = Counter(len(m) for rank in placed(plan).values() for m in rank)
    assert counts == {1: 206, 0: 2}


def test_a_sample_over_the_budget_is_an_error_or_alone():
    table = of_lengths([3, 15, 4])
    with pytest.raises(rollpack.PlanError, match=r"row 1 has 15 tokens.*budget is 10.*oversize='alone'"):
        rollpack.plan(table, max_tokens_per_gpu=10)
    with pytest.raises(rollpack.PlanError, match=r"row 1 has 15 tokens.*16 padded.*budget is 14"):
        rollpack.plan(table, max_tokens_per_gpu=7, cp_size=2)
    plan = rollpack.plan(table, max_tokens_per_gpu=10, oversize="alone")
    assert plan.oversize_rows.tolist() == [1]
    assert plan.oversize_rows.dtype == np.int64
    assert micro_batches_of(plan, table) == [[3, 4], [15]]
    assert rollpack.plan(table, max_tokens_per_gpu=15, oversize="alone").oversize_rows.tolist() == []
    assert rollpack.plan(table, micro_batch_size=3).oversize_rows.tolist() == []


@pytest.mark.parametrize(("multiple", "per_rank"), [(1, 3), (2, 4), (3, 3), (4, 4), (5, 5)])
def test_each_rank_has_a_multiple_of_micro_batches(multiple, per_rank):
    table = of_lengths([4] * 12)
    plan = rollpack.plan(table, max_tokens_per_gpu=8, dp_size=2, micro_batch_multiple=multiple)
    assert plan.steps[0].num_micro_batches == per_rank
    assert all(placed(plan)[0, 0] + placed(plan)[0, 1])


def test_a_step_of_too_few_samples_says_how_many_are_missing_and_what_to_change():
    table = of_lengths([4, 4, 4])
    with pytest.raises(rollpack.PlanError, match=r"3 samples.*4.*1 missing") as caught:
        rollpack.plan(table, max_tokens_per_gpu=8, dp_size=4)
    for way_out in ("dp_size", "micro_batch_multiple", "placeholders=True"):
        assert way_out in str(caught.value)
    with pytest.raises(rollpack.PlanError, match=r"3 samples.*10.*7 missing"):
        rollpack.plan(table, max_tokens_per_gpu=8, dp_size=2, micro_batch_multiple=5)
    plan = rollpack.plan(table, max_tokens_per_gpu=8, dp_size=4, placeholders=True)
    assert plan.steps[0].num_micro_batches == 1
    assert sorted(len(plan.rows(0, rank, 0)) for rank in range(4)) == [0, 1, 1, 1]
    assert plan.to_arrow().num_rows == 3
    later = of_lengths([4] * 7)
    with pytest.raises(rollpack.PlanError, match="step 1"):
        rollpack.plan(later, micro_batch_size=8, dp_size=4, global_batch_size=4, remainder="keep")


def test_placeholders_are_not_used_where_samples_suffice():
    table = of_lengths([4] * 6)
    plan = rollpack.plan(table, max_tokens_per_gpu=12, dp_size=3, micro_batch_multiple=2, placeholders=True)
    assert [len(m) for rank in placed(plan).values() for m in rank] == [1] * 6


# ------------------------------------------------------------------------------------------ fill, imbalance, print


@pytest.mark.parametrize(
    ("lengths", "arguments", "fill", "imbalance"),
    [
        ([7, 5, 3, 5], {"max_tokens_per_gpu": 10}, 1.0, 1.0),
        ([6, 2], {"max_tokens_per_gpu": 8, "dp_size": 2}, 8 / 16, 6 / 4),
        ([6, 2], {"max_tokens_per_gpu": 8, "dp_size": 2, "sync": "micro_batch"}, 8 / 16, 6 / 4),
        ([6, 2], {"max_tokens_per_gpu": 8, "dp_size": 2, "cost": rollpack.CostModel(0, 1)}, 8 / 16, 36 / 20),
        ([6, 2], {"max_tokens_per_gpu": 8, "dp_size": 2, "cost": rollpack.CostModel(2, 1)}, 8 / 16, 48 / 28),
        ([6, 2], {"max_tokens_per_gpu": 8, "dp_size": 2, "cost": "attention"}, 8 / 16, (6 * 24582) / (3 * 24582 + 24578)),
        # two steps: the slowest ranks take 6 and 4, the mean rank (8 + 8) / 2
        ([6, 2, 4, 4], {"max_tokens_per_gpu": 8, "dp_size": 2, "global_batch_size": 2}, 16 / 32, 10 / 8),
        # the ranks take 8 + 2 and 6 + 4; round by round the slower ones take 8 + 4
        ([8, 6, 4, 2], {"micro_batch_size": 1, "dp_size": 2}, 20 / 32, 1.0),
        ([8, 6, 4, 2], {"micro_batch_size": 1, "dp_size": 2, "sync": "micro_batch"}, 20 / 32, 12 / 10),
        ([15, 3, 3], {"max_tokens_per_gpu": 10, "oversize": "alone"}, 21 / 25, 1.0),
        # a placeholder leaves all its room, and its rank waits
        ([4], {"max_tokens_per_gpu": 8, "dp_size": 2, "placeholders": True}, 4 / 16, 2.0),
        ([4, 4], {"max_tokens_per_gpu": 8}, 1.0, 1.0),
    ],
)
def test_fill_and_imbalance_by_hand(lengths, arguments, fill, imbalance):
    plan = rollpack.plan(of_lengths(lengths), **arguments)
    assert plan.fill == pytest.approx(fill, rel=1e-12)
    assert plan.imbalance == pytest.approx(imbalance, rel=1e-12)
    assert f"fill {fill:.1%}" in repr(plan)
    assert f"imbalance {imbalance:.4f}" in repr(plan)


def test_with_a_number_of_samples_too_the_heaviest_one_has_the_least_company():
    table = of_lengths([4, 2, 1])
    plan = rollpack.plan(table, micro_batch_size=2, dp_size=2)
    assert micro_batches_of(plan, table) == [[1, 2], [4]]
    assert plan.imbalance == pytest.approx(8 / 7)


def test_a_plan_prints_what_it_is():
    table = of_lengths([4, 4, 20, 4, 4])
    plan = rollpack.plan(
        table, max_tokens_per_gpu=8, dp_size=2, cp_size=1, oversize="alone", global_batch_size=4, remainder="drop"
    )
    for said in ("4 samples", "2 micro-batches", "2 x 1", "sample_mean", "1 row dropped", "1 row over the budget"):
        assert said in repr(plan)


@pytest.mark.parametrize("sync", ["step", "micro_batch"])
@pytest.mark.parametrize("cost", ["tokens", "attention"])
def test_real_traces_are_balanced(traces, cost, sync):
    plan = rollpack.plan(traces("tau_bench_airline"), max_tokens_per_gpu=16_384, dp_size=8, cost=cost, sync=sync)
    assert plan.imbalance < 1.1
    assert plan.fill > 0.5


# --------------------------------------------------------------------------------------------------- what is refused


def test_the_same_cost_said_in_other_words_is_the_same_plan():
    table = of_lengths([6, 2, 5])
    ids = [
        rollpack.plan(table, max_tokens_per_gpu=8, dp_size=2, cost=cost).id
        for cost in ("tokens", (1, 0), rollpack.CostModel(1))
    ]
    assert len(set(ids)) == 1
    most = 2**63 - 1  # of int64
    assert rollpack.plan(table, micro_batch_size=1, cost=(most, most)).settings.cost == (most, most)


REFUSED = {
    "neither limit": ({}, "exactly one of max_tokens_per_gpu and micro_batch_size"),
    "both limits": ({"max_tokens_per_gpu": 8, "micro_batch_size": 1}, "exactly one"),
    "both step sizes": ({"micro_batch_size": 1, "global_batch_size": 1, "prompts_per_step": 1}, "at most one"),
    "mode": ({"micro_batch_size": 1, "loss_aggregation": "mean"}, "sample_mean, prompt_mean, token_mean, constant"),
    "no divisor": ({"micro_batch_size": 1, "loss_aggregation": "constant"}, "divisor"),
    "divisor of another mode": ({"micro_batch_size": 1, "divisor": 1.0}, "only loss_aggregation 'constant'"),
    **{
        f"divisor {divisor}": (
            {"micro_batch_size": 1, "loss_aggregation": "constant", "divisor": divisor},
            re.escape(f"divisor is {divisor!r}; it has to be a number"),
        )
        for divisor in ("ten", ())
    },
    "empty": ({"micro_batch_size": 1, "empty": "drop"}, "count or skip"),
    "remainder": ({"micro_batch_size": 1, "remainder": "pad"}, "error, drop or keep"),
    "oversize": ({"micro_batch_size": 1, "oversize": "drop"}, "error or alone"),
    "layout": ({"micro_batch_size": 1, "layout": "striped"}, "zigzag or contiguous"),
    "sync": ({"micro_batch_size": 1, "sync": "never"}, "step or micro_batch"),
    "keep_together": ({"micro_batch_size": 1, "keep_together": "prompt"}, "group, rollout or None"),
    "cost": ({"micro_batch_size": 1, "cost": "flops"}, "tokens, attention or a CostModel"),
    "negative cost": ({"micro_batch_size": 1, "cost": rollpack.CostModel(-1)}, "^linear of the cost model is -1"),
    "negative pairs": ({"micro_batch_size": 1, "cost": rollpack.CostModel(1, -1)}, "^quadratic of the cost model is -1"),
    "cost over int64": (
        {"micro_batch_size": 1, "cost": rollpack.CostModel(2**63)},
        f"linear of the cost model is {2**63}; it has to fit an int64",
    ),
    "cost under int64": ({"micro_batch_size": 1, "cost": rollpack.CostModel(-(2**63) - 1)}, "linear .* to fit an int64"),
    "least int64": ({"micro_batch_size": 1, "cost": rollpack.CostModel(-(2**63))}, "linear .* at least 0"),
    "cost of a list": ({"micro_batch_size": 1, "cost": [1, 0]}, "tokens, attention or a CostModel"),
    "cost of one number": ({"micro_batch_size": 1, "cost": (1,)}, "tokens, attention or a CostModel"),
    "cost of nothing": ({"micro_batch_size": 1, "cost": rollpack.CostModel(0, 0)}, "cost"),
    "budget too small for a token": ({"max_tokens_per_gpu": 3, "pad_to_multiple_of": 4}, "max_tokens_per_gpu"),
    **{
        f"{name} {value}": ({"micro_batch_size": 1} | {name: value}, f"{name} is {value}")
        for name in (
            "dp_size",
            "cp_size",
            "global_batch_size",
            "prompts_per_step",
            "micro_batch_multiple",
            "pad_to_multiple_of",
            "pad_micro_batch_to_multiple_of",
            "micro_batch_size",
        )
        for value in (0, -1)
    },
    "budget 0": ({"max_tokens_per_gpu": 0}, "max_tokens_per_gpu is 0"),
    "budget -1": ({"max_tokens_per_gpu": -1}, "max_tokens_per_gpu is -1"),
}


@pytest.mark.parametrize(("arguments", "match"), REFUSED.values(), ids=REFUSED)
def test_arguments_that_cannot_be_met_are_refused(arguments, match):
    table = of_lengths([3, 4], group_index=[0, 1])
    with pytest.raises(rollpack.PlanError, match=match):
        rollpack.plan(table, **arguments)


@pytest.mark.parametrize("divisor", [0, -1.0, float("nan"), float("inf"), -float("inf"), None])
def test_a_divisor_is_finite_and_positive(divisor):
    with pytest.raises(rollpack.PlanError, match="finite number above 0"):
        rollpack.plan(of_lengths([3]), loss_aggregation="constant", divisor=divisor, micro_batch_size=1)


@pytest.mark.parametrize("mode", ["sample_mean", "prompt_mean", "token_mean"])
def test_a_divisor_belongs_to_constant_alone(mode):
    table = of_lengths([3], group_index=[0])
    with pytest.raises(rollpack.PlanError, match="leave it out"):
        rollpack.plan(table, loss_aggregation=mode, divisor=2.0, micro_batch_size=1)


WORDS = ["loss_aggregation", "empty", "layout", "remainder", "oversize", "sync"]


@pytest.mark.parametrize(
    ("name", "wrong"),
    [*((name, None) for name in WORDS), *product([*WORDS, "keep_together"], [3, ["step"], b"step", "\udcff"])],
)
def test_what_is_no_word_is_told_the_words(name, wrong):
    with pytest.raises(rollpack.PlanError, match=rf"^{name} is '.*'; it has to be (one of )?\w+( or|,) \w+"):
        rollpack.plan({"tokens": [[1]], "response_length": [1]}, micro_batch_size=1, **{name: wrong})


def test_wrong_arguments_do_not_cost_a_reader_its_rows():
    reader = of_lengths([3, 4]).to_reader()
    with pytest.raises(rollpack.PlanError):
        rollpack.plan(reader, micro_batch_size=1, dp_size=0)
    assert len(rollpack.summarize(reader)) == 2


def test_prompt_mean_over_a_summary_without_groups_says_what_to_pass():
    summary = rollpack.summarize(of_lengths([3, 4], group_index=[0, 1]))
    for arguments in ({"loss_aggregation": "prompt_mean"}, {"prompts_per_step": 1}):
        with pytest.raises(rollpack.PlanError, match="groups=True"):
            rollpack.plan(summary, micro_batch_size=2, **arguments)
    assert rollpack.plan(summary, micro_batch_size=2).steps[0].num_prompts is None


def test_a_summary_with_groups_tells_the_number_of_prompts_under_every_mode():
    summary = rollpack.summarize(of_lengths([3, 4, 5], group_index=[0, 1, 1]), groups=True)
    assert rollpack.plan(summary, micro_batch_size=2).steps[0].num_prompts == 2


def test_a_summary_was_made_with_names_of_its_own():
    summary = rollpack.summarize(of_lengths([3, 4]))
    for arguments in ({"columns": {"tokens": "x"}}, {"rollout_key": "x"}):
        with pytest.raises(rollpack.PlanError, match="summarize"):
            rollpack.plan(summary, micro_batch_size=2, **arguments)


def test_a_plan_has_the_same_id_however_its_columns_were_listed():
    table = of_lengths([3, 4])
    one, other = (
        rollpack.plan(table, micro_batch_size=1, columns=dict(columns))
        for columns in ([("loss_mask", None), ("rollout_id", None)], [("rollout_id", None), ("loss_mask", None)])
    )
    assert one.id == other.id
    assert re.fullmatch("[0-9a-f]{32}", one.id)


def test_a_micro_batch_says_how_many_rollouts_and_groups_there_are():
    table = of_lengths([3, 4, 5, 6], rollout_id=[7, 7, 8, 9], group_index=[4, 4, 4, 2])
    arguments = {"micro_batch_size": 4, "columns": {"rollout_id": "rollout_id"}}
    (packed,) = rollpack.pack(table, rollpack.plan(table, **arguments))
    assert packed.num_indices == (3, None)
    (packed,) = rollpack.pack(table, rollpack.plan(table, loss_aggregation="prompt_mean", **arguments))
    assert packed.num_indices == (3, 2)


def test_places_outside_a_plan_are_refused():
    plan = rollpack.plan(of_lengths([3] * 8), micro_batch_size=1, dp_size=2, global_batch_size=4)
    for place, name in (
        ((2, 0, 0), "step"),
        ((-1, 0, 0), "step"),
        ((0, 2, 0), "dp_rank"),
        ((0, -1, 0), "dp_rank"),
        ((0, 0, 2), "micro_batch"),
        ((0, 0, -1), "micro_batch"),
    ):
        with pytest.raises(rollpack.PlanError, match=f"^{name} is .*2"):
            plan.rows(*place)
    with pytest.raises(rollpack.PlanError, match="this plan has 2 steps; pass step=, from 0 to 1$"):
        rollpack.pack(of_lengths([3] * 8), plan)
    with pytest.raises(rollpack.PlanError, match="^cp_rank is 1, and this plan has 1 cp rank, counted from 0$"):
        rollpack.pack(of_lengths([3] * 8), plan, step=0, cp_rank=1)
    with pytest.raises(rollpack.PlanError, match="^Table is no Plan; pass the data, then what rollpack.plan returned$"):
        rollpack.pack(plan, of_lengths([3] * 8))
    with pytest.raises(rollpack.PlanError, match="^dict is no Plan; pass the data, then"):
        rollpack.write_packed(of_lengths([3] * 8), {}, "never")


# ------------------------------------------------------------------------------------------ the same plan everywhere

SCRIPT = """
import pyarrow as pa
import rollpack

lengths = [3 + (17 * i) % 29 for i in range(200)]
table = pa.table({
    "tokens": [[7] * n for n in lengths],
    "response_length": [n - 1 for n in lengths],
    "rollout_id": [f"rollout {i // 3}" for i in range(200)],
    "group_index": [f"group {i // 12}" for i in range(200)],
})
names = {"tokens": "tokens", "loss_mask": None, "rollout_id": "rollout_id"}
print(rollpack.plan(table, loss_aggregation="prompt_mean", max_tokens_per_gpu=64, dp_size=4, columns=names).id)
"""


def test_the_same_plan_comes_from_every_process():
    ids = set()
    for seed in ("1", "4242"):
        environment = os.environ | {"PYTHONHASHSEED": seed, "OMP_NUM_THREADS": seed[0], "RAYON_NUM_THREADS": seed[0]}
        run = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=True)
        ids.add(run.stdout)
    (plan_id,) = ids
    assert re.fullmatch("[0-9a-f]{32}", plan_id.strip())


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_the_same_plan_comes_from_every_form_of_the_data(data):
    lengths = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=20))
    table = of_lengths(lengths)
    arguments = {"max_tokens_per_gpu": 16, "dp_size": 2, "placeholders": True, "global_batch_size": 5, "remainder": "keep"}
    expected = rollpack.plan(table, **arguments).id
    large = table.set_column(0, "tokens", table["tokens"].cast(pa.large_list(pa.uint16())))
    cut = data.draw(st.integers(0, len(lengths)))
    parts = [table.slice(0, cut), table.slice(cut)]
    for same in (large, parts, pa.concat_tables(parts), pl.from_arrow(table), rollpack.summarize(parts)):
        assert rollpack.plan(same, **arguments).id == expected


def test_the_id_tells_plans_apart():
    table = of_lengths([3, 4, 5, 6], group_index=[0, 0, 1, 1])
    plans = [
        rollpack.plan(table, micro_batch_size=2),
        rollpack.plan(table, micro_batch_size=1),
        rollpack.plan(table, micro_batch_size=2, cp_size=2),
        rollpack.plan(table, micro_batch_size=2, cp_size=2, layout="contiguous"),
        rollpack.plan(table, micro_batch_size=2, loss_aggregation="token_mean"),
        rollpack.plan(table.take([1, 0, 2, 3]), micro_batch_size=2),
    ]
    assert len({plan.id for plan in plans}) == len(plans)


def test_numpy_integers_are_integers():
    table = of_lengths([3, 4, 5, 6])
    plain = {"max_tokens_per_gpu": 12, "dp_size": 2, "global_batch_size": 4, "cost": rollpack.CostModel(3, 1)}
    numpy = {"max_tokens_per_gpu": np.int64(12), "dp_size": np.int32(2), "global_batch_size": np.int64(4)}
    numpy["cost"] = rollpack.CostModel(np.int64(3), np.int64(1))
    plan = rollpack.plan(table, **numpy)
    assert plan.id == rollpack.plan(table, **plain).id
    assert rollpack.Plan.from_bytes(plan.to_bytes()).id == plan.id


# ------------------------------------------------------------------------------------------------- pickle, save, load


@pytest.fixture
def plan():
    table = of_lengths([3, 30, 5, 6, 7, 2, 2], rollout_id=list("aabccde"), group_index=[0, 0, 0, 1, 1, 2, 3])
    return rollpack.plan(
        table,
        loss_aggregation="prompt_mean",
        max_tokens_per_gpu=8,
        oversize="alone",
        dp_size=2,
        cp_size=2,
        prompts_per_step=2,
        remainder="keep",
        placeholders=True,
        columns={"loss_mask": None},
    )


def same(one, other):
    assert one.id == other.id
    assert re.fullmatch("[0-9a-f]{32}", one.id)
    assert one.steps == other.steps
    assert one.settings == other.settings
    assert placed(one) == placed(other)
    assert one.to_arrow().equals(other.to_arrow())
    for name in ("dropped_rows", "oversize_rows"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
        assert getattr(other, name).dtype == np.int64
    for name in ("fill", "imbalance", "num_rows", "columns", "rollout_key"):
        assert getattr(one, name) == getattr(other, name)
    assert repr(one) == repr(other)


def test_a_plan_can_be_pickled_and_copied(plan):
    fresh = pickle.loads(pickle.dumps(plan))
    same(plan, fresh)
    placed(plan)  # what a plan keeps once it was used goes along or not, and makes no difference
    same(plan, pickle.loads(pickle.dumps(plan, protocol=2)))
    same(plan, copy.deepcopy(plan))


def test_a_plan_can_be_saved_and_loaded(plan, tmp_path):
    path = tmp_path / "plan.arrow"
    path.write_text("what was there before")
    plan.save(path)
    same(plan, rollpack.Plan.load(path))
    same(plan, rollpack.Plan.load(str(path)))
    assert [p.name for p in tmp_path.iterdir()] == ["plan.arrow"]  # no temporary file is left
    assert pl.read_ipc(path)["row"].to_list() == plan.to_arrow()["row"].to_pylist()


def test_a_loaded_plan_packs(plan, tmp_path):
    table = of_lengths([3, 30, 5, 6, 7, 2, 2])
    plan.save(tmp_path / "plan.arrow")
    loaded = rollpack.Plan.load(tmp_path / "plan.arrow")
    for step in range(len(plan.steps)):
        for one, other in zip(rollpack.pack(table, plan, step=step), rollpack.pack(table, loaded, step=step), strict=True):
            np.testing.assert_array_equal(one.tokens, other.tokens)
            np.testing.assert_array_equal(one.sample_weights, other.sample_weights)
            assert one.plan_id == other.plan_id == plan.id


def test_a_file_that_is_no_plan_is_named(plan, tmp_path):
    whole = plan.to_bytes()
    other = pa.BufferOutputStream()
    with pa.ipc.new_file(other, pa.schema([("a", pa.int64())])) as writer:
        writer.write_batch(pa.record_batch({"a": [1]}))
    for number, content in enumerate((b"", b"ARROW1", b"hello", whole[:-1], whole[:100], whole[100:], other.getvalue())):
        path = tmp_path / f"{number}.arrow"
        path.write_bytes(content)
        with pytest.raises(rollpack.DataError) as caught:
            rollpack.Plan.load(path)
        assert str(path) in str(caught.value)
    for path in (tmp_path / "missing.arrow", tmp_path):
        with pytest.raises(rollpack.DataError) as caught:
            rollpack.Plan.load(path)
        assert str(path) in str(caught.value)


WHOLE = rollpack.plan(of_lengths([3, 4, 5]), micro_batch_size=2)
SAVED = WHOLE.to_bytes()


def test_a_plan_that_says_it_has_more_rows_than_it_holds_is_refused():
    plan = rollpack.plan(of_lengths([3] * 1003), micro_batch_size=2, placeholders=True)
    saved = plan.to_bytes()
    assert isinstance(saved, bytes)
    # The length of the batch and of each of its columns.
    more = saved.replace((1003).to_bytes(8, "little"), (10**9).to_bytes(8, "little"))
    assert more.count((10**9).to_bytes(8, "little")) > len(plan.to_arrow().column_names)
    with pytest.raises(rollpack.DataError, match="no plan that rollpack saved: ArrowInvalid: .* too small"):
        rollpack.Plan.from_bytes(more)


@settings(max_examples=500, deadline=None)
@given(st.integers(0, len(SAVED) - 1), st.binary(min_size=1, max_size=8))
def test_a_damaged_plan_is_found_out_or_whole(at, damage):
    """Whatever happens to the file: the very plan or a DataError, and never another plan without a word."""
    damaged = SAVED[:at] + damage + SAVED[at + len(damage) :]
    try:
        loaded = rollpack.Plan.from_bytes(damaged)
    except rollpack.DataError:
        return
    same(WHOLE, loaded)


@pytest.mark.parametrize("micro_batch", [-1, 2, 2**40])
def test_a_sample_in_a_micro_batch_that_there_is_not_is_refused(micro_batch):
    """Before a table is made that has room for it."""
    (batch,) = pa.ipc.open_file(rollpack.plan(of_lengths([3, 3]), micro_batch_size=1).to_bytes()).read_all().to_batches()
    assert batch["micro_batch"].to_pylist() == [0, 1]
    at = batch.schema.get_field_index("micro_batch")
    batch = batch.set_column(at, batch.schema.field(at), pa.array(sorted([0, micro_batch])))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)
    with pytest.raises(rollpack.DataError, match="ValueError: a sample lies in a micro-batch that there is not"):
        rollpack.Plan.from_bytes(sink.getvalue().to_pybytes())


def test_a_description_that_was_damaged_is_not_believed():
    """A number of micro-batches that grew would ask for a table of as many, before anybody sees that it is wrong."""
    damaged = SAVED.replace(b"[[3, null, 9, 2]]", b"[[3,null,9,9999]]")
    assert len(damaged) == len(SAVED)
    assert damaged != SAVED
    with pytest.raises(rollpack.DataError, match="description was damaged"):
        rollpack.Plan.from_bytes(damaged)


# ------------------------------------------------------------------------------------------------------- for all input


@st.composite
def rollouts(draw):
    """Samples of random lengths and masks; rollouts fan out, and their samples lie anywhere."""
    samples = []
    for group in range(draw(st.integers(1, 5))):
        for number in range(draw(st.integers(1, 3))):
            for _ in range(draw(st.integers(1, 3))):
                mask = draw(st.lists(st.integers(0, 1), max_size=12))
                length = len(mask) + draw(st.integers(1, 6))
                samples.append((length, mask, f"{group}/{number}", group))
    lengths, masks, ids, groups = map(list, zip(*draw(st.permutations(samples)), strict=True))
    return lengths, masks, ids, groups


def up(x, multiple):
    return -(-x // multiple) * multiple


def padded(lengths, cp_size, layout, pad_to_multiple_of=1, pad_micro_batch_to_multiple_of=1):
    """The padded tokens of a micro-batch, from the words of the design."""
    of_cut = (1, 1) if cp_size == 1 else (2 * cp_size, 1) if layout == "zigzag" else (1, cp_size)
    each = [up(n, math.lcm(of_cut[0], pad_to_multiple_of)) for n in lengths]
    return up(sum(each), math.lcm(*of_cut, pad_micro_batch_to_multiple_of))


CUTS = st.fixed_dictionaries(
    {
        "cp_size": st.sampled_from([1, 2, 3, 4]),
        "layout": st.sampled_from(["zigzag", "contiguous"]),
        "pad_to_multiple_of": st.sampled_from([1, 2, 3, 8]),
        "pad_micro_batch_to_multiple_of": st.sampled_from([1, 5, 16]),
    }
)
SHAPES = st.fixed_dictionaries(
    {
        "dp_size": st.integers(1, 4),
        "micro_batch_multiple": st.integers(1, 3),
        "sync": st.sampled_from(["step", "micro_batch"]),
        "cost": st.sampled_from(["tokens", "attention"]),
        "placeholders": st.booleans(),
        "oversize": st.sampled_from(["alone", "error"]),
        "empty": st.sampled_from(["count", "skip"]),
        "keep_together": st.sampled_from([None, None, "rollout", "group"]),
    }
)
LIMITS = st.one_of(
    st.fixed_dictionaries({"max_tokens_per_gpu": st.integers(1, 60)}),
    st.fixed_dictionaries({"micro_batch_size": st.integers(1, 5)}),
)
STEPS = st.one_of(
    st.just({}),
    st.fixed_dictionaries({"prompts_per_step": st.integers(1, 3), "remainder": st.sampled_from(["keep", "drop"])}),
    st.fixed_dictionaries({"global_batch_size": st.integers(1, 6), "remainder": st.sampled_from(["keep", "drop"])}),
)
MODES = st.sampled_from(["sample_mean", "prompt_mean", "token_mean", "constant"])


def steps_by_hand(ids, groups, arguments):
    """The rows of each step, and those that are dropped: units in first-seen order, so many a step."""
    if "global_batch_size" in arguments:
        units, size = ids, arguments["global_batch_size"]
    elif "prompts_per_step" in arguments:
        units, size = groups, arguments["prompts_per_step"]
    else:
        return [list(range(len(ids)))], []
    order = list(dict.fromkeys(units))
    steps = [[row for row, unit in enumerate(units) if unit in order[at : at + size]] for at in range(0, len(order), size)]
    if arguments["remainder"] == "drop" and len(order) % size:
        return steps[:-1], steps[-1]
    return steps, []


@settings(max_examples=400, deadline=None)
@given(data=rollouts(), cut=CUTS, shape=SHAPES, limit=LIMITS, step=STEPS, mode=MODES)
def test_a_plan_places_every_row_once_and_keeps_its_promises(data, cut, shape, limit, step, mode):
    lengths, masks, ids, groups = data
    table = pa.table(
        {
            "tokens": [[7] * n for n in lengths],
            "loss_mask": pa.array(masks, pa.list_(pa.uint8())),
            "rollout_id": ids,
            "group_index": groups,
        }
    )
    summary = rollpack.summarize(table, groups=True)
    arguments = {"loss_aggregation": mode, "divisor": 7 if mode == "constant" else None, **cut, **shape, **limit, **step}
    steps, dropped = steps_by_hand(ids, groups, step)
    budget = limit.get("max_tokens_per_gpu", math.inf) * cut["cp_size"]
    oversize = [row for rows in steps for row in rows if padded([lengths[row]], **cut) > budget]
    cuts_a_group = any(len({i for i, s in enumerate([*steps, dropped]) for r in s if groups[r] == g}) > 1 for g in groups)
    try:
        plan = rollpack.plan(summary, **arguments)
    except rollpack.PlanError as error:
        text = str(error)
        if "needs whole groups" in text:
            assert mode == "prompt_mean" or shape["keep_together"] == "group"
            assert cuts_a_group
        elif "nothing" in text:
            assert not steps
        elif "does not hold one padded token" in text:
            assert shape["oversize"] == "error"
            assert padded([1], **cut) > budget
        elif "oversize=" in text:
            assert shape["oversize"] == "error"
            assert oversize
        else:
            assert "missing" in text or (shape["keep_together"] and "leave keep_together out" in text)
            assert not shape["placeholders"]
        return

    # Every row once, in its step; none where it should not be.
    assert steps
    assert not (mode == "prompt_mean" and cuts_a_group)
    assert rows_of_steps(plan) == [sorted(rows) for rows in steps]
    assert plan.dropped_rows.tolist() == dropped
    assert sorted(plan.oversize_rows.tolist()) == sorted(oversize)
    assert not (oversize and shape["oversize"] == "error")

    # Micro-batches: as many on each rank, none empty, none over the budget.
    for micro_batches in placed(plan).values():
        assert len(micro_batches) % shape["micro_batch_multiple"] == 0
        for rows in micro_batches:
            assert rows or shape["placeholders"]
            assert len(rows) <= limit.get("micro_batch_size", math.inf)
            if padded([lengths[row] for row in rows], **cut) > budget:
                assert len(rows) == 1
                assert rows[0] in oversize
    assert plan.imbalance >= 1 - 1e-12
    assert 0 < plan.fill <= 1

    # Counts, mask sums and weights, from the words of the design.
    of_row = {row["row"]: row for row in plan.to_arrow().to_pylist()}
    sums = [sum(mask) for mask in masks]
    for rows, counts in zip(steps, plan.steps, strict=True):

        def units(names, rows=rows):
            found = {names[row] for row in rows}
            trained = {names[row] for row in rows if sums[row]}
            return len(trained if shape["empty"] == "skip" else found)

        n, p, t = units(ids), units(groups), sum(sums[row] for row in rows)
        assert counts[:3] == (n, p, t)
        for row in rows:
            m_r = sum(sums[r] for r in rows if ids[r] == ids[row])
            m_g = sum(sums[r] for r in rows if groups[r] == groups[row])
            found = of_row[row]
            assert (found["total_length"], found["mask_sum"], found["rollout_mask_sum"]) == (lengths[row], sums[row], m_r)
            if mode == "prompt_mean":
                assert found["prompt_mask_sum"] == m_g
            below = {"sample_mean": n * m_r, "prompt_mean": p * m_g, "token_mean": t, "constant": 7 * n}[mode]
            expected = 1 / below if below else 0.0
            if sums[row]:
                assert found["sample_weight"] == pytest.approx(expected, rel=1e-14)
            assert math.isfinite(found["sample_weight"])


@settings(max_examples=100, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=40),
    dp_size=st.integers(1, 4),
    budget=st.integers(20, 60),
)
def test_there_are_no_more_micro_batches_than_a_simple_packer_needs(lengths, dp_size, budget):
    bins = []
    for length in sorted(lengths, reverse=True):  # first fit decreasing
        for fit in bins:
            if sum(fit) + length <= budget:
                fit.append(length)
                break
        else:
            bins.append([length])
    plan = rollpack.plan(of_lengths(lengths), max_tokens_per_gpu=budget, dp_size=dp_size, placeholders=True)
    least = -(-sum(lengths) // budget)
    assert -(-least // dp_size) <= plan.steps[0].num_micro_batches <= -(-(len(bins) + 1) // dp_size)


@pytest.mark.parametrize(
    "name", ["tau_bench_airline", "tau_bench_airline_per_turn", "reflexion_fanout", "swe_harnesses", "humaneval_k100"]
)
def test_real_traces_are_placed_once_under_the_budget(traces, name):
    summary = rollpack.summarize(traces(name), groups=True)
    lengths = summary.column("total_length")
    plan = rollpack.plan(summary, loss_aggregation="prompt_mean", max_tokens_per_gpu=16_384, dp_size=2, cp_size=2)
    assert np.concatenate([rows for m in placed(plan).values() for rows in m]).astype(int).size == len(summary)
    assert rows_of_steps(plan) == [list(range(len(summary)))]
    for micro_batches in placed(plan).values():
        for rows in micro_batches:
            assert padded([int(lengths[row]) for row in rows], 2, "zigzag") <= 2 * 16_384
