"""The torch side: per-token losses become a loss whose gradient does not depend on how the batch was cut."""

from rollpack.torch.attention import attention_mask, block_mask
from rollpack.torch.backends import gradient_factor
from rollpack.torch.logprobs import token_logprobs
from rollpack.torch.mesh import Ranks, ranks_of
from rollpack.torch.metrics import Metrics
from rollpack.torch.reducer import LossReducer
from rollpack.torch.shards import check_same_plan, summarize_shards
from rollpack.torch.stream import MicroBatchDataset, MicroBatches, micro_batches
from rollpack.torch.weights import scale_advantages, token_weights, weighted_sum

__all__ = [
    "LossReducer",
    "Metrics",
    "MicroBatchDataset",
    "MicroBatches",
    "Ranks",
    "attention_mask",
    "block_mask",
    "check_same_plan",
    "gradient_factor",
    "micro_batches",
    "ranks_of",
    "scale_advantages",
    "summarize_shards",
    "token_logprobs",
    "token_weights",
    "weighted_sum",
]
