"""Runs the jobs of a call here or on a Ray cluster, and reads their measurements from the store at the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from forerun.base.answers import Answer, fields_of
from forerun.base.errors import ForerunError, MeasurementError, MissingExtraError
from forerun.base.extras import require
from forerun.base.plugins import plugin
from forerun.evidence.measurement.circumstances import describe_circumstances
from forerun.evidence.measurement.frameworks import PYTORCH, framework_of
from forerun.evidence.measurement.jobs import MeasurementJob, Protocol
from forerun.evidence.measurement.measured_job import key_of
from forerun.evidence.measurement.progress import Event, JobFinished, SessionReport
from forerun.evidence.records.measurement import JobKind, Measurement, Outcome
from forerun.evidence.records.record_store import RecordStore
from forerun.question.devices.local import gpu_index

__all__ = ["MeasurementRun", "measure_jobs"]

_FLOPS_PER_S = 2e10  # a guess for the remaining time only; the times of finished jobs correct it
_START_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasurementRun(Answer):
    """The measurements of a session in the store, at its end.

    Attributes:
        report: Counts of what this session did.
        measurements: The measurements of all its jobs, those of earlier sessions included.
        records: The store, without a password.
    """

    report: SessionReport
    measurements: tuple[Measurement, ...]
    records: str

    def json_fields(self) -> dict[str, Any]:
        """The report of the session, and the job and result of each measurement."""
        rows = [{name: getattr(m, name) for name in _ROW} for m in self.measurements]
        return {**fields_of(self.report), "records": self.records, "measurements": rows}


_ROW = ("key", "kind", "subject", "parameters", "outcome", "reason", "summary", "results")


def measure_jobs(
    jobs: Sequence[MeasurementJob],
    device: str,
    records: str | Path | None,
    occasion: str,
    protocol: Protocol | None,
    ray: str | None,
    on_event: Callable[[Event], None] | None,
    framework: str = "pytorch",
) -> MeasurementRun:
    """Measures the jobs the store does not have yet.

    Raises:
        MissingExtraError: PyTorch is not installed.
        MeasurementError: The device is busy, or nothing could be measured.
        RecordError: The store cannot be used.
    """
    require("measuring", "torch")
    protocol = protocol or Protocol()
    finished: list[Measurement] = []

    def tell(event: Event) -> None:
        if isinstance(event, JobFinished):
            finished.append(event.measurement)
        if on_event is not None:
            on_event(event)

    shared: dict[str, Any] = {"protocol": protocol, "occasion": occasion, "on_event": tell}
    with RecordStore.open(records) as store:
        if ray is not None:
            report = _on_ray(jobs, store, ray, device, shared)
        else:
            report, finished = _here(jobs, store, device, shared, framework)
        run = MeasurementRun(report=report, measurements=tuple(finished), records=store.name)
    _refuse_nothing(run)
    return run


def _here(
    jobs: Sequence[MeasurementJob], store: RecordStore, device: str, shared: dict[str, Any], framework: str
) -> tuple[SessionReport, list[Measurement]]:
    from forerun.evidence.measurement.session import run_jobs

    around = describe_circumstances(
        device, protocol=shared["protocol"], occasion=shared["occasion"], framework=framework
    )
    if (other := framework_of(framework)) is not None:
        shared = {**shared, "run": other.run, "anchor": None}  # the anchor is a step of PyTorch
    name = around.device if gpu_index(device) is not None else "here"
    report = run_jobs(
        jobs,
        store,
        device_index=device,
        circumstances=around,
        expected_s=_Expectation(name, shared["protocol"]) if _is_foreseeable(jobs, framework) else None,
        **shared,
    )
    wanted = {key_of(job, around) for job in jobs}
    kept = store.measurements(occasion=shared["occasion"])
    return report, [m for m in kept if m.key in wanted]  # read again: anchors may have marked some of them


def _is_foreseeable(jobs: Sequence[MeasurementJob], framework: str) -> bool:
    """True if predicting the jobs pays; a model of another framework is traced in another process, which takes long."""
    return framework == PYTORCH or all(job.kind is JobKind.LAYER for job in jobs)


def _on_ray(
    jobs: Sequence[MeasurementJob], store: RecordStore, address: str, device: str, shared: dict[str, Any]
) -> SessionReport:
    if (cluster := plugin("forerun.clusters", "ray")) is None:
        raise MissingExtraError("measuring on a Ray cluster", "ray")
    kind = "cpu" if gpu_index(device) is None else "cuda"
    report: SessionReport = cluster.measure(jobs, store, address=address, device_index=kind, **shared)
    return report


def _refuse_nothing(run: MeasurementRun) -> None:
    """An error if every job failed; full memory and a timeout are results, not errors."""
    failed = [m for m in run.measurements if m.outcome in (Outcome.FAILED, Outcome.KILLED)]
    if failed and len(failed) == len(run.measurements):
        raise MeasurementError(
            f"none of {len(failed)} jobs could be measured; {failed[0].subject} {failed[0].outcome}: {failed[0].reason}"
        )


class _Expectation:
    """Time of a job by forerun's own prediction, for the progress bar only."""

    def __init__(self, device: str, protocol: Protocol) -> None:
        self._device = device
        self._protocol = protocol
        self._step_time_s = cache(self._predicted_step_s)

    def __call__(self, job: MeasurementJob) -> float:
        protocol = self._protocol
        if job.kind is JobKind.LAYER:
            flops = job.parameters.get("flops")
            step_s = float(flops) / _FLOPS_PER_S if isinstance(flops, (int, float)) else 0.0
        else:
            step_s = self._step_time_s(job.to_json())
        num_timed = protocol.min_warm_up + 2 * protocol.window + protocol.num_repetitions
        timed_s = min(num_timed * step_s, 2 * protocol.max_seconds)
        return _START_S + timed_s + step_s * _num_epoch_steps(job)

    def _predicted_step_s(self, job_text: str) -> float:
        from forerun.evidence.records.measured_run import input_options_of
        from forerun.search.predict import predict

        job = MeasurementJob.from_json(job_text)
        asked = job.parameters
        names = ("batch_size", "precision", "layout", "compile", "optimizer", "phase")
        options: dict[str, Any] = {name: asked[name] for name in names if name in asked}
        options |= {k: v for k, v in input_options_of(asked).items() if k != "num_classes"}
        try:
            return float(predict(job.subject, device=self._device, **options).step_time_s.value)
        except ForerunError:
            return 1.0  # a model that cannot be predicted can be measured


def _num_epoch_steps(job: MeasurementJob) -> float:
    """Number of steps in all epochs of a training."""
    epochs, size, batch = (job.parameters.get(n) for n in ("num_epochs", "dataset_size", "batch_size"))
    if not all(isinstance(value, (int, float)) for value in (epochs, size, batch)):
        return 0.0
    steps = job.parameters.get("num_steps") or float(size or 0) / float(batch or 1)
    return float(epochs or 0) * float(steps)
