"""One measurement with its job and circumstances: the schema of the record store.

A *job* describes a run; a *measurement* is the result of the run, with its circumstances. ``StepRecord`` is
the flat view of a measured step that fits and evaluations read; ``step_record.as_step_record`` makes it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from functools import cache
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, ConfigDict, Field, StrictBool, StrictInt, TypeAdapter, ValidationError

from forerun.base.errors import RecordError, near_matches
from forerun.evidence.records.measured_run import measured_device, measured_run
from forerun.question.devices.device import Device
from forerun.question.run import Run

MEASUREMENT_VERSION = 2
"""Version of the fields below; a document of another version is refused."""

ANCHOR_FAMILY = "anchor"
"""Family of the fixed small step that is measured again and again to see the machine itself change."""

Scalar = str | int | float | bool | None
"""Type of a value among a job's parameters and a measurement's results."""

_Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
_Seconds = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
_Text = Annotated[str, Field(min_length=1)]
_OTHER_UNITS = ("_ms", "_us", "_ns", "_kb", "_mb", "_gb", "_kib", "_mib", "_gib")


def _in_our_units(values: dict[str, Scalar]) -> dict[str, Scalar]:
    for key, value in values.items():
        if key.endswith(_OTHER_UNITS):
            raise ValueError(
                f"'{key}': expected times in seconds (_s) and sizes in bytes (_bytes); convert the value and rename it"
            )
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"'{key}': expected a finite number, got {value}; leave it out")
        if isinstance(value, (int, float)) and value < 0 and key.endswith("_s"):
            raise ValueError(
                f"'{key}': expected seconds from zero, got {value}; drop the record or correct the time"
            )
    return values


_Scalars = Annotated[dict[str, Scalar], AfterValidator(_in_our_units)]


class JobKind(StrEnum):
    """Kind of job that was run."""

    STEP = "step"
    """Steps of a whole model."""
    TRAINING = "training"
    """Whole epochs of training a model, with accuracy and loss."""
    LAYER = "layer"
    """One layer alone."""
    DATA_PARALLEL = "data-parallel"
    """Steps of a whole model on several devices that average their gradients."""
    LINK = "link"
    """All-reduces of several sizes between devices."""
    NULL = "null"
    """A step that does nothing: the overhead of measuring."""


_OF_RUNS = (JobKind.STEP, JobKind.TRAINING, JobKind.DATA_PARALLEL)


class Outcome(StrEnum):
    """The way a job ended."""

    DONE = "done"
    OUT_OF_MEMORY = "out-of-memory"
    TIMED_OUT = "timed-out"
    KILLED = "killed"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Summary of the repetitions.

    Attributes:
        median_s: Median repetition [s].
        low_s: Lower end of the 95 % interval of the median, from order statistics [s].
        high_s: Upper end of that interval [s].
        is_stable: True if the repetitions are stationary and no anchor drifted.
        reason: Reason why the time is not stable; empty if it is.
    """

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    median_s: _Seconds
    low_s: _Seconds
    high_s: _Seconds
    is_stable: StrictBool
    reason: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.low_s <= self.median_s <= self.high_s:
            raise ValueError(
                f"expected 0 <= low_s <= median_s <= high_s, got {self.low_s}, {self.median_s}, {self.high_s}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Circumstances:
    """Place, time, device and software of a measurement.

    Attributes:
        device: Catalogue name of the device, ``cpu`` for a processor without an entry.
        device_title: The driver's or processor's own name.
        device_index: Name of the device in the process, such as ``cuda:1``.
        host: Name of the machine as the user wants it known.
        num_cores: Processor cores the job could use.
        num_threads: Threads of the framework.
        memory_bytes: Memory of the device the job could use [bytes].
        operating_system: Name and version of the operating system.
        python_version, framework, framework_version, forerun_version: Software; framework ``pytorch`` or ``keras``.
        accelerator_software: CUDA, ROCm and driver versions; empty on a processor.
        started_at: Beginning of the job, ISO 8601 in UTC.
        occasion: Label of the session, which distinguishes repeats on another day.
        load_before: Load average per core when the job began.
        telemetry: Figures of the sensors before, during and after: clocks [Hz], power [W], temperature [C],
            throttling; a figure without a sensor is absent.
    """

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    device: str
    device_title: str
    device_index: str = "cpu"
    host: str = ""
    num_cores: StrictInt = 1
    num_threads: StrictInt = 1
    memory_bytes: _Number | None = None
    operating_system: str = ""
    python_version: str = ""
    framework: str = "pytorch"
    framework_version: str = ""
    forerun_version: str = ""
    accelerator_software: str = ""
    started_at: str = ""
    occasion: str = ""
    load_before: _Number | None = None
    telemetry: dict[str, _Number] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One finished job.

    Attributes:
        key: Identity of (job, device, framework version, occasion); a rerun skips keys that are done.
        kind: Kind of job that was run.
        subject: Subject of the job: a model as ``predict`` names it, or the name of a layer.
        family: Group that must not be split between fit and test.
        parameters: All other settings of the job: batch size, precision, layout, optimizer, sizes of the layer.
        outcome: The way the job ended.
        reason: Reason for a bad end; empty after a good one.
        repetitions_s: Every timed repetition, in order [s].
        warm_up_s: Repetitions before the step time was stationary [s].
        summary: Median, interval and stability; None without repetitions.
        results: Figures beside time: peak_memory_bytes, compile_time_s, num_parameters, accuracy and loss per
            epoch (``accuracy_1``, ``loss_1``, ...), null_step_s, anchor_drift.
        circumstances: Place, time, device and software.
        schema_version: Version this measurement was written with.
    """

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    key: _Text
    kind: JobKind
    subject: _Text
    family: _Text
    parameters: _Scalars
    outcome: Outcome
    circumstances: Circumstances
    reason: str = ""
    repetitions_s: tuple[_Seconds, ...] = ()
    warm_up_s: tuple[_Seconds, ...] = ()
    summary: Summary | None = None
    results: _Scalars = field(default_factory=dict)
    schema_version: int = MEASUREMENT_VERSION

    @property
    def is_anchor(self) -> bool:
        """True for a measurement of the machine, not of a model; no fit or evaluation may count it."""
        return self.family == ANCHOR_FAMILY

    @property
    def device(self) -> Device:
        """Where it was measured.

        Raises:
            UnknownDeviceError: The catalogue does not know the device.
        """
        around = self.circumstances
        return measured_device(around.device, around.device_title, around.num_cores)

    @property
    def run(self) -> Run | None:
        """The run whose steps were measured, as ``predict`` takes it; None for layers and links.

        Raises:
            UsageError: The catalogue does not know the device, or a parameter has a value that is none of it.
        """
        return self.run_on(self.device) if self.kind in _OF_RUNS else None

    def run_on(self, device: Device) -> Run | None:
        """The same with the figures of a device instead of the catalogue's."""
        if self.kind not in _OF_RUNS:
            return None
        around = self.circumstances
        return measured_run(self.subject, self.parameters, device, around.framework, around.framework_version)


Record = Measurement
"""The name of a measured thing in ``import forerun``."""


Document = dict[str, Any]
"""A record as a JSON object."""

# Looked up once: a million records pass through here.
_FIELDS, _CIRCUMSTANCES, _SUMMARY = (
    tuple(each.name for each in fields(kind)) for kind in (Measurement, Circumstances, Summary)
)


def measurement_document(measurement: Measurement) -> Document:
    """A measurement as JSON values: enumerations as text, tuples as lists."""
    # dataclasses.asdict copies every value deeply, which takes ten times as long.
    document: Document = {name: getattr(measurement, name) for name in _FIELDS}
    document["kind"], document["outcome"] = str(measurement.kind), str(measurement.outcome)
    for name in ("repetitions_s", "warm_up_s"):
        document[name] = list(document[name])
    for name in ("parameters", "results"):
        document[name] = dict(document[name])
    around, summary = measurement.circumstances, measurement.summary
    document["circumstances"] = {name: getattr(around, name) for name in _CIRCUMSTANCES}
    document["circumstances"]["telemetry"] = dict(around.telemetry)
    if summary is not None:
        document["summary"] = {name: getattr(summary, name) for name in _SUMMARY}
    return document


@cache
def _reader() -> TypeAdapter[Measurement]:
    return TypeAdapter(Measurement)


def read_document(document: Mapping[str, Any], place: str) -> Measurement:
    """A measurement from a document.

    Args:
        document: Output of ``measurement_document``.
        place: Origin of the document for messages, such as a file and row.

    Raises:
        RecordError: Unknown or missing fields, impossible values, or a document of another version.
    """
    version = document.get("schema_version")
    if version != MEASUREMENT_VERSION or not isinstance(version, int) or isinstance(version, bool):
        raise RecordError(
            f"{place}: expected schema_version {MEASUREMENT_VERSION}, got {version!r}; "
            "read it with the version of forerun that wrote it"
        )
    # An empty cell of a table is None, and means the default.
    given = {name: value for name, value in document.items() if value is not None}
    try:
        measurement = _reader().validate_python(given)
    except ValidationError as error:
        raise RecordError(f"{place}{_in_words(error)}") from None
    if measurement.outcome is Outcome.DONE and not (measurement.repetitions_s or measurement.results):
        raise RecordError(
            f"{place}: outcome 'done' needs repetitions_s or results, got neither; drop the record or fill it in"
        )
    return measurement


_EXPECTED = {
    "greater_than_equal": "expected seconds from zero",
    "finite_number": "expected a finite number",
    "string_too_short": "expected text",
}


def _in_words(error: ValidationError) -> str:
    """The first refusal, an unknown name before others, after the names that lead to the value."""
    found = error.errors(include_url=False)
    first = next((one for one in found if one["type"] == "unexpected_keyword_argument"), found[0])
    # The types of a union stand in the path as well.
    names = first["loc"][: 2 if first["loc"][0] != "circumstances" else 3]
    path = "".join(f", item {name + 1}" if isinstance(name, int) else f", '{name}'" for name in names[:-1])
    last = names[-1]
    if first["type"] == "unexpected_keyword_argument":
        known = {"circumstances": _CIRCUMSTANCES, "summary": _SUMMARY}.get(str(names[0]), _FIELDS)
        return (
            f"{path}: unknown field '{last}'{near_matches(str(last), known)} "
            "(units are part of a name: times in _s, sizes in _bytes); rename or remove it"
        )
    if first["type"] == "missing":
        return f"{path}: expected the field '{last}', which is missing"
    path += f", item {last + 1}" if isinstance(last, int) else f", '{last}'"
    if first["type"] == "value_error":
        said = str(first["ctx"]["error"])
        return f"{path}, {said}" if said.startswith("'") else f"{path}: {said}"
    expected = _EXPECTED.get(first["type"], first["msg"].replace("Input should be", "expected"))
    if len(first["loc"]) > len(names):
        expected = "expected a number, text or flag"
    return f"{path}: {expected}, got {first['input']!r}; correct it or drop the record"
