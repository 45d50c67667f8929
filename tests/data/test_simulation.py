"""What ``simulate`` predicts, against values worked out by hand and against plain Python over the plan."""

import math

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen3Config, Qwen3ForCausalLM

import rollpack
from rollpack.cost import MODELS
from rollpack.simulation import Setting, simulate

#: A sample of s tokens costs 10 s + s * s: 144 at 8 tokens, 119 at 7, 96 at 6, 75 at 5, 39 at 3.
COST = rollpack.CostModel(10, 1)
#: One unit of cost takes a second.
UNIT = {"model": COST, "device": 1.0, "mfu": 1.0}


def of_lengths(*lengths, **columns):
    return pa.table({"tokens": [[7] * n for n in lengths], "response_length": [1] * len(lengths), **columns})


def only(simulation):
    (prediction,) = simulation.predictions
    return prediction


# ------------------------------------------------------------------------------------------- by hand


def test_the_slower_rank_sets_the_step():
    # {8} and {5, 3}: 144 and 114.
    found = only(simulate(of_lengths(8, 5, 3), budgets=[8], dp_sizes=[2], **UNIT))
    assert (found.num_steps, found.num_micro_batches) == (1, 1)
    assert (found.seconds, found.step_seconds, found.gpu_seconds) == (144, 144, 288)
    assert (found.idle_mean, found.idle_worst) == (15, 30)
    assert (found.fill, found.padding, found.peak_tokens) == (1, 0, 8)


@pytest.mark.parametrize("trainer", ["ddp", "pipeline"])
def test_ranks_that_wait_once_a_step(trainer):
    # No two fit together. {8, 5} takes 219, {7, 6} 215.
    found = only(simulate(of_lengths(8, 7, 6, 5), budgets=[8], dp_sizes=[2], trainer=trainer, **UNIT))
    assert (found.num_micro_batches, found.seconds) == (2, 219)
    assert (found.idle_mean, found.idle_worst) == (2, 4)


def test_ranks_that_wait_at_each_micro_batch():
    # {8, 7} run together, and {6, 5}: 144 + 96. All of it is 434.
    lengths = [8, 7, 6, 5]
    found = only(simulate(of_lengths(*lengths), budgets=[8], dp_sizes=[2], trainer="fsdp", **UNIT))
    assert (found.num_micro_batches, found.seconds) == (2, 240)
    assert found.idle_mean == (2 * 240 - 434) / 2
    # {8, 6} and {7, 5}, or {8, 5} and {7, 6}: which, the plan says.
    plan = rollpack.plan(of_lengths(*lengths), max_tokens_per_gpu=8, dp_size=2, cost=COST, sync="micro_batch")
    assert found.plan_id == plan.id
    beside_8 = {
        lengths[row] for rank in range(2) for k in range(2) for row in plan.rows(0, rank, k) if 0 in ranks_of(plan, rank)
    }
    assert found.idle_worst == (46 if 6 in beside_8 else 25)


def ranks_of(plan, rank):
    return [row for k in range(plan.steps[0].num_micro_batches) for row in plan.rows(0, rank, k)]


def test_context_parallel_ranks_share_a_micro_batch():
    # 5 tokens are padded to 2C = 4, so to 8: 144, half of it on each of two.
    found = only(simulate(of_lengths(5), budgets=[8], cp_sizes=[2], **UNIT))
    assert (found.seconds, found.gpu_seconds) == (72, 144)
    assert (found.peak_tokens, found.padding) == (4, 3 / 8)


def test_padding_of_the_micro_batch_is_of_its_last_sequence():
    # 3 and 5 in 16 positions: one of 3 tokens, and one of 13: 39 + 130 + 169, or of 5 and 11: 75 + 110 + 121.
    found = only(simulate(of_lengths(3, 5), budgets=[16], pad_micro_batch_to_multiple_of=16, **UNIT))
    assert found.seconds in {338, 306}
    assert (found.peak_tokens, found.padding) == (16, 1 / 2)


