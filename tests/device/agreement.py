"""On a device: the reducer and what goes with it are right in every precision."""

from __future__ import annotations

import dataclasses
import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from tests.device.lines import Line, at_most

import rollpack
from rollpack.testing import Cut, check_reducer, make_rollouts, verify
from rollpack.torch import LossReducer, attention_mask, micro_batches, token_logprobs, token_weights, weighted_sum, weights

ROOT = Path(__file__).parents[2]
#: Of losses and gradients against float64: a few last bits of the sums, or of the gradient in half precision.
LIMITS = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-10}
MODES = ("sample_mean", "prompt_mean", "token_mean", "constant")
CUTS = [
    Cut(1, 1, "zigzag", 100_000),
    Cut(1, 1, "zigzag", 512),
    Cut(3, 1, "zigzag", 512),
    Cut(1, 4, "zigzag", 512),
    Cut(2, 2, "contiguous", 512),
]


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def reducer(device: torch.device) -> Iterator[Line]:
    """Every mode, cut and dtype against float64; and the kit for other people's reducers."""
    table = make_rollouts(prompts=6, longest=480)
    reduce = LossReducer(backend="none")
    for agreement in verify(
        table,
        CUTS,
        modes=MODES,
        dtypes=list(LIMITS),
        reduce=lambda x, micro_batch: reduce(x.to(device), micro_batch.to(device)).cpu(),
    ):
        for dtype, limit in LIMITS.items():
            what = f"{agreement.loss_aggregation} {name(dtype)}, {len(CUTS)} cuts"
            yield at_most(f"{what}: loss off float64", agreement.loss[dtype], limit)
            yield at_most(f"{what}: gradient off float64", agreement.gradient[dtype], limit)
    for (dtype, limit), mode in zip(LIMITS.items(), MODES, strict=True):
        of_type = LossReducer(backend="ddp")
        report = check_reducer(
            lambda x, micro_batch, of_type=of_type, dtype=dtype: of_type(x.to(device, dtype), micro_batch.to(device)).cpu(),
            loss_aggregation=mode,
            divisor=64.0 if mode == "constant" else None,
            backend="ddp",
            tolerance=8 * limit,  # of sums of rounded parts
        )
        yield Line(
            f"check_reducer, {mode} {name(dtype)}", "; ".join(map(str, report.failures)) or "all hold", "all hold", report.ok
        )


