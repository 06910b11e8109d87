"""The watch of a process of the user's command: it times every step and every wait from inside PyTorch's own classes.

A window of steps is traced by ``torch.profiler`` and summed to four parts in the process itself.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import re
import sys
import time
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from forerun.base.process_control import die_with_parent
from forerun.script.patching import after_import, follow_arguments, length_of, surround, trainer_patches
from forerun.script.profiling.knob_hooks import KnobPatches
from forerun.script.profiling.messages import (
    STOPPED_STATUS,
    HookSettings,
    Recording,
    read_settings,
    trace_file,
)
from forerun.script.profiling.step_hooks import (
    LoaderSpan,
    StepClock,
    StepHooks,
    StepListener,
    tensor_shapes,
)

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
        self._clock.close(time.monotonic())
        if self._num_steps:
            self._look_at_thread(time.monotonic())
        self._write_all("end")

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
        self._write_all("stopped")
        sys.stdout.flush()
        sys.stderr.flush()
        # Raising inside a loader or an optimizer would run the script's own error handling, and its saving.
        os._exit(STOPPED_STATUS)

    def _write_all(self, end: str) -> None:
        """Writes what is known, and the way in which the process ends."""
        self._window.close()  # an open window crashes the interpreter's end
        self._write_window()
        self._recording.flush()
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            self._recording.write("device_memory", peak_bytes=torch.cuda.max_memory_allocated())
        self._recording.write(end, time_s=time.monotonic())

    def _write_window(self) -> None:
        if (sums := self._window.take_sums()) is not None:
            self._recording.write("window", **sums)

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
            num_batches=length_of(loader),
            num_samples=length_of(loader.dataset),
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
        self._recording.write("batch", shapes=list(tensor_shapes(batch)))

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


Spans = list[tuple[float, float]]

_WAIT_MARK = "forerun::wait"
_ORIGIN_MARK = "forerun::origin"
# Marks and nodes of the autograd engine enclose operators and the Python between them; all other events are operators.
_OPERATOR = re.compile(r"(?!autograd::|forerun::|profiler::)[\w.]+::")
_US = 1e-6


class Window:
    """Traces a number of steps after a warm-up; with a file, the trace is kept in Chrome's format."""

    def __init__(self, warmup_steps: int, num_steps: int, trace: Path | None = None) -> None:
        self._trace = trace
        self._first, self._last = warmup_steps, warmup_steps + num_steps
        self._profiler: Any = None
        self._sums: dict[str, Any] | None = None
        self._steps: Spans = []
        self._origin_s = 0.0

    @property
    def is_open(self) -> bool:
        """True while steps are traced."""
        return self._profiler is not None

    def turn(self, num_steps: int, begin_s: float, end_s: float) -> bool:
        """Opens or closes the window after a step; True if that took time.

        Args:
            num_steps: Number of steps so far.
            begin_s: Begin of the last step, monotonic clock [s].
            end_s: End of the last step [s].
        """
        if self.is_open:
            self._steps.append((begin_s, end_s))
        if num_steps == self._first and self._last > self._first:
            self._open()
            return True
        if self.is_open and num_steps >= self._last:
            self.close()
            return True
        return False

    @contextlib.contextmanager
    def mark_wait(self) -> Iterator[None]:
        """Marks a wait for a loader on the traced timeline."""
        if not self.is_open:
            yield
            return
        with sys.modules["torch"].autograd.profiler.record_function(_WAIT_MARK):
            yield

    def close(self) -> None:
        """Ends the window and sums its parts."""
        if self._profiler is None:
            return
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        if self._trace is not None:
            profiler.export_chrome_trace(str(self._trace))
        if not self._steps:
            return
        events = profiler.events()
        # Traced times count from another moment than the clock of the steps; the first mark links the two.
        origin = next((e.time_range.start * _US for e in events if e.name == _ORIGIN_MARK), None)
        if origin is None:
            return
        steps = [
            (begin - self._origin_s + origin, end - self._origin_s + origin) for begin, end in self._steps
        ]
        self._sums = {
            "wall_s": _length(steps),
            "num_steps": len(steps),
            **timeline_sums([event for event in events if _starts_in(event, steps)]),
        }

    def take_sums(self) -> dict[str, Any] | None:
        """Sums of a window that has closed since the last call."""
        sums, self._sums = self._sums, None
        return sums

    def _open(self) -> None:
        self._profiler = started_profiler(acc_events=True, record_shapes=self._trace is not None)
        if self._profiler is None:
            return
        self._origin_s = time.monotonic()
        with sys.modules["torch"].autograd.profiler.record_function(_ORIGIN_MARK):
            pass


def started_profiler(**options: Any) -> Any:
    """A running ``torch.profiler`` of the processor and of a GPU in use; None if the script traces itself.

    Args:
        options: Further arguments of ``torch.profiler.profile``.
    """
    from torch.profiler import (
        ProfilerActivity,
        profile,
    )  # the script has imported torch before its first step

    activities = [ProfilerActivity.CPU]
    if sys.modules["torch"].cuda.is_initialized():
        activities.append(ProfilerActivity.CUDA)
    try:
        profiler = profile(activities=activities, **options)
        profiler.start()
    except RuntimeError:  # two tracers exclude each other
        return None
    return profiler


