"""ONNX operators that make shapes and constants, and that move data without changing it.

Importing this module registers them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from forerun.adapters.onnx.graph import OnnxNode, numbers, onnx_op

__all__: list[str] = []


@onnx_op("Constant")
def _constant(node: OnnxNode) -> Tensor:
    for name, value in node.attributes.items():
        if name == "value":
            return torch.as_tensor(value)
        if name.startswith(("value_int", "value_float")):
            dtype = torch.int64 if name.startswith("value_int") else torch.float32
            return torch.tensor(value, dtype=dtype)
    raise node.refuse("a constant that is not a tensor of numbers")


@onnx_op("Shape")
def _shape(node: OnnxNode, x: Tensor) -> Tensor:
    return torch.tensor(list(x.shape)[slice(node.get("start", 0), node.get("end"))], dtype=torch.int64)


@onnx_op("Size")
def _size(node: OnnxNode, x: Tensor) -> Tensor:
    return torch.tensor(x.numel(), dtype=torch.int64)


@onnx_op("ConstantOfShape", host=(0,))
def _constant_of_shape(node: OnnxNode, shape: Tensor) -> Tensor:
    value = node.get("value", torch.zeros(1))
    return torch.full(numbers(node, shape) or [], value.item(), dtype=value.dtype)


@onnx_op("Range", host=(0, 1, 2))
def _range(node: OnnxNode, start: Tensor, limit: Tensor, delta: Tensor) -> Tensor:
    bounds = [(numbers(node, bound) or [0])[0] for bound in (start, limit, delta)]
    return torch.arange(*bounds, dtype=start.dtype)


@onnx_op("Reshape", host=(1,))
def _reshape(node: OnnxNode, x: Tensor, shape: Tensor | None = None) -> Tensor:
    sizes = numbers(node, shape, "shape") or []
    if not node.get("allowzero", 0):
        sizes = [x.shape[index] if size == 0 else size for index, size in enumerate(sizes)]
    return torch.reshape(x, sizes)


@onnx_op("Flatten")
def _flatten(node: OnnxNode, x: Tensor) -> Tensor:
    axis = node.get("axis", 1)
    axis = axis + x.dim() if axis < 0 else axis
    rows = 1
    for size in x.shape[:axis]:
        rows *= size
    return torch.reshape(x, (rows, -1))


@onnx_op("Squeeze", host=(1,))
def _squeeze(node: OnnxNode, x: Tensor, axes: Tensor | None = None) -> Tensor:
    chosen = numbers(node, axes, "axes")
    return torch.squeeze(x) if chosen is None else torch.squeeze(x, tuple(chosen))


@onnx_op("Unsqueeze", host=(1,))
def _unsqueeze(node: OnnxNode, x: Tensor, axes: Tensor | None = None) -> Tensor:
    chosen = numbers(node, axes, "axes") or []
    num_axes = x.dim() + len(chosen)
    for axis in sorted(axis % num_axes for axis in chosen):
        x = torch.unsqueeze(x, axis)
    return x


@onnx_op("Transpose")
def _transpose(node: OnnxNode, x: Tensor) -> Tensor:
    return torch.permute(x, tuple(node.get("perm") or reversed(range(x.dim()))))


@onnx_op("Expand", host=(1,))
def _expand(node: OnnxNode, x: Tensor, shape: Tensor) -> Tensor:
    return x.expand(_broadcast(tuple(x.shape), tuple(numbers(node, shape) or ())))


def _broadcast(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...]:
    length = max(len(left), len(right))
    pairs = zip((1,) * (length - len(left)) + left, (1,) * (length - len(right)) + right, strict=True)
    return tuple(b if a == 1 else a for a, b in pairs)


@onnx_op("Tile", host=(1,))
def _tile(node: OnnxNode, x: Tensor, repeats: Tensor) -> Tensor:
    return x.repeat(*(numbers(node, repeats) or []))


@onnx_op("Concat")
def _concat(node: OnnxNode, *parts: Tensor) -> Tensor:
    return torch.cat(parts, node.get("axis", 0))


@onnx_op("Split", host=(1,))
def _split(node: OnnxNode, x: Tensor, sizes: Tensor | None = None) -> tuple[Tensor, ...]:
    axis = node.get("axis", 0)
    chosen = numbers(node, sizes, "split")
    if chosen is None:
        chosen_size = -(-x.shape[axis] // len(node.outputs))
        return torch.split(x, chosen_size, axis)
    return torch.split(x, chosen, axis)


@onnx_op("Slice", host=(1, 2, 3, 4))
def _slice(
    node: OnnxNode,
    x: Tensor,
    starts: Tensor | None = None,
    ends: Tensor | None = None,
    axes: Tensor | None = None,
    steps: Tensor | None = None,
) -> Tensor:
    first, last = numbers(node, starts, "starts") or [], numbers(node, ends, "ends") or []
    chosen = numbers(node, axes, "axes") or list(range(len(first)))
    strides = numbers(node, steps) or [1] * len(first)
    for axis, start, end, step in zip(chosen, first, last, strides, strict=True):
        if step > 0:
            x = x[(slice(None),) * (axis % x.dim()) + (slice(start, end, step),)]
        else:
            kept = list(range(x.shape[axis]))[slice(start, end if end >= -x.shape[axis] else None, step)]
            x = torch.index_select(x, axis, torch.tensor(kept, dtype=torch.int64, device=x.device))
    return x


@onnx_op("Gather")
def _gather(node: OnnxNode, data: Tensor, indices: Tensor) -> Tensor:
    axis = node.get("axis", 0) % data.dim()
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
def _gather_elements(node: OnnxNode, data: Tensor, indices: Tensor) -> Tensor:
    axis = node.get("axis", 0)
    return torch.gather(data, axis, _from_front(indices, data.shape[axis]))


@onnx_op("GatherND")
def _gather_nd(node: OnnxNode, data: Tensor, indices: Tensor) -> Tensor:
    if node.get("batch_dims", 0):
        raise node.refuse("batch_dims")
    return data[tuple(indices.unbind(-1))]


@onnx_op("ScatterND")
def _scatter_nd(node: OnnxNode, data: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    if node.get("reduction", "none") not in ("none", "add"):
        raise node.refuse(f"the reduction {node.get('reduction')!r}")
    return data.index_put(tuple(indices.unbind(-1)), updates, accumulate=node.get("reduction") == "add")


@onnx_op("ScatterElements")
def _scatter_elements(node: OnnxNode, data: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    if node.get("reduction", "none") != "none":
        raise node.refuse(f"the reduction {node.get('reduction')!r}")
    axis = node.get("axis", 0)
    return torch.scatter(data, axis, _from_front(indices, data.shape[axis]), updates)


@onnx_op("OneHot", host=(1,))
def _one_hot(node: OnnxNode, indices: Tensor, depth: Tensor, values: Tensor) -> Tensor:
    if node.get("axis", -1) != -1:
        raise node.refuse("an axis other than the last")
    count = int((numbers(node, depth) or [1])[0])
    hot = indices.unsqueeze(-1) == torch.arange(count, device=indices.device)
    return torch.where(hot, values[1], values[0])


@onnx_op("Trilu", host=(1,))
def _triangle(node: OnnxNode, x: Tensor, k: Tensor | None = None) -> Tensor:
    diagonal = int((numbers(node, k) or [0])[0])
    return torch.triu(x, diagonal) if node.get("upper", 1) else torch.tril(x, diagonal)


_PAD_MODES = {"constant": "constant", "reflect": "reflect", "edge": "replicate", "wrap": "circular"}


@onnx_op("Pad", host=(1, 2, 3))
def _pad(
    node: OnnxNode,
    x: Tensor,
    pads: Tensor | None = None,
    value: Tensor | None = None,
    axes: Tensor | None = None,
) -> Tensor:
    amounts = numbers(node, pads, "pads") or []
    chosen = numbers(node, axes) or list(range(x.dim()))
    both = {axis % x.dim(): (amounts[i], amounts[i + len(chosen)]) for i, axis in enumerate(chosen)}
    mode = _PAD_MODES[node.get("mode", "constant")]
    padded = [size for axis in reversed(range(x.dim())) for size in both.get(axis, (0, 0))]
    while len(padded) > 2 and padded[-2:] == [0, 0]:
        padded = padded[:-2]
    if not any(padded):
        return x
    fill = (numbers(node, value, "value") or [0.0])[0]
    return functional.pad(x, padded, mode, fill) if mode == "constant" else functional.pad(x, padded, mode)


_RESIZE_MODES = {
    ("linear", 1): "linear",
    ("linear", 2): "bilinear",
    ("linear", 3): "trilinear",
    ("cubic", 2): "bicubic",
}


@onnx_op("Resize", host=(1, 2, 3))
def _resize(
    node: OnnxNode,
    x: Tensor,
    roi: Tensor | None = None,
    scales: Tensor | None = None,
    sizes: Tensor | None = None,
) -> Tensor:
    if node.opset < 11:  # there the second input holds the scales
        roi, scales = None, roi
    axes = [axis % x.dim() for axis in node.get("axes") or range(x.dim())]
    return _resized(node, x, axes, numbers(node, scales), numbers(node, sizes))


@onnx_op("Upsample", host=(1,))
def _upsample(node: OnnxNode, x: Tensor, scales: Tensor | None = None) -> Tensor:
    return _resized(node, x, list(range(x.dim())), numbers(node, scales, "scales"), None)


def _resized(
    node: OnnxNode, x: Tensor, axes: list[int], scales: list[Any] | None, sizes: list[Any] | None
) -> Tensor:
    target = list(x.shape)
    for index, axis in enumerate(axes):
        target[axis] = int(sizes[index]) if sizes else int(x.shape[axis] * (scales or [1.0] * x.dim())[index])
    if target[:2] != list(x.shape[:2]):
        raise node.refuse("resizing of the batch or channel axis")
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
def _depth_to_space(node: OnnxNode, x: Tensor) -> Tensor:
    block = node.get("blocksize")
    if node.get("mode", "DCR") == "CRD":
        return functional.pixel_shuffle(x, block)
    batch, channels, height, width = x.shape
    parts = x.reshape(batch, block, block, channels // block**2, height, width)
    return parts.permute(0, 3, 4, 1, 5, 2).reshape(batch, channels // block**2, height * block, width * block)


@onnx_op("SpaceToDepth")
def _space_to_depth(node: OnnxNode, x: Tensor) -> Tensor:
    block = node.get("blocksize")
    batch, channels, height, width = x.shape
    parts = x.reshape(batch, channels, height // block, block, width // block, block)
    return parts.permute(0, 3, 5, 1, 2, 4).reshape(
        batch, channels * block**2, height // block, width // block
    )
