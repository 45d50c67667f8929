"""``rollpack`` as a process of its own, in a terminal too."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import struct
import subprocess
import sys
import termios

import pytest

COMMAND = [sys.executable, "-m", "rollpack"]
#: Seconds in which each process of these tests has ended, however busy the machine is.
AT_MOST = 300

# What stands before a command instead of a preexec_fn, which runs in a fork of this process: with the threads of Ray or
# gRPC in it, such a fork may wait for ever for a lock that one of these held.
#: What a shell has started in the background ignores Ctrl-C, and so does all that it starts: the tests may be that.
LISTENING = ["env", "--default-signal=INT,TERM,HUP"]
NOHUP = ["env", "--ignore-signal=HUP"]


def limited(file_size):
    """Before a command: it cannot write a file of more bytes."""
    return ["prlimit", f"--fsize={file_size}"]


def environment(**changes):
    """This process's, without what says how to colour and how wide a terminal is."""
    left_out = ("NO_COLOR", "FORCE_COLOR", "COLUMNS")
    kept = {name: value for name, value in os.environ.items() if name not in left_out}
    return {**kept, "TERM": "xterm", "PYTHONFAULTHANDLER": "1", **changes}


def start(*arguments, before=(), **options):
    """Starts rollpack, by a command that stands before it."""
    return popen([*before, *COMMAND, *map(str, arguments)], **options)


def popen(command, **options):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, **{"env": environment(), "text": True, **pipes, **options})


def to_its_end(process, given=None):
    """The process, ended, with all that it said. One that never ends tells where it is."""
    try:
        out, err = process.communicate(given, timeout=AT_MOST)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGABRT)  # faulthandler shows what each thread does
        pytest.fail(f"{process.args} did not end within {AT_MOST} s:\n{process.communicate()[1]}")
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def run_process(command, **options):
    """Runs a command to its end."""
    given = options.pop("input", None)
    return to_its_end(popen(command, **options, **({} if given is None else {"stdin": subprocess.PIPE})), given)


def rollpack_process(*arguments, before=(), **options):
    """Runs rollpack to its end."""
    return run_process([*before, *COMMAND, *map(str, arguments)], **options)


def on_terminal(*arguments, stream, **changes):
    """Runs a command with a terminal of 100 columns for ``stream``: (exit status, what it shows, the other one)."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
    (other,) = {"stdin", "stdout", "stderr"} - {stream, "stdin"} if stream != "stdin" else ("stderr",)
    process = subprocess.Popen(
        [*COMMAND, *map(str, arguments)],
        env=environment(**changes),
        text=True,
        **{stream: theirs, other: subprocess.PIPE},
    )
    os.close(theirs)
    shown = b""
    try:
        while stream != "stdin" and (read := os.read(ours, 1 << 16)):
            shown += read
    except OSError:  # so a terminal ends
        pass
    rest = getattr(to_its_end(process), other)
    os.close(ours)
    return process.returncode, shown.decode(), rest
