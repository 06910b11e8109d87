"""The Pareto front: candidates that no other candidate beats in all objectives."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["pareto_front"]

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


def pareto_front(costs: Floats) -> Bools:
    """True if each point is on the front, that is not dominated by another, (n,).

    A point dominates another if it is nowhere larger and somewhere smaller. Of equal points the first is kept.
    Points with a value that is not finite are never on the front.

    Args:
        costs: One row per point, each column to be small, (n, k).
    """
    on_front = np.zeros(len(costs), dtype=bool)
    usable = np.flatnonzero(np.isfinite(costs).all(axis=1))
    if not usable.size:
        return on_front
    # In lexicographic order a later point never dominates an earlier one.
    order = usable[np.lexsort(costs[usable].T[::-1])]
    chosen = _front_of_two(costs[order]) if costs.shape[1] == 2 else _front_of_many(costs[order])
    on_front[order[chosen]] = True
    return on_front


def _front_of_two(ordered: Floats) -> Bools:
    second = ordered[:, 1]
    best_before = np.concatenate([[np.inf], np.minimum.accumulate(second)[:-1]])
    return np.asarray(second < best_before)


def _front_of_many(ordered: Floats) -> Bools:
    chosen = np.zeros(len(ordered), dtype=bool)
    front = np.empty((0, ordered.shape[1]))
    for index, point in enumerate(ordered):
        if not (front <= point).all(axis=1).any():
            chosen[index] = True
            front = np.vstack([front, point])
    return chosen
