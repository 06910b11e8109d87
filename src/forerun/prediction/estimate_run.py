"""Puts step, memory, job, money and energy of a run together into one estimate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

from forerun.graph.blocks import expert_products
from forerun.graph.graph import Graph
from forerun.hardware.device import Device, DeviceKind
from forerun.kept import Kept
from forerun.memory.constants import MemoryConstants, memory_constants, visible_memory
from forerun.memory.max_batch import MaxBatchSize, max_batch_size
from forerun.memory.peak import MemoryEstimate, estimate_memory, fits
from forerun.optime.software_stack import stack_note
from forerun.optime.weights import CostModel
from forerun.prediction.cost_model import other_calibration_note
from forerun.prediction.estimate import BreakdownPart, Estimate, Interval, MemoryShare
from forerun.prediction.gradients import optimizer_state_bytes
from forerun.prediction.input_pipeline import LOADER_BOUND_NOTE, is_loader_bound
from forerun.prediction.job_times import JobTimes, job_times
from forerun.prediction.layouts.answer import parallelism_of
from forerun.prediction.layouts.divided_model import DividedModel
from forerun.prediction.layouts.layout_memory import StageMemory, layout_memory
from forerun.prediction.layouts.layout_step import uses_layout
from forerun.prediction.point_times import ideal_times_s
from forerun.prediction.power import training_energy_j
from forerun.prediction.run_step import (
    RunStep,
    fed_interval,
    is_shared,
    layout_activity,
    run_step,
    step_alone,
)
from forerun.prediction.scale import HeldMemory, OneStep, grown_memory_bytes, held_state
from forerun.prediction.software_stack import is_keras_graph, stack_of
from forerun.prediction.step import (
    PreparedModel,
    is_order_of_magnitude,
    layer_times,
    missing_format_note,
    points_of,
)
from forerun.prediction.tokens import tokens_and_use
from forerun.run.run import Run, parse_release
from forerun.run.setup import TrainingSetup
from forerun.run.sharing import Strategy

__all__ = ["RunEstimate", "estimate_run", "held_memory", "memory_constants_of"]

_SHARED_PARTS = (
    ("exposed_s", "gradient synchronisation"),
    ("contention_s", "slowed by communication"),
    ("straggler_s", "waiting for other devices"),
    ("overhead_s", "work of several devices"),
)
_UPDATE_PART = "optimizer"
_LOADER_PART = "waiting for the data loader"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEstimate:
    """The estimate of a run, and the step behind it with its parts."""

    estimate: Estimate
    step: RunStep


def estimate_run(
    model: PreparedModel, validation: PreparedModel | None, run: Run, weights: CostModel
) -> RunEstimate:
    """The estimate of a run on one device or several.

    Time of a step, throughput, epoch, job, money and energy are those of all devices together, memory that of each.
    Steps of an epoch are those of the global batch. The validation pass is shared by the devices as well. A device that
    waits for others draws less, but is counted as if it worked.

    Args:
        model: The traced step.
        validation: The traced inference pass, needed if the job has validation samples.
        run: The run.
        weights: The cost model.

    Raises:
        UsageError: A link that is needed is not known, or an epoch has no step.
    """
    step = run_step(model, run, weights)
    setup, device, number = run.setup, run.cluster.device, run.cluster.num_devices
    times = _job_times(model, validation, run, step, weights)
    duration = (times.job_time_s or times.epoch_time_s) if times else None
    memory = _memory(model, run, step.one)
    estimate = Estimate(
        run=run,
        model=model.graph.model,
        device=device.name,
        device_title=device.title,
        batch_size_per_device=setup.batch_size_per_device,
        num_devices=number,
        precision=setup.precision,
        layout=setup.layout,
        compile=setup.compile,
        optimizer=setup.optimizer,
        phase=setup.phase,
        step_time_s=step.step_s,
        throughput_samples_per_s=step.step_s.inverse(run.batch_size_global),
        epoch_time_s=times.epoch_time_s if times else None,
        job_time_s=times.job_time_s if times else None,
        peak_memory_bytes=memory.peak,
        cost_usd=_cost(run, duration),
        energy_j=_energy(model, run, step, duration),
        max_batch_size=memory.max_batch,
        fits=memory.verdict,
        breakdown=_breakdown(run, step),
        bound_by=_bound_by(run, step),
        provenance=step.alone.provenance,
        unsupported_ops=model.graph.unsupported_ops,
        top_layers=layer_times(step.layout.model if step.layout else model, step.alone),
        memory_parts=memory.parts,
        device_memory_bytes=memory.device_bytes,
        num_parameters=model.graph.num_parameters,
        flops_per_sample=model.graph.total_flops(setup.batch_size_per_device) / setup.batch_size_per_device,
        num_trainable_parameters=model.graph.num_trainable_parameters,
        num_steps=_num_steps(run, times),
        **tokens_and_use(model.graph, run, step.step_s),
        num_steps_per_epoch=times.num_steps_per_epoch if times else None,
        parallelism=parallelism_of(run, step.layout, memory.stages) if step.layout is not None else None,
        notes=(
            *_notes(model, run, weights),
            *_missing(run, times, memory),
            *other_calibration_note(run, weights),
            *_notes_of_several(run),
            *_note_of_loader(run, step),
        ),
    )
    return RunEstimate(estimate=estimate, step=step)


def _job_times(
    model: PreparedModel,
    validation: PreparedModel | None,
    run: Run,
    step: RunStep,
    weights: CostModel,
) -> JobTimes | None:
    job = run.job
    if job is None:
        return None
    rest = job.num_samples % run.batch_size_global
    last_s = step.step_s
    # The last partial batch of several devices or micro-steps takes a whole step: its time is not known better.
    # A model of one batch size runs its last samples padded to that batch.
    if rest and not is_shared(run) and model.graph.only_batch_size is None:
        partial = replace(run.setup, batch_size_per_device=rest)
        last_s = fed_interval(run, step_alone(model, run, partial, weights).step_s, rest)
    validation_s = None
    setup = run.validation_setup
    if validation is not None and setup is not None:
        validation_s = step_alone(validation, run, setup, weights).step_s
    return job_times(
        job,
        run.batch_size_global,
        step.step_s,
        last_s,
        validation_s,
        validation_batch_size=run.setup.batch_size_per_device * run.num_replicas,
    )


def _num_steps(run: Run, times: JobTimes | None) -> int | None:
    epochs = run.job.num_epochs if run.job is not None else None
    return None if times is None or epochs is None else ceil(epochs * times.num_steps_per_epoch)


def _cost(run: Run, duration: Interval | None) -> Interval | None:
    if run.price_usd_per_hour is None or duration is None:
        return None
    return duration.scaled(run.cluster.num_devices * run.price_usd_per_hour / 3600.0)


def _energy(model: PreparedModel, run: Run, step: RunStep, duration: Interval | None) -> Interval | None:
    device = run.cluster.device
    if step.layout is None:
        points = points_of(model, [device], [run.setup], run.software.torch_version)
        compute_s, memory_s = (float(part[0]) for part in ideal_times_s(model, points))
        ideal_s = compute_s + memory_s
        activity, fraction = ideal_s / step.alone.step_s.value, compute_s / ideal_s if ideal_s else 0.0
    else:
        activity, fraction = layout_activity(model, run, step.layout)
    # A device that waits for its loader draws less.
    activity *= step.busy_s.value / step.step_s.value
    found = training_energy_j(device, duration or step.step_s, activity, fraction)
    return None if found is None else found.scaled(run.cluster.num_devices)


def _breakdown(run: Run, step: RunStep) -> tuple[BreakdownPart, ...]:
    """Parts that add up to the step, the longest first."""
    parts = list(step.alone.breakdown if step.layout is None else step.layout.parts)
    num_own = len(parts)
    if step.shared is not None:
        parts = _computation(run, parts, step.shared.compute_s)
        parts += [
            BreakdownPart(name, getattr(step.shared, key))
            for key, name in _SHARED_PARTS
            if getattr(step.shared, key) > 0
        ]
    waiting_s = step.step_s.value - step.busy_s.value
    if waiting_s > 0:
        parts.append(BreakdownPart(_LOADER_PART, waiting_s))
    if len(parts) == num_own:
        return tuple(parts)
    return tuple(sorted(parts, key=lambda part: -part.time_s))


def _computation(run: Run, alone: Sequence[BreakdownPart], compute_s: float) -> list[BreakdownPart]:
    """Parts of what each device computes: all micro-steps, then one update, divided where ZeRO divides it."""
    alone_s = sum(part.time_s for part in alone)
    if run.sharing.strategy is Strategy.MIRRORED:  # the host's work is counted apart
        return [BreakdownPart(part.name, part.time_s * compute_s / alone_s) for part in alone]
    number = run.cluster.num_devices if run.sharing.strategy.stage else 1
    update_s = sum(part.time_s for part in alone if part.name == _UPDATE_PART)
    scale = max(0.0, compute_s - update_s / number) / max(alone_s - update_s, 1e-30)
    factors = {_UPDATE_PART: 1.0 / number}
    return [BreakdownPart(part.name, part.time_s * factors.get(part.name, scale)) for part in alone]


def _bound_by(run: Run, step: RunStep) -> str:
    waits = run.loader is not None and is_loader_bound(step.step_s.value, step.busy_s.value, run.loader)
    return "data loader" if waits else step.alone.bound_by


def _note_of_loader(run: Run, step: RunStep) -> tuple[str, ...]:
    """Said where the interval of a step is that of its loader."""
    return (LOADER_BOUND_NOTE,) if _bound_by(run, step) == "data loader" else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Memory:
    peak: Interval
    parts: tuple[MemoryShare, ...]
    verdict: str
    max_batch: Interval | None
    max_batch_reason: str
    device_bytes: float
    stages: tuple[StageMemory, ...] = ()


def memory_constants_of(device: Device, run: Run) -> MemoryConstants:
    """Overhead and factors of a device with the software of a run."""
    return memory_constants(
        device,
        torch_version=parse_release(run.software.torch_version),
        overhead_bytes=run.software.memory_overhead_bytes,
    )


def held_memory(model: PreparedModel, one: OneStep, found: MemoryEstimate) -> HeldMemory:
    """Parts of the peak of one device that are weights, gradients and optimizer state."""
    return HeldMemory(
        weight_bytes=one.weight_bytes,
        gradient_bytes=one.gradient_bytes,
        held_gradient_bytes=sum(part.size_bytes for part in found.parts if part.name == "gradients"),
        state_bytes=optimizer_state_bytes(model.graph),
    )


def _memory(model: PreparedModel, run: Run, one: OneStep | None) -> _Memory:
    constants = memory_constants_of(run.cluster.device, run)
    visible = visible_memory(run.cluster.device)
    if uses_layout(run):
        return _layout_memory(model, run, constants, visible.value_bytes)
    found = estimate_memory(model.graph, run.setup, constants)
    largest = _largest_batch(model.graph, run.setup, visible.value_bytes, constants)
    batch = None
    if largest.value is not None and largest.low is not None and largest.high is not None:
        batch = Interval(float(largest.value), float(largest.low), float(largest.high))
    parts = tuple(MemoryShare(part.name, float(part.size_bytes)) for part in found.parts)
    peak = Interval(found.peak_bytes, found.low_bytes, found.high_bytes)
    verdict = str(fits(found, visible.value_bytes))
    number = run.cluster.num_devices
    if number > 1 and one is not None:
        held = held_memory(model, one, found)
        grown = grown_memory_bytes(held, run.sharing, number)
        parts = _parts_of_several(parts, held, run, grown)
        peak = peak.shifted(grown)
        verdict = _verdict(peak, visible.value_bytes)
    return _Memory(
        peak=peak,
        parts=parts,
        verdict=verdict,
        max_batch=batch,
        max_batch_reason=largest.reason,
        device_bytes=visible.value_bytes,
    )


def _layout_memory(
    model: PreparedModel, run: Run, constants: MemoryConstants, visible_bytes: float
) -> _Memory:
    """Memory of the stage that needs most."""
    stages = layout_memory(DividedModel(model=model), run, constants)
    worst = max(stages, key=lambda stage: stage.peak_bytes.value)
    return _Memory(
        peak=worst.peak_bytes,
        parts=worst.parts,
        verdict=_verdict(worst.peak_bytes, visible_bytes),
        max_batch=None,
        max_batch_reason="not searched for a layout; forerun plan --strategy auto compares micro-batches",
        device_bytes=visible_bytes,
        stages=stages,
    )


def _verdict(peak: Interval, available_bytes: float) -> str:
    if peak.low > available_bytes:
        return "no"
    return "yes" if peak.high <= available_bytes else "close"


def _parts_of_several(
    alone: tuple[MemoryShare, ...], one: HeldMemory, run: Run, grown: float
) -> tuple[MemoryShare, ...]:
    """Contents of the memory of one device among several; the parts add up to its peak."""
    held = held_state(one, run.sharing, run.cluster.num_devices)
    saved = {
        "weights": one.weight_bytes - held.weights_bytes,
        "gradients": one.held_gradient_bytes - held.gradients_bytes,
        "optimizer state": one.state_bytes - held.optimizer_bytes,
    }
    parts = [MemoryShare(part.name, part.size_bytes - saved.get(part.name, 0.0)) for part in alone]
    buffers = grown + sum(saved.get(part.name, 0.0) for part in alone)
    return (*parts, MemoryShare("gradient buckets", buffers)) if buffers > 0 else tuple(parts)


_largest_kept: Kept[MaxBatchSize] = Kept(256)


def _largest_batch(
    graph: Graph, setup: TrainingSetup, visible_bytes: float, constants: MemoryConstants
) -> MaxBatchSize:
    """``max_batch_size``, remembered: it does not depend on the batch size that is asked about."""
    general = replace(setup, batch_size_per_device=1)
    return _largest_kept.get(
        (graph,),
        (general, visible_bytes, constants),
        lambda: max_batch_size(graph, setup, visible_bytes, constants),
    )


def _notes(model: PreparedModel, run: Run, weights: CostModel) -> list[str]:
    device, is_keras = run.cluster.device, is_keras_graph(model.graph)
    notes = list(model.graph.notes)
    if expert_products(model.graph.ops).any():
        notes.append(
            "experts: as many tokens are taken to go to each; where routing is uneven, the fullest sets the pace"
        )
    missing = missing_format_note(device, run.setup.precision)
    if missing:
        notes.append(missing)
    if is_order_of_magnitude(device, weights):
        what = (
            f"a {device.kind}"
            if device.kind is not DeviceKind.GPU
            else f"a GPU of this architecture ({device.architecture})"
        )
        command = f"forerun calibrate{' --framework keras' if is_keras else ''}"
        notes.append(
            f"no measurement of {what} stands behind the cost model, which was fitted on other GPUs: "
            f"take the time as an order of magnitude, and calibrate: {command}"
        )
    effect = stack_of(model.graph, device, weights)
    if effect is not None:
        notes.append(stack_note(effect, device.name))
    elif is_keras and weights.calibrated_device is None:
        notes.append(
            f"software stack: no step of Keras on TensorFlow was measured on a {device.kind}; the time is "
            "that of the same operations in PyTorch"
        )
    if run.job is not None and is_keras:
        notes.append(
            "an epoch is taken as the sum of its steps: fit on arrays, or on a data set with the tuner of tf.data on, "
            "often waits between epochs, up to an epoch's time and 60 s at most (docs/methods/keras.md says how to "
            "avoid it)"
        )
    if run.setup.compile and is_keras:
        notes.append("memory is that of eager execution; torch.compile usually needs less")
    return notes


def _missing(run: Run, times: JobTimes | None, memory: _Memory) -> list[str]:
    notes = []
    if times is None:
        notes.append(
            "epoch_time_s, job_time_s and cost_usd need a dataset: --dataset NAME or --dataset-size N"
        )
    elif times.job_time_s is None:
        notes.append("job_time_s needs the number of epochs: --epochs E")
    if times is not None and run.price_usd_per_hour is None:
        notes.append("cost_usd needs the price of the device: --price 1.89/h")
    if times is None:
        notes.append("energy_j is that of one step")
    elif times.job_time_s is None:
        notes.append("energy_j and cost_usd are those of one epoch")
    if memory.max_batch is None and memory.max_batch_reason:
        notes.append(f"max_batch_size: {memory.max_batch_reason}")
    return notes


def _notes_of_several(run: Run) -> list[str]:
    cluster, accumulation = run.cluster, run.sharing.num_accumulation_steps
    notes = []
    if accumulation > 1:
        notes.append(
            f"a step is {accumulation} micro-steps of {run.setup.batch_size_per_device} samples a device and one update"
        )
    if cluster.num_devices > 1:
        links = [link.title for link in (cluster.intra_link, cluster.inter_link) if link is not None]
        where = f"{cluster.num_nodes} x {cluster.num_devices_per_node} devices over {' and '.join(links)}"
        notes += [
            f"{where}, strategy {run.sharing.strategy}: the batch size is that of one device; "
            "cost, energy and steps are those of all",
            "the largest batch is that of one device alone",
        ]
    return notes
