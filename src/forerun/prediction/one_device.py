"""What a scaling curve must know of one device: its predicted step taken apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

from forerun.communication.buckets import gradient_buckets
from forerun.graph.graph import AllocationKind, MemoryEvent
from forerun.kept import Kept
from forerun.memory.peak import estimate_memory
from forerun.prediction.gradients import batch_norms, gradients_of, optimizer_state_bytes, pass_of
from forerun.prediction.predictor import Question, memory_constants_of
from forerun.prediction.scale import OneDevice, OneStep
from forerun.prediction.step import PreparedModel, predict_steps

__all__ = ["one_device", "one_steps"]

_STEPS: Kept[list[OneStep]] = Kept(512)


def one_device(model: PreparedModel, question: Question, bucket_bytes: float) -> OneDevice:
    """The predicted step of one device, its gradients and its memory.

    Args:
        model: The traced step.
        question: Device, setup and weights.
        bucket_bytes: Capacity of a gradient bucket [bytes].
    """
    setup = question.setup
    (step,) = one_steps(model, question, [setup.batch_size_per_device], bucket_bytes)
    memory = estimate_memory(model.graph, setup, memory_constants_of(question))
    return OneDevice(
        **{field.name: getattr(step, field.name) for field in fields(step)},
        held_gradient_bytes=sum(p.size_bytes for p in memory.parts if p.name == "gradients"),
        state_bytes=optimizer_state_bytes(model.graph),
        peak_memory_bytes=memory.peak_bytes,
    )


def one_steps(
    model: PreparedModel, question: Question, batch_sizes: Sequence[int], bucket_bytes: float
) -> list[OneStep]:
    """Predicted steps of one device at several batch sizes, without their memory.

    They are remembered: a plan is often asked again with another number of devices.

    Args:
        model: The traced step.
        question: Device, setup and weights; the batch size of its setup is not looked at.
        batch_sizes: Samples of a step.
        bucket_bytes: Capacity of a gradient bucket [bytes].
    """
    parts = (model, question.device, question.weights)
    general = replace(question.setup, batch_size_per_device=1)
    values = (general, tuple(batch_sizes), question.torch_version, bucket_bytes)
    found = _STEPS.find(parts, values)
    if found is None:
        found = _worked_out(model, question, batch_sizes, bucket_bytes)
        _STEPS.keep(parts, values, found)
    return found


def _worked_out(
    model: PreparedModel, question: Question, batch_sizes: Sequence[int], bucket_bytes: float
) -> list[OneStep]:
    setups = [replace(question.setup, batch_size_per_device=size) for size in batch_sizes]
    steps = predict_steps(model, question.device, setups, question.weights, question.torch_version)
    number, statistics = batch_norms(model.graph)
    weight_bytes = _weight_bytes(model)
    found = []
    for step in steps:
        gradients = gradients_of(model, step)
        found.append(
            OneStep(
                step_s=step.step_s,
                parts=pass_of(model, step),
                host_s=step.host_s,
                gradient_bytes=sum(gradient.size_bytes for gradient in gradients),
                weight_bytes=weight_bytes,
                buckets=gradient_buckets(gradients, bucket_bytes),
                num_batch_norms=number,
                batch_norm_bytes=statistics,
            )
        )
    return found


def _weight_bytes(model: PreparedModel) -> float:
    stream = model.graph.memory
    is_weight = (stream.kind == AllocationKind.WEIGHT) & (stream.event == MemoryEvent.ALLOCATE)
    return float(stream.size_bytes[is_weight, 0].sum())
