"""A plan: which samples make up a step, a micro-batch and a rank's work, and what each sample weighs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, Self, get_type_hints

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rollpack._arguments import flag, integer, number, word
from rollpack._arrow import int64_array
from rollpack._errors import DataError, PlanError
from rollpack._files import Saved, digest
from rollpack._text import counted
from rollpack.cost import cost_model
from rollpack.summary import SourceName

if TYPE_CHECKING:
    from rollpack.schedule import Schedule

_METADATA, _INTACT, _ID = b"rollpack.plan", b"rollpack.plan_intact", b"rollpack.plan_id"


def as_plan(value: object) -> Plan:
    """An argument that has to be a plan."""
    if not isinstance(value, Plan):
        raise PlanError(f"{type(value).__name__} is no Plan; pass the data, then what rollpack.plan returned")
    return value


class Step(NamedTuple):
    """The counts of one optimizer step, of all ranks together."""

    #: N, the rollouts that count in means.
    num_rollouts: int
    #: P, the prompt groups that count in means; None where groups were not read.
    num_prompts: int | None
    #: T, the trained tokens.
    num_tokens: int
    #: K, the micro-batches that each rank runs.
    num_micro_batches: int


@dataclass(frozen=True)
class Settings:
    """The arguments that a plan was made with, as ``pack`` and the reducer need them."""

    loss_aggregation: str
    divisor: float | None
    empty: str
    max_tokens_per_gpu: int | None
    micro_batch_size: int | None
    dp_size: int
    cp_size: int
    layout: str
    global_batch_size: int | None
    prompts_per_step: int | None
    remainder: str
    oversize: str
    placeholders: bool
    micro_batch_multiple: int
    pad_to_multiple_of: int
    pad_micro_batch_to_multiple_of: int
    cost: tuple[int, int]
    sync: str
    keep_together: str | None = None

    @classmethod
    def of(cls, *, divisor: Any, placeholders: Any, cost: Any, **arguments: Any) -> Settings:
        """From arguments as callers give them; the core knows which of them go together.

        Raises:
            PlanError: one that has to be a number, or True or False, is none.
        """
        divisor = None if divisor is None else number("divisor", divisor)
        kinds = _kinds()
        for name, value in arguments.items():
            if kinds[name] in {int, str} or value is not None:
                arguments[name] = integer(name, value) if kinds[name] in {int, int | None} else word(value)
        return cls(divisor=divisor, placeholders=flag("placeholders", placeholders), cost=cost_model(cost), **arguments)

    @property
    def cut(self) -> tuple[int, str, int, int]:
        """Paddings and the cut over cp ranks, as the core takes them."""
        return self.cp_size, self.layout, self.pad_to_multiple_of, self.pad_micro_batch_to_multiple_of


@cache
def _kinds() -> dict[str, Any]:
    return get_type_hints(Settings)


@dataclass(frozen=True, eq=False, repr=False)
class Plan(Saved):
    """Where every sample goes. It holds integers (and weights), no token, and can be pickled, saved and sent.

    It speaks the Arrow PyCapsule protocol as :meth:`to_arrow` does.

    Attributes:
        steps: the counts of each optimizer step.
        settings: the arguments that it was made with.
        columns: the mapping of column names, for ``pack``.
        rollout_key: the rollout key, for reading the data again.
        sources: the shards that were joined, by name, and how many rows each has; empty where none was named. Rows count
            through them in this order.
        num_rows: the number of rows of the data.
        dropped_rows: int64, the rows that ``remainder="drop"`` leaves out.
        oversize_rows: int64, the rows over the budget that are alone in their micro-batch.
        fill: true tokens over the tokens that the micro-batches have room for: the budget, less what is over a multiple that
            micro-batches are padded to (for ``micro_batch_size``: as many as the largest micro-batch of the step has).
        imbalance: cost (of padded lengths) of the slowest rank over the mean rank, over each step (``sync="step"``) or each
            round of micro-batches (``sync="micro_batch"``); 1.0 if nobody waits.
    """

    steps: tuple[Step, ...]
    settings: Settings
    columns: Mapping[str, str | None]
    rollout_key: tuple[str, ...]
    sources: tuple[tuple[SourceName, int], ...]
    num_rows: int
    dropped_rows: npt.NDArray[np.int64]
    oversize_rows: npt.NDArray[np.int64]
    fill: float
    imbalance: float
    _placements: pa.RecordBatch
    #: Where each micro-batch begins among the placed samples, and the end: step by step, rank by rank.
    _offsets: npt.NDArray[np.int64]

    def rows(self, step: int, dp_rank: int, micro_batch: int) -> npt.NDArray[np.int64]:
        """The input rows of a micro-batch, int64, in the order in which they lie in it. A placeholder has none."""
        rows: npt.NDArray[np.int64] = self._slice("row", self._bounds(step, dp_rank, micro_batch))
        return rows

    def rows_by_source(self, rows: npt.NDArray[np.int64]) -> dict[SourceName, npt.NDArray[np.int64]]:
        """Where these rows lie: for each source that has some of them, its rows, counted from 0 within it, in order.

        Args:
            rows: integers, rows of the data as in :meth:`rows`; -1, the row of a placeholder, lies nowhere.

        Raises:
            PlanError: no source was named (see :meth:`Summary.concat`), or there is no such row.
        """
        if not self.sources:
            raise PlanError("this plan has no sources: its summary was made without source=")
        names, sizes = zip(*self.sources, strict=True)
        ends = np.cumsum(sizes, dtype=np.int64)
        rows = np.sort(np.asarray(rows))
        if rows.size and rows.dtype.kind not in "iu":
            raise PlanError(f"rows are {rows.dtype}; they have to be integers")
        if rows.size and not (rows[0] >= -1 and rows[-1] < self.num_rows):
            wrong = rows[-1] if rows[0] >= -1 else rows[0]
            raise PlanError(f"there is no row {wrong}: the data of this plan has {self.num_rows}, counted from 0")
        bounds = np.searchsorted(rows, [0, *ends]).tolist()
        return {
            name: rows[a:b] - (end - size)
            for name, size, end, (a, b) in zip(names, sizes, ends, pairwise(bounds), strict=True)
            if a < b
        }

    def to_arrow(self) -> pa.Table:
        """One row a placed sample.

        Columns: ``step``, ``dp_rank``, ``micro_batch``, ``position``, ``row``, ``total_length``, ``mask_sum``,
        ``rollout_mask_sum``, under ``prompt_mean`` ``prompt_mask_sum`` (all int64), and ``sample_weight`` (float64).
        """
        whole = self._whole_batch()
        names = whole.schema.names
        return pa.Table.from_batches([whole]).select(names[: names.index("response_length")])

    def _whole_batch(self) -> pa.RecordBatch:
        """The placed samples with their places, which the offsets tell: most plans never need them sample by sample."""
        sizes = np.diff(self._offsets)
        per_rank = np.array([step.num_micro_batches for step in self.steps])
        of_bins = np.concatenate([np.arange(n * self.settings.dp_size) for n in per_rank])
        step = np.repeat(np.arange(len(self.steps)), per_rank * self.settings.dp_size)
        places = {"step": step, "dp_rank": of_bins // per_rank[step], "micro_batch": of_bins % per_rank[step]}
        columns = {name: np.repeat(column, sizes) for name, column in places.items()}
        columns["position"] = np.arange(self._placements.num_rows) - np.repeat(self._offsets[:-1], sizes)
        fields = [pa.field(name, pa.int64(), nullable=False) for name in columns]
        return pa.RecordBatch.from_arrays(
            [*map(int64_array, columns.values()), *self._placements.columns],
            schema=pa.schema([*fields, *self._placements.schema]),
        )

    @cached_property
    def inverse(self) -> npt.NDArray[np.int64]:
        """Puts outputs, one a sample, back in input order: int64, [placed samples].

        ``outputs`` are those of all micro-batches, one after the other in the order of :meth:`to_arrow` (step, dp rank,
        micro-batch, position), without placeholders. Then ``outputs[plan.inverse]`` are in the order of the input rows;
        rows of ``dropped_rows`` have none.
        """
        return np.argsort(self._placements.column("row").to_numpy(), kind="stable").astype(np.int64, copy=False)

    def show(self, step: int = 0) -> Schedule:
        """A step as a picture: a row a dp rank, time along, a micro-batch as a block, with gaps where ranks wait.

        A notebook draws it (with the extra ``report``), and it prints as text.

        Raises:
            PlanError: there is no such step.
        """
        from rollpack.schedule import Schedule

        return Schedule.of(self, step)

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        return self.to_arrow().__arrow_c_stream__(requested_schema)

    def to_bytes(self) -> bytes:
        """The plan as one Arrow IPC file."""
        described = self._describe()
        batch = self._whole_batch().replace_schema_metadata({_METADATA: described, _INTACT: digest(described), _ID: self.id})
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, batch.schema) as writer:
            writer.write_batch(batch)
        return sink.getvalue().to_pybytes()  # type: ignore[no-any-return]

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """The inverse of :meth:`to_bytes`.

        Raises:
            DataError: this is no plan, or it was damaged.
        """
        try:
            reader = pa.ipc.open_file(pa.BufferReader(data))
            metadata, batch = reader.schema.metadata or {}, reader.get_batch(0)
            # What is described is believed only if it is whole: of a number that grew there would be tables of any size.
            if digest(metadata[_METADATA]) != metadata[_INTACT]:
                raise ValueError("its description was damaged")
            batch.validate(full=True)
            plan = cls._from_description(metadata[_METADATA], batch)
            intact = metadata[_ID].decode() == plan.id
        except Exception as error:  # a damaged file fails in as many ways as it has bytes
            raise DataError(f"this is no plan that rollpack saved: {type(error).__name__}: {error}") from error
        if not intact:
            raise DataError("this plan was damaged: its contents do not match its id")
        return plan

    @cached_property
    def id(self) -> str:
        """A hash of the schedule and its settings: the same plan has the same id on every machine."""
        schema = [(field.name, str(field.type), field.nullable) for field in self._placements.schema]
        columns = (self._offsets, *(column.to_numpy() for column in self._placements.columns))
        contents = (np.ascontiguousarray(column).data for column in columns)
        return digest(self._describe(), repr(schema).encode(), *contents).hex()

    def _describe(self) -> bytes:
        return json.dumps(
            {
                "steps": self.steps,
                "settings": asdict(self.settings),
                "columns": dict(self.columns),
                "rollout_key": self.rollout_key,
                "sources": self.sources,
                "num_rows": self.num_rows,
                "dropped_rows": self.dropped_rows.tolist(),
                "oversize_rows": self.oversize_rows.tolist(),
                "fill": self.fill,
                "imbalance": self.imbalance,
            },
            sort_keys=True,
        ).encode()

    @classmethod
    def _from_description(cls, described: bytes, placements: pa.RecordBatch) -> Self:
        values = json.loads(described)
        settings = Settings(**values["settings"] | {"cost": tuple(values["settings"]["cost"])})
        steps = tuple(Step(*step) for step in values["steps"])
        per_rank = np.array([step.num_micro_batches for step in steps], dtype=np.int64)
        first = np.concatenate([[0], np.cumsum(per_rank * settings.dp_size)])
        step, rank, micro_batch = (placements.column(name).to_numpy() for name in ("step", "dp_rank", "micro_batch"))
        index = first[step] + rank * per_rank[step] + micro_batch
        if not (index.min() >= 0 and index.max() < first[-1]):
            raise ValueError("a sample lies in a micro-batch that there is not")
        counts = np.bincount(index, minlength=first[-1])
        return cls(
            steps=steps,
            settings=settings,
            columns=values["columns"],
            rollout_key=tuple(values["rollout_key"]),
            sources=tuple((name, rows) for name, rows in values["sources"]),
            num_rows=values["num_rows"],
            dropped_rows=np.array(values["dropped_rows"], dtype=np.int64),
            oversize_rows=np.array(values["oversize_rows"], dtype=np.int64),
            fill=values["fill"],
            imbalance=values["imbalance"],
            _placements=placements.select(placements.schema.names[4:]).replace_schema_metadata(None),
            _offsets=np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]),
        )

    def _num_units(self, column: str) -> int:
        """One more than the largest index of a rollout or a prompt group."""
        return int(self._placements.column(column).to_numpy().max()) + 1

    @cached_property
    def _unit_counts(self) -> tuple[int, int | None]:
        prompts = self.settings.loss_aggregation == "prompt_mean"
        return self._num_units("rollout_index"), self._num_units("prompt_index") if prompts else None

    @cached_property
    def _first_bins(self) -> npt.NDArray[np.int64]:
        """The number of the first micro-batch of each step, and the end."""
        per_step = [step.num_micro_batches * self.settings.dp_size for step in self.steps]
        return np.concatenate([[0], np.cumsum(per_step, dtype=np.int64)])

    def _checked(self, step: int | None, dp_rank: int, cp_rank: int) -> int:
        """The step, the only one if None; and there is such a rank.

        Raises:
            PlanError: there is no such step or rank, or none was given and there are several steps.
        """
        step = self._only_step() if step is None else step
        self._bounds(step, dp_rank, 0)
        self._check("cp_rank", cp_rank, self.settings.cp_size)
        return step

    def _bounds(self, step: int, dp_rank: int, micro_batch: int) -> slice:
        per_rank = self._step(step).num_micro_batches
        self._check("dp_rank", dp_rank, self.settings.dp_size)
        self._check("micro_batch", micro_batch, per_rank)
        index = int(self._first_bins[step]) + dp_rank * per_rank + micro_batch
        return slice(int(self._offsets[index]), int(self._offsets[index + 1]))

    def _bounds_of_rank(self, step: int, dp_rank: int) -> list[slice]:
        """Where the micro-batches of a rank lie, in the order in which it runs them."""
        per_rank = self._step(step).num_micro_batches
        first = int(self._first_bins[step]) + dp_rank * per_rank
        return [slice(a, b) for a, b in pairwise(self._offsets[first : first + per_rank + 1].tolist())]

    def _rows_of(self, step: int, dp_rank: int | None = None) -> npt.NDArray[np.int64]:
        """The rows of all micro-batches of a rank in a step, or of a whole step."""
        per_rank = self._step(step).num_micro_batches
        first = int(self._first_bins[step]) + (dp_rank or 0) * per_rank
        last = first + per_rank * (self.settings.dp_size if dp_rank is None else 1)
        rows: npt.NDArray[np.int64] = self._slice("row", slice(int(self._offsets[first]), int(self._offsets[last])))
        return rows

    def _step(self, step: int) -> Step:
        self._check("step", step, len(self.steps))
        return self.steps[step]

    @staticmethod
    def _check(name: str, value: int, size: int) -> None:
        if not 0 <= integer(name, value) < size:
            noun = name.replace("micro_", "micro-").replace("_", " ")
            raise PlanError(f"{name} is {value}, and this plan has {counted(size, noun)}, counted from 0")

    def _only_step(self) -> int:
        if len(self.steps) != 1:
            raise PlanError(f"this plan has {len(self.steps)} steps; pass step=, from 0 to {len(self.steps) - 1}")
        return 0

    def _slice(self, column: str, bounds: slice) -> Any:
        return self._placements.column(column).to_numpy()[bounds]

    def __repr__(self) -> str:
        settings = self.settings
        per_rank = [step.num_micro_batches for step in self.steps]
        fewest = "" if len(set(per_rank)) == 1 else f"{min(per_rank):,} to "
        micro_batches = fewest + counted(max(per_rank), "micro-batch")
        left = f", {counted(len(self.dropped_rows), 'row')} dropped" if len(self.dropped_rows) else ""
        left += f", {counted(len(self.oversize_rows), 'row')} over the budget" if len(self.oversize_rows) else ""
        return (
            f"Plan({counted(self._placements.num_rows, 'sample')} in {counted(len(self.steps), 'step')} of {micro_batches} "
            f"on each of {settings.dp_size} x {settings.cp_size} dp x cp ranks, {settings.loss_aggregation}, "
            f"fill {self.fill:.1%}, imbalance {self.imbalance:.4f}{left})"
        )
