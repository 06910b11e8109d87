"""Brings the cost model to one device by measurements made on it.

Two ways, by how much was measured:

- *refined*: from layers and whole models, some dozens of samples: the fitted networks are refined on them, as near to
  where they were as the samples allow (``regressors.op_fit.refine_op_network``);
- *offset*: from a few whole steps: log offsets of compute, memory and host time and of each class of operations, in
  closed form (``costs.calibration``).

The error is measured on configurations left out: families of models in turn, so that no configuration is predicted by
a calibration that has seen it.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

import numpy as np
import numpy.typing as npt

from forerun.costs.calibration import (
    ADDED_S,
    PriorScales,
    coefficients,
    likely_scales,
    sensitivities,
)
from forerun.costs.op_time import step_times
from forerun.costs.op_weights import NetworkWeights, OpTimeWeights
from forerun.errors import RecordError
from forerun.evaluation.interval_laws import IntervalLaw, fit_law
from forerun.evaluation.measured_layers import DeviceSample, sampling_weights
from forerun.evaluation.op_time_fit import as_weights
from forerun.hardware.device import Device
from forerun.prediction.estimate import Provenance
from forerun.regressors.op_fit import FitSettings, encode_samples, refine_op_network

__all__ = ["REFINE_SETTINGS", "CalibrationResult", "calibrate", "fitted_weights", "log_predictions"]

Floats = npt.NDArray[np.float64]

LEAST_TO_REFINE = 40
"""Samples from which networks are refined; with fewer, offsets are fitted."""

REFINE_SETTINGS = FitSettings(
    num_iterations=700,
    samples_per_batch=32,
    learning_rate=3e-3,
    latent_learning_rate=5e-2,
    weight_decay=0.0,
    latent_scale=1.0,
    host_latent_scale=1.0,
)
"""Another device may be twice as fast throughout as its figures say, so its offsets are hardly held."""

_LEAST_LAW_ROWS = 4

_FEWEST_TO_JUDGE = 3
"""Steps from which a device may be taken for one far from its datasheet: one odd step is no reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationResult:
    """A calibration and what is known about its error.

    Attributes:
        weights: The calibrated model.
        method: ``refined`` or ``offset``.
        num_layers, num_models: Samples it was made from.
        log_before: log(measured / predicted) of the whole models before, (m,).
        log_after: The same by calibrations that had not seen the model's family, (m,).
        samples: The whole models, in that order.
    """

    weights: OpTimeWeights
    method: str
    num_layers: int
    num_models: int
    log_before: Floats
    log_after: Floats
    samples: tuple[DeviceSample, ...]


def calibrate(
    samples: Sequence[DeviceSample],
    device: Device,
    start: OpTimeWeights,
    report: Callable[[str], None] = lambda _: None,
    num_folds: int = 4,
    settings: FitSettings = REFINE_SETTINGS,
    loop_s: float = 0.0,
) -> CalibrationResult:
    """Fits a device and measures the error on families of models left out.

    Args:
        samples: Steps and layers measured on the device.
        device: The device.
        start: Weights of all devices.
        report: Told about each finished fit.
        num_folds: Folds of the families.
        settings: How networks are refined.
        loop_s: What a step of the training loop takes beside its operations, as the samples say it [s].

    Raises:
        RecordError: No finished step or layer is among the measurements, or models left out are predicted worse with
            the calibration than without.
    """
    if not samples:
        raise RecordError(
            "expected finished measurements of steps or layers on the device, got none; "
            "measure some with: forerun measure model MODEL"
        )
    refines = len(samples) >= LEAST_TO_REFINE
    fit = partial(fitted_weights, settings=settings, refines=refines)
    whole = [sample for sample in samples if sample.is_whole_model]
    before, after = np.zeros(len(whole)), np.zeros(len(whole))
    if whole:
        before = _residuals([replace(sample, loop_s=0.0) for sample in whole], start)
        for number, held_out in enumerate(_family_folds(whole, num_folds), start=1):
            families = {whole[i].group for i in held_out}
            rest = [sample for sample in samples if sample.group not in families]
            fitted = fit(rest, start) if rest else start
            after[held_out] = _residuals([whole[i] for i in held_out], fitted)
            report(f"fit without family {number}")
        if len({sample.group for sample in whole}) > 1:
            _refuse_if_worse(before, after)
    weights = fit(samples, start)
    return CalibrationResult(
        weights=_with_provenance(
            weights, samples, device, start, whole, after, "refined" if refines else "offset", loop_s
        ),
        method="refined" if refines else "offset",
        num_layers=len(samples) - len(whole),
        num_models=len(whole),
        log_before=before,
        log_after=after,
        samples=tuple(whole),
    )


