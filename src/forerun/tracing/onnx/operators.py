"""The table of ONNX operators: name to a function of torch tensors.

An operator takes its node, then the node's inputs (None for those left out), and returns a tensor or a tuple
of tensors. Shapes and other small integers are real tensors on the CPU, activations and weights are on the
meta device, or on the CPU where an interpreter is tested with values. Inputs whose values an operator reads
are its *host inputs*.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from forerun.errors import TraceError

__all__ = ["BRANCH", "OPERATORS", "OnnxNode", "Operator", "Runtime", "host_inputs", "numbers", "onnx_op"]


BRANCH = "If"
"""The one operator with bodies; the interpreter runs it itself."""


@dataclass(slots=True)
class Runtime:
    """How a graph is run.

    Attributes:
        training: Whether batch norms use batch statistics and dropout drops.
        float_dtype: What a cast to fp32 means: the type of the weights if the file's own are fp32.
    """

    training: bool
    float_dtype: torch.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class OnnxNode:
    """One node of a graph as plain values.

    Attributes:
        op: Operator name, with its domain in front unless it is ONNX' own.
        name: The node's name, or its first output's.
        inputs: Names of values, empty where an optional input is left out.
        outputs: Names of values.
        attributes: Values by name; tensors as CPU tensors, graphs as ``onnx_graph.OnnxGraph``.
        opset: Version of the operator set.
        runtime: How the graph is run.
    """

    op: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]
    opset: int
    runtime: Runtime

    def get(self, attribute: str, default: Any = None) -> Any:
        """An attribute, or the default if the node does not carry it."""
        return self.attributes.get(attribute, default)

    def refuse(self, what: str) -> TraceError:
        """The error for a form of an operator that is not supported."""
        return TraceError(f"the ONNX node {self.name!r} ({self.op}) uses {what}, which is not supported")


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """An operator's function and the positions of the inputs whose values it reads."""

    run: Callable[..., Any]
    host_inputs: frozenset[int]


OPERATORS: dict[str, Operator] = {}


def onnx_op(*names: str, host: tuple[int, ...] = ()) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a function as ONNX operators; no name can be taken twice.

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
    """The values of a host input, or of the attribute that older operator sets have instead.

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
