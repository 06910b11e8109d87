"""A callback for the Trainer of Hugging Face: it writes curve and record of a run, and may stop the training."""

from __future__ import annotations

import math
from importlib import import_module
from pathlib import Path
from typing import Any

from forerun.base.errors import MissingExtraError
from forerun.script.callbacks.curve_callback import CurveCallback
from forerun.script.callbacks.loop_timer import LoopTimer

__all__ = ["trainer_callback"]


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
    try:
        base = import_module("transformers").TrainerCallback
    except ModuleNotFoundError as error:
        raise MissingExtraError("the callback for the Trainer", "hf") from error
    return _callback_class(base)(curve, records, subject)


def _callback_class(base: type[Any]) -> type[Any]:
    class ForecastCallback(base):  # type: ignore[misc]  # the base is known at run time only
        """Writes the curve of a run and stops it, see ``CurveCallback``; times its steps, see ``LoopTimer``."""

        def __init__(self, curve: CurveCallback, records: str | Path | None, subject: str | None) -> None:
            super().__init__()
            self.curve = curve
            self.timer: LoopTimer | None = None
            self._records, self._subject = records, subject

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            """Called by the trainer."""
            if self._subject is None or not state.is_world_process_zero:
                return
            accumulated = args.gradient_accumulation_steps
            self.timer = LoopTimer(
                self._records,
                subject=self._subject,
                model=kwargs.get("model"),
                batch_size=args.per_device_train_batch_size * accumulated,
                optimizer=str(args.optim).split(".")[-1].split("_")[0].lower(),
                precision="amp" if args.fp16 else "amp-bf16" if args.bf16 else None,
                compile=bool(args.torch_compile),
            )

        def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            """Called by the trainer."""
            if self.timer is not None:
                self.timer.start_epoch()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            """Called by the trainer after an optimizer step."""
            if self.timer is not None:
                self.timer.step()

        def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            """Called by the trainer."""
            if self.timer is not None:
                self.timer.end_epoch()

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

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            """Called by the trainer; writes the record."""
            if self.timer is not None:
                self.timer.finish()

    return ForecastCallback


def _number(value: Any) -> float | None:
    """A finite number, also one that is written as text, as the Trainer logs it; None for anything else."""
    try:
        found = float(value)
    except (TypeError, ValueError):
        return None
    return found if math.isfinite(found) else None
