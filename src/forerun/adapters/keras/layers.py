"""Single layers of Keras by the names and sizes of ``layer_figures``, on any backend of Keras.

A layer is equal in both frameworks if its figures agree: ``same`` with an even window is left out, because Keras
then pads less than PyTorch networks do and the output is one pixel smaller.

A measured layer is a compiled graph on TensorFlow (``tf.function``): its forward pass, or a training step of it as that
of ``runners.step_runner``: forward, backward from a gradient of the output to gradients of the weights and of the
input, update; without XLA unless the job is compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import keras

from forerun.adapters.keras.networks import channels_axis, in_present_format
from forerun.adapters.keras.runner import (
    LEARNING_RATE,
    KerasPeakMemory,
    keras_optimizer,
    open_tensorflow,
    set_keras_defaults,
    tensorflow_synchroniser,
)
from forerun.base.errors import InvalidSetupError
from forerun.evidence.measurement.jobs import MeasurementJob, Protocol, RunResult
from forerun.evidence.measurement.layer_figures import layer_figures
from forerun.evidence.measurement.runners.step_runner import MODES, time_first_and_rest
from forerun.evidence.records.measured_run import flag_of, setup_of, text_of, whole_of
from forerun.evidence.records.measurement import Scalar
from forerun.question.setup import TrainingSetup

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
    given = keras.Input(in_present_format(figures.input_shape[1:]))
    output = _LAYERS[kind](parameters)(given)
    if tuple(output.shape[1:]) != in_present_format(figures.output_shape[1:]):
        raise InvalidSetupError(
            f"expected a layer {kind} with an output of {figures.output_shape[1:]}, Keras makes "
            f"{tuple(output.shape[1:])} of it; choose an odd kernel, or padding 'valid'"
        )
    if activation != "none":
        output = keras.layers.Activation(activation)(output)
    return keras.Model(given, output, name=f"layer_{kind}")


def _window(parameters: Parameters) -> dict[str, Any]:
    return {"strides": whole_of(parameters, "stride", 1), "padding": text_of(parameters, "padding", "same")}


def _convolution(parameters: Parameters) -> Any:
    return keras.layers.Conv2D(
        whole_of(parameters, "out_features"),
        whole_of(parameters, "kernel"),
        **_window(parameters),
        groups=whole_of(parameters, "groups", 1),
        **_biased(parameters),
    )


def _biased(parameters: Parameters) -> dict[str, Any]:
    return {"use_bias": flag_of(parameters, "use_bias")}


def _attention(parameters: Parameters) -> Any:
    heads, width = whole_of(parameters, "num_heads"), whole_of(parameters, "in_features")
    layer = keras.layers.MultiHeadAttention(heads, width // heads, **_biased(parameters))
    return lambda given: layer(given, given)


_LAYERS: dict[str, Callable[[Parameters], Any]] = {
    "conv2d": _convolution,
    "grouped_conv2d": _convolution,
    "depthwise_conv2d": lambda p: keras.layers.DepthwiseConv2D(
        whole_of(p, "kernel"), **_window(p), **_biased(p)
    ),
    "dense": lambda p: keras.layers.Dense(whole_of(p, "out_features"), **_biased(p)),
    "batch_norm": lambda p: keras.layers.BatchNormalization(channels_axis()),
    "group_norm": lambda p: keras.layers.GroupNormalization(whole_of(p, "groups", 1), channels_axis()),
    "layer_norm": lambda p: keras.layers.LayerNormalization(),
    "max_pool": lambda p: keras.layers.MaxPooling2D(whole_of(p, "kernel"), **_window(p)),
    "avg_pool": lambda p: keras.layers.AveragePooling2D(whole_of(p, "kernel"), **_window(p)),
    "attention": _attention,
    "lstm": lambda p: keras.layers.LSTM(whole_of(p, "out_features"), **_biased(p), return_sequences=True),
    "null": lambda p: keras.layers.Identity(),
}


def run_keras_layer(job: MeasurementJob, device_index: str, protocol: Protocol) -> RunResult:
    """Times a layer; results are num_parameters, first_step_s and the peak memory.

    Raises:
        InvalidSetupError: Keras does not have this mode, optimizer or layer.
    """
    mode = text_of(job.parameters, "mode", "forward")
    if mode not in MODES:
        raise InvalidSetupError(f"unknown mode '{mode}' of a layer; expected {' or '.join(MODES)}")
    if whole_of(job.parameters, "copies", 1) != 1:
        raise InvalidSetupError("copies of a layer are measured with PyTorch only; leave copies out")
    setup = setup_of(job.parameters)
    device = open_tensorflow(device_index, protocol)[0]
    set_keras_defaults(setup, whole_of(job.parameters, "seed", 0))
    layer = build_keras_layer(job.subject, job.parameters)
    num_parameters = int(layer.count_params())
    memory = KerasPeakMemory(device, num_parameters)
    given = _input(layer, whole_of(job.parameters, "batch_size", 1))
    if mode == "forward":
        step = _forward_step(layer, given, setup.compile)
    else:
        step = _train_step(layer, given, setup, flag_of(job.parameters, "input_gradient", True))
    timed, first = time_first_and_rest(
        step, tensorflow_synchroniser(device), protocol, is_compiled=setup.compile
    )
    return timed.with_results(num_parameters=num_parameters, **first, **memory.figures())


def _input(layer: Any, batch_size: int) -> Any:
    import tensorflow as tf

    values = tf.random.normal((batch_size, *layer.input_shape[1:]))
    return tf.cast(values, layer.compute_dtype)


def _forward_step(layer: Any, given: Any, is_compiled: bool) -> Callable[[], None]:
    import tensorflow as tf

    # The input is an argument: a constant of the graph could be computed once and for all.
    forward = tf.function(lambda values: layer(values, training=False), jit_compile=is_compiled)

    def step() -> None:
        forward(given)

    return step


def _train_step(layer: Any, given: Any, setup: TrainingSetup, has_input_gradient: bool) -> Callable[[], None]:
    import tensorflow as tf

    weights = layer.trainable_variables
    optimizer = None
    if setup.optimizer != "none" and weights:
        optimizer = keras_optimizer(setup, LEARNING_RATE)
        optimizer.build(weights)
    output_gradient = tf.random.normal(tf.shape(layer(given)), dtype=tf.float32)

    @tf.function(jit_compile=setup.compile)  # type: ignore[untyped-decorator]  # TensorFlow is not typed
    def train(values: Any, gradient: Any) -> Any:
        with tf.GradientTape() as tape:
            if has_input_gradient:
                tape.watch(values)
            output = layer(values, training=True)
        sources = [*weights, values] if has_input_gradient else [*weights]
        gradients = tape.gradient(output, sources, output_gradients=tf.cast(gradient, output.dtype))
        if optimizer is not None:
            optimizer.apply(gradients[: len(weights)], weights)
            return gradients[len(weights) :]
        return gradients  # a returned value must be computed

    def step() -> None:
        train(given, output_gradient)

    return step
