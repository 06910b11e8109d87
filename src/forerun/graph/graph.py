"""The operation graph of one training step, as plain numbers.

A graph is the result of a trace: one row per kernel-launching operation, and the stream of memory
allocations and frees. Every size is affine in the batch size, ``value = constant + slope * batch``, so one
graph answers any batch size without tracing again. No framework object is kept.
"""

from __future__ import annotations

from dataclasses import Field, dataclass, field, fields
from enum import IntEnum, StrEnum
from functools import cache
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


class OpClass(IntEnum):
    """Kind of work a kernel does, as far as its cost depends on that. The numbers are part of the file format."""

    CONV = 0
    DEPTHWISE_CONV = 1
    GROUPED_CONV = 2
    LINEAR = 3
    BMM = 4
    ATTENTION = 5
    RECURRENT = 6
    BATCH_NORM = 7
    LAYER_NORM = 8
    GROUP_NORM = 9
    SOFTMAX = 10
    MAX_POOL = 11
    AVG_POOL = 12
    REDUCE = 13
    COPY = 14
    ACTIVATION = 15
    MUL = 16
    ADD = 17
    ELEMENTWISE = 18
    DROPOUT = 19
    EMBEDDING = 20
    CAST = 21
    OPTIMIZER = 22
    UNKNOWN = 23


class StepPart(IntEnum):
    """Part of the training step that an operation belongs to."""

    FORWARD = 0
    BACKWARD = 1
    WEIGHT_GRADIENT = 2
    OPTIMIZER = 3


class MemoryEvent(IntEnum):
    """Kind of one entry of a memory stream."""

    ALLOCATE = 0
    FREE = 1
    CONV_WORKSPACE = 2
    """A convolution runs here; ``size`` is its input plus output bytes, from which its workspace follows."""
    FORWARD_BEGINS = 3
    BACKWARD_BEGINS = 4
    OPTIMIZER_BEGINS = 5
    STEP_ENDS = 6


class AllocationKind(IntEnum):
    """Contents of an allocation."""

    WEIGHT = 0
    BUFFER = 1
    INPUT = 2
    ACTIVATION = 3
    TEMPORARY = 4
    GRADIENT = 5
    OPTIMIZER_STATE = 6


class Share(StrEnum):
    """Part of a column that one device of an axis of a layout has."""

    WHOLE = "whole"
    """All of it: a kind, a flag, or a size that the axis leaves alone."""
    ROWS = "rows"
    """The rows of its own units."""
    WORK = "work"
    """Of a product the work of its own sides, of any other row its part of the tokens, columns or heads."""
    READ = "read"
    """The same of what is read: the factors of a product."""
    WRITTEN = "written"
    """The same of what is written: the result of a product."""
    MOVED = "moved"
    """The same of all traffic: factors and result."""
    OPERANDS = "operands"
    """The elements of all three operands of a product; of any other row as above."""
    SIDES = "sides"
    """The sides of a product that are divided."""
    HEAD = "head"
    """Columns of the rows that the head works on, such as its softmax over a vocabulary."""
    ALLOCATED = "allocated"
    """Its part of what the operation of the row allocates: of the tokens, and of weights and their gradients."""
    STATE = "state"
    """Weights, gradients and states of the optimizer by the strategy; all of what else is allocated."""


@dataclass(frozen=True, slots=True)
class Divided:
    """Parts of a column that the devices of each axis have.

    The batch of a graph is that of one device: devices with samples of their own (``data``) divide no operation.
    """

    tensor: Share = Share.WHOLE
    context: Share = Share.WHOLE
    expert: Share = Share.WHOLE
    pipeline: Share = Share.ROWS
    data: Share = Share.WHOLE


@dataclass(frozen=True, slots=True)
class Within:
    """Values that a column of a file may have; what lies outside is damage.

    Attributes:
        low, high: Ends of the range, both possible. A word as ``high`` is a number of rows: of ``kernel_names`` or
            ``module_names``, below which an index stays, or of the table itself (``rows``).
        tail: Lengths of the axes behind the rows; the last of two is (constant, slope) in the batch.
        is_whole: Whether its numbers are integers of 64 bits; else they are floats.
        may_fall_short: Whether a size that is affine in the batch may be negative at the smallest batches.
    """

    low: float
    high: float | str
    tail: tuple[int, ...] = ()
    is_whole: bool = False
    may_fall_short: bool = False


