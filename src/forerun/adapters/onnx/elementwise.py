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

from forerun.adapters.onnx.graph import OnnxNode, onnx_op, torch_dtype

__all__: list[str] = []


def _divide(left: Tensor, right: Tensor) -> Tensor:
    is_whole = not left.is_floating_point() and not right.is_floating_point()
    return torch.div(left, right, rounding_mode="trunc") if is_whole else torch.div(left, right)


def _power(base: Tensor, exponent: Tensor) -> Tensor:
    is_known = exponent.dim() == 0 and not exponent.is_meta
    power: Tensor = torch.pow(base, exponent.item() if is_known else exponent)
    return power.to(base.dtype)


def _hard_sigmoid(x: Tensor, *, alpha: float = 0.2, beta: float = 0.5) -> Tensor:
    if abs(alpha - 1 / 6) < 1e-4 and beta == 0.5:
        return functional.hardsigmoid(x)
    line: Tensor = alpha * x + beta
    return line.clamp(0, 1)


def _swish(x: Tensor, *, alpha: float = 1.0) -> Tensor:
    return functional.silu(x) if alpha == 1.0 else x * torch.sigmoid(alpha * x)


_ELEMENTWISE: dict[str, Callable[..., Any]] = {
    "Abs": torch.abs,
    "Acos": torch.acos,
    "Add": torch.add,
    "And": torch.logical_and,
    "Asin": torch.asin,
    "Atan": torch.atan,
    "CastLike": lambda x, like: x.to(like.dtype),
    "Ceil": torch.ceil,
    "Celu": lambda x, *, alpha=1.0: functional.celu(x, alpha),
    "Cos": torch.cos,
    "Div": _divide,
    "Elu": lambda x, *, alpha=1.0: functional.elu(x, alpha),
    "Equal": torch.eq,
    "Erf": torch.erf,
    "Exp": torch.exp,
    "Floor": torch.floor,
    "Gelu": lambda x, *, approximate="none": functional.gelu(x, approximate=approximate),
    "Greater": torch.gt,
    "GreaterOrEqual": torch.ge,
    "HardSigmoid": _hard_sigmoid,
    "HardSwish": functional.hardswish,
    "Identity": lambda x: x,
    "IsInf": torch.isinf,
    "IsNaN": torch.isnan,
    "LeakyRelu": lambda x, *, alpha=0.01: functional.leaky_relu(x, alpha),
    "Less": torch.lt,
    "LessOrEqual": torch.le,
    "Log": torch.log,
    "Max": lambda *xs: reduce(torch.maximum, xs),
    "Mean": lambda *xs: reduce(torch.add, xs) / len(xs),
    "Min": lambda *xs: reduce(torch.minimum, xs),
    "Mish": functional.mish,
    "Mod": lambda left, right, *, fmod=0: (torch.fmod if fmod else torch.remainder)(left, right),
    "Mul": torch.mul,
    "Neg": torch.neg,
    "Not": torch.logical_not,
    "Or": torch.logical_or,
    "PRelu": lambda x, slope: functional.prelu(x, slope.flatten()),
    "Pow": _power,
    "Reciprocal": torch.reciprocal,
    "Relu": functional.relu,
    "Round": torch.round,
    "Selu": functional.selu,
    "Sigmoid": torch.sigmoid,
    "Sign": torch.sign,
    "Sin": torch.sin,
    "Softplus": functional.softplus,
    "Softsign": functional.softsign,
    "Sqrt": torch.sqrt,
    "Sub": torch.sub,
    "Sum": lambda *xs: reduce(torch.add, xs),
    "Swish": _swish,
    "Tan": torch.tan,
    "Tanh": torch.tanh,
    "Where": torch.where,
    "Xor": torch.logical_xor,
}

for _name, _function in _ELEMENTWISE.items():
    onnx_op(_name)(_function)


@onnx_op("Clip", host={1: "min", 2: "max"})
def _clip(x: Tensor, low: list[float] | None, high: list[float] | None) -> Tensor:
    lower, upper = (None if bound is None else bound[0] for bound in (low, high))
    return x if lower is upper is None else torch.clamp(x, lower, upper)


