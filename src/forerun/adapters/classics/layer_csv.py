"""The flat CSV of layer benchmarks: a row per layer, a column per parameter, its time, and figures of the hardware.

``layer``, then every parameter of any row (empty where a kind has none: ``batch_size``, ``in_size``, ``kernel``,
``stride``, ``padding``, ``optimizer``, ``mode``, ``flops``, ...), ``time_ms`` (median), ``time_ms_min``,
``time_ms_max``, and ``device``, ``cores``, ``clock_mhz``, ``bandwidth_gb_per_s``, ``peak_tflops``, ``memory_gb``.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from forerun.base.errors import RecordError, UnknownDeviceError
from forerun.evidence.records.measurement import JobKind, Measurement, Outcome
from forerun.evidence.records.reading import RecordFormat
from forerun.question.devices import find_device
from forerun.question.devices.device import Device, NumberFormat

__all__ = ["LAYERS", "write_layer_csv"]


def write_layer_csv(
    measurements: Iterable[Measurement], path: str | Path, device: Device | None = None
) -> int:
    """Writes the finished layers and skips others; returns the number of rows.

    Args:
        measurements: Measurements of any kind.
        path: The CSV file.
        device: Device of the layers, if not the one that their device names mean.

    Raises:
        RecordError: The file cannot be written.
    """
    rows: list[dict[str, Any]] = [
        {"layer": m.subject, **m.parameters, **_times(m), **_hardware(m, device)}
        for m in measurements
        if m.kind is JobKind.LAYER and m.outcome is Outcome.DONE and m.repetitions_s
    ]
    columns = {name: None for row in rows for name in row}
    last = [name for name in columns if name.startswith("time_ms") or name in _HARDWARE]
    ordered = [*(name for name in columns if name not in last), *last]
    try:
        with Path(path).open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, ordered or ["layer"], restval="")
            writer.writeheader()
            writer.writerows(rows)
    except OSError as error:
        raise RecordError(f"{path}: the file cannot be written: {error.strerror or error}") from error
    return len(rows)


_HARDWARE = ("device", "cores", "clock_mhz", "bandwidth_gb_per_s", "peak_tflops", "memory_gb")


def _times(measurement: Measurement) -> dict[str, float]:
    found = sorted(measurement.repetitions_s)
    median_s = (found[(len(found) - 1) // 2] + found[len(found) // 2]) / 2
    return {"time_ms": 1e3 * median_s, "time_ms_min": 1e3 * found[0], "time_ms_max": 1e3 * found[-1]}


def _hardware(measurement: Measurement, device: Device | None) -> dict[str, Any]:
    around = measurement.circumstances
    try:
        found = device or find_device(around.device)
    except UnknownDeviceError:
        return {"device": around.device_title}
    return dict(
        zip(
            _HARDWARE,
            (
                around.device_title,
                found.num_compute_units,
                found.boost_clock_hz / 1e6,
                found.memory_bandwidth_bytes_per_s / 1e9,
                found.peak_flops_per_s.get(NumberFormat.FP32, 0.0) / 1e12,
                found.memory_bytes / 1e9,
            ),
            strict=True,
        )
    )


LAYERS = RecordFormat(write=write_layer_csv)
"""The format as an entry point of ``forerun.record_formats``."""
