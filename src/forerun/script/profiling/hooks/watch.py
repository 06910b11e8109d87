"""Times every step and every wait of a PyTorch process from inside its loader and optimizer classes."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path
from typing import Any

from forerun.script.profiling.hooks.messages import STOPPED_STATUS, HookSettings, Recording, trace_file
from forerun.script.profiling.hooks.step_hooks import (
    LoaderSpan,
    StepClock,
    StepHooks,
    StepListener,
    tensor_shapes,
)
from forerun.script.profiling.hooks.window import Window

__all__ = ["Watch"]

_LOOK_EVERY_S = 0.5


class Watch(StepListener):
    """Writes the spans of a ``StepClock`` that hooks feed."""

    def __init__(self, settings: HookSettings, recording: Recording) -> None:
        self._settings = settings
        self._recording = recording
        self._pid = os.getpid()
        self._clock = StepClock(self._step, self._rest)
        self._window = Window(
            settings.warmup_steps,
            settings.window_steps,
            trace_file(Path(settings.folder), os.getpid()) if settings.keeps_trace else None,
        )
        self.hooks = StepHooks(self._clock, self)
        self._num_steps = 0
        self._first_step_s: float | None = None
        self._looked_s = 0.0

    def finish(self) -> None:
        """Writes everything known when the process ends in the ordinary way."""
        if os.getpid() != self._pid:
            return
        self._clock.finish(time.monotonic())
        if self._num_steps:
            self._look_at_thread(time.monotonic())
        self._window.close()  # an open window crashes the interpreter's end
        self._write_window()
        self._recording.flush()
        self._write_memory()
        self._recording.write("end", time_s=time.monotonic())

    def _step(self, interval: LoaderSpan) -> None:
        is_traced = self._window.is_open
        self._recording.add("steps", _row(interval, is_traced))
        self._num_steps += 1
        if interval.end_s - self._looked_s >= _LOOK_EVERY_S:
            self._look_at_thread(interval.end_s)
        if self._first_step_s is None:
            self._first_step_s = interval.end_s
        if self._window.turn(self._num_steps, interval.begin_s, interval.end_s):
            self._write_window()
            now_s = time.monotonic()
            self._recording.add("own", [interval.end_s, now_s])
            self._clock.skip(now_s)
        if self._is_enough(interval.end_s):
            self._look_at_thread(interval.end_s)
            self._stop()

    def _rest(self, interval: LoaderSpan) -> None:
        self._recording.add("rest", _row(interval, is_traced=False))

    def _is_enough(self, now_s: float) -> bool:
        settings = self._settings
        if settings.stop_after_steps is not None and self._num_steps >= settings.stop_after_steps:
            return True
        return (
            settings.stop_after_s is not None
            and self._first_step_s is not None
            and now_s - self._first_step_s >= settings.stop_after_s
        )

    def _stop(self) -> None:
        self._window.close()
        self._write_window()
        self._recording.flush()
        self._write_memory()
        self._recording.write("stopped", time_s=time.monotonic())
        sys.stdout.flush()
        sys.stderr.flush()
        # Raising inside a loader or an optimizer would run the script's own error handling, and its saving.
        os._exit(STOPPED_STATUS)

    def _write_window(self) -> None:
        if (sums := self._window.take_sums()) is not None:
            self._recording.write("window", **sums)

    def _write_memory(self) -> None:
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            self._recording.write("device_memory", peak_bytes=torch.cuda.max_memory_allocated())

    def mark_wait(self) -> contextlib.AbstractContextManager[None]:
        """Marks a wait on the traced timeline."""
        return self._window.mark_wait()

    def loader_seen(self, number: int, loader: Any) -> None:
        """Writes the settings of a loader."""
        self._recording.write(
            "loader",
            loader=number,
            batch_size=loader.batch_size,
            num_workers=loader.num_workers,
            pin_memory=loader.pin_memory,
            prefetch_factor=loader.prefetch_factor,
            persistent_workers=loader.persistent_workers,
            num_batches=_length(loader),
            num_samples=_length(loader.dataset),
        )

    def optimizer_seen(self, number: int, optimizer: Any) -> None:
        """Writes the settings of an optimizer."""
        group = optimizer.param_groups[0]
        self._write_optimizer(type(optimizer).__name__, group.get("lr"), group["params"][0])

    def backward_seen(self, tensor: Any) -> None:
        """Writes the device of a script that makes no optimizer."""
        self._write_optimizer(None, None, tensor)

    def batch_seen(self, batch: Any) -> None:
        """Writes the shapes of a batch."""
        self._recording.write("batch", shapes=tensor_shapes(batch))

    def job_seen(self, **known: Any) -> None:
        """Writes what a framework's trainer knows about its job: ``num_steps``, ``num_epochs``, ``steps_per_epoch``."""
        if os.getpid() == self._pid:
            self._recording.write("job", **known)

    def _write_optimizer(self, name: str | None, lr: Any, tensor: Any) -> None:
        self._recording.write(
            "optimizer",
            name=name,
            lr=lr,
            device=str(tensor.device),
            num_threads=sys.modules["torch"].get_num_threads(),
        )

    def _look_at_thread(self, now_s: float) -> None:
        """Adds the time that the training thread has run so far, and has waited for a free core."""
        self._looked_s = now_s
        self._recording.add("thread", [now_s, time.thread_time(), _waited_for_core_s()])


def _waited_for_core_s() -> float:
    """Time for which this thread was ready to run and had no core [s]; -1 where the system does not tell."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text(encoding="ascii").split()[1]) * 1e-9
    except (OSError, ValueError, IndexError):
        return -1.0


def _row(interval: LoaderSpan, is_traced: bool) -> list[float]:
    return [
        interval.begin_s,
        interval.end_s,
        interval.wait_s,
        interval.num_samples,
        interval.loader,
        int(interval.starts_epoch),
        int(is_traced),
        interval.num_batches,
    ]


def _length(sized: Any) -> int | None:
    try:
        return len(sized)
    except (TypeError, NotImplementedError):  # a stream has no length
        return None
