"""What lies where in a packed micro-batch: by hand, against a packer in plain Python, and on real traces."""

import math

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rollpack

NAN = float("nan")
INTEGERS = [pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()]
MASKS = [*INTEGERS, pa.bool_(), pa.float16(), pa.float32(), pa.float64()]
POSITIONS = ("tokens", "labels", "position_ids", "segment_ids", "loss_mask")


def only(data, plan, **arguments):
    (micro_batch,) = rollpack.pack(data, plan, **arguments)
    return micro_batch


def listed(micro_batch, names):
    return {name: getattr(micro_batch, name).tolist() for name in names}


# -------------------------------------------------------------------------------------------------------- threads


@pytest.mark.parametrize("num_threads", [2, 3, 50])
def test_threads_pack_the_same_in_the_same_order(num_threads):
    table = pa.table({"tokens": [[row] * (2 + row % 7) for row in range(40)], "response_length": [1] * 40})
    plan = rollpack.plan(table, max_tokens_per_gpu=16, placeholders=True, micro_batch_multiple=13)
    one, several = list(rollpack.pack(table, plan)), list(rollpack.pack(table, plan, num_threads=num_threads))
    assert [m.index for m in several] == list(range(plan.steps[0].num_micro_batches))
    for mine, theirs in zip(one, several, strict=True):
        for name in (*POSITIONS, "cu_seqlens", "cu_seqlens_padded", "rows", "sample_weights"):
            np.testing.assert_array_equal(getattr(mine, name), getattr(theirs, name))
    # Who stops early waits for what is begun, and for no more.
    some = rollpack.pack(table, plan, num_threads=num_threads)
    assert next(some).index == 0
    some.close()


def test_an_error_comes_from_its_thread():
    table = pa.table({"tokens": [[1, 2]] * 8, "response_length": [1] * 8})
    plan = rollpack.plan(table, micro_batch_size=1)
    changed = pa.table({"tokens": [[1, 2]] * 7 + [[1, 2, 3]], "response_length": [1] * 8})
    packed = rollpack.pack(changed, plan, num_threads=3)
    with pytest.raises(rollpack.DataError, match="row 7"):
        list(packed)
    with pytest.raises(rollpack.PlanError, match="num_threads is 0"):
        rollpack.pack(table, plan, num_threads=0)


# -------------------------------------------------------------------------------------------------------- by hand

HAND = pa.table(
    {
        "tokens": [[11, 12, 13, 14, 15], [21, 22, 23]],
        "response_length": [3, 2],
        "loss_mask": [[1, 0, 1], [0, 1]],
        "logprobs": [[-0.25, -0.5, -0.75], [-1.0, -2.0]],
        "reward": [0.5, None],
        "turns": pa.array([3, None], pa.int32()),
        "group_index": ["x", "y"],
    }
)
CARRIED = {"token_columns": ["logprobs"], "sample_columns": ["reward", "turns"]}


def test_uncut_by_hand():
    """The label of a position is the token after it, where that is trained; nothing is padded."""
    plan = rollpack.plan(HAND, loss_aggregation="prompt_mean", micro_batch_size=2)
    packed = only(HAND, plan, **CARRIED)
    assert listed(packed, (*POSITIONS, "cu_seqlens", "cu_seqlens_padded")) == {
        "tokens": [11, 12, 13, 14, 15, 21, 22, 23],
        "labels": [-100, 13, -100, 15, -100, -100, 23, -100],
        "position_ids": [0, 1, 2, 3, 4, 0, 1, 2],
        "segment_ids": [0, 0, 0, 0, 0, 1, 1, 1],
        "loss_mask": [False, True, False, True, False, False, True, False],
        "cu_seqlens": [0, 5, 8],
        "cu_seqlens_padded": [0, 5, 8],
    }
    assert packed.columns["logprobs"].tolist() == [0, -0.25, -0.5, -0.75, 0, -1.0, -2.0, 0]
    np.testing.assert_array_equal(packed.sample_columns["reward"], [0.5, NAN])
    np.testing.assert_array_equal(packed.sample_columns["turns"], [3, NAN])
    assert listed(packed, ("rows", "mask_sums", "rollout_mask_sums", "prompt_mask_sums", "sample_weights")) == {
        "rows": [0, 1],
        "mask_sums": [2, 1],
        "rollout_mask_sums": [2, 1],
        "prompt_mask_sums": [2, 1],
        "sample_weights": [1 / 4, 1 / 2],
    }
    assert packed.max_seqlen == 5
    assert not packed.is_placeholder
    assert (packed.step, packed.dp_rank, packed.cp_rank, packed.index) == (0, 0, 0, 0)
    assert (packed.num_rollouts, packed.num_prompts, packed.num_tokens, packed.num_micro_batches) == (2, 2, 3, 1)
    assert (packed.dp_size, packed.cp_size, packed.layout) == (1, 1, "zigzag")
    assert (packed.loss_aggregation, packed.divisor, packed.plan_id) == ("prompt_mean", None, plan.id)
    for said in ("2 samples", "8 positions", "prompt_mean"):
        assert said in repr(packed)


