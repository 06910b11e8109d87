"""Records a training step: the dispatched operations with shapes, and the life of storages."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import _C
from torch.utils._python_dispatch import TorchDispatchMode

from forerun.graph.graph import AllocationKind, MemoryEvent, StepPart
from forerun.tracing.calls import Call, CostRow, TensorInfo, operation_facts
from forerun.tracing.cuda_semantics import repeats_now
from forerun.tracing.fusion import Access, DataFlow
from forerun.tracing.meta_results import SHORTCUTS, meta_result, nested_tensors
from forerun.tracing.op_rules import cost_rows

_NAMES_WITHOUT_KERNEL = frozenset(operation_facts()["without_kernel"])
_BATCH_STATISTICS = operation_facts()["batch_statistics"]


@dataclass(frozen=True, slots=True)
class RecordedRow:
    """A cost row with its place in the step."""

    cost: CostRow
    kernel_name: str
    module_name: str
    step_part: StepPart
    in_place: bool
    permuted: bool
    flow: DataFlow
    recomputed: bool = False


@dataclass(slots=True)
class RecordedEvent:
    """An entry of the memory stream at one batch size."""

    event: MemoryEvent
    block: int
    size_bytes: int
    kind: int
    row: int


@dataclass(frozen=True, slots=True)
class _Schema:
    name: str
    has_kernel: bool
    is_mutable: bool
    is_convolution: bool


def _read_schema(func: Any) -> _Schema:
    name = func._schema.name.partition("::")[2]
    namespace = func.namespace
    return _Schema(
        name,
        has_kernel=namespace != "prim" and name not in _NAMES_WITHOUT_KERNEL,
        is_mutable=func._schema.is_mutable,
        is_convolution=name in ("convolution", "convolution_backward"),
    )


_SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc)


def _values(sparse: torch.Tensor) -> torch.Tensor:
    return sparse._values() if sparse.layout is torch.sparse_coo else sparse.values()


def _tensor_info(tensor: torch.Tensor) -> TensorInfo:
    if tensor.layout in _SPARSE:
        number, rows = _values(tensor).numel(), max(1, tensor.shape[0])
        # A product takes the values of a row, as many as there are in the mean, and not all of its columns.
        shape = (rows, max(1, number // rows)) if tensor.dim() == 2 else tuple(tensor.shape)
        return TensorInfo(shape, tensor.element_size(), number, tensor.is_floating_point())
    shape, strides = tuple(tensor.shape), tensor.stride()
    touched = 1
    for size, stride in zip(shape, strides, strict=True):
        if stride:
            touched *= size
    if 0 in shape:
        touched = 0
    return TensorInfo(shape, tensor.element_size(), touched, tensor.is_floating_point(), strides)


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _tensor_info(value)
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested lists, tuples and mappings; of a sparse one its values."""
    return (_values(tensor) if tensor.layout in _SPARSE else tensor for tensor in nested_tensors(value))


