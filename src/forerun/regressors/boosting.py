"""Gradient-boosted trees on whole-model sums."""

from __future__ import annotations

from typing import Any

import numpy as np

from forerun.errors import MissingExtraError
from forerun.regressors.features import WholeModelFeatures
from forerun.regressors.interface import SHORTEST_STEP_S, Floats, check_fit_input, not_fitted

__all__ = ["BoostedTrees"]

_NUM_TREES = 400
_LEARNING_RATE = 0.06
_MAX_LEAVES = 15
_MIN_ROWS_PER_LEAF = 5


class BoostedTrees:
    """log t from trees over log sums per op class, totals, sizes and flags.

    Trees return means of what they saw: a step outside the range of the fit gets the time of its border.
    """

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed
        self._trees: Any = None

    @staticmethod
    def _columns(features: WholeModelFeatures) -> Floats:
        seconds = np.column_stack(
            [
                features.flops / features.peak_flops_per_s,
                features.traffic_bytes / features.bandwidth_bytes_per_s,
                features.class_flops / features.peak_flops_per_s[:, None],
                features.class_bytes / features.bandwidth_bytes_per_s[:, None],
            ]
        )
        sizes = np.column_stack(
            [features.num_parameters, features.batch_size, features.image_size, features.num_kernels]
        )
        # A class that does not occur sits at the launch of one kernel, below all that do.
        logs = [np.log(np.maximum(seconds, SHORTEST_STEP_S)), np.log(np.maximum(sizes, 1.0))]
        return np.column_stack([*logs, features.flags])

    def fit(self, features: WholeModelFeatures, step_time_s: Floats) -> None:
        """Grow the trees on log times."""
        times = check_fit_input(features, step_time_s)
        try:
            from sklearn.ensemble import HistGradientBoostingRegressor
        except ImportError as error:
            raise MissingExtraError("gradient boosting", "ml") from error
        self._trees = HistGradientBoostingRegressor(
            max_iter=_NUM_TREES,
            learning_rate=_LEARNING_RATE,
            max_leaf_nodes=_MAX_LEAVES,
            min_samples_leaf=min(_MIN_ROWS_PER_LEAF, max(1, len(times) // 4)),
            early_stopping=False,
            random_state=self._seed,
        ).fit(self._columns(features), np.log(times))

    def predict(self, features: WholeModelFeatures) -> Floats:
        """Times of the trees [s]."""
        if self._trees is None:
            raise not_fitted("gradient boosting")
        logs = self._trees.predict(self._columns(features))
        return np.asarray(np.exp(logs), dtype=float)
