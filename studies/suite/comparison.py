"""Compares the measurements of the suite with earlier predictions: time, memory, host, energy, noise."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from forerun.base.answers import Answer, fields_of
from forerun.base.errors import RecordError
from forerun.cost.time.correction import PriorScales
from forerun.evidence.fitting.evaluation import ErrorMetrics, errors, grouped_errors
from forerun.evidence.measurement.jobs import MeasurementJob
from forerun.evidence.measurement.measured_job import job_of
from forerun.evidence.records.measurement import JobKind, Measurement, Outcome
from studies.optime.few_steps import choose_steps, condition
from studies.suite.models import LIMIT, REPEAT
from studies.suite.prediction import JobPrediction


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestBatch:
    """A search.

    Attributes:
        subject: The model.
        precision: Precision of the step.
        limit_bytes: Limit of the memory [bytes].
        predicted: Largest batch that was predicted to fit.
        predicted_low, predicted_high: Its interval: batches between are too close to the limit to tell.
        fitted: Largest batch that ran; None if none did.
        failed: Smallest batch that did not; None if all did.
        num_tried: Batches that were run.
    """

    subject: str
    precision: str
    limit_bytes: float
    predicted: float | None
    predicted_low: float | None
    predicted_high: float | None
    fitted: int | None
    failed: int | None
    num_tried: int

    @property
    def relative_error(self) -> float | None:
        """Predicted over the middle of the bracket, less one."""
        if self.predicted is None or self.fitted is None or self.failed is None:
            return None
        return self.predicted / (0.5 * (self.fitted + self.failed - 1)) - 1


def tried_batches(search: MeasurementJob, found: Sequence[Measurement]) -> dict[int, bool]:
    """Batch sizes of a search that were run, and whether they fitted; other outcomes are left out."""
    tried: dict[int, bool] = {}
    for m in found:
        if m.parameters.get(LIMIT) is None or m.outcome not in (Outcome.DONE, Outcome.OUT_OF_MEMORY):
            continue
        if _at_one(job_of(m)) == _at_one(search):
            tried[int(float(str(m.parameters["batch_size"])))] = m.outcome is Outcome.DONE
    return tried


def _at_one(job: MeasurementJob) -> MeasurementJob:
    return replace(job, parameters={**job.parameters, "batch_size": 1})


def largest_batches(
    predictions: Sequence[JobPrediction], found: Sequence[Measurement]
) -> tuple[LargestBatch, ...]:
    """The searches of which at least one batch was run."""
    searches = []
    for p in predictions:
        if not p.is_search:
            continue
        job = MeasurementJob.from_json(p.job)
        tried = tried_batches(job, found)
        if not tried:
            continue
        searches.append(
            LargestBatch(
                subject=job.subject,
                precision=str(job.parameters["precision"]),
                limit_bytes=float(str(job.parameters[LIMIT])),
                predicted=p.max_batch_size,
                predicted_low=p.max_batch_size_low,
                predicted_high=p.max_batch_size_high,
                fitted=max((size for size, fits in tried.items() if fits), default=None),
                failed=min((size for size, fits in tried.items() if not fits), default=None),
                num_tried=len(tried),
            )
        )
    return tuple(searches)


def verdict_counts(predictions: Sequence[JobPrediction], found: Sequence[Measurement]) -> dict[str, int]:
    """Numbers of runs with a verdict, with a right one, and with one too close to call.

    A run of a search is told to fit up to the largest batch that was predicted; it is close between the ends of
    that prediction's interval. Close ones count as right or wrong by their middle all the same.
    """
    counts = {"n": 0, "right": 0, "close": 0}
    ends = {
        job_of(m).to_json(): m.outcome is Outcome.DONE
        for m in found
        if m.outcome in (Outcome.DONE, Outcome.OUT_OF_MEMORY)
    }
    for p in predictions:
        if p.is_search:
            _count_search(p, tried_batches(MeasurementJob.from_json(p.job), found), counts)
        elif p.fits and p.job in ends:
            counts["n"] += 1
            counts["close"] += p.fits == "close"
            counts["right"] += (p.fits != "no") == ends[p.job]
    return counts


def _count_search(prediction: JobPrediction, tried: dict[int, bool], counts: dict[str, int]) -> None:
    largest = prediction.max_batch_size
    if largest is None:
        return
    for size, fitted in tried.items():
        counts["n"] += 1
        counts["right"] += (size <= largest) == fitted
        low, high = prediction.max_batch_size_low or largest, prediction.max_batch_size_high or largest
        counts["close"] += low < size <= high


HOST_BOUND_SHARE = 0.9
"""A step is bound by the host where launching it takes this share of it or more."""

_NUM_STEPS = (0, 1, 3, 5, 10)
_NUM_SURPRISES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep(Answer):
    """One step with its prediction.

    Attributes:
        prediction: Made before.
        measurement: The real run.
    """

    prediction: JobPrediction
    measurement: Measurement

    @property
    def measured_s(self) -> float:
        """Median repetition [s]."""
        assert self.measurement.summary is not None
        return self.measurement.summary.median_s

    @property
    def predicted_s(self) -> float:
        """Predicted step [s]."""
        assert self.prediction.step_time_s is not None
        return self.prediction.step_time_s

    def figure(self, name: str) -> float | None:
        """A number among the results; None if it was not measured."""
        value = self.measurement.results.get(name)
        return float(value) if isinstance(value, (int, float)) else None

    @property
    def launched_share(self) -> float | None:
        """Share of the step after which the host had launched it."""
        launched_s = self.figure("launched_s")
        return None if launched_s is None else min(1.0, launched_s / self.measured_s)

    def json_fields(self) -> dict[str, Any]:
        """The row: what was run, measured and predicted."""
        summary, prediction = self.measurement.summary, self.prediction
        assert summary is not None
        return {
            "subject": self.measurement.subject,
            "model_class": prediction.model_class,
            "parameters": self.measurement.parameters,
            "measured_s": self.measured_s,
            "relative_noise": 0.5 * (summary.high_s - summary.low_s) / summary.median_s,
            "is_stable": summary.is_stable,
            "predicted_s": self.predicted_s,
            "low_s": prediction.low_s,
            "high_s": prediction.high_s,
            "bound_by": prediction.bound_by,
            "launched_share": self.launched_share,
            "live_peak_bytes": prediction.live_peak_bytes,
            "allocator_bytes": prediction.allocator_bytes,
            **{name: self.figure(name) for name in _MEASURED_FIGURES},
            "energy_j": prediction.energy_j,
        }


_MEASURED_FIGURES = (
    "peak_memory_bytes", "peak_reserved_bytes", "peak_rss_delta_bytes", "compile_time_s", "step_energy_j",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeat(Answer):
    """One configuration at the start and at the end [s]."""

    subject: str
    start_s: float
    end_s: float

    @property
    def change(self) -> float:
        """Relative change from the start to the end."""
        return self.end_s / self.start_s - 1

    def json_fields(self) -> dict[str, Any]:
        """The fields, and the change."""
        return {**fields_of(self), "change": self.change}


@dataclass(frozen=True, slots=True, kw_only=True)
class FewShot:
    """Errors on the steps that were not used, after some were.

    Attributes:
        num_steps: Steps that were used.
        used: Which, in the order of their choice.
        metrics: Errors on the others.
    """

    num_steps: int
    used: tuple[str, ...]
    metrics: ErrorMetrics


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteComparison(Answer):
    """Everything the suite says; figures that could not be had are None or empty.

    Attributes:
        device: Title of the device.
        predictor: Version of the predictor.
        predicted_at, measured_from, measured_to: Times, ISO 8601.
        num_planned: Steps that were predicted.
        step_time: Errors of the step time of all rows.
        groups: Errors of the step time by class of model, precision, layout, batch size, compilation and bound.
        baselines: Errors of simple predictors.
        allocated, reserved: Errors of the bytes of tensors, and of the allocator.
        resident: Errors of the bytes of tensors against the growth of the process, on a processor.
        energy: Errors of the energy of a step.
        verdicts: Numbers of runs, under a limit or of the whole suite, that fitted as predicted.
        largest_batches: The searches.
        host_bound: Shares of the steps bound by the host, predicted and measured, and of the steps where both agree.
        repeats: Noise of the measurements.
        anchor_drifts: Relative changes of the fixed small job from one time to the next.
        few_shot: Errors after 0, 1, 3, 5 and 10 steps.
        kernels: Rates of the kernels.
        failures: Jobs that did not run, with reasons.
        rows: The steps.
    """

    device: str
    predictor: str
    predicted_at: str
    measured_from: str
    measured_to: str
    num_planned: int
    step_time: ErrorMetrics
    groups: Mapping[str, ErrorMetrics]
    baselines: Mapping[str, ErrorMetrics | None]
    allocated: ErrorMetrics | None
    reserved: ErrorMetrics | None
    resident: ErrorMetrics | None
    energy: ErrorMetrics | None
    verdicts: Mapping[str, int]
    largest_batches: tuple[LargestBatch, ...]
    host_bound: Mapping[str, float]
    repeats: tuple[Repeat, ...]
    anchor_drifts: tuple[float, ...]
    few_shot: tuple[FewShot, ...]
    kernels: tuple[Mapping[str, Any], ...]
    failures: tuple[str, ...]
    rows: tuple[MeasuredStep, ...]

    @property
    def is_predicted_before(self) -> bool:
        """Whether every prediction is older than the first measurement."""
        return self.predicted_at <= self.measured_from

    def surprises(self) -> list[MeasuredStep]:
        """The steps that were predicted worst."""
        return sorted(self.rows, key=lambda r: -abs(np.log(r.predicted_s / r.measured_s)))[:_NUM_SURPRISES]

    def json_fields(self) -> dict[str, Any]:
        """The fields; the rows behind the steps that were predicted worst."""
        found = fields_of(self)
        rows = found.pop("rows")
        surprises = self.surprises()
        return {
            **found,
            "is_predicted_before": self.is_predicted_before,
            "surprises": surprises,
            "rows": rows,
        }


def compare(
    predictions: Sequence[JobPrediction],
    measurements: Iterable[Measurement],
    scales: PriorScales,
    baselines: Callable[[Sequence[MeasuredStep]], Mapping[str, ErrorMetrics | None]] = lambda _: {},
) -> SuiteComparison:
    """Compares the measurements of a suite with its predictions.

    Args:
        predictions: Predictions of all jobs.
        measurements: All measurements of the suite.
        scales: Prior scales of the calibration.
        baselines: Errors of simple predictors on the same rows.

    Raises:
        RecordError: No step that was predicted has been measured.
    """
    found = list(measurements)
    rows = _rows(predictions, found)
    if not rows:
        raise RecordError(
            f"expected measured steps that were predicted, got none among {len(found)} measurements and "
            f"{len(predictions)} predictions; measure first, with the same folder"
        )
    predicted = np.asarray([row.predicted_s for row in rows])
    measured = np.asarray([row.measured_s for row in rows])
    low_s, high_s = (
        np.asarray([getattr(row.prediction, end) for row in rows]) for end in ("low_s", "high_s")
    )
    intervals = (low_s, high_s)
    began = sorted(m.circumstances.started_at for m in found)
    return SuiteComparison(
        device=rows[0].measurement.circumstances.device_title,
        predictor=rows[0].prediction.predictor,
        predicted_at=max(row.prediction.made_at for row in rows),
        measured_from=began[0],
        measured_to=began[-1],
        num_planned=sum(not p.is_search for p in predictions),
        step_time=errors(predicted, measured, intervals),
        groups=_groups(rows, predicted, measured, intervals),
        baselines=baselines(rows),
        allocated=_errors_of(rows, "live_peak_bytes", "peak_memory_bytes"),
        reserved=_errors_of(rows, "allocator_bytes", "peak_reserved_bytes"),
        resident=_errors_of(rows, "live_peak_bytes", "peak_rss_delta_bytes"),
        energy=_errors_of(rows, "energy_j", "step_energy_j"),
        verdicts=verdict_counts(predictions, found),
        largest_batches=largest_batches(predictions, found),
        host_bound=_host_bound(rows),
        repeats=_repeats(found),
        anchor_drifts=_anchor_drifts(found),
        few_shot=few_shot_table(rows, scales),
        kernels=tuple(_kernel(m) for m in found if m.kind is JobKind.KERNEL and m.outcome is Outcome.DONE),
        failures=_failures(found),
        rows=tuple(rows),
    )


def _rows(predictions: Sequence[JobPrediction], found: Sequence[Measurement]) -> list[MeasuredStep]:
    by_job = {p.job: p for p in predictions if p.step_time_s is not None}
    pairs = [
        (by_job.get(job_of(m).to_json()), m)
        for m in found
        if m.outcome is Outcome.DONE and m.summary is not None
    ]
    return [MeasuredStep(prediction=p, measurement=m) for p, m in pairs if p is not None]


def _batch_words(row: MeasuredStep) -> str:
    """Powers of eight: steps bound by launching, in between, and bound by work."""
    size = int(float(str(row.measurement.parameters["batch_size"])))
    for bound in (8, 64, 512):
        if size <= bound:
            return f"up to {bound}"
    return "above 512"


_GROUPS: Mapping[str, Callable[[MeasuredStep], str]] = {
    "class": lambda row: row.prediction.model_class,
    "precision": lambda row: str(row.measurement.parameters["precision"]),
    "layout": lambda row: str(row.measurement.parameters["layout"]),
    "batch": _batch_words,
    "compiled": lambda row: "yes" if row.measurement.parameters.get("compile") else "no",
    "bound by": lambda row: row.prediction.bound_by,
}


def _groups(
    rows: Sequence[MeasuredStep], predicted: Any, measured: Any, intervals: Any
) -> dict[str, ErrorMetrics]:
    return {
        f"{kind} {name}": metrics
        for kind, group_of in _GROUPS.items()
        for name, metrics in grouped_errors(
            predicted, measured, [group_of(r) for r in rows], intervals
        ).items()
    }


def _errors_of(rows: Sequence[MeasuredStep], predicted: str, measured: str) -> ErrorMetrics | None:
    """Errors of the rows with both figures; None without such rows."""
    pairs = [(getattr(row.prediction, predicted), row.figure(measured)) for row in rows]
    known = [(said, was) for said, was in pairs if said is not None and was]
    return errors([said for said, _ in known], [was for _, was in known]) if known else None


def _host_bound(rows: Sequence[MeasuredStep]) -> dict[str, float]:
    """Shares of the rows; empty where nobody timed the launching."""
    pairs = [
        (row.prediction.bound_by == "host", share >= HOST_BOUND_SHARE)
        for row in rows
        if (share := row.launched_share) is not None
    ]
    if not pairs:
        return {}
    return {
        "n": float(len(pairs)),
        "predicted_share": float(np.mean([said for said, _ in pairs])),
        "measured_share": float(np.mean([was for _, was in pairs])),
        "told_alike": float(np.mean([said == was for said, was in pairs])),
    }


def _repeats(found: Sequence[Measurement]) -> tuple[Repeat, ...]:
    times: dict[str, dict[str, tuple[str, float]]] = {}
    for m in found:
        when = m.parameters.get(REPEAT)
        if when and m.summary is not None and m.outcome is Outcome.DONE:
            asked = {name: value for name, value in m.parameters.items() if name != REPEAT}
            key = replace(job_of(m), parameters=asked).to_json()
            times.setdefault(key, {})[str(when)] = (m.subject, m.summary.median_s)
    pairs = [pair for pair in times.values() if {"start", "end"} <= pair.keys()]
    return tuple(
        Repeat(subject=pair["start"][0], start_s=pair["start"][1], end_s=pair["end"][1]) for pair in pairs
    )


def _anchor_drifts(found: Sequence[Measurement]) -> tuple[float, ...]:
    drifts = [m.results.get("anchor_drift") for m in found]
    return tuple(float(drift) for drift in drifts if isinstance(drift, (int, float)))


def few_shot_table(
    rows: Sequence[MeasuredStep], scales: PriorScales, num_steps: Sequence[int] = _NUM_STEPS
) -> tuple[FewShot, ...]:
    """Errors on the other rows after k of them corrected the device, for each k; as long as some are left.

    The steps are chosen before they are measured, by what they tell about all (``choose_steps``); the correction is
    the posterior mean of ``condition``.
    """
    sensitivities = np.asarray([row.prediction.row for row in rows])
    residuals = np.log([row.measured_s / row.predicted_s for row in rows])
    counts = [k for k in num_steps if k < len(rows)]
    order = choose_steps(sensitivities, list(range(len(rows))), max(counts, default=0), scales)
    table = []
    for k in counts:
        mean = condition(sensitivities, order[:k], residuals[order[:k]], scales).mean
        rest = [i for i in range(len(rows)) if i not in order[:k]]
        corrected = [rows[i].predicted_s * float(np.exp(mean[i])) for i in rest]
        table.append(
            FewShot(
                num_steps=k,
                used=tuple(rows[i].measurement.subject for i in order[:k]),
                metrics=errors(corrected, [rows[i].measured_s for i in rest]),
            )
        )
    return tuple(table)


def _kernel(measurement: Measurement) -> dict[str, Any]:
    rates = {name: value for name, value in measurement.results.items() if "per" in name}
    return {"subject": measurement.subject, "parameters": measurement.parameters, **rates}


def _failures(found: Sequence[Measurement]) -> tuple[str, ...]:
    """Failed jobs; running out of memory under a limit is not a failure."""
    return tuple(
        f"{m.subject} {m.outcome}: {m.reason}"
        for m in found
        if m.outcome is not Outcome.DONE and LIMIT not in m.parameters
    )
