"""Run by test_kernel.py beside test_reducer.py: from here on the reducer takes the Triton kernels, interpreted on the CPU.

TRITON_INTERPRET=1 has to be set before Triton is imported, so this is a pytest of its own.
"""

import math
from collections import Counter

import pytest
import torch

from rollpack.torch import _kernel, token_weights, weighted_sum, weights

CALLS = Counter()
PLAIN = {"token_weights": token_weights, "weighted_sum": weighted_sum}


class Counted:
    """The kernels, counted."""

    def __getattr__(self, name):
        CALLS[name] += 1
        return getattr(_kernel, name)


def everywhere(values, *others):
    """As ``weights._kernel``, on a CPU."""
    fits = len(values) and not any(other.requires_grad for other in others) and not values.is_meta
    return Counted() if fits and not torch.compiler.is_compiling() else None


@pytest.fixture
def plain(monkeypatch):
    """In its place: plain torch, as on a device without Triton."""
    monkeypatch.setattr(weights, "_kernel", lambda *_: None)


weights._kernel = everywhere


def test_the_reducer_took_the_kernels():
    assert min(CALLS["token_weights"], CALLS["weighted_sum"]) > 20


def made(positions, dtype):
    generator = torch.Generator().manual_seed(positions)
    accumulated = torch.float64 if dtype == torch.float64 else torch.float32
    segment_ids = torch.randint(-1, 7, (positions,), generator=generator)
    mask = torch.rand(positions, generator=generator) < 0.6
    values = torch.randn(positions, generator=generator).to(dtype).masked_fill(~mask, math.nan)
    return mask, segment_ids, torch.rand(7, dtype=accumulated, generator=generator) / positions, values


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("positions", [1, 7, 4095, 4096, 4097, 10_001])
def test_kernels_and_plain_torch_agree(plain, positions, dtype):
    mask, segment_ids, of_samples, values = made(positions, dtype)
    found = _kernel.token_weights(mask, segment_ids, of_samples)
    expected = token_weights(mask, segment_ids, of_samples)
    assert torch.equal(found, expected)
    results = []
    for reduce in (_kernel.weighted_sum, weighted_sum):
        leaf = values.clone().requires_grad_()
        total = reduce(leaf, expected)
        (total * 3).backward()
        results.append((total.detach(), leaf.grad))
    rounding = 1e-15 if dtype == torch.float64 else 1e-6
    torch.testing.assert_close(results[0][0], results[1][0], rtol=rounding, atol=rounding)
    # A last bit of half precision: the interpreter cuts off where a GPU rounds.
    rounding = {torch.bfloat16: 2**-7, torch.float16: 2**-10}.get(dtype, 0.0)
    torch.testing.assert_close(results[0][1], results[1][1], rtol=rounding, atol=0)
    assert results[0][1].dtype == dtype


def test_what_is_not_contiguous_is_read_right(plain):
    values = torch.arange(12.0).reshape(6, 2)[:, 1]
    mask, segment_ids = torch.tensor([[True, False]] * 6)[:, 0], torch.zeros(6, 2, dtype=torch.int32)[:, 0]
    found = _kernel.token_weights(mask, segment_ids, torch.tensor([2.0, 3.0])[::2])
    assert found.tolist() == [2.0] * 6
    assert _kernel.weighted_sum(values, found).item() == 2 * (1 + 3 + 5 + 7 + 9 + 11)


def test_a_sample_that_there_is_not_is_seen():
    found = _kernel.token_weights(torch.tensor([True, True, False]), torch.tensor([0, 5, 5]), torch.ones(2))
    assert found.tolist() == [1.0, pytest.approx(math.nan, nan_ok=True), 0.0]


def test_second_derivatives_are_those_of_plain_torch():
    values, scale = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    total = _kernel.weighted_sum(values * scale, torch.tensor([1.0, 0.0, 2.0]))
    (first,) = torch.autograd.grad(total, values, create_graph=True)
    first.sum().backward()  # of w s
    assert scale.grad.tolist() == [1.0, 0.0, 2.0]
