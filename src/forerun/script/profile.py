"""Profiles a user's training command, and advises the one change that is worth most."""

from __future__ import annotations

import math
import shutil
import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO

from forerun.base.errors import FailureError, ScriptError, UsageError
from forerun.base.kept import temporary_folder
from forerun.question.devices import describe_host
from forerun.question.devices.local import first_device, only_device
from forerun.script.command_words import check_command
from forerun.script.diagnosis.causes import Cause, busy_device, causes_of
from forerun.script.diagnosis.observation import of_profile
from forerun.script.profiling.launch import Launch, launch
from forerun.script.profiling.messages import HookSettings, trace_file
from forerun.script.profiling.profile import Advice, Profile, summarise_run


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
    if min(window_steps, warmup_steps) < 0 or (num_steps is not None and num_steps < 1):
        raise UsageError(
            f"expected one step or more and a window of zero or more, got {num_steps} and {window_steps}"
        )
    if trace is not None:
        _check_trace(trace, window_steps, warmup_steps, num_steps)
    with temporary_folder() as own:
        records = _made(folder) if folder is not None else Path(own)
        settings = HookSettings(
            folder=str(records),
            warmup_steps=warmup_steps,
            window_steps=window_steps,
            stop_after_steps=num_steps,
            stop_after_s=stop_after_s,
            keeps_trace=trace is not None,
        )
        run = launch(
            words,
            settings,
            echo=echo,
            timeout_s=timeout_s,
            device_index=device_index or first_device(),
            environment=None if device_index is None else only_device(device_index),
        )
        found = _profile(run, epochs)
        if trace is not None:
            found = replace(found, notes=(*found.notes, _keep_trace(records, run, trace)))
        return found


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


def _keep_trace(records: Path, run: Launch, trace: Path) -> str:
    """Moves the trace of the training process to its place; a sentence about it."""
    process = run.training_process
    if process is None or not trace_file(records, process.pid).is_file():
        return "no trace was written: the script ended before its window, or traces itself"
    if trace.is_dir():
        trace = trace / f"{socket.gethostname()}_{process.pid}.{time.time_ns() // 10**6}.pt.trace.json"
    shutil.move(trace_file(records, process.pid), trace)
    return f"trace of the profiled steps written to {trace}"


def _made(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("process-*.jsonl"):
            old.unlink()
    except OSError as error:
        raise FailureError(f"expected a folder to write to at '{folder}', got: {error.strerror}") from error
    return folder


def _profile(run: Launch, epochs: float | None) -> Profile:
    process = run.training_process
    if process is None and run.outcome == "interrupted":
        raise KeyboardInterrupt(run.interrupted_by)  # which shells know by the status of its signal
    if process is None:
        raise ScriptError(_no_steps(run))
    found = summarise_run(
        run,
        process,
        num_ranks=run.num_ranks,
        num_usable_cores=describe_host().num_usable_cores,
        epochs=epochs,
    )
    return replace(found, advice=advise(found))


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
_UNCERTAINTY = 0.25  # uncertain share of a saving: workers compete with the step for memory and caches


def advise(profile: Profile) -> Advice:
    """Advice about the most expensive part of the step that a change can shorten."""
    seen = of_profile(profile)
    first = next(
        (cause for cause in causes_of(seen) if cause.share >= _least_share(cause, profile)), busy_device(seen)
    )
    return Advice(
        bottleneck=first.bottleneck,
        reason=first.evidence,
        change=first.knobs,
        words=first.change,
        **({} if first.after_s is None else _gain(profile.step_time_s, first.after_s)),
    )


def _least_share(cause: Cause, profile: Profile) -> float:
    """Share of a step from which on a cause is worth a change: a large batch leaves some host time to any step."""
    is_large = (profile.batch_size or math.inf) > 16
    return _LARGE_HOST if cause.bottleneck == "host" and is_large else _NOTABLE


def _gain(before_s: float, after_s: float) -> dict[str, float]:
    """Expected ratio of speeds, and the ratio if a quarter less or more is saved."""
    saved_s = before_s - after_s

    def ratio(factor: float) -> float:
        return before_s / max(before_s - factor * saved_s, 1e-3 * before_s)

    return {
        "speedup": ratio(1.0),
        "speedup_low": ratio(1 - _UNCERTAINTY),
        "speedup_high": ratio(1 + _UNCERTAINTY),
    }
