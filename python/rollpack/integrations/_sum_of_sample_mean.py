"""What slime and miles share: their flags, and the reducer that stands in for their sum of sample means.

Both trainers return K D C / N times what their reducer gives to Megatron, which divides by K and averages over D C ranks
(miles' FSDP: D / N, and FSDP averages over D ranks). So what they call the sum of sample means is N times the step loss, and
that is what is returned here: under ``prompt_mean`` N / P times the sum of the prompts' means, under ``constant`` sum / L.
"""

from __future__ import annotations

import argparse
import math
import warnings
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from rollpack._errors import DataError, PlanError, RollpackError
from rollpack.names import OURS
from rollpack.packing import pack
from rollpack.planning import plan
from rollpack.torch.weights import token_weights, weighted_sum
from rollpack.weights import sample_weights

Reducer = Callable[[torch.Tensor], torch.Tensor]

#: What a micro-batch has to carry under ``prompt_mean``, one integer a sample: M_g, and N and P of its step.
PROMPT_KEYS = ("prompt_mask_sums", "step_num_rollouts", "step_num_prompts")

#: The modes that the trainer's own reducer computes.
OWN = ("sample_mean", "token_mean")


class Share(NamedTuple):
    """Which of the cp ranks this is."""

    rank: int
    size: int


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--loss-aggregation`` and ``--loss-aggregation-divisor``; for ``parse_args(add_custom_arguments=...)``."""
    parser.add_argument(
        "--loss-aggregation",
        choices=OURS,
        default="sample_mean",
        help="How token losses x of a step become the policy-gradient loss. N rollouts, P prompts, T trained tokens, M_r "
        "and M_g those of a rollout and of a prompt's group. sample_mean (default, the trainer's own): (1/N) sum_r (sum x / "
        "M_r), GRPO, arXiv:2402.03300. prompt_mean: (1/P) sum_g (sum x / M_g), ScaleRL, arXiv:2510.13786, section 3.2. "
        "token_mean: (sum x) / T, the same as --calculate-per-token-loss. constant: (sum x) / (L N), Dr. GRPO, "
        "arXiv:2503.20783. The first three have the scale of one token's loss, constant that of a response's summed loss "
        "over L.",
    )
    parser.add_argument(
        "--loss-aggregation-divisor",
        type=float,
        default=None,
        help="L of --loss-aggregation constant, finite and above 0, the same for the whole run: usually the longest "
        "response that can be sampled. Gradients scale with 1 / L.",
    )
    return parser


def validate(args: Namespace, loss_path: str | None) -> None:
    """Check the flags against each other, and settle ``args``; see :func:`rollpack.integrations.slime.validate`."""
    mode, divisor = args.loss_aggregation, args.loss_aggregation_divisor
    per_token = bool(getattr(args, "calculate_per_token_loss", False))
    if mode not in OURS:
        raise PlanError(f"--loss-aggregation is {mode!r}; it has to be one of {', '.join(OURS)}")
    if mode == "constant" and not (divisor is not None and math.isfinite(divisor) and divisor > 0):
        raise PlanError(
            f"--loss-aggregation-divisor is {divisor}; --loss-aggregation constant needs one, finite and above 0"
        )
    if mode != "constant" and divisor is not None:
        raise PlanError(f"--loss-aggregation-divisor is for --loss-aggregation constant, and this is {mode}")
    if per_token and mode not in OWN:
        raise PlanError(f"--calculate-per-token-loss is a token_mean, and --loss-aggregation is {mode}: leave one out")
    if mode in OWN:
        args.loss_aggregation = "token_mean" if per_token else mode
        args.calculate_per_token_loss = args.loss_aggregation == "token_mean"
        return
    if mode == "prompt_mean":
        _check_whole_groups(args)
    if getattr(args, "custom_pg_loss_reducer_function_path", None) is not None:
        warnings.warn(
            f"--custom-pg-loss-reducer-function-path takes precedence: --loss-aggregation {mode} has no effect", stacklevel=3
        )
    if loss_path is not None:
        _through_custom_loss(args, loss_path)


def _through_custom_loss(args: Namespace, loss_path: str) -> None:
    mode, kind = args.loss_aggregation, getattr(args, "loss_type", "policy_loss")
    if kind not in {"policy_loss", "custom_loss"}:
        raise PlanError(f"--loss-aggregation {mode} is for the policy loss, and --loss-type is {kind}")
    own_loss = kind == "custom_loss" and args.custom_loss_function_path
    if own_loss and own_loss != loss_path:
        raise PlanError(
            f"--loss-aggregation {mode} takes the place of --custom-loss-function-path, which is {own_loss}: leave it out, "
            "or call pg_loss_reducer(args, batch, sum_of_sample_mean) in it and validate(args, custom_loss=False)"
        )
    args.loss_type, args.custom_loss_function_path = "custom_loss", loss_path


def _check_whole_groups(args: Namespace) -> None:
    rollouts, group = getattr(args, "global_batch_size", None), getattr(args, "n_samples_per_prompt", None)
    if rollouts and group and rollouts % group:
        raise PlanError(
            f"--global-batch-size {rollouts} is no multiple of --n-samples-per-prompt {group}, so that steps would cut "
            f"groups, and prompt_mean needs whole ones: use {rollouts - rollouts % group or group}"
        )


def reducer(
    lists: Mapping[str, Any],
    share: Callable[[], Share],
    own: Callable[[], Reducer],
    *,
    loss_aggregation: str,
    divisor: float | None,
    per_token: bool,
    num_rollouts: int | None,
    num_prompts: int | None,
    padded_length: int | None,
) -> Reducer:
    """The trainer's own reducer where the mode is its own, else ours.

    Args:
        lists: ``total_lengths``, ``response_lengths``, ``loss_masks`` and ``prompt_mask_sums``, one entry a sample.
        share: which cp rank this is.
        own: makes the trainer's own reducer.
        loss_aggregation: the mode.
        divisor: L of ``constant``.
        per_token: ``calculate_per_token_loss``.
        num_rollouts: N, what the trainer divides by.
        num_prompts: P of the step.
        padded_length: what each sequence is padded to before it is cut, None for its own length.
    """
    lengths = {name: len(values) for name, values in lists.items() if values is not None}
    if len(set(lengths.values())) != 1:
        raise RollpackError(f"these lists differ in length: {', '.join(f'{k} {v}' for k, v in lengths.items())}")
    totals, responses, masks = (lists[name] or [] for name in ("total_lengths", "response_lengths", "loss_masks"))
    for i, (mask, response) in enumerate(zip(masks, responses, strict=True)):
        if len(mask) != response:
            raise RollpackError(f"sample {i} has a loss mask of {len(mask)} and a response_length of {response}")
    if loss_aggregation in OWN:
        return own()
    if per_token:
        raise PlanError(f"{loss_aggregation} and calculate_per_token_loss: per-token loss is a token_mean, choose one")
    scales = _scales(loss_aggregation, divisor, lists["prompt_mask_sums"], len(masks), num_rollouts, num_prompts)
    where = share()
    local = list(masks)
    if where.size > 1:
        local = [m[p] for m, p in zip(masks, owned_positions(totals, responses, where, padded_length), strict=True)]
    return _WeightedSum(local, scales)


def _scales(
    mode: str,
    divisor: float | None,
    prompt_mask_sums: Sequence[Any] | None,
    samples: int,
    num_rollouts: int | None,
    num_prompts: int | None,
) -> npt.NDArray[np.float64]:
    """[S], N times the weight of each sample's trained tokens."""
    if mode == "constant":  # N cancels: the trainer divides by it
        return sample_weights(mode, rollout_mask_sums=np.zeros(samples, np.int64), num_rollouts=1, divisor=divisor)
    if prompt_mask_sums is None or num_rollouts is None or num_prompts is None:
        raise PlanError(f"{mode} needs prompt_mask_sums, num_rollouts and num_prompts of the step, and has not all of them")
    sums = np.array([int(value) for value in prompt_mask_sums], dtype=np.int64)
    return sample_weights(mode, prompt_mask_sums=sums, num_prompts=num_prompts) * num_rollouts


