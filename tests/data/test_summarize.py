"""What a summary says of rollouts, and what it refuses."""

import pickle
import threading
import time

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rollpack

GOOD = {
    "tokens": [[1, 2, 3], [4, 5, 6, 7], [8, 9], [10, 11, 12, 13, 14]],
    "response_length": [2, 3, 1, 4],
    "loss_mask": [[1, 0], [1, 1, 0], [0], [1, 1, 1, 0]],
    "rollout_id": [1, 1, 2, 3],
    "group_index": [0, 0, 0, 1],
}
SUMS = [1, 2, 0, 3]


def changed(**columns):
    """The good data with other columns; None leaves one out."""
    return {name: values for name, values in (GOOD | columns).items() if values is not None}


def at(name, row, value):
    """The good data with one other value."""
    values = list(GOOD[name])
    values[row] = value
    return changed(**{name: values})


def split(data, size=2):
    """As Arrow, in batches with empty ones between."""
    table = pa.table(data)
    batches = [table.slice(0, 0).to_batches() or [pa.RecordBatch.from_pylist([], table.schema)]]
    batches += [table.slice(i, size).to_batches() + batches[0] for i in range(0, table.num_rows, size)]
    return pa.Table.from_batches([batch for group in batches for batch in group])


def summary_of(data, **arguments):
    return pa.table(rollpack.summarize(data, **arguments)).to_pydict()


def test_a_summary_says_lengths_mask_sums_and_ids():
    summary = rollpack.summarize(pa.table(GOOD))
    table = pa.table(summary)
    assert table.to_pydict() == {
        "row": [0, 1, 2, 3],
        "total_length": [3, 4, 2, 5],
        "response_length": [2, 3, 1, 4],
        "mask_sum": SUMS,
        "rollout_id": [1, 1, 2, 3],
    }
    assert {field.type for field in table.schema} == {pa.int64()}
    assert len(summary) == 4
    assert summary.column("mask_sum").tolist() == SUMS
    assert summary.column("mask_sum").dtype == np.int64
    for said in ("4 samples", "14 tokens", "6 trained", "without groups"):
        assert said in repr(summary)
    assert pl.DataFrame(summary).equals(pl.from_arrow(table))


def test_a_summary_can_be_pickled_and_planned():
    summary = rollpack.summarize(pa.table(GOOD), groups=True)
    copy = pickle.loads(pickle.dumps(summary))
    assert pa.table(copy).equals(pa.table(summary))
    expected = rollpack.plan(pa.table(GOOD), loss_aggregation="prompt_mean", micro_batch_size=2)
    for planned in (summary, copy):
        assert rollpack.plan(planned, loss_aggregation="prompt_mean", micro_batch_size=2).id == expected.id


def test_groups_are_in_the_summary_when_asked_for():
    assert summary_of(pa.table(GOOD), groups=True)["group_index"] == [0, 0, 0, 1]
    assert "with groups" in repr(rollpack.summarize(pa.table(GOOD), groups=True))


def test_a_mask_alone_tells_the_response():
    data = changed(response_length=None)
    assert summary_of(pa.table(data))["response_length"] == [2, 3, 1, 4]
    assert summary_of(pa.table(data))["mask_sum"] == SUMS


def test_without_response_length_a_mask_may_cover_the_sequence():
    masks = [[0, 1, 0], [0, 1, 1, 0], [0, 0], [0, 1, 1, 1, 0]]
    data = changed(response_length=None, loss_mask=masks)
    assert summary_of(pa.table(data))["response_length"] == [3, 4, 2, 5]
    assert summary_of(pa.table(data))["mask_sum"] == SUMS
    told = summary_of(pa.table(changed(loss_mask=masks)), columns={"response_length": None})
    assert told["mask_sum"] == SUMS


def test_without_a_mask_every_response_token_is_trained():
    data = changed(loss_mask=None)
    assert summary_of(pa.table(data))["mask_sum"] == [2, 3, 1, 4]
    told = summary_of(pa.table(GOOD), columns={"loss_mask": None})
    assert told["mask_sum"] == [2, 3, 1, 4]


