"""Callbacks for Keras, Lightning and the Trainer of Hugging Face: they write curves and records, and may stop a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from forerun.base.errors import UsageError
from forerun.base.extras import needing
from forerun.script.callbacks.loop import CurveCallback, LoopTimer
from forerun.script.profiling.step_hooks import num_samples_of


def keras_callback(path: str | Path, **options: Any) -> Any:
    """A ``keras.callbacks.Callback`` around a ``CurveCallback``, which is its attribute ``curve``.

    Args:
        path: CSV file that receives the curve.
        options: Arguments of ``CurveCallback``.

    Raises:
        MissingExtraError: Keras is not installed.
    """
    curve = CurveCallback(path, **options)
    with needing("the callback for Keras"):
        base = import_module("keras").callbacks.Callback

    class ForecastCallback(_WithCurve, base):  # type: ignore[misc, valid-type]  # the base is known at run time only
        """Writes the curve of a run and stops it, see ``CurveCallback``."""

        def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
            """Called by ``fit`` after each epoch, counted from 0."""
            metrics = {name: float(value) for name, value in (logs or {}).items()}
            rate = getattr(getattr(self.model, "optimizer", None), "learning_rate", None)
            if rate is not None and "learning_rate" not in metrics:
                metrics["learning_rate"] = float(rate)
            if self.curve.log(epoch + 1, **metrics):
                self.model.stop_training = True

    return ForecastCallback(curve)


class _WithCurve:
    """A callback of a framework with a curve and, if the steps are timed, a timer."""

    def __init__(self, curve: CurveCallback | None) -> None:
        super().__init__()
        self.curve: Any = curve
        self.timer: LoopTimer | None = None


def _tells(event: str) -> Callable[..., None]:
    """A method that passes an event of a framework on to the timer of its callback."""

    def told(self: _WithCurve, *args: Any, **kwargs: Any) -> None:
        if self.timer is not None:
            getattr(self.timer, event)()

    return told


_PACKAGES = ("lightning.pytorch", "pytorch_lightning")
_PRECISIONS = {"16-mixed": "amp", "bf16-mixed": "amp-bf16", "16-true": "fp16", "bf16-true": "bf16"}


def _lightning() -> type[Any]:
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


def lightning_callback(path: str | Path, **options: Any) -> Any:
    """A ``lightning.pytorch.Callback`` around a ``CurveCallback``, which is its attribute ``curve``.

    Args:
        path: CSV file that receives the curve.
        options: Arguments of ``CurveCallback``.

    Raises:
        UsageError: Lightning is not installed.
    """
    curve = CurveCallback(path, **options)

    class ForecastCallback(_WithCurve, _lightning()):  # type: ignore[misc]  # the base is known at run time only
        """Writes the curve of a run and stops it, see ``CurveCallback``."""

        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            """Called by the trainer after each validation."""
            # Lightning validates a few batches before any training.
            if getattr(trainer, "sanity_checking", False) or not getattr(trainer, "is_global_zero", True):
                return
            metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
            optimizers = getattr(trainer, "optimizers", None) or []
            if optimizers:
                metrics["learning_rate"] = float(optimizers[0].param_groups[0]["lr"])
            names = self.curve.log_file.columns
            # The first row fixes the columns of the file: metrics that appear later have no place.
            kept = {k: v for k, v in metrics.items() if not names or k in names}
            done = int(trainer.current_epoch) + 1
            if self.curve.log(done, step=int(trainer.global_step), **kept):
                trainer.should_stop = True

    return ForecastCallback(curve)


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

    class TimerCallback(_WithCurve, _lightning()):  # type: ignore[misc]  # the base is known at run time only
        """Times the steps of ``fit``, see ``LoopTimer``."""

        on_train_epoch_start = _tells("start_epoch")
        on_train_epoch_end = _tells("end_epoch")
        on_fit_end = _tells("finish")

        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            """Called by the trainer."""
            if trainer.is_global_zero:
                known = {"model": pl_module, "precision": _PRECISIONS.get(str(trainer.precision))}
                self.timer = LoopTimer(records, subject=subject, **{**known, **options})

        def on_train_batch_end(
            self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            """Called by the trainer after a batch."""
            if self.timer is not None:
                self.timer.step(num_samples_of(batch))

    return TimerCallback(None)


def trainer_callback(
    path: str | Path, *, records: str | Path | None = None, subject: str | None = None, **options: Any
) -> Any:
    """A ``transformers.TrainerCallback`` with the attributes ``curve`` and ``timer``.

    Each evaluation, and each log before the first one, is a row of the curve, which ``forerun forecast`` reads. With a
    subject the steps are timed as well, and a record of them is written when training ends.

    Args:
        path: CSV file that receives the curve.
        records: Store that receives the record; None for the default store.
        subject: Model as ``forerun.predict`` names it, such as ``hf:config.json``; None times no steps.
        options: Arguments of ``CurveCallback``.

    Raises:
        MissingExtraError: Transformers is not installed.
    """
    curve = CurveCallback(path, **options)
    with needing("the callback for the Trainer"):
        base = import_module("transformers").TrainerCallback

    class ForecastCallback(_WithCurve, base):  # type: ignore[misc, valid-type]  # the base is known at run time only
        """Writes the curve of a run and stops it, see ``CurveCallback``; times its steps, see ``LoopTimer``."""

        on_epoch_begin = _tells("start_epoch")
        on_step_end = _tells("step")
        on_epoch_end = _tells("end_epoch")
        on_train_end = _tells("finish")

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            """Called by the trainer."""
            if subject is None or not state.is_world_process_zero:
                return
            accumulated = args.gradient_accumulation_steps
            self.timer = LoopTimer(
                records,
                subject=subject,
                model=kwargs.get("model"),
                batch_size=args.per_device_train_batch_size * accumulated,
                optimizer=str(args.optim).split(".")[-1].split("_")[0].lower(),
                precision="amp" if args.fp16 else "amp-bf16" if args.bf16 else None,
                compile=bool(args.torch_compile),
            )

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            """Called by the trainer with figures of training, and with those of an evaluation."""
            if not state.is_world_process_zero or not state.epoch:
                return
            found = {name: _number(value) for name, value in (logs or {}).items()}
            metrics = {name: value for name, value in found.items() if value is not None and name != "epoch"}
            columns = self.curve.log_file.columns
            is_evaluation = any(name.startswith("eval_") for name in metrics)
            if columns and not set(metrics) & set(columns) and not is_evaluation:
                return
            if args.eval_strategy != "no" and not is_evaluation:
                return  # rows of the curve are evaluations, with the figures of training that came last
            kept = {name: value for name, value in metrics.items() if not columns or name in columns}
            if kept and self.curve.log(float(state.epoch), step=int(state.global_step), **kept):
                control.should_training_stop = True

    return ForecastCallback(curve)


def _number(value: Any) -> float | None:
    """A finite number, also one that is written as text, as the Trainer logs it; None for anything else."""
    try:
        found = float(value)
    except (TypeError, ValueError):
        return None
    return found if math.isfinite(found) else None
