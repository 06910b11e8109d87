"""``python -m studies suite`` as a function: predicts, measures for some minutes, compares, in one folder."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from forerun.adapters.classics.baselines import baseline_names, make_baseline
from forerun.adapters.classics.step_features import whole_model_features
from forerun.base.answers import Answer
from forerun.base.errors import InvalidSetupError, RecordError, UnknownDeviceError
from forerun.cost.time.correction import PriorScales
from forerun.cost.time.evidence import shipped_evidence
from forerun.cost.time.weights import load_weights, shipped_weights_path
from forerun.evidence.fitting.evaluation import ErrorMetrics, cross_validated_predictions, errors, group_folds
from forerun.evidence.measurement.jobs import MeasurementJob
from forerun.evidence.measurement.session import Event
from forerun.evidence.records.measurement import Measurement
from forerun.evidence.records.reading import export_measurements, import_measurements
from forerun.evidence.records.record_store import RecordStore
from forerun.question.devices import describe_host, find_device
from forerun.question.devices.catalogue import device_at
from forerun.question.devices.device import Device, DeviceKind
from forerun.question.devices.local import first_device, gpu_index
from forerun.tracing.trace import trace
from studies.suite.comparison import MeasuredStep
from studies.suite.models import SUITE_MODELS, SuiteModel, batch_searches, step_jobs
from studies.suite.prediction import (
    JobPrediction,
    about,
    predict_jobs,
    read_predictions,
    with_positions,
    write_predictions,
)
from studies.suite.session import SuiteSession, job_cost_s

if TYPE_CHECKING:
    from studies.suite.comparison import SuiteComparison


STAGES = ("predict", "measure", "compare")

_PREDICTIONS, _DEVICE, _STORE = "predictions.csv", "device.json", "records.sqlite"
_TABLE, _COMPARISON = "records.parquet", "comparison.json"
_LIBRARIES = ("torch", "torchvision", "timm", "triton", "numpy", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13")


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteRun(Answer):
    """What a run of the suite left in its folder.

    Attributes:
        folder: The folder.
        device: Name of the device.
        num_predictions: Jobs that were predicted.
        outcomes: Numbers of measured jobs by outcome; empty without the stage.
        num_measurements: Measurements in the folder.
        duration_s: Time of the stage ``measure`` [s].
        comparison: What was found, as ``comparison.json`` holds it; None without the stage.
    """

    folder: str
    device: str
    num_predictions: int
    outcomes: dict[str, int]
    num_measurements: int
    duration_s: float
    comparison: SuiteComparison | None


def measure_suite(
    out: str | Path,
    *,
    device: str = "here",
    minutes: float = 8.0,
    stages: Sequence[str] = STAGES,
    on: str | None = None,
    models: Sequence[SuiteModel] = SUITE_MODELS,
    num_threads: int | None = None,
    on_event: Callable[[Event], None] | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> SuiteRun:
    """Measures kernels, steps and largest batches for some minutes, and compares them with earlier predictions.

    The folder holds ``device.json``, ``predictions.csv``, ``records.sqlite`` and the same as ``records.parquet``,
    and ``comparison.json``. A second run in it keeps the predictions and measures the missing jobs.

    Args:
        out: The folder; made if it is not there.
        device: ``here`` (the first GPU, or else the processor), ``cpu`` or ``cuda:N``.
        minutes: Time to measure; predicting and comparing come on top.
        stages: Stages to run, of ``predict``, ``measure`` and ``compare``.
        on: Device to predict, by name, where it is not this machine's.
        models: Models to run, with their settings.
        num_threads: Threads of a processor.
        on_event: Receives an event for every job.
        report: Receives lines about the progress.

    Raises:
        UsageError: An argument has an impossible value, or there is no such device.
        MeasurementError: Another process measures on the device.
        RecordError: The folder cannot be used, or holds nothing to compare.
    """
    _check(minutes, stages, on)
    index, folder = _index(device), Path(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RecordError(f"{folder}: the folder cannot be made: {error.strerror or error}") from error
    if "predict" in stages:
        _predict(folder, find_device(on) if on else device_at(gpu_index(index)), models, report)
    outcomes, duration_s = {}, 0.0
    if "measure" in stages:
        began_s = time.monotonic()
        outcomes = _measure(folder, index, minutes, models, num_threads, on_event)
        duration_s = time.monotonic() - began_s
    predictions = _predictions(folder)
    measurements = list(_measurements(folder))
    comparison = _compare(folder, predictions, measurements) if "compare" in stages else None
    return SuiteRun(
        folder=str(folder),
        device=predictions[0].device if predictions else index,
        num_predictions=len(predictions),
        outcomes=outcomes,
        num_measurements=len(measurements),
        duration_s=duration_s,
        comparison=comparison,
    )


def _check(minutes: float, stages: Sequence[str], on: str | None) -> None:
    unknown = [stage for stage in stages if stage not in STAGES]
    if unknown or not stages:
        raise InvalidSetupError(f"expected stages of {', '.join(STAGES)}, got '{','.join(stages)}'")
    if not 0 < minutes < float("inf"):
        raise InvalidSetupError(f"expected minutes above zero, got {minutes}")
    if on is not None and "measure" in stages:
        raise InvalidSetupError(
            f"{on} is predicted, not measured: what is measured is a device of this machine; "
            "give --stages predict, and measure there with --device"
        )


def _index(device: str) -> str:
    if device == "here":
        return first_device()
    gpu_index(device)  # refuses what is no device
    return device


def _predict(
    folder: Path, device: Device, models: Sequence[SuiteModel], report: Callable[[str], None]
) -> None:
    """Predictions are made once: existing ones stay."""
    path = folder / _PREDICTIONS
    if path.exists():
        report(f"{path} is there already and is kept")
        return
    weights_file = shipped_weights_path()
    weights = load_weights(weights_file)
    is_gpu = device.kind is DeviceKind.GPU
    found = predict_jobs(
        step_jobs(is_gpu=is_gpu, models=models),
        batch_searches(is_gpu=is_gpu, models=models),
        device,
        weights,
        about(weights, weights_file),
        report,
    )
    scales = PriorScales(**shipped_evidence().calibration_scales)
    write_predictions(with_positions(found, lambda p: _cost_s(p, is_gpu), scales), path)
    report(f"predictions written to {path}")


def _cost_s(prediction: JobPrediction, is_gpu: bool) -> float:
    compiles = bool(MeasurementJob.from_json(prediction.job).parameters.get("compile"))
    return job_cost_s(prediction.step_time_s, is_gpu=is_gpu, is_compiled=compiles)


def _predictions(folder: Path) -> list[JobPrediction]:
    path = folder / _PREDICTIONS
    return read_predictions(path) if path.exists() else []


def _measure(
    folder: Path,
    index: str,
    minutes: float,
    models: Sequence[SuiteModel],
    num_threads: int | None,
    on_event: Callable[[Event], None] | None,
) -> dict[str, int]:
    (folder / _DEVICE).write_text(json.dumps(_device_facts(index), indent=2) + "\n", encoding="utf-8")
    with RecordStore.open(folder / _STORE) as store:
        session = SuiteSession(store, index, 60.0 * minutes, models, num_threads, on_event)
        outcomes = session.run(_predictions(folder))
        export_measurements(store.measurements(), folder / _TABLE)
    return {str(outcome): count for outcome, count in outcomes.items()}


def _device_facts(index: str) -> dict[str, Any]:
    """The device by the catalogue if that has it, the machine by its drivers, and the versions of the software."""
    try:
        device = device_at(gpu_index(index)).as_dict()
    except UnknownDeviceError:
        device = None  # measured all the same
    versions = {}
    for name in _LIBRARIES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "device_index": index,
        "device": device,
        "host": describe_host().as_dict(),
        "software": versions,
    }


def _measurements(folder: Path) -> Iterable[Measurement]:
    """Measurements of the store, or of the table if there is no store."""
    if (folder / _STORE).exists():
        with RecordStore.open(folder / _STORE, create=False) as store:
            return list(store.measurements())
    return import_measurements(folder / _TABLE) if (folder / _TABLE).exists() else []


def _compare(
    folder: Path, predictions: Sequence[JobPrediction], measurements: Sequence[Measurement]
) -> SuiteComparison:
    from studies.suite.comparison import compare

    scales = PriorScales(**shipped_evidence().calibration_scales)
    found = compare(
        predictions,
        measurements,
        scales,
        lambda rows: suite_baselines(rows, find_device(predictions[0].device)),
    )
    text = json.dumps(found.as_dict(), indent=1, allow_nan=False)
    (folder / _COMPARISON).write_text(f"{text}\n", encoding="utf-8")
    return found


_ROOFLINE, _PYTORCH_RULE = "roofline", "pytorch rule"
_NUM_FOLDS = 5
_FEWEST_ROWS = 10


def suite_baselines(rows: Sequence[MeasuredStep], device: Device) -> dict[str, ErrorMetrics | None]:
    """Errors of each baseline on the rows; None for fitted ones where there are too few rows or families.

    Args:
        rows: Measured steps; their models are traced again, from the cache if they are there.
        device: Device of the steps.
    """
    cases = []
    for row in rows:
        run = row.measurement.run
        assert run is not None
        cases.append((trace(run.model, run.setup), device, run.setup))
    features = whole_model_features(cases)
    actual = np.asarray([row.measured_s for row in rows])
    families = [row.measurement.family for row in rows]
    num_folds = min(_NUM_FOLDS, len(set(families)))
    splits = group_folds(families, num_folds) if num_folds >= 2 and len(rows) >= _FEWEST_ROWS else None
    found: dict[str, ErrorMetrics | None] = {}
    for name in baseline_names():
        if name == _ROOFLINE:  # as it was written down for the device itself
            found[name] = errors([row.prediction.roofline_s or np.nan for row in rows], actual)
        elif name == _PYTORCH_RULE:
            found[name] = errors(make_baseline(name).predict(features), actual)
        elif splits is None:
            found[name] = None
        else:
            predicted = cross_validated_predictions(partial(make_baseline, name), features, actual, splits)
            found[name] = errors(predicted, actual)
    return found
