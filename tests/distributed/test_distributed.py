"""The same loss under real distributed training: real processes, each library's own averaging.

One process in float64 that sees the whole step is the truth (tiny.py); trainers.py trains with each library.
"""

import os

import pytest
import ranks
import tiny
import torch
from cases import TOLERANCES, Case, cases, missing

import rollpack
from rollpack.testing import Cut
from rollpack.torch import LossReducer

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="ranks are forked")
MEGATRON = [f"megatron{kind}" for kind in ("", "_legacy", "_per_token")]


def result(measured, case):
    if "error" in measured[case]:
        pytest.fail(measured[case]["error"], pytrace=False)
    return measured[case]


def here(found):
    """Cases as parameters, skipped where their library is missing."""
    skip = {case.trainer: [pytest.mark.skip(reason)] if (reason := missing(case.trainer)) else [] for case in found}
    return [pytest.param(case, id=str(case), marks=skip[case.trainer]) for case in found]


@pytest.mark.parametrize("case", here(cases()))
def test_gradient_and_weights_are_those_of_one_process(case, measured):
    found = result(measured, case)
    assert found["gradient"] <= TOLERANCES[case.dtype]
    assert found["weights"] <= TOLERANCES[case.dtype]


@pytest.mark.parametrize("case", [Case("wrong", 2, 2, "zigzag", 64, "sample_mean", "float64")], ids=str)
def test_the_proof_notices_a_missing_factor(case, measured):
    assert result(measured, case)["gradient"] == pytest.approx(3 / 4)


@pytest.mark.parametrize(
    "case", here([Case(name, 1, cp_size, "zigzag", 64, "prompt_mean", "float64") for name in MEGATRON for cp_size in (1, 2)])
)
def test_megatron_divides_in_place_what_it_is_given(case, measured):
    """So a clone of the returned loss can be logged, and a detached view of it cannot."""
    found = result(measured, case)
    steps, ranks, tokens = found["micro_batches"], case.ranks, found["tokens"]
    assert steps > 2
    factor = {"megatron": steps * ranks, "megatron_legacy": steps * case.dp_size, "megatron_per_token": tokens}[case.trainer]
    assert found["clone"] / factor == pytest.approx(found["loss"], rel=1e-12)
    divided = {"megatron": steps, "megatron_legacy": steps / case.cp_size, "megatron_per_token": 1}[case.trainer]
    assert found["view"] == pytest.approx(found["clone"] / divided, rel=1e-12)


@pytest.mark.parametrize("backend", ["none", "ddp", "fsdp", "hf_trainer_scaled", "hf_trainer_num_items", *MEGATRON])
def test_dividing_the_returned_loss_in_place_changes_nothing_else(backend):
    table = tiny.rollouts()
    (packed,) = rollpack.pack(table, rollpack.plan(table, max_tokens_per_gpu=4096))
    micro_batch = packed.to("cpu")
    reducer = LossReducer(backend=backend)
    x = torch.ones(len(micro_batch.tokens), dtype=torch.float64, requires_grad=True)
    before = [tensor.clone() for tensor in tensors(micro_batch)]

    def loss():
        return reducer.loss_and_count(x, micro_batch)[0] if backend == "megatron_per_token" else reducer(x, micro_batch)

    first = loss()
    kept = {tensor.untyped_storage().data_ptr() for tensor in [x, *tensors(micro_batch), *tensors(reducer)]}
    assert first.untyped_storage().data_ptr() not in kept
    logged, view = first.detach().clone(), first.detach()
    first /= 4
    assert view == first != logged
    first.backward()
    second = loss()
    assert second.item() == logged
    assert second.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
    assert x.grad.sum().item() == pytest.approx(logged.item() / 4)
    assert all(torch.equal(a, b) for a, b in zip(before, tensors(micro_batch), strict=True))


def tensors(thing):
    return [value for value in vars(thing).values() if isinstance(value, torch.Tensor)]


@pytest.mark.parametrize("cut", [(2, 1, "zigzag", 64), (2, 2, "contiguous", 64), (4, 2, "zigzag", 64), (4, 1, "zigzag", 64)])
def test_the_cuts_part_rollouts_and_groups(cut):
    """Otherwise means over a rank or a micro-batch could pass for those over the step."""
    table = tiny.rollouts()
    plan = Cut(*cut).plan(table, loss_aggregation="prompt_mean")
    for column, many in (("rollout_id", 2), ("group_index", 3)):
        ids = table[column].to_pylist()
        places = {}
        for d in range(plan.settings.dp_size):
            for k in range(plan.steps[0].num_micro_batches):
                for row in plan.rows(0, d, k):
                    places.setdefault(ids[row], set()).add((d, k))
        over_ranks = [i for i, at in places.items() if len({d for d, _ in at}) > 1]
        over_micro_batches = [i for i, at in places.items() if len(at) > 1]
        assert len(over_ranks) >= many, column
        assert len(over_micro_batches) >= many, column


def test_a_failing_rank_or_a_missing_library_is_told_and_the_rest_goes_on():
    good, bad = (Case(name, 2, 1, "zigzag", 1024, "token_mean", "float64") for name in ("none", "no such trainer"))
    found = ranks.run([bad, good], limit=120)
    assert "KeyError: 'no such trainer'" in found[bad]["error"]
    assert found[good]["gradient"] <= 1e-12
