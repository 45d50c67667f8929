"""One process of the gloo run in test_masks.py: ``python masks_worker.py RANK STORE OUT``; four processes, dp 2 x cp 2."""

import json
import sys

import torch
from examples import FOUR_SAMPLES, MODES
from test_masks import NEW_MASKS, whole_masks

import rollpack
from rollpack.testing import Cut, check_reducer, check_trainer, verify
from rollpack.torch import LossReducer, MicroBatchDataset, micro_batches, ranks_of


def main(rank, store, out):
    torch.set_num_threads(1)
    dist = torch.distributed
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=4)
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    flat = dist.device_mesh.init_device_mesh("cpu", (4,), mesh_dim_names=("fsdp",))
    other = dist.device_mesh.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    ranks = ranks_of(mesh)
    found = {"ranks": list(ranks), "flat": list(ranks_of(flat)), "losses": {}, "errors": {}}

    table = FOUR_SAMPLES.table()
    for layout in ("zigzag", "contiguous"):
        for mode in MODES:
            plan = rollpack.plan(
                table,
                loss_aggregation=mode,
                divisor=10.0 if mode == "constant" else None,
                micro_batch_size=1,
                dp_size=ranks.dp_size,
                cp_size=ranks.cp_size,
                layout=layout,
            )
            packed = rollpack.pack(table, plan, dp_rank=ranks.dp_rank, cp_rank=ranks.cp_rank, token_columns=["loss"])
            batches = [batch.to("cpu") for batch in packed]
            for group in (mesh, dist.group.WORLD, None):
                for cut in (True, False):
                    reducer = LossReducer(backend="fsdp", mesh=group, denominators="current")
                    reducer.set_masks(batches, [local_mask(b) if cut else whole_masks(b) for b in batches], cut=cut)
                    with reducer.step():
                        loss = sum(reducer(b.columns["loss"].double(), b) for b in batches)
                    dist.all_reduce(loss)
                    name = "none" if group is None else type(group).__name__
                    found["losses"][f"{layout} {mode} {name} cut={cut}"] = loss.item() / 4  # fsdp averages over four

    def told(name, call):
        try:
            call()
        except rollpack.PlanError as error:
            found["errors"][name] = str(error)

    token_loss, batch = batches[0].columns["loss"], batches[0]
    told("no backend", lambda: LossReducer()(token_loss, batch))
    told("mesh without cp", lambda: LossReducer(backend="fsdp", mesh=flat)(token_loss, batch))
    told("no data dimension", lambda: LossReducer(backend="fsdp", mesh=other)(token_loss, batch))
    told("group without cp", lambda: LossReducer(backend="ddp", mesh=pairs[rank // 2])(token_loss, batch))
    single = rollpack.plan(table, micro_batch_size=1, dp_size=1)
    (alone, *_) = rollpack.pack(table, single, token_columns=["loss"])
    told("other sizes", lambda: LossReducer(backend="fsdp", mesh=mesh)(torch.zeros(len(alone.tokens)), alone))
    zeros = torch.zeros(len(alone.tokens))
    told("group of other size", lambda: LossReducer(backend="ddp", mesh=dist.group.WORLD)(zeros, alone))
    other_rank = next(rollpack.pack(table, plan, dp_rank=1 - ranks.dp_rank, cp_rank=ranks.cp_rank))
    told("another rank", lambda: LossReducer(backend="fsdp", mesh=mesh)(torch.zeros(len(other_rank.tokens)), other_rank))
    every = [b.to("cpu") for b in rollpack.pack(table, single)]
    unclear = LossReducer(backend="none", denominators="current")
    told("other number of processes", lambda: unclear.set_masks(every, [b.loss_mask for b in every], cut=True))
    told("no dp rank", lambda: micro_batches(table, plan, cp_rank=0, device="cpu"))
    told("no cp rank", lambda: micro_batches(table, plan, dp_rank=0, device="cpu"))
    told("data set without ranks", lambda: MicroBatchDataset(table, plan))
    found["rows"] = [m.rows.tolist() for m in micro_batches(table, plan, dp_rank=0, cp_rank=0, device="cpu")]
    found["rows of one"] = [m.rows.tolist() for m in micro_batches(table, single, device="cpu")]

    # pack takes rank 0 if it is told none.
    first = [b.to("cpu") for b in rollpack.pack(table, plan, token_columns=["loss"])]
    of_world = LossReducer(backend="fsdp", mesh=dist.group.WORLD)
    unmeshed = LossReducer(backend="fsdp"), LossReducer(backend="fsdp", denominators="current")
    found["all pack for rank 0"] = [
        error_of(lambda: unmeshed[0](first[0].columns["loss"], first[0])),
        error_of(lambda: of_world(first[0].columns["loss"], first[0])),
        error_of(lambda: unmeshed[1].set_masks(iter(first), (b.loss_mask for b in first), cut=True)),
    ]

    masks = [b.loss_mask.clone() for b in batches]
    if rank == 2:
        masks[0][(~masks[0]).nonzero()[0]] = True
    try:
        LossReducer(backend="fsdp", denominators="current").set_masks(batches, masks, cut=True)
    except rollpack.RollpackError as error:
        found["added"] = str(error)

    def of_one(batches, masks, denominators="current", mesh=None):
        """What is wrong on rank 1 alone, as all are told of it."""
        reducer = LossReducer(backend="fsdp", mesh=mesh, denominators=denominators)
        return error_of(lambda: reducer.set_masks(batches, masks, cut=True))

    right = [b.loss_mask for b in batches]
    found["wrong on rank 1"] = [
        of_one(batches, [m[1:] if rank == 1 else m for m in right]),
        of_one(batches, [m.float() if rank == 1 else m for m in right]),
        of_one(batches, right[:-1] if rank == 1 else right),
        of_one(batches, [] if rank == 1 else right),
        of_one(batches[1:] if rank == 1 else batches, right),
        of_one([] if rank == 1 else batches, right),
        of_one(None if rank == 1 else batches, right),
        of_one([None, None] if rank == 1 else batches, right),
        of_one(batches, None if rank == 1 else right),
        of_one(batches, right, "original" if rank == 1 else "current"),
    ]
    found["wrong on none"] = of_one(batches, right)
    found["wrong on rank 1 of a mesh"] = of_one(batches, [m[1:] if rank == 1 else m for m in right], mesh=mesh)
    halves = list(rollpack.pack(table, rollpack.plan(table, micro_batch_size=2, dp_size=2), dp_rank=rank % 2))
    of_halves = [torch.from_numpy(b.loss_mask)[rank == 1 :] for b in halves]
    found["wrong on rank 1 of pairs"] = of_one(halves, of_halves, mesh=pairs[rank // 2])
    # One rank is a step behind.
    two_steps = rollpack.plan(table, micro_batch_size=1, dp_size=2, global_batch_size=2)
    of_step = list(rollpack.pack(table, two_steps, step=rank % 2, dp_rank=rank % 2))
    found["of two steps"] = of_one(of_step, [torch.from_numpy(b.loss_mask) for b in of_step], mesh=pairs[rank // 2])

    def reduced(backend, dp_size, mesh=None):
        of = rollpack.plan(table, micro_batch_size=4, dp_size=dp_size, placeholders=True)
        (batch,) = rollpack.pack(table, of, dp_rank=rank % dp_size if mesh else dp_size - 1, token_columns=["loss"])
        reducer = LossReducer(backend=backend, mesh=mesh)
        token_loss = torch.from_numpy(batch.columns["loss"]).double()
        if backend == "megatron_per_token":
            return reducer.loss_and_count(token_loss, batch)[0].item()
        return reducer(token_loss, batch).item()

    told("more ranks than processes", lambda: reduced("ddp", 8))
    told("fewer ranks than processes", lambda: reduced("ddp", 1))  # or was dp_size= forgotten?
    told("the kit", lambda: check_reducer(LossReducer(backend="none")))
    told("the kit for trainers", lambda: check_trainer(lambda step: step.model().weight))
    told("verify", lambda: verify(table, [Cut(2, 2, "zigzag", 8)]))
    # The others are, say, tensor parallel.
    with_others = "none", "megatron", "megatron_legacy", "megatron_per_token"
    found["fewer ranks than processes"] = {backend: reduced(backend, 1) for backend in with_others}
    found["fewer ranks, of a group"] = reduced("ddp", 2, mesh=pairs[rank // 2])
    found["summed by hand"] = reduced("none", 8)
    with open(f"{out}.{rank}", "w") as file:
        json.dump(found, file)
    dist.barrier()  # torch 2.6 may wait for ever where it destroys a group right after a gather
    dist.destroy_process_group()


def error_of(call):
    try:
        call()
    except (rollpack.RollpackError, TypeError) as error:
        return f"{type(error).__name__}: {error}"


def local_mask(batch):
    """What this cp rank would make of the new masks at its own positions, told by row and position."""
    keep = torch.zeros(len(batch.tokens), dtype=torch.bool)
    for t in range(len(keep)):
        row = int(batch.rows[batch.segment_ids[t]])
        following = int(batch.position_ids[t]) + 1 - 2  # the token after it, after a prompt of two
        if batch.segment_ids[t] >= 0 and 0 <= following < len(NEW_MASKS[row]):
            keep[t] = bool(NEW_MASKS[row][following])
    return keep


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
