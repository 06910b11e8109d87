"""Records the steps of a built Keras model under fake tensors, on PyTorch's backend of Keras.

The step is TensorFlow's: images stay in the model's own format, because kernels of TensorFlow take either; the
permutations and copies that the PyTorch backend makes for its kernels are left out. Batch norm is moments and
element-wise operations, as Keras 3 computes it on every backend, and one kernel where XLA compiles the step.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from importlib import metadata
from typing import Any

import keras
import torch
from keras.src.backend.torch import random as keras_random
from keras.src.layers.layer import Layer
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from forerun.adapters.keras.build import KerasModel
from forerun.base.errors import ForerunError
from forerun.graph.affine import graph_for
from forerun.graph.graph import Graph, StepPart, at_batch
from forerun.question.setup import Layout, OptimizerImplementation, Phase, Precision, TrainingSetup
from forerun.tracing.models.built_model import BuiltModel, inferred_loss
from forerun.tracing.models.meta_build import explain_failure
from forerun.tracing.optimizers import fuse_optimizer
from forerun.tracing.recorder import RecordedRow, StepRecorder
from forerun.tracing.step import RawTrace, record_step
from forerun.tracing.step_graph import step_graph

_STATISTICS = ("moving_mean", "moving_variance")


def trace_built_keras(found: KerasModel, setup: TrainingSetup) -> Graph:
    """The graph of one step of a built Keras model.

    Args:
        found: The model; its variables become fake tensors.
        setup: Training configuration. ``compile`` stands for XLA (``jit_compile=True``), a fused optimizer for one
            kernel per variable, as Keras 2 updates; Keras 3 has one per operation of the optimizer's formula.

    Raises:
        InvalidSetupError, ModelBuildError, TraceError: As in ``failures.explain_failure``.
    """
    # Seeds are values, which fake tensors do not have.
    keras_random.torch_seed_generator = lambda seed: torch.Generator()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    num_norms = _fuse_batch_norms(found.model) if setup.compile else len(_batch_norms(found.model))
    # Precision and layout are in the model already; a variable's update is a separate operation in TensorFlow.
    update = OptimizerImplementation.FOREACH if setup.compile else OptimizerImplementation.FOR_LOOP
    plain = replace(setup, precision=Precision.FP32, layout=Layout.NCHW, optimizer_implementation=update)
    with mode:
        built = _built(found, mode, training=setup.phase is not Phase.INFERENCE)
        try:
            graph = _traced(built, found.model, plain)
        except ForerunError:
            raise
        except Exception as error:  # the user's model may raise anything
            raise explain_failure(error, built) from error
    if setup.compile:
        graph = fuse_optimizer(graph)
    elif setup.optimizer_implementation is OptimizerImplementation.FUSED:
        graph = fuse_optimizer(graph, len(found.model.trainable_variables))
    return replace(graph, notes=(*graph.notes, *_notes(graph, setup, num_norms, found.model)))


class _Network(torch.nn.Module):
    """A Keras model as a module: its weights as parameters, its statistics as buffers."""

    def __init__(self, model: Any, mode: FakeTensorMode) -> None:
        super().__init__()
        self._model = [model]  # in a list, so that the model is not a submodule
        for index, variable in enumerate(model.variables):
            value = variable._value
            # Counters and seeds of layers are no weights, and have no gradient.
            if not value.is_floating_point():
                continue
            fake = mode.from_tensor(value.detach())
            is_statistic = variable.name in _STATISTICS
            variable._value = torch.nn.Parameter(fake, requires_grad=variable.trainable and not is_statistic)
            if is_statistic:
                self.register_buffer(f"v{index}", variable._value)
            else:
                self.register_parameter(f"v{index}", variable._value)

    def forward(self, *inputs: torch.Tensor) -> Any:
        """The outputs of the model for its inputs in order."""
        given = inputs[0] if len(inputs) == 1 else list(inputs)
        return self._model[0](given, training=self.training)


def _built(found: KerasModel, mode: FakeTensorMode, *, training: bool) -> BuiltModel:
    dtypes = [getattr(torch, name) for name in found.input_dtypes]

    def make_batch(batch_size: int) -> Mapping[str, Any]:
        pairs = zip(found.input_shapes, dtypes, strict=True)
        inputs = tuple(
            torch.empty(
                (batch_size, *shape),
                dtype=dtype,
                requires_grad=found.is_layer and training and dtype.is_floating_point,
            )
            for shape, dtype in pairs
        )
        return {"args": inputs, "target": torch.empty(batch_size, dtype=torch.int64)}

    return BuiltModel(
        name=found.name,
        module=_Network(found.model, mode).train(training),
        input_shape=found.input_shapes[0],
        make_batch=make_batch,
        loss=_given_gradient if found.is_layer else _loss_of(found.model),
        notes=found.notes,
    )


def _given_gradient(output: torch.Tensor, _: Mapping[str, Any]) -> torch.Tensor:
    """Loss that gives a layer's output a gradient: a product with a constant, whose operations belong to no layer."""
    return (output * torch.empty_like(output)).sum()


def _loss_of(model: Any) -> Callable[[Any, Mapping[str, Any]], torch.Tensor]:
    """Cross entropy in the form for the last activation, plus the losses that layers add."""
    last = model.layers[-1] if model.layers else None
    activation = getattr(getattr(last, "activation", None), "__name__", "")

    def loss(output: Any, batch: Mapping[str, Any]) -> torch.Tensor:
        total = _main_loss(output, batch, activation)
        for added in model.losses:
            total = total + added
        return total

    return loss