def test_a_response_may_be_empty():
    data = {"tokens": [[1, 2], [3]], "response_length": [0, 0], "loss_mask": [[], []]}
    assert summary_of(pa.table(data))["mask_sum"] == [0, 0]
    assert summary_of(pa.table({"tokens": [[1, 2], [3]], "loss_mask": [[], []]}))["response_length"] == [0, 0]
    assert summary_of(pa.table({"tokens": [[1, 2], [3]], "response_length": [0, 0]}))["mask_sum"] == [0, 0]


def test_an_untrained_token_may_be_at_position_0():
    data = {"tokens": [[1, 2, 3]], "response_length": [3], "loss_mask": [[0, 1, 1]]}
    assert summary_of(pa.table(data))["mask_sum"] == [2]


INTEGERS = [pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()]
MASKS = [*INTEGERS, pa.bool_(), pa.float16(), pa.float32(), pa.float64()]


def values_of(type_, values):
    if pa.types.is_float16(type_):
        return pa.array(np.array(values, np.float16))
    return pa.array([bool(v) for v in values] if type_ == pa.bool_() else values, type_)


def list_array(type_, lists, large=False):
    """A list column with junk before, between and behind: as a filter leaves it."""
    flat = [1, 0, 1] + [v for values in lists for v in values] + [0, 1]
    offsets = np.cumsum([0, 3, *map(len, lists), 2])
    make = pa.LargeListArray if large else pa.ListArray
    offsets = pa.array(offsets, pa.int64() if large else pa.int32())
    return make.from_arrays(offsets, values_of(type_, flat)).slice(1, len(lists))


@pytest.mark.parametrize("large", [False, True], ids=["list", "large_list"])
@pytest.mark.parametrize("type_", MASKS, ids=str)
def test_masks_of_every_type_are_summed(type_, large):
    table = pa.table(changed(loss_mask=None)).append_column("loss_mask", list_array(type_, GOOD["loss_mask"], large))
    assert summary_of(table)["mask_sum"] == SUMS
    assert summary_of(split(table, 3))["mask_sum"] == SUMS


@pytest.mark.parametrize("large", [False, True], ids=["list", "large_list"])
@pytest.mark.parametrize("type_", INTEGERS, ids=str)
def test_tokens_and_response_lengths_of_every_integer_type_are_read(type_, large):
    table = pa.table(
        {
            "tokens": list_array(type_, GOOD["tokens"], large),
            "response_length": pa.array(GOOD["response_length"], type_),
            "loss_mask": GOOD["loss_mask"],
        }
    )
    assert summary_of(table)["total_length"] == [3, 4, 2, 5]
    assert summary_of(table)["response_length"] == [2, 3, 1, 4]


def test_masks_of_nothing_but_empty_lists_have_no_type_and_are_read():
    table = pa.table({"tokens": [[1, 2], [3]], "loss_mask": pa.array([[], []], pa.list_(pa.null()))})
    assert summary_of(table)["mask_sum"] == [0, 0]


@pytest.mark.parametrize("type_", MASKS, ids=str)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_mask_sums_are_those_of_python(type_, data):
    masks = data.draw(st.lists(st.lists(st.integers(0, 1), max_size=600), min_size=1, max_size=6))
    tokens = [[9] * (len(mask) + 1) for mask in masks]
    table = pa.table({"tokens": tokens, "loss_mask": list_array(type_, masks)})
    assert rollpack.summarize(table).column("mask_sum").tolist() == [sum(mask) for mask in masks]


