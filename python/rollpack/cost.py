"""What a sample costs a rank."""

from __future__ import annotations

from typing import NamedTuple

from rollpack._arguments import integer
from rollpack._errors import PlanError


class CostModel(NamedTuple):
    """A sample of s padded tokens costs ``linear * s + quadratic * s * s``; both are integers of at least 0.

    Pass a model's FLOPs per token and per token pair to balance by them.

    >>> CostModel.of_transformer(layers=1, hidden=8, heads=2, ffn=16, vocab=100)
    CostModel(linear=8640, quadratic=48)
    """

    linear: int
    quadratic: int = 0

    @classmethod
    def of_transformer(
        cls,
        *,
        layers: int,
        hidden: int,
        heads: int,
        ffn: int,
        vocab: int,
        kv_heads: int | None = None,
        head_dim: int | None = None,
    ) -> CostModel:
        """The FLOPs of a causal transformer, forward and backward, of sequences that attend only to themselves.

        A token takes ``6 N`` FLOPs and a pair of tokens ``12 layers heads head_dim`` (PaLM, arXiv:2204.02311, appendix B:
        6N + 12LHQT a token). Of the s * s pairs of a sequence a causal kernel computes half. N are the weights that a token
        is multiplied by: the projections of attention, the MLP's three matrices (it is gated) and the output layer; the
        embedding is looked up. What is computed again to save memory does not count.

        Args:
            layers: transformer layers.
            hidden: width of the residual stream.
            heads: query heads.
            ffn: width of the MLP: of a mixture of experts, experts per token times the width of one; of an MLP that is not
                gated, two thirds of its width.
            vocab: rows of the output layer.
            kv_heads: key and value heads; as many as ``heads`` if None.
            head_dim: width of a head; ``hidden / heads`` if None.

        Raises:
            PlanError: a number is no integer, or below 1, or ``heads`` does not divide ``hidden``.
        """
        given = {"layers": layers, "hidden": hidden, "heads": heads, "ffn": ffn, "vocab": vocab}
        given |= {"kv_heads": heads if kv_heads is None else kv_heads}
        given |= {} if head_dim is None else {"head_dim": head_dim}
        size = {name: integer(f"{name} of the transformer", value, least=1) for name, value in given.items()}
        if head_dim is None and size["hidden"] % size["heads"]:
            raise PlanError(f"heads={heads} does not divide hidden={hidden}; pass head_dim")
        width = size.get("head_dim", size["hidden"] // size["heads"])
        attention = 2 * size["hidden"] * width * (size["heads"] + size["kv_heads"])
        weights = size["layers"] * (attention + 3 * size["hidden"] * size["ffn"]) + size["hidden"] * size["vocab"]
        return cls(linear=6 * weights, quadratic=6 * size["layers"] * size["heads"] * width)


#: ``cost="attention"`` is a transformer whose attention costs as much as all else at 24,576 tokens.
NAMED = {"tokens": CostModel(1, 0), "attention": CostModel(24_576, 1)}


def cost_model(cost: str | CostModel) -> CostModel:
    """The model that ``cost=`` names."""
    if isinstance(cost, str):
        if cost not in NAMED:
            raise PlanError(f"cost is {cost!r}; it has to be {', '.join(NAMED)} or a CostModel")
        return NAMED[cost]
    if not isinstance(cost, tuple) or len(cost) != len(CostModel._fields):
        raise PlanError(f"cost is {cost!r}; it has to be {', '.join(NAMED)} or a CostModel")
    named = zip(CostModel._fields, cost, strict=True)
    return CostModel(*(integer(f"{name} of the cost model", value, least=0) for name, value in named))


#: FLOPs of models by name. Sizes are those of the config.json that each model is published with.
MODELS = {
    name: CostModel.of_transformer(
        layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, head_dim=head_dim, ffn=ffn, vocab=vocab
    )
    for name, layers, hidden, heads, kv_heads, head_dim, ffn, vocab in (
        ("qwen2.5-7b", 28, 3584, 28, 4, 128, 18_944, 152_064),
        ("qwen3-8b", 36, 4096, 32, 8, 128, 12_288, 151_936),
        ("qwen3-32b", 64, 5120, 64, 8, 128, 25_600, 151_936),
        ("llama-3.1-8b", 32, 4096, 32, 8, 128, 14_336, 128_256),
        ("llama-3.1-70b", 80, 8192, 64, 8, 128, 28_672, 128_256),
    )
}
