"""The same rollouts give the same summary, however they arrive."""

import json
import os
from functools import partial
from pathlib import Path

import datasets
import duckdb
import fsspec
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.feather
import pyarrow.fs
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest
import torch

import rollpack
from rollpack._sources import Source, Watch
from rollpack.packing import Packer

DATA = {
    "tokens": [[1, 2, 3], [4, 5, 6, 7], [8, 9], [10, 11, 12, 13, 14], [15, 16, 17]],
    "response_length": [2, 3, 1, 4, 2],
    "loss_mask": [[1, 0], [1, 1, 0], [0], [1, 1, 1, 0], [0, 1]],
    "rollout_id": [7, 7, 9, -1, 2**40],
    "group_index": [0, 0, 0, 1, 1],
    "reward": [0.5, None, 1.0, 0.0, None],
}
SUMMARY = {
    "row": [0, 1, 2, 3, 4],
    "total_length": [3, 4, 2, 5, 3],
    "response_length": [2, 3, 1, 4, 2],
    "mask_sum": [1, 2, 0, 3, 1],
    "rollout_id": [7, 7, 9, -1, 2**40],
    "group_index": [0, 0, 0, 1, 1],
}
TABLE = pa.table(DATA)
LISTS = ("tokens", "loss_mask")
ROWS = TABLE.to_pylist()


def cut(*lengths):
    """The table in batches of these lengths."""
    batches, start = [], 0
    for length in lengths:
        batches += TABLE.slice(start, length).to_batches() or [pa.RecordBatch.from_pylist([], TABLE.schema)]
        start += length
    return batches


def chunked_differently():
    """Every column has chunk boundaries of its own."""
    cuts = [(2, 3), (5,), (1, 1, 3), (4, 1), (1, 4), (3, 2)]
    columns = []
    for name, lengths in zip(TABLE.column_names, cuts, strict=True):
        column, chunks, start = TABLE[name], [], 0
        for length in lengths:
            chunks += column.slice(start, length).chunks
            start += length
        columns.append(pa.chunked_array(chunks))
    return pa.table(columns, names=TABLE.column_names)


def sliced():
    """The rows as a slice of a larger table, with offsets into every buffer."""
    return pa.concat_tables([TABLE.slice(3), TABLE, TABLE.slice(0, 2)]).combine_chunks().slice(2, 5)


def large_lists():
    fields = [
        pa.field(f.name, pa.large_list(pa.int32())) if f.name in LISTS else pa.field(f.name, f.type) for f in TABLE.schema
    ]
    return TABLE.cast(pa.schema(fields))


def hugging_face_selected():
    rows = datasets.Dataset.from_dict({name: values[::-1] + values[:1] for name, values in DATA.items()})
    return rows.select([4, 3, 2, 1, 0])


#: Some versions of DuckDB close a connection that only a relation still knows.
CONNECTIONS = []


def duckdb_connection():
    CONNECTIONS.append(duckdb.connect())
    return CONNECTIONS[-1]


def duckdb_relation():
    return duckdb_connection().from_arrow(TABLE)


def duckdb_reader():
    """Its list child is called "l"."""
    connection = duckdb_connection()
    connection.register("rollouts", TABLE)
    relation = connection.sql("select * from rollouts order by tokens[1]")
    return relation.to_arrow_reader() if hasattr(relation, "to_arrow_reader") else relation.fetch_arrow_reader()


def numpy_objects(values):
    """As verl keeps what is no tensor: an array of objects, each an array or a number."""
    array = np.empty(len(values), object)
    array[:] = [np.array(value) if isinstance(value, list) else value for value in values]
    return array


class Tensors(pa.ExtensionType):
    """Ray Data's arrays of one shape: a list with a shape in its metadata."""

    def __init__(self, value_type, large):
        storage = pa.large_list(value_type) if large else pa.list_(value_type)
        super().__init__(storage, "ray.data.arrow_tensor_v2" if large else "ray.data.arrow_tensor")

    def __arrow_ext_serialize__(self):
        return b"[3]"

    @classmethod
    def __arrow_ext_deserialize__(cls, storage_type, _):
        return cls(storage_type.value_type, pa.types.is_large_list(storage_type))


class RaggedTensors(pa.ExtensionType):
    """Ray Data's arrays of any shape: a struct of flat values and shape."""

    def __init__(self, value_type):
        storage = pa.struct([("data", pa.large_list(value_type)), ("shape", pa.list_(pa.int64()))])
        super().__init__(storage, "ray.data.arrow_variable_shaped_tensor")

    def __arrow_ext_serialize__(self):
        return b"1"

    @classmethod
    def __arrow_ext_deserialize__(cls, storage_type, _):
        return cls(storage_type.field("data").type.value_type)


