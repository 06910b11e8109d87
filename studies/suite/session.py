"""The measuring of a suite: the most informative jobs first, the noise at both ends, until the time is up."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import ceil, floor

from forerun.evidence.measurement.circumstances import describe_circumstances
from forerun.evidence.measurement.jobs import MeasurementJob, Protocol
from forerun.evidence.measurement.layer_design import spread_order
from forerun.evidence.measurement.measured_job import measure_job
from forerun.evidence.measurement.session import Event, run_jobs
from forerun.evidence.records.measurement import Outcome
from forerun.evidence.records.record_store import RecordStore
from forerun.question.devices.local import gpu_index, lock_device
from studies.suite.comparison import tried_batches
from studies.suite.models import BatchSearch, SuiteModel, batch_searches, kernel_jobs, repeat_jobs, step_jobs
from studies.suite.prediction import JobPrediction

SUITE_PROTOCOL = Protocol(
    min_warm_up=3,
    max_warm_up=30,
    window=4,
    num_repetitions=20,
    max_seconds=1.2,
    timeout_s=180,
    anchor_every=20,
)
_SEARCH_PROTOCOL = replace(
    SUITE_PROTOCOL, min_warm_up=0, max_warm_up=0, num_repetitions=3, max_seconds=0.0, timeout_s=60
)
"""Four steps: what the second one holds, all later ones hold."""

_OCCASION = "suite"
_START_S = {True: 3.0, False: 0.7}  # of a job: process, context, model; GPU or not
_COMPILE_S = 30.0
_UNKNOWN_STEP_S = 0.2
_CORE_SHARE, _SEARCH_SHARE = 0.65, 0.85  # of the time, at most, until the core and until the searches end
_END_SHARE = 0.06
_LONGEST_END_S = 20.0
_FIRST_BATCH = 32


def job_cost_s(step_time_s: float | None, *, is_gpu: bool, is_compiled: bool) -> float:
    """Time that measuring a step will take: start, first steps, warm-up and repetitions [s].

    Args:
        step_time_s: Predicted step; None if it is not known [s].
        is_gpu: Whether a context has to be made.
        is_compiled: Whether torch.compile has to run first.
    """
    step_s = _UNKNOWN_STEP_S if step_time_s is None else step_time_s
    protocol = SUITE_PROTOCOL
    num_steps = protocol.min_warm_up + 2 * protocol.window + protocol.num_repetitions
    timed_s = max(6 * step_s, min(num_steps * step_s, 2 * protocol.max_seconds))
    return _START_S[is_gpu] + timed_s + step_s + _COMPILE_S * is_compiled


class SuiteSession:
    """Measures the jobs of a suite that a store does not have yet.

    Args:
        store: Store for the measurements.
        device_index: ``cpu`` or ``cuda:N``.
        duration_s: Time for measuring; no job begins after it [s].
        models: Models to run.
        num_threads: Threads of a processor; all cores if None.
        on_event: Receives an event for every job.
    """

    def __init__(
        self,
        store: RecordStore,
        device_index: str,
        duration_s: float,
        models: Sequence[SuiteModel],
        num_threads: int | None,
        on_event: Callable[[Event], None] | None,
    ) -> None:
        self._store = store
        self._device_index = device_index
        self._is_gpu = gpu_index(device_index) is not None
        self._protocol = replace(SUITE_PROTOCOL, num_threads=num_threads)
        self._around = describe_circumstances(device_index, protocol=self._protocol, occasion=_OCCASION)
        self._on_event = on_event
        self._began_s = time.monotonic()
        self._duration_s = duration_s
        self._steps = step_jobs(is_gpu=self._is_gpu, models=models)
        self._searches = batch_searches(is_gpu=self._is_gpu, models=models)
        self._end_s = min(_END_SHARE * duration_s, _LONGEST_END_S)
        self._expected_s: dict[str, float] = {}
        self._outcomes: Counter[Outcome] = Counter()

    def run(self, predictions: Sequence[JobPrediction]) -> Mapping[Outcome, int]:
        """Kernels, the first repeats, the core, searches, the rest, the last repeats; how the jobs ended.

        Args:
            predictions: In the order of their positions they are measured; without any, in a fixed order.
        """
        core, rest = self._ordered(predictions)
        start = [*kernel_jobs(is_gpu=self._is_gpu), *repeat_jobs(self._steps, "start")]
        self._measure([*start, *core], _CORE_SHARE)
        self._search(predictions, _SEARCH_SHARE)
        self._measure([*core, *rest], 1.0 - self._end_s / self._duration_s)
        self._measure(repeat_jobs(self._steps, "end"), 1.0)
        return self._outcomes

    def _is_past(self, share: float) -> bool:
        """Whether this share of the time is over."""
        return time.monotonic() >= self._began_s + share * self._duration_s

    def _ordered(
        self, predictions: Sequence[JobPrediction]
    ) -> tuple[list[MeasurementJob], list[MeasurementJob]]:
        place = {p.job: p.position for p in predictions}
        for step in self._steps:
            self._expected_s[step.job.to_json()] = job_cost_s(
                None, is_gpu=self._is_gpu, is_compiled=bool(step.job.parameters["compile"])
            )
        for p in predictions:
            compiles = bool(MeasurementJob.from_json(p.job).parameters.get("compile"))
            self._expected_s[p.job] = job_cost_s(p.step_time_s, is_gpu=self._is_gpu, is_compiled=compiles)
        spread = spread_order(self._steps)
        ordered = sorted(spread, key=lambda s: place.get(s.job.to_json(), len(predictions)))
        return [s.job for s in ordered if s.is_core], [s.job for s in ordered if not s.is_core]

    def _measure(self, jobs: Sequence[MeasurementJob], until_share: float) -> None:
        if self._is_past(until_share):
            return
        report = run_jobs(
            jobs,
            self._store,
            device_index=self._device_index,
            protocol=self._protocol,
            occasion=_OCCASION,
            circumstances=self._around,
            on_event=self._on_event,
            expected_s=lambda job: self._expected_s.get(job.to_json(), _START_S[self._is_gpu]),
            is_time_up=lambda: self._is_past(until_share),
        )
        self._outcomes.update(report.outcomes)

    def _search(self, predictions: Sequence[JobPrediction], until_share: float) -> None:
        first = {p.job: int(p.max_batch_size) for p in predictions if p.max_batch_size}
        found = list(self._store.measurements(occasion=_OCCASION))
        with lock_device(self._device_index):
            for search in self._searches:
                largest_batch(
                    partial(self._fits, search, until_share),
                    first.get(search.job.to_json(), _FIRST_BATCH),
                    tried_batches(search.job, found),
                )

    def _fits(self, search: BatchSearch, until_share: float, batch_size: int) -> bool | None:
        """Whether a step ran within the limit; None if there is no time, or it ended in another way."""
        if self._is_past(until_share):
            return None
        protocol = replace(
            _SEARCH_PROTOCOL,
            num_threads=self._protocol.num_threads,
            memory_limit_bytes=None if self._is_gpu else search.limit_bytes,
        )
        measurement = measure_job(search.at(batch_size), protocol=protocol, circumstances=self._around)
        self._store.add(measurement)
        self._outcomes[measurement.outcome] += 1
        ends = {Outcome.DONE: True, Outcome.OUT_OF_MEMORY: False}
        return ends.get(measurement.outcome)


_GROWTH = 1.05
_MOST_TRIES = 12


def next_batch_to_try(tried: Mapping[int, bool], first: int, *, tolerance: float = 0.06) -> int | None:
    """The batch size to run next, None when the answer is known well enough.

    From the first guess the search goes up while batches fit, and down while they do not, by 5 %, 10 %, 22 % ... (the
    growth is squared each time); between the largest that fits and the smallest that does not it halves, until they are
    less than ``tolerance`` of the former apart, or neighbours.

    Args:
        tried: Whether each batch size that was run did fit.
        first: First batch size to try, such as the predicted one.
        tolerance: Relative width of the bracket that is good enough.
    """
    fitting = [size for size, fits in tried.items() if fits]
    failing = [size for size, fits in tried.items() if not fits]
    if not tried:
        return max(1, first)
    if len(tried) >= _MOST_TRIES:
        return None
    if not failing:
        growth = _growth(len(fitting))
        return max(max(fitting) + 1, ceil(max(fitting) * growth))
    if not fitting:
        growth = _growth(len(failing))
        smaller = min(min(failing) - 1, floor(min(failing) / growth))
        return smaller if smaller >= 1 else None
    low, high = max(fitting), min(failing)
    if high - low <= max(1.0, tolerance * low):  # also where a smaller one failed than one that fitted
        return None
    return (low + high) // 2


def _growth(num_tried: int) -> float:
    return float(_GROWTH ** (2 ** (num_tried - 1)))


def largest_batch(
    try_batch: Callable[[int], bool | None], first: int, known: Mapping[int, bool] | None = None
) -> dict[int, bool]:
    """Runs the search; returns the outcome of each batch size.

    Args:
        try_batch: Runs a step at a batch size; whether it fitted, None to give up.
        first: First batch size to try.
        known: Earlier outcomes by batch size, which are not repeated.
    """
    tried = dict(known or {})
    while (size := next_batch_to_try(tried, first)) is not None:
        fits = try_batch(size)
        if fits is None:
            break
        tried[size] = fits
    return tried
