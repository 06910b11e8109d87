"""Operations and allocations of one device when a step is divided by tensor, sequence and context parallelism.

With t devices of tensor parallelism a product whose weight is divided has n/t or k/t of its features, and what runs
between two such products n/t columns or heads. Under sequence parallelism everything else has 1/t of the tokens;
context parallelism by c leaves 1/c of the tokens to every operation. Sizes become those that the device really
computes, so that a cost model sees thin products as thin. Of experts divided among e devices, each has 1/e of them and
e times the tokens of each: those that e devices send it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from forerun.graph.blocks import Blocks, Division, weight_products, whole_sizes
from forerun.graph.graph import Graph, OpTable

__all__ = ["Shards", "fixed_shares", "sharded_ops", "token_shares"]

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shards:
    """Number of devices that share the tokens and the features of a sequence.

    Attributes:
        tensor: Devices of tensor parallelism.
        context: Devices of context parallelism.
        expert: Devices that divide the experts, each with tokens of its own.
        sequence_parallel: Whether tokens outside of divided products are shared by the devices of tensor parallelism.
    """

    tensor: int = 1
    context: int = 1
    expert: int = 1
    sequence_parallel: bool = True


def token_shares(blocks: Blocks, shards: Shards) -> Floats:
    """Share of a streaming operation, or of what it allocates, that one device has, (n,)."""
    outside = 1 / shards.tensor if shards.sequence_parallel else 1.0
    share = np.where(blocks.division == Division.NONE, outside, 1 / shards.tensor)
    share[blocks.unit < 0] = 1.0
    return np.asarray(share / shards.context)


def sharded_ops(graph: Graph, blocks: Blocks, shards: Shards) -> OpTable:
    """The operations of one device, all blocks, in the order of the graph; rows without a token stay whole.

    Args:
        graph: Traced step.
        blocks: Its units.
        shards: Number of devices that share a sequence.
    """
    if shards.tensor == 1 and shards.context == 1 and shards.expert == 1:
        return graph.ops
    ops = graph.ops
    share = token_shares(blocks, shards)
    fixed = fixed_shares(blocks, shards)
    scale = np.stack([fixed, share], axis=1)
    gemm = ops.gemm.copy()
    gemm[:, 0] *= scale  # batched products: samples times heads
    columns: dict[str, Any] = {
        "flops": ops.flops * scale,
        "read_bytes": ops.read_bytes * scale,
        "write_bytes": ops.write_bytes * scale,
        "elements": ops.elements * scale,
    }
    whole = whole_sizes(ops)
    for row in np.flatnonzero(weight_products(ops)).tolist():
        gemm[row] = _product(ops.gemm[row], whole[row], blocks, shards, row)
        before, after = _operands(ops.gemm[row]), _operands(gemm[row])
        columns["flops"][row] = ops.flops[row] * _work_ratio(ops.gemm[row], gemm[row])
        columns["elements"][row] = sum(after)
        columns["read_bytes"][row] = _scaled(ops.read_bytes[row], before[0] + before[1], after[0] + after[1])
        columns["write_bytes"][row] = _scaled(ops.write_bytes[row], before[2], after[2])
    width = np.where(
        (blocks.unit == blocks.num_units - 1) & (blocks.division == Division.INSIDE),
        ops.width / shards.tensor,
        ops.width,
    )
    return replace(ops, gemm=gemm, width=width, **columns)


def fixed_shares(blocks: Blocks, shards: Shards) -> Floats:
    """Share that one device has of what does not grow with the batch, such as gradients of weights, (n,)."""
    divided = np.where(blocks.has_divided_weight & (blocks.unit >= 0), 1 / shards.tensor, 1.0)
    found: Floats = divided * np.where(blocks.is_expert, 1 / shards.expert, 1.0)
    return found


def _product(sizes: Floats, whole: Floats, blocks: Blocks, shards: Shards, row: int) -> Floats:
    """Sizes (groups, m, n, k) of a product on one device, from those in the graph and those of its operands."""
    sizes = sizes.copy()
    division = blocks.division[row]
    if blocks.expert_product[row]:
        sizes[0] /= shards.expert
        sizes[1:, 1] *= shards.expert
    if division in (Division.COLUMNS, Division.ROWS):
        target = int(blocks.divided_size[row])
        matching = [i for i in (1, 2, 3) if whole[i, 1] == 0 and round(whole[i, 0]) == target]
        # Of a square weight either side may be divided: a forward product by columns has n first, one by rows k.
        chosen = matching[0] if division == Division.COLUMNS else matching[-1]
        sizes[chosen, 0] /= shards.tensor
        sizes[:, 1] /= shards.context
        return sizes
    sequence = shards.tensor if shards.sequence_parallel and division == Division.NONE else 1
    if division == Division.INSIDE:
        sequence = shards.tensor
    sizes[:, 1] /= shards.context * sequence
    return sizes


def _operands(sizes: Floats) -> tuple[Floats, Floats, Floats]:
    """Elements of the two factors and of the result, affine in the batch, of a product with one size that grows."""
    groups, m, n, k = sizes

    def times(a: Floats, b: Floats) -> Floats:
        pair = np.asarray([a[0] * b[0], a[0] * b[1] + a[1] * b[0]])
        return np.asarray([pair[0] * groups[0], pair[1] * groups[0] + pair[0] * groups[1]])

    return times(m, k), times(k, n), times(m, n)


def _work_ratio(before: Floats, after: Floats) -> float:
    at_one = before.sum(axis=1).prod()
    return float(after.sum(axis=1).prod() / at_one) if at_one else 1.0


def _scaled(size: Floats, before: Floats, after: Floats) -> Floats:
    found: Floats = size * np.divide(after, before, out=np.ones(2), where=before != 0)
    return found
