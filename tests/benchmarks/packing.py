"""Plans and packing beside other public packers, in one run and one table.

    python -m tests.benchmarks.packing

Others are run by the Python that ``ROLLPACK_OTHERS`` names (a virtual environment of their own: they need not agree with
ours on versions), else by this one; those that do not import are left out, and the table says why.

- *by budget*: as few micro-batches as the budget allows, over the bound ceil(tokens / budget).
- *balance*: plans over ranks under a budget. Cost of a sample of s tokens: 24576 s + s * s. The rank ratio is the heaviest
  rank over the mean one, what ranks wait for that meet once a step; the lockstep ratio sums up the heaviest micro-batch of
  each round instead, for ranks that meet at each micro-batch. No schedule is below the bound beside it (``lockstep_bound``).
- *whole way*: Arrow in, every micro-batch out as arrays, each dropped before the next.
- *summarize* beside ``numpy.count_nonzero`` over the same mask bytes, Polars and pyarrow; *pack* beside a copy of as many
  bytes between warm buffers.

Lengths are lognormal (sigma 1), clipped to the budget of 32768, and those of the real traces, resampled, where their folder
is there (``--traces``). Times are medians. The core alone, without Arrow and Python:
``cargo run --release -p rollpack-core --example speed``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import torch
from tests.benchmarks.pipeline import cpu, make

import rollpack
from rollpack._sources import Request

BUDGET = 32768


def lognormal(n: int, median: int, seed: int) -> np.ndarray:
    lengths = np.random.default_rng(seed).lognormal(np.log(median), 1, n)
    return np.clip(lengths, 1, BUDGET).astype(np.int64)


def resampled(traces: Path, n: int, seed: int) -> np.ndarray | None:
    files = sorted(traces.glob("*.parquet"))
    if not files:
        return None
    every = [rollpack.summarize(str(file)).column("total_length") for file in files]
    rng = np.random.default_rng(seed)
    # As many of each file, however many rows it has.
    drawn = np.concatenate([rng.choice(lengths, -(-n // len(every))) for lengths in every])
    return np.clip(rng.permutation(drawn)[:n], 1, BUDGET)


def summary_of(lengths: np.ndarray) -> rollpack.Summary:
    """A summary of these lengths, without the tokens that it would be of."""
    one = rollpack.summarize(pa.table({"tokens": [[1, 2]], "response_length": [1]}))
    values = {"total_length": lengths, "response_length": np.zeros_like(lengths), "mask_sum": np.zeros_like(lengths)}
    rows = np.arange(len(lengths))
    batch = pa.record_batch([pa.array(values.get(name, rows)) for name in one._batch.schema.names], one._batch.schema.names)
    return rollpack.Summary(batch, one.rollout_key, (), Request.make(None, "rollout_id"))


def timed(repeat: int, work: Callable[[], Any]) -> tuple[float, Any]:
    seconds, result = [], None
    for _ in range(repeat):
        begin = time.perf_counter()
        result = work()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds), result


def others(kind: str, lengths: np.ndarray, repeat: int, dp_size: int = 1) -> dict[str, Any]:
    python = os.environ.get("ROLLPACK_OTHERS", sys.executable)
    with tempfile.TemporaryDirectory() as folder:
        job, result = Path(folder) / "job.npz", Path(folder) / "result.json"
        np.savez(job, kind=kind, lengths=lengths, budget=BUDGET, dp_size=dp_size, repeat=repeat)
        script = Path(__file__).with_name("others.py")
        done = subprocess.run([python, str(script), str(job), str(result)], capture_output=True, text=True, check=False)
        if done.returncode:
            return {"others": {"skipped": (done.stderr.strip().splitlines() or ["it stopped without a word"])[-1]}}
        found: dict[str, Any] = json.loads(result.read_text())
        return found


# ---- what a schedule is worth


def cost(lengths: np.ndarray) -> np.ndarray:
    s = lengths.astype(np.float64)
    return 24576 * s + s * s


def worth(lengths: np.ndarray, ranks: list[list[list[int]]]) -> dict[str, Any]:
    """Ratios of a schedule: ranks, their micro-batches, the samples in each."""
    costs = cost(lengths)
    loads = np.array([[costs[m].sum() for m in rank] for rank in ranks])
    even = costs.sum() / len(ranks)
    return {
        "lockstep": loads.max(axis=0).sum() / even,
        "rank": loads.sum(axis=1).max() / even,
        "over": sum(int(lengths[m].sum()) > BUDGET for rank in ranks for m in rank),
        "bins": loads.size,
    }


def lockstep_bound(lengths: np.ndarray, dp_size: int) -> float:
    """What no schedule under the budget can be below.

    A round whose longest sample is x costs at least c(x), and of samples over half the budget a micro-batch holds one: so
    round j costs at least the (j dp_size + 1)-th longest while that is over the half. A micro-batch whose longest is x
    holds at most c(x) + c(budget - x), or a budget of tokens at the price of x where x is under the half; and all of them
    hold at most the longest samples that have so many tokens. What these rounds cannot hold is spread evenly at best.
    """
    longest = np.sort(lengths)[::-1]
    costs = cost(longest)
    most = np.where(2 * longest >= BUDGET, costs + cost(BUDGET - longest), costs / longest * BUDGET)
    tokens, costs_up_to = (np.concatenate([[0], np.cumsum(values)]) for values in (longest, costs))
    even, leads, held, bound = costs.sum() / dp_size, 0.0, 0.0, 1.0
    for first in range(0, len(longest), dp_size):
        if first and 2 * longest[first] <= BUDGET:
            break
        leads += costs[first]
        held += np.minimum(most[first : first + dp_size], costs[first]).sum()
        most_here = min(held, np.interp((first + dp_size) * BUDGET, tokens, costs_up_to))
        bound = max(bound, (leads + (costs.sum() - most_here) / dp_size) / even)
    return bound


def schedule_of(plan: rollpack.Plan) -> list[list[list[int]]]:
    per_rank = range(plan.steps[0].num_micro_batches)
    return [[plan.rows(0, rank, k).tolist() for k in per_rank] for rank in range(plan.settings.dp_size)]


# ---- the parts


Row = dict[str, Any]


def by_budget(name: str, lengths: np.ndarray, repeat: int, others_up_to: int) -> Iterator[Row]:
    work = f"by budget, {name} n={len(lengths):,}"
    bound = -(-int(lengths.sum()) // BUDGET)
    summary = summary_of(lengths)
    seconds, plan = timed(repeat, lambda: rollpack.plan(summary, max_tokens_per_gpu=BUDGET))
    found = worth(lengths, schedule_of(plan))
    yield {
        "work": work,
        "way": "rollpack.plan",
        "seconds": seconds,
        "over_bound": found["bins"] - bound,
        "over": found["over"],
    }
    if len(lengths) <= others_up_to and lengths.sum() < 2**31 - 1:
        for way, result in others("pack", lengths, 1).items():
            yield {"work": work, "way": way, "over_bound": result.get("bins", bound) - bound, **result}


def balance(name: str, lengths: np.ndarray, dp_size: int, repeat: int) -> Iterator[Row]:
    work = f"balance, {name} n={len(lengths):,} dp={dp_size}"
    lock, least = lockstep_bound(lengths, dp_size), -(-int(lengths.sum()) // BUDGET)
    summary = summary_of(lengths)
    arguments = {"max_tokens_per_gpu": BUDGET, "dp_size": dp_size, "cost": "attention"}
    for sync in ("micro_batch", "step"):
        seconds, plan = timed(repeat, lambda sync=sync: rollpack.plan(summary, sync=sync, **arguments))
        yield {"work": work, "way": f"rollpack, sync={sync}", "seconds": seconds, "bound": lock} | row_of(
            worth(lengths, schedule_of(plan)), dp_size, least
        )
    for way, result in others("balance", lengths, 3, dp_size).items():
        schedule = result.pop("schedule", None)
        yield {"work": work, "way": way, "bound": lock, **result} | (
            row_of(worth(lengths, schedule), dp_size, least) if schedule else {}
        )


def row_of(found: dict[str, Any], dp_size: int, least: int) -> Row:
    """``over_bound`` counts what is more than ranks with as many micro-batches each would need for ``least``."""
    needed = -(-least // dp_size) * dp_size
    return {**found, "over_bound": found.pop("bins") - needed}


def lists_to_torch(tokens: list[list[int]], masks: list[list[int]], bins: list[list[int]]) -> None:
    for rows in bins:
        flat = [token for row in rows for token in tokens[row]]
        shifted = [bit for row in rows for bit in [0] * (len(tokens[row]) - len(masks[row]) - 1) + masks[row] + [0]]
        positions = [position for row in rows for position in range(len(tokens[row]))]
        segments = [segment for segment, row in enumerate(rows) for _ in tokens[row]]
        labels = [token if bit else -100 for token, bit in zip([*flat[1:], 0], shifted, strict=True)]
        for values in (flat, labels, positions, segments):
            torch.tensor(values, dtype=torch.int32)
        torch.tensor(shifted, dtype=torch.bool)


def whole_way(samples: int, repeat: int, seed: int) -> Iterator[Row]:
    data = make(samples, 0, "lognormal", seed)
    work = f"whole way, n={samples:,}, {int(data.token_offsets[-1]) / 1e6:.0f}M tokens"

    def way() -> int:
        plan = rollpack.plan(data.table, max_tokens_per_gpu=BUDGET)
        return sum(len(micro_batch.tokens) for micro_batch in rollpack.pack(data.table, plan))

    seconds, _ = timed(repeat, way)
    yield {"work": work, "way": "rollpack", "seconds": seconds}
    for name, result in others("whole", np.diff(data.token_offsets), 3).items():
        yield {"work": work, "way": f"{name} (tokens, labels)", **result}
    tokens, masks = data.table["tokens"].to_pylist(), data.table["loss_mask"].to_pylist()
    bins = schedule_of(rollpack.plan(data.table, max_tokens_per_gpu=BUDGET))[0]
    seconds, _ = timed(1, lambda: lists_to_torch(tokens, masks, bins))
    yield {"work": work, "way": "lists to torch, planned before", "seconds": seconds}


def summarize_and_pack(samples: int, repeat: int, seed: int) -> Iterator[Row]:
    data = make(samples, 0, "lognormal", seed)
    # Each rollout's sum beside each sample's, as rollpack's plan needs it.
    masks = data.table.select(["loss_mask", "rollout_id"])
    frame = pl.from_arrow(masks)

    def polars() -> Any:
        sums = frame.select(pl.col("loss_mask").list.sum().cast(pl.Int64).alias("sum"), "rollout_id")
        return sums.group_by("rollout_id").agg(pl.col("sum").sum())

    def pyarrow() -> Any:
        lists = masks["loss_mask"].combine_chunks()
        flat = pa.table({"row": pc.list_parent_indices(lists), "mask": pc.list_flatten(lists)})
        sums = flat.group_by("row").aggregate([("mask", "sum")])
        return sums.num_rows

    work = f"summarize, n={samples:,}, {len(data.masks) / 1e6:.0f}M mask bytes"
    ways: list[tuple[str, str, Callable[[], Any]]] = [
        (work, "rollpack.summarize", lambda: rollpack.summarize(data.table)),
        (work, "numpy.count_nonzero (floor)", lambda: np.count_nonzero(data.masks)),
        (work, "polars, list and group sums", polars),
        (work, "pyarrow, list sums", pyarrow),
    ]
    plan = rollpack.plan(data.table, max_tokens_per_gpu=BUDGET)
    size = 0
    for micro_batch in rollpack.pack(data.table, plan):
        own = (getattr(micro_batch, name) for name in ("tokens", "labels", "position_ids", "segment_ids", "loss_mask"))
        size += sum(array.nbytes for array in own)
    source, target = np.ones(size, np.uint8), np.zeros(size, np.uint8)

    def packed(threads: int) -> None:
        for _ in rollpack.pack(data.table, plan, num_threads=threads):
            pass

    work = f"pack, n={samples:,}, {size / 1e6:.0f} MB written"
    ways += [(work, f"rollpack.pack, {threads} thread(s)", lambda threads=threads: packed(threads)) for threads in (1, 2)]
    ways.append((work, "copy between warm buffers (floor)", lambda: np.copyto(target, source)))
    # One round runs every way once, so that what else the machine does falls on all of them. Every other round runs
    # backwards: each finds caches and memory as the one before it leaves them.
    seconds: list[list[float]] = [[] for _ in ways]
    for turn in range(repeat):
        for i in range(len(ways))[:: -1 if turn % 2 else 1]:
            seconds[i].append(timed(1, ways[i][2])[0])
    for times, (work, way, _) in zip(seconds, ways, strict=True):
        yield {"work": work, "way": way, "seconds": statistics.median(times)}


# ---- the table


COLUMNS = {"over_bound": "bins over", "lockstep": "lockstep", "bound": "its bound", "rank": "rank", "over": "over cap"}


def show(row: Row) -> None:
    if "skipped" in row:
        print(f"{row['work']:48}{row['way']:32}  left out: {row['skipped'][:80]}", flush=True)
        return
    cells = "".join(
        f"{'-' if (value := row.get(name)) is None else value if isinstance(value, int) else f'{value:.5f}':>11}"
        for name in COLUMNS
    )
    print(f"{row['work']:48}{row['way']:32}{1e3 * row['seconds']:11.2f}{cells}  {row.get('version', '')}", flush=True)


def rows(args: argparse.Namespace) -> Iterator[Row]:
    traces = Path(args.traces)
    for n in args.sizes:
        repeat = 5 if n > 100_000 else 15
        yield from by_budget("lognormal", lognormal(n, 2048, args.seed), repeat, args.others_up_to)
        real = resampled(traces, n, args.seed)
        if real is not None:
            yield from by_budget("real", real, repeat, args.others_up_to)
    # Two to four samples a micro-batch, where the usual heuristics waste most.
    for times in (2, 3, 4):
        for seed in range(args.seed, args.seed + args.seeds):
            drawn = lognormal(512, 2048, seed)
            lengths = np.clip(drawn * BUDGET // (times * int(drawn.mean())), 1, BUDGET)
            yield from by_budget(f"{times} x mean, seed {seed}", lengths, 15, args.others_up_to)
    for n, median, dp_size in ((1024, 2048, 8), (1024, 2048, 32), (512, 8192, 32), (8192, 2048, 64)):
        for seed in range(args.seed, args.seed + args.seeds):
            name = f"lognormal({median}) seed {seed}"
            yield from balance(name, lognormal(n, median, seed), dp_size, 5)
    real = resampled(traces, 1024, args.seed)
    if real is not None:
        yield from balance("real", real, 8, 5)
    yield from whole_way(args.whole, 5, args.seed)
    yield from summarize_and_pack(args.rows, 7, args.seed)


def main() -> None:
    parser = argparse.ArgumentParser(description="Plans and packing beside other public packers.")
    parser.add_argument("--sizes", type=int, nargs="*", default=[1024, 8192, 65536, 524288], help="samples packed by budget")
    parser.add_argument("--others-up-to", type=int, default=8192, help="samples that others pack: more take them minutes")
    parser.add_argument("--seeds", type=int, default=3, help="seeds of each balance row")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--whole", type=int, default=2048, help="samples of the whole way")
    parser.add_argument("--rows", type=int, default=16384, help="samples that are summarized and packed")
    parser.add_argument("--traces", default="shared/data", help="folder of real traces; left out where it is missing")
    parser.add_argument("--json", action="store_true", help="print each row as JSON")
    args = parser.parse_args()
    if not args.json:
        print(f"{cpu()}; rollpack {rollpack.__version__}, numpy {np.__version__}, pyarrow {pa.__version__}, ", end="")
        print(f"polars {pl.__version__}, torch {torch.__version__}; budget {BUDGET}, seed {args.seed}\n")
        print(f"{'work':48}{'way':32}{'ms':>11}" + "".join(f"{title:>11}" for title in COLUMNS.values()))
    for row in rows(args):
        if args.json:
            print(json.dumps(row), flush=True)
        else:
            show(row)


if __name__ == "__main__":
    main()
