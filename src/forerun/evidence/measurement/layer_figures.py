"""Work, traffic and shapes of single layers in closed form, without a framework.

Parameters have the names of the public layer tables (Justus et al. 2018): ``batch_size``, ``in_size`` [pixels,
square], ``in_features`` and ``out_features`` (channels of images), ``kernel``, ``stride``, ``padding``, ``use_bias``;
beside them ``groups``, ``sequence_length`` and ``num_heads``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

from forerun.base.errors import InvalidSetupError, near_matches
from forerun.evidence.records.measured_run import Parameters, flag_of, text_of, whole_of

_NORM_FLOPS = 8  # per element: mean, variance, difference, product with the scale, sum with the shift
_SOFTMAX_FLOPS = 5  # per element: maximum, difference, exponential, sum, quotient
_LSTM_GATE_FLOPS = 9  # per element of the state, beside the products


@dataclass(frozen=True, slots=True)
class LayerFigures:
    """Figures of one layer, known before it is run.

    Attributes:
        input_shape, output_shape: Shapes of input and output, batch axis first.
        num_parameters: Number of parameters.
        flops: Work of the forward pass, a multiply-add is two; without the activation [FLOP].
    """

    input_shape: tuple[int, ...]
    output_shape: tuple[int, ...]
    num_parameters: int
    flops: float

    @property
    def num_inputs(self) -> int:
        """Number of elements of the input."""
        return prod(self.input_shape)

    @property
    def num_outputs(self) -> int:
        """Number of elements of the output."""
        return prod(self.output_shape)


def output_size(in_size: int, kernel: int, stride: int, padding: str) -> int:
    """Height and width after a window has moved over an image; zero or less if it does not fit.

    ``same`` pads kernel // 2 on both sides, as PyTorch networks do, ``valid`` nothing.
    """
    pads = 2 * (kernel // 2) if padding == "same" else 0
    return (in_size + pads - kernel) // stride + 1


def layer_figures(kind: str, parameters: Parameters) -> LayerFigures:
    """Figures of a layer.

    Raises:
        InvalidSetupError: There is no such kind, a size is missing, or sizes contradict each other.
    """
    if kind not in _RULES:
        raise InvalidSetupError(
            f"unknown layer '{kind}'{near_matches(kind, _RULES)}; expected one of {', '.join(_RULES)}"
        )
    figures = LayerFigures(*_RULES[kind](parameters))
    if min(*figures.input_shape, *figures.output_shape) < 1:
        raise InvalidSetupError(
            f"a layer {kind} of these sizes has no output: {dict(parameters)}; give a larger in_size, a smaller "
            "kernel, or padding 'same'"
        )
    return figures


_Figures = tuple[tuple[int, ...], tuple[int, ...], int, float]
"""Shapes of input and output, number of parameters and work: the fields of ``LayerFigures``."""


def _sizes(parameters: Parameters, *names: str) -> list[int]:
    return [whole_of(parameters, name) for name in names]


def _window(parameters: Parameters, in_size: int) -> tuple[int, int]:
    """Kernel and output size; a kernel larger than the padded image gives size 0."""
    kernel, stride = whole_of(parameters, "kernel"), whole_of(parameters, "stride", 1)
    return kernel, output_size(in_size, kernel, stride, text_of(parameters, "padding", "same"))


def _check_divided(parameters: Parameters, by: int, what: str, *names: str) -> None:
    sizes = _sizes(parameters, *names)
    if any(size % by for size in sizes):
        raise InvalidSetupError(
            f"expected {' and '.join(names)} that {by} {what} divide, got {' and '.join(map(str, sizes))}"
        )


def _grouped(parameters: Parameters) -> _Figures:
    batch, channels, filters, size = _sizes(
        parameters, "batch_size", "in_features", "out_features", "in_size"
    )
    groups = whole_of(parameters, "groups", 1)
    _check_divided(parameters, groups, "groups", "in_features", "out_features")
    kernel, out_size = _window(parameters, size)
    weights_per_filter = channels // groups * kernel**2
    num_parameters = filters * (weights_per_filter + flag_of(parameters, "use_bias"))
    flops = 2.0 * batch * filters * max(0, out_size) ** 2 * weights_per_filter
    return (batch, channels, size, size), (batch, filters, out_size, out_size), num_parameters, flops


def _depthwise(parameters: Parameters) -> _Figures:
    channels = whole_of(parameters, "in_features")
    return _grouped({**parameters, "groups": channels, "out_features": channels})


def _dense(parameters: Parameters) -> _Figures:
    batch, inputs, outputs = _sizes(parameters, "batch_size", "in_features", "out_features")
    num_parameters = outputs * (inputs + flag_of(parameters, "use_bias"))
    return (batch, inputs), (batch, outputs), num_parameters, 2.0 * batch * inputs * outputs


def _batch_norm(parameters: Parameters) -> _Figures:
    return _group_norm({**parameters, "groups": whole_of(parameters, "in_features")})


def _group_norm(parameters: Parameters) -> _Figures:
    batch, channels, size = _sizes(parameters, "batch_size", "in_features", "in_size")
    groups = whole_of(parameters, "groups", 1)
    _check_divided(parameters, groups, "groups", "in_features")
    if batch * channels // groups * size**2 < 2:
        raise InvalidSetupError(
            "expected more than one value to normalise over, got one pixel of one sample; give a larger batch_size "
            "or in_size"
        )
    return _norm((batch, channels, size, size), channels)


def _layer_norm(parameters: Parameters) -> _Figures:
    batch, tokens, width = _sizes(parameters, "batch_size", "sequence_length", "in_features")
    return _norm((batch, tokens, width), width)


def _norm(shape: tuple[int, ...], num_features: int) -> _Figures:
    """Every norm has a scale and a shift for each feature."""
    return shape, shape, 2 * num_features, float(_NORM_FLOPS * prod(shape))


def _pool(parameters: Parameters) -> _Figures:
    batch, channels, size = _sizes(parameters, "batch_size", "in_features", "in_size")
    kernel, out_size = _window(parameters, size)
    flops = float(kernel**2 * batch * channels * max(0, out_size) ** 2)
    return (batch, channels, size, size), (batch, channels, out_size, out_size), 0, flops


def _attention(parameters: Parameters) -> _Figures:
    """Products with the input and output weights, two products of tokens with tokens, softmax."""
    batch, tokens, width, heads = _sizes(
        parameters, "batch_size", "sequence_length", "in_features", "num_heads"
    )
    _check_divided(parameters, heads, "heads", "in_features")
    products = 8.0 * batch * tokens * width**2 + 4.0 * batch * tokens**2 * width
    num_parameters = 4 * width * (width + flag_of(parameters, "use_bias"))
    shape = (batch, tokens, width)
    return shape, shape, num_parameters, products + _SOFTMAX_FLOPS * batch * heads * tokens**2


def _lstm(parameters: Parameters) -> _Figures:
    batch, tokens, width, hidden = _sizes(
        parameters, "batch_size", "sequence_length", "in_features", "out_features"
    )
    num_parameters = 4 * hidden * (width + hidden + 2 * flag_of(parameters, "use_bias"))
    flops = batch * tokens * (8.0 * hidden * (width + hidden) + _LSTM_GATE_FLOPS * hidden)
    return (batch, tokens, width), (batch, tokens, hidden), num_parameters, flops


def _null(parameters: Parameters) -> _Figures:
    shape = (whole_of(parameters, "batch_size", 1), whole_of(parameters, "in_features", 1))
    return shape, shape, 0, 0.0


_RULES: dict[str, Callable[[Parameters], _Figures]] = {
    "conv2d": _grouped,
    "grouped_conv2d": _grouped,
    "depthwise_conv2d": _depthwise,
    "dense": _dense,
    "batch_norm": _batch_norm,
    "group_norm": _group_norm,
    "layer_norm": _layer_norm,
    "max_pool": _pool,
    "avg_pool": _pool,
    "attention": _attention,
    "lstm": _lstm,
    "null": _null,
}

LAYER_KINDS = tuple(_RULES)
"""Every kind of layer; ``null`` passes its input on and shows the cost of a call."""
