"""Rules of operations that stream their operands.

Element-wise operations, copies, fills, reductions and pooling; normalisations and softmax; the multi-tensor kernels
of optimizers; and the fused kernels of Liger-Kernel and Unsloth, each of which reads its tensors once.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil, log2, prod
from typing import Any

from forerun.graph.graph import OpClass
from forerun.tracing.calls import Call, CostRow, TensorInfo, operation_facts, rule, streaming_row


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


@rule(*operation_facts()["fills"])
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


@rule(*operation_facts()["scattered_gradients"])
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


def _rule_of(listed: dict[str, Any], *, normalises: bool) -> None:
    op_class, num_changed = OpClass[listed["class"].upper()], listed.get("changed", 0)

    @rule(*listed["names"])
    def stream(call: Call) -> list[CostRow]:
        tensors, width = call.tensors(), 0.0
        if normalises:
            shape = tensors[1 if "backward" in call.name else 0].shape
            width = float(shape[-1] if op_class is OpClass.LAYER_NORM else prod(shape[2:]))
        moved = replace(call, outputs=(*call.outputs, *tensors[:num_changed]))
        return [streaming_row(moved, op_class, listed["flops"], width=width)]


for _kind in ("streaming", "normalising"):
    for _listed in operation_facts()[_kind]:
        _rule_of(_listed, normalises=_kind == "normalising")


@rule(*operation_facts()["softmax"])
def _softmax(call: Call) -> list[CostRow]:
    source = call.tensors()[0]
    dim = next((value for value in call.args if isinstance(value, int)), -1)  # after the tensor arguments
    width = source.shape[dim] if source.shape else 1
    return [streaming_row(call, OpClass.SOFTMAX, 5.0, width=float(width))]


@rule(*operation_facts()["max_pool"])
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


@rule("_fft_c2c", "_fft_r2c", "_fft_c2r")
def _fft(call: Call) -> list[CostRow]:
    """One pass an axis of n: 5 log2 n FLOP a complex element (Cooley and Tukey 1965), half for real ones."""
    largest = max((*call.tensors(), *call.outputs), key=lambda tensor: tensor.num_elements)
    work = 5.0 if call.name == "_fft_c2c" else 2.5
    axes = [largest.shape[axis] for axis in call.args[1]]
    return [streaming_row(call, OpClass.ELEMENTWISE, work * log2(max(size, 2))) for size in axes]
