"""``micro_batches`` beside a DataLoader that builds tensors from lists, and a plain copy; the memory of ``token_logprobs``.

    python -m tests.benchmarks.stream

One plan, one order, and the same tensors, which is asserted before anything is timed. The ways:

- ``micro_batches``: from an Arrow table, packed by one background thread.
- ``loader``, ``loader, 1 worker``: a DataLoader over Python lists of tokens and masks, in this process or in one other.
  The lists are there already. It makes the fields that a model and a loss need, and no others.
- ``copy``: every tensor of the micro-batches that were made before, into new memory.

torch has one thread. One round runs every way once; times are medians over rounds, ratios medians of each round's ratio.
Memory is how much the peak of a process of its own grows once its logits are there, over the bytes of the logits.
"""

from __future__ import annotations

import argparse
import dataclasses
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch.utils.data import DataLoader, Dataset

import rollpack
from rollpack.torch import micro_batches, token_logprobs

FIELDS = ("tokens", "labels", "position_ids", "segment_ids", "loss_mask", "cu_seqlens")
Batch = tuple[torch.Tensor, ...]
POSITIONS, VOCABULARY = 2048, 64_000


def rollouts(samples: int) -> pa.Table:
    """A long tail of lengths; the prompt is a quarter; stretches of the response are not trained."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(1024), 1, samples), 8, 16_384).astype(int)
    return pa.table(
        {
            "tokens": [rng.integers(0, 150_000, n, dtype=np.int32) for n in lengths],
            "loss_mask": [np.repeat(rng.random(n // 64 + 1) < 0.8, 64)[: n - n // 4].astype(np.uint8) for n in lengths],
        }
    )


class Lists(Dataset[Batch]):
    """A micro-batch an item, from lists, as trainers do it: one tensor a sample and field, then joined."""

    def __init__(self, table: pa.Table, plan: rollpack.Plan) -> None:
        self.tokens, self.masks = table["tokens"].to_pylist(), table["loss_mask"].to_pylist()
        self.rows = [plan.rows(0, 0, i).tolist() for i in range(plan.steps[0].num_micro_batches)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Batch:
        parts: list[Batch] = []
        for segment, row in enumerate(self.rows[index]):
            tokens = torch.tensor(self.tokens[row])
            n, mask = len(tokens), torch.zeros(len(tokens), dtype=torch.bool)
            response = torch.tensor(self.masks[row], dtype=torch.bool)
            mask[n - 1 - len(response) : n - 1] = response
            labels = torch.where(mask, tokens.roll(-1), -100)
            parts.append((tokens, labels, torch.arange(n), torch.full((n,), segment), mask))
        lengths = torch.tensor([0, *(len(part[0]) for part in parts)])
        return *map(torch.cat, zip(*parts, strict=True)), lengths.cumsum(0).int()


def consume(batches: Iterable[Any]) -> None:
    for _ in batches:
        pass


def throughput(samples: int, budget: int, repeat: int) -> None:
    table = rollouts(samples)
    plan = rollpack.plan(table, max_tokens_per_gpu=budget)
    lists = Lists(table, plan)
    made = list(micro_batches(table, plan, device="cpu"))
    for ours, theirs in zip(made, lists, strict=False):  # a Dataset has no end
        for name, tensor in zip(FIELDS, theirs, strict=True):
            torch.testing.assert_close(getattr(ours, name), tensor, rtol=0, atol=0)
    tensors = [[v for f in dataclasses.fields(m) if isinstance(v := getattr(m, f.name), torch.Tensor)] for m in made]
    size = sum(t.nbytes for of in tensors for t in of)
    needed = sum(getattr(m, name).nbytes for m in made for name in FIELDS)
    tokens = sum(len(m.tokens) for m in made)

    def copied() -> Iterator[list[torch.Tensor]]:
        for of in tensors:
            yield [tensor.clone() for tensor in of]

    ways: dict[str, tuple[int, Callable[[], Iterable[Any]]]] = {
        "micro_batches": (size, lambda: micro_batches(table, plan, device="cpu")),
        "loader": (needed, lambda: DataLoader(lists, batch_size=None)),
        "loader, 1 worker": (needed, lambda: DataLoader(lists, batch_size=None, num_workers=1)),
        "copy": (size, copied),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeat):
        for name, (_, way) in ways.items():
            started = time.perf_counter()
            consume(way())
            times[name].append(time.perf_counter() - started)
    print(
        f"{samples} samples, {tokens / 1e6:.1f}M tokens, {len(made)} micro-batches; medians of {repeat} rounds, one thread"
    )
    print(f"{'':<18}{'ms':>9}{'M tokens/s':>12}{'MB made':>9}{'time / micro_batches':>22}")
    for name, (nbytes, _) in ways.items():
        median = statistics.median(times[name])
        ratio = statistics.median(a / b for a, b in zip(times[name], times["micro_batches"], strict=True))
        print(f"{name:<18}{1e3 * median:>9.1f}{tokens / median / 1e6:>12.1f}{nbytes / 1e6:>9.0f}{ratio:>22.2f}")


# ---- memory, in a process of its own


def plain(logits: torch.Tensor, micro_batch: rollpack.MicroBatch[torch.Tensor]) -> torch.Tensor:
    labels = micro_batch.labels
    return torch.log_softmax(logits, dim=1).gather(1, labels.clamp(min=0)[:, None])[:, 0].masked_fill(labels < 0, 0)


LOGPROBS = {"token_logprobs": token_logprobs, "log_softmax(...).gather(...)": plain}


def grown(way: str) -> None:
    """Print by how much the peak grows: forward, and forward with backward."""
    rows = {"tokens": [np.arange(POSITIONS, dtype=np.int32)], "loss_mask": [np.ones(POSITIONS - 1, np.uint8)]}
    table = pa.table(rows)
    (micro_batch,) = (m.to("cpu") for m in rollpack.pack(table, rollpack.plan(table, micro_batch_size=1)))
    logits = torch.empty(POSITIONS, VOCABULARY).uniform_(-1, 1).requires_grad_()
    # What is loaded at first use is not of the logits' making.
    micro_batch.labels.clamp_(max=7)
    LOGPROBS[way](torch.zeros(POSITIONS, 8, requires_grad=True), micro_batch).sum().backward()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    loss = LOGPROBS[way](logits, micro_batch).sum()
    forward = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    loss.backward()
    both = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    unit = logits.nbytes / 1024
    print(f"{way:<30}{(forward - before) / unit:>9.2f}{(both - before) / unit:>22.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=2048, help="default: 2048")
    parser.add_argument("--budget", type=int, default=16_384, help="tokens of a micro-batch (default: 16384)")
    parser.add_argument("--repeat", type=int, default=9, help="rounds (default: 9)")
    parser.add_argument("--memory", choices=LOGPROBS, help="only the memory of this one")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.memory:
        grown(arguments.memory)
        return
    print(f"torch {torch.__version__}, rollpack {rollpack.__version__}, {platform.machine()}")
    # Memory first: the peak that a new process begins with is what this one holds.
    size = POSITIONS * VOCABULARY * 4 / 1e6
    print(f"peak beside float32 logits [{POSITIONS}, {VOCABULARY}] ({size:.0f} MB), over their size")
    print(f"{'':<30}{'forward':>9}{'forward and backward':>22}", flush=True)
    for way in LOGPROBS:
        subprocess.run([sys.executable, "-m", "tests.benchmarks.stream", "--memory", way], check=True)
    print()
    throughput(arguments.samples, arguments.budget, arguments.repeat)


if __name__ == "__main__":
    main()
