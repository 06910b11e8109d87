"""ONNX operators that work element by element, and reductions.

Importing this module registers them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from forerun.adapters.onnx.graph import OnnxNode, numbers, onnx_op, torch_dtype

__all__: list[str] = []


def _register_plain(table: dict[str, Callable[..., Any]]) -> None:
    """Registers functions whose arguments are just the node's inputs."""
    for name, function in table.items():

        def run(node: OnnxNode, *inputs: Tensor | None, function: Callable[..., Any] = function) -> Any:
            return function(*inputs)

        onnx_op(name)(run)


def _divide(left: Tensor, right: Tensor) -> Tensor:
    is_whole = not left.is_floating_point() and not right.is_floating_point()
    return torch.div(left, right, rounding_mode="trunc") if is_whole else torch.div(left, right)


def _power(base: Tensor, exponent: Tensor) -> Tensor:
    is_known = exponent.dim() == 0 and not exponent.is_meta
    power: Tensor = torch.pow(base, exponent.item() if is_known else exponent)
    return power.to(base.dtype)


_register_plain(
    {
        "Abs": torch.abs,
        "Acos": torch.acos,
        "Add": torch.add,
        "And": torch.logical_and,
        "Asin": torch.asin,
        "Atan": torch.atan,
        "Ceil": torch.ceil,
        "Cos": torch.cos,
        "Div": _divide,
        "Equal": torch.eq,
        "Erf": torch.erf,
        "Exp": torch.exp,
        "Floor": torch.floor,
        "Greater": torch.gt,
        "GreaterOrEqual": torch.ge,
        "HardSwish": functional.hardswish,
        "Identity": lambda x: x,
        "IsInf": torch.isinf,
        "IsNaN": torch.isnan,
        "Less": torch.lt,
        "LessOrEqual": torch.le,
        "Log": torch.log,
        "Mish": functional.mish,
        "Mul": torch.mul,
        "Neg": torch.neg,
        "Not": torch.logical_not,
        "Or": torch.logical_or,
        "Pow": _power,
        "Reciprocal": torch.reciprocal,
        "Relu": functional.relu,
        "Round": torch.round,
        "Sigmoid": torch.sigmoid,
        "Sign": torch.sign,
        "Sin": torch.sin,
        "Softplus": functional.softplus,
        "Softsign": functional.softsign,
        "Sqrt": torch.sqrt,
        "Sub": torch.sub,
        "Tan": torch.tan,
        "Tanh": torch.tanh,
        "Where": torch.where,
        "Xor": torch.logical_xor,
        "Max": lambda *xs: reduce(torch.maximum, xs),
        "Min": lambda *xs: reduce(torch.minimum, xs),
        "Sum": lambda *xs: reduce(torch.add, xs),
        "Mean": lambda *xs: reduce(torch.add, xs) / len(xs),
    }
)


@onnx_op("LeakyRelu")
def _leaky_relu(node: OnnxNode, x: Tensor) -> Tensor:
    return functional.leaky_relu(x, node.get("alpha", 0.01))


@onnx_op("Elu")
def _elu(node: OnnxNode, x: Tensor) -> Tensor:
    return functional.elu(x, node.get("alpha", 1.0))


@onnx_op("Celu")
def _celu(node: OnnxNode, x: Tensor) -> Tensor:
    return functional.celu(x, node.get("alpha", 1.0))


@onnx_op("Selu")
def _selu(node: OnnxNode, x: Tensor) -> Tensor:
    return functional.selu(x)


@onnx_op("PRelu")
def _prelu(node: OnnxNode, x: Tensor, slope: Tensor) -> Tensor:
    return functional.prelu(x, slope.flatten())


@onnx_op("HardSigmoid")
def _hard_sigmoid(node: OnnxNode, x: Tensor) -> Tensor:
    alpha, beta = node.get("alpha", 0.2), node.get("beta", 0.5)
    if abs(alpha - 1 / 6) < 1e-4 and beta == 0.5:
        return functional.hardsigmoid(x)
    line: Tensor = alpha * x + beta
    return line.clamp(0, 1)


@onnx_op("Gelu")
def _gelu(node: OnnxNode, x: Tensor) -> Tensor:
    return functional.gelu(x, approximate=node.get("approximate", "none"))


@onnx_op("Swish")
def _swish(node: OnnxNode, x: Tensor) -> Tensor:
    alpha = node.get("alpha", 1.0)
    return functional.silu(x) if alpha == 1.0 else x * torch.sigmoid(alpha * x)


@onnx_op("Clip", host=(1, 2))
def _clip(node: OnnxNode, x: Tensor, low: Tensor | None = None, high: Tensor | None = None) -> Tensor:
    bounds = [numbers(node, low, "min"), numbers(node, high, "max")]
    lower, upper = (None if bound is None else bound[0] for bound in bounds)
    return x if lower is upper is None else torch.clamp(x, lower, upper)


