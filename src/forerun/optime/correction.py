"""Correction of a device's predictions from a few measured steps, in closed form.

The log residual r = log(measured / predicted) of a step is a Gaussian around zero, r = J a + noise. The columns
of J are the ways in which a device may differ: faster or slower throughout, in arithmetic, in memory traffic, on
its host, or in one class of operations; a column's entry is the share of the step that it changes. With prior
standard deviations S = diag(s^2), noise n and k measured rows (index k):

    K = J_k S J_k' + n^2 I
    a = S J_k' K^-1 r_k

The scales are those that make the residuals of *other* held-out devices most likely, so that one odd
measurement moves a prediction no further than devices have been seen to move.

Of a device that is corrected for good, two exponents join the columns, of the work F and the traffic D of a step, for
its efficiency may depend on size in another way than that of the devices of the fit:

    r = J a + b1 log(F / F0) + b2 log(D / D0) + noise,   F0, D0 geometric means over the measured steps

Its noise, its overall scale and that of the exponents are those of a few that make the measured steps most likely:
steps of one family of networks have more in common than those of all, and a device may be far from its datasheet.

Source: Bayesian linear regression, for instance Bishop 2006, section 3.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from forerun.graph.graph import OpClass
from forerun.optime.features import Point
from forerun.optime.law import SMOOTH_STEP
from forerun.optime.rows import DistinctOps
from forerun.optime.step_times import StepTimes, log_sizes, step_times
from forerun.optime.weights import CostModel, SizeLaw

__all__ = [
    "PriorScales",
    "Step",
    "StepFigures",
    "corrected",
    "offsets_of",
    "sensitivities",
    "step_figures",
]

Floats = npt.NDArray[np.float64]

_NUM_SHARED = 4
_NUM_SIZES = 2

_EXPONENTS = (0.03, 0.15, 0.5)
"""Prior scales of the exponents; the first stands where rows are too few to tell."""

_NOISES = (0.015, 0.03, 0.06, 0.12)
"""Log times that no correction explains, between models of one family and between all models."""

_FEWEST_ROWS_FOR_NOISE = 8

_OVERALL = (0.3, 1.0, 3.0)
"""Scales of a device that is not what its datasheet says: a processor shared or cut down, a device unlike any known."""

_WIDEST = 3.0
"""No correction is expected to exceed a factor of twenty; a wider prior would fit noise where it hardly acts."""


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


class Step(Protocol):
    """A measured step of one device."""

    @property
    def ops(self) -> DistinctOps:
        """Its kernels."""

    @property
    def point(self) -> Point:
        """Device and configuration."""

    @property
    def system(self) -> str:
        """Key of the measuring system (``weights.system_key``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFigures:
    """Predictions of n steps by a cost model.

    Attributes:
        log_time_s: Log of the predicted time, (n,).
        rows: ``sensitivities`` of each, (n, c).
        log_sizes: Logarithms of work and traffic, (n, 2).
    """

    log_time_s: Floats
    rows: Floats
    log_sizes: Floats

    def take(self, chosen: npt.NDArray[np.int64]) -> StepFigures:
        """Those of some of the steps."""
        return StepFigures(
            log_time_s=self.log_time_s[chosen], rows=self.rows[chosen], log_sizes=self.log_sizes[chosen]
        )


def step_figures(steps: Sequence[Step], weights: CostModel) -> StepFigures:
    """Figures of steps; those that share their kernels are evaluated together."""
    logs, rows = np.empty(len(steps)), np.empty((len(steps), _NUM_SHARED + len(OpClass)))
    sizes = np.empty((len(steps), _NUM_SIZES))
    together: dict[int, list[int]] = {}
    for index, step in enumerate(steps):
        together.setdefault(id(step.ops), []).append(index)
    for chosen in together.values():
        ops, points = steps[chosen[0]].ops, [steps[i].point for i in chosen]
        offsets = np.stack([offsets_of(point, weights) for point in points], axis=1)
        times = step_times(ops, points, weights, offsets, with_kernels=True)
        logs[chosen], rows[chosen] = np.log(times.step_s), sensitivities(ops, times)
        sizes[chosen] = log_sizes(ops, points)
    return StepFigures(log_time_s=logs, rows=rows, log_sizes=sizes)


def offsets_of(point: Point, weights: CostModel) -> Floats:
    """Offsets of the systems nearest to a point, (members, 3)."""
    setup = point.setup
    compiler = "compiled" if setup.compile else "eager"
    return weights.offsets_of_device(point.device.name, setup.precision, setup.layout, compiler)


def corrected(
    steps: Sequence[Step], time_s: Floats, start: CostModel, figures: StepFigures | None = None
) -> CostModel:
    """A cost model with the departure of one device that its measured steps make most likely.

    Args:
        steps: Steps of one device.
        time_s: Measured times of their operations [s], (n,).
        start: The cost model of all devices, or one refined for this device.
        figures: What ``start`` says about the steps, if it is known.
    """
    figures = figures or step_figures(steps, start)
    sizes = figures.log_sizes
    centres = sizes.mean(axis=0)
    rows = np.column_stack([figures.rows, sizes - centres])
    scales = {name: min(s, _WIDEST) for name, s in start.provenance["calibration_scales"].items()}
    found = _likely_coefficients(rows, np.log(time_s) - figures.log_time_s, PriorScales(**scales))
    overall, *shift = found[:_NUM_SHARED]
    classes = found[_NUM_SHARED:-_NUM_SIZES] + overall + (start.class_offsets or np.zeros(len(OpClass)))
    systems = {step.system: offsets_of(step.point, start) + np.asarray(shift) for step in steps}
    latents = np.stack(list(systems.values()), axis=1).astype(np.float32)
    return replace(
        start,
        networks=tuple(
            replace(network, latents=own) for network, own in zip(start.networks, latents, strict=True)
        ),
        systems=tuple(systems),
        class_offsets=tuple(classes.tolist()),
        size_law=SizeLaw(
            exponents=_pair(found[-_NUM_SIZES:]),
            centres=_pair(centres),
            lows=_pair(sizes.min(axis=0)),
            highs=_pair(sizes.max(axis=0)),
        ),
    )


def _pair(values: Floats) -> tuple[float, float]:
    work, traffic = values.tolist()
    return work, traffic


def _likely_coefficients(rows: Floats, residuals: Floats, prior: PriorScales) -> Floats:
    """Posterior mean, (c + 2,), with the scales of greatest marginal likelihood.

    Noise and exponents are chosen only where rows can tell.
    """
    can_tell = len(rows) >= _FEWEST_ROWS_FOR_NOISE
    candidates = (
        _Posterior.of(
            rows,
            residuals,
            np.append(replace(prior, overall=overall).variances(), np.full(_NUM_SIZES, exponent**2)),
            noise,
        )
        for overall in (prior.overall, *_OVERALL)
        for noise in (_NOISES if can_tell else (prior.noise,))
        for exponent in (_EXPONENTS if can_tell else _EXPONENTS[:1])
    )
    return max(candidates, key=lambda found: found.log_likelihood).mean


@dataclass(frozen=True, slots=True)
class _Posterior:
    """Mean of the coefficients, (c,), and the marginal log likelihood of the rows."""

    mean: Floats
    log_likelihood: float

    @classmethod
    def of(cls, rows: Floats, residuals: Floats, variances: Floats, noise: float) -> _Posterior:
        """In the space of the columns, so that the cost grows with the rows and not with their cube.

        With Z = J S^(1/2) / n: mean = S^(1/2) (I + Z'Z)^-1 Z' r / n; log N(r; 0, J S J' + n^2 I) without its constant
        by det = n^(2k) det(I + Z'Z) and Woodbury's identity.
        """
        scaled = rows * np.sqrt(variances) / noise
        inner = np.eye(rows.shape[1]) + scaled.T @ scaled
        projected = scaled.T @ residuals / noise
        solved = np.linalg.solve(inner, projected)
        squares = residuals @ residuals / noise**2 - projected @ solved
        log_determinant = np.linalg.slogdet(inner)[1] + 2 * len(rows) * np.log(noise)
        return cls(np.sqrt(variances) * solved, float(-0.5 * (squares + log_determinant)))
