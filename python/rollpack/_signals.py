"""Signals that ask a command to stop end it as an exception does, so that nothing half-written is left."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
#: Seconds until it is asked again. Some swallow an exception that they do not know, as pyarrow does where it imports pandas.
_AGAIN = 0.02


#: The signals that asked for it. A library may make another exception of it, as pandas does in the middle of its import.
asked: list[int] = []


class Stopped(KeyboardInterrupt):
    """A signal asked the process to stop."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


@contextmanager
def stopping() -> Iterator[None]:
    """Raises :class:`Stopped` in this block when a signal comes. One that the caller ignores (nohup) stays ignored."""
    if threading.current_thread() is not threading.main_thread():  # only there can signals be had
        yield
        return
    asked.clear()
    before = {number: signal.getsignal(number) or signal.SIG_DFL for number in (*_SIGNALS, signal.SIGALRM)}
    for number in _SIGNALS:
        if before[number] is not signal.SIG_IGN:
            signal.signal(number, _stop)
    try:
        yield
    finally:
        heed_no_more()
        for number, handler in before.items():
            signal.signal(number, handler)


def heed_no_more() -> None:
    """The command is ending: what asks it to, for the first time or again, changes nothing any more."""
    if signal.getsignal(signal.SIGALRM) is _ask_again:
        signal.setitimer(signal.ITIMER_REAL, 0)
    for number in (*_SIGNALS, signal.SIGALRM):
        if signal.getsignal(number) in (_stop, _ask_again):
            signal.signal(number, signal.SIG_IGN)


def _stop(number: int, _: FrameType | None) -> None:
    asked.append(number)
    error = sys.exc_info()[1]
    while error is not None:
        if isinstance(error, Stopped):  # what is half-written is being removed; a second Ctrl-C would leave it there
            return
        error = error.__context__
    signal.signal(signal.SIGALRM, _ask_again)
    signal.setitimer(signal.ITIMER_REAL, _AGAIN, _AGAIN)
    raise Stopped(number)


def _ask_again(*_: object) -> None:
    _stop(asked[-1], None)


def _is_command() -> bool:
    """Whether this process is ``rollpack`` or ``python -m rollpack``, and no other program that imports rollpack."""
    program = os.path.basename((getattr(sys, "argv", None) or [""])[0])
    return os.path.splitext(program)[0] == "rollpack" or (program == "-m" and "rollpack" in sys.orig_argv)


# Importing takes so long that people press Ctrl-C meanwhile. Until :func:`stopping` begins nothing is half-written, and it
# ends the command at once, without a traceback of imports.
if _is_command() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
