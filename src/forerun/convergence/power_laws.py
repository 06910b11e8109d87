"""Curves that know nothing of the learning rate: power laws and their relatives, with bounds.

    power law   c + a (x + s)^-p      p = 1/4, 1/2, 1, 2; s >= 0: what a forecast without schedule rests on

Points weigh as the square of their number, so that the latest decide: what they show of the rest of the fall is the
floor c, whatever the run did early. p is not chosen but averaged over, each with its best s, with weights

    exp(-(residual - least residual) / 2 sigma^2 - penalty / 2),   sigma^2 the least residual of one point

where no curve is explained better than to 3 % of its level, and steep powers pay a little. The others are baselines,
with every point alike, the best shape chosen:

    pow3      c + a x^-alpha                             c, a >= 0, alpha 0.1 to 2
    pow4      c + a (x + b)^-alpha                       b 0 to the epochs seen
    exp3      c + a exp(-alpha x)
    weibull4  c + a exp(-(kappa x)^delta)
    mmf4      c + a / (1 + (kappa x)^delta)

For fixed shape parameters each is linear in c and a: the shapes are scanned and c, a solved by non-negative least
squares. Source of the catalogue: Domhan, Springenberg and Hutter 2015, IJCAI, table 1; bounds are ours.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from forerun.convergence.curve import Floats
from forerun.convergence.forecaster import Prefix, forecaster
from forerun.convergence.nonnegative import nonnegative_fit

__all__ = [
    "POWERS",
    "POWER_PENALTIES",
    "averaged_fit",
    "exp3_path",
    "late_weights",
    "mmf4_path",
    "pow3_path",
    "pow4_path",
    "power_law_path",
    "shifted_powers",
    "weibull4_path",
]

POWERS = (0.25, 0.5, 1.0, 2.0)
POWER_PENALTIES = (0.0, 0.0, 1.0, 2.0)
"""Price of each power, in squared standard deviations."""

_ALPHAS = np.linspace(0.1, 2.0, 39)
_DELTAS = np.asarray([0.25, 0.5, 0.75, 1.0, 1.5, 2.0])
_NUM_RATES = 24
_EXPLAINED = 0.03
_SHIFTS = np.concatenate([[0.0], np.geomspace(0.01, 3.0, 10)])  # of the epochs seen


def late_weights(num_points: int) -> Floats:
    """Weights of the residuals at so many points: the square of the share of them that is done, (n,)."""
    return np.asarray((np.arange(1, num_points + 1) / num_points) ** 2, dtype=float)


def shifted_powers(clock: Floats, now: float, shifts: Floats = _SHIFTS) -> list[Floats]:
    """Falls (x + s)^-p from 1 for each of ``POWERS``, (shifts, n) each; shifts are shares of the present place."""
    shifted = np.maximum(clock + shifts[:, None] * now, 1e-9 * max(now, 1e-9))  # a clock may begin at 0
    return [np.asarray((shifted / shifted[:, :1]) ** -power, dtype=float) for power in POWERS]


def averaged_fit(
    prefix: Prefix,
    columns: Floats,
    sizes: Sequence[int],
    penalties: Sequence[float],
    prior: Floats | None = None,
) -> Floats:
    """The mean over families of laws that are linear but for a shape, each with its best shape, (n,).

    Args:
        prefix: The run so far.
        columns: Columns of the law for each shape, (shapes, n, columns), families after each other.
        sizes: Shapes of each family.
        penalties: What each family pays, in squared standard deviations.
        prior: A further row of the least squares, whose product with the coefficients is to be 0, (columns,).
    """
    seen = prefix.num_seen
    weights = late_weights(seen)
    rows, wanted = columns[:, :seen] * weights[:, None], prefix.errors * weights
    if prior is not None:
        rows = np.concatenate([rows, np.broadcast_to(prior, (len(rows), 1, len(prior)))], axis=1)
        wanted = np.append(wanted, 0.0)
    solved, loss = nonnegative_fit(rows, wanted)
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    best = [
        begin + int(np.argmin(loss[begin : begin + size])) for begin, size in zip(starts, sizes, strict=True)
    ]
    least = loss[best]
    of_a_point = float(least.min()) / float(weights @ weights)
    variance = max(of_a_point, (_EXPLAINED * prefix.level) ** 2, 1e-12)
    log_weights = -0.5 * (least - least.min()) / variance - 0.5 * np.asarray(penalties)
    shares = np.exp(log_weights - log_weights.max())
    paths = np.einsum("anc,ac->an", columns[best], solved[best])
    return np.asarray(shares @ paths / shares.sum(), dtype=float)


@forecaster("power law")
def power_law_path(prefix: Prefix) -> Floats:
    """C + a (x + s)^-p, averaged over p."""
    falls = shifted_powers(prefix.epochs, float(prefix.epochs[prefix.num_seen - 1]))
    stacked = np.concatenate(falls)
    columns = np.stack([np.ones_like(stacked), stacked], axis=2)
    return averaged_fit(prefix, columns, [len(fall) for fall in falls], POWER_PENALTIES)


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
