"""What slime and miles do around their reducer, as far as it bears on the loss: their formulas, in a few lines of our own.

Read at THUDM/slime 00c2d6d (slime/backends/megatron_utils/loss.py) and radixark/miles 0b3ae66
(miles/backends/training_utils/loss/objective.py). Neither can be installed from a registry.
"""

from dataclasses import dataclass, field
from enum import Enum
from importlib import import_module
from typing import Any

import torch

#: The example of the README: groups 0 0 1 1, the third token of the last sample untrained.
TOTALS, RESPONSES = [2, 4, 3, 5], [1, 3, 2, 4]
MASKS = [torch.tensor(m, dtype=torch.int) for m in ([1], [1, 1, 1], [1, 1], [1, 0, 1, 1])]
LOSSES = torch.tensor([4.0, 1, 2, 3, 10, 20, 1, 100, 2, 3], dtype=torch.float64)


def sum_of_sample_mean(lengths, masks, denominators, *, per_token=False):
    """Both trainers' own reducer. ``lengths`` and ``masks`` are those of the responses' local parts."""

    def reduce(x):
        parts = zip(x.split(lengths), masks, denominators, strict=True)
        return sum((part * mask).sum() / (1 if per_token else max(int(of), 1)) for part, mask, of in parts)

    return reduce


def megatron_loss(reduced, *, micro_batches, rollouts, dp_size, cp_size):
    """``loss * num_microbatches / step_global_batch_size * (dp x cp size)``; Megatron then averages, and divides by K."""
    return reduced * micro_batches / rollouts * dp_size * cp_size


def megatron_per_token_loss(reduced, masks, *, cp_size):
    """``loss * cp_size`` and the count: each sample's trained tokens, at least 1, the same on every cp rank."""
    return reduced * cp_size, sum(max(int(mask.sum()), 1) for mask in masks)


def fsdp_loss(reduced, *, rollouts, dp_size):
    """miles' FSDP: ``loss / global_batch_size * dp size``; FSDP averages over dp."""
    return reduced / rollouts * dp_size


class Status(Enum):
    COMPLETED = "completed"
    TRUNCATED = "truncated"


@dataclass
class Sample:
    """The attributes of slime/utils/types.py that matter here."""

    tokens: list[int] = field(default_factory=list)
    response_length: int = 0
    loss_mask: list[int] | None = None
    group_index: int | None = None
    rollout_id: int | None = None
    index: int | None = None
    reward: Any = None
    remove_sample: bool = False
    status: Status = Status.COMPLETED
    metadata: dict = field(default_factory=dict)
    rollout_log_probs: list[float] | None = None
    prompt: str = ""

    @staticmethod
    def from_dict(fields):
        return Sample(**fields | {"status": Status(fields["status"])})


@dataclass
class Lists:
    """A packed micro-batch as these trainers have it: lists with an entry a sample, and the responses' values."""

    totals: list[int]
    responses: list[int]
    masks: list[torch.Tensor]
    x: torch.Tensor
    local_lengths: list[int]
    local_masks: list[torch.Tensor]
    share: tuple[int, int]

    @classmethod
    def of(cls, x, mb):
        """``x``: [T]. A micro-batch that is not cut zigzag comes whole, with zeros where another rank has the values: they
        redistribute it (``--allgather-cp``), and parts add up."""
        zigzag = mb.layout == "zigzag"
        totals = mb.cu_seqlens.diff().tolist()
        responses = [0] if mb.is_placeholder else mb.sample_columns["response_length"].int().tolist()
        whole, local, values = [], [], []
        for sample, (total, response) in enumerate(zip(totals, responses, strict=True)):
            position = mb.position_ids + 1 - (total - response)  # the response token that each logit speaks of
            mine = (mb.segment_ids == sample) & (position >= 0) & (position < response)
            mask = torch.zeros(response, dtype=torch.int32)
            mask[position[mine]] = mb.loss_mask[mine].int()
            whole.append(mask)
            if zigzag:
                local.append(mask[position[mine]])
                values.append(x[mine])
            else:
                local.append(mask)
                values.append(x.new_zeros(response).index_put((position[mine],), x[mine]))
        share = (mb.cp_rank, mb.cp_size) if zigzag else (0, 1)
        return cls(totals, responses, whole, torch.cat(values), [len(v) for v in values], local, share)


def policy_loss_function(args, batch, logits, sum_of_sample_mean):
    """The part of both trainers' policy loss around the hook for a custom reducer; here the logits are the token losses."""
    per_token, path = args.calculate_per_token_loss, args.custom_pg_loss_reducer_function_path
    masks = batch.get("rejected_masks", batch["loss_masks"])  # TIS and rejection hand changed masks to the reducer
    if path is None:
        reduce = sum_of_sample_mean
    else:
        module, _, name = path.rpartition(".")
        reduce = getattr(import_module(module), name)(batch["total_lengths"], batch["response_lengths"], masks, per_token)
    loss = reduce(logits)
    return loss, {"pg_loss": loss.detach(), "ppo_kl": sum_of_sample_mean(logits.detach())}


#: The keys that slime's split over dp ranks passes on (rollout.py), and those that its get_batch asks for (model.py).
SPLIT_KEYS = [
    *("tokens", "multimodal_train_inputs", "response_lengths", "rewards", "truncated", "loss_masks", "round_number"),
    *("metadata", "sample_indices", "rollout_ids", "rollout_mask_sums", "rollout_log_probs", "teacher_log_probs"),
]
BATCH_KEYS = ["tokens", "total_lengths", "response_lengths", "loss_masks", "rollout_mask_sums", "advantages"]


def split(data, schedule, keys):
    """Each rank's data: of the keys in the list, its partition."""
    ranks = []
    for rank, partition in enumerate(schedule[0]):
        of_rank = {key: [data[key][i] for i in partition] for key in keys if key in data}
        of_rank["total_lengths"] = [len(data["tokens"][i]) for i in partition]
        of_rank["loss_masks"] = [torch.tensor(mask, dtype=torch.int) for mask in of_rank["loss_masks"]]
        of_rank["micro_batch_indices"] = schedule[1][rank]
        ranks.append(of_rank)
    return ranks


def get_batch(of_rank, index, keys):
    """A micro-batch: of the keys in the list, what it has of them, else None."""
    rows = of_rank["micro_batch_indices"][index]
    return {key: [of_rank[key][i] for i in rows] if key in of_rank else None for key in keys}
