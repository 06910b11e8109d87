"""One measurement with its job and circumstances: the schema of the record store.

A *job* describes a run; a *measurement* is the result of the run, with its circumstances. ``StepRecord`` is
the flat view of a measured step that fits and evaluations read; ``step_view.as_step_record`` makes it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from forerun.hardware.device import Device
from forerun.records.measured_run import measured_device, measured_run
from forerun.run.run import Run

__all__ = [
    "ANCHOR_FAMILY",
    "MEASUREMENT_VERSION",
    "Circumstances",
    "JobKind",
    "Measurement",
    "Outcome",
    "Record",
    "Scalar",
    "Summary",
]

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
