"""Runs an ONNX graph with torch functions, as a module with parameters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from forerun.adapters.onnx.file_graph import OnnxGraph, OnnxInput, weight_names
from forerun.adapters.onnx.operators import BRANCH, OPERATORS, OnnxNode, Operator, Runtime
from forerun.base.errors import ForerunError, TraceError

__all__ = ["OnnxModule"]

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
        self._graph = replace(graph, initializers={})  # so that their values are not held twice
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

    @property
    def graph(self) -> OnnxGraph:
        """The graph, without its initializers."""
        return self._graph

    @property
    def graph_inputs(self) -> tuple[OnnxInput, ...]:
        """The inputs in the order ``forward`` takes them."""
        return self._graph.inputs

    def forward(self, *inputs: torch.Tensor) -> Any:
        """One output, or a tuple of several."""
        self._runtime.training = self.training
        if (
            self._follows_weights
        ):  # a model converted to half precision casts to half precision if the file says fp32
            self._runtime.float_dtype = next(self.parameters()).dtype
        values: Values = dict(self._constants)
        values.update((name, getattr(self, attribute)) for name, attribute in self._attribute_of.items())
        values.update((given.name, tensor) for given, tensor in zip(self._graph.inputs, inputs, strict=True))
        outputs = _run(self._graph, values, self._dead_after)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)


def _last_uses(graph: OnnxGraph) -> list[list[str]]:
    """For every node, the names that no later node reads."""
    last: dict[str, int] = {}
    for index, node in enumerate(graph.nodes):
        last.update((name, index) for name in (*node.inputs, *node.outputs))
        for body in _bodies(node):
            last.update((name, index) for name in body.captured())
    dead: list[list[str]] = [[] for _ in graph.nodes]
    for name, index in last.items():
        if name and name not in graph.outputs:
            dead[index].append(name)
    return dead


def _bodies(node: OnnxNode) -> Iterator[OnnxGraph]:
    return (value for value in node.attributes.values() if isinstance(value, OnnxGraph))


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