_DIVIDED, _WITHIN = "divided", "within"
_NAMES: Any = {_DIVIDED: Divided(pipeline=Share.WHOLE)}
_MOST = 1e18
"""Largest size that is taken for one: a thousand times the work of a kernel of the largest models."""
_MOST_BYTES = 1e12
"""Largest allocation, for any number of samples of which sums of bytes stay within 64 bits."""


def _kind(low: float, high: float | str, divided: Divided | None = None) -> Any:
    """A kind, an index or a flag, which no device divides."""
    return {_DIVIDED: divided or Divided(), _WITHIN: Within(low, high, is_whole=True)}


def _number(low: float, high: float, divided: Divided | None = None) -> Any:
    return {_DIVIDED: divided or Divided(), _WITHIN: Within(low, high)}


def _size(
    share: Share, *tail: int, data: Share = Share.WHOLE, may_fall_short: bool = False, most: float = _MOST
) -> Any:
    return {
        # Devices that divide features, tokens or experts have the same share.
        _DIVIDED: Divided(tensor=share, context=share, expert=share, data=data),
        _WITHIN: Within(0.0, most, tail=(*tail, 2), may_fall_short=may_fall_short),
    }


def within_of(column: Field[Any]) -> Within | None:
    """The values that a column may have; None for names."""
    return column.metadata.get(_WITHIN)


def divided_of(column: Field[Any]) -> Divided:
    """The declaration of a column.

    Raises:
        TypeError: The column has none.
    """
    found = column.metadata.get(_DIVIDED)
    if not isinstance(found, Divided):
        raise TypeError(
            f"expected the column {column.name} to declare its part on each device of a layout, got none; give it "
            "field(metadata=...) as the columns beside it"
        )
    return found


_Table = TypeVar("_Table")


def _declared(table: type[_Table]) -> type[_Table]:
    """A table whose columns all declare how devices divide them; a forgotten one would silently stay whole."""
    for column in fields(table):  # type: ignore[arg-type]  # a dataclass, which a type variable cannot say
        divided_of(column)
    return table


def at_batch(affine: Floats, batch_size: float) -> Floats:
    """Values at a batch size of an array whose last axis is (constant, slope)."""
    values: Floats = affine[..., 0] + affine[..., 1] * batch_size
    return values


@_declared
@dataclass(frozen=True, slots=True, kw_only=True)
class OpTable:
    """Operations of one step in launch order, one row each; n rows.

    Arrays with a last axis of two are affine in the batch size, (constant, slope). Each column declares which part of
    it a device of a layout has (``Divided``); ``graph.shards`` divides by nothing else.

    Attributes:
        op_class: ``OpClass`` of each row, (n,).
        step_part: ``StepPart``, (n,).
        kernel: Index into ``kernel_names``, (n,).
        module: Index into ``module_names``: the module whose forward caused the row, (n,).
        count: Kernels of this shape launched by the row, (n,); a part of one where few steps launch it.
        element_bytes: Element size of the operands [bytes], (n,).
        flops: Floating-point operations of one kernel [FLOP], (n, 2).
        read_bytes: Traffic read if every operand is read once [bytes], (n, 2).
        write_bytes: Traffic written [bytes], (n, 2).
        gemm: Matrix-product sizes as (groups, m, n, k), each affine; zero without a product, (n, 4, 2).
        elements: Elements of the largest operand; for a matrix product, of its three operands together, (n, 2).
        kernel_area: Filter or window area, 1 if none, (n,).
        stride: Largest stride, (n,).
        groups: Convolution groups, (n,).
        width: Innermost spatial size of images, or the normalised size, 0 if none, (n,).
        serial_steps: Dependent time steps inside a recurrent kernel, else 1, (n,).
        law_size: Size that the law of the row's class asks for (``cost.time.kernel_laws``), else 1, (n,).
        in_place: 1 if the output overwrites an input, (n,).
        permuted: 1 if an operand lies in memory in another order than the result, (n,).
        joined: Kernel of each row where a compiler joins operations; rows of one kernel share a number, (n,).
        joined_bytes: The row's part of the traffic of that kernel [bytes], (n, 2).
        recomputed: 1 if the operation of the forward pass is repeated in the backward pass, (n,); its step part is
            forward, because that is the kind of work it does.
        kernel_names: Framework names of the operations.
        module_names: Dotted module paths, ``""`` for the step itself.
    """

    op_class: Ints = field(metadata=_kind(0, max(OpClass)))
    step_part: Ints = field(metadata=_kind(0, max(StepPart)))
    kernel: Ints = field(metadata=_kind(0, "kernel_names"))
    module: Ints = field(metadata=_kind(0, "module_names"))
    count: Floats = field(metadata=_number(1e-3, 1e9))
    element_bytes: Floats = field(metadata=_number(0.5, 64.0))
    flops: Floats = field(metadata=_size(Share.WORK))
    read_bytes: Floats = field(metadata=_size(Share.READ))
    write_bytes: Floats = field(metadata=_size(Share.WRITTEN))
    gemm: Floats = field(metadata=_size(Share.SIDES, 4))
    elements: Floats = field(metadata=_size(Share.OPERANDS))
    kernel_area: Floats = field(metadata=_number(0.0, 1e12))
    stride: Floats = field(metadata=_number(0.0, 1e9))
    groups: Floats = field(metadata=_number(0.0, 1e12))
    width: Floats = field(metadata=_number(0.0, 1e12, Divided(tensor=Share.HEAD)))
    serial_steps: Floats = field(metadata=_number(0.0, 1e12))
    law_size: Floats = field(metadata=_number(0.0, 1e12))
    in_place: Floats = field(metadata=_number(0.0, 1.0))
    permuted: Floats = field(metadata=_number(0.0, 1.0))
    joined: Ints = field(metadata=_kind(0, "rows"))
    joined_bytes: Floats = field(metadata=_size(Share.MOVED, may_fall_short=True))
    recomputed: Floats = field(metadata=_number(0.0, 1.0))
    kernel_names: tuple[str, ...] = field(metadata=_NAMES)
    module_names: tuple[str, ...] = field(metadata=_NAMES)

    def __len__(self) -> int:
        return len(self.op_class)