def ragged(lists, shapes=None):
    type_ = RaggedTensors(pa.int64())
    rows = [
        None if values is None else {"data": values, "shape": [len(values)] if shapes is None else shape}
        for values, shape in zip(lists, shapes or lists, strict=True)
    ]
    return pa.ExtensionArray.from_storage(type_, pa.array(rows, type_.storage_type))


def ray_block():
    """What ``map_batches(batch_format="pyarrow")`` hands over, a column of nothing but nulls with it."""
    table = TABLE.set_column(0, "tokens", ragged(DATA["tokens"])).set_column(2, "loss_mask", ragged(DATA["loss_mask"]))
    return table.append_column("teacher", pa.nulls(5)).combine_chunks()


def ipc_buffer():
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, TABLE.schema, options=pa.ipc.IpcWriteOptions(compression="lz4")) as writer:
        writer.write_table(TABLE, max_chunksize=2)
    return sink.getvalue()


def parquet_buffer():
    sink = pa.BufferOutputStream()
    pq.write_table(TABLE, sink, row_group_size=2)
    return pa.BufferReader(sink.getvalue())


def in_memory(name, fsspec_too=True):
    """The table as a Parquet file in a file system of memory: pyarrow's, or fsspec's, which is Python."""
    if not fsspec_too:
        file_system, _ = pyarrow.fs.FileSystem.from_uri("mock:///")
    else:
        file_system = fsspec.filesystem("memory")
    with (file_system.open_output_stream if not fsspec_too else lambda p: file_system.open(p, "wb"))(name) as sink:
        pq.write_table(TABLE, sink, row_group_size=2)
    return file_system


class Capsule:
    """What speaks only the array half of the protocol."""

    def __init__(self, batch):
        self._batch = batch

    def __arrow_c_array__(self, requested_schema=None):
        return self._batch.__arrow_c_array__(requested_schema)


OBJECTS = {
    "table": lambda: TABLE,
    "record batch": lambda: TABLE.to_batches()[0],
    "reader": lambda: TABLE.to_reader(max_chunksize=2),
    "reader of a generator": lambda: pa.RecordBatchReader.from_batches(TABLE.schema, (b for b in cut(1, 0, 3, 1))),
    "batches, some empty": lambda: pa.Table.from_batches(cut(0, 2, 0, 0, 3, 0)),
    "columns chunked differently": chunked_differently,
    "slice": sliced,
    "slice of a chunked table": lambda: pa.concat_tables([TABLE.slice(3), TABLE]).slice(2),
    "large lists": large_lists,
    "list of tables": lambda: [TABLE.slice(0, 2), TABLE.slice(2, 0), TABLE.slice(2, 3)],
    "list of mixed": lambda: [TABLE.slice(0, 1), pl.DataFrame(DATA).slice(1, 2), TABLE.slice(3).to_batches()[0]],
    "tuple of a reader": lambda: (TABLE.to_reader(),),
    "list of dicts": lambda: ROWS,
    "pyarrow dataset": lambda: pads.dataset([TABLE.slice(0, 3), TABLE.slice(3)]),
    "pyarrow scanner": lambda: pads.dataset(TABLE).scanner(),
    "polars": lambda: pl.DataFrame(DATA),
    "polars in chunks": lambda: pl.concat([pl.DataFrame(DATA).head(3), pl.DataFrame(DATA).tail(2)], rechunk=False),
    "pandas with Arrow columns": lambda: TABLE.to_pandas(types_mapper=pd.ArrowDtype),
    "pandas with object columns": lambda: pd.DataFrame(DATA),
    "pandas with numpy arrays and an index": lambda: TABLE.to_pandas().set_index(pd.Index([9, 8, 7, 6, 5])),
    "duckdb": duckdb_relation,
    "duckdb reader": duckdb_reader,
    "dict of lists": lambda: DATA,
    "dict of numpy objects": lambda: {name: numpy_objects(values) for name, values in DATA.items()},
    "numpy array of dicts": lambda: np.array(ROWS, object),
    "list of dicts of numpy arrays": lambda: [
        {name: np.array(value) if isinstance(value, list) else value for name, value in row.items()} for row in ROWS
    ],
    "ray block": ray_block,
    "parquet file object": lambda: pq.ParquetFile(parquet_buffer()),
    "Arrow file reader": lambda: pa.ipc.open_file(ipc_buffer()),
    "dataset on fsspec": lambda: pads.dataset("five.parquet", filesystem=in_memory("five.parquet")),
    "parquet file object on fsspec": lambda: pq.ParquetFile(in_memory("six.parquet").open("six.parquet")),
    "dataset on pyarrow.fs": lambda: pads.dataset("mem.parquet", filesystem=in_memory("mem.parquet", False)),
    "only an array capsule": lambda: Capsule(TABLE.to_batches()[0]),
    "polars sliced": lambda: pl.concat([pl.DataFrame(DATA)] * 2).slice(5, 5),
    "hugging face": lambda: datasets.Dataset.from_dict(DATA),
    "hugging face selected": hugging_face_selected,
    "hugging face with numpy format": lambda: datasets.Dataset.from_dict(DATA).with_format("numpy"),
}


