"""slime's and miles' Sample objects: to train data, and to Arrow and back.

A Sample is anything with the attributes ``tokens``, ``response_length``, ``loss_mask``, ``group_index``, ``rollout_id``,
``index``, ``reward``, ``remove_sample``, ``status`` and ``metadata`` (slime/utils/types.py, miles/utils/types.py).
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rollpack._errors import DataError
from rollpack._text import counted
from rollpack.planning import plan

#: What becomes a column of its own. All else of a sample goes into one column of JSON.
_TYPES = {
    "tokens": pa.list_(pa.int32()),
    "response_length": pa.int32(),
    "loss_mask": pa.list_(pa.uint8()),
    "group_index": pa.int64(),
    "rollout_id": pa.int64(),
    "index": pa.int64(),
    "remove_sample": pa.bool_(),
    "status": pa.string(),
    "rollout_log_probs": pa.list_(pa.float32()),
    "teacher_log_probs": pa.list_(pa.float32()),
}
_REST = "rest"

#: What else goes into train data, under the same name, where the samples have it: all of them, or none.
_CARRIED = (
    *("rollout_log_probs", "teacher_log_probs", "opd_reverse_kl", "rollout_routed_experts", "rollout_indexer_topk"),
    *("rollout_top_p_token_ids", "rollout_top_p_token_offsets", "rollout_topk_token_ids", "rollout_topk_log_probs"),
)
#: And what some of them may have, with its name there.
_SOME = {"train_metadata": "metadata", "multimodal_train_inputs": "multimodal_train_inputs"}

#: The estimators whose rewards are divided by their standard deviation.
_GRPO = {"grpo", "gspo", "cispo"}


def convert_samples_to_train_data(args: Namespace, samples: Sequence[Any]) -> dict[str, list[Any]]:
    """For ``--custom-convert-samples-to-train-data-path``: the train data of a rollout batch.

    A loss mask of None trains the whole response; that of a removed sample is all 0. A ``rollout_id`` of None gets a fresh
    id that no other sample has.

    The trainer leaves rewards to this hook. Under ``rewards_normalization``, for the estimators that the trainers do it for,
    ``rewards`` are r - mean over the prompt's rollouts, and with ``grpo_std_normalization`` that over (std + 1e-6) for those
    of GRPO's kind (slime/ray/rollout.py, ``_post_process_rewards``). Prompts are told by ``group_index`` under
    ``prompt_mean``; else they are runs of ``n_samples_per_prompt`` samples.

    Args:
        args: the trainer's, after ``validate``.
        samples: Sample objects, in lists of any depth.

    Returns:
        ``tokens, response_lengths, rewards, raw_reward, truncated, sample_indices, rollout_ids, loss_masks,
        rollout_mask_sums`` and under ``prompt_mean`` also ``prompt_mask_sums`` and ``group_indices`` (by which the split
        counts prompts). Where the samples have them also log-probabilities, top-p and top-k ids, routed experts,
        ``multimodal_train_inputs``, and ``train_metadata`` as ``metadata``.

    Raises:
        DataError: a None ``group_index`` under ``prompt_mean`` (other modes do not read it), a mask that is not as long as
            its response, rewards that cannot be normalised, or what :func:`rollpack.plan` finds wrong.
    """
    flat = list(_flatten(samples))
    mode = getattr(args, "loss_aggregation", "sample_mean")
    groups = [sample.group_index for sample in flat] if mode == "prompt_mean" else None
    if groups is not None and None in groups:
        row = groups.index(None)
        raise DataError(
            f"column 'group_index', row {row}: it is None, and prompt_mean needs to know the prompt of each sample",
            column="group_index",
            row=row,
        )
    masks = [_mask(row, sample) for row, sample in enumerate(flat)]
    ids = _rollout_ids([getattr(sample, "rollout_id", None) for sample in flat])
    raw = [sample.get_reward_value(args) if hasattr(sample, "get_reward_value") else sample.reward for sample in flat]
    sums = _mask_sums(flat, masks, ids, groups)
    data = {
        "tokens": [sample.tokens for sample in flat],
        "response_lengths": [sample.response_length for sample in flat],
        "rewards": _rewards(args, raw, ids, groups),
        "raw_reward": [(s.metadata or {}).get("raw_reward", r) for s, r in zip(flat, raw, strict=True)],
        "truncated": [int(_status(sample) == "truncated") for sample in flat],
        "sample_indices": [sample.index for sample in flat],
        "rollout_ids": ids,
        "loss_masks": masks,
        "rollout_mask_sums": sums.column("rollout_mask_sum").to_pylist(),
    }
    if groups is not None:
        data |= {"prompt_mask_sums": sums.column("prompt_mask_sum").to_pylist(), "group_indices": groups}
    return data | _carried(flat)


def samples_to_arrow(samples: Sequence[Any]) -> pa.Table:
    """A table with a row per sample: columns that :func:`rollpack.plan` reads, and what else a sample holds as JSON.

    It is what :func:`rollpack.summarize`, ``plan`` and ``pack`` take, if every ``rollout_id`` is set (else pass
    ``columns={"rollout_id": None}``). A ``loss_mask`` of None is null: fill it, or leave the column out, to plan. Samples
    are kept as they are: one with ``remove_sample`` keeps its mask, so take it out before you plan a dump.

    Log-probabilities are float32, as the trainers train with them.

    Raises:
        DataError: a field that is neither a column nor JSON (a tensor, an array).
    """
    flat = list(_flatten(samples))
    fields = [_fields(sample) for sample in flat]
    table: dict[str, pa.Array] = {}
    for name, kind in _TYPES.items():
        if any(name in of for of in fields):
            values = [of.pop(name, None) for of in fields]
            if name == "loss_mask":
                values = [None if mask is None else _binary(row, mask) for row, mask in enumerate(values)]
            table[name] = _array(name, values, kind)
    rewards = [of.get("reward") for of in fields]
    if all(reward is None or isinstance(reward, float) for reward in rewards):
        table["reward"] = pa.array([of.pop("reward", None) for of in fields], pa.float64())
    table[_REST] = pa.array([_json(row, of) for row, of in enumerate(fields)], pa.string())
    return pa.table(table)


def samples_from_arrow(table: pa.Table, make: Callable[[dict[str, Any]], Any] = dict) -> list[Any]:
    """The inverse of :func:`samples_to_arrow`: ``make`` of each row's fields, such as ``Sample.from_dict``."""
    columns = {name: _values(table[name].combine_chunks()) for name in table.column_names if name != _REST}
    rest = map(json.loads, table[_REST].to_pylist())
    return [
        make(dict(zip(columns, row, strict=True)) | others)
        for row, others in zip(zip(*columns.values(), strict=True), rest, strict=True)
    ]


