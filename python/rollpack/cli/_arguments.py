"""Flags that commands share, and what becomes of them."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable, Collection
from typing import Any

from rollpack._errors import RollpackError
from rollpack._sources import ROLES
from rollpack.cost import NAMED, CostModel
from rollpack.names import LAYOUTS
from rollpack.planning import plan


class UsageError(RollpackError):
    """The command line cannot be understood."""


def add_input(parser: argparse.ArgumentParser) -> None:
    """``FILE...``, ``--columns`` and ``--rollout-key``: what is read, under which names."""
    add_files(parser)
    group = parser.add_argument_group("columns")
    group.add_argument(
        "--columns",
        metavar="ROLE=NAME,...",
        type=_columns,
        action="extend",
        default=argparse.SUPPRESS,
        help=f"names in the data that differ, as tokens=input_ids; loss_mask= leaves one out; roles: {', '.join(ROLES)}",
    )
    group.add_argument(
        "--rollout-key",
        metavar="NAME,...",
        type=names,
        default=argparse.SUPPRESS,
        help="the columns that tell rollouts apart; group_index,rollout_id where ids are unique only within their prompt",
    )


def add_files(parser: argparse.ArgumentParser) -> None:
    """``FILE...``."""
    what = "Parquet, Arrow IPC or JSON lines: a path, a glob, a directory, or - for standard input"
    parser.add_argument("files", metavar="FILE", nargs="+", help=what)


def add_json(parser: argparse.ArgumentParser) -> None:
    """``--json``."""
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def add_common(parser: argparse.ArgumentParser) -> None:
    """What every command takes."""
    parser.add_argument("-q", "--quiet", action="store_true", help="show no progress")


def input_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The arguments ``columns`` and ``rollout_key`` that were given."""
    given = {name: getattr(arguments, name) for name in ("columns", "rollout_key") if hasattr(arguments, name)}
    if "columns" in given:
        given["columns"] = dict(given["columns"])
    return given


def add_plan_options(parser: argparse.ArgumentParser, without: Collection[str] = ()) -> None:
    """The arguments of :func:`rollpack.plan` as flags. What is not given stays out: its default is plan's."""
    group = parser.add_argument_group("plan (as the arguments of rollpack.plan)")
    for name, (kind, metavar, text) in PLAN_FLAGS.items():
        if name in without:
            continue
        default = inspect.signature(plan).parameters[name].default
        shown = "" if default is None or default is False else f" (default: {default})"
        options: dict[str, Any] = {"action": "store_true"} if kind is bool else {"type": kind, "metavar": metavar}
        group.add_argument(flag(name), dest=name, default=argparse.SUPPRESS, help=text + shown, **options)


def plan_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The arguments of :func:`rollpack.plan` that were given."""
    given = {name: getattr(arguments, name) for name in PLAN_FLAGS if hasattr(arguments, name)}
    return given | input_options(arguments)


def flag(name: str) -> str:
    """The flag of an argument."""
    return "--" + name.replace("_", "-")


def names(text: str) -> list[str]:
    """``a,b`` → ["a", "b"]; nothing → []."""
    return text.split(",") if text else []


def sizes(text: str) -> list[int]:
    """``1,2`` → [1, 2]: integers of at least 1."""
    try:
        parts = [int(part) for part in text.split(",")]
    except ValueError:
        parts = []
    if not parts or min(parts) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of integers of at least 1, such as 1,2,4")
    return parts


def layouts(text: str) -> list[str]:
    """``zigzag,contiguous`` → a list of some of :data:`LAYOUTS`."""
    parts = text.split(",")
    if not set(parts) <= set(LAYOUTS):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of {' and '.join(LAYOUTS)}")
    return parts


def _columns(text: str) -> list[tuple[str, str | None]]:
    pairs = []
    for pair in text.split(","):
        role, equals, name = pair.partition("=")
        if not equals or role not in ROLES:
            raise argparse.ArgumentTypeError(f"{pair!r} is not ROLE=NAME with a role of {', '.join(ROLES)}")
        pairs.append((role, name or None))
    return pairs


def _integer(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no integer") from None
    if not -(2**63) <= value < 2**63:
        raise argparse.ArgumentTypeError(f"{text} does not fit 64 bits")
    return value


def _cost(text: str) -> str | CostModel:
    if text in NAMED:
        return text
    try:
        return CostModel(*(int(part) for part in text.split(",")))
    except (ValueError, TypeError):
        known = ", ".join(NAMED)
        raise argparse.ArgumentTypeError(f"{text!r} is neither {known} nor LINEAR,QUADRATIC in integers") from None


#: Argument of plan → how its flag is read, what stands for the value, and what it does.
PLAN_FLAGS: dict[str, tuple[Callable[[str], Any], str, str]] = {
    "loss_aggregation": (str, "MODE", "sample_mean, prompt_mean, token_mean or constant; or a trainer's, as trl:dapo"),
    "divisor": (float, "L", "the constant of constant"),
    "empty": (str, "count|skip", "whether rollouts and groups without a trained token count in the mean"),
    "max_tokens_per_gpu": (_integer, "N", "a micro-batch has at most N x cp size tokens, padding included"),
    "micro_batch_size": (_integer, "N", "or at most N samples; exactly one of the two is needed"),
    "dp_size": (_integer, "D", "data-parallel ranks"),
    "cp_size": (_integer, "C", "context-parallel ranks"),
    "layout": (str, "|".join(LAYOUTS), "how sequences are cut over context-parallel ranks"),
    "global_batch_size": (_integer, "N", "rollouts a step; without it, all is one step"),
    "prompts_per_step": (_integer, "N", "or whole prompt groups a step"),
    "remainder": (str, "error|drop|keep", "what to do with an incomplete last step"),
    "oversize": (str, "error|alone", "what to do with a sample over the budget"),
    "placeholders": (bool, "", "fill up with masked dummies where samples are fewer than micro-batches"),
    "micro_batch_multiple": (_integer, "N", "make the micro-batches of a rank a multiple of N"),
    "pad_to_multiple_of": (_integer, "N", "pad each sequence to a multiple of N"),
    "pad_micro_batch_to_multiple_of": (_integer, "N", "pad each micro-batch to a multiple of N"),
    "cost": (_cost, "tokens|attention|LINEAR,QUADRATIC", "what ranks are balanced by"),
    "sync": (str, "step|micro_batch", "where ranks wait for each other"),
    "keep_together": (str, "rollout|group", "keep all samples of one on one rank"),
}
