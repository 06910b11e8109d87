"""Power of a GPU at work, and the effect of a power limit on its clock.

A training step keeps a share of the device's peak rates busy. With work c at the peak rates and traffic m at the full
bandwidth [s], and a step that takes t [s]:

    activity   a = (c + m) / t
    demand     P = idle + (full - idle) (1 - exp(-(k a)^q))
    limited    P' = (P^-12 + L^-12)^(-1/12)
    left       r = (min(P, L) - idle) / (P - idle)
    clock      f = r^g0, below the knee r0 of r: r0^g0 (r / r0)
    slowdown   s = f^-(1 + g1 (c / (c + m) - 1/2))

Powers are shares of the board's power limit as shipped; L is the limit that is set. ``idle`` is the power of a
waiting device with its clocks up, which is more than an idle desktop draws. Power varies within a step, so the parts
with most power reach the limit before the mean does: mean power stays somewhat below both the demand and the limit.
Dynamic power is proportional to f V^2: while the voltage V falls with the clock, a small loss of clock saves much
power; below the knee the voltage is at its minimum, and power falls in proportion to the clock. Time depends on the
clock, the time of arithmetic more than that of traffic. Power of the host, cooling and network is left out.

Fitted by the study of energy on ``zeus_epoch_time_power`` (You, Chung and Chowdhury, NSDI 2023): A40,
P100, Quadro RTX 6000 and V100, power limits from 100 W.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from forerun.base.errors import InvalidSetupError
from forerun.question.devices.device import Device, DeviceKind

Floats = npt.NDArray[np.float64]

_LEAST_DYNAMIC_SHARE = 0.05
_SHARPNESS = 12.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerLaw:
    """Constants of the power model; powers are shares of the board's limit as shipped.

    Attributes:
        idle_share: Power of a device that waits with its clocks up.
        full_share: Power of a device at full activity.
        activity_factor: k.
        activity_exponent: q.
        slowdown_exponent: g0.
        knee_share: r0, dynamic power over dynamic power without a limit, where the voltage reaches its minimum.
        compute_weight: g1.
        log_width: Half-width of the 90 % interval of log power.
        source: Data on which the constants were fitted.
    """

    idle_share: float
    full_share: float
    activity_factor: float
    activity_exponent: float
    slowdown_exponent: float
    knee_share: float
    compute_weight: float
    log_width: float
    source: str


POWER_LAW = PowerLaw(
    idle_share=0.164,
    full_share=0.863,
    activity_factor=3.76,
    activity_exponent=1.07,
    slowdown_exponent=0.33,
    knee_share=0.536,
    compute_weight=0.124,
    log_width=0.49,
    source="zeus_epoch_time_power, 1,308 epochs on four GPUs, 2026-11-23",
)
"""Mean of the laws of four GPUs; the width is the error on a GPU left out of the fit."""


def _own(
    idle: float, full: float, factor: float, exponent: float, slowdown: float, knee: float, log_width: float
) -> PowerLaw:
    return replace(
        POWER_LAW,
        idle_share=idle,
        full_share=full,
        activity_factor=factor,
        activity_exponent=exponent,
        slowdown_exponent=slowdown,
        knee_share=knee,
        log_width=log_width,
    )


POWER_LAWS: Mapping[str, PowerLaw] = {
    "a40": _own(0.209, 0.925, 2.78, 0.818, 0.317, 0.683, 0.24),
    "p100-pcie-16gb": _own(0.0892, 0.666, 5.68, 0.959, 0.35, 0.53, 0.38),
    "quadro-rtx-6000": _own(0.24, 0.949, 3.46, 1.36, 0.265, 0.384, 0.17),
    "v100-pcie-16gb": _own(0.116, 0.913, 3.11, 1.14, 0.388, 0.546, 0.17),
}
"""Laws of the measured GPUs; the widths are errors on networks and limits left out of the fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Power:
    """Power of a device and the factor by which a power limit lengthens its time; arrays of one shape.

    Attributes:
        value_w, low_w, high_w: Average power with its 90 % interval [W].
        slowdown: Time under the limit over time without, at least 1.
    """

    value_w: Floats
    low_w: Floats
    high_w: Floats
    slowdown: Floats