def _main_loss(output: Any, batch: Mapping[str, Any], activation: str) -> torch.Tensor:
    if not isinstance(output, torch.Tensor) or output.dim() != 2:
        return inferred_loss(output, batch)
    if output.shape[1] == 1:
        target = batch["target"].reshape(-1, 1)
        values = keras.losses.binary_crossentropy(target, output, from_logits=activation != "sigmoid")
    else:
        values = keras.losses.sparse_categorical_crossentropy(
            batch["target"], output, from_logits=activation != "softmax"
        )
    mean: torch.Tensor = values.mean()
    return mean


def _traced(built: BuiltModel, model: Any, setup: TrainingSetup) -> Graph:
    versions = [(name, metadata.version(name)) for name in ("torch", "keras")]
    return graph_for(
        lambda size: step_graph(built, _recorded(built, model, setup, size), versions),
        setup.batch_size_per_device,
    )


def _recorded(built: BuiltModel, model: Any, setup: TrainingSetup, batch_size: int) -> RawTrace:
    recorder = StepRecorder(lambda tensor: isinstance(tensor, FakeTensor), _SHORTCUTS)
    with _layer_names(recorder, model):
        raw = record_step(built, setup, batch_size, recorder)
    return replace(raw, rows=[row for row in raw.rows if not _is_gradient_copy(row)])


def _clone(source: torch.Tensor, *, memory_format: torch.memory_format | None = None) -> Any:
    """Clone that skips copies for another order of images, because TensorFlow's kernels take either order."""
    if source.dim() < 3 or memory_format is None or memory_format is torch.preserve_format:
        return NotImplemented
    if memory_format is not torch.contiguous_format:
        return torch.ops.aten.alias.default(source)
    # The same memory in the order that was asked for: a view of it may follow, as in Flatten.
    strides = [math.prod(source.shape[axis + 1 :]) for axis in range(source.dim())]
    return torch.ops.aten.as_strided.default(source, source.shape, strides)


_SHORTCUTS: dict[Any, Callable[..., Any]] = {torch.ops.aten.clone.default: _clone}


def _is_gradient_copy(row: RecordedRow) -> bool:
    """True if a row only permutes the gradient of a filter into the filter's order, which PyTorch alone needs."""
    return row.kernel_name == "copy_" and row.step_part is StepPart.BACKWARD


@contextmanager
def _layer_names(recorder: StepRecorder, model: Any) -> Iterator[None]:
    """Tells the recorder which layer is called; inner layers take over from outer ones."""
    original = Layer.__call__

    def named(layer: Any, *args: Any, **kwargs: Any) -> Any:
        if layer is model:
            return original(layer, *args, **kwargs)
        recorder.enter_module(layer.name)
        try:
            return original(layer, *args, **kwargs)
        finally:
            recorder.leave_module()

    Layer.__call__ = named
    try:
        yield
    finally:
        Layer.__call__ = original


def _batch_norms(model: Any) -> list[Any]:
    return [layer for layer in model._flatten_layers() if isinstance(layer, keras.layers.BatchNormalization)]


def _fuse_batch_norms(model: Any) -> int:
    """Makes every batch norm of a model one kernel, as XLA does; returns their number."""
    norms = _batch_norms(model)
    for norm in norms:
        norm.call = types.MethodType(_fused_batch_norm, norm)
    return len(norms)


def _fused_batch_norm(norm: Any, inputs: torch.Tensor, training: bool | None = None, mask: Any = None) -> Any:
    source = inputs.movedim(norm.axis, 1)
    mean, variance = norm.moving_mean._value, norm.moving_variance._value
    result = torch.nn.functional.batch_norm(
        source,
        mean.detach(),
        variance.detach(),
        norm.gamma._value if norm.scale else None,
        norm.beta._value if norm.center else None,
        training=bool(training) and norm.trainable,
        momentum=1 - norm.momentum,
        eps=norm.epsilon,
    )
    return result.movedim(1, norm.axis)


def _notes(graph: Graph, setup: TrainingSetup, num_norms: int, model: Any) -> Iterator[str]:
    train_step = getattr(type(model), "train_step", keras.Model)
    if setup.phase is Phase.TRAIN and not train_step.__module__.startswith("keras."):
        yield (
            f"the train_step of {type(model).__name__} is not followed: the step is a forward pass, a loss and the "
            "optimizer asked for; for its own, name a script that calls fit: forerun predict --on DEVICE -- python FILE"
        )
    if num_norms:
        apart = "moments and element-wise operations (no XLA)"
        how = "one kernel each, as XLA fuses them" if setup.compile else apart
        yield f"batch norm: {num_norms} layers as {how}"
    if not setup.compile:
        yield (
            "the step is predicted without XLA; Keras on TensorFlow compiles by itself where the step runs on one GPU "
            "alone (jit_compile='auto'): --compile predicts that"
        )
    for name in graph.unsupported_ops:
        yield f"operation without a rule: {name}, {_share(graph, name, setup):.1%} of the step's traffic"


def _share(graph: Graph, kernel: str, setup: TrainingSetup) -> float:
    ops = graph.ops
    moved = at_batch(ops.read_bytes + ops.write_bytes, setup.batch_size_per_device) * ops.count
    chosen = ops.kernel == graph.ops.kernel_names.index(kernel)
    return float(moved[chosen].sum() / moved.sum())
