"""A dump of rollouts: columns of Arrow beside torch.save of a list of dicts, as slime and miles write theirs.

    python -m tests.benchmarks.rollout_dump

Saves and loads the same Sample objects in turn, in one run; medians are shown, and ratios to torch.save. ``load`` gives
Sample objects again, ``table`` what plan and pack read (an Arrow file is mapped, and read where it is used).
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

import rollpack
from rollpack.integrations import slime
from rollpack.testing import make_rollouts


@dataclass
class Sample:
    """What a Sample of slime mostly holds."""

    tokens: list[int]
    response_length: int
    loss_mask: list[int]
    group_index: int
    rollout_id: int
    index: int
    reward: float
    rollout_log_probs: list[float]
    remove_sample: bool = False
    status: str = "completed"
    prompt: str = "What is 2 + 2?"
    metadata: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return self.__dict__.copy()

    @staticmethod
    def from_dict(fields: dict[str, Any]) -> Sample:
        return Sample(**fields)


def samples(prompts: int) -> list[Sample]:
    """Made-up rollouts of up to 8,192 tokens. Log-probabilities are such as float32 holds."""
    rows = make_rollouts(prompts=prompts).to_pylist()
    logprobs = [(-torch.rand(row["response_length"])).tolist() for row in rows]
    return [Sample(**row, index=i, rollout_log_probs=logprobs[i]) for i, row in enumerate(rows)]


def write_arrow(found: list[Sample], path: Path) -> None:
    table = slime.samples_to_arrow(found)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)


def read_arrow(path: Path) -> pa.Table:
    with pa.memory_map(str(path)) as source:
        return pa.ipc.open_file(source).read_all()


def write_parquet(found: list[Sample], path: Path) -> None:
    pq.write_table(slime.samples_to_arrow(found), path)


def write_torch(found: list[Sample], path: Path) -> None:
    torch.save({"rollout_id": 0, "samples": [sample.to_dict() for sample in found]}, path)


def read_torch(path: Path) -> list[Sample]:
    return [Sample.from_dict(fields) for fields in torch.load(path, weights_only=False)["samples"]]


def timed(run: Callable[[], Any]) -> tuple[float, Any]:
    started = time.perf_counter()
    result = run()
    return time.perf_counter() - started, result


def measure(found: list[Sample], repeat: int, folder: Path) -> dict[str, dict[str, float]]:
    ways: dict[str, tuple[Callable[..., None], Callable[[Path], list[Sample]], Callable[[Path], Any]]] = {
        "torch.save": (write_torch, read_torch, lambda path: slime.samples_to_arrow(read_torch(path))),
        "Arrow IPC": (write_arrow, lambda p: slime.samples_from_arrow(read_arrow(p), Sample.from_dict), read_arrow),
        "Parquet": (write_parquet, lambda p: slime.samples_from_arrow(pq.read_table(p), Sample.from_dict), pq.read_table),
    }
    times: dict[str, dict[str, list[float]]] = {name: {"save": [], "load": [], "table": []} for name in ways}
    for _ in range(repeat):
        for name, (save, load, table) in ways.items():
            path = folder / name
            times[name]["save"].append(timed(lambda save=save, path=path: save(found, path))[0])
            seconds, back = timed(lambda load=load, path=path: load(path))
            assert [asdict(a) for a in back[:3]] == [asdict(a) for a in found[:3]], name
            times[name]["load"].append(seconds)
            del back
            times[name]["table"].append(timed(lambda table=table, path=path: table(path))[0])
    sizes = {name: (folder / name).stat().st_size / 2**20 for name in ways}
    return {name: {k: statistics.median(v) for k, v in t.items()} | {"MiB": sizes[name]} for name, t in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    found = samples(arguments.prompts)
    with tempfile.TemporaryDirectory() as folder:
        results = measure(found, arguments.repeat, Path(folder))
    if arguments.json:
        print(json.dumps(results))
        return
    tokens = sum(len(sample.tokens) for sample in found)
    print(f"torch {torch.__version__}, pyarrow {pa.__version__}, rollpack {rollpack.__version__}")
    print(f"{len(found):,} samples, {tokens:,} tokens, {arguments.repeat} rounds; in brackets, torch.save over it")
    print(f"{'':<12} {'MiB':>14} {'save s':>16} {'load s':>16} {'table s':>16}")
    base = results["torch.save"]
    for name, row in results.items():
        shown = [f"{row[k]:.3f} ({base[k] / row[k]:.1f}x)" for k in ("MiB", "save", "load", "table")]
        print(f"{name:<12} {shown[0]:>14} {shown[1]:>16} {shown[2]:>16} {shown[3]:>16}")


if __name__ == "__main__":
    main()
