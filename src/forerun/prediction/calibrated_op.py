"""The op-level model as a regressor: the shipped weights with an offset that a few measured steps decide.

The shipped weights give log t0 of a step and its sensitivities J (``costs.calibration``): how it would change if all
kernels, arithmetic, memory traffic, the host, or one class of operations were slower by a factor. Added to these are
two exponents, of the work F and the traffic D of a step, for a device's efficiency may depend on size in another way
than that of the devices of the fit:

    log t = log t0 + J a + b1 log(F / F0) + b2 log(D / D0),   F0, D0 geometric means over the measured steps

a and b are Gaussian around zero; the fit takes their posterior mean in closed form, from one row on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import ClassVar, Self

import numpy as np
import numpy.typing as npt

from forerun.costs.calibration import PriorScales, sensitivities
from forerun.costs.op_time import step_times
from forerun.costs.op_weights import NetworkWeights, OpTimeWeights, load_weights, shipped_weights_path
from forerun.errors import CostModelError, RecordError
from forerun.hardware.device import Device
from forerun.prediction.step import PreparedModel, points_of
from forerun.regressors.interface import Floats, RegressorState, check_fit_input, not_fitted
from forerun.workload.graph import OpClass
from forerun.workload.setup import TrainingSetup

__all__ = ["CalibratedOpModel", "OpCase", "OpLevelRows", "op_level_rows"]

_COLUMNS = (
    "overall",
    "compute",
    "memory",
    "host",
    "additive",
    *(f"class.{kind.name.lower()}" for kind in OpClass),
    "work",
    "traffic",
)
_NUM_EXPONENTS = 2
_NUM_FACTORS = len(_COLUMNS) - _NUM_EXPONENTS

_EXPONENTS = (0.03, 0.15, 0.5)
"""Prior scales of the exponents; the first stands where rows are too few to tell."""

_NOISES = (0.015, 0.03, 0.06, 0.12)
"""What no correction explains, between models of one family and between all models, of log times."""

_FEWEST_ROWS_FOR_NOISE = 8

_OVERALL = (0.3, 1.0, 3.0)
"""Scales of a device that is not what its datasheet says: a processor shared or cut down, a device unlike any known."""

_WIDEST = 3.0
"""No correction is expected to exceed a factor of twenty; a wider prior would fit noise where it hardly acts."""


@dataclass(frozen=True, slots=True)
class OpCase:
    """One step: the model, where it runs, how, and the version of the framework ("" if unknown)."""

    model: PreparedModel
    device: Device
    setup: TrainingSetup
    framework_version: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpLevelRows:
    """What the shipped op-level model says about n steps.

    Attributes:
        log_time_s: Log of the predicted step time, (n,).
        sensitivities: How it answers to each kind of correction, as in ``costs.calibration``, (n, corrections).
        log_work: Logarithms of the work [FLOP] and the traffic [bytes] of the step, (n, 2).
    """

    log_time_s: Floats
    sensitivities: Floats
    log_work: Floats

    def __post_init__(self) -> None:
        for name, columns in (("sensitivities", _NUM_FACTORS), ("log_work", _NUM_EXPONENTS)):
            expected, found = (len(self.log_time_s), columns), getattr(self, name).shape
            if found != expected:
                raise RecordError(f"op-level figures: expected {name} of shape {expected}, got {found}")
        for name in ("log_time_s", "sensitivities", "log_work"):
            if not np.all(np.isfinite(getattr(self, name))):
                raise RecordError(f"op-level figures: '{name}' holds NaN or infinity; drop those rows")

    def __len__(self) -> int:
        return len(self.log_time_s)

    def take(self, rows: npt.NDArray[np.int64]) -> OpLevelRows:
        """The rows with these indices, in their order."""
        return OpLevelRows(
            log_time_s=self.log_time_s[rows],
            sensitivities=self.sensitivities[rows],
            log_work=self.log_work[rows],
        )


@cache
def _shipped_weights() -> OpTimeWeights:
    return load_weights(shipped_weights_path())


def op_level_rows(cases: Sequence[OpCase], weights: OpTimeWeights | None = None) -> OpLevelRows:
    """Op-level figures of steps; those of one model are evaluated together.

    Args:
        cases: The steps.
        weights: The cost model, such as one refined for the device; the shipped one if None.
    """
    weights = weights or _shipped_weights()
    logs, rows = np.empty(len(cases)), np.empty((len(cases), _NUM_FACTORS))
    indices_of: dict[tuple[int, str], list[int]] = {}
    for index, case in enumerate(cases):
        indices_of.setdefault((id(case.model), case.framework_version), []).append(index)
    for (_, version), indices in indices_of.items():
        chosen = [cases[i] for i in indices]
        model = chosen[0].model
        points = points_of(model, [c.device for c in chosen], [c.setup for c in chosen], version or None)
        offsets = np.stack([weights.offsets_of_point(point) for point in points], axis=1)
        times = step_times(model.ops, points, weights, offsets, with_kernels=True)
        logs[indices], rows[indices] = np.log(times.step_s), sensitivities(model.ops, times)
    return OpLevelRows(
        log_time_s=logs, sensitivities=rows, log_work=np.array([_log_work(case) for case in cases])
    )


def _log_work(case: OpCase) -> tuple[float, float]:
    graph, batch = case.model.graph, case.setup.batch_size_per_device
    return float(np.log(max(1.0, graph.total_flops(batch)))), float(
        np.log(max(1.0, graph.total_bytes(batch)))
    )


@cache
def _weights_id() -> str:
    """Identity of the numbers of the shipped weights."""
    weights = _shipped_weights()
    digest = hashlib.sha256(repr((weights.systems, weights.class_offsets, weights.overall_offset)).encode())
    for network in weights.networks:
        for name in NetworkWeights.__slots__:
            digest.update(np.ascontiguousarray(getattr(network, name)).tobytes())
    return digest.hexdigest()[:16]


class CalibratedOpModel:
    """log t = log t0 + J a + b log(work), by Bayesian linear regression on the log residuals of measured steps.

    The prior scales are those of the shipped weights. Noise, overall scale and that of the exponents are those of a few
    that make the measured steps most likely: steps of one family of networks have more in common than those of all, and
    a device may be far from its datasheet.
    """

    kind: ClassVar[str] = "op"
    version: ClassVar[int] = 1

    def __init__(self) -> None:
        self._coefficients: Floats | None = None
        self._centre = np.zeros(_NUM_EXPONENTS)

    def fit(self, features: OpLevelRows, step_time_s: Floats) -> None:
        """Fit the log corrections."""
        residuals = np.log(check_fit_input(features, step_time_s)) - features.log_time_s
        self._centre = features.log_work.mean(axis=0)
        rows = self._columns(features)
        prior = _capped(PriorScales(**_shipped_weights().provenance["calibration_scales"]))
        self._coefficients = _posterior_mean(rows, residuals, _likely_scales(rows, residuals, prior))

    def _columns(self, features: OpLevelRows) -> Floats:
        return np.column_stack([features.sensitivities, features.log_work - self._centre])

    def predict(self, features: OpLevelRows) -> Floats:
        """Calibrated times [s]."""
        if self._coefficients is None:
            raise not_fitted("the calibrated op-level model")
        logs = features.log_time_s + self._columns(features) @ self._coefficients
        return np.asarray(np.exp(logs), dtype=float)

    def state(self) -> RegressorState:
        """Corrections, and which weights they correct."""
        if self._coefficients is None:
            raise not_fitted("the calibrated op-level model")
        return RegressorState(
            features=_COLUMNS,
            settings={"weights_id": _weights_id()},
            arrays={"coefficients": self._coefficients, "centre": self._centre},
        )

    @classmethod
    def from_state(cls, state: RegressorState) -> Self:
        """The model that had this state.

        Raises:
            CostModelError: It was fitted on top of other weights than this version ships.
        """
        if state.settings["weights_id"] != _weights_id():
            raise CostModelError(
                "the model corrects other op-level weights than this version of forerun has; "
                "fit it again with: forerun fit RECORDS --model op --out FILE"
            )
        found = cls()
        found._coefficients = np.asarray(state.arrays["coefficients"], dtype=float)
        found._centre = np.asarray(state.arrays["centre"], dtype=float)
        shapes = (found._coefficients.shape, found._centre.shape)
        if shapes != ((len(_COLUMNS),), (_NUM_EXPONENTS,)):
            raise ValueError(
                f"expected {len(_COLUMNS)} coefficients and {_NUM_EXPONENTS} centres, got {shapes}"
            )
        return found


@dataclass(frozen=True, slots=True)
class _Scales:
    """Prior variance of each column, (columns,), and the noise."""

    variances: Floats
    noise: float


def _capped(prior: PriorScales) -> PriorScales:
    return PriorScales(**{name: min(scale, _WIDEST) for name, scale in asdict(prior).items()})


def _likely_scales(rows: Floats, residuals: Floats, prior: PriorScales) -> _Scales:
    """The prior with the scales of greatest marginal likelihood; noise and exponents only where rows can tell."""
    can_tell = len(rows) >= _FEWEST_ROWS_FOR_NOISE
    candidates = (
        _Scales(
            np.append(replace(prior, overall=overall).variances(), np.full(_NUM_EXPONENTS, exponent**2)),
            noise,
        )
        for overall in (prior.overall, *_OVERALL)
        for noise in (_NOISES if can_tell else (prior.noise,))
        for exponent in (_EXPONENTS if can_tell else _EXPONENTS[:1])
    )
    return max(candidates, key=lambda scales: _log_likelihood(rows, residuals, scales))


def _posterior_mean(rows: Floats, residuals: Floats, scales: _Scales) -> Floats:
    """Mean of the coefficients given k rows, (columns,): S^(1/2) (I + Z'Z)^-1 Z' r / n with Z = J S^(1/2) / n."""
    scaled = rows * np.sqrt(scales.variances) / scales.noise
    inner = np.eye(rows.shape[1]) + scaled.T @ scaled
    solved = np.linalg.solve(inner, scaled.T @ residuals / scales.noise)
    return np.asarray(np.sqrt(scales.variances) * solved, dtype=float)


def _log_likelihood(rows: Floats, residuals: Floats, scales: _Scales) -> float:
    """Marginal log likelihood, log N(r; 0, J S J' + n^2 I), without its constant.

    In the space of the columns, so that the cost grows with the rows and not with their cube:
    det = n^(2k) det(I + Z'Z), and the inverse by Woodbury's identity.
    """
    scaled = rows * np.sqrt(scales.variances) / scales.noise
    inner = np.eye(rows.shape[1]) + scaled.T @ scaled
    projected = scaled.T @ residuals / scales.noise
    squares = residuals @ residuals / scales.noise**2 - projected @ np.linalg.solve(inner, projected)
    log_determinant = np.linalg.slogdet(inner)[1] + 2 * len(rows) * np.log(scales.noise)
    return float(-0.5 * (squares + log_determinant))
