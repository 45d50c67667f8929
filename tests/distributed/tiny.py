"""A tiny causal transformer that takes packed micro-batches, the rollouts it is trained on, and the truth about both."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.distributed as dist
from torch import nn

from rollpack import MicroBatch, _reference
from rollpack.testing import Rollouts, make_rollouts, token_losses
from rollpack.torch import LossReducer, token_logprobs

SHARED = Path(__file__).parents[3] / "shared" / "data"
VOCABULARY, HIDDEN, HEADS, LAYERS, POSITIONS = 61, 16, 2, 2, 128
DIVISOR = 16.0  # L of the mode constant
ENTROPY, VALUE = 0.1, 0.5


class _GatherOverRanks(torch.autograd.Function):
    """[T, ...] of each rank becomes [C, T, ...]; backward, each rank gets the sum of what all did with its part."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        gathered = [torch.empty_like(local) for _ in range(group.size())]
        dist.all_gather(gathered, local.contiguous(), group=group)
        return torch.stack(gathered)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad[ctx.group.rank()], None


class Attention(nn.Module):
    """Queries of this rank, keys and values of the whole micro-batch. No key bias: its gradient would be 0 but for noise."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.value, self.out = (nn.Linear(HIDDEN, HIDDEN) for _ in range(3))
        self.key = nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor, allowed: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        keys_values = torch.stack([self.key(x), self.value(x)], dim=1)  # [T, 2, H]
        if group is not None:
            keys_values = _GatherOverRanks.apply(keys_values, group).flatten(0, 1)  # [T·C, 2, H]
        q = self.query(x).unflatten(1, (HEADS, -1))
        k, v = keys_values.unflatten(2, (HEADS, -1)).unbind(1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / (HIDDEN // HEADS) ** 0.5
        attention = scores.masked_fill(~allowed, -torch.inf).softmax(dim=-1)
        return self.out(torch.einsum("hqk,khd->qhd", attention, v).flatten(1))


class Block(nn.Module):
    """Attention and two linear layers, each behind a norm and beside what it is added to."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(HIDDEN) for _ in range(2))
        self.attention = Attention()
        self.mlp = nn.Sequential(nn.Linear(HIDDEN, 2 * HIDDEN), nn.GELU(), nn.Linear(2 * HIDDEN, HIDDEN))

    def forward(self, x: torch.Tensor, allowed: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        x = x + self.attention(self.norms[0](x), allowed, group)
        return x + self.mlp(self.norms[1](x))


class TinyTransformer(nn.Module):
    """Logits [T, V] of a packed micro-batch and, of a critic, values [T]. Sequences do not see each other, nor padding."""

    def __init__(self, *, critic: bool = False, cp_group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.cp_group = cp_group
        self.embedding, self.position = nn.Embedding(VOCABULARY, HIDDEN), nn.Embedding(POSITIONS, HIDDEN)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.critic = nn.Linear(HIDDEN, 1) if critic else None

    def forward(self, micro_batch: MicroBatch[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return self.of_tokens(micro_batch.tokens, micro_batch.position_ids, micro_batch.segment_ids)

    def of_tokens(self, tokens: torch.Tensor, positions: torch.Tensor, segments: torch.Tensor) -> tuple[torch.Tensor, ...]:
        allowed = self._allowed(positions, segments)
        x = self.embedding(tokens) + self.position(positions % POSITIONS)
        for layer in self.layers:
            x = layer(x, allowed, self.cp_group)
        x = self.norm(x)
        logits = self.head(x)
        return (logits,) if self.critic is None else (logits, self.critic(x)[:, 0])

    def _allowed(self, positions: torch.Tensor, segments: torch.Tensor) -> torch.Tensor:
        """[T, T·C] bool: which keys a query sees. Padding sees itself alone, and nothing else sees it."""
        here = torch.stack([positions, segments], dim=1)
        whole, first = here, 0
        if self.cp_group is not None:
            whole = _GatherOverRanks.apply(here, self.cp_group).flatten(0, 1)
            first = self.cp_group.rank() * len(here)
        causal = whole[:, 0] <= positions[:, None]
        same = (whole[:, 1] == segments[:, None]) & (segments >= 0)[:, None]
        itself = torch.arange(len(whole)) == first + torch.arange(len(here))[:, None]
        return (causal & same) | itself


def terms(outputs: tuple[torch.Tensor, ...], micro_batch: MicroBatch[Any]) -> list[tuple[torch.Tensor, str | None]]:
    """The token losses [T] that make up the loss, each with its mode (None: the plan's)."""
    logits = outputs[0]
    parts = [(-token_logprobs(logits, micro_batch) * micro_batch.columns["advantages"], None)]
    if len(outputs) == 2:
        parts += [(ENTROPY * _entropy(logits), "sample_mean")]
        parts += [(VALUE * (outputs[1] - _target(micro_batch.position_ids)) ** 2, "sample_mean")]
    return parts


def loss(reducer: LossReducer, outputs: tuple[torch.Tensor, ...], micro_batch: MicroBatch[Any]) -> torch.Tensor:
    """What is back-propagated: every term through the reducer."""
    return sum(reducer(x, micro_batch, loss_aggregation=mode) for x, mode in terms(outputs, micro_batch))


def _entropy(logits: torch.Tensor) -> torch.Tensor:
    logprobs = logits.log_softmax(dim=-1)
    return (logprobs.exp() * logprobs).sum(dim=-1)


def _target(positions: torch.Tensor) -> torch.Tensor:
    return (positions % 8) / 8


def rollouts() -> pa.Table:
    """Agents' rollouts, cut short: ragged groups, ragged fan-out, sparse masks and one removed rollout, interleaved."""
    if SHARED.exists():
        reflexion = pq.read_table(SHARED / "reflexion_fanout.parquet").slice(0, 30)
        tau = pq.read_table(SHARED / "tau_bench_airline.parquet").slice(2, 5)
        rows = [(100 + r["group_index"], 1000 + r["rollout_id"], r, 150) for r in tau.to_pylist()]
        rows += [(r["group_index"], r["rollout_id"], r, 24) for r in reflexion.to_pylist()]
    else:
        made_up = make_rollouts(prompts=6, longest=2000).to_pylist()
        rows = [(r["group_index"], r["rollout_id"], r, 40) for r in made_up]
    columns: dict[str, list[Any]] = {name: [] for name in ("group_index", "rollout_id", "tokens", "loss_mask")}
    for i in np.random.default_rng(0).permutation(len(rows)):
        group, rollout, row, stride = rows[i]
        kept = range(0, len(row["tokens"]), stride)
        response = [t for t in kept if t >= len(row["tokens"]) - row["response_length"]]
        first = len(row["tokens"]) - row["response_length"]
        columns["group_index"].append(group)
        columns["rollout_id"].append(rollout)
        columns["tokens"].append([row["tokens"][t] % VOCABULARY for t in kept])
        columns["loss_mask"].append([int(row["loss_mask"][t - first] and rollout != rows[0][1]) for t in response])
    flat = token_losses(np.array([len(mask) for mask in columns["loss_mask"]]), seed=1)
    columns["advantages"] = np.split(flat, np.cumsum([len(mask) for mask in columns["loss_mask"]])[:-1])
    types = {"tokens": pa.list_(pa.int32()), "loss_mask": pa.list_(pa.int8()), "advantages": pa.list_(pa.float32())}
    return pa.table({name: pa.array(values, types.get(name)) for name, values in columns.items()})


def fresh(dtype: torch.dtype, *, critic: bool, cp_group: dist.ProcessGroup | None = None) -> TinyTransformer:
    """The model before training, the same everywhere and in every precision."""
    torch.manual_seed(0)
    model = TinyTransformer(critic=critic, cp_group=cp_group).to(torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(torch.float32) + 0.02 * torch.randn_like(parameter, dtype=torch.float32))
        for embedding in (model.embedding, model.position):  # a float32 of 1 moves in steps that 1e-5 would notice
            embedding.weight.mul_(0.25)
    return model.to(dtype)


def adamw(parameters: Any) -> torch.optim.AdamW:
    """AdamW whose ``eps`` is not far below the gradients, as Adam amplifies their rounding by 1 / eps."""
    return torch.optim.AdamW(parameters, lr=3e-2, weight_decay=0.1, eps=1e-2)


Tensors = dict[str, torch.Tensor]


class Truth:
    """One process, float64, the whole step at once: every sample alone, weighted as the reference says."""

    def __init__(self, table: pa.Table, mode: str, *, critic: bool) -> None:
        model = fresh(torch.float64, critic=critic)
        read = Rollouts.read(table)
        arguments: dict[str, Any] = {"divisor": DIVISOR}
        weights = [
            _reference.step_gradient(m, read.masks, read.rollouts, read.groups, **arguments) for m in (mode, "sample_mean")
        ]
        samples = list(zip(count(), table["tokens"].to_pylist(), table["advantages"].to_pylist()))
        self.start = copy(model, lambda p: p)
        optimizer = adamw(model.parameters())
        for step in range(3):
            total = torch.zeros((), dtype=torch.float64)
            for row, ids, advantages in samples:
                tokens = torch.tensor(ids)
                positions = torch.arange(len(tokens))
                outputs = model.of_tokens(tokens, positions, torch.zeros_like(tokens))
                # The logit at t is of token t + 1, which weighs what the reference says.
                of_mode, of_mean = (torch.from_numpy(w[row][1:]) for w in weights)
                advantage = torch.zeros(len(tokens), dtype=torch.float64)
                advantage[len(tokens) - len(advantages) :] = torch.tensor(advantages, dtype=torch.float64)
                logprobs = outputs[0].log_softmax(dim=-1)[:-1].gather(1, tokens[1:, None])[:, 0]
                total = total - (of_mode * advantage[1:] * logprobs).sum()
                if critic:
                    error = outputs[1] - _target(positions)
                    total = total + (of_mean * (ENTROPY * _entropy(outputs[0]) + VALUE * error**2)[:-1]).sum()
            total.backward()
            if step == 0:
                self.loss = total.item()
                self.gradient = copy(model, lambda p: p.grad)
            optimizer.step()
            optimizer.zero_grad()
        self.weights = copy(model, lambda p: p)

    def gradient_error(self, gradient: Tensors) -> float:
        """max|g - g0| / max|g0| over all parameters together."""
        return _largest(gradient, self.gradient) / _largest(self.gradient)

    def weights_error(self, weights: Tensors) -> float:
        """max|w - w0| / how far the weights moved at most."""
        return _largest(weights, self.weights) / _largest(self.weights, self.start)


def copy(model: nn.Module, of: Any) -> Tensors:
    """Each parameter's ``of``, whole, in float64."""
    whole = {name: of(parameter).detach() for name, parameter in model.named_parameters()}
    return {n: (x.full_tensor() if hasattr(x, "full_tensor") else x).to(torch.float64, copy=True) for n, x in whole.items()}


def _largest(a: Tensors, b: Tensors | None = None) -> float:
    assert b is None or a.keys() == b.keys(), (a.keys(), b.keys())
    # Not max() of floats: a NaN has to stay.
    return torch.stack([(a[n] - (0 if b is None else b[n])).abs().max() for n in a]).max().item()
