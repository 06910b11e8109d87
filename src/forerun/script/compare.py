"""Compares two configurations of a training command, or runs it with one."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from forerun.base.answers import Answer
from forerun.base.errors import FailureError, ScriptError, UsageError
from forerun.base.kept import temporary_folder
from forerun.question.devices.local import first_device
from forerun.script.profiling.hooks.messages import HookSettings
from forerun.script.profiling.launch import Launch, check_command, launch
from forerun.script.profiling.recorded import read_processes
from forerun.script.tuning.comparison import NonInferiority, PairedRatio, non_inferiority, paired_ratio
from forerun.script.tuning.configuration import ScriptConfiguration, read_configuration
from forerun.script.tuning.space import Metric
from forerun.script.tuning.trial import TrialOrder, TrialResult, run_trial, say_nothing

__all__ = ["ComparedRun", "Comparison", "apply", "compare"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRun:
    """One run of a comparison.

    Attributes:
        which: ``A`` or ``B``.
        rate_samples_per_s: Samples a second in steady steps; None where they cannot be counted.
        wall_s: Time of the whole run [s].
        metric: Last value of the metric; None without one.
    """

    which: str
    rate_samples_per_s: float | None
    wall_s: float
    metric: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison(Answer):
    """Comparison of two configurations that ran by turns.

    Attributes:
        speed: Ratio of the samples per second, B over A.
        time: Ratio of the total times, A over B.
        accuracy: Non-inferiority of B; None without a metric.
        metric: Its name.
        runs: Every run, those of A first.
    """

    speed: PairedRatio | None
    time: PairedRatio
    accuracy: NonInferiority | None
    metric: str | None
    runs: tuple[ComparedRun, ...]


def compare(
    command: Sequence[str],
    first: ScriptConfiguration | Path | None,
    second: ScriptConfiguration | Path | None,
    *,
    repetitions: int = 3,
    metric: str | None = None,
    margin: float = 0.01,
    timeout_s: float = 3600.0,
    say: Callable[[str], None] = say_nothing,
    echo: IO[str] | None = None,
) -> Comparison:
    """Runs a command in two configurations by turns, A-B-B-A, and compares speed and metric in pairs.

    Args:
        command: Words of the command.
        first: Configuration A or its file; None for the unchanged command.
        second: Configuration B, like ``first``.
        repetitions: Runs of each configuration.
        metric: Metric that the script prints; a usual one if None.
        margin: Loss of the metric that still counts as equal: a share, of the value itself for losses.
        timeout_s: Longest time of a run [s].
        say: Receives a line about each run.
        echo: Stream for the script's output.

    Raises:
        UsageError: The command or a file cannot be used.
        ScriptError: A run fails.
    """
    words = check_command(command)
    if repetitions < 1:
        raise UsageError(f"expected one repetition or more, got {repetitions}")
    wanted = None if metric is None else Metric.named(metric)
    order = TrialOrder(
        command=words, metric=wanted, is_short=False, timeout_s=timeout_s, device_index=first_device()
    )
    configurations = {"A": _read(first), "B": _read(second)}
    results: dict[str, list[TrialResult]] = {"A": [], "B": []}
    for index in range(repetitions):
        # The first of a pair changes from pair to pair.
        for which in ("AB", "BA")[index % 2]:
            result = run_trial(order, configurations[which], echo=echo)
            if result.outcome == "interrupted":
                raise KeyboardInterrupt
            if result.outcome != "done":
                raise ScriptError(
                    f"expected {which} to run to its end, but it {result.outcome}: {result.reason}"
                )
            results[which].append(result)
            say(f"{which}: {result.wall_s:.1f} s, {result.rate_samples_per_s or 0:.1f} samples/s")
    return _compared(results, wanted, margin)


def _read(found: ScriptConfiguration | Path | None) -> ScriptConfiguration:
    if found is None:
        return ScriptConfiguration(arguments={}, hooks={})
    return read_configuration(found) if isinstance(found, Path) else found


def _compared(results: Mapping[str, list[TrialResult]], wanted: Metric | None, margin: float) -> Comparison:
    rates = {w: [r.rate_samples_per_s for r in runs if r.rate_samples_per_s] for w, runs in results.items()}
    has_rates = all(len(rates[w]) == len(results[w]) for w in "AB")
    last = {w: [r.curve[-1][1] for r in runs if r.curve] for w, runs in results.items()}
    name = results["A"][0].metric
    metric = wanted or (None if name is None else Metric.named(name))
    has_metric = metric is not None and all(len(last[w]) == len(results[w]) for w in "AB")
    if has_metric and metric is not None:
        margin = metric.margin(margin, sum(last["A"]) / len(last["A"]))
    return Comparison(
        speed=paired_ratio(rates["A"], rates["B"]) if has_rates else None,
        time=paired_ratio([r.wall_s for r in results["B"]], [r.wall_s for r in results["A"]]),
        accuracy=non_inferiority(last["A"], last["B"], margin=margin, is_rising=metric.is_rising)
        if has_metric and metric is not None
        else None,
        metric=metric.name if has_metric and metric is not None else None,
        runs=tuple(
            ComparedRun(
                which=which,
                rate_samples_per_s=result.rate_samples_per_s,
                wall_s=result.wall_s,
                metric=result.curve[-1][1] if result.curve else None,
            )
            for which in "AB"
            for result in results[which]
        ),
    )


def apply(
    command: Sequence[str],
    configuration: ScriptConfiguration | Path,
    *,
    say: Callable[[str], None] = say_nothing,
    echo: IO[str] | None = None,
) -> Launch:
    """Runs a command with a configuration that ``tune`` found.

    Raises:
        UsageError: The command or the file cannot be used.
        ScriptError: The command fails.
    """
    words = check_command(command)
    found = _read(configuration)
    exact = found.command(words)
    say(f"command: {shlex.join(exact)}")
    with temporary_folder() as folder:
        settings = HookSettings(folder=folder, parent_pid=0, window_steps=0, knobs=found.hooks)
        run = launch(exact, settings, echo=echo)
        seen = {hook["what"]: hook for process in read_processes(Path(folder)) for hook in process.hooks}
        for hook in seen.values():
            say(f"hook: {hook['knob']}: {hook['what']}")
        for knob in set(found.hooks) - {hook["knob"] for hook in seen.values()}:
            say(f"hook: {knob}: not applied, the script never came to it")
    if run.outcome == "interrupted":
        raise KeyboardInterrupt
    if run.outcome != "done":
        raise FailureError(f"the command {run.outcome} with status {run.status}")
    return run
