"""Correction of a device's predictions from a few measured steps, in closed form.

The log residual r = log(measured / predicted) of a step is a Gaussian around zero, r = J a + b + noise. The columns
of J say what a device may do differently: be faster or slower throughout, in arithmetic, in memory traffic, on
its host, add a constant to each step, or be so in one class of operations; a column's entry is the share of the step it
acts on. b is the run's own: the same whenever that run is measured, and of no account for any other. With prior
standard deviations S = diag(s^2), q of b, noise n between repeats, and k measured rows (index k):

    K    = J_k S J_k' + (q^2 + n^2) I
    mean = (J S J_k' + q^2 D) K^-1 r_k,   D = 1 where the row is the measured one
    var  = diag(J S J') + q^2 - diag((J S J_k' + q^2 D) K^-1 (J S J_k' + q^2 D)') + n^2

The scales are those that make the residuals of *other* held-out devices most likely, so that one odd
measurement moves a prediction no further than devices have been seen to move.

Source: Bayesian linear regression, for instance Bishop 2006, section 3.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace

import numpy as np
import numpy.typing as npt
from scipy import optimize

from forerun.costs.op_time import StepTimes
from forerun.regressors.op_law import SMOOTH_STEP
from forerun.regressors.op_rows import DistinctOps
from forerun.workload.graph import OpClass

__all__ = [
    "ADDED_S",
    "Posterior",
    "PriorScales",
    "choose_steps",
    "coefficients",
    "condition",
    "fit_scales",
    "information_order",
    "likely_scales",
    "sensitivities",
]

Floats = npt.NDArray[np.float64]

ADDED_S = 4e-3
"""What a step takes more where the additive column is one, if it is no smaller than that [s]."""

_OVERALL = (0.3, 1.0, 3.0)

_REPEAT_NOISE = 0.02
"""Repeats of one run differ by this; see docs/methods/op-time.md."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PriorScales:
    """Standard deviations of the log correction of each kind, of what is a run's own, and between repeats of a run."""

    overall: float = 0.19
    compute: float = 0.28
    memory: float = 0.12
    host: float = 0.40
    additive: float = 0.28
    op_class: float = 0.25
    run: float = 0.12
    noise: float = _REPEAT_NOISE

    def variances(self) -> Floats:
        """Prior variance of each column of ``sensitivities``."""
        shared = np.array([self.overall, self.compute, self.memory, self.host, self.additive])
        return np.concatenate([shared, np.full(len(OpClass), self.op_class)]) ** 2


@dataclass(frozen=True, slots=True)
class Posterior:
    """Log corrections of p steps: mean and standard deviation, noise included, (p,) each."""

    mean: Floats
    deviation: Floats


def sensitivities(ops: DistinctOps, times: StepTimes) -> Floats:
    """Row of J for each of p points of one model, (p, 5 + number of classes).

    With w = T^6 / (T^6 + H^6), the share of the device in the step without its loop, and s the share of that in the
    step: 1; s w times the elasticity of device time in compute and in traffic; s (1 - w); 4 ms over the step,
    at most 1; s w times the share of each class of operations.
    """
    assert times.kernel_s is not None
    assert times.compute_share is not None
    assert times.memory_share is not None
    ratio = (times.host_s / times.device_s) ** SMOOTH_STEP
    without_loop = np.maximum(1.0 - times.loop_s / times.step_s, 0.0)
    device_share = without_loop / (1.0 + ratio)
    shares = times.kernel_s / times.kernel_s.sum(axis=1, keepdims=True)
    by_class = shares @ np.eye(len(OpClass))[ops.op_class]
    shared = [
        np.ones_like(device_share),
        device_share * (shares * times.compute_share).sum(axis=1),
        device_share * (shares * times.memory_share).sum(axis=1),
        without_loop - device_share,
        np.minimum(ADDED_S / times.step_s, 1.0),
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
    prior = (weighted * rows).sum(axis=1) + scales.run**2
    if not len(measured):
        return Posterior(np.zeros(len(rows)), np.sqrt(prior + scales.noise**2))
    chosen = rows[list(measured)]
    gram = (chosen * variances) @ chosen.T + (scales.run**2 + scales.noise**2) * np.eye(len(chosen))
    is_same = np.arange(len(rows))[:, None] == np.asarray(measured)
    cross = weighted @ chosen.T + scales.run**2 * is_same
    solved = np.linalg.solve(gram, cross.T)
    explained = (cross.T * solved).sum(axis=0)
    deviation = np.sqrt(np.maximum(prior - explained, 0) + scales.noise**2)
    return Posterior(cross @ np.linalg.solve(gram, residuals), deviation)


def coefficients(rows: Floats, residuals: Floats, scales: PriorScales) -> Floats:
    """Posterior mean of a, (c,), given the ``sensitivities`` of k measured steps, (k, c), and their residuals, (k,)."""
    weighted = rows * scales.variances()
    gram = weighted @ rows.T + (scales.run**2 + scales.noise**2) * np.eye(len(rows))
    mean: Floats = weighted.T @ np.linalg.solve(gram, residuals)
    return mean


def likely_scales(rows: Floats, residuals: Floats, scales: PriorScales) -> PriorScales:
    """The scales with the overall one that makes the residuals of a device most likely, of a few larger ones.

    A device may be far from its datasheet: a processor that is shared or cut down, a board unlike any known.
    """

    def negative_log_likelihood(candidate: PriorScales) -> float:
        own = candidate.run**2 + candidate.noise**2
        covariance = (rows * candidate.variances()) @ rows.T + own * np.eye(len(rows))
        return float(np.linalg.slogdet(covariance)[1] + residuals @ np.linalg.solve(covariance, residuals))

    candidates = [
        scales,
        *(replace(scales, overall=overall) for overall in _OVERALL if overall > scales.overall),
    ]
    return min(candidates, key=negative_log_likelihood)


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
    covariance = (rows * scales.variances()) @ rows.T + scales.run**2 * np.eye(len(rows))
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

    Runs without repeats cannot tell their own part from noise: the noise stays near its start.

    Args:
        groups: Per device the ``sensitivities`` of its steps, (p, c), and their log residuals, (p,).
        start: Where the search begins.
    """
    first = np.log(astuple(start or PriorScales()))

    def negative_log_likelihood(logs: Floats) -> float:
        scales = PriorScales(**dict(zip(PriorScales.__slots__, np.exp(logs), strict=True)))
        total = 0.0
        for rows, residuals in groups:
            own = scales.run**2 + scales.noise**2
            covariance = (rows * scales.variances()) @ rows.T + own * np.eye(len(rows))
            _, log_determinant = np.linalg.slogdet(covariance)
            # Devices weigh alike however many steps of them were measured.
            total += (log_determinant + residuals @ np.linalg.solve(covariance, residuals)) / len(rows)
        # A weak pull to the start keeps scales that the data say nothing about where they were.
        return float(total + 0.02 * ((logs - first) ** 2).sum())

    found = optimize.minimize(negative_log_likelihood, first, method="Nelder-Mead", options={"maxiter": 800})
    return PriorScales(**dict(zip(PriorScales.__slots__, np.exp(found.x).tolist(), strict=True)))
