"""Acceptance of the best trial of a study: it keeps the metric in a whole run, and is better when it is repeated."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from forerun.script.compare import in_turns, non_inferiority, paired_difference, paired_ratio
from forerun.script.tuning.configuration import ScriptConfiguration
from forerun.script.tuning.options import value_of
from forerun.script.tuning.space import Metric
from forerun.script.tuning.study import values_of
from forerun.script.tuning.trial import TrialOrder, TrialResult, not_interrupted, run_trial

if TYPE_CHECKING:
    from forerun.script.tuning.tuner import Tuner

LEAST_PAIRS = 3
"""Fewest pairs that can show anything: of two pairs a t interval is 12.7 standard errors to either side."""
MOST_PAIRS = 8
_NUM_CANDIDATES = 3
_RESERVED = 0.3
"""Share of the runs that repeat the winner: a search without repeats mostly finds the luckiest of equal trials."""
_FEWEST_RUNS = 20
"""The share of fewer runs is no three pairs."""
_MOST_TRIED = 3
_AS_IT_IS = ScriptConfiguration(arguments={}, hooks={})


def accept_best(tuner: Tuner, ranked: Sequence[Any]) -> tuple[Any, dict[str, Any] | None, tuple[str, ...]]:
    """Makes whole runs of the script as it is and of the best trials, until one keeps the metric.

    A trial that changes no setting on which the trained model depends needs no such run, and neither does the script as
    it is. Runs for which the budget has no time are not made, and the notes say so.
    """
    if not ranked:
        return None, None, ("no trial brought a value",)
    check, max_loss = tuner.task.settings.check, tuner.task.settings.max_accuracy_loss
    # Workers and pinned memory change no number that is trained, so a whole run could show nothing.
    if not tuner.task.order.is_short or (check and not _changes_result(tuner, ranked[0])):
        return ranked[0], None, ()
    why = ""
    if not check:
        why = "--no-check"
    elif (left_s := tuner.left_s) is not None and left_s < tuner.usual_run_s():
        why = "the budget left no time for whole runs; 'forerun compare' makes them"
    elif (before := _whole_run(tuner, _AS_IT_IS)).outcome != "done":
        why = f"the script as it is {before.outcome}: {before.reason}; 'forerun compare' runs both to their ends"
    if why:
        return ranked[0], None, (f"accuracy was not checked: {why}",)
    tried: list[dict[str, Any]] = []
    for trial in ranked[:_MOST_TRIED]:
        if tried and not _changes_result(tuner, trial):
            return trial, {"baseline": before.as_dict(), "best": None, "tried": tried}, ()
        after = _whole_run(tuner, tuner.task.configuration(values_of(trial)))
        verdict = _verdict(before, after, tuner.metric(before), max_loss)
        tuner.say(f"whole run of trial {trial.number}: {after.outcome}, {verdict['words']}")
        tried.append({"number": trial.number, **verdict})
        if verdict["is_accepted"]:
            checked = {"baseline": before.as_dict(), "best": after.as_dict(), **verdict, "tried": tried}
            return trial, checked, ()
    lost = f"none of the {len(tried)} fastest trials keeps the metric within {max_loss:g}: the script as it is stays"
    return None, {"baseline": before.as_dict(), "best": None, "tried": tried}, (lost,)


def screen(tuner: Tuner, ranked: Sequence[Any]) -> list[Any]:
    """The trials in the order of a second run of the first few, where the budget has room for it."""
    if not tuner.task.is_single:
        return list(ranked)
    others = [trial for trial in ranked if not is_script(tuner, trial)]
    if not others or is_script(tuner, ranked[0]):
        return list(ranked)
    order = screened(
        others,
        lambda trial: _value(tuner, tuner.task.configuration(values_of(trial))),
        tuner.num_repeats_left(),
        is_rising=tuner.task.objectives[0].is_rising,
    )
    return [*order, *(trial for trial in ranked if trial not in order)]


def repeat_winner(tuner: Tuner, chosen: Any) -> Verdict:
    """The verdict on a trial: repeated in turns with the script as it is, as far as the budget allows.

    Args:
        tuner: Session of the study.
        chosen: The best trial.
    """
    if not tuner.task.is_single:
        return Verdict(
            verdict="not repeated",
            words="the winner was not repeated: several objectives have a front, and no single winner",
        )
    if is_script(tuner, chosen):
        return Verdict(
            verdict="no difference",
            number=chosen.number,
            words="no configuration was better than the script as it is",
        )
    objective, began_s = tuner.task.objectives[0], time.monotonic()
    num_pairs = min(MOST_PAIRS, tuner.num_repeats_left() // 2)
    winner = tuner.task.configuration(values_of(chosen))
    if num_pairs >= LEAST_PAIRS:
        tuner.say(f"repeating trial {chosen.number} and the script as it is in {num_pairs} pairs of runs")
    found = show_winner(
        lambda: _value(tuner, _AS_IT_IS),
        lambda: _value(tuner, winner),
        num_pairs=num_pairs,
        is_rising=objective.is_rising,
        has_ratios=objective.name != "accuracy",
    )
    return replace(
        found, number=chosen.number, wall_s=time.monotonic() - began_s, num_runs=2 * found.num_pairs
    )


def _value(tuner: Tuner, configuration: ScriptConfiguration) -> float | None:
    tuner.num_repeats += 1
    result = not_interrupted(tuner.run(tuner.order, configuration, echo=tuner.echo, say=tuner.say))
    if result.outcome != "done":
        return None
    task = tuner.task
    return value_of(task.objectives[0], result, tuner.metric(result), task.settings.price_usd_per_hour)


def is_script(tuner: Tuner, trial: Any) -> bool:
    """True if every value of a trial is that of the script as it is."""
    base = tuner.task.base
    return all(name in base and base[name] == value for name, value in values_of(trial).items())


def _changes_result(tuner: Tuner, trial: Any) -> bool:
    """True if a trial changes a setting on which the trained model may depend."""
    changed = {name for name, value in values_of(trial).items() if tuner.task.base.get(name) != value}
    return any(
        parameter.changes_result
        for parameter in tuner.task.space.parameters
        if parameter.name in changed or parameter.scale_with in changed
    )


def _whole_run(tuner: Tuner, configuration: ScriptConfiguration) -> TrialResult:
    order: TrialOrder = replace(tuner.order, is_short=False)
    return not_interrupted(run_trial(order, configuration, echo=tuner.echo))


def _verdict(
    before: TrialResult, after: TrialResult, metric: Metric | None, max_loss: float
) -> dict[str, Any]:
    if after.outcome != "done":
        return {"is_accepted": False, "words": after.reason}
    speedup = None
    if before.rate_samples_per_s and after.rate_samples_per_s:
        speedup = after.rate_samples_per_s / before.rate_samples_per_s
    elif before.step_time_s and after.step_time_s:
        speedup = before.step_time_s / after.step_time_s
    if metric is None or not before.curve or not after.curve:
        return {"is_accepted": True, "speedup": speedup, "words": "the script prints no metric: not compared"}
    first, second = before.curve[-1][1], after.curve[-1][1]
    margin = metric.margin(max_loss, first)
    kept = non_inferiority([first], [second], margin=margin, is_rising=metric.is_rising)
    return {
        "is_accepted": kept.is_not_inferior,
        "speedup": speedup,
        "metric": metric.name,
        "metric_before": first,
        "metric_after": second,
        "words": f"{metric.name} {first:.4f} before, {second:.4f} after",
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The winner of a study beside the script as it is.

    Attributes:
        verdict: ``better``, ``no difference``, ``worse``, or ``not repeated``.
        number: Number of the trial; None if no trial was a candidate.
        ratio: Mean ratio of the objective, above one if the winner is better; None for an objective that has
            differences, or if it was not repeated.
        difference: Mean difference of the objective, above zero if the winner is better; None for one with ratios.
        low: Low end of the 95 % interval of either.
        high: High end of that interval.
        num_pairs: Number of pairs of runs.
        wall_s: Time of all runs behind the verdict [s].
        num_runs: Number of these runs.
        words: The verdict in a sentence.
    """

    verdict: str
    number: int | None = None
    ratio: float | None = None
    difference: float | None = None
    low: float | None = None
    high: float | None = None
    num_pairs: int = 0
    wall_s: float = 0.0
    num_runs: int = 0
    words: str = ""


