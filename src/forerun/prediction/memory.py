"""Memory of each device of a run: of one alone, of replicas, and of each stage of a layout at its own peak.

Replicas hold what one device alone holds, and buckets of gradients beside it. A stage of a
layout holds its part of weights, gradients and optimizer state, and what the micro-steps in flight keep. The last of
them is replayed unit by unit through forward and backward pass: its own peak lies where kept activations, the
temporaries of a unit and the gathered weights and gradients of FSDP are largest together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import exp, hypot, log
from typing import TYPE_CHECKING

import numpy as np

from forerun.base.kept import Kept
from forerun.cost.memory.peak import (
    MaxBatchSize,
    MemoryConstants,
    MemoryEstimate,
    MemoryShare,
    MemoryWidth,
    estimate_memory,
    fits,
    largest_passing,
    max_batch_size,
    memory_constants,
    memory_width,
    plans_for_setup,
    visible_memory_bytes,
)
from forerun.cost.memory.replay import replay
from forerun.graph.graph import Graph
from forerun.prediction.estimate import Interval
from forerun.prediction.step import PreparedModel
from forerun.question.devices.device import Device, DeviceKind
from forerun.question.post_training import Algorithm
from forerun.question.run import Run
from forerun.question.saving import Offload
from forerun.question.setup import MAX_BATCH_SIZE, OptimizerImplementation, Phase, parse_release
from forerun.question.sharing import FsdpVersion, PipelineSchedule, Strategy

if TYPE_CHECKING:  # of several devices, which most runs do not have
    from forerun.cost.memory.units import UnitMemory
    from forerun.prediction.units import DividedModel

_COMMUNICATOR_BYTES = 2 * 24 * 4 * 1024**2
"""Buffers of one communicator of NCCL: 24 channels of 4 MiB (``NCCL_BUFFSIZE``) to each of two neighbours."""
_BUCKET_ELEMENTS = 500_000_000
"""Gradients in a bucket of DeepSpeed (``reduce_bucket_size``), allocated whole in every backward pass, however few
weights are trained: two with ZeRO-2, whose files set ``overlap_comm``, one with ZeRO-3. Source: deepspeedai/DeepSpeed:
deepspeed/runtime/zero/stage_1_and_2.py (``backward``), stage3.py and config.py."""
_SUB_GROUP_ELEMENTS = 1e9
"""Weights of a device that ZeRO-3 updates at once (``sub_group_size``, deepspeed/runtime/zero/config.py)."""
_SHOWN = Interval(1.28, 1.05, 1.60)
"""Memory that ``nvidia-smi`` shows over what a step needs: median and 90 % of the 241 runs of fine-tuning by Hugging
Face's Trainer for which fms-acceleration published that memory and its tensors' peak, on 1 to 8 A100."""
_REPLAYED = Interval(1.02, 0.92, 1.25)
"""The same over what a replay with all of the device's memory holds, of one device: 24 runs of four sources (Qwen's and
unsloth's READMEs, fms-acceleration, ljm565/universal-llm-trainer), each within 4 % of it in the median."""
_COPY_RATIO = 2.0
"""Bytes of a gradient in fp32 over those in half precision."""


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


def worst_stage(model: DividedModel, run: Run, constants: MemoryConstants) -> StageMemory:
    """The stage that needs most, among the first of each number of blocks: later ones hold fewer micro-steps."""
    units = [(0 in own, len(own)) for own in model.stages(run.layout)]
    chosen = {*(units.index(kind) for kind in units), len(units) - 1}
    return max(layout_memory(model, run, constants, sorted(chosen)), key=lambda stage: stage.peak_bytes.value)


def layout_memory(
    model: DividedModel, run: Run, constants: MemoryConstants, chosen: Sequence[int] | None = None
) -> tuple[StageMemory, ...]:
    """Memory of every stage, or of some.

    Args:
        model: The step traced in the run's ``compute_setup``.
        run: The run.
        constants: Overhead and factors of device and software.
        chosen: Numbers of the stages; None for all.
    """
    shards, size = run.shards, run.setup.batch_size_per_device
    memory = model.memory(shards, size)
    every = model.memory(replace(shards, expert=1, whole_experts=False), size)
    if run.layout.keep_gathered and run.layout.tensor > 1 and run.setup.saving.recompute == "none":
        # Kept from the forward pass of a unit on, and freed by its backward pass, which otherwise gathers them again.
        gathered = model.gathered_bytes(shards, size)
        memory = replace(memory, kept=memory.kept + gathered, backward_net=memory.backward_net - gathered)
    units, width = model.stages(run.layout), memory_width(model.model.graph)
    wanted = range(len(units)) if chosen is None else chosen
    return tuple(_stage_peak(run, memory, every, units[index], index, constants, width) for index in wanted)


