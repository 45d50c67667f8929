"""slime's and miles' Sample objects: to train data, through the schedule to the loss, and to Arrow and back."""

from argparse import Namespace
from itertools import chain
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from megatron_trainers import (
    BATCH_KEYS,
    SPLIT_KEYS,
    Sample,
    Status,
    fsdp_loss,
    get_batch,
    megatron_loss,
    split,
    sum_of_sample_mean,
)

import rollpack
from rollpack import _reference
from rollpack.integrations import miles, slime

PROMPT_MEAN = Namespace(loss_aggregation="prompt_mean", calculate_per_token_loss=False, loss_aggregation_divisor=None)
DEFAULT = Namespace(loss_aggregation="sample_mean")


def four(**others):
    """The example of the README: groups 0 0 1 1."""
    masks = [None, [1, 1, 1], None, [1, 0, 1, 1]]
    return [
        Sample(tokens=[7] + [1] * n, response_length=n, loss_mask=mask, index=10 + i, group_index=i // 2, reward=float(i))
        for i, (n, mask) in enumerate(zip((1, 3, 2, 4), masks, strict=True))
    ]


# --- to train data --------------------------------------------------------------------------------------------------


def test_the_train_data_that_the_hook_has_to_return():
    samples = four()
    samples[1].status = Status.TRUNCATED
    samples[2].metadata = {"raw_reward": 0.25}
    data = slime.convert_samples_to_train_data(DEFAULT, [samples[:2], samples[2:]])  # slime nests them by prompt
    assert data == {
        "tokens": [[7, 1], [7, 1, 1, 1], [7, 1, 1], [7, 1, 1, 1, 1]],
        "response_lengths": [1, 3, 2, 4],
        "rewards": [0.0, 1.0, 2.0, 3.0],
        "raw_reward": [0.0, 1.0, 0.25, 3.0],
        "truncated": [0, 1, 0, 0],
        "sample_indices": [10, 11, 12, 13],
        "rollout_ids": [0, 1, 2, 3],
        "loss_masks": [[1], [1, 1, 1], [1, 1], [1, 0, 1, 1]],
        "rollout_mask_sums": [1, 3, 2, 3],
    }


def test_what_else_a_sample_holds_for_training_goes_along():
    samples = four()
    for sample in samples:
        sample.rollout_log_probs = [-0.5] * sample.response_length
    samples[1].train_metadata = {"source": "code"}
    data = slime.convert_samples_to_train_data(DEFAULT, samples)
    assert data["rollout_log_probs"][2] == [-0.5, -0.5]
    assert data["metadata"] == [None, {"source": "code"}, None, None]
    samples[2].rollout_log_probs = None
    with pytest.raises(rollpack.DataError, match="'rollout_log_probs', row 2: it is None, and other samples have it"):
        slime.convert_samples_to_train_data(DEFAULT, samples)


def test_prompt_mean_adds_its_denominators_and_the_groups_to_count():
    data = miles.convert_samples_to_train_data(PROMPT_MEAN, four())
    assert data["prompt_mask_sums"] == [4, 4, 5, 5]
    assert data["group_indices"] == [0, 0, 1, 1]


def test_samples_of_one_rollout_share_their_denominator_and_a_removed_one_counts_nothing():
    samples = four()
    samples[0].rollout_id = samples[1].rollout_id = 5
    samples[3].remove_sample = True
    data = slime.convert_samples_to_train_data(PROMPT_MEAN, samples)
    assert data["rollout_mask_sums"] == [4, 4, 2, 0]
    assert data["prompt_mask_sums"] == [4, 4, 2, 2]
    assert data["loss_masks"][3] == [0, 0, 0, 0]
    assert samples[3].loss_mask == [1, 0, 1, 1]


def test_a_fresh_rollout_id_collides_with_none():
    samples = four()
    samples[1].rollout_id, samples[3].rollout_id = 0, 2
    assert slime.convert_samples_to_train_data(DEFAULT, samples)["rollout_ids"] == [1, 0, 3, 2]


def test_a_missing_group_is_an_error_under_prompt_mean_and_unread_otherwise():
    samples = four()
    samples[2].group_index = None
    with pytest.raises(rollpack.DataError, match="'group_index', row 2: it is None") as error:
        slime.convert_samples_to_train_data(PROMPT_MEAN, samples)
    assert (error.value.column, error.value.row) == ("group_index", 2)
    for sample in samples:
        sample.group_index = object()
    slime.convert_samples_to_train_data(DEFAULT, samples)


def test_a_mask_of_another_length_is_an_error():
    samples = four()
    samples[1].loss_mask = [1, 1]
    with pytest.raises(rollpack.DataError, match="'loss_mask', row 1: it has 2 values, and the response 3 tokens"):
        slime.convert_samples_to_train_data(DEFAULT, samples)


@pytest.mark.parametrize("convert", [lambda s: slime.convert_samples_to_train_data(DEFAULT, s), slime.samples_to_arrow])
def test_a_mask_holds_0_and_1_in_whatever_it_is(convert):
    samples = four()
    samples[1].loss_mask, samples[2].loss_mask = torch.tensor([True, False, True]), [True, 1.0]
    masks = convert(samples)
    masks = masks["loss_masks"] if isinstance(masks, dict) else masks["loss_mask"].to_pylist()
    assert masks[1:] == [[1, 0, 1], [1, 1], [1, 0, 1, 1]]
    samples[1].loss_mask = [1, 0.5, 1]
    with pytest.raises(rollpack.DataError, match="'loss_mask', row 1: the value at position 1 is 0.5"):
        convert(samples)


def test_ids_of_two_kinds_are_an_error():
    samples = four(rollout_id=None)
    samples[0].rollout_id = "a"
    with pytest.raises(rollpack.DataError, match="'rollout_id' cannot be stored"):
        slime.convert_samples_to_train_data(DEFAULT, samples)
    with pytest.raises(rollpack.DataError, match="'rollout_id' cannot be stored as int64"):
        slime.samples_to_arrow(samples)


def test_a_rollout_of_two_prompts_is_an_error():
    samples = four()
    samples[1].rollout_id = samples[2].rollout_id = 9
    with pytest.raises(rollpack.DataError, match="rollout_id 9 is in group 1 here and in another group at row 1"):
        slime.convert_samples_to_train_data(PROMPT_MEAN, samples)


@pytest.mark.parametrize("mode", ["sample_mean", "prompt_mean"])
def test_rewards_are_normalised_over_the_prompts_rollouts(mode):
    """Rewards 0 1 and 2 3: each is half a unit from its mean, and their standard deviation is sqrt(1/2)."""
    batch = {"n_samples_per_prompt": 2, "rollout_batch_size": 2, "loss_aggregation": mode}
    grpo = Namespace(advantage_estimator="grpo", rewards_normalization=True, grpo_std_normalization=True, **batch)
    scale = np.sqrt(0.5) + 1e-6
    found = slime.convert_samples_to_train_data(grpo, four())
    assert found["rewards"] == pytest.approx([-0.5 / scale, 0.5 / scale] * 2)
    assert found["raw_reward"] == [0, 1, 2, 3]
    grpo.grpo_std_normalization = False
    assert slime.convert_samples_to_train_data(grpo, four())["rewards"] == [-0.5, 0.5, -0.5, 0.5]
    grpo.rewards_normalization = False
    assert slime.convert_samples_to_train_data(grpo, four())["rewards"] == [0, 1, 2, 3]


def test_rewards_of_prompts_that_are_not_known_are_not_normalised_together():
    batch = {"n_samples_per_prompt": 3, "rollout_batch_size": 2, "loss_aggregation": "sample_mean"}
    grpo = Namespace(advantage_estimator="grpo", rewards_normalization=True, grpo_std_normalization=True, **batch)
    with pytest.raises(rollpack.DataError, match="there are 4 samples, and not n_samples_per_prompt x .*, 3 x 2"):
        slime.convert_samples_to_train_data(grpo, four())
    grpo.loss_aggregation = "prompt_mean"
    samples = four()
    samples[0].rollout_id = samples[1].rollout_id = 7
    with pytest.raises(rollpack.DataError, match="samples of rollout 7 have several rewards"):
        slime.convert_samples_to_train_data(grpo, samples)


# --- the schedule ---------------------------------------------------------------------------------------------------

PARALLEL = {"dp_size": 2, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": None}
DYNAMIC = SimpleNamespace(use_dynamic_batch_size=True, max_tokens_per_gpu=40, micro_batch_size=None, balance_data=False)


def ragged():
    """Seven groups of two rollouts, of one or two samples each, some without a trained token."""
    random = np.random.default_rng(3)
    samples = []
    for rollout in range(14):
        for _ in range(int(random.integers(1, 3))):
            n = int(random.integers(1, 15))
            mask = (random.random(n) < 0.7).astype(int).tolist() if rollout != 4 else [0] * n
            sample = Sample(tokens=[7] * (n + 3), response_length=n, loss_mask=mask, index=len(samples))
            sample.group_index, sample.rollout_id, sample.reward = rollout // 2, rollout, 0.0
            samples.append(sample)
    return samples


@pytest.mark.parametrize("balance", [False, True])
@pytest.mark.parametrize("parallel", [{}, {"cp_size": 2}, {"vpp_size": 2, "microbatch_group_size_per_vp_stage": 3}])
@pytest.mark.parametrize("dynamic", [True, False])
def test_the_schedule_has_the_shape_and_the_promises_of_slimes(parallel, dynamic, balance):
    """``(partitions, micro_batch_indices, num_microbatches, global_batch_sizes)``, slime/utils/dp_schedule.py at 04e6743."""
    parallel = PARALLEL | parallel
    data = slime.convert_samples_to_train_data(PROMPT_MEAN, ragged())
    lengths, rollouts = [len(t) for t in data["tokens"]], data["rollout_ids"]
    args = SimpleNamespace(
        **vars(DYNAMIC) | {"use_dynamic_batch_size": dynamic, "balance_data": balance, "micro_batch_size": 2}
    )
    made = slime.build_dp_schedule(args, parallel, lengths, global_batch_size=4, rollout_indices=rollouts)
    partitions, indices, per_step, sizes = made
    assert sizes == [4, 4, 4]
    kept = [i for i, rollout in enumerate(rollouts) if rollout < 12]
    assert sorted(chain.from_iterable(partitions)) == kept  # the last two rollouts make no whole step
    for partition, of_rank in zip(partitions, indices, strict=True):
        assert list(chain.from_iterable(of_rank)) == list(range(len(partition)))
        assert len(of_rank) == sum(per_step)
        for b in of_rank:
            tokens = [lengths[partition[i]] for i in b]
            assert b
            assert sum(tokens) <= 40 * parallel["cp_size"] if dynamic else len(b) <= 2
    if parallel["vpp_size"] > 1:
        assert all(k % 3 == 0 for k in per_step)
    for step, rows in enumerate(made.steps()):
        assert {rollouts[row] for row in rows} == set(range(4 * step, 4 * step + 4))


def test_a_sample_over_the_budget_is_alone():
    args = SimpleNamespace(**vars(DYNAMIC) | {"max_tokens_per_gpu": 8})
    made = slime.build_dp_schedule(args, PARALLEL, [3, 20, 4, 4], global_batch_size=4, rollout_indices=[0, 1, 2, 3])
    alone = [
        [p[i] for i in b] for p, of_rank in zip(made.partitions, made.micro_batch_indices, strict=True) for b in of_rank
    ]
    assert [1] in alone


def test_with_groups_a_step_that_would_cut_one_is_an_error():
    data = slime.convert_samples_to_train_data(PROMPT_MEAN, ragged())
    lengths = [len(t) for t in data["tokens"]]
    with pytest.raises(rollpack.PlanError, match="global_batch_size 5 cuts group 2"):
        slime.build_dp_schedule(
            DYNAMIC,
            PARALLEL,
            lengths,
            global_batch_size=5,
            rollout_indices=data["rollout_ids"],
            group_indices=data["group_indices"],
        )


def test_prompts_are_counted_in_each_step_and_whole_groups_are_asked_for():
    data = slime.convert_samples_to_train_data(PROMPT_MEAN, four())
    lengths = [len(t) for t in data["tokens"]]
    made = slime.build_dp_schedule(DYNAMIC, PARALLEL, lengths, global_batch_size=2, rollout_indices=data["rollout_ids"])
    assert slime.prompt_columns(data, made) == {
        "prompt_mask_sums": [4, 4, 5, 5],
        "step_num_rollouts": [2, 2, 2, 2],
        "step_num_prompts": [1, 1, 1, 1],
    }
    data["group_indices"] = [0, 0, 0, 1]
    with pytest.raises(rollpack.DataError, match="step 0 has 2 of the 3 samples of group 0, and prompt_mean needs whole"):
        slime.prompt_columns(data, made)
    del data["group_indices"]
    with pytest.raises(rollpack.DataError, match="prompt_mean needs 'group_indices', and the train data has none"):
        slime.prompt_columns(data, made)


# --- all the way ----------------------------------------------------------------------------------------------------


def reference(samples, losses):
    masks = [np.array(s.loss_mask, dtype=bool) for s in samples]
    return _reference.step_loss(
        "prompt_mean", losses, masks, [s.rollout_id for s in samples], [s.group_index for s in samples]
    )


def run(trainer, of_ranks, schedule, losses, around):
    """The loss of each step, as the trainer reports it: the sum over ranks and micro-batches, averages undone."""
    found, first = [], 0
    for per_rank in schedule[2]:
        total = 0.0
        for of_rank in of_ranks:
            for index in range(first, first + per_rank):
                batch = get_batch(of_rank, index, [*BATCH_KEYS, *trainer.PROMPT_KEYS])
                own = sum_of_sample_mean(batch["response_lengths"], batch["loss_masks"], batch["rollout_mask_sums"])
                x = torch.cat([torch.from_numpy(losses[tokens[0]]) for tokens in batch["tokens"]])
                total += around(trainer.pg_loss_reducer(PROMPT_MEAN, batch, own)(x), per_rank).item()
        found.append(total)
        first += per_rank
    return found


@pytest.mark.parametrize("trainer", [slime, miles], ids=["slime", "miles"])
def test_from_samples_through_the_split_to_the_loss(trainer, monkeypatch):
    """Three steps over two ranks: each step's loss is the reference's, with the two keys added where the README says."""
    monkeypatch.setattr(trainer, "_share", lambda: slime.Share(0, 1))
    samples = ragged()
    for i, sample in enumerate(samples):
        sample.tokens[0] = i  # so that a batch tells which samples it has
    losses = [np.random.default_rng(i).normal(size=s.response_length) for i, s in enumerate(samples)]
    data = trainer.convert_samples_to_train_data(PROMPT_MEAN, samples)
    lengths, rollouts = [len(t) for t in data["tokens"]], data["rollout_ids"]
    made = trainer.build_dp_schedule(
        *(DYNAMIC, PARALLEL, lengths),
        global_batch_size=4,
        rollout_indices=rollouts,
        group_indices=data["group_indices"],
    )
    data |= trainer.prompt_columns(data, made)
    of_ranks = split(data, made, [*SPLIT_KEYS, *trainer.PROMPT_KEYS])

    def around(reduced, k):  # what Megatron then undoes: it averages over two ranks, and divides by K
        return megatron_loss(reduced, micro_batches=k, rollouts=4, dp_size=2, cp_size=1) / (2 * k)

    found = run(trainer, of_ranks, made, losses, around)
    for step, loss in enumerate(found):
        here = [i for i, s in enumerate(samples) if s.rollout_id // 4 == step]
        expected = reference([samples[i] for i in here], [losses[i] for i in here])
        assert loss == pytest.approx(expected, rel=1e-12)


def test_the_split_drops_what_is_not_in_its_list(monkeypatch):
    """slime's own list of keys: the denominators do not arrive, which is an error and no other mean."""
    monkeypatch.setattr(slime, "_share", lambda: slime.Share(0, 1))
    data = slime.convert_samples_to_train_data(PROMPT_MEAN, four())
    lengths = [len(t) for t in data["tokens"]]
    made = slime.build_dp_schedule(DYNAMIC, PARALLEL, lengths, global_batch_size=4, rollout_indices=data["rollout_ids"])
    data |= slime.prompt_columns(data, made)
    of_rank = split(data, made, SPLIT_KEYS)[0]
    with pytest.raises(rollpack.DataError, match="prompt_mean needs 'prompt_mask_sums', and the micro-batch has none"):
        slime.pg_loss_reducer(PROMPT_MEAN, get_batch(of_rank, 0, [*BATCH_KEYS, *slime.PROMPT_KEYS]), None)


def test_miles_fsdp_path(monkeypatch):
    """No schedule: rows are dealt out to ranks in turn, and a step is ``global_batch_size`` samples in a row."""
    samples = [s for s in ragged() if s.rollout_id < 8]
    samples = [next(s for s in samples if s.rollout_id == r) for r in range(8)]  # without fan-out
    for i, sample in enumerate(samples):
        sample.tokens[0] = i
    losses = [np.random.default_rng(i).normal(size=s.response_length) for i, s in enumerate(samples)]
    data = miles.convert_samples_to_train_data(PROMPT_MEAN, samples)
    args = Namespace(global_batch_size=4, balance_data=False)
    data |= miles.fsdp_prompt_columns(args, data)
    assert data["step_num_rollouts"] == [4] * 8
    assert data["step_num_prompts"] == [2] * 8
    partitions = [list(range(rank, 8, 2)) for rank in range(2)]
    dealt = (partitions, [[[0], [1], [2], [3]]] * 2, [2, 2], [4, 4])
    of_ranks = split(data, dealt, [*SPLIT_KEYS, *miles.PROMPT_KEYS])
    monkeypatch.setattr(miles, "_share", lambda: slime.Share(0, 1))
    found = run(miles, of_ranks, dealt, losses, lambda r, _: fsdp_loss(r, rollouts=4, dp_size=2) / 2)
    assert found == pytest.approx([reference(samples[i : i + 4], losses[i : i + 4]) for i in (0, 4)], rel=1e-12)
    args.balance_data = True
    with pytest.raises(rollpack.PlanError, match="--balance-data with several steps"):
        miles.fsdp_prompt_columns(args, data)


# --- Arrow ----------------------------------------------------------------------------------------------------------


def test_samples_to_arrow_and_back(tmp_path):
    samples = four()
    samples[0].metadata, samples[0].prompt = {"tool": "search", "turns": 3}, "2 + 2 ="
    samples[1].rollout_log_probs = [-0.5, -0.25, -2.0]
    samples[2].rollout_id, samples[2].remove_sample, samples[2].status = 4, True, Status.TRUNCATED
    table = slime.samples_to_arrow([samples[:2], samples[2:]])
    assert slime.samples_from_arrow(table, Sample.from_dict) == samples
    pq.write_table(table, tmp_path / "rollouts.parquet")
    assert slime.samples_from_arrow(pq.read_table(tmp_path / "rollouts.parquet"), Sample.from_dict) == samples


@pytest.mark.parametrize("rewards", [[1, True, None, "good"], [{"em": 1.0, "f1": 0.5}] * 4, [1.5, None, 0.0, -1.0]])
def test_any_reward_comes_back(rewards):
    samples = four()
    for sample, reward in zip(samples, rewards, strict=True):
        sample.reward = reward
    assert slime.samples_from_arrow(slime.samples_to_arrow(samples), Sample.from_dict) == samples


def test_a_dump_is_what_plan_takes():
    samples = ragged()
    table = slime.samples_to_arrow(samples)
    planned = rollpack.plan(table, loss_aggregation="prompt_mean", max_tokens_per_gpu=40)
    assert planned.steps[0].num_prompts == 7
    assert planned.steps[0].num_rollouts == 14
    sums = planned.to_arrow().sort_by("row")["prompt_mask_sum"].to_pylist()
    assert sums == slime.convert_samples_to_train_data(PROMPT_MEAN, samples)["prompt_mask_sums"]
    assert isinstance(table, pa.Table)


def test_what_is_no_json_is_named():
    samples = four()
    samples[2].metadata = {"image": torch.zeros(2)}
    with pytest.raises(rollpack.DataError, match="'metadata', row 2: .*not JSON serializable") as error:
        slime.samples_to_arrow(samples)
    assert (error.value.column, error.value.row) == ("metadata", 2)
