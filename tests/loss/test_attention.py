"""Models take a micro-batch as it is: packed and one by one, logits, losses and gradients are the same."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rollpack
from rollpack import _reference
from rollpack.testing import make_rollouts
from rollpack.testing.rollouts import Rollouts
from rollpack.torch import LossReducer, attention_mask, block_mask, token_logprobs

transformers = pytest.importorskip("transformers")

VOCABULARY = 31
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "attn_implementation": "sdpa",
}
MODELS = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)),
    "qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES)),
}
CUTS = {
    "one rank": {},
    "padded": {"pad_to_multiple_of": 8, "pad_micro_batch_to_multiple_of": 64},
    "zigzag over 2": {"cp_size": 2},
    "zigzag over 4": {"cp_size": 4, "pad_micro_batch_to_multiple_of": 16},
    "contiguous over 3": {"cp_size": 3, "layout": "contiguous"},
}


def make_model(name):
    torch.manual_seed(0)
    return MODELS[name]().double()


@pytest.fixture(scope="module")
def table():
    made = make_rollouts(prompts=3, longest=60, seed=3)
    tokens = [[t % VOCABULARY for t in row] for row in made["tokens"].to_pylist()]
    return made.set_column(made.schema.get_field_index("tokens"), "tokens", [tokens])


def gradients(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def one_by_one(model, table, mode):
    """Logits of each sample, the step loss and its gradient: every sequence alone, weights from the reference."""
    read = Rollouts.read(table)
    weights = _reference.step_gradient(mode, read.masks, read.rollouts, read.groups, divisor=64.0)
    total, alone = 0.0, []
    for tokens, weight in zip(table["tokens"].to_pylist(), weights, strict=True):
        logits = model(input_ids=torch.tensor([tokens])).logits[0]
        logprobs = logits[:-1].log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
        total = total - (torch.from_numpy(weight[1:]) * logprobs).sum()
        alone.append(logits.detach())
    total.backward()
    return alone, total.item(), gradients(model)


@pytest.mark.parametrize("mode", ["sample_mean", "prompt_mean", "token_mean", "constant"])
@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("name", MODELS)
def test_packed_and_one_by_one_agree(table, name, cut, mode):
    """``pytest -rP`` shows what they come to."""
    model = make_model(name)
    alone, loss, gradient = one_by_one(model, table, mode)
    model.zero_grad()
    plan = rollpack.plan(
        table, loss_aggregation=mode, divisor=64.0 if mode == "constant" else None, max_tokens_per_gpu=128, **cut
    )
    cp_size, reducer, found = plan.settings.cp_size, LossReducer(backend="none"), 0.0
    worst = 0.0
    ranks = [rollpack.pack(table, plan, cp_rank=rank) for rank in range(cp_size)]
    for packed in zip(*ranks, strict=True):
        parts = [m.to("cpu") for m in packed]
        # All ranks in one process: their queries one behind the other, as their keys are once they are gathered.
        tokens, positions = (torch.cat([getattr(m, f) for m in parts])[None] for f in ("tokens", "position_ids"))
        mask = torch.cat([attention_mask(m) for m in parts])[None, None]
        logits = model(input_ids=tokens, position_ids=positions, attention_mask=mask).logits[0]
        part = 0.0
        for micro_batch, own in zip(parts, logits.chunk(cp_size), strict=True):
            part = part + reducer(-token_logprobs(own, micro_batch), micro_batch)
            for sample, row in enumerate(micro_batch.rows.tolist()):
                here = micro_batch.segment_ids == sample
                there = alone[row][micro_batch.position_ids[here]]
                torch.testing.assert_close(own[here], there, rtol=1e-12, atol=1e-12)
                worst = max([worst, *(own[here] - there).abs().flatten().tolist()])
        part.backward()  # of all ranks at once: these models' norms round to float32, and so would parts of a gradient
        found += part.item()
    assert found == pytest.approx(loss, rel=1e-12)
    off = ((gradients(model) - gradient).abs().max() / gradient.abs().max()).item()
    print(f"largest differences: logits {worst:.1e}, loss {abs(found - loss) / abs(loss):.1e}, gradient {off:.1e}")
    assert off <= 1e-12


@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=5),
    cp_size=st.sampled_from([1, 2, 3, 4]),
    layout=st.sampled_from(["zigzag", "contiguous"]),
    padding=st.sampled_from([(1, 1), (3, 1), (1, 16), (4, 24)]),
)
@settings(max_examples=60, deadline=None)
def test_no_token_sees_another_sequence_or_a_later_one(lengths, cp_size, layout, padding):
    rows = [{"tokens": [7] * n, "loss_mask": [0] * n} for n in lengths]
    plan = rollpack.plan(
        rows,
        micro_batch_size=len(rows),
        cp_size=cp_size,
        layout=layout,
        pad_to_multiple_of=padding[0],
        pad_micro_batch_to_multiple_of=padding[1],
    )
    ranks = [next(rollpack.pack(rows, plan, cp_rank=rank)) for rank in range(cp_size)]
    segments, positions = (np.concatenate([getattr(m, f) for m in ranks]) for f in ("segment_ids", "position_ids"))
    for micro_batch in ranks:
        mask = attention_mask(micro_batch).numpy()
        assert mask.shape == (len(micro_batch.tokens), len(segments))
        assert mask.any(axis=1).all()  # an empty row is NaN
        for query, seen in enumerate(mask):
            segment, position = micro_batch.segment_ids[query], micro_batch.position_ids[query]
            if segment >= 0:
                assert (seen == ((segments == segment) & (positions <= position))).all()


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_flex_attention_sees_the_same(table, cut):
    from torch.nn.attention.flex_attention import flex_attention

    plan = rollpack.plan(table, max_tokens_per_gpu=128, **cut)
    cp_size = plan.settings.cp_size
    for rank in range(cp_size):
        micro_batch = next(rollpack.pack(table, plan, cp_rank=rank)).to("cpu")
        generator = torch.Generator().manual_seed(rank)
        query, key, value = (
            torch.randn(1, 2, len(micro_batch.tokens) * size, 8, generator=generator) for size in (1, cp_size, cp_size)
        )
        dense = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=attention_mask(micro_batch))
        flexible = flex_attention(query, key, value, block_mask=block_mask(micro_batch))
        torch.testing.assert_close(flexible, dense)


def test_a_placeholder_has_a_mask_too():
    rows = [{"tokens": [1, 2, 3], "loss_mask": [0, 1]}]
    plan = rollpack.plan(rows, micro_batch_size=1, dp_size=2, placeholders=True)
    (micro_batch,) = (m for rank in range(2) for m in rollpack.pack(rows, plan, dp_rank=rank) if m.is_placeholder)
    assert attention_mask(micro_batch).any(dim=1).all()


def test_masks_of_a_layout_that_is_not_known_are_refused():
    """Who adds one to the core is told what is missing, and gets no mask of another layout."""
    (micro_batch,) = rollpack.pack(
        {"tokens": [[1, 2]], "response_length": [1]},
        rollpack.plan([{"tokens": [1, 2], "response_length": 1}], micro_batch_size=1),
    )
    for mask in (attention_mask, block_mask):
        with pytest.raises(rollpack.PlanError, match="layout 'ring': it is one of zigzag, contiguous"):
            mask(dataclasses.replace(micro_batch, layout="ring"))