def test_small_micro_batches_are_not_free():
    samples = of_lengths(8, 8, 8)
    free = simulate(samples, budgets=[8, 24], **UNIT)
    assert [p.seconds for p in free.predictions] == [432, 432]
    assert free.best.setting.max_tokens_per_gpu == 8  # as fast, with less memory
    measured = simulate(samples, budgets=[8, 24], overhead=10, **UNIT)
    assert [p.seconds for p in measured.predictions] == [462, 442]
    assert measured.best.setting.max_tokens_per_gpu == 24


def test_a_placeholder_is_one_token():
    found = only(simulate(of_lengths(8), budgets=[8], dp_sizes=[2], placeholders=True, **UNIT))
    assert (found.seconds, found.idle_worst, found.idle_mean) == (144, 144 - 11, (144 - 11) / 2)


def test_peak_and_utilisation():
    found = simulate(of_lengths(8), budgets=[8], model=COST, device="h100", mfu=0.5)
    assert found.flops_per_second == 494.5e12
    assert math.isclose(only(found).seconds, 144 / 494.5e12)
    assert math.isclose(only(simulate(of_lengths(8), budgets=[8], model=COST, device=100)).seconds, 144 / 40)


def test_steps_add_up():
    # 144 and, after it, 39.
    found = only(simulate(of_lengths(8, 3), budgets=[8], global_batch_size=1, **UNIT))
    assert (found.num_steps, found.num_micro_batches, found.seconds, found.step_seconds) == (2, 2, 183, 91.5)


def test_best_is_the_least_gpu_seconds_and_on_as_many_gpus_the_shortest():
    # On one: 144 + 75 + 39. On two as above: 144, which is 288 GPU-seconds. With cp 8 tokens are padded by nothing: 144 / 2,
    # 5 are padded to 8, 3 to 4 (40 + 16): (144 + 144 + 56) / 2.
    found = simulate(of_lengths(8, 5, 3), budgets=[8], dp_sizes=[1, 2], cp_sizes=[1, 2], **UNIT)
    seconds = {(p.setting.dp_size, p.setting.cp_size): p.seconds for p in found.predictions}
    assert seconds == {(1, 1): 258, (1, 2): 172, (2, 1): 144, (2, 2): 100}  # {8} beside {5, 3}
    assert found.best.setting == Setting("sample_mean", 1, 1, 8)
    assert {n: p.setting[1:3] for n, p in found.best_by_gpus.items()} == {1: (1, 1), 2: (2, 1), 4: (2, 2)}


# ---------------------------------------------------------------------------------------- the grid


def test_a_setting_that_cannot_be_planned_is_no_end():
    found = simulate(of_lengths(8, 5, 3), budgets=[4, 8], dp_sizes=[2, 9], **UNIT)
    assert [p.setting for p in found.predictions] == [Setting("sample_mean", 2, 1, 8)]
    assert list(found.refused) == [Setting("sample_mean", *rest) for rest in ((2, 1, 4), (9, 1, 4), (9, 1, 8))]
    assert found.refused["sample_mean", 2, 1, 4].startswith("row 0 has 8 tokens")
    assert "dp_size" in found.refused["sample_mean", 9, 1, 8]


def test_a_budget_that_does_not_hold_the_padding_is_no_end():
    found = simulate(of_lengths(8, 5, 3), budgets=[8, 16], pad_to_multiple_of=16, **UNIT)
    assert [p.setting.max_tokens_per_gpu for p in found.predictions] == [16]
    (reason,) = found.refused.values()
    assert "does not hold one padded token, which takes 16" in reason


def test_nothing_at_all_can_be_planned():
    with pytest.raises(
        rollpack.PlanError,
        match=r"no setting can be planned; the first of 2, sample_mean, dp 1, cp 1, 4 tokens a GPU: row 0",
    ):
        simulate(of_lengths(8), budgets=[4, 5], **UNIT)


