"""slime and miles: their flags with ours, and the policy loss through their hooks. See megatron_trainers.py."""

import argparse
import sys
from types import ModuleType

import pytest
import torch
from megatron_trainers import LOSSES, MASKS, RESPONSES, TOTALS, policy_loss_function, sum_of_sample_mean

import rollpack
from rollpack.integrations import miles, slime

BOTH = pytest.mark.parametrize("trainer", [slime, miles], ids=["slime", "miles"])


def namespace(trainer, *flags, **others):
    """What the trainer's parse_args(add_custom_arguments=...) gives."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--calculate-per-token-loss", action="store_true")
    parser.add_argument("--loss-type", default="policy_loss")
    parser.add_argument("--custom-loss-function-path", default=None)
    parser.add_argument("--custom-pg-loss-reducer-function-path", default=None)
    assert trainer.add_arguments(parser) is parser
    return argparse.Namespace(**vars(parser.parse_args(flags)) | others)


# --- flags ----------------------------------------------------------------------------------------------------------


@BOTH
def test_the_default_changes_nothing(trainer):
    args = namespace(trainer)
    before = dict(vars(args))
    trainer.validate(args)
    assert vars(args) == before
    assert before["loss_aggregation"] == "sample_mean"


@BOTH
def test_per_token_loss_and_token_mean_are_one(trainer):
    old, new = namespace(trainer, "--calculate-per-token-loss"), namespace(trainer, "--loss-aggregation", "token_mean")
    for args in (old, new, new):
        trainer.validate(args)
        assert (args.loss_aggregation, args.calculate_per_token_loss) == ("token_mean", True)
        assert args.custom_loss_function_path is None


@BOTH
@pytest.mark.parametrize("flags", [["prompt_mean"], ["constant", "--loss-aggregation-divisor", "16384"]])
def test_our_modes_go_through_the_custom_loss(trainer, flags):
    args = namespace(trainer, "--loss-aggregation", *flags)
    for _ in range(2):
        trainer.validate(args)
        assert args.loss_type == "custom_loss"
        assert args.custom_loss_function_path == f"{trainer.__name__}.policy_loss"


@BOTH
@pytest.mark.parametrize("kind", ["policy_loss", "custom_loss"])
def test_where_the_line_is_edited_the_loss_type_stays(trainer, kind):
    flags = ("--loss-aggregation", "prompt_mean", "--loss-type", kind, "--custom-loss-function-path", "mine.loss")
    args = namespace(trainer, *flags)
    trainer.validate(args, custom_loss=False)
    assert (args.loss_type, args.custom_loss_function_path) == (kind, "mine.loss")
    with pytest.raises(rollpack.PlanError, match="is a token_mean"):
        trainer.validate(namespace(trainer, *flags, "--calculate-per-token-loss"), custom_loss=False)


@BOTH
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--loss-aggregation constant", "divisor is None; .*constant needs one"),
        ("--loss-aggregation constant --loss-aggregation-divisor 0", "divisor is 0.0; .*above 0"),
        ("--loss-aggregation constant --loss-aggregation-divisor nan", "divisor is nan; .*finite"),
        ("--loss-aggregation constant --loss-aggregation-divisor inf", "divisor is inf; .*finite"),
        ("--loss-aggregation-divisor 8", "divisor is for --loss-aggregation constant, and this is sample_mean"),
        ("--loss-aggregation prompt_mean --loss-aggregation-divisor 8", "is for --loss-aggregation constant"),
        (
            "--loss-aggregation prompt_mean --calculate-per-token-loss",
            "is a token_mean, and --loss-aggregation is prompt_mean",
        ),
        (
            "--loss-aggregation constant --loss-aggregation-divisor 8 --calculate-per-token-loss",
            "is a token_mean, and --loss-aggregation is constant",
        ),
        ("--loss-aggregation prompt_mean --loss-type sft_loss", "for the policy loss, and --loss-type is sft_loss"),
        (
            "--loss-aggregation prompt_mean --loss-type custom_loss --custom-loss-function-path mine.loss",
            "takes the place of --custom-loss-function-path, which is mine.loss",
        ),
    ],
)
def test_flags_that_contradict_each_other(trainer, flags, message):
    with pytest.raises(rollpack.PlanError, match=message):
        trainer.validate(namespace(trainer, *flags.split()))


@BOTH
def test_steps_hold_whole_groups_under_prompt_mean(trainer):
    flags = ("--loss-aggregation", "prompt_mean")
    trainer.validate(namespace(trainer, *flags, global_batch_size=64, n_samples_per_prompt=16))
    with pytest.raises(rollpack.PlanError, match="--global-batch-size 60 is no multiple of .* 16, .*: use 48"):
        trainer.validate(namespace(trainer, *flags, global_batch_size=60, n_samples_per_prompt=16))
    trainer.validate(namespace(trainer, global_batch_size=60, n_samples_per_prompt=16))  # the default does not mind


def test_miles_fsdp_averages_without_cp():
    flags = ("--loss-aggregation", "prompt_mean")
    miles.validate(namespace(miles, *flags, train_backend="fsdp", context_parallel_size=1))
    miles.validate(namespace(miles, train_backend="fsdp", context_parallel_size=2))
    with pytest.raises(rollpack.PlanError, match="fsdp and --context-parallel-size 2: .*a group without cp"):
        miles.validate(namespace(miles, *flags, train_backend="fsdp", context_parallel_size=2))


@BOTH
def test_help_gives_formula_source_and_scale(trainer, capsys):
    parser = argparse.ArgumentParser()
    trainer.add_arguments(parser).print_help()
    shown = " ".join(capsys.readouterr().out.split())
    for part in ("(1/P) sum_g (sum x / M_g)", "arXiv:2510.13786", "(sum x) / (L N)", "arXiv:2503.20783", "scale", "1 / L"):
        assert part in shown


# --- through the hooks ----------------------------------------------------------------------------------------------


@pytest.fixture
def installed(monkeypatch):
    """The modules that hold the trainers' policy loss, with what megatron_trainers.py has of it."""
    for name in ("slime.backends.megatron_utils.loss", "miles.backends.training_utils.loss.hub.losses"):
        module = ModuleType(name)
        module.policy_loss_function = policy_loss_function
        monkeypatch.setitem(sys.modules, name, module)
    for trainer in (slime, miles):
        monkeypatch.setattr(trainer, "_share", lambda: slime.Share(0, 1))


