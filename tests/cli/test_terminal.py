"""What a person at a terminal sees: colours, progress, help."""

from __future__ import annotations

import json
import re
import shlex

import pytest

from rollpack.cli import _parsed

from .conftest import ROWS, write
from .processes import environment, on_terminal, rollpack_process

COMMANDS = ("inspect", "plan", "pack", "verify", "demo")
GREEN, RED = "\x1b[32mno faults\x1b[0m", "\x1b[1;31m1 fault\x1b[0m"


@pytest.fixture
def bad(tmp_path):
    return write(tmp_path / "bad.parquet", [{**ROWS[0], "loss_mask": [3]}])


def test_colours_on_a_terminal(file, bad):
    assert GREEN in on_terminal("inspect", file, stream="stdout")[1]
    assert RED in on_terminal("inspect", bad, stream="stdout")[1]
    status, shown, _ = on_terminal("inspect", "no.parquet", "--quiet", stream="stderr")
    assert (status, shown) == (2, "\x1b[1;31mrollpack: error:\x1b[0m no file is called no.parquet\r\n")


@pytest.mark.parametrize("changes", [{"NO_COLOR": "1"}, {"TERM": "dumb"}, {"NO_COLOR": "1", "FORCE_COLOR": "1"}])
def test_no_colours_where_they_are_not_wanted(bad, changes):
    assert "\x1b" not in on_terminal("inspect", bad, stream="stdout", **changes)[1]
    assert "\x1b" not in on_terminal("inspect", "no.parquet", stream="stderr", **changes)[1]


@pytest.mark.parametrize(("changes", "coloured"), [({}, False), ({"FORCE_COLOR": "1"}, True), ({"NO_COLOR": ""}, False)])
def test_colours_in_a_pipe(bad, changes, coloured):
    ended = rollpack_process("inspect", bad, env=environment(**changes))
    assert (RED in ended.stdout, "\x1b" in ended.stdout) == (coloured, coloured)
    assert ended.stderr == ""


def test_json_has_no_colours(bad):
    ended = rollpack_process("inspect", bad, "--json", env=environment(FORCE_COLOR="1"))
    assert len(json.loads(ended.stdout)["faults"]) == 1


@pytest.mark.parametrize(("kind", "known"), [("parquet", True), ("arrow", True), ("jsonl", False)])
def test_progress_tells_the_rate_and_where_rows_are_known_the_time_left(tmp_path, kind, known):
    file = write(tmp_path / f"rollouts.{kind}", ROWS)
    status, shown, out = on_terminal("inspect", file, "--json", stream="stderr")
    assert status == 0
    assert json.loads(out)["rows"] == 4
    bars = [bar for bar in shown.split("\r") if bar.startswith("reading:")]
    left = re.compile(r"/4\.00 \[\d\d:\d\d<\S+, +\S*row/s\]")  # of 4 rows, [elapsed<left, rate]
    assert bool(left.search(shown)) == known, bars
    assert bars


@pytest.mark.parametrize(("flags", "changes"), [(["--quiet"], {}), (["-q"], {}), ([], {"TERM": "dumb"})])
def test_no_progress_where_it_is_not_wanted(file, tmp_path, flags, changes):
    pack = ("pack", file, "--micro-batch-size", 1, "-o", tmp_path / "out")
    assert on_terminal(*pack, *flags, stream="stderr", **changes)[:2] == (0, "")


def test_no_progress_of_a_file_that_cannot_be_read(tmp_path, file):
    cut = tmp_path / "cut.parquet"
    cut.write_bytes(file.read_bytes()[:-20])
    status, shown, _ = on_terminal("inspect", file, cut, stream="stderr")
    assert status == 2
    assert f"{cut}: cannot be read as Parquet" in shown


@pytest.mark.parametrize("width", [50, 80, 160])
@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_fits_the_terminal_and_its_examples_are_commands(run, monkeypatch, command, width):
    monkeypatch.setenv("COLUMNS", str(width))
    status, out, err = run(*command.split(), "--help")
    assert (status, err) == (0, "")
    wide = [line for line in out.splitlines() if len(line) > width]
    # A flag and its value are not parted, and no word is.
    assert all(len(re.split(r" (?=-)|(?<!\S) ", line.strip().rstrip(" \\"))) <= 2 for line in wide), wide
    _, _, examples = out.partition("examples:\n")
    commands = re.findall(r"^  (.*)$", examples.replace(" \\\n    ", ""), flags=re.MULTILINE)
    parsed = 0
    for line in commands:
        for part in line.split(" | "):
            words = shlex.split(part)
            if words[0] == "rollpack":
                assert callable(_parsed(words[1:]).run)
                parsed += 1
    assert parsed >= 2


def test_help_of_a_command_and_alone(run):
    assert run("help", "plan") == run("plan", "--help")
    assert run("help") == run("--help")
    status, out, err = run()
    assert (status, out) == (2, "")
    assert err == run("--help")[1]
