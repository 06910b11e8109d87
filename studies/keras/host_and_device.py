"""Separates host and device time of a step, from steps of one device at several batch sizes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.optimize import least_squares

from forerun.base.errors import InvalidSetupError
from forerun.base.numerics import refuse_times
from forerun.cost.communication.data_parallel import SHARPNESS, HostAndDevice

_USUAL_SCATTER = 0.05
"""Logarithmic errors beyond this pull linearly: a run that was disturbed says little."""


def split_host_and_device(batch_sizes: Sequence[float], steps_s: Sequence[float]) -> HostAndDevice:
    """Host, fixed and per-sample time of a network from its steps on one device.

    Minimises the logarithmic error, squared where it is small, of max(H, D_0 + s b) with all three at least zero. At
    least three batch sizes are needed. Where the step grows with the batch from the smallest on, H is only bounded
    above, and the fit takes the smallest that explains the steps as well as any: what is not seen to be the host's is
    the device's.

    Args:
        batch_sizes: Samples of one device.
        steps_s: Measured steps of one device [s].

    Raises:
        InvalidSetupError: There are fewer than three batch sizes, or a time is not above zero.
    """
    batch, steps = np.asarray(batch_sizes, dtype=float), np.asarray(steps_s, dtype=float)
    if len(set(batch.tolist())) < 3:
        raise InvalidSetupError(
            "host and device cannot be told apart: expected steps at three batch sizes or more, "
            f"got {len(set(batch.tolist()))}; measure more"
        )
    refuse_times(steps)
    smallest = float(steps.min())
    slope = max(1e-12, float((steps.max() - smallest) / (batch.max() - batch.min())))

    def residual(at: np.ndarray) -> np.ndarray:
        host, fixed, per_sample = np.exp(at)
        found = (host**SHARPNESS + (fixed + per_sample * batch) ** SHARPNESS) ** (1 / SHARPNESS)
        # The last row prefers the smaller host where both explain the steps.
        return np.append(np.log(found / steps), 1e-3 * at[0])

    starts = [(h * smallest, f * smallest, slope) for h in (0.1, 0.9) for f in (0.05, 0.9)]
    fits = [
        least_squares(residual, np.log(start), loss="soft_l1", f_scale=_USUAL_SCATTER) for start in starts
    ]
    best = min(fits, key=lambda fit: fit.cost)
    host_s, fixed_s, per_sample_s = (float(value) for value in np.exp(best.x))
    return HostAndDevice(host_s=host_s, device_fixed_s=fixed_s, device_per_sample_s=per_sample_s)
