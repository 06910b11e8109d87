"""A pruner for Optuna and a scheduler for Ray Tune: a trial ends when it is too unlikely to beat the best so far.

Optuna can end a trial and not pause it; the scheduler for Ray Tune can also pause trials for others (``next_trial``).
Their own pruners compare trials at the same step; this one asks for the chance of a better end, by what finished trials
still fell from there (``chance_to_win``), or by a forecast of the trial alone. The chance must be the larger, the more
of the trial is left to pay for. Simulated searches: ``studies.forecast.sweeps``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import numpy as np

from forerun.base.errors import ForecastError, InvalidSetupError, UsageError
from forerun.base.extras import needing
from forerun.jobs import (
    HOPELESS,
    Curve,
    chance_to_win,
    forecast_curve,
    next_stage,
    next_trial,
    schedule_of,
    shipped_table,
)

with needing("ForecastPruner"):
    import optuna

_FEWEST_POINTS = 4


class ForecastPruner(optuna.pruners.BasePruner):  # type: ignore[misc]  # Optuna is not followed
    """Prunes a trial that, by its forecast, ends no better than the best finished trial.

    Args:
        num_steps: Number of steps of a whole trial; ``trial.report`` counts them from 0 or 1.
        schedule: Learning-rate schedule of all trials, see ``forerun.jobs.schedule_of``, for a forecast without
            history: finished trials show its drops. None if not known.
        num_startup_trials: Number of finished trials before any trial is pruned.
        num_warm_up_steps: Number of steps before a trial can be pruned.
        with_history: True counts finished trials as runs of the same job, False forecasts each trial alone.
        hopeless: A trial is pruned where its probability of beating the best finished trial is at most this, times
            the share of it that is left.
    """

    def __init__(
        self,
        num_steps: int,
        *,
        schedule: Any = None,
        num_startup_trials: int = 1,
        num_warm_up_steps: int = 4,
        with_history: bool = True,
        hopeless: float = HOPELESS,
    ) -> None:
        if num_steps < 2:
            raise InvalidSetupError(f"a pruner needs trials of two or more steps, got {num_steps}")
        self._num_steps = num_steps
        self._schedule = None if schedule is None else schedule_of(schedule, num_steps)
        self._num_startup_trials = num_startup_trials
        self._num_warm_up_steps = max(_FEWEST_POINTS, num_warm_up_steps)
        self._with_history, self._hopeless = with_history, hopeless
        self._table = shipped_table()

    def prune(self, study: optuna.Study, trial: optuna.trial.FrozenTrial) -> bool:
        """True if the trial should be pruned now."""
        finished = [t for t in study.get_trials(deepcopy=False) if t.state.name == "COMPLETE"]
        if len(trial.intermediate_values) < _FEWEST_POINTS or not finished:
            return False
        is_rising = study.direction.name == "MAXIMIZE"
        curves = [_curve(t, is_rising) for t in finished if t.intermediate_values]
        return self.is_lost(_curve(trial, is_rising), curves, study.best_value)

    def is_lost(self, curve: Curve, finished: Sequence[Curve], best: float) -> bool:
        """True if the chance of an end better than ``best`` is too small; False while little is known."""
        if len(curve) < self._num_warm_up_steps or len(finished) < self._num_startup_trials:
            return False
        progress = min(1.0, float(curve.epochs[-1]) / self._num_steps)
        bound = self._hopeless * (1 - progress)
        if self._with_history:
            chance = chance_to_win(curve, [run for run in finished if len(run) >= _FEWEST_POINTS], progress)
            return chance is not None and chance <= bound
        try:
            forecast = forecast_curve(
                curve,
                self._table,
                end_epoch=max(self._num_steps, float(curve.epochs[-1])),
                schedule=self._schedule,
            )
        except ForecastError:
            return False  # too short, or diverged: the trial's own code handles both
        return forecast.probability_final_beats(best) <= bound


def ray_scheduler(
    num_steps: int,
    *,
    metric: str | None = None,
    mode: str | None = None,
    pauses: bool = False,
    **options: Any,
) -> Any:
    """A scheduler for Ray Tune that stops trials which cannot win any more, or pauses them for a more promising one.

    Args:
        num_steps: Number of results of a whole trial, ``training_iteration`` at its end.
        metric: Metric of the trials; that of ``TuneConfig`` if None.
        mode: "max" or "min"; that of ``TuneConfig`` if None.
        pauses: True pauses and resumes trials as ``forerun.jobs.next_trial`` says, and stops none; trials must save
            checkpoints, or begin anew. False stops a trial whose forecast ends no better than the best finished one.
        options: Where trials are stopped, ``schedule``, ``num_startup_trials``, ``num_warm_up_steps``, ``with_history``
            and ``hopeless``, as of ``ForecastPruner``.

    Raises:
        InvalidSetupError: Fewer than two steps, or options of stopping where trials pause.
        UsageError: Ray Tune is not installed.
    """
    if pauses and options:
        raise InvalidSetupError(f"a scheduler that pauses stops no trial; leave out {', '.join(options)}")
    judge = ForecastPruner(num_steps, **options)
    try:
        base: type[Any] = import_module("ray.tune.schedulers").FIFOScheduler
    except ImportError as error:
        raise UsageError(
            "the scheduler for Ray Tune expects Ray Tune, which was not found; install it with: pip install 'ray[tune]'"
        ) from error
    stopping = _ray_class(base)
    return (
        _pausing_class(stopping, num_steps)(judge, metric, mode) if pauses else stopping(judge, metric, mode)
    )


def _ray_class(base: type[Any]) -> type[Any]:
    class ForecastScheduler(base):  # type: ignore[misc]  # the base is known at run time only
        """Starts trials in turn, and stops those that cannot win any more."""

        def __init__(self, judge: ForecastPruner, metric: str | None, mode: str | None) -> None:
            super().__init__()
            self._judge, self._metric, self._mode = judge, metric, mode
            self._seen: dict[str, dict[float, float]] = {}
            self._finished: set[str] = set()

        def set_search_properties(self, metric: str | None, mode: str | None, **spec: Any) -> bool:
            """Called by the tuner with the metric and mode of its configuration."""
            self._metric, self._mode = metric or self._metric, mode or self._mode
            return bool(self._metric and self._mode)

        def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
            """Called by the tuner after each result."""
            self._note(trial, result)
            finished = [self._curve(key) for key in sorted(self._finished)]
            if not finished:
                return str(base.CONTINUE)
            ends = [float(curve.values[-1]) for curve in finished]
            best = max(ends) if self._mode == "max" else min(ends)
            lost = self._judge.is_lost(self._curve(trial.trial_id), finished, best)
            return str(base.STOP if lost else base.CONTINUE)

        def on_trial_complete(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> None:
            """Called by the tuner at the end of a trial that was not stopped."""
            self._note(trial, result)
            self._finished.add(trial.trial_id)

        def _note(self, trial: Any, result: dict[str, Any]) -> None:
            if self._metric in result:
                seen = self._seen.setdefault(trial.trial_id, {})
                seen[float(result["training_iteration"])] = float(result[self._metric])

        def _curve(self, key: str) -> Curve:
            return _curve_of(f"trial {key}", self._seen[key], self._mode == "max")

    return ForecastScheduler


def _pausing_class(base: type[Any], num_steps: int) -> type[Any]:
    class PausingScheduler(base):  # type: ignore[misc]  # the base is known at run time only
        """Runs the trial that ``next_trial`` says, each up to the next share at which it may pause."""

        _supports_buffered_results = False

        def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
            """Called by the tuner after each result."""
            before = max(self._seen.get(trial.trial_id, {0.0: 0.0})) / num_steps
            self._note(trial, result)
            done = float(result["training_iteration"]) / num_steps
            if done < next_stage(before) * (1 - 1e-9) or done >= 1:
                return str(base.CONTINUE)
            waiting = [t for t in tune_controller.get_trials() if t.status in ("PENDING", "PAUSED")]
            return str(base.CONTINUE if self._next([trial, *waiting]) is trial else base.PAUSE)

        def choose_trial_to_run(self, tune_controller: Any) -> Any:
            """Called by the tuner where resources are free."""
            return self._next([t for t in tune_controller.get_trials() if t.status in ("PENDING", "PAUSED")])

        def _next(self, trials: list[Any]) -> Any:
            """The one of some trials that should run; all that have begun are learned from."""
            if not self._seen or not trials:
                return trials[0] if trials else None
            by_name = {f"trial {trial.trial_id}": trial for trial in trials if trial.trial_id in self._seen}
            new = [trial for trial in trials if trial.trial_id not in self._seen]
            curves = [self._curve(key) for key in self._seen]
            found = next_trial(curves, [float(num_steps)] * len(curves), num_new=len(new))
            able = (row.name for row in found.standings if row.index is not None)
            names = (name for name in able if name in by_name or (name is None and new))
            name = next(names, None)
            return new[0] if name is None and new else by_name.get(str(name), trials[0])

    return PausingScheduler


def _curve(trial: Any, is_rising: bool) -> Curve:
    return _curve_of(f"trial {trial.number}", trial.intermediate_values, is_rising)


def _curve_of(name: str, values: Mapping[float, float], is_rising: bool) -> Curve:
    steps = np.asarray(sorted(values), dtype=float)
    return Curve(
        name=name,
        metric="objective",
        epochs=steps + 1 if steps[0] == 0 else steps,
        values=np.asarray([values[step] for step in steps.tolist()]),
        is_rising=is_rising,
    )


class TrialPruner:
    """Judges a trial by each value it prints: a trial ends when its forecast cannot win.

    A trial that runs again because its node died prints its values again. A value with a number seen before changes
    nothing: the known values stay, and the trial is judged again when a later value comes.

    Args:
        study: Optuna's study, whose finished trials are to be beaten.
        trial: Running trial of that study.
        num_rounds: Number of values that a whole run prints, two or more.
        is_rising: True if a larger value is better.
    """

    def __init__(self, study: Any, trial: Any, num_rounds: int, *, is_rising: bool) -> None:
        self._study, self._trial, self._num_rounds = study, trial, num_rounds
        # As in the objective, the sign of a falling metric is turned.
        self._sign = 1.0 if is_rising else -1.0
        self._pruner = ForecastPruner(num_rounds)
        self._num_told = 0
        self._is_lost = False

    def __call__(self, number: int, value: float) -> bool:
        """Takes a value and its number, counted from one; True if the trial should end."""
        if number > self._num_told:
            self._num_told = number
            self._trial.report(self._sign * value, number)
            # Nothing is left to save by ending a trial that printed its last value.
            if number < self._num_rounds:
                frozen = self._study.get_trials(deepcopy=False)[self._trial.number]
                self._is_lost = bool(self._pruner.prune(self._study, frozen))
        return self._is_lost
