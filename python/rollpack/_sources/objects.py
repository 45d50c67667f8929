"""Arrow objects, and what can be turned into one."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import pyarrow as pa

from rollpack._errors import DataError, SchemaError, is_printable
from rollpack._sources.files import of_arrow_file, of_parquet
from rollpack._sources.parts import Batches, Part, sound
from rollpack._sources.remote import is_object_ref
from rollpack._sources.request import ROLES


def _of_table(table: pa.Table | pa.RecordBatch) -> Part:
    """A table, which knows its rows."""
    return Part(
        lambda names, _: sound(table if names is None else table.select(names)),
        lambda: list(table.schema.names),
        lambda: [table.num_rows],
    )


def of_columns(names: Sequence[str], column: Callable[[str], Any], num_rows: int | None = None) -> Part:
    """Columns of Python or numpy values. Those that are not read need not fit into Arrow, nor their names into UTF-8."""
    names = [name for name in names if is_printable(name)]

    def convert(name: str) -> Any:
        values = column(name)
        if not isinstance(values, Iterable):
            raise SchemaError(
                f"column '{name}': is {values!r}, and has to hold a value for each row. Rows go into a list: [row]", name
            )
        if isinstance(values, np.ndarray) and values.ndim > 1:
            values = list(values)
        values = [_array(value) for value in values] if isinstance(values, list) else values
        try:
            return pa.array(values)
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            raise SchemaError(f"column '{name}': its values cannot be made Arrow: {error}", name) from error

    def stream(wanted: list[str] | None, _: object) -> pa.Table:
        chosen = names if wanted is None else wanted
        arrays = {name: convert(name) for name in chosen}
        lengths = {name: len(array) for name, array in arrays.items()}
        if len(set(lengths.values())) > 1:
            raise DataError(f"the columns have different lengths: {lengths}")
        return pa.table(arrays)

    return Part(stream, lambda: list(names), None if num_rows is None else lambda: [num_rows])


def _array(value: Any) -> Any:
    """A tensor, or what else Arrow does not know, as a numpy array."""
    arrow = ("__arrow_c_array__", "__arrow_c_stream__", "__arrow_array__")
    if isinstance(value, np.ndarray) or not hasattr(value, "__array__") or any(hasattr(value, name) for name in arrow):
        return value
    return np.asarray(value)


def of_object(data: Any) -> Part:
    """One object of a library that is known, or that speaks the PyCapsule protocol."""
    library = type(data).__module__.partition(".")[0]
    readers = {"pyarrow": _of_pyarrow, "polars": _of_polars, "datasets": _of_hugging_face}
    part = readers[library](data) if library in readers else None
    if part is not None:
        return part
    if library == "pandas" and hasattr(data, "columns"):
        hidden = [name for name in data.index.names if name in ROLES and name not in data.columns]
        if hidden:
            raise SchemaError(f"column '{hidden[0]}': is the index of this DataFrame; pass frame.reset_index()", hidden[0])
        return of_columns([name for name in data.columns if isinstance(name, str)], data.__getitem__, len(data))
    if hasattr(data, "__arrow_c_stream__"):
        return Part(lambda *_: data)
    if hasattr(data, "__arrow_c_array__"):
        return _of_table(pa.record_batch(data))
    if isinstance(data, Mapping) and data and all(map(_is_data, data.values())):
        raise DataError(
            "this is a dict of data by name, and not of columns: summarize each, rollpack.summarize(data, source=name), "
            "plan rollpack.Summary.concat(...) of them, and pass the dict to pack"
        )
    if isinstance(data, Mapping) and all(isinstance(name, str) for name in data):
        return of_columns(list(data), lambda name: _array(data[name]))
    raise TypeError(
        f"{type(data).__name__} is no data that rollpack reads: pass what speaks the Arrow PyCapsule protocol (a pyarrow "
        "Table or reader, a polars or pandas DataFrame, a DuckDB result), a list of those, a Hugging Face dataset, a list "
        "of dicts or a dict of columns, or the path of Parquet, Arrow IPC or JSON-lines files"
    )


def _is_data(value: Any) -> bool:
    """Whether this is rows of several columns, and no column."""
    if isinstance(value, list):
        return bool(value) and all(map(_is_data, value))
    whole = hasattr(value, "__arrow_c_stream__") and not any(hasattr(value, name) for name in ("type", "dtype"))
    return whole or isinstance(value, str | os.PathLike | Mapping) or hasattr(value, "columns") or is_object_ref(value)


def _of_pyarrow(data: Any) -> Part | None:
    # Importing pyarrow.dataset takes pandas along, and a second; hence names instead of types.
    kinds = {kind.__name__ for kind in type(data).__mro__}
    if kinds & {"Table", "RecordBatch"}:
        return _of_table(data)
    if "RecordBatchReader" in kinds:
        return Part(lambda *_: Batches(data.schema, data))
    if "_RecordBatchFileReader" in kinds:
        return of_arrow_file(lambda _: data, nullcontext)
    if "ParquetFile" in kinds:
        return of_parquet(lambda: nullcontext(data), lambda: data.metadata, nullcontext)
    if "Dataset" in kinds:
        return Part(lambda names, _: _scan(data, names), lambda: list(data.schema.names))
    return Part(lambda *_: Batches(data.projected_schema, data.to_batches())) if "Scanner" in kinds else None


def _of_polars(data: Any) -> Part | None:
    if hasattr(data, "collect"):
        raise TypeError("a polars LazyFrame has no rows yet; pass frame.collect()")
    if not hasattr(data, "columns"):
        return None
    # Only the columns that are read are converted: others may hold what Arrow cannot.
    return Part(lambda names, _: data if names is None else data[names], lambda: list(data.columns), lambda: [len(data)])


def _of_hugging_face(data: Any) -> Part | None:
    if not hasattr(data, "with_format"):
        return None
    if not hasattr(data, "num_rows"):
        raise TypeError("a streaming Hugging Face dataset has no fixed rows; load it without streaming=True")
    if isinstance(data, Mapping):
        raise TypeError(f"this is a dict of datasets; pass one of {list(data)}, such as data['train']")

    def stream(names: list[str] | None, _: object) -> Batches:
        # Formatting applies the indices that select, shuffle and filter leave behind.
        rows = data.with_format("arrow")
        rows = rows if names is None else rows.select_columns(names)
        batches = (batch for table in rows.iter(batch_size=4096) for batch in table.to_batches())
        return Batches(rows[:0].schema, batches)

    return Part(stream, lambda: list(data.column_names), lambda: [data.num_rows])


def _scan(data: Any, names: list[str] | None) -> Batches:
    # By default it reads far ahead, and makes batches of 131,072 rows, which may be gigabytes of tokens.
    options: dict[str, Any] = {"columns": names, "batch_size": 1024, "batch_readahead": 1, "fragment_readahead": 1}
    chosen = getattr(getattr(data, "format", None), "default_fragment_scan_options", None)
    parquet = getattr(sys.modules["pyarrow.dataset"], "ParquetFragmentScanOptions", None)
    if parquet and isinstance(chosen, parquet) and chosen == parquet():
        options["fragment_scan_options"] = parquet(use_buffered_stream=True, buffer_size=1 << 20, pre_buffer=False)
    scanner = data.scanner(**options)
    return Batches(scanner.projected_schema, scanner.to_batches())
