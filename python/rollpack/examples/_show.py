"""What the examples show: a bar while they run, a line on what a mode came to, and a picture."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from tqdm import tqdm

#: Of a reward and a loss, one after the other.
Points = Sequence[tuple[float, float]]


@contextmanager
def bar(what: str, steps: int) -> Iterator[Callable[[tuple[float, float]], object]]:
    """A bar of so many steps on rank 0. What is given is called with each step's reward and loss, and shows the reward."""
    with tqdm(desc=what, total=steps, unit="step", disable=os.environ.get("RANK", "0") != "0") as shown:

        def step(point: tuple[float, float]) -> None:
            shown.set_postfix(reward=f"{point[0]:.3f}", refresh=False)
            shown.update()

        yield step


def rise(name: str, runs: Sequence[Points]) -> str:
    """Rewards at the beginning and at the end of each run (means of five steps), and a curve of their mean in text."""
    ends = [(fmean(r for r, _ in run[:5]), fmean(r for r, _ in run[-5:])) for run in runs]
    told = ", ".join(f"{start:.2f} to {end:.2f} (+{end - start:.2f})" for start, end in ends)
    mean = [fmean(run[i][0] for run in runs) for i in range(len(runs[0]))]
    return f"{name:<12} {sparkline(mean)}  reward {told}"


def sparkline(values: Sequence[float], width: int = 30) -> str:
    """Values in [0, 1] as blocks of an eighth, at most ``width`` of them."""
    width = min(width, len(values))
    parts = [values[i * len(values) // width : (i + 1) * len(values) // width] for i in range(width)]
    return "".join("▁▂▃▄▅▆▇█"[min(7, int(8 * fmean(part)))] for part in parts)


def check(parser: argparse.ArgumentParser, arguments: argparse.Namespace, seeds: Sequence[int]) -> None:
    """Refuses what would only fail after the training."""
    if arguments.steps < 1 or min(seeds) < 0:
        parser.error("--steps has to be at least 1, and seeds at least 0")
    plot = Path(arguments.plot)
    if plot.suffix != ".png" or not plot.parent.is_dir():
        parser.error(f"--plot {plot}: it has to be a .png file in a folder that is there")


def draw(path: str, panels: Mapping[str, Mapping[Any, Points]]) -> None:
    """Save a PNG: a column a panel, rewards above, losses below, a line a run."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from PIL import Image

    figure = Figure(figsize=(2.5 * len(panels), 3.2), dpi=100, layout="constrained")
    canvas = FigureCanvasAgg(figure)  # needs no screen
    axes = figure.subplots(2, len(panels), sharex=True, sharey="row", squeeze=False)
    for column, (name, runs) in enumerate(panels.items()):
        for label, points in runs.items():
            for row in range(2):
                axes[row, column].plot([point[row] for point in points], label=str(label), linewidth=0.8)
        axes[0, column].set(title=name, ylim=(0, 1))
        axes[1, column].set_xlabel("step")
        axes[0, column].legend(fontsize=6, frameon=False, loc="lower right")
    axes[0, 0].set_ylabel("reward")
    axes[1, 0].set_ylabel("loss")
    canvas.draw()  # type: ignore[no-untyped-call]
    # With few colours it is a third of the size.
    drawn = Image.fromarray(np.asarray(canvas.buffer_rgba()))  # type: ignore[no-untyped-call]
    drawn.convert("RGB").quantize(64).save(path, optimize=True)