def expert_products(ops: OpTable) -> Bools:
    """True for batched products of a fixed number of weights with tokens, evenly many for each, (n,)."""
    groups, sizes = ops.gemm[:, 0], ops.gemm[:, 1:]
    grows = (sizes[..., 1] > 0).any(axis=1)
    found: Bools = (ops.op_class == OpClass.BMM) & (groups[:, 1] == 0) & (groups[:, 0] > 1) & grows
    return found


@_declared
@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryStream:
    """Allocations and frees of two identical steps in order, n entries.

    Weights, buffers and the input batch exist before the first step; they are allocated by the entries before
    the first ``FORWARD_BEGINS``. The second step starts with gradients and optimizer state in place;
    repeating its entries gives the steady state.

    Attributes:
        event: ``MemoryEvent`` of each entry, (n,).
        block: Identity of the block that is allocated or freed, -1 for markers, (n,).
        size_bytes: Bytes requested, affine in the batch size, (n, 2).
        kind: ``AllocationKind`` of allocations, -1 otherwise, (n,).
        row: Operation of the second step that allocates the block, or before which it is freed; -1 before that step.
            Empty where it is not known, (n,) or (0,).
        compiled_end: Of allocations, the end of the block under a compiler: the number, from one in its step, of the
            allocation before which it is freed, 0 if it is never allocated, -1 if nothing changes and for other
            entries. Empty where it is not known, (n,) or (0,).
    """

    event: Ints = field(metadata=_kind(0, max(MemoryEvent)))
    block: Ints = field(metadata=_kind(-1, "rows"))
    size_bytes: Floats = field(metadata=_size(Share.ALLOCATED, data=Share.STATE, most=_MOST_BYTES))
    kind: Ints = field(metadata=_kind(-1, max(AllocationKind)))
    row: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64), metadata=_kind(-1, 1e9))
    compiled_end: Ints = field(
        default_factory=lambda: np.zeros(0, dtype=np.int64), metadata=_kind(-1, "rows")
    )

    def __len__(self) -> int:
        return len(self.event)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTraffic:
    """Transfers between a device and its host in one step, of what is held in the host's memory.

    Attributes:
        forward_bytes: Weights brought to the device for the forward pass [bytes].
        backward_bytes: Weights brought again for the backward pass [bytes].
        gradient_bytes: Gradients sent to the host [bytes].
        updated_bytes: Updated weights brought back after the update, if the device holds weights [bytes].
        update_bytes: Memory of the host that its update reads and writes [bytes].
        num_transfers: Transfers of one pass, one a block.
    """

    forward_bytes: float = 0.0
    backward_bytes: float = 0.0
    gradient_bytes: float = 0.0
    updated_bytes: float = 0.0
    update_bytes: float = 0.0
    num_transfers: int = 0


