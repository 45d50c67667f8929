"""``LossReducer``: per-token losses of a micro-batch become its share of the step loss."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from rollpack._errors import PlanError, RollpackError
from rollpack.packing import MicroBatch
from rollpack.torch.backends import BACKENDS, gradient_factor
from rollpack.torch.weights import accumulation_dtype, token_weights, weighted_sum
from rollpack.weights import sample_weights


class LossReducer:
    """Reduces token losses so that the trainer's gradient is that of the step loss, however the batch is cut.

    Every rank calls it for each of its micro-batches and back-propagates what it returns. All that it needs to know of
    the step travels in the micro-batch.

    Args:
        backend: what the trainer does to gradients; see :func:`rollpack.torch.gradient_factor`. It may be left out in one
            process only, where nothing is averaged.
        accumulation_steps: the ``gradient_accumulation_steps`` that Accelerate or DeepSpeed is configured with.
        own_accumulation_boundary: you set the boundary of the optimizer step yourself, so that these may differ from K.
    """

    def __init__(
        self,
        *,
        backend: str | None = None,
        accumulation_steps: int | None = None,
        own_accumulation_boundary: bool = False,
    ) -> None:
        if backend is not None and backend not in BACKENDS:
            raise PlanError(f"backend is {backend!r}; it has to be one of {', '.join(BACKENDS)}")
        self.backend = backend
        self.accumulation_steps = accumulation_steps
        self.own_accumulation_boundary = own_accumulation_boundary

    def __repr__(self) -> str:
        steps = "" if self.accumulation_steps is None else f", accumulation_steps={self.accumulation_steps}"
        return f"LossReducer(backend={self.backend!r}{steps})"

    def __call__(
        self,
        token_loss: torch.Tensor,
        micro_batch: MicroBatch[Any],
        *,
        loss_aggregation: str | None = None,
        loss_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The loss to back-propagate: this micro-batch's part of the step loss times the backend's factor.

        Args:
            token_loss: [T], floating; one loss per position of ``micro_batch``, of the token after it. Positions that are
                not trained may hold anything.
            micro_batch: as packed, or on a device.
            loss_aggregation: another mode than the plan's, for regularisers such as KL. ``prompt_mean`` and ``constant``
                only where the plan is of that mode.
            loss_mask: [T] bool, a mask that was changed since: the numerator takes it, the denominators stay. It can take
                tokens out, not add any.

        Returns:
            A 0-d tensor, joined to the graph of ``token_loss`` even where nothing is trained; float64 for a float64
            token loss, else float32.

        Raises:
            RollpackError: shapes or dtypes are not those above.
            PlanError: the backend is missing, or does not go with this micro-batch.
        """
        if self.backend == "megatron_per_token":
            raise PlanError("backend 'megatron_per_token' returns a loss and a count: call reducer.loss_and_count(...)")
        factor = self._factor(micro_batch)
        return self._partial(token_loss, micro_batch, loss_aggregation, loss_mask) * factor

    def loss_and_count(
        self,
        token_loss: torch.Tensor,
        micro_batch: MicroBatch[Any],
        *,
        loss_aggregation: str | None = None,
        loss_mask: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """For Megatron's ``calculate_per_token_loss``: T times the partial sum, and the count that Megatron divides by.

        Args: as for calling the reducer.

        Returns:
            The loss (0-d), and the trained tokens that this rank owns in this micro-batch (0-d int32): over all ranks and
            micro-batches they add up to T. A changed ``loss_mask`` does not change them.
        """
        if self.backend != "megatron_per_token":
            raise PlanError(f"loss_and_count is for backend 'megatron_per_token', and this reducer has {self.backend!r}")
        loss = self._partial(token_loss, micro_batch, loss_aggregation, loss_mask) * self._factor(micro_batch)
        count = _tensor(micro_batch.loss_mask, token_loss.device).sum(dtype=torch.int32)
        return loss, count

    def _factor(self, micro_batch: MicroBatch[Any]) -> int:
        backend = self.backend
        if backend is None:
            ranks = micro_batch.dp_size * micro_batch.cp_size
            distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
            ranks = max(ranks, torch.distributed.get_world_size() if distributed else 1)
            if ranks > 1:
                raise PlanError(
                    f"there are {ranks} ranks, and what the trainer does to gradients is not known: pass "
                    f"LossReducer(backend=...), one of {', '.join(BACKENDS)}"
                )
            backend = "none"
        return gradient_factor(
            backend,
            dp_size=micro_batch.dp_size,
            cp_size=micro_batch.cp_size,
            num_micro_batches=micro_batch.num_micro_batches,
            num_tokens=micro_batch.num_tokens,
            accumulation_steps=self.accumulation_steps,
            own_accumulation_boundary=self.own_accumulation_boundary,
        )

    def _partial(
        self,
        token_loss: torch.Tensor,
        micro_batch: MicroBatch[Any],
        loss_aggregation: str | None,
        loss_mask: torch.Tensor | None,
    ) -> torch.Tensor:
        positions = len(micro_batch.tokens)
        if token_loss.shape != (positions,):
            raise RollpackError(
                f"token_loss has shape {list(token_loss.shape)}, and this micro-batch has {positions} positions: one loss "
                "each, masked and padded ones included"
            )
        device = token_loss.device
        mask = _tensor(micro_batch.loss_mask, device)
        if loss_mask is not None:
            if loss_mask.dtype != torch.bool or loss_mask.shape != (positions,):
                raise RollpackError(
                    f"loss_mask is {loss_mask.dtype} of shape {list(loss_mask.shape)}; it has to be bool [{positions}]. "
                    "Importance weights go into token_loss"
                )
            mask = mask & loss_mask
        per_sample = _tensor(_weights(micro_batch, loss_aggregation), device).to(accumulation_dtype(token_loss))
        segment_ids = _tensor(micro_batch.segment_ids, device)
        return weighted_sum(token_loss, token_weights(mask, segment_ids, per_sample))


def _weights(micro_batch: MicroBatch[Any], loss_aggregation: str | None) -> Any:
    """[S] float64: the weights that were planned, or those of another mode."""
    if loss_aggregation is None or loss_aggregation == micro_batch.loss_aggregation:
        return micro_batch.sample_weights
    return sample_weights(
        loss_aggregation,
        rollout_mask_sums=_array(micro_batch.rollout_mask_sums),
        prompt_mask_sums=None if micro_batch.prompt_mask_sums is None else _array(micro_batch.prompt_mask_sums),
        num_rollouts=micro_batch.num_rollouts,
        num_prompts=micro_batch.num_prompts,
        num_tokens=micro_batch.num_tokens,
    )


def _array(value: Any) -> Any:
    return value.cpu().numpy() if isinstance(value, torch.Tensor) else value


def _tensor(value: Any, device: torch.device) -> torch.Tensor:
    if isinstance(value, np.ndarray) and not value.flags.writeable:
        value = value.copy()
    return torch.as_tensor(value, device=device)
