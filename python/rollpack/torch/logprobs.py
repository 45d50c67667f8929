"""``token_logprobs``: the log-probability of each trained token, without a copy of the logits."""

from __future__ import annotations

from typing import Any

import torch

from rollpack._errors import RollpackError
from rollpack.packing import MicroBatch

#: Elements of the logits that are worked on at a time (64 MiB of float32), which bounds the memory beside them.
_CHUNK = 1 << 24


def token_logprobs(logits: torch.Tensor, micro_batch: MicroBatch[Any]) -> torch.Tensor:
    """The log-probability of the label at each position, 0 where the label is -100.

    Beside the logits it holds one number per position for backward, and works in chunks; the gradient of the logits is
    the only thing of their size that it makes. At positions without a label the gradient is exactly 0, whatever the
    logits hold there.

    Args:
        logits: [T, V], floating.
        micro_batch: as packed, or on a device; ``labels`` is what is used of it.

    Returns:
        [T], float64 for float64 logits, else float32 (sums over the vocabulary are float32 for half precision).

    Raises:
        RollpackError: the logits have another shape or dtype, or a label is not below V. In backward: a second derivative is
            asked for (``create_graph=True``).
    """
    labels = torch.as_tensor(micro_batch.labels, device=logits.device).to(torch.int64)
    if not logits.is_floating_point():
        raise RollpackError(f"logits are {logits.dtype}; they have to be floating")
    if logits.ndim != 2 or len(logits) != len(labels):
        raise RollpackError(f"logits have shape {list(logits.shape)}; they have to be [{len(labels)}, vocabulary]")
    # On a device this would wait for it, and indexing there checks bounds itself.
    if logits.device.type == "cpu" and len(labels) and int(labels.max()) >= logits.shape[1]:
        raise RollpackError(f"label {int(labels.max())} is not below the vocabulary of {logits.shape[1]} logits")
    logprobs: torch.Tensor = _TokenLogprobs.apply(logits, labels)
    return logprobs


def _chunks(logits: torch.Tensor) -> list[slice]:
    size = max(1, _CHUNK // max(1, logits.shape[1]))
    return [slice(i, min(i + size, len(logits))) for i in range(0, len(logits), size)]


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
        trained = labels >= 0
        index = labels.clamp(min=0)
        normalisers = torch.empty(len(labels), dtype=dtype, device=logits.device)
        for part in _chunks(logits):
            normalisers[part] = torch.logsumexp(logits[part].to(dtype), dim=1)
        chosen = logits.gather(1, index[:, None])[:, 0].to(dtype)
        ctx.save_for_backward(logits, index, trained, normalisers)
        return torch.where(trained, chosen - normalisers, 0)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        # What follows is not differentiable. ``once_differentiable`` would say so only where ``grad`` needs a gradient.
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RollpackError("token_logprobs has no second derivative; gather from logits.log_softmax(-1) instead")
        logits, index, trained, normalisers = ctx.saved_tensors
        result = torch.empty_like(logits)
        for part in _chunks(logits):
            # d log p(label) / d logits = [label] - softmax
            softmax = torch.exp(logits[part].to(grad.dtype) - normalisers[part, None])
            scale = torch.where(trained[part], grad[part], 0)[:, None]
            found = softmax.mul_(-scale)
            found.scatter_add_(1, index[part, None], scale)
            # Selected, not multiplied: an untrained position may hold NaN or infinity.
            result[part] = torch.where(trained[part, None], found, 0)
        return result, None
