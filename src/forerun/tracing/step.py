"""Runs training steps of a built model on the meta device under the recorder."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from forerun.graph.graph import AllocationKind, MemoryEvent, StepPart
from forerun.question.setup import Layout, Phase, TrainingSetup
from forerun.tracing.cuda_semantics import cuda_semantics, leave_autocast_region
from forerun.tracing.meta_results import mapped_tensors
from forerun.tracing.models.built_model import BuiltModel
from forerun.tracing.models.meta_build import FiniteNumbers
from forerun.tracing.op_rules.products import attention_as
from forerun.tracing.optimizers import make_optimizer
from forerun.tracing.recorder import RecordedEvent, RecordedRow, StepRecorder, tensors_in
from forerun.tracing.saving.offload import on_device, parked_inputs, streamed_blocks
from forerun.tracing.saving.prepare import AUTOCAST_DTYPE, STORAGE_DTYPE, convert_weights


@dataclass(frozen=True, slots=True)
class RawTrace:
    """Rows and memory events of one model at one batch size."""

    batch_size: int
    rows: list[RecordedRow]
    events: list[RecordedEvent]
    unsupported: frozenset[str]


def record_step(
    built: BuiltModel, setup: TrainingSetup, batch_size: int, recorder: StepRecorder | None = None
) -> RawTrace:
    """Records the steady-state step of a model and the memory stream of two steps.

    Args:
        built: Model on the meta device; it is converted in place to the setup's precision and layout.
        setup: Training configuration; its batch size is not used.
        batch_size: Number of samples in the traced batch.
        recorder: New recorder, for tensors other than those of the meta device.
    """
    module = built.module
    batch = prepared_batch(built, setup, batch_size)
    for parameter in module.parameters():
        parameter.grad = None
    optimizer = make_optimizer(on_device(setup), [p for p in module.parameters() if p.requires_grad])
    recorder = recorder or StepRecorder()
    _watch_static(recorder, module, batch, optimizer)
    was_collecting = gc.isenabled()
    gc.disable()  # blocks are freed by their last reference, as on a GPU, not when the collector happens to run
    try:
        with (
            attention_as(setup.attention_kernel),
            _module_names(module, recorder),
            streamed_blocks(module, built.blocks, setup, recorder),
            parked_inputs(module, built.blocks, setup, recorder),
        ):
            for index in range(2):
                recorder.records_ops = index == 1
                if setup.phase is Phase.TRAIN:
                    _train_step(built, setup, batch, optimizer, recorder)
                else:
                    _forward_step(built, setup, batch, recorder)
    finally:
        if was_collecting:
            gc.enable()
    # Blocks that die after the second step, some of them when the collector runs, are not part of the stream.
    events = list(recorder.events)
    _name_kinds(recorder, module, optimizer)
    for parameter in module.parameters():
        parameter.grad = None
    rows = recorder.rows if setup.compile_loss else [_eager_loss(row) for row in recorder.rows]
    return RawTrace(batch_size, rows, events, frozenset(recorder.unsupported))


def _eager_loss(row: RecordedRow) -> RecordedRow:
    # What runs outside of every submodule is the loss: a language model's own forward adds nothing else to its parts.
    is_loss = not row.module_name and row.step_part is not StepPart.OPTIMIZER
    return replace(row, flow=replace(row.flow, is_eager=True)) if is_loss else row


def prepared_batch(built: BuiltModel, setup: TrainingSetup, batch_size: int) -> dict[str, Any]:
    """A batch in the setup's precision and layout, to which the model is converted in place."""
    dtype = STORAGE_DTYPE.get(setup.precision)
    convert_weights(built.module, setup)
    if setup.layout is Layout.NHWC:
        built.module.to(memory_format=torch.channels_last)

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        if dtype is not None and tensor.is_floating_point():
            tensor = tensor.to(dtype)
        if setup.layout is Layout.NHWC and tensor.dim() == 4:
            tensor = tensor.contiguous(memory_format=torch.channels_last)
        return tensor

    batch: dict[str, Any] = mapped_tensors(built.make_batch(batch_size), convert)
    return batch


def _watch_static(
    recorder: StepRecorder,
    module: torch.nn.Module,
    batch: dict[str, Any],
    optimizer: torch.optim.Optimizer | None,
) -> None:
    for parameter in module.parameters():
        recorder.watch(parameter, AllocationKind.WEIGHT)
    for buffer in module.buffers():
        recorder.watch(buffer, AllocationKind.BUFFER)
    for tensor in tensors_in(batch):
        recorder.watch(tensor, AllocationKind.INPUT)
    for tensor in _state_of(optimizer, recorder):  # Adagrad makes its state before the first step
        recorder.watch(tensor, AllocationKind.OPTIMIZER_STATE)


