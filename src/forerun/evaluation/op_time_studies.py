"""Cross-validated predictions of the op-level model: whole families held out, whole devices held out.

Fits and predictions are by split, never by row; the splits come from ``regressors.evaluation``. A study returns
one row per tested measurement, so that any error figure can be computed, and printed again, from it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from forerun.costs.calibration import PriorScales, choose_steps, condition, fit_scales, sensitivities
from forerun.costs.op_time import step_times
from forerun.costs.op_weights import OpTimeWeights
from forerun.evaluation.corpus import Measured
from forerun.evaluation.op_time_fit import as_weights, encode, fit_ensemble
from forerun.regressors.evaluation import family_folds
from forerun.regressors.op_fit import FitSettings

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
    """

    steps: tuple[Measured, ...]
    log_predicted: Floats
    spread: Floats
    fold: npt.NDArray[np.int64]
    sensitivities: Floats

    @property
    def log_measured(self) -> Floats:
        """Log of the measured step time, (n,)."""
        return np.log([step.record.step_time_s for step in self.steps])

    @property
    def residuals(self) -> Floats:
        """log(measured / predicted), (n,)."""
        return self.log_measured - self.log_predicted


def predict_with(weights: OpTimeWeights, steps: Sequence[Measured]) -> tuple[Floats, Floats, Floats]:
    """Log step time, spread over the ensemble, and sensitivities of each step."""
    logs, spreads, rows = np.empty(len(steps)), np.empty(len(steps)), []
    for index, step in enumerate(steps):
        offsets = weights.offsets_of_system(step.system)[:, None]
        times = step_times(step.ops, [step.point()], weights, offsets, with_kernels=True)
        logs[index], spreads[index] = np.log(times.step_s[0]), times.spread[0]
        rows.append(sensitivities(step.ops, times)[0])
    return logs, spreads, np.asarray(rows)


def family_study(
    steps: Sequence[Measured],
    tested: Sequence[int],
    settings: Sequence[FitSettings],
    report: Callable[[str], None] = lambda _: None,
    num_folds: int = 5,
) -> HeldOut:
    """Every tested step predicted by a fit without its family, in any table.

    Args:
        steps: All measurements that may be fitted.
        tested: Indices of those to predict; folds are by their families.
        settings: Members of the ensemble.
        report: Told about each finished fold.
        num_folds: Number of folds.
    """
    encoded = encode(steps)
    families = np.asarray([step.record.family for step in steps])
    rows = np.asarray(tested)
    logs, spreads, fold = np.empty(len(rows)), np.empty(len(rows)), np.empty(len(rows), dtype=np.int64)
    sensitivity: list[Floats] = [np.empty(0)] * len(rows)
    for number, split in enumerate(family_folds([steps[i].record for i in rows], num_folds)):
        held_out = set(families[rows[split.test]])
        chosen = np.flatnonzero([family not in held_out for family in families])
        weights = as_weights(fit_ensemble(encoded, chosen, settings), encoded.systems, {})
        part = predict_with(weights, [steps[i] for i in rows[split.test]])
        logs[split.test], spreads[split.test], fold[split.test] = part[0], part[1], number
        for position, row in zip(split.test, part[2], strict=True):
            sensitivity[position] = row
        report(f"families, fold {number + 1} of {num_folds}")
    return HeldOut(
        steps=tuple(steps[i] for i in rows),
        log_predicted=logs,
        spread=spreads,
        fold=fold,
        sensitivities=np.asarray(sensitivity),
    )


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
) -> dict[str, HeldOut]:
    """Each device's steps predicted by a fit without any row of it."""
    encoded = encode(steps)
    names = np.asarray([step.device.name for step in steps])
    results = {}
    for device in devices:
        networks = fit_ensemble(encoded, np.flatnonzero(names != device), settings)
        weights = as_weights(networks, encoded.systems, {})
        chosen = np.flatnonzero(names == device)
        logs, spread, rows = predict_with(weights, [steps[i] for i in chosen])
        results[device] = HeldOut(
            steps=tuple(steps[i] for i in chosen),
            log_predicted=logs,
            spread=spread,
            fold=np.zeros(len(chosen), dtype=np.int64),
            sensitivities=rows,
        )
        report(f"device {device} held out")
    return results


def few_shot(
    held_out: dict[str, HeldOut], num_steps: Sequence[int] = (0, 1, 3, 5, 10), num_candidates: int = 60
) -> list[DeviceResult]:
    """Errors after k chosen steps were measured; prior scales from the other devices."""
    random = np.random.default_rng(0)
    sampled = {name: _sample(held, random, num_candidates) for name, held in held_out.items()}
    results = []
    for name, held in held_out.items():
        others = [(h.sensitivities[sampled[n]], h.residuals[sampled[n]]) for n, h in held_out.items() if n != name]
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


def fast(settings: Sequence[FitSettings], num_iterations: int) -> tuple[FitSettings, ...]:
    """The same settings with fewer iterations."""
    return tuple(replace(setting, num_iterations=num_iterations) for setting in settings)


def overall_scales(held_out: dict[str, HeldOut], num_candidates: int = 60) -> PriorScales:
    """Prior scales from all held-out devices, for devices nobody here has measured."""
    random = np.random.default_rng(0)
    chosen = {name: _sample(held, random, num_candidates) for name, held in held_out.items()}
    return fit_scales([(h.sensitivities[chosen[n]], h.residuals[chosen[n]]) for n, h in held_out.items()])
