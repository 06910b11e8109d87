"""Optimus' convergence model.

    loss(k) = 1 / (b0 k + b1) + b2,    b0, b1, b2 >= 0

With s = b1 / b0 it is B / (k + s) + b2, linear in B = 1 / b0 and b2: s alone is searched, on a grid that is refined
around its best, and B and b2 are solved by non-negative least squares on the losses themselves. So b2 goes wherever
the points want it, above the lowest of noisy ones too; there is no starting point and no fit that fails. The linear
form of the published code, 1 / (loss - b2) = b0 k + b1, needs b2 below every point, and turns noise around.

The published code weighs the residuals of each third of the history four times more than those of the third before.

Source: Peng, Bao, Chen, Wu and Guo 2018, EuroSys, section 3.1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from forerun.convergence.curve import Floats
from forerun.convergence.forecaster import Prefix, forecaster
from forerun.convergence.nonnegative import nonnegative_fit

__all__ = ["OptimusFit", "fit_optimus", "optimus_path"]

_WEIGHT_OF_A_THIRD = 4.0
_NUM_SHIFTS = 24
_NUM_REFINED = 9
_REFINEMENTS = 9
_NEAREST_SHIFT = 1e-3  # of the first distance between points
_FARTHEST_SHIFT = 1e3  # of the last step: the curve is a straight line by then


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimusFit:
    """Coefficients of the model.

    Attributes:
        b0: Rate [1 / (loss x step)].
        b1: Inverse of the loss to lose at step 0 [1 / loss].
        b2: What is left in the end [loss].
        rmse: Root mean squared residual [loss].
        deviations: Standard errors of b0, b1 and b2 from the curvature of the fit; infinite where the points do not
            determine them.
    """

    b0: float
    b1: float
    b2: float
    rmse: float
    deviations: tuple[float, float, float]

    def losses(self, steps: Floats) -> Floats:
        """Loss after so many steps, (n,)."""
        return 1.0 / np.maximum(self.b0 * steps + self.b1, 1e-12) + self.b2

    def steps_to(self, loss: float) -> float:
        """Steps until the loss is reached; infinite if it never is."""
        if loss <= self.b2 or self.b0 <= 0:
            return 0.0 if loss >= 1.0 / max(self.b1, 1e-12) + self.b2 else float("inf")
        return max(0.0, (1.0 / (loss - self.b2) - self.b1) / self.b0)


def fit_optimus(steps: Floats, losses: Floats, *, with_published_weights: bool = False) -> OptimusFit:
    """Fits the model by least squares on the losses.

    Args:
        steps: Steps or epochs, ascending, not negative, (n,).
        losses: Not negative, (n,).
        with_published_weights: Whether residuals of later thirds of the history count four times more each.
    """
    top, last = float(np.max(losses)) or 1.0, float(steps[-1]) or 1.0
    places, scaled = steps / last, losses / top
    weights = _thirds(len(losses)) if with_published_weights else np.ones(len(losses))
    gap = float(places[1] - places[0]) if len(places) > 1 else 1.0
    nearest = 0.0 if places[0] > 0 else _NEAREST_SHIFT * gap
    shifts = np.concatenate([[nearest], np.geomspace(_NEAREST_SHIFT * gap, _FARTHEST_SHIFT, _NUM_SHIFTS)])
    for refinement in range(_REFINEMENTS):
        solved, loss = _solved(shifts, places, scaled, weights)
        best = int(np.argmin(loss))
        if refinement + 1 < _REFINEMENTS:
            low, high = shifts[max(best - 1, 0)], shifts[min(best + 1, len(shifts) - 1)]
            shifts = np.unique(np.append(np.linspace(low, high, _NUM_REFINED), shifts[best]))
    slope, floor = float(solved[best, 0]), float(solved[best, 1])
    if slope <= 0:  # no fall at all: a constant
        return _fit_of(0.0, 1.0 / max(floor * top, 1e-12), 0.0, steps, losses, weights)
    b0 = 1.0 / (slope * top * last)
    return _fit_of(b0, float(shifts[best]) * last * b0, floor * top, steps, losses, weights)


def _solved(shifts: Floats, places: Floats, scaled: Floats, weights: Floats) -> tuple[Floats, Floats]:
    falls = 1.0 / (places + shifts[:, None])
    # Each fall on the scale of 1, or far shifts would give columns that differ by the rounding only.
    height = falls[:, :1]
    columns = np.stack([falls / height, np.ones_like(falls)], axis=2) * weights[:, None]
    solved, loss = nonnegative_fit(columns, scaled * weights)
    return solved / np.concatenate([height, np.ones_like(height)], axis=1), loss


def _fit_of(b0: float, b1: float, b2: float, steps: Floats, losses: Floats, weights: Floats) -> OptimusFit:
    fall = 1.0 / np.maximum(b0 * steps + b1, 1e-12)
    residuals = losses - fall - b2
    return OptimusFit(
        b0=b0,
        b1=b1,
        b2=b2,
        rmse=float(np.sqrt(np.mean(residuals**2))),
        deviations=_deviations(fall, steps, residuals, weights),
    )


def _deviations(
    fall: Floats, steps: Floats, residuals: Floats, weights: Floats
) -> tuple[float, float, float]:
    """Standard errors of (b0, b1, b2): the root of the diagonal of s^2 (J' W J)^-1, as ``curve_fit`` states them."""
    never = (float("inf"),) * 3
    if len(steps) <= len(never):
        return never
    columns = np.stack([-steps * fall**2, -(fall**2), np.ones_like(fall)], axis=1) * weights[:, None]
    scale = np.sqrt(np.sum(columns**2, axis=0))
    if np.any(scale <= 0):
        return never
    gram = (columns / scale).T @ (columns / scale)
    if np.linalg.cond(gram) > 1e14:
        return never
    variance = float(np.sum((weights * residuals) ** 2)) / (len(steps) - len(never))
    found = np.sqrt(variance * np.diag(np.linalg.inv(gram))) / scale
    return float(found[0]), float(found[1]), float(found[2])


def _thirds(num_points: int) -> Floats:
    third = np.minimum(2, np.arange(num_points) * 3 // max(num_points, 1))
    return np.asarray(_WEIGHT_OF_A_THIRD**third, dtype=float)


@forecaster("optimus")
def optimus_path(prefix: Prefix) -> Floats:
    """Optimus' model of the errors, with the published weights."""
    seen = prefix.epochs[: prefix.num_seen]
    return fit_optimus(seen, prefix.errors, with_published_weights=True).losses(prefix.epochs)