def _values(column: pa.Array) -> list[Any]:
    """As Python objects; lists are cut from one, which is many times faster than a scalar each."""
    if not pa.types.is_list(column.type):
        return column.to_pylist()  # type: ignore[no-any-return]
    flat, ends = column.flatten().to_numpy(zero_copy_only=False).tolist(), np.cumsum(column.value_lengths().fill_null(0))
    known = column.is_valid().to_pylist()
    starts = [0, *ends[:-1].tolist()]
    return [flat[a:b] if is_valid else None for a, b, is_valid in zip(starts, ends.tolist(), known, strict=True)]


def _flatten(samples: Iterable[Any]) -> Iterable[Any]:
    for sample in samples:
        if isinstance(sample, list | tuple):
            yield from _flatten(sample)
        else:
            yield sample


def _mask(row: int, sample: Any) -> list[int]:
    if sample.loss_mask is not None and len(sample.loss_mask) != sample.response_length:
        raise DataError(
            f"column 'loss_mask', row {row}: it has {counted(len(sample.loss_mask), 'value')}, and the response "
            f"{counted(sample.response_length, 'token')}",
            column="loss_mask",
            row=row,
        )
    if sample.remove_sample:
        return [0] * sample.response_length
    if sample.loss_mask is None:
        return [1] * sample.response_length
    return _binary(row, sample.loss_mask)


def _binary(row: int, mask: Any) -> list[int]:
    """The values of a mask, be it a list, an array or a tensor, as integers."""
    values = mask.tolist() if hasattr(mask, "tolist") else list(mask)
    wrong = next((at for at, value in enumerate(values) if value not in {0, 1}), None)
    if wrong is not None:
        raise DataError(
            f"column 'loss_mask', row {row}: the value at position {wrong} is {values[wrong]}, and a mask holds only 0 "
            "and 1",
            column="loss_mask",
            row=row,
        )
    return [int(value) for value in values]


