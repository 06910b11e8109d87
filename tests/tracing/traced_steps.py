"""Traces of small modules for the tests of the tracer."""

from __future__ import annotations

import torch

from forerun.graph.graph import AllocationKind, MemoryEvent
from forerun.question.model import ModelRequest
from forerun.question.setup import Phase, Precision, TrainingSetup
from forerun.tracing.models.sources import build_model
from forerun.tracing.step import record_step
from forerun.tracing.trace import trace

torch.set_num_threads(1)


def setup_of(precision="fp32", optimizer="none", phase="train", **options):
    """A setup without optimizer, unless one is named."""
    return TrainingSetup(precision=Precision(precision), optimizer=optimizer, phase=Phase(phase), **options)


def record(module, input_shape, batch_size=4, **options):
    """The raw trace of one steady step."""
    setup = setup_of(**options)
    built = build_model(module, input_shape=input_shape, training=setup.phase is not Phase.INFERENCE)
    return record_step(built, setup, batch_size)


def graph_of(module, input_shape, **options):
    """The graph of a module."""
    return trace(ModelRequest(model="module", input_shape=input_shape), setup_of(**options), module)


def kernels(raw, module=None, part=None):
    """Kernel names of the rows of a module and a part of the step, in order."""
    return [
        row.kernel_name
        for row in raw.rows
        if (module is None or row.module_name == module) and (part is None or row.step_part == part)
    ]


def rows_named(raw, name):
    """The rows of one kernel."""
    return [row for row in raw.rows if row.kernel_name == name]


def live_bytes(raw):
    """Live bytes after each event, and the events."""
    sizes, total, history = {}, 0, []
    for event in raw.events:
        if event.event == MemoryEvent.ALLOCATE:
            sizes[event.block] = event.size_bytes
            total += event.size_bytes
        elif event.event == MemoryEvent.FREE:
            total -= sizes[event.block]
        history.append((event, total))
    return history


def allocated_bytes(raw, kind=None):
    """Sizes of all allocations of one kind (all kinds if None), both steps."""
    return [
        event.size_bytes
        for event in raw.events
        if event.event == MemoryEvent.ALLOCATE and (kind is None or event.kind == AllocationKind(kind))
    ]
