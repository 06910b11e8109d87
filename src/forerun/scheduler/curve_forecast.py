"""Epochs that a job still needs for its target, from the curve so far: Optimus' form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from forerun.convergence.optimus import OptimusFit, fit_optimus
from forerun.errors import InvalidSetupError

__all__ = ["FEWEST_POINTS", "CurveForecast", "fit_of_epochs"]

FEWEST_POINTS = 4
"""Epochs below which a curve says nothing, and the stated epochs stand."""


def fit_of_epochs(losses: Sequence[float]) -> OptimusFit:
    """Optimus' curve through the losses of epochs 1, 2 ...

    Raises:
        InvalidSetupError: There are fewer than two losses, or one is not above zero.
    """
    values = np.asarray(losses, dtype=float)
    if values.size < 2 or not np.all(np.isfinite(values) & (values > 0)):
        raise InvalidSetupError("expected at least two losses above zero to fit a curve, got fewer or others")
    return fit_optimus(np.arange(1.0, values.size + 1), values)


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
            wanted = k if reached else fit_of_epochs(so_far).steps_to(target)
            forecasts.append(float(min(max(wanted, k + 0.1), max(stated_epochs, k + 0.1))))
        return cls(samples_per_epoch=samples_per_epoch, epochs_by_epoch=tuple(forecasts))

    def __call__(self, done_samples: float) -> float:
        """Samples left."""
        done = done_samples / self.samples_per_epoch
        known = self.epochs_by_epoch[min(int(done + 1e-9), len(self.epochs_by_epoch) - 1)]
        return max(0.1, known - done) * self.samples_per_epoch
