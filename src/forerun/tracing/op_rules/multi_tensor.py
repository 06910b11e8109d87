"""Rule of the multi-tensor kernels of optimizers."""

from __future__ import annotations

from math import ceil

from forerun.graph.graph import OpClass
from forerun.tracing.calls import Call, CostRow, TensorInfo

__all__ = ["multi_tensor_row", "num_multi_tensor_launches"]

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
