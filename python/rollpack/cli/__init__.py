"""``rollpack`` on the command line: a file a command, each with ``add_parser`` and ``run``.

Exit status: 0 all is well, 1 the command ran and what it looked at is not in order, 2 bad input (one line on stderr), 130
Ctrl-C.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence

import pyarrow as pa

import rollpack
from rollpack._errors import RollpackError
from rollpack.cli import demo, inspect, pack, plan, report, simulate, verify
from rollpack.cli._arguments import Parser
from rollpack.cli._output import one_line

_COMMANDS = (inspect, plan, simulate, pack, verify, report, demo)

_EPILOG = """\
examples:
  rollpack inspect rollouts.parquet
  rollpack plan rollouts.parquet --max-tokens-per-gpu 16384 --dp-size 8 --cp-size 2
  rollpack verify rollouts.parquet
  rollpack report rollouts.parquet -o report.html
  rollpack pack 'shards/*.parquet' --max-tokens-per-gpu 16384 --dp-size 8 -o packed

FILE is Parquet, Arrow IPC or JSON lines; several are read as one input, and globs need not be expanded.
Exit status: 0 well, 1 faults were found, 2 bad input, 130 interrupted.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status. ``argv``: the arguments, by default those of the process."""
    try:
        status = _run(argv)
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        _silence_stdout()
        return 141  # as a program that SIGPIPE ends
    except KeyboardInterrupt:
        print("rollpack: interrupted", file=sys.stderr)
        return 130
    except (RollpackError, OSError, TypeError, pa.ArrowException) as error:
        print(f"rollpack: error: {one_line(error)}", file=sys.stderr)
        return 2
    return status


def _run(argv: Sequence[str] | None) -> int:
    try:
        arguments = _parser().parse_args(argv)
    except SystemExit as end:  # --help and --version
        return int(end.code or 0)
    status: int = arguments.run(arguments)
    return status


def _parser() -> Parser:
    parser = Parser(
        prog="rollpack",
        description="Pack RL rollouts into micro-batches whose loss does not depend on how they were cut.",
        epilog=_EPILOG,
    )
    parser.add_argument("--version", action="version", version=f"rollpack {rollpack.__version__}")
    subparsers = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)
    for command in _COMMANDS:
        command.add_parser(subparsers)
    return parser


def _silence_stdout() -> None:
    """Lets the interpreter's last flush of stdout go nowhere: the reader has left."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
