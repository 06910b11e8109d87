"""For training scripts: ``from forerun.callbacks import CurveCallback``; see ``forerun.script.callbacks``."""

from __future__ import annotations

from forerun.script import callbacks as _callbacks

__all__ = list(vars(_callbacks)["__all__"])


def __getattr__(name: str) -> object:
    return getattr(_callbacks, name)
