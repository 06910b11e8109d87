"""Captures, profiles, tunes and watches a training script that nobody edited."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forerun.script.callbacks.loop import CurveLog

__all__ = ["CurveLog"]

_MODULES = {"CurveLog": "forerun.script.callbacks.loop"}
"""Door of the room: what others may use, loaded on first use."""


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(import_module(_MODULES[name]), name)
