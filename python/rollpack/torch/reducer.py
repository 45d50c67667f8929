"""``LossReducer``: per-token losses of a micro-batch become its share of the step loss."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch

from rollpack._errors import PlanError, RollpackError
from rollpack._text import counted, noun
from rollpack.packing import MicroBatch
from rollpack.torch.backends import BACKENDS, gradient_factor
from rollpack.torch.batches import as_tensor
from rollpack.torch.masks import StepMasks, check_changed
from rollpack.torch.mesh import Mesh, check_ranks, num_processes
from rollpack.torch.weights import accumulation_dtype, check_tensor, mode_weights, token_weights, weighted_sum

#: Under these processes of other kinds (tp, pp) are common, and who averages is not told by torch's default group.
_OTHER_PROCESSES = {"none", "megatron", "megatron_legacy", "megatron_per_token"}


class LossReducer:
    """Reduces token losses so that the trainer's gradient is that of the step loss, however the batch is cut.

    Every rank calls it for each of its micro-batches and back-propagates what it returns. All that it needs to know of
    the step travels in the micro-batch. Every term that is back-propagated goes through it: regularisers (KL, entropy) and
    a critic's value loss with ``loss_aggregation="sample_mean"`` unless you want another.

    Args:
        backend: what the trainer does to gradients; see :func:`rollpack.torch.gradient_factor`. It may be left out in one
            process only, where nothing is averaged.
        mesh: the DeviceMesh (dimensions ``dp...`` and ``cp``), or the process group over which gradients are averaged (dp
            x cp). Where it is given, each micro-batch's plan is compared with it.
        accumulation_steps: the ``gradient_accumulation_steps`` that Accelerate or DeepSpeed is configured with.
        own_accumulation_boundary: you set the boundary of the optimizer step yourself, so that these may differ from K.
        denominators: ``original`` keeps those of the plan where a mask is changed; ``current`` takes those of the masks
            given to :meth:`set_masks`.
    """

    def __init__(
        self,
        *,
        backend: str | None = None,
        mesh: Mesh | None = None,
        accumulation_steps: int | None = None,
        own_accumulation_boundary: bool = False,
        denominators: str = "original",
    ) -> None:
        if mesh is not None and not isinstance(mesh, Mesh):
            raise TypeError(f"mesh is a {type(mesh).__name__}; it has to be a DeviceMesh or a process group")
        if backend is not None and backend not in BACKENDS:
            raise PlanError(f"backend is {backend!r}; it has to be one of {', '.join(BACKENDS)}")
        if denominators not in {"original", "current"}:
            raise PlanError(f"denominators is {denominators!r}; it has to be original or current")
        self.backend = backend
        self.mesh = mesh
        self.accumulation_steps = accumulation_steps
        self.own_accumulation_boundary = own_accumulation_boundary
        self.denominators = denominators
        self._masks: StepMasks | None = None
        self._seen: _Seen | None = None
        # Weights are worked out once for a micro-batch, however many terms of the loss are reduced.
        self._weights: WeakKeyDictionary[MicroBatch[Any], dict[Any, torch.Tensor]] = WeakKeyDictionary()

    def __repr__(self) -> str:
        steps = "" if self.accumulation_steps is None else f", accumulation_steps={self.accumulation_steps}"
        steps += ", own_accumulation_boundary=True" if self.own_accumulation_boundary else ""
        return f"LossReducer(backend={self.backend!r}{steps}, denominators={self.denominators!r})"

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_weights": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _weights=WeakKeyDictionary())

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
            loss_mask: [T] bool, a mask that was changed since, of the token after each position: the numerator takes it, the
                denominators stay. It takes tokens out. One that adds some is refused on a CPU; on another device, where
                looking would make the host wait, the tokens that it adds stay untrained. Under ``denominators="current"``
                the masks of :meth:`set_masks` are taken instead.

        Returns:
            A 0-d tensor, joined to the graph of ``token_loss`` even where nothing is trained; float64 for a float64
            token loss, else float32.

        Raises:
            RollpackError: shapes or dtypes are not those above, or a changed mask adds tokens.
            PlanError: the backend is missing, or does not go with this micro-batch, or the plan is for more ranks than there
                are processes of torch.distributed, or the micro-batch is not one of the step that is under way.
        """
        if self.backend == "megatron_per_token":
            raise PlanError("backend 'megatron_per_token' returns a loss and a count: call reducer.loss_and_count(...)")
        return self._reduce(token_loss, micro_batch, loss_aggregation, loss_mask)

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
        loss = self._reduce(token_loss, micro_batch, loss_aggregation, loss_mask)
        return loss, as_tensor(micro_batch.loss_mask, token_loss.device).sum(dtype=torch.int32)

    def step(self) -> AbstractContextManager[None]:
        """``with reducer.step():`` watches over an optimizer step: each micro-batch of this rank once, none of another step.

        Masks of :meth:`set_masks` are let go of at its end. Several terms of the loss may be reduced for a micro-batch, one
        after the other: the same object. Packed again, as in the next epoch over the data, it comes a second time.
        (The same object in a second epoch over a list of a single micro-batch cannot be told from another term.)

        Raises:
            PlanError: a micro-batch of another plan, step or rank, one that comes again after others, or, at the end, some
                that were left out.

        What other ranks do it cannot see: that all have the same plan, :func:`rollpack.torch.check_same_plan` tells.
        """
        return _Step(self)

    def set_masks(self, micro_batches: Sequence[MicroBatch[Any]], masks: Sequence[torch.Tensor], *, cut: bool) -> None:
        """Give the changed masks of a whole step, before its first backward, for ``denominators="current"``.

        M_r, M_g and T become those of these masks, all-reduced over the ranks (of ``mesh``, else of all processes) once all
        of them said that nothing is wrong; N and P stay. Every rank has to call it. From then on the reducer takes these
        masks for these micro-batches.

        Args:
            micro_batches: all of this rank's micro-batches of the step.
            masks: one bool tensor each. They take tokens out and add none.
            cut: whether the masks are cut over cp ranks. True: [T], as ``micro_batch.loss_mask``, about the token after
                each position. False: each cp rank has the whole, [cu_seqlens[-1]], where token p of sample s is at
                ``cu_seqlens[s] + p``.

        Raises:
            PlanError: the reducer keeps original denominators, or micro-batches are missing or of different steps, here or
                over ranks.
            RollpackError: a mask has another dtype or shape; or masks add tokens to the plan's. What is wrong on one rank is
                an error on every rank, so that none waits for it.
        """
        fault = None
        try:
            if self.denominators != "current":
                raise PlanError("set_masks is for LossReducer(denominators='current'); loss_mask= keeps the original ones")
            for name, given in (("micro_batches", micro_batches), ("masks", masks)):
                if not isinstance(given, Iterable):
                    raise TypeError(f"{name} is a {type(given).__name__}; it has to be a sequence")
            micro_batches, masks = list(micro_batches), list(masks)
            self._check_whole(micro_batches)
        except Exception as error:  # noqa: BLE001 - the other ranks are told, and do not wait for this one
            fault = error
        self._weights.clear()
        self._masks = StepMasks(micro_batches, masks, cut=cut, mesh=self.mesh, fault=fault)

    def _check_whole(self, micro_batches: Sequence[MicroBatch[Any]]) -> None:
        """That these are all micro-batches of this rank in one step."""
        if not micro_batches:
            raise PlanError("there is no micro-batch; pass all of this rank's, placeholders too")
        seen = _Seen()
        for micro_batch in micro_batches:
            if not isinstance(micro_batch, MicroBatch):
                raise TypeError(f"micro_batches has a {type(micro_batch).__name__}; it has to hold rollpack.MicroBatch")
            check_ranks(self.mesh, micro_batch)
            if micro_batch.index in seen.indices:
                raise PlanError(f"micro-batch {micro_batch.index} is given twice, and would count twice in denominators")
            seen.add(micro_batch)
        seen.finish()

    def _factor(self, micro_batch: MicroBatch[Any]) -> int:
        backend, world = self.backend, num_processes()
        ranks = micro_batch.dp_size * micro_batch.cp_size
        if backend is None:
            ranks = max(ranks, world or 1)
            if ranks > 1:
                raise PlanError(
                    f"there are {ranks} ranks, and what the trainer does to gradients is not known: pass "
                    f"LossReducer(backend=...), one of {', '.join(BACKENDS)}"
                )
            backend = "none"
        # With more processes than ranks, others than these reduce (tp, pp), or dp_size= was left out.
        if self.mesh is None and ranks < (world or 1) and backend not in _OTHER_PROCESSES:
            raise PlanError(
                f"the plan is for dp {micro_batch.dp_size} x cp {micro_batch.cp_size}, and {world} processes run: plan for "
                "the dp_size= and cp_size= that there are, or, if some of them are of other kinds (tp, pp), say which "
                "average: LossReducer(mesh=...)"
            )
        # What is summed may be summed by hand.
        if world is not None and ranks > world and backend != "none":
            raise PlanError(
                f"the plan is for dp {micro_batch.dp_size} x cp {micro_batch.cp_size}, and {world} processes run: backend "
                f"{backend!r} reduces over these alone, and the rest of the step would not be trained. Plan for the "
                "dp_size= and cp_size= that there are (ranks_of(mesh) tells them)"
            )
        return gradient_factor(
            backend,
            dp_size=micro_batch.dp_size,
            cp_size=micro_batch.cp_size,
            num_micro_batches=micro_batch.num_micro_batches,
            num_tokens=micro_batch.num_tokens,
            accumulation_steps=self.accumulation_steps,
            own_accumulation_boundary=self.own_accumulation_boundary,
        )

    def _reduce(
        self,
        token_loss: torch.Tensor,
        micro_batch: MicroBatch[Any],
        loss_aggregation: str | None,
        loss_mask: torch.Tensor | None,
    ) -> torch.Tensor:
        if not isinstance(micro_batch, MicroBatch):
            raise TypeError(f"micro_batch is a {type(micro_batch).__name__}; it has to be a rollpack.MicroBatch")
        check_ranks(self.mesh, micro_batch)
        positions = len(micro_batch.tokens)
        check_tensor("token_loss", token_loss)
        if token_loss.shape != (positions,):
            raise RollpackError(
                f"token_loss has shape {list(token_loss.shape)}, and this micro-batch has {counted(positions, 'position')}: "
                "one loss each, masked and padded ones included"
            )
        if self._seen is not None:
            self._seen.add(micro_batch)
        if self.denominators == "current" and loss_mask is not None:
            raise PlanError("under denominators='current' masks go into reducer.set_masks(...), before the first backward")
        mode = micro_batch.loss_aggregation if loss_aggregation is None else loss_aggregation
        weights = self._token_weights(token_loss, micro_batch, mode)
        if loss_mask is not None:
            trained = as_tensor(micro_batch.loss_mask, token_loss.device)
            weights = weights.masked_fill(~check_changed(loss_mask, trained), 0)
        return weighted_sum(token_loss, weights)

    def _token_weights(self, token_loss: torch.Tensor, micro_batch: MicroBatch[Any], mode: str) -> torch.Tensor:
        device, dtype = token_loss.device, accumulation_dtype(token_loss)
        mask, of_samples = micro_batch.loss_mask, micro_batch.sample_weights
        # A graph has no place for a cache: a CUDA graph is replayed after its micro-batch was written over. And of an array
        # nobody can tell whether it was changed in place.
        in_graph = torch.compiler.is_compiling() or (token_loss.is_cuda and torch.cuda.is_current_stream_capturing())
        if in_graph or not (_counts_changes(mask) and _counts_changes(of_samples)):
            return self._make_weights(micro_batch, mode, device, dtype)
        known = self._weights.setdefault(micro_batch, {})
        key = mode, device, dtype, mask._version, of_samples._version
        if key not in known:
            known[key] = self._make_weights(micro_batch, mode, device, dtype)
        return known[key]

    def _make_weights(
        self, micro_batch: MicroBatch[Any], mode: str, device: torch.device, dtype: torch.dtype
    ) -> torch.Tensor:
        if self.denominators == "current":
            if self._masks is None:
                raise PlanError("denominators='current' needs the masks of the step first: call reducer.set_masks(...)")
            mask, per_sample = self._masks.of(micro_batch, mode)
        else:
            mask, per_sample = micro_batch.loss_mask, mode_weights(micro_batch, mode)
        segment_ids = as_tensor(micro_batch.segment_ids, device)
        # The factor goes into the few weights of samples, where it costs nothing.
        scaled = as_tensor(per_sample, device).to(dtype) * self._factor(micro_batch)
        return token_weights(as_tensor(mask, device), segment_ids, scaled)


