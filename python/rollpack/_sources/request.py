"""What to read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rollpack._errors import SchemaError, is_printable

#: The columns that a role can be mapped to, in the order of the documentation.
ROLES = ("tokens", "response_length", "loss_mask", "rollout_id", "group_index")


@dataclass(frozen=True)
class Request:
    """What to read, and under which names. The core knows what it means."""

    columns: Mapping[str, str | None]
    rollout_key: tuple[str, ...]
    groups: bool
    token_columns: tuple[str, ...]
    sample_columns: tuple[str, ...]

    @classmethod
    def make(
        cls,
        columns: Mapping[str, str | None] | None,
        rollout_key: str | Sequence[str],
        *,
        groups: bool = False,
        token_columns: Sequence[str] = (),
        sample_columns: Sequence[str] = (),
    ) -> Request:
        """From the arguments of the public functions. A key that names the group reads the groups."""
        if not isinstance(columns, Mapping | None):
            raise TypeError(f"columns is {columns!r}; it has to map roles to names, as {{'tokens': 'input_ids'}}")
        for role, name in (columns or {}).items():
            _check_names("columns", [role] if name is None else [role, name])
        key = _names("rollout_key", rollout_key)
        return cls(
            columns=dict(columns or {}),
            rollout_key=key,
            groups=groups or "group_index" in key,
            token_columns=_names("token_columns", token_columns),
            sample_columns=_names("sample_columns", sample_columns),
        )

    def names(self) -> set[str]:
        """The columns of the data that may be read."""
        roles = {"tokens", "response_length", "loss_mask", *self.rollout_key}
        if self.groups:
            roles.add("group_index")
        names = {self.columns.get(role, role) for role in roles}
        return {name for name in names if name is not None} | {*self.token_columns, *self.sample_columns}


def _names(argument: str, names: str | Sequence[str]) -> tuple[str, ...]:
    if not isinstance(names, str | Sequence):
        raise TypeError(f"{argument} is {names!r}; it has to be a column name or a sequence of them")
    names = (names,) if isinstance(names, str) else tuple(names)
    _check_names(argument, names)
    return names


def _check_names(argument: str, names: Sequence[str]) -> None:
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"{argument} holds {name!r}; column names are strings")
        if not is_printable(name):
            raise SchemaError(f"{argument} holds {name!r}, and no column has a name that UTF-8 cannot hold", name)