def micro_batch(**others):
    of_step = {"step_num_rollouts": [4] * 4, "step_num_prompts": [2] * 4, "prompt_mask_sums": [4, 4, 5, 5]}
    return (
        {"total_lengths": TOTALS, "response_lengths": RESPONSES, "loss_masks": MASKS, "max_seq_lens": None}
        | of_step
        | others
    )


def own_reducer(x):
    return sum_of_sample_mean(RESPONSES, MASKS, [1, 3, 2, 3])(x)


@BOTH
@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["prompt_mean"], 4 * 4.85),
        (["constant", "--loss-aggregation-divisor", "10"], 4.6),
    ],
)
def test_the_policy_loss_takes_our_mode_and_metrics_stay_on_the_default(trainer, flags, expected, installed):
    args = namespace(trainer, "--loss-aggregation", *flags)
    trainer.validate(args)
    loss, metrics = trainer.policy_loss(args, micro_batch(), LOSSES, own_reducer)
    assert loss.item() == pytest.approx(expected)
    assert metrics["ppo_kl"].item() == pytest.approx(4 * 5.75)  # sample_mean of the README
    assert args.custom_pg_loss_reducer_function_path is None


@BOTH
def test_rejected_tokens_leave_the_denominators(trainer, installed):
    """Without the loss of 20: groups (4 + 6) / 4 and (10 + 6) / 5, times 4 / 2."""
    args = namespace(trainer, "--loss-aggregation", "prompt_mean")
    trainer.validate(args)
    masks = [*MASKS[:2], torch.tensor([1, 0], dtype=torch.int), MASKS[3]]
    loss, _ = trainer.policy_loss(args, micro_batch(rejected_masks=masks), LOSSES, own_reducer)
    assert loss.item() == pytest.approx((10 / 4 + 16 / 5) * 2)


def halves(_totals, _responses, _masks, _per_token):
    return lambda x: x.sum() / 2


@BOTH
def test_a_custom_reducer_keeps_its_precedence(trainer, installed):
    flags = ("--loss-aggregation", "prompt_mean", "--custom-pg-loss-reducer-function-path", f"{__name__}.halves")
    args = namespace(trainer, *flags)
    with pytest.warns(UserWarning, match="takes precedence: --loss-aggregation prompt_mean has no effect"):
        trainer.validate(args)
    loss, _ = trainer.policy_loss(args, micro_batch(), LOSSES, own_reducer)
    assert loss.item() == pytest.approx(146 / 2)


@BOTH
@pytest.mark.parametrize("key", slime.PROMPT_KEYS)
@pytest.mark.parametrize("absent", [False, True])
def test_missing_denominators_are_an_error_and_no_fallback(trainer, key, absent, installed):
    args = namespace(trainer, "--loss-aggregation", "prompt_mean")
    trainer.validate(args)
    batch = micro_batch(**{key: None})
    if absent:
        del batch[key]
    with pytest.raises(rollpack.DataError, match=f"prompt_mean needs '{key}', and the micro-batch has none: add") as error:
        trainer.policy_loss(args, batch, LOSSES, own_reducer)
    assert error.value.column == key


@BOTH
def test_a_micro_batch_of_two_steps_is_an_error(trainer, installed):
    args = namespace(trainer, "--loss-aggregation", "prompt_mean")
    trainer.validate(args)
    with pytest.raises(rollpack.DataError, match=r"of several steps: \(N, P\) of \[\(4, 2\), \(4, 3\)\]"):
        trainer.policy_loss(args, micro_batch(step_num_prompts=[2, 2, 3, 3]), LOSSES, own_reducer)


@BOTH
def test_the_hook_alone_says_what_it_cannot_do(trainer):
    with pytest.raises(rollpack.PlanError, match="gets neither the batch nor its denominators"):
        trainer.hook(TOTALS, RESPONSES, MASKS, False)


@BOTH
def test_in_a_policy_loss_of_ones_own_the_default_mode_gives_the_same_object(trainer):
    args = namespace(trainer)
    trainer.validate(args)
    assert trainer.pg_loss_reducer(args, micro_batch(), own_reducer) is own_reducer
