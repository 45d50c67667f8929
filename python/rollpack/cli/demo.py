"""``rollpack demo``: ``verify`` without a file, and a picture of a schedule."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from rollpack.cli._arguments import add_json
from rollpack.cli._output import say
from rollpack.cli.verify import add_cuts, need_torch, verify
from rollpack.names import OURS
from rollpack.planning import plan
from rollpack.summary import summarize

_EPILOG = """\
examples:
  rollpack demo
  rollpack demo --seed 7 --prompts 64
"""


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the command."""
    text = "verify made-up rollouts, and draw a schedule"
    parser = subparsers.add_parser("demo", help=text, description=f"{text.capitalize()}.", epilog=_EPILOG)
    parser.add_argument(
        "--seed", type=_count(0), default=0, metavar="N", help="another seed makes other rollouts (default: 0)"
    )
    parser.add_argument("--prompts", type=_count(1), default=12, metavar="N", help="prompt groups (default: 12)")
    add_cuts(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def _count(least: int) -> Callable[[str], int]:
    def integer(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is no integer of at least {least}")
        return int(text)

    return integer


def run(arguments: argparse.Namespace) -> int:
    """Make rollouts, verify them, draw their schedule."""
    need_torch("demo")
    from rollpack.testing import make_rollouts

    data = make_rollouts(arguments.seed, prompts=arguments.prompts)
    summary = summarize(data, groups=True)
    status = verify(arguments, data, summary, OURS, f"{arguments.prompts} made-up prompt groups, seed {arguments.seed}")
    if not arguments.json:
        budget = int(summary.column("total_length").max())
        made = plan(summary, loss_aggregation="prompt_mean", max_tokens_per_gpu=budget, dp_size=4)
        say()
        for line in [repr(made), *made.show().text()]:
            say(line)
    return status
