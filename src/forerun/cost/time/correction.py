"""Correction of a device's predictions from a few measured steps, in closed form.

The log residual r = log(measured / predicted) of a step is a Gaussian around zero, r = J a + noise. The columns
of J are the ways in which a device may differ: faster or slower throughout, in arithmetic, in memory traffic, on
its host, by a constant added to each step, in short kernels, in one class of operations, in half precision
(throughout and in each class), in NHWC or compiled; a column's entry is the share of the step that it changes.
With prior standard deviations S = diag(s^2), noise n and k measured rows (index k):

    K = J_k S J_k' + n^2 I
    a = S J_k' K^-1 r_k

The scales are those that make the residuals of *other* held-out devices most likely, so that one odd
measurement moves a prediction no further than devices have been seen to move.

Of a device that is corrected for good, two exponents join the columns, of the work F and the traffic D of a step, for
its efficiency may depend on size in another way than that of the devices of the fit:

    r = J a + b1 log(F / F0) + b2 log(D / D0) + noise,   F0, D0 geometric means over the measured steps

Part of what no column explains is the run's own: it comes again whenever that run is measured, and less
the more its batch differs (``weights.MeasuredRun``). Of a residual e = r - J a it is e run^2 / (run^2 + repeats^2).

Its noise, its overall scale and that of the exponents are those of a few that make the measured steps most likely:
steps of one family of networks have more in common than those of all, and a device may be far from its datasheet.

Source: Bayesian linear regression, for instance Bishop 2006, section 3.3.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from forerun.base.errors import UsageError
from forerun.cost.time.evidence import REPEAT_NOISE, shipped_evidence
from forerun.cost.time.features import Point
from forerun.cost.time.law import SMOOTH_STEP, shortness
from forerun.cost.time.rows import DistinctOps
from forerun.cost.time.step_times import StepTimes, log_sizes, step_times
from forerun.cost.time.weights import (
    DEFAULT_STACK,
    NUM_CIRCUMSTANCES,
    CostModel,
    MeasuredRun,
    SizeLaw,
    circumstance_flags,
    load_weights,
    network_key,
    run_circumstances,
)
from forerun.graph.graph import OpClass
from forerun.question.devices.device import Device
from forerun.question.setup import TrainingSetup

Floats = npt.NDArray[np.float64]

_NUM_SHARED = 6
_NUM_SIZES = 2

ADDED_S = 4e-3
"""Time that a step takes more where the additive column is one, if the step is no shorter than that [s]."""

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
    """Standard deviations of the log correction of each kind, and of the rest, a run's own, that none explains."""

    overall: float = 0.19
    compute: float = 0.28
    memory: float = 0.12
    host: float = 0.40
    additive: float = 0.28
    short: float = 0.1
    op_class: float = 0.25
    noise: float = 0.12
    half: float = 0.12
    layout: float = 0.1
    compiled: float = 0.1
    half_class: float = 0.2

    def variances(self) -> Floats:
        """Prior variance of each column of ``with_circumstances``; the first are those of ``sensitivities``."""
        shared = np.array([self.overall, self.compute, self.memory, self.host, self.additive, self.short])
        classes = np.full(len(OpClass), self.op_class)
        circumstances = np.array([self.half, self.layout, self.compiled])
        return np.concatenate([shared, classes, circumstances, np.full(len(OpClass), self.half_class)]) ** 2

    @property
    def run_variance(self) -> float:
        """Variance of the part that is a run's own, without the noise between repeats of it."""
        return max(self.noise**2 - REPEAT_NOISE**2, 0.0)


