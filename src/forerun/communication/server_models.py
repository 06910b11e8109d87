"""Speed models of parameter servers: Optimus' two forms, fitted on relative error, with identifiability checked."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from forerun.communication.nonnegative import fit_relative
from forerun.communication.parameter_server import asynchronous_terms, synchronous_terms
from forerun.communication.speed_models import FittedSpeed
from forerun.communication.speed_points import SpeedPoint, refuse_too_few
from forerun.errors import InvalidSetupError

__all__ = ["OptimusModel", "server_columns"]

Floats = npt.NDArray[np.float64]

_SYNCHRONOUS_NAMES = ("t0 (M/w)", "t1 (constant)", "t2 (w/p)", "t3 (w)", "t4 (p)")
_ASYNCHRONOUS_NAMES = ("t0 (constant)", "t1 (w/p)", "t2 (w)", "t3 (p)")


def server_columns(points: Sequence[SpeedPoint], *, synchronous: bool, batch: float) -> Floats:
    """Factors of each coefficient, (points, coefficients).

    Args:
        points: Sizes with workers and servers.
        synchronous: Whether the form is the synchronous one.
        batch: Global batch size of the coefficients, M = 1.
    """
    without = [point for point in points if point.num_servers < 1]
    if without:
        raise InvalidSetupError(
            f"a parameter-server model needs num_servers of at least 1 at every point, got {without[0].num_servers}; "
            "give the column num_servers"
        )
    if synchronous:
        rows = [synchronous_terms(p.num_devices, p.num_servers, p.batch_size_global / batch) for p in points]
    else:
        rows = [asynchronous_terms(p.num_devices, p.num_servers) for p in points]
    return np.asarray(rows, dtype=float)


class OptimusModel:
    """Optimus' speed function, T linear in non-negative coefficients (Peng et al. 2018, equations 3 and 4).

    The step of a point is that of all workers together (synchronous) or of one worker (asynchronous).

    Args:
        synchronous: Whether the form is the synchronous one.
    """

    def __init__(self, *, synchronous: bool = True) -> None:
        self._synchronous = synchronous

    @property
    def name(self) -> str:
        """Name of the form."""
        return "optimus-synchronous" if self._synchronous else "optimus-asynchronous"

    def fit(self, points: Sequence[SpeedPoint]) -> FittedSpeed:
        """Non-negative least squares on relative error.

        Raises:
            InvalidSetupError: The points do not tell the coefficients apart; the message names them.
        """
        names = _SYNCHRONOUS_NAMES if self._synchronous else _ASYNCHRONOUS_NAMES
        refuse_too_few(points, 2, f"the model '{self.name}'")
        batch = float(np.median([point.batch_size_global for point in points]))
        columns = server_columns(points, synchronous=self._synchronous, batch=batch)
        times = np.asarray([point.measured_s for point in points])
        fit = fit_relative(columns, times, names)

        def terms(at: Sequence[SpeedPoint]) -> Floats:
            return server_columns(at, synchronous=self._synchronous, batch=batch)

        def log_times(at: Sequence[SpeedPoint]) -> Floats:
            return np.log(np.maximum(1e-12, terms(at) @ fit.coefficients))

        def log_variances(at: Sequence[SpeedPoint]) -> Floats:
            rows = terms(at)
            variances: Floats = np.einsum("pi,ij,pj->p", rows, fit.covariance, rows)
            relative: Floats = variances / np.maximum(1e-12, rows @ fit.coefficients) ** 2
            return relative

        return FittedSpeed(
            name=self.name,
            parameters=dict(zip(names, fit.coefficients.tolist(), strict=True)),
            log_times=log_times,
            log_variances=log_variances,
            log_spread=fit.log_spread,
            num_freedom=max(1, len(points) - len(names)),
        )
