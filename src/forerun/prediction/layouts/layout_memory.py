"""Memory of each stage of a layout, each at its own peak.

A stage holds its part of weights, gradients and optimizer state, and what the micro-steps in flight keep. The
last of them is replayed unit by unit through forward and backward pass: its own peak lies where kept activations,
the temporaries of a unit and the gathered weights and gradients of FSDP are largest together.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from forerun.memory.constants import MemoryConstants
from forerun.memory.peak import COMPILED_FRACTION
from forerun.memory.units import UnitMemory
from forerun.prediction.estimate import Interval, MemoryShare
from forerun.prediction.layouts.divided_model import DividedModel
from forerun.prediction.layouts.layout_step import shards_of, wide_factor
from forerun.prediction.layouts.stages import in_flight
from forerun.run.parallel import PipelineSchedule
from forerun.run.run import Run
from forerun.run.saving import MasterWeights
from forerun.run.setup import OptimizerImplementation
from forerun.run.sharing import Strategy

__all__ = ["StageMemory", "layout_memory", "stage_peak"]

_COMMUNICATOR_BYTES = 2 * 24 * 4 * 1024**2
"""Buffers of one communicator of NCCL: 24 channels of 4 MiB (``NCCL_BUFFSIZE``) to each of two neighbours."""
_COPY_RATIO = 2.0
"""Bytes of a gradient in fp32 over those in half precision."""
_UNCERTAINTY = 0.05
"""Half-width of the 90 % interval of the bytes of tensors of an eager step, as a fraction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Memory of each device of one stage.

    Attributes:
        stage: Number of the stage, from 0.
        num_blocks: Blocks it has.
        parts: Contents at the peak, which add up to ``peak_bytes.value``.
        peak_bytes: Memory that the process needs [bytes].
        allocated_bytes: Bytes of tensors at the peak, as PyTorch's ``max_memory_allocated`` counts them [bytes].
    """

    stage: int
    num_blocks: int
    parts: tuple[MemoryShare, ...]
    peak_bytes: Interval
    allocated_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """State of the model on one device of a stage [bytes]."""

    weights: float
    gradients: float
    updated: float
    """Gradients that this device updates with, in the precision of the master weights."""
    state: float
    gathered: float
    """Weights of input and head that FSDP keeps gathered."""
    buffers: float
    """Buffers, which every device of a stage has whole."""


def layout_memory(model: DividedModel, run: Run, constants: MemoryConstants) -> tuple[StageMemory, ...]:
    """Memory of every stage.

    Args:
        model: The step traced in ``compute_setup``.
        run: The run.
        constants: Overhead and factors of device and software.
    """
    memory = model.memory(shards_of(run), run.setup.batch_size_per_device)
    every = model.memory(replace(shards_of(run), expert=1), run.setup.batch_size_per_device)
    if run.layout.keep_gathered and run.layout.tensor > 1 and run.setup.saving.recompute == "none":
        gathered = model.gathered_bytes(shards_of(run), run.setup.batch_size_per_device)
        memory = replace(memory, kept=memory.kept + gathered, backward_net=memory.backward_net - gathered)
    units = model.stages(run.layout)
    return tuple(stage_peak(run, memory, every, own, index, constants) for index, own in enumerate(units))


def stage_peak(
    run: Run, memory: UnitMemory, every: UnitMemory, units: range, stage: int, constants: MemoryConstants
) -> StageMemory:
    """Memory of one stage at its peak.

    Args:
        run: The run.
        memory: Memory of the units.
        every: The same with all experts, of which each replica holds a part.
        units: Units of the stage.
        stage: Its number.
        constants: Overhead and factors of device and software.
    """
    own = list(units)
    held = _held(run, memory, every, own, stage)
    micro_steps = run.sharing.num_accumulation_steps
    waiting = in_flight(run.layout, stage, micro_steps) - 1
    # Groups of blocks wait in the interleaved schedule, but a head's backward pass follows its forward pass at once.
    last = len(memory.weights) - 1
    is_interleaved = run.layout.schedule is PipelineSchedule.INTERLEAVED
    holding = [unit for unit in own if not (is_interleaved and unit == last)]
    kept_before = waiting * float(memory.kept[holding].sum())
    peaks = [
        _passes(run, memory, every, own, kept_before, grows=micro_steps == 1 and not _keeps_gradients(run))
    ]
    peaks.append((0.0, _update_ratio(run, memory) * held.updated, held.gradients))
    activations, temporaries, gradients = max(peaks, key=sum)
    static = held.weights + held.buffers + held.state + held.gathered + memory.inputs
    allocated = static + activations + temporaries + gradients
    fragmentation = allocated * (constants.live_factor - 1)
    buffers = _COMMUNICATOR_BYTES * _num_communicators(run)
    parts = (
        MemoryShare("weights", held.weights + held.buffers),
        MemoryShare("gathered weights of input and head", held.gathered),
        MemoryShare("gradients", gradients),
        MemoryShare("optimizer state", held.state),
        MemoryShare("activations", activations),
        MemoryShare("temporaries", temporaries),
        MemoryShare("input", memory.inputs),
        MemoryShare("fragmentation", fragmentation),
        MemoryShare("buffers of collectives", buffers),
        MemoryShare("context", constants.overhead_bytes),
    )
    peak = allocated + fragmentation + buffers + constants.overhead_bytes
    margin = (COMPILED_FRACTION if run.setup.compile else _UNCERTAINTY) * allocated
    return StageMemory(
        stage=stage,
        num_blocks=sum(unit not in (0, last) for unit in own),
        parts=tuple(part for part in parts if part.size_bytes > 0),
        peak_bytes=Interval(peak, peak - margin, peak + margin),
        allocated_bytes=allocated,
    )


def _update_ratio(run: Run, memory: UnitMemory) -> float:
    """Temporaries of the update over the gradients that it reads.

    A fused update has none, beside master weights but a copy of the gradients in their format.
    """
    if run.setup.optimizer_implementation is not OptimizerImplementation.FUSED:
        return memory.optimizer_ratio
    has_copies = run.setup.saving.master_weights is MasterWeights.FP32 and wide_factor(run) == 1.0
    return min(memory.optimizer_ratio, _COPY_RATIO if has_copies else 0.0)


def _num_shards(run: Run) -> int:
    """Devices among which the state of the optimizer is divided."""
    layout, sharing = run.layout, run.sharing
    number = layout.context * layout.data
    if sharing.strategy is Strategy.HSDP:
        usual = max(1, min(number, run.cluster.num_devices_per_node // layout.tensor))
        return sharing.shard_size or max(k for k in range(1, usual + 1) if number % k == 0)
    return number if sharing.strategy.stage else 1


def _num_communicators(run: Run) -> int:
    layout = run.layout
    sizes = (layout.tensor, layout.context, layout.context * layout.data, layout.pipeline)
    return sum(size > 1 for size in sizes) + (run.sharing.strategy is Strategy.HSDP)


def _keeps_gradients(run: Run) -> bool:
    """True if gradients live in buffers that are there all the time: those of mixed precision outside of FSDP."""
    return run.sharing.strategy.stage < 3 and wide_factor(run) > 1


def _held(run: Run, memory: UnitMemory, every: UnitMemory, own: list[int], stage: int) -> _Held:
    sharing, wide, number = run.sharing, wide_factor(run), _num_shards(run)
    is_last = run.layout.pipeline > 1 and stage == run.layout.pipeline - 1
    tied = memory.tied if is_last else 0.0
    weights, gradients = float(memory.weights[own].sum()) + tied, float(memory.gradients[own].sum()) + tied
    all_weights, all_gradients = (
        float(every.weights[own].sum()) + tied,
        float(every.gradients[own].sum()) + tied,
    )
    updated = wide * (all_gradients / number if sharing.strategy.stage else gradients)
    state = updated * memory.state_ratio
    buffers = float(memory.buffers[own].sum())
    if sharing.strategy.stage == 3:
        last = len(memory.weights) - 1
        ends = [unit for unit in own if unit in (0, last)]
        gathered = float(memory.weights[ends].sum()) * (1.0 if sharing.gather_half else wide)
        return _Held(
            weights=all_weights * wide / number,
            gradients=updated,
            updated=updated,
            state=state,
            gathered=gathered,
            buffers=buffers,
        )
    return _Held(
        weights=weights + (updated if wide > 1 else 0.0),  # in fp32 beside those that compute
        gradients=updated if sharing.strategy.stage == 2 else gradients * wide,
        updated=updated,
        state=state,
        gathered=0.0,
        buffers=buffers,
    )


def _passes(
    run: Run, memory: UnitMemory, every: UnitMemory, own: list[int], kept_before: float, *, grows: bool
) -> tuple[float, float, float]:
    """Kept activations, temporaries and gradients at the peak of the last micro-step in flight [bytes].

    Args:
        run: The run.
        memory: Memory of the units.
        every: The same with all experts.
        own: Units of the stage.
        kept_before: What the other micro-steps in flight keep.
        grows: Whether gradients are made in this backward pass, not summed into those that are there.
    """
    sharing, wide = run.sharing, wide_factor(run)
    is_sharded = sharing.strategy.stage == 3
    number = _num_shards(run)
    last = len(memory.weights) - 1
    is_block = np.asarray([unit not in (0, last) for unit in own])
    gathered = (
        memory.weights[own] * is_block * (1.0 if sharing.gather_half else wide)
        if is_sharded
        else np.zeros(len(own))
    )
    ahead = 2 if sharing.prefetch else 1
    whole = (every.gradients[own] / number if sharing.strategy.stage >= 2 else memory.gradients[own]) * wide
    if run.layout.pipeline > 1 and last in own and 0 not in own:
        # A head that shares its weight with the embedding needs a second copy of it on the last stage.
        whole[-1] += memory.tied * wide / (number if sharing.strategy.stage >= 2 else 1)
    made = (
        memory.gradients[own] * (1.0 + (wide if wide > 1 and not sharing.reduce_half else 0.0))
        if is_sharded
        else memory.largest_gradient[own] * (wide > 1)
    )
    total = float(whole.sum())
    best = (0.0, 0.0, 0.0 if grows else total)
    kept, gradients = kept_before, 0.0 if grows else total
    stays = 0.0
    for place, unit in enumerate(own):
        open_bytes = (
            float(gathered[place : place + ahead].sum())
            if sharing.reshard
            else float(gathered[: place + ahead].sum())
        )
        candidate = (kept, float(memory.forward_peak[unit]) + open_bytes, gradients)
        best = max(best, candidate, key=sum)
        kept += float(memory.kept[unit])
    stays = 0.0 if sharing.reshard else float(gathered.sum())
    for place in range(len(own) - 1, -1, -1):
        unit = own[place]
        begin = max(0, place - ahead + 1)
        open_bytes = float(gathered[begin : place + 1].sum()) if sharing.reshard else stays
        candidate = (kept, float(memory.backward_peak[unit]) + open_bytes + float(made[place]), gradients)
        best = max(best, candidate, key=sum)
        kept += float(memory.backward_net[unit])
        gradients += float(whole[place]) if grows else 0.0
    return best
