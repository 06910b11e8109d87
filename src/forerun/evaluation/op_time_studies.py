"""Cross-validated predictions of the op-level model: whole families held out, whole devices held out.

Fits and predictions are by split, never by row; the splits come from ``regressors.evaluation``. A study returns
one row per tested measurement, so that any error figure can be computed, and printed again, from it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from forerun.costs.calibration import PriorScales, choose_steps, condition, fit_scales, sensitivities
from forerun.costs.op_time import step_times
from forerun.costs.op_weights import OpTimeWeights
from forerun.evaluation.corpus import Measured
from forerun.evaluation.op_time_fit import as_weights, encode, fit_ensemble, fittable, operator_rows
from forerun.evaluation.operator_tables import OperatorTable
from forerun.regressors.evaluation import family_folds
from forerun.regressors.op_fit import FitSettings
from forerun.workload.graph import StepPart

__all__ = [
    "DeviceResult",
    "HeldOut",
    "device_study",
    "family_study",
    "few_shot",
    "predict_with",
]

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """Predictions of measurements that the fit did not see, n rows.

    Attributes:
        steps: The measurements.
        log_predicted: Log of the predicted step time, mean of the ensemble, (n,).
        spread: Standard deviation over the ensemble, (n,).
        fold: Split each row was tested in, (n,).
        sensitivities: Rows of the calibration's J, (n, c).
        forward_share: Share of the kernels' time that lies in the forward pass, (n,).
    """

    steps: tuple[Measured, ...]
    log_predicted: Floats
    spread: Floats
    fold: npt.NDArray[np.int64]
    sensitivities: Floats
    forward_share: Floats

    @property
    def log_measured(self) -> Floats:
        """Log of the measured step time, (n,)."""
        return np.log([step.record.step_time_s for step in self.steps])

    @property
    def residuals(self) -> Floats:
        """log(measured / predicted), (n,)."""
        return self.log_measured - self.log_predicted

    def take(self, rows: npt.NDArray[np.int64]) -> HeldOut:
        """The rows with these indices."""
        return HeldOut(
            steps=tuple(self.steps[int(i)] for i in rows),
            log_predicted=self.log_predicted[rows],
            spread=self.spread[rows],
            fold=self.fold[rows],
            sensitivities=self.sensitivities[rows],
            forward_share=self.forward_share[rows],
        )


def predict_with(
    weights: OpTimeWeights, steps: Sequence[Measured], folds: npt.NDArray[np.int64] | None = None
) -> HeldOut:
    """Predictions of steps by a model that was fitted without them, with the offsets that a user gets."""
    logs, spreads, shares, rows = np.empty(len(steps)), np.empty(len(steps)), np.empty(len(steps)), []
    for index, step in enumerate(steps):
        offsets = weights.offsets_of_point(step.point())[:, None]
        times = step_times(step.ops, [step.point()], weights, offsets, with_kernels=True)
        logs[index], spreads[index] = np.log(times.step_s[0]), times.spread[0]
        rows.append(sensitivities(step.ops, times)[0])
        assert times.kernel_s is not None
        is_forward = step.ops.step_part == StepPart.FORWARD
        shares[index] = times.kernel_s[0, is_forward].sum() / times.kernel_s[0].sum()
    return HeldOut(
        steps=tuple(steps),
        log_predicted=logs,
        spread=spreads,
        fold=np.zeros(len(steps), dtype=np.int64) if folds is None else folds,
        sensitivities=np.asarray(rows),
        forward_share=shares,
    )


def joined(parts: Sequence[HeldOut]) -> HeldOut:
    """Several results as one."""

    def column(name: str) -> npt.NDArray[Any]:
        return np.concatenate([getattr(part, name) for part in parts])

    return HeldOut(
        steps=tuple(step for part in parts for step in part.steps),
        log_predicted=column("log_predicted"),
        spread=column("spread"),
        fold=column("fold"),
        sensitivities=column("sensitivities"),
        forward_share=column("forward_share"),
    )


def family_study(
    steps: Sequence[Measured],
    tested: Sequence[int],
    settings: Sequence[FitSettings],
    report: Callable[[str], None] = lambda _: None,
    num_folds: int = 5,
    operators: Sequence[OperatorTable] = (),
) -> HeldOut:
    """Every tested step predicted by a fit without its family, in any table.

    Args:
        steps: All measurements that may be fitted.
        tested: Indices of those to predict; folds are by their families.
        settings: Members of the ensemble.
        report: Told about each finished fold.
        num_folds: Number of folds.
        operators: Operators timed alone, in every fit.
    """
    encoded = encode(steps, operators)
    families = np.asarray([step.record.family for step in steps])
    rows = np.asarray(tested)
    parts = []
    for number, split in enumerate(family_folds([steps[int(i)].record for i in rows], num_folds)):
        held_out = set(families[rows[split.test]])
        known = np.flatnonzero(fittable(steps) & [family not in held_out for family in families])
        chosen = np.concatenate([known, operator_rows(steps, operators)])
        seen = {steps[int(i)].system for i in known}
        weights = as_weights(fit_ensemble(encoded, chosen, settings), encoded.systems, {}, seen)
        folds = np.full(len(split.test), number)
        parts.append(predict_with(weights, [steps[int(i)] for i in rows[split.test]], folds))
        report(f"families, fold {number + 1} of {num_folds}")
    return joined(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceResult:
    """Errors on a device that the fit did not see, with k measured steps.

    Attributes:
        device: The device.
        corrected: For each k, log(measured / predicted) of the steps that were not measured.
        deviation: For each k, the posterior standard deviation of those.
    """

    device: str
    corrected: dict[int, Floats]
    deviation: dict[int, Floats]


def device_study(
    steps: Sequence[Measured],
    devices: Sequence[str],
    settings: Sequence[FitSettings],
    report: Callable[[str], None] = lambda _: None,
    operators: Sequence[OperatorTable] = (),
) -> dict[str, HeldOut]:
    """Each device's steps predicted by a fit without any row of it, in any table.

    Args:
        steps: All measurements.
        devices: Names of those to hold out, one at a time.
        settings: Members of the ensemble.
        report: Told about each finished device.
        operators: Operators timed alone; those of the device are left out as well.
    """
    encoded = encode(steps, operators)
    names = np.asarray([step.device.name for step in steps])
    results = {}
    for device in devices:
        known = np.flatnonzero(fittable(steps) & (names != device))
        fitted = np.concatenate([known, operator_rows(steps, operators, [device])])
        networks = fit_ensemble(encoded, fitted, settings)
        weights = as_weights(networks, encoded.systems, {}, {steps[int(i)].system for i in known})
        chosen = np.flatnonzero(names == device)
        results[device] = predict_with(weights, [steps[int(i)] for i in chosen])
        report(f"held out: {device}")
    return results


def few_shot(
    held_out: dict[str, HeldOut], num_steps: Sequence[int] = (0, 1, 3, 5, 10), num_candidates: int = 60
) -> list[DeviceResult]:
    """Errors after k chosen steps were measured; prior scales from the other devices."""
    random = np.random.default_rng(0)
    sampled = {name: _sample(held, random, num_candidates) for name, held in held_out.items()}
    results = []
    for name, held in held_out.items():
        others = [
            (h.sensitivities[sampled[n]], h.residuals[sampled[n]]) for n, h in held_out.items() if n != name
        ]
        scales = fit_scales(others)
        order = choose_steps(held.sensitivities, sampled[name].tolist(), max(num_steps), scales)
        corrected, deviation = {}, {}
        for k in num_steps:
            posterior = condition(held.sensitivities, order[:k], held.residuals[order[:k]], scales)
            rest = np.setdiff1d(np.arange(len(held.steps)), order[:k])
            corrected[k] = (held.residuals - posterior.mean)[rest]
            deviation[k] = posterior.deviation[rest]
        results.append(DeviceResult(device=name, corrected=corrected, deviation=deviation))
    return results


def _sample(held: HeldOut, random: np.random.Generator, limit: int) -> npt.NDArray[np.int64]:
    count = len(held.steps)
    return np.sort(random.choice(count, size=min(limit, count), replace=False))


def overall_scales(held_out: dict[str, HeldOut], num_candidates: int = 60) -> PriorScales:
    """Prior scales from all held-out devices, for devices nobody here has measured."""
    random = np.random.default_rng(0)
    chosen = {name: _sample(held, random, num_candidates) for name, held in held_out.items()}
    return fit_scales([(h.sensitivities[chosen[n]], h.residuals[chosen[n]]) for n, h in held_out.items()])
