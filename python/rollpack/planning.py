"""``plan``: cut rollouts into optimizer steps and micro-batches over ranks."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from rollpack import _core
from rollpack.cost import CostModel
from rollpack.names import check_units, resolve
from rollpack.plans import Plan, Settings, Step
from rollpack.summary import summary_of


def plan(
    data_or_summary: Any,
    *,
    loss_aggregation: str = "sample_mean",
    divisor: float | None = None,
    empty: str = "count",
    max_tokens_per_gpu: int | None = None,
    micro_batch_size: int | None = None,
    dp_size: int = 1,
    cp_size: int = 1,
    layout: str = "zigzag",
    global_batch_size: int | None = None,
    prompts_per_step: int | None = None,
    remainder: str = "error",
    oversize: str = "error",
    placeholders: bool = False,
    micro_batch_multiple: int = 1,
    pad_to_multiple_of: int = 1,
    pad_micro_batch_to_multiple_of: int = 1,
    cost: str | CostModel = "tokens",
    sync: str = "step",
    keep_together: str | None = None,
    columns: Mapping[str, str | None] | None = None,
    rollout_key: str | Sequence[str] = "rollout_id",
) -> Plan:
    """Cut rollouts into optimizer steps and micro-batches over ranks. The same input gives the same plan everywhere.

    Args:
        data_or_summary: rollouts, as :func:`rollpack.summarize` takes them, or a :class:`rollpack.Summary`.
        loss_aggregation: ``sample_mean``, ``prompt_mean``, ``token_mean`` or ``constant``; see
            :func:`rollpack.sample_weights`. Or ``token_mean_legacy``, SkyRL's old token mean, for doing an old run again:
            the mean over the micro-batches of all ranks, those with a trained token, of each one's own token mean. It
            depends on the cut, and warns of it. Or another trainer's name with its prefix, as ``trl:dapo``
            (:data:`rollpack.names.MODES`): the plan is of the mode of ours that it is, or the error says why none is.
        divisor: L of ``constant``, finite and above 0; for no other mode.
        empty: whether a rollout or group without a trained token counts in the mean (``count``) or not (``skip``).
        max_tokens_per_gpu: a micro-batch has at most ``max_tokens_per_gpu * cp_size`` tokens, padding included.
        micro_batch_size: or a micro-batch has at most so many samples. Exactly one of the two is given.
        dp_size: D, data-parallel ranks.
        cp_size: C, context-parallel ranks that share each micro-batch.
        layout: ``zigzag`` pads each sequence to a multiple of 2C and gives each rank two of its 2C chunks;
            ``contiguous`` pads the micro-batch to a multiple of C and cuts it in C runs.
        global_batch_size: rollouts a step, as slime counts (Megatron counts samples).
        prompts_per_step: or whole prompt groups a step. With neither, all of the data is one step.
        remainder: an incomplete last step is an ``error``, or is ``drop``-ped (see ``Plan.dropped_rows``) or ``keep``-t.
        oversize: a sample over the budget is an ``error``, or goes ``alone`` into a micro-batch.
        placeholders: where a step has fewer samples than micro-batches, fill up with masked dummies.
        micro_batch_multiple: every rank's number of micro-batches is a multiple of this (Megatron's
            ``microbatch_group_size_per_vp_stage`` where stages are interleaved).
        pad_to_multiple_of: pad each sequence to a multiple of this, together with what ``layout`` needs.
        pad_micro_batch_to_multiple_of: pad each micro-batch, over all its cp ranks, to a multiple of this. For a multiple
            of m on each rank, pass ``m * cp_size``.
        cost: what ranks are balanced by: ``tokens``, ``attention`` or a :class:`rollpack.CostModel`.
        sync: whether ranks wait for each other once a ``step`` (DDP, pipelines) or at each ``micro_batch`` (FSDP,
            expert parallelism). Ranks' totals are evened out, or what runs at the same time. No more micro-batches are
            used for that than the budget needs.
        keep_together: ``rollout`` or ``group``: all samples of a rollout, or of a prompt group, are on one rank (in as many
            of its micro-batches as it takes). A step needs at least as many of them as there are ranks, and ranks are less
            even than without. ``group`` reads groups.
        columns: as for :func:`rollpack.summarize`; the plan hands it on to ``pack``.
        rollout_key: as for :func:`rollpack.summarize`.

    Returns:
        A :class:`Plan`. Every row is in exactly one micro-batch or in ``dropped_rows``; no micro-batch is empty; each rank
        has the same number of them in a step; none is over the budget but those of ``oversize_rows``.

    Raises:
        PlanError: what cannot be met, and what would meet it.
        SchemaError, DataError: as for :func:`rollpack.summarize`.
    """
    settings, options = checked(
        loss_aggregation=loss_aggregation,
        divisor=divisor,
        empty=empty,
        max_tokens_per_gpu=max_tokens_per_gpu,
        micro_batch_size=micro_batch_size,
        dp_size=dp_size,
        cp_size=cp_size,
        layout=layout,
        global_batch_size=global_batch_size,
        prompts_per_step=prompts_per_step,
        remainder=remainder,
        oversize=oversize,
        placeholders=placeholders,
        micro_batch_multiple=micro_batch_multiple,
        pad_to_multiple_of=pad_to_multiple_of,
        pad_micro_batch_to_multiple_of=pad_micro_batch_to_multiple_of,
        cost=cost,
        sync=sync,
        keep_together=keep_together,
    )
    groups = needs_groups(settings.loss_aggregation, prompts_per_step, keep_together)
    summary = summary_of(data_or_summary, groups=groups, columns=columns, rollout_key=rollout_key)
    if settings.loss_aggregation == "token_mean_legacy":
        _warn_of_legacy()
    sources = [(repr(name), rows) for name, rows in summary.sources]
    planned = _core.plan(summary._planned_batch(), summary.rollout_key, summary.group_key, sources, options)
    check_units(loss_aggregation, *(planned.placements.column(column).to_numpy() for column in ("row", "rollout_index")))
    return Plan(
        steps=tuple(Step(*step) for step in planned.steps),
        settings=settings,
        columns=dict(summary.request.columns),
        rollout_key=summary.request.rollout_key,
        sources=summary.sources,
        num_rows=len(summary),
        dropped_rows=planned.dropped_rows,
        oversize_rows=planned.oversize_rows,
        fill=planned.fill,
        imbalance=planned.imbalance,
        _placements=planned.placements,
        _offsets=planned.offsets,
    )


def checked(*, loss_aggregation: str, divisor: float | None, empty: str, **arguments: Any) -> tuple[Settings, _core.Options]:
    """The arguments of :func:`plan` as what they mean, and as the core takes them. No data is read for it.

    Raises:
        PlanError: one is wrong, or they do not go together.
    """
    mode, divisor = resolve(loss_aggregation, divisor, empty)
    settings = Settings.of(loss_aggregation=mode, divisor=divisor, empty=empty, **arguments)
    return settings, _core.Options(settings, settings.cut)


def needs_groups(loss_aggregation: str | None, prompts_per_step: int | None, keep_together: str | None) -> bool:
    """Whether a plan with these arguments reads prompt groups."""
    return loss_aggregation == "prompt_mean" or prompts_per_step is not None or keep_together == "group"


@cache
def _warn_of_legacy() -> None:
    """Once: it is said in every step otherwise."""
    warnings.warn(
        "token_mean_legacy is a mean of micro-batch means: loss and gradient change with the budget, dp_size and the order "
        "of samples. Use token_mean, unless an old run is to be done again",
        stacklevel=3,
    )
