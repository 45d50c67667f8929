"""Rows behind Ray ObjectRefs: of a block that lies on another machine only the wanted rows and columns travel."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rollpack._sources.parts import Batches, Part


def is_object_ref(data: Any) -> bool:
    """Whether this is a ray.ObjectRef; does not import ray."""
    return any((kind.__module__.partition(".")[0], kind.__name__) == ("ray", "ObjectRef") for kind in type(data).__mro__)


def of_object_ref(ref: Any, size: int, rows: npt.NDArray[np.int64] | None) -> Part:
    """Some rows (None: all) of what lies behind ``ref``, a table of ``size`` rows."""
    wanted = np.arange(size) if rows is None else np.unique(rows)
    # Pieces are runs: of rows that are wanted, and of those between them.
    first = np.flatnonzero(np.diff(wanted, prepend=-2) > 1)
    last = np.append(first[1:], len(wanted)) - 1
    runs = list(pairwise(sorted({0, size, *wanted[first].tolist(), *(wanted[last] + 1).tolist()})))

    @cache
    def schema() -> pa.Schema:
        return _fetch(_there(_schema_of, ref))

    def stream(names: list[str] | None, pieces: list[int] | None) -> Batches:
        # Asked for at once and waited for later, so that blocks come at the same time.
        coming = _there(_rows_of, ref, wanted, names)

        def batches() -> Iterator[pa.RecordBatch]:
            table = _fetch(coming).combine_chunks()
            for start, end in runs if pieces is None else (runs[piece] for piece in pieces):
                yield from table.slice(int(np.searchsorted(wanted, start)), end - start).to_batches()

        columns = schema() if names is None else pa.schema([schema().field(name) for name in names])
        return Batches(columns, batches())

    return Part(stream, lambda: list(schema().names), lambda: [end - start for start, end in runs])


def _there(function: Any, *arguments: Any) -> Any:
    import ray

    # Ray runs a task where its arguments lie, and again where its worker died. It asks for no CPU: trainers may have all.
    return ray.remote(num_cpus=0, max_retries=-1)(function).remote(*arguments)


def _fetch(ref: Any) -> Any:
    import ray

    return ray.get(ref)


def _schema_of(block: Any) -> pa.Schema:
    return pa.table(block).schema


def _rows_of(block: Any, rows: npt.NDArray[np.int64], names: list[str] | None) -> pa.Table:
    table = pa.table(block)
    table = table if names is None else table.select(names)
    return table if len(rows) == table.num_rows else table.take(pa.array(rows))