def test_mask_sums_are_exact_where_float32_and_int32_are_not():
    length = 2**24 + 2
    mask = np.ones(length - 1, np.float32)  # 2^24 + 1, which no float32 holds
    row = pa.table(
        {
            "tokens": pa.ListArray.from_arrays(pa.array([0, length], pa.int32()), pa.array(np.zeros(length, np.int8))),
            "loss_mask": pa.ListArray.from_arrays(pa.array([0, length - 1], pa.int32()), pa.array(mask)),
            "rollout_id": [5],
        }
    )
    assert rollpack.summarize(row).column("mask_sum").tolist() == [2**24 + 1]

    bits = pa.ListArray.from_arrays(pa.array([0, length - 1], pa.int32()), pa.array(np.ones(length - 1, np.bool_)))
    row = row.set_column(1, "loss_mask", bits)
    many = pa.concat_tables([row] * 130)  # one rollout of more than 2^31 trained tokens
    summary = rollpack.summarize(many)
    assert int(summary.column("mask_sum").sum()) == 130 * (2**24 + 1)
    plan = rollpack.plan(summary, micro_batch_size=1)
    assert plan.steps[0].num_tokens == 130 * (2**24 + 1)
    assert set(plan.to_arrow()["rollout_mask_sum"].to_pylist()) == {130 * (2**24 + 1)}


IDS = {
    "int64": pa.array([-(2**63), 2**63 - 1, -(2**63), 0]),
    "uint64": pa.array([2**64 - 1, 2**63, 2**64 - 1, 2**53 + 1], pa.uint64()),
    "int32": pa.array([-5, 6, -5, 7], pa.int32()),
    "uint8": pa.array([255, 6, 255, 7], pa.uint8()),
    "string": pa.array(["b", "", "b", "Ω"]),
    "large string": pa.array(["b", "", "b", "Ω"], pa.large_string()),
    "binary": pa.array([b"\xff\x00", b"", b"\xff\x00", b"\x00"]),
    "large binary": pa.array([b"\xff\x00", b"", b"\xff\x00", b"\x00"], pa.large_binary()),
    "uuid": pa.array([b"1234567890123456", b"a" * 16, b"1234567890123456", b"c" * 16], pa.binary(16)),
}


@pytest.mark.parametrize("ids", IDS.values(), ids=IDS)
def test_ids_come_back_as_what_they_were(ids):
    table = pa.table(changed(rollout_id=ids, group_index=ids))
    for data in (table, split(table, 1), pa.concat_tables([table.slice(2), table]).slice(2)):
        read = pa.table(rollpack.summarize(data, groups=True))
        for name in ("rollout_id", "group_index"):
            assert read[name].type == ids.type
            assert read[name].to_pylist() == ids.to_pylist()
        plan = rollpack.plan(data, loss_aggregation="prompt_mean", micro_batch_size=4)
        assert plan.steps[0][:2] == (3, 3)  # rows 0 and 2 are of one rollout and one group


def test_ids_that_float64_would_merge_stay_apart():
    ids = [2**53, 2**53 + 1, 2**53 + 2, 2**53 + 3]
    assert rollpack.plan(pa.table(changed(rollout_id=ids)), micro_batch_size=4).steps[0].num_rollouts == 4


def test_ids_of_polars_strings_are_strings():
    data = pl.DataFrame(changed(rollout_id=["a", "a", "a string that is too long to lie in a view", "c"]))
    assert summary_of(data)["rollout_id"] == ["a", "a", "a string that is too long to lie in a view", "c"]


@pytest.mark.parametrize("type_", [pa.float16(), pa.float32(), pa.float64()], ids=str)
@pytest.mark.parametrize("column", ["rollout_id", "group_index"])
def test_float_ids_are_refused_with_the_reason(column, type_):
    table = pa.table(changed(**{column: values_of(type_, [1.0, 1.0, 2.0, 3.0])}))
    with pytest.raises(rollpack.SchemaError, match="pandas") as caught:
        rollpack.summarize(table, groups=True)
    assert caught.value.column == column


def test_pandas_integers_with_gaps_are_such_floats():
    frame = pd.DataFrame(changed(rollout_id=[1, 1, None, 3]))
    with pytest.raises(rollpack.SchemaError, match=r"rollout_id.*pandas.*int64") as caught:
        rollpack.summarize(frame)
    assert caught.value.column == "rollout_id"


