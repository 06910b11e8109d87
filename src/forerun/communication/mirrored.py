"""TensorFlow's MirroredStrategy: one process that dispatches every replica and then reduces all gradients.

The step of one device is bound either by its host, which needs H seconds to launch it however small the batch, or by
the device, which needs D(b). With n replicas the same host launches n times, and the device additionally waits for the
all-reduce of all gradients, which are sent together when the last of them is there:

    t_1 = max(H, D(b))        t_n = max(n H + (n-1) C, D(b) + R),        R = all-reduce of the gradients

where the maxima are soft: max_k(x, y) = (x^k + y^k)^(1/k). H and D come from steps of one device at several batch
    sizes alone:
D(b) = D_0 + s b, and H from the flat part. C is what moving a batch to another replica costs the host; it is
contained in H for one device and therefore left out (C = 0). Nothing of this is fitted to steps of several devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import least_squares

from forerun.communication.nonnegative import refuse_times
from forerun.errors import InvalidSetupError

__all__ = ["HostAndDevice", "mirrored_step_s", "split_host_and_device"]

_USUAL_SCATTER = 0.05
"""Logarithmic errors beyond this pull linearly: a run that was disturbed says little."""
SHARPNESS = 4.0
"""Exponent of the soft maximum: at equal times the step is 19 % longer than either."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostAndDevice:
    """What a step of one device is made of.

    Attributes:
        host_s: Launching the step, independent of the batch, H [s].
        device_fixed_s: Device time at batch zero: optimizer, weights, D_0 [s].
        device_per_sample_s: Device time of one sample, s [s].
    """

    host_s: float
    device_fixed_s: float
    device_per_sample_s: float

    def device_s(self, batch_size_per_device: float) -> float:
        """Time of the device, D(b) [s]."""
        return self.device_fixed_s + self.device_per_sample_s * batch_size_per_device

    def step_s(self, batch_size_per_device: float) -> float:
        """Step of one device [s]."""
        return _soft_max(self.host_s, self.device_s(batch_size_per_device))


def _soft_max(x: float, y: float) -> float:
    return float((x**SHARPNESS + y**SHARPNESS) ** (1 / SHARPNESS))


def mirrored_step_s(
    one: HostAndDevice, batch_size_per_device: float, num_devices: int, all_reduce_s: float
) -> float:
    """Step of n replicas under one host process [s].

    t_n = max(n H, D(b) + R), soft; n = 1 gives the step of one device.

    Args:
        one: Host and device of one replica.
        batch_size_per_device: Samples of one replica, b.
        num_devices: Replicas, n.
        all_reduce_s: All-reduce of all gradients, R [s].
    """
    if num_devices < 1 or not batch_size_per_device > 0:
        raise InvalidSetupError(
            f"replicas and their batch must be at least 1, got {num_devices} and {batch_size_per_device}"
        )
    exposed_s = all_reduce_s if num_devices > 1 else 0.0
    return _soft_max(num_devices * one.host_s, one.device_s(batch_size_per_device) + exposed_s)


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
