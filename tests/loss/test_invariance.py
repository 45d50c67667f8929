"""The promise: the same rollouts give the same loss and the same gradient, however they are cut."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import rollpack
from rollpack.testing import Cut, Rollouts, cuts, make_rollouts, token_losses, verify
from rollpack.torch import LossReducer

SHARED = Path(__file__).parents[3] / "shared" / "data"
FILES = sorted(SHARED.glob("*.parquet"))


@st.composite
def batches(draw):
    """Ragged groups of rollouts of one or several samples, in any order, some of them without a trained token."""
    rows = []
    rollout = 0
    for group in range(draw(st.integers(1, 5))):
        for _ in range(draw(st.integers(1, 4))):
            for _ in range(draw(st.integers(1, 3))):
                mask = draw(st.lists(st.integers(0, 1), max_size=12))
                prompt = draw(st.integers(0 if mask and mask[0] == 0 else 1, 6))
                rows.append((group, rollout, [9] * (prompt + len(mask)), mask))
            rollout += 1
    rows = [row for row in draw(st.permutations(rows)) if row[2]] or [(0, 0, [1, 2], [1])]
    group, rollout_id, tokens, mask = zip(*rows, strict=True)
    types = {"tokens": pa.list_(pa.int32()), "loss_mask": pa.list_(pa.int8())}
    return pa.table(
        {
            "group_index": group,
            "rollout_id": [f"r{r}" for r in rollout_id],
            "tokens": pa.array(tokens, types["tokens"]),
            "loss_mask": pa.array(mask, types["loss_mask"]),
        }
    )


random_cuts = st.builds(
    Cut,
    dp_size=st.integers(1, 5),
    cp_size=st.integers(1, 5),
    layout=st.sampled_from(["zigzag", "contiguous"]),
    max_tokens_per_gpu=st.integers(1, 60),
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(table=batches(), cut=random_cuts, empty=st.sampled_from(["count", "skip"]))
def test_random_batches_under_random_cuts(table, cut, empty):
    for agreement in verify(table, [cut], empty=empty, divisor=7.0):
        assert agreement.agrees, agreement


def mean_of_micro_batch_means(token_loss, micro_batch):
    mask = torch.from_numpy(micro_batch.loss_mask)
    count = max(1, int(mask.sum()))
    return torch.where(mask, token_loss, 0).sum() / count / micro_batch.num_micro_batches


def multiplied_by_zero(token_loss, micro_batch):
    """Right in value, but a masked position keeps a gradient of its own."""
    correct = LossReducer(backend="none")(token_loss, micro_batch)
    return correct + 1e-3 * (token_loss * torch.from_numpy(~micro_batch.loss_mask)).sum()


def counted_cp_twice(token_loss, micro_batch):
    return LossReducer(backend="fsdp")(token_loss, micro_batch) / micro_batch.dp_size


def masked_nan(token_loss, micro_batch):
    poisoned = token_loss * torch.where(torch.from_numpy(micro_batch.loss_mask), 1.0, torch.nan)
    return (poisoned * 0.0).sum()


@pytest.mark.parametrize(
    "wrong", [mean_of_micro_batch_means, multiplied_by_zero, counted_cp_twice, masked_nan], ids=lambda f: f.__name__
)
def test_wrong_reducers_are_found_out(wrong):
    table = make_rollouts(seed=1, prompts=4, longest=512)
    for agreement in verify(table, cuts([700], dp_sizes=(2,), cp_sizes=(2,)), reduce=wrong):
        assert not agreement.agrees, agreement


def test_a_wrong_result_is_measured_not_only_noticed():
    """Twice the loss is off by |loss| / Σ w|x|, and by 1 in the gradient."""
    table = make_rollouts(seed=1, prompts=4, longest=512)
    reducer = LossReducer(backend="none")
    (agreement,) = verify(
        table,
        cuts([700], dp_sizes=(1,), cp_sizes=(1,)),
        modes=["token_mean"],
        dtypes=[torch.float64],
        reduce=lambda loss, batch: 2 * reducer(loss, batch),
    )
    rollouts = Rollouts.read(table)
    mask = np.concatenate(rollouts.masks)
    losses = token_losses(rollouts.lengths)[mask]
    assert agreement.gradient[torch.float64] == pytest.approx(1.0)
    assert agreement.loss[torch.float64] == pytest.approx(abs(losses.mean()) / np.abs(losses).mean())
    assert agreement.worst[torch.float64] == Cut(1, 1, "zigzag", 700)


def test_made_up_rollouts_have_what_is_hard_about_real_ones():
    table = make_rollouts(seed=0)
    assert table.equals(make_rollouts(seed=0))
    assert not table.equals(make_rollouts(seed=1))
    rollouts = Rollouts.read(table)
    sizes = np.bincount(rollouts.groups)
    fan_out = np.bincount(rollouts.rollouts)
    lengths = rollouts.lengths
    assert sizes.min() != sizes.max()
    assert fan_out.max() > 1
    assert lengths.max() > 8 * np.median(lengths)
    assert min(m.sum() for m in rollouts.masks) == 0
    assert any(0 < m.sum() < len(m) / 2 for m in rollouts.masks)


def test_token_losses_are_told_by_row_and_position_and_held_by_float32():
    lengths = np.array([3, 5, 2])
    losses = token_losses(lengths)
    assert losses[3:6].tolist() == token_losses(np.array([1, 3]))[1:4].tolist()  # row 1, positions 0 to 2
    assert (losses == losses.astype(np.float32)).all()
    assert -1 <= losses.min() < losses.max() < 3
    assert len(set(token_losses(np.array([1000])).tolist())) > 990
    assert (token_losses(lengths, seed=1) != losses).any()


@pytest.mark.skipif(not FILES, reason="the shared traces are not here")
@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_real_traces(file):
    """A few hard cuts of every file; `rollpack verify` tries all of them."""
    longest = int(rollpack.summarize(file).column("total_length").max())
    chosen = [Cut(1, 1, "zigzag", longest), Cut(8, 4, "zigzag", longest // 4 + 1), Cut(4, 2, "contiguous", longest)]
    for agreement in verify(file, chosen, divisor=4096.0):
        assert agreement.agrees, agreement


@pytest.mark.parametrize("longest", [2, 3, 16, 60])
def test_made_up_rollouts_may_be_short(longest):
    lengths = pa.compute.list_value_length(make_rollouts(prompts=4, longest=longest)["tokens"]).to_pylist()
    assert min(lengths) >= 2
    assert max(lengths) <= longest


def test_made_up_rollouts_have_a_prompt_and_a_response():
    with pytest.raises(rollpack.RollpackError, match="longest is 1"):
        make_rollouts(longest=1)