# The sequences are padded to 8 and 4 and cut in chunks of 2 and 1: rank 0 has chunks 0 and 3, rank 1 chunks 1 and 2.
ZIGZAG = [
    {
        "tokens": [11, 12, 0, 0, 21, 0],
        "labels": [-100, 13, -100, -100, -100, -100],
        "position_ids": [0, 1, 6, 7, 0, 3],
        "segment_ids": [0, 0, -1, -1, 1, -1],
        "loss_mask": [False, True, False, False, False, False],
        "logprobs": [0, -0.25, 0, 0, -1.0, 0],
    },
    {
        "tokens": [13, 14, 15, 0, 22, 23],
        "labels": [-100, 15, -100, -100, 23, -100],
        "position_ids": [2, 3, 4, 5, 1, 2],
        "segment_ids": [0, 0, 0, -1, 1, 1],
        "loss_mask": [False, True, False, False, True, False],
        "logprobs": [-0.5, -0.75, 0, 0, -2.0, 0],
    },
]
# 5 and 3 are 8, which needs no padding: rank 0 has the first half, rank 1 the second.
CONTIGUOUS = [
    {
        "tokens": [11, 12, 13, 14],
        "labels": [-100, 13, -100, 15],
        "position_ids": [0, 1, 2, 3],
        "segment_ids": [0, 0, 0, 0],
        "loss_mask": [False, True, False, True],
        "logprobs": [0, -0.25, -0.5, -0.75],
    },
    {
        "tokens": [15, 21, 22, 23],
        "labels": [-100, -100, 23, -100],
        "position_ids": [4, 0, 1, 2],
        "segment_ids": [0, 1, 1, 1],
        "loss_mask": [False, False, True, False],
        "logprobs": [0, -1.0, -2.0, 0],
    },
]


@pytest.mark.parametrize(
    ("layout", "expected", "starts"),
    [("zigzag", ZIGZAG, [0, 8, 12]), ("contiguous", CONTIGUOUS, [0, 5, 8])],
)
@pytest.mark.parametrize("cp_rank", [0, 1])
def test_cut_over_two_context_parallel_ranks_by_hand(layout, expected, starts, cp_rank):
    plan = rollpack.plan(HAND, max_tokens_per_gpu=6, cp_size=2, layout=layout)
    packed = only(HAND, plan, cp_rank=cp_rank, **CARRIED)
    assert listed(packed, POSITIONS) | {"logprobs": packed.columns["logprobs"].tolist()} == expected[cp_rank]
    assert packed.cu_seqlens.tolist() == [0, 5, 8]
    assert packed.cu_seqlens_padded.tolist() == starts
    assert packed.max_seqlen == starts[1]
    # What is of samples is the same on both ranks.
    assert packed.rows.tolist() == [0, 1]
    assert packed.sample_weights.tolist() == [1 / 4, 1 / 2]
    np.testing.assert_array_equal(packed.sample_columns["reward"], [0.5, NAN])
    assert packed.prompt_mask_sums is None


def test_contiguous_pads_the_whole_micro_batch_by_hand():
    """5 tokens over 2 ranks: one of padding at the end, which belongs to the last sequence."""
    data = HAND.slice(0, 1)
    plan = rollpack.plan(data, max_tokens_per_gpu=3, cp_size=2, layout="contiguous")
    first, second = (only(data, plan, cp_rank=rank) for rank in (0, 1))
    assert listed(first, POSITIONS) == {
        "tokens": [11, 12, 13],
        "labels": [-100, 13, -100],
        "position_ids": [0, 1, 2],
        "segment_ids": [0, 0, 0],
        "loss_mask": [False, True, False],
    }
    assert listed(second, POSITIONS) == {
        "tokens": [14, 15, 0],
        "labels": [15, -100, -100],
        "position_ids": [3, 4, 5],
        "segment_ids": [0, 0, -1],
        "loss_mask": [True, False, False],
    }
    for packed in (first, second):
        assert packed.cu_seqlens.tolist() == [0, 5]
        assert packed.cu_seqlens_padded.tolist() == [0, 6]
        assert packed.max_seqlen == 6


def test_paddings_by_hand():
    plan = rollpack.plan(HAND, micro_batch_size=2, pad_to_multiple_of=4, pad_micro_batch_to_multiple_of=16)
    packed = only(HAND, plan)
    assert packed.tokens.tolist() == [11, 12, 13, 14, 15, 0, 0, 0, 21, 22, 23, 0, 0, 0, 0, 0]
    assert packed.segment_ids.tolist() == [0] * 5 + [-1] * 3 + [1] * 3 + [-1] * 5
    assert packed.position_ids.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7]
    assert packed.cu_seqlens.tolist() == [0, 5, 8]
    assert packed.cu_seqlens_padded.tolist() == [0, 8, 16]
    assert packed.max_seqlen == 8


def test_a_response_that_is_the_whole_sequence_has_no_logit_for_its_first_token():
    data = pa.table({"tokens": [[5, 6, 7]], "loss_mask": [[0, 1, 1]], "x": [[9.0, 1.0, 2.0]]})
    packed = only(data, rollpack.plan(data, micro_batch_size=1), token_columns=["x"])
    assert packed.labels.tolist() == [6, 7, -100]
    assert packed.columns["x"].tolist() == [1.0, 2.0, 0.0]


