"""TensorFlow's MirroredStrategy: one process that dispatches every replica and then reduces all gradients.

The step of one device is bound either by its host, which needs H seconds to launch it however small the batch, or by
the device, which needs D(b). With n replicas the same host launches n times, and the device additionally waits for the
all-reduce of all gradients, which are sent together when the last of them is there:

    t_1 = max(H, D(b))        t_n = max(n H + (n-1) C, D(b) + R),        R = all-reduce of the gradients

where the maxima are soft: max_k(x, y) = (x^k + y^k)^(1/k). H and D come from steps of one device at several batch
sizes alone: D(b) = D_0 + s b, and H from the flat part. C is what moving a batch to another replica costs the host; it
is contained in H for one device and therefore left out (C = 0). Nothing of this is fitted to steps of several devices.
Where a prediction knows the loop of ``fit`` apart from the launches, that runs once and is added to t_n.
"""

from __future__ import annotations

from dataclasses import dataclass

from forerun.base.errors import InvalidSetupError

__all__ = [
    "HostAndDevice",
    "device_part_s",
    "mirrored_step_s",
]

SHARPNESS = 4.0
"""Exponent of the soft maximum: at equal times the step is 19 % longer than either."""

_LEAST_DEVICE_SHARE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class HostAndDevice:
    """Parts of the step of one device.

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


def device_part_s(step_s: float, host_s: float) -> float:
    """Device time of a step that is the soft maximum of the host's time and it; at least 5 % of the step [s]."""
    share = min(1.0, host_s / step_s)
    return step_s * float(max(1 - share**SHARPNESS, _LEAST_DEVICE_SHARE**SHARPNESS) ** (1 / SHARPNESS))


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
