"""In TRL's environment: the aggregation of each loss type, run by the trainer's own method, and packing."""

import json
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset, DatasetDict
from padded_case import REAL, as_policy_loss, chosen_case, kit, off
from trl import GRPOTrainer
from trl import pack_dataset as theirs

from rollpack import DataError, PlanError
from rollpack.integrations.trl import pack_dataset
from rollpack.testing import make_rollouts, padded_rows

CASE = chosen_case()
MODES = {
    "grpo": ("sample_mean", None),
    "bnpo": ("token_mean", None),
    "dr_grpo": ("constant", float(CASE.width)),
    "dapo": ("token_mean", None),
    "cispo": ("token_mean", None),
    "sapo": ("sample_mean", None),
    "vespo": ("token_mean", None),
    "luspo": ("constant", 1.0),
}


def trainer(loss_type, processes, micro_batches, log_probs, steps_per_generation=None):
    """A GRPOTrainer without a model: its log-probabilities are a parameter."""
    made = object.__new__(GRPOTrainer)
    made.__dict__ |= {
        "loss_type": loss_type,
        "importance_sampling_level": "token",
        "epsilon_low": 0.2,
        "epsilon_high": 5.0 if loss_type == "cispo" else 0.2,
        "beta": 0.0,
        "max_completion_length": CASE.width,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "use_vllm": False,
        "aux_loss_enabled": False,
        "_entropy_bonus_enabled": False,
        "current_gradient_accumulation_steps": micro_batches,
        "_metrics": {"train": defaultdict(list)},
        "model": torch.nn.Module(),
        "args": SimpleNamespace(
            delta=None,
            steps_per_generation=steps_per_generation or micro_batches,
            sapo_temperature_pos=1.0,
            sapo_temperature_neg=1.05,
            vespo_k_pos=2.0,
            vespo_lambda_pos=3.0,
            vespo_k_neg=3.0,
            vespo_lambda_neg=2.0,
        ),
        "accelerator": SimpleNamespace(num_processes=processes, gather=lambda x: x, reduce=lambda x, **_: x),
        "_get_per_token_logps_and_entropies": lambda *_, **__: (log_probs, torch.zeros_like(log_probs), None),
    }
    return made


def gradient(loss_type, cut, tokens, steps_per_generation=None):
    """Over the token losses, at a ratio of 1: what each token weighs. Summed over micro-batches, averaged over ranks."""
    log_probs = torch.zeros_like(CASE.losses).requires_grad_()
    for rank in cut:
        for rows in rank:
            one = torch.ones(len(rows), 1, dtype=torch.long)
            mask = CASE.mask[rows].long()
            inputs = {
                "prompt_ids": one,
                "prompt_mask": one,
                "completion_ids": mask,
                "completion_mask": mask,
                "advantages": -torch.ones_like(CASE.losses[rows]),
                "num_items_in_batch": torch.tensor(float(tokens)),
            }
            own = trainer(loss_type, len(cut), len(rank), log_probs[rows], steps_per_generation)
            (own._compute_loss(None, inputs) / len(cut)).backward()
    return log_probs.grad


def compared():
    """Each loss type beside the reference, under each cut."""
    rows = []
    for loss_type, (mode, divisor) in MODES.items():
        expected = CASE.weights(mode, divisor=divisor)
        for name, cut in CASE.cuts().items():
            found = gradient(loss_type, cut, CASE.sums.sum())
            rows.append({"function": "TRL _compute_loss", "mode": loss_type, "cut": name, "off": off(found, expected)})
    # The first optimizer step of a generation batch that is two of them.
    half = CASE.rows // 2
    first = [[list(range(half))]]
    found = gradient("dapo", first, CASE.sums.sum(), steps_per_generation=2)
    expected = CASE.mask / CASE.sums[:half].sum()
    expected[half:] = 0
    name = "a generation batch of 2 optimizer steps"
    rows.append({"function": "TRL _compute_loss", "mode": "dapo", "cut": name, "off": off(found, expected)})
    return rows


def checked():
    """The kit on each loss type. Its micro-batches differ in rows, which those of TRL do not."""

    def reducer(loss_type):
        def call(x, m):
            rows, mask = padded_rows(x, m), padded_rows(m.loss_mask, m).long()
            log_probs, advantages = as_policy_loss(rows)
            one = torch.ones(len(rows), 1, dtype=torch.long)
            inputs = {
                "prompt_ids": one,
                "prompt_mask": one,
                "completion_ids": mask,
                "completion_mask": mask,
                "advantages": advantages,
                "num_items_in_batch": torch.tensor(float(m.num_tokens)),
            }
            return trainer(loss_type, m.dp_size, m.num_micro_batches, log_probs)._compute_loss(None, inputs)

        return call

    wanted = {
        "grpo": ("sample_mean", None),
        "bnpo": ("token_mean", None),
        "dapo": ("token_mean", None),
        "luspo": ("constant", 1.0),
    }
    return [
        kit("TRL _compute_loss", name, reducer(name), mode, takes_losses=False, divisor=divisor, backend="hf_trainer_scaled")
        for name, (mode, divisor) in wanted.items()
    ]


def packing():
    """Every sequence whole and once, none over the budget, in no more examples than TRL needs."""
    table = make_rollouts(1, prompts=60, longest=512)
    tokens = table["tokens"].to_pylist()
    data = Dataset.from_dict(
        {"input_ids": tokens, "labels": [[-t for t in row] for row in tokens], "name": [str(i) for i in range(len(tokens))]}
    )
    packed = pack_dataset(data, 600)
    assert packed.column_names == ["input_ids", "labels", "seq_lengths"]
    seen = []
    for example in packed:
        assert len(example["input_ids"]) == sum(example["seq_lengths"]) <= 600
        at = 0
        for length in example["seq_lengths"]:
            seen.append(example["input_ids"][at : at + length])
            assert example["labels"][at : at + length] == [-t for t in seen[-1]]
            at += length
    assert sorted(seen) == sorted(tokens)
    both = pack_dataset(DatasetDict(train=data, test=data), 600, "bfd", {"desc": "Packing"})
    assert both["test"][:] == packed[:]
    of_trl = theirs(data.select_columns(["input_ids", "labels"]), 600)
    assert set(of_trl.column_names) == set(packed.column_names)
    for bad, error in ((data, PlanError), (data.select_columns(["name"]), DataError)):
        with pytest.raises(error):
            pack_dataset(bad, 100)
    with pytest.raises(PlanError, match="'wrapped'"):
        pack_dataset(data, 600, "wrapped")
    shuffled = pack_dataset(data.shuffle(seed=0).select_columns(["input_ids"]), 600)
    assert sum(map(sum, shuffled["input_ids"])) == sum(map(sum, tokens))
    return [len(packed), len(of_trl), -(-sum(map(len, tokens)) // 600)]


if __name__ == "__main__":
    print(json.dumps({"compared": compared(), "kit": checked() if REAL else [], "packing": packing()}))
