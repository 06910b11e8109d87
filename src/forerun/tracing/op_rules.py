"""FLOP and byte formulas of PyTorch's operations.

A rule turns one ``Call`` into the cost rows of its kernels. Work is counted as the algorithm needs it (a
multiply-add is two FLOP, a convolution is direct), traffic as every operand moving once. What a device makes
of it is the cost model's business.

Matrix sizes are (groups, m, n, k): ``groups`` products of (m, k) x (k, n). For a convolution with batch B,
input (Cin, H, W), output (Cout, Ho, Wo), window area a and g groups:

    forward          (g, B Ho Wo, Cout/g, Cin/g a)
    data gradient    (g, B H W,   Cin/g,  Cout/g a)
    weight gradient  (g, Cout/g,  Cin/g a, B Ho Wo)

each of 2 B Ho Wo Cout (Cin/g) a FLOP.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, prod
from typing import Any

from forerun.tracing.calls import Call, CostRow, TensorInfo
from forerun.workload.graph import OpClass

__all__ = ["RULES", "cost_rows"]

Rule = Callable[[Call], list[CostRow]]
RULES: dict[str, Rule] = {}

NUM_GATES = {"lstm": 4, "gru": 3, "rnn": 1}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Registers a rule; two rules for one operation are refused."""

    def register(function: Rule) -> Rule:
        for name in names:
            assert name not in RULES, f"two rules for {name}"
            RULES[name] = function
        return function

    return register


def cost_rows(call: Call) -> list[CostRow]:
    """Cost of a call; an operation without a rule is charged by its traffic and marked unsupported."""
    known = RULES.get(call.name)
    if known is not None:
        return known(call)
    if call.name.startswith("_foreach_") or call.name.startswith("_fused_"):
        return [_multi_tensor(call)]
    return [_streaming(call, OpClass.UNKNOWN, is_supported=False)]


# ---------------------------------------------------------------------------------------------------------
# operations that stream their operands


def _traffic(call: Call) -> tuple[float, float, float, int]:
    """(read bytes, written bytes, elements of the largest operand, element bytes of it)."""
    inputs, outputs = call.tensors(), call.outputs
    largest = max((*inputs, *outputs), key=lambda t: t.num_elements, default=TensorInfo((), 4, 0))
    read = float(sum(t.touched_bytes for t in inputs))
    return read, float(sum(t.touched_bytes for t in outputs)), float(largest.num_elements), largest.element_bytes


def _streaming(
    call: Call, op_class: OpClass, flops_per_element: float = 1.0, width: float = 0.0, is_supported: bool = True
) -> CostRow:
    read, write, elements, element_bytes = _traffic(call)
    return CostRow(
        op_class=op_class,
        flops=flops_per_element * elements,
        read_bytes=read,
        write_bytes=write,
        element_bytes=element_bytes,
        elements=elements,
        width=width,
        is_supported=is_supported,
    )


def _streaming_rules(op_class: OpClass, flops_per_element: float, names: str) -> None:
    @rule(*names.split())
    def stream(call: Call) -> list[CostRow]:
        return [_streaming(call, op_class, flops_per_element)]


