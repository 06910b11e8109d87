"""Write curves and records, and ask for forecasts inside a training loop: PyTorch, Lightning, Trainer, Keras, Optuna.

    from forerun.script.callbacks import CurveCallback

    curve = CurveCallback("run.csv", target="val_accuracy>=0.92", schedule="cosine:epochs=90")
    for epoch in range(1, 91):
        ...
        if curve.log(epoch, val_accuracy=accuracy, learning_rate=rate):
            break  # reached, or out of reach

A framework is imported when its callback is made, never before.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forerun.script.callbacks.frameworks import (
        keras_callback,
        lightning_callback,
        lightning_timer,
        trainer_callback,
    )
    from forerun.script.callbacks.loop import CurveCallback, CurveLog, LoopTimer
    from forerun.script.callbacks.pruner import ForecastPruner, ray_scheduler
    from forerun.script.callbacks.run_logger import RunLogger

__all__ = [
    "CurveCallback",
    "CurveLog",
    "ForecastPruner",
    "LoopTimer",
    "RunLogger",
    "keras_callback",
    "lightning_callback",
    "lightning_timer",
    "ray_scheduler",
    "trainer_callback",
]

_MODULES = {
    "CurveCallback": "loop",
    "CurveLog": "loop",
    "ForecastPruner": "pruner",
    "keras_callback": "frameworks",
    "LoopTimer": "loop",
    "ray_scheduler": "pruner",
    "RunLogger": "run_logger",
    "lightning_callback": "frameworks",
    "lightning_timer": "frameworks",
    "trainer_callback": "frameworks",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