@pytest.mark.parametrize("make", OBJECTS.values(), ids=OBJECTS)
def test_every_object_gives_the_same_summary(make):
    summary = pa.table(rollpack.summarize(make(), groups=True))
    assert summary.to_pydict() == SUMMARY
    assert summary["rollout_id"].type == pa.int64()


@pytest.mark.parametrize("make", OBJECTS.values(), ids=OBJECTS)
def test_every_object_can_be_planned(make):
    expected = rollpack.plan(TABLE, loss_aggregation="prompt_mean", max_tokens_per_gpu=8)
    assert rollpack.plan(make(), loss_aggregation="prompt_mean", max_tokens_per_gpu=8).id == expected.id


ONE_SHOT = {"reader", "reader of a generator", "tuple of a reader", "pyarrow scanner", "duckdb reader"}
if tuple(map(int, duckdb.__version__.split(".")[:2])) < (1, 3):
    ONE_SHOT.add("duckdb")  # a relation gives its rows once, and then an error


@pytest.mark.parametrize("name", sorted(OBJECTS.keys() - ONE_SHOT))
def test_every_object_that_can_be_read_twice_is_planned_and_packed(name):
    data = OBJECTS[name]()
    plan = rollpack.plan(data, micro_batch_size=2)
    packed = list(rollpack.pack(data, plan, sample_columns=["reward"]))
    rows = np.concatenate([m.rows for m in packed]).tolist()
    assert sorted(rows) == [0, 1, 2, 3, 4]
    tokens = np.concatenate([m.tokens for m in packed]).tolist()
    assert tokens == [token for row in rows for token in DATA["tokens"][row]]
    rewards = np.concatenate([m.sample_columns["reward"] for m in packed])
    expected = [np.nan if DATA["reward"][row] is None else DATA["reward"][row] for row in rows]
    np.testing.assert_array_equal(rewards, np.array(expected, np.float32))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_shuffled_hugging_face_dataset_is_read_in_its_new_order(seed):
    shuffled = datasets.Dataset.from_dict(DATA).shuffle(seed=seed)
    firsts = [tokens[0] for tokens in DATA["tokens"]]
    order = [firsts.index(tokens[0]) for tokens in shuffled["tokens"]]
    assert order != [0, 1, 2, 3, 4]
    summary = pa.table(rollpack.summarize(shuffled, groups=True)).to_pydict()
    assert summary["row"] == [0, 1, 2, 3, 4]
    for name in ("total_length", "response_length", "mask_sum", "rollout_id", "group_index"):
        assert summary[name] == [SUMMARY[name][i] for i in order]


def write_stream(path, table):
    with pa.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)


def write_file(path, table, **options):
    with pa.ipc.new_file(path, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table, max_chunksize=2)


def write_json(path, table):
    path.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))


FILES = {
    "parquet": (".parquet", lambda path, table: pq.write_table(table, path)),
    "parquet in row groups": (".parquet", lambda path, table: pq.write_table(table, path, row_group_size=2)),
    "parquet by duckdb": (".parquet", lambda path, table: duckdb_connection().from_arrow(table).write_parquet(str(path))),
    "parquet by polars": (".parquet", lambda path, table: pl.from_arrow(table).write_parquet(path)),
    "Arrow file": (".arrow", write_file),
    "Arrow file, compressed": (".arrow", lambda path, table: write_file(path, table, compression="zstd")),
    "Arrow stream": (".arrows", write_stream),
    "Arrow stream, as Hugging Face caches it": (".arrow", write_stream),
    "feather": (".feather", lambda path, table: pyarrow.feather.write_feather(table, str(path))),
    "JSON lines": (".jsonl", write_json),
    "parquet without a telling name": (".dat", lambda path, table: pq.write_table(table, path)),
}


