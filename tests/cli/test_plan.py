from __future__ import annotations

import inspect
import json

import numpy as np
import pytest

import rollpack
from rollpack.cli._arguments import PLAN_FLAGS

from .conftest import ROWS, write


def test_values_worked_out_by_hand(run, rollouts):
    # Three rollouts, two groups; the samples of rollout 10 stay in one step. 9 + 5 and 4 tokens over two ranks.
    status, out, err = run(
        "plan", rollouts, "--micro-batch-size", 2, "--dp-size", 2, "--loss-aggregation", "prompt_mean", "--json"
    )
    assert (status, err) == (0, "")
    plan = json.loads(out)
    assert plan["num_rows"] == plan["num_samples"] == 4
    (step,) = plan["steps"]
    assert {name: step[name] for name in ("num_rollouts", "num_prompts", "num_tokens", "num_micro_batches")} == {
        "num_rollouts": 3,
        "num_prompts": 2,
        "num_tokens": 6,
        "num_micro_batches": 1,
    }
    assert sorted(step["tokens_per_dp_rank"]) == [9, 9]  # 3 + 6 and 5 + 4
    assert plan["imbalance"] == 1.0
    assert (plan["dropped_rows"], plan["oversize_rows"]) == ([], [])


def test_text(run, rollouts):
    status, out, _ = run("plan", rollouts, "--max-tokens-per-gpu", 6, "--global-batch-size", 2, "--remainder", "keep")
    assert status == 0
    first, *table = out.splitlines()
    assert first == repr(rollpack.plan(rollouts, max_tokens_per_gpu=6, global_batch_size=2, remainder="keep"))
    assert [line.split() for line in table] == [
        ["step", "N", "P", "T", "K", "tokens", "a", "dp", "rank:", "min", "mean", "max"],
        ["0", "2", "-", "6", "3", "14", "14", "14"],
        ["1", "1", "-", "0", "1", "4", "4", "4"],
    ]


def test_many_steps_are_cut_short_for_people_only(run, tmp_path):
    file = write(tmp_path / "a.parquet", [{"tokens": [1, 2], "loss_mask": [1]}] * 50)
    arguments = ("plan", file, "--micro-batch-size", 1, "--global-batch-size", 1)
    assert "... and 30 more steps (--json has all)" in run(*arguments)[1]
    assert len(json.loads(run(*arguments, "--json")[1])["steps"]) == 50


def test_saved_plan(run, file, tmp_path):
    saved = tmp_path / "batch.plan"
    status, out, _ = run("plan", file, "--micro-batch-size", 2, "-o", saved)
    assert status == 0
    assert f"saved as {saved}" in out
    assert rollpack.Plan.load(saved).id == rollpack.plan(file, micro_batch_size=2).id
    found = json.loads(run("plan", file, "--micro-batch-size", 2, "-o", saved, "--json")[1])
    assert (found["output"], found["plan_id"]) == (str(saved), rollpack.Plan.load(saved).id)


def test_every_argument_of_plan_has_a_flag():
    arguments = set(inspect.signature(rollpack.plan).parameters) - {"data_or_summary"}
    assert arguments == {*PLAN_FLAGS, "columns", "rollout_key"}


def test_flags_mean_what_the_arguments_mean(run, file):
    flags = {
        "loss_aggregation": "constant",
        "divisor": 8.0,
        "empty": "skip",
        "max_tokens_per_gpu": 64,
        "dp_size": 2,
        "cp_size": 2,
        "layout": "contiguous",
        "global_batch_size": 1,
        "remainder": "drop",
        "oversize": "alone",
        "micro_batch_multiple": 2,
        "pad_to_multiple_of": 3,
        "pad_micro_batch_to_multiple_of": 5,
        "cost": "attention",
        "sync": "micro_batch",
        "keep_together": "rollout",
    }
    arguments = [text for name, value in flags.items() for text in ("--" + name.replace("_", "-"), value)]
    status, out, _ = run("plan", file, *arguments, "--placeholders", "--rollout-key", "rollout_id", "--json")
    assert status == 0
    plan = rollpack.plan(file, placeholders=True, **flags)
    assert json.loads(out)["plan_id"] == plan.id
    assert json.loads(out)["settings"]["cost"] == list(rollpack.plan(file, placeholders=True, **flags).settings.cost)


def test_cost_in_numbers(run, file):
    found = json.loads(run("plan", file, "--micro-batch-size", 1, "--cost", "5,2", "--json")[1])
    assert found["settings"]["cost"] == [5, 2]


def test_several_files_are_one_input(run, tmp_path, file):
    other = write(tmp_path / "other.jsonl", [{**row, "rollout_id": row["rollout_id"] + 90} for row in ROWS])
    found = json.loads(run("plan", file, other, "--micro-batch-size", 4, "--json")[1])
    assert found["plan_id"] == rollpack.plan([file, other], micro_batch_size=4).id
    assert found["steps"][0]["num_rollouts"] == 6


