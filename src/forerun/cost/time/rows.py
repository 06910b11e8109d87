"""The distinct kernels of a graph, which the op-level model evaluates in place of every single launch."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt

from forerun.graph.graph import OpClass, OpTable

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

MATRIX_CLASSES = (
    OpClass.CONV,
    OpClass.DEPTHWISE_CONV,
    OpClass.GROUPED_CONV,
    OpClass.LINEAR,
    OpClass.BMM,
    OpClass.ATTENTION,
    OpClass.RECURRENT,
)
"""Classes whose time depends on the sizes of a matrix product."""

_FLOATING_CLASSES = (
    *MATRIX_CLASSES,
    OpClass.BATCH_NORM,
    OpClass.LAYER_NORM,
    OpClass.GROUP_NORM,
    OpClass.SOFTMAX,
    OpClass.ACTIVATION,
    OpClass.OPTIMIZER,
)
"""Classes that no integers have: eight bytes are double precision there, elsewhere mostly indices."""

_SMALL_ELEMENTS_PER_SAMPLE = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class DistinctOps:
    """Distinct kernels of one step, n rows; affine columns as in ``OpTable``.

    Kernels with equal shapes share a row. Streaming kernels whose size does not depend on the batch (weight
    casts, optimizer updates) or is tiny (gates, biases) share one row per class and part with their mean size:
    their time is affine in the size, so the sum is kept.

    Attributes:
        group_of_row: Distinct row of each row of the graph, (number of graph rows,).
        count: Kernels in each distinct row, (n,).
        op_class: ``OpClass``, (n,).
        step_part: ``StepPart``, (n,).
        flops: Work of one kernel [FLOP], (n, 2).
        moved_bytes: Traffic of one kernel [bytes], (n, 2).
        gemm: (groups, m, n, k), (n, 4, 2).
        elements: As in ``OpTable``, (n, 2).
        attributes: kernel area, stride, groups, width, serial steps, in place, permuted, element bytes, (n, 8).
        law_size: As in ``OpTable``, (n,).
        joined_count: Kernels of each row where a compiler joins operations: none where another row does its work, (n,).
        joined_flops: Work of one of these [FLOP], (n, 2).
        joined_bytes: Traffic of one of these [bytes], (n, 2).
    """

    group_of_row: Ints
    count: Floats
    op_class: Ints
    step_part: Ints
    flops: Floats
    moved_bytes: Floats
    gemm: Floats
    elements: Floats
    attributes: Floats
    law_size: Floats
    joined_count: Floats
    joined_flops: Floats
    joined_bytes: Floats

    def __len__(self) -> int:
        return len(self.count)

    def take(self, rows: Ints) -> DistinctOps:
        """Some of the kernels; no row of the graph belongs to them any more."""
        columns = {
            field.name: getattr(self, field.name)[rows]
            for field in fields(self)
            if field.name != "group_of_row"
        }
        return DistinctOps(group_of_row=np.zeros(0, dtype=np.int64), **columns)


def on_four_bytes(ops: DistinctOps) -> DistinctOps:
    """The kernels on four-byte operands in place of two-byte ones, which move twice as much; casts stay."""
    factor = np.where((ops.attributes[:, 7] == 2) & (ops.op_class != OpClass.CAST), 2.0, 1.0)
    attributes = ops.attributes.copy()
    attributes[:, 7] *= factor
    moved = {name: getattr(ops, name) * factor[:, None] for name in ("moved_bytes", "joined_bytes")}
    return replace(ops, attributes=attributes, **moved)


def in_double(ops: DistinctOps) -> npt.NDArray[np.bool_]:
    """True for kernels that compute in double precision (fp64), (n,)."""
    found: npt.NDArray[np.bool_] = (ops.attributes[:, 7] == 8) & np.isin(ops.op_class, _FLOATING_CLASSES)
    return found


def is_mostly_double(ops: DistinctOps) -> bool:
    """True if the larger part of a step's work is in double precision, as after ``model.double()``."""
    work = ops.count * ops.flops.sum(axis=1)
    return bool(2 * work[in_double(ops)].sum() > work.sum())


