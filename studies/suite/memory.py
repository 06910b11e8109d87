"""Whether steps fitted as predicted: runs of the suite, and searches for the largest batch under a limit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from forerun.evidence.measurement.jobs import MeasurementJob
from forerun.evidence.measurement.measured_job import job_of
from forerun.evidence.records.measurement import Measurement, Outcome
from studies.suite.jobs import LIMIT
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
