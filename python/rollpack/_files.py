"""Writing files whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def _beside(path: Path) -> Path:
    """A name for what will become ``path``: in the same folder, so that the last step is one rename."""
    return path.with_name(f".{path.name}.{os.urandom(4).hex()}.tmp")


@contextmanager
def write_whole(path: Path) -> Iterator[Path]:
    """A temporary file, which takes the place of ``path`` when the block ends well and goes when it does not."""
    temporary = _beside(path)
    try:
        yield temporary
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def write_whole_directory(path: Path) -> Iterator[Path]:
    """A temporary directory, which becomes ``path`` when the block ends well and goes when it does not.

    Raises:
        FileExistsError: ``path`` is there already; nothing is overwritten.
        FileNotFoundError: the folder that it is to lie in is not there.
    """
    if path.exists():
        raise FileExistsError(f"{path} is there already; remove it, or choose another place")
    temporary = _beside(path)
    try:
        temporary.mkdir()
        yield temporary
        temporary.rename(path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
