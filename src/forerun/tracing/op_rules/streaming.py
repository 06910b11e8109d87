"""Rules of operations that stream their operands.

Element-wise operations, copies, fills, reductions and pooling; normalisations and softmax; the multi-tensor kernels
of optimizers; and the fused kernels of Liger-Kernel and Unsloth, each of which reads its tensors once.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil, log2, prod

from forerun.graph.graph import OpClass
from forerun.tracing.calls import (
    Call,
    CostRow,
    TensorInfo,
    operation_facts,
    rule,
    streaming_row,
    streaming_rules,
)

streaming_rules(
    OpClass.ACTIVATION,
    4.0,
    """relu relu_ relu6 threshold_backward gelu gelu_backward silu silu_ silu_backward hardswish hardswish_
    hardswish_backward hardsigmoid hardsigmoid_ hardsigmoid_backward hardtanh hardtanh_
    hardtanh_backward sigmoid sigmoid_ sigmoid_backward tanh tanh_ tanh_backward leaky_relu leaky_relu_
    leaky_relu_backward elu elu_ elu_backward mish mish_ mish_backward softplus softplus_backward
    _prelu_kernel _prelu_kernel_backward log_sigmoid_forward log_sigmoid_backward glu glu_backward erf
    celu selu""",
)
streaming_rules(OpClass.MUL, 1.0, "mul mul_ div div_ addcmul addcmul_ addcdiv addcdiv_")
streaming_rules(OpClass.ADD, 1.0, "add add_ sub sub_ rsub lerp lerp_")
streaming_rules(
    OpClass.ELEMENTWISE,
    1.0,
    """abs abs_ acos asin atan atan2 bernoulli bernoulli_ bitwise_and bitwise_and_ bitwise_not bitwise_or
    bitwise_or_ bitwise_xor ceil clamp clamp_ clamp_min clamp_min_ clamp_max clamp_max_ cos cosh eq eq_
    erfinv exp exp_ exp2 expm1 exponential_ floor floor_ floor_divide fmod ge gt isinf isnan isfinite le
    log log10 log1p log2 log_ logical_and logical_and_ logical_not logical_or logical_or_ lt masked_fill
    masked_fill_ maximum minimum ne neg neg_ normal_ pow pow_ reciprocal reciprocal_ remainder round
    rsqrt rsqrt_ sign sgn sin sinh sqrt sqrt_ square tan tril tril_ triu triu_ trunc uniform_ where
    xlogy random_ nan_to_num nan_to_num_ polar view_as_complex real imag conj_physical __or__ __and__
    heaviside sinc copysign signbit logaddexp hypot sign_ sgn_ round_ ceil_ trunc_ cos_ sin_
    square_ logical_not_ logical_xor bitwise_xor_ ge_ gt_ le_ lt_ ne_ fmod_ remainder_""",
)
streaming_rules(
    OpClass.COPY,
    0.0,
    """cat clone roll flip repeat stack constant_pad_nd reflection_pad1d reflection_pad1d_backward
    reflection_pad2d reflection_pad2d_backward replication_pad2d replication_pad2d_backward im2col
    col2im unfold_backward index_select gather scatter scatter_ scatter_add scatter_add_ index index_put
    index_put_ _unsafe_index _unsafe_index_put index_add index_add_ take tril_indices triu_indices
    repeat_interleave pixel_shuffle pixel_unshuffle channel_shuffle native_channel_shuffle
    select_scatter slice_scatter index_fill index_fill_ masked_scatter masked_scatter_ diag_embed
    diagonal_scatter index_copy index_copy_ take_along_dim as_strided_scatter masked_scatter_backward
    _foreach_copy _reshape_copy _unsafe_masked_index _unsafe_masked_index_put_accumulate
    split_with_sizes_copy roll_backward rot90""",
)
streaming_rules(
    OpClass.REDUCE,
    1.0,
    """sum mean amax amin max min argmax argmin prod var var_mean std std_mean linalg_vector_norm norm any
    all cumsum cumprod logsumexp nll_loss_forward nll_loss_backward nll_loss2d_forward
    nll_loss2d_backward mse_loss mse_loss_backward smooth_l1_loss smooth_l1_loss_backward huber_loss
    huber_loss_backward binary_cross_entropy binary_cross_entropy_backward
    binary_cross_entropy_with_logits topk sort bincount soft_margin_loss count_nonzero nansum median
    mode histc searchsorted bucketize dist cummax aminmax linalg_matrix_norm sum_to_size logcumsumexp
    unique_consecutive _unique2 cdist_backward _is_all_true _is_any_true _weight_norm_interface
    _weight_norm_interface_backward""",
)
streaming_rules(
    OpClass.EMBEDDING, 0.0, "embedding_dense_backward _embedding_bag_dense_backward embedding_renorm_"
)
streaming_rules(
    OpClass.AVG_POOL,
    2.0,
    """avg_pool1d avg_pool2d avg_pool2d_backward avg_pool3d avg_pool3d_backward _adaptive_avg_pool2d
    _adaptive_avg_pool2d_backward _adaptive_avg_pool3d _adaptive_avg_pool3d_backward upsample_nearest1d
    upsample_nearest1d_backward upsample_nearest2d upsample_nearest2d_backward
    upsample_bilinear2d_backward upsample_bicubic2d_backward _upsample_bilinear2d_aa
    _upsample_bilinear2d_aa_backward _upsample_bicubic2d_aa _upsample_bicubic2d_aa_backward
    upsample_linear1d upsample_linear1d_backward upsample_trilinear3d upsample_trilinear3d_backward
    upsample_nearest3d upsample_nearest3d_backward _upsample_nearest_exact2d
    _upsample_nearest_exact2d_backward grid_sampler_2d grid_sampler_2d_backward
    _upsample_nearest_exact1d""",
)
streaming_rules(
    OpClass.DROPOUT, 2.0, "native_dropout native_dropout_backward rrelu_with_noise _fused_dropout"
)


@rule("upsample_bilinear2d", "upsample_bicubic2d")
def _interpolated(call: Call) -> list[CostRow]:
    """A thread for each place of an image, which goes through all samples and, unless they are last, all channels.

    Source: PyTorch, ``native/cuda/UpSampleBilinear2d.cu`` and ``UpSampleBicubic2d.cu``.
    """
    row = streaming_row(call, OpClass.AVG_POOL, 2.0)
    source = call.tensors()[0]
    if call.name == "upsample_bilinear2d" and source.memory_order()[-1:] == (1,):
        return [row]
    return [replace(row, law_size=float(source.shape[1]))]


_FILLS = """zero_ zeros_like zeros ones ones_like full full_like fill_ fill arange eye rand randn randint
    randperm new_zeros new_full new_ones scalar_tensor rand_like randn_like linspace"""


@rule(*_FILLS.split())
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


@rule(
    "slice_backward",
    "select_backward",
    "diagonal_backward",
    "as_strided_backward",
    "value_selecting_reduction_backward",
)
def _scatter_gradient(call: Call) -> list[CostRow]:
    """Zeroes a tensor of the input's size, then copies the gradient into a part of it."""
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
    """Gathers a row per index, not the whole table; a bag writes the sum of several."""
    out, (table, indices) = call.outputs[0], call.tensors()[:2]
    gathered_bytes = indices.num_elements * table.shape[1] * table.element_bytes
    return [
        CostRow(
            op_class=OpClass.EMBEDDING,
            read_bytes=gathered_bytes + indices.touched_bytes,
            write_bytes=out.touched_bytes,
            elements=out.num_elements,
            element_bytes=out.element_bytes,
        )
    ]


