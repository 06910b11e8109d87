"""Split-conformal intervals for positive quantities, on the logarithm of measured over predicted.

The score of a row is |log(actual / predicted)| / scale. A quantile q of the scores of rows that took no
part in the fit gives the interval predicted * exp(-q scale) ... predicted * exp(q scale), which covers a
new row with the wanted probability if it is exchangeable with those rows. Rows of one device are not
exchangeable with rows of another, hence the weights.

Source: Lei et al. 2018, Journal of the American Statistical Association 113(523); weights after Tibshirani
et al. 2019, NeurIPS.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from forerun.base.errors import RecordError

__all__ = [
    "IntervalLaw",
    "conformal_quantile",
    "conformal_scores",
    "coverage",
    "fit_law",
    "group_weights",
    "interval",
    "worst_group_quantile",
]

Floats = npt.NDArray[np.float64]


def _positive(values: npt.ArrayLike, what: str) -> Floats:
    array = np.asarray(values, dtype=float)
    if array.size == 0 or not np.all(np.isfinite(array) & (array > 0)):
        raise RecordError(f"{what} must be numbers above zero and at least one, got {array}")
    return array


def conformal_scores(predicted: npt.ArrayLike, actual: npt.ArrayLike, scale: npt.ArrayLike = 1.0) -> Floats:
    """|log(actual / predicted)| / scale, (n,).

    Args:
        predicted: Predictions, positive, (n,).
        actual: Measurements, positive, (n,).
        scale: Believed uncertainty of each prediction, positive, (n,) or one for all.
    """
    ratio = _positive(actual, "measured values") / _positive(predicted, "predictions")
    return np.asarray(np.abs(np.log(ratio)) / _positive(scale, "scales"), dtype=float)


def group_weights(groups: Sequence[object]) -> Floats:
    """Weights that let each group (device) count alike, whatever its number of rows; they add up to n."""
    _, index, sizes = np.unique(
        np.array([str(group) for group in groups]), return_inverse=True, return_counts=True
    )
    return np.asarray(len(groups) / len(sizes) / sizes[index], dtype=float)


def conformal_quantile(
    scores: npt.ArrayLike, target: float = 0.9, weights: npt.ArrayLike | None = None
) -> float:
    """Smallest score that, with the correction for a finite sample, covers the target share.

    The new row counts as one more row with an infinite score: the quantile is the smallest s with
    sum of weights of scores <= s at least target * (n + 1). With equal weights this is the
    ceil((n + 1) target)-th smallest score. Infinite if there are too few rows (fewer than 9 at 0.9).

    Args:
        scores: Scores of rows outside the fit, (n,).
        target: Wanted coverage, between 0 and 1.
        weights: Weight of each row, scaled to add up to n; equal if not given.
    """
    if not 0 < target < 1:
        raise RecordError(f"coverage must lie between 0 and 1, got {target}")
    values = np.asarray(scores, dtype=float)
    if values.size == 0 or np.any(np.isnan(values)):
        raise RecordError("expected at least one score and no NaN among them")
    mass = np.ones(len(values)) if weights is None else _positive(weights, "weights")
    if len(mass) != len(values):
        raise RecordError(f"expected one weight per score ({len(values)}), got {len(mass)}")
    mass = mass * len(values) / mass.sum()
    order = np.argsort(values)
    # The small allowance keeps sums of equal weights from missing their target by rounding.
    reached = np.cumsum(mass[order]) >= target * (len(values) + 1) - 1e-9
    return float(values[order][reached.argmax()]) if reached.any() else float("inf")


def worst_group_quantile(scores: npt.ArrayLike, groups: Sequence[object], target: float = 0.9) -> float:
    """Largest of the groups' own quantiles: the interval that would have covered every group.

    A group too small for its corrected quantile contributes its largest score.
    """
    values = np.asarray(scores, dtype=float)
    names = np.array([str(group) for group in groups])
    if len(names) != len(values):
        raise RecordError(f"expected one group per score ({len(values)}), got {len(names)}")
    per_group = [values[names == name] for name in np.unique(names)]
    if not per_group:
        raise RecordError("expected at least one group of scores, got none")
    return max(min(conformal_quantile(group, target), float(group.max())) for group in per_group)


def interval(predicted: npt.ArrayLike, quantile: float, scale: npt.ArrayLike = 1.0) -> tuple[Floats, Floats]:
    """Low and high of each prediction, (n,) each: predicted * exp(-+ quantile * scale)."""
    centre = _positive(predicted, "predictions")
    half = quantile * np.asarray(scale, dtype=float)
    return np.asarray(centre * np.exp(-half), dtype=float), np.asarray(centre * np.exp(half), dtype=float)


def coverage(actual: npt.ArrayLike, low: npt.ArrayLike, high: npt.ArrayLike) -> float:
    """Share of measurements inside their interval, borders included."""
    values, lows, highs = (np.asarray(part, dtype=float) for part in (actual, low, high))
    if values.size == 0 or values.shape != lows.shape or values.shape != highs.shape:
        raise RecordError(
            f"expected one interval per measurement, got {values.shape}, {lows.shape} and {highs.shape}"
        )
    if np.any(lows > highs):
        raise RecordError("low <= high must hold for every interval")
    return float(np.mean((values >= lows) & (values <= highs)))


_BASE = 0.05
_SLOPES = (0.0, 0.5, 1.0, 2.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalLaw:
    """Half-width = quantile * (base + slope * spread), in the log of the step time."""

    quantile: float
    base: float
    slope: float

    def half_widths(self, spread: Floats) -> Floats:
        """Half-widths of the log step time, (n,)."""
        widths: Floats = self.quantile * (self.base + self.slope * spread)
        return widths


def fit_law(residuals: Floats, spread: Floats, groups: Sequence[object], target: float = 0.9) -> IntervalLaw:
    """The law with the narrowest mean interval that covers the target share.

    Args:
        residuals: log(measured / predicted) of held-out rows, (n,).
        spread: Standard deviation over the ensemble, (n,).
        groups: Group of each row.
        target: Share to cover.
    """
    weights = group_weights(groups)
    laws = []
    for slope in _SLOPES:
        scores = np.abs(residuals) / (_BASE + slope * spread)
        laws.append(
            IntervalLaw(quantile=float(conformal_quantile(scores, target, weights)), base=_BASE, slope=slope)
        )
    return min(laws, key=lambda law: float(np.average(law.half_widths(spread), weights=weights)))
