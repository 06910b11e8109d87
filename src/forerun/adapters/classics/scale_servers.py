"""Parameter servers, and speed models fitted to measured points."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any, Unpack

from forerun.adapters.classics.model_choice import choose_speed_model
from forerun.adapters.classics.server_models import (
    OPTIMUS_ASYNCHRONOUS,
    OPTIMUS_SYNCHRONOUS,
    ParameterServerSetup,
    asynchronous_terms,
    candidate_points,
    parameter_server_step_s,
    propose_points,
    synchronous_terms,
)
from forerun.adapters.classics.speed_models import SpeedPoint, read_points
from forerun.base.answers import Answer
from forerun.base.errors import InvalidSetupError
from forerun.prediction.estimate import Interval
from forerun.prediction.models import TracedModels, cost_model_of
from forerun.prediction.run_step import step_alone
from forerun.prediction.step import PreparedModel
from forerun.question.devices import load_catalog
from forerun.question.devices.cluster import parse_link, require_link
from forerun.question.job import Job
from forerun.question.options import RunOptions
from forerun.question.run import Run
from forerun.question.settings import checked, whole
from forerun.search.scale import sizes_of

COEFFICIENTS = ("optimus",)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerPoint(Answer):
    """One number of workers and servers.

    Attributes:
        num_workers, num_servers: Numbers of workers and servers.
        batch_size_per_update: Samples of one update of the model: of all workers (synchronous) or of one.
        step_time_s: Step of all workers together (synchronous) or of one worker (asynchronous) [s].
        steps_per_s: Updates of the model per second, of all workers together.
        throughput_samples_per_s: Samples of all workers per second.
        efficiency: Throughput over ``num_workers`` times the throughput of one worker with as many servers.
        num_steps_per_epoch: Updates of an epoch; None without a dataset.
        num_steps: Updates of all epochs; None without a number of epochs.
        job_time_s: All epochs; None without a number of epochs [s].
    """

    num_workers: int
    num_servers: int
    batch_size_per_update: int
    step_time_s: float
    steps_per_s: float
    throughput_samples_per_s: float
    efficiency: float
    num_steps_per_epoch: int | None = None
    num_steps: int | None = None
    job_time_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCurve(Answer):
    """Answer of ``forerun.scale_servers``.

    Attributes:
        run: The run of one worker.
        model: The model as it was named.
        device: Device of a worker; None with published coefficients.
        mode: synchronous or asynchronous.
        batch_size: Batch size of one worker; of all together where ``global_batch_size`` was given.
        is_global_batch: Whether it is that of all workers together.
        epochs: Epochs in the question.
        points: One point per number of workers and servers.
        best_workers: Workers with the highest throughput, by number of servers.
        notes: Remarks for the reader.
    """

    run: Run
    model: str
    device: str | None
    mode: str
    batch_size: int
    is_global_batch: bool
    epochs: float | None
    points: tuple[ServerPoint, ...]
    best_workers: Mapping[int, int]
    notes: tuple[str, ...]


def scale_servers(
    model: str,
    *,
    num_workers: Sequence[int],
    num_servers: Sequence[int],
    device: str | None = None,
    global_batch_size: int | None = None,
    synchronous: bool = True,
    coefficients: str | None = None,
    use_cache: bool = True,
    **options: Unpack[RunOptions],
) -> ServerCurve:
    """Predicts the speed of training with parameter servers.

    Args:
        model: A specification such as ``torchvision:resnet50``; with published coefficients a name only.
        num_workers: Numbers of workers.
        num_servers: Numbers of servers.
        device: Device of a worker; not needed with published coefficients.
        global_batch_size: Batch size of all workers together (synchronous), which they share; None: each has
            ``batch_size`` of its own.
        synchronous: Whether workers wait for each other.
        coefficients: ``optimus`` for the published speed function of ResNet-50 instead of first principles.
        use_cache: Whether to use the cache of traced graphs.
        options: The settings of the run of a worker, see ``forerun.RunOptions``; ``batch_size`` is that of one worker,
            ``inter`` the link of each worker and server, such as ``ethernet-10g``.

    Raises:
        UsageError: The question must be changed, or the device or link must be named.
    """
    given = checked(options, RunOptions)
    if "price_usd_per_hour" in given:
        raise InvalidSetupError("a price of one device cannot be used for workers and servers; leave it out")
    if coefficients is not None and coefficients not in COEFFICIENTS:
        raise InvalidSetupError(
            f"unknown coefficients '{coefficients}'; expected one of {', '.join(COEFFICIENTS)}"
        )
    if global_batch_size is not None and (not synchronous or "batch_size" in given):
        raise InvalidSetupError(
            "--global-batch-size is shared by synchronous workers, in place of --batch-size, which is each worker's; "
            "give one of the two, and asynchronous workers their own"
        )
    workers, servers = sizes_of(num_workers), sizes_of(num_servers)
    is_global = global_batch_size is not None
    batch = whole("batch size", global_batch_size) if is_global else given.get("batch_size", 32)
    if coefficients is None and device is None:
        raise InvalidSetupError(
            "expected the device of a worker with --on, or --coefficients optimus; give one"
        )
    inter = given.pop("inter", None)
    # With published coefficients the device has no effect; any one serves to check the settings of the job.
    run = Run.of(model, device=device or "cpu", **{**given, "batch_size": batch})
    if coefficients is not None:
        step_s, note = _published(synchronous=synchronous)
    else:
        step_s, note = _first_principles(TracedModels(use_cache=use_cache).of(run), run, inter, synchronous)

    def point(w: int, p: int) -> ServerPoint:
        # Without a batch of all, each worker brings its own: an update has w times as many samples.
        samples = batch * w if synchronous and not is_global else batch
        together_s = step_s(w, p, samples)
        steps_per_s = (1 if synchronous else w) / together_s
        return ServerPoint(
            num_workers=w,
            num_servers=p,
            batch_size_per_update=samples,
            step_time_s=together_s,
            steps_per_s=steps_per_s,
            throughput_samples_per_s=samples * steps_per_s,
            efficiency=samples * steps_per_s / (batch / step_s(1, p, batch)) / w,
            **_job_steps(run.job, samples, steps_per_s),
        )

    points = [point(w, p) for p in servers for w in workers]
    return ServerCurve(
        run=run,
        model=model,
        device=None if coefficients else device,
        mode="synchronous" if synchronous else "asynchronous",
        batch_size=batch,
        is_global_batch=is_global,
        epochs=given.get("epochs"),
        points=tuple(points),
        best_workers={p: _fastest(points, p).num_workers for p in servers},
        notes=(note,),
    )


def _fastest(points: Sequence[ServerPoint], servers: int) -> ServerPoint:
    alike = [point for point in points if point.num_servers == servers]
    return max(alike, key=lambda point: point.throughput_samples_per_s)


_StepTime = Callable[[int, int, float], float]
"""Step [s] of workers, servers and samples of an update."""


def _published(*, synchronous: bool) -> tuple[_StepTime, str]:
    """Step time from Optimus' coefficients, and a note on it."""
    theta = OPTIMUS_SYNCHRONOUS if synchronous else OPTIMUS_ASYNCHRONOUS

    def step_s(w: int, p: int, samples: float) -> float:
        terms = synchronous_terms(w, p, samples) if synchronous else asynchronous_terms(w, p)
        return sum(t * x for t, x in zip(theta, terms, strict=True))

    return step_s, (
        f"speed function of Optimus (Peng et al. 2018, table 2: ResNet-50 on its 40 containers), {theta}, times "
        "in seconds; whatever the model is called, the speed is that of their ResNet-50"
    )


