"""One trial: a configuration run in separate processes, all ended at its limit, and the figures in its output."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import IO, Any

import numpy as np

from forerun.base.errors import near_matches
from forerun.question.devices.local import lock_device, only_device
from forerun.script.patching import tables
from forerun.script.profiling.launch import Launch, OutputLine, launch
from forerun.script.profiling.messages import HookSettings
from forerun.script.profiling.profile import summarise_run
from forerun.script.tuning.configuration import ScriptConfiguration
from forerun.script.tuning.space import Metric

_OUT_OF_MEMORY = re.compile(
    r"out of memory|OutOfMemoryError|MemoryError|can't allocate memory|Cannot allocate memory|"
    r"DefaultCPUAllocator|bad_alloc|killed by signal: Killed",
    re.IGNORECASE,
)
_SIGKILL = -9
"""Signal of the kernel to a process when the machine runs out of memory; the script prints nothing then."""
_LOCK_PATIENCE_S = 24 * 3600.0
"""A trial beside another one would measure both; the longest is as long as a training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialOrder:
    """Settings with which the trials of a study run.

    Attributes:
        command: Command of the script as it is.
        metric: Metric that the script prints; None to look for a usual one.
        is_short: True if only the speed is wanted: the script is stopped after ``short_s`` of steps.
        short_s: Time of steps of a short trial [s].
        timeout_s: Longest time of a trial [s].
        memory_limit_bytes: Most memory of a trial; None for the machine's own limit [bytes].
        device_index: Number of the device that runs the trial.
        stop_at_target: True ends a trial as soon as its metric reaches the target.
    """

    command: tuple[str, ...]
    metric: Metric | None = None
    is_short: bool = True
    short_s: float = 8.0
    timeout_s: float = 600.0
    memory_limit_bytes: float | None = None
    device_index: str = "cpu"
    stop_at_target: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialResult:
    """Result of a trial.

    Attributes:
        outcome: ``done``, ``out of memory``, ``crashed``, ``timeout``, ``pruned`` or ``interrupted``.
        reason: Reason why the trial is not done, or has no metric.
        rate_samples_per_s: Samples per second in steady steps; None if samples cannot be counted.
        step_time_s: Mean time of a steady step [s].
        num_steps: Number of steps seen.
        wall_s: Time of the whole trial [s].
        train_s: Time from the first to the last step [s].
        metric: Name of the metric.
        curve: Values of the metric with the time since the start [s], in order.
        start_memory_bytes: Memory before the first step [bytes].
        peak_memory_bytes: Peak memory [bytes].
        cpu_utilisation: Cores that the processes used between the first and the last step.
        energy_j: Energy of the GPU; None without a counter [J].
        hooks: Changes made by hooks.
    """

    outcome: str
    reason: str = ""
    rate_samples_per_s: float | None = None
    step_time_s: float | None = None
    num_steps: int = 0
    wall_s: float = 0.0
    train_s: float = 0.0
    metric: str | None = None
    curve: tuple[tuple[float, float], ...] = ()
    start_memory_bytes: int = 0
    peak_memory_bytes: int = 0
    cpu_utilisation: float = 0.0
    energy_j: float | None = None
    hooks: tuple[dict[str, Any], ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Every field as JSON types."""
        return asdict(self)

    def best(self, *, is_rising: bool) -> float | None:
        """Best value of the metric."""
        values = [value for _, value in self.curve if np.isfinite(value)]
        return (max if is_rising else min)(values, default=None)


def not_interrupted(result: TrialResult) -> TrialResult:
    """The result of a trial; raises KeyboardInterrupt where the user ended it, and forerun with it."""
    if result.outcome == "interrupted":
        raise KeyboardInterrupt
    return result


def say_nothing(line: str) -> None:
    """Drops a message."""


def run_trial(
    order: TrialOrder,
    configuration: ScriptConfiguration,
    *,
    echo: IO[str] | None = None,
    on_value: Callable[[int, float], bool] | None = None,
    say: Callable[[str], None] = say_nothing,
) -> TrialResult:
    """Runs a configuration while no other trial runs on the device.

    Args:
        order: Settings of the trial.
        configuration: Configuration to run.
        echo: Stream that receives the script's output.
        on_value: Called with the number and value of each printed metric; returns True to end the trial.
        say: Called with the name of the device's user, if the trial must wait for the device.
    """
    seen: list[float] = []
    reader = None if order.metric is None else MetricReader(order.metric.name)

    def follow(line: OutputLine) -> bool:
        if order.metric is None or reader is None:
            return False
        ends = False
        for reading in reader.read(line):
            seen.append(reading.value)
            ends |= on_value is not None and on_value(len(seen), reading.value)
            ends |= order.stop_at_target and order.metric.is_reached(reading.value)
        return ends

    settings = HookSettings(
        window_steps=0,
        stop_after_s=order.short_s if order.is_short else None,
        knobs=configuration.hooks,
    )
    with lock_device(order.device_index, wait_s=_LOCK_PATIENCE_S, on_wait=say):
        run = launch(
            configuration.command(order.command),
            settings,
            echo=echo,
            timeout_s=order.timeout_s,
            memory_limit_bytes=order.memory_limit_bytes,
            device_index=order.device_index,
            environment=only_device(order.device_index),
            on_line=follow,
        )
    return _result(order, run)


def _result(order: TrialOrder, run: Launch) -> TrialResult:
    metric = order.metric or find_metric(run.lines)
    readings = read_metric(metric.name, run.lines) if metric is not None else ()
    outcome, reason = _outcome(order, run, readings)
    return TrialResult(
        outcome=outcome,
        reason=reason,
        wall_s=run.end_s - run.begin_s,
        metric=metric.name if metric is not None else None,
        curve=tuple((reading.time_s - run.begin_s, reading.value) for reading in readings),
        energy_j=run.telemetry.get("gpu_energy_j"),
        hooks=tuple({h["knob"]: h for p in run.processes for h in p.hooks}.values()),
        **_figures(run),
    )


def _outcome(order: TrialOrder, run: Launch, readings: Sequence[Reading]) -> tuple[str, str]:
    if run.outcome == "ended":
        is_reached = order.metric is not None and any(order.metric.is_reached(r.value) for r in readings)
        return ("done", "") if is_reached and order.stop_at_target else ("pruned", "its forecast cannot win")
    if run.outcome == "out of memory":
        return "out of memory", "its memory exceeded the limit"
    if run.outcome in ("crashed", "timeout", "interrupted"):
        text = "\n".join(line.text for line in run.lines)
        if run.outcome == "crashed" and (run.status == _SIGKILL or _OUT_OF_MEMORY.search(text)):
            return "out of memory", run.said
        if run.outcome == "timeout":
            return "timeout", f"it reached the time limit of {order.timeout_s:.0f} s"
        return run.outcome, f"status {run.status}: {run.said}"
    if run.training_process is None:
        return "crashed", "it ended without a second training step"
    if order.metric is not None and not order.is_short and not readings:
        return "done", missing_metric(order.metric.name, run.lines)
    return "done", ""


def _figures(run: Launch) -> dict[str, Any]:
    process = run.training_process
    start_bytes = run.samples[0].memory_bytes if run.samples else 0
    if process is None:
        return {"start_memory_bytes": start_bytes, "peak_memory_bytes": run.peak_memory_bytes}
    # With one core the used share of the cores is their number.
    seen = summarise_run(run, process, num_usable_cores=1.0)
    first_s, last_s = float(process.steps.begin_s[0]), float(process.steps.end_s[-1])
    before = [sample.memory_bytes for sample in run.samples if sample.time_s <= first_s]
    return {
        "start_memory_bytes": max(before, default=start_bytes) if seen.device_peak_bytes is None else 0,
        "peak_memory_bytes": seen.device_peak_bytes or seen.peak_memory_bytes,
        "cpu_utilisation": seen.cpu_utilisation,
        "rate_samples_per_s": seen.throughput_samples_per_s,
        "step_time_s": seen.step_time_s,
        "num_steps": seen.num_steps,
        "train_s": last_s - first_s,
    }


_MOST_NAMES = 8
_FEWEST_COLUMNS = 3
_NUMBER = r"([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)(?:/(\d+))?\s*(%?)"
# Between a name and its value: a colon or an equals sign, the border of a table's cell, quotes around either.
_BETWEEN = r"[\"']?\s*[:=|│┃]?\s*[\"']?"
_NAMED = re.compile(rf"([A-Za-z_][\w/.@-]*)[\"']?\s*[:=]\s*[\"']?{_NUMBER}")
_PROGRESS = re.compile(r"\s\S*\d+%\S*\|.*|\d+%\|.*|:\s.*%.*")
_CELL = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A printed value.

    Attributes:
        time_s: Time of printing, monotonic clock [s].
        value: The value; a share if it was printed in per cent or as a number of all.
    """

    time_s: float
    value: float


class MetricReader:
    """Reads the values of a metric line by line.

    It knows ``name=0.8``, ``name: 80 %``, ``{'name': '0.8'}``, JSON, ``name: 985/1000 (98%)`` as the share 0.985, a
    table of names beside values (Lightning), and a table with the name above its column (yolo).
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._pattern = re.compile(
            rf"(?<![\w-])[\"']?{re.escape(name)}(?![\w-]){_BETWEEN}{_NUMBER}", re.IGNORECASE
        )
        self._column: int | None = None
        self._num_columns = 0

    def read(self, line: OutputLine) -> list[Reading]:
        """Values that a line has."""
        found = []
        for match in self._pattern.finditer(line.text):
            value = float(match[1])
            if match[2] is not None:
                value = value / float(match[2]) if float(match[2]) else float("nan")
            elif match[3]:
                value /= 100.0
            found.append(Reading(time_s=line.time_s, value=value))
        if found:
            return found
        cells = _PROGRESS.sub("", line.text).split()
        if self._is_heading(cells):
            return []
        if self._column is None or len(cells) != self._num_columns:
            return []
        cell = _CELL.fullmatch(cells[self._column])
        return [] if cell is None else [Reading(time_s=line.time_s, value=float(cell[0]))]

    def _is_heading(self, cells: Sequence[str]) -> bool:
        """True if a line names the columns of a table; notes the metric's column, or that it has none."""
        if len(cells) < _FEWEST_COLUMNS or not all(cell[0].isalpha() for cell in cells):
            return False
        names = [cell.rstrip("):").lower() for cell in cells]
        if self._name.lower() in names:
            self._column, self._num_columns = names.index(self._name.lower()), len(cells)
        elif len(cells) == self._num_columns:
            self._column = None  # another table begins
        return True


def read_metric(name: str, lines: Sequence[OutputLine]) -> tuple[Reading, ...]:
    """All values of a metric in the order of printing, in the forms that ``MetricReader`` knows."""
    reader = MetricReader(name)
    return tuple(reading for line in lines for reading in reader.read(line))


def missing_metric(name: str, lines: Sequence[OutputLine]) -> str:
    """A sentence about a metric that a whole run did not print, with the figures that the run did print."""
    names = dict.fromkeys(match[1] for line in lines for match in _NAMED.finditer(line.text))
    printed = (
        f"it printed {', '.join(list(names)[:_MOST_NAMES])}" if names else "it printed no figure by name"
    )
    return f"the script printed no '{name}=VALUE'; {printed}{near_matches(name, list(names))}"


def find_metric(lines: Sequence[OutputLine]) -> Metric | None:
    """The first of the usual metrics that the lines have."""
    usual = tables("tuning")["metrics"]["usual"]
    return next((Metric.named(name) for name in usual if read_metric(name, lines)), None)
