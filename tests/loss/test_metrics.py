"""Metrics: what each normaliser means, that no cut changes it, and that one collective gathers all."""

import dataclasses
import json
import math
import subprocess
import sys
import time
from itertools import product
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from examples import EXAMPLES, MODES, Example

import rollpack
from rollpack.torch import LossReducer, Metrics

DECLARED = {
    "loss": "prompt_mean",
    "kl": "sample_mean",
    "entropy": "token_mean",
    "clipped": "count",
    "tokens": "none",
    "ratio_max": "max",
    "ratio_min": "min",
    "on_rank_0": "none",
    "never": "sample_mean",
    "never_max": "max",
}
STEPS = 2
TWO_STEPS = Example(
    losses=EXAMPLES["four_samples"].losses + EXAMPLES["all_apart"].losses,
    masks=EXAMPLES["four_samples"].masks + EXAMPLES["all_apart"].masks,
    rollouts=list(range(8)),
    groups=[0, 0, 1, 1, 2, 2, 3, 3],
    expected={},
)
#: The trained losses are 4 1 2 3 10 20 1 2 3 (sum 46) and 10 2 2 2 4 4 1 1 1 1 1 1 (sum 30).
EXPECTED = {
    "loss": (97 / 20 + 23 / 8) / 2,
    "kl": (23 / 4 + 17 / 4) / 2,
    "entropy": (46 / 9 + 5 / 2) / 2,
    "clipped": 6 / 21,  # above 3: 4, 10, 20; 10, 4, 4
    "tokens": 21 / 2,
    "ratio_max": 20.0,
    "ratio_min": 1.0,
    "on_rank_0": 1.5,
    "never": 0.0,
}


def fill(metrics, table, ranks, **arguments):
    """Add every micro-batch of these (dp_rank, cp_rank) in both steps."""
    plan = rollpack.plan(table, loss_aggregation="prompt_mean", prompts_per_step=2, placeholders=True, **arguments)
    assert len(plan.steps) == STEPS
    for (dp_rank, cp_rank), step in product(ranks, range(STEPS)):
        for packed in rollpack.pack(table, plan, step=step, dp_rank=dp_rank, cp_rank=cp_rank, token_columns=["loss"]):
            micro_batch = packed.to("cpu")
            loss = micro_batch.columns["loss"].double()
            x = torch.where(micro_batch.loss_mask, loss, math.nan).requires_grad_()
            metrics.add(micro_batch, {"loss": x, "ratio_max": x, "ratio_min": x})
            metrics.add(micro_batch, {"kl": x.detach(), "entropy": x, "clipped": loss > 3, "tokens": torch.ones(len(loss))})
            if (dp_rank, cp_rank, micro_batch.index) == (0, 0, 0):
                metrics.add(micro_batch, {"on_rank_0": torch.tensor(1.0 + step)})


def every(dp_size, cp_size):
    return list(product(range(dp_size), range(cp_size)))


def add_all(metrics, example, mode="sample_mean", value=lambda loss: loss, **arguments):
    arguments = {"max_tokens_per_gpu": 100, "placeholders": True} | arguments
    divisor = example.divisor if mode == "constant" else None
    plan = rollpack.plan(example.table(), loss_aggregation=mode, divisor=divisor, **arguments)
    for dp_rank, cp_rank in every(plan.settings.dp_size, plan.settings.cp_size):
        for packed in rollpack.pack(example.table(), plan, dp_rank=dp_rank, cp_rank=cp_rank, token_columns=["loss"]):
            metrics.add(packed, {"x": value(torch.from_numpy(packed.columns["loss"]))})


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cut", [{}, {"micro_batch_size": 1, "max_tokens_per_gpu": None}, {"dp_size": 4, "cp_size": 2}])
def test_a_mode_logs_the_step_loss(name, mode, cut):
    example = EXAMPLES[name]
    metrics = Metrics({"x": mode})
    add_all(metrics, example, mode, **cut)
    assert metrics.log() == {"x": pytest.approx(float(example.expected[mode]), rel=1e-14)}


