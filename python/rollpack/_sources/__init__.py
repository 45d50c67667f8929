"""Every way to read data: Arrow objects, what can be turned into one, and files."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rollpack import _core
from rollpack._errors import DataError
from rollpack._sources.files import of_file, paths
from rollpack._sources.objects import of_columns, of_object
from rollpack._sources.parts import Batches, Part, Piece, chained, closed, reading
from rollpack._sources.remote import is_object_ref, of_object_ref
from rollpack._sources.request import ROLES, Request
from rollpack._sources.watch import Watch
from rollpack._text import counted

__all__ = ["ROLES", "Request", "Shards", "Source", "Watch", "no_rows", "of_file", "paths", "reading"]


class Source:
    """Data that can be read as Arrow streams, as often as what is behind it allows."""

    def __init__(self, parts: Sequence[Part]) -> None:
        if not parts:
            raise DataError("the data has no rows: it is an empty list")
        self._parts = parts

    @classmethod
    def of(cls, data: Any) -> Source:
        """A source for whatever the public functions take as ``data``."""
        if isinstance(data, Source):
            return data
        if isinstance(data, np.ndarray) and data.dtype == object and data.ndim == 1:
            data = data.tolist()
        if isinstance(data, list | tuple):
            if data and all(isinstance(part, Mapping) for part in data):
                names = list(dict.fromkeys(name for row in data for name in row))
                return cls([of_columns(names, lambda name: [row.get(name) for row in data], len(data))])
            return cls([part for item in data for part in cls.of(item)._parts])
        if isinstance(data, str | os.PathLike):
            return cls([of_file(path) for path in paths(os.fspath(data))])
        return cls([of_object(data)])

    def watched(self, watch: Watch) -> Source:
        """The same data; ``watch`` notes what is read of it."""
        return Source([watch.part(number, part) for number, part in enumerate(self._parts)])

    def column_names(self) -> list[str]:
        """The names of all columns of the first part; reads no row."""
        names = self._parts[0].names
        return names() if names else []

    def streams(self, request: Request, *, project: bool = True) -> list[Any]:
        """One Arrow stream a part. With ``project``, of the columns that are read only, where a part can choose."""
        return [part.stream(self.projection(part, request) if project else None, None) for part in self._parts]

    def holding(self, rows: npt.NDArray[np.int64] | None) -> set[Piece]:
        """The pieces that hold these rows, None for all. One at least, for the types of its columns.

        From a part on that does not know how many rows it has, nothing is known of where a row lies.
        """
        pieces: list[Piece] = []
        starts: list[int] = []
        start: int | None = 0
        for number, part in enumerate(self._parts):
            lengths = part.lengths() if part.lengths else None
            if lengths is None or start is None:
                start = None
                pieces += [(number, piece) for piece in range(len(lengths or [0]))]
                continue
            pieces += [(number, piece) for piece in range(len(lengths))]
            starts += [start + before for before in accumulate(lengths[:-1], initial=0)] if lengths else []
            start += sum(lengths)
        if rows is None:
            return set(pieces)
        known, unknown = pieces[: len(starts)], pieces[len(starts) :]
        opened = [piece for piece in pieces if not self._parts[piece[0]].closed]
        inside = rows if start is None else rows[rows < start]
        found = np.unique(np.searchsorted(starts, inside, side="right") - 1).tolist() if starts else []
        return {known[piece] for piece in found} | set(unknown) or set(opened[:1])

    def take(self, request: Request, pieces: set[Piece] | None = None) -> _core.Rows:
        """The rows of these pieces (None: all), held, ready for packing. Of the others the number is known."""
        streams: list[Any] = []
        gaps = [0]
        for number, part in enumerate(self._parts):
            lengths = part.lengths() if part.lengths and pieces is not None else [0]
            wanted = [pieces is None or (number, i) in pieces for i in range(len(lengths))]
            names = self.projection(part, request)
            for here, run in groupby(range(len(lengths)), wanted.__getitem__):
                if here:
                    streams.append(part.stream(names, None if all(wanted) else list(run)))
                    gaps.append(0)
                else:
                    gaps[-1] += sum(lengths[i] for i in run)
        with reading(streams):
            return _core.Rows(streams, request, gaps)

    @staticmethod
    def projection(part: Part, request: Request) -> list[str] | None:
        """The columns of a part that are read, None where it cannot tell.

        Raises:
            SchemaError: one is missing.
        """
        if part.names is None:
            return None
        names = part.names()
        # All names are checked first, so that a missing column is told from a misspelt one.
        _core.Rows([no_rows(_plausible(names, request))], request, [0, 0])
        wanted = request.names()
        return [name for name in names if name in wanted]


@dataclass(frozen=True)
class Shards:
    """Data in shards.

    Attributes:
        data: what each is, by name; those that nobody needs may be missing.
        sizes: all names, in the order in which rows count through them, and how many rows each has.
    """

    data: Mapping[Any, Any]
    sizes: Sequence[tuple[Any, int]]

    @classmethod
    def of(cls, data: Any, sizes: Sequence[tuple[Any, int]]) -> Shards | None:
        """Where ``data`` is a mapping from names of ``sizes``.

        Raises:
            DataError: some are names, and others are not; or there is none at all.
        """
        if sizes and isinstance(data, Mapping) and not data:
            raise DataError(f"no shard was passed, and the plan has the sources {_few([name for name, _ in sizes])}")
        if isinstance(data, Shards) or not isinstance(data, Mapping) or {name for name, _ in sizes}.isdisjoint(data):
            return data if isinstance(data, Shards) else None
        unknown = [name for name in data if name not in dict(sizes)]
        if unknown:
            planned = _few([name for name, _ in sizes])
            raise DataError(f"{unknown[0]!r} is none of the sources that were planned: {planned}")
        return cls(data, sizes)

    def opened(self, rows: npt.NDArray[np.int64] | None) -> Source:
        """A source of which the shards that hold none of these rows (None: all) are left closed."""
        starts = np.cumsum([0, *(size for _, size in self.sizes)])
        if rows is not None and len(rows) == 0:  # placeholders only: one row, for the types of columns
            first = next(i for i, (name, _) in enumerate(self.sizes) if name in self.data)
            rows = starts[first : first + 1]
        wanted = np.arange(starts[-1]) if rows is None else np.sort(rows)
        bounds = np.searchsorted(wanted, starts).tolist()
        parts: list[Part] = []
        for (name, size), start, a, b in zip(self.sizes, starts.tolist(), bounds, bounds[1:], strict=False):
            if a == b:
                parts.append(closed(size))
            elif name not in self.data:
                raise DataError(f"source {name!r} holds rows of this rank, and is not among the shards that were passed")
            else:
                parts += self._parts(name, size, wanted[a:b] - start)
        return Source(parts)

    def _parts(self, name: Any, size: int, rows: npt.NDArray[np.int64]) -> Sequence[Part]:
        data = self.data[name]
        if is_object_ref(data):
            return [of_object_ref(data, size, rows)]
        parts = Source.of(data)._parts
        known = [part.lengths() for part in parts if part.lengths]
        if len(known) < len(parts):
            return [Part(lambda names, _: chained(parts, names), None, lambda: [size])]
        if (found := sum(map(sum, known))) != size:
            raise DataError(f"source {name!r} had {counted(size, 'row')} when it was summarized, and now has {found}")
        return parts


def _few(names: Sequence[Any]) -> str:
    shown = ", ".join(repr(name) for name in names[:5])
    return shown if len(names) <= 5 else f"{shown}, ... ({len(names):,} in all)"


def _plausible(names: Sequence[str], request: Request) -> pa.Schema:
    """Columns of these names and of types that suit their roles, for a check of the names alone."""
    lists = {request.columns.get(role, role) for role in ("tokens", "loss_mask")} | {*request.token_columns}
    return pa.schema([(name, pa.list_(pa.int32()) if name in lists else pa.int64()) for name in names])


def no_rows(schema: pa.Schema) -> Batches:
    """A batch without rows, for checks of columns. As a table or a batch pyarrow would hand over none."""
    return Batches(schema, [pa.RecordBatch.from_arrays([pa.nulls(0, field.type) for field in schema], schema=schema)])
