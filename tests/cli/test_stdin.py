"""Standard input and named pipes."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys

import polars as pl
import pytest

import rollpack
from rollpack.cli._spool import expand

from .conftest import ROWS, write
from .processes import COMMAND, environment, limited, on_terminal, rollpack_process, run_process

PLAN = ("--micro-batch-size", "2", "--loss-aggregation", "prompt_mean", "--json")


@pytest.fixture
def temporary(tmp_path):
    """Where spooled data is kept; empty again at the end."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    yield folder
    assert list(folder.iterdir()) == []


def plan_id(ended):
    assert (ended.returncode, ended.stderr) == (0, type(ended.stderr)())
    return json.loads(ended.stdout)["plan_id"]


def expected(file):
    return rollpack.plan(file, micro_batch_size=2, loss_aggregation="prompt_mean").id


def test_every_kind_from_a_pipe_and_from_a_file(rollouts, temporary):
    options = {"env": environment(TMPDIR=str(temporary))}
    piped = rollpack_process("plan", "-", *PLAN, input=rollouts.read_bytes(), **{**options, "text": False})
    assert plan_id(piped) == expected(rollouts)
    with rollouts.open("rb") as file:
        assert plan_id(rollpack_process("plan", "-", *PLAN, stdin=file, **options)) == expected(rollouts)


def test_what_polars_writes(file):
    stream = io.BytesIO()
    pl.read_parquet(file).write_ipc_stream(stream)
    assert plan_id(rollpack_process("plan", "-", *PLAN, input=stream.getvalue(), text=False)) == expected(file)


def test_pack_reads_it_twice(file, tmp_path, temporary):
    out = tmp_path / "out"
    options = {"input": file.read_bytes(), "text": False, "env": environment(TMPDIR=str(temporary))}
    ended = rollpack_process("pack", "-", "--micro-batch-size", 4, "-o", out, **options)
    assert (ended.returncode, ended.stderr) == (0, b"")
    (micro_batch,) = rollpack.read_packed(out / "dp0-cp0.arrow")
    assert micro_batch.tokens.tolist() == next(rollpack.pack(file, rollpack.plan(file, micro_batch_size=4))).tokens.tolist()


def test_named_pipes_among_files(file, tmp_path):
    other = write(tmp_path / "other.jsonl", [{**row, "rollout_id": row["rollout_id"] + 90} for row in ROWS])
    script = f"{' '.join(COMMAND)} plan {file} <(cat {other}) /dev/stdin {' '.join(PLAN)}"
    third = write(tmp_path / "third.jsonl", [{**row, "rollout_id": row["rollout_id"] + 500} for row in ROWS])
    ended = run_process(["bash", "-c", script], input=third.read_text())
    assert plan_id(ended) == expected([file, other, third])


def test_the_rest_of_a_file_that_something_read_before(tmp_path):
    file = write(tmp_path / "a.jsonl", ROWS)
    with file.open("rb", buffering=0) as stdin:
        stdin.seek(len(file.read_bytes().split(b"\n")[0]) + 1)
        ended = rollpack_process("inspect", "-", "--json", stdin=stdin)
    assert json.loads(ended.stdout)["files"] == [{"path": "<stdin>", "rows": 3}]


def test_faults_name_it(tmp_path):
    bad = write(tmp_path / "bad.jsonl", [ROWS[0], {**ROWS[1], "loss_mask": [1, 5, 1]}])
    says = (
        "rollpack: error: <stdin>: column 'loss_mask', row 1: the value at position 1 is 5, and a mask holds only 0 and 1\n"
    )
    assert rollpack_process("plan", "-", *PLAN, input=bad.read_text()).stderr == says
    for damaged in (b"PAR1 and no more", b"ARROW1 and no more", b"\xff\xff\xff\xff"):
        ended = rollpack_process("plan", "-", *PLAN, input=damaged, text=False)
        assert ended.returncode == 2
        assert ended.stderr.startswith(b"rollpack: error: <stdin>: "), ended.stderr


@pytest.mark.parametrize(
    ("files", "given", "says"),
    [
        (["-"], "", "<stdin>: the file is empty"),
        (["-"], "hello", "<stdin>: this is no Parquet, Arrow IPC or JSON-lines file"),
        (["-", "-"], "{}", "<stdin> is named twice, and can be read only once"),
        (["-", "/dev/stdin"], "{}", "<stdin> is named twice, and can be read only once"),
    ],
)
def test_what_cannot_be(files, given, says):
    ended = rollpack_process("inspect", *files, input=given)
    assert (ended.returncode, ended.stdout, ended.stderr) == (2, "", f"rollpack: error: {says}\n")


def test_a_named_pipe_named_twice_does_not_hang(fails, tmp_path, file):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = subprocess.Popen(["cp", str(file), str(pipe)])
    try:
        assert fails("inspect", pipe, pipe) == f"{pipe} is named twice, and can be read only once"
    finally:
        writer.kill()
        writer.wait()


def test_a_terminal_is_not_waited_for():
    assert on_terminal("inspect", "-", stream="stdin") == (
        2,
        "",
        "rollpack: error: <stdin> is a terminal; pipe rollouts in\n",
    )


def test_no_stdin_at_all():
    closed = f"{' '.join(COMMAND)} inspect - <&-"
    ended = run_process(["bash", "-c", closed])
    assert (ended.returncode, ended.stderr) == (2, "rollpack: error: <stdin>: Bad file descriptor\n")


def test_a_full_disk_is_one_line(temporary):
    ended = rollpack_process(
        "inspect",
        "-",
        input="x" * (5 << 20),
        env=environment(TMPDIR=str(temporary)),
        before=limited(3 << 20),
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == (
        f"rollpack: error: <stdin>: File too large after 3.0 MiB, which are kept in {temporary} (set TMPDIR to choose "
        "another place)\n"
    )


def test_where_files_have_no_names_in_proc(tmp_path, file, temporary, monkeypatch):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    monkeypatch.setattr(sys, "platform", "darwin")
    writer = subprocess.Popen(["cp", str(file), str(pipe)])
    files = [str(pipe)]
    (spooled,) = expand(files)
    assert writer.wait() == 0
    assert expand(files) == [spooled]
    assert str(spooled) == str(pipe)
    assert len(list(temporary.iterdir())) == 1
    assert os.fspath(spooled) == str(next(temporary.iterdir()))
    with open(spooled, "rb") as content:
        assert content.read() == file.read_bytes()
    files.clear()
    del spooled
