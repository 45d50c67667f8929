"""In verl's environment: its aggregation, policy losses and micro-batches beside ours."""

import json
import tempfile
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist
from padded_case import REAL, TRACES, Case, chosen_case, kit, off
from tensordict import TensorDict
from verl.trainer.ppo import core_algos
from verl.utils.seqlen_balancing import rearrange_micro_batches as theirs

from rollpack import PlanError
from rollpack.integrations import verl as ours
from rollpack.integrations.padded import row_weights
from rollpack.testing import padded_rows

CASE = chosen_case()
MODES = ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"]


def gradient(aggregate, cut):
    """What the optimizer gets: summed over micro-batches, averaged over ranks; and the loss that goes with it."""
    losses, total = CASE.losses.clone().requires_grad_(), 0.0
    for rank in cut:
        for rows in rank:
            loss = aggregate(losses[rows], CASE.mask[rows], rows, len(cut)) / len(cut)
            loss.backward()
            total += loss.item()
    return total, losses.grad


def same_as_verl():
    """Value and gradient of every mode, with counts of the step and without."""
    worst = 0.0
    counts = {"batch_num_tokens": int(CASE.sums.sum()), "global_batch_size": CASE.rows}
    for mode in MODES:
        for name, cut in CASE.cuts().items():
            for factor in (None, 7):
                for given in (counts, {}) if name == "uncut" else (counts,):

                    def call(function, given=given, mode=mode, factor=factor):
                        return lambda x, m, _, dp: function(x, m, mode, dp, loss_scale_factor=factor, **given)

                    (a, g), (b, h) = gradient(call(core_algos.agg_loss), cut), gradient(call(ours.agg_loss), cut)
                    worst = max(worst, abs(a - b) / abs(b), off(g, h))
    for mode in MODES[:1] + MODES[2:]:
        for function in (core_algos.agg_loss, ours.agg_loss):
            with pytest.raises(ValueError, match="required|needs"):
                function(CASE.losses, CASE.mask, mode, 2)
    return worst


def compared():
    """Each mode of verl beside the reference, under each cut; and without counts of the step, as before they were passed."""
    reference = {
        "token-mean": CASE.weights("token_mean"),
        "seq-mean-token-sum": CASE.weights("constant", divisor=1.0),
        "seq-mean-token-sum-norm": CASE.weights("constant", divisor=float(CASE.width)),
        "seq-mean-token-mean": CASE.weights("sample_mean"),
    }
    counts = {"batch_num_tokens": int(CASE.sums.sum()), "global_batch_size": CASE.rows}
    rows = []
    for mode, weights in reference.items():
        for how, given in (("agg_loss", counts), ("agg_loss without counts", None)):

            def call(x, m, rows, dp, mode=mode, given=given):
                if given is None:  # a mean of each micro-batch, averaged over micro-batches and ranks
                    return core_algos.agg_loss(x, m, mode) / len(of_rank(rows))
                return core_algos.agg_loss(x, m, mode, dp, **given)

            for name, cut in CASE.cuts().items():

                def of_rank(rows, cut=cut):
                    return next(rank for rank in cut if any(rows is part for part in rank))

                _, found = gradient(call, cut)
                rows.append({"function": f"verl {how}", "mode": mode, "cut": name, "off": off(found, weights)})
    row_of = row_weights(CASE.sums, "prompt_mean", prompt_ids=CASE.groups)
    for name, cut in CASE.cuts().items():
        _, found = gradient(lambda x, m, rows, dp: ours.agg_loss(x, m, "prompt_mean", dp, weights=row_of[rows]), cut)
        rows.append(
            {
                "function": "rollpack agg_loss",
                "mode": "prompt_mean",
                "cut": name,
                "off": off(found, CASE.weights("prompt_mean")),
            }
        )
    return rows


