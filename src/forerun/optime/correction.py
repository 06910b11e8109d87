"""Correction of a device's predictions from a few measured steps, in closed form.

The log residual r = log(measured / predicted) of a step is a Gaussian around zero, r = J a + noise. The columns
of J are the ways in which a device may differ: faster or slower throughout, in arithmetic, in memory traffic, on
its host, or in one class of operations; a column's entry is the share of the step that it changes. With prior
standard deviations S = diag(s^2), noise n and k measured rows (index k):

    K = J_k S J_k' + n^2 I
    a = S J_k' K^-1 r_k

The scales are those that make the residuals of *other* held-out devices most likely, so that one odd
measurement moves a prediction no further than devices have been seen to move.

Source: Bayesian linear regression, for instance Bishop 2006, section 3.3.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from forerun.graph.graph import OpClass
from forerun.optime.law import SMOOTH_STEP
from forerun.optime.rows import DistinctOps
from forerun.optime.step_times import StepTimes

__all__ = [
    "PriorScales",
    "coefficients",
    "sensitivities",
]

Floats = npt.NDArray[np.float64]

_NUM_SHARED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class PriorScales:
    """Standard deviations of the log correction of each kind, and of the rest that no correction explains."""

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


def coefficients(rows: Floats, residuals: Floats, scales: PriorScales) -> Floats:
    """Posterior mean of a, (c,), given the ``sensitivities`` of k measured steps, (k, c), and their residuals, (k,)."""
    weighted = rows * scales.variances()
    gram = weighted @ rows.T + scales.noise**2 * np.eye(len(rows))
    mean: Floats = weighted.T @ np.linalg.solve(gram, residuals)
    return mean
