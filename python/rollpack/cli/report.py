"""``rollpack report``: one page that shows what is in rollouts, how they are scheduled and who makes the loss."""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import rollpack
from rollpack._errors import RollpackError
from rollpack._files import write_whole
from rollpack.cli import inspect as inspecting
from rollpack.cli import plan as planning
from rollpack.cli._arguments import add_input, add_json, add_plan_options, input_options, plan_options
from rollpack.cli._input import Input
from rollpack.cli._output import bytes_text, progress, say, say_json
from rollpack.inspection import SHOWN, Inspection, inspect, kinds
from rollpack.planning import plan
from rollpack.plans import Plan
from rollpack.report.numbers import histograms, weights

_EPILOG = """\
examples:
  rollpack report rollouts.parquet -o report.html
  rollpack report rollouts.parquet --max-tokens-per-gpu 16384 --dp-size 8 --loss-aggregation prompt_mean -o report.html

PAGE is one HTML file that needs no network. Without a budget there is no schedule in it. --json prints its numbers.
Exit status: 0 well, 1 there are faults or no plan can be made (the page says why), 2 bad input.
"""


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the command."""
    text = "write a page that shows lengths, schedule and who makes the loss"
    parser = subparsers.add_parser("report", help=text, description=f"{text.capitalize()}.", epilog=_EPILOG)
    add_input(parser)
    parser.add_argument("-o", "--output", metavar="PAGE", type=Path, required=True, help="write the page here")
    add_plan_options(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Inspect, plan, write; 1 if there are faults or no plan."""
    missing = [name for name in ("jinja2", "matplotlib") if find_spec(name) is None]
    if missing:
        raise RollpackError(
            f"rollpack report needs {' and '.join(missing)}; install it with: pip install 'rollpack[report]'"
        )
    planning.check_output(arguments.output, arguments.files)
    with progress(arguments, "reading", "row") as moved:
        files = Input(arguments.files, moved)
        with files.located():
            found = inspecting.typed(inspect(files.source, **input_options(arguments)), arguments)
        made, no_plan = _plan(files, arguments)
    shown = numbers(found, files.paths, made, no_plan, plan_options(arguments))
    _write(arguments.output, shown, made)
    if arguments.json:
        say_json(shown)
    else:
        for line in [repr(found), repr(made) if no_plan is None else f"no schedule: {no_plan}"]:
            say(line)
        say(f"{arguments.output}: {bytes_text(arguments.output.stat().st_size)}")
    return 1 if found.faults or (made is None and _planned(arguments)) else 0


def numbers(
    found: Inspection, paths: list[Path], made: Plan | None, no_plan: str | None, arguments: dict[str, Any]
) -> dict[str, Any]:
    """All that the page shows, for JSON.

    Args:
        found: what was found in the data.
        paths: the files.
        made: the plan; None where there is none.
        no_plan: why there is none.
        arguments: those of :func:`rollpack.plan` that were given.
    """
    tokens = None if made is None else planning.tokens_of_ranks(made)
    planned = None if made is None or tokens is None else planning.document(made, tokens)
    settings = arguments if planned is None else planned["settings"]
    return {
        "version": rollpack.__version__,
        "title": str(paths[0]) if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1:,} more",
        "num_files": len(paths),
        "inspection": inspecting.document(found, paths),
        "num_faults": len(found.faults),
        "faults": [
            {"count": len(alike), "shown": [inspecting.place(fault, paths) + fault.message for fault in alike[:SHOWN]]}
            for alike in kinds(found.faults)
        ],
        "histograms": histograms(found.summary) if found.sound_rows else None,
        "weights": weights(found.summary, made, arguments) if found.sound_rows else None,
        "plan": planned,
        "no_plan": no_plan,
        "waiting": None if made is None else 1 - 1 / made.imbalance,
        "num_steps": None if made is None else len(made.steps),
        "num_dropped": None if made is None else len(made.dropped_rows),
        "num_oversize": None if made is None else len(made.oversize_rows),
        "tokens_of_ranks": None if tokens is None else [{"least": min(r), "most": max(r)} for r in tokens.tolist()],
        "settings": {name: value for name, value in settings.items() if name not in {"columns", "rollout_key"}}
        | {"columns": dict(found.summary.request.columns), "rollout_key": list(found.rollout_key)},
    }


def _planned(arguments: argparse.Namespace) -> bool:
    """Whether a plan is asked for."""
    return bool(plan_options(arguments).keys() - input_options(arguments).keys())


def _plan(files: Input, arguments: argparse.Namespace) -> tuple[Plan | None, str | None]:
    """The plan, or why there is none."""
    if not _planned(arguments):
        return None, "no budget was given: pass --max-tokens-per-gpu or --micro-batch-size"
    try:
        with files.located():
            return plan(files.source, **plan_options(arguments)), None
    except RollpackError as error:
        return None, arguments.spoken(str(error))


def _write(path: Path, shown: dict[str, Any], made: Plan | None) -> None:
    from rollpack.report.page import page

    text = page(shown, None if made is None else made.show())
    with write_whole(path) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")