def test_the_other_modes_keep_their_meaning_when_the_mode_of_the_loss_changes():
    example = EXAMPLES["all_apart"]
    for mode in MODES:
        metrics = Metrics({"x": "sample_mean"})
        add_all(metrics, example, mode, dp_size=2)
        assert metrics.log()["x"] == pytest.approx(17 / 4, rel=1e-14)


@pytest.mark.parametrize(("normaliser", "expected"), [("count", 30 / 12), ("none", 30.0), ("min", 1.0), ("max", 10.0)])
def test_normalisers_by_hand(normaliser, expected):
    metrics = Metrics({"x": normaliser})
    add_all(metrics, EXAMPLES["all_apart"], dp_size=2, cp_size=2, max_tokens_per_gpu=4)
    assert metrics.log() == {"x": pytest.approx(expected, rel=1e-15)}


LAYOUTS = [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (1, 4), (4, 2)]


@pytest.mark.parametrize(("dp_size", "cp_size"), LAYOUTS)
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("budget", [4, 8, 100])
def test_no_cut_changes_what_is_logged(dp_size, cp_size, layout, budget):
    """All ranks in one process, two steps in the log."""
    metrics = Metrics(DECLARED)
    sizes = {"dp_size": dp_size, "cp_size": cp_size, "layout": layout, "oversize": "alone"}
    fill(metrics, TWO_STEPS.table(), every(dp_size, cp_size), max_tokens_per_gpu=budget, **sizes)
    logged = metrics.log()
    assert list(logged) == list(EXPECTED)
    assert logged == pytest.approx(EXPECTED, rel=1e-14)


@pytest.mark.parametrize(("dp_size", "cp_size"), LAYOUTS)
def test_ranks_that_gather_log_the_same(dp_size, cp_size, monkeypatch):
    """A Metrics per rank, and a collective that is only counted: one per log."""
    parts, calls = [], []
    of_rank = []
    for rank in every(dp_size, cp_size):
        metrics = Metrics(DECLARED)
        fill(metrics, TWO_STEPS.table(), [rank], dp_size=dp_size, cp_size=cp_size, max_tokens_per_gpu=8)
        of_rank.append(metrics)
        parts.append(metrics._packed())

    def gather(out, packed, group=None):
        calls.append(packed.dtype)
        out.copy_(torch.cat(parts))

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_backend", lambda _: "gloo")
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda _: len(parts))
    monkeypatch.setattr(torch.distributed, "all_gather_into_tensor", gather)
    logs = [metrics.log() for metrics in of_rank]
    assert all(log == logs[0] for log in logs)  # to the last bit
    assert logs[0] == pytest.approx(EXPECTED, rel=1e-14)
    assert calls == [torch.float64] * len(parts)


def run_ranks(command, world, tmp_path, timeout=240.0):
    """Run the command once a rank. Where one fails, the others would wait for it: they are ended, and its error is shown."""
    errors = [tmp_path / f"stderr.{rank}" for rank in range(world)]
    processes = []
    for rank, error in enumerate(errors):
        with error.open("w") as stderr:
            processes.append(subprocess.Popen([str(rank) if c == "RANK" else c for c in command], stderr=stderr))
    end = time.monotonic() + timeout
    try:
        while any(process.poll() is None for process in processes) and time.monotonic() < end:
            if any(process.poll() for process in processes):
                break
            time.sleep(0.05)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0] * world, [error.read_text() for error in errors]


