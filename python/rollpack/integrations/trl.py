"""TRL (tried with 1.16.0): a GRPOTrainer whose loss is any mode of ours, and its packing with fewer bins."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from rollpack._errors import DataError, PlanError
from rollpack.integrations.padded import lengths_table, padded_token_weights, row_weights
from rollpack.planning import plan
from rollpack.torch.backends import gradient_factor
from rollpack.torch.weights import weighted_sum


class AggregationMixin:
    """Goes before ``trl.GRPOTrainer``, and gives its loss another aggregation, such as ``prompt_mean``.

    ``class Trainer(AggregationMixin, GRPOTrainer): loss_aggregation = "prompt_mean"``. Which token loss it is, the trainer
    says as before, with ``loss_type="dapo"`` (clipped) or ``"cispo"``; its KL term is part of it. Right under gradient
    accumulation, several optimizer steps for a generation batch, several iterations and several processes. Each row is a
    rollout. Evaluation keeps TRL's aggregation.

    What is not a sum of token losses that know nothing of each other's masks is refused: other loss types, sequence-level
    importance sampling, entropy bonuses, and the auxiliary loss of experts.
    """

    loss_aggregation: str = "prompt_mean"
    divisor: float | None = None
    empty: str = "count"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        a: Any = self
        refused = {
            f"loss_type={a.loss_type!r}; it has to be 'dapo' or 'cispo'": a.loss_type not in {"dapo", "cispo"},
            "importance_sampling_level='sequence'": a.importance_sampling_level != "token",
            "an entropy bonus": a._entropy_bonus_enabled,
            "the auxiliary loss of experts": a.aux_loss_enabled,
            "steps_per_generation that are no multiple of gradient_accumulation_steps": a.args.steps_per_generation
            % a.args.gradient_accumulation_steps,
        }
        for what, found in refused.items():
            if found:
                raise PlanError(f"loss_aggregation={self.loss_aggregation!r} does not go with {what}")

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        a: Any = self
        output = super()._generate_and_score_completions(inputs)  # type: ignore[misc]
        # Rows of a prompt follow each other over all processes, as TRL's sampler deals them.
        rows = len(output["completion_ids"])
        output["row_index"] = torch.arange(rows, device=output["completion_ids"].device) + a.accelerator.process_index * rows
        return output

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        a: Any = self
        inputs = super()._prepare_inputs(generation_batch)  # type: ignore[misc]
        if not a.model.training or "sample_weights" in inputs:
            return inputs
        if a.args.steps_per_generation > a.args.gradient_accumulation_steps:
            # TRL shuffles rows before it splits them into steps, which cuts groups; in order, each step has whole ones.
            a._buffered_inputs = _in_order(a._buffered_inputs)
        slices = a._buffered_inputs
        sums = torch.cat([_mask(part).sum(-1) for part in slices])
        rows = torch.cat([part["row_index"] for part in slices])
        steps = (
            torch.arange(len(rows), device=rows.device) // (len(rows) // len(slices)) // a.args.gradient_accumulation_steps
        )
        of_all = a.accelerator.gather(torch.stack([sums, rows, steps], dim=1).long())
        weights = row_weights(
            of_all[:, 0],
            self.loss_aggregation,
            prompt_ids=of_all[:, 1] // a.num_generations,
            steps=of_all[:, 2],
            divisor=self.divisor,
            empty=self.empty,
        )
        own = weights[a.accelerator.process_index * len(rows) :][: len(rows)].to(rows.device)
        for part, of_part in zip(slices, own.chunk(len(slices)), strict=True):
            part["sample_weights"] = of_part
        return slices[a._step % len(slices)]

    def _compute_loss(self, model: Any, inputs: Any) -> torch.Tensor:
        a: Any = self
        if not a.model.training:
            return super()._compute_loss(model, inputs)  # type: ignore[misc, no-any-return]
        if a.current_gradient_accumulation_steps != a.args.gradient_accumulation_steps:
            raise PlanError("the epoch ended within an optimizer step, whose weights are those of a whole one")
        mask = _mask(inputs)
        # TRL's loss is Σ mask × token loss / normalizer: at a normalizer of 1 its derivative by the mask is the token loss.
        probe = torch.ones_like(mask, dtype=torch.float32).requires_grad_()
        normalizer = a.accelerator.num_processes * a.args.steps_per_generation / a.args.gradient_accumulation_steps
        count = torch.tensor(float(normalizer), device=mask.device)
        total = super()._compute_loss(model, {**inputs, "tool_mask": probe * mask, "num_items_in_batch": count})  # type: ignore[misc]
        (token_loss,) = torch.autograd.grad(total, probe, create_graph=True)
        loss = weighted_sum(token_loss.reshape(-1), padded_token_weights(mask, inputs["sample_weights"]))
        ranks = gradient_factor(
            "hf_trainer_scaled", dp_size=a.accelerator.num_processes, cp_size=1, num_micro_batches=len(a._buffered_inputs)
        )
        return loss * ranks


def _mask(inputs: Any) -> torch.Tensor:
    """[b, W], 1 where a completion token is trained."""
    mask: torch.Tensor = inputs["completion_mask"]
    return mask if inputs.get("tool_mask") is None else mask * inputs["tool_mask"]


def _in_order(slices: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same rows, in the order in which they were generated."""
    order = torch.argsort(torch.cat([part["row_index"] for part in slices]))
    ordered: list[dict[str, Any]] = [{} for _ in slices]
    for name, first in slices[0].items():
        if name in {"pixel_values", "image_grid_thw", "num_images"} and first is not None:
            raise PlanError(
                "images are cut by other lengths than rows: set steps_per_generation=gradient_accumulation_steps"
            )
        if isinstance(first, torch.Tensor) and first.ndim:
            values: Any = torch.cat([part[name] for part in slices])[order].chunk(len(slices))
        elif isinstance(first, list):
            flat = [value for part in slices for value in part[name]]
            values = [[flat[i] for i in rows.tolist()] for rows in order.chunk(len(slices))]
        else:
            values = [part[name] for part in slices]
        for part, value in zip(ordered, values, strict=True):
            part[name] = value
    return ordered


