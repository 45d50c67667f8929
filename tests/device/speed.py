"""On a device: time against bytes, no waiting, overlap, memory, and capture. What has an aim is judged on a GPU alone."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from typing import Any

import torch
from tests.benchmarks.reducer import batch, loop
from tests.benchmarks.stream import rollouts
from tests.device.lines import Line, at_least, at_most, captured, seconds, wait

import rollpack
from rollpack.torch import LossReducer, Metrics, micro_batches, token_logprobs


def bandwidth(device: torch.device, size: int) -> float:
    """Bytes a second, read and written, of copying ``size`` bytes from one place on the device to another."""
    source = torch.zeros(size // 4, device=device)
    target = torch.empty_like(source)
    replay, _ = captured(device, lambda: target.copy_(source))
    return 2 * size / seconds(device, replay)


def plain(token_loss: torch.Tensor, mask: torch.Tensor, segment_ids: torch.Tensor, of_samples: torch.Tensor) -> torch.Tensor:
    """The formula, as one would write it for torch.compile."""
    return (torch.where(mask, token_loss, 0).float() * of_samples[segment_ids]).sum()


def reducer(device: torch.device) -> Iterator[Line]:
    """Forward and backward of new micro-batches, against the bytes, a loop over samples, and torch.compile."""
    gpu = device.type == "cuda"
    # An odd number of positions, as without padding: loads are then narrow.
    samples, tokens = (4095, 2049) if gpu else (15, 257)
    micro_batch = batch(samples, tokens).to(device)
    positions = len(micro_batch.tokens)
    copied = bandwidth(device, 1 << 28 if gpu else 1 << 22)
    yield Line("copy on the device, read and written", f"{copied / 1e9:.0f} GB/s")
    segment_ids, mask, of_samples = micro_batch.segment_ids, micro_batch.loss_mask, micro_batch.sample_weights.float()
    compiled = torch.compile(plain, dynamic=False) if gpu else plain
    lengths = micro_batch.cu_seqlens.diff().tolist()
    masks = [m.float() for m in mask.split(lengths)]
    sums = [float(s) for s in micro_batch.rollout_mask_sums.tolist()]

    def by_sample(token_loss: torch.Tensor) -> torch.Tensor:
        return loop(token_loss, lengths, masks, sums, micro_batch.num_rollouts)

    def gradient(loss: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(loss, values)[0]

    for dtype in (torch.float32, torch.bfloat16):
        values = torch.rand(positions, device=device).to(dtype).requires_grad_()

        known = LossReducer()
        ways = {  # a new reducer knows no weights yet
            "first term": lambda values=values: gradient(LossReducer()(values, micro_batch), values),
            "another term": lambda values=values, known=known: gradient(known(values, micro_batch), values),
            "torch.compile": lambda values=values: gradient(compiled(values, mask, segment_ids, of_samples), values),
        }
        rounding = 1e-2 if dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(ways["first term"](), ways["torch.compile"](), rtol=rounding, atol=0)
        times = {}
        for name, way in ways.items():
            replay, _ = captured(device, way)
            times[name] = seconds(device, replay)
        what = f"{positions / 1e6:.3g}M {str(dtype).removeprefix('torch.')}"
        # Read for the loss and again for the gradient: mask and segment. Read once: token losses. Written once: gradients.
        must = positions * 2 * (mask.itemsize + segment_ids.itemsize + values.itemsize)
        share = must / times["first term"] / copied
        yield at_least(f"reducer, {what}: of copy bandwidth, forward and backward", 100 * share, 70, " %", judged=gpu)
        # Its weights are there: of 4 bytes, read for the loss and for the gradient.
        must = positions * 2 * (4 + values.itemsize)
        share = must / times["another term"] / copied
        yield at_least(f"reducer, {what}: the same for another term of the loss", 100 * share, 70, " %", judged=gpu)
        if gpu:
            slower = times["first term"] / times["torch.compile"]
            yield at_most(f"reducer, {what}: time over torch.compile's", slower, 1.1)
        if dtype == torch.float32:
            looped = seconds(device, lambda way=by_sample, values=values: gradient(way(values), values), 1)
            eager = seconds(device, ways["first term"])
            yield at_least(
                f"reducer, {what}: a loop over samples takes so many times as long", looped / eager, 1, judged=gpu
            )
            yield Line(f"reducer, {what}: host and device, not captured", f"{1e6 * eager:.0f} us")


def graph(device: torch.device) -> Iterator[Line]:
    """A captured loss and gradient, replayed on other values, another mask and other weights."""
    micro_batch = batch(16, 256).to(device)
    values = torch.rand(len(micro_batch.tokens), device=device).requires_grad_()
    reduce = LossReducer()
    reduce(values, micro_batch)  # knows weights by now, which the graph is not to hold on to

    def work() -> tuple[torch.Tensor, torch.Tensor]:
        loss = reduce(values, micro_batch)
        return loss.detach(), torch.autograd.grad(loss, values)[0]

    replay, outputs = captured(device, work)
    with torch.no_grad():
        values.copy_(torch.rand_like(values))
    micro_batch.loss_mask[::3] = False
    micro_batch.sample_weights.mul_(2)
    outputs = replay() or outputs
    same = all(map(torch.equal, outputs, work()))
    yield Line(
        "captured in a CUDA graph, and replayed on new data", "the same bits" if same else "differs", "the same bits", same
    )


class Model(torch.nn.Module):
    """Enough of one: tokens [T] in, logits [T, 512] out."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.head = torch.nn.Linear(64, 512, device=device)
        self.register_buffer("frequencies", torch.arange(64.0, device=device))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.sin(tokens[:, None] * self.frequencies))