def joined_kernels(ops: OpTable) -> tuple[Floats, Floats, Floats]:
    """Kernels, work and traffic of each row where operations are joined, (n,), (n, 2), (n, 2).

    A joined kernel stands in the row that moves most when it runs alone.
    """
    moved = ops.read_bytes + ops.write_bytes
    _, kernel = np.unique(ops.joined, return_inverse=True)
    kernel = kernel.reshape(-1)
    flops, kept = np.zeros((len(ops), 2)), np.zeros((len(ops), 2))
    np.add.at(flops, kernel, ops.flops)
    np.add.at(kept, kernel, ops.joined_bytes)
    # Among rows of equal traffic what they are decides, not their order.
    ties = (
        ops.module,
        ops.in_place,
        ops.permuted,
        ops.element_bytes,
        ops.flops[:, 1],
        ops.kernel,
        ops.step_part,
    )
    largest_last = np.lexsort((*ties, moved[:, 0], moved[:, 1], kernel))
    stands = np.zeros(len(ops), dtype=bool)
    if len(ops):
        ordered = kernel[largest_last]
        stands[largest_last[np.append(ordered[1:] != ordered[:-1], True)]] = True
    keep = stands[:, None]
    return (
        np.where(stands, ops.count, 0.0),
        np.where(keep, flops[kernel], 0.0),
        np.where(keep, kept[kernel], 0.0),
    )


def distinct_ops(ops: OpTable) -> DistinctOps:
    """Groups the rows of a graph into distinct kernels."""
    attributes = np.stack(
        [
            ops.kernel_area,
            ops.stride,
            ops.groups,
            ops.width,
            ops.serial_steps,
            ops.in_place,
            ops.permuted,
            ops.element_bytes,
        ],
        axis=1,
    )
    moved = ops.read_bytes + ops.write_bytes
    is_small = (ops.elements[:, 1] <= _SMALL_ELEMENTS_PER_SAMPLE) & ~np.isin(ops.op_class, MATRIX_CLASSES)
    joined_count, joined_flops, joined_bytes = joined_kernels(ops)
    sizes = np.concatenate(
        [
            ops.flops,
            moved,
            ops.gemm.reshape(len(ops), 8),
            ops.elements,
            attributes,
            ops.law_size[:, None],
            joined_flops,
            joined_bytes,
        ],
        axis=1,
    )
    # Small streaming kernels differ only in their element size and in being of fixed size or growing with the batch.
    key = np.where(is_small[:, None], 0.0, sizes)
    key = np.column_stack(
        [
            ops.op_class,
            ops.step_part,
            is_small * (1 + (ops.elements[:, 1] > 0)),
            is_small & (ops.law_size > 1),
            ops.element_bytes,
            joined_count > 0,
            key,
        ]
    )
    _, group = np.unique(key, axis=0, return_inverse=True)
    group = group.reshape(-1)
    num_groups = int(group.max(initial=-1)) + 1
    count: Floats = np.bincount(group, weights=ops.count, minlength=num_groups).astype(np.float64)
    mean = np.zeros((num_groups, sizes.shape[1]))
    np.add.at(mean, group, sizes * ops.count[:, None])
    mean /= count[:, None]
    first = np.zeros(num_groups, dtype=np.int64)
    first[group[::-1]] = np.arange(len(ops))[::-1]
    return DistinctOps(
        group_of_row=group,
        count=count,
        op_class=ops.op_class[first],
        step_part=ops.step_part[first],
        flops=mean[:, 0:2],
        moved_bytes=mean[:, 2:4],
        gemm=mean[:, 4:12].reshape(-1, 4, 2),
        elements=mean[:, 12:14],
        attributes=mean[:, 14:22],
        law_size=mean[:, 22],
        joined_count=np.bincount(group, weights=joined_count, minlength=num_groups).astype(np.float64),
        joined_flops=mean[:, 23:25],
        joined_bytes=mean[:, 25:27],
    )
