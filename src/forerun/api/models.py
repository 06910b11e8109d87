"""Traced models in memory, and what models there are by name."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

from forerun import __version__
from forerun.prediction.step import PreparedModel, prepare
from forerun.run.model import ModelRequest
from forerun.run.setup import TrainingSetup
from forerun.tracing.trace import cache_folder, trace

__all__ = ["is_fixed", "kept_model_names", "model_names", "prepared_model", "trace_model"]

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


def kept_model_names() -> dict[str, Any] | None:
    """What ``model_names`` said before, None if it was never asked with these libraries; loads nothing."""
    try:
        found: dict[str, Any] = json.loads(_names_file().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found


def _names_file() -> Path:
    key = json.dumps([__version__, *(_version(name) for name in ("torchvision", "timm"))])
    return cache_folder() / f"model-names-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def model_names() -> dict[str, Any]:
    """Names of models by where they come from, with the keys of the families; kept in the cache folder."""
    found = _names()
    with contextlib.suppress(OSError):  # a cache that cannot be written costs some seconds the next time
        path = _names_file()
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(found), encoding="utf-8")
        partial.replace(path)
    return found


def _names() -> dict[str, Any]:
    from forerun.tracing.models import family_networks
    from forerun.tracing.models.families import FAMILIES
    from forerun.tracing.models.timm_models import timm_names
    from forerun.tracing.models.torchvision_models import torchvision_names

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
