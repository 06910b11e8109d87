"""Optimus in its own setting: workers and parameter servers, the measured speeds of its authors, its baselines.

Its placement beside first fit, and its assignment of parameters beside MXNet's rule.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

from forerun.adapters.classics.server_models import SynchronousServerSpeed
from forerun.base.errors import InvalidSetupError
from forerun.base.units import GIB
from forerun.jobs.scheduling.job import (
    Allocation,
    NodeGroup,
    ScheduledJob,
    ServerTraining,
    SharedCluster,
    TaskDemand,
)
from forerun.jobs.scheduling.outcome import ScheduleMetrics
from forerun.jobs.scheduling.placement import Placement, Placer, first_fit, pack
from forerun.jobs.scheduling.policy import find_policy
from forerun.jobs.scheduling.running_job import ForecastError
from forerun.jobs.scheduling.simulation import SimulationOptions, simulate
from studies.tables.public import public_table

SERVER_CLUSTER = SharedCluster(
    groups=(
        NodeGroup(
            device="gpu",
            num_nodes=13,
            devices_per_node=2,
            cpu_cores_per_node=16,
            memory_bytes_per_node=48 * GIB,
        ),
    )
)
"""Thirteen servers as in the paper's testbed; cores, memory and GPUs of a node as in the authors' code.

Source: Peng et al. 2018, section 6.1; pengyanghua/optimus, scheduler/params.py.
"""

NUM_JOBS, ARRIVALS_S, INTERVAL_S = 60, 12_000.0, 600.0
"""Source: pengyanghua/optimus, scheduler/params.py: 60 jobs in 20 slots of 600 s; the paper's 12,000 s."""

WORKER = TaskDemand(devices=1, cpu_cores=2, memory_bytes=8 * GIB)
SERVER = TaskDemand(devices=0, cpu_cores=3, memory_bytes=9 * GIB)
"""Source: pengyanghua/optimus, scheduler/jobrepo.py, the ResNet-50 job."""

RESTART_S = 30.0
NUM_FORECAST_POINTS = 10
EPOCHS = (3, 15)
"""Least and most epochs of a job: data sets were shrunk in the paper so that jobs end within hours; its own numbers
of epochs are not published. One epoch takes 100 to 300 s with one worker and one server."""

