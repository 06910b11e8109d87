"""Keras on TensorFlow as a framework of measurements: checks without loading it, and graphs of what was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from forerun.adapters.keras.networks import KERAS_FAMILIES, check_keras_name
from forerun.adapters.keras.parameter_server import SERVER_STRATEGY, check_installed, check_servers
from forerun.adapters.keras.runner import check_keras_optimizer, check_keras_precision
from forerun.adapters.keras.source import KerasRequest, trace_keras_requests
from forerun.base.errors import ForerunError, InvalidSetupError
from forerun.evidence.fitting.measured_steps import only_modules
from forerun.evidence.measurement.settings import StepSettings
from forerun.evidence.records.measured_run import setup_of, text_of
from forerun.evidence.records.measurement import JobKind, Measurement, Scalar
from forerun.graph.graph import Graph
from forerun.question.devices.device import Device
from forerun.question.model import ModelRequest
from forerun.question.setup import Phase, Precision, TrainingSetup
from forerun.tracing.trace import trace_keras_models

Answer = tuple[Graph, TrainingSetup] | ForerunError

_LAYER_BUILDER = "forerun.adapters.keras.layers:build_keras_layer"


class KerasMeasuring:
    """The entry point of ``forerun.frameworks``; see ``evidence.measurement.circumstances.Framework``."""

    run = "forerun.adapters.keras.runner:run_keras_job"
    preloaded = ("forerun.adapters.keras.preloaded",)
    check_installed = staticmethod(check_installed)

    def check_grid(self, network: str, optimizer: str) -> None:
        """Refuses a grid of other networks than Keras' own families."""
        if network not in KERAS_FAMILIES:
            raise InvalidSetupError(
                f"expected one of the networks {', '.join(KERAS_FAMILIES)} for Keras, got {network!r}"
            )
        if optimizer != "none":
            check_keras_optimizer(optimizer)

    def check_layers(self, optimizers: Sequence[str], precision: Precision) -> None:
        """Refuses optimizers and precisions that Keras does not have."""
        for name in optimizers:
            if name != "none":
                check_keras_optimizer(name)
        check_keras_precision(precision)

    def check_steps(self, settings: StepSettings) -> None:
        """Refuses several devices and other phases than training."""
        if settings.num_devices != 1:
            raise InvalidSetupError(
                f"expected one device for steps of Keras, got {settings.num_devices}; replicas of a MirroredStrategy "
                "are measured by: forerun measure grid --framework keras --replicas N"
            )
        if settings.num_servers < 0:
            raise InvalidSetupError(f"expected parameter servers of 0 or more, got {settings.num_servers}")
        if settings.phase != Phase.TRAIN:
            raise InvalidSetupError(
                f"steps of Keras are measured in training only, got phase {settings.phase}"
            )

    def check_model(self, model: str, setup: TrainingSetup) -> None:
        """Refuses a misspelt family or file; tracing would take longer than most jobs."""
        check_keras_name(model)
        self.check_layers([setup.optimizer], setup.precision)

    def server_parameters(self, settings: StepSettings, optimizer: str, device: str) -> Mapping[str, Scalar]:
        """Strategy, workers and servers of a job, checked."""
        check_servers(settings.num_workers, settings.num_servers, settings.phase, optimizer, device)
        return {
            "strategy": SERVER_STRATEGY,
            "num_workers": settings.num_workers,
            "num_servers": settings.num_servers,
        }

    def graphs(self, measurements: Sequence[Measurement], device: Device) -> dict[str, Answer]:
        """Graph and setup of each measurement by its key, or why there is none.

        Args:
            measurements: Steps and layers of Keras.
            device: Where they were measured.

        Raises:
            MissingExtraError: Keras is not installed.
            TraceError: The process that traces took too long.
        """
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
        layers = {m.key: _layer_request(m) for m in measurements if m.kind is JobKind.LAYER}
        graphs = trace_keras_requests(list(layers.values())) if layers else []
        for (key, request), found in zip(layers.items(), graphs, strict=True):
            if isinstance(found, ForerunError):
                answers[key] = found
            else:
                answers[key] = replace(found, ops=only_modules(found.ops)), request.setup
        return answers


KERAS = KerasMeasuring()


def _layer_request(measurement: Measurement) -> KerasRequest:
    """Question to the tracing process about a measured layer."""
    trains = text_of(measurement.parameters, "mode", "forward") == "train_step"
    setup = setup_of({**measurement.parameters, "phase": str(Phase.TRAIN if trains else Phase.INFERENCE)})
    return KerasRequest(
        model=ModelRequest(model=f"layer:{measurement.subject}"),
        setup=setup,
        builder=_LAYER_BUILDER,
        arguments={"kind": measurement.subject, "parameters": measurement.parameters},
        is_layer=True,
    )