def _normalisation_rules(op_class: OpClass, flops_per_element: float, names: str) -> None:
    @rule(*names.split())
    def normalise(call: Call) -> list[CostRow]:
        source = call.tensors()[1 if "backward" in call.name else 0]
        width = source.shape[-1] if op_class is OpClass.LAYER_NORM else prod(source.shape[2:])
        return [streaming_row(call, op_class, flops_per_element, width=float(width))]


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


@rule(
    "_softmax",
    "_log_softmax",
    "_softmax_backward_data",
    "_log_softmax_backward_data",
    "_safe_softmax",
    "_masked_softmax",
)
def _softmax(call: Call) -> list[CostRow]:
    source = call.tensors()[0]
    dim = next((value for value in call.args if isinstance(value, int)), -1)  # after the tensor arguments
    width = source.shape[dim] if source.shape else 1
    return [streaming_row(call, OpClass.SOFTMAX, 5.0, width=float(width))]


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
    has_window = isinstance(window, (list, tuple)) and "adaptive" not in call.name
    area = float(prod(window)) if has_window else 1.0
    row = streaming_row(call, OpClass.MAX_POOL, area)
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


_CHUNK_ELEMENTS = 65536
_BLOCKS_PER_LAUNCH = 320
_TENSORS_PER_LAUNCH = {1: 110, 2: 64, 3: 48, 4: 36}


