"""Graphs of measured Keras layers and models, all traced in one process, which loads Keras once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace

from forerun.errors import ForerunError
from forerun.fitting.layer_rows import only_modules
from forerun.graph.graph import Graph
from forerun.hardware.device import Device
from forerun.records.job_parameters import setup_of, text_of
from forerun.records.measurement import JobKind, Measurement
from forerun.run.model import ModelRequest
from forerun.run.setup import Phase, TrainingSetup
from forerun.tracing.keras.request import KerasRequest
from forerun.tracing.keras.source import trace_keras_requests
from forerun.tracing.trace import trace_keras_models

__all__ = ["keras_graphs", "keras_layer_request"]

Answer = tuple[Graph, TrainingSetup] | ForerunError

_LAYER_BUILDER = "forerun.measurement.keras.layers:build_keras_layer"


def keras_graphs(measurements: Sequence[Measurement], device: Device) -> dict[str, Answer]:
    """Graph and setup of each measurement by its key, or why there is none.

    Args:
        measurements: Steps and layers of Keras.
        device: Where they were measured.

    Raises:
        MissingExtraError: Keras is not installed.
        TraceError: The process that traces took too long.
    """
    layers = [m for m in measurements if m.kind is JobKind.LAYER]
    answers: dict[str, Answer] = {}
    questions: dict[str, tuple[ModelRequest, TrainingSetup]] = {}
    for m in measurements:
        try:
            run = m.run_on(device)
        except ForerunError as error:
            answers[m.key] = error
            continue
        if run is not None:
            questions[m.key] = run.model, run.setup
    for key, graph in zip(questions, trace_keras_models(list(questions.values())), strict=True):
        answers[key] = graph if isinstance(graph, ForerunError) else (graph, questions[key][1])
    requests = [keras_layer_request(m) for m in layers]
    graphs = trace_keras_requests(requests) if requests else []
    for m, request, found in zip(layers, requests, graphs, strict=True):
        answers[m.key] = _layer_answer(found, request.training_setup())
    return answers


def _layer_answer(found: Graph | ForerunError, setup: TrainingSetup) -> Answer:
    if isinstance(found, ForerunError):
        return found
    return replace(found, ops=only_modules(found.ops)), setup


def keras_layer_request(measurement: Measurement) -> KerasRequest:
    """Question to the tracing process about a measured layer."""
    trains = text_of(measurement.parameters, "mode", "forward") == "train_step"
    setup = setup_of({**measurement.parameters, "phase": str(Phase.TRAIN if trains else Phase.INFERENCE)})
    return KerasRequest(
        name=f"layer:{measurement.subject}",
        config=None,
        setup=asdict(setup),
        image_size=None,
        input_shape=None,
        sequence_length=None,
        num_classes=None,
        graph_file="",
        builder=_LAYER_BUILDER,
        arguments={"kind": measurement.subject, "parameters": measurement.parameters},
        is_layer=True,
    )
