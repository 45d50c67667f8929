"""In TRL's environment, on one process or several: real optimizer steps, and each one's gradient beside float64."""

import json
import os
import sys

import torch
import torch.distributed as dist
import trl_refused
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from rollpack.integrations.trl import AggregationMixin

EPSILON, WORDS = 0.2, 40


def tokenizer():
    words = {word: i for i, word in enumerate(["<pad>", "<eos>", *(f"w{i}" for i in range(WORDS))])}
    made = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")


def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS + 2, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        pad_token_id=0, eos_token_id=1, bos_token_id=None, max_position_embeddings=64,
    )  # fmt: skip
    return LlamaForCausalLM(config)


class Trainer(AggregationMixin, GRPOTrainer):
    loss_aggregation = (sys.argv[1:] or ["prompt_mean"])[0]
    divisor = None if sys.argv[2:3] in ([], ["none"]) else float(sys.argv[2])

    def training_step(self, model, inputs, num_items_in_batch):
        output = super().training_step(model, inputs, num_items_in_batch)
        used = self._buffered_inputs[(self._step - 1) % self.args.steps_per_generation]
        SEEN.append({k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in used.items()})
        LOSSES.append(float(output))
        return output


class Watch(TrainerCallback):
    """Compares the gradient of each optimizer step."""

    def on_step_begin(self, *_, **kwargs):
        SEEN.clear()
        LOSSES.clear()
        self.before = model().double()
        self.before.load_state_dict(unwrapped(kwargs["model"]).state_dict())

    def on_pre_optimizer_step(self, *_, **kwargs):
        rows = all_rows()
        total = float(reference(self.before, rows))
        worst = largest = 0.0
        for exact, found in zip(self.before.parameters(), unwrapped(kwargs["model"]).parameters(), strict=True):
            worst = max(worst, float((found.grad.double() - exact.grad).abs().max()))
            largest = max(largest, float(exact.grad.abs().max()))
        losses = torch.tensor(sum(LOSSES))
        if dist.is_initialized():
            dist.all_reduce(losses)
            losses /= dist.get_world_size()
        RESULTS.append({"off": worst / largest, "loss": abs(float(losses) - total), "rows": len(rows)})


def unwrapped(wrapped):
    return getattr(wrapped, "module", wrapped)


def all_rows():
    """The rows of this optimizer step on all processes, without padding."""
    rows = []
    for inputs in SEEN:
        for i in range(len(inputs["completion_ids"])):
            kept = inputs["completion_mask"][i].bool()
            row = {
                "prompt": inputs["prompt_ids"][i][inputs["prompt_mask"][i].bool()].tolist(),
                "completion": inputs["completion_ids"][i][kept].tolist(),
                "advantage": float(inputs["advantages"][i]),
            }
            for name in ("old_per_token_logps", "ref_per_token_logps"):
                row[name] = None if inputs.get(name) is None else inputs[name][i][kept].double()
            rows.append(row)
    if dist.is_initialized():
        gathered = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, rows)
        rows = [row for rows in gathered for row in rows]
    return rows


def reference(model, rows):
    """Back-propagates Σ weight × token loss, rows one by one, with weights counted here."""
    tokens = {}
    for row in rows:
        tokens.setdefault(tuple(row["prompt"]), []).append(len(row["completion"]))
    total = 0.0
    for row in rows:
        of_group = tokens[tuple(row["prompt"])]
        weight = {
            "prompt_mean": 1 / (len(tokens) * sum(of_group)),
            "sample_mean": 1 / (len(rows) * len(row["completion"])),
            "constant": 1 / (len(rows) * (Trainer.divisor or 1)),
        }[Trainer.loss_aggregation]
        ids = torch.tensor([row["prompt"] + row["completion"]])
        start = len(row["prompt"])
        log_probs = model(ids).logits[0, start - 1 : -1].log_softmax(-1).gather(-1, ids[0, start:, None])[:, 0]
        old = row["old_per_token_logps"]
        ratio = (log_probs - (log_probs.detach() if old is None else old)).exp()
        advantage = row["advantage"]
        loss = -torch.minimum(ratio * advantage, ratio.clamp(1 - EPSILON, 1 + EPSILON) * advantage)
        if BETA:
            apart = row["ref_per_token_logps"] - log_probs
            loss = loss + BETA * (apart.exp() - apart - 1) * ratio  # use_bias_correction_kl, TRL's default
        (weight * loss.sum()).backward()
        total += float(weight * loss.detach().sum())
    return total


def reward(completions, **_):
    return [float(len(text.split()) % 5) + NOISE[len(text) % 7] for text in completions]


SEEN, LOSSES, RESULTS = [], [], []
NOISE = [0.1, 0.7, 0.3, 0.9, 0.2, 0.5, 0.4]
BETA = float((sys.argv[4:] or ["0"])[0])
if __name__ == "__main__":
    steps_per_generation = int(sys.argv[3])
    prompts = [" ".join(f"w{(7 * i + j) % WORDS}" for j in range(1 + i % 4)) + f" w{i}" for i in range(WORDS)]
    # The reference model of the KL term is read from where the model was.
    home = f"model-{os.environ.get('RANK', '0')}"
    model().save_pretrained(home)
    args = GRPOConfig(
        output_dir="out", use_cpu=True, report_to=[], max_steps=2, loss_type="dapo", beta=BETA, learning_rate=0.5,
        max_grad_norm=0.0, per_device_train_batch_size=4, gradient_accumulation_steps=2, optim="sgd", epsilon=EPSILON,
        steps_per_generation=steps_per_generation, num_generations=4, max_completion_length=12, save_strategy="no",
        logging_strategy="no", disable_tqdm=True, seed=1, bf16=False, gradient_checkpointing=False,
    )  # fmt: skip
    trainer = Trainer(
        model=LlamaForCausalLM.from_pretrained(home), args=args, reward_funcs=reward, processing_class=tokenizer(),
        callbacks=[Watch()], train_dataset=Dataset.from_dict({"prompt": prompts}),
    )  # fmt: skip
    trainer.train()
    if not dist.is_initialized() or dist.get_rank() == 0:
        print("RESULTS", json.dumps(RESULTS))
    if dist.is_initialized():
        dist.barrier()  # gloo may wait for ever, or abort, where a rank leaves right after a gather
        dist.destroy_process_group()
    else:
        trl_refused.check()