def pack_dataset(dataset: Any, seq_length: int, strategy: str = "bfd", map_kwargs: Any = None) -> Any:  # noqa: ARG001
    """As ``trl.pack_dataset``: whole sequences joined to examples of at most ``seq_length`` tokens, in as few as it takes.

    For ``SFTTrainer``, ``trl.trainer.sft_trainer.pack_dataset = pack_dataset`` puts it in its place.

    Args:
        dataset: a ``datasets.Dataset``, or a ``DatasetDict`` of them. Its list columns are joined, others left out.
        seq_length: the budget. A sequence over it is an error, where TRL truncates.
        strategy: ``bfd``; none of TRL's that cut sequences.
        map_kwargs: not needed: all rows are packed at once.

    Returns:
        The same type, with those columns and ``seq_lengths``, the lengths of the sequences that are joined.

    Raises:
        PlanError: another strategy, or a sequence over the budget.
        DataError: there is no list column, or they differ in length.
    """
    if strategy != "bfd":
        raise PlanError(f"strategy is {strategy!r}, and only 'bfd' keeps sequences whole")
    if hasattr(dataset, "items"):
        return type(dataset)({name: pack_dataset(part, seq_length) for name, part in dataset.items()})
    table: pa.Table = dataset.with_format("arrow")[:]
    names = tuple(field.name for field in table.schema if pa.types.is_list(field.type))
    if not names:
        raise DataError("there is no list column to pack")
    table = table.select(names).combine_chunks()
    lengths = pc.list_value_length(table[0]).to_numpy()
    table, lengths = table.filter(pa.array(lengths > 0)), lengths[lengths > 0]
    planned = plan(lengths_table(lengths), max_tokens_per_gpu=seq_length)
    parts = [planned.rows(0, 0, index) for index in range(planned.steps[0].num_micro_batches)]
    order = np.concatenate(parts)
    ends = np.cumsum([0, *(int(lengths[rows].sum()) for rows in parts)])
    packed = {}
    for name in names:
        column = table[name].take(pa.array(order)).combine_chunks()
        if not np.array_equal(pc.list_value_length(column).to_numpy(), lengths[order]):
            raise DataError(f"its lists are not as long as those of {names[0]!r}", name)
        packed[name] = pa.LargeListArray.from_arrays(ends, column.flatten())
    starts = np.cumsum([0, *(len(rows) for rows in parts)])
    packed["seq_lengths"] = pa.LargeListArray.from_arrays(starts, pa.array(lengths[order]))
    return type(dataset)(pa.table(packed))
