"""Writing files whole or not at all."""

from __future__ import annotations

import glob
import hashlib
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from rollpack._errors import DataError


def _beside(path: Path) -> Path:
    """A name for what will become ``path``: in the same folder, so that the last step is one rename."""
    return path.with_name(f".{path.name}.{os.urandom(4).hex()}.tmp")


def unfinished(path: Path) -> list[Path]:
    """What was to become ``path``: of writers that were killed, or that still write."""
    names = glob.glob(f".{glob.escape(path.name)}.{'[0-9a-f]' * 8}.tmp", root_dir=path.parent)
    return [path.parent / name for name in sorted(names)]


def check_place(path: Path) -> None:
    """A file may take the place of another, but not that of a device or a pipe: /dev/null would be one no more.

    Raises:
        FileExistsError: ``path`` is there, and is no regular file.
    """
    if path.exists() and not path.is_file():
        raise FileExistsError(f"{path} is no regular file; name one to write to")


@contextmanager
def write_whole(path: Path) -> Iterator[Path]:
    """A temporary file, which takes the place of ``path`` when the block ends well and goes when it does not.

    Raises:
        FileExistsError: as :func:`check_place`.
    """
    check_place(path)
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


def digest(*parts: bytes | memoryview) -> bytes:
    """A hash of all parts, one after the other: whether bytes are the ones that were written."""
    made = hashlib.blake2b(digest_size=16)
    for part in parts:
        made.update(part)
    return made.digest()


class Saved(ABC):
    """What can be put in a file."""

    @abstractmethod
    def to_bytes(self) -> bytes:
        """All of it."""

    @classmethod
    @abstractmethod
    def from_bytes(cls, data: bytes) -> Self:
        """The inverse of :meth:`to_bytes`.

        Raises:
            DataError: this is nothing of the kind, or it was damaged.
        """

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write one file, whole or not at all."""
        with write_whole(Path(path)) as temporary:
            temporary.write_bytes(self.to_bytes())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read what :meth:`save` wrote.

        Raises:
            DataError: the file is not there, or holds nothing of the kind.
        """
        try:
            return cls.from_bytes(Path(path).read_bytes())
        except (OSError, DataError) as error:
            raise DataError(f"{os.fspath(path)}: {error}") from error