@pytest.mark.parametrize(("suffix", "write"), FILES.values(), ids=FILES)
def test_every_kind_of_file_gives_the_same_summary(tmp_path, suffix, write):
    whole = tmp_path / f"whole{suffix}"
    write(whole, TABLE)
    for path in (whole, str(whole)):
        assert pa.table(rollpack.summarize(path, groups=True)).to_pydict() == SUMMARY
    write(tmp_path / f"part-0{suffix}", TABLE.slice(0, 2))
    write(tmp_path / f"part-1{suffix}", TABLE.slice(2))
    glob = str(tmp_path / f"part-*{suffix}")
    assert pa.table(rollpack.summarize(glob, groups=True)).to_pydict() == SUMMARY
    parts = [tmp_path / f"part-0{suffix}", TABLE.slice(2)]
    assert pa.table(rollpack.summarize(parts, groups=True)).to_pydict() == SUMMARY


@pytest.mark.parametrize(("suffix", "write"), FILES.values(), ids=FILES)
def test_a_path_is_planned_and_packed(tmp_path, suffix, write):
    write(tmp_path / f"a{suffix}", TABLE.slice(0, 2))
    write(tmp_path / f"b{suffix}", TABLE.slice(2))
    glob = str(tmp_path / f"*{suffix}")
    plan = rollpack.plan(glob, micro_batch_size=5)
    (micro_batch,) = rollpack.pack(glob, plan)
    assert micro_batch.tokens.tolist() == list(range(1, 18))


def test_a_glob_is_read_in_the_order_of_the_names(tmp_path):
    for name, row in {"c": 2, "a": 0, "b": 1}.items():
        pq.write_table(TABLE.slice(row, 1), tmp_path / f"{name}.parquet")
    assert rollpack.summarize(str(tmp_path / "*.parquet")).column("total_length").tolist() == [3, 4, 2]


def test_a_glob_finds_files_at_any_depth(tmp_path):
    (tmp_path / "x" / "y").mkdir(parents=True)
    pq.write_table(TABLE.slice(0, 2), tmp_path / "x" / "0.parquet")
    pq.write_table(TABLE.slice(2), tmp_path / "x" / "y" / "1.parquet")
    assert len(rollpack.summarize(f"{tmp_path}/**/*.parquet")) == 5


def test_a_file_is_found_whose_name_looks_like_a_glob(tmp_path):
    path = tmp_path / "step[1].parquet"
    pq.write_table(TABLE, path)
    assert len(rollpack.summarize(path)) == 5


def test_the_row_of_a_fault_is_counted_over_all_files(tmp_path):
    bad = TABLE.slice(2).set_column(1, "response_length", pa.array([1, 99, 2]))
    pq.write_table(TABLE.slice(0, 2), tmp_path / "0.parquet", row_group_size=1)
    pq.write_table(bad, tmp_path / "1.parquet", row_group_size=1)
    with pytest.raises(rollpack.DataError, match="99") as caught:
        rollpack.summarize(str(tmp_path / "*.parquet"))
    assert (caught.value.column, caught.value.row) == ("response_length", 3)


def test_a_json_line_may_be_long(tmp_path):
    """Long rollouts are what this is for: a line of half a million tokens takes several megabytes."""
    path = tmp_path / "long.jsonl"
    lengths = [10, 500_000, 3]
    with path.open("w") as file:
        for length in lengths:
            file.write(json.dumps({"tokens": [100_000] * length, "response_length": 2}) + "\n")
    assert rollpack.summarize(path).column("total_length").tolist() == lengths


def test_json_ids_that_look_like_dates_stay_strings(tmp_path):
    path = tmp_path / "dates.jsonl"
    ids = ["2026-01-31", "2026-01-31T10:00:00", "2026-02-01"]
    path.write_text("".join(json.dumps({"tokens": [1, 2], "response_length": 1, "rollout_id": i}) + "\n" for i in ids))
    assert rollpack.summarize(path).column("rollout_id").tolist() == ids


@pytest.mark.parametrize("form", ["dicts", "JSON lines"])
def test_a_mask_that_only_later_rows_have_is_not_lost(tmp_path, form):
    """Without its mask the second row would be trained on everything, without a word."""
    rows = [{"tokens": [1, 2], "response_length": 1}, {"tokens": [1, 2], "response_length": 1, "loss_mask": [0]}]
    data = rows
    if form == "JSON lines":
        data = tmp_path / "rows.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(rollpack.DataError, match="null") as caught:
        rollpack.summarize(data)
    assert (caught.value.column, caught.value.row) == ("loss_mask", 0)


def test_parts_without_the_same_columns_are_refused():
    with pytest.raises(rollpack.RollpackError, match="loss_mask"):
        rollpack.summarize([TABLE, TABLE.drop_columns(["loss_mask"])])
    with pytest.raises(rollpack.RollpackError, match="rollout_id"):
        rollpack.summarize([TABLE.drop_columns(["rollout_id"]), TABLE])
    with pytest.raises(rollpack.RollpackError, match="rollout_id"):
        rollpack.summarize([TABLE, TABLE.set_column(3, "rollout_id", pa.array(list("abcde")))])


