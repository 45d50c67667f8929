from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import rollpack
from rollpack.cli import main
from rollpack.cli._output import Bar

from .processes import COMMAND, LISTENING, environment, rollpack_process, run_process


def test_end_to_end(rollouts, tmp_path):
    inspected = rollpack_process("inspect", rollouts, "--json")
    assert (inspected.returncode, inspected.stderr) == (0, "")
    assert json.loads(inspected.stdout)["rollouts"] == 3
    saved, out = tmp_path / "batch.plan", tmp_path / "packed"
    planned = rollpack_process("plan", rollouts, "--micro-batch-size", 2, "-o", saved, "--json")
    assert (planned.returncode, planned.stderr) == (0, "")
    packed = rollpack_process("pack", rollouts, "--plan", saved, "-o", out)
    assert (packed.returncode, packed.stderr) == (0, "")
    assert sum(len(micro_batch.rows) for micro_batch in rollpack.read_packed(out / "dp0-cp0.arrow")) == 4


def test_bad_input_is_one_line_and_no_traceback(tmp_path):
    ended = rollpack_process("inspect", tmp_path / "no.parquet")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == f"rollpack: error: no file is called {tmp_path / 'no.parquet'}\n"


def test_a_reader_that_has_left_is_no_error(file):
    reading, writing = os.pipe()
    os.close(reading)
    try:
        ended = rollpack_process("inspect", file, stdout=writing, stderr=subprocess.PIPE)
    finally:
        os.close(writing)
    assert (ended.returncode, ended.stderr) == (141, "")


@pytest.fixture(params=["", "1"])
def redirected(request, file):
    """Runs a command as a shell does that redirects: (exit status, stdout, stderr). With and without buffers."""

    def redirected(*arguments, to):
        command = ["bash", "-c", f'exec "$@" {to}', "bash", sys.executable, "-m", "rollpack", *map(str, arguments)]
        ended = run_process(command, env=environment(PYTHONUNBUFFERED=request.param))
        return ended.returncode, ended.stdout, ended.stderr

    return redirected


@pytest.mark.parametrize("arguments", [["inspect", None], ["plan", None, "--micro-batch-size", "1", "--json"], ["--help"]])
def test_output_that_is_lost_is_an_error(redirected, file, arguments):
    arguments = [file if argument is None else argument for argument in arguments]
    status, out, err = redirected(*arguments, to=">&-")
    assert (status, out) == (2, "")
    assert err == (
        "rollpack: error: stdout is closed, and what this command prints would be lost; send it to a file or to /dev/null\n"
    )
    full = "rollpack: error: [Errno 28] No space left on device\n"
    assert redirected(*arguments, to=">/dev/full") == (2, "", full)
    assert redirected(*arguments, to=">&- 2>&-") == (2, "", "")


@pytest.mark.parametrize("to", ["2>&-", "2>/dev/full"])
def test_errors_that_nobody_hears_change_no_status_and_are_no_output(redirected, file, to):
    assert redirected("inspect", "no.parquet", to=to) == (2, "", "")
    assert redirected(to=to) == (2, "", "")
    status, out, _ = redirected("inspect", file, "--json", to=to)
    assert (status, json.loads(out)["rollouts"]) == (0, 3)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_it_imports_ends_it_without_a_word(tmp_path, number):
    (tmp_path / "numpy.py").write_text(f"import os\nos.kill(os.getpid(), {int(number)})\n")
    env = environment(PYTHONPATH=str(tmp_path))
    script = Path(sys.executable).parent / "rollpack"
    for command in (COMMAND, [sys.executable, "-W", "ignore", "-m", "rollpack"], [script]):
        ended = run_process([*LISTENING, *command, "demo"], env=env)
        assert (ended.returncode, ended.stdout, ended.stderr) == (-number, "", "")
    other = run_process([*LISTENING, sys.executable, "-c", "import rollpack"], env=env)
    assert other.returncode == -number
    assert other.stderr.endswith("KeyboardInterrupt\n") == (number == signal.SIGINT)  # as any program of Python's
    ignoring = ["env", "--ignore-signal=INT,TERM", *COMMAND, "--version"]
    ended = run_process(ignoring, env=env)
    assert ended.returncode == 1  # it went on, to find that this is no numpy


def test_a_terminal_without_unicode(tmp_path):
    file = tmp_path / "é.jsonl"
    file.write_text('{"tokens": [1, 2], "loss_mask": [7]}\n')
    ended = rollpack_process("inspect", file, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert (ended.returncode, ended.stderr) == (1, "")
    assert "\\xe9.jsonl" in ended.stdout


def test_help_and_version(run):
    status, out, err = run("--version")
    assert (status, out, err) == (0, f"rollpack {rollpack.__version__}\n", "")
    status, out, _ = run("--help")
    assert status == 0
    assert "examples:" in out


def test_usage_errors_are_one_line(fails):
    commands = "inspect, plan, simulate, pack, verify, report, demo, help"
    assert fails("frob") == f"argument COMMAND: invalid choice: 'frob'; choose from {commands} (see rollpack --help)"
    assert fails("inspct") == "argument COMMAND: invalid choice: 'inspct'; did you mean inspect? (see rollpack --help)"
    assert "did you mean verify?" in fails("help", "verfy")
    assert fails("inspect") == "the following arguments are required: FILE (see rollpack inspect --help)"


@pytest.mark.parametrize("where", ["reading", "printing"])
def test_ctrl_c(run, file, monkeypatch, where):
    if where == "reading":  # inside of a stream that the core reads
        from contextlib import contextmanager

        class Interrupting:
            def refresh(self):
                pass

            def update(self, _):
                raise KeyboardInterrupt

        @contextmanager
        def interrupting(*_):
            yield Bar(Interrupting())

        monkeypatch.setattr("rollpack.cli.inspect.progress", interrupting)
    else:

        def interrupted(_):
            raise KeyboardInterrupt

        monkeypatch.setattr("rollpack.cli.inspect.say", interrupted)
    assert run("inspect", file) == (130, "", "rollpack: interrupted\n")


@pytest.fixture
def watched(monkeypatch):
    """Runs a command with a terminal on stderr, and gives what that shows."""

    def watched(*arguments):
        terminal = io.StringIO()
        terminal.isatty = lambda: True
        monkeypatch.setattr(sys, "stderr", terminal)  # in the test itself: pytest sets its own between setup and test
        assert main([str(argument) for argument in arguments]) == 0
        return terminal.getvalue()

    return watched


def test_progress_where_a_person_watches(watched, file, tmp_path):
    shown = watched("pack", file, "--micro-batch-size", 1, "-o", tmp_path / "out")
    assert "reading" in shown
    assert "packing" in shown


def test_no_progress_without_tqdm(watched, file, monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    assert watched("inspect", file) == ""


def test_no_torch():
    code = "import sys, rollpack.cli; rollpack.cli.main(['--version']); sys.exit('torch' in sys.modules)"
    assert run_process([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("arguments", [("--seed", "-1"), ("--seed", "x"), ("--prompts", "0")])
def test_a_demo_of_nothing_is_one_line(fails, arguments):
    assert "is no integer of at least" in fails("demo", *arguments)
