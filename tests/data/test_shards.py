"""Shards that are summarized apart, planned as one and packed from where they lie."""

import hashlib
import json
import pickle
import re
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.parquet as papq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rollpack

#: Rollouts 0, 1 and 2 of groups 5 and 6; rollout 1 and both groups are cut by every boundary below.
WHOLE = pa.table(
    {
        "tokens": [[row] * length for row, length in enumerate([3, 2, 4, 2, 5, 3, 2])],
        "loss_mask": [[1], [1], [1, 0, 1], [1], [0, 0, 0], [1, 1], [0]],
        "rollout_id": [0, 1, 1, 1, 1, 2, 2],
        "group_index": [5, 5, 5, 5, 5, 6, 6],
        "score": [0.5, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5],
    }
)
PLANS = [
    {"max_tokens_per_gpu": 8, "dp_size": 2},
    {"loss_aggregation": "prompt_mean", "max_tokens_per_gpu": 6, "prompts_per_step": 1},
    {"micro_batch_size": 2, "global_batch_size": 1, "dp_size": 2, "placeholders": True},
]


def cut(table, *bounds):
    """The table in slices, by name in the order of their rows."""
    edges = [0, *bounds, len(table)]
    return {f"part-{i}": table.slice(a, b - a) for i, (a, b) in enumerate(pairwise(edges))}


def joined(shards, order=None, **arguments):
    made = [rollpack.summarize(table, groups=True, source=name, **arguments) for name, table in shards.items()]
    return rollpack.Summary.concat([made[i] for i in order] if order else made)


def same_plans(one, other):
    assert one.to_arrow().equals(other.to_arrow())
    assert one.steps == other.steps
    assert one.num_rows == other.num_rows
    assert one.dropped_rows.tolist() == other.dropped_rows.tolist()


def ranks(plan):
    for step in range(len(plan.steps)):
        for dp_rank in range(plan.settings.dp_size):
            yield step, dp_rank


def same_packed(some, others):
    some, others = list(some), list(others)
    assert len(some) == len(others) > 0
    for one, other in zip(some, others, strict=True):
        for name in ("tokens", "labels", "segment_ids", "rows", "sample_weights", "cu_seqlens"):
            assert np.array_equal(getattr(one, name), getattr(other, name)), name
        assert np.array_equal(one.sample_columns["score"], other.sample_columns["score"], equal_nan=True)


# ------------------------------------------------------------------------------------------------------- joining


@pytest.mark.parametrize("arguments", PLANS)
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_the_plan_of_the_shards_is_that_of_the_whole_in_whatever_order_they_come(arguments, order):
    summary = joined(cut(WHOLE, 2, 4), order)
    same_plans(rollpack.plan(summary, **arguments), rollpack.plan(rollpack.summarize(WHOLE, groups=True), **arguments))
    assert summary.sources == (("part-0", 2), ("part-1", 2), ("part-2", 3))


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=20),
    data=st.data(),
    named=st.sampled_from([str, int, lambda i: f"host/{i:03}"]),
)
def test_shards_of_any_cut_and_order_plan_as_one(lengths, data, named):
    rows = range(len(lengths))
    table = pa.table(
        {
            "tokens": [[1] * n for n in lengths],
            "loss_mask": [[data.draw(st.integers(0, 1)) for _ in range(data.draw(st.integers(0, n - 1)))] for n in lengths],
            "rollout_id": [data.draw(st.integers(0, 4)) for _ in rows],
        }
    )
    bounds = sorted(data.draw(st.sets(st.integers(1, len(lengths)), max_size=4)) - {len(lengths)})
    edges = [0, *bounds, len(lengths)]
    shards = [rollpack.summarize(table.slice(a, b - a), source=named(i)) for i, (a, b) in enumerate(pairwise(edges))]
    summary = rollpack.Summary.concat(data.draw(st.permutations(shards)))
    arguments = {"max_tokens_per_gpu": 12, "dp_size": 2, "placeholders": True, "global_batch_size": 2, "remainder": "keep"}
    same_plans(rollpack.plan(summary, **arguments), rollpack.plan(table, **arguments))


