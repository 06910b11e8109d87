"""Operations and allocations of one device when a step is divided by tensor, sequence and context parallelism.

With t devices of tensor parallelism a product whose weight is divided has n/t or k/t of its features, and what runs
between two such products n/t columns or heads. Under sequence parallelism everything else has 1/t of the tokens;
context parallelism by c leaves 1/c of the tokens to every operation. Sizes become those that the device really
computes, so that a cost model sees thin products as thin. Of experts divided among e devices, each has 1/e of them and
e times the tokens of each: those that e devices send it. Where some experts have more tokens than others, the device
is the one with most.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from forerun.graph.blocks import Blocks, Division, Phase, blocks_of, weight_products, whole_sizes
from forerun.graph.graph import Floats, Graph, OpTable, Share, divided_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Shards:
    """Number of devices that share the tokens and the features of a sequence.

    Attributes:
        tensor: Devices of tensor parallelism.
        context: Devices of context parallelism.
        expert: Devices that divide the experts, each with tokens of its own.
        whole_experts: Whether devices of tensor parallelism have whole experts, and tokens of their own for them.
        sequence_parallel: Whether tokens outside of divided products are shared by the devices of tensor parallelism.
    """

    tensor: int = 1
    context: int = 1
    expert: int = 1
    whole_experts: bool = False
    sequence_parallel: bool = True


def token_shares(blocks: Blocks, shards: Shards) -> Floats:
    """Share of a streaming operation, or of what it allocates, that one device has, (n,)."""
    outside = 1 / shards.tensor if shards.sequence_parallel else 1.0
    share = np.where(blocks.division == Division.NONE, outside, 1 / shards.tensor)
    share[blocks.unit < 0] = 1.0
    share[blocks.is_expert] *= _fullest(blocks, shards)
    return np.asarray(share / shards.context)


def _fullest(blocks: Blocks, shards: Shards) -> float:
    return 1.0 if blocks.expert_load is None else blocks.expert_load.fullest(shards.expert)


def sharded_ops(graph: Graph, blocks: Blocks, shards: Shards) -> OpTable:
    """The operations of one device, all blocks, in the order of the graph; rows without a token stay whole.

    Args:
        graph: Traced step.
        blocks: Its units.
        shards: Number of devices that share a sequence.
    """
    if (shards.tensor, shards.context, shards.expert) == (1, 1, 1):
        return graph.ops
    return _with_sides(graph.ops, blocks, shards, _sides(graph.ops, blocks, shards))


def _with_sides(ops: OpTable, blocks: Blocks, shards: Shards, sides: _Sides) -> OpTable:
    columns: dict[str, Any] = {}
    for column in fields(OpTable):
        declared = divided_of(column)
        for share in {declared.tensor, declared.context, declared.expert} - {Share.WHOLE}:
            rule, values = _DIVIDE[share], getattr(ops, column.name)
            columns[column.name] = rule(values, ops, blocks, shards, sides)
    return replace(ops, **columns)


def with_kept_tokens(graph: Graph, kept: float) -> OpTable:
    """The operations where experts take this share of the tokens that are sent to them."""
    blocks, sides = blocks_of(graph), {}
    for row in np.flatnonzero(blocks.expert_product).tolist():
        sides[row] = graph.ops.gemm[row].copy()
        sides[row][1:, 1] *= kept
    return _with_sides(graph.ops, blocks, Shards(), sides)


def _sides(ops: OpTable, blocks: Blocks, shards: Shards) -> dict[int, Floats]:
    """Sizes (groups, m, n, k) on one device of each product with a weight, by its row."""
    whole = whole_sizes(ops)
    rows = np.flatnonzero(weight_products(ops)).tolist()
    return {row: _product(ops.gemm[row], whole[row], blocks, shards, row) for row in rows}


_Sides = Mapping[int, Floats]
_Rule = Callable[[Floats, OpTable, Blocks, Shards, _Sides], Floats]


def _size_rule(of_product: Callable[[Floats, Floats, Floats], Floats]) -> _Rule:
    """The rule of a size: its share of a stream, and ``of_product(size, sides before, sides after)`` of a product."""

    def rule(column: Floats, ops: OpTable, blocks: Blocks, shards: Shards, sides: _Sides) -> Floats:
        found: Floats = column * _scale(blocks, shards)
        for row, after in sides.items():
            found[row] = of_product(column[row], ops.gemm[row], after)
        return found

    return rule


def _scale(blocks: Blocks, shards: Shards) -> Floats:
    """Share of a stream's fixed size and of its growth with the batch, (n, 2)."""
    return np.stack([fixed_shares(blocks, shards), token_shares(blocks, shards)], axis=1)