def _starts_in(event: Any, steps: Spans) -> bool:
    """True if an event belongs to a step, and not to the validation or the saving between two epochs."""
    start_s = event.time_range.start * _US
    index = bisect_right(steps, (start_s, math.inf)) - 1
    return index >= 0 and start_s < steps[index][1]


def timeline_sums(events: Iterable[Any]) -> dict[str, Any]:
    """Seconds of a traced timeline: kernels, copies to the device, waits not hidden behind either.

    On a processor a kernel is an operator outside the loader. On a GPU it is a kernel the device ran, and a wait
    counts only while the device had nothing to run.
    """
    kernels: Spans = []
    copies: Spans = []
    operators: Spans = []
    waits: Spans = []
    totals: dict[str, float] = {}
    for event in events:
        span = (event.time_range.start * _US, event.time_range.end * _US)
        name = event.name
        if event.device_type.name == "CPU":
            if name == _WAIT_MARK:
                waits.append(span)
            elif _OPERATOR.match(name):
                operators.append(span)
                totals[name] = totals.get(name, 0.0) + event.self_cpu_time_total * _US
        elif not getattr(event, "is_user_annotation", False):
            (copies if "HtoD" in name else kernels).append(span)
            totals[name] = totals.get(name, 0.0) + span[1] - span[0]
    on_device = bool(kernels)
    # The loader's own operators run in the same thread, and are waited for.
    busy = kernels if on_device else minus(covered(operators), covered(waits))
    busy, copied = covered(busy), covered(copies)
    copied_alone = minus(copied, busy)
    waited = minus(minus(covered(waits), busy), copied_alone) if on_device else covered(waits)
    return {
        "kernels_s": _length(busy),
        "copy_s": _length(copied_alone),
        "wait_s": _length(waited),
        "on_device": on_device,
        "top": sorted(totals.items(), key=lambda item: -item[1])[:8],
    }


def covered(spans: Sequence[tuple[float, float]]) -> Spans:
    """The union of spans, sorted and disjoint.

    >>> covered([(2.0, 3.0), (0.0, 1.0), (0.5, 1.5)])
    [(0.0, 1.5), (2.0, 3.0)]
    """
    union: Spans = []
    for begin, end in sorted(spans):
        if union and begin <= union[-1][1]:
            union[-1] = (union[-1][0], max(union[-1][1], end))
        else:
            union.append((begin, end))
    return union


def minus(spans: Spans, holes: Spans) -> Spans:
    """Parts of spans outside holes; spans and holes are sorted and disjoint, as from ``covered``.

    >>> minus([(0.0, 4.0)], [(1.0, 2.0), (3.0, 5.0)])
    [(0.0, 1.0), (2.0, 3.0)]
    """
    left: Spans = []
    first = 0
    for begin, end in spans:
        while first < len(holes) and holes[first][1] <= begin:
            first += 1
        at, index = begin, first
        while index < len(holes) and holes[index][0] < end:
            if holes[index][0] > at:
                left.append((at, holes[index][0]))
            at = max(at, holes[index][1])
            index += 1
        if at < end:
            left.append((at, end))
    return left


def _length(spans: Spans) -> float:
    return sum(end - begin for begin, end in spans)


def install(settings_file: Path) -> None:
    """Watches this process from now on; imports only modules that the script imports itself."""
    settings = read_settings(settings_file, HookSettings)
    die_with_parent(settings.parent_pid)
    recording = Recording(Path(settings.folder))
    recording.write(
        "process",
        pid=os.getpid(),
        time_s=time.monotonic(),
        rank=os.environ.get("RANK"),
        executable=sys.executable,
    )
    watch = Watch(settings, recording)
    patches = KnobPatches(knobs=dict(settings.knobs), recording=recording)

    def loaders(module: object) -> None:
        patches.loaders(module)
        watch.hooks.loaders(module)

    def optimizers(module: object) -> None:
        patches.optimizers(module)
        watch.hooks.optimizers(module)

    after_import(
        {
            "argparse": partial(
                follow_arguments,
                known=lambda options: recording.write("options", options=options),
                parsed=lambda options: recording.write("arguments", options=options),
            ),
            "PIL.ImageFile": name_unreadable_images,
            **watch.hooks.patches(),
            **trainer_patches(watch.job_seen),
            "torch.utils.data.dataloader": loaders,
            "torch.optim.optimizer": optimizers,
            "torch.nn.modules.module": patches.modules,
            "PIL.Image": patches.images,
        }
    )
    atexit.register(watch.finish)


def name_unreadable_images(module: Any) -> None:
    """Wraps ``PIL.ImageFile.ImageFile.load``: an error of decoding gets a note with the file.

    Notes are printed below the error (PEP 678), also below an error that a worker of a loader passes on.
    """

    @surround(module.ImageFile, "load")
    def named_load(load: Any, image: Any) -> Any:
        # An image opened through a file object knows its name only while the file is open.
        name = getattr(image, "filename", "") or getattr(getattr(image, "fp", None), "name", "")
        try:
            return load(image)
        except (OSError, SyntaxError, ValueError) as error:
            if name and not any(name in note for note in getattr(error, "__notes__", ())):
                error.add_note(f"in the image '{name}'")
            raise
