"""Callbacks for Lightning: one writes the metrics of each validation and may stop the trainer, one times the steps."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from forerun.base.errors import UsageError
from forerun.script.callbacks.curve_callback import CurveCallback
from forerun.script.callbacks.loop_timer import LoopTimer
from forerun.script.profiling.hooks.step_hooks import num_samples_of

__all__ = ["lightning_callback", "lightning_timer"]

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")
_PRECISIONS = {"16-mixed": "amp", "bf16-mixed": "amp-bf16", "16-true": "fp16", "bf16-true": "bf16"}


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


def lightning_timer(records: str | Path | None = None, *, subject: str, **options: Any) -> Any:
    """A ``lightning.pytorch.Callback`` around a ``LoopTimer``, which is its attribute ``timer``.

    A step is a batch; with accumulated gradients an optimizer step takes several. The record is written when ``fit``
    ends.

    Args:
        records: Store that receives the record; None for the default store.
        subject: Model as ``forerun.predict`` names it.
        options: Further arguments of ``LoopTimer``; precision and model are the trainer's.

    Raises:
        UsageError: Lightning is not installed.
    """
    return _timer_class(_base())(records, subject, options)


def _timer_class(base: type[Any]) -> type[Any]:
    class TimerCallback(base):  # type: ignore[misc]  # the base is known at run time only
        """Times the steps of ``fit``, see ``LoopTimer``."""

        def __init__(self, records: str | Path | None, subject: str, options: dict[str, Any]) -> None:
            super().__init__()
            self.timer: LoopTimer | None = None
            self._records, self._subject, self._options = records, subject, options

        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            """Called by the trainer."""
            if trainer.is_global_zero:
                known = {"model": pl_module, "precision": _PRECISIONS.get(str(trainer.precision))}
                self.timer = LoopTimer(self._records, subject=self._subject, **{**known, **self._options})

        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            """Called by the trainer."""
            if self.timer is not None:
                self.timer.start_epoch()

        def on_train_batch_end(
            self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            """Called by the trainer after a batch."""
            if self.timer is not None:
                self.timer.step(num_samples_of(batch))

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            """Called by the trainer."""
            if self.timer is not None:
                self.timer.end_epoch()

        def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
            """Called by the trainer; writes the record."""
            if self.timer is not None:
                self.timer.finish()

    return TimerCallback