def suite(device: torch.device) -> Iterator[Line]:
    """The reducer's own tests, with everything reduced on the device: float64, float32, bfloat16 and float16."""
    files = [str(ROOT / "tests" / "loss" / file) for file in ("test_reducer.py", "test_examples.py")]
    # A library's warning on a GPU is no fault of the reducer.
    options = ["-q", "-W", "default", "-p", "no:cacheprovider", "-p", "tests.device.on_device"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *files],
        cwd=ROOT,
        env={**os.environ, "ROLLPACK_DEVICE": str(device)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        print(done.stdout[-6000:], done.stderr[-2000:])
    *_, last = done.stdout.splitlines() or ["nothing was said"]
    yield Line("tests/loss: test_reducer.py and test_examples.py", last, "all pass", done.returncode == 0)


def like_the_cpu(device: torch.device) -> Iterator[Line]:
    """One large micro-batch: the same as on a CPU, and the same every time."""
    table = make_rollouts(prompts=24, longest=4096)
    (packed,) = rollpack.pack(table, rollpack.plan(table, max_tokens_per_gpu=1 << 22))
    values = torch.randn(len(packed.tokens), generator=torch.Generator().manual_seed(0))
    for dtype, limit in LIMITS.items():
        results = []
        for place in ("cpu", device, device):
            token_loss = values.to(place, dtype).requires_grad_()
            loss = LossReducer()(token_loss, packed.to(place))
            (gradient,) = torch.autograd.grad(loss, token_loss)
            results.append((loss.detach().cpu(), gradient.cpu()))
        (there, there_gradient), (here, here_gradient), again = results
        off = max((here - there).abs().item(), ((here_gradient - there_gradient).abs().max() / there_gradient.max()).item())
        yield at_most(f"{name(dtype)}, {len(values)} tokens: off the CPU", off, limit)
        same = torch.equal(here, again[0]) and torch.equal(here_gradient, again[1])
        yield Line(f"{name(dtype)}: the same bits again", "yes" if same else "no", "yes", same)


def kernels(device: torch.device) -> Iterator[Line]:
    """Triton and plain torch agree; on a CPU, interpreted."""
    from rollpack.torch import _kernel

    if device.type == "cuda":
        used = weights._kernel_of(torch.device("cuda", torch.cuda.current_device())) is not None
        yield Line("the reducer takes the Triton kernels", "yes" if used else "no", "yes", used)
    generator = torch.Generator().manual_seed(0)
    positions = 10_001
    mask = torch.rand(positions, generator=generator) < 0.6
    segment_ids = torch.randint(-1, 50, (positions,), generator=generator)
    values = torch.rand(positions, generator=generator).masked_fill(~mask, torch.inf)
    for dtype, limit in LIMITS.items():
        of_samples = torch.rand(50, generator=generator, dtype=weights.accumulation_dtype(values.to(dtype))) / positions
        plain = token_weights(mask, segment_ids, of_samples)  # on a CPU: never by the kernels
        on_device = [tensor.to(device) for tensor in (mask, segment_ids, of_samples)]
        same = torch.equal(_kernel.token_weights(*on_device).cpu(), plain)
        yield Line(f"token weights by Triton, {name(plain.dtype)}", "equal" if same else "differ", "equal", same)
        leaves = [values.to(place, dtype).requires_grad_() for place in ("cpu", device)]
        expected, found = weighted_sum(leaves[0], plain), _kernel.weighted_sum(leaves[1], plain.to(device))
        (wanted,), (gradient,) = (torch.autograd.grad(x, leaf) for x, leaf in zip((expected, found), leaves, strict=True))
        off = max((found.cpu() - expected).abs().item(), ((gradient.cpu() - wanted).abs().max() / wanted.max()).item())
        # The interpreter cuts bfloat16 off where a GPU rounds.
        yield at_most(f"weighted sum by Triton, {name(dtype)}: off plain torch", off, 2 * limit)


def stream(device: torch.device) -> Iterator[Line]:
    """``micro_batches`` gives what ``pack`` gives, whatever the device is busy with, and nothing is overwritten later."""
    table = make_rollouts(prompts=32, longest=2048)
    plan = rollpack.plan(table, max_tokens_per_gpu=2048, loss_aggregation="prompt_mean")
    side = 1024 if device.type == "cuda" else 16
    busy = torch.ones(side, side, device=device)
    for prefetch in (1, 3):
        found = []
        for micro_batch in micro_batches(table, plan, device=device, prefetch=prefetch, sample_columns=["reward"]):
            for _ in range(4):
                busy = busy @ busy / side
            found.append(micro_batch)
        expected = [m.to("cpu") for m in rollpack.pack(table, plan, sample_columns=["reward"])]
        same = len(found) == len(expected) and all(map(_equal, found, expected))
        what = f"{len(expected)} micro-batches, prefetch {prefetch}: the same as packed"
        yield Line(what, "yes" if same else "no", "yes", same)


def _equal(left: rollpack.MicroBatch[torch.Tensor], right: rollpack.MicroBatch[torch.Tensor]) -> bool:
    for field in dataclasses.fields(left):
        a, b = getattr(left, field.name), getattr(right, field.name)
        pairs = [(a[key], b[key]) for key in b] if isinstance(b, dict) else [(a, b)]
        for x, y in pairs:
            same = torch.equal(x.cpu(), y) and x.dtype == y.dtype if isinstance(y, torch.Tensor) else x == y
            if not same:
                return False
    return True


def logprobs_and_attention(device: torch.device) -> Iterator[Line]:
    """``token_logprobs`` against log_softmax, and attention through the mask against each sequence alone."""
    table = make_rollouts(prompts=1, longest=200)
    (micro_batch,) = (m.to(device) for m in rollpack.pack(table, rollpack.plan(table, max_tokens_per_gpu=1 << 20)))
    positions = len(micro_batch.tokens)
    generator = torch.Generator().manual_seed(0)
    micro_batch.labels[micro_batch.labels >= 0] %= 4096
    for dtype, limit in {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2**-6}.items():
        logits = torch.randn(positions, 4096, generator=generator).to(device, dtype).requires_grad_()
        found = token_logprobs(logits, micro_batch)
        trained = micro_batch.labels >= 0
        exact = logits.double().log_softmax(-1).gather(1, micro_batch.labels.clamp(min=0)[:, None])[:, 0].where(trained, 0)
        gradients = [torch.autograd.grad(x.sum(), logits)[0] for x in (found, exact)]
        off = max((found - exact).abs().max().item(), (gradients[0] - gradients[1]).abs().max().item())
        yield at_most(f"token_logprobs {name(dtype)}: off float64", off, limit)
    heads = [torch.randn(1, 2, positions, 32, generator=generator).to(device) for _ in range(3)]
    attend = torch.nn.functional.scaled_dot_product_attention
    packed = attend(*heads, attn_mask=attention_mask(micro_batch))
    bounds = micro_batch.cu_seqlens_padded.tolist()
    alone = [attend(*(x[:, :, a:b] for x in heads), is_causal=True) for a, b in itertools.pairwise(bounds)]
    yield at_most("attention by the mask: off one by one", (packed - torch.cat(alone, 2)).abs().max().item(), 1e-3)
