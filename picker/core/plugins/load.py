"""What the load scorers share: how an unknown value counts."""

from __future__ import annotations

import numpy as np

from picker.core.arrays import Floats

NEUTRAL = 50.0


def unknown_as_average(values: Floats, otherwise: float) -> Floats:
    """Replace NaN by the mean of the known values, or by `otherwise` when none is known.

    An endpoint whose metrics went stale is then neither free nor shunned: our own in-flight counts decide.
    """
    unknown = np.isnan(values)
    if not np.count_nonzero(unknown):
        return values
    known = values[~unknown]
    return np.where(unknown, known.mean() if len(known) else otherwise, values)
