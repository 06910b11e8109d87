"""Models from ONNX files: ``onnx:FILE.onnx``.

The file's graph runs with torch functions on the meta device (``onnx.module``); weights are parameters, so that
a training step of a model exported for inference can be traced.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from forerun.adapters.onnx import elementwise as onnx_elementwise
from forerun.adapters.onnx import layers as onnx_layers
from forerun.adapters.onnx import shape_ops as onnx_shape_ops
from forerun.adapters.onnx.file_graph import (
    OnnxGraph,
    OnnxInput,
    check_operators,
    check_order,
    read_graph_proto,
)
from forerun.adapters.onnx.module import OnnxModule
from forerun.adapters.onnx.operators import Runtime
from forerun.base.errors import InvalidSetupError, MissingExtraError, ModelBuildError, UnknownModelError
from forerun.tracing.models.built_model import INFERRED_LOSS_NOTE, BuiltModel, InputOptions, inferred_loss
from forerun.tracing.models.meta_build import building_device, is_building_on_meta

__all__ = ["build_onnx", "load_onnx_module"]

_REGISTERED = (onnx_elementwise, onnx_layers, onnx_shape_ops)  # imported for their registrations

_NORMS = frozenset(
    {
        "BatchNormalization",
        "LayerNormalization",
        "GroupNormalization",
        "InstanceNormalization",
        "RMSNormalization",
    }
)


def build_onnx(path_text: str, options: InputOptions) -> BuiltModel:
    """Builds a module from an ONNX file.

    Args:
        path_text: Path of the file. Separate files of its weights may be missing.
        options: Sizes of the axes that the file leaves open; the head cannot be changed.

    Raises:
        UnknownModelError: There is no such file.
        MissingExtraError: The package ``onnx`` is not installed.
        ModelBuildError: The file is damaged or is not an ONNX file.
        TraceError: The graph has unsupported operators, all of which the message names.
    """
    path = Path(path_text).expanduser()
    name = f"onnx:{path_text}"
    if not path.is_file():
        raise UnknownModelError(f"there is no file {path_text!r}; give onnx:FILE.onnx")
    if options.num_classes is not None:
        raise InvalidSetupError(
            f"{name} is already built: num_classes cannot change its head; leave the option out"
        )
    module = load_onnx_module(path, name=name, with_values=not is_building_on_meta()).train(options.training)
    if not is_building_on_meta():
        module.to(building_device())
    inputs = module.graph_inputs
    if not inputs:
        raise ModelBuildError(f"{name} has no inputs; a model that takes a batch was expected")
    shapes = {given.name: _sample_shape(given, inputs, options, name) for given in inputs}
    batch_sizes = {given.axes[0] for given in inputs if given.axes and isinstance(given.axes[0], int)}
    only_batch_size = int(min(batch_sizes)) if batch_sizes else None

    def make_batch(batch_size: int) -> Mapping[str, Any]:
        tensors = [
            torch.empty((batch_size, *shapes[x.name]) if x.axes else (), dtype=x.dtype, device="meta")
            for x in inputs
        ]
        return {"args": tuple(tensors)}

    return BuiltModel(
        name=name,
        module=module,
        input_shape=shapes[inputs[0].name],
        make_batch=make_batch,
        loss=inferred_loss,
        only_batch_size=only_batch_size,
        notes=_notes(module.graph, only_batch_size),
        cache_key=f"onnx {hashlib.sha256(path.read_bytes()).hexdigest()} {options.key()}",
    )


def load_onnx_module(path: Path, *, name: str = "", with_values: bool = False) -> OnnxModule:
    """The graph of a file as a module, on the meta device.

    Args:
        path: Path of the file.
        name: Name in error messages; empty for the path.
        with_values: True loads the weights' values and stays on the CPU, to run the model.
    """
    try:
        import onnx
    except ImportError as error:
        raise MissingExtraError(name or str(path), "onnx") from error
    name = name or str(path)
    try:
        model = onnx.load(str(path), load_external_data=False)
        if model.functions:
            model = onnx.inliner.inline_local_functions(model)
    except Exception as error:  # protobuf and onnx raise errors without a common base
        raise ModelBuildError(f"{name} cannot be read as an ONNX file: {error}") from error
    if not model.graph.node or not model.opset_import:
        raise ModelBuildError(
            f"{name} is no ONNX model: it holds no graph; export it again with torch.onnx.export"
        )
    opset = max((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), default=1)
    runtime = Runtime(training=False, float_dtype=torch.float32)
    graph = read_graph_proto(model.graph, opset, path.parent, runtime, with_values=with_values)
    check_operators(graph, name)
    check_order(graph, name)
    return OnnxModule(graph, runtime, with_values=with_values)


def _sample_shape(
    given: OnnxInput, inputs: tuple[OnnxInput, ...], options: InputOptions, name: str
) -> tuple[int, ...]:
    """Sizes of an input without the batch axis; the options give the open ones."""
    is_text = not given.dtype.is_floating_point
    axes = given.axes[1:]
    if options.input_shape is not None and given is inputs[0]:
        _check_fixed(given, options.input_shape, name)
        return options.input_shape
    if options.image_size is not None and not is_text and len(axes) == 3:
        channels = axes[0] if isinstance(axes[0], int) else 3
        image = (channels, options.image_size, options.image_size)
        _check_fixed(given, image, name)
        return image
    if options.sequence_length is not None and is_text and axes:
        shape = (options.sequence_length, *(size for size in axes[1:] if isinstance(size, int)))
        _check_fixed(given, shape, name)
        return shape
    sizes: list[int] = []
    for index, size in enumerate(axes, start=1):
        if not isinstance(size, int) or size < 1:
            option = "sequence_length" if is_text else "input_shape or image_size"
            raise InvalidSetupError(
                f"{name} leaves axis {index} of its input {given.name!r} open ({size}): give {option}"
            )
        sizes.append(size)
    return tuple(sizes)


def _check_fixed(given: OnnxInput, shape: tuple[int, ...], name: str) -> None:
    expected = given.axes[1:]
    fits = len(expected) == len(shape) and all(
        not isinstance(size, int) or size == asked for size, asked in zip(expected, shape, strict=True)
    )
    if not fits:
        raise InvalidSetupError(
            f"the input {given.name!r} of {name} has the fixed shape {','.join(map(str, expected))}, got "
            f"{','.join(map(str, shape))}; export the model again with this shape or with dynamic axes"
        )


def _notes(graph: OnnxGraph, only_batch_size: int | None) -> tuple[str, ...]:
    notes = [
        "an ONNX file holds the operations its exporter left; fused or split layers are predicted as such"
    ]
    ops = [node.op for node in graph.all_nodes()]
    biased = sum(
        node.op == "Conv" and len(node.inputs) > 2 and bool(node.inputs[2]) for node in graph.all_nodes()
    )
    if biased and not _NORMS.intersection(ops):
        notes.append(
            f"{biased} convolutions have biases and there is no normalisation: batch norms were folded at "
            "export, or the model has none; if they were folded, the training step is understated: pass the "
            "original model"
        )
    if only_batch_size is not None:
        notes.append(
            f"the file is fixed to batch size {only_batch_size}; export it with a dynamic batch axis"
        )
    notes.append(INFERRED_LOSS_NOTE)
    return tuple(notes)
