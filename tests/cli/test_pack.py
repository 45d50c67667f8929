from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

import rollpack

from .conftest import ROWS, write

DATA = Path(__file__).parents[3] / "shared" / "data"


def assert_same(a, b):
    for field in fields(a):
        x, y = getattr(a, field.name), getattr(b, field.name)
        if isinstance(x, dict):
            assert x.keys() == y.keys()
            for name in x:
                assert x[name].dtype == y[name].dtype
                np.testing.assert_array_equal(x[name], y[name])
        elif isinstance(x, np.ndarray):
            assert x.dtype == y.dtype, field.name
            np.testing.assert_array_equal(x, y, err_msg=field.name)
        else:
            assert x == y, field.name


def assert_holds(directory, data, plan, **columns):
    """The files of a directory hold what pack gives."""
    for dp_rank in range(plan.settings.dp_size):
        for cp_rank in range(plan.settings.cp_size):
            packed = [
                micro_batch
                for step in range(len(plan.steps))
                for micro_batch in rollpack.pack(data, plan, step=step, dp_rank=dp_rank, cp_rank=cp_rank, **columns)
            ]
            read = list(rollpack.read_packed(directory / f"dp{dp_rank}-cp{cp_rank}.arrow"))
            assert len(read) == len(packed)
            for a, b in zip(read, packed, strict=True):
                assert_same(a, b)


def test_values_worked_out_by_hand(run, rollouts, tmp_path):
    out = tmp_path / "packed"
    status, shown, err = run("pack", rollouts, "--micro-batch-size", 4, "-o", out)
    assert (status, err) == (0, "")
    assert [path.name for path in out.iterdir()] == ["dp0-cp0.arrow"]
    assert str(out / "dp0-cp0.arrow") in shown
    (micro_batch,) = rollpack.read_packed(out / "dp0-cp0.arrow")
    trained = {0: 1, 1: 2, 2: 0, 3: 3}
    weights = {0: 1 / 12, 1: 1 / 6, 2: 0.0, 3: 1 / 12}  # N = 3; rollout 10 has 4 trained tokens, 11 has 2
    assert micro_batch.mask_sums.tolist() == [trained[row] for row in micro_batch.rows.tolist()]
    np.testing.assert_allclose(micro_batch.sample_weights, [weights[row] for row in micro_batch.rows.tolist()])
    assert (micro_batch.num_rollouts, micro_batch.num_tokens, len(micro_batch.tokens)) == (3, 6, 18)


def test_what_is_read_back_is_what_pack_gives(run, rollouts, tmp_path):
    out = tmp_path / "packed"
    flags = ["--micro-batch-size", 1, "--dp-size", 2, "--cp-size", 2, "--loss-aggregation", "prompt_mean", "--placeholders"]
    flags += ["--global-batch-size", 2, "--remainder", "keep"]
    status, shown, _ = run(
        "pack", rollouts, *flags, "-o", out, "--token-columns", "loss_mask", "--sample-columns", "reward", "--json"
    )
    assert status == 0
    plan = rollpack.plan(
        rollouts,
        micro_batch_size=1,
        dp_size=2,
        cp_size=2,
        loss_aggregation="prompt_mean",
        placeholders=True,
        global_batch_size=2,
        remainder="keep",
    )
    assert_holds(out, rollouts, plan, token_columns=["loss_mask"], sample_columns=["reward"])
    document = json.loads(shown)
    names = ["dp0-cp0.arrow", "dp0-cp1.arrow", "dp1-cp0.arrow", "dp1-cp1.arrow"]
    assert [Path(file["path"]).name for file in document["files"]] == names
    assert all(file["bytes"] == (out / Path(file["path"]).name).stat().st_size for file in document["files"])
    assert document["plan"]["plan_id"] == plan.id


def test_a_saved_plan(run, fails, file, tmp_path):
    saved, out = tmp_path / "batch.plan", tmp_path / "packed"
    run("plan", file, "--micro-batch-size", 2, "--dp-size", 2, "-o", saved)
    assert "--plan has its own --dp-size" in fails("pack", file, "--plan", saved, "--dp-size", 2, "-o", out)
    assert "--plan has its own --columns" in fails("pack", file, "--plan", saved, "--columns", "loss_mask=", "-o", out)
    assert run("pack", file, "--plan", saved, "-o", out)[0] == 0
    assert_holds(out, file, rollpack.Plan.load(saved))


