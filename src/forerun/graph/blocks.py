"""The repeated blocks of a network, found in its traced step, and the part that tensor parallelism divides in each.

A block is what a numbered list of modules repeats (``model.layers.7``). Operations before the first block and after the
last are units of their own, so that a step is a row of units: input, blocks, head. Inside a unit, products of the token
width with weights are paired as Megatron-LM pairs them: those that widen are divided by columns, the one that comes
back to the token width is divided by rows, and all operations between them act on a device's own columns or heads.

Source: Shoeybi et al. 2019, "Megatron-LM", arXiv 1909.08053, section 3.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from forerun.base.errors import InvalidSetupError
from forerun.base.kept import Kept
from forerun.graph.graph import (
    AllocationKind,
    Bools,
    ExpertLoad,
    Floats,
    Graph,
    Ints,
    MemoryEvent,
    OpClass,
    OpTable,
    StepPart,
    expert_products,
)

_KEPT: Kept[Blocks] = Kept(64)
EIGHT_BIT_PRODUCT = "eight_bit_product"
"""Name of a product in 8 bits, which stands in a graph as one of half the depth in 16 bits."""

EIGHT_BIT_RATE = 2.0
"""Rate of matrix units in 8 bits over that in 16 bits: two on all devices that have both."""

_ATTENTION = (OpClass.ATTENTION, OpClass.BMM, OpClass.SOFTMAX)
_ADAPTER = "lora_"


class Phase(IntEnum):
    """Pass of the step in which an operation runs; recomputed operations run in the backward pass."""

    FORWARD = 0
    BACKWARD = 1
    OPTIMIZER = 2


class Division(IntEnum):
    """Part of an operation that tensor parallelism leaves to one device."""

    NONE = 0
    """All of it, or its part of the tokens under sequence parallelism."""
    INSIDE = 1
    """Its part of the columns or heads."""
    COLUMNS = 2
    """A product whose weight is divided by its output features."""
    ROWS = 3
    """A product whose weight is divided by its input features."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """Units of a traced step: unit 0 is the input, then come the blocks, the last unit is the head.

    Attributes:
        names: Module path of each block.
        unit: Unit of each operation; -1 for the optimizer, (n,).
        phase: ``Phase`` of each operation, (n,).
        division: ``Division`` of each operation, (n,).
        divided_size: Features of a product that are divided, 0 for other operations, (n,).
        has_divided_weight: True for operations of a module whose weight is divided, (n,).
        weight_unit: Unit of each parameter, (p,).
        weight_bytes: Size of each parameter [bytes], (p,).
        weight_divided: True if tensor parallelism divides the parameter, (p,).
        is_expert: True for operations of modules that hold experts, (n,).
        expert_product: True for the products of experts, (n,).
        weight_expert: True if the parameter holds one weight for each expert, (p,).
        num_experts: Experts of a block, the fewest of all that have any; None without experts.
        expert_load: Their tokens, None for equally many.
        tied_bytes: Size of an embedding that the head uses as well; 0 without one [bytes].
        num_heads: Heads of attention per sample, the fewest of all blocks; None if no attention was found.
        hidden_size: Width of a token; 0 if no pair of products was found.
    """

    names: tuple[str, ...]
    unit: Ints
    phase: Ints
    division: Ints
    divided_size: Ints
    has_divided_weight: Bools
    weight_unit: Ints
    weight_bytes: Floats
    weight_divided: Bools
    is_expert: Bools
    expert_product: Bools
    weight_expert: Bools
    num_experts: int | None
    expert_load: ExpertLoad | None
    tied_bytes: float
    num_heads: int | None
    hidden_size: int

    @property
    def num_units(self) -> int:
        """Number of units: the blocks, the input and the head."""
        return len(self.names) + 2

    @property
    def can_be_divided(self) -> bool:
        """True if every block has a pair of products that tensor parallelism divides."""
        has = np.bincount(self.unit[self.division == Division.ROWS] + 1, minlength=self.num_units + 1) > 0
        return bool(has[2:-1].all()) and len(self.names) > 0


def blocks_of(graph: Graph) -> Blocks:
    """The units of a graph; remembered.

    Raises:
        InvalidSetupError: The step has no backward pass, or no names of its weights.
    """
    return _KEPT.get((graph,), (), lambda: _found(graph))


def _found(graph: Graph) -> Blocks:
    ops = graph.ops
    phase = _phases(ops.step_part)
    names, unit = _units(graph, phase)
    division, divided_size, hidden = _divisions(graph, unit, phase, len(names))
    sizes = _parameter_bytes(graph)
    weight_unit = _weight_units(graph, names, unit, phase)
    divided, tied_bytes = _divided_weights(graph, unit, division, weight_unit, sizes)
    is_attention = (ops.op_class == OpClass.ATTENTION) & (unit > 0)
    heads = ops.gemm[is_attention, 0, 1]
    expert_product = expert_products(ops) & (unit >= 0)
    holders = {ops.module_names[module] for module in ops.module[expert_product].tolist()}
    of_expert = [name.rpartition(".")[0] in holders for name in graph.parameter_names]
    experts = ops.gemm[expert_product, 0, 0]
    return Blocks(
        names=names,
        unit=unit,
        phase=phase,
        division=division,
        divided_size=divided_size,
        has_divided_weight=np.isin(ops.module, _modules_with_divided_weight(graph, division, divided)),
        weight_unit=weight_unit,
        weight_bytes=sizes,
        weight_divided=divided,
        is_expert=np.isin(ops.module, np.unique(ops.module[expert_product])) & (unit >= 0),
        expert_product=expert_product,
        weight_expert=np.asarray(of_expert, dtype=bool),
        num_experts=round(experts.min()) if len(experts) else None,
        expert_load=graph.expert_load,
        tied_bytes=tied_bytes,
        num_heads=round(heads.min()) if len(heads) else None,
        hidden_size=hidden,
    )


def _phases(step_part: Ints) -> Ints:
    phase = np.full(len(step_part), int(Phase.FORWARD))
    backward = np.flatnonzero(np.isin(step_part, (StepPart.BACKWARD, StepPart.WEIGHT_GRADIENT)))
    if len(backward):
        phase[backward[0] :] = Phase.BACKWARD
    phase[step_part == StepPart.OPTIMIZER] = Phase.OPTIMIZER
    return phase


def _block_name(module: str) -> str | None:
    """The outermost numbered module that holds a module."""
    parts = module.split(".")
    for index, part in enumerate(parts):
        if part.isdigit() and index:
            return ".".join(parts[: index + 1])
    return None


def _units(graph: Graph, phase: Ints) -> tuple[tuple[str, ...], Ints]:
    ops = graph.ops
    name_of_module = [_block_name(name) for name in ops.module_names]
    siblings: dict[str, set[str]] = defaultdict(set)
    for name in name_of_module:
        if name is not None:
            siblings[name.rpartition(".")[0]].add(name)
    # A single numbered child is no stack of blocks: "features.0" of a head, say.
    is_list = {name: len(siblings[name.rpartition(".")[0]]) > 1 for name in name_of_module if name}
    order: dict[str, int] = {}
    own = np.full(len(ops), -1)
    for row, module in enumerate(ops.module.tolist()):
        name = name_of_module[module]
        if name is None or not is_list[name] or phase[row] == Phase.OPTIMIZER:
            continue
        own[row] = order.setdefault(name, len(order) + 1)
    last = len(order) + 1
    # Rows without a block of their own, such as a residual sum, belong to the block before them; after the
    # last block of a pass comes the head.
    unit = own.copy()
    # The backward pass meets the blocks in reverse, so the head stands before them there.
    for part, before, after in ((Phase.FORWARD, 0, last), (Phase.BACKWARD, last, 0)):
        rows = np.flatnonzero(phase == part)
        inside = rows[own[rows] >= 0]
        if not len(inside):
            unit[rows] = 0
            continue
        current = before
        for row in rows.tolist():
            if own[row] >= 0:
                current = int(own[row])
            unit[row] = after if own[row] < 0 and row > inside[-1] else current
    return tuple(order), unit


def weight_products(ops: OpTable) -> Bools:
    """True for products that tensor parallelism may divide: those of linear layers and of experts, (n,)."""
    found: Bools = (ops.op_class == OpClass.LINEAR) | expert_products(ops)
    return found


def whole_sizes(ops: OpTable) -> Floats:
    """Sizes (groups, m, n, k) of products with the true depth of those in 8 bits, (n, 4, 2)."""
    is_small = np.asarray([EIGHT_BIT_PRODUCT in name for name in ops.kernel_names], dtype=bool)
    if not is_small.any():
        return ops.gemm
    sizes = ops.gemm.copy()
    sizes[is_small[ops.kernel], 3] *= EIGHT_BIT_RATE
    return sizes


def _divisions(graph: Graph, unit: Ints, phase: Ints, num_blocks: int) -> tuple[Ints, Ints, int]:
    """``Division`` and divided features of every operation, and the width of a token."""
    ops = graph.ops
    division, divided = np.zeros(len(ops), dtype=np.int64), np.zeros(len(ops), dtype=np.int64)
    of_expert = expert_products(ops)
    is_product = weight_products(ops) & (ops.gemm[:, 1, 1] > 0)
    modules = ops.module.tolist()
    names = ops.module_names
    sizes = whole_sizes(ops)
    of_product: dict[tuple[int, int, int, int], tuple[int, Division, int]] = {}
    hidden, num_groups = 0, 0
    for block in range(1, num_blocks + 1):
        rows = np.flatnonzero((unit == block) & (phase == Phase.FORWARD))
        group: list[int] = []
        width, attended = 0, False
        for row in rows.tolist():
            if ops.op_class[row] in _ATTENTION and not of_expert[row]:
                attended = attended or bool(group)
            if not is_product[row] or _ADAPTER in names[modules[row]]:
                continue
            n, k = _weight_shape(sizes[row])
            width = width or k
            # The experts of gpt-oss are as wide as a token, so that only their order tells the last product.
            closes = (
                bool(group) and n == width and (k != width or attended or of_expert[[row, group[-1]]].all())
            )
            if closes:
                num_groups += 1
                for member in group:
                    size = _weight_shape(sizes[member])[0]
                    of_product[_product_key(ops, sizes, member, block)] = (num_groups, Division.COLUMNS, size)
                of_product[_product_key(ops, sizes, row, block)] = (num_groups, Division.ROWS, k)
                group, attended = [], False
                hidden = hidden or width
            elif k == width:
                # What chooses the experts is no part of them.
                group = [member for member in group if of_expert[member] == of_expert[row]]
                group.append(row)
                attended = False
    head = np.flatnonzero((unit == num_blocks + 1) & (phase == Phase.FORWARD) & is_product)
    if len(head) and num_groups:
        row = int(head[np.argmax(ops.flops[head, 1])])
        num_groups += 1
        size = _weight_shape(sizes[row])[0]
        of_product[_product_key(ops, sizes, row, num_blocks + 1)] = (num_groups, Division.COLUMNS, size)
    _mark(ops, sizes, unit, phase, of_product, division, divided)
    return division, divided, hidden


def _weight_shape(gemm: Floats) -> tuple[int, int]:
    """Output and input features of a forward product."""
    return round(gemm[2, 0]), round(gemm[3, 0])


def _product_key(ops: OpTable, sizes: Floats, row: int, block: int) -> tuple[int, int, int, int]:
    """Unit, module and the two sizes of the weight of a product, the same in all passes."""
    module = int(ops.module[row])
    fixed = sorted(round(size[0]) for size in sizes[row, 1:] if size[1] == 0)
    return block, module, fixed[0], fixed[-1]


def _mark(
    ops: OpTable,
    sizes: Floats,
    unit: Ints,
    phase: Ints,
    of_product: dict[tuple[int, int, int, int], tuple[int, Division, int]],
    division: Ints,
    divided: Ints,
) -> None:
    """Marks the products of all passes, and as ``INSIDE`` what runs between two products of one pair."""
    marks: list[tuple[int, int, Division]] = []
    for row in np.flatnonzero(weight_products(ops) & (unit > 0)).tolist():
        found = of_product.get(_product_key(ops, sizes, row, int(unit[row])))
        if found is None:
            continue
        pair, kind, size = found
        division[row], divided[row] = kind, size
        marks.append((row, pair, kind))
    # Between two products that divide rows there is a sum over the devices already: nothing inside stays
    # divided.
    for (row, pair, kind), (after, other, other_kind) in itertools.pairwise(marks):
        if pair != other or (kind is Division.ROWS and other_kind is Division.ROWS):
            continue
        between = slice(row + 1, after)
        chosen = (division[between] == Division.NONE) & (unit[between] == unit[row])
        division[between] = np.where(chosen, int(Division.INSIDE), division[between])


def _parameter_bytes(graph: Graph) -> Floats:
    stream = graph.memory
    before = int(np.argmax(stream.event == MemoryEvent.FORWARD_BEGINS))
    is_weight = (stream.kind[:before] == AllocationKind.WEIGHT) & (
        stream.event[:before] == MemoryEvent.ALLOCATE
    )
    found: Floats = stream.size_bytes[:before][is_weight, 0]
    if len(found) != len(graph.parameter_names) or not len(stream.row):
        raise InvalidSetupError(
            f"{graph.model} was traced without the names of its weights, so its work cannot be divided; "
            "expected a PyTorch model, leave --parallel out"
        )
    return found


def _weight_units(graph: Graph, names: Sequence[str], unit: Ints, phase: Ints) -> Ints:
    order = {name: index + 1 for index, name in enumerate(names)}
    first: dict[str, int] = {}
    forward = np.flatnonzero(phase == Phase.FORWARD)
    for row in forward.tolist():
        first.setdefault(graph.ops.module_names[graph.ops.module[row]], int(unit[row]))
    found = []
    for name in graph.parameter_names:
        module = name.rpartition(".")[0]
        block = _block_name(module)
        found.append(order[block] if block in order else first.get(module, 0))
    return np.asarray(found, dtype=np.int64)


def _modules_with_divided_weight(graph: Graph, division: Ints, divided: Bools) -> Ints:
    ops = graph.ops
    names = {
        name.rpartition(".")[0]
        for name, is_divided in zip(graph.parameter_names, divided, strict=True)
        if is_divided
    }
    own = [index for index, name in enumerate(ops.module_names) if name in names]
    products = np.isin(division, (Division.COLUMNS, Division.ROWS))
    return np.union1d(np.asarray(own, dtype=np.int64), ops.module[products])


def _matching(numbers: Floats, weight_unit: Ints, wanted: dict[int, set[int]]) -> Bools:
    """True for weights with as many elements as a divided product of their unit has, (p,)."""
    pairs = zip(np.rint(numbers).astype(np.int64).tolist(), weight_unit.tolist(), strict=True)
    return np.asarray([number in wanted[unit] for number, unit in pairs], dtype=bool)


def _divided_weights(
    graph: Graph, unit: Ints, division: Ints, weight_unit: Ints, sizes: Floats
) -> tuple[Bools, float]:
    """True for each weight of a divided product or of the embedding of tokens, and the size of a tied embedding."""
    ops = graph.ops
    wanted: dict[int, set[int]] = defaultdict(set)
    rows = np.flatnonzero(np.isin(division, (Division.COLUMNS, Division.ROWS)))
    whole = whole_sizes(ops)
    for row in rows.tolist():
        fixed = [round(size[0]) for size in whole[row, 1:] if size[1] == 0]
        if len(fixed) == 2:
            number = round(ops.gemm[row, 0, 0]) if ops.gemm[row, 0, 1] == 0 else 1
            wanted[int(unit[row])].add(number * fixed[0] * fixed[1])
    # Adapters or a quantized block beside half precision make a mean element that no weight has: the format in which
    # most bytes are those of divided products is the one of the blocks.
    by_format = {element: _matching(sizes / element, weight_unit, wanted) for element in (4.0, 2.0, 1.0, 0.5)}
    element = max(by_format, key=lambda one: float(sizes[by_format[one]].sum()))
    divided = by_format[element] | (by_format[2.0] if element < 2.0 else False)
    numbers = np.rint(sizes / element).astype(np.int64)
    is_lookup = (ops.op_class == OpClass.EMBEDDING) & (unit == 0) & (ops.elements[:, 1] > 0)
    tables = {ops.module_names[module] for module in ops.module[is_lookup].tolist()}
    is_table = np.asarray([name.rpartition(".")[0] in tables for name in graph.parameter_names], dtype=bool)
    head = int(weight_unit.max(initial=0)) if len(weight_unit) else 0
    head = max(head, int(unit.max(initial=0)))
    has_own = bool((divided & (weight_unit == head)).any())
    tied = is_table & np.isin(numbers, list(wanted[head])) if not has_own else np.zeros_like(is_table)
    return divided | is_table, float(sizes[tied].max(initial=0.0))
