"""Every public object says what it is in one line."""

import inspect

import numpy as np
import pyarrow as pa
import pytest
import torch

import rollpack
import rollpack.testing
import rollpack.torch
from rollpack import inspection, names
from rollpack.integrations import _schedule, _sum_of_sample_mean
from rollpack.testing import Agreement, Cut, Failure, Report, Rollouts, TrainingStep
from rollpack.torch import LossReducer, Metrics, MicroBatchDataset, Ranks, micro_batches

TABLE = pa.table({"tokens": [[1] * 3, [1] * 5], "loss_mask": [[1], [1, 0]], "rollout_id": ["a", "b"], "group_index": [0, 0]})


def plan():
    return rollpack.plan(TABLE, micro_batch_size=1, dp_size=2)


def closed():
    batches = micro_batches(TABLE, plan(), device="cpu")
    batches.close()
    return batches


def training_step():
    """The one that a training step under check is given."""
    seen = []

    def step(given):
        seen.append(given)
        raise StopIteration

    with pytest.raises(StopIteration):
        rollpack.testing.check_trainer(step)
    return seen[0]


def agreement(deviation):
    found = Agreement("token_mean", 1.25)
    found.add(torch.float64, Cut(1, 1, "zigzag", 8), deviation, 1e-17)
    return found


FAILURE = Failure("dp size", 2.0, "a missing D", "even batch")

CASES = {
    rollpack.CostModel: (lambda: rollpack.CostModel(2, 5), "CostModel(linear=2, quadratic=5)"),
    rollpack.DataError: (lambda: rollpack.DataError("bad", "tokens", 3), "DataError('bad')"),
    rollpack.MicroBatch: (
        lambda: next(rollpack.pack(TABLE, plan(), dp_rank=1)),
        "MicroBatch(1 sample, 3 positions, sample_mean, step 0, dp_rank 1, cp_rank 0, 0 of 1)",
    ),
    rollpack.Plan: (
        plan,
        (
            "Plan(2 samples in 1 step of 1 micro-batch on each of 2 x 1 dp x cp ranks, sample_mean, fill 80.0%, "
            "imbalance 1.2500)"
        ),
    ),
    rollpack.PlanError: (lambda: rollpack.PlanError("bad"), "PlanError('bad')"),
    rollpack.RollpackError: (lambda: rollpack.RollpackError("bad"), "RollpackError('bad')"),
    rollpack.SchemaError: (lambda: rollpack.SchemaError("bad", "tokens"), "SchemaError('bad')"),
    rollpack.Step: (
        lambda: plan().steps[0],
        "Step(num_rollouts=2, num_prompts=None, num_tokens=2, num_micro_batches=1)",
    ),
    rollpack.Summary: (lambda: rollpack.summarize(TABLE), "Summary(2 samples, 8 tokens, 2 trained, without groups)"),
    LossReducer: (
        lambda: LossReducer(backend="accelerate", accumulation_steps=4, own_accumulation_boundary=True),
        "LossReducer(backend='accelerate', accumulation_steps=4, own_accumulation_boundary=True, denominators='original')",
    ),
    Metrics: (lambda: Metrics({"kl": "sample_mean"}), "Metrics({'kl': 'sample_mean'})"),
    MicroBatchDataset: (
        lambda: MicroBatchDataset(TABLE, plan(), dp_rank=1),
        "MicroBatchDataset(1 micro-batch, step 0, dp_rank 1, cp_rank 0)",
    ),
    rollpack.torch.MicroBatches: (closed, "MicroBatches(1 micro-batch, closed)"),
    Ranks: (lambda: Ranks(2, 1, 1, 0), "Ranks(dp_size=2, cp_size=1, dp_rank=1, cp_rank=0)"),
    Agreement: (
        lambda: agreement(2e-16),
        "Agreement(token_mean agrees, loss 1.25, worst deviation float64 2.0e-16)",
    ),
    Cut: (lambda: Cut(2, 1, "zigzag", 64), "Cut(dp_size=2, cp_size=1, layout='zigzag', max_tokens_per_gpu=64)"),
    Failure: (
        lambda: FAILURE,
        "Failure(invariance='dp size', factor=2.0, cause='a missing D', where='even batch')",
    ),
    Report: (lambda: Report(("dp size", "order"), (FAILURE,)), "Report(1 of 2 invariances fail: a missing D)"),
    Rollouts: (lambda: Rollouts.read(TABLE), "Rollouts(2 samples, 8 tokens, 2 trained, with groups)"),
    TrainingStep: (training_step, "TrainingStep(1 x 1 dp x cp ranks, 1 micro-batch on each)"),
}

