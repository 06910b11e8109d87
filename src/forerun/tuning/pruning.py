"""Judges a trial by the values that it prints, while it runs."""

from __future__ import annotations

from typing import Any

__all__ = ["TrialPruner"]


class TrialPruner:
    """Told each printed value of a trial; says whether its forecast cannot win.

    A trial that is run again, because its node died, prints its values again. Those of a number that was told before
    change nothing: what is known of the trial stays, and is judged once more when a later value comes.

    Args:
        study: Of Optuna, whose finished trials are to be beaten.
        trial: The running one, as the study gave it.
        num_rounds: Values that a whole run prints, two or more.
        is_rising: Whether more is better.
    """

    def __init__(self, study: Any, trial: Any, num_rounds: int, *, is_rising: bool) -> None:
        # Optuna is only loaded where a study is; nodes of a cluster may lack it.
        from forerun.callbacks import ForecastPruner

        self._study, self._trial, self._num_rounds = study, trial, num_rounds
        # As in the objective, a falling metric is told with its sign turned.
        self._sign = 1.0 if is_rising else -1.0
        self._pruner = ForecastPruner(num_rounds)
        self._num_told = 0
        self._is_lost = False

    def __call__(self, number: int, value: float) -> bool:
        """Takes the value of a number, counted from one; true if the trial is to be ended."""
        if number > self._num_told:
            self._num_told = number
            self._trial.report(self._sign * value, number)
            # Nothing is left to save by ending a trial that printed its last value.
            if number < self._num_rounds:
                frozen = self._study.get_trials(deepcopy=False)[self._trial.number]
                self._is_lost = bool(self._pruner.prune(self._study, frozen))
        return self._is_lost
