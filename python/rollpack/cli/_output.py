"""What commands print."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from rollpack._errors import RollpackError


def say(line: str = "") -> None:
    """Print a line on stdout; characters that it cannot show are escaped."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    write(line.encode(encoding, "backslashreplace").decode(encoding) + "\n")


def say_json(document: dict[str, Any]) -> None:
    """Print one JSON document on stdout."""
    write(json.dumps(document, allow_nan=False) + "\n")


def write(text: str) -> None:
    """Write on stdout.

    Raises:
        RollpackError: it was closed before the start.
    """
    if sys.stdout is None:
        raise RollpackError(
            "stdout is closed, and what this command prints would be lost; send it to a file or to /dev/null"
        )
    sys.stdout.write(text)


def tell(line: str) -> None:
    """Print a line on stderr, if somebody hears it."""
    if sys.stderr is not None:  # print would take stdout
        with suppress(OSError):
            print(line, file=sys.stderr)


def settle() -> None:
    """What nobody can take any more goes nowhere: the interpreter's own last flush would end with 120 and a traceback."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of cells as lines with columns aligned: the first to the left, the others to the right."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]


def one_line(error: BaseException) -> str:
    """What an error says, in one line."""
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return " ".join(line.strip() for line in str(error).splitlines() if line.strip()) or type(error).__name__


def bytes_text(size: int) -> str:
    """A size in bytes, as people read it."""
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = min(max(size.bit_length() - 1, 0) // 10, len(units) - 1)
    return f"{size} B" if power == 0 else f"{size / 1024**power:.1f} {units[power]}"


class Bar:
    """Progress that a person watches; call it with by how much it moves."""

    def __init__(self, bar: Any) -> None:
        self._bar = bar

    def __call__(self, moved: int) -> None:
        self._bar.update(moved)

    def expect(self, total: int) -> None:
        """From now on the time that is left can be told."""
        self._bar.total = total
        self._bar.refresh()

    def note(self, text: str) -> None:
        """Say what goes on beside."""
        self._bar.set_postfix_str(text, refresh=False)
        self._bar.update(0)


@contextmanager
def progress(arguments: argparse.Namespace, what: str, unit: str, total: int | None = None) -> Iterator[Bar | None]:
    """A progress bar on stderr while a person watches, whatever stdout is; else None."""
    if arguments.quiet or not _is_terminal(sys.stderr):
        yield None
        return
    try:
        from tqdm import tqdm
    except ImportError:  # the extra `cli`; no bar is no fault
        yield None
        return
    with tqdm(desc=what, unit=unit, total=total, unit_scale=True, leave=False, file=sys.stderr, dynamic_ncols=True) as bar:
        yield Bar(bar)


def good(text: str) -> str:
    """Green on a terminal: all is well."""
    return _coloured(text, "32", sys.stdout)


def bad(text: str, stream: TextIO | None = None) -> str:
    """Red on a terminal: something is not. ``stream``: where it will be printed, stdout if left out."""
    return _coloured(text, "1;31", stream or sys.stdout)


def _coloured(text: str, code: str, stream: TextIO | None) -> str:
    # https://no-color.org and https://force-color.org; the first wins.
    forced = bool(os.environ.get("FORCE_COLOR"))
    wanted = not os.environ.get("NO_COLOR") and (forced or _is_terminal(stream))
    return f"\x1b[{code}m{text}\x1b[0m" if wanted else text


def _is_terminal(stream: TextIO | None) -> bool:
    return stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"