_streaming_rules(
    OpClass.ACTIVATION,
    4.0,
    """relu relu_ relu6 threshold_backward gelu gelu_backward silu silu_ silu_backward hardswish hardswish_
    hardswish_backward hardsigmoid hardsigmoid_ hardsigmoid_backward hardtanh hardtanh_ hardtanh_backward sigmoid
    sigmoid_ sigmoid_backward tanh tanh_ tanh_backward leaky_relu leaky_relu_ leaky_relu_backward elu elu_
    elu_backward mish mish_ mish_backward softplus softplus_backward _prelu_kernel _prelu_kernel_backward
    log_sigmoid_forward log_sigmoid_backward glu glu_backward erf celu selu""",
)
_streaming_rules(OpClass.MUL, 1.0, "mul mul_ div div_ addcmul addcmul_ addcdiv addcdiv_")
_streaming_rules(OpClass.ADD, 1.0, "add add_ sub sub_ rsub lerp lerp_")
_streaming_rules(
    OpClass.ELEMENTWISE,
    1.0,
    """abs abs_ acos asin atan atan2 bernoulli bernoulli_ bitwise_and bitwise_and_ bitwise_not bitwise_or
    bitwise_or_ bitwise_xor ceil clamp clamp_ clamp_min clamp_min_ clamp_max clamp_max_ cos cosh eq eq_ erfinv exp
    exp_ exp2 expm1 exponential_ floor floor_ floor_divide fmod ge gt isinf isnan isfinite le log log10 log1p log2
    log_ logical_and logical_and_ logical_not logical_or logical_or_ lt masked_fill masked_fill_ maximum minimum ne
    neg neg_ normal_ pow pow_ reciprocal reciprocal_ remainder round rsqrt rsqrt_ sign sgn sin sinh sqrt sqrt_
    square tan tril tril_ triu triu_ trunc uniform_ where xlogy random_ nan_to_num nan_to_num_ polar
    view_as_complex real imag conj_physical __or__ __and__ heaviside sinc copysign signbit logaddexp hypot""",
)
_streaming_rules(
    OpClass.COPY,
    0.0,
    """cat clone roll flip repeat stack constant_pad_nd reflection_pad1d reflection_pad1d_backward reflection_pad2d
    reflection_pad2d_backward replication_pad2d replication_pad2d_backward im2col col2im unfold_backward
    index_select gather scatter scatter_ scatter_add scatter_add_ index index_put index_put_ _unsafe_index
    _unsafe_index_put index_add index_add_ take tril_indices triu_indices repeat_interleave pixel_shuffle
    pixel_unshuffle channel_shuffle native_channel_shuffle select_scatter slice_scatter index_fill index_fill_
    masked_scatter masked_scatter_ diag_embed diagonal_scatter index_copy index_copy_ take_along_dim
    as_strided_scatter masked_scatter_backward _foreach_copy _reshape_copy _unsafe_masked_index
    _unsafe_masked_index_put_accumulate split_with_sizes_copy roll_backward rot90""",
)
_streaming_rules(
    OpClass.REDUCE,
    1.0,
    """sum mean amax amin max min argmax argmin prod var var_mean std std_mean linalg_vector_norm norm any all
    cumsum cumprod logsumexp nll_loss_forward nll_loss_backward nll_loss2d_forward nll_loss2d_backward mse_loss
    mse_loss_backward smooth_l1_loss smooth_l1_loss_backward huber_loss huber_loss_backward
    binary_cross_entropy binary_cross_entropy_backward binary_cross_entropy_with_logits topk sort bincount
    soft_margin_loss count_nonzero nansum median mode histc searchsorted bucketize dist cummax aminmax
    linalg_matrix_norm sum_to_size logcumsumexp unique_consecutive _unique2 cdist_backward""",
)
_streaming_rules(OpClass.EMBEDDING, 0.0, "embedding_dense_backward _embedding_bag_dense_backward embedding_renorm_")
_streaming_rules(
    OpClass.AVG_POOL,
    2.0,
    """avg_pool1d avg_pool2d avg_pool2d_backward avg_pool3d avg_pool3d_backward _adaptive_avg_pool2d
    _adaptive_avg_pool2d_backward _adaptive_avg_pool3d _adaptive_avg_pool3d_backward upsample_nearest1d
    upsample_nearest1d_backward upsample_nearest2d upsample_nearest2d_backward upsample_bilinear2d
    upsample_bilinear2d_backward upsample_bicubic2d upsample_bicubic2d_backward _upsample_bilinear2d_aa
    _upsample_bilinear2d_aa_backward _upsample_bicubic2d_aa _upsample_bicubic2d_aa_backward upsample_linear1d
    upsample_linear1d_backward upsample_trilinear3d upsample_trilinear3d_backward upsample_nearest3d
    upsample_nearest3d_backward _upsample_nearest_exact2d _upsample_nearest_exact2d_backward grid_sampler_2d
    grid_sampler_2d_backward _upsample_nearest_exact1d""",
)
_streaming_rules(OpClass.DROPOUT, 2.0, "native_dropout native_dropout_backward rrelu_with_noise _fused_dropout")