def odd_frame(library):
    """A frame with a column that no Arrow type fits, and that nobody asks for."""
    odd = [1, "a", object(), {"b": 2}, None]
    if library is pd:
        return pd.DataFrame(DATA | {"odd": pd.Series(odd, dtype=object)})
    return pl.DataFrame(DATA).with_columns(pl.Series("odd", odd, dtype=pl.Object))


@pytest.mark.parametrize("library", [pd, pl], ids=["pandas", "polars"])
def test_a_frame_may_hold_what_is_not_read_and_no_arrow(library):
    frame = odd_frame(library)
    assert pa.table(rollpack.summarize(frame, groups=True)).to_pydict() == SUMMARY
    plan = rollpack.plan(frame, micro_batch_size=5)
    (micro_batch,) = rollpack.pack(frame, plan)
    assert micro_batch.tokens.tolist() == list(range(1, 18))


def test_a_frame_of_mixed_types_in_the_group_column_is_read_without_groups():
    frame = pd.DataFrame(DATA | {"group_index": pd.Series([1, "a", 2.5, None, {}], dtype=object)})
    assert len(rollpack.summarize(frame)) == 5


@pytest.mark.parametrize("kind", ["parquet", "table", "dataset", "stream"])
def test_columns_that_are_not_read_may_be_of_any_type(tmp_path, kind):
    odd = pa.array([[{"a": 1}], None, [], [{"a": None}], None], pa.list_(pa.struct([("a", pa.int8())])))
    table = TABLE.append_column("meta", odd).append_column("when", pa.array([None] * 5, pa.timestamp("us")))
    data = table
    if kind == "parquet":
        data = tmp_path / "odd.parquet"
        pq.write_table(table, data)
    elif kind == "dataset":
        data = pads.dataset(table)
    elif kind == "stream":
        data = table.to_reader()
    assert pa.table(rollpack.summarize(data, groups=True)).to_pydict() == SUMMARY


def test_a_reader_that_was_read_before_is_an_error_that_says_so():
    reader = TABLE.to_reader()
    rollpack.summarize(reader)
    with pytest.raises(rollpack.DataError, match="reader") as caught:
        rollpack.summarize(reader)
    assert (caught.value.column, caught.value.row) == (None, None)


def test_what_a_reader_raises_reaches_the_caller():
    def batches():
        yield TABLE.to_batches()[0]
        raise RuntimeError("the disk is on fire")

    reader = pa.RecordBatchReader.from_batches(TABLE.schema, batches())
    with pytest.raises(rollpack.DataError, match="the disk is on fire"):
        rollpack.summarize(reader)


def test_files_that_cannot_be_read_are_named(tmp_path):
    empty = tmp_path / "empty.parquet"
    empty.touch()
    text = tmp_path / "notes.txt"
    text.write_text("hello")
    cut_short = tmp_path / "short.parquet"
    pq.write_table(TABLE, cut_short)
    cut_short.write_bytes(cut_short.read_bytes()[:-40])
    bad_json = tmp_path / "bad.jsonl"
    bad_json.write_text('{"tokens": [1, 2}\n')
    arrow = tmp_path / "short.arrow"
    write_file(arrow, TABLE)
    arrow.write_bytes(arrow.read_bytes()[:-40])
    missing = tmp_path / "missing.parquet"
    for path in (empty, text, cut_short, bad_json, arrow, missing, tmp_path / "*.feather", tmp_path):
        with pytest.raises(rollpack.DataError) as caught:
            rollpack.summarize(path)
        assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (b'{"tokens": [1, 2}', "line 3: is no JSON: Expecting ',' delimiter at character 17"),
        (b'{"response_length": "one"}', "line 3: column 'response_length' holds a str, and in line 1 a number"),
        (b'[{"tokens": [1, 2]}]', "line 3: holds a list, and each line has to be one object"),
        (b"null", "line 3: holds null, and each line has to be one object"),
        (b'{"tokens": [1, 2], "rollout_id": \xff}', "line 3: is no UTF-8"),
    ],
)
def test_a_line_that_is_no_json_is_told_with_its_number(tmp_path, bad, said):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"tokens": [1, 2], "response_length": 1}\n\n' + bad + b"\n")
    with pytest.raises(rollpack.DataError) as caught:
        rollpack.summarize(path)
    assert f"{path}, {said}" in str(caught.value)