def _counts_changes(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not value.is_inference()


class _Step(AbstractContextManager[None]):
    """One ``with reducer.step():``."""

    def __init__(self, reducer: LossReducer) -> None:
        self._reducer = reducer
        self._entered = False

    def __enter__(self) -> None:
        self._entered = True
        if self._reducer._seen is not None:
            raise PlanError("a step is under way already; one optimizer step ends before the next begins")
        self._reducer._seen = _Seen()

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        seen, self._reducer._seen = self._reducer._seen, None
        if self._reducer._masks is not None:  # those of this step: the next may have the same micro-batches
            self._reducer._masks = None
            self._reducer._weights.clear()
        if error is None and seen is not None:
            seen.finish()

    def __del__(self) -> None:
        if not self._entered:
            warnings.warn("reducer.step() alone does nothing: write `with reducer.step():`", stacklevel=2)


class _Seen:
    """The micro-batches of one step that went by. It holds none of them: their memory is another's by then."""

    def __init__(self) -> None:
        self._of: dict[str, Any] = {}
        self._number: int | None = None
        self._last: ref[MicroBatch[Any]] | None = None
        self.indices: set[int] = set()

    def add(self, micro_batch: MicroBatch[Any]) -> None:
        for name in ("plan_id", "step", "dp_rank", "cp_rank"):
            here, there = self._of.setdefault(name, getattr(micro_batch, name)), getattr(micro_batch, name)
            if here != there:
                raise PlanError(f"this micro-batch has {name} {there}, and the step under way is of {name} {here}")
        again = self._last is not None and self._last() is micro_batch
        if micro_batch.index in self.indices and not again:
            raise PlanError(
                f"micro-batch {micro_batch.index} comes a second time in this step, and would be trained on twice: an epoch "
                "over the same micro-batches is a step of its own. All terms of its loss take the same object, one after "
                "the other"
            )
        self._number, self._last = micro_batch.num_micro_batches, ref(micro_batch)
        self.indices.add(micro_batch.index)

    def finish(self) -> None:
        if not self.indices:
            raise PlanError("the step ended without a micro-batch")
        # While a step arrives, nobody knows how many there are to be.
        number = self._number or max(self.indices) + 1
        missing = sorted(set(range(number)) - self.indices)
        if missing:
            raise PlanError(
                f"{noun(len(missing), 'micro-batch')} {', '.join(map(str, missing))} of this rank's {number} in step "
                f"{self._of['step']} did not come"
            )
