"""Steps and epochs to a target against the batch size.

    steps(B)  = S_min (1 + B_c / B)
    epochs(B) = E_min (1 + B / B_c),     E_min = S_min B_c / dataset size

B_c is the batch size at which twice the least number of steps, or epochs, is needed. Both forms are one law, linear in
S_min and S_min B_c: two batch sizes determine it, more are fitted by non-negative least squares on relative errors.

A steeper growth at large batches, where a fixed recipe stops to carry over, is what the law leaves out: the two-point
line is then a lower bound, and ``fit_batch_scaling`` says how far its own points lie from it.

Source: McCandlish, Kaplan, Amodei et al. 2018 (arXiv 1812.06162), equation 5.1.

The gradient noise scale says from the gradients of one run which batch size is still worth its steps:

    B_simple = tr(covariance of the gradient of one sample) / |gradient|^2

From the squared norms of gradients over a small and a large batch of the same weights, without bias:

    |G|^2 = (B_large |G_large|^2 - B_small |G_small|^2) / (B_large - B_small)
    S     = (|G_small|^2 - |G_large|^2) / (1 / B_small - 1 / B_large)

Both are noisy; their averages over many steps, and only then the ratio, are what counts. B_simple approximates the
critical batch size B_c up to a factor that depends on the optimizer and grows in the course of a run.

Source: McCandlish et al. 2018 (arXiv 1812.06162), appendix A.1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from forerun.base.errors import InvalidSetupError
from forerun.jobs.forecasting.curve import Floats
from forerun.jobs.forecasting.laws import nonnegative_fit

__all__ = [
    "BatchScaling",
    "NoiseScale",
    "fit_batch_scaling",
    "fit_epochs",
    "gradient_noise_scale",
]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseScale:
    """Noise of gradients.

    Attributes:
        batch_size: B_simple [samples]; infinite where the gradient drowns in its noise.
        squared_gradient: |G|^2.
        covariance_trace: S.
        num_steps: Steps averaged over.
    """

    batch_size: float
    squared_gradient: float
    covariance_trace: float
    num_steps: int


def gradient_noise_scale(
    small_squared_norms: npt.ArrayLike,
    large_squared_norms: npt.ArrayLike,
    small_batch_size: int,
    large_batch_size: int,
) -> NoiseScale:
    """The noise scale.

    Args:
        small_squared_norms: Squared norms of gradients over the small batch, (steps,).
        large_squared_norms: Over the large batch of the same step, (steps,).
        small_batch_size: Samples of the small batch.
        large_batch_size: Samples of the large batch.

    Raises:
        InvalidSetupError: The large batch is not larger, or there is no step.
    """
    small, large = np.asarray(small_squared_norms, float), np.asarray(large_squared_norms, float)
    if not 0 < small_batch_size < large_batch_size or small.shape != large.shape or not small.size:
        raise InvalidSetupError(
            "the gradient noise scale needs gradients of a small and of a larger batch in each step, got batches of "
            f"{small_batch_size} and {large_batch_size} in {small.size} and {large.size} steps"
        )
    span = large_batch_size - small_batch_size
    squared = float(np.mean((large_batch_size * large - small_batch_size * small) / span))
    trace = float(np.mean((small - large) / (1 / small_batch_size - 1 / large_batch_size)))
    return NoiseScale(
        batch_size=max(trace, 0.0) / squared if squared > 0 else float("inf"),
        squared_gradient=squared,
        covariance_trace=trace,
        num_steps=small.size,
    )