def test_what_is_joined_can_be_joined_again():
    a, b, c, d = cut(WHOLE, 1, 3, 5).items()
    left, right = joined(dict([d, a])), joined(dict([c, b]))
    summary = rollpack.Summary.concat([right, left])
    assert summary.to_arrow().equals(joined(cut(WHOLE, 1, 3, 5)).to_arrow())


def test_a_joined_summary_tells_source_and_row():
    table = pa.table(joined(cut(WHOLE, 2, 4)))
    assert table["source"].to_pylist() == ["part-0", "part-0", "part-1", "part-1", "part-2", "part-2", "part-2"]
    assert table["row"].to_pylist() == [0, 1, 0, 1, 0, 1, 2]
    assert table["rollout_id"].to_pylist() == [0, 1, 1, 1, 1, 2, 2]


def test_integers_are_ordered_as_numbers_and_strings_as_text():
    tables = {name: pa.table({"tokens": [[1] * length], "response_length": [0]}) for name, length in ((10, 3), (9, 2))}
    numbers = rollpack.Summary.concat(rollpack.summarize(table, source=name) for name, table in tables.items())
    assert numbers.sources == ((9, 1), (10, 1))
    assert numbers.column("total_length").tolist() == [2, 3]
    assert numbers.column("source").tolist() == [9, 10]
    texts = rollpack.Summary.concat(rollpack.summarize(table, source=str(name)) for name, table in tables.items())
    assert texts.sources == (("10", 1), ("9", 1))


def test_rows_of_a_plan_count_through_the_sources():
    plan = rollpack.plan(joined(cut(WHOLE, 2, 4)), micro_batch_size=7)
    assert plan.sources == (("part-0", 2), ("part-1", 2), ("part-2", 3))
    found = plan.rows_by_source(np.array([6, 1, 4, 0]))
    assert {name: rows.tolist() for name, rows in found.items()} == {"part-0": [0, 1], "part-2": [0, 2]}
    assert rollpack.Plan.from_bytes(plan.to_bytes()).sources == plan.sources
    with pytest.raises(rollpack.PlanError, match="source="):
        rollpack.plan(WHOLE, micro_batch_size=7).rows_by_source(np.array([0]))


def test_ids_of_text_keep_their_type_when_shards_are_joined():
    text = WHOLE.set_column(2, "rollout_id", WHOLE["rollout_id"].cast(pa.string()))
    assert joined(cut(text, 2, 4)).to_arrow().schema.field("rollout_id").type == pa.string()


def test_a_summary_that_was_sent_is_joined_with_one_made_here():
    for groups in (False, True):
        here, there = (rollpack.summarize(WHOLE, source=name, groups=groups) for name in "ab")
        sent = rollpack.Summary.from_bytes(there.to_bytes())
        assert rollpack.Summary.concat([here, sent]).to_arrow().equals(rollpack.Summary.concat([here, there]).to_arrow())


def test_shards_may_be_joined_in_several_steps():
    first, second, third = (rollpack.summarize(table, source=name) for name, table in cut(WHOLE, 2, 4).items())
    outer = rollpack.Summary.concat([third, first])
    whole = rollpack.Summary.concat([outer, second])
    assert whole.sources == (("part-0", 2), ("part-1", 2), ("part-2", 3))
    assert whole.to_arrow()["mask_sum"].to_pylist() == [1, 1, 2, 1, 0, 2, 0]
    assert whole.to_arrow()["row"].to_pylist() == [0, 1, 0, 1, 0, 1, 2]
    assert len(outer) == 5


def test_a_summary_prints_groups_and_sources():
    one, other = (rollpack.summarize(WHOLE, source=name, groups=True) for name in "ab")
    assert repr(one) == "Summary(7 samples, 21 tokens, 7 trained, with groups)"
    joint = rollpack.Summary.concat([one, other])
    assert repr(joint) == "Summary(14 samples, 42 tokens, 14 trained, with groups, 2 sources)"