def no_sync(device: torch.device) -> Iterator[Line]:
    """A training step in which every wait of the host for the device is an error."""
    table = rollouts(64)
    plan = rollpack.plan(table, max_tokens_per_gpu=1 << 14)
    model = Model(device)
    optimizer = torch.optim.AdamW(model.parameters())
    reduce, metrics = LossReducer(), Metrics({"loss": "sample_mean", "worst": "max"})
    last: list[torch.Tensor] = []
    for _ in range(2):  # what is made at first use may wait
        with reduce.step():
            for micro_batch in micro_batches(table, plan, device=device):
                micro_batch.labels.remainder_(512)
                token_loss = -token_logprobs(model(micro_batch.tokens), micro_batch)
                loss = reduce(token_loss, micro_batch) + 0.1 * reduce(token_loss, micro_batch, loss_aggregation="token_mean")
                loss.backward()
                metrics.add(micro_batch, {"loss": token_loss, "worst": token_loss})
                last = [loss.detach()]
        optimizer.step()
        optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("error")
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("default")
    wait(device)
    ok = math.isfinite(last[0].item()) and len(metrics.log()) == 2
    yield Line("a step where each wait of the host is an error", "none" if ok else "no finite loss", "none", ok)


def overlap(device: torch.device) -> Iterator[Line]:
    """Packing and copying beside computing; pinned beside pageable."""
    gpu = device.type == "cuda"
    table = rollouts(4096 if gpu else 64)
    plan = rollpack.plan(table, max_tokens_per_gpu=1 << 14)
    count = plan.steps[0].num_micro_batches
    side = 4096 if gpu else 64
    matrix = torch.ones(side, side, device=device, dtype=torch.bfloat16 if gpu else torch.float32)
    result = torch.empty_like(matrix)

    def compute(times: int) -> None:
        for _ in range(times):
            torch.mm(matrix, matrix, out=result)

    def step(tokens: torch.Tensor, times: int) -> None:
        compute(times)
        result[0, 0] = tokens.sum()  # waits for their copy

    def run(times: int) -> None:
        for micro_batch in micro_batches(table, plan, device=device):
            step(micro_batch.tokens, times)

    def compute_alone(times: int) -> None:
        for _ in range(count):
            step(resident, times)

    def pageable() -> None:
        for micro_batch in rollpack.pack(table, plan):
            step(micro_batch.to(device).tokens, 0)

    resident = torch.ones(1 << 14, dtype=torch.int64, device=device)
    once = seconds(device, lambda: compute(1))
    packing = seconds(device, lambda: run(0), 1)
    yield Line(f"packing and copying {count} micro-batches of 16k tokens", f"{1e3 * packing:.1f} ms")
    for share in (0.5, 2.0):
        times = max(1, round(share * packing / count / once))
        computing = seconds(device, lambda times=times: compute_alone(times), 1)
        both = seconds(device, lambda times=times: run(times), 1)
        ratio = both / max(computing, packing)
        what = f"loop, computing {computing / packing:.2g} x as long as packing: time over the larger of both"
        yield at_most(what, ratio, 1.1, judged=gpu)
    ratio = seconds(device, pageable, 1) / packing
    yield at_least("pack(...).to(device), pageable: time over micro_batches'", ratio, 1, judged=gpu)
    if gpu:
        size = 16 * (1 << 20)
        there = torch.empty(size, dtype=torch.uint8, device=device)
        for kind in ("pageable", "pinned"):
            here = torch.zeros(size, dtype=torch.uint8, pin_memory=kind == "pinned")
            taken = seconds(device, lambda here=here: there.copy_(here, non_blocking=True))
            yield Line(f"copy of 16 MiB to the device, {kind}", f"{size / taken / 1e9:.1f} GB/s")


def memory(device: torch.device) -> Iterator[Line]:
    """What is held on the device while the loop runs, and after it was left early."""
    table = rollouts(512)
    plan = rollpack.plan(table, max_tokens_per_gpu=1 << 14)
    prefetch = 2

    def held() -> int:
        gc.collect()
        return torch.cuda.memory_allocated(device)

    before = held()
    largest = 0
    for micro_batch in micro_batches(table, plan, device=device, prefetch=1):
        largest = max(largest, sum(s.nbytes() for s in _storages(micro_batch)))
    del micro_batch
    wait(device)
    torch.cuda.reset_peak_memory_stats(device)
    for micro_batch in micro_batches(table, plan, device=device, prefetch=prefetch):
        micro_batch.tokens.sum()
    del micro_batch
    peak = torch.cuda.max_memory_allocated(device) - before
    # int32 that was widened stays beside it while its micro-batch is made; blocks are of 512 bytes at least.
    limit = (prefetch + 2) * largest * 1.05 + (1 << 20)
    yield at_most(f"memory on the device, prefetch {prefetch}: MB", peak / 1e6, limit / 1e6)
    yield Line(
        "of which the caching allocator had in use at most",
        f"{torch.cuda.memory_stats(device)['active_bytes.all.peak'] / 1e6:.3g} MB",
    )
    for micro_batch in micro_batches(table, plan, device=device):
        del micro_batch
        break
    yield at_most("left after a loop that was left early: MB", (held() - before) / 1e6, 0.0)


def _storages(micro_batch: rollpack.MicroBatch[torch.Tensor]) -> list[Any]:
    """Each storage of its tensors once."""
    tensors = [*vars(micro_batch).values(), *micro_batch.columns.values(), *micro_batch.mode_weights.values()]
    storages = [tensor.untyped_storage() for tensor in tensors if isinstance(tensor, torch.Tensor)]
    return list({storage.data_ptr(): storage for storage in storages}.values())
