"""Cleaning of a curve before a forecast, and notes on it.

Outliers: as Optimus does, a point outside [min of the next points, max of the points before] is replaced by the mean of
its neighbours, but only if it also stands out from the running median by more than ``OUTLIER_SPREADS`` times the
spread of the others: a plain drop of the learning rate is no outlier.

Source of the rule: Peng et al. 2018, EuroSys, section 3.1; of the spread: median absolute deviation, Hampel 1974.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from forerun.convergence.curve import Curve, Floats

__all__ = [
    "OUTLIER_SPREADS",
    "CleanCurve",
    "clean",
    "evaluation_noise",
    "relative_noise",
    "running_median",
    "without_outliers",
]

OUTLIER_SPREADS = 5.0
"""Distance from the running median, in robust standard deviations, from which a lonely point is replaced."""

_WINDOW = 5
_RUNAWAY_FACTOR = 2.0
"""A loss above so many times both its best and its beginning, and staying there, has run away."""

_COLLAPSE_SHARE = 0.75
_COLLAPSE = 0.2
_FEWEST_COLLAPSED = 4
_COLLAPSED_SHARE = 0.2
"""A metric that rises has collapsed if it lost three quarters of what it had gained, no less than a fifth of its
scale, and stays there for a fifth of the points seen, four or more: detectors and fine-tunings fall for a few epochs,
and come back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CleanCurve:
    """A curve whose values are all numbers.

    Attributes:
        curve: The rows that hold numbers, outliers replaced.
        num_missing: Rows without a number that were dropped.
        num_outliers: Values that were replaced.
        has_diverged: Whether the run ran away: it ends in NaN or far above where it was.
        notes: What a reader should know, sentences.
    """

    curve: Curve
    num_missing: int
    num_outliers: int
    has_diverged: bool
    notes: tuple[str, ...]


def clean(curve: Curve) -> CleanCurve | None:
    """Drops rows without numbers, replaces outliers and looks for divergence; None if no number is left."""
    finite = np.isfinite(curve.values)
    if not finite.any():
        return None
    kept = _rows(curve, finite)
    ends_missing = not finite[-1] and len(curve) - 1 - int(np.flatnonzero(finite)[-1]) >= 2
    values, num_outliers = without_outliers(kept.values)
    errors = -values if curve.is_rising else values
    has_diverged = bool(ends_missing or _ran_away(errors, curve.is_rising))
    notes = []
    if not finite.all():
        notes.append(f"{int((~finite).sum())} rows without a number were left out")
    if num_outliers:
        notes.append(f"{num_outliers} lonely outliers were replaced by the mean of their neighbours")
    return CleanCurve(
        curve=replace(kept, values=values),
        num_missing=int((~finite).sum()),
        num_outliers=num_outliers,
        has_diverged=has_diverged,
        notes=tuple(notes),
    )


def _rows(curve: Curve, keep: npt.NDArray[np.bool_]) -> Curve:
    def cut(column: Floats | None) -> Floats | None:
        return None if column is None else column[keep]

    return replace(
        curve,
        epochs=curve.epochs[keep],
        values=curve.values[keep],
        steps=cut(curve.steps),
        learning_rates=cut(curve.learning_rates),
        elapsed_s=cut(curve.elapsed_s),
    )


def running_median(values: Floats, window: int = _WINDOW) -> Floats:
    """Median over a centred window that shrinks at the ends, (n,)."""
    half = window // 2
    return np.asarray(
        [np.median(values[max(0, i - half) : i + half + 1]) for i in range(len(values))], dtype=float
    )


def without_outliers(values: Floats) -> tuple[Floats, int]:
    """Values with lonely outliers replaced by the mean of their neighbours, and how many there were."""
    if len(values) < 2 * _WINDOW - 1:
        return values, 0
    distance = np.abs(values - running_median(values))
    spread = 1.4826 * float(np.median(np.abs(np.diff(values)))) / np.sqrt(2)
    if spread <= 0:
        return values, 0
    found = values.copy()
    num = 0
    for i in range(1, len(values) - 1):
        near = values[[i - 1, i + 1]]
        alone = abs(values[i] - near.mean()) > 2 * abs(near[1] - near[0])
        if distance[i] > OUTLIER_SPREADS * spread and alone:
            found[i] = near.mean()
            num += 1
    return found, num


def evaluation_noise(errors: Floats) -> float:
    """Standard deviation of single evaluations around the trend, from the second half of what was seen.

    Differences of neighbours have 1.41 times the spread; their median is not moved by the trend or by a drop.
    """
    steps = np.diff(errors[len(errors) // 2 :])
    if len(steps) < 2:
        return 0.0
    return 1.4826 * float(np.median(np.abs(steps - np.median(steps)))) / float(np.sqrt(2))


def relative_noise(errors: Floats) -> float:
    """Spread of single evaluations over their level, both in the second half of what was seen; 0 to 1.

    Noise falls with the level: an accuracy near 1 from n images varies by less than one near one half.
    """
    level = float(np.median(errors[len(errors) // 2 :]))
    return min(1.0, evaluation_noise(errors) / level) if level > 0 else 0.0


def _ran_away(errors: Floats, is_rising: bool) -> bool:
    """True if the last points are, and stay, far worse than the best stretch before them."""
    num_late = max(_FEWEST_COLLAPSED if is_rising else 2, round(_COLLAPSED_SHARE * len(errors)))
    if len(errors) < _FEWEST_COLLAPSED + num_late:
        return False
    smooth = running_median(errors)
    best, first, late = float(smooth.min()), float(smooth[0]), float(errors[-num_late:].min())
    if is_rising:  # errors are minus the metric
        gained, top = first - best, float(np.max(np.abs(errors)))
        scale = 1.0 if top <= 1 else top
        return late - best >= max(_COLLAPSE_SHARE * gained, _COLLAPSE * scale) and gained > 0
    return late > _RUNAWAY_FACTOR * max(best, first, 1e-12)
