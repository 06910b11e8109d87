"""The two CSV files of earlier systems: trained networks of the CNN grid, and layers measured alone.

The grid has one row per trained configuration, in the columns of the first such collector:

``depth, base_filters, batch_size, num_params, dataset_size, epochs, time_per_epoch, images_per_second,
max_gpu_mem_mb``: seconds per epoch, images per second, 10^6 bytes at most (empty, or no such column, without a GPU);
then accuracy and loss of each epoch (``accuracy_1``, ``loss_1``, ``val_accuracy_1``, ``val_loss_1``, ...), or of the
last (``accuracy`` ...).

The layers have a row each: ``layer``, then every parameter of any row (empty where a kind has none: ``batch_size``,
``in_size``, ``kernel``, ``stride``, ``padding``, ``optimizer``, ``mode``, ``flops``, ...), ``time_ms`` (median),
``time_ms_min``, ``time_ms_max``, and ``device``, ``cores``, ``clock_mhz``, ``bandwidth_gb_per_s``, ``peak_tflops``,
``memory_gb``.
"""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from forerun.base.errors import RecordError, UnknownDeviceError, UsageError, near_matches
from forerun.base.kept import whole_file, writes
from forerun.base.tables import read_rows
from forerun.evidence.records.measurement import Circumstances, JobKind, Measurement, Outcome, Scalar
from forerun.evidence.records.reading import RecordFormat, columns_of
from forerun.evidence.records.tables import Amount, Count
from forerun.question.devices import find_device
from forerun.question.devices.device import Device, NumberFormat

CNN_COLUMNS = (
    "depth", "base_filters", "batch_size", "num_params", "dataset_size", "epochs", "time_per_epoch",
    "images_per_second", "max_gpu_mem_mb",
)  # fmt: skip
_MEMORY = "max_gpu_mem_mb"
_CURVES = ("accuracy", "loss", "val_accuracy", "val_loss")
_GRID_ORDER = ("depth", "base_filters", "batch_size")
_BYTES_PER_MB = 1e6

# Both are of the same epoch: their product is the size of the dataset, up to the time between epochs.
# Milliseconds or minutes would give a factor of 60 or 1000.
_UNIT_TOLERANCE = 2.0


def write_cnn_csv(measurements: Iterable[Measurement], path: str | Path) -> int:
    """Writes the finished trainings of the family ``cnn`` in the order of the grid, and skips others.

    Returns:
        Number of rows.

    Raises:
        RecordError: The file cannot be written.
    """
    rows = [_row(measurement) for measurement in measurements if _is_of_the_grid(measurement)]
    rows.sort(key=lambda row: tuple(float(row[name] or 0) for name in _GRID_ORDER))
    curves = sorted({name for row in rows for name in row if _is_curve(name)}, key=_curve_order)
    return _written(path, (*CNN_COLUMNS, *curves), rows)


