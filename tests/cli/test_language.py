"""Errors name flags, as people type them here, and not the arguments of Python that they stand for."""

from __future__ import annotations

import ast
import re
import shlex
import sys
from pathlib import Path

import pytest

from rollpack.cli import _parsed
from rollpack.cli._arguments import PLAN_FLAGS
from rollpack.cli._language import spoken

from .conftest import ROWS, write
from .processes import rollpack_process, run_process

ROOT = Path(__file__).parents[2]
ONE = ("--micro-batch-size", "1")
STEPS = (*ONE, "--global-batch-size", "2")


def without(*names, **others):
    return [{name: value for name, value in row.items() if name not in names} | others for row in ROWS]


@pytest.mark.parametrize(
    ("rows", "flags", "says"),
    [
        (
            without("tokens", input_ids=[1, 2, 3]),
            ONE,
            "is missing; if it has another name, pass --columns 'tokens=its name'; the columns",
        ),
        (
            without("tokens", token=[1, 2, 3]),
            ONE,
            "did you mean 'token'? If it has another name, pass --columns tokens=token;",
        ),
        (
            without("loss_mask", loss_masks=[1]),
            ONE,
            "pass --columns loss_mask=loss_masks to read that, or --columns loss_mask= to",
        ),
        (without(loss_mask=None), ONE, "every value is null; pass --columns loss_mask= to do without a mask"),
        (
            without(loss_mask=[0, 1, 1]),
            ONE,
            "where response_length is left out: pass --columns response_length=, or cut the mask",
        ),
        (ROWS, (*ONE, "--columns", "tokens="), "column 'tokens': is needed here, and --columns says that it is absent"),
        (ROWS, (*ONE, "--rollout-key", "rollout_id,rollout_id"), "column 'rollout_id': is named twice in --rollout-key"),
        (ROWS, (*ONE, "--loss-aggregation", "constant"), "--loss-aggregation 'constant' needs --divisor, a finite number"),
        (ROWS, (*ONE, "--loss-aggregation", "trl:dr_grpo"), "pass --divisor max_completion_length"),
        (
            ROWS,
            (*ONE, "--loss-aggregation", "openrlhf:seq-mean-token-mean"),
            "do not count: pass --empty skip, or take 'sample_mean'",
        ),
        (ROWS, (*ONE, "--loss-aggregation", "trl:grpo"), "Make each row a rollout, with --columns rollout_id=, or take"),
        (ROWS, (*ONE, "--loss-aggregation", "trl:gspo"), "--loss-aggregation is 'trl:gspo', and trl"),
        (ROWS, (*ONE, "--empty", "no"), "--empty is 'no'; it has to be count or skip"),
        (ROWS, (*ONE, "--remainder", "no"), "--remainder is 'no'; it has to be error, drop or keep"),
        (ROWS, (*ONE, "--oversize", "no"), "--oversize is 'no'; it has to be error or alone"),
        (ROWS, (*ONE, "--sync", "no"), "--sync is 'no'; it has to be step or micro_batch"),
        (ROWS, (*ONE, "--keep-together", "no"), "--keep-together is 'no'; it has to be group, rollout, or be left out"),
        (
            ROWS,
            ("--max-tokens-per-gpu", "4"),
            "(--max-tokens-per-gpu 4 x --cp-size 1). Raise --max-tokens-per-gpu, or pass --oversize alone to",
        ),
        (ROWS, ("--max-tokens-per-gpu", "0"), "--max-tokens-per-gpu is 0; it has to be at least 1"),
        (ROWS, (*ONE, "--pad-to-multiple-of", "0"), "--pad-to-multiple-of is 0; it has to be from 1 to"),
        (
            ROWS,
            STEPS,
            (
                "steps of --global-batch-size 2: 1 left over. Pass --remainder drop or --remainder keep, or "
                "another --global-batch-size"
            ),
        ),
        (
            ROWS,
            (*ONE, "--global-batch-size", "9", "--remainder", "drop"),
            "--remainder drop leaves nothing; lower --global-batch-size or pass --remainder keep",
        ),
        (
            ROWS,
            (*ONE, "--global-batch-size", "1", "--loss-aggregation", "prompt_mean"),
            "Use --prompts-per-step, or a --global-batch-size that falls between groups",
        ),
        (
            ROWS,
            (*ONE, "--dp-size", "9"),
            "Lower --dp-size or --micro-batch-multiple, take larger steps, or pass --placeholders",
        ),
        (
            ROWS,
            (*ONE, "--dp-size", "3", "--keep-together", "group"),
            (
                "for --dp-size 3, and --keep-together group needs at least one on each rank. Lower --dp-size, take "
                "larger steps, pass --placeholders, or leave --keep-together out"
            ),
        ),
        ([], ONE, "the data has no rows"),
    ],
)
def test_what_is_said(fails, tmp_path, rows, flags, says):
    if rows:
        file = write(tmp_path / "a.parquet", rows)
    else:
        file = tmp_path / "a.jsonl"
        file.write_text("\n")
    message = fails("plan", file, *flags)
    assert says in message
    assert "a reader" not in message
    for hint in re.findall(r"--columns (?:'[^']*'|\w+=\w*)", message):  # it can be pasted
        assert _parsed(["plan", str(file), *shlex.split(hint)]).columns