def test_without_rollout_ids_each_row_is_a_rollout():
    for data, arguments in ((changed(rollout_id=None), {}), (GOOD, {"columns": {"rollout_id": None}})):
        summary = rollpack.summarize(split(data), **arguments)
        assert summary.column("rollout_id").tolist() == [0, 1, 2, 3]
        assert rollpack.plan(summary, micro_batch_size=4).steps[0].num_rollouts == 4


def test_a_key_of_several_columns_tells_rollouts_apart():
    table = pa.table(changed(rollout_id=[0, 1, 0, 0], group_index=["x", "x", "y", "x"]))
    with pytest.raises(rollpack.DataError, match=r'rollout_key=\("group_index", "rollout_id"\)'):
        rollpack.summarize(table, groups=True)
    summary = rollpack.summarize(table, rollout_key=("group_index", "rollout_id"))
    assert summary.column("rollout_id").tolist() == [0, 1, 0, 0]
    assert summary.column("group_index").tolist() == ["x", "x", "y", "x"]
    plan = rollpack.plan(summary, micro_batch_size=4, loss_aggregation="prompt_mean")
    assert plan.steps[0][:2] == (3, 2)
    again = rollpack.plan(
        table, rollout_key=["group_index", "rollout_id"], micro_batch_size=4, loss_aggregation="prompt_mean"
    )
    assert again.id == plan.id


def test_a_key_may_be_any_column():
    table = pa.table(changed(episode=list("aaab"), turn=[0, 1, 1, 0]))
    assert summary_of(table, rollout_key="episode")["rollout_id"] == list("aaab")
    assert rollpack.plan(table, rollout_key="episode", micro_batch_size=4).steps[0].num_rollouts == 2
    assert rollpack.plan(table, rollout_key=("episode", "turn"), micro_batch_size=4).steps[0].num_rollouts == 3
    with pytest.raises(rollpack.SchemaError) as caught:
        rollpack.summarize(table, rollout_key="episodes")
    assert caught.value.column == "episodes"
    assert "'episode'" in str(caught.value)


@pytest.mark.parametrize("name", ["row", "mask_sum", "total_length"])
def test_a_key_may_have_the_name_of_a_column_of_the_summary(name):
    table = pa.table(changed(**{name: [7, 7, 7, 8]}, attempt=[0, 0, 1, 0]))
    plan = rollpack.plan(table, rollout_key=(name, "attempt"), micro_batch_size=4)
    assert plan.steps[0].num_rollouts == 3


def test_columns_may_have_other_names():
    names = {"tokens": "input_ids", "response_length": "n", "loss_mask": "m", "rollout_id": "traj", "group_index": "prompt"}
    table = pa.table({names[name]: values for name, values in GOOD.items()})
    assert summary_of(table, columns=names, groups=True) == summary_of(pa.table(GOOD), groups=True)
    plan = rollpack.plan(table, columns=names, micro_batch_size=4)
    (micro_batch,) = rollpack.pack(table, plan)  # the names travel in the plan
    assert micro_batch.tokens.tolist() == list(range(1, 15))
    with pytest.raises(rollpack.SchemaError) as caught:
        rollpack.summarize(table, columns=names | {"loss_mask": "mm"})
    assert caught.value.column == "mm"


def test_a_name_that_was_given_has_to_be_there_even_where_the_column_is_optional():
    for role in ("loss_mask", "response_length", "rollout_id"):
        with pytest.raises(rollpack.SchemaError) as caught:
            rollpack.summarize(pa.table(GOOD), columns={role: "nowhere"})
        assert caught.value.column == "nowhere"


def test_a_role_that_does_not_exist_is_refused():
    with pytest.raises(rollpack.SchemaError, match="tokens, response_length, loss_mask") as caught:
        rollpack.summarize(pa.table(GOOD), columns={"token": "tokens"})
    assert caught.value.column == "token"


UNREAD = {
    "nulls": pa.array([0, None, 0, None]),
    "all null": pa.nulls(4),
    "floats": pa.array([1.5, 1.5, 1.5, 2.5]),
    "structs": pa.array([{"a": 1}, None, {"a": 2}, None]),
    "two groups of a rollout": pa.array([0, 1, 0, 1]),
}


