"""``simulate``: what a setting would take, predicted from the plan that it would be run with."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from inspect import signature
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rollpack import _core
from rollpack._arguments import integer, number, word
from rollpack._errors import PlanError
from rollpack._text import counted
from rollpack.cost import MODELS, CostModel, cost_model
from rollpack.names import mode_of, takes_divisor
from rollpack.planning import checked, needs_groups, plan
from rollpack.plans import Plan, Settings
from rollpack.summary import summary_of

#: Dense bfloat16 FLOP/s of one GPU (SXM boards). NVIDIA's data sheets of A100, H100, H200 and HGX B200; but for A100 they
#: give twice as much, with sparsity.
DEVICES = {"a100": 312e12, "h100": 989e12, "h200": 989e12, "b200": 2250e12}

#: ``sync`` of the plan under each kind of trainer: where data-parallel ranks wait for each other.
TRAINERS = {"fsdp": "micro_batch", "ddp": "step", "pipeline": "step"}


class Setting(NamedTuple):
    """One point of the grid: arguments of :func:`rollpack.plan`."""

    loss_aggregation: str
    dp_size: int
    cp_size: int
    max_tokens_per_gpu: int

    @property
    def gpus(self) -> int:
        """D x C."""
        return self.dp_size * self.cp_size

    def __str__(self) -> str:
        mode, dp_size, cp_size, budget = self
        return f"{mode}, dp {dp_size:,}, cp {cp_size:,}, {counted(budget, 'token')} a GPU"


@dataclass(frozen=True)
class Prediction:
    """What one setting would take. Times are in seconds.

    Attributes:
        setting: which one.
        num_steps: optimizer steps of the plan.
        num_micro_batches: micro-batches that each rank runs, over all steps.
        seconds: all steps together.
        idle_mean: how long a dp rank waits for others, over all steps, in the mean of the ranks.
        idle_worst: the same of the rank that waits longest.
        fill: true tokens over the room of the micro-batches, as ``Plan.fill``.
        padding: share of the positions that are padding or of placeholders, of 1.
        peak_tokens: positions of the largest micro-batch on one GPU.
        plan_id: the plan's id.
    """

    setting: Setting
    num_steps: int
    num_micro_batches: int
    seconds: float
    idle_mean: float
    idle_worst: float
    fill: float
    padding: float
    peak_tokens: int
    plan_id: str

    @property
    def step_seconds(self) -> float:
        """Of one optimizer step, in the mean."""
        return self.seconds / self.num_steps

    @property
    def gpu_seconds(self) -> float:
        """All GPUs, all steps: what the rollouts cost."""
        return self.seconds * self.setting.gpus


@dataclass(frozen=True, repr=False)
class Simulation:
    """Predictions over a grid, in the order of the grid.

    Attributes:
        cost: FLOPs of a sample.
        flops_per_second: of one GPU: its peak times the utilisation.
        overhead: seconds that each micro-batch takes beside its FLOPs.
        trainer: which kind.
        predictions: of the settings that can be planned; at least one.
        refused: the others, and why each cannot be planned.
    """

    cost: CostModel
    flops_per_second: float
    overhead: float
    trainer: str
    predictions: tuple[Prediction, ...]
    refused: Mapping[Setting, str]

    @cached_property
    def best(self) -> Prediction:
        """The least GPU-seconds for the same rollouts: among settings with as many GPUs, the shortest time.

        Of those alike in six digits the one with the fewest peak tokens, then the first of the grid.
        """
        return min(self.predictions, key=_rank)

    @cached_property
    def best_by_gpus(self) -> dict[int, Prediction]:
        """The best of each number of GPUs, fewest first."""
        numbers = sorted({prediction.setting.gpus for prediction in self.predictions})
        return {n: min((p for p in self.predictions if p.setting.gpus == n), key=_rank) for n in numbers}

    def __repr__(self) -> str:
        best, settings = self.best, counted(len(self.predictions), "setting")
        return (
            f"Simulation({settings} and {len(self.refused):,} refused, {self.trainer}; best: "
            f"{best.setting}, {best.seconds:.3g} s, {best.gpu_seconds:.3g} GPU-seconds)"
        )


def _rank(prediction: Prediction) -> tuple[float, int]:
    return float(f"{prediction.gpu_seconds:.6g}"), prediction.peak_tokens


def simulate(
    data_or_summary: Any,
    *,
    model: str | CostModel,
    device: str | float,
    budgets: Sequence[int],
    dp_sizes: Sequence[int] = (1,),
    cp_sizes: Sequence[int] = (1,),
    modes: Sequence[str] = ("sample_mean",),
    trainer: str = "fsdp",
    mfu: float = 0.4,
    overhead: float = 0.0,
    divisor: float | None = None,
    columns: Mapping[str, str | None] | None = None,
    rollout_key: str | Sequence[str] = "rollout_id",
    progress: Callable[[int], object] | None = None,
    **plan_options: Any,
) -> Simulation:
    """Plan the same rollouts under every setting of a grid, and predict how long each takes and who waits.

    The data is read once. Each setting is planned as :func:`rollpack.plan` does it, and what is predicted is of that plan
    (``python -m tests.benchmarks.simulation`` holds it against measured times):

    - A micro-batch takes ``cost / (C * peak * mfu) + overhead`` seconds on each of its C cp ranks, forward and backward. Its
      cost is the sum over its samples of ``linear * s + quadratic * s * s``, s with padding: samples attend only to
      themselves (varlen). See :meth:`rollpack.CostModel.of_transformer` for the FLOPs.
    - ``fsdp``: dp ranks run their k-th micro-batches together, so that a step takes the sum over k of the slowest one.
      ``ddp``, ``pipeline``: they wait once a step, which takes as long as the rank with the largest sum.

    Not in it: generating rollouts, the optimizer, collectives that compute does not hide (put what they take a micro-batch
    into ``overhead``), a pipeline's bubble, and that under ``contiguous`` the last cp rank has the most attention. A cp
    rank is one GPU here. Where it is several (tensor parallelism, pipeline stages), give the peak of all of them together as
    ``device``; what is said of a GPU is then of them.

    Args:
        data_or_summary: as :func:`rollpack.plan` takes it.
        model: a name of :data:`rollpack.cost.MODELS`, or a model's FLOPs.
        device: a name of :data:`rollpack.simulation.DEVICES`, or the peak FLOP/s of a GPU.
        budgets: ``max_tokens_per_gpu``.
        dp_sizes: D.
        cp_sizes: C.
        modes: ``loss_aggregation``. It moves no sample, but ``prompt_mean`` refuses steps that cut a group.
        trainer: ``fsdp``, ``ddp`` or ``pipeline``; it is ``sync`` of the plans too.
        mfu: the share of the peak that the FLOPs are done at, above 0 to 1. Llama 3 was trained at 0.38 to 0.43
            (arXiv:2407.21783, table 4). It scales all times alike beside ``overhead``.
        overhead: seconds a micro-batch beside its FLOPs. At 0 nothing speaks against many small micro-batches: measure it,
            as the time of a micro-batch of one short sample.
        divisor: L, for the modes that take one.
        columns: as for :func:`rollpack.summarize`.
        rollout_key: as for :func:`rollpack.summarize`.
        progress: is called with 1 after each setting.
        plan_options: further arguments of :func:`rollpack.plan`, for every setting. ``cost`` is the model's FLOPs if it
            is left out.

    Returns:
        A :class:`rollpack.simulation.Simulation`. Settings that cannot be planned (a sample over the budget) are in its
        ``refused``.

    Raises:
        PlanError: an argument, or one of a list, is wrong, or no setting can be planned.
        SchemaError, DataError: as for :func:`rollpack.summarize`.
    """
    cost = _model(model)
    if trainer not in TRAINERS:
        raise PlanError(f"trainer is {trainer!r}; it has to be {', '.join(TRAINERS)}")
    mfu, overhead = number("mfu", mfu), number("overhead", overhead)
    if not 0 < mfu <= 1:
        raise PlanError(f"mfu is {mfu}; it has to be above 0, and at most 1")
    if not 0 <= overhead < math.inf:
        raise PlanError(f"overhead is {overhead}; it has to be a number of seconds of at least 0")
    rate = _peak(device) * mfu
    sizes = (_integers("dp_sizes", dp_sizes), _integers("cp_sizes", cp_sizes), _integers("budgets", budgets))
    modes = [word(mode) for mode in _listed("modes", modes)]
    settings = [Setting(*values) for values in dict.fromkeys(product(modes, *sizes))]
    options = {"cost": cost, "sync": TRAINERS[trainer], **plan_options}
    for setting in settings:
        _check(setting, divisor, options)
    steps_of, kept = plan_options.get("prompts_per_step"), plan_options.get("keep_together")
    groups = any(needs_groups(mode_of(mode), steps_of, kept) for mode in modes)
    summary = summary_of(data_or_summary, groups=groups, columns=columns, rollout_key=rollout_key)
    predictions, refused = [], {}
    for setting in settings:
        try:
            made = plan(summary, **_arguments(setting, divisor, options))
        except PlanError as error:
            refused[setting] = str(error)
        else:
            predictions.append(_predict(setting, made, cost, rate, overhead))
        if progress is not None:
            progress(1)
    if not predictions:
        first, reason = next(iter(refused.items()))
        raise PlanError(f"no setting can be planned; the first of {len(settings)}, {first}: {reason}")
    return Simulation(cost, rate, overhead, trainer, tuple(predictions), refused)


def micro_batch_seconds(
    made: Plan, cost: CostModel, flops_per_second: float, overhead: float
) -> list[npt.NDArray[np.float64]]:
    """The predicted time of every micro-batch: for each step [D, K], in seconds."""
    positions, squares = _work(made)
    linear, quadratic = (float(value) for value in cost)
    seconds = (linear * positions + quadratic * squares) / (made.settings.cp_size * flops_per_second) + overhead
    return [of_step.reshape(made.settings.dp_size, -1) for of_step in np.split(seconds, made._first_bins[1:-1])]


def rank_seconds(micro_batches: npt.NDArray[np.float64], sync: str) -> tuple[float, npt.NDArray[np.float64]]:
    """How long a step takes, and how long each dp rank waits in it.

    Args:
        micro_batches: [D, K], the time of each one.
        sync: whether ranks wait at each ``micro_batch`` or once a ``step``.
    """
    busy = micro_batches.sum(axis=1)
    step = float(micro_batches.max(axis=0).sum() if sync == "micro_batch" else busy.max())
    return step, np.maximum(step - busy, 0.0)


def _work(made: Plan) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    return _core.work(made._slice("total_length", slice(None)), made._offsets, made.settings.cut)


def _predict(setting: Setting, made: Plan, cost: CostModel, rate: float, overhead: float) -> Prediction:
    sync = made.settings.sync
    steps = [rank_seconds(of_step, sync) for of_step in micro_batch_seconds(made, cost, rate, overhead)]
    idle = sum((waited for _, waited in steps), np.zeros(made.settings.dp_size))
    positions, _ = _work(made)
    tokens = int(made._slice("total_length", slice(None)).sum())
    return Prediction(
        setting=setting,
        num_steps=len(made.steps),
        num_micro_batches=sum(step.num_micro_batches for step in made.steps),
        seconds=sum(seconds for seconds, _ in steps),
        idle_mean=float(idle.mean()),
        idle_worst=float(idle.max()),
        fill=made.fill,
        padding=1 - tokens / int(positions.sum()),
        peak_tokens=int(positions.max()) // made.settings.cp_size,
        plan_id=made.id,
    )


def _check(setting: Setting, divisor: float | None, options: Mapping[str, Any]) -> None:
    """Refuses what is wrong with any data. A budget too small for one padded token is a setting that cannot be planned."""
    bound = signature(plan).bind(None, **_arguments(setting, divisor, options) | {"oversize": "alone"})
    bound.apply_defaults()
    checked(**{field.name: bound.arguments[field.name] for field in fields(Settings)})


def _arguments(setting: Setting, divisor: float | None, options: Mapping[str, Any]) -> dict[str, Any]:
    own = divisor if takes_divisor(setting.loss_aggregation) else None
    return {**setting._asdict(), "divisor": own, **options}


def _model(model: str | CostModel) -> CostModel:
    if not isinstance(model, str):
        return cost_model(model)
    if model not in MODELS:
        raise PlanError(f"model is {model!r}; it has to be {', '.join(MODELS)} or a CostModel (CostModel.of_transformer)")
    return MODELS[model]


def _peak(device: str | float) -> float:
    if isinstance(device, str) and device not in DEVICES:
        raise PlanError(f"device is {device!r}; it has to be {', '.join(DEVICES)} or a peak in FLOP/s")
    peak = number("device", DEVICES[device] if isinstance(device, str) else device)
    if not 0 < peak < math.inf:
        raise PlanError(f"device is {peak} FLOP/s; it has to be above 0")
    return peak


def _listed(name: str, values: Any) -> list[Any]:
    if isinstance(values, str) or not isinstance(values, Iterable) or not (listed := list(values)):
        raise PlanError(f"{name} is {values!r}; it has to be a list of at least one")
    return listed


def _integers(name: str, values: Sequence[int]) -> list[int]:
    return [integer(f"one of {name}", value) for value in _listed(name, values)]