REQUEST = 4
"""Workers and servers that an owner asks for, for Tetris: the authors' jobs come without such a request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerModel:
    """One of the measured models.

    Attributes:
        name: Its name.
        batch_size: Global batch.
        steps_per_epoch: Steps of an epoch.
        actual: True training, fitted to all measured speeds.
        forecast: Training as forecast from ten of them.
    """

    name: str
    batch_size: float
    steps_per_epoch: float
    actual: ServerTraining
    forecast: ServerTraining


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerStudyRow:
    """One policy over all draws.

    Attributes:
        policy: Its name.
        metrics: By draw.
    """

    policy: str
    metrics: tuple[ScheduleMetrics, ...]

    @property
    def average_completion_s(self) -> float:
        """Mean over the draws [s]."""
        return float(np.mean([m.average_completion_s for m in self.metrics]))

    @property
    def makespan_s(self) -> float:
        """Mean over the draws [s]."""
        return float(np.mean([m.makespan_s for m in self.metrics]))


def read_server_models(folder: Path) -> list[ServerModel]:
    """The eight models of the authors' speed records.

    Raises:
        RecordError: A table is missing or lacks a column.
    """
    columns = [
        "model",
        "batch_size_total",
        "n_parameter_servers",
        "n_workers",
        "seconds_per_step",
        "failed_run",
    ]
    speeds = public_table(folder, "optimus_dl2_speed", columns)
    models = public_table(folder, "optimus_dl2_models", ["model", "steps_per_epoch"])
    found = []
    for number, row in enumerate(models.itertuples()):
        own = speeds[(speeds.model == row.model) & ~speeds.failed_run]
        rows = (
            own.n_workers.to_numpy(),
            own.n_parameter_servers.to_numpy(),
            1 / own.seconds_per_step.to_numpy(),
        )
        chosen = np.random.default_rng(number).choice(len(own), NUM_FORECAST_POINTS, replace=False)
        batch = float(own.batch_size_total.iloc[0])
        actual = ServerTraining(speed=fit_server_speed(*rows), batch_size=batch, worker=WORKER, server=SERVER)
        forecast = replace(actual, speed=fit_server_speed(*(column[chosen] for column in rows)))
        found.append(
            ServerModel(
                name=str(row.model),
                batch_size=batch,
                steps_per_epoch=float(str(row.steps_per_epoch)),
                actual=actual,
                forecast=forecast,
            )
        )
    return found


def draw_server_jobs(
    models: Sequence[ServerModel], seed: int
) -> tuple[list[ScheduledJob], dict[str, ScheduledJob]]:
    """Jobs as forecast and as they are: models and epochs uniform, arrivals uniform over the span of the paper."""
    chance = np.random.default_rng(seed)
    known, actual = [], {}
    for number in range(NUM_JOBS):
        model = models[int(chance.integers(len(models)))]
        epochs = float(chance.uniform(*EPOCHS))
        job = ScheduledJob(
            name=f"{model.name}-{number}",
            training=model.actual,
            work_samples=epochs * model.steps_per_epoch * model.batch_size,
            num_workers=REQUEST,
            num_servers=REQUEST,
            arrival_s=float(chance.uniform(0, ARRIVALS_S)),
            restart_s=RESTART_S,
        )
        actual[job.name] = job
        known.append(replace(job, training=model.forecast))
    return known, actual


def server_study(
    folder: Path,
    num_nodes: int = 13,
    num_draws: int = 8,
    policies: Sequence[str] = ("optimus", "tetris", "drf", "normalised"),
) -> list[ServerStudyRow]:
    """Each policy on the same draws, with the same placement: only the allocation differs.

    Forecast speeds come from ten measurements; remaining work is off by a lognormal factor of 20 %, the size of the
    error that the paper reports for its own forecasts.

    Args:
        folder: Folder of the public tables.
        num_nodes: Machines; 13 in the paper.
        num_draws: Draws of 60 jobs.
        policies: Names of the policies.
    """
    cluster = SharedCluster(groups=(replace(SERVER_CLUSTER.groups[0], num_nodes=num_nodes),))
    models = read_server_models(folder)
    error = ForecastError(work=0.2)
    rows: dict[str, list[ScheduleMetrics]] = {name: [] for name in policies}
    for seed in range(num_draws):
        known, actual = draw_server_jobs(models, seed)
        options = SimulationOptions(round_s=INTERVAL_S, seed=seed, error=error)
        for name in policies:
            outcome = simulate(known, cluster, find_policy(name), options, actual)
            rows[name].append(outcome.metrics)
    return [ServerStudyRow(policy=name, metrics=tuple(metrics)) for name, metrics in rows.items()]


def ratios(rows: Sequence[ServerStudyRow]) -> Mapping[str, tuple[float, float]]:
    """Average completion and makespan of each policy over those of Optimus."""
    optimus = next(row for row in rows if row.policy == "optimus")
    return {
        row.policy: (
            row.average_completion_s / optimus.average_completion_s,
            row.makespan_s / optimus.makespan_s,
        )
        for row in rows
    }


def fit_server_speed(
    num_workers: npt.ArrayLike, num_servers: npt.ArrayLike, steps_per_s: npt.ArrayLike
) -> SynchronousServerSpeed:
    """Optimus' five coefficients by non-negative least squares on the relative error of the step time.

    Args:
        num_workers: Workers of each measurement.
        num_servers: Its servers.
        steps_per_s: Measured speeds, above zero.

    Raises:
        InvalidSetupError: There is no point, or a speed is not above zero.
    """
    w, p = np.asarray(num_workers, dtype=float), np.asarray(num_servers, dtype=float)
    speed = np.asarray(steps_per_s, dtype=float)
    if not speed.size or not np.all(np.isfinite(speed) & (speed > 0)):
        raise InvalidSetupError(
            "expected measured speeds above zero for workers and servers, got none or others"
        )
    columns = np.stack([1 / w, np.ones_like(w), w / p, w, p], axis=1)
    found, _ = nnls(columns * speed[:, None], np.ones_like(speed))
    return SynchronousServerSpeed(tuple(found.tolist()))


NUM_SERVERS_PUBLISHED = 10
_MODEL_BYTES, _LINK_BYTES_PER_S = 102.2e6, 125e6
_NUM_DRAWS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementResult:
    """Figures of both comparisons.

    Attributes:
        transfer_s: Mean time to exchange the parameters of ResNet-50 once over 1 Gbit/s [s], by placement.
        nodes: Mean nodes of a job, by placement.
        blocks: Balance of ResNet-50's parameters on ten servers, by rule.
    """

    transfer_s: Mapping[str, float]
    nodes: Mapping[str, float]
    blocks: Mapping[str, BlockBalance]


def placement_study() -> PlacementResult:
    """Both comparisons; seconds."""
    placers: dict[str, Placer] = {"fewest nodes, even spread": pack, "first fit": first_fit}
    means = {name: _placed(placer) for name, placer in placers.items()}
    sizes = resnet50_blocks()
    return PlacementResult(
        transfer_s={name: transfer for name, (transfer, _) in means.items()},
        nodes={name: nodes for name, (_, nodes) in means.items()},
        blocks={
            "balanced (Optimus)": balance(assign_blocks(sizes, NUM_SERVERS_PUBLISHED)),
            "threshold (MXNet)": balance(assign_by_threshold(sizes, NUM_SERVERS_PUBLISHED)),
        },
    )


def _placed(placer: Placer) -> tuple[float, float]:
    """Mean transfer time and nodes of the jobs of all draws: six jobs of 2 to 5 workers and servers on 13 nodes."""
    group = NodeGroup(device="gpu", num_nodes=13, devices_per_node=2, cpu_cores_per_node=16)
    cluster = SharedCluster(groups=(group,))
    speed = SynchronousServerSpeed((1.0, 0.0, 0.0, 0.0, 0.0))
    worker, server = TaskDemand(devices=1, cpu_cores=2), TaskDemand(devices=0, cpu_cores=3)
    training = ServerTraining(speed=speed, batch_size=32, worker=worker, server=server)
    chance = np.random.default_rng(0)
    times, nodes = [], []
    for _ in range(_NUM_DRAWS):
        sizes = chance.integers(2, 6, size=(6, 2))
        names = [f"job-{number}" for number in range(6)]
        jobs = {name: ScheduledJob(name=name, training=training, work_samples=1.0) for name in names}
        given = {name: Allocation("gpu", int(w), int(p)) for name, (w, p) in zip(names, sizes, strict=True)}
        for placement in placer(cluster, jobs, given, {}).values():
            times.append(transfer_time_s(placement, _MODEL_BYTES, _LINK_BYTES_PER_S))
            nodes.append(len(placement))
    return float(np.mean(times)), float(np.mean(nodes))


def resnet50_blocks() -> list[int]:
    """Parameters of each tensor of ResNet-50 with 1,000 classes: convolutions, normalisations, the last layer.

    Source: He et al. 2015, arXiv 1512.03385, table 1; 25.6 million in 161 tensors.
    """
    sizes = [7 * 7 * 3 * 64, 64, 64]
    channels_in = 64
    for width, depth in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(depth):
            out = 4 * width
            convolutions = [(channels_in * width, width), (9 * width * width, width), (width * out, out)]
            if block == 0:
                convolutions.append((channels_in * out, out))
            for weights, normalised in convolutions:
                sizes += [weights, normalised, normalised]
            channels_in = out
    return [*sizes, channels_in * 1000, 1000]


def transfer_time_s(placement: Placement, model_bytes: float, bandwidth_bytes_per_s: float) -> float:
    """Time to exchange all parameters once between servers and workers on different nodes [s].

    Node i holds w_i of w workers and p_i of p servers, each server S / p of the model. Its servers send to the
    workers elsewhere, its workers receive from the servers elsewhere, and the slowest node decides:

        t = max_i max( p_i * S / p * (w - w_i), w_i * S / p * (p - p_i) ) / bandwidth

    The way back takes as long and is left out, and so are collisions inside the network.

    Args:
        placement: Nodes of workers and servers.
        model_bytes: Size of the model S [bytes].
        bandwidth_bytes_per_s: Bandwidth of a node's link, each way [bytes/s].

    Source: Peng et al. 2018, "Optimus", EuroSys, proof of theorem 1, with the link shared by the tasks of a node.
    """
    w = sum(share.num_workers for share in placement)
    p = sum(share.num_servers for share in placement)
    part = model_bytes / p
    most = max(
        max(s.num_servers * part * (w - s.num_workers), s.num_workers * part * (p - s.num_servers))
        for s in placement
    )
    return most / bandwidth_bytes_per_s


SMALL_SHARE = 0.01
"""Blocks below this share of a server's average size are counted, not weighed. Source: Optimus, section 5.3."""