def demand_share(activity: Floats, law: PowerLaw = POWER_LAW) -> Floats:
    """Power that the work would draw without a limit, as a share of the board's limit as shipped.

    Args:
        activity: Ideal time of the work over the time it takes.
        law: Constants of the power model.
    """
    drive = (law.activity_factor * np.maximum(activity, 0.0)) ** law.activity_exponent
    share: Floats = law.idle_share + (law.full_share - law.idle_share) * -np.expm1(-drive)
    return share


def limited_share(demand: Floats, limit_share: Floats | float) -> Floats:
    """Mean power under a limit, both as shares of the limit as shipped."""
    parts = np.asarray(demand, dtype=np.float64) ** -_SHARPNESS + np.asarray(limit_share) ** -_SHARPNESS
    return np.asarray(parts ** (-1 / _SHARPNESS), dtype=np.float64)


def power_slowdown(
    demand: Floats, limit_share: Floats | float, compute_fraction: Floats, law: PowerLaw = POWER_LAW
) -> Floats:
    """Time under a power limit over time without; 1 if the limit does not bind.

    Args:
        demand: Power without the limit, share of the limit as shipped.
        limit_share: The limit that is set, as a share of the limit as shipped.
        compute_fraction: Share of arithmetic in the ideal time, 0 to 1.
        law: Constants of the power model.
    """
    demand = np.asarray(demand, dtype=np.float64)
    # A board without work draws its idle power alone, and there is nothing to divide by.
    dynamic = np.maximum(demand - law.idle_share, 1e-9)
    left = (
        np.maximum(np.minimum(demand, limit_share) - law.idle_share, _LEAST_DYNAMIC_SHARE * dynamic) / dynamic
    )
    at_knee = np.maximum(left, law.knee_share) ** law.slowdown_exponent
    clock = at_knee * np.minimum(left / law.knee_share, 1.0)
    exponent = 1 + law.compute_weight * (compute_fraction - 0.5)
    factor: Floats = np.where(demand > limit_share, np.maximum(1.0, clock**-exponent), 1.0)
    return factor


def power_law_of(device: Device) -> PowerLaw:
    """The constants of a device: its own if it was measured, else the mean of the measured devices."""
    return POWER_LAWS.get(device.name, POWER_LAW)


def check_power_limit_w(limit_w: float, device: Device) -> float:
    """The power limit, checked to be one that a board of this device can be set to [W].

    Raises:
        InvalidSetupError: The limit is not above zero, or is above the board's own limit.
    """
    if not 0 < limit_w < np.inf:
        raise InvalidSetupError(f"a power limit must be above zero watts, got {limit_w}")
    if device.power_limit_w and limit_w > device.power_limit_w:
        raise InvalidSetupError(
            f"the power limit of {device.title} is {device.power_limit_w:g} W, got {limit_w:g} W; give at most that"
        )
    return limit_w


def device_power(
    device: Device,
    activity: Floats,
    compute_fraction: Floats,
    limit_w: float | None = None,
) -> Power | None:
    """Average power of a device at work; None for a device without power measurements.

    Args:
        device: The device; only GPUs were measured.
        activity: Ideal time of the work over the time it takes without a limit.
        compute_fraction: Share of arithmetic in the ideal time.
        limit_w: Power limit that is set; None for the board's own limit [W].
    """
    law = power_law_of(device)
    if device.kind is not DeviceKind.GPU or device.power_limit_w <= 0:
        return None
    limit = 1.0 if limit_w is None else check_power_limit_w(limit_w, device) / device.power_limit_w
    demand = demand_share(activity, law)
    share = limited_share(demand, limit)
    value_w = share * device.power_limit_w
    # No board draws more than its limit on average, nor less than nothing.
    high_w = np.minimum(value_w * np.exp(law.log_width), limit * device.power_limit_w)
    return Power(
        value_w=value_w,
        low_w=value_w * np.exp(-law.log_width),
        high_w=np.maximum(high_w, value_w),
        slowdown=power_slowdown(demand, limit, compute_fraction, law),
    )
