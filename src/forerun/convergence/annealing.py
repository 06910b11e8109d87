"""A law that takes the learning-rate schedule.

    error(x) = c + a (C(x) + s)^-p + b r(x),      a, b, c, s >= 0

C is a clock: the epochs done, or the sum of relative learning rates so far, by which training moves. r is the relative
rate as the weights feel it, an exponential mean over the last few epochs: the noise of stochastic gradients holds the
error up by an amount that follows the rate, and goes when the rate goes. Before the rate has changed, b and c cannot be
told apart; a prior says that at the present rate the noise is the share ``Prefix.drop_share`` of what will not go away
by itself: b r(now) = share / (1 - share) c. As soon as the rate moves, the data outweigh it.

How much a drop of the rate brings is a matter of the task: a third to a half of what remains of the error of an image
classifier, a twentieth of the loss of a language model. The share is learnt from stored runs, by kind of metric.

The answer is the mean over both clocks, and over exponents and weights as in ``power_laws``. Small networks on easy
data fall faster than any power once they begin to: exp(-k C / C_end) stands beside the powers, two deviations out. The
form is that of Tissue et al. 2024 (arXiv 2408.11029), with a noise floor instead of their annealing area; prior, clocks
and weights are ours.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from forerun.convergence.curve import Floats, MetricKind
from forerun.convergence.forecaster import Prefix, forecaster
from forerun.convergence.power_laws import POWER_PENALTIES, averaged_fit, late_weights, shifted_powers

__all__ = ["DROP_SHARES", "USUAL_DROP_SHARES", "annealing_path", "annealing_paths", "felt_rates"]

DROP_SHARES = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5)
"""Shares of what remains that a falling rate may remove, tried on stored runs."""

USUAL_DROP_SHARES = {
    MetricKind.ACCURACY: 0.35,
    MetricKind.OVERLAP: 0.1,
    MetricKind.LOSS: 0.05,
    MetricKind.ERROR_RATE: 0.1,
}
"""Where no stored run of a kind has a schedule; from the same study as the shipped table."""

MEAN_SPAN = 0.05
"""Time constant of the mean of the rate, in shares of the run."""

_PRIOR_WEIGHT = 0.03
_SHIFTS = np.concatenate([[0.0], np.geomspace(0.01, 3.0, 8)])
_DECAYS = np.geomspace(2.0, 40.0, 6)
_PENALTIES = (*POWER_PENALTIES, 4.0)


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
    """The annealing law with the drop that its kind of metric usually brings."""
    return np.asarray(annealing_paths(prefix, [prefix.drop_share])[0], dtype=float)


def annealing_paths(prefix: Prefix, shares: Sequence[float]) -> Floats:
    """The annealing law for each share that a drop might remove, (shares, n)."""
    assert prefix.rates is not None
    relative = prefix.rates / max(float(np.max(prefix.rates)), 1e-12)
    # A rate that only begins to rise has moved nothing yet; the small sum keeps C^-p finite.
    moved = np.cumsum(relative * np.diff(prefix.epochs, prepend=0.0)) + 1e-3 * float(prefix.epochs[0])
    felt = felt_rates(prefix.epochs, relative, max(MEAN_SPAN * float(prefix.epochs[-1]), 1e-9))
    by_clock = [_paths(prefix, clock, felt, shares) for clock in (prefix.epochs, moved)]
    return np.asarray(np.mean(by_clock, axis=0), dtype=float)


def _paths(prefix: Prefix, clock: Floats, felt: Floats, shares: Sequence[float]) -> Floats:
    """Mean over the shapes by one clock, (shares, n)."""
    seen = prefix.num_seen
    now = float(clock[seen - 1])
    falls = [*shifted_powers(clock, now, _SHIFTS), np.exp(-_DECAYS[:, None] * clock / clock[-1])]
    stacked = np.concatenate(falls)
    columns = np.stack([np.ones_like(stacked), stacked, np.broadcast_to(felt, stacked.shape)], axis=2)
    weights = late_weights(seen)
    strength = np.sqrt(_PRIOR_WEIGHT * float(weights @ weights))
    felt_now = max(float(felt[seen - 1]), 1e-3)
    priors = [strength * np.asarray([-share, 0.0, (1 - share) * felt_now]) for share in shares]
    sizes = [len(fall) for fall in falls]
    return np.asarray([averaged_fit(prefix, columns, sizes, _PENALTIES, prior) for prior in priors])
