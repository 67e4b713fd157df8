"""Types of the arrays that hold one entry for each endpoint."""

from __future__ import annotations

from typing import Any

import numpy as np

Slots = np.ndarray[Any, np.dtype[np.intp]]
Floats = np.ndarray[Any, np.dtype[np.float64]]
Integers = np.ndarray[Any, np.dtype[np.int64]]
Flags = np.ndarray[Any, np.dtype[np.bool_]]