def _written(path: str | Path, columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> int:
    """Writes a table; a row without a column has an empty cell there. Returns the number of rows."""
    # Whole or as it was: a table cut short by a full disk reads as one of fewer trainings.
    with (
        writes(path, RecordError),
        whole_file(Path(path)) as partial,
        partial.open("w", newline="", encoding="utf-8") as file,
    ):
        writer = csv.DictWriter(file, columns, restval="")
        writer.writeheader()
        writer.writerows(rows)
    return len(rows)


def _is_of_the_grid(measurement: Measurement) -> bool:
    sizes = {"depth", "base_filters"} <= measurement.parameters.keys()
    return sizes and measurement.kind is JobKind.TRAINING and measurement.outcome is Outcome.DONE


def _curve_order(name: str) -> tuple[int, str]:
    stem, _, epoch = name.rpartition("_")
    return (int(epoch), stem) if epoch.isdigit() else (0, name)


def _row(measurement: Measurement) -> dict[str, Scalar]:
    asked, found = measurement.parameters, measurement.results
    memory = found.get("peak_memory_bytes")
    epoch_s = found.get("epoch_time_s")
    size = asked.get("dataset_size", found.get("dataset_size"))
    row: dict[str, Scalar] = {
        "depth": asked.get("depth"),
        "base_filters": asked.get("base_filters"),
        "batch_size": asked.get("batch_size"),
        "num_params": found.get("num_parameters"),
        "dataset_size": size,
        "epochs": asked.get("num_epochs"),
        "time_per_epoch": epoch_s,
        "images_per_second": _rate(size, epoch_s),
        "max_gpu_mem_mb": memory / _BYTES_PER_MB if isinstance(memory, (int, float)) else None,
    }
    row |= {name: value for name, value in found.items() if _is_curve(name)}
    return row


def _rate(size: Scalar, epoch_s: Scalar) -> float | None:
    if not isinstance(size, (int, float)) or not isinstance(epoch_s, (int, float)) or not epoch_s:
        return None
    return size / epoch_s


def _is_curve(name: str) -> bool:
    stem, _, epoch = name.rpartition("_")
    return name in _CURVES or (stem in _CURVES and epoch.isdigit())


def is_cnn_csv(path: Path) -> bool:
    """True if a file has the sizes of the family among its columns, whatever else is missing or wrong."""
    return path.suffix == ".csv" and {"depth", "base_filters"} <= columns_of(path)


def read_cnn_csv(path: str | Path, *, device: str, occasion: str = "") -> list[Measurement]:
    """Measurements on a device from the rows of a CSV file of the CNN grid.

    Args:
        path: The CSV file.
        device: Device on which the rows were measured; the columns do not name it.
        occasion: Label of the session; empty for the file's name.

    Raises:
        RecordError: A column is missing or unknown, a cell holds an impossible value or another unit, or two rows
            have one configuration; the message names the file, row and column.
    """
    path = Path(path)
    label = occasion or path.name
    _check_columns(path)
    read: dict[str, tuple[int, Measurement]] = {}
    for line, row in read_rows(path, _GridRow):
        found = _measurement(row, f"{path.name}, line {line}", device, label)
        first, _ = read.setdefault(found.key, (line, found))
        if first != line:
            raise RecordError(
                f"{path.name}, line {line}: the same configuration as line {first}; keep one of them, or put repeats "
                "into another file"
            )
    return [found for _, found in read.values()]


_Whole = Annotated[Count, Field(description="a whole number above zero")]
_Amount = Annotated[Amount, Field(description="a number above zero")]


class _GridRow(BaseModel):
    """A row of the grid; the curves are its other columns."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Annotated[float, Field(ge=0, allow_inf_nan=False)]]

    depth: _Whole
    base_filters: _Whole
    batch_size: _Whole
    num_params: _Whole
    dataset_size: _Whole
    epochs: _Whole
    time_per_epoch: _Amount
    images_per_second: _Amount
    max_gpu_mem_mb: float | None = Field(
        default=None, ge=0, allow_inf_nan=False, description="a number from zero"
    )

    @property
    def curves(self) -> dict[str, float]:
        """Accuracy and loss by epoch."""
        return self.__pydantic_extra__


def _check_columns(path: Path) -> None:
    columns = columns_of(path)
    missing = [name for name in CNN_COLUMNS if name not in columns and name != _MEMORY]
    unknown = sorted(name for name in columns if name not in CNN_COLUMNS and not _is_curve(name))
    said = [f"unknown column '{name}'{near_matches(name, (*missing, *_CURVES))}" for name in unknown]
    if columns and missing:
        raise RecordError(
            f"{path.name}: expected the columns {', '.join(CNN_COLUMNS)} ({_MEMORY} may be left out); "
            f"missing: {', '.join([', '.join(missing), *said])}"
        )
    if said:
        raise RecordError(
            f"{path.name}: {', '.join(said)}; rename or remove {'it' if len(said) == 1 else 'them'}"
        )


def _measurement(row: _GridRow, place: str, device: str, occasion: str) -> Measurement:
    # Some tables have milliseconds in a column of seconds; throughput times epoch must give the dataset.
    rate = row.dataset_size / row.time_per_epoch
    if not 1 / _UNIT_TOLERANCE < row.images_per_second / rate < _UNIT_TOLERANCE:
        raise RecordError(
            f"{place}: 'time_per_epoch' of {row.time_per_epoch:g} s for {row.dataset_size} images is {rate:.4g} "
            f"images/s, but images_per_second says {row.images_per_second:.4g}; times must be in seconds throughout"
        )
    results: dict[str, Scalar] = {
        "num_parameters": row.num_params, "epoch_time_s": row.time_per_epoch, **row.curves
    }  # fmt: skip
    if row.max_gpu_mem_mb is not None:
        results["peak_memory_bytes"] = row.max_gpu_mem_mb * _BYTES_PER_MB
    results["step_time_s"] = row.time_per_epoch / -(-row.dataset_size // row.batch_size)
    whole = {name: getattr(row, name) for name in CNN_COLUMNS[:6]}
    subject = f"cnn:depth={row.depth},base_filters={row.base_filters}"
    identity = "\n".join([subject, device, occasion, *(f"{name}={value}" for name, value in whole.items())])
    return Measurement(
        key=hashlib.sha256(identity.encode()).hexdigest()[:32],
        kind=JobKind.TRAINING,
        subject=subject,
        family="cnn",
        parameters={
            "depth": row.depth,
            "base_filters": row.base_filters,
            "batch_size": row.batch_size,
            "dataset_size": row.dataset_size,
            "num_epochs": row.epochs,
            "optimizer": "adam",
        },
        outcome=Outcome.DONE,
        results=results,
        circumstances=Circumstances(device=device, device_title=device, occasion=occasion),
    )


def _read_on(path: Path, device: Device | None) -> list[Measurement]:
    if device is None:
        raise UsageError(f"{path.name} does not say where it was measured; name it with --on DEVICE")
    return read_cnn_csv(path, device=device.name)


CNN_GRID = RecordFormat(write=write_cnn_csv, is_file=is_cnn_csv, read=_read_on, is_of_epochs=True)
"""The format as an entry point of ``forerun.record_formats``."""


def write_layer_csv(measurements: Iterable[Measurement], path: str | Path) -> int:
    """Writes the finished layers and skips others; returns the number of rows.

    Args:
        measurements: Measurements of any kind.
        path: The CSV file.

    Raises:
        RecordError: The file cannot be written.
    """
    rows: list[dict[str, Any]] = [
        {"layer": m.subject, **m.parameters, **_times(m), **_hardware(m)}
        for m in measurements
        if m.kind is JobKind.LAYER and m.outcome is Outcome.DONE and m.repetitions_s
    ]
    columns = {name: None for row in rows for name in row}
    last = [name for name in columns if name.startswith("time_ms") or name in ("device", *_HARDWARE)]
    # Times and devices stand last, as in the public tables.
    ordered = [*(name for name in columns if name not in last), *last]
    return _written(path, ordered or ["layer"], rows)


_HARDWARE: Mapping[str, Callable[[Device], float]] = {
    "cores": lambda device: device.num_compute_units,
    "clock_mhz": lambda device: device.boost_clock_hz / 1e6,
    "bandwidth_gb_per_s": lambda device: device.memory_bandwidth_bytes_per_s / 1e9,
    "peak_tflops": lambda device: device.peak_flops_per_s.get(NumberFormat.FP32, 0.0) / 1e12,
    "memory_gb": lambda device: device.memory_bytes / 1e9,
}


def _times(measurement: Measurement) -> dict[str, float]:
    found = measurement.repetitions_s
    return {"time_ms": 1e3 * median(found), "time_ms_min": 1e3 * min(found), "time_ms_max": 1e3 * max(found)}


def _hardware(measurement: Measurement) -> dict[str, Any]:
    around = measurement.circumstances
    title = {"device": around.device_title}
    try:
        found = find_device(around.device)
    except UnknownDeviceError:
        return title
    return {**title, **{name: figure(found) for name, figure in _HARDWARE.items()}}


LAYERS = RecordFormat(write=write_layer_csv)
"""The format as an entry point of ``forerun.record_formats``."""
