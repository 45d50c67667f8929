"""From sample weights to a loss: short pure functions, for those who bring their own batches."""

from __future__ import annotations

import math
import warnings
from functools import cache
from typing import Any

import torch

from rollpack._errors import RollpackError
from rollpack._text import counted
from rollpack.packing import MicroBatch
from rollpack.weights import sample_weights


def token_weights(loss_mask: torch.Tensor, segment_ids: torch.Tensor, sample_weights: torch.Tensor) -> torch.Tensor:
    """The weight of each position: its sample's weight where it is trained, else 0.

    Args:
        loss_mask: [T] bool.
        segment_ids: [T] integers, which sample each position belongs to; below 0 on padding.
        sample_weights: [S] floats, as :func:`rollpack.sample_weights` gives them.

    Returns:
        [T], dtype and device of ``sample_weights``.

    >>> mask, segments = torch.tensor([True, False, True, False]), torch.tensor([0, 0, 1, -1])
    >>> token_weights(mask, segments, torch.tensor([0.5, 0.25])).tolist()
    [0.5, 0.0, 0.25, 0.0]
    """
    for name, tensor in (("loss_mask", loss_mask), ("segment_ids", segment_ids), ("sample_weights", sample_weights)):
        one_dimension(name, tensor)
    if loss_mask.dtype != torch.bool:
        raise RollpackError(f"loss_mask is {loss_mask.dtype}; it has to be bool")
    if loss_mask.shape != segment_ids.shape:
        raise RollpackError(f"loss_mask has {counted(len(loss_mask), 'position')} and segment_ids {len(segment_ids)}")
    if kernel := _kernel(loss_mask, segment_ids, sample_weights):
        weights: torch.Tensor = kernel.token_weights(loss_mask, segment_ids, sample_weights)
        return weights
    of_sample = torch.index_select(sample_weights, 0, segment_ids.clamp(min=0))
    return of_sample.masked_fill(~loss_mask | (segment_ids < 0), 0)


def weighted_sum(token_loss: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Σ weight × token loss over the positions of weight other than 0.

    Positions of weight 0 are selected out: a NaN or an infinity there touches neither the sum nor, as the gradient with
    respect to ``token_loss`` is exactly 0 there, what is back-propagated from here. (What made the NaN may still make
    another in its own backward, as exp of a huge log-ratio does; mask its inputs with
    ``torch.where(weights != 0, log_ratio, 0)``.)

    Args:
        token_loss: [T] of any floating dtype.
        weights: [T] floats.

    Returns:
        A 0-d tensor joined to the graph of ``token_loss``, float64 for a float64 token loss, else float32.
    """
    _check("token_loss", token_loss, weights)
    dtype = accumulation_dtype(token_loss)
    weights = weights if weights.dtype == dtype else weights.to(dtype)
    if kernel := _kernel(token_loss, weights):
        total: torch.Tensor = kernel.weighted_sum(token_loss, weights)
        return total
    values = token_loss if token_loss.dtype == dtype else token_loss.to(dtype)
    if values.device.type == "cpu" and not weights.requires_grad and not torch.compiler.is_compiling():
        tested: torch.Tensor = _TestedSum.apply(values, weights)
        return tested
    # On a device a test of the result would wait for it, and under compile it would break the graph.
    return (values.masked_fill(weights == 0, 0) * weights).sum()


def scale_advantages(advantages: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Advantages times weights, for trainers that add up their token losses: the plain sum is then the step loss.

    That holds for losses that are proportional to the advantage. It does not scale what is not, such as a KL, entropy or
    value term, which need weights of their own.

    Args:
        advantages: [T] of any floating dtype.
        weights: [T] floats.

    Returns:
        [T], exactly 0 where the weight is 0, float64 for float64 advantages, else float32.
    """
    return _scaled("advantages", advantages, weights)


def mode_weights(micro_batch: MicroBatch[Any], mode: str) -> Any:
    """[S] float64: the weights that were planned, or those of another mode."""
    if mode == micro_batch.loss_aggregation:
        return micro_batch.sample_weights
    if mode in micro_batch.mode_weights:
        return micro_batch.mode_weights[mode]
    # The mask sums of prompt groups are there only where prompt_mean was planned.
    return sample_weights(
        mode,
        rollout_mask_sums=host_array(micro_batch.rollout_mask_sums),
        num_rollouts=micro_batch.num_rollouts,
        num_tokens=micro_batch.num_tokens,
    )


def host_array(value: Any) -> Any:
    """A tensor or array as a numpy array."""
    return value.cpu().numpy() if isinstance(value, torch.Tensor) else value


def accumulation_dtype(tensor: torch.Tensor) -> torch.dtype:
    """What weights and sums are held in beside this tensor."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _kernel(*tensors: torch.Tensor) -> Any:
    """The module of Triton kernels where they can take these tensors, the first of which alone may need a gradient; or None.

    What torch compiles, it fuses itself; and what only stands for a tensor (fake, distributed) has no memory to read.
    """
    first, *others = tensors
    if not first.is_cuda or not len(first) or torch.compiler.is_compiling():
        return None
    if not all(type(tensor) in {torch.Tensor, torch.nn.Parameter} for tensor in tensors):
        return None
    if any(other.device != first.device or other.requires_grad for other in others):
        return None
    return _kernel_of(first.device)


@cache
def _kernel_of(device: torch.device) -> Any:
    """The module, if its kernels run there. They need Triton, which comes with torch on Linux, and a C compiler."""
    try:
        from rollpack.torch import _kernel

        one = torch.ones(1, device=device)
        _kernel.weighted_sum(one, _kernel.token_weights(one.bool(), one.long() - 1, one))
    except Exception as error:  # noqa: BLE001 - whatever it is, plain torch does the same
        warnings.warn(f"plain torch reduces losses on {device}, as Triton cannot be used there: {error}", stacklevel=2)
        return None
    return _kernel


class _TestedSum(torch.autograd.Function):
    """A weighted sum that selects only where its result is not finite, which is where selecting makes a difference.

    Not a dot product: that adds up one number after the other, and in float32 losses that are all alike, as GRPO's are at a
    ratio of 1, would be off by one in ten thousand. ``sum`` adds in pairs.
    """

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weights)
        total = (values * weights).sum()
        if not math.isfinite(total.item()):
            total = (values.masked_fill(weights == 0, 0) * weights).sum()
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (weights,) = ctx.saved_tensors
        scaled = grad * weights
        return scaled if math.isfinite(grad.item()) else scaled.masked_fill(weights == 0, 0), None


def _scaled(name: str, values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    _check(name, values, weights)
    dtype = accumulation_dtype(values)
    return values.to(dtype).masked_fill(weights == 0, 0) * weights.to(dtype)


def _check(name: str, values: torch.Tensor, weights: torch.Tensor) -> None:
    one_dimension(name, values)
    one_dimension("weights", weights)
    if not values.is_floating_point():
        raise RollpackError(f"{name} is {values.dtype}; it has to be floating")
    if values.shape != weights.shape:
        raise RollpackError(f"{name} has {counted(len(values), 'position')} and the weights {len(weights)}")


def check_tensor(name: str, value: Any) -> None:
    """Refuses what is no tensor."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} is a {type(value).__name__}; it has to be a torch tensor")


def one_dimension(name: str, tensor: Any) -> None:
    """Refuses what is no tensor of one dimension."""
    check_tensor(name, tensor)
    if tensor.ndim != 1:
        raise RollpackError(f"{name} has shape {list(tensor.shape)}; it has to have one dimension")
