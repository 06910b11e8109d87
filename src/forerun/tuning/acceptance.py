"""Acceptance of the best trial of a study, by whole runs beside the script as it is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import IO, Any

from forerun.tuning.configuration import ScriptConfiguration, configure
from forerun.tuning.space import Metric
from forerun.tuning.trial import TrialResult, run_trial
from forerun.tuning.tuner import Tuner

__all__ = ["accept_best"]

_MOST_TRIED = 3


def accept_best(
    tuner: Tuner, ranked: Sequence[Any], max_loss: float, *, check: bool, echo: IO[str] | None
) -> tuple[Any, dict[str, Any] | None, tuple[str, ...]]:
    """Makes whole runs of the script as it is and of the best trials, until one keeps the metric."""
    if not ranked:
        return None, None, ("no trial brought a value",)
    order = tuner.task.order
    if not check or not order.is_short:
        note = () if not order.is_short else ("accuracy was not checked: --no-check",)
        return ranked[0], None, note
    whole = replace(order, is_short=False)
    before = run_trial(whole, ScriptConfiguration(arguments={}, hooks={}), echo=echo)
    if before.outcome != "done":
        return (
            ranked[0],
            None,
            (f"accuracy was not checked: the script as it is {before.outcome}: {before.reason}",),
        )
    tried: list[dict[str, Any]] = []
    for trial in ranked[:_MOST_TRIED]:
        configuration = configure(
            tuner.task.space, trial.user_attrs["record"]["values"], tuner.base, tuner.optimizer
        )
        after = run_trial(whole, configuration, echo=echo)
        verdict = _verdict(before, after, tuner.metric(before), max_loss)
        tuner.say(f"whole run of trial {trial.number}: {after.outcome}, {verdict['words']}")
        tried.append({"number": trial.number, **verdict})
        if verdict["is_accepted"]:
            checked = {"baseline": before.as_dict(), "best": after.as_dict(), **verdict, "tried": tried}
            return trial, checked, ()
    lost = f"none of the {len(tried)} fastest trials keeps the metric within {max_loss:g}: the script as it is stays"
    return None, {"baseline": before.as_dict(), "best": None, "tried": tried}, (lost,)


def _verdict(
    before: TrialResult, after: TrialResult, metric: Metric | None, max_loss: float
) -> dict[str, Any]:
    if after.outcome != "done":
        return {"is_accepted": False, "words": after.reason}
    speedup = (
        None
        if not before.rate_samples_per_s or not after.rate_samples_per_s
        else after.rate_samples_per_s / before.rate_samples_per_s
    )
    if metric is None or not before.curve or not after.curve:
        return {"is_accepted": True, "speedup": speedup, "words": "the script prints no metric: not compared"}
    first, second = before.curve[-1][1], after.curve[-1][1]
    loss = first - second if metric.is_rising else second - first
    return {
        "is_accepted": bool(loss <= max_loss and math.isfinite(second)),
        "speedup": speedup,
        "metric": metric.name,
        "metric_before": first,
        "metric_after": second,
        "words": f"{metric.name} {first:.4f} before, {second:.4f} after",
    }
