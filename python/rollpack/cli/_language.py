"""What the library says in Python's language, in that of the command line: ``dp_size=2`` is ``--dp-size 2`` here."""

from __future__ import annotations

import argparse
import ast
import re
import shlex
from collections.abc import Mapping

#: An argument, with or without a value. Quoted text and paths are passed over: they may hold anything.
_ARGUMENT = re.compile(
    r"""(?P<quoted>(?<!\w)'[^']*'|"[^"]*")
    | (?<![\w/.-]) (?P<name>[a-z]\w*)
      (?P<given>= (?P<value>\{[^{}]*\} | \([^()]*\) | \[[^][]*\] | '[^']*' | "[^"]*" | \w+(?:\.\w+)*)? )?
      (?![\w/=] | \.\w)""",
    re.VERBOSE,
)

#: What is no concern of those who name files and leave flags out.
_ELSEWHERE = (
    (re.compile(r" \(a reader [^()]*\)|, or a reader [^()]* \([^()]*\)"), ""),
    (re.compile(r" or a CostModel \(CostModel\.of_transformer\)"), ", or left out, with the sizes of a model in its place"),
    (re.compile(r"(?<=has to be )(.*) or None\b"), r"\1, or be left out"),
)


def flags_of(parser: argparse.ArgumentParser) -> dict[str, str]:
    """The flag of each argument that a command has, and of those that ``stands_for`` says another one sets."""
    own = {action.dest: action.option_strings[-1] for action in parser._actions if action.option_strings}
    return own | (parser.get_default("stands_for") or {})


def spoken(text: str, flags: Mapping[str, str]) -> str:
    """``text`` with the arguments that have a flag as people type them.

    Args:
        text: what an error says.
        flags: as :func:`flags_of` gives them. A plural does where there is no other: ``dp_size`` is ``--dp-sizes``.
    """
    for pattern, instead in _ELSEWHERE:
        text = pattern.sub(instead, text)

    def typed(found: re.Match[str]) -> str:
        name, given, value = found["name"], found["given"], found["value"]
        flag = flags.get(name) or flags.get(f"{name}s") if name else None
        if flag is None:
            return found[0]
        if given is None:
            # Of a name that is a word of English too only the first is told: "layout is 'spiral'".
            told = "_" in name or (found.start() == 0 and text.startswith(f"{name} is "))
            return flag if told else name
        return f"{flag}{_typed_value(value)}"

    return _ARGUMENT.sub(typed, text)


def _typed_value(value: str | None) -> str:
    """A value of Python's as it follows its flag."""
    if value is None or value == "True":
        return ""
    try:
        meant = ast.literal_eval(value)
    except (ValueError, SyntaxError):  # a name that stands for a value
        return f" {value}"
    if isinstance(meant, dict):
        meant = [f"{key}={'' if name is None else name}" for key, name in meant.items()]
    return " " + shlex.quote(",".join(map(str, meant)) if isinstance(meant, list | tuple) else str(meant))