def num_multi_tensor_launches(sizes: list[int], num_lists: int) -> int:
    """Number of kernels that one multi-tensor operation launches.

    A launch takes at most 320 blocks of 65,536 elements and 110, 64, 48 or 36 tensors for one to four lists.
    Source: PyTorch, aten/src/ATen/native/cuda/MultiTensorApply.cuh.
    """
    per_launch = _TENSORS_PER_LAUNCH.get(num_lists, 30)
    num_chunks = sum(ceil(size / _CHUNK_ELEMENTS) for size in sizes)
    return max(1, ceil(len(sizes) / per_launch), ceil(num_chunks / _BLOCKS_PER_LAUNCH))


def multi_tensor_row(call: Call) -> CostRow:
    """Row of one operation over lists of tensors: ``count`` kernels that share its traffic evenly."""
    lists = [
        [item for item in value if isinstance(item, TensorInfo)]
        for value in call.args
        if isinstance(value, (list, tuple))
    ]
    lists = [items for items in lists if items]
    # Optimizers hand over lists of equal shapes (weights, gradients, moments); the first one stands for all.
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


TRITON_KERNELS = {
    name: (OpClass[kernel["class"].upper()], float(kernel["moved"]))
    for name, kernel in operation_facts()["triton_kernels"].items()
}
"""Class of other libraries' kernels, and how often each of their tensors is moved."""


def _fused_rule(name: str, op_class: OpClass, work: float, num_changed: int = 0) -> None:
    """Registers a kernel that writes its results, and its first tensors anew; norms have the width of the first."""

    @rule(name)
    def fused(call: Call) -> list[CostRow]:
        tensors = call.tensors()
        width = float(tensors[0].shape[-1]) if op_class is OpClass.LAYER_NORM else 0.0
        outputs = (*call.outputs, *tensors[:num_changed])
        return [streaming_row(replace(call, outputs=outputs), op_class, work, width=width)]


_fused_rule("cross_entropy", OpClass.REDUCE, 5.0)
_fused_rule("cross_entropy_backward_", OpClass.ACTIVATION, 5.0, 1)
_fused_rule("rms_norm", OpClass.LAYER_NORM, 5.0)
_fused_rule("rms_norm_backward_", OpClass.LAYER_NORM, 8.0, 1)
_fused_rule("rotate_", OpClass.ELEMENTWISE, 4.0, 2)
_fused_rule("gated", OpClass.ACTIVATION, 5.0)
_fused_rule("gated_backward_", OpClass.ACTIVATION, 10.0, 2)


@rule("_fft_c2c", "_fft_r2c", "_fft_c2r")
def _fft(call: Call) -> list[CostRow]:
    """One pass an axis of n: 5 log2 n FLOP a complex element (Cooley and Tukey 1965), half for real ones."""
    largest = max((*call.tensors(), *call.outputs), key=lambda tensor: tensor.num_elements)
    work = 5.0 if call.name == "_fft_c2c" else 2.5
    axes = [largest.shape[axis] for axis in call.args[1]]
    return [streaming_row(call, OpClass.ELEMENTWISE, work * log2(max(size, 2))) for size in axes]
