"""One measurement with its job and circumstances: the schema of the record store.

A *job* describes a run; a *measurement* is the result of the run, with its circumstances. ``StepRecord`` is
the flat view of a measured step that fits and evaluations read; ``step_record.as_step_record`` makes it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeVar

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


class JobKind(StrEnum):
    """Kind of job that was run."""

    STEP = "step"
    """Steps of a whole model."""
    TRAINING = "training"
    """Whole epochs of training a model, with accuracy and loss."""
    LAYER = "layer"
    """One layer alone."""
    KERNEL = "kernel"
    """One microbenchmark: product, convolution, copy, launch."""
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

    median_s: float
    low_s: float
    high_s: float
    is_stable: bool
    reason: str = ""


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

    device: str
    device_title: str
    device_index: str = "cpu"
    host: str = ""
    num_cores: int = 1
    num_threads: int = 1
    memory_bytes: float | None = None
    operating_system: str = ""
    python_version: str = ""
    framework: str = "pytorch"
    framework_version: str = ""
    forerun_version: str = ""
    accelerator_software: str = ""
    started_at: str = ""
    occasion: str = ""
    load_before: float | None = None
    telemetry: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One finished job.

    Attributes:
        key: Identity of (job, device, framework version, occasion); a rerun skips keys that are done.
        kind: Kind of job that was run.
        subject: Subject of the job: a model as ``predict`` names it, or the name of a layer or kernel.
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

    key: str
    kind: JobKind
    subject: str
    family: str
    parameters: dict[str, Scalar]
    outcome: Outcome
    circumstances: Circumstances
    reason: str = ""
    repetitions_s: tuple[float, ...] = ()
    warm_up_s: tuple[float, ...] = ()
    summary: Summary | None = None
    results: dict[str, Scalar] = field(default_factory=dict)
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
        """The run whose steps were measured, as ``predict`` takes it; None for layers, kernels and links.

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

_Part = TypeVar("_Part", Measurement, Circumstances, Summary)
_Reader = Callable[[Any], Any]
"""Function from a value of a document to that of a field."""

_OTHER_UNITS = ("_ms", "_us", "_ns", "_kb", "_mb", "_gb", "_kib", "_mib", "_gib")


def _field_names(kind: type[Measurement | Circumstances | Summary]) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))


def _required_names(kind: type[Measurement | Circumstances | Summary]) -> tuple[str, ...]:
    fields = dataclasses.fields(kind)
    return tuple(f.name for f in fields if f.default is f.default_factory is dataclasses.MISSING)


# Looked up once: a million records pass through here.
_FIELDS, _REQUIRED = _field_names(Measurement), _required_names(Measurement)
_CIRCUMSTANCES, _SUMMARY = _field_names(Circumstances), _field_names(Summary)


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


def read_document(document: Mapping[str, Any], place: str) -> Measurement:
    """A measurement from a document.

    Args:
        document: Output of ``measurement_document``.
        place: Origin of the document for messages, such as a file and row.

    Raises:
        RecordError: Unknown or missing fields, impossible values, or a document of another version.
    """
    version = document.get("schema_version")
    if version != MEASUREMENT_VERSION or not _is_whole(version):
        raise RecordError(
            f"{place}: expected schema_version {MEASUREMENT_VERSION}, got {version!r}; "
            "read it with the version of forerun that wrote it"
        )
    # An empty cell of a table is None, and means the default.
    given = {name: value for name, value in document.items() if value is not None or name in _REQUIRED}
    try:
        measurement = _read(Measurement, given)
    except _RefusedError as refused:
        raise RecordError(f"{place}{refused}") from None
    for name in ("key", "subject", "family"):
        if not getattr(measurement, name):
            raise RecordError(f"{place}, '{name}': expected text, got ''")
    if measurement.outcome is Outcome.DONE and not (measurement.repetitions_s or measurement.results):
        raise RecordError(
            f"{place}: outcome 'done' needs repetitions_s or results, got neither; drop the record or fill it in"
        )
    return measurement


class _RefusedError(ValueError):
    """Refusal of a value; its text follows the place of the value."""