def sensitivities(ops: DistinctOps, times: StepTimes) -> Floats:
    """Row of J for each of p points of one model, (p, 6 + number of classes).

    With w = T^6 / (T^6 + H^6), the share of the device in the step without its loop, and s the share of that in the
    step: 1; s w times the elasticity of device time in compute and in traffic; s (1 - w); 4 ms over the step, at
    most 1; s w times the share of short kernels, with t the time of one launch 1 / (1 + t / 100 us) of each; s w times
    the share of each class of operations.
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
        device_share * (shares * shortness(times.kernel_s / np.maximum(ops.count, 1))).sum(axis=1),
    ]
    return np.column_stack([*shared, device_share[:, None] * by_class])


def with_circumstances(rows: Floats, setups: Sequence[TrainingSetup]) -> Floats:
    """Rows of J with the columns of their circumstances, (n, 6 + c) -> (n, 9 + 2 c).

    A device may be faster or slower in half precision, in NHWC and where it is compiled; and classes in half precision
    need not depart from the datasheet as they do in full.
    """
    flags = np.asarray([circumstance_flags(setup) for setup in setups], dtype=np.float64)
    return np.column_stack([rows, flags, flags[:, :1] * rows[:, _NUM_SHARED:]])


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
        # By identity: steps of one model share the object, whose arrays are slow to compare.
        together.setdefault(id(step.ops), []).append(index)
    for chosen in together.values():
        ops, points = steps[chosen[0]].ops, [steps[i].point for i in chosen]
        offsets = np.stack([weights.offsets_of_point(point) for point in points], axis=1)
        times = step_times(ops, points, weights, offsets, with_kernels=True)
        logs[chosen], rows[chosen] = np.log(times.step_s), sensitivities(ops, times)
        sizes[chosen] = log_sizes(ops, points)
    return StepFigures(log_time_s=logs, rows=rows, log_sizes=sizes)


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
    setups = [step.point.setup for step in steps]
    # Centred sizes: otherwise the slope of a class would move its level as well.
    rows = np.column_stack([with_circumstances(figures.rows, setups), sizes - centres])
    scales = {name: min(s, _WIDEST) for name, s in shipped_evidence().calibration_scales.items()}
    residuals = np.log(time_s) - figures.log_time_s
    likely = _likely_coefficients(rows, residuals, PriorScales(**scales))
    found = likely.mean
    overall, *shift, added, short = found[:_NUM_SHARED]
    columns = found[_NUM_SHARED:-_NUM_SIZES]
    classes = columns[: len(OpClass)] + (start.class_offsets or np.zeros(len(OpClass)))
    circumstances = columns[len(OpClass) :] + (
        start.circumstance_offsets or np.zeros(NUM_CIRCUMSTANCES + len(OpClass))
    )
    systems = {
        step.system: _shifted(start.offsets_of_point(step.point), start, np.asarray(shift), added * ADDED_S)
        for step in steps
    }
    latents = np.stack(list(systems.values()), axis=1).astype(np.float32)
    explained = replace(
        start,
        networks=tuple(
            replace(network, latents=own) for network, own in zip(start.networks, latents, strict=True)
        ),
        systems=tuple(systems),
        class_offsets=tuple(classes.tolist()),
        circumstance_offsets=tuple(circumstances.tolist()),
        overall_offset=start.overall_offset + float(overall),
        short_offset=start.short_offset + float(short),
        size_law=SizeLaw(
            exponents=_pair(found[-_NUM_SIZES:]),
            centres=_pair(centres),
            lows=_pair(sizes.min(axis=0)),
            highs=_pair(sizes.max(axis=0)),
        ),
        # Their departures are found anew below; kept, they would count twice.
        runs=(),
    )
    rest = likely.run_share * (np.log(time_s) - step_figures(steps, explained).log_time_s)
    runs = tuple(
        MeasuredRun(
            network=network_key(step.ops),
            circumstances=run_circumstances(step.point.setup),
            batch_size=step.point.setup.batch_size_per_device,
            log_factor=float(own),
        )
        for step, own in zip(steps, rest, strict=True)
    )
    return replace(explained, runs=runs)


def _shifted(offsets: Floats, start: CostModel, shift: Floats, added_s: float) -> Floats:
    """Offsets of a system after a correction of its compute, memory and host time and of its loop, (members, 4)."""
    loop_s = np.exp(
        np.asarray([float(np.ravel(network.loop)[0]) for network in start.networks]) + offsets[:, 3]
    )
    # The loop may become shorter, but not shorter than a microsecond.
    loops = offsets[:, 3] + np.log(np.maximum(loop_s + added_s, 1e-6) / loop_s)
    return np.column_stack([offsets[:, :3] + shift, loops])


def _pair(values: Floats) -> tuple[float, float]:
    work, traffic = values.tolist()
    return work, traffic


def _likely_coefficients(rows: Floats, residuals: Floats, prior: PriorScales) -> _Posterior:
    """Posterior of the coefficients, c + 2 of them, with the scales of greatest marginal likelihood.

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
    return max(candidates, key=lambda found: found.log_likelihood)