@rule("zero_", "zeros_like", "zeros", "ones", "ones_like", "full", "full_like", "fill_", "fill", "arange", "eye", "rand",
      "randn", "randint", "randperm", "new_zeros", "new_full", "new_ones", "scalar_tensor", "rand_like", "randn_like", "linspace")
def _fill(call: Call) -> list[CostRow]:
    """Writes its output and reads nothing."""
    written = float(sum(t.touched_bytes for t in call.outputs))
    elements = float(sum(t.num_elements for t in call.outputs))
    size = call.outputs[0].element_bytes if call.outputs else 4
    return [CostRow(op_class=OpClass.COPY, write_bytes=written, elements=elements, element_bytes=size)]


@rule("_to_copy", "copy_", "copy", "_copy_from_and_resize", "lift_fresh_copy")
def _copy(call: Call) -> list[CostRow]:
    """Copy or cast: reads the source, writes the target."""
    inputs = call.tensors()
    source = inputs[1] if call.name in ("copy_", "copy") and len(inputs) > 1 else inputs[0]
    target = call.outputs[0]
    kind = OpClass.COPY if source.element_bytes == target.element_bytes else OpClass.CAST
    return [
        CostRow(
            op_class=kind,
            read_bytes=source.touched_bytes,
            write_bytes=target.num_elements * target.element_bytes,
            elements=target.num_elements,
            element_bytes=target.element_bytes,
        )
    ]


@rule("slice_backward", "select_backward", "diagonal_backward", "as_strided_backward", "value_selecting_reduction_backward")
def _scatter_gradient(call: Call) -> list[CostRow]:
    """Zeroes a tensor of the input's size, then copies the gradient into its part."""
    grad, full = call.tensors()[0], call.outputs[0]
    return [
        CostRow(
            op_class=OpClass.COPY,
            read_bytes=grad.touched_bytes,
            write_bytes=full.touched_bytes + grad.touched_bytes,
            elements=full.num_elements,
            element_bytes=full.element_bytes,
        )
    ]


@rule("embedding", "_embedding_bag", "_embedding_bag_forward_only")
def _embedding(call: Call) -> list[CostRow]:
    """Gathers rows: reads what it writes, not the whole table."""
    out, indices = call.outputs[0], call.tensors()[1]
    return [
        CostRow(
            op_class=OpClass.EMBEDDING,
            read_bytes=out.touched_bytes + indices.touched_bytes,
            write_bytes=out.touched_bytes,
            elements=out.num_elements,
            element_bytes=out.element_bytes,
        )
    ]


# ---------------------------------------------------------------------------------------------------------
# matrix products


def _product(
    op_class: OpClass, groups: float, m: float, n: float, k: float, call: Call, element_bytes: int
) -> CostRow:
    read, write, _, _ = _traffic(call)
    return CostRow(
        op_class=op_class,
        flops=2.0 * groups * m * n * k,
        read_bytes=read,
        write_bytes=write,
        element_bytes=element_bytes,
        gemm=(groups, m, n, k),
        elements=groups * max(m * n, m * k, n * k),
    )


@rule("mm", "addmm", "_addmm_activation", "mv", "addmv")
def _mm(call: Call) -> list[CostRow]:
    """(m, k) x (k, n): 2 m n k FLOP."""
    left, right = call.tensors()[-2:]
    m, k = left.shape
    n = right.shape[1] if len(right.shape) > 1 else 1
    return [_product(OpClass.LINEAR, 1, m, n, k, call, left.element_bytes)]


