"""Runs in the environment of torchtitan: its loss beside ours, and the documented lines in its place, in real processes.

    python torchtitan_ranks.py RESULT

writes JSON. ``tests/trainers/test_torchtitan.py`` calls it. The rollouts are those of this folder's other tests.
"""

import inspect
import json
import os
import re
import sys
import tempfile
from pathlib import Path

import tiny
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, fully_shard
from torchtitan.components.loss import BaseLoss, CrossEntropyLoss
from torchtitan.distributed.fsdp import disable_fsdp_gradient_division

import rollpack
import trainers
from rollpack.testing import Cut
from rollpack.torch import LossReducer, token_logprobs

ROOT = Path(__file__).parents[2]
CUTS = [Cut(2, 1, "zigzag", 64), Cut(1, 2, "zigzag", 64), Cut(2, 2, "contiguous", 160)]


def loss_of_the_page():
    """``RolloutLoss``, as the page on trainers has it."""
    blocks = re.findall(
        r"^```python\n(.*?)^```$", (ROOT / "python" / "docs" / "trainers.md").read_text(), flags=re.MULTILINE | re.DOTALL
    )
    (text,) = [block for block in blocks if "class RolloutLoss" in block]
    names = {"LossReducer": LossReducer, "token_logprobs": token_logprobs}
    exec(text, names)
    return names["RolloutLoss"]


def as_base_loss():
    """The page's class as a loss of torchtitan: a BaseLoss whose call takes what torchtitan passes."""
    ours = loss_of_the_page()
    theirs = list(inspect.signature(BaseLoss.__call__).parameters)
    assert list(inspect.signature(ours.__call__).parameters)[: len(theirs) - 1] == theirs[:-1], theirs

    class Loss(ours, BaseLoss):
        pass

    return Loss()


def gradient_errors(cut, mode, folder):
    """Each rank's largest deviation from one process in float64, under torchtitan's way of averaging (it sums)."""
    table = tiny.rollouts()
    truth = tiny.Truth(table, mode, critic=False)
    plan = cut.plan(table, loss_aggregation=mode)
    size, pids = cut.dp_size * cut.cp_size, []
    for rank in range(size):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                train(rank, size, cut, table, plan, truth, folder)
                status = 0
            finally:
                os._exit(status)
        pids.append(pid)
    statuses = [os.waitpid(pid, 0)[1] for pid in pids]
    assert not any(statuses), statuses
    return max(float((Path(folder) / f"error{rank}").read_text()) for rank in range(size))


def train(rank, size, cut, table, plan, truth, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    dp_rank, cp_rank = divmod(rank, cut.cp_size)
    model = tiny.fresh(torch.float64, critic=False, cp_group=trainers.cp_group(cut.dp_size, cut.cp_size))
    for module in [*model.layers, model]:
        fully_shard(module)
    disable_fsdp_gradient_division(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other
    loss_fn = as_base_loss()
    for packed in rollpack.pack(table, plan, dp_rank=dp_rank, cp_rank=cp_rank, token_columns=["advantages"]):
        micro_batch = packed.to("cpu")
        (logits,) = model(micro_batch)
        loss, metrics = loss_fn(logits[None], micro_batch.labels[None], None, micro_batch=micro_batch)
        assert metrics == {}
        loss.backward()
    (Path(folder) / f"error{rank}").write_text(str(truth.gradient_error(tiny.copy(model, lambda p: p.grad))))
    dist.barrier()


def beside_cross_entropy():
    """torchtitan's loss, a sum over tokens divided by the step's, beside our token_mean, in float32."""
    table = tiny.rollouts()
    plan = rollpack.plan(table, loss_aggregation="token_mean", max_tokens_per_gpu=64)
    theirs_loss, ours_loss = CrossEntropyLoss(CrossEntropyLoss.Config()), LossReducer(backend="none")
    torch.manual_seed(0)
    theirs, ours, scale, worst, largest = 0.0, 0.0, 0.0, 0.0, 0.0
    for packed in rollpack.pack(table, plan):
        micro_batch = packed.to("cpu")
        values = torch.randn(len(micro_batch.tokens), tiny.VOCABULARY)
        a, b = (values.clone().requires_grad_() for _ in range(2))
        loss, _ = theirs_loss(a[None], micro_batch.labels[None], torch.tensor(plan.steps[0].num_tokens))
        logprobs = token_logprobs(b, micro_batch)
        mine = ours_loss(-logprobs, micro_batch)
        loss.backward()
        mine.backward()
        theirs, ours = theirs + loss.item(), ours + mine.item()
        scale += logprobs.abs().sum().item() / plan.steps[0].num_tokens
        worst, largest = max(worst, (a.grad - b.grad).abs().max().item()), max(largest, b.grad.abs().max().item())
    return {"loss": abs(theirs - ours) / scale, "gradient": worst / largest}


def main(result):
    found = {"cross_entropy": beside_cross_entropy(), "gradients": {}}
    for cut in CUTS:
        for mode in ("token_mean", "prompt_mean"):
            with tempfile.TemporaryDirectory() as folder:
                found["gradients"][f"{mode}, {cut}"] = gradient_errors(cut, mode, folder)
    Path(result).write_text(json.dumps(found))


if __name__ == "__main__":
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    main(*sys.argv[1:])