def _stage_peak(
    run: Run,
    memory: UnitMemory,
    every: UnitMemory,
    units: range,
    stage: int,
    constants: MemoryConstants,
    width: MemoryWidth,
) -> StageMemory:
    """Memory of one stage at its peak; ``every`` has all experts, of which each replica holds a part."""
    from forerun.prediction.division import in_flight

    own = list(units)
    held = _held(run, memory, every, own, stage)
    micro_steps = run.sharing.num_accumulation_steps
    waiting = in_flight(run.layout, stage, micro_steps) - 1
    # Groups of blocks wait in the interleaved schedule, but a head's backward pass follows its forward pass at once.
    last = len(memory.weights) - 1
    is_interleaved = run.layout.schedule is PipelineSchedule.INTERLEAVED
    holding = [unit for unit in own if not (is_interleaved and unit == last)]
    kept_before = waiting * float(memory.kept[holding].sum())
    # Outside of FSDP mixed precision has buffers for gradients that are there all the time.
    has_buffers = run.sharing.strategy.stage < 3 and run.gradient_factor > 1
    peaks = [_passes(run, memory, every, own, kept_before, grows=micro_steps == 1 and not has_buffers)]
    # The update finds no activation left, but its temporaries may still need more than the passes did.
    at_once = held.updated
    if run.sharing.strategy is Strategy.ZERO3:
        at_once = min(
            at_once, _SUB_GROUP_ELEMENTS * (2 if run.setup.precision.is_half else 4) * run.wide_factor
        )
    peaks.append((0.0, _update_ratio(run, memory) * at_once, held.gradients))
    activations, temporaries, gradients = max(peaks, key=sum)
    others = _other_models_bytes(run, held, float(every.weights[own].sum()))
    static = held.weights + held.buffers + held.state + held.gathered + memory.inputs + others
    allocated = static + activations + temporaries + gradients
    loaded = float(every.weights[own].sum()) * run.wide_factor if run.sharing.load_whole else 0.0
    if held.weights + held.buffers + loaded > allocated and loaded:
        # Nothing but weights is there yet.
        activations, temporaries, gradients, others = 0.0, 0.0, 0.0, 0.0
        held, memory = replace(held, state=0.0, gathered=0.0), replace(memory, inputs=0.0)
        allocated = held.weights + held.buffers + loaded
    else:
        loaded = 0.0
    fragmentation = allocated * (constants.live_factor - 1)
    buffers = _communicator_bytes(run)
    buckets = _bucket_bytes(run)
    parts = (
        MemoryShare("weights", held.weights + held.buffers),
        MemoryShare("weights and states of other models", others),
        MemoryShare("gathered weights of input and head", held.gathered),
        MemoryShare("whole weights while they are loaded", loaded),
        MemoryShare("gradients", gradients),
        MemoryShare("optimizer state", held.state),
        MemoryShare("activations", activations),
        MemoryShare("temporaries", temporaries),
        MemoryShare("input", memory.inputs),
        MemoryShare("fragmentation", fragmentation),
        MemoryShare("gradient buckets", buckets),
        MemoryShare("buffers of collectives", buffers),
        MemoryShare("context", constants.overhead_bytes),
    )
    # Overhead and buffers are known: only the bytes of tensors are uncertain.
    peak = allocated + fragmentation + buckets + buffers + constants.overhead_bytes
    whole = allocated + fragmentation
    return StageMemory(
        stage=stage,
        num_blocks=sum(unit not in (0, last) for unit in own),
        parts=tuple(part for part in parts if part.size_bytes > 0),
        peak_bytes=Interval(peak, peak - (1 - width.low) * whole, peak + (width.high - 1) * whole),
        allocated_bytes=allocated,
    )


def _other_models_bytes(run: Run, held: _Held, weights: float) -> float:
    """Reference and reward models of post-training, divided as the policy is; a value model with its states [bytes].

    The engine that writes answers sleeps while the policy is trained, and a reference of adapters is the model itself.
    """
    if run.setup.post.algorithm is Algorithm.SFT:
        return 0.0
    from forerun.prediction.post_training import other_passes

    number = run.num_shards if run.sharing.strategy.stage == 3 else 1
    frozen = 0.0 if run.setup.saving.lora_rank is not None else weights / number
    return sum(
        held.weights + held.gradients + held.state if one.is_trained else frozen
        for one in other_passes(run.setup)
        if one.has_own_weights and one.name != "value"  # of the value model that is trained
    )


