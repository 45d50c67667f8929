"""token_logprobs against log_softmax and gather."""

import math

import pyarrow as pa
import pytest
import torch

import rollpack
from rollpack.torch import logprobs, token_logprobs

TABLE = pa.table({"tokens": [[1, 2, 3, 4], [5, 6, 0]], "loss_mask": [[1, 0, 1], [1]], "response_length": [3, 1]})


@pytest.fixture
def micro_batch():
    plan = rollpack.plan(TABLE, max_tokens_per_gpu=100, pad_to_multiple_of=4)
    (packed,) = rollpack.pack(TABLE, plan)
    assert packed.labels.tolist() == [2, -100, 4, -100, -100, 0, -100, -100]
    return packed


@pytest.mark.parametrize("chunk", [1, 14, 1 << 20])
def test_values_and_gradient_are_those_of_log_softmax(micro_batch, monkeypatch, chunk):
    monkeypatch.setattr(logprobs, "_CHUNK", chunk)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(8, 7, dtype=torch.float64, generator=generator).requires_grad_()
    upstream = torch.randn(8, dtype=torch.float64, generator=generator)
    found = token_logprobs(logits, micro_batch)
    found.backward(upstream)
    gradient, logits.grad = logits.grad, None
    labels = torch.from_numpy(micro_batch.labels).long()
    plain = torch.log_softmax(logits, dim=1).gather(1, labels.clamp(min=0)[:, None])[:, 0] * (labels >= 0)
    plain.backward(upstream)
    torch.testing.assert_close(found, plain, rtol=1e-14, atol=1e-15)
    torch.testing.assert_close(gradient, logits.grad, rtol=1e-13, atol=1e-15)
    assert torch.autograd.gradcheck(lambda x: token_logprobs(x, micro_batch), (logits,))


def test_untrained_positions_are_exactly_zero_whatever_the_logits_hold(micro_batch):
    logits = torch.zeros(8, 7)
    untrained = torch.from_numpy(micro_batch.labels) < 0
    logits[untrained] = math.nan
    logits.requires_grad_()
    found = token_logprobs(logits, micro_batch)
    assert found[untrained].tolist() == [0.0] * 5
    assert found[~untrained].tolist() == pytest.approx([-math.log(7)] * 3, rel=1e-6)
    found.sum().backward()
    assert torch.equal(logits.grad[untrained], torch.zeros(5, 7))
    assert torch.isfinite(logits.grad).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_summed_in_float32(micro_batch, dtype):
    logits = torch.zeros(8, 7, dtype=dtype, requires_grad=True)
    found = token_logprobs(logits, micro_batch)
    assert found.dtype == torch.float32
    assert found[0].item() == pytest.approx(-math.log(7), rel=1e-6)
    found.sum().backward()
    assert logits.grad.dtype == dtype


def test_nothing_of_the_size_of_the_logits_is_kept(micro_batch):
    """What backward holds on to, beside the logits themselves, is a few numbers a position."""
    logits = torch.randn(8, 5000, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        token_logprobs(logits, micro_batch)
    assert sum(t.numel() for t in kept if t.data_ptr() != logits.data_ptr()) <= 3 * 8


def test_wrong_logits_are_told(micro_batch):
    with pytest.raises(rollpack.RollpackError, match=r"logits have shape \[1, 8, 7\]; they have to be \[8, vocabulary\]"):
        token_logprobs(torch.zeros(1, 8, 7), micro_batch)
    with pytest.raises(rollpack.RollpackError, match=r"logits are torch.int64; they have to be floating"):
        token_logprobs(torch.zeros(8, 7, dtype=torch.int64), micro_batch)
    with pytest.raises(rollpack.RollpackError, match="label 4 is not below the vocabulary of 4"):
        token_logprobs(torch.zeros(8, 4), micro_batch)


def test_a_second_derivative_is_refused_and_not_left_out(micro_batch):
    logits = torch.ones(8, 7, requires_grad=True)
    loss = token_logprobs(logits, micro_batch).sum() + (logits**2).sum()
    with pytest.raises(rollpack.RollpackError, match="no second derivative"):
        torch.autograd.grad(loss, logits, create_graph=True)
