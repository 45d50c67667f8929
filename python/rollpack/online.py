"""``pack_online``: micro-batches of rollouts that are still arriving."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import count
from typing import Any

import numpy.typing as npt

from rollpack import _core
from rollpack._arguments import integer
from rollpack._errors import DataError, PlanError
from rollpack._sources import Request
from rollpack.arrivals import Arrival, Arriving, arrived, naming
from rollpack.cost import CostModel
from rollpack.packing import MicroBatch, fresh, pack_rows
from rollpack.plans import Settings


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
            raise PlanError(f"{name} is {rank}; it has to be from 0 to {size - 1}")
    request = Request.make(columns, (), token_columns=token_columns, sample_columns=sample_columns)
    # The core counts rollouts or prompts where it cuts steps, and here it cuts none.
    options = _core.Options(replace(settings, prompts_per_step=None), settings.cut)
    online = _core.Online(options, integer("look_ahead", look_ahead))
    prompts = loss_aggregation == "prompt_mean"
    pieces = arrived(arrivals, request, prompts=prompts, columns=columns, rollout_key=rollout_key)
    tokens = None if num_tokens is None else iter(num_tokens)
    return _Steps(settings, request, online, pieces, tokens, (dp_rank, cp_rank)).run()


def _check_totals(settings: Settings, num_tokens: Iterable[int] | None) -> None:
    """What weights are made of is stated, for the mode that needs it."""
    rollouts, prompts, mode = settings.global_batch_size, settings.prompts_per_step, settings.loss_aggregation
    if rollouts is None or rollouts < 1:
        raise PlanError(f"global_batch_size is {rollouts}; it has to be an integer of at least 1")
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


class _Steps:
    """What goes out on one rank."""

    def __init__(
        self,
        settings: Settings,
        request: Request,
        online: _core.Online,
        arrived: Iterator[Arrival],
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
        self._rest: Arrival | None = None
        self._complete = True

    def run(self) -> Iterator[Iterator[MicroBatch[npt.NDArray[Any]]]]:
        for step in count():
            if self._arrival() is None:
                return
            self._complete = False
            yield self._step(step)
            if not self._complete:
                raise PlanError(f"step {step} was left before its end: take all of its micro-batches, then the next step")

    def _arrival(self) -> Arrival | None:
        """What comes next; it stays until it is taken."""
        if self._rest is None:
            self._rest = next(self._arrived, None)
        return self._rest

    def _step(self, step: int) -> Iterator[MicroBatch[npt.NDArray[Any]]]:
        rollouts, num_tokens = self._settings.global_batch_size or 0, self._tokens_of(step)
        arriving = Arriving(self._settings, num_tokens)
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
            with naming(arrival.number):
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
        return integer(f"num_tokens of step {step}", number, least=0)
