"""Fits the cost model to one device by measurements made on it.

There are two methods, for many and for few measurements:

- *refined*: from layers and whole models, some dozens of samples: the fitted networks are refined on them, as near to
  where they were as the samples allow (``op_time_fit.refine_op_network``);
- *offset*: from a few whole steps: log offsets of compute, memory and host time and of each class of operations, and
  exponents of the size of a step, in closed form (``cost.time.correction``).

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

from forerun.base.errors import RecordError
from forerun.cost.time.correction import Step, corrected, step_figures
from forerun.cost.time.evidence import Z_90, shipped_evidence
from forerun.cost.time.step_times import step_times
from forerun.cost.time.weights import CostModel, NetworkWeights, run_kind
from forerun.evidence.fitting.evaluation import IntervalLaw, Split, fit_law
from forerun.evidence.fitting.measured_steps import DeviceSample, sampling_weights
from forerun.evidence.fitting.op_time_fit import FitSettings, as_weights, encode_samples, refine_op_network
from forerun.prediction.estimate import Provenance
from forerun.question.devices.device import Device

Floats = npt.NDArray[np.float64]

LEAST_TO_REFINE = 40
"""Fewest samples for refining networks; with fewer, offsets are fitted."""

REFINE_SETTINGS = FitSettings(
    num_iterations=700,
    samples_per_batch=32,
    learning_rate=3e-3,
    latent_learning_rate=5e-2,
    weight_decay=0.0,
    latent_scale=1.0,
    host_latent_scale=1.0,
)
"""Weak prior of the offsets, because another device may be twice as fast throughout as its figures say."""

WORSE_BY = 1.5
"""Error on models left out, over that before, above which a calibration is refused. Of five steps few are left out: by
more than 1, a fourth of the calibrations of systems never seen would be refused, nearly all of which help."""

_LEAST_LAW_ROWS = 4
_LEAST_TO_REFUSE = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationResult:
    """A calibration and what is known about its error.

    Attributes:
        weights: The calibrated model.
        method: ``refined`` or ``offset``.
        num_layers, num_models: Numbers of samples behind the calibration.
        log_before: log(measured / predicted) of the whole models before, (m,).
        log_after: log(measured / predicted) by calibrations that had not seen the model's family, (m,).
        samples: The whole models, in that order.
        refused: Measurements that the others contradict, which the calibration has not taken.
    """

    weights: CostModel
    method: str
    num_layers: int
    num_models: int
    log_before: Floats
    log_after: Floats
    samples: tuple[DeviceSample, ...]
    refused: tuple[str, ...] = ()


def calibrate(
    samples: Sequence[DeviceSample],
    device: Device,
    start: CostModel,
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
        report: Receives a line about each finished fit.
        num_folds: Folds of the families.
        settings: Settings of the refinement.
        loop_s: Time of a step of the training loop beside its operations, as in the samples [s].

    Raises:
        RecordError: No finished step or layer is among the measurements, or models left out are predicted worse with
            the calibration than without.
    """
    if not samples:
        raise RecordError(
            "expected finished measurements of steps or layers on the device, got none; "
            "measure some with: forerun measure model MODEL"
        )
    samples, refused = _without_outliers(samples, start)
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
        # With a single family nothing is left to fit once it is held out.
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
        refused=refused,
    )


def _without_outliers(
    samples: Sequence[DeviceSample], start: CostModel
) -> tuple[list[DeviceSample], tuple[str, ...]]:
    """Samples without the whole models that all others contradict, and what is said about those.

    A busy moment or a wrong row of a table moves everything where steps are few. A log residual is refused if it lies
    further from the median than five robust deviations (1.483 times the median distance, but no less than systems
    differ from each other) and than a factor of 1.5. One of few is never more than half of them.
    """
    whole = [index for index, sample in enumerate(samples) if sample.is_whole_model]
    if len(whole) < _LEAST_TO_REFUSE:
        return list(samples), ()
    residuals = _residuals([replace(samples[index], loop_s=0.0) for index in whole], start)
    apart = np.abs(residuals - np.median(residuals))
    limit = max(5.0 * max(1.483 * float(np.median(apart)), shipped_evidence().spreads.system), np.log(1.5))
    odd = [index for index, distance in zip(whole, apart, strict=True) if distance > limit]
    told = tuple(
        f"{samples[index].measurement.subject}, batch {samples[index].point.setup.batch_size_per_device}: left out, "
        f"{np.exp(apart[whole.index(index)]):.1f} times as far from its prediction as the others; measure it again"
        for index in odd
    )
    return [sample for index, sample in enumerate(samples) if index not in odd], told


