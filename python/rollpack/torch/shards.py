"""Each rank summarizes its own shards, and all plan alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from rollpack._errors import DataError, PlanError, RollpackError, SchemaError
from rollpack.plans import Plan
from rollpack.summary import SourceName, Summary, summarize
from rollpack.torch.mesh import num_processes


def summarize_shards(
    shards: Mapping[SourceName, Any], *, group: dist.ProcessGroup | None = None, **arguments: Any
) -> Summary:
    """The summary of the shards of all ranks, on every rank: each reads its own, and only summaries travel.

    Plan it on every rank, which gives the same plan (:func:`check_same_plan`), and pass the shards that hold the rows of a
    rank to ``pack`` by name.

    Args:
        shards: this rank's shards, ``{source: data}``, such as ``{path: path}``; empty where it has none. A source is one
            rank's only.
        group: the process group, None for that of all ranks. Alone, a process takes its own.
        arguments: ``groups``, ``columns`` and ``rollout_key`` of :func:`rollpack.summarize`, alike on all ranks.

    Raises:
        SchemaError, DataError: as for :func:`rollpack.summarize` and :meth:`rollpack.Summary.concat`. What is wrong on one
            rank is raised on all, with the rank: none waits for another.
        RollpackError: a rank failed in another way, such as a file that it may not read.
        PlanError: this process is not in ``group``; raised on it alone.
    """
    size = num_processes(group)
    own: list[bytes] | tuple[str, ...]
    try:
        if not isinstance(shards, Mapping):
            raise TypeError(
                f"shards is a {type(shards).__name__}; it has to be {{source: data}}, empty where a rank has none"
            )
        own = [summarize(data, source=source, **arguments).to_bytes() for source, data in shards.items()]
    except Exception as error:  # noqa: BLE001 - whatever it is, the others are told
        own, mine = _described(error), error
    found = _gathered(own, size, group)
    for rank, of_rank in enumerate(found):
        if isinstance(of_rank, tuple):
            raise _made_again(rank, *of_rank) from (mine if of_rank is own else None)
    return Summary.concat(Summary.from_bytes(summary) for of_rank in found for summary in of_rank)


def _gathered(own: Any, size: int | None, group: dist.ProcessGroup | None) -> list[Any]:
    """What each of the ``size`` ranks of the group has; alone (None), a process has its own."""
    if size is None:
        return [own]
    found: list[Any] = [None] * size
    dist.all_gather_object(found, own, group)
    return found


_LOCATED = {kind.__name__: kind for kind in (DataError, SchemaError)}


def _described(error: Exception) -> tuple[Any, ...]:
    """An error that may not be pickled, in parts that can."""
    name = type(error).__name__
    text = str(error) if isinstance(error, RollpackError) else f"{name}: {error}"
    return name, text, getattr(error, "column", None), getattr(error, "row", None)


def _made_again(rank: int, name: str, text: str, column: str | None, row: int | None) -> RollpackError:
    text = f"rank {rank}: {text}"
    return _LOCATED[name](text, column, row) if name in _LOCATED else RollpackError(text)


def check_same_plan(plan: Plan, *, group: dist.ProcessGroup | None = None) -> None:
    """See to it that all ranks have the same plan. They compare its id, a hash of the schedule and its settings.

    Args:
        plan: this rank's plan.
        group: the process group, None for that of all ranks.

    Raises:
        PlanError: some ranks have another plan, or what is no plan; raised on all of them. Or this process is not in the
            group; raised on it alone.
    """
    own = plan.id if isinstance(plan, Plan) else (type(plan).__name__,)
    ids = _gathered(own, num_processes(group), group)
    for rank, found in enumerate(ids):
        if isinstance(found, tuple):
            raise PlanError(f"rank {rank} passed a {found[0]}, which is no plan")
    ((most, _),) = Counter(ids).most_common(1)
    others = [rank for rank, found in enumerate(ids) if found != most]
    if others:
        raise PlanError(
            f"ranks {', '.join(map(str, others))} have another plan than the others: give rollpack.plan the same summary "
            "and the same arguments on every rank"
        )
