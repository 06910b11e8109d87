"""The table of ONNX operators: name to a function of torch tensors.

An operator takes its node, then the node's inputs (None for those left out), and returns a tensor or a tuple
of tensors. Shapes and other small integers are real tensors on the CPU, activations and weights are on the
meta device, or on the CPU if an interpreter is tested with values. Inputs whose values an operator reads
are its *host inputs*.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from forerun.base.errors import TraceError

__all__ = ["BRANCH", "OPERATORS", "OnnxNode", "Operator", "Runtime", "host_inputs", "numbers", "onnx_op"]


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
        attributes: Values by name; tensors as CPU tensors, graphs as ``file_graph.OnnxGraph``.
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

    def refuse(self, what: str) -> TraceError:
        """The error for an unsupported form of an operator."""
        return TraceError(f"the ONNX node {self.name!r} ({self.op}) uses {what}, which is not supported")


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """An operator's function and the positions of the inputs whose values it reads."""

    run: Callable[..., Any]
    host_inputs: frozenset[int]


OPERATORS: dict[str, Operator] = {}


def onnx_op(*names: str, host: tuple[int, ...] = ()) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a function as ONNX operators; a name can be used once.

    Args:
        names: Operator names.
        host: Positions of inputs whose values are read.
    """

    def register(run: Callable[..., Any]) -> Callable[..., Any]:
        for name in names:
            if name in OPERATORS:
                raise ValueError(f"the ONNX operator {name} is registered twice")
            OPERATORS[name] = Operator(run=run, host_inputs=frozenset(host))
        return run

    return register


def host_inputs(op: str) -> frozenset[int]:
    """Positions of the inputs whose values an operator reads."""
    return frozenset({0}) if op == BRANCH else OPERATORS[op].host_inputs


def numbers(node: OnnxNode, tensor: torch.Tensor | None, attribute: str | None = None) -> list[Any] | None:
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