def test_faults_of_inspect(run, tmp_path):
    file = write(tmp_path / "a.parquet", without("loss_mask", loss_masks=[1]))
    for flags in ([], ["--json"]):
        out = run("inspect", file, *flags)[1]
        assert "pass --columns loss_mask=loss_masks to read that, or --columns loss_mask= to do without" in out


def test_flags_of_verify(fails, file):
    for wrong in ("no", "zigzag,no", ""):  # where cp sizes are 1 no cut has a second one
        says = f"argument --layouts: {wrong!r} is no list of zigzag and contiguous (see rollpack verify --help)"
        assert fails("verify", file, "--cp-sizes", "1", "--layouts", wrong) == says
    assert "--empty is 'no'" in fails("verify", file, "--empty", "no")


def test_data_that_changed_since_it_was_planned(run, fails, tmp_path, file):
    saved = tmp_path / "batch.plan"
    run("plan", file, *ONE, "-o", saved)
    fewer = write(tmp_path / "fewer.parquet", ROWS[:2])
    says = "4 rows were planned, and the data now has 2: it is not the data that was planned"
    assert fails("pack", fewer, "--plan", saved, "-o", tmp_path / "out").endswith(says)


def test_warnings_are_one_line_too(file):
    ended = rollpack_process("plan", file, *ONE, "--loss-aggregation", "token_mean_legacy")
    assert ended.returncode == 0
    assert ended.stderr.startswith("rollpack: warning: token_mean_legacy is a mean of micro-batch means: ")
    assert "--dp-size" in ended.stderr
    assert ended.stderr.count("\n") == 1


FLAGS = {name: "--" + name.replace("_", "-") for name in (*PLAN_FLAGS, "columns", "rollout_key")}


@pytest.mark.parametrize(
    "text",
    [
        "column 'dp_size': the columns are 'layout', 'max_tokens_per_gpu'",
        "runs/dp_size/a.parquet: the file is empty",
        "global_batch_size=4/a.parquet: the file is empty",
        "cost of the cost model; the columns of the data",
        "max_tokens_per_gpus and num_rollouts",
        "rollout_key.row is missing from the summary",
        "argument --dp-size: 'x' is no integer",
    ],
)
def test_names_and_paths_are_left_alone(text):
    assert spoken(text, FLAGS) == text


def messages():
    """The texts of the library that name an argument of plan: string literals of the core, the binding and Python."""
    names = "|".join(FLAGS)
    for path in sorted([*ROOT.glob("rust/*/src/**/*.rs"), *ROOT.glob("python/rollpack/**/*.py")]):
        if {"cli", "integrations", "examples", "torch"} & set(path.parts):
            continue
        if path.suffix == ".py":
            nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Raise)]
            constants = [n.value for node in nodes for n in ast.walk(node) if isinstance(n, ast.Constant)]
            texts = [value for value in constants if isinstance(value, str)]
        else:
            code = re.sub(r"^\s*//.*$", "", path.read_text().partition("#[cfg(test)]")[0], flags=re.MULTILINE)
            texts = [
                re.sub(r"\\\n\s*", "", text).replace('\\"', '"').replace("{{", "{").replace("}}", "}")
                for text in re.findall(r'"((?:[^"\\]|\\.)*)"', code, flags=re.DOTALL)
            ]
        yield from (text for text in texts if re.search(rf"\b(?:{names})=", text))


def test_none_is_left_in_the_form_of_python():
    found = list(messages())
    assert len(found) > 15
    for text in found:
        for name in FLAGS:
            assert not re.search(rf"(?<![-\w]){name}=", spoken(text, FLAGS)), text


def test_the_library_speaks_python_still():
    code = "import rollpack, pyarrow as pa; rollpack.plan(pa.table({'token': [[1, 2]]}), max_tokens_per_gpu=8)"
    ended = run_process([sys.executable, "-c", code])
    assert 'pass columns={"tokens": "token"}' in ended.stderr
