"""In Tinker's environment: real Datum objects, whose plain sums are the step loss."""

import json
import warnings

import pytest
import tinker
import torch
from padded_case import chosen_case, off
from tinker.lib.chunked_fwdbwd_helpers import combine_fwd_bwd_output_results

from rollpack import DataError
from rollpack.integrations import tinker as ours

CASE = chosen_case()


def datum(row, **inputs):
    """As the cookbook makes it: one position for each target."""
    targets = torch.arange(CASE.width)
    named = {"target_tokens": targets, "logprobs": torch.zeros(CASE.width), "advantages": torch.ones(CASE.width)}
    named |= {"mask": CASE.mask[row].float()} | inputs
    tensors = {name: tinker.TensorData.from_torch(value) for name, value in named.items() if value is not None}
    return tinker.Datum(model_input=tinker.ModelInput.from_ints(list(range(CASE.width))), loss_fn_inputs=tensors)


def weights(data, name="advantages"):
    return torch.stack([torch.from_numpy(d.loss_fn_inputs[name].to_numpy()) for d in data]).double()


def compared():
    """What Tinker sums: advantages as they are made, and scaled."""
    data = [datum(row) for row in range(CASE.rows)]
    rows = []
    for mode, options in {
        "sample_mean": {},
        "prompt_mean": {"prompt_ids": CASE.groups},
        "token_mean": {},
        "constant": {"divisor": 64.0},
    }.items():
        expected = CASE.weights(mode, divisor=options.get("divisor"))
        found = weights(ours.scale_advantages(data, mode, **options))
        rows.append({"function": "rollpack on Tinker's sum", "mode": mode, "cut": "any", "off": off(found, expected)})
    assert weights(data).min() == 1  # the given ones are untouched
    of_weights = [datum(row, mask=None, weights=CASE.mask[row].float()) for row in range(CASE.rows)]
    found = weights(ours.scale_advantages(of_weights, "token_mean", loss_fn="cross_entropy"), "weights")
    assert off(found, CASE.weights("token_mean")) < 1e-7
    return rows


def logged():
    """As the client joins the results of one call sent in parts: sums over a step, then a mean over steps."""

    def result(value):
        return tinker.ForwardBackwardOutput(loss_fn_output_type="x", metrics={"loss:sum": value}, loss_fn_outputs=[])

    joined = combine_fwd_bwd_output_results([result(1.0), result(2.0)])
    assert joined.metrics["loss:sum"] == 3.0
    assert ours.logged([[joined, result(4.0)], [result(3.0)]]) == 5.0


def refused():
    """No mask, a mask of another length; and losses that do not follow their advantages are warned of."""
    for bad in (datum(0, mask=None), datum(0, mask=torch.ones(3))):
        with pytest.raises(DataError) as caught:
            ours.scale_advantages([datum(1), bad], "token_mean")
        assert (caught.value.column, caught.value.row) == ("mask", 1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours.scale_advantages([datum(0)], "token_mean", loss_fn="ppo")
        assert not caught
        ours.scale_advantages([datum(0)], "token_mean", loss_fn="dro")
        assert "dro" in str(caught[0].message)


if __name__ == "__main__":
    logged()
    refused()
    print(json.dumps({"compared": compared()}))
