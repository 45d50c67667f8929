"""What each producer and type costs to read: time, and how much memory grows against the bytes of the columns read.

Growth of 0 is zero-copy; 1 is one copy of everything. Each is read in a process of its own, its data made beforehand.
Run ``python -m tests.benchmarks.producers``.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import rollpack

ROWS, TOKENS = 8192, 2048  # 64 MiB of tokens, 8 MiB of masks


def table(lists: Callable[[np.ndarray, int], Any], ids: Any = None) -> pa.Table:
    tokens = np.random.default_rng(0).integers(0, 150_000, ROWS * TOKENS, dtype=np.int32)
    masks = np.ones(ROWS * TOKENS // 2, np.uint8)
    ids = pa.array(np.arange(ROWS) // 4) if ids is None else ids
    return pa.table(
        {"tokens": lists(tokens, TOKENS), "loss_mask": lists(masks, TOKENS // 2), "rollout_id": ids, "group_index": ids}
    )


def offsets(values: np.ndarray, length: int, kind: Any = np.int32) -> Any:
    return pa.array(np.arange(0, len(values) + 1, length, dtype=kind))


def list_(values: np.ndarray, length: int) -> Any:
    return pa.ListArray.from_arrays(offsets(values, length), pa.array(values))


def large_list(values: np.ndarray, length: int) -> Any:
    return pa.LargeListArray.from_arrays(offsets(values, length, np.int64), pa.array(values))


def fixed_size_list(values: np.ndarray, length: int) -> Any:
    return pa.FixedSizeListArray.from_arrays(pa.array(values), length)


def list_view(values: np.ndarray, length: int) -> Any:
    sizes = pa.array(np.full(len(values) // length, length, np.int32))
    return pa.ListViewArray.from_arrays(offsets(values, length)[:-1], sizes, pa.array(values))


def large_list_view(values: np.ndarray, length: int) -> Any:
    sizes = pa.array(np.full(len(values) // length, length, np.int64))
    return pa.LargeListViewArray.from_arrays(offsets(values, length, np.int64)[:-1], sizes, pa.array(values))


def strings() -> Any:
    return pa.array([f"rollout {i // 4}" for i in range(ROWS)])


def duckdb(_: Path) -> Any:
    import duckdb

    return duckdb.from_arrow(table(list_))


def polars(_: Path) -> Any:
    import polars as pl

    return pl.DataFrame(table(large_list))


def hugging_face(folder: Path) -> Any:
    import datasets

    rollouts = table(list_)
    datasets.disable_progress_bars()
    datasets.Dataset(rollouts).save_to_disk(str(folder / "hf"))
    return datasets.load_from_disk(str(folder / "hf"))


def pandas_arrow(_: Path) -> Any:
    import pandas as pd

    return table(list_).to_pandas(types_mapper=pd.ArrowDtype)


def dicts(_: Path) -> Any:
    return table(list_).to_pylist()


def parquet(folder: Path) -> Any:
    import pyarrow.parquet as pq

    pq.write_table(table(list_), folder / "rollouts.parquet", row_group_size=512)
    return folder / "rollouts.parquet"


def dataset(folder: Path) -> Any:
    import pyarrow.dataset as pads

    return pads.dataset(parquet(folder))


def arrow_file(folder: Path, compression: str | None = None) -> Any:
    path = folder / "rollouts.arrow"
    with pa.ipc.new_file(path, table(list_).schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        writer.write_table(table(list_), max_chunksize=512)
    return path


def json_lines(folder: Path) -> Any:
    import json

    path = folder / "rollouts.jsonl"
    with path.open("w") as file:
        for batch in table(list_).to_batches(max_chunksize=64):
            file.writelines(json.dumps(row) + "\n" for row in batch.to_pylist())
    return path


PRODUCERS: dict[str, Callable[[Path], Any]] = {
    "pyarrow Table, list": lambda _: table(list_),
    "pyarrow RecordBatchReader": lambda _: table(list_).to_reader(max_chunksize=512),
    "large list": lambda _: table(large_list),
    "fixed-size list": lambda _: table(fixed_size_list),
    "list view": lambda _: table(list_view),
    "large list view": lambda _: table(large_list_view),
    "string ids": lambda _: table(list_, strings()),
    "string view ids": lambda _: table(list_, strings().cast(pa.string_view())),
    "dictionary ids": lambda _: table(list_, strings().dictionary_encode()),
    "polars DataFrame": polars,
    "DuckDB relation": duckdb,
    "pandas, Arrow columns": pandas_arrow,
    "Hugging Face dataset, on disk": hugging_face,
    "pandas, object columns": lambda _: table(list_).to_pandas(),
    "list of dicts": dicts,
    "Parquet file": parquet,
    "pyarrow Dataset of it": dataset,
    "Arrow file, mapped": arrow_file,
    "Arrow file, lz4": lambda folder: arrow_file(folder, "lz4"),
    "JSON lines": json_lines,
}


def anonymous() -> float:
    """Bytes that cannot be dropped and read again, as pages of a mapped file can."""
    with open("/proc/self/status") as status:
        return float(next(int(line.split()[1]) for line in status if line.startswith("RssAnon")) * 1024)


def peak(work: Callable[[], Any]) -> tuple[float, float]:
    """How far memory grew at its peak, in bytes, and the seconds it took."""
    most, done, before = 0.0, threading.Event(), anonymous()

    def watch() -> None:
        nonlocal most
        while not done.wait(0.001):
            most = max(most, anonymous())

    thread = threading.Thread(target=watch)
    thread.start()
    start = time.perf_counter()
    result = work()
    seconds = time.perf_counter() - start
    most = max(most, anonymous())
    done.set()
    thread.join()
    del result
    return max(most - before, 0), seconds


def measure(name: str) -> None:
    """In this process: summarize, then plan and pack every micro-batch, each dropped before the next."""
    read = table(list_).nbytes
    rollpack.plan(table(list_).slice(0, 8), max_tokens_per_gpu=1 << 16)  # what is loaded once
    with tempfile.TemporaryDirectory() as folder:
        data = PRODUCERS[name](Path(folder))
        grown, seconds = peak(lambda: rollpack.summarize(data, groups=True))
        line = f"{name:<32}{grown / read:>7.2f}{seconds * 1e3:>9.0f} ms"
        if "Reader" not in name:
            plan = rollpack.plan(data, max_tokens_per_gpu=1 << 16)
            grown, seconds = peak(lambda: sum(len(m.tokens) for m in rollpack.pack(data, plan)))
            line += f"{grown / read:>9.2f}{seconds * 1e3:>9.0f} ms"
        print(line)


def main() -> None:
    """Prints the table."""
    print(f"{'':<32}summarize          pack\n{'':<32}{'copies':>7}{'time':>9}   {'copies':>9}{'time':>9}")
    for name in PRODUCERS:
        subprocess.run([sys.executable, "-m", "tests.benchmarks.producers", name], check=True)


if __name__ == "__main__":
    measure(sys.argv[1]) if sys.argv[1:] else main()