@rule("dot", "vdot")
def _dot(call: Call) -> list[CostRow]:
    return [_streaming(call, OpClass.REDUCE, 2.0)]


@rule("bmm", "baddbmm")
def _bmm(call: Call) -> list[CostRow]:
    """(g, m, k) x (g, k, n): 2 g m n k FLOP."""
    left, right = call.tensors()[-2:]
    groups, m, k = left.shape
    return [_product(OpClass.BMM, groups, m, right.shape[2], k, call, left.element_bytes)]


@rule("_cdist_forward")
def _cdist(call: Call) -> list[CostRow]:
    left, right = call.tensors()[:2]
    groups = prod(left.shape[:-2])
    return [_product(OpClass.BMM, groups, left.shape[-2], right.shape[-2], left.shape[-1], call, left.element_bytes)]


# ---------------------------------------------------------------------------------------------------------
# convolutions


def _conv_class(groups: int, channels_in: int, channels_out: int) -> OpClass:
    if groups == 1:
        return OpClass.CONV
    return OpClass.DEPTHWISE_CONV if groups in (channels_in, channels_out) else OpClass.GROUPED_CONV


def _conv_row(
    source: TensorInfo, weight: TensorInfo, out: TensorInfo, transposed: bool, groups: int, stride: Any, which: str
) -> CostRow:
    """One of the three products of a convolution; for a transposed one, input and output change places."""
    if transposed:
        source, out = out, source
    batch, channels_in = source.shape[:2]
    channels_out = out.shape[1]
    area = prod(weight.shape[2:])
    in_pixels, out_pixels = batch * prod(source.shape[2:]), batch * prod(out.shape[2:])
    per_in, per_out = channels_in // groups, channels_out // groups
    if transposed:
        which = {"forward": "data", "data": "forward"}.get(which, which)
    gemm, moved = {
        "forward": ((out_pixels, per_out, per_in * area), (source, weight, out)),
        "data": ((in_pixels, per_in, per_out * area), (out, weight, source)),
        "weight": ((per_out, per_in * area, out_pixels), (out, source, weight)),
    }[which]
    return CostRow(
        op_class=_conv_class(groups, channels_in, channels_out),
        flops=2.0 * out_pixels * channels_out * per_in * area,
        read_bytes=moved[0].touched_bytes + moved[1].touched_bytes,
        write_bytes=moved[2].touched_bytes,
        element_bytes=source.element_bytes,
        gemm=(groups, *gemm),
        elements=max(source.num_elements, out.num_elements, weight.num_elements),
        kernel_area=area,
        stride=max(stride, default=1),
        groups=groups,
        width=out.shape[-1],
        is_weight_gradient=which == "weight",
    )


@rule("convolution", "_convolution", "cudnn_convolution", "convolution_overrideable")
def _convolution(call: Call) -> list[CostRow]:
    """Direct convolution in any number of dimensions; a bias is added by the same kernel."""
    source, weight, _, stride, _, _, transposed, _, groups = call.args[:9]
    return [_conv_row(source, weight, call.outputs[0], transposed, groups, stride, "forward")]


@rule("convolution_backward", "convolution_backward_overrideable")
def _convolution_backward(call: Call) -> list[CostRow]:
    """Data gradient, weight gradient and bias gradient, as far as they are wanted."""
    grad, source, weight, _, stride, _, _, transposed, _, groups, wanted = call.args[:11]
    rows = []
    if wanted[0]:
        rows.append(_conv_row(source, weight, grad, transposed, groups, stride, "data"))
    if wanted[1]:
        rows.append(_conv_row(source, weight, grad, transposed, groups, stride, "weight"))
    if wanted[2]:
        rows.append(
            CostRow(
                op_class=OpClass.REDUCE,
                flops=grad.num_elements,
                read_bytes=grad.touched_bytes,
                write_bytes=grad.shape[1] * grad.element_bytes,
                elements=grad.num_elements,
                element_bytes=grad.element_bytes,
            )
        )
    return rows


