"""Requests to the process that traces Keras models."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from forerun.question.setup import TrainingSetup

__all__ = ["KerasRequest"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KerasRequest:
    """One trace of a Keras model.

    Attributes:
        name: The model as the user named it.
        config: ``keras.Model.to_json`` of a model object, None for a named model or a file.
        setup: The training setup.
        image_size, input_shape, sequence_length, num_classes: As in ``input_options``.
        builder: Function that makes the model in place of the name, as ``module:function``.
        arguments: Keyword arguments of the builder, plain values.
        is_layer: True for a layer alone: a gradient of its output takes the place of a loss, and its input gets a
            gradient.
    """

    name: str
    config: str | None
    setup: TrainingSetup
    image_size: int | None
    input_shape: tuple[int, ...] | None
    sequence_length: int | None
    num_classes: int | None
    builder: str | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    is_layer: bool = False