@pytest.mark.parametrize("groups", UNREAD.values(), ids=UNREAD)
def test_the_group_column_is_not_looked_at_unless_asked_for(groups):
    table = pa.table(changed(group_index=groups))
    assert summary_of(table)["mask_sum"] == SUMS
    for mode in ("sample_mean", "token_mean"):
        plan = rollpack.plan(table, loss_aggregation=mode, micro_batch_size=4)
        assert plan.steps[0].num_prompts is None
    with pytest.raises(rollpack.RollpackError) as caught:
        rollpack.plan(table, loss_aggregation="prompt_mean", micro_batch_size=4)
    assert caught.value.column == "group_index"


LATE = 2**40

# What is wrong, the data, the column and row that the error carries, and what its text has to say.
FAULTS = {
    "tokens null": (at("tokens", 3, None), "tokens", 3, ["null"]),
    "mask null": (at("loss_mask", 2, None), "loss_mask", 2, ["null"]),
    "response length null": (at("response_length", 1, None), "response_length", 1, ["null"]),
    "rollout id null": (at("rollout_id", 3, None), "rollout_id", 3, ["null"]),
    "group null": (at("group_index", 2, None), "group_index", 2, ["null"]),
    "null token": (at("tokens", 2, [8, None]), "tokens", 2, ["null", "position 1"]),
    "null in a mask": (at("loss_mask", 3, [1, 1, None, 0]), "loss_mask", 3, ["null", "position 2"]),
    "mask of 2": (at("loss_mask", 1, [1, 2, 0]), "loss_mask", 1, ["position 1", "2", "0 and 1"]),
    "advantages for a mask": (at("loss_mask", 1, [0.5, -1.25, 0.5]), "loss_mask", 1, ["0.5", "are these advantages"]),
    "mask of -1": (at("loss_mask", 3, [1, 1, 1, -1]), "loss_mask", 3, ["position 3", "-1"]),
    "mask too short": (at("loss_mask", 1, [1, 1]), "loss_mask", 1, ["2", "3", "response_length"]),
    "mask too long": (at("loss_mask", 2, [0, 0, 0]), "loss_mask", 2, ["3", "1", "response_length"]),
    "mask over all": (
        at("loss_mask", 3, [0, 1, 1, 1, 0]),
        "loss_mask",
        3,
        ["prompt and response", "5", "4", 'columns={"response_length": None}'],
    ),
    "mask longer than the sequence": (
        {"tokens": [[1, 2], [3, 4]], "loss_mask": [[1], [0, 1, 1]]},
        "loss_mask",
        1,
        ["3", "2"],
    ),
    "response length negative": (at("response_length", 2, -1), "response_length", 2, ["-1", "negative"]),
    "response length too large": (at("response_length", 3, 6), "response_length", 3, ["6", "5"]),
    "response length far too large": (at("response_length", 3, LATE), "response_length", 3, [str(LATE), "5"]),
    "empty sequence": (
        {"tokens": [[1], []], "response_length": [0, 0], "loss_mask": [[], []]},
        "tokens",
        1,
        ["empty"],
    ),
    "position 0 trained": (
        {"tokens": [[1, 2], [3, 4]], "response_length": [1, 2], "loss_mask": [[1], [1, 0]]},
        "loss_mask",
        1,
        ["position 0"],
    ),
    "position 0 trained under a mask over all": (
        {"tokens": [[1, 2], [3, 4]], "loss_mask": [[0, 1], [1, 1]]},
        "loss_mask",
        1,
        ["position 0"],
    ),
    "position 0 trained without a mask": (
        {"tokens": [[1, 2], [3, 4]], "response_length": [1, 2]},
        "response_length",
        1,
        ["position 0"],
    ),
    "rollout in two groups": (at("group_index", 1, 5), "group_index", 1, ["5", "rollout_id 1", "row 0", "rollout_key"]),
}


