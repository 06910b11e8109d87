"""Traced models in memory, and what models there are by name."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from forerun.prediction.step import PreparedModel, prepare
from forerun.tracing.trace import ModelRequest, trace
from forerun.workload.setup import TrainingSetup

__all__ = ["is_fixed", "model_names", "prepared_model", "trace_model"]

_MODELS_KEPT = 128
_OF_FILES = ("hf:", "onnx:", "keras:")


def is_fixed(model: str) -> bool:
    """Whether a model's name says all about it; a file may change between two questions."""
    return not model.startswith(_OF_FILES) and ".py:" not in model


@lru_cache(maxsize=_MODELS_KEPT)
def prepared_model(request: ModelRequest, setup: TrainingSetup) -> PreparedModel:
    """A traced model with its distinct kernels, kept in memory; for models whose name says all about them."""
    return prepare(trace(request, setup))


def trace_model(request: ModelRequest, setup: TrainingSetup) -> str:
    """Traces a model into the cache of graphs, and returns its name.

    Raises:
        UsageError, FailureError: It cannot be built or traced.
    """
    return trace(request, setup).model


def model_names() -> dict[str, Any]:
    """Names of models by where they come from, with the keys of the families."""
    from forerun.tracing import family_networks
    from forerun.tracing.families import FAMILIES
    from forerun.tracing.timm_models import timm_names
    from forerun.tracing.torchvision_models import torchvision_names

    _ = family_networks.__name__  # imported for its registrations
    families = [
        {
            "name": family.name,
            "input_shape": list(family.input_shape),
            "keys": [
                {
                    "name": key,
                    "default": rule.default,
                    "low": rule.low,
                    "high": rule.high,
                    "step": rule.step,
                    "meaning": rule.meaning,
                }
                for key, rule in family.keys.items()
            ],
        }
        for family in FAMILIES.values()
    ]
    return {
        "families": families,
        "torchvision": [f"torchvision:{name}" for name in torchvision_names()],
        "timm": [f"timm:{name}" for name in timm_names()],
    }
