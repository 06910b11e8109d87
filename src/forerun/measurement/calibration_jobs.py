"""Jobs of a calibration: layers that fill the space of sizes, and whole models unlike each other.

Layers give the speed of each kind of operation over its sizes; whole models give the cost of a step beside its layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from forerun.measurement.jobs import MeasurementJob
from forerun.measurement.layers.design import LayerDesign, design_layers
from forerun.records.importers.model_names import subject_family
from forerun.records.measurement import JobKind, Scalar

__all__ = [
    "CALIBRATION_MODELS",
    "KERAS_CALIBRATION_MODELS",
    "LOOP_MODEL",
    "calibration_layers",
    "calibration_models",
    "loop_job",
]

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
