"""Models from ONNX files: ``onnx:FILE.onnx``.

The graph of a file runs with torch functions on the meta device; weights are parameters, so that a training step of a
model exported for inference can be traced.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from forerun.adapters.onnx import elementwise as onnx_elementwise
from forerun.adapters.onnx import layers as onnx_layers
from forerun.adapters.onnx.graph import (
    BRANCH,
    OPERATORS,
    OnnxGraph,
    OnnxInput,
    OnnxNode,
    Operator,
    Runtime,
    check_operators,
    check_order,
    read_graph_proto,
    weight_names,
)
from forerun.base.errors import (
    ForerunError,
    InvalidSetupError,
    ModelBuildError,
    TraceError,
    UnknownModelError,
)
from forerun.base.extras import needing
from forerun.tracing.models.built_model import INFERRED_LOSS_NOTE, BuiltModel, InputOptions, inferred_loss
from forerun.tracing.models.meta_build import building_device, is_building_on_meta

Values = dict[str, torch.Tensor]


class OnnxModule(torch.nn.Module):
    """An ONNX graph as a module; autograd gives its backward pass.

    Values are dropped after their last use, as the local variables of a module's own ``forward`` would be.

    Args:
        graph: Graph to run.
        runtime: Runtime settings that the graph's nodes hold.
        with_values: True keeps the weights' values on the CPU; otherwise they are meta tensors.
    """

    def __init__(self, graph: OnnxGraph, runtime: Runtime, *, with_values: bool = False) -> None:
        super().__init__()
        self.graph = replace(graph, initializers={})  # so that their values are not held twice
        self._runtime = runtime
        self._attribute_of: dict[str, str] = {}
        self._constants: Values = {}
        weights, statistics = weight_names(graph)
        for index, (name, tensor) in enumerate(graph.initializers.items()):
            value = tensor if with_values else torch.empty_like(tensor, device="meta")
            if name in weights:
                self._attribute_of[name] = f"weight_{index}"
                self.register_parameter(f"weight_{index}", torch.nn.Parameter(value))
            elif name in statistics:
                self._attribute_of[name] = f"statistic_{index}"
                self.register_buffer(f"statistic_{index}", value)
            else:
                self._constants[name] = tensor
        self._dead_after = _last_uses(graph)
        weight = next(self.parameters(), None)
        self._follows_weights = weight is not None and weight.dtype == torch.float32

    def forward(self, *inputs: torch.Tensor) -> Any:
        """One output, or a tuple of several."""
        self._runtime.training = self.training
        # A model converted to half precision casts to half precision if the file says fp32.
        if self._follows_weights:
            self._runtime.float_dtype = next(self.parameters()).dtype
        values: Values = dict(self._constants)
        values.update((name, getattr(self, attribute)) for name, attribute in self._attribute_of.items())
        values.update((given.name, tensor) for given, tensor in zip(self.graph.inputs, inputs, strict=True))
        outputs = _run(self.graph, values, self._dead_after)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)


def _last_uses(graph: OnnxGraph) -> list[list[str]]:
    """For every node, the names that no later node reads."""
    last: dict[str, int] = {}
    for index, node in enumerate(graph.nodes):
        last.update((name, index) for name in (*node.inputs, *node.outputs))
        for body in node.bodies:
            last.update((name, index) for name in body.captured())
    dead: list[list[str]] = [[] for _ in graph.nodes]
    for name, index in last.items():
        # An input that is left out has an empty name.
        if name and name not in graph.outputs:
            dead[index].append(name)
    return dead


def _run(graph: OnnxGraph, values: Values, dead_after: list[list[str]]) -> list[torch.Tensor]:
    for node, dead in zip(graph.nodes, dead_after, strict=True):
        results = _run_if(node, values) if node.op == BRANCH else _run_node(node, values)
        values.update((name, value) for name, value in zip(node.outputs, results, strict=False) if name)
        del results
        for name in dead:
            values.pop(name, None)
    return [values[name] for name in graph.outputs]


def _run_node(node: OnnxNode, values: Values) -> tuple[Any, ...]:
    operator = OPERATORS[node.op]
    arguments = _on_one_device(operator, [values[name] if name else None for name in node.inputs])
    try:
        result = operator.run(node, *arguments)
    except ForerunError:
        raise
    except Exception as error:
        shapes = ", ".join("-" if x is None else str(tuple(x.shape)) for x in arguments)
        error.add_note(f"in the ONNX node {node.name!r} ({node.op}) with inputs {shapes}")
        raise
    return result if isinstance(result, tuple) else (result,)


def _run_if(node: OnnxNode, values: Values) -> tuple[Any, ...]:
    condition = values[node.inputs[0]]
    if condition.is_meta:
        raise TraceError(
            f"the ONNX node {node.name!r} (If) branches on the model's data: a step is traced without values"
        )
    body: OnnxGraph = node.attributes["then_branch" if bool(condition) else "else_branch"]
    return tuple(_run(body, {**values, **body.initializers}, _last_uses(body)))


def _on_one_device(operator: Operator, arguments: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Moves real constants to the device of the other operands: meta (in their floating-point type) or a GPU."""
    operands = [x for i, x in enumerate(arguments) if x is not None and i not in operator.host_inputs]
    if not any(x.is_meta for x in operands):
        return _beside_gpu_operands(operator, arguments, operands)
    # A constant of fp32 beside activations of half would promote them, which no exporter of a half model meant.
    dtype = next((x.dtype for x in operands if x.is_meta and x.is_floating_point()), None)
    moved: list[torch.Tensor | None] = []
    for index, tensor in enumerate(arguments):
        is_constant = tensor is not None and not tensor.is_meta and tensor.dim() > 0
        if is_constant and index not in operator.host_inputs:
            assert tensor is not None
            wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
            tensor = torch.empty(tensor.shape, dtype=wanted, device="meta")
        moved.append(tensor)
    return moved


