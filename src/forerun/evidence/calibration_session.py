"""Jobs of a calibration, and the measuring of layers and whole models by turns until the time is up.

Layers give the speed of each kind of operation over its sizes; whole models give the cost of a step beside its layers.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from forerun.evidence.measurement.circumstances import describe_circumstances, framework_of
from forerun.evidence.measurement.jobs import MeasurementJob, Protocol
from forerun.evidence.measurement.layer_design import design_layers
from forerun.evidence.measurement.session import Event
from forerun.evidence.measurement.settings import LayerDesign
from forerun.evidence.records.measurement import JobKind, Measurement, Outcome, Scalar
from forerun.evidence.records.model_names import subject_family
from forerun.evidence.records.record_store import RecordStore
from forerun.question.devices.device import Device, DeviceKind
from forerun.question.devices.local import lock_device

CALIBRATION_MODELS: Sequence[tuple[str, int, int]] = (
    ("torchvision:resnet18", 64, 4),
    ("torchvision:mobilenet_v3_small", 96, 8),
    ("cnn:depth=3,base_filters=32", 32, 32),
    ("torchvision:squeezenet1_1", 128, 4),
    ("torchvision:densenet121", 64, 2),
    ("torchvision:shufflenet_v2_x0_5", 128, 8),
    ("torchvision:vgg11_bn", 64, 2),
    ("torchvision:efficientnet_b0", 96, 4),
    ("torchvision:resnext50_32x4d", 64, 2),
    ("torchvision:alexnet", 128, 8),
    ("torchvision:swin_t", 64, 2),
    ("cifar-resnet:20", 32, 64),
    ("torchvision:regnet_y_400mf", 160, 2),
    ("torchvision:mnasnet0_5", 160, 4),
    ("torchvision:googlenet", 96, 4),
    ("torchvision:resnet50", 128, 2),
)
"""Model, image size [pixels] and batch size, in the order of use: each model is unlike those before it."""

KERAS_CALIBRATION_MODELS: Sequence[tuple[str, int, int]] = (
    ("keras:cifar10-cnn", 32, 32),
    ("keras:VGG16", 48, 4),
    ("keras:MobileNet", 96, 8),
    ("keras:pcam-cnn", 64, 4),
    ("keras:ResNet50", 64, 4),
    ("keras:MobileNetV2", 96, 4),
    ("keras:Xception", 96, 2),
    ("keras:DenseNet121", 64, 2),
    ("keras:EfficientNetB0", 96, 2),
    ("keras:VGG19", 64, 2),
)
"""Models, image sizes and batch sizes for Keras, those that build quickly first (keras.applications, practicum)."""

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
    for model, image_size, batch_size in KERAS_CALIBRATION_MODELS if is_keras else CALIBRATION_MODELS:
        parameters: dict[str, Scalar] = {
            "batch_size": batch_size * (16 if is_gpu else 1),
            "image_size": max(image_size, 128) if is_gpu and image_size > 32 else image_size,
            "precision": precision,
            "optimizer": "sgd",
            "phase": "train",
        }
        if is_keras:
            parameters["layout"] = "nhwc"
        jobs.append(
            MeasurementJob(
                kind=JobKind.STEP, subject=model, family=subject_family(model), parameters=parameters
            )
        )
    return jobs


def loop_job(precision: str) -> MeasurementJob:
    """A step of ``fit`` for a network with almost no work."""
    parameters: dict[str, Scalar] = {
        "batch_size": 1,
        "image_size": _LOOP_IMAGE_SIZE,
        "precision": precision,
        "optimizer": "sgd-plain",
        "phase": "train",
        "layout": "nhwc",
    }
    return MeasurementJob(kind=JobKind.STEP, subject=LOOP_MODEL, family="loop", parameters=parameters)


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
