"""Judges a trial by the values that it prints, while it runs."""

from __future__ import annotations

from typing import Any

__all__ = ["TrialPruner"]


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
        # Only a process with a study loads Optuna; nodes of a cluster may lack it.
        from forerun.script.callbacks import ForecastPruner

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
