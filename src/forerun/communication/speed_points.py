"""Measured points of a job at several sizes, for fitted speed models, and their file."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path

from forerun.errors import InvalidSetupError, RecordError, near_matches

__all__ = ["POINT_COLUMNS", "SpeedPoint", "read_points", "refuse_too_few"]

POINT_COLUMNS: Mapping[str, str] = {
    "num_devices": "devices that work together (or num_workers)",
    "num_nodes": "nodes that hold the devices; 1 if left out",
    "batch_size_per_device": "batch size of one device and micro-step; 1 if left out",
    "num_accumulation_steps": "micro-steps of one step; 1 if left out",
    "num_workers": "workers of a parameter-server job, instead of num_devices",
    "num_servers": "parameter servers; 0 or empty for all-reduce",
    "step_time_s": "measured time of one step of all devices [s]",
    "synchronisation_s": "exposed synchronisation, a part of step_time_s, if known [s]",
    "throughput_samples_per_s": "instead of step_time_s, with batch_size_per_device",
}
"""Columns of a file of points and their meaning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedPoint:
    """One size of a job, measured or asked about.

    Attributes:
        num_devices: Devices or workers, K.
        num_nodes: Nodes.
        batch_size_per_device: Samples of one device and micro-step, m.
        num_accumulation_steps: Micro-steps of a step, s.
        num_servers: Parameter servers, 0 for all-reduce.
        step_time_s: Measured step; None where it is to be predicted [s].
        synchronisation_s: Exposed synchronisation, a part of the step; None where not known [s].
    """

    num_devices: int
    num_nodes: int = 1
    batch_size_per_device: float = 1.0
    num_accumulation_steps: int = 1
    num_servers: int = 0
    step_time_s: float | None = None
    synchronisation_s: float | None = None

    def __post_init__(self) -> None:
        least: dict[str, float] = {
            "num_devices": 1,
            "num_nodes": 1,
            "num_accumulation_steps": 1,
            "num_servers": 0,
        }
        for name, bound in least.items():
            if not getattr(self, name) >= bound:
                raise InvalidSetupError(
                    f"{name} must be at least {bound}, got {getattr(self, name)}; correct the point"
                )
        if not (self.batch_size_per_device > 0 and isfinite(self.batch_size_per_device)):
            raise InvalidSetupError(
                f"batch_size_per_device must be above zero, got {self.batch_size_per_device}"
            )
        if self.num_nodes > self.num_devices:
            raise InvalidSetupError(
                f"{self.num_devices} devices cannot be on {self.num_nodes} nodes; give at least one device per node"
            )
        if self.step_time_s is not None and not (self.step_time_s > 0 and isfinite(self.step_time_s)):
            raise InvalidSetupError(
                f"a step time must be above zero seconds and finite, got {self.step_time_s:g}; "
                "correct or remove that point"
            )
        if self.synchronisation_s is not None and not 0 <= self.synchronisation_s <= (
            self.step_time_s or float("inf")
        ):
            raise InvalidSetupError(
                f"synchronisation must be between zero and the step, got {self.synchronisation_s:g} s; "
                "correct the point"
            )

    @property
    def measured_s(self) -> float:
        """The measured step [s]."""
        assert self.step_time_s is not None, "a point without a time cannot be fitted"
        return self.step_time_s

    @property
    def batch_size_global(self) -> float:
        """Samples of one step of all devices."""
        return self.num_devices * self.batch_size_per_device * self.num_accumulation_steps

    @property
    def size(self) -> tuple[float, ...]:
        """The fields that distinguish two points."""
        return (
            self.num_devices,
            self.num_nodes,
            self.batch_size_per_device,
            self.num_accumulation_steps,
            self.num_servers,
        )


def refuse_too_few(points: Sequence[SpeedPoint], least: int, name: str) -> None:
    """Refuses points that do not suffice for a model.

    Raises:
        InvalidSetupError: There are fewer distinct sizes than ``least``.
    """
    num_distinct = len({point.size for point in points})
    if num_distinct < least:
        raise InvalidSetupError(
            f"{name} needs at least {least} points of different size, got {num_distinct} "
            f"({len(points)} rows); measure more sizes"
        )


def read_points(path: str | Path) -> tuple[SpeedPoint, ...]:
    """The points of a CSV file with a header; columns as in ``POINT_COLUMNS``.

    Raises:
        RecordError: The file cannot be read, or a column or number is wrong.
        InvalidSetupError: A number is impossible.
    """
    file = Path(path)
    try:
        with file.open(newline="", encoding="utf-8-sig") as stream:
            rows = list(csv.DictReader(stream))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise RecordError(
            f"expected a CSV file of points at '{file}', but {error}; check the path"
        ) from error
    if not rows:
        raise RecordError(f"{file.name}: expected a header and rows of points, got none")
    for column in rows[0]:
        if column not in POINT_COLUMNS:
            raise RecordError(
                f"{file.name}: unknown column '{column}'{near_matches(str(column), POINT_COLUMNS)}; "
                f"known are {', '.join(POINT_COLUMNS)}"
            )
    return tuple(_point(row, f"{file.name}, row {number}") for number, row in enumerate(rows, start=1))


def _point(row: Mapping[str, str | None], where: str) -> SpeedPoint:
    values = {
        key: _number(key, text, where) for key, text in row.items() if text is not None and text.strip()
    }
    devices = values.get("num_devices", values.get("num_workers"))
    if devices is None:
        raise RecordError(f"{where}: expected num_devices or num_workers, got neither; add the column")
    try:
        size = SpeedPoint(
            num_devices=_whole("num_devices", devices, where),
            num_nodes=_whole("num_nodes", values.get("num_nodes", 1), where),
            batch_size_per_device=values.get("batch_size_per_device", 1.0),
            num_accumulation_steps=_whole(
                "num_accumulation_steps", values.get("num_accumulation_steps", 1), where
            ),
            num_servers=_whole("num_servers", values.get("num_servers", 0), where),
            step_time_s=values.get("step_time_s"),
            synchronisation_s=values.get("synchronisation_s"),
        )
    except InvalidSetupError as error:
        raise InvalidSetupError(f"{where}: {error}") from error
    if size.step_time_s is not None:
        return size
    rate = values.get("throughput_samples_per_s")
    if rate is None or not rate > 0:
        raise InvalidSetupError(
            f"{where}: expected step_time_s or throughput_samples_per_s above zero, got {rate}; add the measured value"
        )
    return replace(size, step_time_s=size.batch_size_global / rate)


def _number(key: str, text: str, where: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise RecordError(f"{where}: '{key}' must be a number, got '{text}'; correct the cell") from None


def _whole(key: str, value: float, where: str) -> int:
    if not isfinite(value) or value != int(value):
        raise RecordError(f"{where}: '{key}' must be a whole number, got {value:g}; correct the cell")
    return int(value)
