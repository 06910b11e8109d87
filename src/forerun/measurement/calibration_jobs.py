"""What a calibration measures: layers that fill the space of sizes, and whole models unlike each other.

Layers say how fast each kind of operation is, over its sizes; whole models say what a step costs beside its layers.
"""

from __future__ import annotations

from collections.abc import Sequence

from forerun.measurement.jobs import Job
from forerun.measurement.layer_design import LayerDesign, design_layers
from forerun.records.measurement import JobKind, Scalar
from forerun.records.model_names import subject_family

__all__ = ["CALIBRATION_MODELS", "calibration_layers", "calibration_models"]

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
"""Model, image size [pixels] and batch size, in the order of their use: each next one unlike those before it."""

_WORK_OF_GPU = 100.0
"""A GPU takes layers of so many times the work for the same time."""


def calibration_layers(num_layers: int, *, is_gpu: bool, precision: str, seed: int = 0) -> list[Job]:
    """Layers to measure, in an order in which any first part fills the space as well."""
    factor = _WORK_OF_GPU if is_gpu else 1.0
    design = LayerDesign(
        num_layers=num_layers,
        optimizers=("none", "sgd-plain", "momentum", "adam"),
        precision=precision,
        max_flops=1.5e9 * factor,
        max_bytes=1.5e8 * factor,
        seed=seed,
        with_null=False,
    )
    return design_layers(design)


def calibration_models(*, is_gpu: bool, precision: str) -> list[Job]:
    """Training steps of whole models; on a GPU at images and batches that keep it busy."""
    jobs = []
    for model, image_size, batch_size in CALIBRATION_MODELS:
        parameters: dict[str, Scalar] = {
            "batch_size": batch_size * (16 if is_gpu else 1),
            "image_size": max(image_size, 128) if is_gpu and image_size > 32 else image_size,
            "precision": precision,
            "optimizer": "sgd",
            "phase": "train",
        }
        jobs.append(
            Job(kind=JobKind.STEP, subject=model, family=subject_family(model), parameters=parameters)
        )
    return jobs
