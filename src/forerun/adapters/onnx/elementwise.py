"""ONNX operators that work element by element, reductions, and those that make shapes and constants or move data.

Importing this module registers them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from forerun.adapters.onnx.graph import OnnxNode, numbers, onnx_op, torch_dtype

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


_OF_THE_SAME_NAME = (
    "Abs", "Acos", "Add", "Asin", "Atan", "Ceil", "Cos", "Erf", "Exp", "Floor", "IsInf", "IsNaN",
    "Log", "Mul", "Neg", "Reciprocal", "Round", "Sigmoid", "Sign", "Sin", "Sqrt", "Sub", "Tan", "Tanh",
)  # fmt: skip
"""Operators that PyTorch calls the same, in small letters."""

_ELEMENTWISE: dict[str, Callable[..., Any]] = {
    **{name: getattr(torch, name.lower()) for name in _OF_THE_SAME_NAME},
    "And": torch.logical_and,
    "CastLike": lambda x, like: x.to(like.dtype),
    "Celu": lambda x, *, alpha=1.0: functional.celu(x, alpha),
    "Div": _divide,
    "Elu": lambda x, *, alpha=1.0: functional.elu(x, alpha),
    "Equal": torch.eq,
    "Gelu": lambda x, *, approximate="none": functional.gelu(x, approximate=approximate),
    "Greater": torch.gt,
    "GreaterOrEqual": torch.ge,
    "HardSigmoid": _hard_sigmoid,
    "HardSwish": functional.hardswish,
    "Identity": lambda x: x,
    "LeakyRelu": lambda x, *, alpha=0.01: functional.leaky_relu(x, alpha),
    "Less": torch.lt,
    "LessOrEqual": torch.le,
    "Max": lambda *xs: reduce(torch.maximum, xs),
    "Mean": lambda *xs: reduce(torch.add, xs) / len(xs),
    "Min": lambda *xs: reduce(torch.minimum, xs),
    "Mish": functional.mish,
    "Mod": lambda left, right, *, fmod=0: (torch.fmod if fmod else torch.remainder)(left, right),
    "Not": torch.logical_not,
    "Or": torch.logical_or,
    "PRelu": lambda x, slope: functional.prelu(x, slope.flatten()),
    "Pow": _power,
    "Relu": functional.relu,
    "Selu": functional.selu,
    "Softplus": functional.softplus,
    "Softsign": functional.softsign,
    "Sum": lambda *xs: reduce(torch.add, xs),
    "Swish": _swish,
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


Numbers = list[Any] | None
"""Values of a host input; None where the node has none."""


@onnx_op("Constant")
def _constant(node: OnnxNode) -> Tensor:
    for name, value in node.attributes.items():
        if name == "value":
            return torch.as_tensor(value)
        if name.startswith(("value_int", "value_float")):
            dtype = torch.int64 if name.startswith("value_int") else torch.float32
            return torch.tensor(value, dtype=dtype)
    raise node.refuse("a constant that is not a tensor of numbers")


onnx_op("Shape")(lambda x, *, start=0, end=None: torch.tensor(list(x.shape)[start:end], dtype=torch.int64))
onnx_op("Size")(lambda x: torch.tensor(x.numel(), dtype=torch.int64))
onnx_op("Squeeze", host={1: "axes"})(
    lambda x, axes: torch.squeeze(x) if axes is None else torch.squeeze(x, tuple(axes))
)
onnx_op("Transpose")(lambda x, *, perm=None: torch.permute(x, tuple(perm or reversed(range(x.dim())))))
# ONNX broadcasts both ways: a size of one in the wanted shape keeps the tensor's own.
onnx_op("Expand", host={1: ""})(
    lambda x, shape: x.expand(torch.broadcast_shapes(tuple(x.shape), tuple(shape or ())))
)
onnx_op("Tile", host={1: ""})(lambda x, repeats: x.repeat(*(repeats or [])))
onnx_op("Concat")(lambda *parts, axis=0: torch.cat(parts, axis))
onnx_op("Trilu", host={1: ""})(
    lambda x, k, *, upper=1: (torch.triu if upper else torch.tril)(x, int((k or [0])[0]))
)


@onnx_op("ConstantOfShape", host={0: ""})
def _constant_of_shape(shape: Numbers, *, value: Tensor | None = None) -> Tensor:
    value = torch.zeros(1) if value is None else value
    return torch.full(shape or [], value.item(), dtype=value.dtype)


@onnx_op("Range", host={0: None, 1: None, 2: None})
def _range(node: OnnxNode, start: Tensor, limit: Tensor, delta: Tensor) -> Tensor:
    bounds = [(numbers(node, bound) or [0])[0] for bound in (start, limit, delta)]
    return torch.arange(*bounds, dtype=start.dtype)


@onnx_op("Reshape", host={1: "shape"})
def _reshape(x: Tensor, shape: Numbers, *, allowzero: int = 0) -> Tensor:
    sizes = shape or []
    if not allowzero:
        sizes = [x.shape[index] if size == 0 else size for index, size in enumerate(sizes)]
    return torch.reshape(x, sizes)


@onnx_op("Flatten")
def _flatten(x: Tensor, *, axis: int = 1) -> Tensor:
    axis = axis + x.dim() if axis < 0 else axis
    return torch.reshape(x, (prod(x.shape[:axis]), -1))


@onnx_op("Unsqueeze", host={1: "axes"})
def _unsqueeze(x: Tensor, axes: Numbers) -> Tensor:
    chosen = axes or []
    num_axes = x.dim() + len(chosen)
    for axis in sorted(axis % num_axes for axis in chosen):
        x = torch.unsqueeze(x, axis)
    return x


@onnx_op("Split", host={1: "split"})
def _split(node: OnnxNode, x: Tensor, sizes: Numbers, *, axis: int = 0) -> tuple[Tensor, ...]:
    if sizes is None:
        return torch.split(x, -(-x.shape[axis] // len(node.outputs)), axis)
    return torch.split(x, sizes, axis)


@onnx_op("Slice", host={1: "starts", 2: "ends", 3: "axes", 4: ""})
def _slice(x: Tensor, starts: Numbers, ends: Numbers, axes: Numbers, steps: Numbers) -> Tensor:
    first, last = starts or [], ends or []
    chosen, strides = axes or list(range(len(first))), steps or [1] * len(first)
    for axis, start, end, step in zip(chosen, first, last, strides, strict=True):
        if step > 0:
            x = x[(slice(None),) * (axis % x.dim()) + (slice(start, end, step),)]
        else:
            # Tensors of PyTorch take no negative step.
            kept = list(range(x.shape[axis]))[slice(start, end if end >= -x.shape[axis] else None, step)]
            x = torch.index_select(x, axis, torch.tensor(kept, dtype=torch.int64, device=x.device))
    return x


@onnx_op("Gather")
def _gather(data: Tensor, indices: Tensor, *, axis: int = 0) -> Tensor:
    axis %= data.dim()
    if indices.dim() == 0 and not indices.is_meta:
        return torch.select(data, axis, int(indices))
    indices = _from_front(indices, data.shape[axis])
    if axis == 0 and data.dim() == 2:
        return functional.embedding(indices, data)
    picked = torch.index_select(data, axis, indices.flatten())
    return picked.reshape((*data.shape[:axis], *indices.shape, *data.shape[axis + 1 :]))


def _from_front(indices: Tensor, size: int) -> Tensor:
    """Indices counted from the front. The signs of indices on meta cannot be seen, so these stay as they are."""
    if indices.is_meta or not bool((indices < 0).any()):
        return indices
    return torch.where(indices < 0, indices + size, indices)


@onnx_op("GatherElements")
def _gather_elements(data: Tensor, indices: Tensor, *, axis: int = 0) -> Tensor:
    return torch.gather(data, axis, _from_front(indices, data.shape[axis]))


@onnx_op("GatherND")
def _gather_nd(node: OnnxNode, data: Tensor, indices: Tensor, *, batch_dims: int = 0) -> Tensor:
    if batch_dims:
        raise node.refuse("batch_dims")
    return data[tuple(indices.unbind(-1))]


@onnx_op("ScatterND")
def _scatter_nd(
    node: OnnxNode, data: Tensor, indices: Tensor, updates: Tensor, *, reduction: str = "none"
) -> Tensor:
    if reduction not in ("none", "add"):
        raise node.refuse(f"the reduction {reduction!r}")
    return data.index_put(tuple(indices.unbind(-1)), updates, accumulate=reduction == "add")


@onnx_op("ScatterElements")
def _scatter_elements(
    node: OnnxNode, data: Tensor, indices: Tensor, updates: Tensor, *, axis: int = 0, reduction: str = "none"
) -> Tensor:
    if reduction != "none":
        raise node.refuse(f"the reduction {reduction!r}")
    return torch.scatter(data, axis, _from_front(indices, data.shape[axis]), updates)


@onnx_op("OneHot", host={1: ""})
def _one_hot(node: OnnxNode, indices: Tensor, depth: Numbers, values: Tensor, *, axis: int = -1) -> Tensor:
    if axis != -1:
        raise node.refuse("an axis other than the last")
    count = int((depth or [1])[0])
    hot = indices.unsqueeze(-1) == torch.arange(count, device=indices.device)
    return torch.where(hot, values[1], values[0])


_PAD_MODES = {"constant": "constant", "reflect": "reflect", "edge": "replicate", "wrap": "circular"}


@onnx_op("Pad", host={1: "pads", 2: "value", 3: ""})
def _pad(x: Tensor, pads: Numbers, value: Numbers, axes: Numbers, *, mode: str = "constant") -> Tensor:
    amounts, chosen = pads or [], axes or list(range(x.dim()))
    both = {axis % x.dim(): (amounts[i], amounts[i + len(chosen)]) for i, axis in enumerate(chosen)}
    padded = [size for axis in reversed(range(x.dim())) for size in both.get(axis, (0, 0))]
    # PyTorch pads by reflection in the innermost axes only: outer ones must not be named.
    while len(padded) > 2 and padded[-2:] == [0, 0]:
        padded = padded[:-2]
    if not any(padded):
        return x
    fill = (value or [0.0])[0] if mode == "constant" else None
    return functional.pad(x, padded, _PAD_MODES[mode], fill)


_RESIZE_MODES = {
    ("linear", 1): "linear",
    ("linear", 2): "bilinear",
    ("linear", 3): "trilinear",
    ("cubic", 2): "bicubic",
}


@onnx_op("Resize", host={1: "", 2: "", 3: ""})
def _resize(node: OnnxNode, x: Tensor, roi: Numbers, scales: Numbers, sizes: Numbers) -> Tensor:
    if node.opset < 11:  # there the second input holds the scales
        scales = roi
    axes = [axis % x.dim() for axis in node.get("axes") or range(x.dim())]
    return _resized(node, x, axes, scales, sizes)


@onnx_op("Upsample", host={1: "scales"})
def _upsample(node: OnnxNode, x: Tensor, scales: Numbers) -> Tensor:
    return _resized(node, x, list(range(x.dim())), scales, None)


def _resized(node: OnnxNode, x: Tensor, axes: list[int], scales: Numbers, sizes: Numbers) -> Tensor:
    target = list(x.shape)
    for index, axis in enumerate(axes):
        target[axis] = int(sizes[index]) if sizes else int(x.shape[axis] * (scales or [1.0] * x.dim())[index])
    if target[:2] != list(x.shape[:2]):
        raise node.refuse("resizing of the batch or channel axis")
    # Exporters write a resize to the same size where the original had a dynamic one.
    if target == list(x.shape):
        return x
    if node.get("mode", "nearest") == "nearest":
        return functional.interpolate(x, size=target[2:], mode="nearest")
    mode = _RESIZE_MODES.get((node.get("mode"), x.dim() - 2))
    if mode is None:
        raise node.refuse(f"the mode {node.get('mode')!r} on {x.dim() - 2} axes")
    aligned = node.get("coordinate_transformation_mode", "half_pixel") == "align_corners"
    antialias = bool(node.get("antialias", 0))
    return functional.interpolate(x, size=target[2:], mode=mode, align_corners=aligned, antialias=antialias)


@onnx_op("DepthToSpace")
def _depth_to_space(x: Tensor, *, blocksize: int, mode: str = "DCR") -> Tensor:
    if mode == "CRD":
        return functional.pixel_shuffle(x, blocksize)
    batch, channels, height, width = x.shape
    depth = channels // blocksize**2
    parts = x.reshape(batch, blocksize, blocksize, depth, height, width)
    return parts.permute(0, 3, 4, 1, 5, 2).reshape(batch, depth, height * blocksize, width * blocksize)


@onnx_op("SpaceToDepth")
def _space_to_depth(x: Tensor, *, blocksize: int) -> Tensor:
    batch, channels, height, width = x.shape
    rows, columns = height // blocksize, width // blocksize
    parts = x.reshape(batch, channels, rows, blocksize, columns, blocksize)
    return parts.permute(0, 3, 5, 1, 2, 4).reshape(batch, channels * blocksize**2, rows, columns)