@pytest.mark.parametrize("world", [2, 4])
def test_real_processes(world, tmp_path):
    pq.write_table(TWO_STEPS.table(), tmp_path / "table.parquet")
    worker = Path(__file__).with_name("metrics_worker.py")
    paths = map(str, [tmp_path / "store", tmp_path / "table.parquet", tmp_path / "out"])
    run_ranks([sys.executable, str(worker), "RANK", str(world), *paths], world, tmp_path)
    ranks = [json.loads((tmp_path / f"out.{rank}").read_text()) for rank in range(world)]
    assert all(rank == ranks[0] for rank in ranks)
    logged = ranks[0]["logged"]
    assert "declared different metrics" in logged.pop("error")
    assert "declared different metrics" in logged.pop("a name more")
    assert "declared different metrics" in logged.pop("many names more")
    assert logged.pop("many names") == {f"{i:02}": 100.0 * (world - 1) + i for i in range(70)}
    assert "of different plans or steps: plan alike on all of them" in logged.pop("another plan")
    assert f"and the {world} processes that were gathered added micro-batches of 1: call add" in logged.pop("one rank")
    assert "processes 1 did not add each of their micro-batches" in logged.pop("a micro-batch less")
    assert "processes 1 did not add each of their micro-batches in each step, or pass" in logged.pop("an epoch less")
    assert f"for 1 dp x cp ranks, and the {world} processes that were gathered added micro-batches of {world}" in logged.pop(
        "group"
    )
    layouts = [f"{world // c}x{c}" for c in (1, 2, 4) if c <= world]
    assert list(logged) == [*layouts, "of a group", "of a pipeline"]
    for values in logged.values():
        assert values == pytest.approx(EXPECTED, rel=1e-14)
    full = 7 + 2 * 64  # room for 64 names
    # One for each call of log().
    calls = ranks[0]["calls"]
    assert [n for n in calls if n != full] == [2 * (70 - 64)]  # the second of 70 names
    assert len(calls) - 1 == 2 * len(layouts) + 11


def batch(**arguments):
    table = EXAMPLES["four_samples"].table()
    plan = rollpack.plan(table, **({"max_tokens_per_gpu": 100} | arguments))
    return next(iter(rollpack.pack(table, plan, token_columns=["loss"])))


def test_adding_never_waits_for_the_device():
    """A tensor on "meta" has no value to wait for: whoever asks for one is told off."""
    micro_batch = batch(loss_aggregation="prompt_mean").to("meta")
    x = torch.ones(len(micro_batch.tokens), device="meta")
    metrics = Metrics({name: name for name in ("sample_mean", "prompt_mean", "token_mean", "count", "none", "min", "max")})
    for _ in range(2):
        metrics.add(micro_batch, dict.fromkeys(metrics._normalisers, x), loss_mask=x > 0)
        metrics.add(micro_batch, {"max": x.sum(), "none": x.sum(), "min": 3.0})
    assert {value.device.type for value in metrics._values.values()} == {"meta"}
    with pytest.raises(RuntimeError, match="meta"):
        metrics.log()


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_what_is_masked_touches_nothing(poison):
    micro_batch = batch(loss_aggregation="prompt_mean", pad_to_multiple_of=4)
    mask = torch.from_numpy(micro_batch.loss_mask)
    logs = []
    for masked in (0.0, poison):
        metrics = Metrics({n: n for n in ("sample_mean", "prompt_mean", "token_mean", "count", "none", "min", "max")})
        values = torch.where(mask, torch.from_numpy(micro_batch.columns["loss"]), masked)
        metrics.add(micro_batch, dict.fromkeys(metrics._normalisers, values))
        logs.append(metrics.log())
    assert logs[0] == logs[1]
    assert logs[0]["max"] == 20.0


def test_a_nan_of_a_trained_token_is_logged():
    micro_batch = batch()
    metrics = Metrics({"x": "sample_mean", "y": "max", "z": "min"})
    metrics.add(micro_batch, dict.fromkeys("xyz", torch.full((len(micro_batch.tokens),), math.nan)))
    metrics.add(batch(), dict.fromkeys("xyz", torch.ones(len(micro_batch.tokens))))
    assert all(math.isnan(value) for value in metrics.log().values())