def registered():
    """A registered policy loss on the weights of the batch, in two optimizer steps of 2 ranks."""
    half, ranks = CASE.rows // 2, 2
    config = SimpleNamespace(
        clip_ratio=0.2, clip_ratio_low=0.2, clip_ratio_high=0.2, get=lambda _, default: default, global_batch_info={}
    )
    # Ranks hold halves, and steps a half of each: groups have to be whole in a step.
    batch = {"response_mask": CASE.mask.long()}
    ours.add_weights(batch, "prompt_mean", uids=CASE.groups, mini_batch_size=half, dp_size=ranks)
    loss = core_algos.get_policy_loss_fn(ours.register("vanilla"))
    worst = 0.0
    for step in range(2):
        rows = [rank * half + step * half // 2 + i for rank in range(ranks) for i in range(half // 2)]
        expected = torch.zeros_like(CASE.losses)
        counted = len(set(CASE.groups[rows].tolist()))
        for row in rows:
            same = [other for other in rows if CASE.groups[other] == CASE.groups[row]]
            expected[row] = CASE.mask[row] / (counted * int(CASE.sums[same].sum()))
        log_probs = torch.zeros_like(CASE.losses).requires_grad_()
        for rank in range(ranks):
            config.global_batch_info = {"dp_size": ranks}
            of_rank = rows[rank * half // 2 : (rank + 1) * half // 2]
            for part in np.array_split(of_rank, 3):
                value, _ = loss(
                    old_log_prob=torch.zeros_like(log_probs[part]),
                    log_prob=log_probs[part],
                    advantages=-torch.ones_like(log_probs[part]),
                    response_mask=CASE.mask[part],
                    loss_agg_mode="token-mean",
                    config=config,
                    rollout_is_weights=batch["rollout_is_weights"][part],
                )
                (value / ranks).backward()
        worst = max(worst, off(log_probs.grad, expected))
    with pytest.raises(PlanError, match="always takes seq-mean-token-mean"):
        ours.register("sapo")
    with pytest.raises(PlanError, match="prompt group 0 is cut"):
        ours.add_weights(batch, "prompt_mean", uids=np.arange(CASE.rows) % 2, mini_batch_size=half, dp_size=2)
    with pytest.raises(PlanError, match="needs the weights of the batch"):
        loss(None, None, None, None)
    return worst


def whole_loss():
    """verl's own ``ppo_loss`` on micro-batches of a step: policy term in prompt_mean, entropy in seq-mean-token-mean."""
    from verl.utils import tensordict_utils as tu
    from verl.workers.config import ActorConfig, PolicyLossConfig
    from verl.workers.utils.losses import ppo_loss

    settings = {"strategy": "fsdp", "rollout_n": 1, "ppo_micro_batch_size_per_gpu": 1, "entropy_coeff": 0.5}
    registered = PolicyLossConfig(loss_mode=ours.register("vanilla"))
    config = ActorConfig(**settings, loss_agg_mode="seq-mean-token-mean", policy_loss=registered)
    batch = {"response_mask": CASE.mask.long()}
    ours.add_weights(batch, "prompt_mean", uids=CASE.groups)
    log_probs, entropies = (torch.zeros_like(CASE.losses).requires_grad_() for _ in range(2))
    one = torch.ones(CASE.rows, 1, dtype=torch.long)
    whole = TensorDict(
        {
            **batch,
            "prompts": one,
            "responses": CASE.mask.long(),
            "attention_mask": torch.ones(CASE.rows, CASE.width + 1, dtype=torch.long),
            "old_log_probs": torch.zeros_like(CASE.losses),
            "advantages": -CASE.losses,
        },
        [CASE.rows],
    )
    for rows in np.array_split(np.arange(CASE.rows), 3):
        part = tu.index_select_tensor_dict(whole, torch.from_numpy(rows))
        tu.assign_non_tensor(part, dp_size=1, batch_num_tokens=int(CASE.sums.sum()), global_batch_size=CASE.rows)
        # A log-probability and an entropy for each position of the sequence, of the token after it.
        outputs = {
            name: torch.nn.functional.pad(value[rows], (0, 1)).reshape(-1)
            for name, value in (("log_probs", log_probs), ("entropy", entropies))
        }
        ppo_loss(config, outputs, part)[0].backward()
    return [
        off(log_probs.grad, CASE.losses * CASE.weights("prompt_mean")),
        off(entropies.grad, -0.5 * CASE.weights("sample_mean")),
    ]


def micro_batches():
    """Rows of each once, none over the cap; how many beside verl's."""
    width = int(CASE.lengths.max())
    attention = torch.arange(width)[None] < torch.from_numpy(CASE.lengths)[:, None]
    batch = TensorDict(
        {"input_ids": torch.arange(CASE.rows)[:, None].expand(-1, width), "attention_mask": attention.long()}, [CASE.rows]
    )
    told = []
    for cap in (width, width * 2, width * 5):
        for options in ({}, {"num_batches_divided_by": 4}, {"min_num_micro_batch": 30}, {"force_group_size": 2}):
            cap_of = cap * options.get("force_group_size", 1)
            parts, indices = ours.rearrange_micro_batches(batch, cap_of, **options)
            assert sorted(row for rows in indices for row in rows) == list(range(CASE.rows))
            for part, rows in zip(parts, indices, strict=True):
                assert part["input_ids"][:, 0].tolist() == rows
                assert int(part["attention_mask"].sum()) <= cap_of
            assert len(parts) % options.get("num_batches_divided_by", 1) == 0
            assert len(parts) >= options.get("min_num_micro_batch", 1)
            told.append([cap_of, options, len(parts), len(theirs(batch, cap_of, **options)[0])])
    nested = torch.nested.nested_tensor(
        [torch.zeros(n, dtype=torch.long) for n in CASE.lengths.tolist()], layout=torch.jagged
    )
    _, indices = ours.rearrange_micro_batches(TensorDict({"input_ids": nested}, [CASE.rows]), width * 2)
    assert all(sum(int(CASE.lengths[row]) for row in rows) <= width * 2 for rows in indices)
    for bad, told_by in (((batch, 3), "the budget is 3"), ((batch, width, None, CASE.rows + 1), "to fill them")):
        with pytest.raises(PlanError, match=told_by):
            ours.rearrange_micro_batches(*bad)
    return told


def _rank(rank, address, lengths, results):
    """One rank of two, with rows of these lengths."""
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    own = lengths[rank]
    attention = (torch.arange(max(own))[None] < torch.tensor(own)[:, None]).long()
    batch = TensorDict({"input_ids": attention, "attention_mask": attention}, [len(own)])
    try:
        results[rank] = len(ours.rearrange_micro_batches(batch, 10, dp_group=dist.group.WORLD)[0])
    except PlanError as error:
        results[rank] = str(error)
    dist.barrier()  # gloo may wait for ever, or abort, where a rank leaves right after a gather
    dist.destroy_process_group()


def of_two_ranks(lengths):
    """How many micro-batches each rank gets, or what it is told."""
    with tempfile.TemporaryDirectory() as folder, torch.multiprocessing.Manager() as manager:
        results = manager.dict()
        arguments = (f"file://{folder}/rendezvous", lengths, results)
        torch.multiprocessing.start_processes(_rank, arguments, nprocs=2, start_method="fork")
        return [results[0], results[1]]


def fanned_out():
    """A mean of rows where the unit that it is compared with is the rollout, of up to 30 rows."""
    table = pq.read_table(TRACES / "tau_bench_airline_per_turn.parquet")
    turns = Case(table)
    losses = turns.losses.clone().requires_grad_()
    core_algos.agg_loss(losses, turns.mask, "seq-mean-token-mean", global_batch_size=turns.rows).backward()
    expected = turns.weights("sample_mean", rollouts=table["rollout_id"].to_pylist())
    cut = "uncut, a row a turn, beside sample_mean of rollouts"
    return [{"function": "verl agg_loss", "mode": "seq-mean-token-mean", "cut": cut, "off": off(losses.grad, expected)}]


def checked():
    """The kit on agg_loss with the counts of the step, and on ours."""

    def reducer(function, mode, weights=False):
        def call(x, m):
            given = {"weights": m.sample_weights} if weights else {}
            given |= {"batch_num_tokens": m.num_tokens, "global_batch_size": m.num_rollouts, "dp_size": m.dp_size}
            return function(padded_rows(x, m), padded_rows(m.loss_mask, m).double(), mode, **given)

        return call

    wanted = {
        "token-mean": ("token_mean", None),
        "seq-mean-token-mean": ("sample_mean", None),
        "seq-mean-token-sum": ("constant", 1.0),
    }
    return [
        *(
            kit("verl agg_loss", mode, reducer(core_algos.agg_loss, mode), ours_is, divisor=divisor, backend="fsdp")
            for mode, (ours_is, divisor) in wanted.items()
        ),
        kit("rollpack agg_loss", "prompt_mean", reducer(ours.agg_loss, "prompt_mean", True), "prompt_mean", backend="fsdp"),
    ]


if __name__ == "__main__":
    told = {"compared": compared() + fanned_out() if REAL else compared(), "kit": checked() if REAL else []}
    if not REAL:
        told |= {
            "same": same_as_verl(),
            "registered": registered(),
            "whole_loss": whole_loss(),
            "micro_batches": micro_batches(),
        }
        told["two_ranks"] = [
            of_two_ranks([[9, 8, 7, 6, 5], [3, 3, 3, 3, 3]]),
            of_two_ranks([[9, 8, 7], [3, 3]]),
            of_two_ranks([[11], [3]]),
        ]
    print(json.dumps(told))
