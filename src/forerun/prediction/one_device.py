"""What a scaling curve must know of one device: its predicted step taken apart."""

from __future__ import annotations

import numpy as np

from forerun.communication.buckets import gradient_buckets
from forerun.costs.memory import estimate_memory
from forerun.costs.op_time import step_times
from forerun.prediction.gradients import batch_norms, gradients_of, optimizer_state_bytes, pass_of
from forerun.prediction.predictor import Question, memory_constants_of
from forerun.prediction.scale import OneDevice
from forerun.prediction.step import PreparedModel, points_of, predict_steps
from forerun.workload.graph import AllocationKind, MemoryEvent

__all__ = ["one_device"]


def one_device(model: PreparedModel, question: Question, bucket_bytes: float) -> OneDevice:
    """The predicted step of one device, its gradients and its memory.

    Args:
        model: The traced step.
        question: Device, setup and weights.
        bucket_bytes: Capacity of a gradient bucket [bytes].
    """
    setup = question.setup
    step = predict_steps(model, question.device, [setup], question.weights, question.torch_version)[0]
    gradients = gradients_of(model, step)
    number, statistics = batch_norms(model.graph)
    memory = estimate_memory(model.graph, setup, memory_constants_of(question))
    return OneDevice(
        step_s=step.step_s,
        parts=pass_of(model, step),
        host_s=_host_s(model, question),
        gradient_bytes=sum(gradient.size_bytes for gradient in gradients),
        held_gradient_bytes=sum(p.size_bytes for p in memory.parts if p.name == "gradients"),
        weight_bytes=_weight_bytes(model),
        state_bytes=optimizer_state_bytes(model.graph),
        buckets=gradient_buckets(gradients, bucket_bytes),
        num_batch_norms=number,
        batch_norm_bytes=statistics,
        peak_memory_bytes=memory.peak_bytes,
    )


def _host_s(model: PreparedModel, question: Question) -> float:
    """Time the host needs to launch the step [s]."""
    points = points_of(model, [question.device], [question.setup], question.torch_version)
    setup = question.setup
    offsets = question.weights.offsets_of_device(
        question.device.name, setup.precision, setup.layout, "compiled" if setup.compile else "eager"
    )
    return float(step_times(model.ops, points, question.weights, np.stack([offsets], axis=1)).host_s[0])


def _weight_bytes(model: PreparedModel) -> float:
    stream = model.graph.memory
    is_weight = (stream.kind == AllocationKind.WEIGHT) & (stream.event == MemoryEvent.ALLOCATE)
    return float(stream.size_bytes[is_weight, 0].sum())
