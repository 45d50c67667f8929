"""The examples, shortened: a policy learns in every mode, and but for the legacy one no cut changes how."""

import re
import shlex
import subprocess
import sys
from statistics import fmean

import numpy as np
import pyarrow as pa
import pytest
import torch

from rollpack.examples import budgets, grpo
from rollpack.examples._game import BETWEEN, HIGHER, LOWER, VOCABULARY, play

pytest.importorskip("matplotlib")


def always_three(tokens, position_ids, mask):
    """Logits of a policy that guesses 3 whatever it is told."""
    logits = torch.zeros(*tokens.shape, VOCABULARY, dtype=torch.float64)
    logits[..., 3] = 1000.0
    return logits


def test_the_environment_answers_until_the_number_is_found():
    rollouts = play(always_three, np.random.default_rng(0), prompts=50)
    assert np.bincount(rollouts["group_index"]).tolist() == pytest.approx([5.5] * 50, abs=2.5)  # 3 to 8
    seen = set()
    for row in rollouts.to_pylist():
        start, low, high, *response = row["tokens"]
        assert start == BETWEEN
        assert low <= high
        if row["reward"]:
            assert low <= 3 <= high
            expected = [3]
        else:
            assert response[1] == (LOWER if high < 3 else HIGHER if low > 3 else response[1])
            expected = [3, response[1], 3, response[1], 3, response[1], 3]
        assert response == expected
        assert row["loss_mask"] == [1, 0, 1, 0, 1, 0, 1][: len(expected)]
        assert row["old_logprobs"] == [0.0] * len(expected)
        seen.add(tuple(response))
    assert seen == {(3,), (3, HIGHER, 3, HIGHER, 3, HIGHER, 3), (3, LOWER, 3, LOWER, 3, LOWER, 3)}


def test_advantages_are_those_of_the_group():
    rollouts = pa.table(
        {"group_index": [0, 1, 0, 1, 0], "reward": [1.0, 1, 0, 1, 0], "loss_mask": [[1], [1], [1, 0, 1], [1], [1]]}
    )
    # Group 0: mean 1/3, deviation sqrt(2)/3.
    found = grpo.with_advantages(rollouts)["advantages"].to_pylist()
    half = 0.5**0.5
    for one, expected in zip(found, [[2 * half], [0.0], [-half] * 3, [0.0], [-half]], strict=True):
        assert one == pytest.approx(expected, rel=1e-5)


def test_the_reward_rises_in_every_mode(tmp_path, capsys):
    curves = grpo.main(["--seeds", "0", "--steps", "12", "--plot", str(tmp_path / "grpo.png")])
    assert [mode for mode, _ in curves] == list(grpo.MODES)
    for curve in curves.values():
        rewards = [point.reward for point in curve.points]
        assert len(rewards) == 12
        assert fmean(rewards[-4:]) > fmean(rewards[:2]) + 0.07
    assert (tmp_path / "grpo.png").read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out.count("reward 0.") == 4


@pytest.mark.parametrize(("dp_size", "cp_size"), [(2, 1), (1, 2)])
def test_the_curve_is_the_same_over_real_ranks(tmp_path, dp_size, cp_size):
    torchrun = f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node 2"
    sizes = f"--dp-size {dp_size} --cp-size {cp_size}"
    done = subprocess.run(
        shlex.split(f"{torchrun} -m rollpack.examples.grpo {sizes} --modes prompt_mean --seeds 0 --steps 3"),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if "largest differences" in line]
    reward, loss, parameter = map(float, re.findall(r"\d\.\de[+-]\d\d", line))
    assert reward == 0
    assert max(loss, parameter) < 1e-12, line


def test_a_budget_changes_a_run_under_the_legacy_mode_alone(tmp_path, capsys):
    plot = str(tmp_path / "budgets.png")
    curves = budgets.main(["--budgets", "64", "2048", "--steps", "3", "--plot", plot])
    for mode, same in [("token_mean", True), ("token_mean_legacy", False)]:
        small, large = curves[mode].values()
        apart = (small.parameters - large.parameters).abs().max().item()
        assert (apart < 1e-12) is same
        assert same or apart > 1e-4  # the learning rate is 3e-3


def test_ranks_without_torchrun_are_refused(capsys):
    with pytest.raises(SystemExit):
        grpo.main(["--cp-size", "2"])
    assert "start it by torchrun --nproc-per-node 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("main", "arguments"),
    [
        (grpo.main, ["--steps", "0"]),
        (grpo.main, ["--seeds", "-1"]),
        (grpo.main, ["--plot", "there/is/no.png"]),
        (grpo.main, ["--plot", "curve.foo"]),
        (budgets.main, ["--steps", "-1"]),
        (budgets.main, ["--budgets", "48"]),
    ],
)
def test_what_would_fail_after_the_training_is_refused_before(main, arguments, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert "has to" in capsys.readouterr().err