@pytest.mark.parametrize(("data", "column", "row", "said"), FAULTS.values(), ids=FAULTS)
def test_a_bad_value_is_named_with_column_and_row(data, column, row, said):
    data = data if "group_index" in data else data | {"group_index": [0] * len(data["tokens"])}
    for table in (pa.table(data), split(data, 1), split(data, 2), [pa.table(data)]):
        with pytest.raises(rollpack.DataError) as caught:
            rollpack.summarize(table, groups=True)
        assert (caught.value.column, caught.value.row) == (column, row)
        for text in (*said, f"'{column}'", f"row {row}"):
            assert text in str(caught.value)
        with pytest.raises(rollpack.DataError) as planned:
            rollpack.plan(table, loss_aggregation="prompt_mean", micro_batch_size=4)
        assert str(planned.value) == str(caught.value)


def test_rows_are_counted_over_all_parts_of_a_list():
    bad = at("response_length", 1, -7)
    with pytest.raises(rollpack.DataError, match="-7") as caught:
        rollpack.summarize([pa.table(GOOD), pl.DataFrame(GOOD), split(bad, 1)])
    assert (caught.value.column, caught.value.row) == ("response_length", 9)


def test_a_response_length_beyond_int64_is_shown_as_it_is():
    data = changed(response_length=pa.array([2, 3, 2**64 - 1, 4], pa.uint64()))
    with pytest.raises(rollpack.DataError, match="18446744073709551615") as caught:
        rollpack.summarize(pa.table(data))
    assert (caught.value.column, caught.value.row) == ("response_length", 2)


@pytest.mark.parametrize("value", [0.5, float("nan"), float("inf"), -1.0, 1 + 2**-52])
def test_a_float_mask_holds_0_and_1_only(value):
    data = at("loss_mask", 1, [1.0, value, 0.0])
    data["loss_mask"] = pa.array([[float(v) for v in mask] for mask in data["loss_mask"]])
    with pytest.raises(rollpack.DataError, match="position 1") as caught:
        rollpack.summarize(pa.table(data))
    assert (caught.value.column, caught.value.row) == ("loss_mask", 1)


def test_a_float_mask_may_hold_a_negative_zero():
    masks = [[1.0, -0.0], [1.0, 1.0, -0.0], [-0.0], [1.0, 1.0, 1.0, 0.0]]
    assert summary_of(pa.table(changed(loss_mask=masks)))["mask_sum"] == SUMS


def test_nulls_of_other_rows_are_not_this_rows_fault():
    """A null row may still span values, and a slice has values before and behind it."""
    lists = pa.ListArray.from_arrays(pa.array([0, 2, 4, 7], pa.int32()), pa.array([1, None, 3, 4, 5, 6, None]))
    table = pa.table({"tokens": lists, "response_length": [None, 1, None]})
    assert summary_of(table.slice(1, 1))["total_length"] == [2]


def test_a_row_that_is_null_is_null_even_where_it_spans_values():
    valid = pa.array([False, True])
    lists = pa.ListArray.from_arrays(pa.array([0, 2, 4], pa.int32()), pa.array([1, 2, 3, 4]), mask=pa.array([True, False]))
    assert valid.to_pylist() == lists.is_valid().to_pylist()
    with pytest.raises(rollpack.DataError, match="null") as caught:
        rollpack.summarize(pa.table({"tokens": lists, "response_length": [1, 1]}))
    assert (caught.value.column, caught.value.row) == ("tokens", 0)


TYPES = {
    "tokens of strings": ("tokens", pa.array([["a"]] * 4)),
    "tokens of floats": ("tokens", pa.array([[1.0, 2.0]] * 4)),
    "tokens of booleans": ("tokens", pa.array([[True, False]] * 4)),
    "tokens of lists": ("tokens", pa.array([[[1, 2]]] * 4)),
    "tokens are no list": ("tokens", pa.array([1, 2, 3, 4])),
    "tokens are text": ("tokens", pa.array(["a"] * 4)),
    "tokens are all null": ("tokens", pa.nulls(4)),
    "mask of strings": ("loss_mask", pa.array([["1"]] * 4)),
    "mask is no list": ("loss_mask", pa.array([1, 1, 0, 1])),
    "response length float": ("response_length", pa.array([2.0, 3.0, 1.0, 4.0])),
    "response length text": ("response_length", pa.array(["2"] * 4)),
    "response length boolean": ("response_length", pa.array([True] * 4)),
    "rollout id boolean": ("rollout_id", pa.array([True] * 4)),
    "rollout id list": ("rollout_id", pa.array([[1]] * 4)),
    "rollout id time": ("rollout_id", pa.array([1] * 4, pa.timestamp("s"))),
    "rollout id decimal": ("rollout_id", pa.array([1] * 4).cast(pa.decimal128(20, 0))),
    "group struct": ("group_index", pa.array([{"a": 1}] * 4)),
}