def _refuse_if_worse(before: Floats, after: Floats) -> None:
    """Refuses a calibration that predicts models it has not seen worse than the weights it began with."""
    worse, better = (float(np.abs(np.expm1(-logs)).mean()) for logs in (after, before))
    if worse > better:
        raise RecordError(
            f"expected measurements that agree with each other, but models left out are predicted with a mean error of "
            f"{worse:.0%} after the calibration and {better:.0%} before it; was the machine busy, or do precision and "
            "versions differ from what was measured? Measure again, or more models"
        )


def fitted_weights(
    samples: Sequence[DeviceSample],
    start: OpTimeWeights,
    *,
    settings: FitSettings = REFINE_SETTINGS,
    refines: bool | None = None,
) -> OpTimeWeights:
    """The cost model of a device, without intervals or provenance of its own.

    Args:
        samples: Steps and layers measured on the device.
        start: Weights of all devices.
        settings: How networks are refined.
        refines: Whether they are refined, or offsets fitted; None goes by the number of samples.
    """
    if refines is None:
        refines = len(samples) >= LEAST_TO_REFINE
    return _refined(settings, samples, start) if refines else _offset(samples, start)


def log_predictions(samples: Sequence[DeviceSample], weights: OpTimeWeights) -> Floats:
    """Log of the predicted time of each sample, its training loop included, (n,)."""
    logs = np.empty(len(samples))
    for index, sample in enumerate(samples):
        times = step_times(sample.ops, [sample.point], weights, _offsets(sample, weights))
        logs[index] = np.log(times.step_s[0] + sample.loop_s)
    return logs


def _offsets(sample: DeviceSample, weights: OpTimeWeights) -> Floats:
    return weights.offsets_of_point(sample.point)[:, None]


def _residuals(samples: Sequence[DeviceSample], weights: OpTimeWeights) -> Floats:
    measured = np.log([sample.step_time_s for sample in samples])
    residuals: Floats = measured - log_predictions(samples, weights)
    return residuals


def _family_folds(samples: Sequence[DeviceSample], num_folds: int) -> list[list[int]]:
    """Indices by fold; the samples of a family stay together, large families first to the smallest fold."""
    by_family: dict[str, list[int]] = {}
    for index, sample in enumerate(samples):
        by_family.setdefault(sample.group, []).append(index)
    folds: list[list[int]] = [[] for _ in range(min(num_folds, len(by_family)))]
    for rows in sorted(by_family.values(), key=len, reverse=True):
        min(folds, key=len).extend(rows)
    return folds


def _refined(settings: FitSettings, samples: Sequence[DeviceSample], start: OpTimeWeights) -> OpTimeWeights:
    # What is slower throughout is taken off first: constants and latencies have no offsets of their own.
    logs = np.log([sample.step_time_s for sample in samples]) - log_predictions(samples, start)
    overall = float(np.median(logs))
    chosen = [s.fit_sample(float(w)) for s, w in zip(samples, sampling_weights(samples), strict=True)]
    encoded = encode_samples([replace(s, step_time_s=s.step_time_s * np.exp(-overall)) for s in chosen])
    device = samples[0].point.device
    known = start.offsets_of_kernels(device.name, device.architecture)
    networks = [
        refine_op_network(
            {name: getattr(network, name) for name in NetworkWeights.__slots__}
            | {"device_offsets": known[member][None]},
            encoded,
            np.arange(len(encoded)),
            settings,
        )
        for member, network in enumerate(start.networks)
    ]
    found = as_weights(networks, encoded.systems, {"method": "refined"})
    return replace(found, overall_offset=overall + start.overall_offset)