@dataclass(frozen=True, slots=True)
class _Posterior:
    """Mean of the coefficients, (c,), the marginal log likelihood of the rows, and the noise that was assumed."""

    mean: Floats
    log_likelihood: float
    noise: float

    @property
    def run_share(self) -> float:
        """Share of a row's unexplained residual that is the run's own, not noise between repeats."""
        return max(1.0 - (REPEAT_NOISE / self.noise) ** 2, 0.0)

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
        # The determinant itself is beyond a float: a product of dozens of large eigenvalues.
        log_determinant = np.linalg.slogdet(inner)[1] + 2 * len(rows) * np.log(noise)
        return cls(np.sqrt(variances) * solved, float(-0.5 * (squares + log_determinant)), noise)


CALIBRATIONS_VARIABLE = "FORERUN_CALIBRATIONS"
"""Environment variable that names the folder of calibrations."""


def calibration_path(device: Device, stack: str = DEFAULT_STACK) -> Path:
    """Path of a device's calibration in the user's data folder; the file may be missing.

    Args:
        device: The device.
        stack: ``pytorch`` or ``keras``; each framework has its own calibration.
    """
    from platformdirs import user_data_path

    named = os.environ.get(CALIBRATIONS_VARIABLE)
    folder = Path(named) if named else user_data_path("forerun") / "calibrations"
    stem = re.sub("[^a-z0-9]+", "-", device.title.lower()).strip("-")
    return folder / f"{stem if stack == DEFAULT_STACK else f'{stem}.{stack}'}.safetensors"


def find_calibration(device: Device, stack: str = DEFAULT_STACK) -> CostModel | None:
    """The calibration of this machine's device for a framework; None if there is none.

    Raises:
        CostModelError: The file is damaged, or was made for other features than this version computes.
    """
    path = calibration_path(device, stack)
    return load_weights(path) if path.exists() else None


def load_calibration(path: Path, device: Device, stack: str = DEFAULT_STACK) -> CostModel:
    """A calibration from a file, checked to be for this device and framework.

    Raises:
        UsageError: The file is missing, or is not a calibration of this device and framework.
        CostModelError: The file is damaged, or was made for other features than this version computes.
    """
    if not path.is_file():
        raise UsageError(
            f"expected a calibration file at {path}, but there is none; make one with: {_command(stack)} --out {path}"
        )
    weights = load_weights(path)
    if weights.calibrated_device != device.title:
        raise UsageError(
            f"{path.name} is a calibration of '{weights.calibrated_device or 'no single device'}', but the device is "
            f"'{device.title}'; name the file of that device, or leave --calibration out"
        )
    if weights.calibrated_stack != stack:
        raise UsageError(
            f"{path.name} is a calibration of {weights.calibrated_stack}, but the model runs with {stack}, whose "
            f"operations take other times; make one with: {_command(stack)} --out FILE, or leave --calibration out"
        )
    return weights


def _command(stack: str) -> str:
    return "forerun calibrate" if stack == DEFAULT_STACK else f"forerun calibrate --framework {stack}"
