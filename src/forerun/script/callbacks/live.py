"""``forerun.watch``: a live forecast of a job's end, from inside the training script.

    import forerun

    forerun.watch(model)  # after the model is wrapped and moved, before training

It prints a line such as

    forerun: step 120 of 1,125, 64 ms a step: the job ends at 15:42:10, in 1.07 min (58.2 s to 1.2 min)
"""

from __future__ import annotations

import contextlib
import datetime
import math
import sys
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from forerun.base.errors import InvalidSetupError, UsageError
from forerun.base.kept import temporary_folder
from forerun.base.units import format_duration_s
from forerun.script.capturing.job import EPOCH_NAMES, SURE_STEP_NAMES, named_length
from forerun.script.patching import after_import, length_of, trainer_patches
from forerun.script.profiling.step_hooks import LoaderSpan, StepClock, StepHooks, StepListener

if TYPE_CHECKING:
    from forerun.prediction.estimate import Estimate
    from forerun.script.diagnosis.observation import Observation

_MOST_STEPS = 400
_FEWEST_STEPS = 10
_NUM_BLOCKS = 10
_TRACED_STEPS = 6
"""Steps of the one window that is traced of a slow run; the first is left out."""
_MOST_CAUSES = 3


def watch(
    model: Any,
    *,
    num_steps: int | None = None,
    num_epochs: float | None = None,
    every_s: float = 30.0,
    stream: IO[str] | None = None,
    predicted: Estimate | None = None,
) -> LiveForecast:
    """Prints, from time to time, when the training of a model will end; returns the forecast, which can be asked too.

    The steps are those of the optimizers that hold the model's parameters. The length of the job is what is given here,
    else what a trainer (Hugging Face, Lightning) says, else a usual name (``epochs``, ``max_steps``) among the script's
    variables or in its ``args``. Without any of them, the end of the epoch is forecast.

    Args:
        model: Module that is trained.
        num_steps: Number of optimizer steps of the job; None if it is not known.
        num_epochs: Number of epochs of the job; None if it is not known.
        every_s: Time between two lines [s].
        stream: Where lines go; standard error if None.
        predicted: Prediction of the step. Once steps are above its interval, some are traced, and lines say the causes.

    Raises:
        InvalidSetupError: A number is not above zero, or the model has no parameter to train.
    """
    for name, value in (("num_steps", num_steps), ("num_epochs", num_epochs), ("every_s", every_s)):
        if value is not None and not value > 0:
            raise InvalidSetupError(f"expected {name} above zero, got {value}")
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        raise InvalidSetupError("expected a model with parameters to train, got one without")
    found = LiveForecast(
        {id(parameter) for parameter in trained},
        num_steps,
        num_epochs,
        every_s,
        stream or sys.stderr,
        predicted,
    )
    after_import({**found.hooks.patches(), **trainer_patches(found.job_seen)})
    return found