def test_modes_move_nothing_but_refuse_steps_that_cut_groups():
    samples = of_lengths(8, 5, 3, 6, group_index=[0, 0, 0, 1])
    modes = ["sample_mean", "prompt_mean", "constant", "trl:dapo"]
    whole = simulate(samples, budgets=[8], modes=modes, divisor=4, **UNIT)
    assert [p.setting.loss_aggregation for p in whole.predictions] == modes
    assert len({p.seconds for p in whole.predictions}) == 1
    assert len({p.plan_id for p in whole.predictions}) == 4
    cut = simulate(samples, budgets=[8], modes=modes[:2], global_batch_size=2, **UNIT)
    assert [p.setting.loss_aggregation for p in cut.predictions] == ["sample_mean"]
    (reason,) = cut.refused.values()
    assert "cuts group" in reason
    assert not simulate(samples, budgets=[8], modes=modes[:2], prompts_per_step=1, **UNIT).refused


def test_the_data_is_read_once():
    table = of_lengths(8, 5, 3)
    once = table.to_reader()  # it cannot be read a second time
    assert len(simulate(once, budgets=[8, 16], dp_sizes=[1, 2], **UNIT).predictions) == 4
    summary = rollpack.summarize(table)
    assert only(simulate(summary, budgets=[8], **UNIT)) == only(simulate(table, budgets=[8], **UNIT))


def test_the_plan_is_the_one_that_would_be_used():
    samples = of_lengths(8, 7, 6, 5)
    found = only(simulate(samples, budgets=[16], dp_sizes=[2], trainer="ddp", cost="tokens", pad_to_multiple_of=4, **UNIT))
    plan = rollpack.plan(samples, max_tokens_per_gpu=16, dp_size=2, sync="step", cost="tokens", pad_to_multiple_of=4)
    assert found.plan_id == plan.id


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"model": "gpt-9"}, "model is 'gpt-9'; it has to be qwen2.5-7b,"),
        ({"model": (1, 2, 3)}, "or a CostModel"),
        ({"device": "abacus"}, "device is 'abacus'; it has to be a100,"),
        ({"device": 0}, "has to be above 0"),
        ({"device": math.nan}, "has to be above 0"),
        ({"device": None}, "device is None; it has to be a number"),
        ({"mfu": 0}, "mfu is 0.0; it has to be above 0, and at most 1"),
        ({"mfu": 1.1}, "mfu is 1.1"),
        ({"overhead": -1}, "overhead is -1.0"),
        ({"overhead": math.inf}, "overhead is inf"),
        ({"trainer": "horse"}, "trainer is 'horse'; it has to be fsdp, ddp, pipeline"),
        ({"budgets": []}, "budgets is []; it has to be a list of at least one"),
        ({"modes": "sample_mean"}, "modes is 'sample_mean'; it has to be a list"),
        ({"dp_sizes": [1.5]}, "one of dp_sizes is 1.5; it has to be an integer"),
        ({"cp_sizes": ["x", 1]}, "one of cp_sizes is 'x'; it has to be an integer"),
        ({"budgets": 8}, "budgets is 8; it has to be a list"),
        ({"layout": "spiral"}, "layout is 'spiral'"),
        ({"modes": ["sample_mean", "foo"]}, "loss_aggregation is 'foo'; it has to be one of sample_mean,"),
        ({"modes": ["sample_mean", "trl:foo"]}, "loss_aggregation is 'trl:foo', and trl (1.16.0) has no 'foo'"),
        ({"modes": ["sample_mean", "verl:token-sum"]}, "no mode of ours is that"),
        ({"modes": ["sample_mean", "constant"]}, "'constant' needs divisor="),
        ({"dp_sizes": [1, 0]}, "dp_size is 0; it has to be from 1 to"),
        ({"cp_sizes": [1, -1]}, "cp_size is -1; it has to be from 1 to"),
        ({"budgets": [8, 0]}, "max_tokens_per_gpu is 0; it has to be at least 1"),
        ({"oversize": "bend"}, "oversize is 'bend'; it has to be error or alone"),
    ],
)
def test_wrong_arguments(wrong, says):
    with pytest.raises(rollpack.PlanError) as error:
        simulate(of_lengths(8), **UNIT | {"budgets": [8]} | wrong)
    assert says in str(error.value)


