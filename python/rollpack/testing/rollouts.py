"""Rollouts for tests: read in plain Python, made up, and given token losses that no cut changes."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rollpack import _reference
from rollpack._arguments import integer
from rollpack._sources import Request, Source
from rollpack._text import counted


@dataclass(frozen=True, eq=False)
class Rollouts:
    """The samples of a step as the reference takes them, read without the Rust core.

    Attributes:
        lengths: [n] int64, tokens of each sample.
        masks: a bool array per sample, as long as its sequence: which tokens are trained.
        rollouts: the rollout of each sample.
        groups: the prompt group of each sample, None where there are none.
    """

    lengths: npt.NDArray[np.int64]
    masks: list[_reference.Mask]
    rollouts: list[Hashable]
    groups: list[Hashable] | None

    def __repr__(self) -> str:
        trained = sum(int(mask.sum()) for mask in self.masks)
        groups = "without groups" if self.groups is None else "with groups"
        tokens = counted(int(self.lengths.sum()), "token")
        return f"Rollouts({counted(len(self.lengths), 'sample')}, {tokens}, {trained:,} trained, {groups})"

    @classmethod
    def read(
        cls, data: Any, *, columns: Mapping[str, str | None] | None = None, rollout_key: str | Sequence[str] = "rollout_id"
    ) -> Rollouts:
        """Read data that :func:`rollpack.summarize` takes. Groups are read where there is a column of them."""
        request = Request.make(columns, rollout_key)
        streams = Source.of(data).streams(request, project=False)
        table = pa.concat_tables([pa.table(stream) for stream in streams])
        names = {role: request.columns.get(role, role) for role in ("tokens", "response_length", "loss_mask", "group_index")}
        column = {role: table[name].combine_chunks() for role, name in names.items() if name in table.column_names}
        lengths = column["tokens"].value_lengths().to_numpy().astype(np.int64)
        given = _lists(column["loss_mask"]) if "loss_mask" in column else None
        if "response_length" in column:
            responses = column["response_length"].to_pylist()
        else:
            responses = [len(mask) for mask in given or []]
        masks = []
        for i, (length, response) in enumerate(zip(lengths, responses, strict=True)):
            mask = np.zeros(length, dtype=bool)
            mask[length - response :] = True if given is None else given[i] != 0
            masks.append(mask)
        key = [request.columns.get(part, part) for part in request.rollout_key]
        ids: list[list[Hashable]] = [table[name].to_pylist() for name in key if name in table.column_names]
        rollouts: list[Hashable] = list(zip(*ids, strict=True)) if len(ids) > 1 else [*ids, [*range(len(lengths))]][0]
        return cls(lengths, masks, rollouts, column["group_index"].to_pylist() if "group_index" in column else None)

    @property
    def starts(self) -> npt.NDArray[np.int64]:
        """[n + 1], where each sample begins if all lie one behind the other."""
        return np.concatenate([[0], np.cumsum(self.lengths)])

    def split(self, flat: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
        """A value per token of all samples, as one array per sample."""
        return np.split(flat, self.starts[1:-1])


def _lists(column: pa.Array) -> list[npt.NDArray[Any]]:
    values = column.flatten().to_numpy(zero_copy_only=False)
    return np.split(values, np.cumsum(column.value_lengths().to_numpy())[:-1])


def token_losses(lengths: npt.NDArray[np.int64], seed: int = 0) -> npt.NDArray[np.float64]:
    """A fixed pseudo-random loss for each token of each sample, told by its row and position alone.

    Args:
        lengths: [n] tokens of each sample.
        seed: another seed, another set.

    Returns:
        [Σ lengths] float64 in [-1, 3), each of which a float32 holds exactly.
    """
    row = np.repeat(np.arange(len(lengths), dtype=np.uint64), lengths)
    position = np.arange(len(row), dtype=np.uint64) - np.repeat(np.cumsum(lengths) - lengths, lengths).astype(np.uint64)
    # Mixing after splitmix64 (Steele, Lea and Flood, OOPSLA 2014).
    x = (row << np.uint64(32)) + position + np.uint64(seed) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return ((x ^ (x >> np.uint64(31))) >> np.uint64(40)).astype(np.float64) / 2**22 - 1.0


def make_rollouts(seed: int = 0, *, prompts: int = 48, longest: int = 8192) -> pa.Table:
    """A made-up batch with what is hard about real ones: a long tail, ragged groups, fan-out, masked turns.

    Args:
        seed: the same seed, the same batch.
        prompts: prompt groups, of 2 to 8 rollouts each; a rollout is 1 to 4 samples.
        longest: no sample has more tokens than this; at least 2.

    Returns:
        A table with ``group_index``, ``rollout_id``, ``tokens``, ``response_length``, ``loss_mask`` and ``reward``.
    """
    seed, prompts = integer("seed", seed, least=0), integer("prompts", prompts, least=1)
    longest = integer("longest", longest, least=2)  # a prompt and a response
    random = np.random.default_rng(seed)
    rows: list[dict[str, Any]] = []
    rollout = 0
    for group in range(prompts):
        prompt = min(int(random.integers(16, 256)), longest // 2)
        for _ in range(random.integers(2, 9)):
            reward = float(random.random() < 0.4)
            for _ in range(1 + (random.random() < 0.25) * random.integers(1, 4)):
                response = int(min(longest - prompt, 8 + int(random.lognormal(6.0, 1.0))))
                mask = np.ones(response, dtype=np.uint8)
                for _ in range(random.poisson(1.0)):  # what a tool or an environment wrote
                    start = random.integers(0, response)
                    mask[start : start + random.integers(1, 200)] = 0
                if random.random() < 0.02:  # a sample that was removed
                    mask[:] = 0
                rows.append(
                    {
                        "group_index": group,
                        "rollout_id": rollout,
                        "tokens": random.integers(0, 32_000, prompt + response, dtype=np.int32),
                        "response_length": response,
                        "loss_mask": mask,
                        "reward": reward,
                    }
                )
            rollout += 1
    return pa.Table.from_pylist(
        rows,
        schema=pa.schema(
            {
                "group_index": pa.int64(),
                "rollout_id": pa.int64(),
                "tokens": pa.list_(pa.int32()),
                "response_length": pa.int32(),
                "loss_mask": pa.list_(pa.uint8()),
                "reward": pa.float32(),
            }
        ),
    )
