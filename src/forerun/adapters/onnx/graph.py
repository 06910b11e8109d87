"""Graphs of ONNX files as plain nodes, constants and inputs, and the table of operators that run them.

An operator takes a node's inputs (None for those left out) and its attributes, and returns a tensor or a tuple of
tensors. Shapes and other small integers are real tensors on the CPU, activations and weights are on the
meta device, or on the CPU if an interpreter is tested with values. Inputs whose values an operator reads
are its *host inputs*.

A float initializer is a weight if a node uses it together with data from the model's inputs. One
that meets only shapes (a scale of a Resize, a bound of a Clip) is a constant whose value is kept.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any

import torch

from forerun.adapters import words_of
from forerun.base.errors import ModelBuildError, TraceError

BRANCH = "If"
"""The one operator with bodies; the interpreter runs it itself."""


@dataclass(slots=True)
class Runtime:
    """Settings with which a graph runs.

    Attributes:
        training: True if batch norms use batch statistics and dropout drops.
        float_dtype: Type to which a cast to fp32 casts: the type of the weights if the file's weights are fp32.
    """

    training: bool
    float_dtype: torch.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class OnnxNode:
    """One node of a graph as plain values.

    Attributes:
        op: Operator name, with its domain in front unless it is ONNX' own.
        name: Name of the node, or of its first output.
        inputs: Names of the input values; empty for an optional input left out.
        outputs: Names of the output values.
        attributes: Values by name; tensors as CPU tensors, graphs as ``OnnxGraph``.
        opset: Version of the operator set.
        runtime: Settings with which the graph runs.
    """

    op: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]
    opset: int
    runtime: Runtime

    def get(self, attribute: str, default: Any = None) -> Any:
        """An attribute, or the default if the node lacks it."""
        return self.attributes.get(attribute, default)

    @property
    def bodies(self) -> list[OnnxGraph]:
        """Graphs among the attributes."""
        return [value for value in self.attributes.values() if isinstance(value, OnnxGraph)]

    def refuse(self, what: str) -> TraceError:
        """The error for an unsupported form of an operator."""
        return TraceError(f"the ONNX node {self.name!r} ({self.op}) uses {what}, which is not supported")


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """An operator's function and the positions of the inputs whose values it reads."""

    run: Callable[..., Any]
    host_inputs: frozenset[int]


OPERATORS: dict[str, Operator] = {}


