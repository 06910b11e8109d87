"""The only place that parses and prints units.

Inside forerun a time is in seconds, a size in bytes, work in FLOP (a multiply-add is two) and money in
US dollars. Milliseconds, GiB and TFLOP/s exist in this module and nowhere else.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping

from forerun.base.errors import InvalidSetupError

GIB = 1024**3

_DURATIONS = (
    (1e-6, 1e-3, "µs"),
    (1e-3, 1.0, "ms"),
    (1.0, 120.0, "s"),
    (60.0, 7200.0, "min"),
    (3600.0, 172800.0, "h"),
)
_BYTES = ((1024**4, "TiB"), (GIB, "GiB"), (1024**2, "MiB"), (1024, "KiB"))
_DECIMAL = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def _three_digits(value: float) -> str:
    if value == 0:
        return "0"
    decimals = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{decimals}f}"


def _in_largest(value: float, units: Iterable[tuple[float, str]]) -> str | None:
    """A value in the first unit that is no larger; None where it is smaller than all."""
    return next((f"{_three_digits(value / size)} {name}" for size, name in units if abs(value) >= size), None)


def format_duration_s(duration_s: float) -> str:
    """A duration in words: '12.3 ms', '4.20 min', '2.10 d'."""
    for unit_s, upper_s, name in _DURATIONS:
        if duration_s < upper_s:
            return f"{_three_digits(duration_s / unit_s)} {name}"
    return f"{_three_digits(duration_s / 86400.0)} d"


def format_bytes(size_bytes: float) -> str:
    """A size in binary units: '23.7 GiB'."""
    return _in_largest(size_bytes, _BYTES) or f"{size_bytes:.0f} B"


def _format_decimal(value: float, unit: str) -> str:
    return f"{_in_largest(value, _DECIMAL) or f'{_three_digits(value)} '}{unit}".rstrip()


def format_count(count: float) -> str:
    """A count with a decimal prefix: '25.6 M'."""
    return _format_decimal(count, "")


def format_flops_per_s(flops_per_s: float) -> str:
    """A rate of work: '312 TFLOP/s'."""
    return _format_decimal(flops_per_s, "FLOP/s")


_ENERGIES = ((3.6e6, "kWh"), (3600.0, "Wh"))


def format_energy_j(energy_j: float) -> str:
    """An energy: '12.0 J' below a Wh, '45.1 Wh', '7.28 kWh'."""
    return _in_largest(energy_j, _ENERGIES) or f"{_three_digits(energy_j)} J"


_SIZES = {
    **{name: unit_s for unit_s, _, name in _DURATIONS},
    **{name: unit for unit, name in (*_BYTES, *_DECIMAL, *_ENERGIES)},
    "d": 86400.0,
    **dict.fromkeys(("B", "J", "samples/s", "tokens/s"), 1.0),
}


def format_beside(value: float, text: str, format_value: Callable[[float], str]) -> str:
    """A value in the unit of the quantity beside which it stands, unless that makes it too small or large to read.

    >>> format_beside(6600.0, "2.36 h", format_duration_s)
    '1.83 h'
    """
    unit = text.partition(" ")[2]
    size = _SIZES.get(unit.partition(" ")[0])
    is_read = size is not None and (value == 0 or 0.01 <= abs(value) / size < 10_000)
    return f"{_three_digits(value / size)} {unit}" if size is not None and is_read else format_value(value)


_DURATION = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(?:e([+-]?\d+))?\s*([a-z]*)")
_SECONDS = {
    **dict.fromkeys(("", "s", "sec", "second", "seconds"), 1.0),
    **dict.fromkeys(("m", "min", "minute", "minutes"), 60.0),
    **dict.fromkeys(("h", "hr", "hour", "hours"), 3600.0),
    **dict.fromkeys(("d", "day", "days"), 86400.0),
}


def parse_duration_s(text: str) -> float:
    """Parses a duration of zero or more [s]; a bare number is seconds.

    >>> parse_duration_s("1.5h")
    5400.0

    Raises:
        ValueError: The text is not such a duration.
    """
    found = _DURATION.fullmatch(text.strip().lower())
    if found is None or found[3] not in _SECONDS:
        raise ValueError(f"expected a duration such as 90, 90s, 15min, 2h or 1.5d, got '{text}'")
    return float(found[1]) * 10.0 ** int(found[2] or 0) * _SECONDS[found[3]]


def format_mass_g(mass_g: float) -> str:
    """A mass: '412 g', from a kilogram on '1.20 kg'."""
    return f"{_three_digits(mass_g / 1000)} kg" if mass_g >= 1000 else f"{_three_digits(mass_g)} g"


# Memory is binary throughout, GB too: a "24 GB" card has 24 GiB. An empty unit may be left out.
UNITS: Mapping[str, Mapping[str, float]] = {
    "time": {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0},
    "money": {"": 1.0, "usd": 1.0, "$": 1.0},
    "memory": {"mb": 1024**2, "mib": 1024**2, "gb": GIB, "gib": GIB, "tb": 1024**4, "tib": 1024**4},
    "energy": {"j": 1.0, "kj": 1e3, "mj": 1e6, "wh": 3600.0, "kwh": 3.6e6, "mwh": 3.6e9},
    "mass": {"g": 1.0, "kg": 1e3, "t": 1e6},
    "rate": {"": 1.0, "/s": 1.0, "samples/s": 1.0},
    "share": {"": 1.0, "%": 0.01},
}
"""Spellings of units by kind of quantity, lower case, with their size in the unit used inside."""

_AMOUNT = re.compile(
    r"(?P<sign>[-+]?)\s*(?P<dollar>\$?)\s*(?P<number>\d[\d_]*(?:\.\d*)?(?:e[-+]?\d+)?|\.\d+)\s*(?P<unit>.*)",
    re.I,
)


def parse_amount(text: str, kind: str) -> float:
    """A number with a unit of a kind of quantity, in the unit used inside.

    >>> parse_amount("2h", "time"), parse_amount("24 GB", "memory") / GIB, parse_amount("$20", "money")
    (7200.0, 24.0, 20.0)

    Raises:
        InvalidSetupError: The text is not a number, its unit is missing or of another kind, or it is below zero.
    """
    units = UNITS[kind]
    found = _AMOUNT.fullmatch(text.strip())
    known = ", ".join(unit for unit in units if unit)
    if found is None:
        raise InvalidSetupError(f"expected a number with a unit ({known}), got '{text.strip()}'")
    if found["sign"] == "-":
        raise InvalidSetupError(f"an amount must be zero or more, got '{text.strip()}'")
    unit = found["unit"].strip().lower() or found["dollar"]
    if unit not in units:
        problem = f"unknown unit '{found['unit'].strip()}'" if unit else "the unit is missing"
        raise InvalidSetupError(f"{problem} in '{text.strip()}'; expected one of {known}")
    value = float(found["number"].replace("_", "")) * units[unit]
    if not math.isfinite(value):
        raise InvalidSetupError(f"an amount must be finite, got '{text.strip()}'")
    return value