def test_progress_and_repr():
    moved = []
    found = simulate(of_lengths(8, 5, 3), budgets=[8, 4], dp_sizes=[2], progress=moved.append, **UNIT)
    assert moved == [1, 1]
    assert repr(found) == (
        "Simulation(1 setting and 1 refused, fsdp; best: sample_mean, dp 2, cp 1, 8 tokens a GPU, 144 s, 288 GPU-seconds)"
    )


# ------------------------------------------------------------------------------------ real lengths


@pytest.mark.parametrize("cp_size", [1, 2])
@pytest.mark.parametrize("trainer", ["fsdp", "ddp"])
@pytest.mark.parametrize("name", ["tau_bench_airline", "reflexion_fanout"])
def test_against_plain_python_over_the_plan(traces, name, trainer, cp_size):
    path, ranks = traces(name), 4
    model, overhead, rate = MODELS["qwen2.5-7b"], 0.01, 312e12 * 0.4
    found = only(
        simulate(
            path, model="qwen2.5-7b", device="a100", budgets=[16_384], dp_sizes=[ranks], cp_sizes=[cp_size],
            trainer=trainer, overhead=overhead, global_batch_size=50, remainder="drop",
        )
    )  # fmt: skip
    lengths = rollpack.summarize(path).column("total_length").tolist()
    plan = rollpack.plan(
        path, max_tokens_per_gpu=16_384, dp_size=ranks, cp_size=cp_size, global_batch_size=50, remainder="drop",
        cost=model, sync={"fsdp": "micro_batch", "ddp": "step"}[trainer],
    )  # fmt: skip
    assert found.plan_id == plan.id
    padded = [n if cp_size == 1 else -(-n // (2 * cp_size)) * 2 * cp_size for n in lengths]
    seconds, idle, positions = 0.0, np.zeros(ranks), []
    for step, counts in enumerate(plan.steps):
        micro_batches = [
            [[padded[row] for row in plan.rows(step, rank, k)] for k in range(counts.num_micro_batches)]
            for rank in range(ranks)
        ]
        times = np.array(
            [
                [sum(model.linear * s + model.quadratic * s * s for s in m) / (cp_size * rate) + overhead for m in rank]
                for rank in micro_batches
            ]
        )
        took = times.max(axis=0).sum() if trainer == "fsdp" else times.sum(axis=1).max()
        seconds += took
        idle += took - times.sum(axis=1)
        positions += [sum(m) for rank in micro_batches for m in rank]
    true = sum(lengths[row] for row in plan.to_arrow()["row"].to_pylist())
    assert found.seconds == pytest.approx(seconds, rel=1e-12)
    assert (found.idle_mean, found.idle_worst) == pytest.approx((idle.mean(), idle.max()), rel=1e-9)
    assert found.padding == pytest.approx(1 - true / sum(positions), abs=1e-12)
    assert found.peak_tokens == max(positions) // cp_size
    assert found.fill == plan.fill


# --------------------------------------------------------------------------------------- the FLOPs


def test_flops_by_hand():
    # A layer: queries 4 x 6, keys and values 2 x 4 x 3, out 6 x 4, the MLP 3 x 4 x 5; then 4 x 7 of the output layer.
    cost = rollpack.CostModel.of_transformer(layers=2, hidden=4, heads=2, kv_heads=1, head_dim=3, ffn=5, vocab=7)
    assert cost == (6 * (2 * (24 + 24 + 24 + 60) + 28), 6 * 2 * 2 * 3)
    wide = rollpack.CostModel.of_transformer(layers=1, hidden=4, heads=2, ffn=5, vocab=7)  # 2 heads of 2, all of their own
    assert wide == (6 * (4 * 16 + 60 + 28), 6 * 4)


def test_flops_of_a_real_model():
    """torch counts the products of a Qwen3: all pairs of tokens, of which a causal kernel computes half."""
    sizes = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 32, "ffn": 96, "vocab": 128}
    config = Qwen3Config(
        num_hidden_layers=2, hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        intermediate_size=96, vocab_size=128, attn_implementation="eager",
    )  # fmt: skip
    model, cost = Qwen3ForCausalLM(config), rollpack.CostModel.of_transformer(**sizes)
    for tokens in (16, 128):
        with FlopCounterMode(display=False) as counter:
            model(torch.zeros(1, tokens, dtype=torch.long)).logits.sum().backward()
        angles = counter.get_total_flops() - (cost.linear * tokens + 2 * cost.quadratic * tokens**2)
        # Some versions of transformers or torch make the rotary angles, tokens times half a head, by a product of matrices.
        assert angles in (0, 2 * tokens * sizes["head_dim"] // 2)


@pytest.mark.parametrize(
    ("name", "embedding", "vectors", "parameters"),
    [
        # Vectors, which no token is multiplied by as a matrix: two norms a layer and the last; biases of queries, keys and
        # values in Qwen2.5, norms of queries and keys in Qwen3.
        ("qwen2.5-7b", 152_064 * 3584, 28 * (2 * 3584 + 3584 + 2 * 512) + 3584, 7_615_616_512),
        ("qwen3-8b", 151_936 * 4096, 36 * (2 * 4096 + 2 * 128) + 4096, 8_190_735_360),
        ("qwen3-32b", 151_936 * 5120, 64 * (2 * 5120 + 2 * 128) + 5120, 32_762_123_264),
        ("llama-3.1-8b", 128_256 * 4096, 32 * 2 * 4096 + 4096, 8_030_261_248),
        ("llama-3.1-70b", 128_256 * 8192, 80 * 2 * 8192 + 8192, 70_553_706_496),
    ],
)
def test_models_have_as_many_parameters_as_are_published(name, embedding, vectors, parameters):
    """Half the bytes that model.safetensors.index.json of each model says its weights take in bfloat16."""
    assert MODELS[name].linear == 6 * (parameters - embedding - vectors)


@pytest.mark.parametrize(
    ("name", "pairs"),
    [
        ("qwen2.5-7b", 28 * 28 * 128),
        ("qwen3-8b", 36 * 32 * 128),
        ("qwen3-32b", 64 * 64 * 128),
        ("llama-3.1-8b", 32 * 32 * 128),
        ("llama-3.1-70b", 80 * 64 * 128),
    ],
)
def test_a_pair_of_tokens_is_multiplied_twice_in_each_head_of_each_layer(name, pairs):
    # Forward and backward are three passes of two products of two FLOPs each, and half the pairs are computed.
    assert MODELS[name].quadratic == 3 * 2 * 2 * pairs // 2


def test_heads_that_do_not_divide_have_a_width_of_their_own():
    # Queries 4 x 6, keys and values 2 x 4 x 6, out 6 x 4, the MLP 3 x 4 x 5; then 4 x 7.
    cost = rollpack.CostModel.of_transformer(layers=1, hidden=4, heads=3, head_dim=2, ffn=5, vocab=7)
    assert cost == (6 * (24 + 48 + 24 + 60 + 28), 6 * 3 * 2)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"layers": 0}, "layers of the transformer is 0"),
        ({"ffn": 1.5}, "ffn of the transformer is 1.5; it has to be an integer"),
        ({"heads": 3}, "heads=3 does not divide hidden=4; pass head_dim"),
        ({"head_dim": 0}, "head_dim of the transformer is 0"),
    ],
)
def test_a_transformer_that_is_none(wrong, says):
    with pytest.raises(rollpack.PlanError, match=says):
        rollpack.CostModel.of_transformer(**{"layers": 1, "hidden": 4, "heads": 2, "ffn": 5, "vocab": 7} | wrong)
