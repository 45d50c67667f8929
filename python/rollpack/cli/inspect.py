"""``rollpack inspect``: what is in the rollouts, and everything that is wrong with them."""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rollpack._text import counted
from rollpack.cli._arguments import add_input, add_json, input_options
from rollpack.cli._input import Input
from rollpack.cli._output import bad, good, progress, say, say_json, table
from rollpack.inspection import SHOWN, Fault, Inspection, Spread, inspect, kinds

_EPILOG = """\
examples:
  rollpack inspect rollouts.parquet
  rollpack inspect 'shards/*.jsonl' --columns tokens=input_ids,response_length=
  rollpack inspect rollouts.parquet --json | jq .faults

Numbers are of the rows without a fault. Rows are counted from 0. Exit status: 0 no faults, 1 faults, 2 bad input.
"""


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the command."""
    text = "show what is in rollouts, and every fault"
    parser = subparsers.add_parser("inspect", help=text, description=f"{text.capitalize()}.", epilog=_EPILOG)
    add_input(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Inspect; 1 if there are faults."""
    with progress(arguments, "reading", "row") as moved:
        files = Input(arguments.files, moved)
        with files.located():
            found = inspect(files.source, **input_options(arguments))
    found = typed(found, arguments)
    if arguments.json:
        say_json(document(found, files.paths))
    else:
        for line in [*_overview(found, files.paths), *_faults(found.faults, files.paths)]:
            say(line)
    return 1 if found.faults else 0


def typed(found: Inspection, arguments: argparse.Namespace) -> Inspection:
    """With faults in words of the command line."""
    return replace(found, faults=[fault._replace(message=arguments.spoken(fault.message)) for fault in found.faults])


def document(found: Inspection, paths: list[Path]) -> dict[str, Any]:
    """All that was found; a fault's part is its file."""
    values = {name: asdict(value) if isinstance(value, Spread) else value for name, value in vars(found).items()}
    del values["summary"]
    part_rows = values.pop("part_rows")
    values["files"] = [{"path": str(path), "rows": rows} for path, rows in zip(paths, part_rows, strict=True)]
    values["faults"] = [
        {
            "kind": fault.kind,
            "column": fault.column,
            "row": fault.row,
            "file": None if fault.part is None else str(paths[fault.part]),
            "file_row": fault.part_row,
            "message": fault.message,
        }
        for fault in found.faults
    ]
    return values


def _overview(found: Inspection, paths: list[Path]) -> list[str]:
    if found.sound_rows == 0:
        told = "no row can be read" if found.rows is None else f"{counted(found.rows, 'row')}, and none without a fault"
        return [f"{_files(paths)}: {told}"]
    whose = ", each row of its own" if not found.rollout_key else f" by {', '.join(found.rollout_key)}"
    rows = [
        ["rows", "unknown" if found.rows is None else f"{found.rows:,}"],
        *([["  without a fault", f"{found.sound_rows:,}"]] if found.faults else []),
        ["rollouts", f"{found.rollouts:,}{whose}"],
        ["groups", "not read" if found.groups is None else f"{found.groups:,}"],
        ["tokens", f"{found.tokens:,}"],
        ["  response", f"{found.response_tokens:,}"],
        ["  trained", f"{found.trained_tokens:,}"],
        ["mask density", f"{_percent(found.trained_of_response)} of response, {_percent(found.trained_of_all)} of all"],
        ["fan-out", f"{counted(found.fanned_out, 'rollout')} of several samples ({_percent(found.fanned_out_share)})"],
    ]
    if found.groups is not None:
        rows.append(["groups of one", f"{found.groups_of_one:,}"])
    untrained = [counted(found.untrained_samples, "sample"), counted(found.untrained_rollouts, "rollout")]
    if found.untrained_groups is not None:
        untrained.append(counted(found.untrained_groups, "group"))
    rows.append(["nothing trained in", ", ".join(untrained)])
    width = max(len(name) for name, _ in rows)
    return [_files(paths), *(f"{name.ljust(width)}  {value}" for name, value in rows), "", *_spreads(found)]


def _spreads(found: Inspection) -> list[str]:
    spreads = {
        "total length": found.total_length,
        "response length": found.response_length,
        "trained tokens": found.trained_length,
        "samples a rollout": found.fan_out,
        "rollouts a group": found.group_size,
    }
    rows = [["", "min", "p10", "p25", "p50", "p75", "p90", "p99", "max", "mean"]]
    for name, spread in spreads.items():
        if spread is not None:
            *levels, mean = asdict(spread).values()
            rows.append([name, *(f"{level:,}" for level in levels), f"{mean:,.1f}"])
    return table(rows)


def _faults(faults: list[Fault], paths: list[Path]) -> list[str]:
    """The faults, those of a kind together, the first of each kind in full."""
    if not faults:
        return ["", good("no faults")]
    lines = ["", bad(counted(len(faults), "fault"))]
    for alike in kinds(faults):
        lines += [f"  {place(fault, paths)}{fault.message}" for fault in alike[:SHOWN]]
        if len(alike) > SHOWN:
            lines.append(f"  ... and {len(alike) - SHOWN:,} more of this kind (--json has all)")
    return lines


def place(fault: Fault, paths: list[Path]) -> str:
    """Column, row and file of a fault, before its message."""
    parts = [] if fault.column is None else [f"column '{fault.column}'"]
    parts += [] if fault.row is None else [f"row {fault.row}"]
    if len(paths) > 1 and fault.part is not None:
        within = "" if fault.part_row is None else f"row {fault.part_row} of "
        parts.append(f"{within}{paths[fault.part]}")
    return f"{', '.join(parts)}: " if parts else ""


def _files(paths: list[Path]) -> str:
    return str(paths[0]) if len(paths) == 1 else f"{len(paths)} files, {paths[0]} to {paths[-1]}"


def _percent(share: float | None) -> str:
    return "none" if share is None else f"{share:.1%}"
