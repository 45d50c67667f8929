"""The same rollouts in every Arrow type give the same summary and the same packed arrays."""

import mmap
import os

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rollpack

TOKENS = [[1, 2, 3], [4, 5, 6, 7], [8, 9], [10, 11, 12, 13, 14]]
MASKS = [[1, 0], [1, 1, 0], [0], [1, 1, 1, 0]]
SUMS = [1, 2, 0, 3]
IDS = ["a", "a", "", "a string that is too long to lie in a view"]
FIXED = [[1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 11, 12]]


def view(type_):
    """A list view whose rows lie in another order than they are in, and overlap with what no row has."""

    def make(lists, value_type):
        make_view = pa.LargeListViewArray if type_ == "large" else pa.ListViewArray
        index = pa.int64() if type_ == "large" else pa.int32()
        order = list(range(len(lists)))[::-1]
        flat = [value_type == pa.bool_() or 1]
        starts = [0] * len(lists)
        for row in order:
            starts[row] = len(flat)
            flat += lists[row]
        sizes = pa.array([len(values) for values in lists], index)
        return make_view.from_arrays(pa.array(starts, index), sizes, pa.array(flat, value_type))

    return make


LISTS = {
    "list": lambda lists, t: pa.array(lists, pa.list_(t)),
    "large list": lambda lists, t: pa.array(lists, pa.large_list(t)),
    "list view": view("small"),
    "large list view": view("large"),
    "list without nulls, child called l": lambda lists, t: pa.array(lists, pa.list_(pa.field("l", t, nullable=False))),
    "list with metadata": lambda lists, t: pa.array(lists, pa.list_(pa.field("element", t, metadata={"a": "b"}))),
}


def packed(table, **arguments):
    plan = rollpack.plan(table, micro_batch_size=3, cp_size=2)
    arrays = []
    for cp_rank in range(2):
        for m in rollpack.pack(table, plan, cp_rank=cp_rank, **arguments):
            arrays += [
                m.tokens,
                m.labels,
                m.loss_mask,
                m.segment_ids,
                m.cu_seqlens,
                m.rows,
                m.mask_sums,
                *m.columns.values(),
            ]
    return [array.tolist() for array in arrays]


def table_of(make=LISTS["list"], ids=None, tokens=TOKENS, masks=MASKS):
    return pa.table(
        {
            "tokens": make(tokens, pa.int32()),
            "loss_mask": make(masks, pa.int8()),
            "rollout_id": pa.array(IDS[: len(tokens)]) if ids is None else ids,
            "logprobs": make(masks, pa.float64()),
        }
    )


@pytest.mark.parametrize("make", LISTS.values(), ids=LISTS)
def test_every_list_gives_the_same(make):
    expected, table = table_of(), table_of(make)
    for data in (table, pa.concat_tables([table.slice(3), table, table]).combine_chunks().slice(1, 4)):
        assert pa.table(rollpack.summarize(data)).equals(pa.table(rollpack.summarize(expected)))
        assert packed(data, token_columns=["logprobs"]) == packed(expected, token_columns=["logprobs"])


def test_fixed_size_lists_give_the_same():
    def fixed(lists, value_type):
        return pa.array(lists, pa.list_(value_type, len(lists[0])))

    masks = [[1, 0], [0, 1], [0, 0], [1, 1]]
    expected, table = table_of(tokens=FIXED, masks=masks), table_of(fixed, tokens=FIXED, masks=masks)
    for data in (table, pa.concat_tables([table, table]).combine_chunks().slice(4)):
        assert pa.table(rollpack.summarize(data)).equals(pa.table(rollpack.summarize(expected)))
        assert packed(data, token_columns=["logprobs"]) == packed(expected, token_columns=["logprobs"])


def test_fixed_size_lists_of_nothing():
    """arrow's own cast makes too few rows of them; the fuzzer found that."""
    masks = pa.FixedSizeListArray.from_buffers(pa.list_(pa.int8(), 0), 2, [None], children=[pa.array([], pa.int8())])
    summary = rollpack.summarize(pa.table({"tokens": [[1], [2, 3]], "loss_mask": masks}))
    assert summary.column("response_length").tolist() == [0, 0]