def _rollout_ids(given: Sequence[int | None]) -> list[int]:
    """The ids, and for each None one that is new."""
    taken = set(given)
    fresh = (number for number in range(len(given)) if number not in taken)
    return [next(fresh) if rollout is None else rollout for rollout in given]


def _mask_sums(
    samples: Sequence[Any], masks: Sequence[list[int]], ids: Sequence[int], groups: Sequence[Any] | None
) -> pa.Table:
    """``rollout_mask_sum`` and ``prompt_mask_sum`` of each sample, in order."""
    lengths = np.array([len(sample.tokens) for sample in samples], dtype=np.int64)
    table = pa.table(
        {
            "tokens": pa.LargeListArray.from_arrays(_offsets(lengths), np.zeros(lengths.sum(), np.int8)),
            "loss_mask": pa.array(masks, pa.list_(pa.int8())),
            "rollout_id": _array("rollout_id", ids),
            **({} if groups is None else {"group_index": _array("group_index", groups)}),
        }
    )
    mode = "sample_mean" if groups is None else "prompt_mean"
    return plan(table, loss_aggregation=mode, micro_batch_size=max(1, len(samples))).to_arrow().sort_by("row")


def _array(name: str, values: Sequence[Any], kind: pa.DataType | None = None) -> pa.Array:
    try:
        return pa.array(values, kind)
    except (pa.ArrowException, TypeError, OverflowError) as error:
        raise DataError(f"column {name!r} cannot be stored as {kind or 'ids of one type'}: {error}", column=name) from error


def _offsets(lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(lengths)])


def _carried(samples: Sequence[Any]) -> dict[str, list[Any]]:
    columns = {}
    for name in (*_CARRIED, *_SOME):
        values = [getattr(sample, name, None) for sample in samples]
        missing = [row for row, value in enumerate(values) if value is None]
        if len(missing) == len(values):
            continue
        if missing and name not in _SOME:
            raise DataError(
                f"column {name!r}, row {missing[0]}: it is None, and other samples have it", column=name, row=missing[0]
            )
        columns[_SOME.get(name, name)] = values
    return columns


def _status(sample: Any) -> Any:
    return sample.status.value if isinstance(sample.status, Enum) else sample.status


def _rewards(args: Namespace, raw: list[Any], ids: Sequence[int], groups: Sequence[Any] | None) -> list[Any]:
    """Rewards as the trainer's own conversion has them."""
    estimator = getattr(args, "advantage_estimator", None)
    if estimator not in {*_GRPO, "reinforce_plus_plus_baseline"} or not args.rewards_normalization:
        return raw
    if groups is None:
        size = args.n_samples_per_prompt
        if len(raw) != size * args.rollout_batch_size:
            raise DataError(
                f"there are {len(raw)} samples, and not n_samples_per_prompt x rollout_batch_size, {size} x "
                f"{args.rollout_batch_size}: the prompt of each reward is not known, to normalise it. Normalise rewards "
                "before, and pass --disable-rewards-normalization",
                column="reward",
            )
        groups = [row // size for row in range(len(raw))]
    by_group: dict[Any, dict[int, float]] = {}
    for reward, rollout, group in zip(raw, ids, groups, strict=True):
        if by_group.setdefault(group, {}).setdefault(rollout, reward) != reward:
            raise DataError(f"the samples of rollout {rollout} have several rewards, and need one", column="reward")
    divided = estimator in _GRPO and args.grpo_std_normalization
    scales = {}
    for group, of_rollouts in by_group.items():
        values = np.array(list(of_rollouts.values()), dtype=np.float64)
        scales[group] = values.mean(), values.std(ddof=1) + 1e-6 if divided and len(values) > 1 else 1.0
    return [float((reward - scales[g][0]) / scales[g][1]) for reward, g in zip(raw, groups, strict=True)]


def _fields(sample: Any) -> dict[str, Any]:
    if isinstance(sample, Mapping):
        return dict(sample)
    fields = dict(sample.to_dict() if hasattr(sample, "to_dict") else vars(sample))
    return fields | {"status": _status(sample)}


def _json(row: int, fields: dict[str, Any]) -> str:
    try:
        return json.dumps(fields)
    except (TypeError, ValueError) as error:
        name = next((name for name, value in fields.items() if not _is_json(value)), None)
        raise DataError(
            f"column {name!r}, row {row}: {error}. Turn it into lists, or set it to None before it is saved",
            column=name,
            row=row,
        ) from None


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True
