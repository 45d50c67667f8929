"""One process of the gloo run in test_metrics.py: ``python metrics_worker.py RANK WORLD STORE TABLE OUT``.

It takes the whole run through several layouts, so that one start of processes serves them all, and writes what every
layout logged, with the number of collectives, as JSON.
"""

import json
import sys

import pyarrow.parquet as pq
import torch
from test_metrics import DECLARED, STEPS, fill

import rollpack
from rollpack.torch import Metrics


def main(rank, world, store, path, out):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    table = pq.read_table(path)
    gather, calls = torch.distributed.all_gather_into_tensor, []

    def counted(*arguments, **keywords):
        calls.append(len(arguments[1]))
        return gather(*arguments, **keywords)

    torch.distributed.all_gather_into_tensor = counted
    logged = {}
    for cp_size in [c for c in (1, 2, 4) if c <= world]:
        dp_size = world // cp_size
        metrics = Metrics(DECLARED)
        fill(metrics, table, [divmod(rank, cp_size)], dp_size=dp_size, cp_size=cp_size, max_tokens_per_gpu=8)
        logged[f"{dp_size}x{cp_size}"] = metrics.log()
        assert metrics.log() == dict.fromkeys((n for n, k in DECLARED.items() if k not in {"min", "max", "count"}), 0.0)
    assert STEPS == 2
    # Two runs side by side, each over a group of its own.
    size = world // 2
    groups = [torch.distributed.new_group(range(first, first + size)) for first in (0, size)]
    metrics = Metrics(DECLARED)
    fill(metrics, table, [(rank % size, 0)], dp_size=size, cp_size=1, max_tokens_per_gpu=8)
    logged["of a group"] = metrics.log(group=groups[rank // size])
    # Of a pipeline only the last stage has something to add.
    metrics = Metrics(DECLARED)
    if rank == world - 1:
        fill(metrics, table, [(0, 0)], dp_size=1, cp_size=1, max_tokens_per_gpu=8)
    logged["of a pipeline"] = metrics.log()
    # Ranks that declared something else are told, all of them.
    other = Metrics({"a": "max"} if rank else {"a": "min"})
    try:
        other.log()
    except ValueError as error:
        logged["error"] = str(error)
    for name, number in {"a name more": 2, "many names more": 65}.items():
        more = Metrics({f"{i:02}": "max" for i in range(number if rank == 0 else 1)})
        try:
            more.log()
        except ValueError as error:
            logged[name] = str(error)
    # Of many names each gets its own: one tensor is not enough for them.
    plan = rollpack.plan(table, micro_batch_size=100, dp_size=world)
    (micro_batch,) = rollpack.pack(table, plan, dp_rank=rank)
    many = Metrics({f"{i:02}": "max" for i in range(70)})
    many.add(micro_batch, {f"{i:02}": float(100 * rank + i) for i in range(70)})
    logged["many names"] = many.log()
    # As are processes that are not the dp x cp ranks of the plan: here each runs the whole of it.
    metrics = Metrics(DECLARED)
    fill(metrics, table, [(0, 0)], dp_size=1, cp_size=1, max_tokens_per_gpu=100)
    try:
        metrics.log()
    except ValueError as error:
        logged["group"] = str(error)

    def refused(name, micro_batches):
        metrics = Metrics({"a": "sample_mean"})
        for micro_batch in micro_batches:
            metrics.add(micro_batch, {"a": 1.0})
        try:
            metrics.log()
        except ValueError as error:
            logged[name] = str(error)

    def packed(size):
        plan = rollpack.plan(table, micro_batch_size=size, dp_size=world)
        return list(rollpack.pack(table, plan, dp_rank=rank))

    refused("another plan", packed(1 + rank % 2))
    refused("one rank", packed(1) if rank == 1 else [])
    refused("a micro-batch less", packed(1)[: -1 if rank == 1 else None])
    refused("an epoch less", packed(1) * (1 if rank == 1 else 2))
    with open(f"{out}.{rank}", "w") as file:
        json.dump({"logged": logged, "calls": calls}, file)
    torch.distributed.barrier()  # torch 2.6 may wait for ever where it destroys a group right after a gather
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
