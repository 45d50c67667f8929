"""What Ctrl-C and others leave behind: nothing, or all."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time

import pytest

import rollpack

from .conftest import write
from .processes import LISTENING, NOHUP, environment, run_process, start, to_its_end

ROWS = [{"tokens": [7] * 400, "loss_mask": [1] * 300} for _ in range(2000)]
PLAN = ["--micro-batch-size", "1", "--dp-size", "4"]


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    return write(tmp_path_factory.mktemp("many") / "many.parquet", ROWS)


def started(command, many, folder, before=LISTENING):
    return start(command, many, *PLAN, "-o", folder / "out", before=before, stdout=subprocess.DEVNULL)


def whole(command, out):
    """Whether what was written is all of it."""
    if command == "plan":
        return rollpack.Plan.load(out).num_rows == len(ROWS)
    held = [sum(1 for _ in rollpack.read_packed(out / f"dp{rank}-cp0.arrow")) for rank in range(4)]
    return held == [len(ROWS) // 4] * 4


def assert_nothing_or_all(command, folder):
    left = list(folder.iterdir())
    assert [path.name for path in left] in ([], ["out"])
    assert all(whole(command, path) for path in left)


@pytest.mark.parametrize("command", ["plan", "pack"])
def test_at_any_moment(command, many, tmp_path):
    start = time.monotonic()
    process = started(command, many, tmp_path)
    assert to_its_end(process).stderr == ""
    assert whole(command, tmp_path / "out")
    took = time.monotonic() - start
    # From before the interpreter is up to after the end.
    moments = random.Random(command)
    for run in range(8):
        folder = tmp_path / f"run{run}"
        folder.mkdir()
        process = started(command, many, folder)
        time.sleep(took * moments.uniform(0.0, 1.1))
        number = (signal.SIGINT, signal.SIGTERM)[run % 2]
        process.send_signal(number)
        told = to_its_end(process).stderr
        # Python itself ends by the signal while it ends, and with 1 or by the signal while it starts.
        starting = process.returncode == 1 and told.endswith("KeyboardInterrupt\n") and "rollpack" not in told
        assert process.returncode in {0, 128 + number, -number} or starting, told
        assert_nothing_or_all(command, folder)


def writing(process, folder):
    """Waits until something half-written is there."""
    while not (begun := list(folder.glob(".out.*.tmp/*"))):
        assert process.poll() is None
        time.sleep(0.001)
    return begun


@pytest.mark.parametrize(
    ("number", "says"),
    [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "terminated"), (signal.SIGHUP, "terminated")],
)
def test_in_the_middle_of_writing(number, says, many, tmp_path):
    process = started("pack", many, tmp_path)
    assert writing(process, tmp_path)
    process.send_signal(number)
    assert to_its_end(process).stderr == f"rollpack: {says}\n"
    assert process.returncode == 128 + number
    assert list(tmp_path.iterdir()) == []


def test_an_impatient_person(many, tmp_path):
    process = started("pack", many, tmp_path)
    assert writing(process, tmp_path)
    while process.poll() is None:
        process.send_signal(signal.SIGINT)
        time.sleep(0.0005)
    to_its_end(process)
    assert list(tmp_path.iterdir()) == []


def test_nohup(many, tmp_path):
    process = started("pack", many, tmp_path, NOHUP)
    assert writing(process, tmp_path)
    process.send_signal(signal.SIGHUP)
    assert to_its_end(process).stderr == ""
    assert process.returncode == 0
    assert whole("pack", tmp_path / "out")


def test_while_it_waits_for_a_pipe(tmp_path):
    reading, writing_end = os.pipe()
    folder = tmp_path / "temporary"
    folder.mkdir()
    options = {"stdin": reading, "env": environment(TMPDIR=str(folder))}
    process = start("inspect", "-", before=LISTENING, **options)
    os.write(writing_end, b" " * (1 << 20))  # more than a pipe holds: it ends when that is read
    process.send_signal(signal.SIGTERM)
    said = to_its_end(process).stderr
    os.close(reading)
    os.close(writing_end)
    assert (process.returncode, said) == (143, "rollpack: terminated\n")
    assert list(folder.iterdir()) == []


#: ``inspect -`` where the signal does not come to the thread that waits for what it reads.
ELSEWHERE = """
import signal, sys, threading, time
from rollpack.cli import main
def elsewhere():
    time.sleep(0.3)
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
threading.Thread(target=elsewhere).start()
sys.exit(main(["inspect", "-"]))
"""


def test_a_signal_that_does_not_wake_who_waits():
    reading, writing_end = os.pipe()
    ended = run_process([*LISTENING, sys.executable, "-c", ELSEWHERE], stdin=reading)
    os.close(reading)
    os.close(writing_end)
    assert (ended.returncode, ended.stderr) == (143, "rollpack: terminated\n")


#: ``inspect`` with some time between its lines.
SLOW = """
import sys, time
from rollpack.cli import inspect, main
say = inspect.say
inspect.say = lambda line: (time.sleep(0.2), say(line))
sys.exit(main(["inspect", sys.argv[1]]))
"""


def test_a_library_that_swallows_it(many, tmp_path):
    """As pyarrow does while it imports pandas: what comes then ends the import alone."""
    (tmp_path / "pandas").mkdir()
    (tmp_path / "pandas" / "__init__.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\n")
    ended = run_process([*LISTENING, sys.executable, "-c", SLOW, str(many)], env=environment(PYTHONPATH=str(tmp_path)))
    assert (ended.returncode, ended.stderr) == (143, "rollpack: terminated\n")


#: ``inspect`` where a library makes another exception of the signal, as pandas does whose import is broken off.
BROKEN = """
import os, signal, sys
from rollpack.cli import inspect, main
def say(line):
    try:
        os.kill(os.getpid(), signal.SIGTERM)
    except BaseException:
        raise AttributeError(line)
inspect.say = say
sys.exit(main(["inspect", sys.argv[1]]))
"""


def test_a_library_that_makes_another_exception_of_it(many):
    ended = run_process([*LISTENING, sys.executable, "-c", BROKEN, str(many)])
    assert (ended.returncode, ended.stderr) == (143, "rollpack: terminated\n")


#: ``inspect``, stopped, where the machine has no time for it until it is asked again and a second person asks too.
LATE = """
import os, signal, sys, time
from rollpack import cli
class Late:
    def __init__(self):
        self.stopping = stopping()
    def __enter__(self):
        self.stopping.__enter__()
    def __exit__(self, *error):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)
        return self.stopping.__exit__(*error)
stopping, cli.stopping = cli.stopping, Late
cli.inspect.say = lambda line: os.kill(os.getpid(), signal.SIGTERM)
sys.exit(cli.main(["inspect", sys.argv[1]]))
"""


def test_once_it_has_said_that_it_was_stopped_it_ends(many):
    ended = run_process([*LISTENING, sys.executable, "-c", LATE, str(many)])
    assert (ended.returncode, ended.stderr) == (143, "rollpack: terminated\n")
