"""Single layers of Keras by the names and sizes of ``layer_figures``, on any backend of Keras.

A layer is equal in both frameworks if its figures agree: ``same`` with an even window is left out, because Keras
then pads less than PyTorch networks do and the output is one pixel smaller.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import keras

from forerun.adapters.keras.networks import channels_axis
from forerun.base.errors import InvalidSetupError
from forerun.evidence.measurement.layer_figures import layer_figures
from forerun.evidence.records.measured_run import flag_of, text_of, whole_of
from forerun.evidence.records.measurement import Scalar

__all__ = ["build_keras_layer"]

Parameters = Mapping[str, Scalar]
_ACTIVATIONS = ("relu", "tanh", "sigmoid", "gelu")


def build_keras_layer(kind: str, parameters: Parameters) -> Any:
    """The layer followed by its activation, as a ``keras.Model`` in the present image format and dtype policy.

    Args:
        kind: Kind of layer, one of ``figures.LAYER_KINDS``.
        parameters: Sizes of the layer; ``activation`` is none, relu, tanh, sigmoid or gelu.

    Raises:
        InvalidSetupError: There is no such kind or activation, or Keras makes another layer of these sizes.
    """
    figures = layer_figures(kind, parameters)
    activation = text_of(parameters, "activation", "none")
    if activation != "none" and activation not in _ACTIVATIONS:
        raise InvalidSetupError(
            f"unknown activation '{activation}'; expected none, {', '.join(_ACTIVATIONS)}"
        )
    given = keras.Input(_ordered(figures.input_shape[1:]))
    output = _LAYERS[kind](parameters)(given)
    if tuple(output.shape[1:]) != _ordered(figures.output_shape[1:]):
        raise InvalidSetupError(
            f"expected a layer {kind} with an output of {figures.output_shape[1:]}, Keras makes "
            f"{tuple(output.shape[1:])} of it; choose an odd kernel, or padding 'valid'"
        )
    if activation != "none":
        output = keras.layers.Activation(activation)(output)
    return keras.Model(given, output, name=f"layer_{kind}")


def _ordered(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape (channels, height, width) in the present image format; others as they are."""
    return (*shape[1:], shape[0]) if len(shape) == 3 and channels_axis() == -1 else shape


def _window(parameters: Parameters) -> dict[str, Any]:
    return {"strides": whole_of(parameters, "stride", 1), "padding": text_of(parameters, "padding", "same")}


def _convolution(parameters: Parameters) -> Any:
    return keras.layers.Conv2D(
        whole_of(parameters, "out_features"),
        whole_of(parameters, "kernel"),
        **_window(parameters),
        groups=whole_of(parameters, "groups", 1),
        use_bias=flag_of(parameters, "use_bias"),
    )


def _depthwise(parameters: Parameters) -> Any:
    return keras.layers.DepthwiseConv2D(
        whole_of(parameters, "kernel"), **_window(parameters), use_bias=flag_of(parameters, "use_bias")
    )


def _dense(parameters: Parameters) -> Any:
    return keras.layers.Dense(whole_of(parameters, "out_features"), use_bias=flag_of(parameters, "use_bias"))


def _attention(parameters: Parameters) -> Any:
    heads, width = whole_of(parameters, "num_heads"), whole_of(parameters, "in_features")
    layer = keras.layers.MultiHeadAttention(heads, width // heads, use_bias=flag_of(parameters, "use_bias"))
    return lambda given: layer(given, given)


def _lstm(parameters: Parameters) -> Any:
    return keras.layers.LSTM(
        whole_of(parameters, "out_features"),
        use_bias=flag_of(parameters, "use_bias"),
        return_sequences=True,
    )


_LAYERS: dict[str, Callable[[Parameters], Any]] = {
    "conv2d": _convolution,
    "grouped_conv2d": _convolution,
    "depthwise_conv2d": _depthwise,
    "dense": _dense,
    "batch_norm": lambda p: keras.layers.BatchNormalization(channels_axis()),
    "group_norm": lambda p: keras.layers.GroupNormalization(whole_of(p, "groups", 1), channels_axis()),
    "layer_norm": lambda p: keras.layers.LayerNormalization(),
    "max_pool": lambda p: keras.layers.MaxPooling2D(whole_of(p, "kernel"), **_window(p)),
    "avg_pool": lambda p: keras.layers.AveragePooling2D(whole_of(p, "kernel"), **_window(p)),
    "attention": _attention,
    "lstm": _lstm,
    "null": lambda p: keras.layers.Identity(),
}
