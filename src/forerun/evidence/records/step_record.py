"""One measured step as a flat row: the view of a measurement that tables, fits and errors have."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, dataclass, fields
from statistics import median
from typing import Any

from forerun.base.errors import InvalidSetupError, RecordError
from forerun.evidence.records.measured_run import input_options_of, measured_run, measured_setup
from forerun.evidence.records.measurement import Circumstances, JobKind, Measurement, Outcome, Scalar
from forerun.question.devices import find_device
from forerun.question.devices.device import Device
from forerun.question.run import Run
from forerun.question.setup import Layout, OptimizerImplementation, Phase, Precision, TrainingSetup

SCHEMA_VERSION = 1
"""Version of the fields below; a stored table of another version is refused."""

_NAMES = ("source", "row_id", "model", "family", "device", "optimizer", "framework")
_LEAST = {
    **dict.fromkeys(("batch_size_per_device", "num_devices", "image_size", "sequence_length"), 1),
    **dict.fromkeys(("num_parameters", "step_time_std_s", "peak_memory_bytes"), 0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One whole measured step.

    Attributes:
        source: Table or file the row came from.
        row_id: Identity of the row within its source.
        model: Model as forerun names it, such as ``timm:resnet50``.
        family: Group of related networks that must not be split between fit and test.
        device: Device name the catalogue resolves, such as ``rtx-3090``.
        batch_size_per_device: Number of samples in one step of one device.
        step_time_s: Time of one step [s].
        precision: Numeric recipe.
        convolution_precision: Arithmetic of convolutions in fp32; None for that of ``precision``.
        phase: Training step, forward pass, or inference.
        layout: Memory order of images.
        compile: True if the step ran under torch.compile or its like.
        optimizer: Name as in ``TrainingSetup``; ``none`` if no update ran.
        optimizer_implementation: Kernel granularity of the update.
        includes_optimizer: True if the measured time contains the update.
        fused_attention: True if attention ran as one kernel.
        autocast_backward: True if the autocast region also spanned the backward pass.
        image_size: Height and width of square images [pixels].
        input_shape: Shape of one sample without the batch axis, if a sample is not a square image.
        sequence_length: Number of tokens in one sample.
        framework: Name of the framework, such as pytorch, tensorflow, keras or mxnet.
        framework_version: Version as the source gives it, such as ``1.12``; empty if it is not known.
        num_devices: Number of devices that took part.
        step_time_std_s: Standard deviation between steps or replicas [s].
        num_parameters: Number of parameters of the model as the source counts them.
        peak_memory_bytes: Largest memory use seen [bytes].
        next_larger_batch_failed: Next larger batch size that was tried and failed.
        note: Remark for readers of the row.
    """

    source: str
    row_id: str
    model: str
    family: str
    device: str
    batch_size_per_device: int
    step_time_s: float
    precision: Precision
    phase: Phase
    convolution_precision: Precision | None = None
    layout: Layout = Layout.NCHW
    compile: bool = False
    optimizer: str = "none"
    optimizer_implementation: OptimizerImplementation = OptimizerImplementation.FOREACH
    includes_optimizer: bool = False
    fused_attention: bool = True
    autocast_backward: bool = False
    image_size: int | None = None
    input_shape: tuple[int, ...] | None = None
    sequence_length: int | None = None
    framework: str = "pytorch"
    framework_version: str = ""
    num_devices: int = 1
    step_time_std_s: float | None = None
    num_parameters: int | None = None
    peak_memory_bytes: float | None = None
    next_larger_batch_failed: int | None = None
    note: str = ""

    def __post_init__(self) -> None:
        for name in _NAMES:
            if not getattr(self, name):
                raise RecordError(f"{self._place}: column '{name}' must not be empty; fill it in")
        if not (math.isfinite(self.step_time_s) and self.step_time_s > 0):
            raise RecordError(
                f"{self._place}, column 'step_time_s': expected seconds above zero, got {self.step_time_s}; "
                "drop the row or correct the time"
            )
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= least):
                raise RecordError(
                    f"{self._place}, column '{name}': expected at least {least}, got {value}; correct it"
                )
        failed = self.next_larger_batch_failed
        if failed is not None and failed <= self.batch_size_per_device:
            raise RecordError(
                f"{self._place}, column 'next_larger_batch_failed': expected more than the batch size "
                f"that ran ({self.batch_size_per_device}), got {failed}"
            )

    @property
    def _place(self) -> str:
        return f"{self.source or 'record'}, row {self.row_id or '?'}"

    @property
    def throughput_samples_per_s(self) -> float:
        """Throughput of all devices together [samples/s]."""
        return self.batch_size_per_device * self.num_devices / self.step_time_s

    @property
    def run(self) -> Run:
        """The run whose step was measured: the question that a prediction of it answers.

        Raises:
            UnknownDeviceError: The catalogue does not know the device.
        """
        return self.run_on(find_device(self.device))

    def run_on(self, device: Device) -> Run:
        """The same with the figures of a device instead of the catalogue's."""
        return measured_run(self.model, self.parameters, device, self.framework, self.framework_version)

    def training_setup(self) -> TrainingSetup:
        """The setup with which a prediction is compared with this record."""
        return measured_setup(self.parameters, self.framework, self.framework_version)

    @property
    def parameters(self) -> dict[str, Scalar]:
        """The settings of the job that measures such a step."""
        shape = self.input_shape
        told = {name: getattr(self, name) for name in _PARAMETERS}
        told["input_shape"] = None if shape is None else "x".join(map(str, shape))
        return {"batch_size": self.batch_size_per_device, **_present(told)}


_RESULTS = ("step_time_std_s", "num_parameters", "peak_memory_bytes", "next_larger_batch_failed", "note")
_OF_MEASUREMENT = ("model", "family", "device", "step_time_s", "framework", "framework_version")
_PARAMETERS = tuple(
    field.name
    for field in fields(StepRecord)
    if field.name not in (*_RESULTS, *_OF_MEASUREMENT, "batch_size_per_device")
)


def _present(values: dict[str, Any]) -> dict[str, Scalar]:
    plain = {name: str(value) if isinstance(value, str) else value for name, value in values.items()}
    return {name: value for name, value in plain.items() if value not in (None, "")}


def as_measurement(record: StepRecord) -> Measurement:
    """The measurement of one repetition behind a row of a table, with the circumstances that the table gives."""
    # As JSON, so that no two pairs of texts join to the same one.
    identity = json.dumps([record.source, record.row_id])
    return Measurement(
        key=hashlib.sha256(identity.encode()).hexdigest()[:32],
        kind=JobKind.STEP,
        subject=record.model,
        family=record.family,
        parameters=record.parameters,
        outcome=Outcome.DONE,
        repetitions_s=(record.step_time_s,),
        results=_present({name: getattr(record, name) for name in _RESULTS}),
        circumstances=Circumstances(
            device=record.device,
            device_title=record.device,
            framework=record.framework,
            framework_version=record.framework_version,
            occasion=record.source,
        ),
    )


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