ID_TYPES = {
    "large string": lambda: pa.array(IDS, pa.large_string()),
    "string view": lambda: pa.array(IDS, pa.string_view()),
    "dictionary": lambda: pa.array(IDS).dictionary_encode(),
    "dictionary of int8 keys": lambda: pa.DictionaryArray.from_arrays(pa.array([0, 0, 1, 2], pa.int8()), [IDS[0], *IDS[2:]]),
    "run-end encoded": lambda: pa.RunEndEncodedArray.from_arrays([2, 3, 4], [IDS[0], *IDS[2:]]),
    "run-end encoded int16": lambda: pa.RunEndEncodedArray.from_arrays(pa.array([2, 3, 4], pa.int16()), [IDS[0], *IDS[2:]]),
    "binary": lambda: pa.array(IDS).cast(pa.binary()),
    "large binary": lambda: pa.array(IDS).cast(pa.large_binary()),
    "binary view": lambda: pa.array([i.encode() for i in IDS], pa.binary_view()),
    "dictionary of binary": lambda: pa.array(IDS).cast(pa.binary()).dictionary_encode(),
    "fixed-size binary": lambda: pa.array([i.encode().ljust(60)[:60] for i in IDS], pa.binary(60)),
    "dictionary of integers": lambda: pa.array([5, 5, -1, 2**60]).dictionary_encode(),
    "run-end encoded integers": lambda: pa.RunEndEncodedArray.from_arrays([2, 3, 4], [5, -1, 2**60]),
}


@pytest.mark.parametrize("make", ID_TYPES.values(), ids=ID_TYPES)
def test_every_id_tells_the_same_rollouts_apart(make):
    ids = make()
    table = table_of(ids=ids).append_column("group_index", ids)
    expected = rollpack.plan(table_of(), micro_batch_size=4).to_arrow()
    for data in (table, [table.slice(0, 1), table.slice(1)], pa.concat_tables([table.slice(2), table]).slice(2)):
        summary = rollpack.summarize(data, groups=True)
        for name in ("rollout_id", "group_index"):
            found = [str(i).encode() if isinstance(i, str | int) else i for i in pa.table(summary)[name].to_pylist()]
            assert found == [str(i).encode() if isinstance(i, str | int) else i for i in ids.to_pylist()]
        assert rollpack.plan(summary, micro_batch_size=4).to_arrow() == expected


@pytest.mark.parametrize("kind", [pa.string_view(), pa.binary_view()])
def test_views_of_short_ids_that_a_cast_made(kind):
    """Pyarrow before 25 leaves them a buffer short, and crashes by itself where it hands that over."""
    ids = pa.array(["a", "a", None, "b"]).cast(pa.string() if kind == pa.string_view() else pa.binary()).cast(kind)
    table = table_of(ids=ids)
    for data in (
        table.slice(0, 2),
        [table.slice(3), table.slice(1, 1)],
        pa.concat_tables([table.slice(0, 2)] * 2).to_reader(),
    ):
        rows = pa.table(rollpack.summarize(data))["rollout_id"].to_pylist()
        assert [i if isinstance(i, str) else i.decode() for i in rows] in (["a"] * 2, ["b", "a"], ["a"] * 4)
    with pytest.raises(rollpack.DataError, match="null") as caught:
        rollpack.summarize(table)
    assert (caught.value.column, caught.value.row) == ("rollout_id", 2)


@pytest.mark.parametrize("kind", ["dictionary", "its values", "run-end encoded"])
def test_a_null_in_encoded_ids_is_found(kind):
    ids = {
        "dictionary": lambda: pa.DictionaryArray.from_arrays(pa.array([0, 1, None, 0]), ["a", "b"]),
        "its values": lambda: pa.DictionaryArray.from_arrays(pa.array([0, 0, 1, 0]), ["a", None]),
        "run-end encoded": lambda: pa.RunEndEncodedArray.from_arrays([2, 3, 4], ["a", None, "b"]),
    }[kind]()
    with pytest.raises(rollpack.DataError, match="null") as caught:
        rollpack.summarize(table_of(ids=ids))
    assert (caught.value.column, caught.value.row) == ("rollout_id", 2)


def test_group_columns_of_nulls_and_of_floats_have_their_own_messages():
    table = table_of()
    with pytest.raises(rollpack.DataError, match=r"row 0.*type Null.*leave it out"):
        rollpack.summarize(table.append_column("group_index", pa.nulls(4)), groups=True)
    gaps = pa.array([0.0, 0.0, None, 1.0])  # as pandas has it
    with pytest.raises(rollpack.SchemaError, match=r"Float64.*pandas.*fill the gaps"):
        rollpack.summarize(table.append_column("group_index", gaps), groups=True)


def test_a_null_row_over_values_adds_nothing_and_is_found():
    """The values under a null row are no tokens of anybody."""
    offsets = pa.array([0, 3, 7, 9], pa.int32())
    lists = pa.ListArray.from_arrays(offsets, pa.array(range(9), pa.int32()), mask=pa.array([False, True, False]))
    table = pa.table({"tokens": lists, "response_length": [1, 1, 1]})
    for data, row in ((table, 1), (table.slice(1), 0)):
        with pytest.raises(rollpack.DataError, match="null") as caught:
            rollpack.summarize(data)
        assert (caught.value.column, caught.value.row) == ("tokens", row)
    without = [table.slice(0, 1), table.slice(2)]
    assert rollpack.summarize(without).column("total_length").tolist() == [3, 2]
    plan = rollpack.plan(without, micro_batch_size=2)
    assert sorted(t for m in rollpack.pack(without, plan) for t in m.tokens.tolist()) == [0, 1, 2, 7, 8]


