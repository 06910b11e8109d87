"""Interface of fitted speed models: fit to some points, predict others with intervals."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
from scipy.stats import t as student_t

from forerun.communication.speed_points import SpeedPoint

__all__ = ["FittedSpeed", "SpeedModel", "StepInterval"]

Floats = npt.NDArray[np.float64]

_LEAST_SPREAD = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInterval:
    """A step time and its 90 % interval [s]."""

    value_s: float
    low_s: float
    high_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedSpeed:
    """A speed model after its fit.

    Attributes:
        name: Name of the model.
        parameters: Its coefficients by name.
        log_times: Function of points: logarithm of the step times, (points,).
        log_variances: Function of points: variance of that logarithm from the coefficients' uncertainty, (points,).
        log_spread: Standard deviation of the logarithm of measured over fitted steps.
        num_freedom: Points less coefficients, at least 1: quantiles are those of Student's distribution.
    """

    name: str
    parameters: Mapping[str, float]
    log_times: Callable[[Sequence[SpeedPoint]], Floats]
    log_variances: Callable[[Sequence[SpeedPoint]], Floats]
    log_spread: float
    num_freedom: int = 1

    def step_s(self, points: Sequence[SpeedPoint]) -> Floats:
        """Step times of these sizes, (points,) [s]."""
        times: Floats = np.exp(self.log_times(points))
        return times

    def intervals(self, points: Sequence[SpeedPoint]) -> list[StepInterval]:
        """Step times with 90 % intervals: scatter of the points and uncertainty of the coefficients together."""
        times = self.step_s(points)
        spread = max(self.log_spread, _LEAST_SPREAD)
        quantile = float(student_t.ppf(0.95, max(1, self.num_freedom)))
        factors = np.exp(
            np.minimum(quantile * np.sqrt(spread**2 + np.maximum(0.0, self.log_variances(points))), 3.0)
        )
        return [
            StepInterval(value_s=float(time), low_s=float(time / factor), high_s=float(time * factor))
            for time, factor in zip(times, factors, strict=True)
        ]


class SpeedModel(Protocol):
    """A form of the step time as a function of the size of a job."""

    @property
    def name(self) -> str:
        """Name of the form."""
        ...

    def fit(self, points: Sequence[SpeedPoint]) -> FittedSpeed:
        """Fits the form to measured points.

        Raises:
            InvalidSetupError: The points do not suffice, or a time is not above zero.
        """
        ...