@pytest.mark.parametrize("before", [b"", b"\n\n  ", b"\xef\xbb\xbf", b" " * 100])
@pytest.mark.parametrize("after", [b"", b'\n{"tokens": [1, 2], "response_length": 1}\n'])
def test_a_file_that_begins_with_null_is_told(tmp_path, before, after):
    """pyarrow 26 dies of it."""
    path = tmp_path / "failed.jsonl"
    path.write_bytes(before + b"null" + after)
    with pytest.raises(rollpack.DataError, match=r"failed.jsonl, line \d: holds null, and each line has to be one object"):
        rollpack.summarize(path)


SHARD = {"tokens": [[1, 2, 3], [4, 5]], "loss_mask": [[1, 0], [1]]}


@pytest.mark.parametrize(
    "shard",
    [
        pa.table(SHARD),
        pa.record_batch(SHARD),
        pa.table(SHARD).to_reader(),
        pd.DataFrame(SHARD),
        pl.DataFrame(SHARD),
        SHARD,
        pa.table(SHARD).to_pylist(),
        [pa.table(SHARD)],
        "worker-0.parquet",
        Path("worker-0.parquet"),
        rollpack.summarize(SHARD),
    ],
    ids=lambda shard: type(shard).__name__,
)
def test_a_dict_of_shards_is_no_dict_of_columns(shard):
    plan = rollpack.plan(SHARD, micro_batch_size=2)  # of one source without a name
    for shards in ({"a": shard}, {0: shard, 1: shard}):
        for use in (rollpack.summarize, partial(rollpack.plan, micro_batch_size=1), partial(rollpack.pack, plan=plan)):
            with pytest.raises(rollpack.DataError, match=r"dict of data by name, .* summarize each, .*Summary.concat"):
                use(shards)


def test_a_dict_of_columns_is_one_whatever_they_are():
    tensors = {name: [torch.tensor(values) for values in column] for name, column in SHARD.items()}
    frame, table = pd.DataFrame(SHARD), pa.table(SHARD)
    for columns in (SHARD, tensors, {n: frame[n] for n in SHARD}, {n: table[n] for n in SHARD}, {**SHARD, "meta": [{}, {}]}):
        assert rollpack.summarize(columns).column("mask_sum").tolist() == [1, 1]


def test_a_column_whose_name_is_no_utf8_is_passed_over():
    name = os.fsdecode(b"\xff")
    for data in ({**SHARD, name: [1, 2]}, [{**row, name: 1} for row in pa.table(SHARD).to_pylist()]):
        assert rollpack.summarize(data).column("mask_sum").tolist() == [1, 1]
        assert len(list(rollpack.pack(data, rollpack.plan(data, micro_batch_size=1)))) == 2
    plan = rollpack.plan(SHARD, micro_batch_size=1)
    for asked, ask in {
        "columns": lambda: rollpack.summarize(SHARD, columns={"tokens": name}),
        "rollout_key": lambda: rollpack.summarize(SHARD, rollout_key=("group_index", name)),
        "token_columns": lambda: rollpack.pack(SHARD, plan, token_columns=[name]),
        "sample_columns": lambda: rollpack.pack(SHARD, plan, sample_columns=[name]),
    }.items():
        with pytest.raises(rollpack.SchemaError, match=rf"^{asked} holds '\\udcff', and no column has a name that UTF-8"):
            ask()


@pytest.mark.parametrize(
    "wrong", [["tokens"], [("tokens", "ids")], "tokens=ids", {"tokens": 3}, {1: "ids"}, {"tokens": ("ids",)}]
)
def test_columns_that_map_no_roles_to_names_are_told(wrong):
    says = r"^columns (is .* map roles to names, as {'tokens': 'input_ids'}|holds .* column names are strings)$"
    with pytest.raises(TypeError, match=says):
        rollpack.plan(SHARD, micro_batch_size=1, columns=wrong)


def test_what_is_no_data_is_told_what_would_be():
    for data in (5, None, {1: [[1]]}, [1, 2], object()):
        with pytest.raises((TypeError, rollpack.RollpackError), match="Arrow"):
            rollpack.summarize(data)
    with pytest.raises(TypeError, match="collect"):
        rollpack.summarize(pl.DataFrame(DATA).lazy())
    with pytest.raises(TypeError, match="train"):
        rollpack.summarize(datasets.DatasetDict(train=datasets.Dataset.from_dict(DATA)))
    with pytest.raises(TypeError, match="streaming"):
        rollpack.summarize(datasets.Dataset.from_dict(DATA).to_iterable_dataset())


def test_what_duckdb_makes_of_sums_is_told_with_the_fix():
    frame = duckdb_connection().sql("select [1, 2] as tokens, sum(x) as response_length from (values (1), (0)) t(x)")
    with pytest.raises(rollpack.SchemaError, match=r"Decimal.*sum\(\.\.\.\)::BIGINT") as caught:
        rollpack.summarize(frame)
    assert caught.value.column == "response_length"
    ids = TABLE.set_column(3, "rollout_id", pa.array([1] * 5).cast(pa.decimal128(38, 0)))
    with pytest.raises(rollpack.SchemaError, match="BIGINT"):
        rollpack.summarize(ids)


