"""Optimus' convergence model.

    loss(k) = 1 / (b0 k + b1) + b2,    b0, b1, b2 >= 0

For a fixed b2 the model is linear: 1 / (loss - b2) = b0 k + b1. b2 is scanned and b0, b1 solved by non-negative least
squares with weights (loss - b2)^2, which make the residual that of the loss itself to first order: no starting point,
and no fit that fails. The published code weighs the residuals of each third of the history four times more than those
of the third before.

Source: Peng, Bao, Chen, Wu and Guo 2018, EuroSys, section 3.1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from forerun.convergence.curve import Floats
from forerun.convergence.forecaster import Prefix, forecaster
from forerun.convergence.nonnegative import nonnegative_fit

__all__ = ["OptimusFit", "fit_optimus", "optimus_path"]

_NUM_FLOORS = 60
_WEIGHT_OF_A_THIRD = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimusFit:
    """Coefficients of the model.

    Attributes:
        b0: Rate [1 / (loss x step)].
        b1: Inverse of the loss to lose at step 0 [1 / loss].
        b2: What is left in the end [loss].
        rmse: Root mean squared residual [loss].
    """

    b0: float
    b1: float
    b2: float
    rmse: float

    def losses(self, steps: Floats) -> Floats:
        """Loss after so many steps, (n,)."""
        return 1.0 / np.maximum(self.b0 * steps + self.b1, 1e-12) + self.b2

    def steps_to(self, loss: float) -> float:
        """Steps until the loss is reached; infinite below b2."""
        if loss <= self.b2 or self.b0 <= 0:
            return 0.0 if loss >= 1.0 / max(self.b1, 1e-12) + self.b2 else float("inf")
        return max(0.0, (1.0 / (loss - self.b2) - self.b1) / self.b0)


def fit_optimus(steps: Floats, losses: Floats, *, with_published_weights: bool = True) -> OptimusFit:
    """Fits the model.

    Args:
        steps: Steps or epochs, (n,).
        losses: Above zero, (n,).
        with_published_weights: Whether later thirds of the history count four times more each.
    """
    top = float(np.max(losses)) or 1.0
    scaled = losses / top
    weights = _thirds(len(losses)) if with_published_weights else np.ones(len(losses))
    floors = np.linspace(0.0, 0.999 * float(scaled.min()), _NUM_FLOORS)
    above = np.maximum(scaled - floors[:, None], 1e-9)
    row_weights = above**2 * weights
    columns = np.stack([np.broadcast_to(steps, above.shape), np.ones_like(above)], axis=2)
    solved, _ = nonnegative_fit(columns * row_weights[..., None], row_weights / above)
    fitted = 1.0 / np.maximum(solved[:, :1] * steps + solved[:, 1:], 1e-9) + floors[:, None]
    best = int(np.argmin(np.sum(((fitted - scaled) * weights) ** 2, axis=1)))
    return OptimusFit(
        b0=float(solved[best, 0] / top),
        b1=float(solved[best, 1] / top),
        b2=float(floors[best] * top),
        rmse=float(np.sqrt(np.mean((fitted[best] - scaled) ** 2)) * top),
    )


def _thirds(num_points: int) -> Floats:
    third = np.minimum(2, np.arange(num_points) * 3 // max(num_points, 1))
    return np.asarray(_WEIGHT_OF_A_THIRD**third, dtype=float)


@forecaster("optimus")
def optimus_path(prefix: Prefix) -> Floats:
    """Optimus' model of the errors, with the published weights."""
    seen = prefix.epochs[: prefix.num_seen]
    return fit_optimus(seen, prefix.errors).losses(prefix.epochs)
