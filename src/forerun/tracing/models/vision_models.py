"""Models of the libraries of vision: ``torchvision:resnet50`` and ``timm:convnext_tiny``."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional

from forerun.base.errors import (
    ForerunError,
    InvalidSetupError,
    TraceError,
    UnknownModelError,
    near_matches,
)
from forerun.base.extras import needing
from forerun.tracing.models.built_model import (
    BuiltModel,
    InputOptions,
    classification_loss,
    image_batch,
    sum_of_means,
)
from forerun.tracing.models.meta_build import build_on_meta, first_line, move_to_meta

# Weights of the auxiliary heads' losses. Their values do not change the cost of a step; that the heads run does:
# Szegedy et al. 2015 (section 5), the fine-tuning tutorial of PyTorch, torchvision references/segmentation.
_AUX_WEIGHT = {"googlenet": 0.3, "inception_v3": 0.4}
_SEGMENTATION_AUX_WEIGHT = 0.5

_SEGMENTATION_CROP = 480
"""Training crop of torchvision references/segmentation/presets.py."""

_CLIP_FRAMES = {"s3d": 64, "swin3d_t": 32, "swin3d_s": 32, "swin3d_b": 32}
"""Frames of a training clip; 16 for models that are not listed."""


def torchvision_names() -> list[str]:
    """Names that can be built: all of torchvision but quantized and detection models; none if it is missing."""
    try:
        from torchvision import models
    except ModuleNotFoundError:
        return []

    return [name for name in models.list_models() if _kind(name) not in ("quantization", "detection")]


def _kind(name: str) -> str:
    """``models``, ``segmentation``, ``video``, ``detection``, ``quantization`` or ``optical_flow``."""
    from torchvision import models

    package = models.get_model_builder(name).__module__.rpartition(".")[0]
    return str(package.rpartition(".")[2])


def build_torchvision(name: str, options: InputOptions) -> BuiltModel:
    """Builds a model of torchvision without weights.

    Args:
        name: Name as in ``torchvision.models.list_models()``.
        options: Options of inputs and head.

    Raises:
        UnknownModelError: There is no such model, or it is a quantized one.
        TraceError: The model is a detection model.
    """
    with needing(f"torchvision:{name}"):
        from torchvision import models

    if name not in models.list_models():
        raise UnknownModelError(
            f"torchvision has no model {name!r}{near_matches(name, torchvision_names())} "
            "(torchvision.models.list_models() lists them)"
        )
    kind = _kind(name)
    if kind == "quantization":
        raise UnknownModelError(
            f"torchvision:{name} is a quantized model for inference on CPUs; "
            f"use torchvision:{name.removeprefix('quantized_')}"
        )
    if kind == "detection":
        raise TraceError(
            f"torchvision:{name} is a detection model: how much work its heads do depends on the boxes "
            "found in the images, so its step has no fixed shape; predict its backbone instead"
        )
    options.refuse_sequence(f"torchvision:{name}")
    shape = options.image_shape(torchvision_input_shape(name))
    if shape[0] != 3:
        raise InvalidSetupError(f"torchvision:{name} takes 3 channels, got {shape[0]} (input_shape {shape})")
    arguments = _arguments(name, kind, shape, options)
    try:
        module: torch.nn.Module = build_on_meta(lambda: models.get_model(name, **arguments))
    except Exception as error:  # constructors refuse sizes with assertions and errors of many kinds
        raise InvalidSetupError(
            f"torchvision:{name} cannot be built for inputs of {shape}: {first_line(error)}"
        ) from error
    notes = ("the loss is the mean of the flow fields",) if kind == "optical_flow" else ()
    return BuiltModel(
        name=f"torchvision:{name}",
        module=move_to_meta(module).train(options.training),
        input_shape=shape,
        make_batch=_batch_maker(kind, shape),
        loss=_loss(name, kind),
        notes=notes,
        may_be_kept=True,
    )


def torchvision_input_shape(name: str) -> tuple[int, ...]:
    """Shape of a sample: the crop at which the first published weights were evaluated, else 224 pixels."""
    kind = _kind(name)
    if kind == "optical_flow":
        return (3, 368, 496)  # FlyingChairs crop of torchvision references/optical_flow
    if kind == "segmentation":
        return (3, _SEGMENTATION_CROP, _SEGMENTATION_CROP)
    size = _published_crop(name, "KINETICS400_V1" if kind == "video" else "IMAGENET1K_V1")
    if kind == "video":
        return (3, _CLIP_FRAMES.get(name, 16), size, size)
    return (3, size, size)


def _published_crop(name: str, weights_name: str) -> int:
    from torchvision import models

    weights = models.get_model_weights(name)
    if weights_name not in weights.__members__:
        return 224
    return int(weights[weights_name].transforms().crop_size[-1])


def _arguments(name: str, kind: str, shape: tuple[int, ...], options: InputOptions) -> dict[str, Any]:
    arguments: dict[str, Any] = {"weights": None}
    if options.num_classes is not None and kind != "optical_flow":
        arguments["num_classes"] = options.num_classes
    if kind == "segmentation":
        arguments["weights_backbone"] = None
        if not name.startswith("lraspp"):
            arguments["aux_loss"] = options.training
    # Random weights take seconds on the host and are thrown away: only shapes matter on meta.
    if name in _AUX_WEIGHT:
        arguments["init_weights"] = False
    if name.startswith("vit_"):
        arguments["image_size"] = _square(name, shape)
    if name.startswith("maxvit"):
        arguments["input_size"] = shape[-2:]
    if name.startswith("mvit") and shape != torchvision_input_shape(name):
        raise InvalidSetupError(
            f"torchvision:{name} takes clips of {torchvision_input_shape(name)} only, got {shape}"
        )
    if kind == "optical_flow":
        _check_raft(name, shape)
    return arguments


def _square(name: str, shape: tuple[int, ...]) -> int:
    if shape[-1] != shape[-2]:
        raise InvalidSetupError(f"torchvision:{name} takes square images, got {shape[-2]}x{shape[-1]}")
    return shape[-1]


def _check_raft(name: str, shape: tuple[int, ...]) -> None:
    if any(size % 8 or size < 128 for size in shape[-2:]):
        raise InvalidSetupError(
            f"torchvision:{name} takes images of at least 128 pixels a side, divisible by 8; "
            f"got {shape[-2]}x{shape[-1]}"
        )


def _batch_maker(kind: str, shape: tuple[int, ...]) -> Callable[[int], Mapping[str, Any]]:
    def make_batch(batch_size: int) -> Mapping[str, Any]:
        batch = image_batch(batch_size, shape)
        if kind == "optical_flow":
            batch["args"] = (batch["args"][0], torch.empty((batch_size, *shape), device="meta"))
            del batch["target"]
        if kind == "segmentation":
            batch["target"] = torch.empty((batch_size, *shape[-2:]), dtype=torch.int64, device="meta")
        return batch

    return make_batch


def _loss(name: str, kind: str) -> Callable[[Any, Mapping[str, Any]], torch.Tensor]:
    if kind == "optical_flow":
        return sum_of_means
    if kind == "segmentation":
        return _segmentation_loss
    if name not in _AUX_WEIGHT:
        return classification_loss
    weight = _AUX_WEIGHT[name]

    def with_auxiliary_heads(output: Any, batch: Mapping[str, Any]) -> torch.Tensor:
        if isinstance(output, torch.Tensor):
            return classification_loss(output, batch)
        total = classification_loss(output[0], batch)
        for logits in output[1:]:
            if logits is not None:
                total = total + weight * classification_loss(logits, batch)
        return total

    return with_auxiliary_heads


def _segmentation_loss(output: Mapping[str, torch.Tensor], batch: Mapping[str, Any]) -> torch.Tensor:
    target = batch["target"]
    total = functional.cross_entropy(output["out"], target, ignore_index=255)
    if "aux" in output:
        total = total + _SEGMENTATION_AUX_WEIGHT * functional.cross_entropy(
            output["aux"], target, ignore_index=255
        )
    return total


def timm_names() -> list[str]:
    """Names of timm's architectures; empty if timm is not installed."""
    try:
        import timm
    except ImportError:
        return []
    return [str(name) for name in timm.list_models()]