class _WeightedSum:
    """Σ weight × mask × x over the responses of a micro-batch, one behind the other."""

    def __init__(self, masks: Sequence[torch.Tensor], scales: npt.NDArray[np.float64]) -> None:
        lengths = torch.tensor([len(mask) for mask in masks])
        mask = torch.cat(list(masks))
        samples = torch.repeat_interleave(torch.arange(len(masks)), lengths).to(mask.device)
        # A mask that truncated importance sampling made soft scales, as in the trainer's reducer.
        weights = token_weights(mask != 0, samples, torch.from_numpy(scales).to(mask.device))
        self._weights = weights if mask.dtype == torch.bool else weights * mask

    def __repr__(self) -> str:
        return f"Σ weight x mask x loss over {len(self._weights):,} response positions"

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``x``: [Σ local response lengths] floating. 0-d, joined to its graph."""
        return weighted_sum(x, self._weights.to(x.device))


def owned_positions(
    total_lengths: Sequence[int], response_lengths: Sequence[int], share: Share, padded_length: int | None = None
) -> list[torch.Tensor]:
    """For each sample, the positions in its response that this cp rank owns under zigzag, in the order it holds them.

    The core's own cut, of samples that are all trained: a token is owned where its logit lives, one position earlier.
    """
    offsets = np.concatenate([[0], np.cumsum(total_lengths)]).astype(np.int32)
    tokens = pa.ListArray.from_arrays(offsets, np.zeros(offsets[-1], np.int8))
    table = pa.table({"tokens": tokens, "response_length": pa.array(list(map(int, response_lengths)), pa.int32())})
    planned = plan(
        table, micro_batch_size=len(table), cp_size=share.size, pad_to_multiple_of=_padding(padded_length, share.size)
    )
    (packed,) = pack(table, planned, cp_rank=share.rank)
    owned: list[torch.Tensor] = [torch.zeros(0, dtype=torch.int64)] * len(table)
    for segment, row in enumerate(packed.rows):
        mine = packed.loss_mask & (packed.segment_ids == segment)
        first = total_lengths[row] - response_lengths[row]
        owned[row] = torch.from_numpy(packed.position_ids[mine].astype(np.int64) + 1 - first)
    return owned


def _padding(padded_length: int | None, cp_size: int) -> int:
    """A multiple that pads every sequence to one length (``bshd``), or does not pad beyond zigzag."""
    return 1 if padded_length is None else -(-int(padded_length) // (2 * cp_size)) * 2 * cp_size


def padded_length(qkv_format: str, max_seq_lens: Sequence[int] | None) -> int | None:
    """What ``bshd`` pads each sequence of a micro-batch to; None for ``thd``."""
    if qkv_format == "thd":
        return None
    lengths = set(map(int, max_seq_lens or ()))
    if qkv_format != "bshd" or len(lengths) != 1:
        raise PlanError(f"qkv_format is {qkv_format!r} and max_seq_lens {max_seq_lens}; it is thd, or bshd with one length")
    return lengths.pop()


def prompt_arguments(batch: Mapping[str, Any]) -> dict[str, Any]:
    """What ``prompt_mean`` needs, out of a micro-batch.

    Raises:
        DataError: the trainer's split did not pass it on.
    """
    for key in PROMPT_KEYS:
        if batch.get(key) is None:
            raise DataError(
                f"prompt_mean needs {key!r}, and the micro-batch has none: add rollpack's PROMPT_KEYS to the keys that the "
                "trainer's split over dp ranks and its get_batch pass on",
                column=key,
            )
    sums, rollouts, prompts = (batch[key] for key in PROMPT_KEYS)
    counts = {(int(n), int(p)) for n, p in zip(rollouts, prompts, strict=True)}
    if len(counts) != 1:
        raise DataError(f"the samples of this micro-batch are of several steps: (N, P) of {sorted(counts)}", column="steps")
    ((num_rollouts, num_prompts),) = counts
    return {"prompt_mask_sums": sums, "num_rollouts": num_rollouts, "num_prompts": num_prompts}


def of_batch(
    make: Callable[..., Reducer],
    args: Namespace,
    batch: Mapping[str, Any],
    own: Reducer,
    loss_masks: Sequence[torch.Tensor] | None,
) -> Reducer:
    """``make``, one of the two ``get_sum_of_sample_mean``, called with what is in a micro-batch."""
    mode = args.loss_aggregation
    return make(
        batch["total_lengths"],
        batch["response_lengths"],
        batch["loss_masks"] if loss_masks is None else loss_masks,
        calculate_per_token_loss=args.calculate_per_token_loss,
        qkv_format=getattr(args, "qkv_format", "thd"),
        max_seq_lens=batch.get("max_seq_lens"),
        loss_aggregation=mode,
        divisor=args.loss_aggregation_divisor,
        own=own,
        **(prompt_arguments(batch) if mode == "prompt_mean" else {}),
    )


#: Makes the reducer of the policy loss that is under way, from the masks that the trainer wants reduced.
_CURRENT: ContextVar[Callable[[Sequence[torch.Tensor]], Reducer]] = ContextVar("rollpack_pg_loss_reducer")


@contextmanager
def reducing(make: Callable[[Sequence[torch.Tensor]], Reducer]) -> Any:
    """While the trainer's policy loss runs: what its hook for a custom reducer gives."""
    token = _CURRENT.set(make)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def hook(
    _total_lengths: Sequence[int],
    _response_lengths: Sequence[int],
    loss_masks: Sequence[torch.Tensor],
    _calculate_per_token_loss: bool,
) -> Reducer:
    """What ``--custom-pg-loss-reducer-function-path`` names while our policy loss calls the trainer's."""
    make = _CURRENT.get(None)
    if make is None:
        raise PlanError(
            "a custom reducer function gets neither the batch nor its denominators, so it cannot do this alone: pass "
            "--loss-aggregation and call validate(args), which goes through --custom-loss-function-path"
        )
    return make(loss_masks)
