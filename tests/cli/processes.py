"""``rollpack`` as a process of its own, in a terminal too."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios

COMMAND = [sys.executable, "-m", "rollpack"]


def environment(**changes):
    """This process's, without what says how to colour and how wide a terminal is."""
    left_out = ("NO_COLOR", "FORCE_COLOR", "COLUMNS")
    kept = {name: value for name, value in os.environ.items() if name not in left_out}
    return {**kept, "TERM": "xterm", **changes}


def rollpack_process(*arguments, **options):
    """Runs a command to its end."""
    options = {"env": environment(), "text": True, **options}
    return subprocess.run([*COMMAND, *map(str, arguments)], capture_output="stdout" not in options, check=False, **options)


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
    rest = process.communicate()[other == "stderr"]
    os.close(ours)
    return process.returncode, shown.decode(), rest