def test_an_empty_response_has_no_label():
    data = pa.table({"tokens": [[5, 6], [7]], "response_length": [0, 0], "x": pa.array([[], []], pa.list_(pa.float64()))})
    packed = only(data, rollpack.plan(data, micro_batch_size=2), token_columns=["x"])
    assert packed.labels.tolist() == [-100, -100, -100]
    assert packed.columns["x"].tolist() == [0, 0, 0]
    assert packed.sample_weights.tolist() == [0, 0]
    assert packed.cu_seqlens.tolist() == [0, 2, 3]


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_a_placeholder_is_one_masked_dummy_sequence(cp_size, layout):
    data = HAND.slice(0, 1)
    plan = rollpack.plan(
        data, max_tokens_per_gpu=16, dp_size=2, cp_size=cp_size, layout=layout, placeholders=True,
        loss_aggregation="prompt_mean",
    )  # fmt: skip
    (dp_rank,) = (rank for rank in (0, 1) if len(plan.rows(0, rank, 0)) == 0)
    length = 1 if cp_size == 1 else 2 * cp_size if layout == "zigzag" else cp_size
    position_ids = []
    for cp_rank in range(cp_size):
        junk = [
            np.full(length // cp_size + n, 7.0, np.float32) for n in (0, 1, 2) for _ in range(20)
        ]  # for np.empty to find
        del junk
        packed = only(data, plan, dp_rank=dp_rank, cp_rank=cp_rank, **CARRIED)
        assert packed.is_placeholder
        assert packed.rows.tolist() == [-1]
        assert len(packed.tokens) == length // cp_size
        assert not packed.tokens.any()
        assert (packed.labels == -100).all()
        assert not packed.loss_mask.any()
        assert packed.columns["logprobs"].tolist() == [0.0] * (length // cp_size)
        assert packed.segment_ids.tolist() == [0 if p == 0 else -1 for p in packed.position_ids]
        position_ids += packed.position_ids.tolist()
        for name in ("mask_sums", "rollout_mask_sums", "prompt_mask_sums", "sample_weights"):
            assert getattr(packed, name).tolist() == [0]
        assert packed.cu_seqlens.tolist() == [0, 1]
        assert packed.cu_seqlens_padded.tolist() == [0, length]
        assert packed.max_seqlen == length
        assert np.isnan(packed.sample_columns["reward"]).all()
        assert packed.sample_columns["reward"].shape == (1,)
        # The counts are the step's, and the placeholder is in none of them but K.
        assert (packed.num_rollouts, packed.num_prompts, packed.num_tokens, packed.num_micro_batches) == (1, 1, 2, 1)
        assert "placeholder" in repr(packed)
        check_forms(packed, plan)
    assert sorted(position_ids) == list(range(length))


# ------------------------------------------------------------------------------------------------ a packer in Python


def up(x, multiple):
    return -(-x // multiple) * multiple


def packed_by_hand(samples, cut, cp_rank, token_columns):
    """A micro-batch, position by position, from the words of the design.

    ``samples`` are dicts of ``tokens``, ``mask`` (as long as the response) and a list for each of ``token_columns``.
    """
    cp_size, layout = cut["cp_size"], cut["layout"]
    sequence, total = cut.get("pad_to_multiple_of", 1), cut.get("pad_micro_batch_to_multiple_of", 1)
    if cp_size > 1 and layout == "zigzag":
        sequence, total = math.lcm(sequence, 2 * cp_size), math.lcm(total, 2 * cp_size)
    elif cp_size > 1:
        total = math.lcm(total, cp_size)
    padded = [up(len(sample["tokens"]), sequence) for sample in samples]
    padded[-1] += up(sum(padded), total) - sum(padded)  # padding at the end belongs to the last sequence

    sequences = []
    for segment, (sample, length) in enumerate(zip(samples, padded, strict=True)):
        tokens, mask = sample["tokens"], sample["mask"]
        prompt = len(tokens) - len(mask)
        positions = []
        for t in range(length):
            after = t + 1 - prompt  # which response token comes next
            response = 0 <= after < len(mask)
            trained = response and bool(mask[after])
            positions.append(
                {
                    "tokens": tokens[t] if t < len(tokens) else 0,
                    "labels": tokens[t + 1] if trained else -100,
                    "position_ids": t,
                    "segment_ids": segment if t < len(tokens) else -1,
                    "loss_mask": trained,
                    **{name: float(sample[name][after]) if response else 0.0 for name in token_columns},
                }
            )
        sequences.append(positions)

    if cp_size == 1 or layout == "contiguous":
        whole = [position for positions in sequences for position in positions]
        share = len(whole) // cp_size
        mine = whole[cp_rank * share : (cp_rank + 1) * share]
    else:
        mine = []
        for positions in sequences:
            chunk = len(positions) // (2 * cp_size)
            for k in (cp_rank, 2 * cp_size - 1 - cp_rank):
                mine += positions[k * chunk : (k + 1) * chunk]
    arrays = {name: [position[name] for position in mine] for name in (*POSITIONS, *token_columns)}
    arrays["cu_seqlens"] = np.cumsum([0] + [len(sample["tokens"]) for sample in samples]).tolist()
    arrays["cu_seqlens_padded"] = np.cumsum([0, *padded]).tolist()
    return arrays, max(padded)


def check_forms(packed, plan):
    """Dtypes, shapes and layout in memory, the same for every micro-batch."""
    positions, samples = len(packed.tokens), len(packed.rows)
    assert packed.cu_seqlens_padded[-1] == positions * plan.settings.cp_size
    forms = {
        "tokens": (np.int32, positions),
        "labels": (np.int32, positions),
        "position_ids": (np.int32, positions),
        "segment_ids": (np.int32, positions),
        "loss_mask": (np.bool_, positions),
        "cu_seqlens": (np.int32, samples + 1),
        "cu_seqlens_padded": (np.int32, samples + 1),
        "rows": (np.int64, samples),
        "mask_sums": (np.int64, samples),
        "rollout_mask_sums": (np.int64, samples),
        "sample_weights": (np.float64, samples),
    }
    if plan.settings.loss_aggregation == "prompt_mean":
        forms["prompt_mask_sums"] = (np.int64, samples)
    else:
        assert packed.prompt_mask_sums is None
    arrays = {name: (getattr(packed, name), *form) for name, form in forms.items()}
    arrays |= {name: (array, np.float32, positions) for name, array in packed.columns.items()}
    for name, (array, dtype, length) in arrays.items():
        assert isinstance(array, np.ndarray), name
        assert (array.dtype, array.shape) == (dtype, (length,)), name
        assert array.flags.c_contiguous, name
        assert array.flags.aligned, name
    for array in packed.sample_columns.values():
        assert array.shape == (samples,)
        assert array.flags.c_contiguous


def list_array(type_, lists, large):
    """A list column with junk before and behind it, as a slice has."""
    flat = [1, 0, 1] + [v for values in lists for v in values] + [0, 1]
    if pa.types.is_float16(type_):
        flat = np.array(flat, np.float16)
    elif type_ == pa.bool_():
        flat = [bool(v) for v in flat]
    make = pa.LargeListArray if large else pa.ListArray
    offsets = pa.array(np.cumsum([0, 3, *map(len, lists), 2]), pa.int64() if large else pa.int32())
    return make.from_arrays(offsets, pa.array(flat, type_)).slice(1, len(lists))


CUTS = st.fixed_dictionaries(
    {
        "cp_size": st.sampled_from([1, 2, 3, 4]),
        "layout": st.sampled_from(["zigzag", "contiguous"]),
        "pad_to_multiple_of": st.sampled_from([1, 2, 3, 8]),
        "pad_micro_batch_to_multiple_of": st.sampled_from([1, 5, 16]),
    }
)


@st.composite
def samples(draw):
    """Ragged samples with what they carry along."""
    kind = draw(st.sampled_from(["mask", "length", "both", "all"]))
    found = []
    for _ in range(draw(st.integers(1, 8))):
        response = draw(st.integers(0, 9))
        prompt = 0 if kind == "all" else draw(st.integers(1, 6))
        length = max(prompt + response, 1)
        response = length - prompt
        mask = draw(st.lists(st.integers(0, 1), min_size=response, max_size=response))
        if kind == "all":
            mask[0] = 0
        if kind == "length":
            mask = [1] * response
        numbers = st.floats(-1e6, 1e6, width=32)
        found.append(
            {
                "tokens": draw(st.lists(st.integers(0, 127), min_size=length, max_size=length)),
                "mask": mask,
                "logprobs": draw(st.lists(numbers, min_size=response, max_size=response)),
                "teacher": draw(st.lists(st.integers(-100, 100), min_size=response, max_size=response)),
                "reward": draw(st.none() | numbers),
                "turns": draw(st.none() | st.integers(-(2**53), 2**53)),
                "passed": draw(st.none() | st.booleans()),
                "rollout": draw(st.integers(0, 3)),
            }
        )
    return kind, found


@settings(max_examples=300, deadline=None)
@given(
    data=samples(),
    cut=CUTS,
    dp_size=st.integers(1, 3),
    token_type=st.sampled_from(INTEGERS),
    mask_type=st.sampled_from(MASKS),
    large=st.booleans(),
    budget=st.sampled_from([{"micro_batch_size": 1}, {"micro_batch_size": 3}, {"max_tokens_per_gpu": 24}]),
    mode=st.sampled_from(["sample_mean", "prompt_mean"]),
    parts=st.integers(0, 8),
)
def test_everything_lies_where_the_design_says(data, cut, dp_size, token_type, mask_type, large, budget, mode, parts):
    kind, found = data
    columns = {
        "tokens": list_array(token_type, [s["tokens"] for s in found], large),
        "logprobs": pa.array([s["logprobs"] for s in found], pa.list_(pa.float64())),
        "teacher": pa.array([s["teacher"] for s in found], pa.large_list(pa.int16())),
        "reward": pa.array([s["reward"] for s in found], pa.float64()),
        "turns": pa.array([s["turns"] for s in found], pa.int64()),
        "passed": pa.array([s["passed"] for s in found], pa.bool_()),
        "rollout_id": [s["rollout"] for s in found],
        "group_index": [s["rollout"] // 2 for s in found],
    }
    if kind != "mask" and kind != "all":
        columns["response_length"] = pa.array([len(s["mask"]) for s in found], pa.int32())
    if kind != "length":
        columns["loss_mask"] = list_array(mask_type, [s["mask"] for s in found], large)
    table = pa.table(columns)
    table = pa.concat_tables([table.slice(0, parts), table.slice(parts, 0), table.slice(parts)])

    plan = rollpack.plan(table, loss_aggregation=mode, dp_size=dp_size, placeholders=True, oversize="alone", **cut, **budget)
    carried = {"token_columns": ["logprobs", "teacher"], "sample_columns": ["turns", "reward", "passed"]}
    weights = {row["row"]: row for row in plan.to_arrow().to_pylist()}
    seen, owned = [], [0] * len(found)
    for dp_rank in range(dp_size):
        for cp_rank in range(cut["cp_size"]):
            packed = list(rollpack.pack(table, plan, dp_rank=dp_rank, cp_rank=cp_rank, **carried))
            assert len(packed) == plan.steps[0].num_micro_batches
            for index, micro_batch in enumerate(packed):
                check_forms(micro_batch, plan)
                assert (micro_batch.dp_rank, micro_batch.cp_rank, micro_batch.index) == (dp_rank, cp_rank, index)
                rows = plan.rows(0, dp_rank, index).tolist()
                assert micro_batch.is_placeholder == (not rows)
                if not rows:
                    continue
                assert micro_batch.rows.tolist() == rows
                here = [found[row] for row in rows]
                expected, longest = packed_by_hand(here, cut, cp_rank, carried["token_columns"])
                got = listed(micro_batch, (*POSITIONS, "cu_seqlens", "cu_seqlens_padded"))
                got |= {name: array.tolist() for name, array in micro_batch.columns.items()}
                assert got == expected
                assert micro_batch.max_seqlen == longest
                for name, key, dtype in (
                    ("reward", "reward", np.float32),
                    ("turns", "turns", np.float64),
                    ("passed", "passed", np.float64),
                ):
                    values = [NAN if s[key] is None else s[key] for s in here]
                    assert micro_batch.sample_columns[name].dtype == dtype
                    np.testing.assert_array_equal(micro_batch.sample_columns[name], np.array(values, dtype))
                assert micro_batch.mask_sums.tolist() == [sum(s["mask"]) for s in here]
                assert micro_batch.rollout_mask_sums.tolist() == [weights[row]["rollout_mask_sum"] for row in rows]
                assert micro_batch.sample_weights.tolist() == [weights[row]["sample_weight"] for row in rows]
                for segment, trained in zip(micro_batch.segment_ids, micro_batch.loss_mask, strict=True):
                    owned[rows[segment]] += int(trained)
                if cp_rank == 0:
                    seen += rows
    assert sorted(seen) == list(range(len(found)))
    assert owned == [sum(s["mask"]) for s in found]  # each trained token on exactly one rank


@pytest.mark.parametrize("large", [False, True], ids=["list", "large_list"])
@pytest.mark.parametrize("type_", MASKS, ids=str)
def test_token_columns_of_every_type_are_float32(type_, large):
    values = [[1, 0, 1], [0, 1]]
    table = HAND.append_column("x", list_array(type_, values, large))
    packed = only(table, rollpack.plan(table, micro_batch_size=2), token_columns="x")
    assert packed.columns["x"].dtype == np.float32
    assert packed.columns["x"].tolist() == [0, 1, 0, 1, 0, 0, 1, 0]


@pytest.mark.parametrize("type_", MASKS, ids=str)
def test_sample_columns_are_float32_of_floats_and_float64_of_the_rest(type_):
    values = np.array([1, 0]).astype(type_.to_pandas_dtype())
    column = pa.array(values, type_)
    table = HAND.append_column("x", column)
    packed = only(table, rollpack.plan(table, micro_batch_size=2), sample_columns="x")
    assert packed.sample_columns["x"].dtype == (np.float32 if pa.types.is_floating(type_) else np.float64)
    assert packed.sample_columns["x"].tolist() == [1, 0]


def test_columns_keep_the_order_in_which_they_were_named():
    plan = rollpack.plan(HAND, micro_batch_size=2)
    packed = only(HAND, plan, sample_columns=["turns", "reward"], token_columns=("logprobs",))
    assert list(packed.sample_columns) == ["turns", "reward"]
    assert list(packed.columns) == ["logprobs"]
    assert only(HAND, plan).columns == {}
    assert only(HAND, plan).sample_columns == {}


def test_numbers_that_are_carried_are_rounded_to_float32_and_nan_and_infinity_stay():
    table = HAND.append_column("x", pa.array([[0.1, float("inf"), NAN], [-float("inf"), 1e-300]]))
    packed = only(table, rollpack.plan(table, micro_batch_size=2), token_columns=["x"])
    expected = np.array([0, 0.1, np.inf, np.nan, 0, -np.inf, 0, 0], np.float32)
    np.testing.assert_array_equal(packed.columns["x"], expected)


@pytest.mark.parametrize("value", [2**24, -(2**24), 2**24 + 1, -(2**24) - 1, 2**31])
def test_integers_of_a_token_column_are_carried_exactly_or_refused(value):
    table = HAND.append_column("x", pa.array([[1, value, 1], [1, 1]], pa.list_(pa.int64())))
    plan = rollpack.plan(table, micro_batch_size=2)
    if abs(value) <= 2**24:
        assert only(table, plan, token_columns=["x"]).columns["x"].tolist() == [0, 1, value, 1, 0, 1, 1, 0]
        return
    with pytest.raises(rollpack.DataError, match="float32") as caught:
        list(rollpack.pack(table, plan, token_columns=["x"]))
    assert (caught.value.column, caught.value.row) == ("x", 0)


@pytest.mark.parametrize("value", [2**53, -(2**53), 2**53 + 1, -(2**53) - 1, 2**62])
def test_integers_of_a_sample_column_are_carried_exactly_or_refused(value):
    table = HAND.append_column("x", pa.array([1, value]))
    plan = rollpack.plan(table, micro_batch_size=2)
    if abs(value) <= 2**53:
        assert only(table, plan, sample_columns=["x"]).sample_columns["x"].tolist() == [1, value]
        return
    with pytest.raises(rollpack.DataError, match=str(value)) as caught:
        list(rollpack.pack(table, plan, sample_columns=["x"]))
    assert (caught.value.column, caught.value.row) == ("x", 1)


def test_micro_batches_have_arrays_of_their_own():
    table = pa.concat_tables([HAND, HAND])
    first, second = rollpack.pack(table, rollpack.plan(table, micro_batch_size=2))
    before = second.tokens.copy(), second.labels.copy()
    first.tokens[:] = -7
    first.labels[:] = -7
    first.loss_mask[:] = True
    np.testing.assert_array_equal(second.tokens, before[0])
    np.testing.assert_array_equal(second.labels, before[1])
    assert second.loss_mask.sum() == 3


# ----------------------------------------------------------------------------------------------- steps and real data


def test_the_step_may_be_left_out_where_there_is_one():
    one = rollpack.plan(HAND, micro_batch_size=2)
    assert only(HAND, one).tokens.tolist() == only(HAND, one, step=0).tokens.tolist()
    two = rollpack.plan(HAND, micro_batch_size=2, global_batch_size=1)
    with pytest.raises(rollpack.PlanError, match=r"2 steps.*step="):
        list(rollpack.pack(HAND, two))
    assert [only(HAND, two, step=step).rows.tolist() for step in (0, 1)] == [[0], [1]]
    assert only(HAND, two, step=1).step == 1


def test_places_outside_a_plan_are_refused():
    plan = rollpack.plan(HAND, micro_batch_size=1, dp_size=2, cp_size=2)
    for place in ({"step": 1}, {"step": -1}, {"dp_rank": 2}, {"dp_rank": -1}, {"cp_rank": 2}, {"cp_rank": -1}):
        with pytest.raises(rollpack.PlanError, match=next(iter(place))):
            list(rollpack.pack(HAND, plan, **place))


def test_dropped_rows_are_packed_nowhere():
    table = pa.concat_tables([HAND, HAND.slice(0, 1)])
    plan = rollpack.plan(table, micro_batch_size=2, global_batch_size=2, remainder="drop")
    assert only(table, plan).rows.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("name", "cut"),
    [
        ("tau_bench_airline", {"dp_size": 2, "cp_size": 2, "layout": "zigzag"}),
        ("tau_bench_airline", {"dp_size": 1, "cp_size": 4, "layout": "contiguous", "pad_micro_batch_to_multiple_of": 64}),
        ("swe_harnesses", {"dp_size": 1, "cp_size": 2, "layout": "zigzag", "pad_to_multiple_of": 16}),
        ("reflexion_fanout", {"dp_size": 2, "cp_size": 1}),
        ("humaneval_k100", {"dp_size": 4, "cp_size": 2, "layout": "contiguous"}),
    ],
)
def test_every_token_of_a_real_trace_says_where_it_came_from(traces, name, cut):
    path = traces(name)
    table = pq.read_table(path, columns=["response_length", "tokens", "loss_mask", "reward"])
    lengths = table["tokens"].combine_chunks().value_lengths().to_numpy()
    responses = table["response_length"].to_numpy()
    masks = [np.asarray(mask.values, dtype=bool) for mask in table["loss_mask"]]
    rewards = table["reward"].to_numpy()
    plan = rollpack.plan(
        path, max_tokens_per_gpu=16_384, global_batch_size=64, remainder="keep", placeholders=True, oversize="alone", **cut
    )
    real = np.zeros(table.num_rows, int)
    trained = np.zeros(table.num_rows, int)
    for step in range(min(3, len(plan.steps))):
        for dp_rank in range(cut["dp_size"]):
            for cp_rank in range(cut["cp_size"]):
                for m in rollpack.pack(table, plan, step=step, dp_rank=dp_rank, cp_rank=cp_rank, sample_columns=["reward"]):
                    if m.is_placeholder:
                        continue
                    kept = m.segment_ids >= 0
                    rows, at = m.rows[m.segment_ids[kept]], m.position_ids[kept].astype(np.int64)
                    np.testing.assert_array_equal(m.tokens[kept], (7919 * rows + at) % 151_643)
                    assert (at < lengths[rows]).all()
                    assert not m.tokens[~kept].any()
                    assert not m.loss_mask[~kept].any()
                    assert (m.labels[~m.loss_mask] == -100).all()
                    owners = m.rows[m.segment_ids[m.loss_mask]]
                    after = m.position_ids[m.loss_mask].astype(np.int64) + 1
                    np.testing.assert_array_equal(m.labels[m.loss_mask], (7919 * owners + after) % 151_643)
                    response = after - (lengths[owners] - responses[owners])
                    assert all(masks[row][i] for row, i in zip(owners, response, strict=True))
                    np.testing.assert_array_equal(m.sample_columns["reward"], rewards[m.rows])
                    np.add.at(real, rows, 1)
                    np.add.at(trained, owners, 1)
    done = np.isin(np.arange(table.num_rows), plan.to_arrow().filter(pc.field("step") < 3)["row"].to_numpy())
    np.testing.assert_array_equal(real, np.where(done, lengths, 0))
    np.testing.assert_array_equal(trained, np.where(done, [mask.sum() for mask in masks], 0))


def test_a_long_tail_is_packed_alone(traces):
    path = traces("long_reasoning")
    plan = rollpack.plan(
        path, max_tokens_per_gpu=8_192, cp_size=2, oversize="alone", global_batch_size=100, remainder="keep"
    )
    lengths = rollpack.summarize(path).column("total_length")
    over = np.flatnonzero(-(-lengths // 4) * 4 > 16_384).tolist()
    assert len(over) > 10
    assert sorted(plan.oversize_rows.tolist()) == over
    packed = list(rollpack.pack(path, plan, step=0, cp_rank=1))
    for micro_batch in packed:
        if len(micro_batch.tokens) > 8_192:
            assert micro_batch.rows.tolist()[0] in over
            assert len(micro_batch.rows) == 1
    assert sorted(row for m in packed for row in m.rows.tolist()) == list(range(100))


# ---------------------------------------------------------------------------------------------------- what is refused


def changed(**columns):
    table = HAND
    for name, values in columns.items():
        table = table.set_column(table.column_names.index(name), name, pa.array(values))
    return table


CHANGED = {
    "a sequence is longer": (
        changed(tokens=[[11, 12, 13, 14, 15], [21, 22, 23, 24]]), "tokens", 1, ["length is 4", "3 was planned"],
    ),
    "a mask sum is another": (changed(loss_mask=[[1, 0, 1], [1, 1]]), "loss_mask", 1, ["mask sum is 2", "1 was planned"]),
    "a response is shorter": (
        changed(response_length=[2, 2], loss_mask=[[1, 1], [0, 1]]), "loss_mask", 0, ["response length is 2", "3 was"],
    ),
    "a mask is wrong now": (changed(loss_mask=[[1, 0, 1], [0, 2]]), "loss_mask", 1, ["2", "0 and 1"]),
    "a sequence is null now": (changed(tokens=[[11, 12, 13, 14, 15], None]), "tokens", 1, ["null"]),
}  # fmt: skip


@pytest.mark.parametrize(("data", "column", "row", "said"), CHANGED.values(), ids=CHANGED)
def test_data_that_changed_after_planning_is_found_out(data, column, row, said):
    plan = rollpack.plan(HAND, micro_batch_size=2)
    for changed_data in (data, [data.slice(0, 1), data.slice(1)]):
        with pytest.raises(rollpack.DataError) as caught:
            list(rollpack.pack(changed_data, plan))
        assert (caught.value.column, caught.value.row) == (column, row)
        for text in said:
            assert text in str(caught.value)


def test_another_number_of_rows_is_found_out():
    plan = rollpack.plan(HAND, micro_batch_size=2)
    for data in (HAND.slice(0, 1), pa.concat_tables([HAND, HAND])):
        with pytest.raises(rollpack.DataError, match=f"2 rows were planned.*{data.num_rows}"):
            list(rollpack.pack(data, plan))


def test_rows_in_another_order_are_found_out():
    plan = rollpack.plan(HAND, micro_batch_size=2)
    with pytest.raises(rollpack.DataError, match="was planned"):
        list(rollpack.pack(HAND.take([1, 0]), plan))


def test_a_reader_can_be_read_once_only():
    reader = HAND.to_reader()
    plan = rollpack.plan(reader, micro_batch_size=2)
    with pytest.raises(rollpack.DataError, match="reader"):
        list(rollpack.pack(reader, plan))
    assert only(HAND.to_reader(), plan).rows.tolist() == [0, 1]  # a fresh one will do


@pytest.mark.parametrize("value", [2**31, -(2**31) - 1, 2**63 - 1])
@pytest.mark.parametrize("position", [0, 2])
def test_a_token_that_does_not_fit_an_int32_is_refused(value, position):
    tokens = [[11, 12, 13, 14, 15], [21, 22, 23]]
    tokens[1][position] = value
    data = changed(tokens=tokens)
    plan = rollpack.plan(data, micro_batch_size=2)
    with pytest.raises(rollpack.DataError, match=f"position {position} is {value}") as caught:
        list(rollpack.pack(data, plan))
    assert (caught.value.column, caught.value.row) == ("tokens", 1)


def test_the_largest_token_is_packed():
    data = changed(tokens=pa.array([[11, 12, 13, 14, 2**31 - 1], [2**31 - 1, 22, 23]], pa.list_(pa.uint64())))
    packed = only(data, rollpack.plan(data, micro_batch_size=2))
    assert packed.tokens.tolist() == [11, 12, 13, 14, 2**31 - 1, 2**31 - 1, 22, 23]
    assert packed.labels.tolist() == [-100, 13, -100, 2**31 - 1, -100, -100, 23, -100]


def test_a_negative_token_is_refused_where_it_is_trained():
    """As a label it would be ignored without a word. Elsewhere it may stand for an image, say."""
    data = changed(tokens=[[-200, 12, 13, -200, 15], [21, 22, 23]])
    packed = only(data, rollpack.plan(data, micro_batch_size=2))
    assert packed.tokens.tolist()[:5] == [-200, 12, 13, -200, 15]
    assert packed.labels.tolist()[:5] == [-100, 13, -100, 15, -100]
    for value in (-1, -100):
        data = changed(tokens=[[11, 12, 13, 14, 15], [21, 22, value]])
        plan = rollpack.plan(data, micro_batch_size=2)
        with pytest.raises(rollpack.DataError, match=f"position 2 is {value}") as caught:
            list(rollpack.pack(data, plan))
        assert (caught.value.column, caught.value.row) == ("tokens", 1)


BAD_TOKEN_COLUMNS = {
    "too short": ([[1.0, 2.0, 3.0], [1.0]], 1, ["1", "2"]),
    "too long": ([[1.0, 2.0, 3.0, 4.0], [1.0, 2.0]], 0, ["4", "3"]),
    "as long as the sequence": ([[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]], 1, ["3", "2"]),
    "null": ([[1.0, 2.0, 3.0], None], 1, ["null"]),
    "a null inside": ([[1.0, 2.0, 3.0], [1.0, None]], 1, ["null", "position 1"]),
}


@pytest.mark.parametrize(("values", "row", "said"), BAD_TOKEN_COLUMNS.values(), ids=BAD_TOKEN_COLUMNS)
def test_a_token_column_has_a_number_for_each_response_token(values, row, said):
    data = changed(logprobs=values)
    plan = rollpack.plan(data, micro_batch_size=2)
    with pytest.raises(rollpack.DataError) as caught:
        list(rollpack.pack(data, plan, token_columns=["logprobs"]))
    assert (caught.value.column, caught.value.row) == ("logprobs", row)
    for text in said:
        assert text in str(caught.value)
    assert len(list(rollpack.pack(data, plan))) == 1  # not asked for, not looked at


def test_carried_columns_have_to_be_there_and_to_be_numbers():
    plan = rollpack.plan(HAND, micro_batch_size=2)
    for arguments, column in (
        ({"token_columns": ["logprob"]}, "logprob"),
        ({"sample_columns": ["rewards"]}, "rewards"),
        ({"token_columns": ["reward"]}, "reward"),
        ({"sample_columns": ["logprobs"]}, "logprobs"),
        ({"sample_columns": ["group_index"]}, "group_index"),
    ):
        with pytest.raises(rollpack.SchemaError) as caught:
            list(rollpack.pack(HAND, plan, **arguments))
        assert (caught.value.column, caught.value.row) == (column, None)


def test_a_sample_column_of_nothing_but_nulls_is_nan():
    table = HAND.append_column("none", pa.nulls(2)).append_column("floats", pa.nulls(2, pa.float64()))
    packed = only(table, rollpack.plan(table, micro_batch_size=2), sample_columns=["none", "floats"])
    assert np.isnan(packed.sample_columns["none"]).all()
    assert np.isnan(packed.sample_columns["floats"]).all()


def test_a_mask_that_was_left_out_of_the_plan_is_left_out_of_the_pack():
    data = pl.from_arrow(HAND)
    plan = rollpack.plan(data, micro_batch_size=2, columns={"loss_mask": None})
    assert only(data, plan).loss_mask.sum() == 5


def test_groups_and_ids_are_not_read_again():
    """Packing needs lengths, masks and tokens; ids were settled by the plan."""
    plan = rollpack.plan(HAND, micro_batch_size=2, loss_aggregation="prompt_mean")
    assert only(HAND.drop_columns(["group_index"]), plan).prompt_mask_sums.tolist() == [2, 1]


def test_a_null_that_pandas_made_of_a_nan_is_told():
    frame = pd.DataFrame({"tokens": [[1, 2, 3]], "loss_mask": [[0, 1]], "x": [[float("nan"), 0.5]]})
    plan = rollpack.plan(frame, micro_batch_size=1)
    with pytest.raises(
        rollpack.DataError, match=r"position 0 is null \(pandas makes one of a NaN\); fill it or drop the row$"
    ):
        list(rollpack.pack(frame, plan, token_columns=["x"]))


@pytest.mark.parametrize("kind", ["token_columns", "sample_columns"])
def test_a_number_too_large_for_float32_is_no_infinity(kind):
    value = [1.0, 1e300] if kind == "token_columns" else 1e300
    table = pa.table({"tokens": [[1, 2, 3]], "loss_mask": [[1, 1]], "x": [value]})
    plan = rollpack.plan(table, micro_batch_size=1)
    said = "the value at position 1 is 1e300, too" if kind == "token_columns" else "1e300 is too"
    with pytest.raises(rollpack.DataError, match=f"{said} large for a float32") as caught:
        list(rollpack.pack(table, plan, **{kind: ["x"]}))
    assert (caught.value.column, caught.value.row) == ("x", 0)
    infinite = table.set_column(2, "x", [[[1.0, float("inf")]] if kind == "token_columns" else [float("inf")]])
    (micro_batch,) = rollpack.pack(infinite, plan, **{kind: ["x"]})
    carried = micro_batch.columns if kind == "token_columns" else micro_batch.sample_columns
    assert np.isinf(carried["x"]).sum() == 1
