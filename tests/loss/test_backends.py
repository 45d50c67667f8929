"""Each backend's arithmetic, against a plain statement of what the trainer does to losses and gradients."""

import pytest
import torch
from examples import EXAMPLES, MODES

import rollpack
from rollpack.torch import LossReducer, gradient_factor


def average_over_ranks(losses):
    """DDP and FSDP: each rank adds up its micro-batches, and gradients are averaged over the dp x cp group."""
    return sum(sum(rank) for rank in losses) / len(losses)


def megatron(losses):
    """Three values, count 1: the schedule divides each micro-batch by K; gradients are averaged over dp x cp."""
    return sum(sum(loss / len(rank) for loss in rank) for rank in losses) / len(losses)


def trainers(cp_size):
    return {
        "none": lambda losses: sum(map(sum, losses)),
        "ddp": average_over_ranks,
        "fsdp": average_over_ranks,
        # The loss is divided by the configured number of accumulation steps, here K, before backward.
        "accelerate": megatron,
        "deepspeed": megatron,
        "megatron": megatron,
        # Two values: the schedule multiplies by the context-parallel size itself.
        "megatron_legacy": lambda losses: megatron(losses) * cp_size,
    }


@pytest.mark.parametrize("backend", ["none", "ddp", "fsdp", "accelerate", "deepspeed", "megatron", "megatron_legacy"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("dp_size", "cp_size"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_what_the_trainer_makes_of_it_is_the_step_loss(backend, mode, dp_size, cp_size):
    example = EXAMPLES["all_apart"]
    table = example.table()
    plan = rollpack.plan(
        table,
        loss_aggregation=mode,
        divisor=example.divisor if mode == "constant" else None,
        micro_batch_size=1,
        dp_size=dp_size,
        cp_size=cp_size,
    )
    steps = plan.steps[0].num_micro_batches
    assert steps == 4 // dp_size
    reducer = LossReducer(backend=backend, accumulation_steps=steps if backend in {"accelerate", "deepspeed"} else None)
    losses = [
        [
            reducer(torch.from_numpy(batch.columns["loss"]).double(), batch).item()
            for batch in rollpack.pack(table, plan, dp_rank=d, cp_rank=c, token_columns=["loss"])
        ]
        for d in range(dp_size)
        for c in range(cp_size)
    ]
    assert trainers(cp_size)[backend](losses) == pytest.approx(float(example.expected[mode]), rel=1e-14)


@pytest.mark.parametrize(
    ("backend", "factor"),
    [
        ("none", 1),
        ("ddp", 6),
        ("fsdp", 6),
        ("hf_trainer_scaled", 6),
        ("hf_trainer_num_items", 1),
        ("megatron", 30),
        ("megatron_legacy", 10),
        ("megatron_per_token", 99),
    ],
)
def test_factors(backend, factor):
    assert gradient_factor(backend, dp_size=2, cp_size=3, num_micro_batches=5, num_tokens=99) == factor


@pytest.mark.parametrize("backend", ["accelerate", "deepspeed", "hf_trainer"])
def test_accumulation_steps(backend):
    sizes = {"dp_size": 2, "cp_size": 3, "num_micro_batches": 5}
    assert gradient_factor(backend, **sizes, accumulation_steps=5) == 30
    with pytest.raises(rollpack.PlanError, match="needs accumulation_steps="):
        gradient_factor(backend, **sizes)
    with pytest.raises(rollpack.PlanError, match="steps 4, and this step has 5.*own_accumulation_boundary=True"):
        gradient_factor(backend, **sizes, accumulation_steps=4)
    # Who sets the boundary has the loss divided by the configured 4 all the same.
    assert gradient_factor(backend, **sizes, accumulation_steps=4, own_accumulation_boundary=True) == 24
    assert gradient_factor(backend, **sizes, accumulation_steps=1, own_accumulation_boundary=True) == 6
    for steps in (0, -1):
        with pytest.raises(rollpack.PlanError, match=f"accumulation_steps is {steps}; it has to be at least 1"):
            gradient_factor(backend, **sizes, accumulation_steps=steps, own_accumulation_boundary=True)


def test_a_reducer_that_sets_the_boundary_itself():
    """One micro-batch of losses 1 under an Accelerate that divides by 4 all the same."""
    table = EXAMPLES["four_samples"].table()
    (batch,) = rollpack.pack(table, rollpack.plan(table, micro_batch_size=4))
    ones = torch.ones(len(batch.tokens), dtype=torch.float64)
    reducer = LossReducer(backend="accelerate", accumulation_steps=4, own_accumulation_boundary=True)
    assert reducer(ones, batch).item() == pytest.approx(4.0, rel=1e-14)
    with pytest.raises(rollpack.PlanError, match="steps 4, and this step has 1"):
        LossReducer(backend="accelerate", accumulation_steps=4)(ones, batch)


def test_wrong_arguments():
    sizes = {"dp_size": 2, "cp_size": 1, "num_micro_batches": 1}
    names = (
        "none, ddp, fsdp, accelerate, deepspeed, hf_trainer, hf_trainer_scaled, hf_trainer_num_items, megatron, "
        "megatron_legacy, megatron_per_token"
    )
    with pytest.raises(rollpack.PlanError, match=f"^backend is 'horovod'; it has to be one of {names}$"):
        gradient_factor("horovod", **sizes)
    with pytest.raises(rollpack.PlanError, match="accumulation_steps= is for accelerate, deepspeed and hf_trainer"):
        gradient_factor("fsdp", **sizes, accumulation_steps=2)
    with pytest.raises(rollpack.PlanError, match="needs num_tokens"):
        gradient_factor("megatron_per_token", **sizes)
    for name in ("dp_size", "cp_size", "num_micro_batches"):
        with pytest.raises(rollpack.PlanError, match=f"^{name} is 0; it has to be at least 1"):
            gradient_factor("ddp", **sizes | {name: 0})
        with pytest.raises(rollpack.PlanError, match=f"^{name} is 2.0; it has to be an integer"):
            gradient_factor("ddp", **sizes | {name: 2.0})
    with pytest.raises(rollpack.PlanError, match="^accumulation_steps is '1'; it has to be an integer"):
        gradient_factor("accelerate", **sizes, accumulation_steps="1")
    for wrong, text in ((-1, "be at least 0"), ("9", "be an integer")):
        with pytest.raises(rollpack.PlanError, match=f"^num_tokens is {wrong!r}; it has to {text}"):
            gradient_factor("megatron_per_token", **sizes, num_tokens=wrong)
    with pytest.raises(rollpack.PlanError, match="^own_accumulation_boundary is 'no'; it has to be True or False"):
        gradient_factor("accelerate", **sizes, accumulation_steps=2, own_accumulation_boundary="no")


def test_a_step_without_a_trained_token_has_a_factor_too():
    assert gradient_factor("megatron_per_token", dp_size=2, cp_size=1, num_micro_batches=1, num_tokens=0) == 0