# ---------------------------------------------------------------------------------------------------------
# attention and recurrent layers as fused kernels


def _attention_row(query: TensorInfo, key: TensorInfo, value: TensorInfo, call: Call, num_products: float) -> CostRow:
    """num_products matrix products of (Lq, Lk) with the head size, for each of B x heads."""
    *groups, num_queries, head_size = query.shape
    num_keys, value_size = key.shape[-2], value.shape[-1]
    read, write, elements, _ = _traffic(call)
    pairs = prod(groups) * num_queries * num_keys
    return CostRow(
        op_class=OpClass.ATTENTION,
        flops=num_products * pairs * (head_size + value_size),
        read_bytes=read,
        write_bytes=write,
        element_bytes=query.element_bytes,
        gemm=(prod(groups), num_queries, num_keys, head_size),
        elements=elements,
        width=num_keys,
    )


@rule(
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
)
def _attention(call: Call) -> list[CostRow]:
    """Two products: 2 B h Lq Lk (d + dv) FLOP. Causal masks do not halve it: kernels differ."""
    query, key, value = call.tensors()[:3]
    return [_attention_row(query, key, value, call, 2.0)]


@rule(
    "_scaled_dot_product_flash_attention_backward",
    "_scaled_dot_product_efficient_attention_backward",
    "_scaled_dot_product_cudnn_attention_backward",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
)
def _attention_backward(call: Call) -> list[CostRow]:
    """Five products, one of them the recomputed scores: 5 B h Lq Lk (d + dv) FLOP."""
    query, key, value = call.tensors()[1:4]
    return [_attention_row(query, key, value, call, 5.0)]


