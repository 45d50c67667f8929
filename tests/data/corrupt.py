"""Corrupts data in many ways and reads it; run as a program, so that a crash is seen. Prints what became of each kind.

Each damaged input is *refused* by an error of rollpack, or *unchanged*: read as what was written, or *as stored*: a byte
that is a value was changed, and the summary and the packed arrays are those of the values that are in the file now (which
pyarrow validates whole). A format without checksums cannot tell more. Anything else is a failure.
"""

import io
import json
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq

import rollpack

ROWS = 24


def rollouts(seed=0):
    random = np.random.default_rng(seed)
    lengths = random.integers(2, 9, ROWS)
    tokens = [random.integers(0, 100, n).tolist() for n in lengths]
    masks = [random.integers(0, 2, n - 1).tolist() for n in lengths]
    return pa.table(
        {
            "tokens": pa.array(tokens, pa.list_(pa.int32())),
            "loss_mask": pa.array(masks, pa.large_list(pa.int8())),
            "response_length": pa.array([n - 1 for n in lengths], pa.int16()),
            "rollout_id": pa.array([f"rollout {i // 2}" for i in range(ROWS)]),
            "group_index": pa.array([i // 4 for i in range(ROWS)]),
        }
    )


def read(data):
    """All that rollpack says of data."""
    summary = rollpack.summarize(data, groups=True)
    plan = rollpack.plan(summary, micro_batch_size=5, dp_size=2)
    packed = [m for rank in range(2) for m in rollpack.pack(data, plan, dp_rank=rank)]
    return pa.table(summary).to_pydict(), {
        row: (m.tokens[a:b].tolist(), m.loss_mask[a:b].tolist())
        for m in packed
        for row, a, b in zip(m.rows.tolist(), m.cu_seqlens[:-1], m.cu_seqlens[1:], strict=True)
    }


def plain(table):
    """The same in Python, of a table that pyarrow found to be valid; None where it is not."""
    table.validate(full=True)
    # A column whose name was damaged is a column that is not there; some may be absent.
    rows = table.select([name for name in rollouts().column_names if name in table.column_names]).to_pylist()
    summary = {"row": list(range(len(rows))), "total_length": [], "response_length": [], "mask_sum": []}
    packed = {}
    for i, row in enumerate(rows):
        response = row.get("response_length", len(row.get("loss_mask", "")))
        mask = row.get("loss_mask", [1] * response)
        summary["total_length"].append(len(row["tokens"]))
        summary["response_length"].append(response)
        summary["mask_sum"].append(sum(mask))
        trained = [False] * (len(row["tokens"]) - response) + [bool(v) for v in mask]
        packed[i] = row["tokens"], [*trained[1:], False]
    summary["rollout_id"] = [row.get("rollout_id", i) for i, row in enumerate(rows)]
    summary["group_index"] = [row["group_index"] for row in rows]
    return summary, packed


def verdict(data, good, stored):
    """``stored``: gives the table as pyarrow reads it."""
    try:
        found = read(data)
    except rollpack.RollpackError:
        return "refused"
    if found == good:
        return "unchanged"
    assert found == plain(stored()), "a wrong number"
    return "as stored"


def parquet(table, **options):
    sink = io.BytesIO()
    pq.write_table(table, sink, row_group_size=10, **options)
    return sink.getvalue()


def arrow(table, make=pa.ipc.new_file, **options):
    sink = io.BytesIO()
    with make(sink, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table, max_chunksize=10)
    return sink.getvalue()


#: How each is written, and read by pyarrow; `pq.read_table` would ask the statistics, which rollpack does not.
FILES = {
    "parquet": (".parquet", lambda t: parquet(t, compression="none"), lambda p: pq.ParquetFile(p).read()),
    "parquet with checksums": (
        ".parquet",
        lambda t: parquet(t, write_page_checksum=True),
        lambda p: pq.ParquetFile(p).read(),
    ),
    "Arrow file": (".arrow", arrow, lambda p: pa.ipc.open_file(p).read_all()),
    "Arrow file, lz4": (".arrow", lambda t: arrow(t, compression="lz4"), lambda p: pa.ipc.open_file(p).read_all()),
    "Arrow stream": (".arrows", lambda t: arrow(t, pa.ipc.new_stream), lambda p: pa.ipc.open_stream(p).read_all()),
}


def flipped(name, folder, tries):
    """Random bytes changed, one to three at a time."""
    suffix, write, stored = FILES[name]
    whole = write(rollouts())
    good = plain(rollouts())
    path = Path(folder) / f"flipped{suffix}"
    random = np.random.default_rng(1)
    for trial in range(tries):
        damaged = bytearray(whole)
        for at in random.integers(0, len(whole), 1 if trial % 2 else random.integers(1, 4)):
            damaged[at] ^= int(random.integers(1, 256))
        path.write_bytes(damaged)
        yield verdict(path, good, lambda: stored(str(path)))


def described(name, folder, _tries):
    """Each byte that describes the data (a footer, a schema), in turn, with one bit changed: the 10 rows of a row group
    become 2, and a name takes in what follows it."""
    suffix, write, stored = FILES[name]
    whole, good = write(rollouts()), plain(rollouts())
    path = Path(folder) / f"described{suffix}"
    at = range(len(whole) - 1500, len(whole)) if name == "parquet with checksums" else range(1000)
    for byte in at:
        damaged = bytearray(whole)
        damaged[byte] ^= 0x10
        path.write_bytes(damaged)
        yield verdict(path, good, lambda: stored(str(path)))


def truncated(name, folder, tries):
    suffix, write, stored = FILES[name]
    whole = write(rollouts())
    good = plain(rollouts())
    path = Path(folder) / f"truncated{suffix}"
    for length in sorted(set(np.linspace(0, len(whole) - 1, tries).astype(int).tolist()) | {len(whole) - 1, len(whole) - 8}):
        path.write_bytes(whole[:length])
        found = verdict(path, good, lambda: stored(str(path)))
        assert found != "as stored", f"{length} of {len(whole)} bytes were read as other rows"
        yield found


def offsets(_name, _folder, _tries):
    """Each offset of each list and string column, in turn, set to each of many values, in memory that pyarrow has seen."""
    good = plain(rollouts())
    for column, kind in (("tokens", np.int32), ("loss_mask", np.int64), ("rollout_id", np.int32)):
        table = rollouts()
        array = table[column].combine_chunks()
        memory = np.frombuffer(array.buffers()[1].to_pybytes(), kind)[: ROWS + 1].copy()
        whole = memory.copy()
        buffers = [None, pa.py_buffer(memory), *array.buffers()[2:3]]
        children = [array.values] if pa.types.is_nested(array.type) else []
        buffers = buffers[:2] if children else buffers
        changed = pa.Array.from_buffers(array.type, ROWS, buffers, children=children)
        data = table.set_column(table.schema.get_field_index(column), column, changed)
        size = int(whole[-1])
        near = [-1, 0, 1, size, size + 1, size + 1000, 2**31 - 1, -(2**31)]
        far = [2**62, -(2**63), 2**63 - 1] if kind is np.int64 else []
        for at in range(ROWS + 1):
            for to in [*near, *far, int(whole[at]) + 1, int(whole[at]) - 1]:
                memory[:] = whole
                memory[at] = to
                # The lists of the neighbours change, and stay lists: then lengths disagree, or strings differ.
                for form in (data, Lax(data)) if column != "rollout_id" else (data,):
                    yield verdict(form, good, lambda data=data: data)
        memory[:] = whole
        assert verdict(data, good, None) == "unchanged"


class Lax:
    """pyarrow's own stream, which rollpack cannot ask to be validated."""

    def __init__(self, table):
        self._table = table

    def __arrow_c_stream__(self, requested_schema=None):
        return self._table.__arrow_c_stream__(requested_schema)


def nulls(_name, _folder, _tries):
    """Wrong numbers of nulls, with and without a bitmap; the values stay."""
    good = plain(rollouts())
    table = rollouts()
    bitmap = pa.py_buffer(b"\xff" * 16)
    for column in table.column_names:
        array = table[column].combine_chunks()
        children = [array.values] if pa.types.is_nested(array.type) else []
        buffers = array.buffers()[1 : 2 if children else None]
        for validity in (None, bitmap):
            for count in (-1, 0, 1, 5, ROWS, ROWS + 1, 2**40, -7):
                try:
                    changed = pa.Array.from_buffers(array.type, ROWS, [validity, *buffers], count, children=children)
                except pa.ArrowInvalid:
                    yield "refused by pyarrow"
                    continue
                data = table.set_column(table.schema.get_field_index(column), column, changed)
                for form in (data, Lax(data)):
                    found = verdict(form, good, lambda: table)
                    assert found != "as stored"
                    yield found


KINDS = {
    **{f"flipped {name}": (flipped, name) for name in FILES},
    **{f"truncated {name}": (truncated, name) for name in FILES},
    "description of parquet with checksums": (described, "parquet with checksums"),
    "description of Arrow stream": (described, "Arrow stream"),
    "offsets": (offsets, ""),
    "null counts": (nulls, ""),
}


def main(kind, folder, tries):
    make, name = KINDS[kind]
    counts, slowest, before = Counter(), 0.0, time.process_time()  # whatever else the machine does
    for found in make(name, folder, tries):
        counts[found] += 1
        now = time.process_time()
        slowest, before = max(slowest, now - before), now
    print(json.dumps({"kind": kind, "tried": counts.total(), **counts, "slowest": round(slowest, 2)}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