def _state_of(optimizer: torch.optim.Optimizer | None, recorder: StepRecorder) -> Iterator[torch.Tensor]:
    if optimizer is not None:
        tensors = tensors_in([list(state.values()) for state in optimizer.state.values()])
        yield from (tensor for tensor in tensors if recorder.is_traced(tensor))


@contextmanager
def _module_names(module: torch.nn.Module, recorder: StepRecorder) -> Iterator[None]:
    """Tells the recorder which module is running, by forward hooks on every submodule."""
    handles = []
    for name, child in module.named_modules():
        if not name:
            continue

        def enter(_module: Any, _args: Any, name: str = name) -> None:
            recorder.enter_module(name)

        def leave(_module: Any, _args: Any, _output: Any) -> None:
            recorder.leave_module()

        handles.append(child.register_forward_pre_hook(enter))
        handles.append(child.register_forward_hook(leave, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _train_step(
    built: BuiltModel,
    setup: TrainingSetup,
    batch: dict[str, Any],
    optimizer: torch.optim.Optimizer | None,
    recorder: StepRecorder,
) -> None:
    recorder.default_kind = AllocationKind.ACTIVATION
    with (
        recorder,
        cuda_semantics(AUTOCAST_DTYPE.get(setup.precision), fused_attention=setup.fused_attention),
    ):
        # Gradients of the step before live until here, as in a loop that zeroes them first.
        recorder.mark(MemoryEvent.FORWARD_BEGINS)
        if not setup.keeps_gradients:
            _zero_gradients(built.module, setup)
        loss = _run_forward(built, batch)
        if not setup.autocast_backward:
            leave_autocast_region()
        recorder.default_kind = AllocationKind.TEMPORARY
        recorder.mark(MemoryEvent.BACKWARD_BEGINS)
        loss.backward()
        leave_autocast_region()
        recorder.mark(MemoryEvent.OPTIMIZER_BEGINS)
        if optimizer is not None:
            optimizer.step()
        del loss
        recorder.mark(MemoryEvent.STEP_ENDS)


def _run_forward(built: BuiltModel, batch: dict[str, Any]) -> torch.Tensor:
    with FiniteNumbers():
        output = built.module(*batch.get("args", ()), **batch.get("kwargs", {}))
        return built.loss(output, batch)


def _forward_step(
    built: BuiltModel, setup: TrainingSetup, batch: dict[str, Any], recorder: StepRecorder
) -> None:
    recorder.default_kind = AllocationKind.ACTIVATION
    # Not inference_mode, which keeps composite operations whole; no_grad splits them as training does.
    gradients: Callable[[], Any] = torch.no_grad if setup.phase is Phase.INFERENCE else torch.enable_grad
    dtype = AUTOCAST_DTYPE.get(setup.precision)
    with gradients(), recorder, cuda_semantics(dtype, fused_attention=setup.fused_attention):
        recorder.mark(MemoryEvent.FORWARD_BEGINS)
        with FiniteNumbers():
            output = built.module(*batch.get("args", ()), **batch.get("kwargs", {}))
        leave_autocast_region()
        recorder.mark(MemoryEvent.STEP_ENDS)
        del output


def _zero_gradients(module: torch.nn.Module, setup: TrainingSetup) -> None:
    for parameter in module.parameters():
        if setup.zero_grad_to_none:
            parameter.grad = None
        elif parameter.grad is not None:
            parameter.grad.zero_()


def _name_kinds(
    recorder: StepRecorder, module: torch.nn.Module, optimizer: torch.optim.Optimizer | None
) -> None:
    """Corrects the kinds of blocks whose role is known only at the end or by their life span."""
    kinds: dict[int, AllocationKind] = {}
    for parameter in module.parameters():
        if parameter.grad is not None and (block := recorder.block_of(parameter.grad)) is not None:
            kinds[block] = AllocationKind.GRADIENT
    for tensor in _state_of(optimizer, recorder):
        if (block := recorder.block_of(tensor)) is not None:
            kinds[block] = AllocationKind.OPTIMIZER_STATE
    # Last, because gradients and states are told by what holds them, and anything else by how long it lives.
    name_short_lived(recorder.events, kinds)
    for event in recorder.events:
        if event.event is MemoryEvent.ALLOCATE and event.block in kinds:
            event.kind = kinds[event.block]


def name_short_lived(events: list[RecordedEvent], kinds: dict[int, AllocationKind]) -> None:
    """Marks activations that die before backward begins as temporaries."""
    in_forward: set[int] = set()
    for event in events:
        if event.event is MemoryEvent.FORWARD_BEGINS or event.event is MemoryEvent.BACKWARD_BEGINS:
            in_forward = set()
        elif event.event is MemoryEvent.ALLOCATE and event.kind == AllocationKind.ACTIVATION:
            in_forward.add(event.block)
        elif event.event is MemoryEvent.FREE and event.block in in_forward:
            kinds.setdefault(event.block, AllocationKind.TEMPORARY)
