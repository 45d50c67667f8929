"""The reducer's time, forward and backward, beside a loop over samples and beside a bare dot: one run, one table.

    python -m tests.benchmarks.reducer

One thread. Each way is timed in turn, again and again; medians are shown. ``first`` is the first call for a micro-batch,
which works out the weights; the others find them.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import torch

import rollpack
from rollpack.torch import LossReducer, token_weights

SHAPES = [(16, 2048), (128, 512), (1024, 128)]


def batch(samples: int, tokens: int) -> rollpack.MicroBatch:
    random = np.random.default_rng(0)
    masks = (random.random((samples, tokens)) < 0.8).astype(np.uint8)
    masks[:, 0] = 0
    table = pa.table(
        {
            "tokens": list(np.zeros((samples, tokens), np.int32)),
            "loss_mask": list(masks),
            "rollout_id": np.arange(samples) // 2,
        }
    )
    plan = rollpack.plan(table, max_tokens_per_gpu=samples * tokens)
    (packed,) = rollpack.pack(table, plan)
    return packed.to("cpu")


def loop(
    token_loss: torch.Tensor, lengths: list[int], masks: list[torch.Tensor], sums: list[float], count: int
) -> torch.Tensor:
    """What trainers do: split, multiply, sum, divide, one sample at a time."""
    parts = token_loss.split(lengths)
    return sum((x * m).sum() / s for x, m, s in zip(parts, masks, sums, strict=True)) / count


def timed(run: Callable[[], torch.Tensor], values: torch.Tensor) -> float:
    values.grad = None
    started = time.perf_counter()
    run().backward()
    return time.perf_counter() - started


def measure(samples: int, tokens: int, repeat: int) -> dict[str, float]:
    micro_batch = batch(samples, tokens)
    values = torch.rand(len(micro_batch.tokens), requires_grad=True)
    weights = token_weights(micro_batch.loss_mask, micro_batch.segment_ids, micro_batch.sample_weights.float())
    lengths = micro_batch.cu_seqlens.diff().tolist()
    masks = [m.float() for m in micro_batch.loss_mask.split(lengths)]
    sums = [float(s) for s in micro_batch.rollout_mask_sums]
    reducer = LossReducer()
    ways = {
        "loop": lambda: loop(values, lengths, masks, sums, micro_batch.num_rollouts),
        "dot": lambda: torch.dot(values, weights),
        "first": lambda: LossReducer()(values, micro_batch),
        "reducer": lambda: reducer(values, micro_batch),
    }
    results = {}
    for name, way in ways.items():  # all ways agree before they are timed
        values.grad = None
        way().backward()
        results[name] = (way().item(), values.grad.clone())
    for value, gradient in results.values():
        torch.testing.assert_close(torch.tensor(value), torch.tensor(results["loop"][0]), rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(gradient, results["loop"][1], rtol=1e-4, atol=1e-9)
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeat):
        for name, way in ways.items():
            times[name].append(timed(way, values))
    return {name: statistics.median(t) for name, t in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=200, help="rounds (default: 200)")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = {f"{s} x {t}": measure(s, t, arguments.repeat) for s, t in SHAPES}
    if arguments.json:
        print(json.dumps(rows))
        return
    versions = f"torch {torch.__version__}, rollpack {rollpack.__version__}, {platform.machine()}"
    print(f"{versions}, one thread, {arguments.repeat} rounds")
    heads = ("loop us", "dot us", "reducer us", "first us", "loop/reducer", "reducer/dot")
    print(f"{'samples x tokens':>18} {heads[0]:>9} {heads[1]:>8} {heads[2]:>11} {heads[3]:>9} {heads[4]:>13} {heads[5]:>12}")
    for shape, t in rows.items():
        us = {name: 1e6 * value for name, value in t.items()}
        print(
            f"{shape:>18} {us['loop']:>9.0f} {us['dot']:>8.1f} {us['reducer']:>11.1f} {us['first']:>9.1f}"
            f" {us['loop'] / us['reducer']:>13.1f} {us['reducer'] / us['dot']:>12.2f}"
        )


if __name__ == "__main__":
    main()
