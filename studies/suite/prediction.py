"""Predictions of every job of the measuring suite, made before any of them is measured, and kept in a file."""

from __future__ import annotations

import csv
import datetime
import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from forerun.adapters.classics.baselines import make_baseline
from forerun.adapters.classics.step_features import whole_model_features
from forerun.base.errors import ForerunError, RecordError
from forerun.cost.memory.peak import estimate_memory, fits, max_batch_size, memory_constants, visible_memory
from forerun.cost.time.correction import PriorScales, sensitivities
from forerun.cost.time.features import Point
from forerun.cost.time.step_times import step_times
from forerun.cost.time.weights import CostModel
from forerun.evidence.measurement.jobs import MeasurementJob
from forerun.evidence.records.measured_run import input_options_of, setup_of
from forerun.prediction.estimate import Interval
from forerun.prediction.estimate_run import training_energy_j
from forerun.prediction.step import PreparedModel, ideal_times_s, points_of, predict_steps, prepare
from forerun.question.devices.device import Device
from forerun.question.model import ModelRequest
from forerun.question.setup import TrainingSetup
from forerun.tracing.trace import trace
from studies.optime.few_steps import information_order
from studies.suite.models import LIMIT, BatchSearch, StepJob


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPrediction:
    """Prediction of one job; an unknown quantity is None.

    Attributes:
        job: The job, as ``MeasurementJob.to_json`` writes it.
        model_class: Kind of network.
        is_core: Whether the job is measured first.
        position: Its place in the order of measuring, from 0.
        device: Name of the device.
        made_at: Time of the prediction, ISO 8601 in UTC.
        predictor: forerun's version, date and digest of the weights.
        step_time_s, low_s, high_s: Step with its 90 % interval [s].
        device_s, host_s: Time of the kernels, and of launching them [s].
        bound_by: compute, memory bandwidth or host.
        roofline_s: Step by the roofline [s].
        live_peak_bytes: Bytes of tensors at the peak [bytes].
        allocator_bytes: Memory that the allocator needs [bytes].
        allocator_low_bytes, allocator_high_bytes: Interval of ``allocator_bytes`` [bytes].
        fits: yes, no or close.
        energy_j: Energy of the step [J].
        max_batch_size, max_batch_size_low, max_batch_size_high: Largest batch of a search under its limit.
        sensitivities: Row of the calibration's J, as JSON.
        reason: Reason for a missing prediction; empty if there is one.
    """

    job: str
    model_class: str
    is_core: bool = False
    position: int = 0
    device: str = ""
    made_at: str = ""
    predictor: str = ""
    step_time_s: float | None = None
    low_s: float | None = None
    high_s: float | None = None
    device_s: float | None = None
    host_s: float | None = None
    bound_by: str = ""
    roofline_s: float | None = None
    live_peak_bytes: float | None = None
    allocator_bytes: float | None = None
    allocator_low_bytes: float | None = None
    allocator_high_bytes: float | None = None
    fits: str = ""
    energy_j: float | None = None
    max_batch_size: float | None = None
    max_batch_size_low: float | None = None
    max_batch_size_high: float | None = None
    sensitivities: str = ""
    reason: str = ""

    @property
    def is_search(self) -> bool:
        """Whether the job is a search for the largest batch."""
        return LIMIT in MeasurementJob.from_json(self.job).parameters

    @property
    def row(self) -> list[float]:
        """The sensitivities."""
        found: list[float] = json.loads(self.sensitivities)
        return found


def about(weights: CostModel, weights_file: Path) -> str:
    """Identity of the predictor: version of forerun, date and digest of the weights."""
    try:
        release = version("forerun")
    except PackageNotFoundError:
        release = "from source"
    digest = hashlib.sha256(weights_file.read_bytes()).hexdigest()[:12]
    return f"forerun {release}, weights of {weights.provenance.get('date')} ({digest})"


def predict_jobs(
    steps: Sequence[StepJob],
    searches: Sequence[BatchSearch],
    device: Device,
    weights: CostModel,
    predictor: str,
    report: Callable[[str], None] = lambda _: None,
) -> list[JobPrediction]:
    """Predicts steps and searches on a device that is not asked; a job that cannot be traced gets the reason.

    Args:
        steps: Training steps.
        searches: Searches for the largest batch.
        device: Where.
        weights: The shipped model.
        predictor: ``about`` of the weights.
        report: Told about each model.
    """
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    shared: dict[str, Any] = {"device": device.name, "made_at": now, "predictor": predictor}
    jobs = [(s.job, s.model_class, s.is_core) for s in steps]
    jobs += [(s.job, s.model_class, True) for s in searches]
    found = []
    for number, (job, model_class, is_core) in enumerate(jobs, start=1):
        blank = JobPrediction(
            job=job.to_json(), model_class=model_class, is_core=is_core, position=number - 1, **shared
        )
        try:
            found.append(_predicted(blank, job, device, weights))
        except ForerunError as error:
            found.append(replace(blank, reason=str(error)))
        report(f"{number} of {len(jobs)} predicted: {job.subject}")
    return found


def _predicted(
    blank: JobPrediction, job: MeasurementJob, device: Device, weights: CostModel
) -> JobPrediction:
    setup = setup_of(job.parameters)
    request = ModelRequest(model=job.subject, **input_options_of(job.parameters))
    model = prepare(trace(request, setup))
    if blank.is_search:
        limit_bytes = float(str(job.parameters[LIMIT]))
        return replace(blank, **_largest_batch(model, setup, device, limit_bytes))
    return replace(blank, **_times(model, setup, device, weights), **_memory(model, setup, device))