def test_where_nothing_was_added_a_sum_is_zero_and_the_rest_is_left_out():
    declared = {"a": "sample_mean", "b": "count", "c": "none", "d": "min", "e": "max", "f": "token_mean"}
    metrics = Metrics(declared)
    assert metrics.log() == {"a": 0.0, "c": 0.0, "f": 0.0}
    table = pa.table({"tokens": [[1, 2], [3, 4, 5]], "loss_mask": [[0], [0, 0]]})
    plan = rollpack.plan(table, max_tokens_per_gpu=100)
    for micro_batch in rollpack.pack(table, plan):
        metrics.add(micro_batch, dict.fromkeys(declared, torch.ones(5)))
    assert metrics.log() == {"a": 0.0, "c": 0.0, "f": 0.0}


def test_a_log_begins_anew():
    metrics = Metrics({"x": "sample_mean"})
    for factor in (2, 1):
        add_all(metrics, EXAMPLES["all_apart"], value=lambda loss, factor=factor: factor * loss)
        assert metrics.log() == {"x": factor * 17 / 4}
    assert metrics.log() == {"x": 0.0}


def test_epochs_over_one_plan_are_averaged_too():
    metrics = Metrics({"x": "sample_mean", "y": "none", "z": "count"})
    for epoch in range(3):
        micro_batch = batch()
        x = torch.from_numpy(micro_batch.columns["loss"]) * (1 + epoch)
        metrics.add(micro_batch, {"x": x})
        metrics.add(micro_batch, {"y": x, "z": x})
    assert metrics.log() == pytest.approx({"x": 2 * 23 / 4, "y": 2 * 46, "z": 2 * 46 / 9})


def test_one_number_stands_for_every_trained_token_and_for_itself_in_a_sum():
    metrics = Metrics({"a": "sample_mean", "b": "count", "c": "none", "d": "max", "e": "min"})
    micro_batch = batch()
    metrics.add(micro_batch, {"a": torch.tensor(2.0), "b": 3, "c": 4.5, "d": torch.tensor(-1), "e": 7.0})
    assert metrics.log() == pytest.approx({"a": 2.0, "b": 3.0, "c": 4.5, "d": -1.0, "e": 7.0})


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_a_logged_loss_takes_no_factor_and_shares_nothing(backend):
    """Megatron divides the returned loss in place: what was added before is not touched."""
    micro_batch = batch()
    token_loss = torch.from_numpy(micro_batch.columns["loss"]).double().requires_grad_()
    metrics = Metrics({"loss": "sample_mean", "partial": "none"})
    partial = LossReducer(backend="none")(token_loss, micro_batch)
    loss = LossReducer(backend=backend)(token_loss, micro_batch)
    metrics.add(micro_batch, {"loss": token_loss, "partial": partial.detach()})
    partial.detach().div_(1000)
    with torch.no_grad():
        token_loss.mul_(0)
    assert metrics.log() == pytest.approx({"loss": 5.75, "partial": 5.75})
    assert loss.requires_grad


def test_gradients_do_not_flow():
    micro_batch = batch()
    token_loss = torch.ones(len(micro_batch.tokens), requires_grad=True)
    metrics = Metrics({"a": "sample_mean", "b": "max", "c": "count", "d": "none"})
    metrics.add(micro_batch, dict.fromkeys("abcd", token_loss))
    assert not any(value.requires_grad for value in metrics._values.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int64, torch.bool])
def test_any_real_dtype(dtype):
    micro_batch = batch()
    metrics = Metrics({"a": "sample_mean", "b": "none"})
    metrics.add(micro_batch, dict.fromkeys("ab", torch.ones(len(micro_batch.tokens), dtype=dtype)))
    assert metrics.log() == {"a": pytest.approx(1.0, rel=1e-15), "b": 9.0}


