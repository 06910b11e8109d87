"""One layer of Keras alone on TensorFlow: its forward pass, or a training step of it, each a compiled graph.

The step and the parameters of the job are those of ``layer_runner``: forward, backward from a gradient of the
output to gradients of the weights and of the input, update. One call runs one graph (``tf.function``, eager off);
without XLA unless the job is compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from forerun.adapters.keras.measurement.tensorflow_device import (
    KerasPeakMemory,
    keras_optimizer,
    open_tensorflow,
    set_keras_defaults,
    tensorflow_synchroniser,
)
from forerun.base.errors import InvalidSetupError
from forerun.evidence.measurement.jobs import MeasurementJob, Protocol, RunResult
from forerun.evidence.measurement.runners.layer_runner import MODES
from forerun.evidence.measurement.runners.step_runner import time_first_and_rest
from forerun.evidence.records.measured_run import flag_of, setup_of, text_of, whole_of
from forerun.question.setup import TrainingSetup

__all__ = ["run_keras_layer"]

_LEARNING_RATE = 1e-4
_FLOAT_BYTES = 4


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
    from forerun.adapters.keras.measurement.layers import build_keras_layer

    layer = build_keras_layer(job.subject, job.parameters)
    num_parameters = int(layer.count_params())
    memory = KerasPeakMemory(device, _FLOAT_BYTES * num_parameters)
    given = _input(layer, whole_of(job.parameters, "batch_size", 1))
    if mode == "forward":
        step = _forward_step(layer, given, setup.compile)
    else:
        step = _train_step(layer, given, setup, flag_of(job.parameters, "input_gradient", True))
    timed, first = time_first_and_rest(
        step, tensorflow_synchroniser(device), protocol, is_compiled=setup.compile
    )
    return RunResult(
        repetitions_s=timed.repetitions_s,
        warm_up_s=timed.warm_up_s,
        is_stationary=timed.is_stationary,
        results={"num_parameters": num_parameters, **first, **memory.figures()},
    )


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
        optimizer = keras_optimizer(setup, _LEARNING_RATE)
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
