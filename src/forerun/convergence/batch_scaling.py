"""Steps and epochs to a target against the batch size.

    steps(B)  = S_min (1 + B_c / B)
    epochs(B) = E_min (1 + B / B_c),     E_min = S_min B_c / dataset size

B_c is the batch size at which twice the least number of steps, or epochs, is needed. Both forms are one law, linear in
S_min and S_min B_c: two batch sizes determine it, more are fitted by non-negative least squares on relative errors.

A steeper growth at large batches, where a fixed recipe stops to carry over, is what the law leaves out: the two-point
line is then a lower bound, and ``fit_batch_scaling`` says how far its own points lie from it.

Source: McCandlish, Kaplan, Amodei et al. 2018 (arXiv 1812.06162), equation 5.1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from forerun.convergence.curve import Floats
from forerun.convergence.nonnegative import nonnegative_fit
from forerun.errors import InvalidSetupError

__all__ = ["BatchScaling", "fit_batch_scaling", "fit_epochs"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchScaling:
    """The law with its numbers.

    Attributes:
        least_steps: S_min, steps at an endless batch.
        least_samples: S_min B_c, samples at a batch of next to nothing.
        worst_error: Largest relative error at the points it was fitted to.
    """

    least_steps: float
    least_samples: float
    worst_error: float

    @property
    def critical_batch_size(self) -> float:
        """B_c; infinite where steps only ever fall with the batch."""
        return self.least_samples / self.least_steps if self.least_steps > 0 else float("inf")

    def steps(self, batch_sizes: npt.ArrayLike) -> Floats:
        """Steps to the target, (n,)."""
        sizes: Floats = np.asarray(batch_sizes, dtype=float)
        return self.least_steps + self.least_samples / sizes

    def samples(self, batch_sizes: npt.ArrayLike) -> Floats:
        """Samples to the target, (n,)."""
        sizes: Floats = np.asarray(batch_sizes, dtype=float)
        return self.steps(sizes) * sizes

    def epochs(self, batch_sizes: npt.ArrayLike, dataset_size: float) -> Floats:
        """Epochs to the target, (n,)."""
        return self.samples(batch_sizes) / dataset_size


def fit_batch_scaling(batch_sizes: npt.ArrayLike, steps: npt.ArrayLike) -> BatchScaling:
    """Fits the law to steps to the same target at several batch sizes.

    Raises:
        InvalidSetupError: Fewer than two different batch sizes, or numbers that are not above zero.
    """
    sizes, counts = np.asarray(batch_sizes, dtype=float), np.asarray(steps, dtype=float)
    good = sizes.shape == counts.shape and np.all(np.isfinite(sizes) & np.isfinite(counts))
    if not good or np.any(sizes <= 0) or np.any(counts <= 0) or len(np.unique(sizes)) < 2:
        raise InvalidSetupError(
            "steps against the batch size need two or more different batch sizes and steps above zero, got "
            f"{sizes.tolist()} and {counts.tolist()}"
        )
    columns = np.stack([np.ones_like(sizes), 1.0 / sizes], axis=1) / counts[:, None]
    solved, _ = nonnegative_fit(columns[None], np.ones(len(sizes)))
    least_steps, least_samples = (float(value) for value in solved[0])
    misses = np.abs((least_steps + least_samples / sizes) / counts - 1)
    return BatchScaling(least_steps=least_steps, least_samples=least_samples, worst_error=float(misses.max()))


def fit_epochs(batch_sizes: npt.ArrayLike, epochs: npt.ArrayLike, dataset_size: float) -> BatchScaling:
    """The same from epochs to the target."""
    sizes = np.asarray(batch_sizes, dtype=float)
    return fit_batch_scaling(sizes, np.asarray(epochs, dtype=float) * dataset_size / np.maximum(sizes, 1e-12))
