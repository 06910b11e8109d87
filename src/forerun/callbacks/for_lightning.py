"""A callback for Lightning: it writes the metrics of each validation to the curve and may stop the trainer."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from forerun.callbacks.curve_callback import CurveCallback
from forerun.errors import UsageError

__all__ = ["lightning_callback"]

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def lightning_callback(path: str | Path, **options: Any) -> Any:
    """A ``lightning.pytorch.Callback`` around a ``CurveCallback``, which is its attribute ``curve``.

    Args:
        path: CSV file that receives the curve.
        options: Arguments of ``CurveCallback``.

    Raises:
        UsageError: Lightning is not installed.
    """
    curve = CurveCallback(path, **options)
    return _callback_class(_base())(curve)


def _base() -> type[Any]:
    for package in _PACKAGES:
        try:
            found: type[Any] = import_module(package).Callback
        except ModuleNotFoundError:
            continue
        return found
    raise UsageError(
        f"the callback for Lightning expects one of {', '.join(_PACKAGES)}, found none; install it with: pip install "
        "lightning"
    )


def _callback_class(base: type[Any]) -> type[Any]:
    class ForecastCallback(base):  # type: ignore[misc]  # the base is known at run time only
        """Writes the curve of a run and stops it, see ``CurveCallback``."""

        def __init__(self, curve: CurveCallback) -> None:
            super().__init__()
            self.curve = curve

        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            """Called by the trainer after each validation."""
            if getattr(trainer, "sanity_checking", False) or not getattr(trainer, "is_global_zero", True):
                return
            metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
            optimizers = getattr(trainer, "optimizers", None) or []
            if optimizers:
                metrics["learning_rate"] = float(optimizers[0].param_groups[0]["lr"])
            names = self.curve.log_file.columns
            kept = {k: v for k, v in metrics.items() if not names or k in names}
            done = int(trainer.current_epoch) + 1
            if self.curve.log(done, step=int(trainer.global_step), **kept):
                trainer.should_stop = True

    return ForecastCallback