def _update_ratio(run: Run, memory: UnitMemory) -> float:
    """Temporaries of the update over the gradients that it reads.

    A fused update has none, beside master weights but a copy of the gradients in their format.
    """
    if run.setup.optimizer_implementation is not OptimizerImplementation.FUSED:
        return memory.optimizer_ratio
    has_copies = run.has_masters and run.gradient_factor == 1.0
    return min(memory.optimizer_ratio, _COPY_RATIO if has_copies else 0.0)


def _bucket_bytes(run: Run) -> float:
    """Buckets of DeepSpeed's gradients [bytes]; Megatron's distributed optimizer, FSDP and DDP have others."""
    number = {Strategy.ZERO2: 2, Strategy.ZERO3: 1}.get(run.sharing.strategy, 0)
    return float(number * _BUCKET_ELEMENTS * (2 if run.setup.precision.is_half else 4))


def _communicator_bytes(run: Run) -> float:
    """Buffers of NCCL, for each axis of devices that talk; processes on processors have none [bytes]."""
    if run.cluster.device.kind is DeviceKind.CPU:
        return 0.0
    layout = run.layout
    sizes = (layout.tensor, layout.context, layout.replicated, layout.pipeline)
    return _COMMUNICATOR_BYTES * float(
        sum(size > 1 for size in sizes) + (run.sharing.strategy is Strategy.HSDP)
    )


def _held(run: Run, memory: UnitMemory, every: UnitMemory, own: list[int], stage: int) -> _Held:
    sharing, wide, number = run.sharing, run.wide_factor, run.num_shards
    # The host that updates has the fp32 weights and the states, and takes the gradients that devices share.
    offload = run.setup.saving.offload
    is_here = offload is Offload.NONE
    # One device holds a tied embedding once; over stages, the head needs a copy of its own.
    tied = memory.tied if run.layout.pipeline > 1 and stage == run.layout.pipeline - 1 else 0.0
    columns = (memory.weights, memory.gradients, every.weights, every.gradients)
    weights, gradients, all_weights, all_gradients = (float(each[own].sum()) + tied for each in columns)
    updated = is_here * wide * (all_gradients / number if sharing.strategy.stage else gradients)
    state = updated / wide * run.wide_state_factor * memory.state_ratio
    is_sharded = sharing.strategy.stage == 3
    ends = [unit for unit in own if is_sharded and unit in (0, len(memory.weights) - 1)]
    whole = weights + (updated if wide > 1 else 0.0)  # in fp32 beside those that compute
    shards = 0.0 if offload is Offload.PARAMETERS else all_weights * (wide if is_here else 1.0) / number
    return _Held(
        weights=shards if is_sharded else whole,
        gradients=updated if sharing.strategy.stage >= 2 else gradients * run.gradient_factor,
        updated=updated,
        state=state,
        gathered=float(memory.weights[ends].sum()) * (1.0 if sharing.gather_half else wide),
        buffers=float(memory.buffers[own].sum()),
    )