def _recurrent_row(call: Call, source: TensorInfo, hidden: TensorInfo, weights: list[TensorInfo], passes: float,
                   mode: str, batch_first: bool) -> CostRow:
    """Each weight matrix multiplies every token once: 2 tokens x weights FLOP a pass, over T dependent steps."""
    num_steps, batch = (source.shape[1], source.shape[0]) if batch_first else source.shape[:2]
    num_weights = sum(w.num_elements for w in weights if len(w.shape) == 2)
    read, write, elements, _ = _traffic(call)
    hidden_size = hidden.shape[-1]
    return CostRow(
        op_class=OpClass.RECURRENT,
        flops=2.0 * passes * num_steps * batch * num_weights,
        read_bytes=read,
        write_bytes=write,
        element_bytes=source.element_bytes,
        gemm=(1, batch, NUM_GATES[mode] * hidden_size, hidden_size),
        elements=elements,
        width=hidden_size,
        serial_steps=num_steps * max(1, len(weights) // 4),
    )


@rule("rnn")
def _rnn(call: Call) -> list[CostRow]:
    source, hidden, weights, mode, _, _, batch_first, _ = call.args
    return [_recurrent_row(call, source, hidden, weights, 1.0, mode, batch_first)]


@rule("rnn_backward")
def _rnn_backward(call: Call) -> list[CostRow]:
    _, source, hidden, weights, _, mode, _, _, batch_first = call.args
    return [_recurrent_row(call, source, hidden, weights, 2.0, mode, batch_first)]


# ---------------------------------------------------------------------------------------------------------
# normalisations, softmax, pooling


def _normalisation_rules(op_class: OpClass, flops_per_element: float, names: str) -> None:
    @rule(*names.split())
    def normalise(call: Call) -> list[CostRow]:
        source = call.tensors()[1 if "backward" in call.name else 0]
        width = source.shape[-1] if op_class is OpClass.LAYER_NORM else prod(source.shape[2:])
        return [_streaming(call, op_class, flops_per_element, width=float(width))]


_normalisation_rules(
    OpClass.BATCH_NORM,
    5.0,
    """native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training cudnn_batch_norm
    _batch_norm_with_update _batch_norm_no_update""",
)
_normalisation_rules(
    OpClass.BATCH_NORM, 8.0, "native_batch_norm_backward cudnn_batch_norm_backward batch_norm_backward"
)
_normalisation_rules(OpClass.LAYER_NORM, 5.0, "native_layer_norm _fused_rms_norm")
_normalisation_rules(OpClass.LAYER_NORM, 8.0, "native_layer_norm_backward _fused_rms_norm_backward")
_normalisation_rules(OpClass.GROUP_NORM, 5.0, "native_group_norm")
_normalisation_rules(OpClass.GROUP_NORM, 8.0, "native_group_norm_backward")


@rule("_softmax", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data", "_safe_softmax", "_masked_softmax")
def _softmax(call: Call) -> list[CostRow]:
    source = call.tensors()[0]
    dim = call.args[2] if "backward" in call.name else call.args[1]
    width = source.shape[dim] if source.shape else 1
    return [_streaming(call, OpClass.SOFTMAX, 5.0, width=float(width))]


@rule(
    "max_pool2d_with_indices",
    "max_pool2d_with_indices_backward",
    "max_pool3d_with_indices",
    "max_pool3d_with_indices_backward",
    "adaptive_max_pool2d",
    "adaptive_max_pool2d_backward",
)
def _max_pool(call: Call) -> list[CostRow]:
    """One comparison per window element. The backward kernel reads gradient and indices only."""
    window = call.args[2] if "backward" in call.name else call.args[1]
    area = float(prod(window)) if isinstance(window, (list, tuple)) and window and "adaptive" not in call.name else 1.0
    row = _streaming(call, OpClass.MAX_POOL, area)
    if "backward" not in call.name:
        return [row]
    grad, indices = call.tensors()[0], call.tensors()[-1]
    return [
        CostRow(
            op_class=OpClass.MAX_POOL,
            flops=row.flops,
            read_bytes=grad.touched_bytes + indices.touched_bytes,
            write_bytes=call.outputs[0].touched_bytes,
            element_bytes=grad.element_bytes,
            elements=row.elements,
            kernel_area=area,
        )
    ]


# ---------------------------------------------------------------------------------------------------------
# multi-tensor kernels of optimizers

_CHUNK_ELEMENTS = 65536
_BLOCKS_PER_LAUNCH = 320
_TENSORS_PER_LAUNCH = {1: 110, 2: 64, 3: 48, 4: 36}


def num_multi_tensor_launches(sizes: list[int], num_lists: int) -> int:
    """Kernels that one multi-tensor operation launches.

    A launch takes at most 320 blocks of 65,536 elements and 110, 64, 48 or 36 tensors for one to four lists.
    Source: PyTorch, aten/src/ATen/native/cuda/MultiTensorApply.cuh.
    """
    per_launch = _TENSORS_PER_LAUNCH.get(num_lists, 30)
    num_chunks = sum(ceil(size / _CHUNK_ELEMENTS) for size in sizes)
    return max(1, ceil(len(sizes) / per_launch), ceil(num_chunks / _BLOCKS_PER_LAUNCH))


def _multi_tensor(call: Call) -> CostRow:
    lists = [[item for item in value if isinstance(item, TensorInfo)] for value in call.args if isinstance(value, (list, tuple))]
    lists = [items for items in lists if items]
    first = lists[0] if lists else []
    read = float(sum(t.touched_bytes for items in lists for t in items))
    written = float(sum(t.touched_bytes for t in (call.outputs or first)))
    sizes = [t.num_elements for t in first]
    count = num_multi_tensor_launches(sizes, len(lists) + (0 if call.in_place else 1))
    total = float(sum(sizes))
    return CostRow(
        op_class=OpClass.OPTIMIZER,
        flops=total / count,
        read_bytes=read / count,
        write_bytes=written / count,
        element_bytes=first[0].element_bytes if first else 4,
        elements=total / count,
        count=float(count),
    )
