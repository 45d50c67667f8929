"""``rollpack simulate``: what settings would take, and which is best."""

from __future__ import annotations

import argparse
import inspect
import math
import shlex
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rollpack._text import counted
from rollpack.cli._arguments import (
    UsageError,
    add_input,
    add_json,
    add_plan_options,
    flag,
    names,
    plan_options,
    sizes,
)
from rollpack.cli._input import Input
from rollpack.cli._output import progress, say, say_json, table
from rollpack.cost import MODELS, CostModel
from rollpack.names import takes_divisor
from rollpack.simulation import DEVICES, TRAINERS, Prediction, Setting, Simulation, simulate

_EPILOG = """\
examples:
  rollpack simulate rollouts.parquet --model qwen2.5-7b --device h100 --dp-sizes 8,16 --cp-sizes 1,2 --budgets 8192,16384
  rollpack simulate rollouts.parquet --layers 32 --hidden 4096 --heads 32 --kv-heads 8 --ffn 14336 --vocab 128256 \\
      --device 400e12 --trainer ddp --dp-sizes 8 --budgets 16384 --overhead 0.05
  rollpack simulate 'shards/*.parquet' --model qwen3-8b --device h200 --modes sample_mean,prompt_mean \\
      --prompts-per-step 64 --dp-sizes 8 --budgets 16384,32768 --json

A micro-batch takes FLOPs / (cp size x peak x mfu) + overhead. Under fsdp ranks wait at each micro-batch, under ddp and
pipeline once a step. Best is what takes the fewest GPU-seconds for the same rollouts: of as many GPUs, the shortest time.
"""


def _device(text: str) -> str | float:
    if text in DEVICES:
        return text
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither {', '.join(DEVICES)} nor a peak in FLOP/s") from None


#: Argument of simulate → how its flag is read, what stands for the value, and what it is.
_FLAGS: dict[str, tuple[Callable[[str], Any], str, str]] = {
    "dp_sizes": (sizes, "D,...", "data-parallel sizes"),
    "cp_sizes": (sizes, "C,...", "context-parallel sizes"),
    "budgets": (sizes, "N,...", "max_tokens_per_gpu"),
    "modes": (names, "MODE,...", "loss_aggregation"),
    "device": (_device, "|".join([*DEVICES, "FLOPS"]), "a GPU by name, or its peak in FLOP/s"),
    "mfu": (float, "X", "the share of the peak that is used"),
    "overhead": (float, "SECONDS", "what a micro-batch takes beside its FLOPs"),
    "trainer": (str, "|".join(TRAINERS), "where dp ranks wait for each other"),
}

#: Arguments of CostModel.of_transformer, and what they are.
_TRANSFORMER = {
    "layers": "transformer layers",
    "hidden": "width of the residual stream",
    "heads": "query heads",
    "kv_heads": "key and value heads (default: as many as query heads)",
    "head_dim": "width of a head (default: hidden / heads)",
    "ffn": "width of the gated MLP; of experts: times experts per token",
    "vocab": "rows of the output layer",
}

