"""One process of the gloo run in test_rank_shards.py: ``python shards_worker.py RANK FOLDER``; three processes, dp 3."""

import json
import sys
from pathlib import Path

import torch

import rollpack
from rollpack.torch import LossReducer, Metrics, check_same_plan, micro_batches, summarize_shards


def main(rank, folder):
    torch.set_num_threads(1)
    dist = torch.distributed
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=3)
    files = sorted(str(path) for path in folder.glob("part-*.parquet"))
    found = {"errors": {}, "losses": {}}

    def told(name, call):
        try:
            call()
        except Exception as error:  # noqa: BLE001 - it is written down for the test
            place = [getattr(error, "column", None), getattr(error, "row", None)]
            found["errors"][name] = [type(error).__name__, str(error), *place]

    # Rank 0 has two files, rank 1 none, rank 2 one; which it packs later has nothing to do with it.
    own = {0: [files[2], files[0]], 1: [], 2: [files[1]]}[rank]
    summary = summarize_shards({path: path for path in own}, groups=True)
    found["sources"] = summary.sources
    for mode in ("sample_mean", "prompt_mean", "token_mean"):
        plan = rollpack.plan(summary, loss_aggregation=mode, micro_batch_size=2, dp_size=3)
        check_same_plan(plan)
        found["id"] = plan.id
        needed = plan.rows_by_source(plan._rows_of(0, rank))
        shards = {path: path for path in files if path in needed}
        loss = torch.zeros((), dtype=torch.float64)
        for micro_batch in micro_batches(shards, plan, dp_rank=rank, device="cpu", token_columns=["loss"]):
            loss += LossReducer(backend="none")(micro_batch.columns["loss"].double(), micro_batch)
        dist.all_reduce(loss)
        found["losses"][mode] = loss.item()

    other = rollpack.plan(summary, micro_batch_size=1 + (rank == 1), dp_size=1)
    told("another plan", lambda: check_same_plan(other))
    told("no plan", lambda: check_same_plan(None if rank == 1 else other))
    told("no shards", lambda: summarize_shards([files[0]] if rank == 1 else {}))
    wrong = folder / "wrong.parquet" if rank == 2 else files[rank]
    told("bad row", lambda: summarize_shards({str(wrong): wrong}))
    told("no file", lambda: summarize_shards({rank: folder / "nowhere" if rank == 1 else files[0]}))
    told("wrong type", lambda: summarize_shards({rank: 7 if rank == 0 else files[0]}))
    told("same source", lambda: summarize_shards({"mine": files[rank]}))
    told("nothing", lambda: summarize_shards({}))
    group = dist.new_group([0, 2])
    if rank != 1:
        part = summarize_shards({rank: files[rank]}, group=group)
        check_same_plan(rollpack.plan(part, micro_batch_size=1), group=group)
        found["part"] = part.sources
    else:
        told("outside", lambda: summarize_shards({rank: files[rank]}, group=group))
        told("outside, plan", lambda: check_same_plan(other, group=group))
        told("outside, log", lambda: Metrics({"a": "max"}).log(group=group))
    (folder / f"out.{rank}").write_text(json.dumps(found))
    dist.barrier()  # torch 2.6 may wait for ever where it destroys a group right after a gather
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