def _times(model: PreparedModel, setup: TrainingSetup, device: Device, weights: CostModel) -> dict[str, Any]:
    step = predict_steps(model, device, [setup], weights)[0]
    points = points_of(model, [device], [setup], None)
    offsets = weights.offsets_of_point(points[0])
    times = step_times(model.ops, points, weights, offsets[:, None], with_kernels=True)
    roofline_s = make_baseline("roofline").predict(whole_model_features([(model.graph, device, setup)]))
    return {
        "step_time_s": step.step_s.value,
        "low_s": step.step_s.low,
        "high_s": step.step_s.high,
        "device_s": float(times.device_s[0]),
        "host_s": float(times.host_s[0]),
        "bound_by": step.bound_by,
        "roofline_s": float(roofline_s[0]),
        "energy_j": _energy_j(model, points, device, step.step_s),
        "sensitivities": json.dumps([float(f"{x:.6g}") for x in sensitivities(model.ops, times)[0]]),
    }


def _energy_j(
    model: PreparedModel, points: Sequence[Point], device: Device, step_s: Interval
) -> float | None:
    compute_s, memory_s = (float(part[0]) for part in ideal_times_s(model, points))
    ideal_s = compute_s + memory_s
    energy = training_energy_j(
        device, step_s, ideal_s / step_s.value, compute_s / ideal_s if ideal_s else 0.0
    )
    return None if energy is None else energy.value


def _memory(model: PreparedModel, setup: TrainingSetup, device: Device) -> dict[str, Any]:
    found = estimate_memory(model.graph, setup, memory_constants(device))
    return {
        "live_peak_bytes": float(found.live_peak_bytes),
        "allocator_bytes": found.limit_bytes,
        "allocator_low_bytes": found.low_bytes - found.overhead_bytes,
        "allocator_high_bytes": found.high_bytes - found.overhead_bytes,
        "fits": str(fits(found, visible_memory(device).value_bytes)),
    }


def _largest_batch(
    model: PreparedModel, setup: TrainingSetup, device: Device, limit_bytes: float
) -> dict[str, Any]:
    """The limit is that of a GPU's allocator, or of what a process takes beyond its start: the context is not in it.

    A limit beyond the device's memory is none; then the context counts.
    """
    visible_bytes, constants = visible_memory(device).value_bytes, memory_constants(device)
    if limit_bytes < visible_bytes:
        visible_bytes, constants = limit_bytes, memory_constants(device, overhead_bytes=0.0)
    found = max_batch_size(model.graph, setup, visible_bytes, constants)
    values = {
        "max_batch_size": found.value,
        "max_batch_size_low": found.low,
        "max_batch_size_high": found.high,
    }
    return {name: None if value is None else float(value) for name, value in values.items()}


def with_positions(
    predictions: Sequence[JobPrediction], cost_s: Callable[[JobPrediction], float], scales: PriorScales
) -> list[JobPrediction]:
    """The predictions with their places: the core first, and within it the most informative jobs for their time.

    Jobs without a prediction come last of their part; searches keep the order they were given in.
    """
    steps = [p for p in predictions if p.sensitivities]
    rest = [p for p in predictions if not p.sensitivities]
    ordered: list[JobPrediction] = []
    for is_core in (True, False):
        part = [p for p in steps if p.is_core is is_core]
        if part:
            costs = np.asarray([cost_s(p) for p in part])
            order = information_order(np.asarray([p.row for p in part]), costs, scales)
            ordered += [part[i] for i in order]
        ordered += [p for p in rest if p.is_core is is_core]
    return [replace(p, position=position) for position, p in enumerate(ordered)]


def write_predictions(predictions: Iterable[JobPrediction], path: Path) -> None:
    """Writes predictions, one row each.

    Raises:
        RecordError: The file cannot be written.
    """
    partial = path.with_name(f"{path.name}.partial")
    try:
        with partial.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, _COLUMNS)
            writer.writeheader()
            writer.writerows(
                {k: "" if v is None else v for k, v in asdict(row).items()} for row in predictions
            )
        partial.replace(path)
    except OSError as error:
        raise RecordError(f"{path}: it cannot be written: {error.strerror or error}") from error


def read_predictions(path: Path) -> list[JobPrediction]:
    """Reads the predictions that ``write_predictions`` wrote.

    Raises:
        RecordError: It is not there, or no such file.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
            return [_read(row) for row in rows]
    except OSError as error:
        raise RecordError(f"{path}: it cannot be read: {error.strerror or error}") from error
    except (TypeError, ValueError, KeyError) as error:
        raise RecordError(
            f"{path}: expected the predictions of a suite ({', '.join(_COLUMNS[:4])}, ...), got {error!r}; "
            "make them again with: python -m studies suite --stages predict"
        ) from error


def _read(row: dict[str, str]) -> JobPrediction:
    values: dict[str, Any] = {}
    for name, kind in _KINDS.items():
        text = row[name]
        if kind == "bool":
            values[name] = {"True": True, "False": False}[text]
        elif kind == "int":
            values[name] = int(text)
        else:
            values[name] = text if kind == "str" else (float(text) if text else None)
    MeasurementJob.from_json(values["job"])  # a damaged one is found here
    return JobPrediction(**values)


_KINDS = {field.name: str(field.type) for field in fields(JobPrediction)}
_COLUMNS = tuple(_KINDS)
