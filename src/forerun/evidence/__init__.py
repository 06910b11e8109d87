"""Measures, keeps records, calibrates, fits and evaluates; imports the core, and the core never imports it."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forerun.evidence.measurement.circumstances import at_job_start, describe_circumstances
    from forerun.evidence.measurement.measured_job import timed_training
    from forerun.evidence.measurement.telemetry import record_telemetry
    from forerun.evidence.records.measurement import Record, Scalar
    from forerun.evidence.records.record_store import RecordStore

__all__ = [
    "Record",
    "RecordStore",
    "Scalar",
    "at_job_start",
    "describe_circumstances",
    "record_telemetry",
    "timed_training",
]

_MODULES = {
    "Record": "forerun.evidence.records.measurement",
    "RecordStore": "forerun.evidence.records.record_store",
    "Scalar": "forerun.evidence.records.measurement",
    "at_job_start": "forerun.evidence.measurement.circumstances",
    "describe_circumstances": "forerun.evidence.measurement.circumstances",
    "record_telemetry": "forerun.evidence.measurement.telemetry",
    "timed_training": "forerun.evidence.measurement.measured_job",
}
"""Door of the room: what others may use, loaded on first use."""


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(import_module(_MODULES[name]), name)
