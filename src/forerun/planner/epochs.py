"""Epochs to a target, for plans: those of a run, and those at other batch sizes.

    epochs(B) = epochs(b) samples(B) / samples(b),     samples(B) = S_min B + S_min B_c

with b the batch size of the run and S_min, B_c those of ``convergence.batch_scaling``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.stats import t as student_t

from forerun.convergence.batch_scaling import BatchScaling
from forerun.errors import ForecastError
from forerun.prediction.estimate import Interval

__all__ = ["EpochsToTarget", "LearningRun", "epochs_of_finished_runs", "epochs_of_law", "epochs_of_ranks"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_TO_90 = 1.6449 / 1.2816
"""Distance of the 95 % rank from the middle, where a 90 % interval ends, over that of the 90 % rank; normal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRun:
    """Epochs that a model needs to a target, and their batch size.

    Attributes:
        epochs: Epochs to the target, with their 90 % interval.
        batch_size: Batch size of the run behind them; None where it is not known or does not matter.
    """

    epochs: Interval
    batch_size: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochsToTarget:
    """Epochs of every candidate; the planner's ``EpochsOf``.

    Attributes:
        runs: Epochs to the target by model.
        law: Samples to the target against the batch size; None leaves the epochs unchanged. With a law every run
            has its batch size.
    """

    runs: Mapping[str, LearningRun]
    law: BatchScaling | None = None

    def __call__(self, model: str, global_batch: Ints) -> Floats:
        """Value, low and high, (3, n)."""
        run = self.runs[model]
        ends = np.asarray([run.epochs.value, run.epochs.low, run.epochs.high])
        growth = np.ones(len(global_batch))
        if self.law is not None:
            assert run.batch_size is not None
            growth = self.law.samples(global_batch) / self.law.samples([run.batch_size])
        return np.asarray(ends[:, None] * growth)


def epochs_of_ranks(ranks: tuple[float, float, float], end: float) -> Interval:
    """Epochs to a target, from those at probabilities 0.1, 0.5 and 0.9.

    The 90 % interval reaches further than these ranks: in logarithms 1.28 times as far from the middle. Training ends
    at its end, reached or not: no interval goes beyond, and a rank that is never reached is the end.

    Args:
        ranks: Epochs at the three probabilities; infinite if not by the end.
        end: Epoch at which training ends.

    >>> epochs_of_ranks((18.0, 20.0, float("inf")), 30.0).high
    30.0
    """
    early, middle, late = ranks
    low = middle * (early / middle) ** _TO_90 if early > 0 else 0.0
    high = middle * (late / middle) ** _TO_90 if math.isfinite(late) else end
    return Interval(middle, min(low, middle), max(middle, min(high, end)))


def epochs_of_finished_runs(epochs: Sequence[float]) -> Interval:
    """Epochs of a future run, from those at which finished runs of the same job reached the target.

    The geometric mean m, and with n runs whose logarithms scatter by s the interval of one more,

        m exp(+-t s sqrt(1 + 1 / n)),

    t being Student's 95 % quantile with n - 1 degrees of freedom. One run has no scatter and no interval.

    Raises:
        ForecastError: No run reached the target.
    """
    reached = [epoch for epoch in epochs if math.isfinite(epoch) and epoch > 0]
    if not reached:
        raise ForecastError("no finished run reached the target; give a lower target, or longer runs")
    logs = np.log(reached)
    mean, count = float(np.mean(logs)), len(reached)
    width = 0.0
    if count > 1:
        quantile = float(student_t.ppf(0.95, count - 1))
        width = quantile * float(np.std(logs, ddof=1)) * math.sqrt(1 + 1 / count)
    return Interval(math.exp(mean), math.exp(mean - width), math.exp(mean + width))


def epochs_of_law(law: BatchScaling, batch_size: float, dataset_size: int) -> LearningRun:
    """Epochs at one batch size by the law alone; the interval is its worst error at the points behind it.

    >>> law = BatchScaling(least_steps=1000.0, least_samples=64_000.0, worst_error=0.1)
    >>> epochs_of_law(law, 64, 64_000).epochs
    Interval(value=2.0, low=1.8, high=2.2)
    """
    epochs = float(law.epochs([batch_size], dataset_size)[0])
    ends = (epochs * (1 - law.worst_error), epochs * (1 + law.worst_error))
    return LearningRun(epochs=Interval(epochs, *ends), batch_size=batch_size)
