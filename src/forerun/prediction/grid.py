"""Batch sizes of a grid that are evaluated, and what lies between them.

Up to 16 batch sizes are evaluated one by one. Of more, 16 at equal distances of their logarithm are, and log time is
interpolated in log batch by monotone cubics (PCHIP) between them: a step time is smooth in the batch but for the last
wave of a kernel, and the error stays far below the interval.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from scipy.interpolate import PchipInterpolator

__all__ = ["MAX_EXACT_BATCH_SIZES", "between_nodes", "grid_nodes"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

MAX_EXACT_BATCH_SIZES = 16
"""More batch sizes than these are interpolated between as many of them."""


def grid_nodes(wanted: Ints) -> Ints:
    """The batch sizes to evaluate, ascending: all, or the wanted ones nearest to equal logarithmic distances."""
    distinct = np.unique(wanted)
    if len(distinct) <= MAX_EXACT_BATCH_SIZES:
        return distinct
    targets = np.geomspace(distinct[0], distinct[-1], MAX_EXACT_BATCH_SIZES)
    nearest = np.abs(np.log(distinct)[None] - np.log(targets)[:, None]).argmin(axis=1)
    chosen: Ints = distinct[np.unique(nearest)]
    return chosen


def between_nodes(nodes: Ints, grid: Floats, wanted: Ints) -> Floats:
    """Positive values at the wanted batch sizes, (devices, wanted), from those at the nodes, (devices, nodes)."""
    if len(nodes) == len(np.unique(wanted)):
        return grid[:, np.searchsorted(nodes, wanted)]
    curves = PchipInterpolator(np.log(nodes), np.log(grid), axis=1)
    values: Floats = np.exp(curves(np.log(wanted)))
    return values
