"""Every way to read data: Arrow objects, what can be turned into one, and files."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from itertools import accumulate, groupby
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rollpack import _core
from rollpack._errors import DataError
from rollpack._sources.files import of_file, paths
from rollpack._sources.objects import of_columns, of_object
from rollpack._sources.parts import Batches, Part, Piece, reading
from rollpack._sources.request import ROLES, Request
from rollpack._sources.watch import Watch

__all__ = ["ROLES", "Request", "Source", "Watch", "no_rows", "of_file", "paths", "reading"]


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
        return [part.stream(self._projection(part, request) if project else None, None) for part in self._parts]

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
        inside = rows if start is None else rows[rows < start]
        found = np.unique(np.searchsorted(starts, inside, side="right") - 1).tolist() if starts else []
        return {known[piece] for piece in found} | set(unknown) or set(pieces[:1])

    def take(self, request: Request, pieces: set[Piece] | None = None) -> _core.Rows:
        """The rows of these pieces (None: all), held, ready for packing. Of the others the number is known."""
        streams: list[Any] = []
        gaps = [0]
        for number, part in enumerate(self._parts):
            lengths = part.lengths() if part.lengths and pieces is not None else [0]
            wanted = [pieces is None or (number, i) in pieces for i in range(len(lengths))]
            names = self._projection(part, request)
            for here, run in groupby(range(len(lengths)), wanted.__getitem__):
                if here:
                    streams.append(part.stream(names, None if all(wanted) else list(run)))
                    gaps.append(0)
                else:
                    gaps[-1] += sum(lengths[i] for i in run)
        with reading(streams):
            return _core.Rows(streams, request, gaps)

    @staticmethod
    def _projection(part: Part, request: Request) -> list[str] | None:
        if part.names is None:
            return None
        names = part.names()
        # All names are checked first, so that a missing column is told from a misspelt one.
        _core.Rows([no_rows(_plausible(names, request))], request, [0, 0])
        wanted = request.names()
        return [name for name in names if name in wanted]


def _plausible(names: Sequence[str], request: Request) -> pa.Schema:
    """Columns of these names and of types that suit their roles, for a check of the names alone."""
    lists = {request.columns.get(role, role) for role in ("tokens", "loss_mask")} | {*request.token_columns}
    return pa.schema([(name, pa.list_(pa.int32()) if name in lists else pa.int64()) for name in names])


def no_rows(schema: pa.Schema) -> Batches:
    """A batch without rows, for checks of columns. As a table or a batch pyarrow would hand over none."""
    return Batches(schema, [pa.RecordBatch.from_arrays([pa.nulls(0, field.type) for field in schema], schema=schema)])