def _passes(
    run: Run, memory: UnitMemory, every: UnitMemory, own: list[int], kept_before: float, *, grows: bool
) -> tuple[float, float, float]:
    """Kept activations, temporaries and gradients at the peak of the last micro-step in flight [bytes].

    The other ones keep ``kept_before``; gradients grow where they are not summed into those that are there.
    """
    sharing, wide = run.sharing, run.wide_factor
    is_sharded = sharing.strategy.stage == 3
    number = run.num_shards
    last = len(memory.weights) - 1
    is_block = np.asarray([unit not in (0, last) for unit in own])
    gathered = memory.weights[own] * is_block * is_sharded * (1.0 if sharing.gather_half else wide)
    # Prefetching gathers the next block while this one computes, so that two are whole at once.
    ahead = 2 if sharing.prefetch else 1
    is_shared = sharing.strategy.stage >= 2
    of_gradient = run.gradient_factor
    whole = (every.gradients[own] / number if is_shared else memory.gradients[own]) * of_gradient
    if is_shared and run.setup.saving.offload is not Offload.NONE:
        whole = 0.0 * whole
    if run.layout.pipeline > 1 and last in own and 0 not in own:
        # A head that shares its weight with the embedding needs a second copy of it on the last stage.
        whole[-1] += memory.tied * of_gradient / (number if sharing.strategy.stage >= 2 else 1)
    # FSDP makes the gradients of a block whole before it scatters them, in fp32 once more where they are reduced so;
    # replicas of mixed precision convert one gradient at a time.
    made = (
        memory.gradients[own] * (1.0 + (wide if wide > 1 and not sharing.reduce_half else 0.0))
        if is_sharded
        else memory.largest_gradient[own] * (of_gradient > 1)
    )
    # Kept whole (no_sync), gradients become a part of themselves block by block.
    keeps_whole = is_sharded and sharing.reduce_once and sharing.num_accumulation_steps > 1
    left = memory.gradients[own] if keeps_whole else whole
    total = float(left.sum())
    best = (0.0, 0.0, 0.0 if grows else total)
    kept, gradients = kept_before, 0.0 if grows else total
    for place, unit in enumerate(own):
        # Weights that are not given back stay whole from their first use to the end of the step.
        open_bytes = float(gathered[place if sharing.reshard else 0 : place + ahead].sum())
        candidate = (kept, float(memory.forward_peak[unit]) + open_bytes, gradients)
        best = max(best, candidate, key=sum)
        kept += float(memory.kept[unit])
    # Hooks of FSDP1 on the input of a block whose weights are all frozen hold the node that gathers its gradient, and
    # with it both tensors, if a reentrant checkpoint made the input a leaf (PyTorch, _register_post_backward_reshard_
    # only_hook). The gradient that the next block has just made is there in any case.
    frozen = run.setup.saving.lora_rank is not None and run.setup.saving.recompute == "full"
    holds = sharing.reentrant and frozen and is_sharded and sharing.fsdp_version is FsdpVersion.FSDP1
    flowing = 1.0
    for place in range(len(own) - 1, -1, -1):
        unit = own[place]
        at = slice(max(0, place - ahead + 1), place + 1) if sharing.reshard else slice(None)
        open_bytes = float(gathered[at].sum())
        candidate = (kept, float(memory.backward_peak[unit]) + open_bytes + float(made[place]), gradients)
        best = max(best, candidate, key=sum)
        kept += float(memory.backward_net[unit])
        if holds and is_block[place]:
            kept += (2.0 - flowing) * float(memory.kept[unit])
            flowing = 0.0
        gradients += float(whole[place]) if grows else float(whole[place] - left[place])
    return best


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMemory:
    """Memory of each device of a run, and what follows from it.

    Attributes:
        peak: Device memory that a process needs, of the stage that needs most [bytes].
        parts: Contents at the peak, which add up to it.
        verdict: "yes", "no" or "close".
        max_batch: Largest batch of one device that fits; None where it was not found.
        max_batch_reason: Why not.
        device_bytes: Memory of the device that a process can use [bytes].
        stages: Memory of each stage of a layout by units.
        shown: Memory that ``nvidia-smi`` shows of a language model in training, see ``shown_memory`` [bytes].
    """

    peak: Interval
    parts: tuple[MemoryShare, ...]
    verdict: str
    max_batch: Interval | None
    max_batch_reason: str
    device_bytes: float
    stages: tuple[StageMemory, ...] = ()
    shown: Interval | None = None


_LARGEST: Kept[MaxBatchSize] = Kept(256)


def memory_constants_of(device: Device, run: Run) -> MemoryConstants:
    """Overhead and factors of a device with the software of a run."""
    return memory_constants(
        device,
        torch_version=parse_release(run.software.torch_version),
        overhead_bytes=run.software.memory_overhead_bytes,
    )


def run_memory(
    model: PreparedModel, run: Run, gradient_bytes: float, *, with_largest: bool = True
) -> RunMemory:
    """Memory of each device of a run: the one place that asks the laws of one device, of replicas and of units.

    Args:
        model: The traced step.
        run: The run.
        gradient_bytes: All gradients, which replicas hold once more in their buckets [bytes].
        with_largest: Whether the largest batch is asked for as well.
    """
    constants = memory_constants_of(run.cluster.device, run)
    batch, reason = None, ""
    device_bytes = visible_memory_bytes(run.cluster.device)
    stages: tuple[StageMemory, ...] = ()
    if run.uses_layout:
        from forerun.prediction.units import DividedModel

        units = DividedModel.of(model)
        stages = layout_memory(units, run, constants)
        held = max(stages, key=lambda stage: stage.peak_bytes.value)
        if with_largest:
            batch, reason = _largest_micro_batch(units, run, constants, device_bytes)
    else:
        alone = estimate_memory(model.graph, run.setup, constants)
        held = _of_replica(model.graph, run, alone, gradient_bytes)
        if with_largest:
            # The largest batch does not depend on the batch of the question.
            largest = _LARGEST.get(
                (model.graph,),
                (replace(run.setup, batch_size_per_device=1), device_bytes, constants),
                lambda: max_batch_size(model.graph, run.setup, device_bytes, constants),
            )
            reason = largest.reason
            if largest.value is not None and largest.low is not None and largest.high is not None:
                batch = Interval(float(largest.value), float(largest.low), float(largest.high))

    def reserved() -> float:
        beside = constants.overhead_bytes + replica_bytes(run, gradient_bytes)
        plan, size = plans_for_setup(model.graph, run.setup, constants)[0], run.setup.batch_size_per_device
        return beside + replay(plan, size, int(device_bytes - beside)).peak_reserved_bytes

    replays = None if stages or not constants.uses_caching_allocator else reserved
    reads_tokens = model.graph.tokens_per_sample is not None
    return RunMemory(
        peak=held.peak_bytes,
        parts=held.parts,
        verdict=fits(held.peak_bytes.low, held.peak_bytes.high, device_bytes),
        max_batch=batch,
        max_batch_reason=reason,
        device_bytes=device_bytes,
        stages=stages,
        shown=shown_memory(run, held.peak_bytes, device_bytes, replays) if reads_tokens else None,
    )


