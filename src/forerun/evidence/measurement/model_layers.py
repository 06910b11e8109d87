"""The layers of a whole model in the terms of the layer benchmarks, as a sum of layers needs them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from forerun.base.errors import ForerunError
from forerun.question.model import ModelRequest
from forerun.tracing.models.meta_build import explain_failure
from forerun.tracing.models.sources import build_model

__all__ = ["ModelLayers", "model_layers"]

Parameters = dict[str, str | int | float | bool | None]

_ACTIVATIONS = {nn.ReLU: "relu", nn.Tanh: "tanh", nn.Sigmoid: "sigmoid", nn.GELU: "gelu"}

# Modules with no work or almost none: views, and dropout, which benchmarks leave out.
_FREE = (nn.Flatten, nn.Identity, nn.Dropout, nn.Sequential, nn.ModuleList)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLayers:
    """Layers of a model at one batch size.

    Attributes:
        layers: Kind and parameters of each call, in the order of the forward pass.
        left_out: Kinds of modules that no layer benchmark knows, each once.
    """

    layers: tuple[tuple[str, Parameters], ...]
    left_out: tuple[str, ...]


def model_layers(request: ModelRequest, batch_size: int) -> ModelLayers:
    """Runs the forward pass on the meta device and lists the modules that are called.

    An activation module counts to the layer before it, as in the benchmarks. Functions that are not modules (additions
    of residual connections, functional activations) are not seen.

    Raises:
        UsageError, ModelBuildError, TraceError: As in ``trace``.
    """
    built = build_model(
        request.model,
        image_size=request.image_size,
        input_shape=request.input_shape,
        sequence_length=request.sequence_length,
        num_classes=request.num_classes,
        training=True,
    )
    found: list[tuple[str, Parameters]] = []
    left_out: dict[str, None] = {}

    def note(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if type(module) in _ACTIVATIONS:
            if found and "activation" in found[-1][1]:
                found[-1][1]["activation"] = _ACTIVATIONS[type(module)]
        elif (rule := _RULES.get(type(module))) is not None:
            found.append(rule(module, inputs[0], output))
        elif not isinstance(module, _FREE):
            left_out[type(module).__name__] = None

    leaves = [module for module in built.module.modules() if not any(module.children())]
    handles = [module.register_forward_hook(note) for module in leaves]
    try:
        batch = built.make_batch(batch_size)
        with torch.device("meta"), torch.no_grad():
            built.module(*batch.get("args", ()), **batch.get("kwargs", {}))
    except ForerunError:
        raise
    except Exception as error:  # the user's model may raise anything
        raise explain_failure(error, built) from error
    finally:
        for handle in handles:
            handle.remove()
    return ModelLayers(layers=tuple(found), left_out=tuple(left_out))


def _one(value: Any) -> int:
    return int(value[0] if isinstance(value, tuple) else value)


def _convolution(module: nn.Conv2d, given: torch.Tensor, _: torch.Tensor) -> tuple[str, Parameters]:
    groups = module.groups
    is_depthwise = groups > 1 and groups == module.in_channels == module.out_channels
    kind = "depthwise_conv2d" if is_depthwise else "grouped_conv2d" if groups > 1 else "conv2d"
    return kind, {
        **_image(given),
        "out_features": module.out_channels,
        **_window(module),
        **({"groups": groups} if kind == "grouped_conv2d" else {}),
        "use_bias": module.bias is not None,
        "activation": "none",
    }


def _image(given: torch.Tensor) -> Parameters:
    return {"batch_size": given.shape[0], "in_features": given.shape[1], "in_size": given.shape[-1]}


def _window(module: Any) -> Parameters:
    kernel = _one(module.kernel_size)
    pads = module.padding if isinstance(module.padding, str) else "same" if _one(module.padding) else "valid"
    # A window of one pixel needs no padding; the benchmarks call that "same".
    return {"kernel": kernel, "stride": _one(module.stride), "padding": pads if kernel > 1 else "same"}


def _dense(module: nn.Linear, given: torch.Tensor, _: torch.Tensor) -> tuple[str, Parameters]:
    # Tokens are rows of the product like samples.
    return "dense", {
        "batch_size": given.numel() // given.shape[-1],
        "in_features": module.in_features,
        "out_features": module.out_features,
        "use_bias": module.bias is not None,
        "activation": "none",
    }


def _batch_norm(_: nn.Module, given: torch.Tensor, __: torch.Tensor) -> tuple[str, Parameters]:
    return "batch_norm", _image(given)


def _group_norm(module: nn.GroupNorm, given: torch.Tensor, _: torch.Tensor) -> tuple[str, Parameters]:
    return "group_norm", {**_image(given), "groups": module.num_groups}


def _pool(kind: str) -> Callable[..., tuple[str, Parameters]]:
    def rule(module: Any, given: torch.Tensor, _: torch.Tensor) -> tuple[str, Parameters]:
        return kind, {**_image(given), **_window(module)}

    return rule


_RULES: dict[type[nn.Module], Callable[..., tuple[str, Parameters]]] = {
    nn.Conv2d: _convolution,
    nn.Linear: _dense,
    nn.BatchNorm2d: _batch_norm,
    nn.GroupNorm: _group_norm,
    nn.MaxPool2d: _pool("max_pool"),
    nn.AvgPool2d: _pool("avg_pool"),
}
