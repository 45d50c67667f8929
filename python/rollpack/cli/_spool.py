"""What can be read only once (standard input, named pipes) is kept in a file, as rollouts are read several times."""

from __future__ import annotations

import io
import os
import select
import stat
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path, PosixPath
from typing import IO, Any

from rollpack._errors import DataError
from rollpack._sources import paths
from rollpack.cli._output import bytes_text

STDIN = "<stdin>"
_CHUNK = 1 << 20
#: Seconds after which it is seen whether a signal came.
_PATIENCE = 0.1


class Shown(PosixPath):
    """A path that people know under another name."""

    #: None: its own, as of what is made from it.
    name_shown: str | None = None
    #: Keeps the file open, and so in being.
    file: IO[bytes] | None = None

    @classmethod
    def of(cls, path: str, name: str, file: IO[bytes] | None = None) -> Shown:
        """``path``, shown as ``name``."""
        shown = cls(path)
        shown.name_shown, shown.file = name, file
        return shown

    def __del__(self) -> None:
        if self.file is not None:
            self.file.close()

    def __fspath__(self) -> str:
        return super().__str__()

    def __str__(self) -> str:
        return self.name_shown or super().__str__()


def expand(files: list[Any], note: Callable[[str], object] | None = None) -> list[Path]:
    """The files that FILEs name: globs and directories as in :func:`rollpack.summarize`, ``-`` is standard input.

    What can be read only once is spooled, and takes its place in ``files``: a second call finds it there.

    Args:
        files: FILEs.
        note: is told how far spooling is.
    """
    seen: set[tuple[int, int]] = set()
    for i, file in enumerate(files):
        if isinstance(file, Shown):
            continue
        try:
            status = os.fstat(0) if file == "-" else os.stat(file)
        except OSError as error:
            if file == "-":
                raise DataError(f"{STDIN}: {error.strerror}") from error
            continue  # a glob, or no file: `paths` says so
        name = STDIN if file in {"-", "/dev/stdin"} else file
        if file != "-" and not stat.S_ISFIFO(status.st_mode):
            continue
        if (status.st_dev, status.st_ino) in seen:
            raise DataError(f"{name} is named twice, and can be read only once")
        seen.add((status.st_dev, status.st_ino))
        files[i] = _read_once(0 if file == "-" else file, name, status, note)
    return [path for file in files for path in ([file] if isinstance(file, Shown) else paths(file))]


def _read_once(file: int | str, name: str, status: os.stat_result, note: Callable[[str], object] | None) -> Shown:
    if file == 0 and os.isatty(0):
        raise DataError(f"{name} is a terminal; pipe rollouts in")
    if stat.S_ISREG(status.st_mode) and os.lseek(0, 0, os.SEEK_CUR) == 0:
        return Shown.of("/dev/stdin", name)  # `- < rollouts.parquet`
    with io.BufferedReader(_Patient(file, closefd=file != 0)) as source:
        return _spooled(source, name, note)


class _Patient(io.FileIO):
    """Reads that wait for a short time at once: a signal wakes nobody that comes just before, or to another thread."""

    def readinto(self, buffer: Any) -> int | None:
        while not select.select([self], [], [], _PATIENCE)[0]:
            pass
        return super().readinto(buffer)


def _spooled(source: Any, name: str, note: Callable[[str], object] | None) -> Shown:
    # Where files have no names in /proc, this one keeps its own until it is closed.
    unnamed = sys.platform == "linux"
    kind: Callable[[], Any] = tempfile.TemporaryFile if unnamed else tempfile.NamedTemporaryFile
    folder = tempfile.gettempdir()
    size, start = 0, time.monotonic()
    try:
        with ExitStack() as stack:
            spool = stack.enter_context(kind())
            while chunk := source.read(_CHUNK):
                spool.write(chunk)
                size += len(chunk)
                if note is not None:
                    note(f"{bytes_text(size)} of {name}, {bytes_text(int(size / (time.monotonic() - start + 1e-9)))}/s")
            spool.flush()
            stack.pop_all()
    except OSError as error:
        kept = f"after {bytes_text(size)}, which are kept in {folder} (set TMPDIR to choose another place)"
        raise DataError(f"{name}: {error.strerror} {kept}") from error
    return Shown.of(f"/proc/self/fd/{spool.fileno()}" if unnamed else spool.name, name, spool)
