"""A law that takes the learning-rate schedule.

    error(x) = c + a S(x)^-alpha + b r(x),      a, b, c >= 0

S is the sum of relative learning rates so far: training moves with it. r is the relative rate as the weights feel it,
an exponential mean of it over the last few epochs: the noise of stochastic gradients holds the error up by an amount
that follows the rate, and goes when the rate goes. Before the rate has changed, b and c cannot be told apart; a prior
says that at the present rate the noise is a share ``NOISE_SHARE`` of what will not go away by itself:
b r(now) = share / (1 - share) c. As soon as the rate moves, the data outweigh it.

Small networks on easy data fall faster than any power once they begin to: exp(-k S / S_end) stands beside S^-alpha.

alpha, k and the span of the mean are not chosen but averaged over, with weights exp(-residual^2 / 2 sigma^2), a normal
prior on alpha, and one three deviations out on the exponentials: they count where the data insist. The form is that of
Tissue et al. 2024 (arXiv 2408.11029), with a noise floor instead of their annealing area; prior and spans are ours,
chosen on ``adaptdl_validation_curves`` (26 curves, four jobs).
"""

from __future__ import annotations

import numpy as np

from forerun.convergence.curve import Floats
from forerun.convergence.forecaster import Prefix, forecaster
from forerun.convergence.nonnegative import nonnegative_fit

__all__ = ["NOISE_SHARE", "annealing_path", "felt_rates"]

NOISE_SHARE = 0.5
"""Part of the plateau at a constant rate that a falling rate removes, before data say otherwise."""

MEAN_SPANS = (0.05, 0.1)
"""Time constants of the mean of the rate, in shares of the run."""

_PRIOR_WEIGHT = 0.3
_ALPHAS = np.linspace(0.1, 1.5, 15)
_ALPHA_MEAN, _ALPHA_DEVIATION = 0.5, 0.3
_DECAYS = np.geomspace(2.0, 40.0, 6)
_DECAY_PENALTY = 9.0
_RESIDUAL_FLOOR = 0.03  # of the last error: no curve is explained better than that

_PENALTIES = np.concatenate(
    [((_ALPHAS - _ALPHA_MEAN) / _ALPHA_DEVIATION) ** 2, np.full(len(_DECAYS), _DECAY_PENALTY)]
)


def felt_rates(epochs: Floats, rates: Floats, span_epochs: float) -> Floats:
    """Exponential mean of the rates with a time constant in epochs, (n,)."""
    keep = np.exp(-np.diff(epochs, prepend=0.0) / span_epochs)
    felt = np.empty_like(rates)
    level = rates[0]
    for index, (share, rate) in enumerate(zip(keep, rates, strict=True)):
        level = share * level + (1 - share) * rate
        felt[index] = level
    return felt


@forecaster("annealing", needs_rates=True)
def annealing_path(prefix: Prefix) -> Floats:
    """The annealing law, averaged over its shapes."""
    assert prefix.rates is not None
    relative = prefix.rates / max(float(np.max(prefix.rates)), 1e-12)
    # A rate that only begins to rise has moved nothing yet; the small sum keeps S^-alpha finite.
    moved = np.cumsum(relative * np.diff(prefix.epochs, prepend=0.0)) + 1e-3 * float(prefix.epochs[0])
    spans = [max(share * float(prefix.epochs[-1]), 1e-9) for share in MEAN_SPANS]
    shapes, residuals, penalties = [], [], []
    for span in spans:
        felt = felt_rates(prefix.epochs, relative, span)
        paths, loss = _fits(prefix, moved, felt)
        shapes.append(paths)
        residuals.append(loss)
        penalties.append(_PENALTIES)
    weights = _weights(prefix, np.concatenate(residuals), np.concatenate(penalties))
    return np.asarray(weights @ np.concatenate(shapes), dtype=float)


def _fits(prefix: Prefix, moved: Floats, felt: Floats) -> tuple[Floats, Floats]:
    """Paths for each alpha and k, (shapes, n), and their weighted squared residuals with the prior's, (shapes,)."""
    seen = prefix.num_seen
    weights = np.arange(1, seen + 1) / seen  # late points say more about where it goes
    falls = np.concatenate([moved ** -_ALPHAS[:, None], np.exp(-_DECAYS[:, None] * moved / moved[-1])])
    columns = np.stack([np.ones_like(falls), falls, np.broadcast_to(felt, falls.shape)], axis=2)
    prior = np.sqrt(_PRIOR_WEIGHT * seen) * np.asarray(
        [-NOISE_SHARE, 0.0, (1 - NOISE_SHARE) * max(float(felt[seen - 1]), 1e-3)]
    )
    rows = np.concatenate(
        [columns[:, :seen] * weights[:, None], np.broadcast_to(prior, (len(falls), 1, 3))], axis=1
    )
    solved, loss = nonnegative_fit(rows, np.append(prefix.errors * weights, 0.0))
    return np.einsum("anc,ac->an", columns, solved), loss


def _weights(prefix: Prefix, residuals: Floats, penalties: Floats) -> Floats:
    least = float(residuals.min())
    floor = (_RESIDUAL_FLOOR * float(prefix.errors[-1])) ** 2
    variance = max(least / max(1, prefix.num_seen - 3), floor, 1e-12)
    log_weights = -0.5 * (residuals - least) / variance - 0.5 * penalties
    weights = np.exp(log_weights - log_weights.max())
    return np.asarray(weights / weights.sum(), dtype=float)
