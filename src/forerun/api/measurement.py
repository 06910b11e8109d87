"""Real runs: what ``forerun measure`` does, as functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from itertools import product
from pathlib import Path

from forerun.api.measuring import MeasurementRun, measure_jobs
from forerun.errors import InvalidSetupError, MissingExtraError, TraceError
from forerun.measurement.data_parallel_runner import check_strategy
from forerun.measurement.datasets import check_dataset
from forerun.measurement.grid import Grid, grid_jobs, spread_order
from forerun.measurement.jobs import Job
from forerun.measurement.keras_runner import KERAS_OPTIMIZERS
from forerun.measurement.layer_design import LayerDesign, design_layers
from forerun.measurement.progress import Event
from forerun.measurement.protocol import Protocol
from forerun.records.measurement import JobKind, Scalar
from forerun.records.model_names import subject_family
from forerun.tracing.keras_networks import KERAS_FAMILIES
from forerun.tracing.trace import ModelRequest, trace
from forerun.workload.setup import Phase

__all__ = ["MeasurementRun", "measure_grid", "measure_layers", "measure_link", "measure_model"]


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
    if grid.framework == "keras":
        _check_keras(grid, ray)
    jobs = grid_jobs(grid)
    first, *others = {job.subject: job for job in jobs}.values()
    _check_model(first)  # a mistyped name is told before anything is downloaded
    check_dataset(grid.dataset, grid.image_size)
    for job in others:
        _check_model(job)
    return measure_jobs(jobs, device, records, occasion, protocol, ray, on_event, grid.framework)


def _check_keras(grid: Grid, ray: str | None) -> None:
    if find_spec("keras") is None or find_spec("tensorflow") is None:
        raise MissingExtraError("measuring with Keras", "keras")
    if ray is not None:
        raise InvalidSetupError("grids of Keras run on this machine only; leave --ray out")
    if grid.network not in KERAS_FAMILIES:
        raise InvalidSetupError(
            f"expected one of the networks {', '.join(KERAS_FAMILIES)} for Keras, got {grid.network!r}"
        )
    if grid.optimizer not in KERAS_OPTIMIZERS:
        raise InvalidSetupError(
            f"expected an optimizer of {', '.join(KERAS_OPTIMIZERS)} for Keras, got {grid.optimizer!r}"
        )


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
    return measure_jobs(jobs, device, records, occasion, protocol, ray, on_event)


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
        num_devices: Devices that share the work, each with the batch size; on a processor, processes that share its
            cores.
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
            family=subject_family(model),
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
    return measure_jobs(spread_order(jobs), device, records, occasion, protocol, ray, on_event)


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
        raise InvalidSetupError(
            f"a link has two ends or more: expected at least 2 devices, got {num_devices}"
        )
    job = Job(kind=JobKind.LINK, subject="all-reduce", family="link", parameters={"num_devices": num_devices})
    return measure_jobs([job], device, records, occasion, protocol, None, on_event)


def _check_model(job: Job) -> None:
    """Lets an unknown model or an impossible setup fail here, with one message, instead of in every child."""
    from forerun.measurement.job_parameters import input_options_of, setup_of

    try:
        trace(ModelRequest(model=job.subject, **input_options_of(job.parameters)), setup_of(job.parameters))
    except TraceError:
        return  # what cannot be traced may still run