def _beside_gpu_operands(
    operator: Operator, arguments: list[torch.Tensor | None], operands: list[torch.Tensor]
) -> list[torch.Tensor | None]:
    gpu = next((x.device for x in operands if x.is_cuda), None)
    if gpu is None:
        return arguments
    return [
        x if x is None or i in operator.host_inputs else x.to(gpu, non_blocking=True)
        for i, x in enumerate(arguments)
    ]


_REGISTERED = (onnx_elementwise, onnx_layers)  # imported for their registrations

_NORMS = {f"{kind}Normalization" for kind in ("Batch", "Layer", "Group", "Instance", "RMS")}


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
    inputs = module.graph.inputs
    if not inputs:
        raise ModelBuildError(f"{name} has no inputs; a model that takes a batch was expected")
    shapes = {given.name: _sample_shape(given, inputs, options, name) for given in inputs}
    # A fixed first axis is the batch of the export: the file holds for no other one.
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
        may_be_kept=True,
    )


def load_onnx_module(path: Path, *, name: str = "", with_values: bool = False) -> OnnxModule:
    """The graph of a file as a module, on the meta device.

    Args:
        path: Path of the file.
        name: Name in error messages; empty for the path.
        with_values: True loads the weights' values and stays on the CPU, to run the model.
    """
    name = name or str(path)
    with needing(name):
        import onnx
    try:
        model = onnx.load(str(path), load_external_data=False)
        if model.functions:
            model = onnx.inliner.inline_local_functions(model)
    except Exception as error:  # protobuf and onnx raise errors without a common base
        raise ModelBuildError(
            f"{name} cannot be read as an ONNX file: {error}; copy or export it again"
        ) from error
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
    nodes = list(graph.all_nodes())
    biased = sum(node.op == "Conv" and bool("".join(node.inputs[2:3])) for node in nodes)
    if biased and not any(node.op in _NORMS for node in nodes):
        notes.append(
            f"convolutions have biases ({biased} of them) and there is no normalisation: batch norms were folded at "
            "export, or the model has none; if they were folded, the training step is understated: pass the "
            "original model"
        )
    if only_batch_size is not None:
        notes.append(
            f"the file is fixed to batch size {only_batch_size}; export it with a dynamic batch axis"
        )
    notes.append(INFERRED_LOSS_NOTE)  # a file of inference has no loss
    return tuple(notes)
