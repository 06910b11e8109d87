"""Real runs: ``forerun measure`` as functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, TypedDict, Unpack

from forerun.base.answers import Answer, fields_of
from forerun.base.errors import (
    ForerunError,
    InvalidSetupError,
    MeasurementError,
    MissingExtraError,
    TraceError,
)
from forerun.base.extras import plugin, require
from forerun.evidence.measurement.circumstances import (
    PYTORCH,
    Framework,
    describe_circumstances,
    framework_of,
    software_version,
)
from forerun.evidence.measurement.datasets import check_dataset
from forerun.evidence.measurement.jobs import MeasurementJob, Protocol
from forerun.evidence.measurement.layer_design import design_layers, grid_jobs, spread_order, step_job
from forerun.evidence.measurement.measured_job import key_of
from forerun.evidence.measurement.runners.data_parallel_runner import check_strategy
from forerun.evidence.measurement.runners.step_runner import check_measured_optimizer
from forerun.evidence.measurement.runners.torch_device import check_measured_precision
from forerun.evidence.measurement.session import Event, JobFinished, SessionReport, run_jobs
from forerun.evidence.measurement.settings import Grid, LayerDesign, StepOptions, StepSettings
from forerun.evidence.records.measured_run import input_options_of, setup_of
from forerun.evidence.records.measurement import JobKind, Measurement, Outcome
from forerun.evidence.records.record_store import RecordStore
from forerun.question.devices.catalogue import cpu_device, matching_devices
from forerun.question.devices.device import Device
from forerun.question.devices.here import describe_host, visible_gpus
from forerun.question.devices.local import check_device, gpu_index
from forerun.question.model import ModelRequest, is_keras, own_settings, own_stack
from forerun.question.run import Run
from forerun.question.settings import checked
from forerun.question.setup import Phase, Precision, TrainingSetup, choice, parse_release
from forerun.question.sharing import Sharing
from forerun.tracing.trace import trace


def measure(
    run: Run,
    *,
    records: str | Path | None = None,
    occasion: str = "",
    protocol: Protocol | None = None,
    on_event: Callable[[Event], None] | None = None,
) -> Measurement:
    """Measures the steps of a run on this machine; dataset, epochs and price take no part.

    A run that the store has of the same occasion is not measured again, as with ``forerun measure model``.

    Args:
        run: The run; its device is one of this machine, such as ``here``.
        records: Store of the records; the default store if None.
        occasion: Label of the session; the same label resumes it, another one repeats it.
        protocol: How steps are timed.
        on_event: Told of every job.

    Returns:
        The record, which ``forerun.fit`` takes. Full memory and a timeout are outcomes as well.

    Raises:
        UsageError: The run is of another machine, or asks for what cannot be measured.
        MeasurementError: The device is busy, or the model could not be run.
        RecordError: The store cannot be used.

    Examples:
        >>> run = forerun.Run.of("mnist-cnn", device="here", batch_size=64)  # doctest: +SKIP
        >>> forerun.measure(run).summary.median_s  # doctest: +SKIP
        0.0123
    """
    device = _index_here(run.cluster.device)
    _check_measurable(run)
    setup, model = run.setup, run.model
    (record,) = measure_model(
        model.model,
        batch_sizes=[setup.batch_size_per_device],
        precisions=[str(setup.precision)],
        convolution_precision=setup.convolution_precision,
        layouts=[str(setup.layout)],
        compiles=[setup.compile],
        optimizer=setup.optimizer,
        phase=str(setup.phase),
        image_size=model.image_size,
        input_shape=model.input_shape,
        sequence_length=model.sequence_length,
        num_devices=run.cluster.num_devices,
        strategy=str(run.sharing.strategy),
        device=device,
        records=records,
        occasion=occasion,
        protocol=protocol,
        on_event=on_event,
    ).measurements
    return record


def _index_here(device: Device) -> str:
    """``cpu`` or ``cuda:N`` of a device of this machine.

    Raises:
        InvalidSetupError: It is none of this machine.
    """
    host = describe_host()
    own = cpu_device(host)
    if device.title == own.title:
        return "cpu"
    gpus = visible_gpus(host.gpus)
    for index, gpu in enumerate(gpus):
        if device.title in {found.title for found in matching_devices(gpu.name)}:
            return f"cuda:{index}"
    raise InvalidSetupError(
        f"expected a device of this machine ({', '.join([own.title, *(gpu.name for gpu in gpus)])}), got "
        f"'{device.title}'; give device='here'"
    )


def _check_measurable(run: Run) -> None:
    """Refuses what would change the step and cannot be measured."""
    plain, shared, asked = TrainingSetup(), Sharing(strategy=run.sharing.strategy), run.software.torch_version
    told = {
        "a model object (name it, such as path/to/file.py:factory)": run.module is not None,
        "several nodes": run.cluster.num_nodes > 1,
        "an input pipeline": run.loader is not None,
        "accumulation, algorithm, bucket or batch norm of its own": run.sharing != shared,
        "an optimizer implementation": run.setup.optimizer_implementation
        is not plain.optimizer_implementation,
        "ways to save memory (such as recompute)": run.setup.saving != plain.saving,
        "attention in parts": not run.setup.fused_attention,
        f"PyTorch {asked} (another one is installed)": asked is not None
        and parse_release(asked) != parse_release(software_version("pytorch")),
    }
    found = [words for words, is_so in told.items() if is_so]
    if found:
        raise InvalidSetupError(f"expected a run that can be measured, got {', '.join(found)}; leave it out")


class SessionOptions(TypedDict, total=False):
    """Where and how a session measures.

    Attributes:
        device: ``cpu`` or ``cuda:N``.
        records: Store of the records, a file or an SQLAlchemy URL; the default store if None.
        occasion: Label of the session; the same label resumes it, another one repeats it.
        protocol: Rules of timing.
        ray: Address of a Ray cluster (``auto`` for one of this machine) that runs the jobs.
        on_event: Receives an event for every job.
    """

    device: str
    records: str | Path | None
    occasion: str
    protocol: Protocol | None
    ray: str | None
    on_event: Callable[[Event], None] | None


class ModelOptions(StepOptions, SessionOptions, total=False):
    """Which steps of a model are measured, where and how."""


def measure_grid(grid: Grid | None = None, **session: Unpack[SessionOptions]) -> MeasurementRun:
    """Trains every network of a grid on images and records times, accuracy and loss.

    Args:
        grid: Networks and settings to train; system A's 18 configurations if None.
        session: See ``SessionOptions``.

    Raises:
        UsageError: The grid, the device or a model is not possible.
        MeasurementError: The dataset cannot be loaded, the device is busy, or nothing could be measured.
        RecordError: The store cannot be used.
    """
    grid = grid or Grid()
    if session.get("ray") is None:
        check_device(session.get("device", "cpu"))  # before anything is downloaded
    if (other := _other_framework(grid.framework, session)) is not None:
        other.check_grid(grid.network, grid.optimizer)
    jobs = grid_jobs(grid)
    # One job of each network is enough: its batch sizes and layouts are the same model.
    first, *others = {job.subject: job for job in jobs}.values()
    _check_model(first)  # a mistyped name is reported before anything is downloaded
    check_dataset(grid.dataset, grid.image_size)
    for job in others:
        _check_model(job)
    return measure_jobs(jobs, **session, framework=grid.framework)


def _other_framework(name: str, session: SessionOptions) -> Framework | None:
    """The framework of a measurement; None for PyTorch.

    Raises:
        MissingExtraError: It is not installed.
        InvalidSetupError: It is not known, or is asked for on a cluster.
    """
    if (other := framework_of(name)) is None:
        return None
    other.check_installed(f"measuring with {name.capitalize()}")
    if session.get("ray") is not None:
        raise InvalidSetupError(f"{name.capitalize()} is measured on this machine only; leave --ray out")
    return other


def measure_layers(design: LayerDesign | None = None, **session: Unpack[SessionOptions]) -> MeasurementRun:
    """Measures single layers whose sizes fill the space evenly; arguments as in ``measure_grid``."""
    design = design or LayerDesign()
    precision = choice(Precision, design.precision, "precision")
    if (other := _other_framework(design.framework, session)) is not None:
        other.check_layers(design.optimizers, precision)
    else:
        check_measured_precision(precision)
        for name in design.optimizers:
            check_measured_optimizer(name)
    jobs = design_layers(design)
    return measure_jobs(jobs, **session, framework=design.framework)


def measure_model(model: str, **options: Unpack[ModelOptions]) -> MeasurementRun:
    """Measures steps of any model that ``predict`` takes, on a batch that stays on the device.

    Args:
        model: The model as ``predict`` names it. With ``framework="keras"`` a name that is not one of Keras is one of
            its families, so that ``mnist-cnn`` is ``keras:mnist-cnn``.
        options: See ``SessionOptions`` and ``measurement.settings.StepSettings``; of batch sizes, precisions, layouts
            and compiles all combinations are measured.
    """
    session: Any = {name: value for name, value in options.items() if name in SessionOptions.__annotations__}
    asked = {name: value for name, value in options.items() if name not in session}
    settings = StepSettings(**checked(asked, StepSettings))
    model, framework = _named_for(model, settings.framework)
    if (other := _other_framework(framework, session)) is not None:
        other.check_steps(settings)
    elif settings.num_servers:
        raise InvalidSetupError(
            "parameter servers are those of TensorFlow; name a Keras model, or --framework keras"
        )
    kind, shared = _shared_parameters(settings, session.get("device", "cpu"), other)
    axes = ("batch_size", "precision", "layout", "compile")
    layouts = settings.layouts or (str(own_settings(model)["layout"]),)
    jobs = [
        step_job(model, {**shared, **dict(zip(axes, row, strict=True))}, kind=kind)
        for row in product(settings.batch_sizes, settings.precisions, layouts, settings.compiles)
    ]
    if not jobs:
        raise InvalidSetupError(
            "a measurement needs at least one batch size, precision, layout and compilation"
        )
    for job in jobs:
        _check_model(job)
    return measure_jobs(spread_order(jobs), **session, framework=framework)


def _shared_parameters(
    settings: StepSettings, device: str, other: Framework | None
) -> tuple[JobKind, dict[str, Any]]:
    """Kind of the jobs, and the parameters that all of them share."""
    optimizer = settings.optimizer or ("sgd-plain" if settings.num_servers else "sgd")
    shared: dict[str, Any] = {
        "optimizer": optimizer if settings.phase == Phase.TRAIN else "none",
        "phase": settings.phase,
        "convolution_precision": settings.convolution_precision,
        "image_size": settings.image_size,
        "input_shape": settings.input_shape,
        "sequence_length": settings.sequence_length,
    }
    kind = JobKind.STEP
    if settings.num_servers and other is not None:
        shared |= other.server_parameters(settings, optimizer, device)
        kind = JobKind.DATA_PARALLEL
    elif settings.num_devices != 1:
        check_strategy(settings.strategy, settings.num_devices, settings.phase)
        kind = JobKind.DATA_PARALLEL
        shared |= {"num_devices": settings.num_devices, "strategy": settings.strategy}
    return kind, shared


def _named_for(model: str, framework: str | None) -> tuple[str, str]:
    """The name of the model for a framework, and that framework."""
    found = "keras" if is_keras(model) else "pytorch"
    if framework in (None, found):
        return model, found
    if framework != "keras":
        raise InvalidSetupError(
            f"expected framework keras for {model}, or pytorch for a model of PyTorch, got {framework!r}"
        )
    return (model if ".py:" in model else f"keras:{model}"), framework


def measure_link(*, num_devices: int = 2, **session: Unpack[SessionOptions]) -> MeasurementRun:
    """Measures latency and bandwidth of the link between the devices at hand, by all-reduces of five sizes.

    Args:
        num_devices: Devices, or processes of a processor; at least 2.
        session: See ``SessionOptions``; the device is ``cpu`` or ``cuda``.

    Raises:
        UsageError: There are fewer than two devices.
        MeasurementError: The devices cannot be used.
    """
    if num_devices < 2:
        raise InvalidSetupError(
            f"a link has two ends or more: expected at least 2 devices, got {num_devices}"
        )
    job = MeasurementJob(
        kind=JobKind.LINK, subject="all-reduce", family="link", parameters={"num_devices": num_devices}
    )
    return measure_jobs([job], **session)


def _check_model(job: MeasurementJob) -> None:
    """Lets an unknown model or an impossible setup fail here, with one message, instead of in every child."""
    setup = setup_of(job.parameters)
    if (other := framework_of(own_stack(job.subject))) is not None:
        other.check_model(job.subject, setup)
        return
    check_measured_precision(setup.precision)
    check_measured_optimizer(setup.optimizer)
    try:
        trace(ModelRequest(model=job.subject, **input_options_of(job.parameters)), setup)
    except TraceError:
        return  # a model that cannot be traced may still run


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
    device: str = "cpu",
    records: str | Path | None = None,
    occasion: str = "",
    protocol: Protocol | None = None,
    ray: str | None = None,
    on_event: Callable[[Event], None] | None = None,
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
    around = describe_circumstances(
        device, protocol=shared["protocol"], occasion=shared["occasion"], framework=framework
    )
    if (other := framework_of(framework)) is not None:
        shared = {**shared, "run": other.run, "anchor": None}  # the anchor is a step of PyTorch
    name = around.device if gpu_index(device) is not None else "here"
    # A model of another framework is traced in another process, which takes longer than to foresee its time pays.
    is_foreseeable = framework == PYTORCH or all(job.kind is JobKind.LAYER for job in jobs)
    report = run_jobs(
        jobs,
        store,
        device_index=device,
        circumstances=around,
        expected_s=_Expectation(name, shared["protocol"]) if is_foreseeable else None,
        **shared,
    )
    wanted = {key_of(job, around) for job in jobs}
    kept = store.measurements(occasion=shared["occasion"])
    return report, [m for m in kept if m.key in wanted]  # read again: anchors may have marked some of them


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
        # Warm-up and repetitions each end after the longest time of the protocol.
        timed_s = min(num_timed * step_s, 2 * protocol.max_seconds)
        return _START_S + timed_s + step_s * _num_epoch_steps(job)

    def _predicted_step_s(self, job_text: str) -> float:
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
