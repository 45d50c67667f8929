"""``rollpack verify``: hold the loss and its gradient under many cuts against float64."""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from rollpack._errors import RollpackError, SchemaError
from rollpack._text import counted
from rollpack.cli._arguments import add_input, add_json, input_options, layouts, sizes
from rollpack.cli._input import Input
from rollpack.cli._output import bad, good, progress, say, say_json, table
from rollpack.names import LAYOUTS, OURS
from rollpack.summary import Summary, summarize

if TYPE_CHECKING:
    from rollpack.testing import Agreement, Cut

_EPILOG = """\
examples:
  rollpack verify rollouts.parquet
  rollpack verify 'shards/*.parquet' --dp-sizes 1,16 --cp-sizes 1,8 --budgets 8192,32768

Every token gets a fixed pseudo-random loss. It is reduced through every dp x cp x layout x budget, the parts of all ranks
summed, with samples over the budget alone and placeholders where samples are few. Deviations are |a - b| / sum of w|x| for
the loss and max|g - g0| / max|g0| for the gradient. Exit status: 0 all agree, 1 something does not, 2 bad input.
"""


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the command."""
    text = "hold the loss under many cuts against float64"
    parser = subparsers.add_parser("verify", help=text, description=f"{text.capitalize()}.", epilog=_EPILOG)
    add_input(parser)
    add_cuts(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def add_cuts(parser: argparse.ArgumentParser) -> None:
    """The flags that choose cuts."""
    parser.set_defaults(stands_for={"max_tokens_per_gpu": "--budgets"})
    group = parser.add_argument_group("cuts")
    group.add_argument("--dp-sizes", type=sizes, default=[1, 2, 4, 8], metavar="D,...", help="default: 1,2,4,8")
    group.add_argument("--cp-sizes", type=sizes, default=[1, 2, 4], metavar="C,...", help="default: 1,2,4")
    group.add_argument("--layouts", type=layouts, default=LAYOUTS, metavar=f"{'|'.join(LAYOUTS)},...", help="default: all")
    group.add_argument(
        "--budgets", type=sizes, default=None, metavar="N,...", help="max_tokens_per_gpu; default: three that suit the data"
    )
    group.add_argument("--empty", default="count", metavar="count|skip", help="default: count")


def run(arguments: argparse.Namespace) -> int:
    """Verify the files."""
    need_torch("verify")
    with progress(arguments, "reading", "row") as moved:
        files = Input(arguments.files, moved)
        with files.located():
            summary, modes = _summary(files, input_options(arguments))
    return verify(arguments, files.source, summary, modes, ", ".join(map(str, files.paths)))


def need_torch(command: str) -> None:
    """Say what to install where torch is missing."""
    if find_spec("torch") is None:
        raise RollpackError(f"rollpack {command} needs torch; install it with: pip install 'rollpack[torch]'")


def verify(arguments: argparse.Namespace, data: Any, summary: Summary, modes: tuple[str, ...], what: str) -> int:
    """Run all cuts, print what came of them, and return the exit status."""
    from rollpack import testing

    chosen = list(
        testing.cuts(
            arguments.budgets or budgets(summary),
            dp_sizes=arguments.dp_sizes,
            cp_sizes=arguments.cp_sizes,
            layouts=arguments.layouts,
        )
    )
    divisor = float(max(1, summary.column("response_length").max()))
    with progress(arguments, "verifying", "cut", len(chosen)) as moved:
        agreements = testing.verify(
            data, chosen, modes=modes, divisor=divisor, empty=arguments.empty, progress=moved, **input_options(arguments)
        )
    agree = all(agreement.agrees for agreement in agreements)
    if arguments.json:
        say_json(_document(what, summary, chosen, divisor, agreements, agree))
    else:
        for line in _lines(what, summary, chosen, divisor, agreements, agree):
            say(line)
    return 0 if agree else 1


def budgets(summary: Summary) -> list[int]:
    """Three budgets: one that some samples exceed, if that is not many micro-batches, and two that hold more and more."""
    lengths = summary.column("total_length")
    least = max(int(lengths.max()) // 2, int(lengths.sum()) // 512, 1)
    return [least, 2 * least, 8 * least]


def _summary(files: Input, options: dict[str, Any]) -> tuple[Summary, tuple[str, ...]]:
    """The summary, and the modes that the data allows: ``prompt_mean`` needs a group column."""
    group = options.get("columns", {}).get("group_index", "group_index")
    try:
        return summarize(files.source, groups=True, **options), OURS
    except SchemaError as error:
        if error.column != group and group is not None:
            raise
    return summarize(files.source, **options), tuple(mode for mode in OURS if mode != "prompt_mean")


def _lines(
    what: str, summary: Summary, cuts: list[Cut], divisor: float, agreements: list[Agreement], agree: bool
) -> list[str]:
    from rollpack.testing import TOLERANCES

    def shown(values: Any) -> str:
        return " ".join(map(str, dict.fromkeys(values)))

    dp, cp, layouts, limits = zip(*cuts, strict=True)
    rows = [["mode", "step loss", *(f"{short(d)} {m}" for d in TOLERANCES for m in ("loss", "gradient"))]]
    for agreement in agreements:
        deviations = [f"{measure[d]:.1e}" for d in TOLERANCES for measure in (agreement.loss, agreement.gradient)]
        rows.append([agreement.loss_aggregation, f"{agreement.reference:.12f}", *deviations])
    lines = [
        f"{what}: {summary!r}",
        f"{counted(len(cuts), 'cut')}: dp {shown(dp)} x cp {shown(cp)} x {shown(layouts)} x {shown(limits)} tokens per GPU",
        f"largest deviation from float64 (constant: L = {divisor:g}):",
        *table(rows),
    ]
    if "prompt_mean" not in {agreement.loss_aggregation for agreement in agreements}:
        lines.append("prompt_mean was left out: there is no group column")
    if agree:
        within = ", ".join(f"{short(dtype)} within {tolerance:g}" for dtype, tolerance in TOLERANCES.items())
        return [*lines, f"{good('all agree')}: {within}"]
    for agreement in agreements:
        if not agreement.agrees:
            cut = "; ".join(f"{short(dtype)}: {worst}" for dtype, worst in agreement.worst.items())
            lines.append(f"{agreement.loss_aggregation} {bad('does NOT agree')}; worst at {cut}")
    return lines


def _document(
    what: str, summary: Summary, cuts: list[Cut], divisor: float, agreements: list[Agreement], agree: bool
) -> dict[str, Any]:
    def number(value: float) -> float | None:
        return value if value == value else None  # noqa: PLR0124 - JSON has no NaN

    return {
        "data": what,
        "samples": len(summary),
        "tokens": int(summary.column("total_length").sum()),
        "divisor": divisor,
        "cuts": [cut._asdict() for cut in cuts],
        "modes": {
            agreement.loss_aggregation: {
                "step_loss": agreement.reference,
                "agrees": agreement.agrees,
                "loss_deviation": {short(d): number(v) for d, v in agreement.loss.items()},
                "gradient_deviation": {short(d): number(v) for d, v in agreement.gradient.items()},
                "worst_cut": {short(d): cut._asdict() for d, cut in agreement.worst.items()},
            }
            for agreement in agreements
        },
        "agree": agree,
    }


def short(dtype: Any) -> str:
    """``torch.float32`` → ``float32``."""
    return str(dtype).removeprefix("torch.")