def build_timm(name: str, options: InputOptions) -> BuiltModel:
    """Builds a model of timm without weights, with the dropout rates of its constructor.

    The input size is that of the model's own configuration. A model whose layers depend on the image size is
    built for the user's image size.

    Args:
        name: Name of the architecture, with or without a tag of weights; old names are accepted.
        options: Options of inputs and head.
    """
    with needing(f"timm:{name}"):
        import timm
    if not timm.is_model(name):
        raise UnknownModelError(f"timm has no model {name!r}{near_matches(name, timm_names())}")
    options.refuse_sequence(f"timm:{name}")
    module = move_to_meta(_create(name, options)).train(options.training)
    shape = options.image_shape(timm_input_shape(module))
    return BuiltModel(
        name=f"timm:{name}",
        module=module,
        input_shape=shape,
        make_batch=lambda batch_size: image_batch(batch_size, shape),
        loss=classification_loss,
        may_be_kept=True,
    )


def timm_input_shape(module: torch.nn.Module) -> tuple[int, ...]:
    """The sample shape in the configuration timm attaches to its models."""
    config = getattr(module, "pretrained_cfg", None) or getattr(module, "default_cfg", None) or {}
    return tuple(config.get("input_size", (3, 224, 224)))


def _create(name: str, options: InputOptions) -> torch.nn.Module:
    arguments: dict[str, Any] = {}
    if options.num_classes is not None:
        arguments["num_classes"] = options.num_classes
    if options.image_size is None and options.input_shape is None:
        return _construct(name, arguments)
    shape = options.image_shape((3, 224, 224))
    if shape[0] != 3:
        arguments["in_chans"] = shape[0]
    try:
        return _construct(name, {**arguments, "img_size": shape[-2:]})
    except TypeError:  # most convolutional networks take any size, but no such argument
        return _construct(name, arguments)


def _construct(name: str, arguments: dict[str, Any]) -> torch.nn.Module:
    import timm

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old names warn, but are accepted
            module: torch.nn.Module = build_on_meta(
                lambda: timm.create_model(name, pretrained=False, **arguments)
            )
    except (TypeError, ForerunError):
        raise
    except Exception as error:  # constructors refuse sizes with assertions and errors of many kinds
        chosen = ", ".join(f"{key}={value}" for key, value in arguments.items()) or "its own settings"
        raise InvalidSetupError(f"timm:{name} cannot be built with {chosen}: {first_line(error)}") from error
    return module