#: Arguments of plan that the grid, or the trainer, sets.
_SET = ("loss_aggregation", "dp_size", "cp_size", "max_tokens_per_gpu", "micro_batch_size", "sync")


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the command."""
    text = "predict time, waiting and memory of settings, and name the best"
    parser = subparsers.add_parser("simulate", help=text, description=f"{text.capitalize()}.", epilog=_EPILOG)
    add_input(parser)
    group = parser.add_argument_group("grid, machine and trainer")
    for name, (kind, metavar, what) in _FLAGS.items():
        default = inspect.signature(simulate).parameters[name].default
        needed = default is inspect.Parameter.empty
        shown = "" if needed else f" (default: {','.join(map(str, default)) if isinstance(default, tuple) else default})"
        group.add_argument(
            flag(name), type=kind, required=needed, default=argparse.SUPPRESS, metavar=metavar, help=what + shown
        )
    group = parser.add_argument_group("model (as the arguments of CostModel.of_transformer)")
    group.add_argument("--model", metavar="|".join(MODELS), help="by name, or by the sizes that follow")
    for name, what in _TRANSFORMER.items():
        group.add_argument(flag(name), type=int, default=argparse.SUPPRESS, metavar="N", help=what)
    add_plan_options(parser, without=_SET)
    add_json(parser)
    parser.set_defaults(run=run, stands_for={"max_tokens_per_gpu": "--budgets", "loss_aggregation": "--modes"})


def run(arguments: argparse.Namespace) -> int:
    """Simulate and show."""
    model, options, named = _model(arguments), plan_options(arguments), list(arguments.files)
    grid = {name: getattr(arguments, name) for name in _FLAGS if hasattr(arguments, name)}
    settings = math.prod(len(values) for values in grid.values() if isinstance(values, list))
    with (
        progress(arguments, "reading", "row") as read,
        progress(arguments, "planning", "setting", settings) as planned,
    ):
        files = Input(arguments.files, read)
        with files.located():
            made = simulate(files.source, model=model, progress=planned, **grid, **options)
    made = replace(made, refused={setting: arguments.spoken(reason) for setting, reason in made.refused.items()})
    command = _command(named, made, options)
    if arguments.json:
        say_json(_document(files.paths, made, command))
    else:
        for line in _lines(files.paths, made, command):
            say(line)
    return 0


def _model(arguments: argparse.Namespace) -> str | CostModel:
    given = {name: getattr(arguments, name) for name in _TRANSFORMER if hasattr(arguments, name)}
    if arguments.model is not None and given:
        raise UsageError(f"--model {arguments.model} has its own sizes; leave {flag(next(iter(given)))} out")
    if arguments.model is not None:
        return str(arguments.model)
    missing = [flag(name) for name in ("layers", "hidden", "heads", "ffn", "vocab") if name not in given]
    if missing:
        raise UsageError(f"pass --model, or the sizes of a model: {', '.join(missing)} missing")
    return CostModel.of_transformer(**given)


def _command(files: list[str], made: Simulation, options: dict[str, Any]) -> str:
    """The command that makes the best plan."""
    best = made.best.setting
    chosen = best._asdict() | {"cost": made.cost, "sync": TRAINERS[made.trainer]} | options
    if not takes_divisor(best.loss_aggregation):
        chosen.pop("divisor", None)
    words = ["rollpack", "plan", *files]
    for name, value in chosen.items():
        words += [flag(name)] if value is True else [flag(name), _text(value)]
    return shlex.join(words)


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ",".join(f"{role}={name or ''}" for role, name in value.items())
    return ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _lines(paths: list[Path], made: Simulation, command: str) -> list[str]:
    each = "at each micro-batch" if TRAINERS[made.trainer] == "micro_batch" else "once a step"
    lines = [
        (
            f"{', '.join(map(str, paths))} under {made.trainer} (ranks wait {each}): {made.cost.linear:.4g} FLOPs a token, "
            f"{made.cost.quadratic:.4g} a pair of tokens, {made.flops_per_second:.4g} FLOP/s a GPU, {made.overhead:g} s a "
            "micro-batch besides"
        ),
        *table([_HEADER, *(_row(modes, prediction) for prediction, modes in _alike(made).items())]),
        *_refusals(made),
        (
            f"best, by GPU-seconds: {made.best.setting}: {made.best.gpu_seconds:.4g} GPU-seconds, "
            f"{made.best.step_seconds:.4g} s a step"
        ),
    ]
    if len(made.best_by_gpus) > 1:
        lines += [
            f"shortest on {counted(gpus, 'GPU')}: {best.setting}: {best.step_seconds:.4g} s a step"
            for gpus, best in made.best_by_gpus.items()
        ]
    return [*lines, command]


_HEADER = ["mode", "dp", "cp", "budget", "GPUs", "micro-batches", "s a step", "idle: mean", "worst"]
_HEADER += ["fill", "padding", "peak tokens", "GPU-seconds"]


def _row(modes: list[str], of: Prediction) -> list[str]:
    _, dp_size, cp_size, budget = of.setting
    return [
        ", ".join(modes),
        *(f"{n:,}" for n in (dp_size, cp_size, budget, of.setting.gpus, of.num_micro_batches)),
        f"{of.step_seconds:.4g}",
        *(f"{share:.1%}" for share in (of.idle_mean / of.seconds, of.idle_worst / of.seconds, of.fill, of.padding)),
        f"{of.peak_tokens:,}",
        f"{of.gpu_seconds:.4g}",
    ]


def _alike(made: Simulation) -> dict[Prediction, list[str]]:
    """Predictions that differ in nothing but the mode, once, and their modes."""
    alike: dict[Prediction, list[str]] = {}
    for prediction in made.predictions:
        setting = prediction.setting._replace(loss_aggregation="")
        alike.setdefault(replace(prediction, setting=setting, plan_id=""), []).append(prediction.setting.loss_aggregation)
    return alike


def _refusals(made: Simulation) -> list[str]:
    """Why settings cannot be planned, each reason once."""
    of: dict[str, list[Setting]] = {}
    for setting, reason in made.refused.items():
        of.setdefault(reason, []).append(setting)
    return [
        f"cannot be planned: {settings[0]}{f' (and {len(settings) - 1:,} more)' if settings[1:] else ''}: {reason}"
        for reason, settings in of.items()
    ]


def _document(paths: list[Path], made: Simulation, command: str) -> dict[str, Any]:
    return {
        "files": list(map(str, paths)),
        "cost": made.cost._asdict(),
        "flops_per_second": made.flops_per_second,
        "overhead": made.overhead,
        "trainer": made.trainer,
        "predictions": [_values(prediction) for prediction in made.predictions],
        "refused": [setting._asdict() | {"reason": reason} for setting, reason in made.refused.items()],
        "best": _values(made.best),
        "best_by_gpus": {str(gpus): _values(best) for gpus, best in made.best_by_gpus.items()},
        "command": command,
    }


def _values(of: Prediction) -> dict[str, Any]:
    values = asdict(of) | {"gpus": of.setting.gpus, "step_seconds": of.step_seconds, "gpu_seconds": of.gpu_seconds}
    del values["setting"]
    return of.setting._asdict() | values
