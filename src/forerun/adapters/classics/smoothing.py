"""Residuals of a fitted form, carried to sizes nearby: kriging of logarithmic residuals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from forerun.adapters.classics.speed_models import FittedSpeed, SpeedModel
from forerun.adapters.classics.speed_points import SpeedPoint

__all__ = ["SmoothedModel", "place_of", "smoothed"]

Floats = npt.NDArray[np.float64]

_DEVIATION = 0.1
_REACH = 0.5
_NOISE = 0.06


def place_of(points: Sequence[SpeedPoint]) -> Floats:
    """Coordinates of sizes: logarithms of devices, servers, twice the nodes, half the batch of a device, (points, 4).

    A factor of e in devices is as far as one of sqrt(e) in nodes and e^2 in the batch.
    """
    return np.asarray(
        [
            (
                np.log(point.num_devices),
                np.log(max(1, point.num_servers)),
                2 * np.log(point.num_nodes),
                # With servers the global batch is fixed, so the batch of a worker adds no information.
                0.0 if point.num_servers else 0.5 * np.log(point.batch_size_per_device),
            )
            for point in points
        ],
        dtype=float,
    )


def _likeness(first: Floats, second: Floats) -> Floats:
    square = ((first[:, None] - second[None]) ** 2).sum(axis=-1)
    found: Floats = _DEVIATION**2 * np.exp(-square / (2 * _REACH**2))
    return found


def smoothed(fit: FittedSpeed, points: Sequence[SpeedPoint]) -> FittedSpeed:
    """A fitted model whose residuals at the measured sizes are carried to those near them.

    log T = form + k(x, X) (k(X, X) + noise^2)^-1 residuals, with k a Gaussian of distance: far from every measured
    point nothing changes, and the noise keeps single points from being followed exactly.

    Args:
        fit: The fitted form.
        points: The points it was fitted to.

    Source: Krige 1951; Rasmussen and Williams 2006, Gaussian Processes, chapter 2.
    """
    places = place_of(points)
    residual = np.log([point.measured_s for point in points]) - fit.log_times(points)
    kernel = _likeness(places, places) + _NOISE**2 * np.eye(len(places))
    weights = np.linalg.solve(kernel, residual)

    def log_times(at: Sequence[SpeedPoint]) -> Floats:
        found: Floats = fit.log_times(at) + _likeness(place_of(at), places) @ weights
        return found

    return replace(fit, log_times=log_times)


class SmoothedModel:
    """A speed model whose residuals are carried to sizes nearby.

    Args:
        make: Function that makes the form.
        name: Name of the model.
    """

    def __init__(self, make: Callable[[], SpeedModel], name: str) -> None:
        self._make = make
        self.name = name

    def fit(self, points: Sequence[SpeedPoint]) -> FittedSpeed:
        """Fits the form, then its residuals."""
        return replace(smoothed(self._make().fit(points), points), name=self.name)
