"""The whole way, Arrow to packed arrays, beside plain Python lists and beside numpy on flat buffers.

Every way does the same work and is asserted to give the same sums, weights and packed arrays before anything is timed:

- ``summarize``: the length, response length and mask sum of each sample. rollpack also checks every mask value, length and
  id; the other two take the data on trust.
- ``plan``: from those to the mask sum of each rollout, each sample's weight under ``sample_mean`` and micro-batches under
  the budget. The others pack first-fit, longest first, and do not balance ranks.
- ``pack``: tokens, labels, position ids, segment ids, loss mask and the per-sample arrays of every micro-batch of
  rollpack's plan, each dropped before the next. Lists end as arrays too, for that is what a GPU gets.

The floors: ``numpy.count_nonzero`` over the same mask bytes, and a copy between warm buffers of as many bytes as ``pack``
writes: once of all of them from one large array to another, and once a micro-batch at a time within the cache.

Run ``python -m tests.benchmarks.pipeline``; ``--help`` shows the rest. One round runs every way once, so that what else
the machine does falls on all of them; times are medians over rounds, ratios medians of each round's ratio.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import rollpack

IGNORED = -100
FIELDS = ("tokens", "labels", "position_ids", "segment_ids", "loss_mask", "cu_seqlens")
PER_SAMPLE = ("rows", "mask_sums", "rollout_mask_sums", "sample_weights")


@dataclass
class Data:
    """The same samples as a table and as flat buffers with offsets."""

    table: pa.Table
    tokens: np.ndarray
    masks: np.ndarray
    token_offsets: np.ndarray
    mask_offsets: np.ndarray
    rollout_id: np.ndarray


def make(samples: int, tokens: int, shape: str, seed: int) -> Data:
    """Samples whose prompt is about a quarter of the sequence and whose masks have untrained stretches (tool output)."""
    rng = np.random.default_rng(seed)
    if shape == "fixed":
        lengths = np.full(samples, tokens)
    else:
        lengths = np.clip(rng.lognormal(np.log(2048), 1, samples), 4, 32768).astype(np.int64)
    prompts = np.maximum(1, (lengths * rng.uniform(0.2, 0.3, samples)).astype(np.int64))
    token_offsets = np.concatenate([[0], np.cumsum(lengths)])
    mask_offsets = np.concatenate([[0], np.cumsum(lengths - prompts)])
    flat_tokens = rng.integers(0, 150_000, token_offsets[-1], dtype=np.int32)
    spans = rng.random(-(-int(mask_offsets[-1]) // 64)) < 0.8
    flat_masks = np.repeat(spans, 64)[: mask_offsets[-1]].astype(np.uint8)
    rollout_id = np.arange(samples) // 2
    table = pa.table(
        {
            "tokens": pa.LargeListArray.from_arrays(token_offsets, flat_tokens),
            "loss_mask": pa.LargeListArray.from_arrays(mask_offsets, flat_masks),
            "rollout_id": rollout_id,
            "group_index": np.arange(samples) // 16,
        }
    )
    return Data(table, flat_tokens, flat_masks, token_offsets, mask_offsets, rollout_id)


# ---- numpy on flat buffers


def numpy_summarize(data: Data) -> dict[str, np.ndarray]:
    lengths, responses = np.diff(data.token_offsets), np.diff(data.mask_offsets)
    sums = np.add.reduceat(data.masks, data.mask_offsets[:-1], dtype=np.int64)
    return {"total_length": lengths, "response_length": responses, "mask_sum": sums}


def numpy_plan(summary: dict[str, np.ndarray], rollout_id: np.ndarray, budget: int) -> dict[str, Any]:
    _, rollout = np.unique(rollout_id, return_inverse=True)
    sums = np.bincount(rollout, weights=summary["mask_sum"]).astype(np.int64)
    rollout_mask_sums = sums[rollout]
    with np.errstate(divide="ignore"):
        weights = np.where(rollout_mask_sums > 0, 1.0 / (len(sums) * rollout_mask_sums.astype(np.float64)), 0.0)
    lengths = summary["total_length"]
    room = np.full(len(lengths), budget)
    bins: list[list[int]] = []
    for sample in np.argsort(-lengths, kind="stable"):
        place = int(np.argmax(room[: len(bins) + 1] >= lengths[sample]))
        if place == len(bins):
            bins.append([])
        bins[place].append(int(sample))
        room[place] -= lengths[sample]
    return {"rollout_mask_sums": rollout_mask_sums, "sample_weights": weights, "bins": bins}


def numpy_pack(
    data: Data, summary: dict[str, np.ndarray], planned: dict[str, Any], rows: np.ndarray
) -> dict[str, np.ndarray]:
    """One micro-batch."""
    first, last = data.token_offsets[rows], data.token_offsets[rows + 1]
    tokens = np.concatenate([data.tokens[a:b] for a, b in zip(first.tolist(), last.tolist(), strict=True)])
    lengths = last - first
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    loss_mask = np.zeros(len(tokens), dtype=bool)
    trained = data.masks.view(bool)
    mask_first, mask_last = data.mask_offsets[rows].tolist(), data.mask_offsets[rows + 1].tolist()
    for end, a, b in zip((cu_seqlens[1:] - 1).tolist(), mask_first, mask_last, strict=True):
        loss_mask[end - (b - a) : end] = trained[a:b]
    labels = np.full(len(tokens), IGNORED, dtype=np.int32)
    np.copyto(labels[:-1], tokens[1:], where=loss_mask[:-1])
    position_ids = np.arange(len(tokens), dtype=np.int32) - np.repeat(cu_seqlens[:-1], lengths)
    segment_ids = np.repeat(np.arange(len(rows), dtype=np.int32), lengths)
    return {
        "tokens": tokens,
        "labels": labels,
        "position_ids": position_ids,
        "segment_ids": segment_ids,
        "loss_mask": loss_mask,
        "cu_seqlens": cu_seqlens,
        "rows": rows,
        "mask_sums": summary["mask_sum"][rows],
        "rollout_mask_sums": planned["rollout_mask_sums"][rows],
        "sample_weights": planned["sample_weights"][rows],
    }


# ---- plain Python lists


def list_summarize(tokens: list[list[int]], masks: list[list[int]]) -> dict[str, list[int]]:
    return {
        "total_length": [len(t) for t in tokens],
        "response_length": [len(m) for m in masks],
        "mask_sum": [sum(m) for m in masks],
    }


def list_plan(lengths: list[int], mask_sums: list[int], rollout_id: list[int], budget: int) -> dict[str, Any]:
    sums: dict[int, int] = {}
    for rollout, mask_sum in zip(rollout_id, mask_sums, strict=True):
        sums[rollout] = sums.get(rollout, 0) + mask_sum
    rollout_mask_sums = [sums[rollout] for rollout in rollout_id]
    weights = [1.0 / (len(sums) * m) if m else 0.0 for m in rollout_mask_sums]
    bins: list[list[int]] = []
    room: list[int] = []
    for sample in sorted(range(len(lengths)), key=lambda s: -lengths[s]):
        length = lengths[sample]
        for i, left in enumerate(room):
            if left >= length:
                bins[i].append(sample)
                room[i] = left - length
                break
        else:
            bins.append([sample])
            room.append(budget - length)
    return {"rollout_mask_sums": rollout_mask_sums, "sample_weights": weights, "bins": bins}


def list_pack(
    tokens: dict[int, list[int]],
    masks: dict[int, list[int]],
    mask_sums: list[int],
    planned: dict[str, Any],
    rows: list[int],
) -> dict[str, np.ndarray]:
    """One micro-batch."""
    all_tokens: list[int] = []
    labels: list[int] = []
    position_ids: list[int] = []
    segment_ids: list[int] = []
    loss_mask: list[int] = []
    cu_seqlens = [0]
    for segment, row in enumerate(rows):
        sample, mask = tokens[row], masks[row]
        prompt = len(sample) - len(mask)
        shifted = [0] * (prompt - 1) + mask + [0]
        all_tokens += sample
        labels += [token if m else IGNORED for token, m in zip([*sample[1:], 0], shifted, strict=True)]
        loss_mask += shifted
        position_ids += range(len(sample))
        segment_ids += [segment] * len(sample)
        cu_seqlens.append(len(all_tokens))
    return {
        "tokens": np.array(all_tokens, dtype=np.int32),
        "labels": np.array(labels, dtype=np.int32),
        "position_ids": np.array(position_ids, dtype=np.int32),
        "segment_ids": np.array(segment_ids, dtype=np.int32),
        "loss_mask": np.array(loss_mask, dtype=bool),
        "cu_seqlens": np.array(cu_seqlens, dtype=np.int32),
        "rows": np.array(rows, dtype=np.int64),
        "mask_sums": np.array([mask_sums[r] for r in rows], dtype=np.int64),
        "rollout_mask_sums": np.array([planned["rollout_mask_sums"][r] for r in rows], dtype=np.int64),
        "sample_weights": np.array([planned["sample_weights"][r] for r in rows], dtype=np.float64),
    }


# ---- the run


def same(packed: dict[str, np.ndarray], micro_batch: rollpack.MicroBatch) -> None:
    for name in FIELDS + PER_SAMPLE:
        mine, theirs = getattr(micro_batch, name), packed[name]
        assert mine.dtype == theirs.dtype, (name, mine.dtype, theirs.dtype)
        assert np.array_equal(mine, theirs), name


def written(micro_batch: rollpack.MicroBatch) -> int:
    return sum(getattr(micro_batch, name).nbytes for name in (*FIELDS, "cu_seqlens_padded", *PER_SAMPLE))


def measure(args: argparse.Namespace) -> dict[str, Any]:
    data = make(args.samples, args.tokens, args.shape, args.seed)
    num_tokens = int(data.token_offsets[-1])
    budget, dp_size = args.budget, args.dp_size

    summary = rollpack.summarize(data.table)
    plan = rollpack.plan(summary, max_tokens_per_gpu=budget, dp_size=dp_size)
    places = [(rank, k) for rank in range(dp_size) for k in range(plan.steps[0].num_micro_batches)]
    rows_of = [plan.rows(0, *place) for place in places]

    # Lists run on a part of the data where all of it would take too long; their times are scaled by tokens.
    part = args.list_fraction or min(1.0, 2_000_000 / num_tokens)
    list_rows = max(1, round(part * args.samples))
    list_batches = [rows.tolist() for rows in rows_of[: max(1, round(part * len(rows_of)))]]
    needed = set(range(list_rows)).union(*list_batches)
    tokens = {row: data.tokens[slice(*data.token_offsets[row : row + 2])].tolist() for row in needed}
    masks = {row: data.masks[slice(*data.mask_offsets[row : row + 2])].tolist() for row in needed}
    first_tokens, first_masks = [tokens[r] for r in range(list_rows)], [masks[r] for r in range(list_rows)]
    lengths, rollout_ids = np.diff(data.token_offsets), data.rollout_id.tolist()
    summarize_scale = num_tokens / sum(map(len, first_tokens))
    pack_scale = num_tokens / sum(len(tokens[r]) for rows in list_batches for r in rows)

    # The same results, before anything is timed.
    by_numpy, by_lists = numpy_summarize(data), list_summarize(first_tokens, first_masks)
    for name, values in by_numpy.items():
        assert np.array_equal(summary.column(name), values), name
        assert by_lists[name] == values[:list_rows].tolist(), name
    mask_sums, length_list = by_numpy["mask_sum"].tolist(), lengths.tolist()
    numpy_planned = numpy_plan(by_numpy, data.rollout_id, budget)
    list_planned = list_plan(length_list, mask_sums, rollout_ids, budget)
    placed = plan.to_arrow().sort_by("row")
    for name in ("rollout_mask_sum", "sample_weight"):
        for planned in (numpy_planned, list_planned):
            assert np.array_equal(placed[name].to_numpy(), planned[name + "s"]), name
    assert numpy_planned["bins"] == list_planned["bins"]
    total, number = 0, 0
    for rank in range(dp_size):
        for micro_batch in rollpack.pack(data.table, plan, dp_rank=rank):
            same(numpy_pack(data, by_numpy, numpy_planned, rows_of[number]), micro_batch)
            if number < len(list_batches):
                same(list_pack(tokens, masks, mask_sums, list_planned, list_batches[number]), micro_batch)
            total += written(micro_batch)
            number += 1
    assert number == len(rows_of)

    def packed() -> Iterator[rollpack.MicroBatch]:
        for rank in range(dp_size):
            yield from rollpack.pack(data.table, plan, dp_rank=rank)

    def drop(micro_batches: Iterator[Any]) -> None:
        for _ in micro_batches:
            pass

    # Filled, not left to zeros: pages that nobody wrote are all one page of the kernel's.
    large, small = ([np.full(size, value, np.uint8) for value in range(2)] for size in (total, total // len(rows_of)))

    def copy_cached() -> None:
        for _ in rows_of:
            np.copyto(small[1], small[0])

    ways: dict[tuple[str, str], tuple[float, Callable[[], Any]]] = {
        ("summarize", "rollpack"): (1, lambda: rollpack.summarize(data.table)),
        ("summarize", "numpy"): (1, lambda: numpy_summarize(data)),
        ("summarize", "count_nonzero"): (1, lambda: np.count_nonzero(data.masks)),
        ("summarize", "lists"): (summarize_scale, lambda: list_summarize(first_tokens, first_masks)),
        ("plan", "rollpack"): (1, lambda: rollpack.plan(summary, max_tokens_per_gpu=budget, dp_size=dp_size)),
        ("plan", "numpy"): (1, lambda: numpy_plan(by_numpy, data.rollout_id, budget)),
        ("plan", "lists"): (1, lambda: list_plan(length_list, mask_sums, rollout_ids, budget)),
        ("pack", "rollpack"): (1, lambda: drop(packed())),
        ("pack", "copy"): (1, lambda: np.copyto(large[1], large[0])),
        ("pack", "copy, cached"): (1, copy_cached),
        ("pack", "numpy"): (1, lambda: drop(numpy_pack(data, by_numpy, numpy_planned, rows) for rows in rows_of)),
        ("pack", "lists"): (
            pack_scale,
            lambda: drop(list_pack(tokens, masks, mask_sums, list_planned, rows) for rows in list_batches),
        ),
        ("pack, all kept", "rollpack"): (1, lambda: list(packed())),
        ("pack, all kept", "numpy"): (1, lambda: [numpy_pack(data, by_numpy, numpy_planned, rows) for rows in rows_of]),
    }
    times: dict[tuple[str, str], list[float]] = {way: [] for way in ways}
    gc.collect()
    gc.disable()  # as timeit does: the lists hold millions of objects
    for _ in range(args.repeat):
        for way, (scale, run) in ways.items():
            begin = time.perf_counter()
            result = run()
            times[way].append(scale * (time.perf_counter() - begin))
            del result
    gc.enable()
    return report(args, times, plan, total, num_tokens, summarize_scale, pack_scale, len(numpy_planned["bins"]))


def report(
    args: argparse.Namespace,
    times: dict[tuple[str, str], list[float]],
    plan: rollpack.Plan,
    total: int,
    num_tokens: int,
    summarize_scale: float,
    pack_scale: float,
    first_fit: int,
) -> dict[str, Any]:
    work: dict[str, Any] = {}
    for (verb, way), seconds in times.items():
        ratios = [other / mine for other, mine in zip(seconds, times[verb, "rollpack"], strict=True)]
        entry = {"seconds": statistics.median(seconds), "over_rollpack": statistics.median(ratios)}
        work.setdefault(verb, {})[way] = entry
    micro_batches = sum(step.num_micro_batches for step in plan.steps) * plan.settings.dp_size
    return {
        "machine": f"{cpu()}, {platform.system()} {platform.machine()}",
        "versions": {
            "rollpack": rollpack.__version__,
            "python": platform.python_version(),
            "numpy": np.__version__,
            "pyarrow": pa.__version__,
        },
        "samples": args.samples,
        "tokens": num_tokens,
        "shape": args.shape if args.shape == "lognormal" else f"{args.shape} {args.tokens}",
        "seed": args.seed,
        "budget": args.budget,
        "dp_size": args.dp_size,
        "rounds": args.repeat,
        "micro_batches": {"rollpack": micro_batches, "first fit": first_fit, "bound": -(-num_tokens // args.budget)},
        "imbalance": plan.imbalance,
        "pack_bytes": total,
        "pack_gb_per_second": total / 1e9 / work["pack"]["rollpack"]["seconds"],
        "pack_over_copy": 1 / work["pack"]["copy"]["over_rollpack"],
        "pack_over_cached_copy": 1 / work["pack"]["copy, cached"]["over_rollpack"],
        "summarize_over_count_nonzero": 1 / work["summarize"]["count_nonzero"]["over_rollpack"],
        "lists_scaled_by": {"summarize": summarize_scale, "pack": pack_scale},
        "work": work,
    }


def cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown CPU"
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} x {names[0]}" if names else platform.processor()


def show(result: dict[str, Any]) -> None:
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    print(f"{result['machine']}\n{versions}")
    print(
        f"{result['samples']:,} samples, {result['tokens']:,} tokens ({result['shape']}, seed {result['seed']}), budget "
        f"{result['budget']}, dp_size {result['dp_size']}, medians of {result['rounds']} interleaved rounds, one thread\n"
    )
    print(f"{'':16}{'rollpack':>12}{'numpy':>12}{'lists':>12}{'numpy / rollpack':>19}{'lists / rollpack':>19}")
    for verb, ways in result["work"].items():
        others = [ways.get(way) for way in ("numpy", "lists")]
        cells = [f"{1e3 * way['seconds']:9.1f} ms" if way else f"{'-':>12}" for way in (ways["rollpack"], *others)]
        cells += [f"{way['over_rollpack']:18.1f}x" if way else f"{'-':>19}" for way in others]
        print(f"{verb:16}", *cells, sep="")
    for verb, scale in result["lists_scaled_by"].items():
        if scale > 1:
            print(f"lists ran {verb} on 1/{scale:.1f} of the tokens; the time shown is scaled up by that")
    floor = result["work"]["summarize"]["count_nonzero"]["seconds"]
    print(
        f"\nsummarize is {result['summarize_over_count_nonzero']:.2f} x numpy.count_nonzero over the mask bytes "
        f"({1e3 * floor:.1f} ms)"
    )
    copy, cached = (result["work"]["pack"][way]["seconds"] for way in ("copy", "copy, cached"))
    print(
        f"pack writes {result['pack_bytes'] / 1e6:,.0f} MB at {result['pack_gb_per_second']:.1f} GB/s: "
        f"{result['pack_over_copy']:.2f} x a warm copy of as many bytes ({1e3 * copy:.1f} ms), "
        f"{result['pack_over_cached_copy']:.2f} x one within the cache ({1e3 * cached:.1f} ms)"
    )
    counts = ", ".join(f"{name} {count}" for name, count in result["micro_batches"].items())
    print(f"micro-batches: {counts}; imbalance over ranks {result['imbalance']:.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Time summarize, plan and pack beside numpy and beside Python lists.")
    parser.add_argument("--samples", type=int, default=8192)
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of each sample of --shape fixed")
    parser.add_argument(
        "--shape",
        choices=["fixed", "lognormal"],
        default="fixed",
        help="lognormal: lengths of median 2048 and sigma 1, clipped to 32768",
    )
    parser.add_argument("--budget", type=int, default=32768, help="max_tokens_per_gpu")
    parser.add_argument("--dp-size", type=int, default=8)
    parser.add_argument("--repeat", type=int, default=7, help="rounds")
    parser.add_argument("--list-fraction", type=float, help="the part of the data that lists run on; default: 2M tokens")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print all numbers as JSON")
    args = parser.parse_args()
    result = measure(args)
    if args.json:
        print(json.dumps(result, indent=2))
    else:
        show(result)


if __name__ == "__main__":
    main()
