"""Real runs: ``forerun measure`` as functions."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Unpack

from forerun.base.errors import InvalidSetupError, TraceError
from forerun.evidence.measure_jobs import MeasurementRun, measure_jobs
from forerun.evidence.measurement.circumstances import software_version
from forerun.evidence.measurement.datasets import check_dataset
from forerun.evidence.measurement.frameworks import Framework, framework_of
from forerun.evidence.measurement.grid import grid_jobs, spread_order
from forerun.evidence.measurement.jobs import MeasurementJob, Protocol
from forerun.evidence.measurement.layer_design import design_layers
from forerun.evidence.measurement.progress import Event
from forerun.evidence.measurement.runners.data_parallel_runner import check_strategy
from forerun.evidence.measurement.runners.step_runner import check_measured_optimizer
from forerun.evidence.measurement.runners.torch_device import check_measured_precision
from forerun.evidence.measurement.settings import Grid, LayerDesign, StepOptions, StepSettings
from forerun.evidence.records.measurement import JobKind, Measurement, Scalar
from forerun.evidence.records.model_names import subject_family
from forerun.question.devices.catalogue import cpu_device, matching_devices
from forerun.question.devices.device import Device
from forerun.question.devices.here import describe_host, visible_gpus
from forerun.question.model import ModelRequest, is_keras, own_layout, own_stack
from forerun.question.run import Run
from forerun.question.settings import checked
from forerun.question.setup import Phase, Precision, TrainingSetup, choice, parse_release
from forerun.question.sharing import Sharing
from forerun.tracing.trace import trace

__all__ = ["MeasurementRun", "measure", "measure_grid", "measure_layers", "measure_link", "measure_model"]


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
        grid: Networks and settings to train; system A's 18 configurations if None.
        device: ``cpu`` or ``cuda:N``.
        records: Store of the records, a file or an SQLAlchemy URL; the default store if None.
        occasion: Label of the session; the same label resumes it, another one repeats it.
        protocol: Rules of timing.
        ray: Address of a Ray cluster (``auto`` for one of this machine) that runs the jobs.
        on_event: Receives an event for every job.

    Raises:
        UsageError: The grid, the device or a model is not possible.
        MeasurementError: The dataset cannot be loaded, the device is busy, or nothing could be measured.
        RecordError: The store cannot be used.
    """
    grid = grid or Grid()
    if (other := _other_framework(grid.framework, ray)) is not None:
        other.check_grid(grid.network, grid.optimizer)
    jobs = grid_jobs(grid)
    first, *others = {job.subject: job for job in jobs}.values()
    _check_model(first)  # a mistyped name is reported before anything is downloaded
    check_dataset(grid.dataset, grid.image_size)
    for job in others:
        _check_model(job)
    return measure_jobs(jobs, device, records, occasion, protocol, ray, on_event, grid.framework)


def _other_framework(name: str, ray: str | None) -> Framework | None:
    """The framework of a measurement; None for PyTorch.

    Raises:
        MissingExtraError: It is not installed.
        InvalidSetupError: It is not known, or is asked for on a cluster.
    """
    if (other := framework_of(name)) is None:
        return None
    other.check_installed(f"measuring with {name.capitalize()}")
    if ray is not None:
        raise InvalidSetupError(f"{name.capitalize()} is measured on this machine only; leave --ray out")
    return other


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
    design = design or LayerDesign()
    precision = choice(Precision, design.precision, "precision")
    if (other := _other_framework(design.framework, ray)) is not None:
        other.check_layers(design.optimizers, precision)
    else:
        check_measured_precision(precision)
        for name in design.optimizers:
            check_measured_optimizer(name)
    jobs = design_layers(design)
    return measure_jobs(jobs, device, records, occasion, protocol, ray, on_event, design.framework)


def measure_model(
    model: str,
    *,
    device: str = "cpu",
    records: str | Path | None = None,
    occasion: str = "",
    protocol: Protocol | None = None,
    ray: str | None = None,
    on_event: Callable[[Event], None] | None = None,
    **options: Unpack[StepOptions],
) -> MeasurementRun:
    """Measures steps of any model that ``predict`` takes, on a batch that stays on the device.

    Args:
        model: The model as ``predict`` names it. With ``framework="keras"`` a name that is not one of Keras is one of
            its families, so that ``mnist-cnn`` is ``keras:mnist-cnn``.
        device: ``cpu`` or ``cuda:N``.
        records: Store of the records; the default store if None.
        occasion: Label of the session.
        protocol: Rules of timing.
        ray: Address of a Ray cluster that runs the jobs.
        on_event: Told of every job.
        options: See ``measurement.settings.StepSettings``; of batch sizes, precisions, layouts and compiles all
            combinations are measured.
    """
    settings = StepSettings(**checked(options, StepSettings))
    model, framework = _named_for(model, settings.framework)
    if (other := _other_framework(framework, ray)) is not None:
        other.check_steps(settings)
    elif settings.num_servers:
        raise InvalidSetupError(
            "parameter servers are those of TensorFlow; name a Keras model, or --framework keras"
        )
    kind, shared = _shared_parameters(settings, device, other)
    axes = ("batch_size", "precision", "layout", "compile")
    layouts = settings.layouts or (str(own_layout(model)),)
    jobs = [
        MeasurementJob(
            kind=kind,
            subject=model,
            family=subject_family(model),
            parameters={**shared, **dict(zip(axes, row, strict=True))},
        )
        for row in product(settings.batch_sizes, settings.precisions, layouts, settings.compiles)
    ]
    if not jobs:
        raise InvalidSetupError(
            "a measurement needs at least one batch size, precision, layout and compilation"
        )
    for job in jobs:
        _check_model(job)
    return measure_jobs(spread_order(jobs), device, records, occasion, protocol, ray, on_event, framework)


def _shared_parameters(
    settings: StepSettings, device: str, other: Framework | None
) -> tuple[JobKind, dict[str, Scalar]]:
    """Kind of the jobs, and the parameters that all of them share."""
    optimizer = settings.optimizer or ("sgd-plain" if settings.num_servers else "sgd")
    shape = settings.input_shape
    shared: dict[str, Scalar] = {
        "optimizer": optimizer if settings.phase == Phase.TRAIN else "none",
        "phase": settings.phase,
        "image_size": settings.image_size,
        "input_shape": None if shape is None else "x".join(map(str, shape)),
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
    return kind, {name: value for name, value in shared.items() if value is not None}


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
        protocol: Rules of timing.
        on_event: Receives an event for every job.

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
    return measure_jobs([job], device, records, occasion, protocol, None, on_event)


def _check_model(job: MeasurementJob) -> None:
    """Lets an unknown model or an impossible setup fail here, with one message, instead of in every child."""
    from forerun.evidence.records.measured_run import input_options_of, setup_of

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
