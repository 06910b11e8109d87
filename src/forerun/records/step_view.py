"""Measured steps from stores and files as the flat records that fits and evaluations read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from statistics import median
from typing import Any

from forerun.errors import InvalidSetupError, RecordError
from forerun.records.job_parameters import input_options_of
from forerun.records.measured_run import measured_setup
from forerun.records.measurement import JobKind, Measurement, Outcome
from forerun.records.step_record import StepRecord
from forerun.records.store.files import import_measurements
from forerun.records.store.record_store import RecordStore, is_store
from forerun.run.setup import TrainingSetup

__all__ = ["as_step_record", "read_steps", "repetition_s", "step_records", "step_time_of"]

_OF_SETUP = tuple({f.name for f in fields(TrainingSetup)} & {f.name for f in fields(StepRecord)})
_INPUTS = ("image_size", "input_shape", "sequence_length")
_OPTIONAL = tuple(f.name for f in fields(StepRecord) if f.default is not MISSING)
_STEP_TIME = "step_time_s"


def as_step_record(measurement: Measurement) -> StepRecord | None:
    """The flat record of a measured step; None for anchors and all but finished steps of whole models.

    The step time is the median repetition, or, for a measured training, the step time among its results.

    Raises:
        RecordError: A parameter of the step is not valid, such as an unknown precision.
    """
    step_time_s = step_time_of(measurement)
    if step_time_s is None:
        return None
    try:
        return _flat(measurement, step_time_s)
    except (TypeError, ValueError, RecordError, InvalidSetupError) as error:
        raise RecordError(
            f"record {measurement.key} of {measurement.subject}: its parameters are not those of a step: {error}; "
            "correct or drop it"
        ) from error


def _flat(measurement: Measurement, step_time_s: float) -> StepRecord:
    asked, found, around = measurement.parameters, measurement.results, measurement.circumstances
    setup = measured_setup(asked, around.framework, around.framework_version)
    optimizer = str(asked.get("optimizer") or "none")
    values: dict[str, Any] = {
        "includes_optimizer": setup.optimizer != "none",
        "framework": around.framework,
        "framework_version": around.framework_version,
    }
    for name in _OPTIONAL:
        value = asked.get(name, found.get(name))
        if value is not None:
            values[name] = value
    values |= {name: getattr(setup, name) for name in _OF_SETUP}
    values |= input_options_of({name: values.get(name) for name in _INPUTS})
    return StepRecord(
        source=str(asked.get("source") or around.occasion or "measured"),
        row_id=str(asked.get("row_id") or measurement.key),
        model=measurement.subject,
        family=measurement.family,
        device=around.device,
        step_time_s=step_time_s,
        **{**values, "optimizer": optimizer},
    )


def step_time_of(measurement: Measurement) -> float | None:
    """Time of a finished step of a whole model [s]; None of anchors and of anything else."""
    is_step = measurement.outcome is Outcome.DONE and "batch_size" in measurement.parameters
    if not is_step or measurement.is_anchor:
        return None
    if measurement.kind is JobKind.TRAINING:
        value = measurement.results.get(_STEP_TIME)
        return float(value) if isinstance(value, (int, float)) else None
    if measurement.kind is not JobKind.STEP or not measurement.repetitions_s:
        return None
    return repetition_s(measurement)


def repetition_s(measurement: Measurement) -> float:
    """Median repetition [s]."""
    if measurement.summary is not None:
        return measurement.summary.median_s
    return median(measurement.repetitions_s)


def step_records(measurements: Iterable[Measurement]) -> Iterator[StepRecord]:
    """Flat records of the measurements that are steps of whole models."""
    return (record for record in map(as_step_record, measurements) if record is not None)


def read_steps(path_or_url: str | Path) -> list[StepRecord]:
    """Measured steps of a store, or of a ``.csv`` or ``.parquet`` file.

    Raises:
        RecordError: The store or file is missing, damaged, of another version, or holds impossible values.
    """
    if is_store(path_or_url):
        with RecordStore.open(path_or_url, create=False) as store:
            return list(step_records(store.measurements()))
    return list(step_records(import_measurements(path_or_url)))
