"""slime's and miles' reducers by their formulas, and ours, on one real batch; see compare_megatron.py."""

import compare_megatron as compare
import numpy as np
import pytest

pytestmark = pytest.mark.skipif(not compare.TRACES.exists(), reason="the real rollouts are not here")
SAME = 1e-12
PER_ROLLOUT, PER_SAMPLE, PER_TOKEN, *OURS = compare.WAYS


@pytest.fixture(scope="module")
def table():
    return compare.batch()


@pytest.mark.parametrize("cut", compare.CUTS, ids=str)
@pytest.mark.parametrize("way", [PER_ROLLOUT, *OURS], ids=lambda way: f"{way.name}, {way.mode}")
def test_equal_where_it_is_right(way, cut, table):
    loss, gradient = compare.deviations(way, table, cut)
    assert loss <= SAME
    assert gradient <= SAME


@pytest.mark.parametrize("cut", compare.CUTS, ids=str)
def test_without_denominators_a_rollout_of_several_samples_counts_as_several(cut, table):
    """A token of sample s weighs 1 / (S M_s) in place of 1 / (N M_r), of S samples: the same under every cut."""
    loss, gradient = compare.deviations(PER_SAMPLE, table, cut)
    masks = table["loss_mask"].combine_chunks()
    sums = np.array([int(sum(mask)) for mask in masks.to_pylist()])
    rollouts = table["rollout_id"].to_pylist()
    of_rollout = dict.fromkeys(rollouts, 0)
    for rollout, trained in zip(rollouts, sums, strict=True):
        of_rollout[rollout] += trained
    samples, number = len(sums), len(of_rollout)
    weights = [(1 / samples / m, 1 / number / of_rollout[r]) for r, m in zip(rollouts, sums, strict=True) if m]
    assert gradient == pytest.approx(max(abs(a - b) for a, b in weights) / max(b for _, b in weights))
    assert loss > 1e-3


@pytest.mark.parametrize("cut", compare.CUTS, ids=str)
def test_the_token_count_has_one_for_each_removed_sample(cut, table):
    """T / (T + removed samples) of the gradient: the same under every cut."""
    loss, gradient = compare.deviations(PER_TOKEN, table, cut)
    sums = [int(sum(mask)) for mask in table["loss_mask"].to_pylist()]
    removed = sums.count(0)
    assert removed > 50
    assert gradient == pytest.approx(removed / (sum(sums) + removed))
    assert loss < gradient
