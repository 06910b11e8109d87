"""Waiting for the slowest device: expected maximum of step times that scatter between devices."""

from __future__ import annotations

from functools import cache
from math import erf, exp, pi, sqrt

from forerun.errors import InvalidSetupError

__all__ = ["expected_normal_maximum", "straggler_factor"]

_STEPS = 4000
_REACH = 8.0


@cache
def expected_normal_maximum(num_devices: int) -> float:
    """Expected maximum of n independent standard normal numbers: 0, 0.564, 0.846, 1.029 for n = 1, 2, 3, 4.

    E = integral of x n phi(x) Phi(x)^(n-1); it grows like sqrt(2 ln n).

    Source: Tippett 1925, Biometrika 17 (the table of these values).
    """
    if num_devices < 1:
        raise InvalidSetupError(
            f"the number of devices must be at least 1, got {num_devices}; give a positive number"
        )
    width = 2 * _REACH / _STEPS
    total = 0.0
    for i in range(_STEPS + 1):
        x = -_REACH + i * width
        below = 0.5 * (1 + erf(x / sqrt(2)))
        total += x * num_devices * exp(-x * x / 2) / sqrt(2 * pi) * below ** (num_devices - 1)
    return total * width


def straggler_factor(num_devices: int, coefficient_of_variation: float) -> float:
    """Expected step time of n devices that wait for each other, relative to the mean of one.

    1 + cv * E[max of n normals]. Devices are taken as independent from step to step; one that is always slow shifts the
    mean instead.

    Args:
        num_devices: Devices that synchronise.
        coefficient_of_variation: Standard deviation over mean of the time of one device's step.

    Raises:
        InvalidSetupError: The coefficient is negative.
    """
    if not coefficient_of_variation >= 0:
        raise InvalidSetupError(
            f"a coefficient of variation must be zero or more, got {coefficient_of_variation}; 0.01 to 0.08 are usual"
        )
    return 1 + coefficient_of_variation * expected_normal_maximum(num_devices)
