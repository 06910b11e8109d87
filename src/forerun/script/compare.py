"""Compares two configurations of a training command in pairs of runs, or runs it with one."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
import numpy.typing as npt

from forerun.base.answers import Answer
from forerun.base.errors import FailureError, ScriptError, UsageError
from forerun.question.devices.local import first_device
from forerun.script.command_words import check_command
from forerun.script.profiling.launch import Launch, launch
from forerun.script.profiling.messages import HookSettings
from forerun.script.tuning.configuration import ScriptConfiguration, read_configuration
from forerun.script.tuning.space import Metric
from forerun.script.tuning.trial import TrialOrder, TrialResult, not_interrupted, run_trial, say_nothing


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
    for which in itertools.chain.from_iterable(in_turns(repetitions)):
        result = not_interrupted(run_trial(order, configurations[which], echo=echo))
        if result.outcome != "done":
            raise ScriptError(f"expected {which} to run to its end, but it {result.outcome}: {result.reason}")
        results[which].append(result)
        say(f"{which}: {result.wall_s:.1f} s, {result.rate_samples_per_s or 0:.1f} samples/s")
    return _compared(results, wanted, margin)


def _read(found: ScriptConfiguration | Path | None) -> ScriptConfiguration:
    if found is None:
        return ScriptConfiguration(arguments={}, hooks={})
    return read_configuration(found) if isinstance(found, Path) else found


def _compared(results: Mapping[str, list[TrialResult]], wanted: Metric | None, margin: float) -> Comparison:
    rates = {w: [r.rate_samples_per_s for r in runs if r.rate_samples_per_s] for w, runs in results.items()}
    # A ratio needs all runs of both sides: leaving out those without a rate would compare the lucky ones.
    has_rates = all(len(rates[w]) == len(results[w]) for w in "AB")
    last = {w: [r.curve[-1][1] for r in runs if r.curve] for w, runs in results.items()}
    name = results["A"][0].metric
    metric = wanted or (None if name is None else Metric.named(name))
    if metric is not None and any(len(last[w]) < len(results[w]) for w in "AB"):
        metric = None
    accuracy = None
    if metric is not None:
        lost = metric.margin(margin, sum(last["A"]) / len(last["A"]))
        accuracy = non_inferiority(last["A"], last["B"], margin=lost, is_rising=metric.is_rising)
    return Comparison(
        speed=paired_ratio(rates["A"], rates["B"]) if has_rates else None,
        # B over A, so that both ratios say how much better B is.
        time=paired_ratio([r.wall_s for r in results["B"]], [r.wall_s for r in results["A"]]),
        accuracy=accuracy,
        metric=None if metric is None else metric.name,
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
    run = launch(exact, HookSettings(window_steps=0, knobs=found.hooks), echo=echo)
    seen = {hook["what"]: hook for process in run.processes for hook in process.hooks}
    for hook in seen.values():
        say(f"hook: {hook['knob']}: {hook['what']}")
    for knob in set(found.hooks) - {hook["knob"] for hook in seen.values()}:
        say(f"hook: {knob}: not applied, the script never came to it")
    if run.outcome == "interrupted":
        raise KeyboardInterrupt
    if run.outcome != "done":
        raise FailureError(f"the command {run.outcome} with status {run.status}")
    return run


def in_turns(num_pairs: int) -> Iterator[str]:
    """The runs of each pair in their order, A-B-B-A: a drift of the machine favours neither.

    >>> list(in_turns(3))
    ['AB', 'BA', 'AB']
    """
    return itertools.islice(itertools.cycle(("AB", "BA")), num_pairs)


def _tested(
    gains: npt.NDArray[np.float64],
    *,
    margin: float = 0.0,
    alternative: Literal["two-sided", "greater"] = "two-sided",
) -> Any:
    """Student's t test of the mean of gains over two or more pairs; all comparisons here rest on it."""
    from scipy.stats import ttest_1samp

    if not gains.std():  # equal runs have no scatter, and a ratio to no scatter is none
        gains = gains + 1e-12 * np.resize((1.0, -1.0), gains.shape)
    return ttest_1samp(gains, -margin, alternative=alternative)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedRatio:
    """Speed of B relative to A, from pairs of runs.

    Attributes:
        ratio: Geometric mean of B over A.
        low: Low end of the ratio's 95 % interval; None with one pair.
        high: High end of that interval; None with one pair.
        p_value: Probability of such pairs if A and B are equal, two-sided t-test on log ratios; None with one pair.
        num_pairs: Number of pairs.
    """

    ratio: float
    low: float | None
    high: float | None
    p_value: float | None
    num_pairs: int


