"""Batches in which one thing at a time is hard, and the cuts that somebody's reducer is held against."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rollpack.names import LAYOUTS
from rollpack.packing import MicroBatch, Packer
from rollpack.summary import Summary, summarize
from rollpack.testing.cuts import Cut
from rollpack.testing.rollouts import Rollouts, make_rollouts
from rollpack.testing.truth import Floats, Truth, check_mode

#: What each sample carries along, beside what is in every micro-batch.
SAMPLE_COLUMNS = ("rollout_id", "group_index", "response_length")
_WHOLE, _SOME = 100_000, 24


@dataclass(frozen=True)
class Target:
    """What a reducer is meant to compute, as the arguments of :func:`rollpack.plan` say it."""

    loss_aggregation: str
    divisor: float | None
    empty: str

    def __post_init__(self) -> None:
        check_mode(self.loss_aggregation)


class Probe(NamedTuple):
    """One thing that must not change the loss, or must be reduced right.

    Attributes:
        invariance: what is varied.
        batch: the batch, by name.
        cut: how it is cut.
        padding: further arguments of the plan.
        poison: what stands at positions that are not trained; None for an ordinary loss.
        against: the batch whose uncut probe it has to agree with; None for the reference. A poisoned probe has to agree
            with the same cut without poison.
    """

    invariance: str
    batch: str
    cut: Cut
    padding: tuple[tuple[str, int], ...] = ()
    poison: float | None = None
    against: str | None = None

    def __str__(self) -> str:
        padded = "".join(f", {name} {value}" for name, value in self.padding)
        poisoned = "" if self.poison is None else f", {self.poison} where masked"
        return f"{self.batch} batch, {self.cut}{padded}{poisoned}"


def probes() -> Iterator[Probe]:
    """All probes. The first of each batch is uncut, and compared with the reference."""
    uncut = Cut(1, 1, "zigzag", _WHOLE)
    for invariance, batch in (
        ("plain batch", "plain"),
        ("fan-out", "fan-out"),
        ("uneven groups", "uneven"),
        ("empty rollouts", "empty"),
        ("untrained tokens in the response", "masked"),
        ("all of these", "hard"),
    ):
        yield Probe(invariance, batch, uncut)
    together = [Cut(2, 2, "zigzag", _SOME), Cut(3, 2, "contiguous", _SOME)]
    for invariance, chosen in (
        ("micro-batches", [Cut(1, 1, "zigzag", 2 * _SOME), Cut(1, 1, "zigzag", _SOME)]),
        ("data-parallel ranks", [Cut(d, 1, "zigzag", _WHOLE) for d in (2, 3)]),
        ("context-parallel ranks", [Cut(1, c, layout, _WHOLE) for c in (2, 3) for layout in LAYOUTS]),
        ("all cuts together", together),
    ):
        for cut in chosen:
            yield Probe(invariance, "hard", cut, against="hard")
    yield Probe("order of rows", "shuffled", uncut, against="hard")
    yield Probe("padding", "hard", uncut, (("pad_to_multiple_of", 16),), against="hard")
    yield Probe("padding", "hard", uncut, (("pad_micro_batch_to_multiple_of", 512),), against="hard")
    ranks = Cut(13, 1, "zigzag", _WHOLE)
    yield Probe("empty ranks", "small", uncut)
    yield Probe("empty ranks", "small", ranks, against="small")
    for cut in (uncut, together[0]):
        yield Probe("a step without a trained token", "untrained", cut)
    yield Probe("long rollouts", "made up", Cut(2, 2, "zigzag", 1024))
    for poison, (batch, cut) in itertools.product((float("nan"), float("inf")), (("hard", uncut), ("small", ranks))):
        yield Probe("masked values", batch, cut, poison=poison)
    yield Probe("masked values", "hard", together[0], poison=float("nan"))


class Batch:
    """A batch, with what the reference makes of it.

    Args:
        table: the rollouts.
        target: what a reducer is meant to compute.
        group_size: rollouts per prompt group where groups are even.
        order: [rows], if it is another batch with its rows in this order.
    """

    def __init__(self, table: pa.Table, target: Target, group_size: int, order: npt.NDArray[np.int64] | None = None) -> None:
        self.table = table
        self.target = target
        self.group_size = group_size
        self.truth = Truth(Rollouts.read(table), target.divisor, target.empty)
        self._order = order

    @cached_property
    def _summary(self) -> Summary:
        return summarize(self.table, groups=True)

    @cached_property
    def _packer(self) -> Packer:
        return Packer(self.table, self._summary.request.columns, sample_columns=SAMPLE_COLUMNS)

    def ranks(self, probe: Probe) -> list[list[MicroBatch[Any]]]:
        """The micro-batches of each rank, by dp rank, then cp rank."""
        plan = probe.cut.plan(
            self._summary,
            loss_aggregation=self.target.loss_aggregation,
            divisor=self.target.divisor,
            empty=self.target.empty,
            **dict(probe.padding),
        )
        ranks = itertools.product(range(probe.cut.dp_size), range(probe.cut.cp_size))
        return [list(self._packer.rank(plan, 0, d, c)) for d, c in ranks]

    def unshuffled(self, by_token: Floats) -> Floats:
        """[n + 1] by token, in the order of the batch that this one was shuffled from."""
        if self._order is None:
            return by_token
        parts = self.truth.rollouts.split(by_token[:-1])
        back = np.argsort(self._order)
        return np.concatenate([*(parts[i] for i in back), by_token[-1:]])


def batches(target: Target, group_size: int) -> dict[str, Batch]:
    """The batches by name. Groups are of ``group_size`` rollouts where they are even."""
    even, uneven = [group_size] * 4, [2 * group_size, 1, 2 * group_size + 1, group_size]
    hard, small = _table(uneven, fan_out=True, empty=True, masked=True), _table([2, 3], empty=True)
    nothing = pa.array([[0] * length for length in small["response_length"].to_pylist()])
    order = np.random.default_rng(5).permutation(hard.num_rows)
    tables = {
        "plain": _table(even),
        "fan-out": _table(even, fan_out=True),
        "uneven": _table(uneven),
        "empty": _table(even, empty=True),
        "masked": _table(even, masked=True),
        "hard": hard,
        "small": small,
        "untrained": small.set_column(small.column_names.index("loss_mask"), "loss_mask", nothing),
        "made up": make_rollouts(seed=3, prompts=5, longest=256),
    }
    made = {name: Batch(table, target, group_size) for name, table in tables.items()}
    return made | {"shuffled": Batch(hard.take(order), target, group_size, order)}


def _table(groups: list[int], *, fan_out: bool = False, empty: bool = False, masked: bool = False) -> pa.Table:
    """Groups of so many rollouts, of samples of 4 to 16 tokens.

    Args:
        groups: rollouts of each prompt group.
        fan_out: rollouts have one to three samples, else one.
        empty: some rollouts, and a group of two, have no trained token; with ``fan_out`` also one sample of a rollout.
        masked: some tokens in the middle of responses are not trained.
    """
    random = np.random.default_rng(7)
    rows: list[tuple[int, int, int, list[int]]] = []
    rollout = 0
    for group, size in enumerate([*groups, 2] if empty else groups):
        for member in range(size):
            samples = 1 + rollout % 3 if fan_out else 1
            for sample in range(samples):
                mask = np.ones(int(random.integers(2, 11)), dtype=np.int64)
                if masked:
                    mask[1 : 1 + int(random.integers(0, len(mask) - 1))] = 0
                nothing = group == len(groups) or (member == 1 and group % 2 == 0) or (samples > 1 and sample == 1)
                if empty and nothing:
                    mask[:] = 0
                rows.append((group, rollout, int(random.integers(2, 7)), mask.tolist()))
            rollout += 1
    return pa.table(
        {
            "group_index": [group for group, *_ in rows],
            "rollout_id": [rollout for _, rollout, *_ in rows],
            "tokens": [[1] * (prompt + len(mask)) for *_, prompt, mask in rows],
            "response_length": [len(mask) for *_, mask in rows],
            "loss_mask": [mask for *_, mask in rows],
        }
    )
