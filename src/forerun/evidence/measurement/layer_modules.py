"""Single layers as PyTorch modules, and the layers of a whole model in the terms of the layer benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from forerun.base.errors import ForerunError, InvalidSetupError
from forerun.evidence.records.measured_run import flag_of, text_of, whole_of
from forerun.evidence.records.measurement import Scalar
from forerun.question.model import ModelRequest
from forerun.tracing.models.meta_build import explain_failure
from forerun.tracing.models.sources import build_model

Parameters = Mapping[str, Scalar]

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "gelu": nn.GELU,
}


class _SelfAttention(nn.Module):
    """Self-attention of one layer of a transformer; input and output are (batch, tokens, width)."""

    def __init__(self, width: int, num_heads: int, use_bias: bool) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.inputs = nn.Linear(width, 3 * width, bias=use_bias)
        self.output = nn.Linear(width, width, bias=use_bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        parts = self.inputs(x).view(batch, tokens, 3, self.num_heads, width // self.num_heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value)
        found: torch.Tensor = self.output(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return found


class _Lstm(nn.Module):
    """Outputs of one recurrent layer: (batch, tokens, width) to (batch, tokens, hidden)."""

    def __init__(self, width: int, hidden: int, use_bias: bool) -> None:
        super().__init__()
        self.layer = nn.LSTM(width, hidden, bias=use_bias, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(x)[0]
        return found


def build_layer(kind: str, parameters: Parameters) -> nn.Module:
    """The layer followed by its activation; the container is present without an activation too.

    Args:
        kind: Kind of layer, one of ``figures.LAYER_KINDS``.
        parameters: Sizes of the layer; ``activation`` is none, relu, tanh, sigmoid or gelu.
    """
    activation = text_of(parameters, "activation", "none")
    if activation != "none" and activation not in ACTIVATIONS:
        raise InvalidSetupError(f"unknown activation '{activation}'; expected none, {', '.join(ACTIVATIONS)}")
    layers = [_LAYERS[kind](parameters)]
    if activation != "none":
        layers.append(ACTIVATIONS[activation]())
    return nn.Sequential(*layers)


class _Copies(nn.Module):
    """Equal layers side by side, each with one input and one output."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        return [layer(given) for layer, given in zip(self.layers, inputs, strict=True)]


def copies_of(make: Callable[[], nn.Module], num_copies: int) -> nn.Module:
    """A module of equal layers, each with its own weights, that takes one input per layer.

    Args:
        make: Function that makes one layer.
        num_copies: Number of layers.
    """
    return _Copies([make() for _ in range(num_copies)])


def _convolution(parameters: Parameters, *, is_depthwise: bool = False) -> nn.Module:
    channels, kernel = whole_of(parameters, "in_features"), whole_of(parameters, "kernel")
    return nn.Conv2d(
        channels,
        channels if is_depthwise else whole_of(parameters, "out_features"),
        kernel,
        stride=whole_of(parameters, "stride", 1),
        padding=_pads(parameters, kernel),
        groups=channels if is_depthwise else whole_of(parameters, "groups", 1),
        bias=flag_of(parameters, "use_bias"),
    )


def _pads(parameters: Parameters, kernel: int) -> int:
    return kernel // 2 if text_of(parameters, "padding", "same") == "same" else 0


def _pool(parameters: Parameters, maker: Callable[..., nn.Module]) -> nn.Module:
    kernel = whole_of(parameters, "kernel")
    return maker(kernel, stride=whole_of(parameters, "stride", 1), padding=_pads(parameters, kernel))


def _width(parameters: Parameters) -> int:
    return whole_of(parameters, "in_features")