@pytest.mark.parametrize(("column", "values"), TYPES.values(), ids=TYPES)
def test_a_type_that_cannot_be_read_is_named_with_what_could(column, values):
    with pytest.raises(rollpack.SchemaError) as caught:
        rollpack.summarize(pa.table(changed(**{column: values})), groups=True)
    assert caught.value.column == column
    assert caught.value.row is None
    assert "type" in str(caught.value)


@pytest.mark.parametrize("column", ["rollout_id", "group_index", "response_length"])
def test_a_column_of_nothing_but_nulls_is_null(column):
    with pytest.raises(rollpack.DataError, match="null") as caught:
        rollpack.summarize(pa.table(changed(**{column: pa.nulls(4)})), groups=True)
    assert (caught.value.column, caught.value.row) == (column, 0)


def test_missing_columns_are_named():
    for missing, column in (
        ({"tokens": None}, "tokens"),
        ({"loss_mask": None, "response_length": None}, "loss_mask"),
        ({"group_index": None}, "group_index"),
    ):
        with pytest.raises(rollpack.SchemaError) as caught:
            rollpack.summarize(pa.table(changed(**missing)), groups=True)
        assert (caught.value.column, caught.value.row) == (column, None)
        for name in changed(**missing):
            assert f"'{name}'" in str(caught.value)  # which columns there are
    both = pa.table(changed(loss_mask=None, response_length=None))
    with pytest.raises(rollpack.SchemaError, match=r"loss_mask.*response_length"):
        rollpack.summarize(both)


@pytest.mark.parametrize(
    ("column", "near"),
    [
        ("tokens", "token"),
        ("tokens", "tokns"),
        ("tokens", "Tokens"),
        ("group_index", "group_idx"),
        ("group_index", "groupindex"),
    ],
)
def test_a_near_miss_in_spelling_is_pointed_out(column, near):
    table = pa.table(changed(**{column: None, near: GOOD[column]}))
    with pytest.raises(rollpack.SchemaError) as caught:
        rollpack.summarize(table, groups=True)
    assert caught.value.column == column
    assert f"did you mean '{near}'" in str(caught.value)
    assert f'columns={{"{column}": "{near}"}}' in str(caught.value)
    assert summary_of(table, columns={column: near}, groups=True) == summary_of(pa.table(GOOD), groups=True)


@pytest.mark.parametrize(
    ("column", "twin"),
    [
        ("loss_mask", "lossMask"),
        ("loss_mask", "loss_masks"),
        ("rollout_id", "Rollout ID"),
        ("response_length", "responseLength"),
    ],
)
def test_an_optional_column_in_another_spelling_is_not_taken_for_absent(column, twin):
    table = pa.table(changed(**{column: None, twin: GOOD[column]}))
    with pytest.raises(rollpack.SchemaError, match=twin) as caught:
        rollpack.summarize(table)
    assert caught.value.column == column
    assert summary_of(table, columns={column: twin}) == summary_of(pa.table(GOOD))
    assert len(rollpack.summarize(table, columns={column: None})) == 4


def test_two_columns_of_one_name_are_refused():
    table = pa.table([*pa.table(GOOD).columns, pa.array(GOOD["tokens"])], names=[*GOOD, "tokens"])
    with pytest.raises(rollpack.SchemaError, match="two columns") as caught:
        rollpack.summarize(table)
    assert caught.value.column == "tokens"


