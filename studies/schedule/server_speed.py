"""Optimus' speed of parameter servers, fitted to measured speeds."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

from forerun.adapters.classics.server_models import SynchronousServerSpeed
from forerun.base.errors import InvalidSetupError


def fit_server_speed(
    num_workers: npt.ArrayLike, num_servers: npt.ArrayLike, steps_per_s: npt.ArrayLike
) -> SynchronousServerSpeed:
    """Optimus' five coefficients by non-negative least squares on the relative error of the step time.

    Args:
        num_workers: Workers of each measurement.
        num_servers: Its servers.
        steps_per_s: Measured speeds, above zero.

    Raises:
        InvalidSetupError: There is no point, or a speed is not above zero.
    """
    w, p = np.asarray(num_workers, dtype=float), np.asarray(num_servers, dtype=float)
    speed = np.asarray(steps_per_s, dtype=float)
    if not speed.size or not np.all(np.isfinite(speed) & (speed > 0)):
        raise InvalidSetupError(
            "expected measured speeds above zero for workers and servers, got none or others"
        )
    columns = np.stack([1 / w, np.ones_like(w), w / p, w, p], axis=1)
    found, _ = nnls(columns * speed[:, None], np.ones_like(speed))
    return SynchronousServerSpeed(tuple(found.tolist()))
