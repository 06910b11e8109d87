"""The optimizers of a training setup, run on meta tensors.

Those of large models that PyTorch itself does not have come after its own; the update of a fused optimizer, which
cannot be traced, is made from the multi-tensor update.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from forerun.base.errors import InvalidSetupError, near_matches
from forerun.graph.graph import AllocationKind, Graph, MemoryEvent, OpClass, StepPart
from forerun.graph.passes import taken_rows
from forerun.question.saving import MasterWeights
from forerun.question.setup import OptimizerImplementation, TrainingSetup
from forerun.tracing.device_ops import adamw_8bit

_Parameters = list[torch.nn.Parameter]
_Maker = Callable[..., torch.optim.Optimizer]

OPTIMIZERS: dict[str, _Maker] = {
    "sgd": lambda p, foreach: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-4, foreach=foreach),
    "sgd-plain": lambda p, foreach: torch.optim.SGD(p, lr=0.1, foreach=foreach),
    "momentum": lambda p, foreach: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=foreach),
    "nesterov": lambda p, foreach: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, foreach=foreach),
    "adam": lambda p, foreach: torch.optim.Adam(p, foreach=foreach),
    "adamw": lambda p, foreach: torch.optim.AdamW(p, foreach=foreach),
    "rmsprop": lambda p, foreach: torch.optim.RMSprop(p, foreach=foreach),
    "adagrad": lambda p, foreach: torch.optim.Adagrad(p, foreach=foreach),
    "adadelta": lambda p, foreach: torch.optim.Adadelta(p, foreach=foreach),
    "nadam": lambda p, foreach: torch.optim.NAdam(p, foreach=foreach),
    "adamax": lambda p, foreach: torch.optim.Adamax(p, foreach=foreach),
    "adamw-8bit": lambda p, foreach: AdamW8bit(p),
    "adafactor": lambda p, foreach: Adafactor(p),
    "lion": lambda p, foreach: Lion(p),
    "muon": lambda p, foreach: muon(p, foreach=foreach),
}

STAND_INS = ("adamw-8bit", "adafactor", "lion", "muon")
"""Optimizers that have the kernels and states of the real ones, but not their updates: they cannot train."""


def make_optimizer(setup: TrainingSetup, parameters: _Parameters) -> torch.optim.Optimizer | None:
    """The optimizer of a setup over meta parameters, or None for ``none`` and for models without weights.

    A fused optimizer cannot run on meta tensors; it is traced as multi-tensor kernels and its rows are merged
    into one (``fuse_optimizer``).

    Raises:
        InvalidSetupError: The optimizer is not known.
    """
    if setup.optimizer == "none" or not parameters:
        return None
    maker = OPTIMIZERS.get(setup.optimizer)
    if maker is None:
        raise InvalidSetupError(
            f"unknown optimizer '{setup.optimizer}'{near_matches(setup.optimizer, OPTIMIZERS)}; "
            f"known: none, {', '.join(OPTIMIZERS)}"
        )
    foreach = setup.optimizer_implementation is not OptimizerImplementation.FOR_LOOP
    is_half = any(parameter.element_size() == 2 for parameter in parameters)
    if setup.saving.master_weights is MasterWeights.FP32 and is_half:
        return MasterCopies(parameters, partial(maker, foreach=foreach))
    return maker(parameters, foreach)


_BLOCK = 256
"""Elements that share a scale (bitsandbytes 0.50, blockwise states)."""
_SMALL = 4096
"""Tensors of fewer elements keep their state in fp32 (bitsandbytes, ``min_8bit_size``)."""


class AdamW8bit(torch.optim.Optimizer):
    """AdamW with both moments in 8 bits and a 4-byte scale for each 256 elements (bitsandbytes)."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._large = [p for p in parameters if p.numel() >= _SMALL]
        small = [p for p in parameters if p.numel() < _SMALL]
        self._rest = torch.optim.AdamW(small) if small else None
        super().__init__(list(parameters), {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update."""
        for weight in self._large:
            if weight.grad is None:
                continue
            state = self.state[weight]
            if not state:
                scales = 2 * -(-weight.numel() // _BLOCK)
                state["first"] = torch.zeros_like(weight, dtype=torch.uint8)
                state["second"] = torch.zeros_like(weight, dtype=torch.uint8)
                state["scales"] = torch.zeros(scales, dtype=torch.float32, device=weight.device)
            adamw_8bit(weight, weight.grad, state["first"], state["second"], state["scales"])
        if self._rest is not None:
            self._rest.step()
            self.state.update(self._rest.state)


class _OfWeights(torch.optim.Optimizer):
    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        super().__init__(list(parameters), {})


class Lion(_OfWeights):
    """Lion (Chen et al. 2023, arXiv 2302.06675): the sign of an average of gradients, one state."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update by multi-tensor kernels."""
        weights = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        if not weights:
            return
        gradients = [p.grad for p in weights]
        for weight in weights:
            state = self.state[weight]
            if not state:
                state["average"] = torch.zeros_like(weight)
        averages = [self.state[p]["average"] for p in weights]
        torch._foreach_mul_(weights, 1 - 1e-4 * 0.1)
        updates = torch._foreach_lerp(averages, gradients, 0.1)
        torch._foreach_sign_(updates)
        torch._foreach_add_(weights, updates, alpha=-1e-4)
        torch._foreach_lerp_(averages, gradients, 0.01)


class Adafactor(_OfWeights):
    """Adafactor (Shazeer and Stern 2018, arXiv 1804.04235) without a first moment: sums of rows and columns as state.

    PyTorch's own reads values of tensors, which a trace does not have; the kernels are the same.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update, tensor by tensor."""
        for weight in (p for group in self.param_groups for p in group["params"]):
            if weight.grad is None:
                continue
            gradient, state = weight.grad, self.state[weight]
            squares = gradient * gradient
            if weight.dim() < 2:
                if not state:
                    state["square"] = torch.zeros_like(weight)
                state["square"].lerp_(squares, 0.01)
                update = state["square"].clamp(min=1e-10).rsqrt_()
            else:
                if not state:
                    state["rows"] = weight.new_zeros((*weight.shape[:-1], 1))
                    state["columns"] = weight.new_zeros((*weight.shape[:-2], 1, weight.shape[-1]))
                state["rows"].lerp_(squares.mean(-1, keepdim=True), 0.01)
                state["columns"].lerp_(squares.mean(-2, keepdim=True), 0.01)
                update = (state["rows"] @ state["columns"]).clamp_(min=1e-10).rsqrt_()
            del squares
            update.mul_(gradient)
            scale = update.norm().clamp(min=1.0)
            weight.sub_(update.div_(scale))


class _Several(torch.optim.Optimizer):
    """Optimizers that each update their own part of the weights."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        self._parts = list(parts)
        super().__init__([p for part in parts for group in part.param_groups for p in group["params"]], {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update."""
        for part in self._parts:
            part.step()
            self.state.update(part.state)


def muon(parameters: Sequence[torch.nn.Parameter], foreach: bool) -> torch.optim.Optimizer:
    """Muon for the matrices of the layers, AdamW for the two largest matrices by rows (tables) and everything else.

    Embedding and head have one row for each word; Muon is not meant for them (Jordan et al. 2024).
    """
    matrices = [p for p in parameters if p.dim() == 2 and max(p.shape) < 8 * min(p.shape)]
    # By identity: ``in`` would compare the values of tensors.
    rest = [p for p in parameters if not any(p is matrix for matrix in matrices)]
    parts: list[torch.optim.Optimizer] = []
    if matrices:
        parts.append(torch.optim.Muon(matrices))
    if rest:
        parts.append(torch.optim.AdamW(rest, foreach=foreach))
    return _Several(parts)


class MasterCopies(torch.optim.Optimizer):
    """An optimizer that updates fp32 copies of half-precision weights, which are state; others it updates itself.

    Args:
        parameters: The weights.
        make: Maker of the optimizer of the copies.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        make: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer],
    ) -> None:
        super().__init__(list(parameters), {})
        self._weights = list(parameters)
        self._make = make
        self._inner: torch.optim.Optimizer | None = None
        self._copies: list[torch.nn.Parameter] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Gradients to fp32, the update, and the weights back."""
        if self._inner is None:
            self._copies = [torch.nn.Parameter(p.detach().float()) for p in self._weights]
            self._inner = self._make(self._copies)
        halves = [
            (weight, copy)
            for weight, copy in zip(self._weights, self._copies, strict=True)
            if weight.grad is not None
        ]
        for weight, copy in halves:
            copy.grad = weight.grad.float()  # type: ignore[union-attr]
        self._inner.step()
        torch._foreach_copy_([weight for weight, _ in halves], [copy for _, copy in halves])
        for weight, copy in zip(self._weights, self._copies, strict=True):
            copy.grad = None
            self.state[weight] = {"copy": copy.data, **self._inner.state.get(copy, {})}


_PARAMETERS_PER_LAUNCH = 320 * 65536
"""320 blocks of 65,536 elements."""


def without_update_lists(graph: Graph) -> Graph:
    """A graph whose update has no temporary, as the fused kernel, which works in place."""
    event = graph.memory.event
    in_update = np.cumsum(event == MemoryEvent.OPTIMIZER_BEGINS) > np.cumsum(event == MemoryEvent.STEP_ENDS)
    is_made = in_update & (graph.memory.kind == AllocationKind.TEMPORARY)
    sizes = np.where(is_made[:, None], 0, graph.memory.size_bytes)
    return replace(graph, memory=replace(graph.memory, size_bytes=sizes))


def fuse_optimizer(graph: Graph, num_kernels: int | None = None) -> Graph:
    """Replaces the optimizer rows by kernels that read and write each tensor once.

    The multi-tensor update reads and writes every list several times; the fused kernel reads weights,
    gradients and states and writes weights and states. With S state bytes and W weight bytes:
    read = 2 W + S, written = W + S. S is taken from the memory stream.

    Args:
        graph: A traced step.
        num_kernels: Number of kernels; those of PyTorch's multi-tensor launches if not given.
    """
    ops = graph.ops
    chosen = np.flatnonzero(ops.step_part == StepPart.OPTIMIZER)
    if not len(chosen):
        return graph
    weight_bytes = float(ops.element_bytes[chosen].max()) * graph.num_trainable_parameters
    is_state = graph.memory.kind == AllocationKind.OPTIMIZER_STATE
    state_bytes = float(graph.memory.size_bytes[is_state, 0].sum())
    taken = taken_rows(ops, np.append(np.flatnonzero(ops.step_part != StepPart.OPTIMIZER), chosen[0]))
    taken.count[-1] = num_kernels or max(
        1.0, np.ceil(graph.num_trainable_parameters / _PARAMETERS_PER_LAUNCH)
    )
    # With master weights the first row is a conversion of gradients.
    taken.op_class[-1] = OpClass.OPTIMIZER
    share = 1.0 / taken.count[-1]
    taken.read_bytes[-1] = ((2 * weight_bytes + state_bytes) * share, 0.0)
    taken.write_bytes[-1] = ((weight_bytes + state_bytes) * share, 0.0)
    taken.elements[-1] = (graph.num_trainable_parameters * share, 0.0)
    return replace(graph, ops=taken)