_LAYERS: dict[str, Callable[[Parameters], nn.Module]] = {
    "conv2d": _convolution,
    "grouped_conv2d": _convolution,
    "depthwise_conv2d": lambda p: _convolution(p, is_depthwise=True),
    "dense": lambda p: nn.Linear(_width(p), whole_of(p, "out_features"), bias=flag_of(p, "use_bias")),
    "batch_norm": lambda p: nn.BatchNorm2d(_width(p)),
    "group_norm": lambda p: nn.GroupNorm(whole_of(p, "groups", 1), _width(p)),
    "layer_norm": lambda p: nn.LayerNorm(_width(p)),
    "max_pool": lambda p: _pool(p, nn.MaxPool2d),
    "avg_pool": lambda p: _pool(p, nn.AvgPool2d),
    "attention": lambda p: _SelfAttention(_width(p), whole_of(p, "num_heads"), flag_of(p, "use_bias")),
    "lstm": lambda p: _Lstm(_width(p), whole_of(p, "out_features"), flag_of(p, "use_bias")),
    "null": lambda p: nn.Identity(),
}


_NAMES_OF_ACTIVATIONS = {module: name for name, module in ACTIVATIONS.items()}

# Modules with no work or almost none: views, and dropout, which benchmarks leave out.
_FREE = (nn.Flatten, nn.Identity, nn.Dropout, nn.Sequential, nn.ModuleList)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLayers:
    """Layers of a model at one batch size.

    Attributes:
        layers: Kind and parameters of each call, in the order of the forward pass.
        left_out: Kinds of modules that no layer benchmark knows, each once.
    """

    layers: tuple[tuple[str, dict[str, Scalar]], ...]
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
    found: list[tuple[str, dict[str, Scalar]]] = []
    left_out: dict[str, None] = {}

    def note(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if type(module) in _NAMES_OF_ACTIVATIONS:
            # An activation of its own belongs to the layer before it, as Keras writes networks.
            if found and "activation" in found[-1][1]:
                found[-1][1]["activation"] = _NAMES_OF_ACTIVATIONS[type(module)]
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


def _convolution_of(module: nn.Conv2d, given: torch.Tensor, _: torch.Tensor) -> tuple[str, dict[str, Scalar]]:
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


def _image(given: torch.Tensor) -> dict[str, Scalar]:
    return {"batch_size": given.shape[0], "in_features": given.shape[1], "in_size": given.shape[-1]}


def _window(module: Any) -> dict[str, Scalar]:
    kernel = _one(module.kernel_size)
    pads = module.padding if isinstance(module.padding, str) else "same" if _one(module.padding) else "valid"
    # A window of one pixel needs no padding; the benchmarks call that "same".
    return {"kernel": kernel, "stride": _one(module.stride), "padding": pads if kernel > 1 else "same"}


def _dense_of(module: nn.Linear, given: torch.Tensor, _: torch.Tensor) -> tuple[str, dict[str, Scalar]]:
    # Tokens are rows of the product like samples.
    return "dense", {
        "batch_size": given.numel() // given.shape[-1],
        "in_features": module.in_features,
        "out_features": module.out_features,
        "use_bias": module.bias is not None,
        "activation": "none",
    }


def _batch_norm(_: nn.Module, given: torch.Tensor, __: torch.Tensor) -> tuple[str, dict[str, Scalar]]:
    return "batch_norm", _image(given)


def _group_norm(module: nn.GroupNorm, given: torch.Tensor, _: torch.Tensor) -> tuple[str, dict[str, Scalar]]:
    return "group_norm", {**_image(given), "groups": module.num_groups}


def _pool_of(kind: str) -> Callable[..., tuple[str, dict[str, Scalar]]]:
    def rule(module: Any, given: torch.Tensor, _: torch.Tensor) -> tuple[str, dict[str, Scalar]]:
        return kind, {**_image(given), **_window(module)}

    return rule


_RULES: dict[type[nn.Module], Callable[..., tuple[str, dict[str, Scalar]]]] = {
    nn.Conv2d: _convolution_of,
    nn.Linear: _dense_of,
    nn.BatchNorm2d: _batch_norm,
    nn.GroupNorm: _group_norm,
    nn.MaxPool2d: _pool_of("max_pool"),
    nn.AvgPool2d: _pool_of("avg_pool"),
}
