"""Graphs of measured Keras layers and models, all traced in one process, which loads Keras once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace

from forerun.errors import ForerunError
from forerun.fitting.layer_rows import only_modules
from forerun.fitting.measured_steps import request_of
from forerun.graph.graph import Graph
from forerun.measurement.job_parameters import setup_of, text_of
from forerun.records.measurement import JobKind, Measurement
from forerun.records.step_view import as_step_record
from forerun.run.model import ModelRequest
from forerun.run.setup import Phase, TrainingSetup
from forerun.tracing.keras.request import KerasRequest
from forerun.tracing.keras.source import trace_keras_requests
from forerun.tracing.trace import trace_keras_models

__all__ = ["keras_graphs", "keras_layer_request"]

Answer = tuple[Graph, TrainingSetup] | ForerunError

_LAYER_BUILDER = "forerun.measurement.keras.layers:build_keras_layer"


def keras_graphs(measurements: Sequence[Measurement]) -> dict[str, Answer]:
    """Graph and setup of each measurement by its key, or the reason why there is none.

    Args:
        measurements: Steps and layers of Keras.

    Raises:
        MissingExtraError: Keras is not installed.
        TraceError: The process that traces took too long.
    """
    models, layers = ([m for m in measurements if m.kind is kind] for kind in (JobKind.STEP, JobKind.LAYER))
    answers: dict[str, Answer] = {}
    questions: dict[str, tuple[ModelRequest, TrainingSetup]] = {}
    for m in models:
        try:
            questions[m.key] = _model_question(m)
        except ForerunError as error:
            answers[m.key] = error
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


def _model_question(measurement: Measurement) -> tuple[ModelRequest, TrainingSetup]:
    record = as_step_record(measurement)
    assert record is not None
    return request_of(record), record.training_setup()


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
