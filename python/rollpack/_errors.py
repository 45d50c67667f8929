"""The errors that rollpack raises, all of them :class:`ValueError`."""

from __future__ import annotations


def printable(text: str) -> str:
    """With what UTF-8 cannot hold escaped: bytes of a file's name that are none."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def is_printable(text: str) -> bool:
    """Whether UTF-8 can hold it."""
    return printable(text) == text


class RollpackError(ValueError):
    """Any error that rollpack raises about its input or its arguments. Its text can be written anywhere."""

    def __init__(self, message: str = "") -> None:
        super().__init__(printable(message))


class _LocatedError(RollpackError):
    """An error with a place: ``column`` and ``row``, each None where there is none."""

    def __init__(self, message: str, column: str | None = None, row: int | None = None) -> None:
        super().__init__(message)
        self.column = column
        self.row = row

    def __reduce__(self) -> tuple[type[_LocatedError], tuple[str, str | None, int | None]]:
        return type(self), (str(self), self.column, self.row)


class SchemaError(_LocatedError):
    """A column is missing, or has a type that cannot be read.

    Attributes:
        column: the name of the column in the data.
        row: None.
    """


class DataError(_LocatedError):
    """A value is wrong, or there is nothing to read.

    Attributes:
        column: the name of the column in the data, None where the fault is not in one.
        row: the row, counted from 0 over the whole input, None where the fault is not in one.
    """


class PlanError(RollpackError):
    """What was asked for cannot be met. The message says what would meet it."""
