"""Speed models of a job at several sizes: measured points and their file, the interface of a fit, and its residuals."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Annotated, Any, Protocol

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, model_validator
from scipy.stats import t as student_t

from forerun.adapters import words_of
from forerun.base.errors import InvalidSetupError, RecordError
from forerun.base.numerics import Floats, refuse_times
from forerun.base.tables import read_rows
from forerun.prediction.estimate import Interval

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
        least = {"num_devices": 1, "num_nodes": 1, "num_accumulation_steps": 1, "num_servers": 0}
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
        longest_s = self.step_time_s or float("inf")
        if self.synchronisation_s is not None and not 0 <= self.synchronisation_s <= longest_s:
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


def measured_times(points: Sequence[SpeedPoint], least: int, name: str) -> Floats:
    """Measured steps, (points,) [s].

    Raises:
        InvalidSetupError: There are fewer distinct sizes than ``least``, or a time is not above zero.
    """
    refuse_too_few(points, least, f"the model '{name}'")
    times = np.asarray([point.measured_s for point in points], dtype=float)
    refuse_times(times)
    return times


_COLUMNS: dict[str, str] = words_of("points")["columns"]
"""Names in tables of others, in small letters alone; ``batch_size`` may be of one device or of all."""
_OF_ADAPTDL: dict[str, str] = words_of("points")["of_adaptdl"]
"""Columns of the traces of Pollux (github.com/petuum/adaptdl, simulator/traces), whose times are in seconds."""
_DERIVED = re.compile(r"(scaling|parallel|throughput)?(speedup|efficiency)|(weak|strong)scaling(efficiency)?")


class _PointRow(BaseModel):
    """A row of a table of points.

    Devices are workers where there are parameter servers; a rate with the batch size of a device may stand for the time
    of a step. Columns may have the names that tables of others give them; speedups and efficiencies are passed over.
    """

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _named(cls, cells: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        # A time without a unit is believed only beside the batch size as Pollux calls it.
        known = _OF_ADAPTDL if "local_bsz" in cells else {}
        if known and str(cells.get("placement", "")).isdecimal():
            # Devices of each node, a digit each: 114 is one, one and four.
            digits = [*map(int, cells["placement"])]
            sizes = {"num_devices": sum(digits), "num_nodes": len(digits)}
            cells = {name: cell for name, cell in cells.items() if name != "placement"} | sizes
        for column, cell in cells.items():
            letters = re.sub(r"[^a-z]", "", column.lower())
            meant = (name for name, form in _COLUMNS.items() if re.fullmatch(form, letters))
            name = known.get(column) or next(meant, column)
            if column not in cls.model_fields and _DERIVED.fullmatch(letters):
                continue
            # A second column of one meaning keeps its own name, and is refused.
            found[column if column in cls.model_fields or name in (*found, *cells) else name] = cell
        return found

    num_devices: _Whole | None = Field(default=None, description="a whole number")
    num_workers: _Whole | None = Field(default=None, description="a whole number")
    num_nodes: _Whole = 1
    batch_size_per_device: _Number | None = Field(default=None, description="a number")
    global_batch_size: _Number | None = Field(default=None, description="a number")
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
    batch, of_all = row.batch_size_per_device, row.global_batch_size or global_batch_size
    if batch is None:
        batch = of_all / max(1, devices) if of_all else batch_size
    if batch is None:
        # A guess would be wrong by its own factor: samples per second are the batch over the step.
        raise InvalidSetupError(
            f"{where}: expected the batch size of one device, got none; add the column batch_size_per_device or give "
            "--batch-size (of one device) or --global-batch-size (of all)"
        )
    try:
        told = row.model_dump(exclude={"num_workers", "global_batch_size", "throughput_samples_per_s"})
        size = SpeedPoint(**{**told, "num_devices": devices, "batch_size_per_device": batch})
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


_LEAST_SPREAD = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedSpeed:
    """A speed model after its fit.

    Attributes:
        name: Name of the model.
        parameters: Its coefficients by name.
        log_times: Function of points: logarithm of the step times, (points,).
        log_variances: Function of points: variance of that logarithm from the coefficients' uncertainty, (points,).
        log_spread: Standard deviation of the logarithm of measured over fitted steps.
        num_freedom: Points less coefficients, at least 1: quantiles are those of Student's distribution.
    """

    name: str
    parameters: Mapping[str, float]
    log_times: Callable[[Sequence[SpeedPoint]], Floats]
    log_variances: Callable[[Sequence[SpeedPoint]], Floats]
    log_spread: float
    num_freedom: int = 1

    def step_s(self, points: Sequence[SpeedPoint]) -> Floats:
        """Step times of these sizes, (points,) [s]."""
        times: Floats = np.exp(self.log_times(points))
        return times

    def intervals(self, points: Sequence[SpeedPoint]) -> list[Interval]:
        """Step times with 90 % intervals [s]: scatter of the points and uncertainty of the coefficients together."""
        times = self.step_s(points)
        spread = max(self.log_spread, _LEAST_SPREAD)
        quantile = float(student_t.ppf(0.95, max(1, self.num_freedom)))
        factors = np.exp(
            # An interval of more than e^3 to either side says nothing any more, and would overflow beyond.
            np.minimum(quantile * np.sqrt(spread**2 + np.maximum(0.0, self.log_variances(points))), 3.0)
        )
        return [
            Interval(float(time), float(time / factor), float(time * factor))
            for time, factor in zip(times, factors, strict=True)
        ]


def variances_along(gradient: Floats, covariance: npt.NDArray[Any]) -> Floats:
    """Variance of a value with this gradient to the coefficients, (points, k), whose covariance is given, (points,)."""
    found: Floats = np.einsum("pi,ij,pj->p", gradient, covariance, gradient)
    return found


class SpeedModel(Protocol):
    """A form of the step time as a function of the size of a job."""

    @property
    def name(self) -> str:
        """Name of the form."""
        ...

    def fit(self, points: Sequence[SpeedPoint]) -> FittedSpeed:
        """Fits the form to measured points.

        Raises:
            InvalidSetupError: The points do not suffice, or a time is not above zero.
        """
        ...


_NAMES = ("constant", "workers", "servers", "workers squared", "workers x servers")
_RIDGE = (0.0, 0.05, 0.05, 0.3, 0.3)
"""Chosen on the jobs of ``optimus_dl2_speed`` among 0.3 and 1 for the curved terms: curvature is cautious."""
_LEAST_POINTS = 3
_LEAST_LOG_SPREAD = 0.04


class LogQuadraticModel:
    """The logarithm of the step as a ridge regression on logarithms of workers and servers.

    log T = c0 + c1 log w + c2 log p + c3 (log w)^2 + c4 log w log p

    Unlike a sum of costs it can bend either way, and unlike one it says little beyond what was measured.
    """

    name = "log-quadratic"

    def fit(self, points: Sequence[SpeedPoint]) -> FittedSpeed:
        """Fits the surface.

        Raises:
            InvalidSetupError: There are fewer than three sizes, or a time is not above zero.
        """
        times = measured_times(points, _LEAST_POINTS, self.name)
        rows, wanted = _rows(points), np.log(times)
        information = rows.T @ rows + np.diag(_RIDGE)
        found = np.linalg.solve(information, rows.T @ wanted)
        residual = wanted - rows @ found
        num_freedom = max(2, len(times) - len(_NAMES))
        spread = float(np.sqrt(residual @ residual / num_freedom + _LEAST_LOG_SPREAD**2))
        covariance = spread**2 * np.linalg.inv(information)

        return FittedSpeed(
            name=self.name,
            parameters=dict(zip(_NAMES, found.tolist(), strict=True)),
            log_times=lambda at: _rows(at) @ found,
            log_variances=lambda at: variances_along(_rows(at), covariance),
            log_spread=spread,
            num_freedom=num_freedom,
        )


def _rows(points: Sequence[SpeedPoint]) -> Floats:
    """The five terms of each point, (points, 5)."""
    workers = np.log([point.num_devices for point in points])
    servers = np.log([max(1, point.num_servers) for point in points])
    return np.column_stack([np.ones(len(points)), workers, servers, workers**2, workers * servers])


_DEVIATION = 0.1
_REACH = 0.5
_NOISE = 0.06


class SmoothedModel:
    """A speed model whose residuals at the measured sizes are carried to those near them: kriging.

    log T = form + k(x, X) (k(X, X) + noise^2)^-1 residuals, with k a Gaussian of distance: far from every measured
    point nothing changes, and the noise keeps single points from being followed exactly.

    Args:
        form: The speed model.

    Source: Krige 1951; Rasmussen and Williams 2006, Gaussian Processes, chapter 2.
    """

    def __init__(self, form: SpeedModel) -> None:
        self._form = form
        self.name = f"{form.name}-smoothed"

    def fit(self, points: Sequence[SpeedPoint]) -> FittedSpeed:
        """Fits the form, then its residuals."""
        form, places = self._form.fit(points), _place_of(points)
        residual = np.log([point.measured_s for point in points]) - form.log_times(points)
        weights = np.linalg.solve(_likeness(places, places) + _NOISE**2 * np.eye(len(places)), residual)

        return replace(
            form,
            name=self.name,
            log_times=lambda at: form.log_times(at) + _likeness(_place_of(at), places) @ weights,
        )


def _place_of(points: Sequence[SpeedPoint]) -> Floats:
    """Coordinates of sizes: logarithms of devices, servers, twice the nodes, half the batch of a device, (points, 4).

    A factor of e in devices is as far as one of sqrt(e) in nodes and e^2 in the batch.
    """
    return np.asarray(
        [
            (
                np.log(point.num_devices),
                np.log(max(1, point.num_servers)),
                2 * np.log(point.num_nodes),
                # With servers the global batch is fixed, so the batch of a worker adds no information.
                0.0 if point.num_servers else 0.5 * np.log(point.batch_size_per_device),
            )
            for point in points
        ],
        dtype=float,
    )


def _likeness(first: Floats, second: Floats) -> Floats:
    square = ((first[:, None] - second[None]) ** 2).sum(axis=-1)
    found: Floats = _DEVIATION**2 * np.exp(-square / (2 * _REACH**2))
    return found