@pytest.mark.parametrize("offset", range(9))
def test_boolean_masks_have_bit_offsets(offset):
    bits = pa.array([True] * offset + [bool(v) for mask in MASKS for v in mask] + [True] * 3)
    starts = np.cumsum([offset, *map(len, MASKS)])
    for masks in (
        pa.ListArray.from_arrays(pa.array(starts, pa.int32()), bits),
        pa.ListArray.from_arrays(pa.array(starts - offset, pa.int32()), bits.slice(offset)),
    ):
        table = table_of().set_column(1, "loss_mask", masks)
        assert rollpack.summarize(table).column("mask_sum").tolist() == SUMS
        assert rollpack.summarize(table.slice(1)).column("mask_sum").tolist() == SUMS[1:]
        assert packed(table) == packed(table_of())


def test_what_is_wrong_in_later_batches_is_found():
    good = table_of()
    bad = good.set_column(1, "loss_mask", pa.array([[1, 0], [1, 1, 0], [0], [1, 1, 1, 7]], pa.list_(pa.int8())))
    for data in ([good, bad], pa.concat_tables([good, bad]), pa.concat_tables([good, good.slice(0, 0), bad]).to_reader()):
        with pytest.raises(rollpack.DataError) as caught:
            rollpack.summarize(data)
        assert (caught.value.column, caught.value.row) == ("loss_mask", 7)


def test_offsets_beyond_2_to_the_31_do_not_overflow(tmp_path):
    """The values are a sparse file: only what the rows have takes room."""
    first = 2**31 + 10
    path = tmp_path / "values"
    with path.open("wb") as file:
        os.truncate(file.fileno(), first + 100)
    values = np.memmap(path, np.uint8, "r+")
    values[first : first + 12] = np.arange(12)
    values.flush()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        child = pa.Array.from_buffers(pa.uint8(), first + 100, [None, pa.py_buffer(mapped)])
        tokens = pa.LargeListArray.from_arrays(pa.array([first, first + 3, first + 5]), child)
        masks = pa.LargeListArray.from_arrays(pa.array([first, first + 2, first + 2]), child)
        table = pa.table({"tokens": tokens, "loss_mask": masks})
        assert pa.table(rollpack.summarize(table)).to_pydict() == {
            "row": [0, 1],
            "total_length": [3, 2],
            "response_length": [2, 0],
            "mask_sum": [1, 0],
            "rollout_id": [0, 1],
        }
        (micro_batch,) = rollpack.pack(table, rollpack.plan(table, micro_batch_size=2))
        assert sorted(micro_batch.tokens.tolist()) == [0, 1, 2, 3, 4]
        del child, tokens, masks, table


def shifted(array, by):
    """The same array, its buffers at odd addresses."""
    buffers = [None if b is None else pa.py_buffer(b"\0" * by + b.to_pybytes()).slice(by) for b in array.buffers()]
    if not pa.types.is_nested(array.type):
        return pa.Array.from_buffers(array.type, len(array), buffers)
    values = shifted(array.values, by)
    return pa.Array.from_buffers(array.type, len(array), buffers[:2], children=[values])


@pytest.mark.parametrize("by", [1, 2, 3, 4])
def test_misaligned_buffers_are_read_or_refused(by):
    table = table_of(ids=pa.array([1, 1, 2, 3]))
    columns = {name: shifted(table[name].combine_chunks(), by) for name in table.column_names}
    assert packed(pa.table(columns)) == packed(table)
    assert rollpack.summarize(pa.table(columns)).column("rollout_id").tolist() == [1, 1, 2, 3]
    columns["rollout_id"] = shifted(pa.array(IDS), by)
    if by == 4:
        assert rollpack.summarize(pa.table(columns)).column("rollout_id").tolist() == IDS
    else:
        with pytest.raises(rollpack.DataError, match=r"rollout_id.*not aligned"):
            rollpack.summarize(pa.table(columns))


