"""A device known from a few of its steps: posterior of all others, choice of steps, and the prior's scales.

The correction is that of ``forerun.cost.time.correction``; here it is conditioned on the steps themselves, without its
coefficients. With J_k the rows of k measured steps, S = diag(s^2) the prior and n the noise:

    K    = J_k S J_k' + n^2 I
    C    = J S J_k' + q^2 D,   D = 1 where a row is the measured run, q^2 = n^2 without the noise between repeats
    mean = C K^-1 r_k
    var  = diag(J S J') - diag(C K^-1 C') + n^2

The scales are those that make the residuals of held-out devices most likely, so that one odd measurement moves a
prediction no further than devices have been seen to move.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import optimize

from forerun.cost.time.correction import PriorScales

Floats = npt.NDArray[np.float64]

_PULL = 0.01


@dataclass(frozen=True, slots=True)
class Posterior:
    """Log corrections of p steps: mean and standard deviation, noise included, (p,) each."""

    mean: Floats
    deviation: Floats


def condition(rows: Floats, measured: Sequence[int], residuals: Floats, scales: PriorScales) -> Posterior:
    """Corrections of all steps, given the log residuals of the measured ones.

    Args:
        rows: ``sensitivities`` of all steps, (p, c).
        measured: Indices of the measured steps, k of them.
        residuals: log(measured / predicted) of those, (k,).
        scales: Prior scales.
    """
    variances = scales.variances()[: rows.shape[1]]
    weighted = rows * variances
    prior = (weighted * rows).sum(axis=1)
    if not len(measured):
        return Posterior(np.zeros(len(rows)), np.sqrt(prior + scales.noise**2))
    chosen = rows[list(measured)]
    gram = (chosen * variances) @ chosen.T + scales.noise**2 * np.eye(len(chosen))
    is_same = np.arange(len(rows))[:, None] == np.asarray(measured)
    cross = weighted @ chosen.T + scales.run_variance * is_same
    solved = np.linalg.solve(gram, cross.T)
    explained = (cross.T * solved).sum(axis=0)
    deviation = np.sqrt(np.maximum(prior + scales.noise**2 - explained, 0))
    return Posterior(cross @ np.linalg.solve(gram, residuals), deviation)


def information_order(rows: Floats, cost_s: Floats, scales: PriorScales) -> list[int]:
    """All steps, ordered so that each next one is the most informative about all for its cost.

    The gain of a step is by how much it lowers the summed posterior variance: with C the posterior covariance so far,
    sum_j C_ij^2 / (C_ii + n^2); after it, C loses C_i' C_i / (C_ii + n^2). What is cut short is the part that
    would have told least.

    Args:
        rows: ``sensitivities`` of all steps, (p, c).
        cost_s: Time that measuring each takes, (p,) [s].
        scales: Prior scales.
    """
    covariance = (rows * scales.variances()[: rows.shape[1]]) @ rows.T + scales.run_variance * np.eye(
        len(rows)
    )
    noise_variance = scales.noise**2 - scales.run_variance
    order: list[int] = []
    open_ones = np.ones(len(rows), dtype=bool)
    while open_ones.any():
        own = np.diag(covariance) + noise_variance
        gains = (covariance**2).sum(axis=1) / own / cost_s
        chosen = int(np.argmax(np.where(open_ones, gains, -1.0)))
        order.append(chosen)
        open_ones[chosen] = False
        covariance = covariance - np.outer(covariance[chosen], covariance[chosen]) / own[chosen]
    return order


def fit_scales(groups: Sequence[tuple[Floats, Floats]]) -> PriorScales:
    """Scales that maximise the marginal likelihood of held-out residuals, one independent draw per device.

    Args:
        groups: Per device the ``sensitivities`` of its steps, (p, c), and their log residuals, (p,).
    """
    first = np.log(astuple(PriorScales()))

    def negative_log_likelihood(logs: Floats) -> float:
        scales = PriorScales(**dict(zip(PriorScales.__slots__, np.exp(logs), strict=True)))
        roots = np.sqrt(scales.variances())
        total = 0.0
        for rows, residuals in groups:
            # In the space of the columns, as in ``optime.correction``.
            scaled = rows * roots[: rows.shape[1]] / scales.noise
            inner = np.eye(rows.shape[1]) + scaled.T @ scaled
            projected = scaled.T @ residuals / scales.noise
            squares = residuals @ residuals / scales.noise**2 - projected @ np.linalg.solve(inner, projected)
            log_determinant = np.linalg.slogdet(inner)[1] + 2 * len(rows) * np.log(scales.noise)
            # Devices weigh alike however many steps of them were measured.
            total += (log_determinant + squares) / len(rows)
        # A weak pull to the start keeps scales that the data say nothing about where they were.
        return float(total + _PULL * len(groups) * ((logs - first) ** 2).sum())

    options: Any = {"maxiter": 3, "xtol": 0.05, "ftol": 1e-3}
    found = optimize.minimize(negative_log_likelihood, first, method="Powell", options=options)
    return PriorScales(**dict(zip(PriorScales.__slots__, np.exp(found.x).tolist(), strict=True)))
