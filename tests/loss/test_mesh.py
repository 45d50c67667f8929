"""What a mesh of many ranks says, seen from each of them: torch's fake groups stand for the processes that do not run."""

from contextlib import contextmanager

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import rollpack
from rollpack.torch import LossReducer, micro_batches, ranks_of

TABLE = {"tokens": [[1, 2], [1, 2, 3]], "response_length": [1, 1]}


@contextmanager
def process(rank, num_processes):
    """This process as one of several."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_processes)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def ranks(shape):
    """What each process of a mesh is told."""
    sizes = tuple(shape.values())
    num_processes = torch.Size(sizes).numel()
    for rank in range(num_processes):
        with process(rank, num_processes):
            yield tuple(ranks_of(init_device_mesh("cpu", sizes, mesh_dim_names=tuple(shape))))


@pytest.mark.parametrize("name", ["dp", "ddp", "fsdp", "hsdp", "dp_shard", "dp_replicate"])
def test_one_data_parallel_dimension(name):
    assert list(ranks({name: 3})) == [(3, 1, 0, 0), (3, 1, 1, 0), (3, 1, 2, 0)]


def test_data_parallel_dimensions_count_together_in_the_order_of_the_mesh():
    """A mesh lays its ranks out with the last dimension fastest: rank 7 of (2, 3, 2) is at (1, 0, 1)."""
    found = list(ranks({"dp_replicate": 2, "dp_shard": 3, "cp": 2}))
    assert found == [(6, 2, dp_rank, cp_rank) for dp_rank in range(6) for cp_rank in range(2)]


def test_dimensions_of_other_kinds_do_not_count():
    """Ranks that differ in tp or pp alone get the same micro-batches."""
    of_a_stage = [(2, 2, 0, 0)] * 2 + [(2, 2, 0, 1)] * 2 + [(2, 2, 1, 0)] * 2 + [(2, 2, 1, 1)] * 2
    assert list(ranks({"pp": 2, "dp": 2, "cp": 2, "tp": 2})) == of_a_stage * 2


def test_a_mesh_without_names_is_told_which_it_needs():
    with process(0, 2), pytest.raises(rollpack.PlanError, match=r"the mesh has dimensions \[\], and none is data-parallel"):
        ranks_of(init_device_mesh("cpu", (2,)))
    with pytest.raises(TypeError, match="mesh is a int; it has to be a DeviceMesh"):
        ranks_of(2)


def batch(dp_size, cp_size, dp_rank=0, cp_rank=0):
    plan = rollpack.plan(TABLE, micro_batch_size=1, dp_size=dp_size, cp_size=cp_size, placeholders=True)
    return next(rollpack.pack(TABLE, plan, dp_rank=dp_rank, cp_rank=cp_rank))


def loss(packed, mesh=None):
    return LossReducer(backend="ddp", mesh=mesh)(torch.ones(len(packed.tokens)), packed).item()


def test_ranks_of_the_mesh_are_held_against_those_that_pack_was_told():
    with process(2, 4):  # dp_rank 1, cp_rank 0
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
        loss(batch(2, 2, 1, 0), mesh)
        for other in ((0, 0), (0, 1), (1, 1)):
            with pytest.raises(rollpack.PlanError, match="this process is dp_rank 1, cp_rank 0 of the mesh, and the micro"):
                loss(batch(2, 2, *other), mesh)
        with pytest.raises(rollpack.PlanError, match="the mesh has dp 2 x cp 2, and the plan is for dp 4 x cp 1$"):
            loss(batch(4, 1, 2), mesh)
        without_cp = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        with pytest.raises(rollpack.PlanError, match="the plan is for dp 2 x cp 2: .* so give the mesh a 'cp' dimension"):
            loss(batch(2, 2, 1, 0), without_cp)
        with pytest.raises(rollpack.PlanError, match="the mesh has dp 4 x cp 1, and the plan is for dp 2 x cp 1$"):
            loss(batch(2, 1, 1), without_cp)


def test_a_group_has_to_be_that_of_all_ranks():
    with process(3, 6):
        world, pair = torch.distributed.group.WORLD, torch.distributed.new_group([2, 3])
        loss(batch(3, 2, 1, 1), world)
        loss(batch(2, 1, 1), pair)
        loss(batch(1, 2, 0, 1), pair)
        with pytest.raises(rollpack.PlanError, match="the process group has 2 ranks, which are the plan's dp ranks without"):
            loss(batch(2, 2, 1, 0), pair)
        with pytest.raises(rollpack.PlanError, match="the process group has 6 ranks, and the plan is for dp 2 x cp 2$"):
            loss(batch(2, 2, 1, 0), world)
        # Not all of a group are its first.
        with pytest.raises(rollpack.PlanError, match="this process is rank 1 of 2, and the micro-batch was packed for dp_r"):
            loss(batch(2, 1), pair)
    with process(2, 6):
        loss(batch(2, 1), torch.distributed.new_group([2, 3]))


def test_a_process_that_packs_for_rank_0_is_the_first_unless_others_share_its_rank():
    with process(0, 4):
        loss(batch(2, 2))
    with process(1, 4):
        loss(batch(2, 2, 0, 1))
        with pytest.raises(rollpack.PlanError, match="this process is rank 1 of 4, and the micro-batch was packed for dp_r"):
            loss(batch(2, 2))
        of_two = batch(2, 1)
        LossReducer(backend="none")(torch.ones(len(of_two.tokens)), of_two)  # processes 0 and 1 are tp ranks, say


def test_ranks_that_are_left_out_are_0_where_there_is_one_of_the_kind():
    def take(dp_size, cp_size, **own):
        plan = rollpack.plan(TABLE, micro_batch_size=1, dp_size=dp_size, cp_size=cp_size, placeholders=True)
        first = next(iter(micro_batches(TABLE, plan, device="cpu", **own)))
        return first.dp_rank, first.cp_rank

    assert take(2, 2) == (0, 0)  # one process, which may pack for any
    with process(0, 1):
        assert take(2, 2) == (0, 0)
    with process(1, 2):
        assert take(1, 1) == (0, 0)
        assert take(1, 2, cp_rank=1) == (0, 1)
        assert take(2, 1, dp_rank=1) == (1, 0)
        with pytest.raises(rollpack.PlanError, match="has dp_size 2, and each of 2 processes would pack for dp_rank 0"):
            take(2, 1, cp_rank=0)
        with pytest.raises(rollpack.PlanError, match="has cp_size 2, and each of 2 processes would pack for cp_rank 0"):
            take(1, 2, dp_rank=0)
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "cp"))
        assert take(1, 2, mesh=mesh) == (0, 1)


def test_changed_masks_are_summed_over_the_dp_and_cp_ranks_and_no_others(monkeypatch):
    """Rank 5 of (pp 2, dp 2, tp 2) differs from rank 7 in dp; over tp or pp the same rollouts would be summed twice."""
    summed, all_reduce = [], torch.distributed.all_reduce

    def noted(tensor, op=torch.distributed.ReduceOp.SUM, group=None):
        summed.append(torch.distributed.get_process_group_ranks(group or torch.distributed.group.WORLD))
        all_reduce(tensor, op, group=group)

    monkeypatch.setattr(torch.distributed, "all_reduce", noted)

    def set_masks(packed, mesh=None):
        summed.clear()
        reducer = LossReducer(backend="none", mesh=mesh, denominators="current")
        reducer.set_masks([packed], [torch.from_numpy(packed.loss_mask)], cut=True)
        return summed[len(summed) // 2 :]  # whether all can go on is told first, over the same groups

    def of(dp_size, cp_size, dp_rank, cp_rank):
        cut = rollpack.plan(TABLE, micro_batch_size=2, dp_size=dp_size, cp_size=cp_size, placeholders=True)
        (packed,) = rollpack.pack(TABLE, cut, dp_rank=dp_rank, cp_rank=cp_rank)
        return packed

    assert set_masks(of(1, 1, 0, 0)) == []  # one process
    with process(5, 8):
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
        assert set_masks(of(2, 1, 0, 0), mesh) == [[5, 7]]
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp_replicate", "dp_shard", "cp"))
        assert set_masks(of(4, 2, 2, 1), mesh) == [[1, 5], [5, 7], [4, 5]]
        assert set_masks(of(2, 1, 1, 0), torch.distributed.new_group([4, 5])) == [[4, 5]]
        assert set_masks(of(4, 2, 2, 1)) == [list(range(8))]
        # Without a mesh nobody knows which of the eight are the two.
        with pytest.raises(rollpack.PlanError, match="the plan is for 2 dp x cp ranks, and 8 processes run; pass LossRed"):
            set_masks(of(2, 1, 1, 0))
    with pytest.raises(rollpack.PlanError, match="the plan is for 2 dp x cp ranks, and 1 process"):
        set_masks(of(2, 1, 1, 0))
