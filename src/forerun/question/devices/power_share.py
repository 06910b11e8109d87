"""The share of its boost clock that a board can sustain under its power limit."""

from __future__ import annotations

from functools import cache

from forerun.question.devices.catalogue import devices_of_architecture
from forerun.question.devices.device import Device, DeviceKind, NumberFormat

__all__ = ["POWER_EXPONENT", "power_share", "same_die", "sustained_clock_share"]

POWER_EXPONENT = 0.8
"""Exponent of the clock over power: 1 at the lowest voltage (P ~ f), 1/3 far above it (P ~ f V^2, V ~ f).

Matrix products of ``neusight_ops`` (NeuSight, ASPLOS 2025) reach 0.8 to 0.9 of the FP32 peak on boards with a power
share of one (A100, V100) and 0.44, 0.52 and 0.22 on T4, P4 and L4, with shares of 0.46, 0.60 and 0.41:
exponents of 0.8 to 1.3.
"""


def power_share(device: Device) -> float:
    """Watts per FP32 FLOP/s, relative to the median GPU of the same architecture and kind of memory in the catalogue.

    One architecture may have two dies, made in two processes: with stacked memory (HBM) for data centres, without for
    the rest (Blackwell's B200 and RTX 5090, Ampere's A100 and RTX 3090). Boards of one die need about the same energy
    for a FLOP at full clock; one with a lower limit per peak FLOP/s, such as a 70 W inference card or a "Max-Q" part,
    cannot hold the boost clock that its peak is computed from. One for CPUs and for dies with a single entry.
    """
    own = _watts_per_flop(device)
    if device.kind is not DeviceKind.GPU or own is None:
        return 1.0
    usual = _usual_watts_per_flop(_die(device))
    return 1.0 if usual is None else own / usual


def sustained_clock_share(device: Device) -> float:
    """Share of the boost clock that compute-bound work sustains: min(1, power share)^0.8."""
    share: float = min(1.0, power_share(device)) ** POWER_EXPONENT
    return share


def same_die(device: Device) -> tuple[str, ...]:
    """Names of the other boards that compute like a device: units of one architecture, their number, clock and power.

    >>> from forerun.question.devices.finder import find_device
    >>> same_die(find_device("h200-sxm"))
    ('gh200', 'gh200-144gb', 'h100-sxm')
    """
    boards = (board for board in devices_of_architecture(device.architecture) if board.kind is DeviceKind.GPU)
    names = sorted(board.name for board in boards if _computing(board) == _computing(device))
    return tuple(name for name in names if name != device.name)


def _computing(device: Device) -> tuple[object, ...]:
    return (*_die(device), device.num_compute_units, device.boost_clock_hz, device.power_limit_w)


def _die(device: Device) -> tuple[str, str, bool]:
    return device.vendor, device.architecture, device.memory_type.startswith("HBM")


def _watts_per_flop(device: Device) -> float | None:
    peak = device.peak_flops_per_s.get(NumberFormat.FP32)
    return device.power_limit_w / peak if peak and device.power_limit_w else None


@cache
def _usual_watts_per_flop(die: tuple[str, str, bool]) -> float | None:
    """The median over the boards of a die; None where none has both figures."""
    boards = [board for board in devices_of_architecture(die[1]) if board.kind is DeviceKind.GPU]
    values = sorted(value for board in boards if _die(board) == die and (value := _watts_per_flop(board)))
    middle = len(values) // 2
    return (values[middle] + values[~middle]) / 2 if values else None
