"""Which positions of a packed micro-batch see which: for attention without a varlen kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rollpack._errors import PlanError
from rollpack.names import LAYOUTS
from rollpack.packing import MicroBatch
from rollpack.torch.batches import as_tensor

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


def attention_mask(micro_batch: MicroBatch[Any]) -> torch.Tensor:
    """The dense mask of causal attention, as ``scaled_dot_product_attention`` and Hugging Face's models take it.

    No token sees another sequence. Padding sees its own sequence and is seen by padding alone, so that no row is empty.
    It takes T x T·C bytes: for long micro-batches take :func:`block_mask`, or a varlen kernel and ``cu_seqlens_padded``.

    Args:
        micro_batch: on the device where the mask is wanted, or as packed.

    Returns:
        [T, T·C] bool, True where the query (a position of this rank) sees the key. Keys are those of all cp ranks, rank 0's
        first, as gathering them over the cp group lays them. Hugging Face wants ``mask[None, None]``.
    """
    (query_sequence, query_position), (key_sequence, key_position) = _places(micro_batch)
    same = query_sequence[:, None] == key_sequence
    return same & (key_position <= query_position[:, None])


def block_mask(micro_batch: MicroBatch[Any]) -> BlockMask:
    """The same as :func:`attention_mask` for FlexAttention, which skips the blocks that nobody sees.

    Args:
        micro_batch: on the device where the mask is wanted, or as packed.

    Returns:
        A mask of T queries and T·C keys, broadcast over batch and heads.
    """
    from torch.nn.attention.flex_attention import create_block_mask

    (query_sequence, query_position), (key_sequence, key_position) = _places(micro_batch)

    def sees(_batch: torch.Tensor, _head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (query_sequence[query] == key_sequence[key]) & (key_position[key] <= query_position[query])

    queries, keys = len(query_position), len(key_position)
    return create_block_mask(sees, None, None, queries, keys, device=str(query_position.device))


_Place = tuple[torch.Tensor, torch.Tensor]


def _places(micro_batch: MicroBatch[Any]) -> tuple[_Place, _Place]:
    """Sequence, padding included, and position in it: of this rank's T positions, and of all ranks' T·C."""
    device = micro_batch.tokens.device if isinstance(micro_batch.tokens, torch.Tensor) else "cpu"
    bounds = as_tensor(micro_batch.cu_seqlens_padded, device).to(torch.int64)
    size, positions = micro_batch.cp_size, len(micro_batch.tokens)
    at = torch.arange(positions * size, device=device)
    sequence = torch.searchsorted(bounds[1:], at, right=True)
    position = at - bounds[sequence]
    # Which rank holds a position, as the layout says. Ranks keep the order of what they hold.
    if micro_batch.layout == "zigzag":
        chunk = position // torch.div(bounds.diff()[sequence], 2 * size, rounding_mode="floor").clamp(min=1)
        rank = torch.minimum(chunk, 2 * size - 1 - chunk)
    elif micro_batch.layout == "contiguous":
        rank = at // max(positions, 1)
    else:
        raise PlanError(f"no attention mask is known for layout {micro_batch.layout!r}: it is one of {', '.join(LAYOUTS)}")
    order = torch.argsort(rank, stable=True) if size > 1 else at
    sequence, position = sequence[order], position[order]
    here = slice(micro_batch.cp_rank * positions, (micro_batch.cp_rank + 1) * positions)
    return (sequence[here], position[here]), (sequence, position)
