"""Acceptance of the best trial of a study: it keeps the metric in a whole run, and is better when it is repeated."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import IO, Any

from forerun.script.tuning.comparison import LEAST_PAIRS, MOST_PAIRS, Verdict, screened, show_winner
from forerun.script.tuning.configuration import ScriptConfiguration, configure
from forerun.script.tuning.options import value_of
from forerun.script.tuning.space import Metric
from forerun.script.tuning.trial import TrialOrder, TrialResult, run_trial
from forerun.script.tuning.tuner import Tuner

__all__ = ["accept_best", "is_script", "repeat_winner", "screen"]

_MOST_TRIED = 3
_AS_IT_IS = ScriptConfiguration(arguments={}, hooks={})


def accept_best(
    tuner: Tuner, ranked: Sequence[Any], max_loss: float, *, check: bool, echo: IO[str] | None
) -> tuple[Any, dict[str, Any] | None, tuple[str, ...]]:
    """Makes whole runs of the script as it is and of the best trials, until one keeps the metric.

    A trial that changes no setting on which the trained model depends needs no such run, and neither does the script as
    it is. Runs for which the budget has no time are not made, and the notes say so.
    """
    if not ranked:
        return None, None, ("no trial brought a value",)
    order = tuner.task.order
    if not check or not order.is_short:
        unchecked = () if not order.is_short else ("accuracy was not checked: --no-check",)
        return ranked[0], None, unchecked
    if not _changes_result(tuner, ranked[0]):
        return ranked[0], None, ()
    if (left_s := tuner.left_s) is not None and left_s < tuner.usual_run_s():
        note = (
            "accuracy was not checked: the budget left no time for whole runs; 'forerun compare' makes them"
        )
        return ranked[0], None, (note,)
    before = _whole_run(tuner, _AS_IT_IS, echo)
    if before.outcome != "done":
        return (
            ranked[0],
            None,
            (
                f"accuracy was not checked: the script as it is {before.outcome}: {before.reason}; "
                "'forerun compare' runs both to their ends",
            ),
        )
    tried: list[dict[str, Any]] = []
    for trial in ranked[:_MOST_TRIED]:
        if tried and not _changes_result(tuner, trial):
            return trial, {"baseline": before.as_dict(), "best": None, "tried": tried}, ()
        after = _whole_run(tuner, _configuration(tuner, trial), echo)
        verdict = _verdict(before, after, tuner.metric(before), max_loss)
        tuner.say(f"whole run of trial {trial.number}: {after.outcome}, {verdict['words']}")
        tried.append({"number": trial.number, **verdict})
        if verdict["is_accepted"]:
            checked = {"baseline": before.as_dict(), "best": after.as_dict(), **verdict, "tried": tried}
            return trial, checked, ()
    lost = f"none of the {len(tried)} fastest trials keeps the metric within {max_loss:g}: the script as it is stays"
    return None, {"baseline": before.as_dict(), "best": None, "tried": tried}, (lost,)


def screen(tuner: Tuner, ranked: Sequence[Any], echo: IO[str] | None) -> list[Any]:
    """The trials in the order of a second run of the first few, where the budget has room for it."""
    if len(tuner.task.objectives) != 1:
        return list(ranked)
    others = [trial for trial in ranked if not is_script(tuner, trial)]
    if not others or is_script(tuner, ranked[0]):
        return list(ranked)
    order = screened(
        others,
        lambda trial: _value(tuner, _configuration(tuner, trial), echo),
        tuner.num_repeats_left(),
        is_rising=tuner.task.objectives[0].is_rising,
    )
    return [*order, *(trial for trial in ranked if trial not in order)]


def repeat_winner(tuner: Tuner, chosen: Any, echo: IO[str] | None) -> Verdict:
    """The verdict on a trial: repeated in turns with the script as it is, as far as the budget allows.

    Args:
        tuner: Session of the study.
        chosen: The best trial.
        echo: Stream for the script's output.
    """
    if len(tuner.task.objectives) != 1:
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
    winner = _configuration(tuner, chosen)
    if num_pairs >= LEAST_PAIRS:
        tuner.say(f"repeating trial {chosen.number} and the script as it is in {num_pairs} pairs of runs")
    found = show_winner(
        lambda: _value(tuner, _AS_IT_IS, echo),
        lambda: _value(tuner, winner, echo),
        num_pairs=num_pairs,
        is_rising=objective.is_rising,
        has_ratios=objective.name != "accuracy",
    )
    return replace(
        found, number=chosen.number, wall_s=time.monotonic() - began_s, num_runs=2 * found.num_pairs
    )


def _value(tuner: Tuner, configuration: ScriptConfiguration, echo: IO[str] | None) -> float | None:
    tuner.num_repeats += 1
    result = tuner.run(tuner.order, configuration, echo=echo, say=tuner.say)
    if result.outcome == "interrupted":
        raise KeyboardInterrupt
    if result.outcome != "done":
        return None
    task = tuner.task
    return value_of(task.objectives[0], result, tuner.metric(result), task.price_usd_per_hour)


def _configuration(tuner: Tuner, trial: Any) -> ScriptConfiguration:
    return configure(tuner.task.space, trial.user_attrs["record"]["values"], tuner.base, tuner.optimizer)


def is_script(tuner: Tuner, trial: Any) -> bool:
    """True if every value of a trial is that of the script as it is."""
    values = trial.user_attrs["record"]["values"]
    return all(name in tuner.base and tuner.base[name] == value for name, value in values.items())


def _changes_result(tuner: Tuner, trial: Any) -> bool:
    """True if a trial changes a setting on which the trained model may depend."""
    values = trial.user_attrs["record"]["values"]
    changed = {name for name, value in values.items() if tuner.base.get(name) != value}
    return any(
        parameter.changes_result
        for parameter in tuner.task.space.parameters
        if parameter.name in changed or parameter.scale_with in changed
    )


def _whole_run(tuner: Tuner, configuration: ScriptConfiguration, echo: IO[str] | None) -> TrialResult:
    order: TrialOrder = replace(tuner.order, is_short=False)
    result = run_trial(order, configuration, echo=echo)
    if result.outcome == "interrupted":
        raise KeyboardInterrupt
    return result


def _verdict(
    before: TrialResult, after: TrialResult, metric: Metric | None, max_loss: float
) -> dict[str, Any]:
    if after.outcome != "done":
        return {"is_accepted": False, "words": after.reason}
    speedup = (
        None
        if not before.step_time_s or not after.step_time_s
        else before.step_time_s / after.step_time_s
        if not before.rate_samples_per_s or not after.rate_samples_per_s
        else after.rate_samples_per_s / before.rate_samples_per_s
    )
    if metric is None or not before.curve or not after.curve:
        return {"is_accepted": True, "speedup": speedup, "words": "the script prints no metric: not compared"}
    first, second = before.curve[-1][1], after.curve[-1][1]
    loss = first - second if metric.is_rising else second - first
    return {
        "is_accepted": bool(loss <= metric.margin(max_loss, first) and math.isfinite(second)),
        "speedup": speedup,
        "metric": metric.name,
        "metric_before": first,
        "metric_after": second,
        "words": f"{metric.name} {first:.4f} before, {second:.4f} after",
    }
