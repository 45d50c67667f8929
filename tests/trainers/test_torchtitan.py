"""torchtitan: the documented loss in the place of its own, with its own way of summing gradients, in real processes."""

import json
import os
from pathlib import Path

import environments
import pytest

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="ranks are forked")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    result = tmp_path_factory.mktemp("torchtitan") / "found.json"
    environments.run("torchtitan", Path(__file__).parents[1] / "distributed" / "torchtitan_ranks.py", result)
    return json.loads(result.read_text())


def test_the_gradient_is_that_of_one_process_however_it_is_cut(found):
    assert len(found["gradients"]) == 6
    for cut, error in found["gradients"].items():
        assert error <= 1e-12, cut


def test_its_cross_entropy_is_our_token_mean(found):
    """A sum over tokens, divided by the step's number of them: the same, up to the rounding of float32."""
    assert found["cross_entropy"]["loss"] <= 1e-6
    assert found["cross_entropy"]["gradient"] <= 1e-6
