"""``pack_online``: micro-batches of rollouts that are still arriving."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt

from rollpack import _core
from rollpack._arguments import integer
from rollpack._errors import DataError, PlanError, SchemaError
from rollpack._sources import Request, Source
from rollpack.cost import CostModel
from rollpack.packing import PLANNED, PLANNED_PROMPTS, MicroBatch, fresh, pack_rows
from rollpack.planning import plan
from rollpack.plans import Settings
from rollpack.summary import Summary, summarize
from rollpack.weights import sample_weights

Columns = dict[str, npt.NDArray[Any]]

#: The columns that number rollouts and groups, and what they number.
_INDICES = {"rollout_index": "rollout", "prompt_index": "prompt group"}


def pack_online(
    arrivals: Iterable[Any],
    *,
    global_batch_size: int,
    prompts_per_step: int | None = None,
    num_tokens: Iterable[int] | None = None,
    loss_aggregation: str = "sample_mean",
    divisor: float | None = None,
    max_tokens_per_gpu: int | None = None,
    micro_batch_size: int | None = None,
    look_ahead: int = 2,
    dp_size: int = 1,
    cp_size: int = 1,
    layout: str = "zigzag",
    oversize: str = "error",
    placeholders: bool = True,
    micro_batch_multiple: int = 1,
    pad_to_multiple_of: int = 1,
    pad_micro_batch_to_multiple_of: int = 1,
    cost: str | CostModel = "tokens",
    dp_rank: int = 0,
    cp_rank: int = 0,
    token_columns: Sequence[str] = (),
    sample_columns: Sequence[str] = (),
    columns: Mapping[str, str | None] | None = None,
    rollout_key: str | Sequence[str] = "rollout_id",
) -> Iterator[Iterator[MicroBatch[npt.NDArray[Any]]]]:
    """Pack rollouts while they arrive: micro-batches go out before their step has come as a whole.

    Samples wait until ``look_ahead`` + 1 rounds of full micro-batches could be made of them (a round is one for each dp
    rank, times ``micro_batch_multiple``). Then one round goes out: the sample that has waited longest in each micro-batch,
    and beside it what fills it best. What is left at the end of a step is planned as :func:`rollpack.plan` does. Every rank
    that gets the same arrivals in the same order makes the same micro-batches, however rows are cut into arrivals.

    What the weights are made of has to be known before: N is ``global_batch_size``, P ``prompts_per_step``, T comes from
    ``num_tokens``, and a rollout (under ``prompt_mean`` a prompt group) comes as a whole, in one arrival. All of it is
    checked as it arrives, for each step: an id that comes again in a later step is another rollout. K is not known:
    ``num_micro_batches`` is None, and with it backends that need K are refused.

    Args:
        arrivals: what arrives, each item as :func:`rollpack.summarize` takes data (readable twice, one row at least, the
            same columns and types in each): a table, a list of dicts. They are asked for one by one, when needed.
        global_batch_size: rollouts a step, in the order in which they come.
        prompts_per_step: prompt groups a step, for ``prompt_mean`` and no other.
        num_tokens: trained tokens, one number a step, for ``token_mean`` (and whatever is reduced by it).
        loss_aggregation: ``sample_mean``, ``prompt_mean``, ``token_mean`` or ``constant``.
        divisor: as for :func:`rollpack.plan`.
        max_tokens_per_gpu: as for :func:`rollpack.plan`.
        micro_batch_size: as for :func:`rollpack.plan`; exactly one of the two is given.
        look_ahead: at least 1. More fill micro-batches better and even ranks out better, and hold more: about
            ``look_ahead`` + 1 rounds of tokens, and the arrivals that they lie in.
        dp_size: D, data-parallel ranks.
        cp_size: C, context-parallel ranks that share each micro-batch.
        layout: as for :func:`rollpack.plan`.
        oversize: as for :func:`rollpack.plan`.
        placeholders: fill up with masked dummies where the end of a step has fewer samples than micro-batches; False makes
            that an error, which comes when others have gone out already.
        micro_batch_multiple: as for :func:`rollpack.plan`.
        pad_to_multiple_of: as for :func:`rollpack.plan`.
        pad_micro_batch_to_multiple_of: as for :func:`rollpack.plan`.
        cost: what ranks are evened out by over the step, as for :func:`rollpack.plan`.
        dp_rank: the data-parallel rank.
        cp_rank: the context-parallel rank.
        token_columns: as for :func:`rollpack.pack`.
        sample_columns: as for :func:`rollpack.pack`.
        columns: as for :func:`rollpack.summarize`.
        rollout_key: as for :func:`rollpack.summarize`.

    Yields:
        For each step an iterator of its micro-batches on this rank. It has to be exhausted, as by ``for``, before the next
        step. ``rows`` are counted over all arrivals. Rollouts and groups without a trained token count.

    Raises:
        PlanError: what cannot be met; a step was left before its end.
        DataError: a value is wrong, a rollout or group came in parts, the totals are not those that were stated, or the
            arrivals ended within a step. It names the arrival and the row in it; what only packing sees (a token, a value of
            a carried column) by the row alone, counted over all arrivals.
        SchemaError: as for :func:`rollpack.summarize`.
    """
    settings = Settings.of(
        loss_aggregation=loss_aggregation,
        divisor=divisor,
        empty="count",
        max_tokens_per_gpu=max_tokens_per_gpu,
        micro_batch_size=micro_batch_size,
        dp_size=dp_size,
        cp_size=cp_size,
        layout=layout,
        global_batch_size=global_batch_size,
        prompts_per_step=prompts_per_step,
        remainder="error",
        oversize=oversize,
        placeholders=placeholders,
        micro_batch_multiple=micro_batch_multiple,
        pad_to_multiple_of=pad_to_multiple_of,
        pad_micro_batch_to_multiple_of=pad_micro_batch_to_multiple_of,
        cost=cost,
        sync="step",
    )
    _check_totals(settings, num_tokens)
    if (
        isinstance(arrivals, str | os.PathLike | Mapping)
        or hasattr(arrivals, "__arrow_c_stream__")
        or hasattr(arrivals, "columns")
    ):
        raise TypeError(
            f"arrivals is a {type(arrivals).__name__}, and has to be an iterable of such: pass [data] if it is all there"
        )
    for name, rank, size in (("dp_rank", dp_rank, settings.dp_size), ("cp_rank", cp_rank, settings.cp_size)):
        if not 0 <= integer(name, rank) < size:
            raise PlanError(f"{name} is {rank}, and there are {size}, counted from 0")
    request = Request.make(columns, (), token_columns=token_columns, sample_columns=sample_columns)
    # The core counts rollouts or prompts where it cuts steps, and here it cuts none.
    options = _core.Options(replace(settings, prompts_per_step=None), settings.cut)
    online = _core.Online(options, integer("look_ahead", look_ahead))
    prompts = loss_aggregation == "prompt_mean"
    arrived = _arrived(arrivals, request, prompts=prompts, columns=columns, rollout_key=rollout_key)
    tokens = None if num_tokens is None else iter(num_tokens)
    return _Steps(settings, request, online, arrived, tokens, (dp_rank, cp_rank)).run()


def _check_totals(settings: Settings, num_tokens: Iterable[int] | None) -> None:
    """What weights are made of is stated, for the mode that needs it."""
    rollouts, prompts, mode = settings.global_batch_size, settings.prompts_per_step, settings.loss_aggregation
    if rollouts is None or rollouts < 1:
        raise PlanError(f"global_batch_size is {rollouts}; it has to be at least 1")
    if mode == "token_mean_legacy":
        raise PlanError("token_mean_legacy divides by the number of micro-batches, which is not known while they arrive")
    if (mode == "prompt_mean") != (prompts is not None):
        raise PlanError("prompts_per_step= goes with loss_aggregation 'prompt_mean', which divides by it, and with no other")
    if prompts is not None and not 1 <= prompts <= rollouts:
        raise PlanError(f"prompts_per_step is {prompts}; it has to be from 1 to global_batch_size, {rollouts}")
    if num_tokens is not None and not isinstance(num_tokens, Iterable):
        raise PlanError(
            f"num_tokens is {num_tokens!r}; it has to be an iterable of one number a step: pass [{num_tokens!r}]"
        )
    if mode == "token_mean" and num_tokens is None:
        raise PlanError(
            "token_mean divides by the trained tokens of the whole step, which are not known while it arrives: pass "
            "num_tokens=, one number a step, or plan each step when all of it is there"
        )


@dataclass(frozen=True)
class _Arrival:
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

    def split(self, num_rollouts: int) -> tuple[_Arrival, _Arrival | None]:
        """The rows of its first rollouts and, if there are any, the others."""
        first = self.columns["rollout_index"] < num_rollouts
        return self._of(first), None if first.all() else self._of(~first)

    def _of(self, chosen: npt.NDArray[np.bool_]) -> _Arrival:
        columns = {name: column[chosen] for name, column in self.columns.items()}
        for name in _INDICES.keys() & columns.keys():
            columns[name] = np.unique(columns[name], return_inverse=True)[1]
        return replace(self, columns=columns, ids={name: ids[chosen] for name, ids in self.ids.items()})


@contextmanager
def _naming(number: int) -> Iterator[None]:
    """Errors say which arrival they are about; rows are counted within it."""
    try:
        yield
    except (DataError, SchemaError) as error:
        raise type(error)(f"arrival {number}: {error}", error.column, error.row) from error
    except PlanError as error:
        raise PlanError(f"arrival {number}: {error}") from error


def _arrived(
    arrivals: Iterable[Any],
    request: Request,
    *,
    prompts: bool,
    columns: Mapping[str, str | None] | None,
    rollout_key: str | Sequence[str],
) -> Iterator[_Arrival]:
    """Reads each arrival. ``request``: how it is packed."""
    first_row, known = 0, dict[str, str]()
    for number, data in enumerate(arrivals):
        with _naming(number):
            source = Source.of(data)
            summary = summarize(source, groups=prompts, columns=columns, rollout_key=rollout_key)
            rows = source.take(request)
            if rows.num_rows != len(summary):
                raise DataError(
                    f"it had {len(summary)} rows and now {rows.num_rows}: a reader gives them only once, pass a table"
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
        yield _Arrival(number, rows, first_row, placed, ids)
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


class _Steps:
    """What goes out on one rank."""

    def __init__(
        self,
        settings: Settings,
        request: Request,
        online: _core.Online,
        arrived: Iterator[_Arrival],
        num_tokens: Iterator[int] | None,
        ranks: tuple[int, int],
    ) -> None:
        self._settings = settings
        self._request = request
        self._online = online
        self._arrived = arrived
        self._num_tokens = num_tokens
        self._dp_rank, self._cp_rank = ranks
        described = json.dumps([asdict(settings), asdict(request)], sort_keys=True)
        self._id = hashlib.blake2b(described.encode(), digest_size=16).hexdigest()
        #: What came last, and is not in a step yet.
        self._rest: _Arrival | None = None
        self._complete = True

    def run(self) -> Iterator[Iterator[MicroBatch[npt.NDArray[Any]]]]:
        for step in count():
            if self._arrival() is None:
                return
            self._complete = False
            yield self._step(step)
            if not self._complete:
                raise PlanError(f"step {step} was left before its end: take all of its micro-batches, then the next step")

    def _arrival(self) -> _Arrival | None:
        """What comes next; it stays until it is taken."""
        if self._rest is None:
            self._rest = next(self._arrived, None)
        return self._rest

    def _step(self, step: int) -> Iterator[MicroBatch[npt.NDArray[Any]]]:
        rollouts, num_tokens = self._settings.global_batch_size or 0, self._tokens_of(step)
        arriving = _Arriving(self._settings, num_tokens)
        index = count()
        shared = {
            "step": step,
            "dp_rank": self._dp_rank,
            "cp_rank": self._cp_rank,
            "num_rollouts": rollouts,
            "num_prompts": self._settings.prompts_per_step,
            "num_tokens": num_tokens,
            "loss_aggregation": self._settings.loss_aggregation,
            "divisor": self._settings.divisor,
            "num_micro_batches": None,
            "dp_size": self._settings.dp_size,
            "cp_size": self._settings.cp_size,
            "layout": self._settings.layout,
            "num_indices": (rollouts, self._settings.prompts_per_step),
            "plan_id": self._id,
        }

        def packed(ranks: list[list[list[int]]]) -> Iterator[MicroBatch[npt.NDArray[Any]]]:
            for samples in ranks[self._dp_rank]:
                rows, placed = arriving.take(samples)
                own = shared | {"index": next(index)}
                yield pack_rows(rows, self._request, placed, self._settings.cut, self._cp_rank, fresh, own)
            arriving.went_out([sample for rank in ranks for samples in rank for sample in samples])

        while (missing := rollouts - arriving.came["rollout_index"]) > 0:
            arrival = self._arrival()
            if arrival is None:
                raise DataError(f"the arrivals ended, and {missing} of the {rollouts} rollouts of step {step} did not come")
            here, self._rest = arrival.split(missing)
            with _naming(arrival.number):
                arriving.add(here, self._rest)
                rounds = self._online.add(here.columns["row"], here.columns["total_length"])
            for ranks in rounds:
                yield from packed(ranks)
        arriving.check_totals(step)
        yield from packed(self._online.finish(step))
        self._complete = True

    def _tokens_of(self, step: int) -> int | None:
        if self._num_tokens is None:
            return None
        number = next(self._num_tokens, None)
        if number is None:
            raise DataError(f"num_tokens= has no number for step {step}, whose rollouts arrive")
        if integer("num_tokens", number) < 0:
            raise PlanError(f"num_tokens of step {step} is {number}; it cannot be negative")
        return int(number)


class _Arriving:
    """What has come of one step."""

    def __init__(self, settings: Settings, num_tokens: int | None) -> None:
        self._settings = settings
        self._num_tokens = num_tokens
        self._parts: list[Any] = []
        #: Of each sample: what packing takes of a plan, and which part it came with.
        self._columns: Columns = {}
        #: How many samples of each part have not gone out.
        self._waiting: list[int] = []
        self.came = dict.fromkeys(_INDICES, 0)
        self._seen: dict[str, set[Any]] = {name: set() for name in _INDICES}

    def add(self, part: _Arrival, later: _Arrival | None) -> None:
        """Takes rows in, with their weights. ``later``: what of the same arrival is of later steps."""
        settings, columns = self._settings, dict(part.columns)
        for name, unit in _INDICES.items():
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
        for name in _INDICES.keys() & columns.keys():
            here = columns[name] + self.came[name]
            self.came[name] = int(here.max()) + 1
            columns[name] = here
        columns["row"] = columns["row"] + part.first_row
        columns["part"] = np.full(len(columns["row"]), len(self._parts))
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
        for name, stated, found in (
            ("prompts_per_step", self._settings.prompts_per_step, prompts),
            ("num_tokens", self._num_tokens, tokens),
        ):
            if stated is not None and stated != found:
                raise DataError(
                    f"step {step} has {found} of what {name} counts, and {name} said {stated}: weights were made of that. "
                    "Leave this optimizer step out"
                )


def _show(key: tuple[Any, ...]) -> str:
    return repr(key[0] if len(key) == 1 else key)
