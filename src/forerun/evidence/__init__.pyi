"""Public names of this package and the module of each; ``__init__.py`` loads them from here on first use."""

from forerun.evidence.measurement.circumstances import at_job_start as at_job_start
from forerun.evidence.measurement.circumstances import describe_circumstances as describe_circumstances
from forerun.evidence.measurement.measured_job import timed_training as timed_training
from forerun.evidence.measurement.telemetry import record_telemetry as record_telemetry
from forerun.evidence.records.measurement import Record as Record
from forerun.evidence.records.measurement import Scalar as Scalar
from forerun.evidence.records.record_store import RecordStore as RecordStore
