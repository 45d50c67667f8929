"""What a DeviceMesh or a process group says of ranks."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh

from rollpack._errors import PlanError

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
    """
    names = mesh.mesh_dim_names or ()
    data = [name for name in names if name.startswith("dp") or name in {"ddp", "fsdp", "hsdp"}]
    if not data:
        raise PlanError(f"the mesh has dimensions {list(names)}, none of which is data-parallel; name one 'dp' (and one 'cp')")
    dp_size, dp_rank = 1, 0
    for name in data:
        size = mesh[name].size()
        dp_size, dp_rank = dp_size * size, dp_rank * size + mesh.get_local_rank(name)
    if "cp" not in names:
        return Ranks(dp_size, 1, dp_rank, 0)
    return Ranks(dp_size, mesh["cp"].size(), dp_rank, mesh.get_local_rank("cp"))


def groups_of(mesh: Mesh | None, *, over_cp: bool) -> list[torch.distributed.ProcessGroup | None]:
    """The groups to reduce over, one after the other, to have a sum over dp, or over dp x cp. Empty: one process."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return []
    if mesh is None:
        return [None]
    if isinstance(mesh, torch.distributed.ProcessGroup):
        return [mesh]
    names = [n for n in mesh.mesh_dim_names or () if n.startswith("dp") or n in {"ddp", "fsdp", "hsdp"} or (n == "cp" and over_cp)]
    return [mesh.get_group(name) for name in names]


def check_sizes(mesh: Mesh | None, dp_size: int, cp_size: int) -> None:
    """Compare what a plan was made for with the ranks that there are.

    Raises:
        PlanError: they differ, or the group that gradients are averaged over is without cp.
    """
    if mesh is None:
        return
    if isinstance(mesh, torch.distributed.ProcessGroup):
        size = torch.distributed.get_world_size(mesh)
        if size == dp_size and cp_size > 1:
            raise PlanError(
                f"the process group has {size} ranks, which are the plan's dp ranks without its cp_size {cp_size}: gradients "
                "have to be averaged over the dp x cp group, or cp would count double"
            )
        if size != dp_size * cp_size:
            raise PlanError(f"the process group has {size} ranks, and the plan was made for dp {dp_size} x cp {cp_size}")
        return
    ranks = ranks_of(mesh)
    if (ranks.dp_size, ranks.cp_size) != (dp_size, cp_size):
        without = " (gradients have to be averaged over the dp x cp group: give the mesh a 'cp' dimension)"
        raise PlanError(
            f"the mesh has dp {ranks.dp_size} x cp {ranks.cp_size}, and the plan was made for dp {dp_size} x cp {cp_size}"
            + (without if ranks.cp_size == 1 < cp_size else "")
        )
