"""Measured points of a job at several sizes, for fitted speed models, and their file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from forerun.base.errors import InvalidSetupError, RecordError
from forerun.base.tables import read_rows

__all__ = ["SpeedPoint", "read_points", "refuse_too_few"]

_Whole = Annotated[int, Field(description="a whole number")]
_Number = Annotated[float, Field(description="a number")]


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


class _PointRow(BaseModel):
    """A row of a table of points.

    Devices are workers where there are parameter servers; a rate with the batch size of a device may stand for the time
    of a step.
    """

    model_config = ConfigDict(extra="forbid")

    num_devices: _Whole | None = Field(default=None, description="a whole number")
    num_workers: _Whole | None = Field(default=None, description="a whole number")
    num_nodes: _Whole = 1
    batch_size_per_device: _Number | None = Field(default=None, description="a number")
    num_accumulation_steps: _Whole = 1
    num_servers: _Whole = 0
    step_time_s: _Number | None = Field(default=None, description="a number")
    synchronisation_s: _Number | None = Field(default=None, description="a number")
    throughput_samples_per_s: _Number | None = Field(default=None, description="a number")


def read_points(
    path: str | Path, batch_size: float | None = None, global_batch_size: float | None = None
) -> tuple[SpeedPoint, ...]:
    """The points of a CSV file with a header; its columns are the fields of a row.

    Args:
        path: The file.
        batch_size: Batch size of one device where a row does not say it.
        global_batch_size: The same of all devices together.

    Raises:
        RecordError: The file cannot be read, or a column or number is wrong.
        InvalidSetupError: A number is impossible.
    """
    file = Path(path)
    return tuple(
        _point(row, f"{file.name}, line {line}", batch_size, global_batch_size)
        for line, row in read_rows(file, _PointRow)
    )


def _point(
    row: _PointRow, where: str, batch_size: float | None, global_batch_size: float | None
) -> SpeedPoint:
    devices = row.num_workers if row.num_devices is None else row.num_devices
    if devices is None:
        raise RecordError(f"{where}: expected num_devices or num_workers, got neither; add the column")
    batch = row.batch_size_per_device
    if batch is None:
        batch = global_batch_size / max(1, devices) if global_batch_size else batch_size
    if batch is None:
        # A guess would be wrong by its own factor: samples per second are the batch over the step.
        raise InvalidSetupError(
            f"{where}: expected the batch size of one device, got none; add the column batch_size_per_device or give "
            "--batch-size (of one device) or --global-batch-size (of all)"
        )
    try:
        size = SpeedPoint(
            num_devices=devices,
            num_nodes=row.num_nodes,
            batch_size_per_device=batch,
            num_accumulation_steps=row.num_accumulation_steps,
            num_servers=row.num_servers,
            step_time_s=row.step_time_s,
            synchronisation_s=row.synchronisation_s,
        )
    except InvalidSetupError as error:
        raise InvalidSetupError(f"{where}: {error}") from error
    if size.step_time_s is not None:
        return size
    rate = row.throughput_samples_per_s
    if rate is None or not rate > 0:
        raise InvalidSetupError(
            f"{where}: expected step_time_s or throughput_samples_per_s above zero, got {rate}; add the measured value"
        )
    return replace(size, step_time_s=size.batch_size_global / rate)
