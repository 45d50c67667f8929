"""``check_reducer`` and ``check_trainer``: hold somebody's code against the promise, and name what is wrong with it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from rollpack._arguments import integer, number
from rollpack._errors import PlanError
from rollpack._text import counted
from rollpack.packing import MicroBatch
from rollpack.testing.explanation import DETACHED, MULTIPLIED, NOT_JOINED, ZERO_BY_ZERO, Explanation, Result, agree
from rollpack.testing.probes import Target, batches, probes
from rollpack.testing.truth import Observed, Truth, check_one_process

_SUMMED: Callable[[int, int, int], float] = lambda _k, _d, _c: 1.0  # noqa: E731
_OVER_RANKS: Callable[[int, int, int], float] = lambda _k, d, c: 1.0 / (d * c)  # noqa: E731
_OVER_ALL: Callable[[int, int, int], float] = lambda k, d, c: 1.0 / (k * d * c)  # noqa: E731
#: What trainers make of the losses that are returned: by what each is multiplied before gradients are summed over ranks
#: and micro-batches, given K, D and C.
_TRAINERS = {
    "none": _SUMMED,
    "ddp": _OVER_RANKS,
    "fsdp": _OVER_RANKS,
    "accelerate": _OVER_ALL,
    "deepspeed": _OVER_ALL,
    "hf_trainer": _OVER_ALL,
    "hf_trainer_scaled": _OVER_RANKS,
    # Multiplied by the number of processes, then averaged over them.
    "hf_trainer_num_items": _SUMMED,
    "megatron": _OVER_ALL,
    # The schedule multiplies by C.
    "megatron_legacy": lambda k, d, c: c / (k * d * c),
    # Divided by the sum of the counts that are returned.
    "megatron_per_token": _SUMMED,
}


class Failure(NamedTuple):
    """One thing that changes the loss and must not, or that is reduced wrong.

    Attributes:
        invariance: what was varied.
        factor: a token's weight over what it should be, at the token that is furthest off: 2.0 is twice too much, 0.0
            not at all, infinity where it should not count. Of the value, where only that is wrong; NaN where there is no
            number.
        cause: the usual mistake that does exactly this, or several joined by " + ".
        where: the batch and the cut in which it showed.
    """

    invariance: str
    factor: float
    cause: str
    where: str

    def __str__(self) -> str:
        return f"{self.invariance:<34} x {self.factor:<10.4g} {self.cause}  ({self.where})"


@dataclass(frozen=True)
class Report:
    """What was checked, and what did not hold.

    Attributes:
        checked: the invariances, in order.
        failures: one for each invariance that does not hold: that of its first cut that shows it.
    """

    checked: tuple[str, ...]
    failures: tuple[Failure, ...]

    @property
    def ok(self) -> bool:
        """Whether all held."""
        return not self.failures

    @property
    def causes(self) -> tuple[str, ...]:
        """The mistakes that explain the failures."""
        return tuple(dict.fromkeys(itertools.chain.from_iterable(f.cause.split(" + ") for f in self.failures)))

    def __repr__(self) -> str:
        head = str(self).splitlines()[0]
        return f"Report({head.partition(':')[0] if self.ok else head})"

    def __str__(self) -> str:
        if self.ok:
            return f"all {len(self.checked)} invariances hold: {', '.join(self.checked)}"
        head = f"{len(self.failures)} of {len(self.checked)} invariances fail: {', '.join(self.causes)}"
        return "\n".join([head, *(f"  {failure}" for failure in self.failures)])


class TrainingStep:
    """One optimizer step of all ranks, for the training step that is checked.

    Attributes:
        ranks: the micro-batches of each rank, as torch tensors on the CPU, by dp rank, then cp rank.
    """

    def __init__(self, ranks: list[list[MicroBatch[Any]]], truth: Truth, poison: float | None) -> None:
        self.ranks = [[micro_batch.to("cpu") for micro_batch in rank] for rank in ranks]
        self._tokens = {_place(m): torch.from_numpy(truth.tokens(m)) for rank in ranks for m in rank}
        self._losses = torch.from_numpy(truth.losses)
        self._poison = poison

    def __repr__(self) -> str:
        first = self.ranks[0][0]
        micro_batches = counted(len(self.ranks[0]), "micro-batch")
        return f"TrainingStep({first.dp_size} x {first.cp_size} dp x cp ranks, {micro_batches} on each)"

    def model(self) -> Model:
        """A new copy of the model, for a rank to run forward and backward."""
        return Model(self._losses, self._tokens, self._poison)


class Model(torch.nn.Module):
    """A model whose parameter is the loss of each token: its gradient says what each token weighs.

    ``model(micro_batch)`` is [T], one loss per position, of the token after it.
    """

    def __init__(self, losses: torch.Tensor, tokens: dict[tuple[int, ...], torch.Tensor], poison: float | None) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(losses.clone())
        self._tokens, self._poison = tokens, poison

    def forward(self, micro_batch: MicroBatch[torch.Tensor]) -> torch.Tensor:
        """[T] token losses."""
        losses = self.weight[self._tokens[_place(micro_batch)]]
        return losses if self._poison is None else torch.where(micro_batch.loss_mask, losses, self._poison)


def check_reducer(
    reducer: Callable[[torch.Tensor, MicroBatch[torch.Tensor]], Any],
    *,
    loss_aggregation: str = "sample_mean",
    divisor: float | None = None,
    empty: str = "count",
    backend: str = "none",
    group_size: int = 2,
    tolerance: float = 1e-6,
) -> Report:
    """Cut batches in many ways, reduce them, and compare what every token weighs with the float64 reference.

    ``reducer(token_loss, micro_batch)`` is called for each micro-batch of each rank, and returns the loss that is
    back-propagated there. ``token_loss`` is float64 [T], one loss per position of the micro-batch, of the token after it,
    and whatever is wanted at positions where ``micro_batch.loss_mask`` is False. ``micro_batch`` is a
    :class:`rollpack.MicroBatch` of torch tensors; its ``sample_columns`` hold ``rollout_id``, ``group_index`` and
    ``response_length`` of each sample. :func:`padded_rows` makes rows of it, if that is what the reducer takes.

    Args:
        reducer: the reducer, or a function that calls it.
        loss_aggregation: what it is meant to compute.
        divisor: L, for ``constant``.
        empty: whether it is meant to count rollouts and groups without a trained token.
        backend: what the trainer makes of the losses, by the names of :func:`rollpack.torch.gradient_factor`: ``none`` adds
            up gradients over micro-batches and ranks, ``ddp`` and ``fsdp`` average them over ranks, ``accelerate``,
            ``deepspeed`` and ``megatron`` also divide by the number of micro-batches; under ``megatron_per_token`` the
            reducer returns a loss and a count, and their sums are divided.
        group_size: rollouts per prompt group in the batches where groups are even, for reducers that assume it.
        tolerance: the largest deviation of a token's weight, over the largest weight, that counts as agreement.

    Raises:
        PlanError: no such mode, backend or divisor, the reducer is no function, or several processes run.
        TypeError: the reducer returns something else on a plain batch.
        Exception: what the reducer raises on a plain batch that is not cut. (Later ones are failures in the report.)
    """
    _callable("reducer", reducer)
    if backend not in _TRAINERS:
        raise PlanError(f"backend is {backend!r}; it has to be one of {', '.join(_TRAINERS)}")

    def run(ranks: list[list[MicroBatch[Any]]], truth: Truth, poison: float | None) -> Observed:
        observed, counted = Observed(len(truth.losses) - 1), 0.0
        for micro_batch in itertools.chain.from_iterable(ranks):
            tokens = truth.tokens(micro_batch)
            values = truth.losses[tokens]
            values = values if poison is None else np.where(micro_batch.loss_mask, values, poison)
            token_loss = torch.from_numpy(values).requires_grad_()
            # As in a trainer it comes out of a model: what is no leaf may be changed in place.
            loss = returned = reducer(token_loss.clone(), micro_batch.to("cpu"))
            if backend == "megatron_per_token":
                if not (isinstance(returned, tuple) and len(returned) == 2):
                    raise TypeError(f"the reducer returned {returned!r}; it has to be a loss and a count")
                loss = returned[0]
                counted += float(returned[1])
            if not (isinstance(loss, torch.Tensor) and loss.numel() == 1):
                what = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else repr(loss)
                raise TypeError(f"the reducer returned {what}; the loss has to be a 0-d tensor")
            gradient = None
            if loss.requires_grad:
                (gradient,) = torch.autograd.grad(loss, token_loss, allow_unused=True)
            if gradient is None:  # a leaf of its own has a gradient too, and DDP waits for those of the model
                raise _NotJoinedError(DETACHED if micro_batch.loss_mask.any() else NOT_JOINED)
            scale = _TRAINERS[backend](micro_batch.num_micro_batches, micro_batch.dp_size, micro_batch.cp_size)
            observed.add(loss.item() * scale, gradient * scale, tokens)
        if counted > 0:  # Megatron divides by nothing else
            observed.loss, observed.gradient = observed.loss / counted, observed.gradient / counted
        return observed

    return _check(run, Target(loss_aggregation, divisor, empty), group_size, tolerance)


def check_trainer(
    train: Callable[[TrainingStep], Any],
    *,
    loss_aggregation: str = "sample_mean",
    divisor: float | None = None,
    empty: str = "count",
    group_size: int = 2,
    tolerance: float = 1e-6,
) -> Report:
    """As :func:`check_reducer`, for a whole training step: it also accumulates gradients and averages them over ranks.

    ``train(step)`` is called once per cut. It runs the micro-batches of every rank, each rank with a ``step.model()`` of
    its own, and returns the gradient of ``model.weight`` that the optimizer would get, or a pair of the loss that it would
    log and that gradient::

        def train(step):
            gradients = []
            for micro_batches in step.ranks:
                model = step.model()
                for micro_batch in micro_batches:
                    my_loss(model(micro_batch), micro_batch).backward()
                gradients.append(model.weight.grad)
            return sum(gradients) / len(gradients)

    Args:
        train: the training step.
        loss_aggregation: as for :func:`check_reducer`, and so are the rest.
        divisor: see there.
        empty: see there.
        group_size: see there.
        tolerance: see there.

    Raises:
        PlanError: no such mode or divisor, the training step is no function, or several processes run.
        TypeError: the training step returns something else on a plain batch.
        Exception: what the training step raises on a plain batch that is not cut.
    """
    _callable("train", train)

    def run(ranks: list[list[MicroBatch[Any]]], truth: Truth, poison: float | None) -> Observed:
        result = train(TrainingStep(ranks, truth, poison))
        loss, gradient = result if isinstance(result, tuple) else (None, result)
        if not isinstance(gradient, torch.Tensor) or gradient.shape != (len(truth.losses),):
            raise TypeError(f"the training step returned {gradient!r}; it has to be the gradient of model.weight")
        observed = Observed(len(truth.losses) - 1)
        observed.gradient[:] = gradient.detach().double().numpy()
        observed.loss = float(observed.gradient @ truth.losses) if loss is None else float(loss)
        return observed

    return _check(run, Target(loss_aggregation, divisor, empty), group_size, tolerance)


def padded_rows(values: torch.Tensor, micro_batch: MicroBatch[torch.Tensor]) -> torch.Tensor:
    """[S, W] from [T]: a row per sample, as long as the longest, filled up with 0 (False), as most trainers have them.

    Padding between sequences is left out; under context parallelism each row is what this rank holds of its sample.
    """
    parts = [values[micro_batch.segment_ids == sample] for sample in range(len(micro_batch.rows))]
    return torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)


class _NotJoinedError(Exception):
    """The loss is a constant; says where."""


def _callable(name: str, value: object) -> None:
    if not callable(value):
        raise PlanError(f"{name} is {value!r}; it has to be a function")


def _place(micro_batch: MicroBatch[Any]) -> tuple[int, ...]:
    return micro_batch.dp_rank, micro_batch.cp_rank, micro_batch.index


_Run = Callable[[list[list[MicroBatch[Any]]], Truth, float | None], Observed]


def _check(run: _Run, target: Target, group_size: int, tolerance: float) -> Report:
    check_one_process()
    group_size = integer("group_size", group_size, least=1)
    if not 0.0 < number("tolerance", tolerance) < 1.0:
        raise PlanError(f"tolerance is {tolerance}; it has to be above 0 and below 1, as 1e-6")
    results = _results(run, target, group_size, tolerance)
    failing = [result for result in results if _fails(result, tolerance)]
    explain = Explanation(results, failing, target, group_size, tolerance)
    failures: dict[str, Failure] = {}
    for result in failing:
        invariance = result.probe.invariance
        if invariance not in failures:
            failures[invariance] = Failure(invariance, _factor(result, tolerance), explain(result), str(result.probe))
    return Report(tuple(dict.fromkeys(result.probe.invariance for result in results)), tuple(failures.values()))


def _results(run: _Run, target: Target, group_size: int, tolerance: float) -> list[Result]:
    results: list[Result] = []
    uncut: dict[str, Result] = {}
    healthy: dict[tuple[Any, ...], Result] = {}
    made = batches(target, group_size)
    for probe in probes():
        batch = made[probe.batch]
        truth = batch.truth
        ranks = batch.ranks(probe)
        result = Result(probe, target, batch, ranks)
        cut = probe.batch, probe.cut, probe.padding
        base = uncut.get(probe.against or "") if probe.poison is None else healthy[cut]
        # What it is compared with is of no use if it is no number itself.
        if base is not None and base.trouble is None:
            result.base = base
        try:
            observed = run(ranks, truth, probe.poison)
        except _NotJoinedError as error:
            result.trouble = str(error)
        except Exception as error:
            if not results:
                raise
            result.trouble = f"raises {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        else:
            result.weights = batch.unshuffled(observed.gradient)
            if math.isfinite(observed.loss) and np.isfinite(observed.gradient).all():
                result.value = _value(observed, truth, tolerance)
            else:
                result.trouble = ZERO_BY_ZERO if probe.poison is None else MULTIPLIED
        if probe.poison is not None and base is not None and base.trouble is not None:
            result.trouble = base.trouble
        results.append(result)
        uncut.setdefault(probe.batch, result)
        healthy.setdefault(cut, result)
    return results


def _value(observed: Observed, truth: Truth, tolerance: float) -> float:
    value, scale = observed.gradient @ truth.losses, np.abs(observed.gradient) @ np.abs(truth.losses)
    if abs(observed.loss - value) <= tolerance * (scale or 1.0):
        return 1.0
    return float(observed.loss / value) if value else math.inf


def _fails(result: Result, tolerance: float) -> bool:
    wrong = result.trouble is not None or result.value != 1.0
    return wrong or not agree(result.weights, result.wanted, tolerance)


def _factor(result: Result, tolerance: float) -> float:
    """Found over wanted at the token where they are furthest apart, or of the value if that alone is wrong."""
    found, wanted = result.weights, result.wanted
    if result.trouble is not None:
        return math.nan
    if result.value != 1.0 and agree(found, wanted, tolerance):
        return result.value
    largest = float(np.abs(wanted).max()) or 1.0
    counts = np.abs(wanted) > 1e-9 * largest
    if np.abs(found[~counts]).max(initial=0.0) > 1e-9 * largest:
        return math.inf
    ratios = found[counts] / wanted[counts]
    if not len(ratios):
        return math.nan
    distance = np.abs(np.log(np.abs(ratios), out=np.full_like(ratios, np.inf), where=ratios != 0))
    return float(ratios[np.argmax(distance)])