@dataclass(frozen=True, slots=True)
class ExpertLoad:
    """Tokens of each expert, in parts of their mean.

    Attributes:
        parts: One for each expert of a block, 1 in the mean, (e,).
        has_places: True if experts lie on devices in this order; False if any order is as likely.
    """

    parts: tuple[float, ...]
    has_places: bool

    def fullest(self, num_devices: int) -> float:
        """Tokens of the device with most of them, in parts of the mean: it sets the pace of the others.

        Each of n devices has e/n experts. Without places it is the mean of 64 orders, drawn with a fixed seed.

        >>> ExpertLoad((3.0, 1.0, 0.0, 0.0), has_places=True).fullest(2)
        2.0
        """
        return 1.0 if num_devices <= 1 else _fullest(self, num_devices)


_ORDERS = 64


@cache
def _fullest(load: ExpertLoad, num_devices: int) -> float:
    parts, rng = np.asarray(load.parts), np.random.default_rng(0)
    orders = [parts] if load.has_places else [rng.permutation(parts) for _ in range(_ORDERS)]
    most = [max(part.sum() for part in np.array_split(order, num_devices)) for order in orders]
    return float(np.mean(most)) * num_devices / len(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """One traced training step.

    Attributes:
        model: The model as the user named it.
        input_shape: Shape of one sample, without the batch axis.
        num_parameters: Number of parameters of the model.
        num_trainable_parameters: Number of parameters with a gradient.
        ops: Operations of the step.
        memory: Allocations and frees of two steps.
        only_batch_size: The one batch size the graph holds for, if sizes are not affine; None for any.
        uses_layer_norm: True if a layer or RMS norm occurs (autocast then keeps the residual stream in fp32).
        unsupported_ops: Framework operations without a cost rule; they are charged by their traffic.
        notes: Remarks for the user, such as folded batch norms of an ONNX file.
        versions: Library versions that made the trace, as (name, version).
        parameter_names: Dotted names of the parameters, in the order in which the stream allocates the weights; a
            shared parameter has one. Empty where it is not known.
        tokens_per_sample: Tokens of one sample of a model that reads tokens, None of others.
        blocks: Names of the modules that repeat, such as the layers of a transformer, in order.
        model_flops: Work of the products of one step that the training itself needs, (constant, slope) in the batch
            [FLOP]; products that are computed again are left out.
        recomputed_flops: Work of the products that are computed again, (constant, slope) [FLOP].
        host_traffic: Transfers of what is held in the host's memory, None without offload.
        eager_memory: The memory of eager execution, where ``memory`` is that of a compiled step; else None.
        expert_load: Tokens of its experts, None for equally many.
    """

    model: str
    input_shape: tuple[int, ...]
    num_parameters: int
    num_trainable_parameters: int
    ops: OpTable
    memory: MemoryStream
    only_batch_size: int | None = None
    uses_layer_norm: bool = False
    unsupported_ops: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    versions: tuple[tuple[str, str], ...] = ()
    parameter_names: tuple[str, ...] = ()
    tokens_per_sample: int | None = None
    blocks: tuple[str, ...] = ()
    model_flops: tuple[float, float] = (0.0, 0.0)
    recomputed_flops: tuple[float, float] = (0.0, 0.0)
    host_traffic: HostTraffic | None = None
    eager_memory: MemoryStream | None = None
    expert_load: ExpertLoad | None = None

    @property
    def is_keras(self) -> bool:
        """True if it was traced from a Keras model."""
        return any(name == "keras" for name, _ in self.versions)

    @property
    def size_bytes(self) -> int:
        """Size of the arrays in memory [bytes]."""
        streams = [self.memory] if self.eager_memory is None else [self.memory, self.eager_memory]
        values = [getattr(stream, field.name) for stream in streams for field in fields(stream)]
        values += [getattr(self.ops, field.name) for field in fields(self.ops)]
        return sum(value.nbytes for value in values if isinstance(value, np.ndarray))

    def total_flops(self, batch_size: float) -> float:
        """Work of one step [FLOP]."""
        return float(at_batch(self.ops.flops, batch_size) @ self.ops.count)

    def total_bytes(self, batch_size: float) -> float:
        """Traffic of one step if every operand moves once [bytes]."""
        moved = at_batch(self.ops.read_bytes + self.ops.write_bytes, batch_size)
        return float(moved @ self.ops.count)
