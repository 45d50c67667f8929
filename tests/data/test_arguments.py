"""What passes for a number, or for True or False, and is none: it is refused, by name."""

import numpy as np
import pytest

import rollpack
from rollpack.simulation import simulate

TABLE = {"tokens": [[1, 2, 3], [4, 5]], "response_length": [2, 1]}
PLAN = rollpack.plan(TABLE, micro_batch_size=1)
INTEGERS = [
    *("max_tokens_per_gpu", "dp_size", "cp_size", "global_batch_size", "prompts_per_step", "micro_batch_multiple"),
    *("pad_to_multiple_of", "pad_micro_batch_to_multiple_of", "micro_batch_size"),
]


def planned(**arguments):
    budget = {} if "micro_batch_size" in arguments else {"max_tokens_per_gpu": 8}
    return rollpack.plan(TABLE, **(budget | arguments))


def simulated(**arguments):
    return simulate(TABLE, **({"model": "qwen3-8b", "device": 1e15, "budgets": [8]} | arguments))


def weighed(mode="sample_mean", **arguments):
    return rollpack.sample_weights(mode, **({"rollout_mask_sums": [1, 2], "num_rollouts": 2, "num_tokens": 3} | arguments))


@pytest.mark.parametrize("wrong", [True, np.True_, np.array(True), 2.0, "2", b"2", [2], np.array([2])])
def test_no_flag_text_or_fraction_passes_for_an_integer(wrong):
    calls = {name: lambda name=name: planned(**{name: wrong}) for name in INTEGERS}
    calls |= {name: lambda name=name: list(rollpack.pack(TABLE, PLAN, **{name: wrong})) for name in ("step", "dp_rank")}
    calls["num_threads"] = lambda: list(rollpack.pack(TABLE, PLAN, num_threads=wrong))
    calls |= {name: lambda name=name: weighed(**{name: wrong}) for name in ("num_rollouts", "num_prompts", "num_tokens")}
    calls["one of budgets"] = lambda: simulated(budgets=[wrong])
    calls["linear of the cost model"] = lambda: planned(cost=rollpack.CostModel(wrong))
    for name, call in calls.items():
        with pytest.raises(rollpack.PlanError) as told:
            call()
        assert str(told.value) == f"{name} is {wrong!r}; it has to be an integer"


@pytest.mark.parametrize("wrong", [True, np.True_, np.array(True), "3", b"3", "three", [3.0], np.array([3.0]), {}])
def test_no_flag_or_text_passes_for_a_number(wrong):
    calls = {
        "divisor": [
            lambda: planned(loss_aggregation="constant", divisor=wrong),
            lambda: planned(loss_aggregation="trl:dr_grpo", divisor=wrong),
            lambda: weighed("constant", divisor=wrong),
        ],
        "mfu": [lambda: simulated(mfu=wrong)],
        "overhead": [lambda: simulated(overhead=wrong)],
        "device": [] if isinstance(wrong, str) else [lambda: simulated(device=wrong)],
    }
    for name, several in calls.items():
        for call in several:
            with pytest.raises(rollpack.PlanError) as told:
                call()
            assert str(told.value) == f"{name} is {wrong!r}; it has to be a number"


@pytest.mark.parametrize("wrong", ["no", "error", 0, 1, None])
def test_no_text_or_number_passes_for_a_flag(wrong):
    with pytest.raises(rollpack.PlanError) as told:
        planned(placeholders=wrong)
    assert str(told.value) == f"placeholders is {wrong!r}; it has to be True or False"


def test_numbers_of_numpy_do():
    assert planned(dp_size=np.int8(2), placeholders=np.True_).settings.dp_size == 2
    assert planned(loss_aggregation="constant", divisor=np.float32(2)).settings.divisor == 2.0
    assert weighed(num_rollouts=np.uint8(2)).tolist() == [0.5, 0.25]


def test_a_whole_that_is_less_than_its_part_is_refused():
    """A step of 2 trained tokens has no rollout, and no group, of 3."""
    for name, mode in (("rollout_mask_sums", "token_mean"), ("prompt_mask_sums", "prompt_mean")):
        with pytest.raises(rollpack.PlanError) as told:
            rollpack.sample_weights(mode, **{name: [1, 3]}, num_prompts=2, num_tokens=2)
        assert str(told.value) == f"{name} holds 3, and num_tokens, the trained tokens of the whole step, is 2"
    assert rollpack.sample_weights("token_mean", rollout_mask_sums=[3, 3], num_tokens=3).tolist() == [1 / 3] * 2


def test_a_value_for_each_sample_is_told_from_one_for_each_token():
    table = TABLE | {"reward": [0.5, 1.0]}
    with pytest.raises(rollpack.SchemaError, match="'reward': has type .*; a value for each sample, .* sample_columns="):
        list(rollpack.pack(table, PLAN, token_columns=["reward"]))
    first = next(rollpack.pack(table, PLAN, sample_columns=["reward"]))
    assert first.sample_columns["reward"].tolist() == [table["reward"][first.rows[0]]]
