"""Random batches through the whole way, good and bad ones, for as long as it is told: no wrong answer, and nothing grows.

    python -m tests.endurance --minutes 60

Each round makes a batch (sizes, types, containers), cuts it by random arguments, packs it in one of several ways, and holds
loss and gradient of every step against ``_reference`` in float64; or spoils one value and asks for the error that names its
row. A round is told by seed and number alone: what fails is done again with ``--seed S --first N --rounds 1``. Memory is
what the process holds for itself (RssAnon), measured after a collection.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import pickle
import sys
import tempfile
import time
from collections import Counter, deque
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import rollpack
from rollpack import _reference
from rollpack.testing.rollouts import Rollouts
from rollpack.testing.truth import Observed, Truth
from rollpack.torch import LossReducer, micro_batches

Random = np.random.Generator
TOLERANCES = {torch.float32: 1e-6, torch.float64: 1e-12}
IDS: dict[str, tuple[Any, pa.DataType]] = {
    "int64": (int, pa.int64()),
    "uint16": (int, pa.uint16()),
    "string": (lambda n: f"rollout {n}", pa.string()),
    "large string": (lambda n: f"rollout {n}", pa.large_string()),
    "binary": (lambda n: n.to_bytes(3, "little"), pa.binary()),
    "dictionary": (lambda n: f"rollout {n}", pa.dictionary(pa.int32(), pa.string())),
}
TOKENS = (pa.int16(), pa.int32(), pa.uint32(), pa.int64())
MASKS = (pa.uint8(), pa.int8(), pa.int64(), pa.bool_(), pa.float32(), pa.float64())


@dataclass
class Batch:
    """A batch in plain Python, and the types that its columns are to have."""

    columns: dict[str, list[Any]]
    types: dict[str, pa.DataType]
    truth: Rollouts
    divisor: float | None
    empty: str

    @property
    def table(self) -> pa.Table:
        return pa.table({name: pa.array(values, self.types[name]) for name, values in self.columns.items()})


def pick(random: Random, options: Any) -> Any:
    options = list(options)
    return options[random.integers(len(options))]


def make(random: Random) -> Batch:
    whole_masks, has_ids = random.random() < 0.15, random.random() < 0.85
    longest = int(pick(random, (6, 60, 400, 2000)))
    places = [
        (group, rollout)
        for group in range(random.integers(1, 12))
        for rollout in range(random.integers(1, 6))
        for _ in range(1 + (random.random() < 0.3) * random.integers(1, 4))
    ]
    if random.random() < 0.3:
        random.shuffle(places)
    lengths, masks, responses = [], [], []
    for _ in places:
        length = int(min(longest, 2 + random.lognormal(np.log(longest) / 2, 1.0)))
        response = int(random.integers(1, length))
        mask = np.zeros(length, bool)
        mask[length - response :] = True if whole_masks else random.random(response) < pick(random, (0.0, 0.3, 0.9, 1.0))
        lengths.append(length)
        responses.append(response)
        masks.append(mask)
    make_id, id_type = IDS[pick(random, IDS)]
    list_of = pick(random, (pa.list_, pa.large_list))
    rollouts = [group * 100 + rollout for group, rollout in places] if has_ids else [*range(len(places))]
    truth = Rollouts(np.array(lengths), masks, rollouts, [group for group, _ in places])
    losses = truth.split(Truth(truth, None, "count").losses[:-1])
    if random.random() < 0.5:  # what is not trained may be anything
        losses = [np.where(mask, x, np.nan) for mask, x in zip(masks, losses, strict=True)]
    mask_type = pick(random, MASKS)
    own = float if pa.types.is_floating(mask_type) else bool if pa.types.is_boolean(mask_type) else int
    columns: dict[str, list[Any]] = {
        "tokens": [random.integers(0, 30_000, n).tolist() for n in lengths],
        "response_length": responses,
        "loss_mask": [[*map(own, mask[-r:])] for mask, r in zip(masks, responses, strict=True)],
        "rollout_id": [*map(make_id, rollouts)],
        "group_index": truth.groups or [],
        "loss": [x[-r:].tolist() for x, r in zip(losses, responses, strict=True)],
    }
    types = {
        "tokens": list_of(pick(random, TOKENS)),
        "response_length": pick(random, (pa.int32(), pa.int64())),
        "loss_mask": list_of(mask_type),
        "rollout_id": id_type,
        "group_index": pa.int64(),
        "loss": list_of(pa.float32()),
    }
    left_out = [] if has_ids else ["rollout_id"]
    left_out += ["loss_mask"] if whole_masks else pick(random, (["response_length"], [], []))
    columns = {name: values for name, values in columns.items() if name not in left_out}
    return Batch(columns, types, truth, float(pick(random, (1, 7.5, 4096))), pick(random, ("count", "skip")))


def contained(random: Random, batch: Batch, folder: Path) -> Any:
    """The batch in one of the containers that rollpack reads."""
    table = batch.table
    kind = pick(random, ("table", "batches", "slice", "polars", "pandas", "dicts", "parquet", "arrow", "jsonl"))
    binary = "rollout_id" in batch.columns and pa.types.is_binary(batch.types["rollout_id"])
    if kind == "batches":
        return table.to_batches(max_chunksize=int(random.integers(1, 20)))
    if kind == "slice":
        return pa.concat_tables([table.slice(0, 1), table]).combine_chunks().slice(1)
    if kind == "polars":
        return pl.DataFrame(table)
    if kind == "pandas":
        if random.random() < 0.5:
            return table.to_pandas(types_mapper=pd.ArrowDtype)
        return pa.Table.from_pylist(_without_nan(table), table.schema).to_pandas()  # NaN is how pandas says null
    if kind == "dicts":
        return table.to_pylist()
    if kind == "parquet":
        pq.write_table(table, folder / "batch.parquet", row_group_size=int(random.integers(1, 40)))
        return folder / "batch.parquet"
    if kind == "arrow":
        with pa.ipc.new_file(str(folder / "batch.arrow"), table.schema) as writer:
            writer.write_table(table, max_chunksize=int(random.integers(1, 40)))
        return folder / "batch.arrow"
    if kind == "jsonl" and not binary:
        (folder / "batch.jsonl").write_text("".join(json.dumps(row) + "\n" for row in _without_nan(table)))
        return folder / "batch.jsonl"
    return table


def _without_nan(table: pa.Table) -> list[dict[str, Any]]:
    """Rows without a NaN in the losses, which JSON has no word for; spoiled ones may have none at all."""
    plain = [[0.5 if x != x else x for x in losses] for losses in table["loss"].to_pylist()]
    return [row | {"loss": losses} for row, losses in zip(table.to_pylist(), plain, strict=True)]


def arguments(random: Random, batch: Batch) -> dict[str, Any]:
    mode = pick(random, ("sample_mean", "prompt_mean", "token_mean", "constant"))
    longest = int(batch.truth.lengths.max())
    chosen: dict[str, Any] = {
        "loss_aggregation": mode,
        "divisor": batch.divisor if mode == "constant" else None,
        "empty": batch.empty,
        "dp_size": int(random.integers(1, 6)),
        "cp_size": int(pick(random, (1, 1, 2, 3, 4))),
        "layout": pick(random, ("zigzag", "contiguous")),
        "oversize": pick(random, ("error", "alone")),
        "placeholders": random.random() < 0.8,
        "micro_batch_multiple": int(pick(random, (1, 1, 1, 2, 3))),
        "pad_to_multiple_of": int(pick(random, (1, 1, 3, 8))),
        "pad_micro_batch_to_multiple_of": int(pick(random, (1, 1, 16))),
        "cost": pick(random, ("tokens", "attention")),
        "sync": pick(random, ("step", "micro_batch")),
        "keep_together": pick(random, (None, None, "rollout", "group")),
        "remainder": pick(random, ("error", "drop", "keep", "keep")),
    }
    if random.random() < 0.6:
        chosen["max_tokens_per_gpu"] = int(random.integers(max(longest // 2, 1), 3 * longest + 32))
    else:
        chosen["micro_batch_size"] = int(random.integers(1, 9))
    per_step = pick(random, (None, None, "global_batch_size", "prompts_per_step"))
    return chosen | ({per_step: int(random.integers(1, 9))} if per_step else {})


def spoiled(random: Random, batch: Batch) -> tuple[Batch, type[Exception], str, int | None]:
    """The batch with one fault, and the error that names it."""
    columns, row = {name: [*values] for name, values in batch.columns.items()}, int(random.integers(len(batch.truth.masks)))
    error: type[Exception] = rollpack.DataError
    faults = ["null", "missing", "token"]
    faults += ["value", "short"] if "loss_mask" in columns else []
    faults += ["long", "negative"] if "response_length" in columns else []
    fault, types = pick(random, faults), dict(batch.types)
    match fault:
        case "null":
            name = pick(random, columns.keys() - {"group_index", "loss"})
            columns[name][row] = None
        case "missing":
            name, error = "tokens", rollpack.SchemaError
            del columns[name]
        case "token":
            name, types["tokens"] = "tokens", pa.list_(pa.int64())
            columns[name][row] = [*columns[name][row][:-1], 2**40]
        case "value":
            name, types["loss_mask"] = "loss_mask", pa.list_(pa.float32())
            columns[name] = [[*map(float, mask)] for mask in columns[name]]
            columns[name][row][-1] = pick(random, (2.0, 0.5, -1.0, float("nan")))
        case "short":
            name = "loss_mask"
            longer = len(columns["tokens"][row]) - len(columns[name][row]) + 1
            columns[name][row] = columns[name][row] + columns[name][row][:1] * longer
        case _:
            name = "response_length"
            columns[name][row] = len(columns["tokens"][row]) + 1 if fault == "long" else -1
    return replace(batch, columns=columns, types=types), error, name, None if fault == "missing" else row


def refuse(random: Random, batch: Batch, folder: Path) -> str:
    """A spoiled batch raises the error that names its place, on the way to the end."""
    bad, kind, column, row = spoiled(random, batch)
    typed = random.random() < 0.5
    data = bad.table if typed else contained(random, bad, folder)
    with pytest.raises((rollpack.DataError, rollpack.SchemaError)) as caught:
        deque(rollpack.pack(data, rollpack.plan(data, micro_batch_size=4)), maxlen=0)
    error = caught.value
    # A mask that is not as long as its response is told of either of them.
    assert error.column in {column, "loss_mask"}, f"{error}: expected {column}, row {row}"
    # Without types a column with a null may be one of another type, which is told before any row is looked at.
    assert not typed or (isinstance(error, kind) and error.row == row), f"{error!r}: expected {column}, row {row}"
    return "refused"


def damage(random: Random, batch: Batch, folder: Path) -> str:
    """A file with a wrong byte is read, or refused as bad input is; it does not take the process down."""
    path = folder / "damaged.parquet"
    pq.write_table(batch.table, path)
    content = bytearray(path.read_bytes())
    content[random.integers(len(content))] ^= 1 << int(random.integers(8))
    path.write_bytes(content)
    try:
        deque(rollpack.pack(path, rollpack.plan(path, micro_batch_size=4)), maxlen=0)
    except rollpack.RollpackError:
        return "damaged, refused"
    return "damaged, read"


def hold(random: Random, batch: Batch, folder: Path) -> str:
    """Loss and gradient of every step are those of the reference."""
    chosen = arguments(random, batch)
    try:
        data, plan = planned(random, batch, chosen, folder)
    except rollpack.PlanError:
        return "cannot be planned"
    mode, divisor, empty, r = chosen["loss_aggregation"], chosen["divisor"], batch.empty, batch.truth
    truth, dtype = Truth(r, divisor, empty), pick(random, TOLERANCES)
    losses, way = r.split(truth.losses[:-1]), pick(random, ("pack", "threads", "micro_batches", "files"))
    placed = []
    if way == "files":
        rollpack.write_packed(data, plan, folder / "packed", token_columns=["loss"])
    for step in range(len(plan.steps)):
        observed = reduced(random, data, plan, step, truth, dtype, way, folder)
        per_rank = range(plan.steps[step].num_micro_batches)
        own = np.sort(np.concatenate([plan.rows(step, d, k) for d in range(chosen["dp_size"]) for k in per_rank]))
        placed.append(own)
        masks, units, groups = ([column[i] for i in own] for column in (r.masks, r.rollouts, r.groups or []))
        kept: dict[str, Any] = {"divisor": divisor, "empty": empty}
        loss = _reference.step_loss(mode, [losses[i] for i in own], masks, units, groups, **kept)
        gradient = np.zeros(len(truth.losses))
        for i, weights in zip(own, _reference.step_gradient(mode, masks, units, groups, **kept), strict=True):
            gradient[truth.starts[i] : truth.starts[i + 1]] = weights
        scale, largest = float(np.abs(truth.losses) @ gradient) or 1.0, float(gradient.max()) or 1.0
        off = abs(observed.loss - loss) / scale, float(np.abs(observed.gradient - gradient).max()) / largest
        assert max(off) <= TOLERANCES[dtype], f"step {step} by {way}: {observed.loss} for {loss}, off by {off}: {chosen}"
        assert not observed.gradient[gradient == 0.0].any(), f"step {step} by {way}: a masked token has a gradient: {chosen}"
        wanted = chosen.get("global_batch_size"), chosen.get("prompts_per_step")
        if step < len(plan.steps) - 1 and any(wanted):
            assert len({*(units if wanted[0] else groups)}) == (wanted[0] or wanted[1]), f"step {step}: {chosen}"
    everything = np.sort(np.concatenate([*placed, plan.dropped_rows]))
    assert np.array_equal(everything, np.arange(len(r.masks))), f"rows are not each in one place: {chosen}"
    return f"by {way}"


def planned(random: Random, batch: Batch, chosen: dict[str, Any], folder: Path) -> tuple[Any, rollpack.Plan]:
    """The data in some container and a plan of it: of the data, of a summary, of joined shards, or out of a file."""
    kind = pick(random, ("data", "data", "reader", "shards"))
    if kind == "shards":
        table = batch.table
        cuts = np.sort(random.integers(0, len(table) + 1, 2))
        parts = {"a": table[: cuts[0]], "b": table[cuts[0] : cuts[1]], "c": table[cuts[1] :]}
        parts = {name: part for name, part in parts.items() if len(part)}
        shards = [rollpack.summarize(part, groups=True, source=name) for name, part in reversed(parts.items())]
        whole = rollpack.Summary.concat(pickle.loads(pickle.dumps(shard)) for shard in shards)
        if "rollout_id" not in batch.columns:
            whole = rollpack.summarize(table, groups=True)  # rows of shards are counted through
            return table, rollpack.plan(whole, **chosen)
        return parts, rollpack.plan(whole, **chosen)
    data = contained(random, batch, folder)
    if kind == "reader":
        return data, rollpack.plan(rollpack.summarize(batch.table.to_reader(), groups=True), **chosen)
    plan = rollpack.plan(data, **chosen)
    if random.random() < 0.3:
        plan.save(folder / "plan")
        plan = rollpack.Plan.load(folder / "plan")
    return data, plan


def reduced(
    random: Random, data: Any, plan: rollpack.Plan, step: int, truth: Truth, dtype: torch.dtype, way: str, folder: Path
) -> Observed:
    """What the reducer makes of all ranks of a step."""
    observed, reducer = Observed(len(truth.losses) - 1), LossReducer(backend="none")
    ranks = [(d, c) for d in range(plan.settings.dp_size) for c in range(plan.settings.cp_size)]
    for d, c in ranks:
        place: dict[str, Any] = {"step": step, "dp_rank": d, "cp_rank": c, "token_columns": ["loss"]}
        if random.random() < 0.05:  # left in the middle
            next(iter(micro_batches(data, plan, **place, device="cpu")))
            next(rollpack.pack(data, plan, **place, num_threads=2))
        if way == "files":
            packed = rollpack.read_packed(folder / "packed" / f"dp{d}-cp{c}.arrow")
            batches = (m for m in packed if m.step == step)
        else:
            batches = rollpack.pack(data, plan, **place, num_threads=3 if way == "threads" else 1)
        on_cpu = (
            micro_batches(data, plan, **place, device="cpu") if way == "micro_batches" else (m.to("cpu") for m in batches)
        )
        for m in on_cpu:
            # A placeholder is as small as the multiples allow, and where these are over the budget all samples are too.
            own_room = m.is_placeholder or np.isin(m.rows, plan.oversize_rows).any()
            if (budget := plan.settings.max_tokens_per_gpu) is not None and not own_room:
                assert len(m.tokens) <= budget, f"{len(m.tokens)} positions, and the budget is {budget}: {plan.settings}"
            token_loss = m.columns["loss"].to(dtype).requires_grad_()
            loss = reducer(token_loss, m)
            (gradient,) = torch.autograd.grad(loss, token_loss)
            read = {name: getattr(m, name).numpy() for name in ("rows", "segment_ids", "position_ids", "tokens")}
            observed.add(loss.item(), gradient, truth.tokens(replace(m, **read)))
    return observed


def fill_numpys_cache() -> None:
    """NumPy keeps up to seven freed blocks of each size under 1 KiB: random sizes fill that over hours, by some MiB."""
    blocks = [np.empty(size, np.uint8) for size in range(1024) for _ in range(8)]
    del blocks


def measured() -> tuple[float, int, int]:
    """MiB of anonymous memory, open files and threads of this process."""
    gc.collect()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["RssAnon"].split()[0]) / 1024, len(os.listdir("/proc/self/fd")), int(status["Threads"])


def verdict(samples: list[tuple[float, float, int, int]], limit: float) -> list[str]:
    """What grew. Measured from a quarter of the time on: until then caches fill, and pools start their threads."""
    seconds, memory, files, threads = (np.array(column, float) for column in zip(*samples, strict=True))
    warm = max(len(samples) // 4, 1)
    slope = np.polyfit(seconds[warm:] / 3600, memory[warm:], 1)[0] if len(samples) > warm + 2 else 0.0
    at = {"start": 0, "a quarter": warm, "half": len(samples) // 2, "end": -1}
    for name, i in at.items():
        print(f"{name}: {seconds[i]:.0f} s, {memory[i]:.1f} MiB, {files[i]:.0f} files, {threads[i]:.0f} threads")
    third = max((len(samples) - warm) // 3, 1)
    growth = float(np.median(memory[-third:]) - np.median(memory[warm : warm + third]))
    print(f"memory: {slope:+.2f} MiB an hour; last third over the first after warming up: {growth:+.2f} MiB")
    grown = [f"memory by {growth:.1f} MiB"] if growth > limit else []
    for name, values, late in (("files", files, 0), ("threads", threads, 10)):  # as many as arrow's pools may start late
        if values[-1] > values[: warm + third].max() + late:
            grown.append(f"{name} from {values[: warm + third].max():.0f} to {values[-1]:.0f}")
    return grown


def main() -> int:
    parser = argparse.ArgumentParser(description="Random batches through the whole way; nothing wrong, nothing grows.")
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the first round")
    parser.add_argument("--rounds", type=int, default=sys.maxsize, help="at most so many")
    parser.add_argument("--limit", type=float, default=8.0, help="MiB that memory may grow by")
    given = parser.parse_args()
    torch.set_num_threads(1)
    fill_numpys_cache()
    begin, done, samples = time.monotonic(), Counter[str](), [(0.0, *measured())]
    for number in range(given.first, given.first + given.rounds):
        if (passed := time.monotonic() - begin) > 60 * given.minutes:
            break
        if passed > samples[-1][0] + min(10.0, 60 * given.minutes / 20):
            samples.append((passed, *measured()))
            print(f"{passed:.0f} s, round {number}, {samples[-1][1]:.1f} MiB", file=sys.stderr, flush=True)
        random = np.random.default_rng((given.seed, number))
        work = pick(random, (hold, hold, hold, hold, hold, hold, refuse, refuse, damage))
        with tempfile.TemporaryDirectory() as folder:
            try:
                done[work(random, make(random), Path(folder))] += 1
            except BaseException:
                print(f"again: python -m tests.endurance --seed {given.seed} --first {number} --rounds 1", file=sys.stderr)
                raise
    samples.append((time.monotonic() - begin, *measured()))
    print(f"{done.total()} rounds: " + ", ".join(f"{count} {what}" for what, count in done.most_common()))
    grown = verdict(samples, given.limit)
    print(f"grew: {'; '.join(grown)}" if grown else "nothing grew")
    return 1 if grown else 0


if __name__ == "__main__":
    sys.exit(main())
