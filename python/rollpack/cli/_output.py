"""What commands print."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any


def say(line: str = "") -> None:
    """Print a line on stdout; characters that it cannot show are escaped."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    print(line.encode(encoding, "backslashreplace").decode(encoding))


def say_json(document: dict[str, Any]) -> None:
    """Print one JSON document on stdout."""
    print(json.dumps(document, allow_nan=False))


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


@contextmanager
def progress(
    arguments: argparse.Namespace, what: str, unit: str, total: int | None = None
) -> Iterator[Callable[[int], object] | None]:
    """A progress bar on stderr while a person watches: a function that takes by how much it moves, or None."""
    if arguments.json or sys.stderr is None or not sys.stderr.isatty():
        yield None
        return
    try:
        from tqdm import tqdm
    except ImportError:  # the extra `cli`; no bar is no fault
        yield None
        return
    with tqdm(desc=what, unit=unit, total=total, unit_scale=True, leave=False, file=sys.stderr) as bar:
        yield bar.update
