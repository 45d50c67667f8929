"""The adapters for verl, TRL, SkyRL and Tinker, and the names of OpenRLHF and AReaL, beside each trainer's own code.

A script for each runs in the trainer's environment, and tells what it saw.
"""

import importlib.util
import json
import re

import pytest
from environments import HERE, PACKAGES, run

HELD = 1e-7


def told(name, *arguments):
    """What a script printed last."""
    return json.loads(run(name, HERE / f"{name}_case.py", *arguments).splitlines()[-1])


def rows_of(told, function):
    rows = [row for row in told["compared"] if row["function"] == function]
    assert rows
    return rows


def test_verl():
    seen = told("verl")
    assert seen["same"] < HELD  # value and gradient of every mode of verl, under every cut, with its counts and without
    assert all(row["off"] < HELD for row in rows_of(seen, "verl agg_loss") + rows_of(seen, "rollpack agg_loss"))
    # Without the counts of the step, only an uncut token mean is one.
    for row in rows_of(seen, "verl agg_loss without counts"):
        assert (row["off"] < HELD) == (row["mode"] == "token-mean" and row["cut"] == "uncut"), row
    assert seen["registered"] < HELD
    assert max(seen["whole_loss"]) < HELD
    for cap, options, ours, theirs in seen["micro_batches"]:
        assert ours <= theirs, (cap, options)
    # The rank that needs most says how many, and what one cannot do both refuse.
    as_many, too_few_rows, over_the_cap = seen["two_ranks"]
    assert as_many == [5, 5]
    assert [told.count("one has 2 rows") for told in too_few_rows] == [1, 1]
    assert [told.count("row 0 has 11 tokens") for told in over_the_cap] == [1, 1]


def test_trl():
    seen = told("trl")
    for row in rows_of(seen, "TRL _compute_loss"):
        depends = row["mode"] == "bnpo" and row["cut"] != "uncut"
        depends |= row["cut"] == "a generation batch of 2 optimizer steps"
        assert (row["off"] > 0.01) == depends, row
        assert row["off"] < HELD or depends, row
    ours, theirs, bound = seen["packing"]
    assert bound <= ours <= theirs


@pytest.mark.parametrize(
    ("processes", "mode", "divisor", "steps_per_generation", "beta"),
    [(1, "constant", "12", 2, 0.0), (2, "prompt_mean", "none", 4, 0.1)],
)
def test_optimizer_steps_of_trl(tmp_path, processes, mode, divisor, steps_per_generation, beta):
    """Two steps of two micro-batches on each process; with 4 slices a generation, both steps are of one generation.

    Where there is one process, it goes on to what is refused.
    """
    launcher = ["-m", "torch.distributed.run", f"--nproc-per-node={processes}"] if processes > 1 else []
    printed = run("trl", *launcher, HERE / "trl_train.py", mode, divisor, steps_per_generation, beta, cwd=tmp_path)
    (line,) = [line for line in printed.splitlines() if line.startswith("RESULTS ")]
    results = json.loads(line.removeprefix("RESULTS "))
    assert len(results) == 2
    for result in results:
        assert result["rows"] == 8 * processes
        assert result["off"] < 1e-5
        assert result["loss"] < 1e-5
    assert ("all refused" in printed) == (processes == 1)


def test_skyrl():
    seen = told("skyrl")
    for row in rows_of(seen, "SkyRL apply_loss_reduction"):
        assert row["off"] < HELD or row["mode"] == "token_mean_legacy"
    assert seen["same"] < HELD
    assert seen["of_rollouts"] < HELD
    assert [name for name, holds in seen["proportional"].items() if not holds] == seen["warned"]


@pytest.mark.parametrize("name", ["tinker", "areal"])
def test_every_mode_holds_under_every_cut(name):
    assert all(row["off"] < HELD for row in told(name)["compared"])


def test_openrlhf():
    seen = told("openrlhf")
    assert all(row["off"] < HELD for row in rows_of(seen, "OpenRLHF aggregate_loss"))
    for row in rows_of(seen, "OpenRLHF aggregate_loss without counts"):
        if row["mode"] == "token-mean":
            assert (row["off"] < HELD) == (row["cut"] == "uncut"), row


@pytest.mark.parametrize("name", ["verl", "trl", "skyrl", "tinker"])
def test_an_adapter_is_imported_without_its_trainer(name):
    assert importlib.util.find_spec(name) is None
    importlib.import_module(f"rollpack.integrations.{name}")


PAGE = (HERE.parents[1] / "python" / "docs" / "trainers.md").read_text()
SNIPPETS = re.findall(r"^```python\n(# (\w+) (\d[\d.]*)\n.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(("text", "name", "version"), SNIPPETS[1:], ids=[name for _, name, _ in SNIPPETS[1:]])
def test_snippets_of_the_page(tmp_path, text, name, version):
    assert f"{name}=={version}" == PACKAGES[name][0]
    (tmp_path / "snippet.py").write_text(text)
    run(name, tmp_path / "snippet.py", cwd=tmp_path)


def test_verl_imports_the_module_of_the_page(tmp_path, monkeypatch):
    """As its workers do, by the flag that the page gives."""
    text, name, _ = SNIPPETS[0]
    assert name == "verl"
    (tmp_path / "my_losses.py").write_text(text)
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "my_losses")
    seen = """
import verl
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
from verl.workers.engine import utils
print("rollpack_vanilla" in POLICY_LOSS_REGISTRY, utils.rearrange_micro_batches.__module__)
"""
    assert run("verl", "-c", seen, cwd=tmp_path).splitlines()[-1] == "True rollpack.integrations.verl"
