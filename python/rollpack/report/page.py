"""The page of a report: one HTML document with all that it shows in it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from rollpack._text import noun
from rollpack.report import plots
from rollpack.schedule import Schedule

_FORMATS: dict[str, Callable[[Any], str]] = {
    "count": lambda value: f"{value:,}",
    "plain": lambda value: f"{value:,.6g}",
    "mean": lambda value: f"{value:,.1f}",
    "percent": lambda value: f"{value:.1%}",
    "share": lambda value: f"{value:.2%}",
    "times": lambda value: f"{value:.3g} x",
    "ratio": lambda value: f"{value:.4f}",
}


def page(numbers: dict[str, Any], made: Schedule | None) -> str:
    """The document.

    Args:
        numbers: what ``rollpack report --json`` prints. Every number of the page is one of these, in an element whose
            ``data-number`` says which, and ``data-value`` its value as JSON.
        made: the step that is drawn, if there is a plan.
    """
    environment = Environment(
        loader=PackageLoader("rollpack", "report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )

    def number(path: str, kind: str = "count") -> Markup:
        value = look_up(numbers, path)
        shown = "–" if value is None else _FORMATS[kind](value)
        return Markup('<span data-number="{}" data-value="{}">{}</span>').format(path, json.dumps(value), shown)

    def counted(path: str, singular: str) -> Markup:
        return number(path) + " " + noun(look_up(numbers, path), singular)

    text: str = environment.get_template("page.html").render(
        **numbers, number=number, counted=counted, plots=_pictures(numbers, made), drawn=made and plots.drawn(made)
    )
    return text


def look_up(numbers: Any, path: str) -> Any:
    """``inspection.total_length.max``, ``weights.groups.0.rollouts`` → the value there."""
    for name in path.split("."):
        numbers = numbers[int(name)] if isinstance(numbers, list) else numbers[name]
    return numbers


def _pictures(numbers: dict[str, Any], made: Schedule | None) -> dict[str, Markup]:
    """Those that there is something to draw for."""
    drawn: dict[str, str] = {}
    for name, what, unit, of in (
        ("total_length", "Tokens of a sample", "tokens", "samples"),
        ("mask_sum", "Trained tokens of a sample", "trained tokens", "samples"),
        ("group_size", "Rollouts of a group", "rollouts", "groups"),
        ("fan_out", "Samples of a rollout", "samples", "rollouts"),
    ):
        if numbers["histograms"] and numbers["histograms"][name]:
            drawn[name] = plots.bars(numbers["histograms"][name], what, unit, of)
    weights = numbers["weights"]
    if weights and weights["modes"]:
        modes = weights["modes"]
        drawn["tokens"] = plots.token_weights(modes, weights["trained_edges"])
        drawn["rollouts"] = plots.shares(modes, "curve", "Who makes the loss: rollouts", "rollouts, longest response first")
        if weights["groups"]:
            drawn["groups"] = plots.shares(modes, "group_curve", "Who makes the loss: groups", "groups, heaviest first")
    if made is not None:
        drawn["schedule"] = made.svg
    return {name: Markup(svg) for name, svg in drawn.items()}  # noqa: S704 - plots escapes what is of users