class StepRecorder(TorchDispatchMode):
    """Collects cost rows and memory events of the code that runs under it.

    Rows are collected while ``records_ops`` is true, memory events always. A row of the backward pass belongs
    to the module whose forward created its autograd node. Outside autograd, ``in_optimizer`` says whether a row is one
    of the update or of the forward pass.

    Args:
        is_traced: Function that is True for a tensor which represents one on the device, such as a meta tensor.
        shortcuts: Replacement of an operation, by operation; if it returns ``NotImplemented``, the operation runs.
    """

    def __init__(
        self,
        is_traced: Callable[[torch.Tensor], bool] = lambda tensor: tensor.is_meta,
        shortcuts: Mapping[Any, Callable[..., Any]] = SHORTCUTS,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_traced = is_traced
        self._shortcuts = shortcuts
        self.rows: list[RecordedRow] = []
        self.events: list[RecordedEvent] = []
        self.records_ops = False
        self.unsupported: set[str] = set()
        self.default_kind = AllocationKind.INPUT
        self.before_update: Callable[[], None] | None = None
        self._schemas: dict[Any, _Schema] = {}
        self._modules: list[str] = [""]
        self._module_of_node: dict[int, str] = {}
        self._blocks: dict[int, int] = {}
        self._versions: dict[int, int] = {}
        self._references: dict[int, weakref.ref[Any]] = {}
        self._num_blocks = 0
        self.in_optimizer = False

    def mark(self, event: MemoryEvent) -> None:
        """Adds a marker to the memory stream."""
        if event is MemoryEvent.OPTIMIZER_BEGINS and self.before_update is not None:
            self.before_update()
        self.in_optimizer = event is MemoryEvent.OPTIMIZER_BEGINS
        self._append(event, -1, 0, -1)

    def _append(self, event: MemoryEvent, block: int, size_bytes: int, kind: int) -> None:
        row = len(self.rows) if self.records_ops else -1
        self.events.append(RecordedEvent(event, block, size_bytes, kind, row))

    def watch(self, tensor: torch.Tensor, kind: AllocationKind) -> int:
        """Marks the storage of a tensor as live and returns its block number."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        block = self._blocks.get(key)
        if block is None:
            block = self._num_blocks
            self._num_blocks += 1
            self._blocks[key] = block
            self._append(MemoryEvent.ALLOCATE, block, storage.nbytes(), kind)
            self._references[key] = weakref.ref(storage, partial(self._forget, key))
        return block

    def _forget(self, key: int, _reference: weakref.ref[Any]) -> None:
        block = self._blocks.pop(key)
        del self._references[key]
        self._append(MemoryEvent.FREE, block, 0, -1)

    def evict(self, tensor: torch.Tensor) -> None:
        """Marks the storage of a tensor as freed although the tensor lives on: its contents went elsewhere."""
        key = tensor.untyped_storage()._cdata
        if key in self._blocks:
            self._forget(key, self._references[key])

    def name(self, tensor: torch.Tensor, kind: AllocationKind) -> None:
        """Says what the storage of a watched tensor holds."""
        block = self.block_of(tensor)
        for event in reversed(self.events):
            if event.block == block and event.event is MemoryEvent.ALLOCATE:
                event.kind = kind
                return

    def block_of(self, tensor: torch.Tensor) -> int | None:
        """Block number of a tensor that is alive and watched."""
        return self._blocks.get(tensor.untyped_storage()._cdata)

    def enter_module(self, name: str) -> None:
        """Starts attributing operations to a module."""
        self._modules.append(name)

    def leave_module(self) -> None:
        """Ends the attribution that ``enter_module`` started."""
        self._modules.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the operation on meta and records it."""
        schema = self._schemas.get(func)
        if schema is None:
            schema = self._schemas[func] = _read_schema(func)
        kwargs = kwargs or {}
        operands = list(tensors_in(args))
        if operands and not any(map(self.is_traced, operands)):
            return func(*args, **kwargs)  # arithmetic of the host, such as an optimizer's step counter
        inputs = {t.untyped_storage()._cdata for t in operands}
        result = self._result(func, args, kwargs)
        outputs = [t for t in tensors_in(result) if self.is_traced(t)]
        if not operands and not outputs:
            return result  # made on the host
        for tensor in outputs:
            self.watch(tensor, self.default_kind)
        if not schema.has_kernel:
            return result
        if not schema.is_mutable and outputs and all(t.untyped_storage()._cdata in inputs for t in outputs):
            self._module_of_autograd_node()
            return result  # a view
        if self.records_ops:
            self._record(func, schema, args, kwargs, outputs)
        elif schema.is_mutable:
            self._written(outputs)
        if schema.is_convolution:
            self._note_workspace(args, outputs)
        elif schema.name == "_softmax_backward_data":
            # CUDA's kernel has the product of gradient and output before it (ATen/native/cuda/SoftMax.cu).
            self.watch(torch.empty_like(args[0], device="meta"), self.default_kind)
        return result

    def _result(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of the operation, as a shortcut says it, or as it was before with such operands."""
        shortcut = self._shortcuts.get(func)
        result = NotImplemented if shortcut is None else shortcut(*args, **kwargs)
        return meta_result(func, args, kwargs, self.is_traced) if result is NotImplemented else result

    def _note_workspace(self, args: Any, outputs: list[torch.Tensor]) -> None:
        # The operators of convolutions take nine arguments forward and eleven backward.
        is_forward = len(args) == 9
        source, groups = (args[0], args[8]) if is_forward else (args[1], args[9])
        if groups > 1 and groups == source.shape[1]:
            return
        other = outputs[0] if is_forward else args[0]
        size = source.numel() * source.element_size() + other.numel() * other.element_size()
        self._append(MemoryEvent.CONV_WORKSPACE, -1, size, -1)

    def _module_of_autograd_node(self) -> str:
        """The running module; a forward pass keeps its autograd node for the backward pass."""
        node: Any = _C._current_autograd_node()
        module = self._modules[-1]
        if node is not None and not module:
            return self._module_of_node.get(node._sequence_nr(), "")
        # A module runs in the backward pass too if a checkpoint recomputes it. Autograd made the node of this operation
        # before it dispatched the operation, and has counted on.
        self._module_of_node.setdefault(_C._autograd._get_sequence_nr() - 1, module)
        return module

    def _record(
        self, func: Any, schema: _Schema, args: Any, kwargs: Any, outputs: list[torch.Tensor]
    ) -> None:
        module = self._module_of_autograd_node()
        outside = StepPart.OPTIMIZER if self.in_optimizer else StepPart.FORWARD
        is_outside = _C._current_autograd_node() is None
        # Gradients are computed with autograd off; a checkpoint that repeats the forward pass switches it on, but for
        # what stands inside of a function with its own gradient, such as the product of a quantized layer.
        recomputed = not is_outside and (torch.is_grad_enabled() or repeats_now())
        part = outside if is_outside or recomputed else StepPart.BACKWARD
        plain = [_plain(value) for value in args]
        if kwargs:
            operands = (value for name, value in kwargs.items() if name != "out")  # that is a result
            plain.extend(_plain(v) for v in operands if isinstance(v, (torch.Tensor, list, tuple)))
        call = Call(schema.name, tuple(plain), tuple(_tensor_info(t) for t in outputs), schema.is_mutable)
        reads = self._accesses([*tensors_in(args), *tensors_in(kwargs)])
        if schema.is_mutable:
            self._written(outputs)
        writes = self._accesses(outputs)
        normalises_batch = schema.name in _BATCH_STATISTICS and (
            "backward" in schema.name or args[_BATCH_STATISTICS[schema.name]] is True
        )
        for number, cost in enumerate(cost_rows(call)):
            is_weight_gradient = cost.is_weight_gradient and part is StepPart.BACKWARD
            row_part = StepPart.WEIGHT_GRADIENT if is_weight_gradient else part
            touched = (() if number else reads, () if number else writes)
            flow = DataFlow(cost.op_class, cost.read_bytes, cost.write_bytes, *touched, normalises_batch)
            self.rows.append(
                RecordedRow(
                    cost,
                    schema.name,
                    module,
                    row_part,
                    schema.is_mutable,
                    call.is_permuted(),
                    flow,
                    recomputed,
                )
            )
            if not cost.is_supported:
                self.unsupported.add(schema.name)

    def _written(self, tensors: list[torch.Tensor]) -> None:
        """Notes that the storages of some tensors hold other values from now on."""
        for block in {self._blocks[t.untyped_storage()._cdata] for t in tensors}:
            self._versions[block] = self._versions.get(block, 0) + 1

    def _accesses(self, tensors: list[torch.Tensor]) -> tuple[Access, ...]:
        found = []
        for tensor in tensors:
            block = self._blocks.get(tensor.untyped_storage()._cdata)
            if block is not None:
                size = _tensor_info(tensor).touched_bytes
                found.append(Access(block, self._versions.get(block, 0), int(tensor.storage_offset()), size))
        return tuple(dict.fromkeys(found))
