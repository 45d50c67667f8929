"""What arrives, piece by piece, for :func:`rollpack.pack_online`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from rollpack import _core
from rollpack._errors import DataError, PlanError, SchemaError
from rollpack._sources import Request, Source
from rollpack._text import counted
from rollpack.packing import PLANNED, PLANNED_PROMPTS
from rollpack.planning import plan
from rollpack.plans import Settings
from rollpack.summary import Summary, summarize
from rollpack.weights import sample_weights

Columns = dict[str, npt.NDArray[Any]]

#: The columns that number rollouts and groups, and what they number.
INDICES = {"rollout_index": "rollout", "prompt_index": "prompt group"}


@dataclass(frozen=True)
class Arrival:
    """Rows that came together, or those of them that are of one step.

    Attributes:
        number: counted from 0.
        rows: what they are packed from.
        first_row: where ``rows`` begins, counted over all arrivals.
        columns: what packing takes of a plan, a value each row: rows counted from ``first_row``, rollouts and groups
            numbered from 0.
        ids: by the name of their column in ``columns``, as the data has them, a value each row; left out where each row is
            a rollout.
    """

    number: int
    rows: _core.Rows
    first_row: int
    columns: Columns
    ids: dict[str, npt.NDArray[np.object_]]

    def split(self, num_rollouts: int) -> tuple[Arrival, Arrival | None]:
        """The rows of its first rollouts and, if there are any, the others."""
        first = self.columns["rollout_index"] < num_rollouts
        return self._of(first), None if first.all() else self._of(~first)

    def _of(self, chosen: npt.NDArray[np.bool_]) -> Arrival:
        columns = {name: column[chosen] for name, column in self.columns.items()}
        for name in INDICES.keys() & columns.keys():
            columns[name] = np.unique(columns[name], return_inverse=True)[1]
        return replace(self, columns=columns, ids={name: ids[chosen] for name, ids in self.ids.items()})


@contextmanager
def naming(number: int) -> Iterator[None]:
    """Errors say which arrival they are about; rows are counted within it."""
    try:
        yield
    except (DataError, SchemaError) as error:
        raise type(error)(f"arrival {number}: {error}", error.column, error.row) from error
    except (PlanError, TypeError) as error:
        raise type(error)(f"arrival {number}: {error}") from error


def arrived(
    arrivals: Iterable[Any],
    request: Request,
    *,
    prompts: bool,
    columns: Mapping[str, str | None] | None,
    rollout_key: str | Sequence[str],
) -> Iterator[Arrival]:
    """Reads each arrival. ``request``: how it is packed."""
    first_row, known = 0, dict[str, str]()
    for number, data in enumerate(arrivals):
        with naming(number):
            source = Source.of(data)
            summary = summarize(source, groups=prompts, columns=columns, rollout_key=rollout_key)
            rows = source.take(request)
            if rows.num_rows != len(summary):
                raise DataError(
                    f"it had {counted(len(summary), 'row')} and now {rows.num_rows}: a reader gives them only once, "
                    "pass a table"
                )
            kinds = _kinds(summary, request, rows)
            for name, found in kinds.items():
                if found != (before := known.setdefault(name, found)):
                    raise SchemaError(
                        f"column {name!r} is {found}, and was {before} in arrivals before: give them one schema", name
                    )
            mode = "prompt_mean" if prompts else "sample_mean"
            alone = plan(summary, loss_aggregation=mode, micro_batch_size=1)
            names = PLANNED.keys() | (PLANNED_PROMPTS.keys() if prompts else set())
            # As in the data: each row was planned by itself, in any order.
            placed = {name: alone._slice(name, slice(None))[alone.inverse] for name in names}
            ids = {"rollout_index": _ids(summary, summary.rollout_key)} if summary.rollout_key else {}
            ids |= {"prompt_index": _ids(summary, ("group_index",))} if prompts else {}
        yield Arrival(number, rows, first_row, placed, ids)
        first_row += len(summary)


def _kinds(summary: Summary, request: Request, rows: _core.Rows) -> dict[str, str]:
    """What has to be the same in each arrival: whether there are ids and of what type, and how sample columns travel."""
    kinds = {name: str(summary._batch.schema.field(name).type) for name in summary.rollout_key}
    kinds.setdefault("rollout_id", "absent")
    if summary.groups:
        kinds["group_index"] = str(summary._batch.schema.field("group_index").type)
    columns = zip(request.sample_columns, rows.float_columns, strict=True)
    return kinds | {name: "floats" if is_float else "integers" for name, is_float in columns}


def _ids(summary: Summary, names: Sequence[str]) -> npt.NDArray[np.object_]:
    """The ids of each row, of one column or of several together."""
    ids = np.empty(len(summary), np.object_)
    ids[:] = list(zip(*(summary._batch.column(name).to_pylist() for name in names), strict=True))
    return ids


class Arriving:
    """What has come of one step."""

    def __init__(self, settings: Settings, num_tokens: int | None) -> None:
        self._settings = settings
        self._num_tokens = num_tokens
        self._parts: list[Any] = []
        #: Of each sample: what packing takes of a plan, and which part it came with.
        self._columns: Columns = {}
        #: How many samples of each part have not gone out.
        self._waiting: list[int] = []
        self.came = dict.fromkeys(INDICES, 0)
        self._seen: dict[str, set[Any]] = {name: set() for name in INDICES}

    def add(self, part: Arrival, later: Arrival | None) -> None:
        """Takes rows in, with their weights. ``later``: what of the same arrival is of later steps."""
        settings, columns = self._settings, dict(part.columns)
        for name, unit in INDICES.items():
            ids = part.ids.get(name, np.zeros(0, np.object_))
            row = next((row for row, i in enumerate(ids) if i in self._seen[name]), None)
            if row is not None:
                raise DataError(
                    f"row {columns['row'][row]} is of {unit} {_show(ids[row])}, of which an earlier arrival of this step "
                    f"had samples, and their weights are worked out already: a {unit} has to come as a whole",
                    None,
                    int(columns["row"][row]),
                )
            self._seen[name].update(ids)
        cut = self._seen["prompt_index"] & set(later.ids.get("prompt_index", ()) if later else ())
        if cut:
            raise DataError(
                f"global_batch_size {settings.global_batch_size} cuts prompt group {_show(cut.pop())} between two steps, "
                "and prompt_mean needs whole groups"
            )
        columns["sample_weight"] = sample_weights(
            settings.loss_aggregation,
            rollout_mask_sums=columns["rollout_mask_sum"],
            prompt_mask_sums=columns.get("prompt_mask_sum"),
            num_rollouts=settings.global_batch_size,
            num_prompts=settings.prompts_per_step,
            num_tokens=self._num_tokens,
            divisor=settings.divisor,
        )
        for name in INDICES.keys() & columns.keys():
            here = columns[name] + self.came[name]
            self.came[name] = int(here.max()) + 1
            columns[name] = here
        columns["row"] = columns["row"] + part.first_row
        columns["part"] = np.full(len(columns["row"]), len(self._parts))
        if self._parts and self._waiting[-1] == 0:  # it was kept as the last
            self._parts[-1] = None
        self._parts.append(part)
        self._waiting.append(len(columns["row"]))
        before = self._columns or {name: column[:0] for name, column in columns.items()}
        self._columns = {name: np.concatenate([before[name], column]) for name, column in columns.items()}

    def take(self, samples: Sequence[int]) -> tuple[_core.Rows, Columns]:
        """What a micro-batch of these samples is packed from."""
        at = np.array(samples, np.int64)
        placed = {name: column[at] for name, column in self._columns.items()}
        # A placeholder has none, and takes from what came last which columns there are.
        parts = [self._parts[part] for part in np.unique(placed.pop("part"))] or self._parts[-1:]
        ends = [0, *(part.first_row + part.rows.num_rows for part in parts)]
        gaps = [part.first_row - end for part, end in zip(parts, ends, strict=False)]
        return _core.Rows.joined([part.rows for part in parts], gaps), placed

    def went_out(self, samples: Sequence[int]) -> None:
        """Lets go of the data that no sample waits in any more."""
        for part in self._columns["part"][np.array(samples, np.int64)]:
            self._waiting[part] -= 1
            if self._waiting[part] == 0 and part + 1 < len(self._parts):
                self._parts[part] = None

    def check_totals(self, step: int) -> None:
        """Raises where the totals are not those that weights were made of."""
        prompts, tokens = self.came["prompt_index"], int(self._columns["mask_sum"].sum())
        for name, stated, found, unit in (
            ("prompts_per_step", self._settings.prompts_per_step, prompts, "prompt group"),
            ("num_tokens", self._num_tokens, tokens, "trained token"),
        ):
            if stated is not None and stated != found:
                raise DataError(
                    f"step {step} has {counted(found, unit)}, and {name} said {stated:,}: weights were made of that. Leave "
                    "this optimizer step out"
                )


def _show(key: tuple[Any, ...]) -> str:
    return repr(key[0] if len(key) == 1 else key)