MXNET_THRESHOLD = 1_000_000
"""Parameters from which MXNet splits a block over all servers, ``MXNET_KVSTORE_BIGARRAY_BOUND``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockBalance:
    """Evenness of an assignment.

    Attributes:
        size_gap: Largest less smallest number of parameters of a server.
        request_gap: Largest less smallest number of requests (blocks or slices) of a server.
        num_requests: Requests of all servers in a step.
    """

    size_gap: int
    request_gap: int
    num_requests: int


def assign_blocks(sizes: Sequence[int], num_servers: int) -> list[list[int]]:
    """Sizes of the blocks, or slices of them, that each server holds.

    In order of size, largest first: a block above the average of a server is sliced to that size; one above 1 % of
    the average goes to the server with the least room that is enough (best fit); a smaller one to the server with
    the fewest requests.

    Args:
        sizes: Parameters of each block of the model.
        num_servers: Servers.

    Returns:
        For each server the sizes it holds; together they are all parameters.

    Raises:
        InvalidSetupError: There is no block or server, or a size is not above zero.

    Source: Peng et al. 2018, "Optimus", EuroSys, section 5.3.
    """
    _check(sizes, num_servers)
    average = -(-sum(sizes) // num_servers)
    held: list[list[int]] = [[] for _ in range(num_servers)]
    room = [average] * num_servers
    for size in sorted((part for block in sizes for part in _slices(block, average)), reverse=True):
        if size < SMALL_SHARE * average:
            chosen = min(range(num_servers), key=lambda i: (len(held[i]), -room[i]))
        else:
            fitting = [i for i in range(num_servers) if room[i] >= size]
            chosen = min(fitting, key=lambda i: (room[i], i)) if fitting else room.index(max(room))
        held[chosen].append(size)
        room[chosen] -= size
    return held


def _slices(block: int, average: int) -> list[int]:
    whole, rest = divmod(block, average)
    return [average] * whole + ([rest] if rest else [])


def assign_by_threshold(sizes: Sequence[int], num_servers: int) -> list[list[int]]:
    """MXNet's rule: a block above the threshold is cut into equal parts for all servers, others go to a random one.

    Source: Optimus, section 5.3, on MXNet's default; ``kvstore`` documentation of MXNet.
    """
    _check(sizes, num_servers)
    chance = random.Random(0)
    held: list[list[int]] = [[] for _ in range(num_servers)]
    for size in sizes:
        if size < MXNET_THRESHOLD:
            held[chance.randrange(num_servers)].append(size)
            continue
        for i in range(num_servers):
            held[i].append(size * (i + 1) // num_servers - size * i // num_servers)
    return held


def balance(held: Sequence[Sequence[int]]) -> BlockBalance:
    """Evenness of sizes and requests."""
    sizes, requests = [sum(blocks) for blocks in held], [len(blocks) for blocks in held]
    return BlockBalance(
        size_gap=max(sizes) - min(sizes),
        request_gap=max(requests) - min(requests),
        num_requests=sum(requests),
    )


def _check(sizes: Sequence[int], num_servers: int) -> None:
    if num_servers < 1 or not sizes or min(sizes) < 1:
        raise InvalidSetupError(
            f"expected at least one server and blocks of at least one parameter, got {num_servers} servers and sizes "
            f"{list(sizes)[:5]}"
        )
