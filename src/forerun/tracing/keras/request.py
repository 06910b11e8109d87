"""What a process that traces Keras models is asked, and what it answers: a line of JSON each, and graph files."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from forerun import errors
from forerun.errors import ForerunError, ModelBuildError
from forerun.run.setup import TrainingSetup

__all__ = ["KerasRequest", "error_from", "error_text"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KerasRequest:
    """One trace of a Keras model.

    Attributes:
        name: The model as the user named it.
        config: ``keras.Model.to_json`` of a model object, None for a named model or a file.
        setup: The fields of the training setup.
        image_size, input_shape, sequence_length, num_classes: As in ``input_options``.
        graph_file: Where the graph goes.
        builder: ``module:function`` that makes the model, instead of what the name means.
        arguments: Its keyword arguments, plain values.
        is_layer: Whether the model is a layer alone: a gradient of its output is handed over instead of a loss, and its
            input gets one.
    """

    name: str
    config: str | None
    setup: dict[str, Any]
    image_size: int | None
    input_shape: tuple[int, ...] | None
    sequence_length: int | None
    num_classes: int | None
    graph_file: str
    builder: str | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    is_layer: bool = False

    def as_json(self) -> str:
        """The request as one line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> KerasRequest:
        """What ``as_json`` wrote."""
        values = json.loads(text)
        shape = values["input_shape"]
        return cls(**{**values, "input_shape": None if shape is None else tuple(shape)})

    def training_setup(self) -> TrainingSetup:
        """The training setup."""
        return TrainingSetup(**self.setup)


def error_text(error: ForerunError) -> str:
    """An error as one line of JSON."""
    return json.dumps({"kind": type(error).__name__, "message": str(error)})


def error_from(text: str, otherwise: str) -> ForerunError:
    """The error of ``error_text``, or a ``ModelBuildError`` with another message if the text is none."""
    try:
        found = json.loads(text)
        kind = getattr(errors, found["kind"])
        error: ForerunError = kind.__new__(kind)
        Exception.__init__(error, found["message"])  # some kinds make their message from other arguments
    except (ValueError, KeyError, TypeError, AttributeError):
        return ModelBuildError(otherwise)
    return error
