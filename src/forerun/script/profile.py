"""Profiles a user's training command, and advises the one change that is worth most."""

from __future__ import annotations

import math
import shutil
import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from forerun.base.errors import FailureError, ScriptError, UsageError
from forerun.base.kept import temporary_folder
from forerun.question.devices import describe_host
from forerun.question.devices.local import first_device, only_device
from forerun.script.command_words import check_command
from forerun.script.diagnosis.causes import Cause, busy_device, causes_of
from forerun.script.diagnosis.observation import Observation, observe, of_profile
from forerun.script.diagnosis.trace import read_trace
from forerun.script.profiling.launch import Launch, launch
from forerun.script.profiling.messages import HookSettings, trace_file
from forerun.script.profiling.profile import Profile, summarise_run


def profile(
    command: Sequence[str],
    *,
    num_steps: int | None = None,
    window_steps: int = 5,
    warmup_steps: int = 3,
    epochs: float | None = None,
    timeout_s: float | None = None,
    folder: Path | None = None,
    trace: Path | None = None,
    device_index: str | None = None,
    stop_after_s: float | None = None,
    echo: IO[str] | None = None,
) -> Profile:
    """Runs a training command unchanged and shows where the time of its steps goes.

    Hooks are installed in its Python processes when they start; its files are not touched.

    Args:
        command: Words of the command, such as ``["python", "train.py", "--epochs", "3"]``.
        num_steps: Number of steps after which the command is stopped; None to let it end.
        window_steps: Number of steps under ``torch.profiler``; 0 for none.
        warmup_steps: Number of warm-up steps before the profiled ones.
        epochs: Epochs of the job, if the arguments of the command do not say it.
        timeout_s: Longest time of the run [s].
        folder: Folder for the raw recordings of all processes; None not to keep them.
        trace: File for the window's trace, ``.json``, that chrome://tracing and Perfetto open; or a folder, where it is
            named as TensorBoard's profiler plugin reads it; None for no trace.
        device_index: ``cpu`` or ``cuda:N``, the only device that the command then sees; None for the
            command's own choice.
        stop_after_s: Time after the first step at which the command is stopped; None to let it end [s].
        echo: Stream for the output of the command.

    Raises:
        UsageError: The command cannot be run.
        ScriptError: It made no training step that could be seen.
    """
    words = check_command(command)
    if trace is not None:
        _check_trace(trace, window_steps, warmup_steps, num_steps)
    settings = HookSettings(
        warmup_steps=warmup_steps,
        window_steps=window_steps,
        stop_after_steps=num_steps,
        stop_after_s=stop_after_s,
    )
    where: dict[str, Any] = {"folder": folder, "trace": trace, "device_index": device_index}
    return run_profiled(words, settings, epochs=epochs, timeout_s=timeout_s, echo=echo, **where)[0]


def run_profiled(
    words: Sequence[str],
    settings: HookSettings,
    *,
    epochs: float | None = None,
    timeout_s: float | None = None,
    folder: Path | None = None,
    trace: Path | None = None,
    device_index: str | None = None,
    echo: IO[str] | None = None,
) -> tuple[Profile, Observation]:
    """The profile of a checked command, and its mean step as causes are judged by; arguments as of ``profile``."""
    window_steps, num_steps = settings.window_steps, settings.stop_after_steps
    if min(window_steps, settings.warmup_steps) < 0 or (num_steps is not None and num_steps < 1):
        raise UsageError(
            f"expected one step or more and a window of zero or more, got {num_steps} and {window_steps}"
        )
    with temporary_folder() as own:
        records = _made(folder) if folder is not None else Path(own)
        run = launch(
            words,
            replace(settings, folder=str(records)),
            echo=echo,
            timeout_s=timeout_s,
            device_index=device_index or first_device(),
            environment=None if device_index is None else only_device(device_index),
        )
        process = run.training_process
        if process is None and run.outcome == "interrupted":
            raise KeyboardInterrupt(run.interrupted_by)  # which shells know by the status of its signal
        if process is None:
            raise ScriptError(_no_steps(run))
        notes, traces = [], []
        path = trace_file(records, process.pid)
        try:
            traces = [
                replace(read_trace(file, each.traced_steps), label=f"rank {each.rank}")
                for each in (process, *(other for other in run.training if other is not process))
                if path.is_file() and (file := trace_file(records, each.pid)).is_file()
            ]
        except UsageError as error:
            notes.append(f"judged without the trace of its steps: {error}")
        if trace is not None:
            notes.append(_keep_trace(path, trace))
    host, window = describe_host(), observe(traces[:1]) if traces else None
    found = summarise_run(
        run,
        process,
        num_usable_cores=host.num_usable_cores,
        usable_bytes=host.memory_usable_bytes,
        epochs=epochs,
        window=window,
    )
    seen = of_profile(found, window)
    if len(traces) > 1:
        # What the first rank waits for the others is no communication that all share.
        shared = observe(traces)
        seen = replace(seen, ranks=shared.ranks, exposed_s=min(seen.exposed_s, shared.exposed_s))
    return replace(found, advice=advise(seen), notes=(*found.notes, *notes)), seen


def _check_trace(trace: Path, window_steps: int, warmup_steps: int, num_steps: int | None) -> None:
    is_file = trace.suffix == ".json" and trace.parent.is_dir()
    if not (is_file or trace.is_dir()):
        raise UsageError(
            f"a trace is written to a file such as trace.json in a folder that exists, or into an existing folder for "
            f"TensorBoard, got '{trace}'"
        )
    if window_steps < 1 or (num_steps is not None and num_steps < warmup_steps + window_steps):
        raise UsageError(
            f"a trace is of the profiled window: expected a window of one step or more and at least "
            f"{warmup_steps + max(window_steps, 1)} steps, got a window of {window_steps} and {num_steps} steps"
        )


def _keep_trace(path: Path, trace: Path) -> str:
    """Moves the trace of the training process to its place; a sentence about it."""
    if not path.is_file():
        return "no trace was written: the script ended before its window, or traces itself"
    if trace.is_dir():
        number = path.stem.removeprefix("trace-")
        trace = trace / f"{socket.gethostname()}_{number}.{time.time_ns() // 10**6}.pt.trace.json"
    shutil.move(path, trace)
    return f"trace of the profiled steps written to {trace}"


def _made(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("process-*.jsonl"):
            old.unlink()
    except OSError as error:
        raise FailureError(f"expected a folder to write to at '{folder}', got: {error.strerror}") from error
    return folder


def _no_steps(run: Launch) -> str:
    command = " ".join(run.command)
    if run.outcome == "crashed":
        said = run.said or "nothing"
        return f"'{command}' ended with status {run.status} before its second training step; it said: {said}"
    if not run.processes:
        return (
            f"'{command}' ended without starting a Python process that could be watched; expected python, torchrun or "
            "a program that runs them (not python -S or -I)"
        )
    if run.outcome == "timeout":
        return f"'{command}' made no training step within the time limit; raise --timeout"
    return (
        f"'{command}' ended without a second training step; expected a PyTorch training script that calls "
        "optimizer.step() or loss.backward() more than once"
    )


_NOTABLE = 0.15
_LARGE_HOST = 0.3


def advise(seen: Observation) -> Cause:
    """The most expensive part of a profiled step that a change can shorten."""
    samples = None if seen.profile is None else seen.profile.batch_size
    # A large batch leaves some host time to any step.
    least_shares = {"host": _LARGE_HOST} if (samples or math.inf) > 16 else {}
    worth = (c for c in causes_of(seen) if c.share >= least_shares.get(c.bottleneck, _NOTABLE))
    return next(worth, busy_device(seen))
