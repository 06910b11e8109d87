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

from forerun.base.doors import door

__all__, __getattr__ = door(__name__, __file__)
