"""A causal transformer that is small enough to learn on a CPU, and takes packed micro-batches."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

HEADS = 2


class GatherOverRanks(torch.autograd.Function):
    """[.., T, H] of each cp rank becomes [.., T·C, H], rank 0's first; backward, a rank gets what all did with its part."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        parts = [torch.empty_like(local) for _ in range(group.size())]
        dist.all_gather(parts, local.contiguous(), group=group)
        return torch.cat(parts, dim=-2)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad.chunk(ctx.group.size(), dim=-2)[ctx.group.rank()], None


class Block(nn.Module):
    """Attention and two linear layers, each behind a norm and beside what it is added to."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(2))
        # Without a bias: softmax does not feel that of keys, so its gradient would be rounding alone.
        self.query, self.keys_values = nn.Linear(hidden, hidden, bias=False), nn.Linear(hidden, 2 * hidden, bias=False)
        self.out = nn.Linear(hidden, hidden)
        self.mlp = nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden))

    def forward(self, x: torch.Tensor, mask: torch.Tensor, cp_group: dist.ProcessGroup | None) -> torch.Tensor:
        """Queries are those of this rank, keys and values those of all ranks in ``cp_group``."""
        normed = self.norms[0](x)
        keys_values = self.keys_values(normed)
        if cp_group is not None:
            keys_values = GatherOverRanks.apply(keys_values, cp_group)
        query, key, value = (
            part.unflatten(-1, (HEADS, -1)).transpose(-3, -2) for part in (self.query(normed), *keys_values.chunk(2, dim=-1))
        )
        seen = scaled_dot_product_attention(query, key, value, attn_mask=mask)
        x = x + self.out(seen.transpose(-3, -2).flatten(-2))
        beside: torch.Tensor = self.mlp(self.norms[1](x))
        return x + beside


class Policy(nn.Module):
    """Logits [B, T, vocabulary] of tokens [B, T] at their positions; ``mask`` [T, keys] says which keys each one sees."""

    def __init__(self, vocabulary: int, *, hidden: int = 32, layers: int = 2, positions: int = 64) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, hidden), nn.Embedding(positions, hidden)
        self.blocks = nn.ModuleList(Block(hidden) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, vocabulary)

    def forward(
        self,
        tokens: torch.Tensor,
        position_ids: torch.Tensor,
        mask: torch.Tensor,
        cp_group: dist.ProcessGroup | None = None,
    ) -> torch.Tensor:
        """``cp_group``: the cp ranks among which the sequences are cut, None where there is one."""
        x = self.token(tokens) + self.position(position_ids % self.position.num_embeddings)
        for block in self.blocks:
            x = block(x, mask, cp_group)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits
