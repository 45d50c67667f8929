"""In TRL's environment: what the mixin refuses, and says."""

import pytest
from datasets import Dataset
from trl import GRPOConfig

from rollpack import PlanError


def refused(told, train=False, **options):
    """``options`` of the trainer are refused with this text, when it is made or when it trains."""
    import trl_train

    class Trainer(trl_train.Trainer):
        loss_aggregation, divisor = "prompt_mean", None

    settings = {
        "output_dir": "out", "use_cpu": True, "report_to": [], "max_steps": 1, "loss_type": "dapo", "num_generations": 4,
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "steps_per_generation": 2,
        "max_completion_length": 8, "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True, "bf16": False,
    }  # fmt: skip
    with pytest.raises(PlanError, match=told):
        trainer = Trainer(
            model=trl_train.model(),
            args=GRPOConfig(**settings | options),
            reward_funcs=trl_train.reward,
            processing_class=trl_train.tokenizer(),
            train_dataset=Dataset.from_dict({"prompt": [f"w{i}" for i in range(16)]}),
        )
        if train:
            trainer.train()


def check():
    """All of them."""
    refused("loss_type='grpo'", loss_type="grpo")
    refused("importance_sampling_level='sequence'", importance_sampling_level="sequence")
    refused("an entropy bonus", entropy_coef=0.1)
    refused("no multiple of gradient_accumulation_steps", steps_per_generation=3)
    # Steps of two rows, of groups of four.
    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1, "steps_per_generation": 2}
    refused("prompt group 0 is cut", train=True, **options)
    print("all refused")
