from __future__ import annotations

import inspect
import json
import shlex

import pytest

import rollpack
from rollpack.cli._arguments import PLAN_FLAGS
from rollpack.cli.simulate import _FLAGS, _SET, _TRANSFORMER
from rollpack.simulation import simulate

from .conftest import write

#: 6 * (2 * 4 * 8 + 3 * 4 * 4 + 4 * 2) = 720 FLOPs a token, 6 * 4 = 24 a pair: 720 s + 24 s * s for a sample of s tokens.
SIZES = ("--layers", 1, "--hidden", 4, "--heads", 2, "--ffn", 4, "--vocab", 2)
#: A FLOP a second.
MACHINE = ("--device", 1, "--mfu", 1)


@pytest.fixture
def three(tmp_path):
    """8, 5 and 3 tokens: 7296, 4200 and 2376 FLOPs."""
    rows = [{"tokens": [7] * n, "response_length": 1, "group_index": n // 8} for n in (8, 5, 3)]
    return write(tmp_path / "three.parquet", rows)


def test_values_worked_out_by_hand(run, three):
    status, out, err = run("simulate", three, *SIZES, *MACHINE, "--dp-sizes", "1,2", "--budgets", "8,4", "--json")
    assert (status, err) == (0, "")
    found = json.loads(out)
    assert (found["cost"], found["flops_per_second"]) == ({"linear": 720, "quadratic": 24}, 1.0)
    one, two = found["predictions"]
    assert (one["dp_size"], one["seconds"], one["gpu_seconds"]) == (1, 7296 + 4200 + 2376, 7296 + 4200 + 2376)
    assert two == {
        "loss_aggregation": "sample_mean",
        "dp_size": 2,
        "cp_size": 1,
        "max_tokens_per_gpu": 8,
        "gpus": 2,
        "num_steps": 1,
        "num_micro_batches": 1,
        "seconds": 7296.0,
        "step_seconds": 7296.0,
        "gpu_seconds": 2 * 7296.0,
        "idle_mean": (7296 - 6576) / 2,
        "idle_worst": 7296.0 - 6576,
        "fill": 1.0,
        "padding": 0.0,
        "peak_tokens": 8,
        "plan_id": rollpack.plan(three, max_tokens_per_gpu=8, dp_size=2, cost=(720, 24), sync="micro_batch").id,
    }
    assert [(refused["dp_size"], refused["max_tokens_per_gpu"]) for refused in found["refused"]] == [(1, 4), (2, 4)]
    assert found["refused"][0]["reason"].startswith("row 0 has 8 tokens")
    assert "Raise --budgets, or pass --oversize alone" in found["refused"][0]["reason"]
    assert found["best"] == one
    assert found["best_by_gpus"] == {"1": one, "2": two}


def test_text(run, three):
    status, out, _ = run(
        "simulate", three, *SIZES, *MACHINE, "--dp-sizes", "1,2", "--budgets", "4,8", "--modes", "sample_mean,token_mean"
    )
    assert status == 0
    first, header, one, two, refused, best, *shortest, command = out.splitlines()
    assert first == (
        f"{three} under fsdp (ranks wait at each micro-batch): 720 FLOPs a token, 24 a pair of tokens, 1 FLOP/s a GPU, "
        "0 s a micro-batch besides"
    )
    assert header.split("  ")[-1] == "GPU-seconds"
    modes = ["sample_mean,", "token_mean"]
    assert one.split() == [*modes, "1", "1", "8", "1", "2", "1.387e+04", "0.0%", "0.0%", "100.0%", "0.0%", "8", "1.387e+04"]
    assert two.split() == [*modes, "2", "1", "8", "2", "1", "7296", "4.9%", "9.9%", "100.0%", "0.0%", "8", "1.459e+04"]
    assert refused.startswith("cannot be planned: sample_mean, dp 1, cp 1, 4 tokens a GPU (and 3 more): row 0 has 8 tokens")
    assert "(--budgets 4 x --cp-sizes 1). Raise --budgets, or pass --oversize alone to give" in refused
    assert best == "best, by GPU-seconds: sample_mean, dp 1, cp 1, 8 tokens a GPU: 1.387e+04 GPU-seconds, 1.387e+04 s a step"
    assert shortest == [
        "shortest on 1 GPU: sample_mean, dp 1, cp 1, 8 tokens a GPU: 1.387e+04 s a step",
        "shortest on 2 GPUs: sample_mean, dp 2, cp 1, 8 tokens a GPU: 7296 s a step",
    ]
    assert command.startswith(f"rollpack plan {three} --loss-aggregation sample_mean --dp-size 1 ")


def test_the_command_makes_the_best_plan(run, tmp_path):
    rows = [{"ids": [7] * n, "response_length": 1, "uid": n // 3, "group_index": n // 3} for n in range(2, 20)]
    file = write(tmp_path / "a file.parquet", rows)
    found = json.loads(
        run(
            "simulate", file, "--model", "qwen3-8b", "--device", "h100", "--trainer", "ddp",
            "--overhead", 0.1,
            "--dp-sizes", "1,2", "--cp-sizes", "1,2", "--budgets", "24,32", "--modes", "constant,prompt_mean",
            "--divisor", 4,
            "--columns", "tokens=ids,rollout_id=uid", "--prompts-per-step", 3, "--remainder", "keep", "--placeholders",
            "--layout", "contiguous", "--json",
        )[1]
    )  # fmt: skip
    program, *arguments = shlex.split(found["command"])
    assert program == "rollpack"
    assert json.loads(run(*arguments, "--json")[1])["plan_id"] == found["best"]["plan_id"]


def test_every_argument_has_a_flag():
    arguments = set(inspect.signature(simulate).parameters) - {"data_or_summary", "model", "progress", "plan_options"}
    assert arguments == {*_FLAGS, "divisor", "columns", "rollout_key"}
    assert set(_TRANSFORMER) == set(inspect.signature(rollpack.CostModel.of_transformer).parameters)
    assert set(_SET) < set(PLAN_FLAGS)


def test_a_peak_and_a_trainer(run, three):
    fast = json.loads(run("simulate", three, *SIZES, "--device", "4e3", "--mfu", 0.5, "--budgets", 8, "--json")[1])
    assert fast["best"]["seconds"] == pytest.approx((7296 + 4200 + 2376) / 2000)
    assert json.loads(run("simulate", three, *SIZES, *MACHINE, "--budgets", 8, "--trainer", "ddp", "--json")[1])[
        "command"
    ].count("--sync step")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ([], "the following arguments are required: --budgets, --device"),
        (["--budgets", "8"], "the following arguments are required: --device"),
        (
            ["--budgets", "8", "--device", "h100"],
            "pass --model, or the sizes of a model: --layers, --hidden, --heads, --ffn",
        ),
        (["--budgets", "8", "--device", "h100", "--model", "m"], "--model is 'm'; it has to be qwen2.5-7b"),
        (["--budgets", "8", "--device", "h100", "--model", "qwen3-8b", "--ffn", "3"], "leave --ffn out"),
        (["--budgets", "8", "--device", "abacus", "--model", "qwen3-8b"], "'abacus' is neither a100, h100"),
        (["--budgets", "8", "--device", "-1", "--model", "qwen3-8b"], "device is -1.0 FLOP/s; it has to be above 0"),
        (["--budgets", "8", "--device", "h100", "--layers", "x"], "argument --layers: invalid int value: 'x'"),
        (
            ["--budgets", "8", "--device", "h100", *map(str, SIZES), "--heads", "3"],
            "--heads 3 does not divide --hidden 4; pass --head-dim",
        ),
        (["--budgets", "8", "--device", "h100", "--model", "qwen3-8b", "--mfu", "2"], "mfu is 2.0"),
        (["--budgets", "8", "--device", "h100", "--model", "qwen3-8b", "--trainer", "horse"], "trainer is 'horse'"),
        (["--budgets", "8", "--device", "h100", "--model", "qwen3-8b", "--modes", ""], "modes is []"),
        (["--budgets", "0", "--device", "h100", "--model", "qwen3-8b"], "'0' is no list of integers of at least 1"),
        (
            ["--budgets", "8", "--device", "h100", "--model", "m"],
            "llama-3.1-70b, or left out, with the sizes of a model in its place",
        ),
        (["--budgets", "8", "--device", "h100", "--model", "qwen3-8b", "--modes", "foo"], "--modes is 'foo'; it has to be"),
        (
            ["--budgets", "8", "--device", "h100", "--model", "qwen3-8b", "--modes", "sample_mean,foo"],
            "--modes is 'foo'; it has to be",
        ),
        (["--budgets", "8,0", "--device", "h100", "--model", "qwen3-8b"], "'8,0' is no list of integers of at least 1"),
        (
            ["--budgets", "8", "--device", "h100", "--model", "qwen3-8b", "--modes", "constant"],
            "--modes 'constant' needs --divisor",
        ),
        (
            ["--budgets", "4", "--device", "h100", "--model", "qwen3-8b"],
            "(--budgets 4 x --cp-sizes 1). Raise --budgets, or pass --oversize alone to give",
        ),
        (
            ["--budgets", "4", "--device", "h100", "--model", "qwen3-8b"],
            "no setting can be planned; the first of 1, sample_mean, dp 1, cp 1, 4 tokens a GPU: row 0",
        ),
        (
            ["--budgets", "8", "--device", "h100", "--model", "qwen3-8b", "--dp-size", "2"],
            "unrecognized arguments: --dp-size",
        ),
        (["--budgets", "8", "--device", "h100", "--model", "qwen3-8b", "--columns", "tokens=x"], "column 'x': is missing"),
    ],
)
def test_bad_flags(fails, three, flags, says):
    assert says in fails("simulate", three, *flags)


def test_help(run):
    status, out, _ = run("simulate", "--help")
    assert status == 0
    assert "rollpack simulate rollouts.parquet" in out
    assert "(default: fsdp)" in out
