"""Quantities as people read them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.base.units import (
    GIB,
    format_beside,
    format_bytes,
    format_count,
    format_duration_s,
    format_energy_j,
    format_flops_per_s,
)

ANY_SIZE = st.floats(min_value=1e-3, max_value=1e15, allow_nan=False)


@pytest.mark.parametrize(
    ("duration_s", "text"),
    [
        (0, "0 µs"),
        (12.3e-6, "12.3 µs"),
        (0.0123, "12.3 ms"),
        (1.0, "1.00 s"),
        (99.4, "99.4 s"),
        (252, "4.20 min"),
        (7200, "2.00 h"),
        (181440, "2.10 d"),
        (8.64e7, "1,000 d"),
    ],
)
def test_durations(duration_s, text):
    assert format_duration_s(duration_s) == text


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1.5 * 1024**2, "1.50 MiB"),
        (23.7 * GIB, "23.7 GiB"),
        (2 * 1024**4, "2.00 TiB"),
        (-GIB, "-1.00 GiB"),
    ],
)
def test_sizes(size_bytes, text):
    assert format_bytes(size_bytes) == text


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0"), (7, "7.00"), (25_557_032, "25.6 M"), (1.5e12, "1.50 T"), (999, "999")]
)
def test_counts(count, text):
    assert format_count(count) == text


def test_rates():
    assert format_flops_per_s(312e12) == "312 TFLOP/s"
    assert format_flops_per_s(5) == "5.00 FLOP/s"


@pytest.mark.parametrize(
    ("energy_j", "text"), [(2900, "2,900 J"), (12, "12.0 J"), (359_000, "99.7 Wh"), (3.6e6, "1.00 kWh")]
)
def test_energies(energy_j, text):
    assert format_energy_j(energy_j) == text


def test_a_quantity_beside_another_has_its_unit():
    energies = [format_beside(value, "92.8 Wh", format_energy_j) for value in (1.88e5, 3.34e5, 4.9e6)]
    assert energies == ["52.2 Wh", "92.8 Wh", "1,361 Wh"]
    assert format_beside(6600.0, "2.36 h", format_duration_s) == "1.83 h"
    assert format_beside(832.0, "1.43 k", format_count) == "0.832 k"
    assert format_beside(1e-9, "2.36 h", format_duration_s) == format_duration_s(1e-9)


def value_of(text, units):
    number, _, unit = text.partition(" ")
    return float(number.replace(",", "")) * units[unit]


@given(ANY_SIZE)
def test_a_printed_duration_is_right_to_three_digits(duration_s):
    units = {"µs": 1e-6, "ms": 1e-3, "s": 1, "min": 60, "h": 3600, "d": 86400}
    assert value_of(format_duration_s(duration_s), units) == pytest.approx(duration_s, rel=0.0051)


@given(ANY_SIZE)
def test_a_printed_count_is_right_to_three_digits(count):
    units = {"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
    assert value_of(format_count(count), units) == pytest.approx(count, rel=0.0051)


@given(st.integers(min_value=1024, max_value=2**60))
def test_a_printed_size_is_right_to_three_digits(size_bytes):
    units = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
    assert value_of(format_bytes(size_bytes), units) == pytest.approx(size_bytes, rel=0.0051)