def _first_principles(
    prepared: PreparedModel, run: Run, inter: str | None, synchronous: bool
) -> tuple[_StepTime, str]:
    """Step time on this hardware: compute of a worker as a line in the batch, a model update at the memory's speed."""
    link = require_link(parse_link(inter)[1] if inter else None, "workers and servers", "--inter")
    batch, weights = run.setup.batch_size_per_device, cost_model_of(run)
    small = max(1, batch // 4)
    sizes = [small, batch]
    if prepared.graph.only_batch_size is not None or small == batch:
        sizes = [batch, batch]
    first_s, whole_s = (
        step_alone(prepared, run, replace(run.setup, batch_size_per_device=size), weights).step_s.value
        for size in sizes
    )
    # The part of a step that does not shrink with a worker's share decides how far more workers help.
    distance = batch - small
    slope_s = max(0.0, whole_s - first_s) / distance if distance else 0.0
    compute_s = min(whole_s, slope_s * batch)
    model_bytes = 4.0 * prepared.graph.num_trainable_parameters
    setup = ParameterServerSetup(
        compute_s=compute_s,
        fixed_compute_s=whole_s - compute_s,
        model_bytes=model_bytes,
        server_bytes_per_s=link.usable_bytes_per_s,
        worker_bytes_per_s=link.usable_bytes_per_s,
        # A server's processor reads gradient and weight and writes the weight.
        update_s=3 * model_bytes / load_catalog()["cpu"].memory_bandwidth_bytes_per_s,
        latency_s=link.latency_s,
    )

    def step_s(w: int, p: int, samples: float) -> float:
        # An asynchronous worker computes its own batch, whatever the others do.
        of_all = replace(setup, compute_s=compute_s * samples / batch) if synchronous else setup
        return parameter_server_step_s(of_all, w, p, synchronous=synchronous)

    return (
        step_s,
        f"from first principles over {link.title}: compute, push, update and pull, none of it fitted",
    )


def _job_steps(job: Job | None, batch: int, steps_per_s: float) -> dict[str, Any]:
    """Updates of an epoch, of all epochs and their time, as far as they are known."""
    if job is None:
        return {}
    steps = ceil(job.num_samples / batch)
    if job.num_epochs is None:
        return {"num_steps_per_epoch": steps}
    total = round(steps * job.num_epochs)
    return {"num_steps_per_epoch": steps, "num_steps": total, "job_time_s": total / steps_per_s}


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedFit(Answer):
    """Answer of ``forerun.fit_speed``.

    Attributes:
        model: Name of the speed model; None if nothing was fitted.
        parameters: Its coefficients.
        errors: Mean error of left-out points by model, as fractions; None where a model could not be fitted without
            them.
        points: The sizes of the question, each with ``step_time_s``, ``throughput_samples_per_s`` and their intervals.
        proposals: Sizes to measure next.
        notes: Remarks for the reader.
    """

    model: str | None
    parameters: Mapping[str, float]
    errors: Mapping[str, float | None]
    points: tuple[Mapping[str, Any], ...]
    proposals: tuple[Mapping[str, int], ...]
    notes: tuple[str, ...]


def fit_speed(
    points: str | Path | Sequence[SpeedPoint] | None,
    *,
    speed_model: str | None = None,
    num_devices: Sequence[int] | None = None,
    num_workers: Sequence[int] | None = None,
    num_servers: Sequence[int] | None = None,
    num_nodes: int | None = None,
    batch_size: float | None = None,
    global_batch_size: float | None = None,
    num_proposals: int = 0,
    synchronous: bool = True,
) -> SpeedFit:
    """Fits a speed model to measured points, extrapolates with intervals, and proposes sizes to measure next.

    Args:
        points: A CSV file (columns in ``adapters.classics.speed_models``), or points; None for proposals only.
        speed_model: pollux, ring, average, optimus-synchronous or optimus-asynchronous; None for the best by
            cross-validation.
        num_devices: Numbers of devices to predict; None for those of the points.
        num_workers: Numbers of workers to predict with parameter servers; also the candidates of proposals.
        num_servers: Numbers of servers to combine with the workers.
        num_nodes: Nodes of the predicted sizes; None for those of the measured point nearest in size.
        batch_size: Batch size of one device, also of measured points without one; None for the median of the points.
        global_batch_size: Batch size of all devices together instead, as in strong scaling.
        num_proposals: Number of sizes to propose.
        synchronous: Whether the proposals are for synchronous training.

    Raises:
        UsageError: The points do not suffice, a time is not above zero, or a size is impossible.
        RecordError: The file cannot be read.
    """
    if isinstance(points, (str, Path)):
        points = read_points(points, batch_size, global_batch_size)
    measured = tuple(points or ())
    if not measured and not num_proposals:
        raise InvalidSetupError("expected measured points, got none; give --fit POINTS.csv")
    proposals: tuple[Mapping[str, int], ...] = ()
    if num_proposals:
        if num_workers is None or num_servers is None:
            raise InvalidSetupError(
                "proposals need candidates: give --workers and --servers, such as 1:16 and 1:8"
            )
        batch = global_batch_size or (measured[0].batch_size_global if measured else 1.0)
        known = {(point.num_devices, point.num_servers) for point in measured}
        possible = candidate_points(num_workers, num_servers, batch)
        candidates = [p for p in possible if (p.num_devices, p.num_servers) not in known]
        theta = OPTIMUS_SYNCHRONOUS if synchronous else OPTIMUS_ASYNCHRONOUS
        found = propose_points(
            candidates, num_proposals, measured=measured, theta=theta, synchronous=synchronous
        )
        proposals = tuple({"num_workers": p.num_devices, "num_servers": p.num_servers} for p in found)
    if not measured:
        return SpeedFit(model=None, parameters={}, errors={}, points=(), proposals=proposals, notes=())
    chosen = choose_speed_model(measured, speed_model)
    asked = _asked(
        measured, num_workers or num_devices, num_servers, num_nodes, batch_size, global_batch_size
    )
    return SpeedFit(
        model=chosen.fitted.name,
        parameters=chosen.fitted.parameters,
        errors={name: error if error < float("inf") else None for name, error in chosen.errors.items()},
        points=tuple(
            _row(point, interval, _measured_s(point, measured))
            for point, interval in zip(asked, chosen.fitted.intervals(asked), strict=True)
        ),
        proposals=proposals,
        notes=_notes(measured, asked),
    )


def _asked(
    measured: Sequence[SpeedPoint],
    numbers: Sequence[int] | None,
    servers: Sequence[int] | None,
    num_nodes: int | None,
    batch_size: float | None,
    global_batch_size: float | None,
) -> list[SpeedPoint]:
    if numbers is None:
        return list({point.size: point for point in measured}.values())
    sizes = sorted(point.batch_size_per_device for point in measured)
    totals = {point.batch_size_global for point in measured}
    if global_batch_size is None and batch_size is None and measured[0].num_servers and len(totals) == 1:
        global_batch_size = totals.pop()  # parameter servers were measured at one global batch
    found = []
    for p in servers or (sorted({point.num_servers for point in measured})[:1]):
        for n in numbers:
            nearest = min(measured, key=lambda point, n=n: abs(point.num_devices - n))  # type: ignore[misc]
            batch = global_batch_size / n if global_batch_size else batch_size or sizes[len(sizes) // 2]
            nodes = num_nodes or max(1, round(n * nearest.num_nodes / nearest.num_devices))
            found.append(
                SpeedPoint(num_devices=n, num_nodes=min(n, nodes), batch_size_per_device=batch, num_servers=p)
            )
    return found


def _measured_s(asked: SpeedPoint, measured: Sequence[SpeedPoint]) -> float | None:
    """Mean of the step times measured at exactly this size; None without any [s]."""
    found = [point.measured_s for point in measured if point.size == asked.size]
    return sum(found) / len(found) if found else None


def _row(point: SpeedPoint, step_s: Interval, measured_s: float | None) -> dict[str, Any]:
    sizes = {"num_devices": point.num_devices, "num_nodes": point.num_nodes}
    if point.num_servers:
        sizes = {"num_workers": point.num_devices, "num_servers": point.num_servers}
    return {
        **sizes,
        "batch_size_per_device": point.batch_size_per_device,
        "step_time_s": step_s,
        "throughput_samples_per_s": step_s.inverse(point.batch_size_global),
        "measured_step_time_s": measured_s,
    }


def _notes(measured: Sequence[SpeedPoint], asked: Sequence[SpeedPoint]) -> tuple[str, ...]:
    largest = max(point.num_devices for point in measured)
    beyond = sum(point.num_devices > largest for point in asked)
    words = f"{beyond} of {len(asked)} sizes lie beyond the {largest} that were measured: extrapolated"
    return (words,) if beyond else ()