def num_reserved_runs(num_runs: float) -> int:
    """Runs that a budget keeps back for repeats, of all that fit into it; 0 if there is no room for three pairs.

    >>> num_reserved_runs(40), num_reserved_runs(12), num_reserved_runs(1000)
    (12, 0, 19)
    """
    if num_runs < _FEWEST_RUNS:
        return 0
    return min(max(int(_RESERVED * num_runs), 2 * LEAST_PAIRS), _NUM_CANDIDATES + 2 * MOST_PAIRS)


def screened(
    candidates: Sequence[Any], run: Callable[[Any], float | None], num_runs: int, *, is_rising: bool
) -> list[Any]:
    """The candidates in the order of a second run each; unchanged if that leaves too few runs for pairs.

    The first of many noisy trials is often the luckiest: a fresh run of the first three costs little beside that.
    """
    first = list(candidates[:_NUM_CANDIDATES])
    if len(first) < 2 or num_runs < len(first) + 2 * LEAST_PAIRS:
        return list(candidates)
    again = [(run(candidate), index) for index, candidate in enumerate(first)]
    sign = -1.0 if is_rising else 1.0
    told = sorted((sign * value, index) for value, index in again if value is not None)
    return [*(first[index] for _, index in told), *candidates[len(first) :]]


def show_winner(
    run_script: Callable[[], float | None],
    run_winner: Callable[[], float | None],
    *,
    num_pairs: int,
    is_rising: bool,
    has_ratios: bool = True,
) -> Verdict:
    """Runs the script as it is and the winner in turns, A-B-B-A, and compares them in pairs.

    The runs are none of those by which the winner was chosen, and their number is fixed before the first: if no setting
    matters, the interval lies above one in 2.5 of 100 studies.

    Args:
        run_script: Runs the script as it is; returns its objective, None if the run failed.
        run_winner: Runs the winner.
        num_pairs: Number of pairs.
        is_rising: True if a larger objective is better.
        has_ratios: True compares ratios of objectives above zero; False compares differences.
    """
    if num_pairs < LEAST_PAIRS:
        return Verdict(
            verdict="not repeated",
            words="the winner was not repeated: the budget left no room for "
            f"{LEAST_PAIRS} pairs of runs beside the search",
        )
    script: list[float] = []
    winner: list[float] = []
    for pair in in_turns(num_pairs):
        values = {which: run_script() if which == "A" else run_winner() for which in pair}
        first, second = values["A"], values["B"]
        if first is None or second is None:
            if len(script) >= LEAST_PAIRS:
                break  # the budget ended a run
            failed = "the script as it is" if first is None else "the winner"
            return Verdict(verdict="not repeated", words=f"{failed} failed when it was repeated")
        script.append(first)
        winner.append(second)
    worse, better = (script, winner) if is_rising else (winner, script)
    if has_ratios:
        ratio = paired_ratio(worse, better)
        mean, low, high, neutral = ratio.ratio, ratio.low, ratio.high, 1.0
    else:
        mean, low, high = paired_difference(worse, better)
        neutral = 0.0
    assert low is not None
    assert high is not None
    verdict = "better" if low > neutral else "worse" if high < neutral else "no difference"
    form = (
        "{:.2f} times the script as it is (95 %: {:.2f} to {:.2f})"
        if has_ratios
        else "{:+.4g} (95 %: {:+.4g} to {:+.4g})"
    )
    runs = f"{len(script)} pairs of runs in turns"
    found = (
        f"no difference could be shown in {runs}"
        if verdict == "no difference"
        else f"repeated in {runs}, the winner is {verdict}"
    )
    return Verdict(
        verdict=verdict,
        ratio=mean if has_ratios else None,
        difference=None if has_ratios else mean,
        low=low,
        high=high,
        num_pairs=len(script),
        words=f"{found}: {form.format(mean, low, high)}",
    )