@pytest.mark.parametrize("source", ["b", 7])
@pytest.mark.parametrize("without", [[], ["rollout_id"]])
def test_summaries_can_be_pickled_saved_and_sent(source, without, tmp_path):
    summary = rollpack.summarize(WHOLE.drop_columns(without), groups=True, source=source)
    other = rollpack.summarize(WHOLE.drop_columns(without), groups=True, source="a" if source == "b" else 3)
    summary.save(tmp_path / "x.summary")
    for made in (summary, rollpack.Summary.concat([summary, other])):
        back = pickle.loads(pickle.dumps(made))
        assert back.to_arrow().equals(made.to_arrow())
        assert (back.rollout_key, back.group_key, back.sources) == (made.rollout_key, made.group_key, made.sources)
        assert back.request == made.request
        arguments = {"micro_batch_size": 3, "loss_aggregation": "prompt_mean"}
        assert rollpack.plan(back, **arguments).id == rollpack.plan(made, **arguments).id
    assert rollpack.Summary.load(tmp_path / "x.summary").to_arrow().equals(summary.to_arrow())


def test_what_is_no_summary_is_refused(tmp_path):
    (tmp_path / "x").write_bytes(b"nothing of the sort")
    with pytest.raises(rollpack.DataError, match="x: this is no summary"):
        rollpack.Summary.load(tmp_path / "x")
    with pytest.raises(rollpack.DataError, match="no summary"):
        rollpack.Summary.from_bytes(rollpack.plan(WHOLE, micro_batch_size=7).to_bytes())
    whole = rollpack.summarize(WHOLE).to_bytes()
    with pytest.raises(rollpack.DataError, match="no summary"):
        rollpack.Summary.from_bytes(whole[: len(whole) // 2])


SENT = joined(cut(WHOLE.slice(0, 3), 2), rollout_key=("source", "rollout_id")).to_bytes()


@pytest.mark.parametrize("at", range(len(SENT)))
def test_a_summary_with_a_wrong_byte_is_refused(at):
    """Also one that would be another sound summary: other ids make other weights."""
    damaged = bytearray(SENT)
    damaged[at] ^= 0x41
    with pytest.raises(rollpack.DataError, match="damaged"):
        rollpack.Summary.from_bytes(bytes(damaged))


def test_a_summary_that_was_cut_short_is_refused():
    for end in (0, 1, 15, 16, 17, len(SENT) // 2, len(SENT) - 3, len(SENT) - 1):
        with pytest.raises(rollpack.DataError, match="damaged"):
            rollpack.Summary.from_bytes(SENT[:end])


def test_others_can_read_a_saved_summary_as_arrow():
    assert pa.ipc.open_stream(SENT).read_all()["mask_sum"].to_pylist() == [1, 1, 2]


def test_a_shard_without_a_mask_does_not_join_one_with_a_mask():
    """Its responses would be trained as a whole, and those of the others would not."""
    masked = rollpack.summarize(WHOLE, source="a")
    bare = WHOLE.drop_columns(["loss_mask"]).append_column("response_length", pa.array([1] * 7))
    with pytest.raises(rollpack.SchemaError, match=r"tokens, loss_mask, rollout_id in source 'a'.*tokens, response_length"):
        rollpack.Summary.concat([masked, rollpack.summarize(bare, source="b")])
    sent = rollpack.Summary.from_bytes(rollpack.summarize(bare, source="b").to_bytes())
    with pytest.raises(rollpack.SchemaError, match="columns that were read"):
        rollpack.Summary.concat([masked, sent])


def test_shards_with_ids_of_other_names_say_which():
    named = WHOLE.rename_columns(["tokens", "loss_mask", "uid", "group_index", "score"])
    shards = [
        rollpack.summarize(WHOLE, source="a"),
        rollpack.summarize(named, source="b", rollout_key="uid"),
    ]
    with pytest.raises(rollpack.SchemaError, match=r"loss_mask, rollout_id in source 'a'.*loss_mask, uid in source 'b'"):
        rollpack.Summary.concat(shards)


@pytest.mark.parametrize("source", [2**63, -(2**63) - 1, 2**70, np.uint64(2**63)])
def test_a_source_that_int64_does_not_hold_is_refused(source):
    with pytest.raises(rollpack.RollpackError, match="int64"):
        rollpack.summarize(WHOLE, source=source)


def test_the_largest_sources_stay_apart():
    shards = [rollpack.summarize(WHOLE, source=n, rollout_key=("source", "rollout_id")) for n in (2**63 - 1, -(2**63))]
    summary = rollpack.Summary.concat(shards)
    assert rollpack.plan(summary, micro_batch_size=14).steps[0].num_rollouts == 6
    assert set(summary.to_arrow()["source"].to_pylist()) == {2**63 - 1, -(2**63)}


def test_a_source_that_is_no_text_is_refused():
    with pytest.raises(rollpack.RollpackError, match=r"'a\\udcff'.*UTF-8"):
        rollpack.summarize(WHOLE, source="a\udcff")


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([7], "there is no row 7: the data of this plan has 7"),
        ([-2, 3], "there is no row -2:"),
        ([99, 0], "there is no row 99:"),
        ([9, -1], "there is no row 9:"),
        ([0.5, 3], "rows are float64; they have to be integers"),
        ([True], "rows are bool; they have to be integers"),
    ],
)
def test_rows_that_the_plan_does_not_have_are_refused(rows, words):
    plan = rollpack.plan(joined(cut(WHOLE, 2, 4)), micro_batch_size=7)
    with pytest.raises(rollpack.PlanError, match=words):
        plan.rows_by_source(np.array(rows))
    assert plan.rows_by_source(np.array([-1])) == {}
    assert plan.rows_by_source(np.array([])) == {}


def test_what_is_no_summary_is_not_joined():
    with pytest.raises(rollpack.DataError, match=r"a Table is no summary.*source="):
        rollpack.Summary.concat([WHOLE, WHOLE])
    summary = rollpack.summarize(WHOLE, source="a")
    with pytest.raises(rollpack.PlanError, match="Summary.concat"):
        rollpack.plan([summary, summary], micro_batch_size=7)
    with pytest.raises(rollpack.DataError, match="no shard was passed.*'a'"):
        list(rollpack.pack({}, rollpack.plan(summary, micro_batch_size=7)))


@pytest.mark.parametrize("groups", [None, 1, ["group_index", 3], b"group_index"])
def test_groups_that_are_none_of_the_choices(groups):
    with pytest.raises(rollpack.RollpackError, match="groups is"):
        rollpack.summarize(WHOLE, groups=groups)


def test_a_key_with_the_source_says_where_its_name_comes_from():
    with pytest.raises(rollpack.SchemaError, match=r"'source': is missing.*source="):
        rollpack.summarize(WHOLE, rollout_key=("source", "rollout_id"))


def intact(stream):
    """As rollpack signs it: what else is wrong with it has to be found too."""
    return stream + hashlib.blake2b(stream, digest_size=16).digest()


def test_a_summary_of_like_rows_is_small_and_one_that_says_it_has_more_is_refused():
    rows = rollpack.summarize({"tokens": [[7] * 3] * 1003, "response_length": [1] * 1003})
    saved = rows.to_bytes()
    assert isinstance(saved, bytes)
    assert len(saved) < 3 * 1003  # compressed: 12 bytes a row before
    with_ids = {"tokens": [[7] * 3] * 1003, "response_length": [1] * 1003, "rollout_id": [0] * 1003}
    assert len(rollpack.summarize(with_ids).to_bytes()) < 3 * 1003  # the number of a row is not sent
    more = saved[:-16].replace((1003).to_bytes(8, "little"), (10**9).to_bytes(8, "little"))
    assert more != saved[:-16]
    with pytest.raises(rollpack.DataError, match="no summary that rollpack saved"):
        rollpack.Summary.from_bytes(intact(more))


def test_a_summary_whose_ids_lie_outside_their_text_is_refused():
    saved = rollpack.summarize({"tokens": [[1]] * 2, "response_length": [0] * 2, "rollout_id": ["a", "b"]}).to_bytes()
    batch = pa.ipc.open_stream(saved).read_next_batch()
    offsets = pa.py_buffer(np.array([0, 100, 2], dtype=np.int32))
    ids = pa.StringArray.from_buffers(2, offsets, pa.py_buffer(b"ab"))
    damaged = batch.set_column(batch.schema.get_field_index("rollout_id"), batch.schema.field("rollout_id"), ids)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(damaged)
    with pytest.raises(rollpack.DataError, match="no summary that rollpack saved"):
        rollpack.Summary.from_bytes(intact(sink.getvalue().to_pybytes()))


# ------------------------------------------------------------------------------------------------------------ keys


def test_ids_that_clash_across_sources_are_told_apart_by_the_source():
    shards = {"a": WHOLE.slice(0, 5), "b": WHOLE.slice(0, 5)}

    def counts(**arguments):
        made = [rollpack.summarize(table, source=name, **arguments) for name, table in shards.items()]
        step = rollpack.plan(rollpack.Summary.concat(made), micro_batch_size=10).steps[0]
        return step.num_rollouts, step.num_prompts

    by_source = ("source", "rollout_id")
    assert counts(groups=True) == (2, 1)
    assert counts(groups=True, rollout_key=by_source) == (4, 1)
    assert counts(groups=("source", "group_index"), rollout_key=by_source) == (4, 2)
    assert counts(rollout_key=by_source) == (4, None)
    # A rollout that is told apart by its prompt is, where prompts are told apart by source, by that too.
    assert counts(groups=("source", "group_index"), rollout_key=("group_index", "rollout_id")) == (4, 2)
    assert counts(rollout_key=("group_index", "rollout_id")) == (2, 1)


def test_mask_sums_follow_the_key():
    shards = {"a": WHOLE.slice(0, 5), "b": WHOLE.slice(1, 1)}  # rollout 1 has 1 + 2 + 1 + 0 trained tokens in a and 1 in b
    made = [
        rollpack.summarize(t, source=n, groups=("source", "group_index"), rollout_key=("source", "rollout_id"))
        for n, t in shards.items()
    ]
    plan = rollpack.plan(rollpack.Summary.concat(made), micro_batch_size=10, loss_aggregation="prompt_mean").to_arrow()
    by_row = dict(
        zip(
            plan["row"].to_pylist(),
            zip(plan["rollout_mask_sum"].to_pylist(), plan["prompt_mask_sum"].to_pylist(), strict=True),
            strict=True,
        )
    )
    assert by_row == {0: (1, 5), 1: (4, 5), 2: (4, 5), 3: (4, 5), 4: (4, 5), 5: (1, 1)}


def test_a_column_that_is_called_source_stays_one_where_no_source_is_named():
    table = WHOLE.append_column("source", [["x", "x", "y", "y", "y", "y", "y"]])
    plan = rollpack.plan(table, micro_batch_size=7, rollout_key=("source", "rollout_id"))
    assert plan.steps[0].num_rollouts == 4  # x0, x1, y1, y2


def test_a_rollout_in_two_groups_is_found_across_shards():
    shards = {
        "a": WHOLE.slice(0, 2),
        "b": pa.table({"tokens": [[1, 2]], "loss_mask": [[1]], "rollout_id": [1], "group_index": [9]}),
    }
    found = r"row 2: the rollout of rollout_id 1 is in group 9 here and in another group at row 1 \(row 1 of source 'a'\)"
    with pytest.raises(rollpack.DataError, match=found) as error:
        rollpack.plan(joined(shards), micro_batch_size=1)
    assert "row 2 (row 0 of source 'b')" in str(error.value)
    assert (error.value.column, error.value.row) == ("group_index", 2)


def test_a_sample_over_the_budget_is_named_by_its_source():
    with pytest.raises(rollpack.PlanError, match=r"row 4 \(row 0 of source 'part-2'\) has 5 tokens"):
        rollpack.plan(joined(cut(WHOLE, 2, 4)), max_tokens_per_gpu=4)


# ---------------------------------------------------------------------------------------------------- what is refused


def refused(error, words, shards):
    with pytest.raises(error, match=re.escape(words)):
        rollpack.Summary.concat(shards)


def test_what_cannot_be_joined_is_refused():
    def one(source="a", table=WHOLE, **arguments):
        return rollpack.summarize(table, source=source, **arguments)

    refused(rollpack.DataError, "no summaries to join", [])
    refused(rollpack.DataError, "summarize(..., source=...)", [one(), one(None)])
    refused(rollpack.DataError, "source 'a' is there twice", [one(), one("b"), one()])
    refused(rollpack.DataError, "source 'b' is there twice", [rollpack.Summary.concat([one(), one("b")]), one("b")])
    refused(rollpack.DataError, "some sources are strings and some integers", [one(), one(3)])
    refused(
        rollpack.SchemaError,
        "the group_key is none in source 'a' and group_index in source 'b'",
        [one(), one("b", groups=True)],
    )
    no_ids = WHOLE.drop_columns(["rollout_id"])
    refused(
        rollpack.SchemaError, "the rollout_key is rollout_id in source 'a' and none in source 'b'", [one(), one("b", no_ids)]
    )
    by_source = {"rollout_key": ("source", "rollout_id")}
    refused(
        rollpack.SchemaError,
        "the rollout_key is rollout_id in source 'a' and source, rollout_id in source 'b'",
        [one(), one("b", **by_source)],
    )
    text = WHOLE.set_column(2, "rollout_id", WHOLE["rollout_id"].cast(pa.string()))
    refused(
        rollpack.SchemaError,
        "column 'rollout_id': has type int64 in source 'a' and string in source 'b'",
        [one(), one("b", text)],
    )
    renamed = WHOLE.rename_columns(["input_ids", *WHOLE.column_names[1:]])
    refused(rollpack.SchemaError, "name the columns alike", [one(), one("b", renamed, columns={"tokens": "input_ids"})])


def test_shards_that_differ_are_told_by_the_first_column_that_one_has_alone():
    bare = WHOLE.drop_columns(["loss_mask"]).append_column("response_length", pa.array([1] * 7))
    no_ids = WHOLE.drop_columns(["rollout_id"])
    pairs = {"rollout_key": ("group_index", "rollout_id")}, {"rollout_key": ("rollout_id", "group_index")}
    for column, (table, here), (other, there) in (
        ("loss_mask", (WHOLE, {}), (bare, {})),
        ("response_length", (bare, {"columns": {"rollout_id": None}}), (no_ids, {"columns": {"rollout_id": None}})),
        ("rollout_id", (no_ids, {}), (WHOLE, {})),
        ("group_index", (WHOLE, {}), (WHOLE, {"groups": True})),
        (None, (WHOLE, pairs[0]), (WHOLE, pairs[1])),
    ):
        shards = [rollpack.summarize(table, source="a", **here), rollpack.summarize(other, source="b", **there)]
        with pytest.raises(rollpack.SchemaError) as told:
            rollpack.Summary.concat(shards)
        assert told.value.column == column


def test_several_summaries_are_no_data():
    summary = rollpack.summarize(WHOLE, source="a")
    for data in ([summary, summary], [WHOLE, summary], (summary, WHOLE)):
        with pytest.raises(rollpack.PlanError, match=r"these are several summaries; join them: rollpack.Summary.concat"):
            rollpack.plan(data, micro_batch_size=1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"source": 1.5}, "source is 1.5"),
        ({"source": True}, "source is True"),
        ({"source": "a", "groups": ("source",)}, "groups is ('source',)"),
        ({"groups": ("source", "group_index")}, "pass source="),
        ({"source": "a", "rollout_key": ("source",)}, "column 'rollout_id': is missing"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(arguments, words):
    with pytest.raises(rollpack.RollpackError, match=re.escape(words)):
        rollpack.summarize(WHOLE, **arguments)


def test_groups_may_be_named_by_their_key_in_any_order():
    for groups in (True, "group_index", ["group_index"]):
        assert rollpack.summarize(WHOLE, groups=groups).group_key == ("group_index",)
    for groups in (("source", "group_index"), ("group_index", "source")):
        assert rollpack.summarize(WHOLE, source="a", groups=groups).group_key == ("source", "group_index")


def test_a_path_names_a_source(tmp_path):
    assert rollpack.summarize(WHOLE, source=tmp_path / "x").sources == ((str(tmp_path / "x"), 7),)
    assert rollpack.summarize(WHOLE, source=np.int64(3)).sources == ((3, 7),)


# --------------------------------------------------------------------------------------------------------- packing


@pytest.mark.parametrize("arguments", PLANS)
def test_shards_are_packed_from_a_list_in_order_or_by_name_in_any_order(arguments):
    shards = cut(WHOLE, 2, 4)
    plan, whole = (rollpack.plan(s, **arguments) for s in (joined(shards), rollpack.summarize(WHOLE, groups=True)))
    for step, dp_rank in ranks(plan):
        place = {"step": step, "dp_rank": dp_rank, "sample_columns": ["score"]}
        expected = list(rollpack.pack(WHOLE, whole, **place))
        same_packed(rollpack.pack(list(shards.values()), plan, **place), expected)
        same_packed(rollpack.pack(dict(reversed(shards.items())), plan, **place), expected)


def write(tmp_path, kind, shards):
    """The shards as files of a kind, by name."""
    found = {}
    for name, table in shards.items():
        found[name] = path = tmp_path / f"{name}.{kind}"
        if kind == "parquet":
            papq.write_table(table, path, row_group_size=1)
        elif kind == "arrow":
            with pa.ipc.new_file(str(path), table.schema) as writer:
                writer.write_table(table, max_chunksize=1)
        else:
            path.write_text("\n".join(json.dumps(row) for row in table.to_pylist()))
    return found


@pytest.mark.parametrize("kind", ["parquet", "arrow", "jsonl"])
def test_a_rank_opens_only_the_shards_that_hold_its_rows(tmp_path, kind):
    files = write(tmp_path, kind, cut(WHOLE, 2, 4))
    summary = rollpack.Summary.concat(rollpack.summarize(path, source=name) for name, path in files.items())
    plan = rollpack.plan(summary, micro_batch_size=1, dp_size=7)
    whole = rollpack.plan(WHOLE, micro_batch_size=1, dp_size=7)
    seen = set()
    for dp_rank in range(7):
        (own,) = plan.rows_by_source(plan.rows(0, dp_rank, 0))
        seen.add(own)
        others = {name: tmp_path / "nowhere" for name in files if name != own}
        expected = rollpack.pack(WHOLE, whole, dp_rank=dp_rank, sample_columns=["score"])
        same_packed(rollpack.pack({own: files[own]} | others, plan, dp_rank=dp_rank, sample_columns=["score"]), expected)
    assert seen == set(files)


def test_only_the_row_groups_of_the_rank_are_read(tmp_path, monkeypatch):
    files = write(tmp_path, "parquet", cut(WHOLE, 2, 4))
    summary = rollpack.Summary.concat(rollpack.summarize(path, source=name) for name, path in files.items())
    plan = rollpack.plan(summary, micro_batch_size=1, dp_size=7)
    read = []
    iter_batches = papq.ParquetFile.iter_batches

    def noted(self, *args, row_groups, **kwargs):
        read.append(list(row_groups))
        return iter_batches(self, *args, row_groups=row_groups, **kwargs)

    monkeypatch.setattr(papq.ParquetFile, "iter_batches", noted)
    dp_rank = next(rank for rank in range(7) if plan.rows(0, rank, 0).tolist() == [5])
    (micro_batch,) = rollpack.pack(files, plan, dp_rank=dp_rank)
    assert micro_batch.rows.tolist() == [5]
    assert micro_batch.tokens.tolist() == [5, 5, 5]
    assert read == [[1]]  # of part-2, which begins at row 4


def test_a_rank_of_nothing_but_placeholders_needs_one_shard():
    plan = rollpack.plan(joined(cut(WHOLE.slice(0, 2), 1)), micro_batch_size=1, dp_size=3, placeholders=True)
    (micro_batch,) = rollpack.pack({"part-1": WHOLE.slice(1, 1)}, plan, dp_rank=2)
    assert micro_batch.is_placeholder


def test_shards_that_are_not_those_of_the_plan_are_refused():
    shards = cut(WHOLE, 2, 4)
    plan = rollpack.plan(joined(shards), micro_batch_size=7)
    with pytest.raises(rollpack.DataError, match="source 'part-1' holds rows of this rank, and is not among"):
        rollpack.pack({"part-0": shards["part-0"], "part-2": shards["part-2"]}, plan)
    with pytest.raises(
        rollpack.DataError, match="'part-9' is none of the sources that were planned: 'part-0', 'part-1', 'part-2'"
    ):
        rollpack.pack(shards | {"part-9": WHOLE}, plan)
    with pytest.raises(rollpack.DataError, match="source 'part-1' had 2 rows when it was summarized, and now has 3"):
        rollpack.pack(shards | {"part-1": WHOLE.slice(0, 3)}, plan)
    with pytest.raises(rollpack.DataError, match="planned"):  # another order, seen by lengths
        list(rollpack.pack([shards["part-2"], shards["part-0"], shards["part-1"]], plan))


def test_a_shard_of_several_files_and_one_whose_rows_nobody_can_count(tmp_path):
    files = write(tmp_path, "jsonl", cut(WHOLE, 2, 4))
    shards = {"left": [files["part-0"], files["part-1"]], "right": files["part-2"]}
    summary = rollpack.Summary.concat(rollpack.summarize(data, source=name) for name, data in shards.items())
    plan = rollpack.plan(summary, micro_batch_size=7)
    assert plan.sources == (("left", 4), ("right", 3))
    place = {"sample_columns": ["score"]}
    same_packed(
        rollpack.pack(shards, plan, **place), rollpack.pack(WHOLE, rollpack.plan(WHOLE, micro_batch_size=7), **place)
    )


def test_write_packed_takes_shards_by_name(tmp_path):
    shards = cut(WHOLE, 2, 4)
    arguments = {"micro_batch_size": 2, "global_batch_size": 1, "dp_size": 2, "placeholders": True}
    paths = rollpack.write_packed(
        shards, rollpack.plan(joined(shards), **arguments), tmp_path / "a", sample_columns=["score"]
    )
    others = rollpack.write_packed(WHOLE, rollpack.plan(WHOLE, **arguments), tmp_path / "b", sample_columns=["score"])
    for path, other in zip(paths, others, strict=True):
        same_packed(rollpack.read_packed(path), rollpack.read_packed(other))


@pytest.mark.parametrize("name", ["reflexion_fanout", "tau_bench_airline_per_turn"])
def test_real_rollouts_in_shards_plan_and_pack_as_one(traces, name):
    table = papq.read_table(traces(name))
    names = [f"worker-{i:02}" for i in (7, 0, 3, 11, 5)]
    bounds = np.linspace(0, len(table), len(names) + 1).astype(int)
    shards = {name: table.slice(a, b - a) for name, a, b in zip(sorted(names), bounds, bounds[1:], strict=False)}
    made = [rollpack.summarize(shards[name], groups=True, source=name) for name in names]
    arguments = {"loss_aggregation": "prompt_mean", "max_tokens_per_gpu": 40_960, "dp_size": 4, "cp_size": 2}
    plan, whole = rollpack.plan(rollpack.Summary.concat(made), **arguments), rollpack.plan(table, **arguments)
    same_plans(plan, whole)
    place = {"dp_rank": 3, "cp_rank": 1, "sample_columns": ["reward"]}
    for one, other in zip(rollpack.pack(shards, plan, **place), rollpack.pack(table, whole, **place), strict=True):
        assert np.array_equal(one.tokens, other.tokens)
        assert np.array_equal(one.rows, other.rows)
        assert np.array_equal(one.sample_columns["reward"], other.sample_columns["reward"], equal_nan=True)
