"""The recorder of a script's steps: its whole memory is watched, the operations of the chosen steps are kept."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import torch
from torch import _C

from forerun.graph.graph import AllocationKind, MemoryEvent, OpClass, StepPart
from forerun.script.capturing.pretend import is_pretended
from forerun.tracing.calls import CostRow
from forerun.tracing.fusion import DataFlow
from forerun.tracing.meta_results import SHORTCUTS
from forerun.tracing.op_rules.streaming import TRITON_KERNELS
from forerun.tracing.recorder import RecordedEvent, RecordedRow, StepRecorder, tensors_in


def _on_processor(tensor: torch.Tensor) -> bool:
    """True for a tensor of the processor that holds more than a number."""
    return not is_pretended(tensor) and tensor.device.type == "cpu"


_aten = torch.ops.aten
_AVERAGING = {
    _aten.lerp_.Scalar, _aten.lerp_.Tensor, _aten.mul_.Tensor, _aten.mul_.Scalar, _aten.copy_.default,
    _aten._foreach_lerp_.Scalar, _aten._foreach_mul_.Scalar,
}  # fmt: skip
"""Operations that begin an update of a moving average."""

_READ = torch.ops.aten._local_scalar_dense.default


_PRETENDED_SHORTCUTS = {
    **SHORTCUTS,
    torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default: lambda *args, **kwargs: None,
}


class ScriptRecorder(StepRecorder):
    """Records in a running script. Blocks alive at the first recorded step are its static ones.

    Args:
        pretends: Whether the device is pretended; else the script computes on the processor.

    Attributes:
        weight_writes: Positions of the rows that change weights.
    """

    def __init__(self, *, pretends: bool) -> None:
        super().__init__(
            is_pretended if pretends else _on_processor, _PRETENDED_SHORTCUTS if pretends else {}
        )
        self.pretends = pretends
        self.is_paused = False
        self.num_reads = 0
        self._kept: set[int | None] = set()
        self._num_trained = 0
        self._trained: set[int] = set()
        self.weight_writes: list[int] = []
        self._averaged: set[int | None] = set()
        self._others: dict[int, int | None] = {}

    def averages(self, but: list[torch.Tensor]) -> bool:
        """True if the script changes about as many tensors as it has weights, or gives new data to other parameters.

        Changes count outside networks and optimizers; new data do in parameters of the shapes of weights.

        Args:
            but: Parameters that do not count.
        """
        left_out = {id(p) for p in but}
        renewed = [p for p in _parameters() if self._others.get(id(p), self.block_of(p)) != self.block_of(p)]
        number = len(self._averaged - {self.block_of(p) for p in but})
        number += sum(id(p) not in left_out for p in renewed)
        return number >= max(1, self._num_trained / 2)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the operation; records it unless it belongs to the loader."""
        if self.is_paused or (not self.pretends and not self.records_ops):
            is_quick = self.pretends and any(map(self.is_traced, tensors_in(args)))
            return self._result(func, args, kwargs or {}) if is_quick else func(*args, **(kwargs or {}))
        if not self.pretends:
            if func is _READ:
                if not self.in_optimizer:  # an optimizer's counters are the host's on a GPU as well
                    self.note_read(args[0].element_size())
                return func(*args, **(kwargs or {}))
            for tensor in tensors_in(args):
                if self.is_traced(tensor) and tensor.dim():
                    self.watch(tensor, AllocationKind.INPUT)
        writes = self.records_ops and func._schema.is_mutable
        if writes and any(id(tensor) in self._trained for tensor in tensors_in(args[:1])):
            self.weight_writes.append(len(self.rows))
        is_outside = self.records_ops and not self.in_optimizer and not self._modules[-1]
        if is_outside and func in _AVERAGING and _C._current_autograd_node() is None:
            self._averaged |= {self.block_of(tensor) for tensor in tensors_in(args[:1])} & self._kept
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _result(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of the operation: its values where it computes on the processor."""
        return super()._result(func, args, kwargs) if self.pretends else func(*args, **kwargs)

    def note_read(self, size_bytes: int) -> None:
        """A value that the host reads: a small copy that it waits for."""
        if not self.records_ops:
            return
        self.num_reads += 1
        part = StepPart.OPTIMIZER if self.in_optimizer else StepPart.FORWARD
        elements = max(1.0, size_bytes / 4)
        cost = CostRow(
            op_class=OpClass.COPY,
            read_bytes=float(size_bytes),
            write_bytes=float(size_bytes),
            elements=elements,
        )
        self._add_row(cost, "read_by_host", part)

    def note_kernel(self, name: str, arguments: list[Any]) -> None:
        """A kernel of Triton; one that is not known reads or writes each of its tensors once."""
        if not self.records_ops:
            return
        tensors = [value for value in arguments if isinstance(value, torch.Tensor)]
        moved = float(sum(tensor.numel() * tensor.element_size() for tensor in tensors))
        elements = float(max((tensor.numel() for tensor in tensors), default=1))
        part = StepPart.OPTIMIZER if self.in_optimizer else StepPart.FORWARD
        part = part if torch._C._current_autograd_node() is None else StepPart.BACKWARD
        known = TRITON_KERNELS.get(name)
        op_class, times = known or (OpClass.UNKNOWN, 1.0)
        # The largest tensor is the data: weights, indices and results of a row are smaller.
        widest = max(tensors, key=torch.Tensor.numel, default=None)
        cost = CostRow(
            op_class=op_class,
            read_bytes=times * moved,
            elements=elements,
            element_bytes=widest.element_size() if known and widest is not None else 4,
            width=float(widest.shape[-1]) if known and widest is not None else 0.0,
            is_supported=known is not None,
        )
        self._add_row(cost, f"triton {name}", part)
        if known is None:
            self.unsupported.add(f"triton {name}")

    def _add_row(self, cost: CostRow, name: str, part: StepPart) -> None:
        """Adds a row that no compiler joins with others."""
        flow = DataFlow(cost.op_class, cost.read_bytes, cost.write_bytes, (), ())
        self.rows.append(RecordedRow(cost, name, self._modules[-1], part, False, False, flow))

    def begin(self, static: list[tuple[torch.Tensor, AllocationKind]], trained: list[torch.Tensor]) -> None:
        """Starts the recording: every block alive is one that was there before.

        Args:
            static: Tensors whose contents are known.
            trained: Weights that optimizers change.
        """
        for tensor, kind in static:
            self.watch(tensor, kind)
        alive = set(self._blocks.values())
        sizes = {e.block: e for e in self.events if e.event is MemoryEvent.ALLOCATE and e.block in alive}
        kinds = {self.block_of(tensor): kind for tensor, kind in static}
        self.events = [
            RecordedEvent(
                MemoryEvent.ALLOCATE, block, event.size_bytes, kinds.get(block, AllocationKind.INPUT), -1
            )
            for block, event in sizes.items()
        ]
        changes = (AllocationKind.GRADIENT, AllocationKind.OPTIMIZER_STATE)
        # An optimizer may be given frozen weights too, such as those of a momentum encoder.
        changed = {id(tensor): self.block_of(tensor) for tensor in trained if tensor.requires_grad}
        self._num_trained, self._trained = len(changed), {id(tensor) for tensor in trained}
        self._kept.update(alive - set(changed.values()))
        self._kept -= {block for block, kind in kinds.items() if kind in changes}
        shapes = {tensor.shape for tensor in trained}
        others = (p for p in _parameters() if id(p) not in changed and p.shape in shapes)
        self._others = {id(p): b for p in others if kinds.get(b := self.block_of(p)) not in changes}
        self.rows, self.weight_writes = [], []
        self.records_ops = True
        self.default_kind = AllocationKind.ACTIVATION

    def set_kind(self, tensors: list[torch.Tensor], kind: AllocationKind) -> None:
        """Names the contents of blocks that are alive."""
        blocks = {self.block_of(tensor) for tensor in tensors}
        for event in self.events:
            if event.event is MemoryEvent.ALLOCATE and event.block in blocks:
                event.kind = kind


def _parameters() -> Iterator[torch.Tensor]:
    """All parameters of networks that are alive."""
    return (thing for thing in gc.get_objects() if type(thing) is torch.nn.Parameter)
