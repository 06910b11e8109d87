"""Single layers as PyTorch modules, one call path for all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn
from torch.nn import functional

from forerun.base.errors import InvalidSetupError
from forerun.evidence.records.measured_run import flag_of, text_of, whole_of
from forerun.evidence.records.measurement import Scalar

__all__ = ["ACTIVATIONS", "build_layer", "copies_of"]

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
