"""Correction of a device's predictions from a few measured steps, in closed form.

The log residual r = log(measured / predicted) of a step is a Gaussian around zero, r = J a + noise. The columns
of J say what a device may do differently: be faster or slower throughout, in arithmetic, in memory traffic, on
its host, or in one class of operations; a column's entry is the share of the step it acts on. With prior
standard deviations S = diag(s^2), noise n and k measured rows (index k):

    K    = J_k S J_k' + n^2 I
    mean = J S J_k' K^-1 r_k
    var  = diag(J S J') - diag(J S J_k' K^-1 J_k S J') + n^2

The scales are those that make the residuals of *other* held-out devices most likely, so that one odd
measurement moves a prediction no further than devices have been seen to move.

Source: Bayesian linear regression, for instance Bishop 2006, section 3.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass

import numpy as np
import numpy.typing as npt
from scipy import optimize

from forerun.graph.graph import OpClass
from forerun.optime.law import SMOOTH_STEP
from forerun.optime.rows import DistinctOps
from forerun.optime.step_times import StepTimes

__all__ = [
    "Posterior",
    "PriorScales",
    "choose_steps",
    "coefficients",
    "condition",
    "fit_scales",
    "information_order",
    "sensitivities",
]

Floats = npt.NDArray[np.float64]

_NUM_SHARED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class PriorScales:
    """Standard deviations of the log correction of each kind, and of what no correction explains."""

    overall: float = 0.19
    compute: float = 0.28
    memory: float = 0.12
    host: float = 0.40
    op_class: float = 0.25
    noise: float = 0.12

    def variances(self) -> Floats:
        """Prior variance of each column of ``sensitivities``."""
        shared = np.array([self.overall, self.compute, self.memory, self.host])
        return np.concatenate([shared, np.full(len(OpClass), self.op_class)]) ** 2


@dataclass(frozen=True, slots=True)
class Posterior:
    """Log corrections of p steps: mean and standard deviation, noise included, (p,) each."""

    mean: Floats
    deviation: Floats


def sensitivities(ops: DistinctOps, times: StepTimes) -> Floats:
    """Row of J for each of p points of one model, (p, 4 + number of classes).

    With w = T^6 / (T^6 + H^6), the share of the device in the step: w; w times the elasticity of device time in
    compute and in traffic; 1 - w; w times the share of each class of operations.
    """
    assert times.kernel_s is not None
    assert times.compute_share is not None
    assert times.memory_share is not None
    ratio = (times.host_s / times.device_s) ** SMOOTH_STEP
    device_share = 1.0 / (1.0 + ratio)
    shares = times.kernel_s / times.kernel_s.sum(axis=1, keepdims=True)
    by_class = shares @ np.eye(len(OpClass))[ops.op_class]
    shared = [
        device_share,
        device_share * (shares * times.compute_share).sum(axis=1),
        device_share * (shares * times.memory_share).sum(axis=1),
        1.0 - device_share,
    ]
    return np.column_stack([*shared, device_share[:, None] * by_class])


def condition(rows: Floats, measured: Sequence[int], residuals: Floats, scales: PriorScales) -> Posterior:
    """Corrections of all steps, given the log residuals of the measured ones.

    Args:
        rows: ``sensitivities`` of all steps, (p, c).
        measured: Indices of the measured steps, k of them.
        residuals: log(measured / predicted) of those, (k,).
        scales: Prior scales.
    """
    variances = scales.variances()
    weighted = rows * variances
    prior = (weighted * rows).sum(axis=1)
    if not len(measured):
        return Posterior(np.zeros(len(rows)), np.sqrt(prior + scales.noise**2))
    chosen = rows[list(measured)]
    gram = (chosen * variances) @ chosen.T + scales.noise**2 * np.eye(len(chosen))
    cross = weighted @ chosen.T
    solved = np.linalg.solve(gram, cross.T)
    explained = (cross.T * solved).sum(axis=0)
    deviation = np.sqrt(np.maximum(prior - explained, 0) + scales.noise**2)
    return Posterior(cross @ np.linalg.solve(gram, residuals), deviation)


def coefficients(rows: Floats, residuals: Floats, scales: PriorScales) -> Floats:
    """Posterior mean of a, (c,), given the ``sensitivities`` of k measured steps, (k, c), and their residuals, (k,)."""
    weighted = rows * scales.variances()
    gram = weighted @ rows.T + scales.noise**2 * np.eye(len(rows))
    mean: Floats = weighted.T @ np.linalg.solve(gram, residuals)
    return mean


def choose_steps(rows: Floats, candidates: Sequence[int], num_steps: int, scales: PriorScales) -> list[int]:
    """The steps to measure: greedily those that lower the summed posterior variance over all rows most."""
    chosen: list[int] = []
    for _ in range(min(num_steps, len(candidates))):
        open_ones = [i for i in candidates if i not in chosen]
        sums = [
            float((condition(rows, [*chosen, i], np.zeros(len(chosen) + 1), scales).deviation ** 2).sum())
            for i in open_ones
        ]
        chosen.append(open_ones[int(np.argmin(sums))])
    return chosen


def information_order(rows: Floats, cost_s: Floats, scales: PriorScales) -> list[int]:
    """All steps in an order in which each next one tells most about all of them for its cost.

    The gain of a step is by how much it lowers the summed posterior variance: with C the posterior covariance so far,
    sum_j C_ij^2 / (C_ii + n^2); after it, C loses C_i' C_i / (C_ii + n^2). With equal costs this is the order of
    ``choose_steps``. What is cut short is the part that would have told least.

    Args:
        rows: ``sensitivities`` of all steps, (p, c).
        cost_s: Time that measuring each takes, (p,) [s].
        scales: Prior scales.
    """
    covariance = (rows * scales.variances()) @ rows.T
    order: list[int] = []
    open_ones = np.ones(len(rows), dtype=bool)
    while open_ones.any():
        own = np.diag(covariance) + scales.noise**2
        gains = (covariance**2).sum(axis=1) / own / cost_s
        chosen = int(np.argmax(np.where(open_ones, gains, -1.0)))
        order.append(chosen)
        open_ones[chosen] = False
        covariance = covariance - np.outer(covariance[chosen], covariance[chosen]) / own[chosen]
    return order


def fit_scales(groups: Sequence[tuple[Floats, Floats]], start: PriorScales | None = None) -> PriorScales:
    """Scales that maximise the marginal likelihood of held-out residuals, one independent draw per device.

    Args:
        groups: Per device the ``sensitivities`` of its steps, (p, c), and their log residuals, (p,).
        start: Where the search begins.
    """
    first = np.log(astuple(start or PriorScales()))

    def negative_log_likelihood(logs: Floats) -> float:
        scales = PriorScales(**dict(zip(PriorScales.__slots__, np.exp(logs), strict=True)))
        total = 0.0
        for rows, residuals in groups:
            covariance = (rows * scales.variances()) @ rows.T + scales.noise**2 * np.eye(len(rows))
            _, log_determinant = np.linalg.slogdet(covariance)
            # Devices weigh alike however many steps of them were measured.
            total += (log_determinant + residuals @ np.linalg.solve(covariance, residuals)) / len(rows)
        # A weak pull to the start keeps scales that the data say nothing about where they were.
        return float(total + 0.02 * ((logs - first) ** 2).sum())

    found = optimize.minimize(negative_log_likelihood, first, method="Nelder-Mead", options={"maxiter": 600})
    return PriorScales(**dict(zip(PriorScales.__slots__, np.exp(found.x).tolist(), strict=True)))
