# PYTHON_ARGCOMPLETE_OK
"""``rollpack`` on the command line: a file a command, each with ``add_parser`` and ``run``.

Exit status: 0 all is well, 1 the command ran and what it looked at is not in order, 2 bad input or usage, or output that is
lost (one line on stderr), 128 + n ended by signal n: 130 Ctrl-C, 143 SIGTERM, 141 the reader of stdout has left.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial

import pyarrow as pa

import rollpack
from rollpack._errors import RollpackError
from rollpack._signals import Stopped, asked, heed_no_more, stopping
from rollpack.cli import demo, inspect, pack, plan, report, simulate, verify
from rollpack.cli._arguments import add_common
from rollpack.cli._completion import complete
from rollpack.cli._language import flags_of, spoken
from rollpack.cli._output import bad, one_line, settle, tell
from rollpack.cli._parser import Parser

_COMMANDS = (inspect, plan, simulate, pack, verify, report, demo)

_EPILOG = """\
examples:
  rollpack inspect rollouts.parquet
  rollpack plan rollouts.parquet --max-tokens-per-gpu 16384 --dp-size 8 --cp-size 2
  rollpack verify rollouts.parquet
  rollpack report rollouts.parquet -o report.html
  rollpack pack 'shards/*.parquet' --max-tokens-per-gpu 16384 --dp-size 8 -o packed
  zcat rollouts.jsonl.gz | rollpack inspect -

FILE is Parquet, Arrow IPC or JSON lines; several are read as one input. Globs need not be expanded. Of a directory all
files of rollouts right in it are read, in the order of their names. - is standard input, which is kept in an unnamed
file in TMPDIR, as are named pipes, because rollouts are read more than once.

Progress goes to stderr, and is shown on a terminal only, beside --json too; --quiet leaves it out. NO_COLOR,
FORCE_COLOR and TERM=dumb are respected.

Completion in bash or zsh: pip install 'rollpack[cli]', then put into ~/.bashrc or ~/.zshrc:
  eval "$(register-python-argcomplete rollpack)"

Exit status: 0 well, 1 faults were found, 2 bad input or usage or lost output, 130 interrupted by Ctrl-C, 143 terminated,
141 the reader of stdout has left. A command that did not end well leaves no file half-written.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status. ``argv``: the arguments, by default those of the process."""
    say: Callable[[str], str] = str
    with warnings.catch_warnings(), stopping():
        warnings.showwarning = lambda warning, *_, **__: _tell("warning", say(one_line(warning)))
        try:
            try:
                arguments = _parsed(argv)
            except SystemExit as end:  # --help and --version
                status = int(end.code or 0)
            else:
                say = arguments.spoken
                status = arguments.run(arguments)
            if sys.stdout is not None:
                sys.stdout.flush()
        except BrokenPipeError:
            return 128 + signal.SIGPIPE
        except KeyboardInterrupt as stop:
            return _stopped(stop.number if isinstance(stop, Stopped) else signal.SIGINT)
        except Exception as error:
            if asked:
                return _stopped(asked[0])
            if not isinstance(error, RollpackError | OSError | TypeError | pa.ArrowException):
                raise
            _tell("error", say(one_line(error)))
            return 2
        finally:
            settle()
    return status


def _stopped(number: int) -> int:
    heed_no_more()
    tell(f"rollpack: {'interrupted' if number == signal.SIGINT else 'terminated'}")
    return 128 + number


def _tell(what: str, text: str) -> None:
    tell(f"{bad(f'rollpack: {what}:', sys.stderr)} {text}")


def _parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments, with ``run`` of their command, and ``spoken``, which puts an error in words of its flags."""
    parser = Parser(
        prog="rollpack",
        description="Pack RL rollouts into micro-batches whose loss does not depend on how they were cut.",
        epilog=_EPILOG,
    )
    parser.add_argument("--version", action="version", version=f"rollpack {rollpack.__version__}")
    subparsers = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)
    for module in _COMMANDS:
        module.add_parser(subparsers)
    commands: dict[str, Parser] = dict(subparsers.choices)
    for command in commands.values():
        add_common(command)
        command.set_defaults(spoken=partial(spoken, flags=flags_of(command)))
    helped = subparsers.add_parser("help", help="show the help of a command")
    helped.add_argument("of", metavar="COMMAND", nargs="?", choices=commands)
    if "_ARGCOMPLETE" in os.environ:
        complete(parser, commands.values())
    if not (sys.argv[1:] if argv is None else argv):
        tell(parser.format_help().rstrip())
        raise SystemExit(2)
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        commands.get(arguments.command, parser).refuse(unknown)
    if arguments.command == "help":
        commands.get(arguments.of, parser).print_help()
        raise SystemExit
    return arguments
