"""A pruner for Optuna: a trial is pruned when its forecast cannot beat the best trial so far.

Optuna's own pruners compare trials at the same step; this pruner compares forecasts of the trials' ends, so that a
run with a late drop of the learning rate is not lost because it is behind before the drop.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

from forerun.base.errors import ForecastError, InvalidSetupError, UsageError
from forerun.jobs import Curve, CurveForecast, forecast_curve, schedule_of, shipped_table

if TYPE_CHECKING:
    import optuna


_FEWEST_POINTS = 4


def optuna_pruner_base() -> type[Any]:
    """Optuna's ``BasePruner``.

    Raises:
        UsageError: Optuna is not installed.
    """
    try:
        base: type[Any] = import_module("optuna.pruners").BasePruner
    except ModuleNotFoundError as error:
        raise UsageError(
            "ForecastPruner expects Optuna, which was not found; install it with: pip install 'optuna>=5'"
        ) from error
    return base


class ForecastPruner(optuna_pruner_base()):  # type: ignore[misc]  # known at run time only
    """Prunes a trial that, by its forecast, ends no better than the best finished trial.

    Args:
        num_steps: Number of steps of a whole trial; ``trial.report`` counts them from 0 or 1.
        schedule: Learning-rate schedule of all trials, see ``forerun.jobs.schedule_of``; None if not known.
        num_startup_trials: Number of finished trials before any trial is pruned.
        num_warm_up_steps: Number of steps before a trial can be pruned.
        with_history: True counts finished trials as runs of the same job.
    """

    def __init__(
        self,
        num_steps: int,
        *,
        schedule: Any = None,
        num_startup_trials: int = 4,
        num_warm_up_steps: int = 4,
        with_history: bool = True,
    ) -> None:
        if num_steps < 2:
            raise InvalidSetupError(f"a pruner needs trials of two or more steps, got {num_steps}")
        self._num_steps = num_steps
        self._schedule = None if schedule is None else schedule_of(schedule, num_steps)
        self._num_startup_trials = num_startup_trials
        self._num_warm_up_steps = max(_FEWEST_POINTS, num_warm_up_steps)
        self._with_history = with_history
        self._table = shipped_table()

    def prune(self, study: optuna.Study, trial: optuna.trial.FrozenTrial) -> bool:
        """True if the trial should be pruned now."""
        if len(trial.intermediate_values) < self._num_warm_up_steps:
            return False
        is_rising = study.direction.name == "MAXIMIZE"
        finished = [t for t in study.get_trials(deepcopy=False) if t.state.name == "COMPLETE"]
        if len(finished) < self._num_startup_trials:
            return False
        forecast = self._forecast(trial, finished, is_rising)
        if forecast is None:
            return False
        return not self.can_win(forecast, study.best_value)

    @staticmethod
    def can_win(forecast: CurveForecast, best: float) -> bool:
        """True if the favourable end of the forecast's 90 % interval is better than the best trial."""
        if forecast.curve.is_rising:
            return forecast.final.high_90 > best
        return forecast.final.low_90 < best

    def _forecast(self, trial: Any, finished: list[Any], is_rising: bool) -> CurveForecast | None:
        siblings = [_curve(t, is_rising) for t in finished if len(t.intermediate_values) >= _FEWEST_POINTS]
        try:
            return forecast_curve(
                _curve(trial, is_rising),
                self._table,
                end_epoch=max(self._num_steps, len(trial.intermediate_values)),
                schedule=self._schedule,
                is_schedule_unknown=True,
                siblings=siblings if self._with_history else (),
            )
        except ForecastError:
            return None  # too short, or diverged: the trial's own code handles both


def _curve(trial: Any, is_rising: bool) -> Curve:
    steps = np.asarray(sorted(trial.intermediate_values), dtype=float)
    values = np.asarray([trial.intermediate_values[int(step)] for step in steps])
    return Curve(
        name=f"trial {trial.number}",
        metric="objective",
        epochs=steps + 1 if steps[0] == 0 else steps,
        values=values,
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
