"""Weights and states that the host holds: their transfers, and blocks that come to the device only while they run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import _C, nn

from forerun.base.errors import InvalidSetupError
from forerun.graph.graph import AllocationKind, HostTraffic
from forerun.question.saving import MasterWeights, Offload
from forerun.question.setup import OptimizerImplementation, Phase, TrainingSetup
from forerun.tracing.optimizers import make_optimizer
from forerun.tracing.recorder import StepRecorder, tensors_in

_FP32_BYTES = 4


def on_device(setup: TrainingSetup) -> TrainingSetup:
    """The setup of what runs on the device: without an update if the host does it."""
    return setup if setup.saving.offload is Offload.NONE else replace(setup, optimizer="none")


def host_traffic(
    module: nn.Module, blocks: tuple[str, ...], setup: TrainingSetup, name: str
) -> HostTraffic | None:
    """Transfers of one step of a model, None without offload.

    The host updates fp32 copies of the weights, whatever the precision of the device: DeepSpeed's and PyTorch's own
    offload do. The state is that of the optimizer itself, made over such copies.

    Args:
        module: The model on meta in the precision of the setup.
        blocks: Names of its blocks.
        setup: The setup.
        name: Name of the model, for messages.

    Raises:
        InvalidSetupError: The model has no blocks that could come and go.
    """
    kind = setup.saving.offload
    if kind is Offload.NONE or setup.phase is not Phase.TRAIN:
        return None
    trained = [p for p in module.parameters() if p.requires_grad]
    # The true optimizer says what it keeps: a formula per name would miss every option of it.
    copies = [nn.Parameter(torch.empty(p.shape, device="meta")) for p in trained]
    plain = replace(
        setup,
        saving=replace(setup.saving, master_weights=MasterWeights.FP32),
        optimizer_implementation=OptimizerImplementation.FOREACH,
    )
    optimizer = make_optimizer(plain, copies)
    state = 0
    if optimizer is not None:
        for copy in copies:
            copy.grad = torch.empty_like(copy)
        optimizer.step()
        values = [v for held in optimizer.state.values() for v in held.values()]
        state = sum(v.nbytes for v in values if isinstance(v, torch.Tensor))
    weights = sum(p.numel() for p in copies) * _FP32_BYTES
    gradients = sum(p.nbytes for p in trained)
    if kind is Offload.OPTIMIZER:
        return HostTraffic(
            gradient_bytes=gradients, updated_bytes=gradients, update_bytes=3 * weights + 2 * state
        )
    if not blocks:
        raise InvalidSetupError(
            f"{name} has no repeated blocks that could come from the host one by one: expected a list of modules of "
            "one class; give --offload optimizer instead"
        )
    held = sum(p.nbytes for key in blocks for p in module.get_submodule(key).parameters())
    # Weights of blocks stay on the host, so that only the others come back after the update.
    inside = sum(
        p.nbytes for key in blocks for p in module.get_submodule(key).parameters() if p.requires_grad
    )
    return HostTraffic(
        forward_bytes=held,
        backward_bytes=held,
        gradient_bytes=gradients,
        updated_bytes=gradients - inside,
        update_bytes=3 * weights + 2 * state,
        num_transfers=len(blocks),
    )


class _Blocks:
    """Which blocks are on the device, as the memory stream sees it: the one that runs and the next one."""

    def __init__(self, module: nn.Module, blocks: tuple[str, ...], recorder: StepRecorder) -> None:
        self._weights = [list(module.get_submodule(key).parameters()) for key in blocks]
        self._recorder = recorder
        self._here = set(range(len(blocks)))

    def leave(self) -> None:
        """Sends all blocks to the host."""
        for index in list(self._here):
            self._evict(index)

    def run(self, index: int, step: int) -> None:
        """Brings a block and its neighbour in the direction of the pass, and sends the others away."""
        wanted = {index, index + step} & set(range(len(self._weights)))
        for other in self._here - wanted:
            self._evict(other)
        for other in sorted(wanted - self._here, key=lambda i: i * step):
            self._here.add(other)
            for weight in self._weights[other]:
                self._recorder.watch(weight, AllocationKind.TEMPORARY)

    def _evict(self, index: int) -> None:
        self._here.discard(index)
        for weight in self._weights[index]:
            self._recorder.evict(weight)


@contextmanager
def streamed_blocks(
    module: nn.Module, blocks: tuple[str, ...], setup: TrainingSetup, recorder: StepRecorder
) -> Iterator[None]:
    """Brings each block to the device for its forward and its backward pass, the next one while it runs.

    Gradients leave the device as soon as they are complete.
    """
    if setup.saving.offload is not Offload.PARAMETERS or setup.phase is not Phase.TRAIN:
        yield
        return
    state = _Blocks(module, blocks, recorder)
    state.leave()  # before the first step all are on the host
    handles: list[Any] = []

    def gradient_leaves(weight: torch.Tensor) -> None:
        assert weight.grad is not None
        recorder.name(weight.grad, AllocationKind.GRADIENT)
        weight.grad = None

    for index, key in enumerate(blocks):
        block = module.get_submodule(key)

        def enter(_module: Any, _args: Any, index: int = index) -> None:
            # A recomputed block runs forward within the backward pass, which goes the other way.
            if _C._current_autograd_node() is None:
                state.run(index, 1)

        def leave(_module: Any, _args: Any, output: Any, index: int = index) -> None:
            if _C._current_autograd_node() is not None:
                return
            first = output[0] if isinstance(output, (tuple, list)) else output
            if isinstance(first, torch.Tensor) and first.requires_grad:
                first.register_hook(lambda _gradient, index=index: state.run(index, -1))

        handles += [block.register_forward_pre_hook(enter), block.register_forward_hook(leave)]
        handles += [
            weight.register_post_accumulate_grad_hook(gradient_leaves)
            for weight in block.parameters()
            if weight.requires_grad
        ]
    recorder.before_update = state.leave
    try:
        yield
    finally:
        recorder.before_update = None
        for handle in handles:
            handle.remove()


@contextmanager
def parked_inputs(
    module: nn.Module, blocks: tuple[str, ...], setup: TrainingSetup, recorder: StepRecorder
) -> Iterator[None]:
    """Sends what a checkpointed block keeps, its input, to the host until its backward pass begins.

    As unslothai/unsloth-zoo: unsloth_zoo/gradient_checkpointing.py does. Its transfers run beside the computation.
    """
    if setup.saving.recompute != "offload" or setup.phase is not Phase.TRAIN:
        yield
        return

    def leave(_module: Any, args: Any, kwargs: Any, output: Any) -> None:
        held = [next(tensors_in((args, kwargs)))]  # of the states, which lead the arguments
        recorder.evict(held[0])

        def come_back(_gradient: torch.Tensor) -> None:
            recorder.watch(held.pop(), AllocationKind.ACTIVATION)

        next(tensors_in(output)).register_hook(come_back)

    handles = [module.get_submodule(key).register_forward_hook(leave, with_kwargs=True) for key in blocks]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
