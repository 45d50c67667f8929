"""How the command line is read, helps, and says what it did not understand."""

from __future__ import annotations

import argparse
import difflib
import re
import textwrap
from collections.abc import Collection, Iterable
from itertools import groupby
from pathlib import Path
from typing import Any, NoReturn

from rollpack._errors import is_printable, printable
from rollpack.cli._arguments import UsageError
from rollpack.cli._output import write


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are exceptions, so that they take one line like all others."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, formatter_class=_Formatter, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Raise :class:`UsageError`."""
        raise UsageError(f"{message} (see {self.prog} --help)")

    def _print_message(self, message: str, file: object = None) -> None:  # noqa: ARG002
        write(message)  # argparse passes over what stdout does not take

    def refuse(self, unknown: list[str]) -> NoReturn:
        """Say that these arguments are not known."""
        flag = unknown[0].partition("=")[0]
        near = _near(flag, self._option_string_actions) if flag.startswith("-") else ""
        self.error(f"unrecognized arguments: {' '.join(unknown)}{near}")

    def _get_value(self, action: argparse.Action, text: str) -> Any:
        # Names of files may be any bytes. All else is text to the core and to Arrow.
        if action.option_strings and action.type is not Path and not is_printable(text):
            raise argparse.ArgumentError(action, f"{printable(text)} is no UTF-8")
        return super()._get_value(action, text)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        choices: Collection[str] | None = action.choices  # type: ignore[assignment]
        if choices is not None and value not in choices:
            known = _near(value, choices) or f"; choose from {', '.join(choices)}"
            raise argparse.ArgumentError(action, f"invalid choice: {value!r}{known}")


def _near(text: str, known: Iterable[str]) -> str:
    """What may have been meant: something that begins so, or that is spelt much like it."""
    longer = [name for name in known if name.startswith(text)]
    near = longer[:1] or difflib.get_close_matches(text, list(known), 1)
    return f"; did you mean {near[0]}?" if near else ""


class _Formatter(argparse.HelpFormatter):
    """Prose is wrapped to the width of the terminal; lines that are set in are commands, and can be pasted as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:  # noqa: ARG002
        paragraphs = text.strip("\n").split("\n\n")
        return "\n\n".join("\n".join(self._filled(paragraph, width)) for paragraph in paragraphs)

    @staticmethod
    def _filled(paragraph: str, width: int) -> Iterable[str]:
        for command, lines in groupby(paragraph.splitlines(), key=lambda line: line.startswith("  ")):
            if not command:
                yield from textwrap.wrap(" ".join(lines), width, break_on_hyphens=False)
                continue
            for line in lines:
                # A line ends before a flag only, so that no value is parted from its own.
                whole = re.sub(r"(?<=\S) (?!-)", "\0", line)
                parts = textwrap.wrap(
                    whole, width - 2, subsequent_indent="      ", break_long_words=False, break_on_hyphens=False
                )
                yield " \\\n".join(parts).replace("\0", " ")
