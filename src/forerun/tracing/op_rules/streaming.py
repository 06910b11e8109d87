"""Rules of operations that stream their operands: element-wise, copies, fills, reductions, pooling."""

from __future__ import annotations

from dataclasses import replace

from forerun.graph.graph import OpClass
from forerun.tracing.calls import Call, CostRow
from forerun.tracing.op_rules.registry import rule, streaming_row, streaming_rules

__all__: list[str] = []

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
    unique_consecutive _unique2 cdist_backward _is_all_true _is_any_true""",
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
    return [replace(row, serial_steps=float(source.shape[1]))]


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