def _divided_sides(column: Floats, ops: OpTable, blocks: Blocks, shards: Shards, sides: _Sides) -> Floats:
    found = column.copy()
    found[:, 0] *= _scale(blocks, shards)  # batched products: samples times heads
    for row, after in sides.items():
        found[row] = after
    return found


def _divided_head(column: Floats, ops: OpTable, blocks: Blocks, shards: Shards, sides: _Sides) -> Floats:
    of_head = (blocks.unit == blocks.num_units - 1) & (blocks.division == Division.INSIDE)
    return np.where(of_head, column / shards.tensor, column)


def _work(size: Floats, before: Floats, after: Floats) -> Floats:
    at_one = before.sum(axis=1).prod()
    return size * float(after.sum(axis=1).prod() / at_one) if at_one else size


def _of_operands(chosen: slice) -> Callable[[Floats, Floats, Floats], Floats]:
    """Rule of traffic in proportion to some of the operands (first factor, second, result) of a product."""

    def of_product(size: Floats, before: Floats, after: Floats) -> Floats:
        return _scaled(size, sum(_operands(before)[chosen]), sum(_operands(after)[chosen]))

    return of_product


_DIVIDE: dict[Share, _Rule] = {
    Share.WORK: _size_rule(_work),
    Share.READ: _size_rule(_of_operands(slice(0, 2))),
    Share.WRITTEN: _size_rule(_of_operands(slice(2, 3))),
    Share.MOVED: _size_rule(_of_operands(slice(0, 3))),
    Share.OPERANDS: _size_rule(lambda size, before, after: np.asarray(sum(_operands(after)))),
    Share.SIDES: _divided_sides,
    Share.HEAD: _divided_head,
}
"""The rule of each share of operations; a column with another one is an error."""


def fixed_shares(blocks: Blocks, shards: Shards) -> Floats:
    """Share that one device has of what does not grow with the batch, such as gradients of weights, (n,)."""
    has_part = blocks.has_divided_weight & (blocks.unit >= 0) & ~(shards.whole_experts & blocks.is_expert)
    divided = np.where(has_part, 1 / shards.tensor, 1.0)
    found: Floats = divided * np.where(blocks.is_expert, 1 / shards.expert, 1.0)
    return found


def _product(sizes: Floats, whole: Floats, blocks: Blocks, shards: Shards, row: int) -> Floats:
    """Sizes (groups, m, n, k) of a product on one device, from those in the graph and those of its operands."""
    sizes = sizes.copy()
    division = blocks.division[row]
    if blocks.expert_product[row]:
        sizes[0] /= shards.expert
        sizes[1:, 1] *= shards.expert * _fullest(blocks, shards)
        if shards.whole_experts:
            sizes[:, 1] /= shards.context * shards.tensor
            return sizes
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


def _operands(sizes: Floats) -> tuple[Floats, ...]:
    """Elements of the two factors and of the result, affine in the batch, of a product with one size that grows."""
    groups, m, n, k = sizes

    # Only one size of a product grows with the batch, so the square of the slopes is zero.
    def times(a: Floats, b: Floats) -> Floats:
        pair = np.asarray([a[0] * b[0], a[0] * b[1] + a[1] * b[0]])
        return np.asarray([pair[0] * groups[0], pair[1] * groups[0] + pair[0] * groups[1]])

    return times(m, k), times(k, n), times(m, n)


def _scaled(size: Floats, before: Any, after: Any) -> Floats:
    found: Floats = size * np.divide(after, before, out=np.ones(2), where=before != 0)
    return found


def allocation_shares(ops: OpTable, blocks: Blocks, shards: Shards) -> tuple[Floats, Floats]:
    """Shares of what an operation allocates: of what grows with the batch, and of the rest, (n,) each."""
    growing = token_shares(blocks, shards).copy()
    outside = (1 / shards.tensor if shards.sequence_parallel else 1.0) / shards.context
    is_product = np.isin(blocks.division, (Division.COLUMNS, Division.ROWS)) & weight_products(ops)
    rows = np.flatnonzero(is_product)
    divides_result = np.rint(ops.gemm[rows, 2, 0]).astype(np.int64) == blocks.divided_size[rows]
    whole = whole_sizes(ops)[rows]
    # The size of a square product does not tell which of its axes was divided: the way of the division does.
    square = np.rint(whole[:, 2, 0]) == np.rint(whole[:, 3, 0])
    forward = blocks.phase[rows] == Phase.FORWARD
    by_columns = blocks.division[rows] == Division.COLUMNS
    divides_result = np.where(square, by_columns == forward, divides_result)
    growing[rows] = np.where(divides_result, 1 / shards.tensor / shards.context, outside)
    growing[blocks.expert_product & is_product] *= _fullest(blocks, shards)
    return growing, fixed_shares(blocks, shards)