def shown_memory(
    run: Run, peak: Interval, device_bytes: float, reserved: Callable[[], float] | None = None
) -> Interval | None:
    """Memory that ``nvidia-smi`` shows while a language model is trained; None where nobody measured it [bytes].

    PyTorch's allocator keeps what it freed while the device has room: what a replay with that room holds, else the peak
    times a measured ratio, their widths added in squares; and no more than the device has. ``reserved`` replays.
    """
    asked = run.setup.phase is Phase.TRAIN and run.cluster.device.vendor == "nvidia"
    # torchtitan's run_train.sh sets expandable segments, which leave next to no block unused.
    if peak.value > device_bytes or not asked or run.software.recipe == "torchtitan":
        return None
    law = _SHOWN if reserved is None else _REPLAYED
    value = law.value * (peak.value if reserved is None else max(reserved(), peak.value))
    low, high = (
        value * exp(sign * hypot(log(law.value / end), log(peak.value / of_peak)))
        for sign, end, of_peak in ((-1, law.low, peak.low), (1, law.high, peak.high))
    )
    return Interval(*(min(each, device_bytes) for each in (value, low, high)))


def replica_bytes(run: Run, gradient_bytes: float) -> float:
    """Memory of a replica beyond that of one device alone [bytes].

    DDP's buckets are copies of all gradients; beside them are the buffers of collectives.
    """
    is_ddp = run.cluster.num_devices > 1 and run.sharing.strategy is not Strategy.MIRRORED
    return gradient_bytes + _communicator_bytes(run) if is_ddp else 0.0


def _of_replica(graph: Graph, run: Run, alone: MemoryEstimate, gradient_bytes: float) -> StageMemory:
    """Memory of a device that has the whole model and its states, as one stage of all blocks."""
    added = replica_bytes(run, gradient_bytes)
    buffers = max(0.0, added - gradient_bytes)
    shared = {"gradient buckets": added - buffers, "buffers of collectives": buffers}
    return StageMemory(
        stage=0,
        num_blocks=len(graph.blocks),
        parts=(*alone.parts, *(MemoryShare(name, size) for name, size in shared.items() if size > 0)),
        peak_bytes=Interval(alone.peak_bytes, alone.low_bytes, alone.high_bytes).shifted(added),
        allocated_bytes=alone.live_peak_bytes + added,
    )


def worst_memory(
    model: PreparedModel, run: Run, gradient_bytes: float, constants: MemoryConstants
) -> StageMemory:
    """Memory of the devices that need most, of what ``run_memory`` takes and ``memory_constants_of`` gives."""
    if run.uses_layout:
        from forerun.prediction.units import DividedModel

        return worst_stage(DividedModel.of(model), run, constants)
    return _of_replica(model.graph, run, estimate_memory(model.graph, run.setup, constants), gradient_bytes)


def _largest_micro_batch(
    model: DividedModel, run: Run, constants: MemoryConstants, visible_bytes: float
) -> tuple[Interval | None, str]:
    """Largest micro-batch of a data group, with those whose upper and lower ends fit, and the reason for none."""
    graph = model.model.graph
    if graph.only_batch_size is not None:
        return (
            None,
            f"{graph.model} was traced for batch size {graph.only_batch_size} only; others are unknown",
        )

    @cache
    def peak(size: int) -> Interval:
        of_size = replace(run, setup=replace(run.setup, batch_size_per_device=size))
        return worst_stage(model, of_size, constants).peak_bytes

    def largest(end: str) -> float:
        return float(largest_passing(lambda size: getattr(peak(size), end) <= visible_bytes, MAX_BATCH_SIZE))

    return Interval(*(largest(end) for end in ("value", "high", "low"))), ""
