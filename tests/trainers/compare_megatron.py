"""The reducers of slime and miles, by their formulas, beside ours on one real batch, under several cuts.

    python tests/trainers/compare_megatron.py

prints how far the step loss is from the float64 reference, |a - b| / Σ w|x|, and the gradient, max|g - g0| / max|g0|.
"""

import argparse
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from megatron_trainers import Lists, fsdp_loss, megatron_loss, megatron_per_token_loss, sum_of_sample_mean

import rollpack
from rollpack.integrations import miles, slime
from rollpack.testing import Cut, Rollouts
from rollpack.testing.truth import Observed, Truth

TRACES = Path(__file__).parents[3] / "shared" / "data"
CUTS = [Cut(1, 1, "zigzag", 65_536), Cut(4, 1, "zigzag", 8192), Cut(2, 2, "zigzag", 4096)]


class Way(NamedTuple):
    """A mode, the denominators that the trainer has in its batch, how it averages, and whose reducer it is (None: its own).

    Trainers without denominators, and miles' FSDP, divide by samples.
    """

    name: str
    mode: str
    denominators: str
    backend: str
    ours: object = None

    def divided_by(self, mb, samples):
        return samples if self.denominators == "mask_sums" else mb.num_rollouts


WAYS = [
    Way("slime, miles: sample mean, Megatron", "sample_mean", "rollout_mask_sums", "megatron"),
    Way("before denominators, or miles' FSDP", "sample_mean", "mask_sums", "fsdp"),
    Way("slime, miles: per-token loss", "token_mean", "mask_sums", "megatron_per_token"),
    Way("ours in slime", "prompt_mean", "", "megatron", slime),
    Way("ours in slime", "constant", "", "megatron", slime),
    Way("ours in miles' FSDP", "prompt_mean", "", "fsdp", miles),
]
DIVISOR = 4096.0


def batch(prompts=200, removed=10):
    """Rollouts of several samples each, of the first prompts; those of every tenth are removed, as a filter does it."""
    table = pq.read_table(TRACES / "reflexion_fanout.parquet", filters=[("group_index", "<", prompts)])
    drop = table["group_index"].to_numpy() % removed == 0
    mask = table["loss_mask"].combine_chunks()
    values = np.where(np.repeat(drop, mask.value_lengths()), 0, mask.flatten()).astype(np.uint8)
    column = table.column_names.index("loss_mask")
    return table.set_column(column, "loss_mask", pa.ListArray.from_arrays(mask.offsets, values))


def deviations(way, table, cut):
    """Of the loss and of the gradient, from the reference."""
    divisor = DIVISOR if way.mode == "constant" else None
    truth = Truth(Rollouts.read(table), divisor, "count")
    plan = cut.plan(table, loss_aggregation=way.mode, divisor=divisor)
    observed, counted = Observed(len(truth.losses) - 1), 0
    for dp_rank in range(cut.dp_size):
        for cp_rank in range(cut.cp_size):
            for packed in rollpack.pack(table, plan, dp_rank=dp_rank, cp_rank=cp_rank, sample_columns=["response_length"]):
                tokens = truth.tokens(packed)
                x = torch.from_numpy(truth.losses[tokens]).requires_grad_()
                loss, scale, count = reduced(way, x, packed.to("cpu"), len(table))
                loss.backward()
                observed.add(loss.item() * scale, x.grad * scale, tokens)
                counted += count
    if way.backend == "megatron_per_token":
        observed.loss, observed.gradient = observed.loss / counted, observed.gradient / counted
    wanted = truth.gradient(way.mode)
    loss = abs(observed.loss - truth.loss(way.mode)) / (wanted @ np.abs(truth.losses))
    return loss, np.abs(observed.gradient - wanted).max() / wanted.max()


def reduced(way, x, mb, samples):
    """The loss that the trainer back-propagates, what becomes of it, and the count it is divided by."""
    b = Lists.of(x, mb)
    d, c, k, n = mb.dp_size, mb.cp_size, mb.num_micro_batches, way.divided_by(mb, samples)
    if way.ours is not None:
        of_step = {"num_rollouts": n, "num_prompts": mb.num_prompts, "prompt_mask_sums": mb.prompt_mask_sums}
        arguments = {"loss_aggregation": way.mode, "divisor": mb.divisor, "share": b.share, **of_step}
        total = way.ours.get_sum_of_sample_mean(b.totals, b.responses, b.masks, **arguments)(b.x)
    else:
        of, per_token = getattr(mb, way.denominators), way.mode == "token_mean"
        total = sum_of_sample_mean(b.local_lengths, b.local_masks, of, per_token=per_token)(b.x)
    if way.backend == "megatron_per_token":
        loss, count = megatron_per_token_loss(total, [torch.ones(int(s)) for s in mb.mask_sums], cp_size=c)
        return loss, 1.0, count
    if way.backend == "fsdp":
        return fsdp_loss(total, rollouts=n, dp_size=d * c), 1 / (d * c), 0
    return megatron_loss(total, micro_batches=k, rollouts=n, dp_size=d, cp_size=c), 1 / (k * d * c), 0


def main():
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    table = batch()
    print(f"torch {torch.__version__}, rollpack {rollpack.__version__}; {len(table)} samples")
    print(f"{'reducer':<38} {'mode':<12} {'loss':>9} {'gradient':>9}  cut")
    for way in WAYS:
        for cut in CUTS:
            loss, gradient = deviations(way, table, cut)
            print(f"{way.name:<38} {way.mode:<12} {loss:>9.2g} {gradient:>9.2g}  {cut}")


if __name__ == "__main__":
    main()