def test_a_changed_mask_takes_tokens_out_and_keeps_the_denominators():
    micro_batch = batch()
    x = torch.from_numpy(micro_batch.columns["loss"])
    metrics = Metrics({"a": "sample_mean", "b": "count", "c": "max"})
    metrics.add(micro_batch, dict.fromkeys("abc", x), loss_mask=torch.from_numpy(micro_batch.loss_mask) & (x != 20))
    assert metrics.log() == pytest.approx({"a": (4 + 2 + 10 / 2 + 2) / 4, "b": 26 / 8, "c": 10.0})


def test_wrong_use_is_told_and_changes_nothing():
    with pytest.raises(rollpack.RollpackError, match="metric 'kl' has normaliser 'mean', none of sample_mean"):
        Metrics({"kl": "mean"})
    micro_batch = batch()
    good = torch.ones(len(micro_batch.tokens))
    metrics = Metrics({"kl": "sample_mean", "p": "prompt_mean"})
    with pytest.raises(rollpack.RollpackError, match=r"metric 'k1' was not declared; those that were are \['kl', 'p'\]"):
        metrics.add(micro_batch, {"kl": good, "k1": good})
    for wrong in (good[:-1], good[None], good.to(torch.complex64)):
        with pytest.raises(rollpack.RollpackError, match=r"metric 'kl' is .* of shape \[18\]"):
            metrics.add(micro_batch, {"kl": wrong})
    with pytest.raises(rollpack.RollpackError, match="^loss_mask is torch.float32"):
        metrics.add(micro_batch, {"kl": good}, loss_mask=good)
    with pytest.raises(rollpack.PlanError, match="prompt_mean"):
        metrics.add(micro_batch, {"kl": good, "p": good})
    metrics.add(micro_batch, {"kl": good})
    with pytest.raises(rollpack.PlanError, match="micro-batches for 1 rank, and this one is for 2: log first"):
        metrics.add(batch(dp_size=2), {"kl": good})
    assert metrics.log() == {"kl": pytest.approx(1.0), "p": 0.0}


def test_a_rank_that_is_missing_is_told():
    metrics = Metrics({"x": "sample_mean"})
    micro_batch = batch(dp_size=2)
    metrics.add(micro_batch, {"x": torch.ones(len(micro_batch.tokens))})
    with pytest.raises(rollpack.PlanError, match=r"for 2 dp x cp ranks, and the 1 processes .* of 1: .*log\(group="):
        metrics.log()


@pytest.mark.parametrize("calls", [1, 2])
def test_a_micro_batch_that_was_not_added_is_told(calls):
    """What is logged would be a part of the sum."""
    table = EXAMPLES["four_samples"].table()
    plan = rollpack.plan(table, micro_batch_size=1, dp_size=2)
    every = [m for dp_rank in range(2) for m in rollpack.pack(table, plan, dp_rank=dp_rank, token_columns=["loss"])]

    def add(metrics, micro_batches):
        for micro_batch in micro_batches:
            for name in "xy"[:calls]:
                metrics.add(micro_batch, {name: torch.from_numpy(micro_batch.columns["loss"])})

    for missing in range(len(every)):
        metrics = Metrics({"x": "sample_mean", "y": "max"})
        add(metrics, every[:missing] + every[missing + 1 :])
        with pytest.raises(rollpack.PlanError, match="processes 0 did not add each of their micro-batches in each step"):
            metrics.log()
        add(metrics, [every[missing]])
        assert metrics.log()["x"] == pytest.approx(5.75)
    metrics = Metrics({"x": "sample_mean", "y": "max"})
    metrics.add(every[0], {"x": 1.0})
    add(metrics, every)  # once more for the first
    if calls == 1:
        with pytest.raises(rollpack.PlanError, match="in each step, or pass over it"):
            metrics.log()


