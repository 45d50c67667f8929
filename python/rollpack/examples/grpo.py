"""GRPO on a CPU: a small policy learns to guess numbers, with rollpack in the loop.

    python -m rollpack.examples.grpo
    torchrun --nproc-per-node 4 -m rollpack.examples.grpo --dp-size 2 --cp-size 2 --seeds 0

Each run starts anew, from one seed and under one mode. A picture of all rewards and losses is saved. Under torchrun rank 0
plays and the others get its rollouts; it also trains alone, and how far the two ways are apart is printed.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import rollpack
from rollpack.examples._game import LONGEST_RESPONSE, VOCABULARY, play
from rollpack.examples._policy import Policy
from rollpack.examples._show import bar, check, draw, rise
from rollpack.names import OURS as MODES
from rollpack.torch import LossReducer, Metrics, attention_mask, micro_batches, ranks_of, token_logprobs

PROMPTS = 40  # in each batch of rollouts, for two optimizer steps
CLIP = 0.2


class Point(NamedTuple):
    """What one batch of rollouts came to."""

    reward: float
    loss: float


class Curve(NamedTuple):
    """What a run came to: a point a batch, and the parameters [P] at its end."""

    points: list[Point]
    parameters: torch.Tensor


def train(
    mode: str,
    seed: int,
    *,
    steps: int,
    max_tokens_per_gpu: int = 512,
    mesh: DeviceMesh | None = None,
    each: Callable[[Point], object] = lambda _: None,
) -> Curve:
    """Train a fresh policy on ``steps`` batches of its own rollouts; on the ranks of ``mesh``, if there is one.

    All is float64, so that the same run on other ranks differs by no more than the order of its sums.
    """
    torch.manual_seed(seed)
    random = np.random.default_rng(seed)
    policy = Policy(VOCABULARY).double()
    model = policy if mesh is None else DistributedDataParallel(policy)
    dp_size, cp_size = (1, 1) if mesh is None else ranks_of(mesh)[:2]
    cp_group = None if mesh is None else mesh.get_group("cp")
    optimizer = torch.optim.AdamW(policy.parameters(), lr=0.003)
    reducer = LossReducer(backend="none" if mesh is None else "ddp", mesh=mesh)
    metrics = Metrics({"loss": mode if mode in MODES else "token_mean"})
    points = []
    for _ in range(steps):
        rollouts = from_rank_0(mesh, lambda: with_advantages(play(policy, random, prompts=PROMPTS)))
        plan = rollpack.plan(
            rollouts,
            loss_aggregation=mode,
            divisor=float(LONGEST_RESPONSE) if mode == "constant" else None,
            prompts_per_step=PROMPTS // 2,
            max_tokens_per_gpu=max_tokens_per_gpu,
            dp_size=dp_size,
            cp_size=cp_size,
        )
        for step in range(len(plan.steps)):
            with reducer.step():
                for micro_batch in micro_batches(
                    rollouts, plan, step=step, mesh=mesh, device="cpu", token_columns=["advantages", "old_logprobs"]
                ):
                    mask = attention_mask(micro_batch)
                    logits = model(micro_batch.tokens[None], micro_batch.position_ids[None], mask, cp_group)[0]
                    token_loss = clipped(
                        token_logprobs(logits, micro_batch),
                        micro_batch.columns["old_logprobs"],
                        micro_batch.columns["advantages"],
                    )
                    reducer(token_loss, micro_batch).backward()  # type: ignore[no-untyped-call]
                    metrics.add(micro_batch, {"loss": token_loss})
            optimizer.step()
            optimizer.zero_grad()
        points.append(Point(float(rollouts["reward"].to_numpy().mean()), metrics.log()["loss"]))
        each(points[-1])
    return Curve(points, torch.cat([parameter.detach().flatten() for parameter in policy.parameters()]))


def clipped(logprobs: torch.Tensor, old_logprobs: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    """The policy-gradient loss of each token, its ratio clipped (PPO, arXiv:1707.06347). All [T]."""
    ratio = torch.exp(logprobs - old_logprobs)
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)


def with_advantages(rollouts: pa.Table) -> pa.Table:
    """Each rollout's reward less its group's mean, over the group's deviation (GRPO, arXiv:2402.03300), for each token."""
    group, reward = (rollouts[name].to_numpy() for name in ("group_index", "reward"))
    size = np.bincount(group)
    centred = reward - (np.bincount(group, reward) / size)[group]
    advantage = centred / (np.sqrt(np.bincount(group, centred**2) / size)[group] + 1e-6)
    lengths = rollouts["loss_mask"].combine_chunks().value_lengths().to_numpy()
    return rollouts.append_column("advantages", pa.array([[a] * n for a, n in zip(advantage, lengths, strict=True)]))


