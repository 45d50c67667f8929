"""Makes a large file and reads it, each as a program of its own. Prints the growth of its memory at its peak, in MiB."""

import os
import sys
import threading
import time

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq

import rollpack

TOKENS = 2000  # of each row
ROWS = 250  # of each batch or row group: 2 MB of tokens


def batch(seed):
    random = np.random.default_rng(seed)
    tokens = random.integers(0, 150_000, ROWS * TOKENS, dtype=np.int32)
    mask = random.integers(0, 2, ROWS * TOKENS // 2, dtype=np.int8)

    def lists(values, length):
        return pa.ListArray.from_arrays(np.arange(0, len(values) + 1, length, dtype=np.int32), pa.array(values))

    ids = np.arange(seed * ROWS, (seed + 1) * ROWS)
    return pa.record_batch({"tokens": lists(tokens, TOKENS), "loss_mask": lists(mask, TOKENS // 2), "rollout_id": ids})


def write(path, kind, size):
    first = batch(0)
    count = max(int(size / first.nbytes), 1)
    options = {"options": pa.ipc.IpcWriteOptions(compression="lz4")} if kind == "Arrow file, lz4" else {}
    make = {"Arrow stream": pa.ipc.new_stream}.get(kind, pa.ipc.new_file)
    if kind == "parquet":
        writer = pq.ParquetWriter(path, first.schema, compression="none", use_dictionary=False)
    else:
        writer = make(path, first.schema, **options)
    with writer:
        for seed in range(count):
            writer.write_batch(batch(seed))


def anonymous():
    """What cannot be dropped and read again: pages of a mapped file can."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon")) / 1024


def peak_of(work):
    peak, done = [0.0], threading.Event()

    def watch():
        while not done.wait(0.002):
            peak[0] = max(peak[0], anonymous())

    before = anonymous()
    thread = threading.Thread(target=watch)
    thread.start()
    begin = time.perf_counter()
    result = work()
    seconds = time.perf_counter() - begin
    done.set()
    thread.join()
    return peak[0] - before, seconds, result


def opened(path, form):
    if form == "dataset":
        import pyarrow.dataset as pads

        return pads.dataset(path)
    return path


def main(path, kind, form, verb):
    rollpack.plan(batch(0), max_tokens_per_gpu=16_384)  # what is loaded and allocated once
    data = opened(path, form)
    if form == "dataset":
        next(iter(data.scanner(batch_size=10).to_batches()))
    if verb == "save":  # for packing in a process that did not plan, and has no memory left over from that
        rollpack.plan(data, max_tokens_per_gpu=16_384, global_batch_size=ROWS, remainder="drop").save(f"{path}.plan")
        return
    if verb == "plan":
        growth, seconds, plan = peak_of(lambda: rollpack.plan(data, max_tokens_per_gpu=16_384))
        rows = plan.num_rows
    else:
        plan = rollpack.Plan.load(f"{path}.plan")

        def work():
            return sum(len(m.rows) for m in rollpack.pack(data, plan, step=len(plan.steps) // 2))

        growth, seconds, rows = peak_of(work)
    size = os.path.getsize(path) / 2**20
    print(f"{verb} {kind} {form}: file {size:.0f} MiB, peak growth {growth:.1f} MiB, {rows} rows, {seconds:.2f} s")
    print(growth)


if __name__ == "__main__":
    if sys.argv[1] == "write":
        write(sys.argv[2], sys.argv[3], float(sys.argv[4]))
    else:
        main(*sys.argv[1:])
