"""Jobs of a file as jobs of the scheduler: their speeds predicted, fitted or measured, their work counted."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from math import inf, log
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field

from forerun.base.errors import ForerunError, InvalidSetupError
from forerun.base.tables import read_rows
from forerun.jobs.scheduling.job import (
    DataParallelTraining,
    NodeGroup,
    ScheduledJob,
    SharedCluster,
    check_jobs,
)
from forerun.jobs.scheduling.jobs_file import JobEntry
from forerun.jobs.scheduling.running_job import epochs_to_loss
from forerun.jobs.scheduling.speed import (
    BatchEfficiency,
    MeasuredSpeed,
    SpeedModel,
    StepPoint,
    fit_data_parallel,
)
from forerun.question.job import find_dataset
from forerun.search.predict import predict
from forerun.search.scale import scale
from forerun.search.sweep import sweep

MEASURED_SPREAD = 0.05
"""Standard deviation of the logarithm of a speed between measured points; repeats of the public tables are closer."""

FITTED_SPREAD = 0.10
"""The same for a speed fitted to a table: the form's own error on the steps of the Pollux artifact is 8 to 10 %."""

BY_DURATION = "that their duration says"
"""Source of the speed of jobs of which only the time is known; such a job has no batch to tell."""

TARGET_SPREAD = 0.3
"""The same for epochs to a target: a third is what forecasts in mid-run are off by on the curves of that artifact."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownJob:
    """A job, and the uncertainty of its speed and work.

    Attributes:
        job: The job.
        speed_spread, work_spread: Standard deviation of the logarithm of its speed and work.
        script: Command line of its training script.
        source: Source of its speed.
    """

    job: ScheduledJob
    speed_spread: float
    work_spread: float
    script: str
    source: str


Say = Callable[[str], None]
"""Told what is being done, a few words at a time."""


def known_jobs(
    entries: Sequence[JobEntry], cluster: SharedCluster, links: Links, say: Say | None = None
) -> list[KnownJob]:
    """The jobs of a file. Each table of steps is fitted once, each model predicted once for like jobs.

    Args:
        entries: The jobs.
        cluster: What they share.
        links: Links that the boards do not tell.
        say: Told which job's speed is looked for.

    Raises:
        UsageError: A model, device, dataset or number is unknown or impossible; the message names the job.
        FailureError: A model cannot be predicted; likewise.
    """
    known: dict[Hashable, tuple[dict[str, SpeedModel], float, str]] = {}
    found = []
    for number, entry in enumerate(entries, start=1):
        try:
            key = _speed_key(entry)
            if key not in known:
                if say is not None:
                    say(f"speed of {entry.name}, job {number:,} of {len(entries):,}")
                known[key] = _speeds(entry, cluster, links)
            found.append(_known(entry, cluster, known[key]))
        except ForerunError as error:
            # Errors of the file itself name the job already.
            if f"'{entry.name}'" not in str(error):
                error.args = (f"job '{entry.name}': {error}",)
            raise
    return found


def _speed_key(entry: JobEntry) -> Hashable:
    """A key that is equal for jobs with the same speed."""
    if entry.points is not None:
        return entry.name
    if entry.table is not None:
        return entry.table
    asked = (entry.model, entry.batch_size, entry.num_devices, entry.max_devices)
    return (*asked, tuple(sorted(entry.run_options().items())))


def _known(
    entry: JobEntry, cluster: SharedCluster, found: tuple[dict[str, SpeedModel], float, str]
) -> KnownJob:
    speeds, spread, source = found
    base, most = float(entry.batch_size), float(entry.batch_size_max or entry.batch_size)
    efficiency = None
    if entry.noise_scale is not None:
        efficiency = BatchEfficiency(noise_scale=entry.noise_scale, base_batch_size=base)
    work, epoch_samples = _work(entry)
    training = DataParallelTraining(
        speeds=speeds, batch_size=base, batch_range=(base, most), efficiency=efficiency
    )
    job = ScheduledJob(
        name=entry.name,
        training=training,
        work_samples=work,
        num_workers=entry.num_devices,
        is_elastic=entry.elastic,
        # A job that asks for more than there is has its own message.
        max_workers=entry.max_devices or max(entry.num_devices, *(g.num_devices for g in cluster.groups)),
        arrival_s=entry.arrival,
        deadline_s=inf if entry.deadline is None else entry.deadline,
        weight=entry.weight,
        restart_s=entry.restart,
        is_preemptible=entry.preemptible,
        min_run_s=entry.min_run,
    )
    _check_size(job, cluster)
    if entry.curve is not None:
        job = replace(job, work_samples=_work_to_target(entry, epoch_samples))
    return KnownJob(
        job=job,
        speed_spread=spread,
        work_spread=0.0 if entry.curve is None else TARGET_SPREAD,
        script=entry.script,
        source=source,
    )


def _check_size(job: ScheduledJob, cluster: SharedCluster) -> None:
    """Refuses a job that could run nowhere, or on no number of devices that its owner allows."""
    training = job.training
    groups = [group for group in cluster.groups if group.device in training.speeds]
    check_jobs((job,), {group.device: group.num_devices for group in groups})
    most = max(group.num_devices for group in groups)
    is_one_size = not (job.is_elastic and job.is_preemptible)
    sizes = [job.num_workers] if is_one_size else range(1, min(job.max_workers, most) + 1)
    for group in groups:
        speed = training.speeds[group.device]
        for n in sizes:
            if n <= group.num_devices and speed(n, -(-n // group.devices_per_node), training.batch_size) > 0:
                return
    raise InvalidSetupError(
        f"job '{job.name}': a batch of {training.batch_size:g} runs on none of the numbers of devices that it may "
        "have; enlarge the batch, which needs a sample for each device, or ask for fewer devices"
    )


def _work(entry: JobEntry) -> tuple[float, float]:
    """Samples of the whole job, and of an epoch (0 if it is not counted in epochs)."""
    if entry.samples is not None:
        return entry.samples, 0.0
    if entry.steps is not None:
        return entry.steps * entry.batch_size, 0.0
    assert entry.epochs is not None
    epoch = entry.dataset_size or find_dataset(str(entry.dataset)).num_training_samples
    return entry.epochs * epoch, float(epoch)


def _work_to_target(entry: JobEntry, epoch_samples: float) -> float:
    """Samples that are left until the target by the losses so far."""
    assert entry.curve is not None
    assert entry.target is not None
    assert entry.epochs is not None
    losses = [row.loss for _, row in read_rows(entry.curve, _LossRow)]
    left = epochs_to_loss(losses, entry.target, entry.epochs) - len(losses)
    return max(0.1, left) * epoch_samples


def _speeds(
    entry: JobEntry, cluster: SharedCluster, links: Links
) -> tuple[dict[str, SpeedModel], float, str]:
    """Speed by kind of device, its spread, and where it is from."""
    if entry.duration is not None:
        return _measured(entry, cluster), MEASURED_SPREAD, BY_DURATION
    if entry.points is not None:
        last = max(max(points) for points in entry.points.values())
        most = min(entry.max_devices or inf, max(group.num_devices for group in cluster.groups))
        beyond = (
            f"measured points, carried on beyond {last} devices" if entry.elastic and most > last > 1 else ""
        )
        return _measured(entry, cluster), MEASURED_SPREAD, beyond or "measured points"
    if entry.table is not None:
        return _fitted(entry, entry.table, cluster), FITTED_SPREAD, f"fitted to {entry.table.name}"
    return *predicted_speeds(entry, cluster, links), "predicted"


def _measured(entry: JobEntry, cluster: SharedCluster) -> dict[str, SpeedModel]:
    assert entry.points is not None
    known = {kind: MeasuredSpeed(points) for kind, points in entry.points.items()}
    unknown = [kind for kind in known if kind and kind not in cluster.kinds]
    if unknown and not set(known) & {"", *cluster.kinds}:
        raise InvalidSetupError(
            f"job '{entry.name}': points are for {', '.join(unknown)}, the cluster has {', '.join(cluster.kinds)}"
        )
    return {
        kind: known[kind if kind in known else ""] for kind in cluster.kinds if kind in known or "" in known
    }


def _fitted(entry: JobEntry, path: Path, cluster: SharedCluster) -> dict[str, SpeedModel]:
    """The seven-parameter form, fitted to the steps of each kind of device."""
    points: dict[str, list[StepPoint]] = {}
    for _, row in read_rows(path, _StepRow):
        points.setdefault(row.device.lower(), []).append(row.point(cluster))
    found: dict[str, SpeedModel] = {}
    for kind in cluster.kinds:
        own = points.get(kind) or points.get("")
        if own:
            found[kind] = fit_data_parallel(own, max(p.batch_size_per_device for p in own))
    if not found:
        raise InvalidSetupError(f"{path.name}: expected steps on {', '.join(cluster.kinds)}, got none")
    return found


_Whole = Annotated[int, Field(gt=0, description="a whole number above zero")]
_Above = Annotated[float, Field(gt=0, allow_inf_nan=False, description="a number above zero")]


class _StepRow(BaseModel):
    """A measured step; ``batch_size`` is that of all devices, nodes are as few as hold them if not given."""

    num_devices: _Whole
    batch_size: _Above
    step_time_s: _Above
    device: str = ""
    num_nodes: _Whole | None = None

    def point(self, cluster: SharedCluster) -> StepPoint:
        """The step as the fit takes it."""
        kind = self.device.lower()
        per_node = cluster.group(kind if kind in cluster.kinds else cluster.kinds[0]).devices_per_node
        return StepPoint(
            num_devices=self.num_devices,
            num_nodes=self.num_nodes or -(-self.num_devices // per_node),
            batch_size_per_device=self.batch_size / self.num_devices,
            step_time_s=self.step_time_s,
        )


class _LossRow(BaseModel):
    """One epoch of a curve."""

    loss: _Above


_FROM_90_PERCENT = 1.645
_MOST_NODES = 16
"""Nodes up to which steps are predicted; the form of the speed goes on from there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Links that the boards do not tell, as in ``scale``.

    Attributes:
        intra: Between devices of a node; None: what the form of the board says.
        inter: Between nodes.
    """

    intra: str | None = None
    inter: str | None = None


def predicted_speeds(
    entry: JobEntry, cluster: SharedCluster, links: Links
) -> tuple[dict[str, SpeedModel], float]:
    """Speed of a model on each kind of device, fitted to predicted steps, and the spread of its logarithm.

    Raises:
        UsageError: The model, a device or a link is not known.
        FailureError: The model cannot be predicted.
    """
    found: dict[str, SpeedModel] = {}
    spreads = []
    for group in cluster.groups:
        most = _most_samples(entry, group.device)
        if most < 1:
            continue
        # The form has a constant part and one per sample: several batches tell them apart.
        batches = _batches(entry, most)
        shared, spread = _shared_steps(entry, group, links, batches)
        found[group.device] = fit_data_parallel([*_alone(entry, group.device, batches), *shared], most)
        spreads.append(spread)
    if not found:
        raise InvalidSetupError(
            f"job '{entry.name}': not even one sample of {entry.model} fits on {', '.join(cluster.kinds)}"
        )
    return found, max(spreads)


_OF_SEVERAL = ("strategy", "all_reduce", "bucket_mb", "sync_batch_norm", "variation")


def _options(entry: JobEntry) -> dict[str, Any]:
    """The job's model and settings of its run on one device."""
    settings = {name: value for name, value in entry.run_options().items() if name not in _OF_SEVERAL}
    return {"model": entry.model, **settings}


