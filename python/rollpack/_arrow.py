"""Numpy to Arrow."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa


def int64_array(values: npt.NDArray[Any]) -> pa.Array:
    """Integers as an Arrow array, of int64 without a copy: ``pa.array`` would import pandas, which takes a second."""
    values = np.ascontiguousarray(values, dtype=np.int64)
    return pa.Array.from_buffers(pa.int64(), len(values), [None, pa.py_buffer(values)])
