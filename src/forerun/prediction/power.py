"""Energy of a step or a job on one device."""

from __future__ import annotations

import numpy as np

from forerun.hardware.device import Device
from forerun.optime.power import device_power
from forerun.prediction.estimate import Interval

__all__ = ["training_energy_j"]


def training_energy_j(
    device: Device, duration_s: Interval, activity: float, compute_fraction: float
) -> Interval | None:
    """Energy of the device over a duration [J]; None where no power figures stand behind the model.

    energy = power * duration, with the power of ``optime.power`` at this activity. The two intervals are taken as
    independent: relative half-widths add in squares. Host, cooling and network are left out.

    Args:
        device: The device.
        duration_s: How long it works.
        activity: Ideal time of the step's work and traffic over the time of the step.
        compute_fraction: Share of the work in that ideal time.
    """
    power = device_power(device, np.asarray([activity]), np.asarray([compute_fraction]))
    if power is None:
        return None
    watts, low_w, high_w = (float(end[0]) for end in (power.value_w, power.low_w, power.high_w))
    value = watts * duration_s.value

    def spread(share: float, duration: float) -> float:
        return float((share**2 + duration**2) ** 0.5)

    below = spread(1 - low_w / watts, 1 - duration_s.low / duration_s.value)
    above = spread(high_w / watts - 1, duration_s.high / duration_s.value - 1)
    return Interval(value, value * max(0.0, 1 - below), value * (1 + above))
