"""ONNX operators that are layers: products, convolutions, pooling, normalisation, attention, recurrence.

Importing this module registers them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from forerun.adapters.onnx.graph import OnnxNode, onnx_op

__all__: list[str] = []


onnx_op("MatMul")(torch.matmul)
onnx_op("Einsum")(lambda *operands, equation: torch.einsum(equation, *operands))
onnx_op("GlobalAveragePool")(lambda x: torch.mean(x, list(range(2, x.dim())), keepdim=True))
onnx_op("GlobalMaxPool")(lambda x: torch.amax(x, tuple(range(2, x.dim())), keepdim=True))
onnx_op("LpNormalization")(lambda x, *, p=2, axis=-1: functional.normalize(x, p, axis))
onnx_op("InstanceNormalization")(
    lambda x, scale, bias, *, epsilon=1e-5: functional.instance_norm(x, weight=scale, bias=bias, eps=epsilon)
)
onnx_op("RMSNormalization", "SimplifiedLayerNormalization")(
    lambda x, scale, *, axis=-1, epsilon=1e-5: functional.rms_norm(x, x.shape[axis:], scale, epsilon)
)


@onnx_op("Gemm")
def _gemm(
    a: Tensor,
    b: Tensor,
    c: Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    transA: int = 0,
    transB: int = 0,
) -> Tensor:
    a = a.t() if transA else a
    if transB and alpha == beta == 1.0 and (c is None or c.dim() == 1):
        return functional.linear(a, b, c)
    b = b.t() if transB else b
    return torch.mm(a, b) * alpha if c is None else torch.addmm(c, a, b, beta=beta, alpha=alpha)


def _window(node: OnnxNode, kernel: Sequence[int], sizes: Sequence[int]) -> tuple[list[int], ...]:
    """Strides, dilations and padding (begin of every axis, end of every axis) of a window over these sizes."""
    strides = node.get("strides") or [1] * len(kernel)
    dilations = node.get("dilations") or [1] * len(kernel)
    automatic = node.get("auto_pad", "NOTSET")
    if automatic == "NOTSET":
        return strides, dilations, list(node.get("pads") or [0] * (2 * len(kernel)))
    if automatic == "VALID":
        return strides, dilations, [0] * (2 * len(kernel))
    begins, ends = [], []
    for size, width, stride, dilation in zip(sizes, kernel, strides, dilations, strict=True):
        span = dilation * (width - 1) + 1
        total = max(0, (-(-size // stride) - 1) * stride + span - size)
        # An odd pixel of padding goes to the end (SAME_UPPER) or the beginning (SAME_LOWER).
        small, large = total // 2, total - total // 2
        begins.append(small if automatic == "SAME_UPPER" else large)
        ends.append(large if automatic == "SAME_UPPER" else small)
    return strides, dilations, begins + ends


def _is_symmetric(pads: Sequence[int]) -> bool:
    half = len(pads) // 2
    return list(pads[:half]) == list(pads[half:])


def _padded(x: Tensor, pads: Sequence[int], fill: float = 0.0) -> Tensor:
    half = len(pads) // 2
    reverse = [size for axis in reversed(range(half)) for size in (pads[axis], pads[axis + half])]
    return functional.pad(x, reverse, value=fill)


@onnx_op("Conv")
def _conv(node: OnnxNode, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    num_axes = weight.dim() - 2
    strides, dilations, pads = _window(node, weight.shape[2:], x.shape[2:])
    # Convolutions of PyTorch pad both ends alike.
    if not _is_symmetric(pads):
        x, pads = _padded(x, pads), [0] * len(pads)
    run = (functional.conv1d, functional.conv2d, functional.conv3d)[num_axes - 1]
    return run(x, weight, bias, strides, pads[:num_axes], dilations, node.get("group", 1))


@onnx_op("ConvTranspose")
def _conv_transpose(node: OnnxNode, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    num_axes = weight.dim() - 2
    strides, dilations, pads = _window(node, weight.shape[2:], x.shape[2:])
    is_automatic = node.get("auto_pad", "NOTSET") not in ("NOTSET", "VALID")
    if node.get("output_shape") or is_automatic or not _is_symmetric(pads):
        raise node.refuse("output_shape, automatic or one-sided padding")
    of_axes = (functional.conv_transpose1d, functional.conv_transpose2d, functional.conv_transpose3d)
    extra = node.get("output_padding") or [0] * num_axes
    run = of_axes[num_axes - 1]
    return run(x, weight, bias, strides, pads[:num_axes], extra, node.get("group", 1), dilations)


@onnx_op("MaxPool")
def _max_pool(node: OnnxNode, x: Tensor) -> Tensor:
    kernel = node.get("kernel_shape")
    num_axes = len(kernel)
    if len([name for name in node.outputs if name]) > 1:
        raise node.refuse("the output of indices")
    strides, dilations, pads = _window(node, kernel, x.shape[2:])
    # PyTorch pads both sides alike and by half a window at most; padding apart costs a kernel, as it does there.
    if not _is_symmetric(pads) or any(2 * pad > width for pad, width in zip(pads, kernel, strict=False)):
        x, pads = _padded(x, pads, float("-inf")), [0] * len(pads)
    run = (functional.max_pool1d, functional.max_pool2d, functional.max_pool3d)[num_axes - 1]
    return run(x, kernel, strides, pads[:num_axes], dilations, bool(node.get("ceil_mode", 0)))


@onnx_op("AveragePool")
def _average_pool(node: OnnxNode, x: Tensor) -> Tensor:
    kernel = node.get("kernel_shape")
    num_axes = len(kernel)
    strides, dilations, pads = _window(node, kernel, x.shape[2:])
    if any(dilation != 1 for dilation in dilations):
        raise node.refuse("dilations")
    counts_padding, ceil = bool(node.get("count_include_pad", 0)), bool(node.get("ceil_mode", 0))
    run = (functional.avg_pool1d, functional.avg_pool2d, functional.avg_pool3d)[num_axes - 1]
    if _is_symmetric(pads):
        return run(x, kernel, strides, pads[:num_axes], ceil, counts_padding)
    # Zeros around count in PyTorch's mean: what the mean of ones lacks is taken out again.
    pooled: Tensor = run(_padded(x, pads), kernel, strides, 0, ceil)
    if counts_padding:
        return pooled
    share: Tensor = run(_padded(x.new_ones((1, 1, *x.shape[2:])), pads), kernel, strides, 0, ceil)
    return pooled / share


@onnx_op("BatchNormalization")
def _batch_norm(
    node: OnnxNode,
    x: Tensor,
    scale: Tensor,
    bias: Tensor,
    mean: Tensor,
    var: Tensor,
    *,
    momentum: float = 0.9,
    epsilon: float = 1e-5,
) -> Tensor:
    # Exporters store equal tensors once, so untrained statistics may be a parameter of another layer.
    mean, var = (value.data if value.requires_grad else value for value in (mean, var))
    # ONNX gives the share of the old statistics, PyTorch that of the new ones.
    return functional.batch_norm(x, mean, var, scale, bias, node.runtime.training, 1.0 - momentum, epsilon)


@onnx_op("GroupNormalization")
def _group_norm(x: Tensor, scale: Tensor, bias: Tensor, *, num_groups: int, epsilon: float = 1e-5) -> Tensor:
    if scale.shape[0] != x.shape[1]:  # one value per group before operator set 21
        each = x.shape[1] // num_groups
        scale, bias = (value.unsqueeze(1).expand(-1, each).flatten() for value in (scale, bias))
    return functional.group_norm(x, num_groups, scale, bias, epsilon)


@onnx_op("LayerNormalization")
def _layer_norm(
    x: Tensor, scale: Tensor, bias: Tensor | None = None, *, axis: int = -1, epsilon: float = 1e-5
) -> Tensor:
    return functional.layer_norm(x, x.shape[axis:], scale, bias, epsilon)


def _split_heads(x: Tensor, num_heads: int) -> Tensor:
    """Splits (batch, tokens, heads x size) into (batch, heads, tokens, size)."""
    return x.reshape(*x.shape[:2], num_heads, -1).transpose(1, 2)


@onnx_op("Attention")
def _attention(
    node: OnnxNode, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *past: Tensor
) -> Tensor:
    if any(tensor is not None for tensor in past) or node.get("softcap", 0.0):
        raise node.refuse("cached keys or a soft cap")
    flat = q.dim() == 3
    if flat:
        heads, key_heads = node.get("q_num_heads"), node.get("kv_num_heads")
        q = _split_heads(q, heads)
        k, v = _split_heads(k, key_heads), _split_heads(v, key_heads)
    out = functional.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=bool(node.get("is_causal", 0)),
        scale=node.get("scale"),
        enable_gqa=k.shape[1] != q.shape[1],
    )
    return out.transpose(1, 2).flatten(2) if flat else out


# Gates in ONNX' order, as positions in PyTorch's: LSTM i,o,f,c to i,f,g,o; GRU z,r,h to r,z,n.
_GATE_ORDER = {"LSTM": (0, 2, 3, 1), "GRU": (1, 0, 2), "RNN": (0,)}


def _recurrent_weights(node: OnnxNode, w: Tensor, r: Tensor, b: Tensor | None) -> list[Tensor]:
    """Weights in PyTorch's order. On meta only the shapes matter, and they are equal: nothing is moved."""
    order = _GATE_ORDER[node.op]

    def sorted_gates(x: Tensor) -> Tensor:
        return x if x.is_meta or len(order) == 1 else torch.cat([x.chunk(len(order))[gate] for gate in order])

    weights: list[Tensor] = []
    for direction in range(w.shape[0]):
        weights += [sorted_gates(w[direction]), sorted_gates(r[direction])]
        if b is not None:
            weights += [sorted_gates(half) for half in b[direction].chunk(2)]
    return weights


