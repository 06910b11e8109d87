"""Puts step, memory, job, money and energy together into one estimate."""

from __future__ import annotations

from dataclasses import dataclass, replace

from forerun.errors import InvalidSetupError
from forerun.graph.graph import Graph
from forerun.hardware.device import Device, DeviceKind
from forerun.kept import Kept
from forerun.memory.constants import MemoryConstants, memory_constants, visible_memory
from forerun.memory.max_batch import MaxBatchSize, max_batch_size
from forerun.memory.peak import estimate_memory, fits
from forerun.optime.software_stack import stack_note
from forerun.optime.weights import OpTimeWeights
from forerun.prediction.estimate import Estimate, Interval, MemoryShare
from forerun.prediction.job_times import JobTimes, job_times
from forerun.prediction.point_times import ideal_times_s
from forerun.prediction.power import training_energy_j
from forerun.prediction.software_stack import is_keras_graph, stack_of
from forerun.prediction.step import (
    PreparedModel,
    StepPrediction,
    layer_times,
    missing_format_note,
    points_of,
    predict_steps,
)
from forerun.records.step_record import framework_release
from forerun.run.job import Job
from forerun.run.setup import Phase, TrainingSetup

__all__ = ["Question", "estimate", "memory_constants_of", "release_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Everything an estimate is asked about, besides the traced models.

    Attributes:
        device: The device.
        setup: Training configuration.
        job: Dataset and epochs, None if only the step is asked about.
        price_usd_per_hour: Price of the device, None if not known.
        memory_overhead_bytes: Memory of an idle process on the device, None for the usual.
        torch_version: PyTorch version of the run, None for the newest known.
        weights: The fitted cost model.
    """

    device: Device
    setup: TrainingSetup
    job: Job | None = None
    price_usd_per_hour: float | None = None
    memory_overhead_bytes: float | None = None
    torch_version: str | None = None
    weights: OpTimeWeights


def estimate(model: PreparedModel, validation: PreparedModel | None, question: Question) -> Estimate:
    """The estimate of one model on one device.

    Args:
        model: The traced step.
        validation: The traced inference pass, needed if the job has validation samples.
        question: Device, setup and the rest.

    Raises:
        InvalidSetupError: The graph holds for another batch size only.
    """
    setup, device = question.setup, question.device
    step = _predict_one(model, question, setup)
    notes = _notes(model, question)
    times = _job_times(model, validation, question, step)
    duration = _duration(times)
    memory = _memory(model, question)
    notes.extend(_missing(question, times, memory))
    return Estimate(
        model=model.graph.model,
        device=device.name,
        device_title=device.title,
        batch_size_per_device=setup.batch_size_per_device,
        precision=setup.precision,
        layout=setup.layout,
        compile=setup.compile,
        optimizer=setup.optimizer,
        phase=setup.phase,
        step_time_s=step.step_s,
        throughput_samples_per_s=step.step_s.inverse(setup.batch_size_per_device),
        epoch_time_s=times.epoch_time_s if times else None,
        job_time_s=times.job_time_s if times else None,
        peak_memory_bytes=memory.peak,
        cost_usd=_cost(question, duration),
        energy_j=_energy(model, question, step, duration),
        max_batch_size=memory.max_batch,
        fits=memory.verdict,
        breakdown=step.breakdown,
        bound_by=step.bound_by,
        provenance=step.provenance,
        unsupported_ops=model.graph.unsupported_ops,
        top_layers=layer_times(model, step),
        memory_parts=memory.parts,
        device_memory_bytes=memory.device_bytes,
        num_parameters=model.graph.num_parameters,
        flops_per_sample=model.graph.total_flops(setup.batch_size_per_device) / setup.batch_size_per_device,
        num_steps_per_epoch=times.num_steps_per_epoch if times else None,
        notes=tuple(notes),
    )


def _predict_one(model: PreparedModel, question: Question, setup: TrainingSetup) -> StepPrediction:
    return predict_steps(model, question.device, [setup], question.weights, question.torch_version)[0]


def _job_times(
    model: PreparedModel, validation: PreparedModel | None, question: Question, step: StepPrediction
) -> JobTimes | None:
    job, batch_size = question.job, question.setup.batch_size_per_device
    if job is None:
        return None
    rest = job.num_samples % batch_size
    # A model of one batch size runs its last samples padded to that batch.
    varies = rest and model.graph.only_batch_size is None
    last = _predict_one(model, question, _with_batch(question.setup, rest)).step_s if varies else step.step_s
    validation_s = None
    if validation is not None and job.num_validation_samples:
        setup = replace(question.setup, phase=Phase.INFERENCE, optimizer="none")
        validation_s = _predict_one(validation, question, setup).step_s
    return job_times(job, batch_size, step.step_s, last, validation_s)


def _with_batch(setup: TrainingSetup, batch_size: int) -> TrainingSetup:
    return replace(setup, batch_size_per_device=batch_size)


def _duration(times: JobTimes | None) -> Interval | None:
    if times is None:
        return None
    return times.job_time_s or times.epoch_time_s


def _cost(question: Question, duration: Interval | None) -> Interval | None:
    if question.price_usd_per_hour is None or duration is None:
        return None
    return duration.scaled(question.price_usd_per_hour / 3600.0)


def _energy(
    model: PreparedModel, question: Question, step: StepPrediction, duration: Interval | None
) -> Interval | None:
    points = points_of(model, [question.device], [question.setup], question.torch_version)
    compute_s, memory_s = (float(part[0]) for part in ideal_times_s(model, points))
    ideal_s = compute_s + memory_s
    fraction = compute_s / ideal_s if ideal_s else 0.0
    return training_energy_j(question.device, duration or step.step_s, ideal_s / step.step_s.value, fraction)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Memory:
    peak: Interval
    parts: tuple[MemoryShare, ...]
    verdict: str
    max_batch: Interval | None
    max_batch_reason: str
    device_bytes: float


def release_of(torch_version: str | None) -> tuple[int, int] | None:
    """Major and minor version of a PyTorch version, None for none.

    Raises:
        InvalidSetupError: It is no version.
    """
    if torch_version is None:
        return None
    release = framework_release(torch_version)
    if release is None:
        raise InvalidSetupError(f"a PyTorch version looks like 2.4 or 2.4.1, got '{torch_version}'")
    return release


def memory_constants_of(question: Question) -> MemoryConstants:
    """Overhead and factors of the question's device and software."""
    return memory_constants(
        question.device,
        torch_version=release_of(question.torch_version),
        overhead_bytes=question.memory_overhead_bytes,
    )


def _memory(model: PreparedModel, question: Question) -> _Memory:
    constants = memory_constants_of(question)
    visible = visible_memory(question.device)
    found = estimate_memory(model.graph, question.setup, constants)
    largest = _largest_batch(model.graph, question.setup, visible.value_bytes, constants)
    batch = None
    if largest.value is not None and largest.low is not None and largest.high is not None:
        batch = Interval(float(largest.value), float(largest.low), float(largest.high))
    return _Memory(
        peak=Interval(found.peak_bytes, found.low_bytes, found.high_bytes),
        parts=tuple(MemoryShare(part.name, float(part.size_bytes)) for part in found.parts),
        verdict=fits(found, visible.value_bytes),
        max_batch=batch,
        max_batch_reason=largest.reason,
        device_bytes=visible.value_bytes,
    )


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


def _notes(model: PreparedModel, question: Question) -> list[str]:
    notes = list(model.graph.notes)
    missing = missing_format_note(question.device, question.setup.precision)
    if missing:
        notes.append(missing)
    if question.device.kind is not DeviceKind.GPU and question.weights.calibrated_device is None:
        command = f"forerun calibrate{' --framework keras' if is_keras_graph(model.graph) else ''}"
        notes.append(
            f"no measurement of a {question.device.kind} stands behind the cost model, which was fitted on GPUs: "
            f"take the time as an order of magnitude, and calibrate: {command}"
        )
    effect = stack_of(model.graph, question.device, question.weights)
    if effect is not None:
        notes.append(stack_note(effect, question.device.name))
    elif is_keras_graph(model.graph) and question.weights.calibrated_device is None:
        notes.append(
            f"software stack: no step of Keras on TensorFlow was measured on a {question.device.kind}; the time is "
            "that of the same operations in PyTorch"
        )
    if question.job is not None and is_keras_graph(model.graph):
        notes.append(
            "an epoch is taken as the sum of its steps: fit on arrays, or on a data set with the tuner of tf.data on, "
            "often waits between epochs, up to an epoch's time and 60 s at most (docs/methods/keras.md says how to "
            "avoid it)"
        )
    if question.setup.compile:
        notes.append("memory is that of eager execution; torch.compile usually needs less")
    return notes


def _missing(question: Question, times: JobTimes | None, memory: _Memory) -> list[str]:
    notes = []
    if times is None:
        notes.append(
            "epoch_time_s, job_time_s and cost_usd need a dataset: --dataset NAME or --dataset-size N"
        )
    elif times.job_time_s is None:
        notes.append("job_time_s needs the number of epochs: --epochs E")
    if times is not None and question.price_usd_per_hour is None:
        notes.append("cost_usd needs the price of the device: --price 1.89/h")
    if times is None:
        notes.append("energy_j is that of one step")
    elif times.job_time_s is None:
        notes.append("energy_j and cost_usd are those of one epoch")
    if memory.max_batch is None and memory.max_batch_reason:
        notes.append(f"max_batch_size: {memory.max_batch_reason}")
    return notes