def test_a_rank_that_left_out_a_whole_step_is_told():
    table = EXAMPLES["four_samples"].table()
    plan = rollpack.plan(table, micro_batch_size=1, dp_size=2, global_batch_size=2)
    metrics = Metrics({"x": "sample_mean"})
    for step, dp_rank in [(0, 0), (0, 1), (1, 0)]:
        (micro_batch,) = rollpack.pack(table, plan, step=step, dp_rank=dp_rank)
        metrics.add(micro_batch, {"x": 1.0})
    with pytest.raises(rollpack.PlanError, match="processes 0 did not add each of their micro-batches in each step"):
        metrics.log()


def test_of_a_step_that_arrives_none_before_the_last_may_be_missing():
    """How many there are to be nobody knows, so that the last may be missing unseen."""
    table = EXAMPLES["four_samples"].table()
    packed = rollpack.pack(table, rollpack.plan(table, micro_batch_size=1))
    every = [dataclasses.replace(m, num_micro_batches=None) for m in packed]
    for missing in range(len(every)):
        metrics = Metrics({"x": "sample_mean"})
        for micro_batch in every[:missing] + every[missing + 1 :]:
            metrics.add(micro_batch, {"x": 1.0})
        if missing < len(every) - 1:
            with pytest.raises(rollpack.PlanError, match="processes 0 did not add each of their micro-batches"):
                metrics.log()
        else:
            assert metrics.log() == {"x": pytest.approx(0.75)}


def test_a_step_that_failed_half_way_can_be_thrown_away():
    table = EXAMPLES["four_samples"].table()
    first, *others = rollpack.pack(table, rollpack.plan(table, micro_batch_size=1), token_columns=["loss"])
    metrics = Metrics({"x": "sample_mean", "y": "max"})
    metrics.add(first, {"x": 100.0, "y": 100.0})
    with pytest.raises(rollpack.PlanError, match="did not add each of their micro-batches"):
        metrics.log()
    metrics.reset()
    for micro_batch in (first, *others):
        metrics.add(micro_batch, {"x": torch.from_numpy(micro_batch.columns["loss"]), "y": 3.0})
    assert metrics.log() == {"x": pytest.approx(5.75), "y": 3.0}


def test_names_may_be_left_out_of_any_micro_batch_in_any_epoch():
    table = EXAMPLES["four_samples"].table()
    first, second = rollpack.pack(table, rollpack.plan(table, micro_batch_size=2))
    metrics = Metrics({"x": "none", "y": "none"})
    for epoch in range(2):
        metrics.add(first, {"x": 1.0})
        metrics.add(second, [{"x": 3.0}, {}][epoch])
    assert metrics.log() == {"x": 5 / 2, "y": 0.0}


def test_sums_are_float64():
    """Eight ones beside 2**30: float32 would lose them."""
    metrics = Metrics({"x": "none"})
    micro_batch = batch()
    x = torch.ones(len(micro_batch.tokens))
    x[np.flatnonzero(micro_batch.loss_mask)[0]] = 2.0**30
    metrics.add(micro_batch, {"x": x})
    assert metrics.log() == {"x": 2.0**30 + 8}


