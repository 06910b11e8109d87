"""A callback for Keras: it writes the logs of each epoch to the curve and may stop the training."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from forerun.base.errors import MissingExtraError
from forerun.script.callbacks.curve_callback import CurveCallback

__all__ = ["keras_callback"]


def keras_callback(path: str | Path, **options: Any) -> Any:
    """A ``keras.callbacks.Callback`` around a ``CurveCallback``, which is its attribute ``curve``.

    Args:
        path: CSV file that receives the curve.
        options: Arguments of ``CurveCallback``.

    Raises:
        MissingExtraError: Keras is not installed.
    """
    curve = CurveCallback(path, **options)
    try:
        base = import_module("keras").callbacks.Callback
    except ModuleNotFoundError as error:
        raise MissingExtraError("the callback for Keras", "keras") from error
    return _callback_class(base)(curve)


def _callback_class(base: type[Any]) -> type[Any]:
    class ForecastCallback(base):  # type: ignore[misc]  # the base is known at run time only
        """Writes the curve of a run and stops it, see ``CurveCallback``."""

        def __init__(self, curve: CurveCallback) -> None:
            super().__init__()
            self.curve = curve

        def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
            """Called by ``fit`` after each epoch, counted from 0."""
            metrics = {name: float(value) for name, value in (logs or {}).items()}
            rate = getattr(getattr(self.model, "optimizer", None), "learning_rate", None)
            if rate is not None and "learning_rate" not in metrics:
                metrics["learning_rate"] = float(rate)
            if self.curve.log(epoch + 1, **metrics):
                self.model.stop_training = True

    return ForecastCallback
