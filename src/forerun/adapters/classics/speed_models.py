"""Interface of fitted speed models: fit to some points, predict others with intervals."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
from scipy.stats import t as student_t

from forerun.adapters.classics.speed_points import SpeedPoint, refuse_too_few
from forerun.base.numerics import refuse_times

__all__ = ["FittedSpeed", "LogQuadraticModel", "SpeedModel", "StepInterval"]

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


_NAMES = ("constant", "workers", "servers", "workers squared", "workers x servers")
_RIDGE = (0.0, 0.05, 0.05, 0.3, 0.3)
"""Chosen on the jobs of ``optimus_dl2_speed`` among 0.3 and 1 for the curved terms: curvature is cautious."""
_LEAST_POINTS = 3
_LEAST_LOG_SPREAD = 0.04


class LogQuadraticModel:
    """The logarithm of the step as a ridge regression on logarithms of workers and servers.

    log T = c0 + c1 log w + c2 log p + c3 (log w)^2 + c4 log w log p

    Unlike a sum of costs it can bend either way, and unlike one it says little beyond what was measured.
    """

    name = "log-quadratic"

    def fit(self, points: Sequence[SpeedPoint]) -> FittedSpeed:
        """Fits the surface.

        Raises:
            InvalidSetupError: There are fewer than three sizes, or a time is not above zero.
        """
        refuse_too_few(points, _LEAST_POINTS, f"the model '{self.name}'")
        times = np.asarray([point.measured_s for point in points])
        refuse_times(times)
        rows, wanted = _rows(points), np.log(times)
        information = rows.T @ rows + np.diag(_RIDGE)
        found = np.linalg.solve(information, rows.T @ wanted)
        residual = wanted - rows @ found
        num_freedom = max(2, len(times) - len(_NAMES))
        spread = float(np.sqrt(residual @ residual / num_freedom + _LEAST_LOG_SPREAD**2))
        covariance = spread**2 * np.linalg.inv(information)

        def log_times(at: Sequence[SpeedPoint]) -> Floats:
            values: Floats = _rows(at) @ found
            return values

        def log_variances(at: Sequence[SpeedPoint]) -> Floats:
            variances: Floats = np.einsum("pi,ij,pj->p", _rows(at), covariance, _rows(at))
            return variances

        return FittedSpeed(
            name=self.name,
            parameters=dict(zip(_NAMES, found.tolist(), strict=True)),
            log_times=log_times,
            log_variances=log_variances,
            log_spread=spread,
            num_freedom=num_freedom,
        )


def _rows(points: Sequence[SpeedPoint]) -> Floats:
    """The five terms of each point, (points, 5)."""
    workers = np.log([point.num_devices for point in points])
    servers = np.log([max(1, point.num_servers) for point in points])
    return np.column_stack([np.ones(len(points)), workers, servers, workers**2, workers * servers])
