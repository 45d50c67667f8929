"""Completion of the command line in a shell, by argcomplete (the extra ``cli``)."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable

from rollpack._sources import ROLES
from rollpack.names import MODES, OURS


def complete(parser: argparse.ArgumentParser, commands: Iterable[argparse.ArgumentParser]) -> None:
    """Answer the shell and end the process, where argcomplete is installed and it is the shell that asks."""
    try:
        import argcomplete
    except ImportError:
        return
    for command in commands:
        for action in command._actions:
            if action.option_strings and action.metavar not in {"DIR", "PLAN", "FILE"}:
                action.completer = _completer(action)  # type: ignore[attr-defined]
    argcomplete.autocomplete(parser, always_complete_options=False)


def choices(action: argparse.Action) -> list[str]:
    """The words that a flag takes; none if it takes other values."""
    if action.dest in {"loss_aggregation", "modes"}:
        return [*OURS, *(name for name, mode in MODES.items() if mode.mode is not None)]
    if action.dest == "columns":
        return [f"{role}=" for role in ROLES]
    # Elsewhere the help shows them, as count|skip. Those in capitals stand for a value.
    words = _shown(action).removesuffix(_MORE).split("|")
    return [word for word in words if word and not word.isupper()]


#: What the help shows at the end of a list.
_MORE = ",..."


def _shown(action: argparse.Action) -> str:
    return action.metavar if isinstance(action.metavar, str) else ""


def _completer(action: argparse.Action) -> Callable[..., list[str]]:
    def complete(prefix: str, **_: object) -> list[str]:
        listed = prefix[: prefix.rfind(",") + 1] if _shown(action).endswith(_MORE) else ""
        return [listed + word for word in choices(action)]

    return complete
