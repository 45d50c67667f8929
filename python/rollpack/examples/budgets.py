"""One run of GRPO again and again, with nothing but the token budget changed: ``token_mean`` beside ``token_mean_legacy``.

    python -m rollpack.examples.budgets

The budget says how many tokens fit on a GPU at once, and should not change what is learnt. Under a mean of micro-batch
means it does.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Sequence

import torch

from rollpack.examples._show import bar, check, draw
from rollpack.examples.grpo import Curve, differences, train


def main(argv: Sequence[str] | None = None) -> dict[str, dict[int, Curve]]:
    """Run as the command line says. Returns the curve of each mode and budget."""
    parser = argparse.ArgumentParser(description="The same run under several token budgets.")
    parser.add_argument("--budgets", nargs="+", type=int, default=[48, 256, 2048], metavar="N", help="default: 48 256 2048")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="default: 0")
    parser.add_argument("--steps", type=int, default=40, metavar="N", help="batches of rollouts (default: 40)")
    parser.add_argument("--plot", default="budgets.png", metavar="FILE", help="default: budgets.png")
    arguments = parser.parse_args(argv)
    check(parser, arguments, [arguments.seed])
    if len(arguments.budgets) < 2:
        parser.error("--budgets has to have two at least, to be compared")
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "token_mean_legacy is a mean of micro-batch means")  # that is what is shown
    curves: dict[str, dict[int, Curve]] = {}
    for mode in ("token_mean", "token_mean_legacy"):
        of_mode = curves[mode] = {}
        for budget in arguments.budgets:
            with bar(f"{mode}, {budget} tokens", arguments.steps) as each:
                of_mode[budget] = train(mode, arguments.seed, steps=arguments.steps, max_tokens_per_gpu=budget, each=each)
        first, *others = of_mode.values()
        print(f"{mode:<17} largest differences between budgets: {differences([first] * len(others), others)}")
    draw(arguments.plot, {mode: {f"{b} tokens": curve.points for b, curve in of.items()} for mode, of in curves.items()})
    print(f"{arguments.plot}: reward and loss under each budget")
    return curves


if __name__ == "__main__":
    main()