#: Of what is not in an ``__all__``, and of other states of the same class.
MORE = {
    "open micro-batches": (lambda: micro_batches(TABLE, plan(), device="cpu"), "MicroBatches(1 micro-batch)"),
    "disagreement": (
        lambda: agreement(0.5),
        "Agreement(token_mean does NOT agree, loss 1.25, worst deviation float64 5.0e-01)",
    ),
    "report that is well": (lambda: Report(("dp size", "order"), ()), "Report(all 2 invariances hold)"),
    "inspection": (lambda: inspection.inspect(TABLE), "Inspection(2 sound rows, 2 rollouts, 1 group, 0 faults)"),
    "fault": (
        lambda: inspection.inspect(pa.table({"tokens": [[1]], "loss_mask": [[7]]})).faults[0],
        "Fault(kind='data', column='loss_mask', row=0, part=0, part_row=0, message=",
    ),
    "spread": (lambda: inspection.inspect(TABLE).fan_out, "Spread(min=1, p10=1,"),
    "settings": (lambda: plan().settings, "Settings(loss_aggregation='sample_mean', divisor=None,"),
    "trainer's mode": (lambda: names.MODES["trl:dapo"], "TrainerMode(name='trl:dapo', formula='Σ m x / T'"),
    "schedule of slime and miles": (
        lambda: _schedule.Schedule([[0, 1], [2]], [[[0], [1]], [[0], []]], [2], [3]),
        "Schedule(3 samples, 2 dp ranks, micro-batches a step [2])",
    ),
    "reducer of slime and miles": (
        lambda: _sum_of_sample_mean._WeightedSum([torch.ones(3), torch.ones(2)], np.array([0.5, 1.0])),
        "Σ weight x mask x loss over 5 response positions",
    ),
    "plan of several steps": (
        lambda: rollpack.plan(
            {"tokens": [[1]] * 3, "response_length": [0] * 3}, micro_batch_size=1, global_batch_size=2, remainder="keep"
        ),
        (
            "Plan(3 samples in 2 steps of 1 to 2 micro-batches on each of 1 x 1 dp x cp ranks, sample_mean, fill 100.0%, "
            "imbalance 1.0000)"
        ),
    ),
    "reducer without settings": (
        lambda: LossReducer(backend="fsdp"),
        "LossReducer(backend='fsdp', denominators='original')",
    ),
    "micro-batch on a device": (
        lambda: next(rollpack.pack(TABLE, plan(), dp_rank=1)).to("cpu"),
        "MicroBatch(1 sample, 3 positions, sample_mean, step 0, dp_rank 1, cp_rank 0, 0 of 1)",
    ),
}


@pytest.mark.parametrize(("make", "says"), [*CASES.values(), *MORE.values()], ids=[*(c.__name__ for c in CASES), *MORE])
def test_repr(make, says):
    shown = repr(make())
    assert "\n" not in shown
    assert " object at 0x" not in shown
    assert shown == says if says.endswith((")", "positions")) else shown.startswith(says)


def test_every_public_class_is_among_them():
    public = {
        value
        for module in (rollpack, rollpack.torch, rollpack.testing)
        for name in module.__all__
        if inspect.isclass(value := getattr(module, name))
    }
    assert public == set(CASES)
