"""The gradient noise scale: which batch size is still worth its steps, from gradients of one run.

    B_simple = tr(covariance of the gradient of one sample) / |gradient|^2

From the squared norms of gradients over a small and a large batch of the same weights, without bias:

    |G|^2 = (B_large |G_large|^2 - B_small |G_small|^2) / (B_large - B_small)
    S     = (|G_small|^2 - |G_large|^2) / (1 / B_small - 1 / B_large)

Both are noisy; their averages over many steps, and only then the ratio, are what counts. B_simple approximates the
critical batch size of ``batch_scaling`` up to a factor that depends on the optimizer and grows in the course of a run.

Source: McCandlish et al. 2018 (arXiv 1812.06162), appendix A.1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from forerun.errors import InvalidSetupError

__all__ = ["NoiseScale", "gradient_noise_scale"]


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
