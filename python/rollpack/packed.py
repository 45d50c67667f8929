"""Packed micro-batches in files: one Arrow IPC file a rank, a row a micro-batch, the plan in the metadata."""

from __future__ import annotations

import base64
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rollpack._errors import DataError
from rollpack._files import write_whole_directory
from rollpack._sources.files import mapped, on_disk
from rollpack.packing import MicroBatch, Packer
from rollpack.plans import Plan, as_plan

_METADATA = b"rollpack.packed"
_COLUMNS = ("columns", "sample_columns")
#: What every micro-batch of a file shares, or what is told by the plan in its metadata.
_FROM_PLAN = (
    "num_indices",
    "num_rollouts",
    "num_prompts",
    "num_tokens",
    "loss_aggregation",
    "divisor",
    "num_micro_batches",
    "dp_size",
    "cp_size",
    "layout",
    "plan_id",
    "mode_weights",
)


def write_packed(
    data: Any,
    plan: Plan,
    directory: str | os.PathLike[str],
    *,
    token_columns: Sequence[str] = (),
    sample_columns: Sequence[str] = (),
    progress: Callable[[int], object] | None = None,
) -> list[Path]:
    """Pack all ranks and steps into ``directory``, which appears whole or not at all.

    Until then it is called ``.NAME.xxxxxxxx.tmp`` and lies beside; a process that is killed leaves that there.

    Args:
        data: the rollouts that were planned.
        plan: the plan.
        directory: where ``dp0-cp0.arrow`` and so on go; must not exist.
        token_columns: as for :func:`rollpack.pack`.
        sample_columns: as for :func:`rollpack.pack`.
        progress: called with 1 after each micro-batch.

    Returns:
        The files, by dp rank, then cp rank.

    Raises:
        FileExistsError: ``directory`` is there already.
        RollpackError: as for :func:`rollpack.pack`.
    """
    settings = as_plan(plan).settings
    ranks = [(dp, cp) for dp in range(settings.dp_size) for cp in range(settings.cp_size)]
    names = [f"dp{dp}-cp{cp}.arrow" for dp, cp in ranks]
    metadata = {_METADATA: base64.b64encode(plan.to_bytes())}
    packer = Packer(data, plan.columns, token_columns, sample_columns, sources=plan.sources, rows=plan._rows_of(0))
    with write_whole_directory(Path(directory)) as temporary, ExitStack() as stack:
        writers: list[pa.RecordBatchWriter | None] = [None] * len(ranks)
        # Step by step, so that what a step lies in is read once for all ranks.
        for step in range(len(plan.steps)):
            packer.hold(plan._rows_of(step))
            for rank, (dp_rank, cp_rank) in enumerate(ranks):
                for micro_batch in packer.rank(plan, step, dp_rank, cp_rank):
                    batch = _to_record(micro_batch).replace_schema_metadata(metadata)
                    if (writer := writers[rank]) is None:
                        file = stack.enter_context(on_disk(temporary / names[rank], "wb"))
                        writer = writers[rank] = stack.enter_context(pa.ipc.new_file(file, batch.schema))
                    writer.write_batch(batch)
                    if progress is not None:
                        progress(1)
    return [Path(directory) / name for name in names]


def read_packed(path: str | os.PathLike[str]) -> Iterator[MicroBatch[npt.NDArray[Any]]]:
    """The micro-batches of one file of :func:`write_packed`, in order, as views of the mapped file.

    Raises:
        DataError: the file is not there, is damaged, or holds no packed micro-batches.
    """
    try:
        reader = pa.ipc.open_file(mapped(path))
        described = (reader.schema.metadata or {}).get(_METADATA)
        if described is None:
            raise DataError("rollpack did not write this file")
        plan = Plan.from_bytes(base64.b64decode(described))
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DataError(f"{os.fspath(path)}: these are no packed micro-batches: {error}") from error
    return (_from_record(reader.get_batch(i), plan) for i in range(reader.num_record_batches))


def _to_record(micro_batch: MicroBatch[npt.NDArray[Any]]) -> pa.RecordBatch:
    """One row: arrays as lists, the rest as scalars; carried columns under ``columns.`` and ``sample_columns.``."""
    values: dict[str, Any] = {}
    for field in fields(micro_batch):
        value = getattr(micro_batch, field.name)
        if field.name in _COLUMNS:
            values |= {f"{field.name}.{name}": array for name, array in value.items()}
        elif field.name not in _FROM_PLAN and value is not None:
            values[field.name] = value
    return pa.RecordBatch.from_pydict({name: _one_row(value) for name, value in values.items()})


def _one_row(value: Any) -> pa.Array:
    if not isinstance(value, np.ndarray):
        return pa.array([value])
    # Masks travel as bytes, which can be read back in place; Arrow's own booleans are bits.
    flat = pa.array(value.view(np.uint8) if value.dtype == np.bool_ else value)
    return pa.ListArray.from_arrays(pa.array([0, len(flat)], pa.int32()), flat)


def _from_record(batch: pa.RecordBatch, plan: Plan) -> MicroBatch[npt.NDArray[Any]]:
    values: dict[str, Any] = {"prompt_mask_sums": None, "prompt_indices": None, "columns": {}, "sample_columns": {}}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        value = column.flatten().to_numpy() if pa.types.is_list(column.type) else column[0].as_py()
        kind, _, carried = name.partition(".")
        if kind in _COLUMNS:
            values[kind][carried] = value
        else:
            values[name] = value.view(np.bool_) if name == "loss_mask" else value
    step, settings = plan.steps[values["step"]], plan.settings
    return MicroBatch(
        **values,
        **step._asdict(),
        num_indices=plan._unit_counts,
        loss_aggregation=settings.loss_aggregation,
        divisor=settings.divisor,
        dp_size=settings.dp_size,
        cp_size=settings.cp_size,
        layout=settings.layout,
        plan_id=plan.id,
    )
