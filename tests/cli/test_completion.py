"""Completion, as a real bash asks for it."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pyarrow as pa
import pytest

import rollpack
from rollpack.cli import _parsed
from rollpack.cli._completion import choices
from rollpack.cli._parser import Parser
from rollpack.names import MODES, OURS

from .processes import environment, run_process

BIN = Path(sys.executable).parent
#: What a shell does on TAB at the end of $LINE_SO_FAR, after what the help says to put into ~/.bashrc.
SCRIPT = """
eval "$(register-python-argcomplete rollpack)"
COMP_LINE=$LINE_SO_FAR COMP_POINT=${#LINE_SO_FAR} COMP_TYPE=9
_python_argcomplete rollpack
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture
def completed(tmp_path):
    (tmp_path / "rollouts.parquet").touch()

    def completed(line, **changes):
        env = environment(PATH=f"{BIN}{os.pathsep}{os.environ['PATH']}", LINE_SO_FAR=f"rollpack {line}", **changes)
        ended = run_process(["bash", "-c", SCRIPT], cwd=tmp_path, env=env)
        assert (ended.returncode, ended.stderr) == (0, "")
        return [word.strip() for word in ended.stdout.split("\n") if word.strip()]

    return completed


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", ["inspect", "plan", "simulate", "pack", "verify", "report", "demo", "help"]),
        ("p", ["plan", "pack"]),
        ("help ver", ["verify"]),
        ("plan --max", ["--max-tokens-per-gpu"]),
        ("plan --micro", ["--micro-batch-size", "--micro-batch-multiple"]),
        ("plan rollouts.parquet --layout ", ["zigzag", "contiguous"]),
        ("pack --remainder d", ["drop"]),
        ("plan --cost ", ["tokens", "attention"]),
        ("plan --loss-aggregation ", [*OURS, *(name for name, mode in MODES.items() if mode.mode is not None)]),
        ("plan --loss-aggregation pro", ["prompt_mean"]),
        ("plan --columns to", ["tokens="]),
        ("plan --dp-size ", []),
        ("inspect ", ["rollouts.parquet"]),
        ("inspect rollouts.parquet --ju", []),
        ("verify --empty s", ["skip"]),
        ("verify --layouts ", ["zigzag", "contiguous"]),
        ("verify --layouts zigzag,c", ["zigzag,contiguous"]),
        ("demo --layouts z", ["zigzag"]),
        ("verify --dp-sizes 1,", []),
        ("simulate --device ", ["a100", "h100", "h200", "b200"]),
        ("simulate --model qwen3", ["qwen3-8b", "qwen3-32b"]),
        ("simulate --modes sample_mean,co", ["sample_mean,constant"]),
        ("simulate --trainer ", ["fsdp", "ddp", "pipeline"]),
        # To bash a word begins after =.
        ("plan --columns tokens=ids,response", ["ids,response_length="]),
    ],
)
def test_what_bash_offers(completed, line, words):
    assert sorted(completed(line)) == sorted(words)


def test_without_argcomplete_nothing_breaks(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "argcomplete", None)
    monkeypatch.setenv("_ARGCOMPLETE", "1")
    assert run("--version") == (0, f"rollpack {rollpack.__version__}\n", "")


def test_the_marker_is_where_argcomplete_looks():
    """For those who have argcomplete switched on for all commands."""
    check = [sys.executable, "-W", "ignore", "-m", "argcomplete._check_console_script", str(BIN / "rollpack")]
    ended = run_process(check)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_the_words_offered_are_those_that_plan_takes(monkeypatch):
    parsers = []
    monkeypatch.setattr("rollpack.cli.complete", lambda _, commands: parsers.extend(commands))
    monkeypatch.setenv("_ARGCOMPLETE", "1")
    with pytest.raises(SystemExit):
        _parsed(["--version"])
    (plan,) = (parser for parser in parsers if parser.prog == "rollpack plan")
    assert isinstance(plan, Parser)
    offered = {action.dest: choices(action) for action in plan._actions if action.option_strings}
    data = pa.table({"tokens": [[1, 2]], "response_length": [1]})
    told = 0
    for name, words in offered.items():
        if not words or name in {"loss_aggregation", "columns"}:
            continue
        with pytest.raises(rollpack.PlanError) as refused:
            rollpack.plan(data, **{"micro_batch_size": 1, name: "?"})
        (listed,) = re.findall(r"it has to be (.*)", str(refused.value))
        taken = set(re.split(r", | or ", listed)) - {"None", "a CostModel"}
        assert set(words) == taken
        told += 1
    assert told == 7