@pytest.mark.parametrize("large", [False, True])
def test_ray_arrays_of_one_shape_are_lists(large):
    type_ = Tensors(pa.int32(), large)
    tokens = pa.ExtensionArray.from_storage(type_, pa.array([[1, 2, 3], [4, 5, 6]], type_.storage_type))
    table = pa.table({"tokens": tokens, "response_length": [2, 1]})
    for data in (table, table.slice(1), pa.concat_tables([table, table])):
        assert rollpack.summarize(data).column("total_length").tolist() == [3] * data.num_rows


def test_ray_arrays_that_are_null_or_not_flat_are_refused():
    lengths = pa.array([1, 1, 1])
    for block in (ragged([[1, 2], None, [3, 4]]), ragged([[1, 2, 3, 4], [1, 2], None, [1]]).slice(1)):
        with pytest.raises(rollpack.DataError, match="null") as caught:
            rollpack.summarize(pa.table({"tokens": block, "response_length": lengths}))
        assert (caught.value.column, caught.value.row) == ("tokens", 1)
    flat = ragged([[1, 2, 3, 4], [1, 2], [3, 4]], shapes=[[2, 2], [2], [2]])
    with pytest.raises(rollpack.SchemaError, match="2 dimensions") as caught:
        rollpack.summarize(pa.table({"tokens": flat, "response_length": lengths}))
    assert caught.value.column == "tokens"


def test_a_mask_of_nothing_but_nulls_is_told_how_to_do_without():
    with pytest.raises(rollpack.SchemaError, match=r'columns=\{"loss_mask": None\}'):
        rollpack.summarize(TABLE.set_column(2, "loss_mask", pa.nulls(5)))


def test_python_values_that_are_no_column_are_named():
    for data in (ROWS, DATA):
        odd = [row | {"tokens": object()} for row in data] if data is ROWS else data | {"tokens": [object()] * 5}
        with pytest.raises(rollpack.SchemaError, match="tokens") as caught:
            rollpack.summarize(odd)
        assert caught.value.column == "tokens"
        unread = [row | {"status": object()} for row in data] if data is ROWS else data | {"status": [object()] * 5}
        assert len(rollpack.summarize(unread)) == 5
    with pytest.raises(rollpack.DataError, match="different lengths"):
        rollpack.summarize(DATA | {"rollout_id": [1, 2]})


class EachTimeOther:
    """A source that gives other rows each time it is read."""

    def __init__(self, *tables):
        self._tables = iter(tables)

    def __arrow_c_stream__(self, requested_schema=None):
        return next(self._tables).__arrow_c_stream__(requested_schema)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (TABLE.slice(1), "5 rows were planned, and the data now has 4"),
        (TABLE.take([1, 0, 2, 3, 4]), "was planned: plan again"),
        (TABLE.set_column(2, "loss_mask", pa.array([[1, 1], *DATA["loss_mask"][1:]])), "the mask sum is 2, and 1"),
    ],
)
def test_a_source_that_gives_other_rows_the_second_time_is_found_out(other, said):
    data = EachTimeOther(TABLE, other)
    plan = rollpack.plan(data, micro_batch_size=2)
    with pytest.raises(rollpack.DataError, match=said):
        list(rollpack.pack(data, plan))


@pytest.mark.parametrize("kind", ["parquet", "Arrow file", "Arrow file, compressed", "parquet object", "mixed", "watched"])
@pytest.mark.parametrize("rows", [[0], [4, 3], [2], [1, 4], [0, 1, 2, 3, 4], []])
def test_only_what_holds_the_rows_is_read(tmp_path, kind, rows):
    """Two files of pieces of two rows; the plan asks for some."""
    cuts = [(0, 3), (3, 2)]
    paths = [tmp_path / "0", tmp_path / "1"]
    for path, (start, length) in zip(paths, cuts, strict=True):
        if kind.startswith("Arrow"):
            write_file(path, TABLE.slice(start, length), compression="lz4" if kind.endswith("compressed") else None)
        else:
            pq.write_table(TABLE.slice(start, length), path, row_group_size=2)
    data = [pq.ParquetFile(path) for path in paths] if kind == "parquet object" else paths
    data = [TABLE.slice(0, 3), paths[1]] if kind == "mixed" else data
    source = Source.of(data).watched(Watch()) if kind == "watched" else Source.of(data)
    pieces = [[0, 1, 2], [3, 4]] if kind == "mixed" else [[0, 1], [2], [3, 4]]
    packer = Packer(source, {}, rows=np.array(rows, np.int64))
    expected = {i for i, piece in enumerate(pieces) if set(piece) & set(rows)} or {0}
    numbers = {(0, 0): 0, (1, 0): 1} if kind == "mixed" else {(0, 0): 0, (0, 1): 1, (1, 0): 2}
    assert {numbers[piece] for piece in packer._pieces} == expected
    plan = rollpack.plan(data, micro_batch_size=1, dp_size=5)
    held = {row for i in expected for row in pieces[i]}
    for rank in range(5):
        (row,) = plan.rows(0, rank, 0)
        if row in held:
            (packed,) = packer.rank(plan, 0, rank, 0)
            assert packed.tokens.tolist() == DATA["tokens"][row]
        else:
            with pytest.raises(rollpack.DataError):
                list(packer.rank(plan, 0, rank, 0))
    packer.hold(None)
    assert np.concatenate([m.tokens for d in range(5) for m in packer.rank(plan, 0, d, 0)]).size == 17