@onnx_op("Cast")
def _cast(node: OnnxNode, x: Tensor, *, to: int) -> Tensor:
    dtype = torch_dtype(to, f"the ONNX node {node.name!r} (Cast)")
    return x.to(node.runtime.float_dtype if dtype is torch.float32 and x.is_meta else dtype)


@onnx_op("Softmax", "LogSoftmax")
def _softmax(node: OnnxNode, x: Tensor) -> Tensor:
    """Normalises along an axis; before operator set 13, over all axes from that one on together."""
    function = torch.softmax if node.op == "Softmax" else torch.log_softmax
    if node.opset >= 13:
        return function(x, node.get("axis", -1))
    axis = node.get("axis", 1) % x.dim()
    return function(x.flatten(axis), -1).reshape(x.shape)


@onnx_op("Dropout", host={1: "ratio", 2: ""})
def _dropout(node: OnnxNode, x: Tensor, ratio: list[float] | None, _: list[bool] | None) -> Tensor:
    # Whether it drops is the question's phase, not the mode in which the file was exported.
    return functional.dropout(x, (ratio or [0.5])[0], training=node.runtime.training)


@onnx_op("CumSum", host={1: ""})
def _cumulative_sum(
    node: OnnxNode, x: Tensor, axis: list[int], *, exclusive: int = 0, reverse: int = 0
) -> Tensor:
    if exclusive or reverse:
        raise node.refuse("an exclusive or reversed sum")
    return torch.cumsum(x, axis[0], dtype=x.dtype)


def _sum(x: Tensor, axes: Sequence[int], keep: bool) -> Tensor:
    return torch.sum(x, list(axes), keepdim=keep, dtype=x.dtype)


def _product(x: Tensor, axes: Sequence[int], keep: bool) -> Tensor:
    for axis in sorted((axis % x.dim() for axis in axes), reverse=True):
        x = torch.prod(x, axis, keepdim=keep, dtype=x.dtype)
    return x


_REDUCTIONS: dict[str, Callable[[Tensor, Sequence[int], bool], Tensor]] = {
    "ReduceSum": _sum,
    "ReduceMean": lambda x, axes, keep: torch.mean(x, list(axes), keepdim=keep),
    "ReduceProd": _product,
    "ReduceMax": lambda x, axes, keep: torch.amax(x, tuple(axes), keepdim=keep),
    "ReduceMin": lambda x, axes, keep: torch.amin(x, tuple(axes), keepdim=keep),
    "ReduceL1": lambda x, axes, keep: torch.linalg.vector_norm(x, 1, tuple(axes), keepdim=keep),
    "ReduceL2": lambda x, axes, keep: torch.linalg.vector_norm(x, 2, tuple(axes), keepdim=keep),
    "ReduceSumSquare": lambda x, axes, keep: _sum(x * x, axes, keep),
    "ReduceLogSumExp": lambda x, axes, keep: torch.logsumexp(x, tuple(axes), keepdim=keep),
}


def _reduction(function: Callable[[Tensor, Sequence[int], bool], Tensor]) -> Callable[..., Tensor]:
    def run(x: Tensor, axes: list[int] | None, *, keepdims: int = 1, noop_with_empty_axes: int = 0) -> Tensor:
        if not x.dim() or (not axes and noop_with_empty_axes):
            return x
        return function(x, axes or range(x.dim()), bool(keepdims))

    return run


for _name, _reduced in _REDUCTIONS.items():
    onnx_op(_name, host={1: "axes"})(_reduction(_reduced))


@onnx_op("ArgMax", "ArgMin")
def _arg_extreme(node: OnnxNode, x: Tensor, *, axis: int = 0, keepdims: int = 1) -> Tensor:
    function = torch.argmax if node.op == "ArgMax" else torch.argmin
    return function(x, dim=axis, keepdim=bool(keepdims))


@onnx_op("TopK", host={1: "k"})
def _top_k(
    x: Tensor, k: list[int], *, axis: int = -1, largest: int = 1, sorted: int = 1
) -> tuple[Tensor, Tensor]:
    found = torch.topk(x, k[0], dim=axis, largest=bool(largest), sorted=bool(sorted))
    return found.values, found.indices