def _read(kind: type[_Part], values: Any) -> _Part:
    """A dataclass from names with values; the hints of its fields say what each must be."""
    if not isinstance(values, Mapping):
        raise _RefusedError(f": expected names with values, got {values!r}")
    readers = _READERS[kind]
    # With as many names a missing field comes with an unknown one, which is refused below.
    if len(values) < len(readers):
        for name in _required_names(kind):
            if name not in values:
                raise _RefusedError(f": expected the field '{name}', which is missing")
    found = {}
    for name, value in values.items():
        if name not in readers:
            raise _RefusedError(
                f": unknown field '{name}'{near_matches(str(name), readers)} "
                "(units are part of a name: times in _s, sizes in _bytes); rename or remove it"
            )
        try:
            found[name] = readers[name](value)
        except _RefusedError as refused:
            raise _RefusedError(f", '{name}'{refused}") from None
    part: _Part = kind(**found)
    return part


def _checked(is_right: Callable[[Any], bool], expected: str) -> _Reader:
    def read(value: Any) -> Any:
        if not is_right(value):
            raise _RefusedError(f": expected {expected}, got {value!r}")
        return value

    return read


def _choice(kind: type[JobKind] | type[Outcome]) -> _Reader:
    def read(value: Any) -> Any:
        try:
            return kind(value)
        except ValueError:
            raise _RefusedError(f": expected one of {', '.join(kind)}, got {value!r}") from None

    return read


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_finite(value: Any) -> bool:
    return _is_number(value) and math.isfinite(value)


def _times(values: Any) -> tuple[float, ...]:
    if not isinstance(values, (list, tuple)):
        raise _RefusedError(f": expected a list of seconds, got {values!r}")
    for number, value in enumerate(values, start=1):
        if not _is_number(value) or not 0 <= value < math.inf:
            raise _RefusedError(
                f", item {number}: expected seconds from zero, got {value!r}; "
                "drop the record or correct the time"
            )
    return tuple(map(float, values))


def _scalars(values: Any) -> dict[str, Scalar]:
    if not isinstance(values, Mapping):
        raise _RefusedError(f": expected names with values, got {values!r}")
    for key, value in values.items():
        if value is not None and not isinstance(value, (str, int, float, bool)):
            raise _RefusedError(f", '{key}': expected a number, text or flag, got {value!r}")
        if isinstance(value, float) and not math.isfinite(value):
            raise _RefusedError(f", '{key}': expected a finite number, got {value}; leave it out")
        if key.endswith(_OTHER_UNITS):
            raise _RefusedError(
                f", '{key}': expected times in seconds (_s) and sizes in bytes (_bytes); "
                "convert the value and rename it"
            )
        if isinstance(value, (int, float)) and value < 0 and key.endswith("_s"):
            raise _RefusedError(
                f", '{key}': expected seconds from zero, got {value}; drop the record or correct the time"
            )
    return dict(values)


def _summary(values: Any) -> Summary:
    summary = _read(Summary, values)
    if not 0 <= summary.low_s <= summary.median_s <= summary.high_s:
        raise _RefusedError(
            f": expected 0 <= low_s <= median_s <= high_s, got "
            f"{summary.low_s}, {summary.median_s}, {summary.high_s}"
        )
    return summary


_BY_HINT: dict[str, _Reader] = {
    "str": _checked(lambda value: isinstance(value, str), "text"),
    "int": _checked(_is_whole, "a whole number"),
    "float": _checked(_is_finite, "a finite number"),
    "float | None": _checked(lambda value: value is None or _is_finite(value), "a finite number or nothing"),
    "bool": _checked(lambda value: isinstance(value, bool), "true or false"),
    "dict[str, float]": _checked(
        lambda values: isinstance(values, Mapping) and all(map(_is_finite, values.values())),
        "names with finite numbers",
    ),
    "dict[str, Scalar]": _scalars,
    "tuple[float, ...]": _times,
    "JobKind": _choice(JobKind),
    "Outcome": _choice(Outcome),
    "Summary | None": _summary,
    "Circumstances": lambda values: _read(Circumstances, values),
}
# The hints of the fields are the schema: a field of another type cannot be added without its check.
_READERS: dict[type, dict[str, _Reader]] = {
    kind: {field.name: _BY_HINT[str(field.type)] for field in dataclasses.fields(kind)}
    for kind in (Measurement, Circumstances, Summary)
}
