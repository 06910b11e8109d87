"""A captured script as the model of a run: the script decides most settings."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from forerun.base.errors import InvalidSetupError, UsageError
from forerun.graph.captured import CAPTURE_PREFIX, CaptureFacts, capture_path, read_capture_facts
from forerun.question.setup import Layout, OptimizerImplementation, Phase, Precision
from forerun.question.sharing import Strategy

__all__ = ["captured_facts", "is_captured", "with_captured_settings"]

_FIXED = ("layout", "optimizer", "optimizer_implementation")
_KINDS: Mapping[str, type[StrEnum]] = {
    "precision": Precision,
    "layout": Layout,
    "optimizer_implementation": OptimizerImplementation,
    "strategy": Strategy,
}
_OF_INPUT = ("image_size", "input_shape", "sequence_length")
_SAME_KERNELS = ({"fp32", "tf32"}, {"bf16", "fp16"}, {"amp", "amp-bf16"})
"""Precisions that share a graph."""


def is_captured(model: Any) -> bool:
    """True for a model such as ``capture:graph.forerun``."""
    return isinstance(model, str) and model.startswith(CAPTURE_PREFIX)


def captured_facts(model: Any) -> CaptureFacts | None:
    """Facts of a captured script; None for other models.

    Raises:
        UsageError: The file cannot be read.
    """
    path = capture_path(model)
    return None if path is None else read_capture_facts(path)


def with_captured_settings(model: Any, given: Mapping[str, Any], *, one_device: bool) -> dict[str, Any]:
    """The settings of a run with those that its captured script decides; other models change nothing.

    Args:
        model: The model.
        given: The settings of the user, who may choose batch size, micro-steps, devices, job and loader anew.
        one_device: Whether the user named one device and no number of them.

    Raises:
        InvalidSetupError: A setting contradicts the capture.
    """
    facts = captured_facts(model)
    if facts is None:
        return dict(given)
    own = facts.settings()
    for name, kind in _KINDS.items():
        said = getattr(facts, name)
        if said and said not in list(kind):
            raise UsageError(
                f"expected a captured graph whose {name.replace('_', ' ')} is one of {', '.join(kind)}, got "
                f"'{said[:20]}'; capture the script again"
            )
    for name in _OF_INPUT:
        if given.get(name) is not None:
            raise _contradiction(name, given[name], "the inputs of the script")
    if given.get("phase", Phase.TRAIN) != Phase.TRAIN:
        raise _contradiction("phase", given["phase"], "a training step")
    if given.get("fused_attention") is False:
        raise _contradiction("fused attention", "no", "attention as the script runs it")
    for name in _FIXED:
        if given.get(name) is not None and str(given[name]).lower() != own.get(name):
            raise _contradiction(name.replace("_", " "), given[name], own.get(name))
    wanted, held = str(given.get("precision") or own["precision"]), own["precision"]
    if wanted != held and not any({wanted, held} <= same for same in _SAME_KERNELS):
        raise _contradiction("precision", wanted, held)
    if given.get("dataset") is not None:
        own.pop("dataset_size", None)
    if one_device and facts.world_size > 1:
        own["num_devices"] = facts.world_size
    if not one_device or facts.world_size > 1:
        own |= facts.sharing_settings()
    return {**own, **{name: value for name, value in given.items() if value is not None}}


def _contradiction(name: str, wanted: Any, held: Any) -> InvalidSetupError:
    return InvalidSetupError(
        f"a captured script keeps its {name}: asked for {wanted}, the capture holds {held}; leave it out, or capture "
        "the script again with other arguments"
    )
