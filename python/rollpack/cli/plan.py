"""``rollpack plan``: cut rollouts into steps and micro-batches, and show how well that went."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rollpack._files import check_place
from rollpack._text import counted
from rollpack.cli._arguments import UsageError, add_input, add_json, add_plan_options, plan_options
from rollpack.cli._input import Input
from rollpack.cli._output import progress, say, say_json, table
from rollpack.cli._spool import expand
from rollpack.planning import plan
from rollpack.plans import Plan

#: Steps that are shown to a person.
_SHOWN = 20

_EPILOG = """\
examples:
  rollpack plan rollouts.parquet --max-tokens-per-gpu 16384 --dp-size 8
  rollpack plan rollouts.parquet --micro-batch-size 4 --loss-aggregation prompt_mean --prompts-per-step 32
  rollpack plan 'shards/*.parquet' --max-tokens-per-gpu 16384 --cp-size 2 -o batch.plan

N rollouts, P prompt groups and T trained tokens are of the whole step; K micro-batches are run by each rank in it.
"""


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the command."""
    text = "cut rollouts into steps and micro-batches"
    parser = subparsers.add_parser("plan", help=text, description=f"{text.capitalize()}.", epilog=_EPILOG)
    add_input(parser)
    parser.add_argument("-o", "--output", metavar="PLAN", type=Path, help="save the plan here, for `pack --plan`")
    add_plan_options(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Plan, show, save."""
    output: Path | None = arguments.output
    if output is not None:
        check_output(output, arguments.files)
    made = make(arguments)
    if output is not None:
        made.save(output)
    tokens = tokens_of_ranks(made)
    if arguments.json:
        say_json(document(made, tokens) | {"output": None if output is None else str(output)})
        return 0
    for line in [repr(made), *_steps(made, tokens)]:
        say(line)
    if output is not None:
        say(f"saved as {output}")
    return 0


def check_output(output: Path, files: list[Any]) -> None:
    """Asked before any work: whether a file can be written there, in the place of none that is read."""
    if output.is_dir() or not output.parent.is_dir():
        raise UsageError(f"{output} is a directory, or lies in none; name a file to write")
    if output == Path("-"):
        raise UsageError("- would be stdout, which is not written to; name a file to write")
    check_place(output)
    if output.exists() and any(map(output.samefile, expand(files))):
        raise UsageError(f"{output} is one of the files to read; name another to write")


def make(arguments: argparse.Namespace) -> Plan:
    """The plan that the flags ask for."""
    with progress(arguments, "reading", "row") as moved:
        files = Input(arguments.files, moved)
        with files.located():
            return plan(files.source, **plan_options(arguments))


def tokens_of_ranks(made: Plan) -> npt.NDArray[np.int64]:
    """True tokens of each dp rank in each step, [steps, D]. The cp ranks of a dp rank share them."""
    placed, ranks = made.to_arrow(), made.settings.dp_size
    at = placed["step"].to_numpy() * ranks + placed["dp_rank"].to_numpy()
    tokens = np.zeros(len(made.steps) * ranks, dtype=np.int64)
    np.add.at(tokens, at, placed["total_length"].to_numpy())
    return tokens.reshape(len(made.steps), ranks)


def document(made: Plan, tokens: npt.NDArray[np.int64]) -> dict[str, Any]:
    """The plan's numbers, for JSON."""
    return {
        "plan_id": made.id,
        "num_rows": made.num_rows,
        "num_samples": made.to_arrow().num_rows,
        "fill": made.fill,
        "imbalance": made.imbalance,
        "steps": [
            {**step._asdict(), "tokens_per_dp_rank": ranks} for step, ranks in zip(made.steps, tokens.tolist(), strict=True)
        ],
        "dropped_rows": made.dropped_rows.tolist(),
        "oversize_rows": made.oversize_rows.tolist(),
        "settings": asdict(made.settings),
        "columns": dict(made.columns),
        "rollout_key": list(made.rollout_key),
    }


def _steps(made: Plan, tokens: npt.NDArray[np.int64]) -> list[str]:
    rows = [["step", "N", "P", "T", "K", "tokens a dp rank: min", "mean", "max"]]
    for number, (step, ranks) in enumerate(zip(made.steps[:_SHOWN], tokens, strict=False)):
        prompts = "-" if step.num_prompts is None else f"{step.num_prompts:,}"
        counts = [f"{step.num_rollouts:,}", prompts, f"{step.num_tokens:,}", f"{step.num_micro_batches:,}"]
        rows.append([str(number), *counts, f"{ranks.min():,}", f"{ranks.mean():,.0f}", f"{ranks.max():,}"])
    lines = table(rows)
    if len(made.steps) > _SHOWN:
        lines.append(f"... and {counted(len(made.steps) - _SHOWN, 'more step')} (--json has all)")
    return lines