def paired_ratio(first: Sequence[float], second: Sequence[float]) -> PairedRatio:
    """Ratio of second to first from runs made in turns, so that a drift of the machine is in both.

    Raises:
        UsageError: The values are not pairs of positive numbers.
    """
    a, b = np.asarray(first, dtype=float), np.asarray(second, dtype=float)
    if a.shape != b.shape or not a.size or not np.all((a > 0) & (b > 0)):
        raise UsageError("expected pairs of values above zero")
    gains = np.log(b / a)
    ratio = float(np.exp(gains.mean()))
    if len(gains) < 2:
        return PairedRatio(ratio=ratio, low=None, high=None, p_value=None, num_pairs=1)
    test = _tested(gains)
    low, high = map(float, np.exp(test.confidence_interval(0.95)))
    return PairedRatio(ratio=ratio, low=low, high=high, p_value=float(test.pvalue), num_pairs=len(gains))


def paired_difference(first: Sequence[float], second: Sequence[float]) -> tuple[float, float, float]:
    """Mean of second less first over pairs, two or more, with the ends of its 95 % t interval."""
    gains = np.asarray(second, dtype=float) - np.asarray(first, dtype=float)
    low, high = map(float, _tested(gains).confidence_interval(0.95))
    return float(gains.mean()), low, high


@dataclass(frozen=True, slots=True, kw_only=True)
class NonInferiority:
    """Result of the test that the metric of B is worse than the metric of A by less than a margin.

    Attributes:
        difference: Mean paired difference in the direction of better.
        low: Low end of its one-sided 95 % interval; None with one pair.
        p_value: Of the hypothesis that B is worse by the margin; None with one pair.
        margin: Loss that is accepted.
        is_not_inferior: Whether ``low``, or the difference without it, is above -margin.
        num_pairs: Pairs of runs.
    """

    difference: float
    low: float | None
    p_value: float | None
    margin: float
    is_not_inferior: bool
    num_pairs: int


def non_inferiority(
    first: Sequence[float], second: Sequence[float], *, margin: float, is_rising: bool = True
) -> NonInferiority:
    """Test that the metric of B is worse than the metric of A by less than a margin.

    Takes the mean paired difference, positive if B is better, with the low end of its one-sided 95 % interval; B is not
    inferior if that end is above -margin. With one pair the difference itself is compared, without a claim about
    chance.

    Args:
        first: Metric of the runs of A.
        second: Metric of the runs of B.
        margin: Accepted loss of the metric.
        is_rising: True if a larger metric is better.
    """
    a, b = np.asarray(first, dtype=float), np.asarray(second, dtype=float)
    gains = (b - a) if is_rising else (a - b)
    difference, low, p_value = float(gains.mean()), None, None
    if len(gains) > 1:
        test = _tested(gains, margin=margin, alternative="greater")
        low, p_value = float(test.confidence_interval(0.95).low), float(test.pvalue)
    decided = difference if low is None else low
    return NonInferiority(
        difference=difference,
        low=low,
        p_value=p_value,
        margin=margin,
        is_not_inferior=decided >= -margin,
        num_pairs=len(gains),
    )
