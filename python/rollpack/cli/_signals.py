"""Signals that ask a command to stop end it as an exception does, so that nothing half-written is left."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


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
    before = {number: signal.getsignal(number) or signal.SIG_DFL for number in _SIGNALS}
    taken = [number for number, handler in before.items() if handler is not signal.SIG_IGN]
    for number in taken:
        signal.signal(number, _stop)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, before[number])


def _stop(number: int, _: FrameType | None) -> NoReturn:
    for other in _SIGNALS:  # what is half-written is being removed; a second Ctrl-C would leave it there
        signal.signal(other, signal.SIG_IGN)
    raise Stopped(number)