def test_composite_key(run, tmp_path):
    rows = [{"tokens": [1, 2], "loss_mask": [1], "rollout_id": r, "group_index": g} for g in range(3) for r in range(2)]
    file = write(tmp_path / "a.parquet", rows)
    found = json.loads(run("plan", file, "--micro-batch-size", 1, "--rollout-key", "group_index,rollout_id", "--json")[1])
    assert found["steps"][0]["num_rollouts"] == 6


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ([], "pass exactly one of --max-tokens-per-gpu and --micro-batch-size"),
        (["--max-tokens-per-gpu", "4"], "row 1"),
        (["--micro-batch-size", "x"], "argument --micro-batch-size: 'x' is no integer (see rollpack plan --help)"),
        (["--micro-batch-size", str(2**70)], "does not fit 64 bits"),
        (["--micro-batch-size", "1", "--dp-size", "0"], "--dp-size is 0"),
        (["--micro-batch-size", "1", "--dp-size", "99"], "--dp-size 99"),
        (["--micro-batch-size", "1", "--layout", "spiral"], "--layout is 'spiral'; it has to be zigzag or contiguous"),
        (["--micro-batch-size", "1", "--cost", "x"], "'x' is neither tokens, attention nor LINEAR,QUADRATIC in integers"),
        (["--micro-batch-size", "1", "--cost", "1,2,3"], "LINEAR,QUADRATIC"),
        (["--micro-batch-size", "1", "--columns", "tokens"], "'tokens' is not ROLE=NAME"),
        (["--micro-batch-size", "1", "--columns", "token=x"], "'token=x' is not ROLE=NAME"),
        (["--micro-batch-size", "1", "--columns", "tokens=x"], "column 'x': is missing"),
        (["--micro-batch-size", "1", "--divisor", "2"], "--divisor is 2, and only --loss-aggregation 'constant' takes one"),
        (["--micro-batch-size", "1", "--loss-aggregation", "constant", "--divisor", "nan"], "--divisor is NaN"),
        (["--micro-batch-size", "1", "--frob"], "unrecognized arguments: --frob"),
        (["--micro", "1"], "unrecognized arguments: --micro 1; did you mean --micro-batch-size? (see rollpack plan --help)"),
        (["--micro-batch-size", "1", "-o", "/no/such/folder/plan"], "/no/such/folder/plan is a directory, or lies in none"),
        (["--micro-batch-size", "1", "-o", "/dev/null"], "/dev/null is no regular file; name one to write"),
        (["--micro-batch-size", "1", "-o", "-"], "- is no regular file; name one to write"),
    ],
)
def test_bad_flags(fails, file, flags, says):
    assert says in fails("plan", file, *flags)


def test_an_error_names_the_file_and_its_row(fails, tmp_path, file):
    other = write(tmp_path / "other.parquet", [ROWS[0], {**ROWS[1], "loss_mask": [1, 5, 1]}])
    message = fails("plan", file, other, "--micro-batch-size", 1)
    assert message.startswith(f"{other}, row 1 there: column 'loss_mask', row 5: the value at position 1 is 5")
    message = fails("plan", other, "--micro-batch-size", 1)
    assert message.startswith(f"{other}: column 'loss_mask', row 1: ")


def test_an_error_about_a_column_names_the_file(fails, tmp_path, file):
    other = write(tmp_path / "other.parquet", [{"token": [1, 2], "loss_mask": [1]}])
    message = fails("plan", file, other, "--micro-batch-size", 1)
    assert message.startswith(f"{other}: column 'tokens': is missing; did you mean 'token'?")


def test_a_mask_under_another_spelling_is_not_passed_over(fails, tmp_path):
    # In Parquet only the columns that are read are read: the check has to see the others all the same.
    file = write(tmp_path / "a.parquet", [{"tokens": [1, 2, 3], "response_length": 2, "loss_masks": [1, 0]}])
    assert "there is 'loss_masks'" in fails("plan", file, "--micro-batch-size", 1)


def test_spread_over_ranks(run, tmp_path):
    rng = np.random.default_rng(0)
    file = write(tmp_path / "a.parquet", [{"tokens": [1] * int(n), "loss_mask": [1]} for n in rng.integers(2, 50, 40)])
    found = json.loads(run("plan", file, "--micro-batch-size", 2, "--dp-size", 4, "--json")[1])
    placed = rollpack.plan(file, micro_batch_size=2, dp_size=4).to_arrow()
    by_rank = [
        int(placed.filter(placed["dp_rank"].to_numpy() == rank)["total_length"].to_numpy().sum()) for rank in range(4)
    ]
    assert found["steps"][0]["tokens_per_dp_rank"] == by_rank


def test_the_plan_does_not_take_the_place_of_the_rollouts(fails, file):
    before = file.read_bytes()
    message = fails("plan", file, "--micro-batch-size", 1, "-o", file)
    assert message == f"{file} is one of the files to read; name another to write"
    assert file.read_bytes() == before
