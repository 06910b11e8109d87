"""Models of timm: ``timm:convnext_tiny``."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from forerun.base.errors import (
    ForerunError,
    InvalidSetupError,
    MissingExtraError,
    UnknownModelError,
    near_matches,
)
from forerun.tracing.failures import first_line
from forerun.tracing.models.built_model import BuiltModel, InputOptions
from forerun.tracing.models.losses import classification_loss, image_batch
from forerun.tracing.models.meta_build import build_on_meta, move_to_meta

__all__ = ["build_timm", "timm_input_shape", "timm_names"]


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
    try:
        import timm
    except ImportError as error:
        raise MissingExtraError(f"timm:{name}", "timm") from error
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
        cache_key=f"timm {name} {options.key()}",
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
