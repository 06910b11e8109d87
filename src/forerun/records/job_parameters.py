"""Reads the scalars of a job's parameters with their types, and turns them into settings of a step."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, TypeVar

from forerun.errors import InvalidSetupError
from forerun.run.setup import Layout, OptimizerImplementation, Phase, Precision, TrainingSetup

__all__ = ["choice_of", "flag_of", "input_options_of", "number_of", "setup_of", "text_of", "whole_of"]

Parameters = Mapping[str, str | int | float | bool | None]
_Choice = TypeVar("_Choice", bound=StrEnum)


def whole_of(parameters: Parameters, name: str, default: int | None = None) -> int:
    """A whole number; an absent one or None takes the default, and without a default raises an error."""
    value = parameters.get(name)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not float(value).is_integer():
        raise InvalidSetupError(f"expected a whole number as {name} of the job, got {value!r}; give one")
    return int(value)


def number_of(parameters: Parameters, name: str, default: float) -> float:
    """A number among the parameters."""
    value = parameters.get(name)
    if value is None:
        return default
    if isinstance(value, (bool, str)):
        raise InvalidSetupError(f"expected a number as {name} of the job, got {value!r}; give one")
    return float(value)


def flag_of(parameters: Parameters, name: str, default: bool = False) -> bool:
    """A flag among the parameters, True or False."""
    value = parameters.get(name)
    if value is None:
        return default
    if value not in (True, False):
        raise InvalidSetupError(f"expected true or false as {name} of the job, got {value!r}; give one")
    return bool(value)


def text_of(parameters: Parameters, name: str, default: str) -> str:
    """A text among the parameters."""
    value = parameters.get(name)
    return default if value is None else str(value)


def choice_of(parameters: Parameters, name: str, kind: type[_Choice], default: _Choice) -> _Choice:
    """A parameter that is a member of a ``StrEnum``."""
    word = text_of(parameters, name, default)
    try:
        return kind(word)
    except ValueError:
        raise InvalidSetupError(
            f"unknown {name} '{word}' of the job; expected one of {', '.join(kind)}"
        ) from None


def setup_of(parameters: Parameters) -> TrainingSetup:
    """The training setup of a job; a missing parameter takes the default of ``TrainingSetup``.

    Only a training step has an optimizer, and only if the job names one.
    """
    phase = choice_of(parameters, "phase", Phase, Phase.TRAIN)
    optimizer = text_of(parameters, "optimizer", "none") if phase is Phase.TRAIN else "none"
    return TrainingSetup(
        batch_size_per_device=whole_of(parameters, "batch_size", 32),
        precision=choice_of(parameters, "precision", Precision, Precision.FP32),
        layout=choice_of(parameters, "layout", Layout, Layout.NCHW),
        compile=flag_of(parameters, "compile"),
        optimizer=optimizer,
        optimizer_implementation=choice_of(
            parameters, "optimizer_implementation", OptimizerImplementation, OptimizerImplementation.FOREACH
        ),
        phase=phase,
        fused_attention=flag_of(parameters, "fused_attention", True),
    )


def input_options_of(parameters: Parameters) -> dict[str, Any]:
    """Keywords of ``build_model`` about inputs and head."""
    options: dict[str, Any] = {
        name: whole_of(parameters, name)
        for name in ("image_size", "sequence_length", "num_classes")
        if parameters.get(name) is not None
    }
    if (shape := parameters.get("input_shape")) is not None:
        options["input_shape"] = _shape(str(shape))
    return options


def _shape(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(size) for size in re.split("[x,]", text))
    except ValueError:
        raise InvalidSetupError(
            f"expected input_shape of the job such as 3x224x224, got '{text}'; leave the batch out"
        ) from None
