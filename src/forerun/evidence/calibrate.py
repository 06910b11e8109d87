"""``forerun calibrate`` as a function: measures for some minutes, fits, writes the calibration of a device.

Layers and whole models are measured by turns until the time is up: layers give the speed of each kind of operation over
its sizes, whole models the cost of a step beside its layers.
"""

from __future__ import annotations

import datetime
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, create_model

from forerun.base.answers import Answer, fields_of
from forerun.base.errors import InvalidSetupError, RecordError, UsageError
from forerun.base.extras import require
from forerun.base.kept import write_whole
from forerun.base.tables import own_table, read_rows
from forerun.cost.communication.constants import (
    MeasuredLayouts,
    StepShape,
    is_layouts_file,
)
from forerun.cost.time.correction import calibration_path
from forerun.cost.time.weights import load_weights, shipped_weights_path
from forerun.evidence.fitting.device_calibration import CalibrationResult
from forerun.evidence.measurement.circumstances import describe_circumstances, framework_of
from forerun.evidence.measurement.jobs import MeasurementJob, Protocol
from forerun.evidence.measurement.layer_design import design_layers, step_job
from forerun.evidence.measurement.session import Event
from forerun.evidence.measurement.settings import LayerDesign
from forerun.evidence.measurement.telemetry import device_load, load_warning
from forerun.evidence.records.measurement import JobKind, Measurement, Outcome
from forerun.evidence.records.reading import columns_of, read_all
from forerun.evidence.records.record_store import RecordStore
from forerun.prediction.division import shape_of
from forerun.prediction.models import TracedModels
from forerun.prediction.run_step import divided_steps
from forerun.question.devices import find_device
from forerun.question.devices.catalogue import device_at
from forerun.question.devices.device import Device, DeviceKind
from forerun.question.devices.local import check_device, gpu_index, lock_device
from forerun.question.options import RunOptions
from forerun.question.run import Run
from forerun.question.settings import declared
from forerun.question.setup import Precision, choice

_FIT_SHARE = 0.25
"""Share of the minutes that goes to tracing and fitting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOutModel:
    """A measured model, and its prediction by calibrations that had not seen its family [s]."""

    model: str
    batch_size: int
    measured_s: float
    relative_noise: float
    before_s: float
    after_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration(Answer):
    """A finished calibration.

    Attributes:
        device: Title of the device.
        framework: Framework of the models that the calibration serves, ``pytorch`` or ``keras``.
        file: File of the calibration.
        records: Store of the measurements.
        method: ``refined`` (from layers and models), ``offset`` (from a few steps) or ``layouts`` (from steps of
            several devices).
        num_layers, num_models: Numbers of measurements behind the calibration.
        models: The whole models, left out in turn.
        duration_s: Time of measuring and fitting [s].
        step_cost_s: Time of a step of the training loop beside its operations, for Keras' ``fit`` [s].
        notes: Measurements that could not be used, with the reason, and the load of the device.
    """

    device: str
    framework: str
    file: str
    records: str
    method: str
    num_layers: int
    num_models: int
    models: tuple[LeftOutModel, ...]
    duration_s: float
    step_cost_s: float = 0.0
    notes: tuple[str, ...] = ()

    @property
    def mape_before(self) -> float | None:
        """Mean absolute error of the left-out models by the shipped weights, as a fraction; None without models."""
        return _mape([(model.measured_s, model.before_s) for model in self.models])

    @property
    def mape_after(self) -> float | None:
        """Mean absolute error of the left-out models by calibrations that had not seen the model's family."""
        return _mape([(model.measured_s, model.after_s) for model in self.models])

    def json_fields(self) -> dict[str, Any]:
        """The fields, and the mean errors of all models."""
        return {**fields_of(self), "mape_before": self.mape_before, "mape_after": self.mape_after}


def _mape(pairs: Sequence[tuple[float, float]]) -> float | None:
    return float(np.mean([abs(said / was - 1) for was, said in pairs])) if pairs else None


