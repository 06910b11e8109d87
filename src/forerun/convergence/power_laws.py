"""Curves that know nothing of the learning rate: power laws and their relatives, with bounds.

    pow3      c + a x^-alpha                             c, a >= 0, alpha 0.1 to 2
    pow4      c + a (x + b)^-alpha                       b 0 to the epochs seen
    exp3      c + a exp(-alpha x)
    weibull4  c + a exp(-(kappa x)^delta)
    mmf4      c + a / (1 + (kappa x)^delta)

For fixed shape parameters each is linear in c and a: the shapes are scanned and c, a solved by non-negative least
squares. Source of the catalogue: Domhan, Springenberg and Hutter 2015, IJCAI, table 1; bounds are ours.
"""

from __future__ import annotations

import numpy as np

from forerun.convergence.curve import Floats
from forerun.convergence.forecaster import Prefix, forecaster
from forerun.convergence.nonnegative import nonnegative_fit

__all__ = ["exp3_path", "mmf4_path", "pow3_path", "pow4_path", "weibull4_path"]

_ALPHAS = np.linspace(0.1, 2.0, 39)
_DELTAS = np.asarray([0.25, 0.5, 0.75, 1.0, 1.5, 2.0])
_NUM_RATES = 24


def _best_shape(shapes: Floats, prefix: Prefix) -> Floats:
    """C + a * shape with the least squared residual; shapes are (candidates, n)."""
    seen = shapes[:, : prefix.num_seen]
    solved, loss = nonnegative_fit(np.stack([np.ones_like(seen), seen], axis=2), prefix.errors)
    best = int(np.argmin(loss))
    return np.asarray(solved[best, 0] + solved[best, 1] * shapes[best], dtype=float)


def _rates(prefix: Prefix) -> Floats:
    """Rates at which something happens between a tenth of the first epoch and ten times the epochs seen."""
    seen = prefix.epochs[: prefix.num_seen]
    return np.geomspace(0.1 / float(seen[-1]), 10.0 / max(float(seen[0]), 1e-9), _NUM_RATES)


@forecaster("pow3")
def pow3_path(prefix: Prefix) -> Floats:
    """C + a x^-alpha."""
    return _best_shape(prefix.epochs ** -_ALPHAS[:, None], prefix)


@forecaster("pow4")
def pow4_path(prefix: Prefix) -> Floats:
    """C + a (x + b)^-alpha."""
    last = float(prefix.epochs[prefix.num_seen - 1])
    shifts = np.concatenate([[0.0], np.geomspace(0.02, 1.0, 7) * last])
    alphas, offsets = (grid.ravel()[:, None] for grid in np.meshgrid(_ALPHAS[::2], shifts))
    return _best_shape((prefix.epochs + offsets) ** -alphas, prefix)


@forecaster("exp3")
def exp3_path(prefix: Prefix) -> Floats:
    """C + a exp(-alpha x)."""
    return _best_shape(np.exp(-_rates(prefix)[:, None] * prefix.epochs), prefix)


@forecaster("weibull4")
def weibull4_path(prefix: Prefix) -> Floats:
    """C + a exp(-(kappa x)^delta)."""
    return _best_shape(np.exp(-_stretched(prefix)), prefix)


@forecaster("mmf4")
def mmf4_path(prefix: Prefix) -> Floats:
    """C + a / (1 + (kappa x)^delta)."""
    return _best_shape(1.0 / (1.0 + _stretched(prefix)), prefix)


def _stretched(prefix: Prefix) -> Floats:
    rates, deltas = (grid.ravel()[:, None] for grid in np.meshgrid(_rates(prefix), _DELTAS))
    return np.asarray(np.minimum((rates * prefix.epochs) ** deltas, 500.0), dtype=float)
