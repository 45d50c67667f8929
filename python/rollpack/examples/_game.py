"""The task: guess a number. After each wrong guess the environment says whether the number is higher or lower."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import torch

from rollpack.examples._policy import Policy

NUMBERS = 8
HIGHER, LOWER, BETWEEN = range(NUMBERS, NUMBERS + 3)
VOCABULARY = NUMBERS + 3
GUESSES = 4
LONGEST_RESPONSE = 2 * GUESSES - 1


@torch.no_grad()
def play(policy: Policy, random: np.random.Generator, *, prompts: int) -> pa.Table:
    """Rollouts of the policy, a row each: ragged groups of 3 to 8, and a rollout ends when its number is found.

    A prompt is ``BETWEEN low high``, and a response the guesses, with the environment's answers between them, which are
    not trained: 1 to LONGEST_RESPONSE tokens. The reward is 1 where the number was found, else 0.
    """
    bounds = np.sort(random.integers(0, NUMBERS, (prompts, 2)), axis=1)
    group = np.repeat(np.arange(prompts), random.integers(3, 9, prompts))
    secret = random.integers(bounds[:, 0], bounds[:, 1] + 1)[group]
    rows: list[dict[str, Any]] = [
        {"tokens": [BETWEEN, *bounds[g]], "loss_mask": [], "old_logprobs": [], "reward": 0.0, "group_index": g}
        for g in group
    ]
    playing = np.arange(len(rows))
    for turn in range(GUESSES):
        # All that still play have sequences of the same length.
        tokens = torch.tensor(np.array([rows[i]["tokens"] for i in playing]))
        length = tokens.shape[1]
        logits = policy(tokens, torch.arange(length), torch.ones(length, length, dtype=torch.bool).tril())[:, -1]
        logprobs = logits.log_softmax(-1).numpy()
        # The Gumbel trick: the largest of log p plus noise is a sample of p.
        guesses = (logprobs + random.gumbel(size=logprobs.shape)).argmax(axis=1)
        for i, guess, logprob in zip(playing, guesses, logprobs[np.arange(len(guesses)), guesses], strict=True):
            found = guess == secret[i]
            answer = [] if found or turn == GUESSES - 1 else [HIGHER if guess < secret[i] else LOWER]
            rows[i]["tokens"] += [guess, *answer]
            rows[i]["loss_mask"] += [1] + [0] * len(answer)
            rows[i]["old_logprobs"] += [logprob] + [0.0] * len(answer)
            rows[i]["reward"] = float(found)
        playing = playing[guesses != secret[playing]]
        if not len(playing):
            break
    return pa.Table.from_pylist(rows)
