"""A smooth surface through the logarithm of step times, for parameter servers whose limits are not those of a form."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from forerun.communication.nonnegative import refuse_times
from forerun.communication.speed_models import FittedSpeed
from forerun.communication.speed_points import SpeedPoint, refuse_too_few

__all__ = ["LogQuadraticModel"]

Floats = npt.NDArray[np.float64]

_NAMES = ("constant", "workers", "servers", "workers squared", "workers x servers")
_RIDGE = (0.0, 0.05, 0.05, 0.3, 0.3)
"""Chosen on the jobs of ``optimus_dl2_speed`` among 0.3 and 1 for the curved terms: curvature is cautious."""
_LEAST_POINTS = 3
_LEAST_SPREAD = 0.04


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
        spread = float(np.sqrt(residual @ residual / num_freedom + _LEAST_SPREAD**2))
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
