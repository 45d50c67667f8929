"""RL rollouts in Arrow to packed micro-batches, and a loss that does not depend on how the batch was cut.

One way through, each verb usable alone: :func:`summarize`, :func:`plan`, :func:`pack`, and in :mod:`rollpack.torch` the
reducer. Importing rollpack needs neither torch nor a GPU.
"""

import warnings as _warnings

from rollpack import _core
from rollpack import _signals as _signals  # before all that takes its time: it acts as it is imported
from rollpack._errors import DataError, PlanError, RollpackError, SchemaError
from rollpack.cost import CostModel
from rollpack.online import pack_online
from rollpack.packed import read_packed, write_packed
from rollpack.packing import MicroBatch, pack
from rollpack.planning import plan
from rollpack.plans import Plan, Step
from rollpack.simulation import simulate
from rollpack.summary import Summary, summarize
from rollpack.weights import sample_weights

__version__ = "0.1.0"

if _core.DEBUG:
    _warnings.warn(
        "this is a debug build of rollpack, many times slower than a release: build with `maturin develop --release`, or "
        "install a wheel",
        RuntimeWarning,
        stacklevel=2,
    )

__all__ = [
    "CostModel",
    "DataError",
    "MicroBatch",
    "Plan",
    "PlanError",
    "RollpackError",
    "SchemaError",
    "Step",
    "Summary",
    "pack",
    "pack_online",
    "plan",
    "read_packed",
    "sample_weights",
    "simulate",
    "summarize",
    "write_packed",
]
