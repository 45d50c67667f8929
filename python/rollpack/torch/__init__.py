"""The torch side: per-token losses become a loss whose gradient does not depend on how the batch was cut."""

from rollpack.torch.backends import gradient_factor
from rollpack.torch.logprobs import token_logprobs
from rollpack.torch.reducer import LossReducer
from rollpack.torch.weights import scale_advantages, token_weights, weighted_sum

__all__ = [
    "LossReducer",
    "gradient_factor",
    "scale_advantages",
    "token_logprobs",
    "token_weights",
    "weighted_sum",
]
