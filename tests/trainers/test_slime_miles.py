"""slime and miles: their reducer with our modes, by their documented call signatures. See megatron_trainers.py."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from megatron_trainers import (
    LOSSES,
    MASKS,
    RESPONSES,
    TOTALS,
    Lists,
    fsdp_loss,
    megatron_loss,
    megatron_per_token_loss,
    sum_of_sample_mean,
)

import rollpack
from rollpack.integrations import miles, slime
from rollpack.testing import check_reducer

BOTH = pytest.mark.parametrize("trainer", [slime, miles], ids=["slime", "miles"])
HERE = (0, 1)  # cp rank and size
PROMPTS = {"prompt_mask_sums": [4, 4, 5, 5], "num_rollouts": 4, "num_prompts": 2}


# --- the reducer ----------------------------------------------------------------------------------------------------


@BOTH
def test_prompt_mean_is_rollouts_over_prompts_times_the_sum_of_prompt_means(trainer):
    reduce = trainer.get_sum_of_sample_mean(TOTALS, RESPONSES, MASKS, loss_aggregation="prompt_mean", share=HERE, **PROMPTS)
    assert reduce(LOSSES).item() == pytest.approx(4 * 4.85, rel=1e-15)  # 4.85 of the README, which the trainer divides by 4


@BOTH
def test_groups_may_be_uneven(trainer):
    """Eleven one-token rollouts in groups of 4, 3 and 4, losses 1, 2 and 6: the step loss is 3."""
    sizes = [4] * 4 + [3] * 3 + [4] * 4
    losses = torch.tensor([1.0] * 4 + [2.0] * 3 + [6.0] * 4)
    reduce = trainer.get_sum_of_sample_mean(
        *([2] * 11, [1] * 11, [torch.ones(1)] * 11),
        loss_aggregation="prompt_mean",
        prompt_mask_sums=torch.tensor(sizes),
        num_rollouts=11,
        num_prompts=3,
        share=HERE,
    )
    assert reduce(losses).item() == pytest.approx(11 * 3.0)


@BOTH
def test_constant_leaves_the_sum_over_the_divisor(trainer):
    reduce = trainer.get_sum_of_sample_mean(TOTALS, RESPONSES, MASKS, loss_aggregation="constant", divisor=10.0, share=HERE)
    assert reduce(LOSSES).item() == pytest.approx(46 / 10)


@BOTH
@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.float32])
@pytest.mark.parametrize(("mode", "others"), [("prompt_mean", PROMPTS), ("constant", {"divisor": 10.0})])
def test_what_is_masked_may_hold_anything(trainer, mode, others, dtype):
    masks = [mask.to(dtype) for mask in MASKS]
    reduce = trainer.get_sum_of_sample_mean(TOTALS, RESPONSES, masks, loss_aggregation=mode, share=HERE, **others)
    poisoned = LOSSES.clone()
    poisoned[7] = torch.nan
    poisoned.requires_grad_()
    loss = reduce(poisoned)
    loss.backward()
    assert loss.item() == reduce(LOSSES).item()
    assert poisoned.grad[7] == 0
    assert poisoned.grad.isfinite().all()


@BOTH
@pytest.mark.parametrize(("mode", "per_token"), [("sample_mean", False), ("token_mean", True)])
def test_own_modes_hand_back_the_trainers_own_reducer(trainer, mode, per_token):
    def own(x):
        return x.sum()

    positional = (None, per_token) if trainer is slime else (per_token,)
    arguments = (TOTALS, RESPONSES, MASKS, *positional)
    assert trainer.get_sum_of_sample_mean(*arguments, loss_aggregation=mode, own=own) is own


def test_without_own_the_function_of_slime_is_called_as_slime_calls_it(monkeypatch):
    """``get_sum_of_sample_mean(total_lengths, response_lengths, loss_masks, denominators, per_token)``, slime 00c2d6d."""
    seen = []
    module = ModuleType("slime.backends.megatron_utils.cp_utils")
    module.get_sum_of_sample_mean = lambda *arguments: seen.append(arguments) or "slime's own"
    monkeypatch.setitem(sys.modules, module.__name__, module)
    denominators = [torch.tensor(s) for s in (1, 3, 2, 3)]
    assert slime.get_sum_of_sample_mean(TOTALS, RESPONSES, MASKS, denominators, False) == "slime's own"
    assert seen == [(TOTALS, RESPONSES, MASKS, denominators, False)]


@pytest.mark.parametrize(
    "name", ["miles.backends.training_utils.data.context_parallel", "miles.backends.training_utils.cp_utils"]
)
def test_without_own_the_function_of_miles_is_called_as_miles_calls_it(monkeypatch, name):
    """The 4th positional argument is per_token, ``denominators`` is a keyword: miles 0b3ae66, and where it was before."""
    seen = []
    module = ModuleType(name)
    module.get_sum_of_sample_mean = lambda *arguments, **others: seen.append((arguments, others)) or "miles' own"
    monkeypatch.setitem(sys.modules, name, module)
    denominators = [torch.tensor(s) for s in (1, 3, 2, 3)]
    arguments = (TOTALS, RESPONSES, MASKS, True, "bshd", [8] * 4)
    made = miles.get_sum_of_sample_mean(*arguments, denominators=denominators, loss_aggregation="token_mean")
    assert made == "miles' own"
    assert seen == [(arguments, {"denominators": denominators})]


def test_the_fourth_argument_of_the_other_trainer_is_refused():
    with pytest.raises(rollpack.PlanError, match="fourth argument is slime's denominators.*integrations.miles"):
        slime.get_sum_of_sample_mean(TOTALS, RESPONSES, MASKS, True)
    with pytest.raises(rollpack.PlanError, match="fourth argument is calculate_per_token_loss.*integrations.slime"):
        miles.get_sum_of_sample_mean(TOTALS, RESPONSES, MASKS, [torch.tensor(1)] * 4)


@BOTH
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"response_lengths": [1, 3, 2]}, "differ in length: total_lengths 4, response_lengths 3, loss_masks 4, prompt"),
        ({"prompt_mask_sums": [4, 4, 5]}, "differ in length: .*prompt_mask_sums 3"),
        ({"response_lengths": [1, 3, 2, 3]}, "sample 3 has a loss mask of 4 and a response_length of 3"),
        ({"prompt_mask_sums": None}, "prompt_mean needs prompt_mask_sums, num_rollouts and num_prompts"),
        ({"num_prompts": None}, "prompt_mean needs prompt_mask_sums, num_rollouts and num_prompts"),
        ({"calculate_per_token_loss": True}, "prompt_mean and calculate_per_token_loss"),
        ({"loss_aggregation": "constant", "divisor": 8.0, "calculate_per_token_loss": True}, "constant and calculate_per"),
        ({"loss_aggregation": "constant"}, "divisor"),
        ({"qkv_format": "bshd"}, "qkv_format is 'bshd' and max_seq_lens None"),
    ],
)
def test_what_does_not_go_together_is_an_error(trainer, change, message):
    arguments = {"total_lengths": TOTALS, "response_lengths": RESPONSES, "loss_masks": MASKS, "share": HERE, **PROMPTS}
    with pytest.raises(ValueError, match=message):
        trainer.get_sum_of_sample_mean(**arguments | {"loss_aggregation": "prompt_mean"} | change)


@BOTH
def test_a_value_for_each_local_token_is_asked_for(trainer):
    reduce = trainer.get_sum_of_sample_mean(TOTALS, RESPONSES, MASKS, loss_aggregation="constant", divisor=1.0, share=HERE)
    with pytest.raises(rollpack.RollpackError, match="9 positions and the weights 10"):
        reduce(LOSSES[:9])


@BOTH
def test_a_soft_mask_scales_as_in_the_trainers_reducer(trainer):
    """Truncated importance sampling may hand over masks that are weights."""
    masks = [torch.tensor([0.5, 0.0, 2.0])]
    reduce = trainer.get_sum_of_sample_mean([4], [3], masks, loss_aggregation="constant", divisor=10.0, share=HERE)
    assert reduce(torch.tensor([4.0, 7.0, 3.0])).item() == pytest.approx((2 + 6) / 10)


@BOTH
@pytest.mark.parametrize(
    ("layout", "owned"),
    [
        # 8 tokens in chunks of 2: rank 0 holds positions 0 1 6 7, rank 1 2 3 4 5; the logit at p is of token p + 1, and the
        # response begins at token 3.
        ((), ([4], [0, 1, 2, 3])),
        # Padded to 12, in chunks of 3: rank 0 holds 0 1 2 9 10 11, rank 1 the rest.
        (("bshd", [12]), ([0], [1, 2, 3, 4])),
        (("bshd", [9]), ([0], [1, 2, 3, 4])),  # padded to 12 too
    ],
)
def test_zigzag_context_parallelism_by_hand(trainer, layout, owned):
    values = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0])
    mask = torch.tensor([1, 0, 1, 1, 1])
    total = 0.0
    for rank, positions in enumerate(owned):
        positional = ((None, False) if trainer is slime else (False,)) + layout
        reduce = trainer.get_sum_of_sample_mean(
            *([8], [5], [mask], *positional), loss_aggregation="constant", divisor=10.0, share=(rank, 2)
        )
        part = reduce(values[positions]).item()
        assert part == pytest.approx((values * mask)[positions].sum().item() / 10)
        total += part
    assert total == pytest.approx(29 / 10)


def test_megatron_is_asked_for_the_cp_rank(monkeypatch):
    core = pytest.importorskip("megatron.core")
    monkeypatch.setattr(core.mpu, "get_context_parallel_rank", lambda: 1)
    monkeypatch.setattr(core.mpu, "get_context_parallel_world_size", lambda: 2)
    reduce = slime.get_sum_of_sample_mean([8], [5], [torch.ones(5)], loss_aggregation="constant", divisor=1.0)
    assert reduce(torch.ones(4)).item() == 4.0


def test_miles_is_asked_for_the_cp_rank(monkeypatch):
    module = ModuleType("miles.backends.training_utils.parallel")
    module.get_parallel_state = lambda: SimpleNamespace(cp=SimpleNamespace(rank=0, size=2))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    reduce = miles.get_sum_of_sample_mean([8], [5], [torch.ones(5)], loss_aggregation="constant", divisor=1.0)
    assert reduce(torch.ones(1)).item() == 1.0


# --- under every cut ------------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize(("mode", "divisor"), [("prompt_mean", None), ("constant", 16.0)])
@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
def test_ours_hold_under_every_cut(trainer, mode, divisor, backend):
    """Around them, what the trainer does. (miles' FSDP has no context parallelism of ours: there cp ranks are dp ranks.)"""

    def loss(x, mb):
        b = Lists.of(x, mb)
        reduced = trainer.get_sum_of_sample_mean(
            *(b.totals, b.responses, b.masks),
            loss_aggregation=mode,
            divisor=divisor,
            prompt_mask_sums=mb.prompt_mask_sums,
            num_rollouts=mb.num_rollouts,
            num_prompts=mb.num_prompts,
            share=b.share,
        )(b.x)
        return around(reduced, mb, backend)

    report = check_reducer(loss, loss_aggregation=mode, divisor=divisor, backend=backend)
    assert report.ok, report


def around(reduced, mb, backend):
    n, d, c = mb.num_rollouts, mb.dp_size, mb.cp_size
    if backend == "fsdp":
        return fsdp_loss(reduced, rollouts=n, dp_size=d * c)
    return megatron_loss(reduced, micro_batches=mb.num_micro_batches, rollouts=n, dp_size=d, cp_size=c)


@pytest.mark.parametrize(
    ("backend", "denominators", "mode", "causes"),
    [
        ("megatron", "rollout_mask_sums", "sample_mean", []),
        ("fsdp", "mask_sums", "sample_mean", ["per-row instead of per-rollout mean"]),  # its batch has no denominators
        ("megatron_per_token", "mask_sums", "token_mean", ["phantom tokens from clamping each row's count to 1"]),
    ],
)
def test_what_the_kit_says_of_the_trainers_own_formula(backend, denominators, mode, causes):
    """As documented in the README. All three multiply masked values by zero."""

    def loss(x, mb):
        b = Lists.of(x, mb)
        per_token = mode == "token_mean"
        of = getattr(mb, denominators)
        reduced = sum_of_sample_mean(b.local_lengths, b.local_masks, of, per_token=per_token)(b.x)
        if per_token:
            masks = [torch.ones(int(s)) for s in mb.mask_sums]  # the whole sample's, on every cp rank
            return megatron_per_token_loss(reduced, masks, cp_size=mb.cp_size)
        return around(reduced, mb, backend)

    report = check_reducer(loss, loss_aggregation=mode, backend=backend)
    assert list(report.causes) == [*causes, "masked positions multiplied by zero instead of selected"]