def test_two_processes_that_packed_for_the_same_rank_are_told(monkeypatch):
    """Ranks that are not passed to pack are 0 on every process: half of the data would never be logged, or trained."""
    table = EXAMPLES["four_samples"].table()
    plan = rollpack.plan(table, micro_batch_size=2, dp_size=2)

    def packed_for(dp_rank):
        metrics = Metrics({"loss": "sample_mean"})
        for packed in rollpack.pack(table, plan, dp_rank=dp_rank):
            metrics.add(packed, {"loss": torch.ones(len(packed.tokens))})
        return metrics

    def log(*dp_ranks):
        rows = torch.stack([packed_for(rank)._packed() for rank in dp_ranks]).numpy()
        monkeypatch.setattr("rollpack.torch.metrics._gather", lambda *_: rows)
        return packed_for(dp_ranks[0]).log()

    assert log(0, 1) == {"loss": pytest.approx(1.0)}
    with pytest.raises(rollpack.PlanError, match="same dp_rank and cp_rank: pass each process's own to pack"):
        log(0, 0)
    # So are context-parallel ranks.
    halves = rollpack.plan(table, micro_batch_size=4, cp_size=2)
    metrics = [Metrics({"loss": "sample_mean"}) for _ in range(2)]
    for each in metrics:
        for packed in rollpack.pack(table, halves, cp_rank=1):
            each.add(packed, {"loss": torch.ones(len(packed.tokens))})
    rows = torch.stack([each._packed() for each in metrics]).numpy()
    monkeypatch.setattr("rollpack.torch.metrics._gather", lambda *_: rows)
    with pytest.raises(rollpack.PlanError, match="same dp_rank and cp_rank"):
        metrics[0].log()
    # Of two processes that are two ranks each nobody is told.
    quarters = rollpack.plan(table, micro_batch_size=1, dp_size=4)
    metrics = [Metrics({"loss": "sample_mean"}) for _ in range(2)]
    for dp_rank in range(4):
        for packed in rollpack.pack(table, quarters, dp_rank=dp_rank):
            metrics[dp_rank // 2].add(packed, {"loss": torch.ones(len(packed.tokens))})
    rows = torch.stack([each._packed() for each in metrics]).numpy()
    monkeypatch.setattr("rollpack.torch.metrics._gather", lambda *_: rows)
    assert metrics[0].log() == {"loss": pytest.approx(1.0)}
    # Of rank 1 nothing was added: half of the mean would be missing.
    metrics = packed_for(0)
    rows = torch.stack([metrics._packed(), Metrics({"loss": "sample_mean"})._packed()]).numpy()
    monkeypatch.setattr("rollpack.torch.metrics._gather", lambda *_: rows)
    with pytest.raises(rollpack.PlanError, match="for 2 dp x cp ranks.* added micro-batches of 1"):
        metrics.log()


def test_a_process_that_declared_another_normaliser_is_told(monkeypatch):
    one, other = Metrics({"a": "none"}), Metrics({"a": "count"})
    rows = torch.stack([one._packed(), other._packed()]).numpy()
    monkeypatch.setattr("rollpack.torch.metrics._gather", lambda *_: rows)
    for metrics in (one, other):
        with pytest.raises(rollpack.PlanError, match="ranks declared different metrics"):
            metrics.log()


def test_a_step_in_which_nothing_was_added_is_a_step():
    table = EXAMPLES["four_samples"].table()
    plan = rollpack.plan(table, micro_batch_size=2, global_batch_size=2)
    metrics = Metrics({"a": "none"})
    for step, values in ((0, {"a": 4.0}), (1, {})):
        for micro_batch in rollpack.pack(table, plan, step=step):
            metrics.add(micro_batch, values)
    assert metrics.log() == {"a": 2.0}


@pytest.mark.parametrize("value", [2, 2.0, np.float32(2), np.int64(2), True, np.bool_(True)])
def test_a_number_may_be_of_any_kind(value):
    metrics = Metrics({"a": "none"})
    metrics.add(batch(), {"a": value})
    assert metrics.log() == {"a": float(value)}


def test_a_number_is_logged_in_float64():
    metrics = Metrics({"a": "max", "b": "none"})
    metrics.add(batch(), {"a": 0.1, "b": 1 + 1e-12})
    assert metrics.log() == {"a": 0.1, "b": 1 + 1e-12}


@pytest.mark.parametrize("value", [None, "2", [2.0], np.ones(3)])
def test_what_is_no_number_is_told(value):
    metrics = Metrics({"a": "none"})
    with pytest.raises(TypeError, match=r"metric 'a' is a \w+; it has to be a tensor or a number"):
        metrics.add(batch(), {"a": value})