def test_a_stream_file_without_an_end_is_refused(tmp_path):
    """Cut between two batches it would be read as fewer rows, without a word."""
    path = tmp_path / "whole.arrows"
    write_stream(path, TABLE)
    assert len(rollpack.summarize(path)) == 5
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(rollpack.DataError, match="cut short"):
        rollpack.summarize(path)


def test_what_stops_a_file_is_told_with_its_name(tmp_path):
    good, bad = tmp_path / "0.parquet", tmp_path / "1.parquet"
    pq.write_table(TABLE, good)
    pq.write_table(TABLE, bad, write_page_checksum=True, compression="none")
    content = bytearray(bad.read_bytes())
    content[content.index(np.arange(1, 5, dtype=np.int64).tobytes())] ^= 1
    bad.write_bytes(content)
    plan = rollpack.plan([good, good], micro_batch_size=10)
    for call in (lambda: rollpack.summarize([good, bad]), lambda: rollpack.pack([good, bad], plan)):
        with pytest.raises(rollpack.DataError, match="1.parquet: cannot be read as Parquet.*CRC"):
            call()


def test_ctrl_c_in_a_reader_is_ctrl_c():
    def batches():
        yield TABLE.to_batches()[0]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rollpack.summarize(pa.RecordBatchReader.from_batches(TABLE.schema, batches()))


@pytest.mark.parametrize("role", ["tokens", "response_length", "loss_mask", "rollout_id", "group_index"])
def test_an_index_named_as_a_role_is_told(role):
    frame = pd.DataFrame(DATA).drop(columns=role).rename_axis(index=role)
    with pytest.raises(rollpack.SchemaError, match=f"'{role}': is the index of this DataFrame") as error:
        rollpack.summarize(frame)
    assert error.value.column == role


def test_an_index_that_plays_a_role_is_not_lost():
    frame = pd.DataFrame(DATA).set_index("rollout_id")
    with pytest.raises(rollpack.SchemaError, match=r"'rollout_id': is the index of this DataFrame; pass frame.reset_index"):
        rollpack.summarize(frame)
    assert pa.table(rollpack.summarize(frame.reset_index(), groups=True)).to_pydict() == SUMMARY


def test_rows_may_hold_torch_tensors():
    import torch

    rows = [{name: torch.tensor(v) if isinstance(v, list) else v for name, v in row.items()} for row in ROWS]
    columns = {name: [torch.tensor(v) for v in values] for name, values in DATA.items() if name in LISTS}
    columns |= {name: torch.tensor(DATA[name]) for name in ("response_length", "rollout_id", "group_index")}
    for data in (rows, columns):
        assert pa.table(rollpack.summarize(data, groups=True)).to_pydict() == SUMMARY


def test_paths_that_are_no_files_are_told(tmp_path):
    with pytest.raises(rollpack.DataError, match="the path is empty"):
        rollpack.summarize("")
    with pytest.raises(rollpack.DataError, match=r"/dev/null is no regular file.*save it first"):
        rollpack.summarize("/dev/null")
    os.mkfifo(tmp_path / "a.parquet")  # reading it would wait for ever
    with pytest.raises(rollpack.DataError, match=r"a.parquet is no regular file.*save it first"):
        rollpack.summarize(tmp_path)


def test_polars_lists_without_any_value():
    """Their values are of type Null, to which polars gives a buffer that the format does not have."""
    plan = rollpack.plan(pl.DataFrame({"tokens": [[1, 2], [3]], "loss_mask": [[], []]}), micro_batch_size=2)
    assert (plan.steps[0].num_rollouts, plan.steps[0].num_tokens) == (2, 0)