def calibrate(
    device: str = "cpu",
    *,
    minutes: float = 3.0,
    precision: str = "fp32",
    framework: str = "pytorch",
    records: str | Path | None = None,
    from_records: str | Path | None = None,
    out: str | Path | None = None,
    wait_s: float = 0.0,
    on_event: Callable[[Event], None] | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> Calibration:
    """Measures a device of this machine, or takes records of another one, and fits the cost model to it.

    Args:
        device: ``cpu`` or ``cuda:N``; with ``from_records``, the name of the device they were measured on.
        minutes: Time for measuring and fitting [min], 0.5 or more.
        precision: Precision of the measured steps.
        framework: ``pytorch``, or ``keras`` on TensorFlow; a calibration serves the models of one framework.
        records: Store that keeps the measurements; the default store if None.
        from_records: A store or file of measurements to fit instead of measuring; a table with a column ``parallel`` or
            ``strategy`` holds steps of several devices.
        out: File of the calibration; if None, where ``predict --on here`` finds it.
        wait_s: Longest wait for another process that measures on the device [s].
        on_event: Receives an event for every measured job.
        report: Receives lines about the progress.

    Raises:
        UsageError: An argument has an impossible value.
        MeasurementError: Nothing could be measured, or another process measures on the device.
        RecordError: No measurement of the device can be used.
    """
    if not 0.5 <= minutes < math.inf:
        raise InvalidSetupError(f"a calibration needs half a minute or more, got {minutes} minutes")
    if not 0.0 <= wait_s < math.inf:
        raise InvalidSetupError(f"expected a wait of zero or more, got {wait_s} s")
    require("a calibration", "torch")
    _check_framework(framework)
    choice(Precision, precision, "precision")
    if out is not None:
        _check_file(Path(out))
    if from_records is not None and has_layouts(Path(from_records)):
        return _of_layouts(device, Path(from_records), None if out is None else Path(out))
    began_s, load_note = time.monotonic(), ""
    if from_records is not None:
        found = find_device(device)
        measured, name = _recorded(from_records, found, framework), str(from_records)
    else:
        device = check_device(device)
        found = device_at(gpu_index(device))
        with lock_device(device, wait_s=wait_s, on_wait=report):
            # Asked under the lock, so that no other measurement of ours is the load.
            if load_note := load_warning(device, device_load(device)):
                report(f"warning: {load_note}")
            began_s = time.monotonic()
            # The user's minutes include the fit.
            deadline_s = began_s + 60.0 * minutes * (1 - _FIT_SHARE)
            measured, name = measure_for_calibration(
                device, found, precision, framework, records, deadline_s, on_event
            )
    report(f"fitting {len(measured)} measurements")
    result, notes = fit_device(measured, found, report)
    path = Path(out) if out is not None else calibration_path(found, framework)
    result.weights.save(path)
    return Calibration(
        device=found.title,
        framework=framework,
        file=str(path),
        records=name,
        method=result.method,
        num_layers=result.num_layers,
        num_models=result.num_models,
        models=_left_out(result),
        duration_s=time.monotonic() - began_s,
        step_cost_s=result.weights.step_cost_s,
        notes=(*notes, *result.refused, *([load_note] if load_note else [])),
    )


def _of_layouts(device: str, steps: Path, out: Path | None) -> Calibration:
    """Measured steps of layouts as a calibration; each step is predicted from the others as well."""
    began_s, found = time.monotonic(), find_device(device)
    if out is None or not is_layouts_file(out.name):
        raise InvalidSetupError(
            f"{steps.name} holds steps of several devices; expected a file for them that ends in .json, got "
            f"{out or 'none'}; give --out my-cluster.json"
        )
    rows = read_layout_steps(steps, found)
    measured = MeasuredLayouts(
        device=found.name,
        shapes=tuple(row.shape for row in rows),
        logs=tuple(float(np.log(row.measured_s / row.predicted_s)) for row in rows),
    )
    write_whole(out, measured.to_json().encode())
    models = []
    for index, row in enumerate(rows):
        others = measured.without(index)
        log_factor = others.correction(row.shape)[0] if others is not None else 0.0
        models.append(
            LeftOutModel(
                model=f"{row.run.model.model}, {row.run.layout.text}",
                batch_size=row.run.setup.batch_size_per_device,
                measured_s=row.measured_s,
                relative_noise=0.0,
                before_s=row.predicted_s,
                after_s=row.predicted_s * math.exp(log_factor),
            )
        )
    return Calibration(
        device=found.title,
        framework="pytorch",
        file=str(out),
        records=str(steps),
        method="layouts",
        num_layers=0,
        num_models=len(rows),
        models=tuple(models),
        duration_s=time.monotonic() - began_s,
    )


def _check_file(path: Path) -> None:
    """Refuses a file that cannot be written, before minutes of measuring."""
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if path.is_dir() or not folder.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise RecordError(f"expected a file for the calibration that can be written, got '{path}'")


def _check_framework(framework: str) -> None:
    if (other := framework_of(framework)) is not None:
        other.check_installed(f"a calibration with {framework.capitalize()}")


def _recorded(source: str | Path, device: Device, framework: str) -> list[Measurement]:
    wanted = {device.name, device.title}
    found = [
        m
        for m in read_all([source], device)
        if m.outcome is Outcome.DONE
        and m.circumstances.framework == framework
        and wanted & {m.circumstances.device, m.circumstances.device_title}
    ]
    if not found:
        raise RecordError(
            f"{source}: expected measurements of {framework} on {device.title} ({device.name}), found none; "
            "name the device and the framework they were measured on"
        )
    return found


def fit_device(
    measured: Sequence[Measurement], device: Device, report: Callable[[str], None] = lambda _: None
) -> tuple[CalibrationResult, list[str]]:
    """The cost model of a device from what was measured on it, and what of that could not be used.

    Raises:
        RecordError: No finished step or layer is among the measurements.
    """
    import torch

    from forerun.evidence.fitting.device_calibration import calibrate as fit
    from forerun.evidence.fitting.measured_steps import device_samples

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the products are small: threads would wait for each other
    try:
        loop_s = loop_cost_s(measured)
        rest = [m for m in measured if m.subject != LOOP_MODEL]
        samples, reasons = device_samples(rest, device, loop_s=loop_s)
        return fit(samples, device, load_weights(shipped_weights_path()), report, loop_s=loop_s), reasons
    finally:
        torch.set_num_threads(num_threads)


def _left_out(result: CalibrationResult) -> tuple[LeftOutModel, ...]:
    rows = zip(result.samples, result.log_before, result.log_after, strict=True)
    return tuple(
        LeftOutModel(
            model=sample.measurement.subject,
            batch_size=sample.point.setup.batch_size_per_device,
            measured_s=sample.step_time_s,
            relative_noise=sample.relative_noise,
            before_s=float(sample.step_time_s * np.exp(-before)),
            after_s=float(sample.step_time_s * np.exp(-after)),
        )
        for sample, before, after in rows
    )


_OF_LAYOUTS = {"parallel", "strategy"}


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutMeasurement:
    """One measured step of several devices with its prediction.

    Attributes:
        run: The question.
        measured_s: Measured step [s].
        predicted_s: Predicted step [s].
        shape: What the error of the prediction depends on.
    """

    run: Run
    measured_s: float
    predicted_s: float
    shape: StepShape


def has_layouts(path: Path) -> bool:
    """True if a file is a table of steps with a column of layouts."""
    columns = columns_of(path)
    return "step_time_s" in columns and bool(_OF_LAYOUTS & columns) and "row_id" not in columns


def read_layout_steps(path: Path, device: Device) -> list[LayoutMeasurement]:
    """The steps of a table that a person writes, any settings of ``predict`` and the step, each predicted as shipped.

        model,device,parallel,strategy,batch_size,accumulation,precision,sequence_length,step_time_s
        llama-3.1-8b,8xh100-sxm,"tp=2,dp=4",zero1,1,16,amp-bf16,4096,9.41

    Args:
        path: A ``.csv`` file: model, device (such as ``2x8xh100-sxm``), batch size, step time, and settings by name.
        device: The device that all steps were measured on.

    Raises:
        RecordError: A column is unknown, a cell is damaged or impossible, or a step is of another device.
    """
    models = TracedModels(use_cache=True)
    weights = load_weights(shipped_weights_path())
    found = []
    row: Any  # its fields are known at run time only
    for line, row in read_rows(path, _layout_row()):
        place = f"{path.name}, line {line}"
        try:
            run = _layout_run(row, device, place)
            size = run.setup.batch_size_per_device
            (step,) = divided_steps(models.of(run), run, [size], weights)
            shape = shape_of(step)
        except RecordError:
            raise
        except UsageError as error:
            raise RecordError(f"{place}: {error}") from error
        measured_s = row.step_time_s
        found.append(
            LayoutMeasurement(run=run, measured_s=measured_s, predicted_s=step.step_s.value, shape=shape)
        )
    return found


@cache
def _layout_row() -> type[BaseModel]:
    """Model of a row: the step, and any settings of ``predict``, whose words ``Run.of`` checks."""
    numbers = {int: "a whole number", float: "a number", bool: "yes or no"}
    columns: dict[str, Any] = {}
    for name, item in declared(RunOptions).items():
        kind, words = (item.kind, numbers[item.kind]) if item.kind in numbers else (str, None)
        # A field may not be called like a method of the model.
        is_taken = hasattr(BaseModel, name)
        field = Field(default=None, description=words, alias=name if is_taken else None)
        columns[f"{name}_" if is_taken else name] = (kind | None, field)
    columns |= {name: (str, Field(description=f"a {name}, as in predict")) for name in ("model", "device")}
    columns["batch_size"] = (int, Field(description="a whole number"))
    seconds = Field(gt=0, allow_inf_nan=False, description="seconds above zero")
    columns["step_time_s"] = (float, seconds)
    return create_model("Row", __config__=ConfigDict(extra="forbid"), **columns)


def _layout_run(row: Any, device: Device, place: str) -> Run:
    given = row.model_dump(exclude={"model", "device", "step_time_s"}, exclude_none=True, by_alias=True)
    run = Run.of(row.model, device=row.device, **given)
    if run.cluster.device.name != device.name:
        raise RecordError(
            f"{place}: a step of {run.cluster.device.name}, but the device is {device.name}; give --device "
            f"{run.cluster.device.name}, and a table for each device"
        )
    if run.cluster.num_devices == 1:
        raise RecordError(
            f"{place}: expected a step of several devices, got {run.cluster.device.name} alone; put it into a table "
            "without the columns parallel and strategy"
        )
    return run


LOOP_MODEL = "keras:mlp:depth=1,width=1"
"""A network with almost no work: its step of ``fit`` is the cost of the training loop."""

_LOOP_IMAGE_SIZE = 2
_KERAS_LAYERS = (
    *("conv2d", "dense", "depthwise_conv2d", "batch_norm"),
    *("max_pool", "avg_pool", "layer_norm", "attention"),
)
"""Kinds of layers in image networks and Transformers; a recurrent layer is a loop of many small operations."""

_WORK_OF_GPU = 100.0
"""Factor on the work of layers for a GPU, which does so much more in the same time."""


def calibration_layers(
    num_layers: int, *, is_gpu: bool, precision: str, seed: int = 0, framework: str = "pytorch"
) -> list[MeasurementJob]:
    """Layers to measure, ordered so that any first part of them fills the space as well.

    With Keras, a null layer in each mode comes first; it gives the cost of a call.
    """
    factor = _WORK_OF_GPU if is_gpu else 1.0
    is_keras = framework == "keras"
    shared: dict[str, Any] = {"kinds": _KERAS_LAYERS, "layout": "nhwc"} if is_keras else {}
    design = LayerDesign(
        num_layers=num_layers,
        optimizers=("none", "sgd-plain", "momentum", "adam"),
        precision=precision,
        max_flops=1.5e9 * factor,
        max_bytes=1.5e8 * factor,
        seed=seed,
        with_null=is_keras,
        framework=framework,
        **shared,
    )
    return design_layers(design)


def calibration_models(*, is_gpu: bool, precision: str, framework: str = "pytorch") -> list[MeasurementJob]:
    """Training steps of whole models; on a GPU at images and batches that keep it busy.

    With Keras, the network with almost no work comes first (``loop_job``).
    """
    is_keras = framework == "keras"
    jobs = [loop_job(precision)] if is_keras else []
    table = own_table(__file__, "calibration_models.toml")
    jobs += [
        step_job(
            model,
            {
                # The batches of the table keep a processor busy for a fraction of a second; a GPU would only launch.
                "batch_size": batch_size * (16 if is_gpu else 1),
                "image_size": max(image_size, 128) if is_gpu and image_size > 32 else image_size,
                "precision": precision,
                "optimizer": "sgd",
                "layout": "nhwc" if is_keras else None,
            },
        )
        for model, image_size, batch_size in table[framework]
    ]
    return jobs


def loop_job(precision: str) -> MeasurementJob:
    """A step of ``fit`` for a network with almost no work."""
    asked = {"batch_size": 1, "image_size": _LOOP_IMAGE_SIZE, "layout": "nhwc", "precision": precision}
    return step_job(LOOP_MODEL, {**asked, "optimizer": "sgd-plain"}, family="loop")


_LAYER_SHARE = {"pytorch": 0.5, "keras": 0.35}
"""Share of the measuring time by kind of job; Keras models need more, because TensorFlow first builds a graph."""

_LAYERS_AT_ONCE = 6
_NUM_LAYERS = 400
_LAYER_PROTOCOL = Protocol(
    min_warm_up=2, max_warm_up=12, window=3, num_repetitions=7, max_seconds=0.8, timeout_s=60, anchor_every=0
)
_MODEL_PROTOCOL = Protocol(
    min_warm_up=2, max_warm_up=8, window=3, num_repetitions=7, max_seconds=5.0, timeout_s=120, anchor_every=0
)


@dataclass(slots=True)
class _Queue:
    """Jobs of one kind, the number of them in one turn, and their share of the time."""

    jobs: Iterator[MeasurementJob]
    num_at_once: int
    share: float
    protocol: Protocol
    spent_s: float = 0.0


def measure_for_calibration(
    device_index: str,
    device: Device,
    precision: str,
    framework: str,
    records: str | Path | None,
    deadline_s: float,
    on_event: Callable[[Event], None] | None,
) -> tuple[list[Measurement], str]:
    """Measures until the deadline while the device is held; returns the measurements and their store.

    Layers and models take turns, so that a change of the machine affects both alike; the kind that has had less of
    its share of the time is next.

    Args:
        device_index: ``cpu`` or ``cuda:N``.
        device: The device behind that name.
        precision: Precision of what is measured.
        framework: ``pytorch`` or ``keras``.
        records: Store; the default one if None.
        deadline_s: Reading of ``time.monotonic`` after which no job begins; some of each kind are measured anyway.
        on_event: Receives an event for every job.
    """
    shared: dict[str, Any] = {
        "is_gpu": device.kind is DeviceKind.GPU,
        "precision": precision,
        "framework": framework,
    }
    share = _LAYER_SHARE[framework]
    layers = _Queue(iter(calibration_layers(_NUM_LAYERS, **shared)), _LAYERS_AT_ONCE, share, _LAYER_PROTOCOL)
    models = _Queue(iter(calibration_models(**shared)), 1, 1 - share, _MODEL_PROTOCOL)
    occasion = f"calibration {datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds')}"
    session: dict[str, Any] = {"device_index": device_index, "occasion": occasion, "on_event": on_event}
    with RecordStore.open(records) as store, lock_device(device_index):
        _measure_in_turns([layers, models], store, deadline_s, session, framework)
        return list(store.measurements(occasion=occasion, outcome=Outcome.DONE)), store.name


def _measure_in_turns(
    queues: Sequence[_Queue], store: RecordStore, deadline_s: float, session: dict[str, Any], framework: str
) -> None:
    from forerun.evidence.measurement.session import run_jobs

    waiting = list(queues)
    while waiting:
        queue = min(waiting, key=lambda one: one.spent_s / one.share)
        is_late = time.monotonic() >= deadline_s
        # However short, a calibration has some of each: models give the cost of a step, layers the sizes.
        if is_late and queue.spent_s:
            return
        chunk = list(islice(queue.jobs, queue.num_at_once))
        if not chunk:
            waiting.remove(queue)
            continue
        began_s = time.monotonic()
        run_jobs(chunk, store, anchor=None, **session, **_stack_of(queue.protocol, session, framework))
        queue.spent_s += time.monotonic() - began_s


def _stack_of(protocol: Protocol, session: dict[str, Any], framework: str) -> dict[str, Any]:
    """Arguments of ``run_jobs``; jobs of another framework run in its own runner."""
    if (other := framework_of(framework)) is None:
        return {"protocol": protocol}
    around = describe_circumstances(session["device_index"], protocol=protocol, framework=framework)
    return {"protocol": protocol, "circumstances": around, "run": other.run}


def loop_cost_s(measured: Sequence[Measurement]) -> float:
    """Time of a step of ``fit`` beside its operations [s].

    It is the step of a network with next to no work, less the call of a layer without any: the measured layers, and so
    the cost model, contain that call. It is zero where no such network was measured, as with PyTorch, where the user
    writes the loop.
    """

    def median_s(chosen: Iterable[Measurement]) -> float:
        times = [float(np.median(m.repetitions_s)) for m in chosen if m.repetitions_s]
        return float(np.median(times)) if times else 0.0

    nulls = (m for m in measured if m.kind is JobKind.LAYER and m.subject == "null")
    return max(0.0, median_s(m for m in measured if m.subject == LOOP_MODEL) - median_s(nulls))