def test_no_rows_at_all_are_an_error():
    empty = pa.table(GOOD).slice(0, 0)
    no_batches = pa.Table.from_batches([], schema=empty.schema)
    for data in (
        empty,
        no_batches,
        [empty, empty],
        [],
        (),
        pl.DataFrame(empty),
        pd.DataFrame(GOOD).head(0),
        empty.to_reader(),
    ):
        with pytest.raises(rollpack.DataError, match="no rows") as caught:
            rollpack.summarize(data)
        assert (caught.value.column, caught.value.row) == (None, None)


def test_the_gil_is_released_while_rust_reads(traces):
    """Another thread goes on while a large table is summarized."""
    table = pa.concat_tables([pq.read_table(traces("long_reasoning"))] * 40)
    ticks, done = [], threading.Event()

    def tick():
        while not done.wait(0.001):
            ticks.append(time.perf_counter())

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        begin = time.perf_counter()
        summary = rollpack.summarize(table)
        end = time.perf_counter()
    finally:
        done.set()
        thread.join()
    assert len(summary) == 40 * 1055
    if end - begin < 0.02:
        pytest.skip(f"over in {end - begin:.4f} s, which is too short to see anything")
    assert len([t for t in ticks if begin < t < end]) >= 3


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_summary_does_not_depend_on_batches(data):
    lengths = data.draw(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6)), min_size=1, max_size=12))
    rows = []
    for prompt, response in lengths:
        mask = data.draw(st.lists(st.integers(0, 1), min_size=response, max_size=response))
        rollout = data.draw(st.integers(0, 3))
        rows.append(
            {
                "tokens": list(range(prompt + response)),
                "response_length": response,
                "loss_mask": mask,
                "rollout_id": f"r{rollout}",
                "group_index": rollout // 2,
            }
        )
    schema = pa.schema(
        [
            ("tokens", pa.list_(pa.int32())),
            ("response_length", pa.int16()),
            ("loss_mask", data.draw(st.sampled_from([pa.list_(pa.bool_()), pa.large_list(pa.uint8())]))),
            ("rollout_id", pa.string()),
            ("group_index", pa.uint64()),
        ]
    )
    masks = [
        [bool(v) for v in row["loss_mask"]] if schema.field(2).type == pa.list_(pa.bool_()) else row["loss_mask"]
        for row in rows
    ]
    table = pa.Table.from_pylist([row | {"loss_mask": mask} for row, mask in zip(rows, masks, strict=True)], schema)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(rows)), max_size=5)))
    parts = [table.slice(a, b - a) for a, b in zip([0, *cuts], [*cuts, len(rows)], strict=True)]
    expected = {
        "row": list(range(len(rows))),
        "total_length": [len(row["tokens"]) for row in rows],
        "response_length": [row["response_length"] for row in rows],
        "mask_sum": [sum(row["loss_mask"]) for row in rows],
        "rollout_id": [row["rollout_id"] for row in rows],
        "group_index": [row["group_index"] for row in rows],
    }
    assert summary_of(parts, groups=True) == expected
    assert summary_of(pa.concat_tables(parts), groups=True) == expected


def test_names_of_columns_are_strings():
    table = {"tokens": [[7, 1]], "loss_mask": [[1]], "extra": [[1.0]]}
    plan = rollpack.plan(table, micro_batch_size=1)
    for arguments, told in (
        ({"token_columns": 3}, "^token_columns is 3; it has to be a column name or a sequence of them"),
        ({"token_columns": ["extra", 3]}, "^token_columns holds 3; column names are strings"),
        ({"sample_columns": [None]}, "^sample_columns holds None; column names are strings"),
    ):
        with pytest.raises(TypeError, match=told):
            list(rollpack.pack(table, plan, **arguments))
    with pytest.raises(TypeError, match="^rollout_key is 3; it has to be a column name"):
        rollpack.summarize(table, rollout_key=3)
    # One name needs no list.
    (packed,) = rollpack.pack(table, plan, token_columns="extra")
    assert set(packed.columns) == {"extra"}