class LiveForecast(StepListener):
    """The forecast of a job's end, from the steps seen so far; ``watch`` makes it.

    The time left is the steps left times the mean of the last steps, and, for each epoch left, the time between epochs
    so far. Its interval is that of means of blocks of ten: steps in a row are alike.
    """

    def __init__(
        self,
        parameters: set[int],
        num_steps: float | None,
        num_epochs: float | None,
        every_s: float,
        stream: IO[str],
        predicted: Estimate | None = None,
    ) -> None:
        self._parameters = parameters
        self._given_steps, self._given_epochs = num_steps, num_epochs
        self._every_s, self._stream = every_s, stream
        self.hooks = StepHooks(StepClock(self._step, self._rest), self)
        self._durations: deque[float] = deque(maxlen=_MOST_STEPS)
        self._waits: deque[float] = deque(maxlen=_MOST_STEPS)
        self._predicted = predicted
        self._window: Any = None
        self._window_ends = 0.0
        self._seen: Observation | None = None
        self._num_batches_of_epoch: int | None = None
        self._job: Mapping[str, Any] = {}
        self._num_batches = 0
        self._between_s = 0.0
        self._printed_s = time.monotonic()
        self._is_closed = False
        self.num_done = 0

    def close(self) -> None:
        """Prints nothing any more, and traces no step that may still come."""
        self._is_closed = True
        if self._window is not None:
            self._close_window()

    def is_of_interest(self, optimizer: Any) -> bool:
        """True if an optimizer holds a parameter of the model."""
        groups = optimizer.param_groups
        return any(id(parameter) in self._parameters for group in groups for parameter in group["params"])

    def loader_seen(self, number: int, loader: Any) -> None:
        """Notes the length of the first loader, which is that of training."""
        if self._num_batches_of_epoch is None:
            self._num_batches_of_epoch = length_of(loader)

    def job_seen(self, **known: Any) -> None:
        """Notes what a trainer says about the length of the job."""
        self._job = known

    @property
    def steps_per_epoch(self) -> float | None:
        """Steps of an epoch; None if they are not known."""
        if (known := self._job.get("steps_per_epoch")) is not None:
            return float(known)
        if self._num_batches_of_epoch is None or not self.num_done:
            return None
        return max(1.0, self._num_batches_of_epoch / max(1, round(self._num_batches / self.num_done)))

    @property
    def num_steps(self) -> float | None:
        """Steps of the whole job; None if they are not known."""
        if self._given_steps is not None:
            return float(self._given_steps)
        epochs = self._given_epochs
        if epochs is None and self._job.get("num_steps") is not None:
            return float(self._job["num_steps"])
        if epochs is None:
            if (most := named_length(None, SURE_STEP_NAMES)) is not None:
                return most.value
            named = named_length(None, EPOCH_NAMES)
            epochs = None if named is None else named.value
        per_epoch = self.steps_per_epoch
        return None if epochs is None or per_epoch is None else epochs * per_epoch

    def time_left_s(self) -> tuple[float, float, float] | None:
        """Time until the job ends, with the ends of its interval [s]; None while it is not known."""
        total = self.num_steps
        return None if total is None else self._time_of_s(max(0.0, total - self.num_done))

    def line(self) -> str:
        """The forecast as a line of text."""
        if len(self._durations) < _FEWEST_STEPS:
            return f"forerun: step {self.num_done:,}; a forecast needs {_FEWEST_STEPS} steps"
        total, per_epoch = self.num_steps, self.steps_per_epoch
        step = format_duration_s(float(np.mean(self._durations)))
        if total is not None:
            what, left = f"step {self.num_done:,} of {total:,.0f}", self.time_left_s()
            name = "job"
        elif per_epoch is not None:
            what, name = f"step {self.num_done:,}", "epoch"
            left = self._time_of_s(per_epoch - self.num_done % per_epoch)
        else:
            return f"forerun: step {self.num_done:,}, {step} a step; the length of the job is not known: give num_steps"
        assert left is not None
        end = datetime.datetime.now().astimezone() + datetime.timedelta(seconds=left[0])
        value, low, high = (format_duration_s(seconds) for seconds in left)
        tail = "" if name == "job" else "; the length of the job is not known: give num_epochs"
        return (
            f"forerun: {what}, {step} a step{self.slowness()}: the {name} ends at {end:%H:%M:%S}, in {value} "
            f"({low} to {high}){tail}"
        )

    def slowness(self) -> str:
        """Words about steps above the predicted interval, with the causes in order; empty of others."""
        if not self._is_slow:
            return ""
        from forerun.script.diagnosis.causes import causes_of
        from forerun.script.diagnosis.observation import Observation

        assert self._predicted is not None
        step_s, wait_s = float(np.mean(self._durations)), float(np.mean(self._waits))
        # Without a trace a loop sees its wait for batches alone.
        seen = self._seen or Observation(step_s=step_s, loader_s=wait_s)
        found = causes_of(replace(seen, estimate=self._predicted))
        ratio = f" ({step_s / self._predicted.step_time_s.value:.2g} times the prediction"
        if self._seen is None:
            return f"{ratio}; {found[0].evidence})" if found else f"{ratio}; forerun diagnose tells why)"
        words = [f"{cause.cause}: {cause.evidence}" for cause in found[:_MOST_CAUSES]]
        return f"{ratio}; {'; '.join(words) or 'the device is busy'})"

    @property
    def _is_slow(self) -> bool:
        """True if steps take longer than the predicted interval."""
        if self._predicted is None or not self._durations:
            return False
        return bool(np.mean(self._durations) > self._predicted.step_time_s.high)

    def _close_window(self) -> None:
        """Reads the traced steps as ``forerun diagnose --trace`` would."""
        from forerun.script.diagnosis.observation import observe
        from forerun.script.diagnosis.trace import read_trace

        window, self._window = self._window, None
        window.stop()
        with temporary_folder() as folder, contextlib.suppress(UsageError):
            path = Path(folder) / "trace.json"
            window.export_chrome_trace(str(path))
            self._seen = observe([read_trace(path)])

    def _time_of_s(self, num_left: float) -> tuple[float, float, float] | None:
        if len(self._durations) < _FEWEST_STEPS:
            return None
        steps, per_epoch = np.asarray(self._durations), self.steps_per_epoch
        blocks = np.asarray(
            [block.mean() for block in np.array_split(steps, min(_NUM_BLOCKS, len(steps) // 2))]
        )
        epochs_left = num_left / per_epoch if per_epoch else 0.0
        between_s = epochs_left * self._between_s / max(1.0, self.num_done / per_epoch) if per_epoch else 0.0
        # Single steps vary more than their sum; means of independent steps less, since slow stretches last for many.
        low, high = np.quantile(blocks, [0.05, 0.95])
        mean = float(steps.mean())
        return (
            num_left * mean + between_s,
            num_left * float(low) + between_s,
            num_left * float(high) + between_s,
        )

    def _step(self, span: LoaderSpan) -> None:
        self.num_done += 1
        self._num_batches += span.num_batches
        # The first step pays for starting, a traced one for its trace.
        if self.num_done > 1 and self._window is None:
            self._durations.append(span.end_s - span.begin_s)
            self._waits.append(span.wait_s)
        is_traced = self._window is not None and self.num_done >= self._window_ends
        if is_traced:
            self._close_window()
        is_due = span.end_s - self._printed_s >= self._every_s or self.num_done == _FEWEST_STEPS + 1
        if is_traced or (is_due and len(self._durations) >= _FEWEST_STEPS and not self._is_closed):
            self._printed_s = span.end_s
            print(self.line(), file=self._stream, flush=True)
            if self._is_slow and not self._window_ends:
                from forerun.script.profiling.watch import started_profiler

                self._window = started_profiler()
                # A trace that outlives the job would hold all that the process does after it.
                self._window_ends = min(self.num_done + _TRACED_STEPS, self.num_steps or math.inf)

    def _rest(self, span: LoaderSpan) -> None:
        if self.num_done:
            self._between_s += span.end_s - span.begin_s
