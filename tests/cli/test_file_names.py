"""Files whose names are no UTF-8, as a disk of another locale has them: they are read as any other, and shown escaped."""

from __future__ import annotations

import json
import os

import pytest

import rollpack

from .conftest import ROWS, write
from .processes import rollpack_process

NAME = os.fsdecode(b"bad\xff")
SHOWN = "bad\\udcff"
ONE = ("--micro-batch-size", 1)


@pytest.fixture(params=["parquet", "arrow", "arrows", "jsonl"])
def odd(request, tmp_path):
    """A file of four rows in a directory of such a name, too."""
    folder = tmp_path / NAME
    try:
        folder.mkdir()
    except OSError:
        pytest.skip("this file system holds no such name")
    os.rename(write(tmp_path / f"a.{request.param}", ROWS), folder / f"{NAME}.{request.param}")
    return folder / f"{NAME}.{request.param}"


def test_they_are_read_by_name_by_a_glob_and_in_a_directory(run, odd):
    for named in (odd, odd.parent, odd.parent / "*", odd.parent / f"bad*{odd.suffix}"):
        status, out, err = run("inspect", named, "--json")
        assert (status, err) == (0, "")
        found = json.loads(out)
        # 3 + 5 + 4 + 6 tokens
        assert (found["rows"], found["tokens"], found["files"]) == (4, 18, [{"path": str(odd), "rows": 4}])
        assert rollpack.summarize(named).column("total_length").tolist() == [3, 5, 4, 6]


@pytest.mark.parametrize(
    "command",
    [
        ("inspect",),
        ("plan", *ONE),
        ("simulate", "--device", "h100", "--model", "qwen3-8b", "--budgets", 8),
        ("verify", "--dp-sizes", 1, "--cp-sizes", 1),
    ],
)
def test_every_command_takes_them(run, odd, command):
    status, out, err = run(command[0], odd, *command[1:])
    assert (status, err) == (0, "")
    assert f"{SHOWN}{odd.suffix}" in out or command[0] == "plan"


def test_what_is_written_may_be_called_so_too(run, odd, tmp_path):
    saved, packed, page = (tmp_path / f"{NAME}{what}" for what in (".plan", "-packed", ".html"))
    assert run("plan", odd, *ONE, "-o", saved)[0] == 0
    assert run("pack", odd, "--plan", saved, "-o", packed)[0] == 0
    micro_batches = list(rollpack.read_packed(packed / "dp0-cp0.arrow"))
    assert sorted(len(m.tokens) for m in micro_batches) == [3, 4, 5, 6]
    status, out, err = run("report", odd, *ONE, "-o", page)
    assert (status, err) == (0, "")
    assert f"{SHOWN}.html: " in out
    assert f"{SHOWN}{odd.suffix}" in page.read_text(encoding="utf-8")


def test_errors_show_them_once_and_can_be_written(fails, odd):
    odd.write_bytes(odd.read_bytes()[:-9])
    for command in (("inspect",), ("plan", *ONE), ("verify",)):
        assert fails(command[0], odd, *command[1:]).count(f"{SHOWN}{odd.suffix}") == 1
    with pytest.raises(rollpack.DataError) as error:
        rollpack.summarize(odd)
    assert f"{SHOWN}{odd.suffix}" in str(error.value)
    str(error.value).encode("utf-8")
    missing = odd.parent / "missing"
    assert fails("inspect", missing) == f"no file is called {str(missing).replace(NAME, SHOWN)}"


def test_a_process_ends_with_status_2(odd):
    odd.write_bytes(b"")
    ended = rollpack_process("inspect", odd)
    assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (2, "", 1)
    assert ended.stderr.endswith(f"{SHOWN}{odd.suffix}: the file is empty\n")


@pytest.mark.parametrize("flag", ["--layout", "--loss-aggregation", "--columns", "--rollout-key", "--cost"])
def test_flags_are_text(fails, file, flag):
    value = f"tokens={NAME}" if flag == "--columns" else NAME
    assert f"argument {flag}: {value.replace(NAME, SHOWN)} is no UTF-8" in fails("plan", file, *ONE, flag, value)