def from_rank_0(mesh: DeviceMesh | None, make: Callable[[], pa.Table]) -> pa.Table:
    """What ``make`` gives on rank 0, on every rank."""
    if mesh is None:
        return make()
    made = [make() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(made)
    return made[0]


def differences(curves: Sequence[Curve], others: Sequence[Curve]) -> str:
    """The largest |a - b| of what two lists of runs came to, one by one."""
    both = list(zip(curves, others, strict=True))
    points = [(a, b) for one, other in both for a, b in zip(one.points, other.points, strict=True)]
    reward, loss = (max(abs(a[i] - b[i]) for a, b in points) for i in range(2))
    parameter = max((one.parameters - other.parameters).abs().max().item() for one, other in both)
    return f"reward {reward:.1e}, loss {loss:.1e}, parameter {parameter:.1e}"


def run_all(arguments: argparse.Namespace, mesh: DeviceMesh | None, what: str) -> Iterator[tuple[tuple[str, int], Curve]]:
    """Every mode and seed, with a bar that shows the reward of each step."""
    for mode, seed in product(arguments.modes, arguments.seeds):
        with bar(f"{what}{mode}, seed {seed}", arguments.steps) as each:
            budget = arguments.max_tokens_per_gpu
            curve = train(mode, seed, steps=arguments.steps, max_tokens_per_gpu=budget, mesh=mesh, each=each)
        yield (mode, seed), curve


def main(argv: Sequence[str] | None = None) -> dict[tuple[str, int], Curve]:
    """Run as the command line says. Returns the curve of each mode and seed."""
    parser = argparse.ArgumentParser(description="A small policy learns to guess numbers, on a CPU.")
    parser.add_argument("--modes", nargs="+", default=MODES, metavar="MODE", help="default: all four")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], metavar="N", help="default: 0 1 2")
    parser.add_argument("--steps", type=int, default=60, metavar="N", help="batches of rollouts (default: 60)")
    parser.add_argument("--max-tokens-per-gpu", type=int, default=512, metavar="N", help="of a micro-batch (default: 512)")
    parser.add_argument("--dp-size", type=int, default=1, metavar="D", help="data-parallel ranks, under torchrun")
    parser.add_argument("--cp-size", type=int, default=1, metavar="C", help="context-parallel ranks, under torchrun")
    parser.add_argument("--plot", default="grpo.png", metavar="FILE", help="default: grpo.png")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)  # tensors are small: threads would wait for each other
    check(parser, arguments, arguments.seeds)
    ranks, world = arguments.dp_size * arguments.cp_size, int(os.environ.get("WORLD_SIZE", "1"))
    if ranks != world:
        parser.error(f"{ranks} dp x cp ranks, and {world} processes: start it by torchrun --nproc-per-node {ranks}")
    first = os.environ.get("RANK", "0") == "0"
    curves = dict(run_all(arguments, None, "")) if first else {}
    if world > 1:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (arguments.dp_size, arguments.cp_size), mesh_dim_names=("dp", "cp"))
        spread = dict(run_all(arguments, mesh, f"{world} ranks, "))
        dist.barrier()  # gloo may wait for ever, or abort, where a rank leaves right after a gather
        dist.destroy_process_group()
        if first:
            ranks_text = f"dp {arguments.dp_size} x cp {arguments.cp_size} beside one process"
            print(f"{ranks_text}, largest differences: {differences(list(curves.values()), list(spread.values()))}")
    if first:
        for mode in arguments.modes:
            print(rise(mode, [curve.points for (of, _), curve in curves.items() if of == mode]))
        named = {mode: {f"seed {s}": c.points for (m, s), c in curves.items() if m == mode} for mode in arguments.modes}
        draw(arguments.plot, named)
        print(f"{arguments.plot}: reward and loss of each run")
    return curves


if __name__ == "__main__":
    main()
