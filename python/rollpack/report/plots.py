"""Pictures as ``<svg>`` elements for a page: no script, text in the page's colour, hints where the pointer rests."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from typing import Any, Self
from xml.sax.saxutils import escape, quoteattr

import matplotlib as mpl
import numpy as np
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, PercentFormatter, StrMethodFormatter

from rollpack._text import counted
from rollpack.schedule import Schedule

#: Stands for the page's own colour while drawing.
_INK = "#010203"
#: Legible on white and on black.
_BAR = "#3f87d0"
#: A colour and a dash a mode; a fifth is one of another name.
_LINES = ("#3f87d0", "-"), ("#e07b39", "--"), ("#3aa76d", "-."), ("#b565c9", ":"), ("#c9433f", "-")

_STYLE: Any = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10.0,
    "axes.titlelocation": "left",
    **dict.fromkeys(
        (
            "text.color",
            "axes.edgecolor",
            "axes.labelcolor",
            "axes.titlecolor",
            "xtick.color",
            "ytick.color",
            "patch.edgecolor",
        ),
        _INK,
    ),
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "legend.frameon": False,
}

#: Micro-batches and ranks that are drawn one by one; what is more is joined or left out.
BLOCKS, RANKS = 1500, 128
#: Rows of a micro-batch that a hint names.
_ROWS = 12


class _Drawing:
    """A figure with hints, which becomes an ``<svg>`` element."""

    def __init__(self, what: str, width: float = 4.6, height: float = 2.6) -> None:
        self._what = what
        self._hints: list[str] = []
        self._style = mpl.rc_context({**_STYLE, "svg.hashsalt": what})  # equal pictures are equal text
        self._size = width, height

    def __enter__(self) -> Self:
        self._style.__enter__()
        self.figure = Figure(figsize=self._size, layout="constrained")
        self._canvas = FigureCanvasSVG(self.figure)
        self.axes = self.figure.subplots()
        return self

    def __exit__(self, *_: object) -> None:
        self._style.__exit__(None, None, None)

    def hint(self, artist: Any, text: str) -> None:
        """``text`` is shown where the pointer rests on ``artist``."""
        artist.set_gid(f"hint-{len(self._hints)}")
        self._hints.append(text)

    def svg(self) -> str:
        """The element."""
        out = io.StringIO()
        self._canvas.print_svg(out, metadata={"Date": None})  # type: ignore[no-untyped-call]
        text = out.getvalue()
        # A style element would be one of the whole page.
        text = re.sub(r"<(metadata|style)\b.*?</\1>", "", text[text.index("<svg") :], flags=re.DOTALL)
        text = re.sub(r'<g id="hint-(\d+)">', lambda found: f"<g><title>{escape(self._hints[int(found[1])])}</title>", text)
        # Ids are to be one of a kind in a page of several pictures; only those that are referred to are needed.
        used = set(re.findall(r'url\(#(.+?)\)|href="#(.+?)"', text))
        used_ids = {name for pair in used for name in pair}
        text = re.sub(r' id="([^"]+)"', lambda found: found[0] if found[1] in used_ids else "", text)
        label = quoteattr(self._what)
        return text.replace("<svg", f'<svg role="img" aria-label={label} stroke-linejoin="round"', 1).replace(
            _INK, "currentColor"
        )


def bars(counts: Mapping[str, Sequence[int]], what: str, unit: str, of: str) -> str:
    """A histogram.

    Args:
        counts: ``edges`` and ``counts``, as :func:`rollpack.report.numbers.histogram` has them.
        what: the title.
        unit: what is along.
        of: what is counted.
    """
    with _Drawing(what) as drawing:
        axes, edges = drawing.axes, counts["edges"]
        width = edges[1] - edges[0]
        middle = np.array(edges[:-1]) + (width - 1) / 2
        drawn = axes.bar(middle, counts["counts"], 0.9 * width, color=_BAR)
        for bar, low, count in zip(drawn, edges, counts["counts"], strict=False):
            drawing.hint(bar, f"{_range(low, low + width - 1)} {unit}: {count:,} {of}")
        axes.set(title=what, xlabel=unit, ylabel=of)
        # Few bars are not to be broad ones.
        low = min(edges[0], max(0, edges[0] - 5 * width))
        axes.set_xlim(low - 0.5, max(edges[-1], low + 12 * width) - 0.5)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
        axes.yaxis.set_major_locator(MaxNLocator(5, integer=True, min_n_ticks=1))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        return drawing.svg()


def token_weights(modes: Mapping[str, Mapping[str, Any]], edges: Sequence[int]) -> str:
    """What a token weighs by the trained tokens of its rollout, a line a mode."""
    with _Drawing("What a token weighs, by the length of its rollout", height=3.0) as drawing:
        axes = drawing.axes
        extremes = 1.0, 1.0
        middle = np.sqrt(np.array(edges[:-1]) * (np.array(edges[1:]) - 1.0))
        for (mode, shares), (colour, dash) in zip(modes.items(), _LINES, strict=False):
            weights = np.array([np.nan if x is None else x for x in shares["by_length"]])
            has = ~np.isnan(weights) & (weights > 0)
            axes.plot(middle[has], weights[has], dash, color=colour, label=mode, marker=".", markersize=4)
            extremes = min(extremes[0], *weights[has]), max(extremes[1], *weights[has])
        axes.set(xscale="log", xlim=(edges[0] / 1.2, edges[-1] * 1.2), xlabel="trained tokens of the rollout")
        axes.set(yscale="log", ylim=(extremes[0] / 1.5, extremes[1] * 1.5), ylabel="weight of a token, over the mean")
        axes.set_title("What a token weighs, by its rollout's length")
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=8))
            axis.set_minor_locator(NullLocator())
        axes.legend(fontsize=8)
        return drawing.svg()


def shares(modes: Mapping[str, Mapping[str, Any]], curve: str, what: str, of: str) -> str:
    """The share of the loss of the first so many percent, a line a mode.

    Args:
        modes: as :func:`rollpack.report.numbers.weights` has them.
        curve: which of a mode's curves.
        what: the title.
        of: what is along.
    """
    with _Drawing(what, height=3.0) as drawing:
        axes, percent = drawing.axes, np.linspace(0, 100, 101)
        axes.plot([0, 100], [0, 100], color=_INK, alpha=0.3, linewidth=0.8)
        for (mode, found), (colour, dash) in zip(modes.items(), _LINES, strict=False):
            axes.plot(percent, 100 * np.array(found[curve]), dash, color=colour, label=mode)
        axes.axvline(10, color=_INK, alpha=0.3, linewidth=0.8)
        axes.set(title=what, xlabel=of, ylabel="share of the loss", xlim=(0, 100), ylim=(0, 100))
        axes.xaxis.set_major_formatter(PercentFormatter(decimals=0))
        axes.yaxis.set_major_formatter(PercentFormatter(decimals=0))
        axes.legend(fontsize=8, loc="lower right")
        return drawing.svg()


def drawn(made: Schedule) -> tuple[int, int]:
    """How many ranks of a schedule are drawn, and how many micro-batches a block is."""
    ranks, per_rank = made.tokens.shape
    ranks = min(ranks, RANKS)
    return ranks, -(-ranks * per_rank // BLOCKS)


def schedule(made: Schedule) -> str:
    """Ranks down, time along, micro-batches as blocks coloured by fill; grey is waiting."""
    ranks, joined = drawn(made)
    settings, per_rank = made.plan.settings, made.tokens.shape[1]
    unit = "tokens" if tuple(settings.cost) == (1, 0) else "cost, of the longest rank's"
    scale = 1.0 if unit == "tokens" else 100 / (made.end or 1)
    low = min(0.9, float(made.fills[:ranks][made.tokens[:ranks] > 0].min(initial=1.0)))
    with _Drawing("schedule", 7.6, max(1.7, 1.0 + min(0.26, 9 / ranks) * ranks)) as drawing:
        axes, colours = drawing.axes, mpl.colormaps["viridis"]
        few = ranks * per_rank <= 400
        for rank in range(ranks):
            axes.add_patch(Rectangle((0, rank - 0.42), made.end * scale, 0.84, facecolor=_INK, alpha=0.12, linewidth=0))
            for first in range(0, per_rank, joined):
                at = rank, slice(first, min(first + joined, per_rank))
                begin, end = made.starts[at][0], (made.starts[at] + made.lengths[at])[-1]
                fill = float(made.fills[at].mean())
                if end == begin:
                    continue  # placeholders
                block = Rectangle(
                    (begin * scale, rank - 0.42),
                    (end - begin) * scale,
                    0.84,
                    facecolor=colours((min(fill, 1.0) - low) / (1 - low)),
                    edgecolor="#d7263d" if fill > 1 else "white",
                    linewidth=1.2 if fill > 1 else 0.5 if few else 0,
                )
                axes.add_patch(block)
                drawing.hint(block, _hint(made, rank, range(first, at[1].stop), fill))
        axes.set(xlim=(0, made.end * scale or 1), ylim=(ranks - 0.5, -0.5), ylabel="dp rank")
        axes.set_xlabel("tokens, one micro-batch after the other" if unit == "tokens" else unit)
        axes.yaxis.set_major_locator(MaxNLocator(min(ranks, 16), integer=True))
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}") if unit == "tokens" else PercentFormatter())
        for side in ("left", "bottom"):
            axes.spines[side].set_visible(False)
        bar = drawing.figure.colorbar(ScalarMappable(Normalize(100 * low, 100), colours), ax=axes, pad=0.01, fraction=0.04)
        bar.set_label("fill")
        bar.ax.yaxis.set_major_formatter(PercentFormatter(decimals=0))
        bar.outline.set_visible(False)
        return drawing.svg()


def _hint(made: Schedule, rank: int, micro_batches: range, fill: float) -> str:
    rows = np.concatenate([made.plan.rows(made.step, rank, k) for k in micro_batches])
    named = ", ".join(map(str, rows[:_ROWS].tolist())) + (f", ... ({len(rows):,} rows)" if len(rows) > _ROWS else "")
    which = _range(micro_batches[0], micro_batches[-1])
    tokens = int(made.tokens[rank, micro_batches[0] : micro_batches[-1] + 1].sum())
    over = ", over the budget" if fill > 1 else ""
    return f"dp rank {rank}, micro-batch {which}: {counted(tokens, 'token')}, fill {fill:.1%}{over}\nrows {named}"


def _range(low: int, high: int) -> str:
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"
