"""Real runs: what ``forerun measure`` does, as functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from forerun.errors import ForerunError, InvalidSetupError, MeasurementError, TraceError
from forerun.measurement.circumstances import describe_circumstances
from forerun.measurement.data_parallel_runner import check_strategy
from forerun.measurement.datasets import check_dataset
from forerun.measurement.device_index import gpu_index
from forerun.measurement.grid import Grid, grid_jobs, spread_order
from forerun.measurement.jobs import Job
from forerun.measurement.layer_design import LayerDesign, design_layers
from forerun.measurement.measured_job import key_of
from forerun.measurement.progress import Event, JobFinished, SessionReport
from forerun.measurement.protocol import Protocol
from forerun.records.measurement import JobKind, Measurement, Outcome, Scalar
from forerun.records.model_names import model_family
from forerun.records.store import RecordStore
from forerun.tracing.trace import ModelRequest, trace
from forerun.workload.setup import Phase

__all__ = ["MeasurementRun", "measure_grid", "measure_layers", "measure_link", "measure_model"]

_COLLECTIONS = ("torchvision", "timm")
_FILES = ("hf", "onnx")
_FLOPS_PER_S = 2e10  # a guess for the remaining time only; the times of finished jobs correct it
_START_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasurementRun:
    """What a session has in the store at its end.

    Attributes:
        report: What this session did.
        measurements: The measurements of all its jobs, those of earlier sessions included.
        records: The store, without a password.
    """

    report: SessionReport
    measurements: tuple[Measurement, ...]
    records: str

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        report = asdict(self.report)
        report["outcomes"] = {str(outcome): n for outcome, n in self.report.outcomes.items()}
        return {**report, "records": self.records, "measurements": [_row(m) for m in self.measurements]}


def _row(measurement: Measurement) -> dict[str, Any]:
    summary = measurement.summary
    return {
        "key": measurement.key,
        "kind": str(measurement.kind),
        "subject": measurement.subject,
        "parameters": measurement.parameters,
        "outcome": str(measurement.outcome),
        "reason": measurement.reason,
        "summary": None if summary is None else asdict(summary),
        "results": measurement.results,
    }


def measure_grid(
    grid: Grid | None = None,
    *,
    device: str = "cpu",
    records: str | Path | None = None,
    occasion: str = "",
    protocol: Protocol | None = None,
    ray: str | None = None,
    on_event: Callable[[Event], None] | None = None,
) -> MeasurementRun:
    """Trains every network of a grid on images and records times, accuracy and loss.

    Args:
        grid: What to train; system A's 18 configurations if None.
        device: ``cpu`` or ``cuda:N``.
        records: Store of the records, a file or an SQLAlchemy URL; the default store if None.
        occasion: Label of the session; the same label resumes it, another one repeats it.
        protocol: How steps are timed.
        ray: Address of a Ray cluster (``auto`` for one of this machine) that runs the jobs.
        on_event: Told of every job.

    Raises:
        UsageError: The grid, the device or a model is not possible.
        MeasurementError: The dataset cannot be had, the device is busy, or nothing could be measured.
        RecordError: The store cannot be used.
    """
    grid = grid or Grid()
    jobs = grid_jobs(grid)
    first, *others = {job.subject: job for job in jobs}.values()
    _check_model(first)  # a mistyped name is told before anything is downloaded
    check_dataset(grid.dataset, grid.image_size)
    for job in others:
        _check_model(job)
    return _measure(jobs, device, records, occasion, protocol, ray, on_event)


def measure_layers(
    design: LayerDesign | None = None,
    *,
    device: str = "cpu",
    records: str | Path | None = None,
    occasion: str = "",
    protocol: Protocol | None = None,
    ray: str | None = None,
    on_event: Callable[[Event], None] | None = None,
) -> MeasurementRun:
    """Measures single layers whose sizes fill the space evenly; arguments as in ``measure_grid``."""
    jobs = design_layers(design or LayerDesign())
    return _measure(jobs, device, records, occasion, protocol, ray, on_event)


def measure_model(
    model: str,
    *,
    batch_sizes: Sequence[int] = (32,),
    precisions: Sequence[str] = ("fp32",),
    layouts: Sequence[str] = ("nchw",),
    compiles: Sequence[bool] = (False,),
    optimizer: str = "sgd",
    phase: str = "train",
    image_size: int | None = None,
    input_shape: Sequence[int] | None = None,
    sequence_length: int | None = None,
    num_devices: int = 1,
    strategy: str = "ddp",
    device: str = "cpu",
    records: str | Path | None = None,
    occasion: str = "",
    protocol: Protocol | None = None,
    ray: str | None = None,
    on_event: Callable[[Event], None] | None = None,
) -> MeasurementRun:
    """Measures steps of any model that ``predict`` takes, on a batch that stays on the device.

    Args:
        model: The model as ``predict`` names it.
        batch_sizes: Samples of a step; of these four, all combinations are measured.
        precisions: fp32, tf32, amp, amp-bf16, bf16 or fp16.
        layouts: nchw or nhwc.
        compiles: Whether the step runs under torch.compile.
        optimizer: sgd, adam, adamw, ... or none.
        phase: train, forward or inference.
        image_size: Height and width of square images [pixels].
        input_shape: Shape of one sample.
        sequence_length: Tokens of one sample.
        num_devices: Devices that share the work, each with the batch size; on a processor, processes that share its cores.
        strategy: How they share it: ddp.
        device: ``cpu`` or ``cuda:N``.
        records: Store of the records; the default store if None.
        occasion: Label of the session.
        protocol: How steps are timed.
        ray: Address of a Ray cluster that runs the jobs.
        on_event: Told of every job.
    """
    shared: dict[str, Scalar] = {
        "optimizer": optimizer if phase == Phase.TRAIN else "none",
        "phase": phase,
        "image_size": image_size,
        "input_shape": None if input_shape is None else "x".join(map(str, input_shape)),
        "sequence_length": sequence_length,
    }
    kind = JobKind.STEP
    if num_devices != 1:
        check_strategy(strategy, num_devices, phase)
        kind = JobKind.DATA_PARALLEL
        shared |= {"num_devices": num_devices, "strategy": strategy}
    shared = {name: value for name, value in shared.items() if value is not None}
    axes = ("batch_size", "precision", "layout", "compile")
    jobs = [
        Job(
            kind=kind,
            subject=model,
            family=_family(model),
            parameters={**shared, **dict(zip(axes, row, strict=True))},
        )
        for row in product(batch_sizes, precisions, layouts, compiles)
    ]
    if not jobs:
        raise InvalidSetupError(
            "a measurement needs at least one batch size, precision, layout and compilation"
        )
    for job in jobs:
        _check_model(job)
    return _measure(spread_order(jobs), device, records, occasion, protocol, ray, on_event)


def measure_link(
    *,
    num_devices: int = 2,
    device: str = "cpu",
    records: str | Path | None = None,
    occasion: str = "",
    protocol: Protocol | None = None,
    on_event: Callable[[Event], None] | None = None,
) -> MeasurementRun:
    """Measures latency and bandwidth of the link between the devices at hand, by all-reduces of five sizes.

    Args:
        num_devices: Devices, or processes of a processor; at least 2.
        device: ``cpu`` or ``cuda``.
        records: Store of the records; the default store if None.
        occasion: Label of the session.
        protocol: How they are timed.
        on_event: Told of every job.

    Raises:
        UsageError: There are fewer than two devices.
        MeasurementError: The devices cannot be used.
    """
    if num_devices < 2:
        raise InvalidSetupError(f"a link has two ends or more: expected at least 2 devices, got {num_devices}")
    job = Job(kind=JobKind.LINK, subject="all-reduce", family="link", parameters={"num_devices": num_devices})
    return _measure([job], device, records, occasion, protocol, None, on_event)


def _family(model: str) -> str:
    prefix, _, rest = model.partition(":")
    if prefix in _COLLECTIONS:
        return model_family(model)
    return Path(rest if prefix in _FILES else prefix).stem or model


def _check_model(job: Job) -> None:
    """Lets an unknown model or an impossible setup fail here, with one message, instead of in every child."""
    from forerun.measurement.job_parameters import input_options_of, setup_of

    try:
        trace(ModelRequest(model=job.subject, **input_options_of(job.parameters)), setup_of(job.parameters))
    except TraceError:
        return  # what cannot be traced may still run


def _measure(
    jobs: Sequence[Job],
    device: str,
    records: str | Path | None,
    occasion: str,
    protocol: Protocol | None,
    ray: str | None,
    on_event: Callable[[Event], None] | None,
) -> MeasurementRun:
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
            report, finished = _here(jobs, store, device, shared)
        run = MeasurementRun(report=report, measurements=tuple(finished), records=store.name)
    _refuse_nothing(run)
    return run


def _here(
    jobs: Sequence[Job], store: RecordStore, device: str, shared: dict[str, Any]
) -> tuple[SessionReport, list[Measurement]]:
    from forerun.measurement.session import run_jobs

    around = describe_circumstances(device, protocol=shared["protocol"], occasion=shared["occasion"])
    name = around.device if gpu_index(device) is not None else "here"
    report = run_jobs(
        jobs,
        store,
        device_index=device,
        circumstances=around,
        expected_s=_Expectation(name, shared["protocol"]),
        **shared,
    )
    wanted = {key_of(job, around) for job in jobs}
    kept = store.measurements(kind=jobs[0].kind, occasion=shared["occasion"])
    return report, [m for m in kept if m.key in wanted]  # read again: anchors may have marked some of them


def _on_ray(
    jobs: Sequence[Job], store: RecordStore, address: str, device: str, shared: dict[str, Any]
) -> SessionReport:
    from forerun.measurement.ray_session import run_jobs_on_ray

    kind = "cpu" if gpu_index(device) is None else "cuda"
    return run_jobs_on_ray(jobs, store, address=address, device_index=kind, **shared)


def _refuse_nothing(run: MeasurementRun) -> None:
    """An error if every job failed; full memory and a timeout are answers of their own."""
    failed = [m for m in run.measurements if m.outcome in (Outcome.FAILED, Outcome.KILLED)]
    if failed and len(failed) == len(run.measurements):
        raise MeasurementError(
            f"none of {len(failed)} jobs could be measured; {failed[0].subject} {failed[0].outcome}: {failed[0].reason}"
        )


class _Expectation:
    """How long a job will take by forerun's own prediction; only the bar of progress depends on it."""

    def __init__(self, device: str, protocol: Protocol) -> None:
        self._device = device
        self._protocol = protocol
        self._step_time_s = cache(self._predicted_step_s)

    def __call__(self, job: Job) -> float:
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
        from forerun.api.prediction import predict
        from forerun.measurement.job_parameters import input_options_of

        job = Job.from_json(job_text)
        asked = job.parameters
        names = ("batch_size", "precision", "layout", "compile", "optimizer", "phase")
        options: dict[str, Any] = {name: asked[name] for name in names if name in asked}
        options |= {k: v for k, v in input_options_of(asked).items() if k != "num_classes"}
        try:
            return float(predict(job.subject, device=self._device, **options).step_time_s.value)
        except ForerunError:
            return 1.0  # a model that cannot be predicted can be measured


def _num_epoch_steps(job: Job) -> float:
    """Steps of the epochs of a training."""
    epochs, size, batch = (job.parameters.get(n) for n in ("num_epochs", "dataset_size", "batch_size"))
    if not all(isinstance(value, (int, float)) for value in (epochs, size, batch)):
        return 0.0
    steps = job.parameters.get("num_steps") or float(size or 0) / float(batch or 1)
    return float(epochs or 0) * float(steps)