@onnx_op("LSTM", "GRU", "RNN", host={4: ""})
def _recurrent(
    node: OnnxNode,
    x: Tensor,
    w: Tensor,
    r: Tensor,
    b: Tensor | None = None,
    lengths: list[int] | None = None,
    hidden: Tensor | None = None,
    cell: Tensor | None = None,
    peepholes: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """A recurrent layer over x (steps, batch, features); its output is (steps, directions, batch, hidden)."""
    _check_recurrent(node, lengths, peepholes)
    num_directions, hidden_size = w.shape[0], r.shape[-1]
    state_shape = (num_directions, x.shape[1], hidden_size)
    hidden = x.new_zeros(state_shape) if hidden is None else hidden
    settings = (b is not None, 1, 0.0, node.runtime.training, num_directions == 2, False)
    weights = _recurrent_weights(node, w, r, b)
    if node.op == "LSTM":
        cell = x.new_zeros(state_shape) if cell is None else cell
        output, *final = torch.lstm(x, (hidden, cell), weights, *settings)
    elif node.op == "GRU":
        output, *final = torch.gru(x, hidden, weights, *settings)
    else:
        output, *final = torch.rnn_tanh(x, hidden, weights, *settings)
    output = output.view(*output.shape[:2], num_directions, hidden_size).transpose(1, 2)
    return output, *final


def _check_recurrent(node: OnnxNode, lengths: list[int] | None, peepholes: Tensor | None) -> None:
    if node.get("direction", "forward") == "reverse" or node.get("layout", 0):
        raise node.refuse("reversed direction or batch-first layout")
    if node.get("activations") or node.get("clip") or node.get("input_forget", 0) or peepholes is not None:
        activations = [a.decode() if isinstance(a, bytes) else a for a in node.get("activations") or []]
        usual = {"LSTM": ["Sigmoid", "Tanh", "Tanh"], "GRU": ["Sigmoid", "Tanh"], "RNN": ["Tanh"]}[node.op]
        if not activations or activations[: len(usual)] != usual or node.get("clip") or peepholes is not None:
            raise node.refuse("activations, clipping or peepholes that PyTorch's layers do not have")
    # PyTorch's GRU resets after the product: the other order is another function.
    if node.op == "GRU" and not node.get("linear_before_reset", 0):
        raise node.refuse("linear_before_reset=0")
    if lengths is not None and len(set(lengths)) > 1:
        raise node.refuse("sequences of different lengths")
