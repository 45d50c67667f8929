"""The shape in which slime and miles hand a schedule to their ranks, filled by :func:`rollpack.plan`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from rollpack._errors import DataError
from rollpack._text import counted
from rollpack.integrations.padded import lengths_table
from rollpack.planning import plan


class Schedule(NamedTuple):
    """What ``build_dp_schedule`` of slime and miles returns.

    Attributes:
        partitions: of each dp rank, its samples, in the order in which it runs them.
        micro_batch_indices: of each dp rank, its micro-batches through all steps: indices into its partition.
        num_microbatches: K of each step, the same on every rank.
        global_batch_sizes: N of each step, in rollouts.
    """

    partitions: list[list[int]]
    micro_batch_indices: list[list[list[int]]]
    num_microbatches: list[int]
    global_batch_sizes: list[int]

    def __repr__(self) -> str:
        samples = sum(map(len, self.partitions))
        return (
            f"Schedule({counted(samples, 'sample')}, {counted(len(self.partitions), 'dp rank')}, micro-batches a step "
            f"{self.num_microbatches})"
        )

    def steps(self) -> list[list[int]]:
        """The samples of each step, over all ranks."""
        rows: list[list[int]] = []
        first = 0
        for per_rank in self.num_microbatches:
            bins = [
                (partition, b)
                for partition, indices in zip(self.partitions, self.micro_batch_indices, strict=True)
                for b in indices[first : first + per_rank]
            ]
            rows.append([partition[i] for partition, b in bins for i in b])
            first += per_rank
        return rows


def build_dp_schedule(
    args: Any,
    train_parallel_config: Mapping[str, Any],
    total_lengths: Sequence[int],
    *,
    global_batch_size: int,
    rollout_indices: Sequence[int],
    group_indices: Sequence[int] | None = None,
) -> Schedule:
    """Takes the place of ``build_dp_schedule`` of slime and miles; see :func:`rollpack.plan` for what it promises.

    Padding for context parallelism counts in the budget, which no micro-batch breaks but a sample that is over it by itself.
    Rollouts after the last whole step are left out, as the trainers leave them out.

    Args:
        args: ``use_dynamic_batch_size`` with ``max_tokens_per_gpu``, else ``micro_batch_size``; ``balance_data`` evens out
            the cost of attention, not tokens.
        train_parallel_config: ``dp_size``, ``cp_size``, ``vpp_size``, ``microbatch_group_size_per_vp_stage``.
        total_lengths: tokens of each sample.
        global_batch_size: rollouts a step.
        rollout_indices: the rollout of each sample; its samples are in one step.
        group_indices: the prompt group of each sample, for ``prompt_mean``: a step that would cut one is an error.

    Raises:
        PlanError: what cannot be met, and what would meet it.
    """
    table = lengths_table(np.asarray(total_lengths, np.int64)).append_column("rollout_id", pa.array(rollout_indices))
    if group_indices is not None:
        table = table.append_column("group_index", pa.array(group_indices))
    interleaved = (train_parallel_config["vpp_size"] or 1) > 1
    dynamic = args.use_dynamic_batch_size
    planned = plan(
        table,
        loss_aggregation="sample_mean" if group_indices is None else "prompt_mean",
        max_tokens_per_gpu=args.max_tokens_per_gpu if dynamic else None,
        micro_batch_size=None if dynamic else args.micro_batch_size,
        dp_size=train_parallel_config["dp_size"],
        cp_size=train_parallel_config["cp_size"],
        micro_batch_multiple=train_parallel_config["microbatch_group_size_per_vp_stage"] if interleaved else 1,
        global_batch_size=global_batch_size,
        remainder="drop",
        oversize="alone",
        cost="attention" if getattr(args, "balance_data", False) else "tokens",
    )
    ranks = range(planned.settings.dp_size)
    bins = [
        [planned.rows(s, r, k).tolist() for s, step in enumerate(planned.steps) for k in range(step.num_micro_batches)]
        for r in ranks
    ]
    indices = []
    for of_rank in bins:
        ends = np.cumsum([len(b) for b in of_rank]).tolist()
        indices.append([list(range(end - len(b), end)) for b, end in zip(of_rank, ends, strict=True)])
    return Schedule(
        partitions=[[row for b in of_rank for row in b] for of_rank in bins],
        micro_batch_indices=indices,
        num_microbatches=[step.num_micro_batches for step in planned.steps],
        global_batch_sizes=[step.num_rollouts for step in planned.steps],
    )


def prompt_columns(data: Mapping[str, Sequence[Any]], schedule: Sequence[Any]) -> dict[str, list[int]]:
    """What ``prompt_mean`` needs beside each sample, for the split over dp ranks to pass on: :data:`PROMPT_KEYS`.

    Args:
        data: the train data, as ``convert_samples_to_train_data`` gives it under ``prompt_mean``.
        schedule: what ``build_dp_schedule`` returned, the trainer's or ours.

    Returns:
        ``prompt_mask_sums``, ``step_num_rollouts`` and ``step_num_prompts``, an integer a sample each: M_g, and N and P of
        the step that it is in, counted from the data. 0 for samples that are in no step.

    Raises:
        DataError: denominators are missing, or a step cuts a prompt group.
    """
    made = Schedule(*schedule)
    return columns_of_steps(data, made.steps(), made.global_batch_sizes)


def columns_of_steps(
    data: Mapping[str, Sequence[Any]], steps: Sequence[Iterable[int]], divided_by: Sequence[int]
) -> dict[str, list[int]]:
    """:func:`prompt_columns` where the rows of each step are known, and what the trainer divides the step's loss by."""
    for key in ("prompt_mask_sums", "group_indices"):
        if data.get(key) is None:
            raise DataError(
                f"prompt_mean needs {key!r}, and the train data has none: convert samples with "
                "convert_samples_to_train_data of this module, under --loss-aggregation prompt_mean",
                column=key,
            )
    groups = data["group_indices"]
    sizes: dict[Any, int] = {}
    for group in groups:
        sizes[group] = sizes.get(group, 0) + 1
    rollouts, prompts = [0] * len(groups), [0] * len(groups)
    for number, (step, divisor) in enumerate(zip(steps, divided_by, strict=True)):
        rows = list(step)
        here: dict[Any, int] = {}
        for row in rows:
            here[groups[row]] = here.get(groups[row], 0) + 1
        for row in rows:
            if here[groups[row]] != sizes[groups[row]]:
                raise DataError(
                    f"step {number} has {here[groups[row]]} of the {sizes[groups[row]]} samples of group {groups[row]}, and "
                    "prompt_mean needs whole groups: use a --global-batch-size that falls between groups",
                    column="group_indices",
                    row=row,
                )
            rollouts[row], prompts[row] = divisor, len(here)
    return {
        "prompt_mask_sums": [int(value) for value in data["prompt_mask_sums"]],
        "step_num_rollouts": rollouts,
        "step_num_prompts": prompts,
    }
