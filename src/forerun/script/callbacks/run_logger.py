"""The predicted step beside the measured one, in the logger that a run has: TensorBoard, MLflow, W&B or Lightning's."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

from forerun.base.errors import UsageError
from forerun.prediction.estimate import Estimate


class RunLogger:
    """Logs the measured time of a step beside the predicted one as a run goes on.

    The measured step is the median of ``every`` times between two calls, so logging and validation hardly count.

    Args:
        estimate: Answer of ``forerun.predict``.
        logger: A ``SummaryWriter``, the module ``mlflow``, a run of W&B, or a logger of Lightning.
        every: Number of steps between two rows of the log.

    Raises:
        UsageError: The logger has none of their interfaces.

    Examples:
        >>> class Writer:
        ...     def add_scalar(self, name, value, step): print(name, step)
        >>> import forerun
        >>> log = RunLogger(forerun.predict("torchvision:resnet18", device="l4"), Writer(), every=1)
        >>> log.step(); log.step()
        forerun/step_time_s 1
        forerun/predicted_step_time_s 1
        forerun/predicted_step_time_low_s 1
        forerun/predicted_step_time_high_s 1
        forerun/measured_over_predicted 1
    """

    def __init__(self, estimate: Estimate, logger: Any, *, every: int = 20) -> None:
        self._write = _writer(logger)
        self._predicted = estimate.step_time_s
        self._every = max(1, every)
        self._times_s: list[float] = []
        self._last_s: float | None = None
        self.num_steps = 0

    def step(self) -> None:
        """Ends a step; call it once after each update."""
        now = time.perf_counter()
        if self._last_s is not None:
            self._times_s.append(now - self._last_s)
            self.num_steps += 1
        self._last_s = now
        if len(self._times_s) == self._every:
            measured_s = median(self._times_s)
            row = {
                "forerun/step_time_s": measured_s,
                "forerun/predicted_step_time_s": self._predicted.value,
                "forerun/predicted_step_time_low_s": self._predicted.low,
                "forerun/predicted_step_time_high_s": self._predicted.high,
                "forerun/measured_over_predicted": measured_s / self._predicted.value,
            }
            self._write(row, self.num_steps)
            self._times_s.clear()


def _writer(logger: Any) -> Callable[[Mapping[str, float], int], None]:
    """The call that writes a row of figures to a logger."""
    if hasattr(logger, "add_scalar"):

        def to_tensorboard(row: Mapping[str, float], step: int) -> None:
            for name, value in row.items():
                logger.add_scalar(name, value, step)

        return to_tensorboard
    if hasattr(logger, "log_metrics"):  # MLflow, and the loggers of Lightning
        return lambda row, step: logger.log_metrics(dict(row), step=step)
    if hasattr(logger, "log"):  # W&B: the row joins the script's next row, whose step it must not advance
        return lambda row, step: logger.log(dict(row), commit=False)
    raise UsageError(
        f"expected a SummaryWriter, mlflow, a run of W&B or a logger of Lightning, got {type(logger).__name__}"
    )
