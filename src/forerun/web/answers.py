"""Answers of the server: validated questions in, the JSON of the command line out."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import forerun
from forerun.api.models import kept_model_names, model_names, trace_model
from forerun.hardware import load_catalog
from forerun.prediction.job import DATASETS
from forerun.run.setup import Phase, TrainingSetup
from forerun.tracing.trace import ModelRequest, is_traced
from forerun.web.questions import PlanBody, PredictBody, ScaleBody
from forerun.web.tracer import Tracer

__all__ = ["Answers"]

_ANSWERS_KEPT = 2048
_SETUP_NAMES = ("precision", "layout", "compile", "optimizer")


class Answers:
    """Answers questions and keeps the answers; equal questions have equal answers."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._traced: set[tuple[ModelRequest, TrainingSetup]] = set()
        self._kept: OrderedDict[str, dict[str, Any]] = OrderedDict()
        self._lock = threading.Lock()
        self._models: dict[str, Any] | None = None

    def predict(self, body: PredictBody) -> dict[str, Any]:
        """The JSON of ``forerun predict``."""
        arguments = body.arguments()
        return self._remembered("predict", arguments, lambda: self._predict(arguments))

    def scale(self, body: ScaleBody) -> dict[str, Any]:
        """The JSON of ``forerun scale`` for devices."""
        arguments = body.arguments()
        return self._remembered("scale", arguments, lambda: self._scale(arguments))

    def plan(self, body: PlanBody) -> dict[str, Any]:
        """The JSON of ``forerun plan``."""
        arguments = body.arguments()
        return self._remembered("plan", arguments, lambda: self._plan(arguments))

    def hardware(self) -> dict[str, Any]:
        """The JSON of ``forerun hardware list``."""
        return {"devices": [device.as_dict() for device in load_catalog().values()]}

    def models(self) -> dict[str, Any]:
        """Names of models; the first call ever loads their libraries, in the child."""
        if self._models is None:
            self._models = kept_model_names() or self._tracer.call(model_names)
        return self._models

    def datasets(self) -> dict[str, Any]:
        """Datasets by name, with their sizes."""
        found = [
            {
                "name": name,
                "num_training_samples": dataset.num_training_samples,
                "num_validation_samples": dataset.num_validation_samples,
            }
            for name, dataset in DATASETS.items()
        ]
        return {"datasets": found}

    def _predict(self, arguments: dict[str, Any]) -> dict[str, Any]:
        setup = TrainingSetup(phase=arguments["phase"], **{name: arguments[name] for name in _SETUP_NAMES})
        request = _request(arguments["model"], arguments["image_size"], arguments["sequence_length"])
        training = setup if setup.phase is Phase.TRAIN else replace(setup, optimizer="none")
        self._trace(request, training)
        if arguments["validation_size"] or arguments["validate"]:
            self._trace(request, replace(setup, phase=Phase.INFERENCE, optimizer="none"))
        return forerun.predict(**arguments).as_dict()

    def _scale(self, arguments: dict[str, Any]) -> dict[str, Any]:
        setup = TrainingSetup(**{name: arguments[name] for name in _SETUP_NAMES})
        self._trace(
            _request(arguments["model"], arguments["image_size"], arguments["sequence_length"]), setup
        )
        return forerun.scale(**arguments).as_dict()

    def _plan(self, arguments: dict[str, Any]) -> dict[str, Any]:
        for model in arguments["models"]:
            for image_size in arguments["image_sizes"] or [None]:
                for layout in arguments["layouts"]:
                    for precision in arguments["precisions"]:
                        setup = TrainingSetup(
                            precision=precision, layout=layout, optimizer=arguments["optimizer"]
                        )
                        self._trace(_request(model, image_size, None), setup)
        return forerun.plan(**arguments).as_dict()

    def _trace(self, request: ModelRequest, setup: TrainingSetup) -> None:
        """Has the child trace a model, once."""
        key = (request, setup)
        if key not in self._traced:
            if not is_traced(request, setup):
                self._tracer.call(trace_model, request, setup)
            self._traced.add(key)

    def _remembered(
        self, kind: str, arguments: dict[str, Any], make: Callable[[], dict[str, Any]]
    ) -> dict[str, Any]:
        key = f"{kind} {json.dumps(arguments, sort_keys=True)}"
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        answer = make()
        with self._lock:
            self._kept[key] = answer
            if len(self._kept) > _ANSWERS_KEPT:
                self._kept.popitem(last=False)
        return answer


def _request(model: str, image_size: int | None, sequence_length: int | None) -> ModelRequest:
    return ModelRequest(model=model, image_size=image_size, sequence_length=sequence_length)
