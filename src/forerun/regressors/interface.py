"""What every whole-model regressor offers, and the checks they share."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from forerun.errors import CostModelError, RecordError
from forerun.regressors.features import WholeModelFeatures

__all__ = ["SHORTEST_STEP_S", "Floats", "Regressor", "check_fit_input", "not_fitted"]

Floats = npt.NDArray[np.float64]

SHORTEST_STEP_S = 1e-6
"""Predictions do not go below one microsecond, about the launch of a single kernel."""


class Regressor(Protocol):
    """Predicts the time of a step from whole-model figures.

    A regressor starts unfitted; ``predict`` before ``fit`` is an error unless nothing is fitted. Fitting
    again forgets the first fit. The same input gives the same output.
    """

    def fit(self, features: WholeModelFeatures, step_time_s: Floats) -> None:
        """Learn from n steps; ``step_time_s`` is (n,) and positive."""
        ...

    def predict(self, features: WholeModelFeatures) -> Floats:
        """Positive step times [s], (n,)."""
        ...


def check_fit_input(features: WholeModelFeatures, step_time_s: Floats) -> Floats:
    """The times as a float array, after checking that they can be learned from."""
    times = np.asarray(step_time_s, dtype=float)
    if times.shape != (len(features),):
        raise RecordError(
            f"expected one step time per row of features ({len(features)}), got shape {times.shape}"
        )
    if len(times) == 0:
        raise RecordError("expected at least one measured step to fit on, got none")
    bad = np.flatnonzero(~(np.isfinite(times) & (times > 0)))
    if bad.size:
        raise RecordError(
            f"expected step times above zero, got {times[bad[0]]} in row {bad[0] + 1}; drop the row"
        )
    return times


def not_fitted(name: str) -> CostModelError:
    """The error of a prediction before a fit."""
    return CostModelError(f"{name} was asked for a prediction before it was fitted; call fit first")
