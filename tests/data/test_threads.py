"""The GIL, threads and forks. What may hang or crash runs in a process of its own."""

import subprocess
import sys
import threading

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

import rollpack


def run(script, *arguments):
    command = [sys.executable, "-W", "ignore", "-c", script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


SLEEPY = """
import threading, time
import pyarrow as pa
import rollpack

batch = pa.RecordBatch.from_pydict({"tokens": [[1, 2]], "response_length": [1]})
ticks = 0
asked = threading.Event()
answered = threading.Event()
done = threading.Event()

def other():
    global ticks
    asked.wait()
    answered.set()
    while not done.is_set():
        ticks += 1
        time.sleep(0.001)

def batches():
    for _ in range(20):
        asked.set()
        assert answered.wait(30)  # only another thread sets it
        time.sleep(0.01)
        yield batch

thread = threading.Thread(target=other)
thread.start()
summary = rollpack.summarize(pa.RecordBatchReader.from_batches(batch.schema, batches()))
done.set()
thread.join()
print(len(summary), ticks >= 10)
"""


def test_a_python_reader_that_waits_for_another_thread_does_not_hang():
    assert run(SLEEPY) == ["20", "True"]


FSSPEC = """
import sys
import fsspec, numpy as np, pyarrow as pa, pyarrow.dataset as pads, pyarrow.parquet as pq
import rollpack

memory = fsspec.filesystem("memory")
rows = 3000
for part in range(4):
    table = pa.table({"tokens": [[row, 1, 2] for row in range(rows)], "response_length": [2] * rows})
    with memory.open(f"part-{part}.parquet", "wb") as file:
        pq.write_table(table, file, row_group_size=100)
dataset = pads.dataset([f"part-{part}.parquet" for part in range(4)], filesystem=memory)
def forms():
    yield dataset
    yield dataset.scanner(batch_size=50)
    yield dataset.scanner(batch_size=50).to_reader()  # drained without any Python in between but the file system
    yield [pq.ParquetFile(memory.open(f"part-{part}.parquet")) for part in range(4)]
for data in forms():
    print(len(rollpack.summarize(data)))
plan = rollpack.plan(dataset, micro_batch_size=1000)
print(sum(len(m.tokens) for m in rollpack.pack(dataset, plan)))
"""


def test_a_dataset_over_a_python_file_system_does_not_hang():
    assert run(FSSPEC) == ["12000"] * 4 + ["36000"]


class Draining:
    """A stream that C++ drains: no wrapper of ours between the core and the reader."""

    def __init__(self, reader):
        self._reader = reader

    def __arrow_c_stream__(self, requested_schema=None):
        return self._reader.__arrow_c_stream__(requested_schema)


def table_of(seed, rows=400):
    random = np.random.default_rng(seed)
    lengths = random.integers(2, 60, rows)
    masks = [random.integers(0, 2, length - 1) for length in lengths]
    tokens = [random.integers(0, 1000, length) for length in lengths]
    return pa.table({"tokens": tokens, "loss_mask": masks, "rollout_id": random.integers(0, 100, rows)})


@pytest.mark.parametrize("form", ["table", "reader", "generator", "parquet"])
def test_ten_threads_at_once_get_ten_right_answers(tmp_path, form):
    tables = [table_of(seed) for seed in range(10)]
    for seed, table in enumerate(tables):
        pa.parquet.write_table(table, tmp_path / f"{seed}.parquet", row_group_size=50)
    expected = [[int(sum(mask)) for mask in table["loss_mask"].to_pylist()] for table in tables]
    barrier, answers = threading.Barrier(10), [None] * 10

    def batches(table):
        yield from table.to_batches(max_chunksize=10)

    def data(seed):
        table = tables[seed]
        return {
            "table": lambda: table,
            "reader": lambda: Draining(table.to_reader(max_chunksize=10)),
            "generator": lambda: pa.RecordBatchReader.from_batches(table.schema, batches(table)),
            "parquet": lambda: tmp_path / f"{seed}.parquet",
        }[form]()

    def work(seed):
        barrier.wait()
        for _ in range(3):
            summary = rollpack.summarize(data(seed))
            packed = rollpack.pack(tables[seed], rollpack.plan(summary, max_tokens_per_gpu=4096, dp_size=2), dp_rank=1)
            sums = {row: n for m in packed for row, n in zip(m.rows.tolist(), m.mask_sums.tolist(), strict=True)}
            assert all(sums[row] == expected[seed][row] for row in sums)
            answers[seed] = summary.column("mask_sum").tolist()

    threads = [threading.Thread(target=work, args=[seed]) for seed in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert answers == expected


FORK = """
import os, sys
import pyarrow as pa
import pyarrow.parquet
import rollpack

def work():
    total = 0
    for data in (table, sys.argv[1], pa.RecordBatchReader.from_batches(table.schema, iter(table.to_batches()))):
        total += int(rollpack.summarize(data).column("mask_sum").sum())
    plan = rollpack.plan(sys.argv[1], max_tokens_per_gpu=64)
    return total + sum(len(m.tokens) for m in rollpack.pack(sys.argv[1], plan))

table = pa.parquet.read_table(sys.argv[1])
here = work()
children = []
for _ in range(3):
    child = os.fork()
    if child == 0:
        os._exit(0 if work() == here else 3)
    children.append(child)
print([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0, 0], work() == here)
"""


def test_a_forked_child_gets_the_right_answer(tmp_path):
    path = tmp_path / "rows.parquet"
    pa.parquet.write_table(table_of(1), path, row_group_size=50)
    assert run(FORK, str(path)) == ["True", "True"]