def onnx_op(
    *names: str, host: Mapping[int, str | None] | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a function of torch tensors as ONNX operators; a name can be used once.

    The function takes ``node`` if its first parameter is called so, then the inputs, and by keyword only the attributes
    that it reads, under their ONNX names and with ONNX' defaults.

    Args:
        names: Operator names.
        host: Positions of inputs whose values are read, each with the attribute that older operator sets have in its
            place (empty for none): the function gets a list of numbers, or None. With None it gets the tensor itself.
    """
    read = host or {}

    def register(run: Callable[..., Any]) -> Callable[..., Any]:
        for name in names:
            if name in OPERATORS:
                raise ValueError(f"the ONNX operator {name} is registered twice")
            OPERATORS[name] = Operator(run=_bound(run, read), host_inputs=frozenset(read))
        return run

    return register


def _bound(run: Callable[..., Any], host: Mapping[int, str | None]) -> Callable[..., Any]:
    """The function of a node and its inputs that gives ``run`` what its parameters ask for."""
    parameters: Mapping[str, inspect.Parameter] = {}
    with contextlib.suppress(ValueError):  # a function of PyTorch's C++ part has inputs only
        parameters = inspect.signature(run).parameters
    takes_node = next(iter(parameters), "") == "node"
    attributes = [name for name, one in parameters.items() if one.kind is one.KEYWORD_ONLY]

    def bound(node: OnnxNode, *inputs: torch.Tensor | None) -> Any:
        given: list[Any] = [*inputs, *[None] * (max(host, default=-1) + 1 - len(inputs))]
        for place, attribute in host.items():
            if attribute is not None:
                given[place] = numbers(node, given[place], attribute)
        named = {name: node.attributes[name] for name in attributes if name in node.attributes}
        return run(*([node] if takes_node else []), *given, **named)

    return bound


def host_inputs(op: str) -> frozenset[int]:
    """Positions of the inputs whose values an operator reads."""
    return frozenset({0}) if op == BRANCH else OPERATORS[op].host_inputs


def numbers(node: OnnxNode, tensor: torch.Tensor | None, attribute: str = "") -> list[Any] | None:
    """The values of a host input, or of the attribute that older operator sets have in its place.

    Raises:
        TraceError: If the values depend on the data of the model.
    """
    if tensor is None:
        found = node.get(attribute) if attribute else None
        return None if found is None else (list(found) if isinstance(found, (list, tuple)) else [found])
    if tensor.is_meta:
        raise TraceError(
            f"the ONNX node {node.name!r} ({node.op}) reads a size or index that depends on the model's "
            "input data, and a step is traced without values; re-export the part that depends on shapes only"
        )
    values = tensor.tolist()
    return values if isinstance(values, list) else [values]


_TORCH_DTYPES: dict[int, torch.dtype] = {
    int(number): getattr(torch, name) for number, name in words_of("onnx")["types"].items()
}
"""Numbers of ``TensorProto.DataType``."""

_STATISTICS = {"BatchNormalization": (3, 4)}


@dataclass(frozen=True, slots=True, kw_only=True)
class OnnxInput:
    """An input of the model: its axes are sizes, or names if the file leaves them open."""

    name: str
    dtype: torch.dtype
    axes: tuple[int | str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OnnxGraph:
    """A graph, or the body of a node such as If.

    Attributes:
        nodes: Nodes in order of execution.
        inputs: Inputs to be given.
        outputs: Names of the results.
        initializers: Real tensors on the CPU; meta tensors for floats that are not read from the file.
    """

    nodes: tuple[OnnxNode, ...]
    inputs: tuple[OnnxInput, ...]
    outputs: tuple[str, ...]
    initializers: dict[str, torch.Tensor] = field(default_factory=dict)

    def all_nodes(self) -> Iterator[OnnxNode]:
        """Nodes of this graph and of the bodies inside it."""
        for node in self.nodes:
            yield node
            for body in node.bodies:
                yield from body.all_nodes()

    def captured(self) -> Iterator[str]:
        """Names that nodes read, bodies included."""
        for node in self.all_nodes():
            yield from filter(None, node.inputs)
        yield from self.outputs


def torch_dtype(number: int, what: str) -> torch.dtype:
    """The torch type of an ONNX element type."""
    if number not in _TORCH_DTYPES:
        raise TraceError(f"{what} has the ONNX element type {number}, which has no counterpart here")
    return _TORCH_DTYPES[number]


def read_graph_proto(
    graph: Any, opset: int, folder: Path, runtime: Runtime, *, with_values: bool
) -> OnnxGraph:
    """Reads a ``GraphProto``.

    Args:
        graph: The message.
        opset: Operator set of ONNX' own domain.
        folder: Folder of external data files.
        runtime: Runtime settings given to every node.
        with_values: True reads the values of large float initializers; otherwise they are meta tensors.
    """
    initializers = {
        tensor.name: _read_tensor(tensor, folder, with_values=with_values) for tensor in graph.initializer
    }
    return OnnxGraph(
        nodes=tuple(_read_node(node, opset, folder, runtime, with_values=with_values) for node in graph.node),
        inputs=tuple(_read_input(value) for value in graph.input if value.name not in initializers),
        outputs=tuple(value.name for value in graph.output),
        initializers=initializers,
    )


def _read_tensor(tensor: Any, folder: Path, *, with_values: bool) -> torch.Tensor:
    """A tensor of the file; floats of one axis or more come without values unless requested."""
    import numpy as np
    from onnx import external_data_helper, numpy_helper

    dtype = torch_dtype(tensor.data_type, f"the tensor {tensor.name!r}")
    is_external = external_data_helper.uses_external_data(tensor)
    if is_external:
        location = next((entry.value for entry in tensor.external_data if entry.key == "location"), "")
        if not (folder / location).is_file():
            raise ModelBuildError(
                f"the tensor {tensor.name!r} is kept in the file {location!r} beside the ONNX file, and is missing; "
                "put it there, or export the model into one file"
            )
    if is_external and dtype.is_floating_point and not with_values:
        return torch.empty(tuple(tensor.dims), dtype=dtype, device="meta")
    if is_external:
        try:
            external_data_helper.load_external_data_for_tensor(tensor, str(folder))
        except Exception as error:  # onnx raises its own C++ errors besides OSError
            raise ModelBuildError(
                f"the integer tensor {tensor.name!r} is kept outside of the ONNX file and cannot be read: "
                f"{error}; put the data file beside it"
            ) from error
    values = numpy_helper.to_array(tensor)
    if dtype is torch.bfloat16:
        return torch.from_numpy(np.array(values, dtype=np.float32)).to(dtype)
    # Copied: the array lies in the read-only bytes of the message.
    return torch.from_numpy(np.array(values))


def _read_input(value: Any) -> OnnxInput:
    tensor_type = value.type.tensor_type
    axes: list[int | str] = [
        axis.dim_value if axis.HasField("dim_value") else (axis.dim_param or f"axis {index}")
        for index, axis in enumerate(tensor_type.shape.dim)
    ]
    dtype = torch_dtype(tensor_type.elem_type or 1, f"the input {value.name!r}")
    return OnnxInput(name=value.name, dtype=dtype, axes=tuple(axes))


def _read_node(node: Any, opset: int, folder: Path, runtime: Runtime, *, with_values: bool) -> OnnxNode:
    from onnx import AttributeProto, helper

    attributes: dict[str, Any] = {}
    for attribute in node.attribute:
        if attribute.type == AttributeProto.TENSOR:
            # With its values even where weights have none: a constant may be a shape.
            attributes[attribute.name] = _read_tensor(attribute.t, folder, with_values=True)
        elif attribute.type == AttributeProto.GRAPH:
            attributes[attribute.name] = read_graph_proto(
                attribute.g, opset, folder, runtime, with_values=with_values
            )
        else:
            value = helper.get_attribute_value(attribute)
            attributes[attribute.name] = value.decode() if isinstance(value, bytes) else value
    # The domain of the operators of other vendors tells two of one name apart.
    domain = "" if node.domain in ("", "ai.onnx") else node.domain + "."
    return OnnxNode(
        op=domain + node.op_type,
        name=node.name or (node.output[0] if node.output else ""),
        inputs=tuple(node.input),
        outputs=tuple(node.output),
        attributes=attributes,
        opset=opset,
        runtime=runtime,
    )


def check_operators(graph: OnnxGraph, name: str) -> None:
    """Raise an error that names every operator of a graph without an implementation, each with one of its nodes."""
    missing: dict[str, str] = {}
    for node in graph.all_nodes():
        if node.op != BRANCH and node.op not in OPERATORS:
            missing.setdefault(node.op, node.name)
    if missing:
        listed = ", ".join(f"{op} (node {node!r})" for op, node in sorted(missing.items()))
        raise TraceError(
            f"{name} uses ONNX operators that are not supported: {listed}; give the original PyTorch model, "
            "or re-export without them"
        )


def check_order(graph: OnnxGraph, name: str, outside: frozenset[str] = frozenset()) -> None:
    """Refuses a graph that reads a value before it is made: ONNX asks for nodes in topological order, without circles.

    Raises:
        ModelBuildError: A node or an output reads a value that nothing before it makes.
    """
    made = {*outside, *graph.initializers, *(value.name for value in graph.inputs)}
    for node in graph.nodes:
        if missing := [one for one in node.inputs if one and one not in made]:
            raise ModelBuildError(
                f"{name}: the node {node.name!r} reads {missing[0]!r}, which no node before it makes; the graph has a "
                "circle or its nodes are out of order: export it again"
            )
        for body in node.bodies:
            check_order(body, name, frozenset(made))
        made.update(filter(None, node.outputs))
    if missing := [one for one in graph.outputs if one not in made]:
        raise ModelBuildError(f"{name}: no node makes the output {missing[0]!r}; export it again")


class _Origin(IntEnum):
    """Origins of a value, in order of precedence."""

    CONSTANT = 0
    INITIALIZER = 1
    SHAPE = 2
    DATA = 3


def weight_names(graph: OnnxGraph) -> tuple[set[str], set[str]]:
    """Names of initializers that are weights, and names of running statistics.

    Every value has an origin: data (the inputs, or weights), shapes, or constants. A float initializer with an axis
    is a weight if it meets data or stands alone, unless its value is read.
    """
    origin: dict[str, _Origin] = {value.name: _Origin.DATA for value in graph.inputs}
    for name, tensor in graph.initializers.items():
        is_weight = tensor.is_floating_point() and tensor.dim() > 0
        origin[name] = _Origin.INITIALIZER if is_weight else _Origin.CONSTANT
    weights: set[str] = set()
    statistics: set[str] = set()
    for node in graph.nodes:
        host = host_inputs(node.op)
        used = [name for index, name in enumerate(node.inputs) if name and index not in host]
        origins = [origin.get(name, _Origin.CONSTANT) for name in used]
        made = max(origins, default=_Origin.CONSTANT)
        if made is not _Origin.SHAPE:
            candidates = {name for name in used if origin.get(name) is _Origin.INITIALIZER}
            running = {node.inputs[i] for i in _STATISTICS.get(node.op, ()) if i < len(node.inputs)}
            weights |= candidates - running
            statistics |= candidates & running
        # What is computed of weights alone, such as a fused scale, trains with them.
        if made is _Origin.INITIALIZER:
            made = _Origin.DATA
        if node.op in ("Shape", "Size"):
            made = _Origin.SHAPE
        origin.update(dict.fromkeys(filter(None, node.outputs), made))
    for node in graph.nodes:  # a body sees the names around it; those it reads are taken as weights
        for body in node.bodies:
            weights |= {n for n in body.captured() if origin.get(n) is _Origin.INITIALIZER}
    # Equal tensors are stored once: statistics that another layer trains are its weight.
    return weights, statistics - weights