ELEMENTS = [pa.int8(), pa.uint16(), pa.int32(), pa.int64(), pa.uint64()]
ELEMENTS_OF_MASKS = [pa.bool_(), pa.uint8(), pa.int64(), pa.float32(), pa.float64()]


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_types_slices_chunks_and_nulls(data):
    """Whatever the types, the chunks and the nulls of rows outside the slice: the answer is Python's."""
    rows = data.draw(
        st.lists(
            st.tuples(st.lists(st.integers(0, 127), min_size=1, max_size=5), st.integers(0, 5), st.text(max_size=3)),
            max_size=9,
        )
    )
    rows = [(tokens, min(response, len(tokens) - 1), i) for tokens, response, i in rows]
    masks = [data.draw(st.lists(st.integers(0, 1), min_size=n, max_size=n)) for _, n, _ in rows]
    nulls = data.draw(st.sets(st.integers(0, 9)))
    make = st.sampled_from(sorted(set(LISTS) - {"list without nulls, child called l"} if nulls else LISTS))
    token_type, mask_type = data.draw(st.sampled_from(ELEMENTS)), data.draw(st.sampled_from(ELEMENTS_OF_MASKS))
    encode = data.draw(st.sampled_from(sorted(set(ID_TYPES) & {"large string", "string view", "dictionary", "binary"})))
    values = {
        "tokens": LISTS[data.draw(make)]([t for t, _, _ in rows], token_type),
        "loss_mask": LISTS[data.draw(make)](
            [[bool(v) for v in m] if mask_type == pa.bool_() else m for m in masks], mask_type
        ),
        "response_length": pa.array([n for _, n, _ in rows], data.draw(st.sampled_from(ELEMENTS))),
        "rollout_id": {
            "large string": lambda a: a.cast(pa.large_string()),
            "string view": lambda a: a.cast(pa.string_view()),
            "dictionary": lambda a: a.dictionary_encode(),
            "binary": lambda a: a.cast(pa.binary()),
        }[encode](pa.array([i for _, _, i in rows], pa.string())),
    }
    where = {name: data.draw(st.sets(st.sampled_from(sorted(nulls)))) if nulls else set() for name in values}
    for name, rows_of_nulls in where.items():
        array = values[name]
        if rows_of_nulls and not pa.types.is_list_view(array.type) and not pa.types.is_large_list_view(array.type):
            keep = pa.array([i not in rows_of_nulls for i in range(len(rows))], pa.bool_())
            if not pa.types.is_dictionary(array.type):
                values[name] = pa.array(
                    [v if k else None for v, k in zip(array.to_pylist(), keep.to_pylist(), strict=True)], array.type
                )
            else:
                where[name] = set()
        else:
            where[name] = set()
    table = pa.table(values)
    start, stop = sorted([data.draw(st.integers(0, len(rows))), data.draw(st.integers(0, len(rows)))])
    cuts = sorted(data.draw(st.lists(st.integers(start, stop), max_size=3)))
    parts = [table.slice(a, b - a) for a, b in zip([start, *cuts], [*cuts, stop], strict=True)]
    form = data.draw(st.sampled_from(["parts", "table", "reader"]))
    source = {
        "parts": lambda: parts,
        "table": lambda: pa.concat_tables(parts),
        "reader": lambda: pa.concat_tables(parts).to_reader(),
    }
    bad = sorted(i - start for i in range(start, stop) if any(i in there for there in where.values()))
    if bad or start == stop:
        with pytest.raises(rollpack.DataError) as caught:
            rollpack.summarize(source[form]())
        assert caught.value.row == (bad[0] if bad else None)
        return
    summary = rollpack.summarize(source[form]())
    assert summary.column("total_length").tolist() == [len(t) for t, _, _ in rows[start:stop]]
    assert summary.column("mask_sum").tolist() == [sum(m) for m in masks[start:stop]]
    assert [i.decode() if isinstance(i, bytes) else i for i in summary.column("rollout_id")] == [
        i for *_, i in rows[start:stop]
    ]
    plan = rollpack.plan(summary, micro_batch_size=len(rows))
    (micro_batch,) = rollpack.pack(parts, plan)
    order = micro_batch.rows.tolist()
    assert micro_batch.tokens.tolist() == [t for row in order for t in rows[start + row][0]]


@pytest.mark.parametrize("name", sorted(ID_TYPES))
def test_empty_slices_are_as_good_as_any(name):
    """They may begin anywhere in their buffers; readers of filtered data hand them over."""
    table = table_of(ids=ID_TYPES[name]())
    batch = table.combine_chunks().to_batches()[0]
    for at in range(5):
        batches = [batch.slice(at, 0), batch.slice(0, 2), batch.slice(at, 0), batch.slice(2)]
        found = rollpack.summarize(pa.RecordBatchReader.from_batches(batch.schema, iter(batches)))
        assert found.column("mask_sum").tolist() == SUMS
        assert packed(batches) == packed(table)
    ids = pa.chunked_array([batch["rollout_id"].slice(1, 0), batch["rollout_id"]])
    chunked = table.set_column(table.schema.get_field_index("rollout_id"), "rollout_id", ids)
    assert pa.table(rollpack.summarize(chunked)).equals(pa.table(rollpack.summarize(table)))