@onnx_op("Mod")
def _modulo(node: OnnxNode, left: Tensor, right: Tensor) -> Tensor:
    return torch.fmod(left, right) if node.get("fmod", 0) else torch.remainder(left, right)


@onnx_op("Cast")
def _cast(node: OnnxNode, x: Tensor) -> Tensor:
    dtype = torch_dtype(node.get("to"), f"the ONNX node {node.name!r} (Cast)")
    return x.to(node.runtime.float_dtype if dtype is torch.float32 and x.is_meta else dtype)


@onnx_op("CastLike")
def _cast_like(node: OnnxNode, x: Tensor, like: Tensor) -> Tensor:
    return x.to(like.dtype)


@onnx_op("Softmax")
def _softmax(node: OnnxNode, x: Tensor) -> Tensor:
    return _along_axis(node, x, torch.softmax)


@onnx_op("LogSoftmax")
def _log_softmax(node: OnnxNode, x: Tensor) -> Tensor:
    return _along_axis(node, x, torch.log_softmax)


def _along_axis(node: OnnxNode, x: Tensor, function: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Applies a normalisation along an axis; before operator set 13, over all axes from that one on together."""
    if node.opset >= 13:
        return function(x, node.get("axis", -1))
    axis = node.get("axis", 1) % x.dim()
    return function(x.flatten(axis), -1).reshape(x.shape)


@onnx_op("Dropout", host=(1, 2))
def _dropout(
    node: OnnxNode, x: Tensor, ratio: Tensor | None = None, training: Tensor | None = None
) -> Tensor:
    probability = (numbers(node, ratio, "ratio") or [0.5])[0]
    return functional.dropout(x, probability, training=node.runtime.training)


@onnx_op("CumSum", host=(1,))
def _cumulative_sum(node: OnnxNode, x: Tensor, axis: Tensor) -> Tensor:
    if node.get("exclusive", 0) or node.get("reverse", 0):
        raise node.refuse("an exclusive or reversed sum")
    return torch.cumsum(x, int(axis), dtype=x.dtype)


def _sum(x: Tensor, axes: Sequence[int], keep: bool) -> Tensor:
    return torch.sum(x, list(axes), keepdim=keep, dtype=x.dtype)


def _mean(x: Tensor, axes: Sequence[int], keep: bool) -> Tensor:
    return torch.mean(x, list(axes), keepdim=keep)


def _product(x: Tensor, axes: Sequence[int], keep: bool) -> Tensor:
    for axis in sorted((axis % x.dim() for axis in axes), reverse=True):
        x = torch.prod(x, axis, keepdim=keep, dtype=x.dtype)
    return x


_REDUCTIONS: dict[str, Callable[[Tensor, Sequence[int], bool], Tensor]] = {
    "ReduceSum": _sum,
    "ReduceMean": _mean,
    "ReduceProd": _product,
    "ReduceMax": lambda x, axes, keep: torch.amax(x, tuple(axes), keepdim=keep),
    "ReduceMin": lambda x, axes, keep: torch.amin(x, tuple(axes), keepdim=keep),
    "ReduceL1": lambda x, axes, keep: torch.linalg.vector_norm(x, 1, tuple(axes), keepdim=keep),
    "ReduceL2": lambda x, axes, keep: torch.linalg.vector_norm(x, 2, tuple(axes), keepdim=keep),
    "ReduceSumSquare": lambda x, axes, keep: _sum(x * x, axes, keep),
    "ReduceLogSumExp": lambda x, axes, keep: torch.logsumexp(x, tuple(axes), keepdim=keep),
}


def _register_reductions() -> None:
    for name, function in _REDUCTIONS.items():

        def run(
            node: OnnxNode,
            x: Tensor,
            axes: Tensor | None = None,
            function: Callable[[Tensor, Sequence[int], bool], Tensor] = function,
        ) -> Tensor:
            chosen = numbers(node, axes, "axes")
            if not chosen:
                if node.get("noop_with_empty_axes", 0):
                    return x
                chosen = list(range(x.dim()))
            return function(x, chosen, bool(node.get("keepdims", 1))) if x.dim() else x

        onnx_op(name, host=(1,))(run)


_register_reductions()


@onnx_op("ArgMax", "ArgMin")
def _arg_extreme(node: OnnxNode, x: Tensor) -> Tensor:
    function = torch.argmax if node.op == "ArgMax" else torch.argmin
    return function(x, dim=node.get("axis", 0), keepdim=bool(node.get("keepdims", 1)))


@onnx_op("TopK", host=(1,))
def _top_k(node: OnnxNode, x: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    largest, ordered = bool(node.get("largest", 1)), bool(node.get("sorted", 1))
    found = torch.topk(x, int(k), dim=node.get("axis", -1), largest=largest, sorted=ordered)
    return found.values, found.indices
