"""How time and memory of planning grow: ``python -m tests.benchmarks.scale --traces ../shared/data``.

Lengths, mask sums, fan-out and group sizes are those of the real traces: whole prompt groups, drawn with replacement (seed
0). Each size runs in a process of its own: 64 summaries are made up of what was drawn, sent as bytes, joined, and planned by
budget over dp ranks that grow with the data. Memory is the largest resident set of the process less that before the bytes
became summaries: what a planner needs beside the bytes that it was sent.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import rollpack
from rollpack._sources import Request

COLUMNS = ("total_length", "response_length", "mask_sum", "rollout_id", "group_index")
SHARDS = 64
BUDGET = 65_536
#: Samples on a rank in the largest step that is planned at once.
PER_RANK = 2_048


def traces(folder: Path) -> list[np.ndarray[Any, Any]]:
    """Each prompt group of the traces: [samples, 4] total and response lengths, mask sums, rollouts from 0."""
    groups = []
    for path in sorted(folder.glob("*.parquet")):
        summary = rollpack.summarize(path, groups=True, rollout_key=("group_index", "rollout_id"))
        table = np.stack([summary.column(name) for name in COLUMNS], axis=1)
        table = table[np.argsort(table[:, 4], kind="stable")]
        for group in np.split(table, np.flatnonzero(np.diff(table[:, 4])) + 1):
            group[:, 3] = np.unique(group[:, 3], return_inverse=True)[1]
            groups.append(group[:, :4])
    return groups


def drawn(groups: list[np.ndarray[Any, Any]], samples: int) -> np.ndarray[Any, Any]:
    """[samples, 5]: as :data:`COLUMNS`, of groups that are drawn at random."""
    sizes = np.array([len(group) for group in groups])
    # Small groups as often as large ones would be few rows of theirs.
    chosen = np.random.default_rng(0).integers(len(groups), size=int(1.2 * samples / sizes.mean()) + 64)
    ends = np.cumsum(sizes[chosen])
    number = int(np.searchsorted(ends, samples)) + 1
    rows = np.concatenate([groups[i] for i in chosen[:number]])[:samples]
    group = np.repeat(np.arange(number), sizes[chosen[:number]])[:samples]
    rollouts = np.array([groups[i][-1, 3] + 1 for i in chosen[:number]]).cumsum()
    rows[:, 3] += np.concatenate([[0], rollouts[:-1]])[group]
    return np.column_stack([rows, group])


def shards(rows: np.ndarray[Any, Any]) -> list[rollpack.Summary]:
    """Summaries of consecutive rows, as if each had been made elsewhere. Groups and rollouts are cut."""
    made = []
    for number, part in enumerate(np.array_split(rows, SHARDS)):
        columns = {"row": np.arange(len(part))} | {name: np.ascontiguousarray(part[:, i]) for i, name in enumerate(COLUMNS)}
        batch = pa.RecordBatch.from_pydict({name: pa.array(column) for name, column in columns.items()})
        request = Request.make(None, "rollout_id", groups=True)
        made.append(rollpack.Summary(batch, ("rollout_id",), ("group_index",), request, ((number, len(part)),)))
    return made


def resident(name: str) -> int:
    """VmRSS, what is resident now, or VmHWM, the most since :func:`forget`, in bytes."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def forget() -> int:
    """Begins a new VmHWM, and gives what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def one(folder: Path, samples: int) -> None:
    """Measures one size and prints its numbers, in the order of :data:`HEAD`."""
    rows = drawn(traces(folder), samples)
    made = shards(rows)
    tokens = int(rows[:, 0].sum())
    del rows
    times = []

    def timed(call: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = call()
        times.append(time.perf_counter() - start)
        return result

    sent = timed(lambda: [made.pop(0).to_bytes() for _ in range(SHARDS)])
    sizes = sum(map(len, sent))
    before = forget()
    came = timed(lambda: [rollpack.Summary.from_bytes(sent.pop(0)) for _ in range(SHARDS)])
    summary = timed(lambda: rollpack.Summary.concat(came))
    came.clear()
    held = sum(summary._batch.column(i).nbytes for i in range(summary._batch.num_columns))
    dp_size = max(1, samples // PER_RANK)
    arguments = {"loss_aggregation": "prompt_mean", "max_tokens_per_gpu": BUDGET, "dp_size": dp_size}
    plan = timed(lambda: rollpack.plan(summary, **arguments))
    assert plan.to_arrow().num_rows == samples
    # What an n log n algorithm takes on this machine, where larger arrays lie farther from the cache.
    keys = np.random.default_rng(1).permutation(samples)
    timed(lambda: keys[np.argsort(keys)])
    print(
        samples,
        tokens,
        dp_size,
        sizes / samples,
        held / samples,
        (resident("VmHWM") - before) / samples,
        *times,
        plan.fill,
        plan.imbalance,
    )


HEAD = (
    "samples",
    "tokens",
    "dp",
    "sent B",
    "held B",
    "peak B",
    "send s",
    "receive s",
    "join s",
    "plan s",
    "sort s",
    "n log n",
    "sort",
    "fill",
    "imbalance",
)

WIDTH = 15


def main() -> None:
    """Runs every size in a process of its own, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True)
    parser.add_argument("--samples", type=lambda text: [int(n) for n in text.split(",")], default=[2**20, 2**22, 2**24])
    parser.add_argument("--one", type=int)
    arguments = parser.parse_args()
    if arguments.one:
        one(arguments.traces, arguments.one)
        return
    print("B are bytes a sample; n log n is the plan's time over samples x log2(samples), 1 for the first size; sort is its")
    print("time over that of numpy's argsort of as many integers and a gather", flush=True)
    print("".join(name.rjust(WIDTH) for name in HEAD), flush=True)
    first = None
    for samples in arguments.samples:
        run = [sys.executable, "-m", "tests.benchmarks.scale", "--traces", arguments.traces, "--one", str(samples)]
        numbers = [float(x) for x in subprocess.run(run, check=True, stdout=subprocess.PIPE, text=True).stdout.split()]
        ratio = numbers[9] / (samples * math.log2(samples))
        first = first or ratio
        numbers[11:11] = [ratio / first, numbers[9] / numbers[10]]
        shown = [f"{x:,.0f}" if i < 3 else f"{x:.3f}" if i > 9 else f"{x:.2f}" for i, x in enumerate(numbers)]
        print("".join(x.rjust(WIDTH) for x in shown), flush=True)


if __name__ == "__main__":
    main()
