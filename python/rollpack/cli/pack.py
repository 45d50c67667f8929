"""``rollpack pack``: write the micro-batches of every rank."""

from __future__ import annotations

import argparse
import os
import warnings
from pathlib import Path
from typing import Any

from rollpack._files import unfinished
from rollpack._text import counted
from rollpack.cli import plan as planning
from rollpack.cli._arguments import UsageError, add_input, add_json, add_plan_options, flag, names, plan_options
from rollpack.cli._input import Input
from rollpack.cli._output import bytes_text, progress, say, say_json, table
from rollpack.packed import write_packed
from rollpack.plans import Plan

_EPILOG = """\
examples:
  rollpack pack rollouts.parquet --max-tokens-per-gpu 16384 --dp-size 8 -o packed
  rollpack pack rollouts.parquet --plan batch.plan -o packed --token-columns log_probs --sample-columns reward

DIR gets one Arrow IPC file a rank, dp0-cp0.arrow and so on, a row a micro-batch; it appears whole or not at all.
A run that is killed leaves .DIR.xxxxxxxx.tmp beside it; the next names that, and leaves it, as another may be writing.
rollpack.read_packed(path) gives the micro-batches of a file back.
"""


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the command."""
    text = "write the micro-batches of every rank to files"
    parser = subparsers.add_parser("pack", help=text, description=f"{text.capitalize()}.", epilog=_EPILOG)
    add_input(parser)
    parser.add_argument("-o", "--output", metavar="DIR", type=Path, required=True, help="where to; must not exist")
    parser.add_argument("--plan", metavar="PLAN", type=Path, help="what `plan -o` saved, in place of the plan flags")
    for name, what in (("token_columns", "a number for each response token"), ("sample_columns", "a number a sample")):
        text = f"columns to carry along, of {what}"
        parser.add_argument(flag(name), metavar="NAME,...", type=names, action="extend", default=[], help=text)
    add_plan_options(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Plan where no plan is given, pack, and list what was written."""
    output: Path = arguments.output
    # Asked before any work.
    if os.path.lexists(output):
        raise FileExistsError(f"{output} is there already; remove it, or choose another place")
    if not output.parent.is_dir():
        raise NotADirectoryError(f"{output.parent} is no directory; make it first")
    if left := unfinished(output):
        found = ", ".join(map(str, left))
        warnings.warn(
            f"{found}: left by a run that was killed, or being written by another; if none runs, remove it", stacklevel=2
        )
    plan = _plan(arguments)
    total = sum(step.num_micro_batches for step in plan.steps) * plan.settings.dp_size * plan.settings.cp_size
    files = Input(arguments.files)
    with progress(arguments, "packing", "micro-batch", total) as moved, files.located():
        written = write_packed(
            files.source,
            plan,
            output,
            token_columns=arguments.token_columns,
            sample_columns=arguments.sample_columns,
            progress=moved,
        )
    sizes = [path.stat().st_size for path in written]
    if arguments.json:
        listed = [{"path": str(path), "bytes": size} for path, size in zip(written, sizes, strict=True)]
        tokens = planning.tokens_of_ranks(plan)
        say_json({"output": str(output), "files": listed, "plan": planning.document(plan, tokens)})
        return 0
    say(repr(plan))
    rows = [[str(path), bytes_text(size)] for path, size in zip(written, sizes, strict=True)]
    for line in table([*rows, [counted(len(written), "file"), bytes_text(sum(sizes))]]):
        say(line)
    return 0


def _plan(arguments: argparse.Namespace) -> Plan:
    if arguments.plan is None:
        return planning.make(arguments)
    given = [flag(name) for name in plan_options(arguments)]
    if given:
        raise UsageError(f"--plan has its own {', '.join(given)}; leave out one or the other")
    return Plan.load(arguments.plan)