def _refuse_if_worse(before: Floats, after: Floats) -> None:
    """Refuses a calibration that predicts models it has not seen far worse than the weights it began with."""
    worse, better = (float(np.abs(np.expm1(-logs)).mean()) for logs in (after, before))
    if worse > WORSE_BY * better:
        raise RecordError(
            f"expected measurements that agree with each other, but models left out are predicted with a mean error of "
            f"{worse:.0%} after the calibration and {better:.0%} before it; was the machine busy, or do precision and "
            "versions differ from what was measured? Measure again, or more models"
        )


def fitted_weights(
    samples: Sequence[DeviceSample],
    start: CostModel,
    *,
    settings: FitSettings = REFINE_SETTINGS,
    refines: bool | None = None,
) -> CostModel:
    """The cost model of a device, without its own intervals and provenance.

    Args:
        samples: Steps and layers measured on the device.
        start: Weights of all devices.
        settings: Settings of the refinement.
        refines: Whether networks are refined or offsets fitted; None decides by the number of samples.
    """
    if refines is None:
        refines = len(samples) >= LEAST_TO_REFINE
    if refines:
        return _refined(settings, samples, start)
    return corrected(samples, np.asarray([sample.ops_time_s for sample in samples]), start)


def corrected_predictions(
    steps: Sequence[Step], time_s: Floats, start: CostModel, splits: Sequence[Split]
) -> Floats:
    """Times of steps by offsets fitted to the other steps of their device, (n,) [s].

    Args:
        steps: Measured steps of one device or several; each device has a correction of its own.
        time_s: Measured times, (n,) [s].
        start: Weights of all devices.
        splits: Steps to fit and steps to predict; each is predicted once.
    """
    figures = step_figures(steps, start)
    places = np.asarray([step.point.device.title for step in steps])
    predicted = np.exp(figures.log_time_s)
    for split in splits:
        # Offsets belong to one device: steps of another say nothing about them.
        for place in np.unique(places[split.test]):
            fit, test = (rows[places[rows] == place] for rows in (split.fit, split.test))
            if len(fit):
                model = corrected([steps[i] for i in fit], time_s[fit], start, figures.take(fit))
                predicted[test] = np.exp(step_figures([steps[i] for i in test], model).log_time_s)
    return predicted


def log_predictions(samples: Sequence[DeviceSample], weights: CostModel) -> Floats:
    """Log of the predicted time of each sample, its training loop included, (n,)."""
    logs = np.empty(len(samples))
    for index, sample in enumerate(samples):
        offsets = weights.offsets_of_point(sample.point)[:, None]
        times = step_times(sample.ops, [sample.point], weights, offsets)
        logs[index] = np.log(times.step_s[0] + sample.loop_s)
    return logs


def _residuals(samples: Sequence[DeviceSample], weights: CostModel) -> Floats:
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


def _refined(settings: FitSettings, samples: Sequence[DeviceSample], start: CostModel) -> CostModel:
    # What is slower throughout is taken off first: constants and latencies have no offsets of their own.
    overall = float(np.median(_residuals(samples, start)))
    chosen = [s.fit_sample(float(w)) for s, w in zip(samples, sampling_weights(samples), strict=True)]
    encoded = encode_samples([replace(s, step_time_s=s.step_time_s * np.exp(-overall)) for s in chosen])
    device = samples[0].point.device
    known = start.offsets_of_kernels(device)
    networks = [
        refine_op_network(
            {name: getattr(network, name) for name in NetworkWeights.__slots__}
            | {"device_offsets": own[None]},
            encoded,
            np.arange(len(encoded)),
            settings,
        )
        for network, own in zip(start.networks, known, strict=True)
    ]
    found = as_weights(networks, encoded.systems, {**start.provenance, "method": "refined"})
    return replace(found, overall_offset=overall + start.overall_offset)


def _calibrated_law(log_after: Floats, whole: Sequence[DeviceSample], otherwise: IntervalLaw) -> IntervalLaw:
    """Interval law of the models left out; of too few, that of other systems after five steps, or a wider one.

    A conformal quantile of fewer than nine rows is infinite.
    """
    if len(whole) >= _LEAST_LAW_ROWS:
        found = fit_law(log_after, np.zeros(len(whole)), [sample.group for sample in whole])
        if np.isfinite(found.quantile):
            return found
    largest = float(np.abs(log_after).max(initial=0.0)) / otherwise.base
    return replace(otherwise, quantile=max(otherwise.quantile, largest))


def _with_provenance(
    weights: CostModel,
    samples: Sequence[DeviceSample],
    device: Device,
    start: CostModel,
    whole: Sequence[DeviceSample],
    log_after: Floats,
    method: str,
    loop_s: float,
) -> CostModel:
    known = IntervalLaw(quantile=1.0, base=Z_90 * shipped_evidence().spreads.after_steps, slope=0.0)
    laws = {str(Provenance.CALIBRATED): asdict(_calibrated_law(log_after, whole, known))}
    kinds = {run_kind(sample.ops, sample.point.setup) for sample in samples}
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
            "started_from": {name: start.provenance.get(name) for name in ("date", "rows")},
        },
    )