def test_a_plan_that_is_none(fails, file, tmp_path):
    assert fails("pack", file, "--plan", file, "-o", tmp_path / "out").startswith(f"{file}: this is no plan")
    assert str(tmp_path / "no.plan") in fails("pack", file, "--plan", tmp_path / "no.plan", "-o", tmp_path / "out")


def test_a_plan_of_other_data(run, fails, file, tmp_path):
    saved = tmp_path / "batch.plan"
    run("plan", file, "--micro-batch-size", 2, "-o", saved)
    other = write(tmp_path / "other.parquet", [*ROWS[:3], {**ROWS[3], "loss_mask": [1, 0, 0, 0]}])
    message = fails("pack", other, "--plan", saved, "-o", tmp_path / "out")
    assert message.startswith(f"{other}: ")
    assert "row 3" in message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["batch.plan", "other.parquet", "rollouts.parquet"]


def test_a_bad_token_midway_leaves_nothing_behind(fails, tmp_path):
    rows = [{"tokens": [1, 2, 3], "loss_mask": [1]} for _ in range(50)]
    rows[45] = {"tokens": [1, 2**40, 3], "loss_mask": [1]}
    first = write(tmp_path / "a.parquet", rows[:40])
    second = write(tmp_path / "b.parquet", rows[40:])
    message = fails("pack", first, second, "--micro-batch-size", 1, "-o", tmp_path / "out")
    assert message.startswith(f"{second}, row 5 there: column 'tokens', row 45: ")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.parquet", "b.parquet"]


def test_ctrl_c_midway_leaves_nothing_behind(run, file, tmp_path, monkeypatch):
    from contextlib import contextmanager

    written = []

    @contextmanager
    def interrupting(*_):
        def moved(_):
            written.append(sorted(path.name for path in tmp_path.glob(".out.*/*")))
            if len(written) == 3:
                raise KeyboardInterrupt

        yield moved

    monkeypatch.setattr("rollpack.cli.pack.progress", interrupting)
    status, out, err = run("pack", file, "--micro-batch-size", 1, "--dp-size", 2, "-o", tmp_path / "out")
    assert (status, out, err) == (130, "", "rollpack: interrupted\n")
    assert written[-1] == ["dp0-cp0.arrow", "dp1-cp0.arrow"]  # so there was something to leave behind
    assert [path.name for path in tmp_path.iterdir()] == ["rollouts.parquet"]


@pytest.mark.parametrize("kind", ["directory", "file", "link"])
def test_what_is_there_stays(fails, file, tmp_path, kind):
    out = tmp_path / "out"
    if kind == "directory":
        out.mkdir()
    elif kind == "file":
        out.write_text("mine")
    else:
        out.symlink_to(tmp_path / "nowhere")
    assert "is there already" in fails("pack", file, "--micro-batch-size", 1, "-o", out)
    assert out.read_text() == "mine" if kind == "file" else out.is_symlink() or not list(out.iterdir())


def test_bad_flags(fails, file, tmp_path):
    assert "the following arguments are required: -o/--output" in fails("pack", file, "--micro-batch-size", 1)
    assert "is no directory; make it first" in fails("pack", file, "--micro-batch-size", 1, "-o", tmp_path / "a" / "b")
    carried = ("pack", file, "--micro-batch-size", 1, "-o", tmp_path / "out")
    assert "column 'no': is missing" in fails(*carried, "--sample-columns", "no")
    assert "column 'reward'" in fails(*carried, "--token-columns", "loss_mask,reward")
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(not DATA.exists(), reason="the shared data is not here")
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("name", ["tau_bench_airline", "swe_harnesses"])
def test_shared_data(run, tmp_path, name, layout):
    file, out = DATA / f"{name}.parquet", tmp_path / "out"
    flags = ["--max-tokens-per-gpu", 16_384, "--dp-size", 2, "--cp-size", 2, "--layout", layout]
    assert run("pack", file, *flags, "-o", out, "--sample-columns", "reward")[0] == 0
    plan = rollpack.plan(file, max_tokens_per_gpu=16_384, dp_size=2, cp_size=2, layout=layout)
    assert_holds(out, file, plan, sample_columns=["reward"])
