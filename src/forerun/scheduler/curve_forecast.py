"""Epochs that a job still needs for its target, from the curve so far: Optimus' form, fitted without a start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

from forerun.errors import InvalidSetupError

__all__ = ["FEWEST_POINTS", "CurveForecast", "HyperbolicLoss", "fit_hyperbola"]

FEWEST_POINTS = 4
"""Epochs below which a curve says nothing, and the stated epochs stand."""

_NUM_FLOORS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class HyperbolicLoss:
    """loss(k) = 1 / (b0 * k + b1) + b2 after k epochs, all coefficients >= 0.

    Source: Peng et al. 2018, "Optimus", EuroSys, section 3.1.
    """

    b0: float
    b1: float
    b2: float

    def epochs_to(self, loss: float) -> float:
        """Epochs after which the curve is at a loss; infinite if it never is."""
        if loss <= self.b2 or self.b0 <= 0:
            return np.inf
        return max(0.0, (1.0 / (loss - self.b2) - self.b1) / self.b0)


def fit_hyperbola(losses: Sequence[float]) -> HyperbolicLoss:
    """The curve through the losses of epochs 1, 2 ...

    For a fixed floor b2 the rest is linear, 1 / (loss - b2) = b0 k + b1, and solved by non-negative least squares with
    weights (loss - b2)^2, which makes its errors those of the loss; the floor is tried on a grid.

    Raises:
        InvalidSetupError: There are fewer than two losses, or one is not above zero.
    """
    values = np.asarray(losses, dtype=float)
    if values.size < 2 or not np.all(np.isfinite(values) & (values > 0)):
        raise InvalidSetupError("expected at least two losses above zero to fit a curve, got fewer or others")
    epochs = np.arange(1, values.size + 1, dtype=float)
    fits = [_with_floor(epochs, values, b2) for b2 in values.min() * np.linspace(0, 0.999, _NUM_FLOORS)]
    return min(fits, key=lambda fit: fit[0])[1]


def _with_floor(
    epochs: npt.NDArray[np.float64], values: npt.NDArray[np.float64], b2: float
) -> tuple[float, HyperbolicLoss]:
    above = values - b2
    weights = above**2
    columns = np.stack([epochs, np.ones_like(epochs)], axis=1) * weights[:, None]
    (b0, b1), _ = nnls(columns, weights / above)
    fitted = 1.0 / np.maximum(b0 * epochs + b1, 1e-12) + b2
    return float(np.sum((fitted - values) ** 2)), HyperbolicLoss(b0=float(b0), b1=float(b1), b2=float(b2))


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveForecast:
    """Remaining work of a job that runs until a target, as a callable of the work done.

    Below ``FEWEST_POINTS`` epochs the stated epochs count; from then on the fitted curve, at least a tenth of an
    epoch and at most the stated epochs.

    Attributes:
        samples_per_epoch: Work of an epoch.
        epochs_by_epoch: Forecast of all epochs after 0, 1, 2 ... of them.
    """

    samples_per_epoch: float
    epochs_by_epoch: tuple[float, ...]

    @classmethod
    def from_curve(
        cls, losses: Sequence[float], target: float, stated_epochs: float, samples_per_epoch: float
    ) -> CurveForecast:
        """The forecasts that each stage of a curve of losses gives rise to.

        Args:
            losses: After epochs 1, 2 ..., lower is better, above zero.
            target: Loss at which the job is done.
            stated_epochs: Epochs its owner thinks it needs at most.
            samples_per_epoch: Work of an epoch.
        """
        forecasts = [float(stated_epochs)] * min(FEWEST_POINTS, len(losses) + 1)
        for k in range(FEWEST_POINTS, len(losses) + 1):
            so_far = np.minimum.accumulate(np.asarray(losses[:k], dtype=float)).tolist()
            reached = so_far[-1] <= target
            wanted = k if reached else fit_hyperbola(so_far).epochs_to(target)
            forecasts.append(float(min(max(wanted, k + 0.1), max(stated_epochs, k + 0.1))))
        return cls(samples_per_epoch=samples_per_epoch, epochs_by_epoch=tuple(forecasts))

    def __call__(self, done_samples: float) -> float:
        """Samples left."""
        done = done_samples / self.samples_per_epoch
        known = self.epochs_by_epoch[min(int(done + 1e-9), len(self.epochs_by_epoch) - 1)]
        return max(0.1, known - done) * self.samples_per_epoch
