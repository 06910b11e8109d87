"""The watch of a process of the user's command: it times every step and every wait from inside PyTorch's own classes.

A window of steps is traced by ``torch.profiler`` into a file, which is read when the command has ended.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

from forerun.base.process_control import die_with_parent
from forerun.script.patching import after_import, follow_arguments, length_of, surround, trainer_patches
from forerun.script.profiling.knob_hooks import KnobPatches
from forerun.script.profiling.messages import (
    ORIGIN_MARK,
    STOPPED_STATUS,
    WAIT_MARK,
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
_SAVES = {
    "torch.serialization": "save",
    "safetensors.torch": "save_file",
    "torch.distributed.checkpoint.state_dict_saver": "save",
}
"""Functions that write checkpoints, by their modules."""
_row = attrgetter(*(each.name for each in fields(LoaderSpan)))


class Watch(StepListener):
    """Writes the spans of a ``StepClock`` that hooks feed."""

    def __init__(self, settings: HookSettings, recording: Recording) -> None:
        self._settings = settings
        self._recording = recording
        self._pid = os.getpid()
        self._clock = StepClock(self._step, lambda interval: recording.add("rest", _row(interval)))
        self._window = Window(
            settings.warmup_steps,
            settings.window_steps,
            trace_file(Path(settings.folder), os.getpid()),
        )
        self.hooks = StepHooks(self._clock, self)
        self._collects_since_s = 0.0
        gc.callbacks.append(self._collected)
        self._num_steps = 0
        self._first_step_s: float | None = None
        self._looked_s = 0.0
        self._statm = -1
        with contextlib.suppress(OSError):
            # Kept open: opening it anew would take longer than the smallest steps may be lengthened by.
            self._statm = os.open("/proc/self/statm", os.O_RDONLY)

    def finish(self) -> None:
        """Writes everything known when the process ends in the ordinary way."""
        if os.getpid() != self._pid:
            return
        self._clock.finish(time.monotonic())
        if self._num_steps:
            self._look_at_thread(time.monotonic())
        self._write_all("end")

    def _step(self, interval: LoaderSpan) -> None:
        interval.is_traced = self._window.is_open
        interval.memory_bytes, interval.device_bytes = self._memory_bytes()
        self._recording.add("steps", _row(interval))
        self._num_steps += 1
        if interval.end_s - self._looked_s >= _LOOK_EVERY_S:
            self._look_at_thread(interval.end_s)
        if self._first_step_s is None:
            self._first_step_s = interval.end_s
        if self._window.turn(self._num_steps):
            now_s = time.monotonic()
            self._recording.add("own", [interval.end_s, now_s])
            self._clock.skip(now_s)
        if self._is_enough(interval.end_s):
            self._look_at_thread(interval.end_s)
            self._stop()

    def saves(self, name: str) -> Callable[[Any], None]:
        """Patch that times a function of a module which saves."""

        def patch(module: Any) -> None:
            @surround(module, name)
            def timed(save: Any, *args: Any, **kwargs: Any) -> Any:
                begin_s = time.monotonic()
                try:
                    return save(*args, **kwargs)
                finally:
                    self._hold("saving_s", begin_s)

        return patch

    def _collected(self, phase: str, info: object) -> None:
        """Called by Python when a garbage collection begins and ends."""
        if phase == "start":
            self._collects_since_s = time.monotonic()
        else:
            self._hold("collecting_s", self._collects_since_s)

    def _hold(self, name: str, begin_s: float) -> None:
        # What other threads do, such as a save in the background, does not hold the loop up.
        if threading.current_thread() is threading.main_thread():
            self._clock.hold(name, time.monotonic() - begin_s)

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
        self._recording.flush()
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            device = torch.cuda.get_device_properties(torch.cuda.current_device())
            self._recording.write(
                "device_memory",
                peak_bytes=torch.cuda.max_memory_allocated(),
                whole_bytes=device.total_memory,
            )
        self._recording.write(end, time_s=time.monotonic())

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

    def optimizer_seen(self, optimizer: Any, tensor: Any = None) -> None:
        """Writes the settings of an optimizer, or the device of a script that makes none."""
        group = {"params": [tensor]} if optimizer is None else optimizer.param_groups[0]
        self._recording.write(
            "optimizer",
            name=None if optimizer is None else type(optimizer).__name__,
            lr=group.get("lr"),
            device=str(group["params"][0].device),
            num_threads=sys.modules["torch"].get_num_threads(),
        )

    def batch_seen(self, batch: Any) -> None:
        """Writes the shapes of a batch."""
        self._recording.write("batch", shapes=list(tensor_shapes(batch)))

    def job_seen(self, **known: Any) -> None:
        """Writes what a framework's trainer knows about its job: ``num_steps``, ``num_epochs``, ``steps_per_epoch``."""
        if os.getpid() == self._pid:
            self._recording.write("job", **known)

    def _memory_bytes(self) -> tuple[int, int]:
        """Memory of this process's own, without mapped files, and of its tensors on a GPU; 0 where nothing tells it."""
        own_bytes = 0
        with contextlib.suppress(OSError, ValueError):
            _, resident, shared, *_ = os.pread(self._statm, 256, 0).split()
            own_bytes = (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")
        torch = sys.modules.get("torch")
        is_on_gpu = torch is not None and torch.cuda.is_initialized()
        return own_bytes, sys.modules["torch"].cuda.memory_allocated() if is_on_gpu else 0

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


class Window:
    """Traces a number of steps after a warm-up into a file in Chrome's format."""

    def __init__(self, warmup_steps: int, num_steps: int, trace: Path) -> None:
        self._trace = trace
        self._first, self._last = warmup_steps, warmup_steps + num_steps
        self._profiler: Any = None

    @property
    def is_open(self) -> bool:
        """True while steps are traced."""
        return self._profiler is not None

    def turn(self, num_steps: int) -> bool:
        """Opens or closes the window after a number of steps; True if that took time."""
        if num_steps == self._first and self._last > self._first:
            self._open()
            return True
        if self.is_open and num_steps >= self._last:
            self.close()
            gc.collect()  # else a later step would free what the tracer left behind
            with contextlib.suppress(AttributeError, OSError, TypeError):
                ctypes.CDLL(None).malloc_trim(
                    0
                )  # else later steps would fill it again, and hide that they grow
            return True
        return False

    def mark_wait(self) -> contextlib.AbstractContextManager[None]:
        """Marks a wait for a loader on the traced timeline."""
        return self._mark(WAIT_MARK) if self.is_open else contextlib.nullcontext()

    def close(self) -> None:
        """Ends the window and writes its trace."""
        if self._profiler is None:
            return
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        profiler.export_chrome_trace(str(self._trace))

    def _open(self) -> None:
        self._profiler = started_profiler()
        if self._profiler is None:
            return
        # Traced times count from another moment than the clock of the steps; this mark links the two.
        with self._mark(f"{ORIGIN_MARK}{time.monotonic()}"):
            pass

    @staticmethod
    def _mark(name: str) -> contextlib.AbstractContextManager[None]:
        profiler: Any = sys.modules["torch"].autograd.profiler
        made: contextlib.AbstractContextManager[None] = profiler.record_function(name)
        return made


def started_profiler() -> Any:
    """A running ``torch.profiler`` of the processor and of a GPU in use; None if the script traces itself."""
    # The script has imported torch before its first step.
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU]
    if sys.modules["torch"].cuda.is_initialized():
        activities.append(ProfilerActivity.CUDA)
    try:
        profiler = profile(activities=activities, record_shapes=True)
        profiler.start()
    except RuntimeError:  # two tracers exclude each other
        return None
    return profiler


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
            **{module: watch.saves(name) for module, name in _SAVES.items()},
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
