"""What a DeviceMesh or a process group says of ranks."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh

from rollpack._errors import PlanError
from rollpack._text import counted
from rollpack.packing import MicroBatch
from rollpack.plans import Plan, as_plan

Mesh = DeviceMesh | torch.distributed.ProcessGroup


class Ranks(NamedTuple):
    """Sizes for :func:`rollpack.plan` and this process's place for :func:`rollpack.pack`."""

    dp_size: int
    cp_size: int
    dp_rank: int
    cp_rank: int


def ranks_of(mesh: DeviceMesh) -> Ranks:
    """The data-parallel and context-parallel ranks of a DeviceMesh with named dimensions.

    ``cp`` is context parallelism. ``dp`` and what begins with it (``dp_replicate``, ``dp_shard``), ``ddp``, ``fsdp`` and
    ``hsdp`` are data parallelism; several of them together count in the order of the mesh. Others (``tp``, ``pp``) do not
    count.

    Raises:
        PlanError: the mesh has no data-parallel dimension.
        TypeError: it is no DeviceMesh.
    """
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh is a {type(mesh).__name__}; it has to be a DeviceMesh")
    dp_size, dp_rank = 1, 0
    for name in _data_dimensions(mesh):
        size = mesh[name].size()
        dp_size, dp_rank = dp_size * size, dp_rank * size + mesh.get_local_rank(name)
    if not _context_dimension(mesh):
        return Ranks(dp_size, 1, dp_rank, 0)
    return Ranks(dp_size, mesh["cp"].size(), dp_rank, mesh.get_local_rank("cp"))


def _data_dimensions(mesh: DeviceMesh) -> list[str]:
    names = mesh.mesh_dim_names or ()
    data = [name for name in names if name.startswith("dp") or name in {"ddp", "fsdp", "hsdp"}]
    if not data:
        raise PlanError(f"the mesh has dimensions {list(names)}, and none is data-parallel; name one 'dp' (and one 'cp')")
    return data


def _context_dimension(mesh: DeviceMesh) -> list[str]:
    return [name for name in mesh.mesh_dim_names or () if name == "cp"]


def num_processes(group: torch.distributed.ProcessGroup | None = None) -> int | None:
    """How many processes the group has, all that there are if left out; None where torch.distributed was not initialised.

    Raises:
        PlanError: this process is not in the group.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    size = torch.distributed.get_world_size(group)
    if size < 0:
        raise PlanError(
            f"rank {torch.distributed.get_rank()} is not in the process group that it passed: only the ranks of a group call"
        )
    return size


def own_ranks(plan: Plan, dp_rank: int | None, cp_rank: int | None) -> tuple[int, int]:
    """The ranks that were passed, 0 for one that was not.

    Raises:
        PlanError: one of several was not passed, and several processes run: each of them would take rank 0.
    """
    sizes, passed = (as_plan(plan).settings.dp_size, plan.settings.cp_size), (dp_rank, cp_rank)
    for name, size, rank in zip(("dp", "cp"), sizes, passed, strict=True):
        if size > 1 and rank is None and (num_processes() or 1) > 1:
            raise PlanError(
                f"the plan has {name}_size {size}, and each of {num_processes()} processes would pack for {name}_rank 0: "
                f"pass this process's {name}_rank= (be it 0), or mesh= to micro_batches"
            )
    return dp_rank or 0, cp_rank or 0


def reducing_groups(mesh: Mesh | None) -> list[torch.distributed.ProcessGroup | None]:
    """The groups to reduce over, one after the other, for a sum over all dp x cp ranks."""
    if isinstance(mesh, torch.distributed.ProcessGroup):
        return [mesh]
    if mesh is not None:
        return [mesh.get_group(name) for name in [*_data_dimensions(mesh), *_context_dimension(mesh)]]
    return [None] if num_processes() else []


def check_all_reduce(mesh: Mesh | None, size: int) -> None:
    """That :func:`reducing_groups` are of ``size`` ranks, where no mesh says so.

    Raises:
        PlanError: it cannot be told which processes the ranks are.
    """
    world = num_processes() or 1
    if mesh is None and world != size:
        raise PlanError(f"the plan is for {size} dp x cp ranks, and {world} processes run; pass LossReducer(mesh=...)")


def collective_device(group: torch.distributed.ProcessGroup | None) -> torch.device:
    """Where a rank that has no tensor to go by makes one for the group's collectives."""
    on_cuda = "nccl" in torch.distributed.get_backend(group)
    return torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")


def check_ranks(mesh: Mesh | None, micro_batch: MicroBatch[Any]) -> None:
    """Compare what a micro-batch was planned and packed for with the ranks that there are, and this process's among them.

    Raises:
        PlanError: they differ, or the group that gradients are averaged over is without cp.
    """
    dp_size, cp_size = micro_batch.dp_size, micro_batch.cp_size
    if mesh is None:
        _check_not_all_the_first(micro_batch, None)
        return
    if isinstance(mesh, torch.distributed.ProcessGroup):
        size = torch.distributed.get_world_size(mesh)
        if size == dp_size and cp_size > 1:
            raise PlanError(
                f"the process group has {counted(size, 'rank')}, which are the plan's dp ranks without its cp_size "
                f"{cp_size}: gradients have to be averaged over the dp x cp group, or cp would count double"
            )
        if size != dp_size * cp_size:
            raise PlanError(
                f"the process group has {counted(size, 'rank')}, and the plan is for dp {dp_size} x cp {cp_size}"
            )
        _check_not_all_the_first(micro_batch, mesh)
        return
    ranks = _known_ranks(mesh)
    if (ranks.dp_size, ranks.cp_size) != (dp_size, cp_size):
        without = ": gradients have to be averaged over the dp x cp group, so give the mesh a 'cp' dimension"
        raise PlanError(
            f"the mesh has dp {ranks.dp_size} x cp {ranks.cp_size}, and the plan is for dp {dp_size} x cp {cp_size}"
            + (without if not _context_dimension(mesh) and cp_size > 1 else "")
        )
    if (ranks.dp_rank, ranks.cp_rank) != (micro_batch.dp_rank, micro_batch.cp_rank):
        raise PlanError(
            f"this process is dp_rank {ranks.dp_rank}, cp_rank {ranks.cp_rank} of the mesh, and the micro-batch was packed "
            f"for dp_rank {micro_batch.dp_rank}, cp_rank {micro_batch.cp_rank}: pass this process's ranks to pack"
        )


def _check_not_all_the_first(micro_batch: MicroBatch[Any], group: torch.distributed.ProcessGroup | None) -> None:
    """Without a DeviceMesh nobody knows which rank this process is. But not all are the first, which ``pack`` takes untold.

    Where there are more processes than ranks, several of them (tp, pp) are the first.
    """
    packed_for = micro_batch.dp_rank, micro_batch.cp_rank
    if packed_for != (0, 0) or num_processes(group) != micro_batch.dp_size * micro_batch.cp_size:
        return
    if rank := torch.distributed.get_rank(group):
        raise PlanError(
            f"this process is rank {rank} of {num_processes(group)}, and the micro-batch was packed for dp_rank 0, cp_rank "
            "0: pass this process's dp_rank= and cp_rank= to pack (or mesh= to micro_batches)"
        )


@lru_cache(maxsize=16)
def _known_ranks(mesh: DeviceMesh) -> Ranks:
    return ranks_of(mesh)