def _most_samples(entry: JobEntry, device: str) -> float:
    """Most samples that fit on one device; infinite where that is not known."""
    share = max(1, entry.batch_size // entry.num_devices)
    one = predict(device=device, batch_size=share, **_options(entry))
    return float(one.max_batch_size.value) if one.max_batch_size is not None else inf


def _batches(entry: JobEntry, most: float) -> list[int]:
    """Batches of one device to ask about: the whole one or what fits, down to an eighth."""
    return sorted({max(1, int(min(entry.batch_size, most) / part)) for part in (1, 2, 4, 8)})


def _alone(entry: JobEntry, device: str, batches: list[int]) -> list[StepPoint]:
    options = _options(entry)
    precisions = [options.pop("precision")]
    times = sweep(devices=[device], batch_sizes=batches, precisions=precisions, **options)
    return [
        StepPoint(num_devices=1, num_nodes=1, batch_size_per_device=float(batch), step_time_s=float(step_s))
        for batch, step_s in zip(batches, times.step_time_s[0, 0], strict=True)
    ]


def predicted_sizes(group: NodeGroup, max_devices: int) -> list[int]:
    """Numbers of devices to ask about: doubling within a node, a full node, doubling numbers of full nodes.

    >>> predicted_sizes(NodeGroup(device="t4", num_nodes=5, devices_per_node=6), 100)
    [2, 4, 6, 12, 24]
    """
    per_node = group.devices_per_node
    within = [1 << k for k in range(1, per_node.bit_length()) if 1 << k <= per_node]
    across = [1 << k for k in range(1, _MOST_NODES.bit_length()) if 1 << k <= group.num_nodes]
    sizes = {*within, per_node, *(per_node * nodes for nodes in across)} - {1}
    return sorted(size for size in sizes if size <= max_devices)


def _shared_steps(
    entry: JobEntry, group: NodeGroup, links: Links, batches: list[int]
) -> tuple[list[StepPoint], float]:
    """Steps on several devices at the smallest and the largest batch of a device, and their widest spread."""
    numbers = [1, *predicted_sizes(group, entry.max_devices or group.num_devices)]
    options: dict[str, Any] = _options(entry) | dict(entry.run_options() if max(numbers) > 1 else {})
    points, spreads = [], []
    # Two batches tell what grows with the batch; each more is a prediction for every number of devices.
    for batch in sorted({batches[0], batches[-1]}):
        curve = scale(
            device=f"{group.num_nodes}x{group.devices_per_node}x{group.device}",
            num_devices=numbers,
            batch_size=batch,
            intra=links.intra if max(numbers) > 1 else None,
            inter=links.inter if group.num_nodes > 1 else None,
            **options,
        )
        for point in curve.points:
            step = point.step_time_s
            spreads.append(log(max(step.high / step.value, 1.0)) / _FROM_90_PERCENT)
            if point.num_devices > 1:
                points.append(
                    StepPoint(
                        num_devices=point.num_devices,
                        num_nodes=point.num_nodes,
                        batch_size_per_device=float(batch),
                        step_time_s=step.value,
                    )
                )
    return points, max(spreads)