def _offset(samples: Sequence[DeviceSample], start: OpTimeWeights) -> OpTimeWeights:
    rows, residuals = [], []
    for sample in samples:
        offsets = _offsets(sample, start)
        times = step_times(sample.ops, [sample.point], start, offsets, with_kernels=True)
        rows.append(sensitivities(sample.ops, times)[0])
        residuals.append(np.log(sample.ops_time_s / times.step_s[0]))
    scales = PriorScales(**start.provenance["calibration_scales"])
    known_rows, known_residuals = np.asarray(rows), np.asarray(residuals)
    if len(known_rows) >= _FEWEST_TO_JUDGE:
        scales = likely_scales(known_rows, known_residuals, scales)
    overall, compute, memory, host, added, *classes = coefficients(known_rows, known_residuals, scales)
    shift = np.asarray([compute, memory, host, 0.0])
    systems = tuple(dict.fromkeys(sample.system for sample in samples))
    known = {sample.system: _offsets(sample, start)[:, 0] for sample in samples}

    def latents(member: int, network: NetworkWeights, system: str) -> Floats:
        found: Floats = known[system][member] + shift
        loop_s = float(np.exp(np.ravel(network.loop)[0] + found[3]))
        # The smallest loop is a microsecond: what is added may be negative as well.
        found[3] += np.log(max(loop_s + added * ADDED_S, 1e-6) / loop_s)
        return found

    networks = tuple(
        _with_latents(network, np.stack([latents(member, network, system) for system in systems]))
        for member, network in enumerate(start.networks)
    )
    return replace(
        start,
        networks=networks,
        systems=systems,
        provenance={},
        class_offsets=tuple(classes),
        overall_offset=float(overall),
    )


def _with_latents(network: NetworkWeights, latents: Floats) -> NetworkWeights:
    values = {name: getattr(network, name) for name in NetworkWeights.__slots__}
    return NetworkWeights(**(values | {"latents": latents.astype(np.float32)}))


def _calibrated_law(log_after: Floats, whole: Sequence[DeviceSample], otherwise: IntervalLaw) -> IntervalLaw:
    """The law of the models left out; of too few, that of devices others have measured, or wider where they were off.

    A conformal quantile of fewer than nine rows is infinite.
    """
    if len(whole) >= _LEAST_LAW_ROWS:
        found = fit_law(log_after, np.zeros(len(whole)), [sample.group for sample in whole])
        if np.isfinite(found.quantile):
            return found
    largest = float(np.abs(log_after).max(initial=0.0)) / otherwise.base
    return replace(otherwise, quantile=max(otherwise.quantile, largest))


def _with_provenance(
    weights: OpTimeWeights,
    samples: Sequence[DeviceSample],
    device: Device,
    start: OpTimeWeights,
    whole: Sequence[DeviceSample],
    log_after: Floats,
    method: str,
    loop_s: float,
) -> OpTimeWeights:
    laws = dict(start.provenance["intervals"])
    known = IntervalLaw(**laws[str(Provenance.INTERPOLATED)])
    laws[str(Provenance.CALIBRATED)] = asdict(_calibrated_law(log_after, whole, known))
    kinds = {"half" if sample.point.setup.precision.is_half else "full" for sample in samples}
    around = samples[0].measurement.circumstances
    return replace(
        weights,
        provenance={
            "date": datetime.date.today().isoformat(),
            "calibrated_device": device.title,
            "method": method,
            "num_layers": len(samples) - len(whole),
            "num_models": len(whole),
            "models": sorted({sample.measurement.subject for sample in whole}),
            "host": around.host,
            "num_threads": around.num_threads,
            "framework": f"{around.framework} {around.framework_version}",
            "step_cost_s": loop_s,
            "measured_devices": {device.name: sorted(kinds)},
            "intervals": laws,
            "calibration_scales": start.provenance["calibration_scales"],
            "started_from": {name: start.provenance.get(name) for name in ("date", "rows")},
        },
    )
