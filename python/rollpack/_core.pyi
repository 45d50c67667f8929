"""The Rust extension. Its callers are in this package; the public interface is ``rollpack``."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias, final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

__all__ = ["DEBUG", "Online", "Options", "Planning", "Rows", "inspect", "plan", "sample_weights", "summarize", "work"]

DEBUG: bool

_Ints: TypeAlias = npt.NDArray[np.int64]
_Cut: TypeAlias = tuple[int, str, int, int]
_Round: TypeAlias = list[list[list[int]]]
_Planned: TypeAlias = tuple[_Ints, _Ints, _Ints, _Ints]

class _Request(Protocol):
    @property
    def columns(self) -> Mapping[str, str | None]: ...
    @property
    def rollout_key(self) -> tuple[str, ...]: ...
    @property
    def groups(self) -> bool: ...
    @property
    def token_columns(self) -> tuple[str, ...]: ...
    @property
    def sample_columns(self) -> tuple[str, ...]: ...

class _PlanArguments(Protocol):
    @property
    def loss_aggregation(self) -> str: ...

def summarize(data: Sequence[Any], request: _Request) -> tuple[pa.RecordBatch, list[str], list[str]]: ...
def inspect(
    data: Sequence[Any], request: _Request
) -> tuple[pa.RecordBatch, list[str], list[tuple[str, str | None, int | None, str]]]: ...
def plan(
    summary: Any, key: Sequence[str], groups: Sequence[str], sources: Sequence[tuple[str, int]], options: Options
) -> Planning: ...
def sample_weights(
    loss_aggregation: str,
    num_samples: int,
    rollout_mask_sums: _Ints | None,
    prompt_mask_sums: _Ints | None,
    num_rollouts: int | None,
    num_prompts: int | None,
    num_tokens: int | None,
    divisor: float | None,
) -> npt.NDArray[np.float64]: ...
def work(total_lengths: _Ints, offsets: _Ints, cut_arguments: _Cut) -> tuple[_Ints, _Ints]: ...

@final
class Options:
    def __new__(cls, arguments: _PlanArguments, cut_arguments: _Cut) -> Options: ...

@final
class Planning:
    @property
    def placements(self) -> pa.RecordBatch: ...
    @property
    def offsets(self) -> _Ints: ...
    @property
    def steps(self) -> list[tuple[int, int | None, int, int]]: ...
    @property
    def dropped_rows(self) -> _Ints: ...
    @property
    def oversize_rows(self) -> _Ints: ...
    @property
    def fill(self) -> float: ...
    @property
    def imbalance(self) -> float: ...

@final
class Online:
    def __new__(cls, options: Options, look_ahead: int) -> Online: ...
    def add(self, rows: _Ints, total_lengths: _Ints) -> list[_Round]: ...
    def finish(self, step: int) -> _Round: ...

@final
class Rows:
    def __new__(cls, data: Sequence[Any], request: _Request, gaps: Sequence[int]) -> Rows: ...
    @staticmethod
    def joined(parts: Sequence[Rows], gaps: Sequence[int]) -> Rows: ...
    @property
    def num_rows(self) -> int: ...
    @property
    def float_columns(self) -> list[bool]: ...
    def size(self, planned: _Planned, cut_arguments: _Cut) -> tuple[int, int, int, tuple[int, int, int, int]]: ...
    def pack(
        self,
        planned: _Planned,
        cut_arguments: _Cut,
        cp_rank: int,
        ints: npt.NDArray[np.int32],
        mask: npt.NDArray[np.bool_],
        floats: npt.NDArray[np.float32],
        doubles: npt.NDArray[np.float64],
    ) -> None: ...
