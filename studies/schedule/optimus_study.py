"""Optimus in its own setting: workers and parameter servers, the measured speeds of its authors, its baselines.

The package schedules devices; the rules for two kinds of tasks stand here, as the paper has them. Its placement is
set beside first fit, and its assignment of parameters beside MXNet's rule.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from forerun.adapters.classics.server_models import synchronous_terms
from forerun.base.numerics import relative_coefficients
from forerun.jobs.scheduling.marginal_gain import YOUNG_FACTOR, YOUNG_PROGRESS
from studies.tables.public import public_table

Floats = npt.NDArray[np.float64]

WORKER, SERVER, NODE = np.array((1.0, 2.0, 8.0)), np.array((0.0, 3.0, 9.0)), np.array((2.0, 16.0, 48.0))
"""GPUs, processor cores and memory [GiB] of a worker, a server and a node.

Source: pengyanghua/optimus, scheduler/jobrepo.py, the ResNet-50 job, and scheduler/params.py.
"""

NUM_JOBS, ARRIVALS_S, INTERVAL_S = 60, 12_000.0, 600.0
"""Source: pengyanghua/optimus, scheduler/params.py: 60 jobs in 20 slots of 600 s; the paper's 12,000 s."""

RESTART_S = 30.0
NUM_FORECAST_POINTS = 10
EPOCHS = (3, 15)
"""Least and most epochs of a job: data sets were shrunk in the paper so that jobs end within hours; its own numbers
of epochs are not published. One epoch takes 100 to 300 s with one worker and one server."""

WORK_ERROR = 0.2
"""Spread (lognormal) of the error that the paper reports for its own forecasts of the remaining work."""


class Tasks(NamedTuple):
    """Workers and servers: of a job, or of its part on one node."""

    workers: int
    servers: int

    def plus(self, other: Tasks) -> Tasks:
        """Both together."""
        return Tasks(self.workers + other.workers, self.servers + other.servers)

    @property
    def need(self) -> Floats:
        """GPUs, processor cores and memory [GiB]."""
        found: Floats = self.workers * WORKER + self.servers * SERVER
        return found


NONE, PAIR, REQUEST = Tasks(0, 0), Tasks(1, 1), Tasks(4, 4)
"""A job that waits, the least that runs, and what an owner asks for, which the authors' jobs lack and Tetris needs."""


def step_s(coefficients: Floats, tasks: Tasks) -> float:
    """Time of a step, t0 / w + t1 + t2 w / p + t3 w + t4 p with w workers and p servers [s].

    Source: Peng et al. 2018, "Optimus", EuroSys, equation 4.
    """
    return float(coefficients @ synchronous_terms(*tasks))


@dataclass(slots=True, kw_only=True, eq=False)
class ServerJob:
    """A job, and how far it is.

    Attributes:
        actual, forecast: Coefficients of Optimus' step, in truth and as a rule is told [s].
        num_steps: Steps to the end.
        arrival_s: Its arrival [s].
        work_factor: Error of the steps left as a rule is told.
    """

    actual: Floats
    forecast: Floats
    num_steps: float
    arrival_s: float = 0.0
    work_factor: float = 1.0
    tasks: Tasks = NONE
    done_steps: float = 0.0
    pause_s: float = 0.0
    worker_s: float = 0.0
    end_s: float = inf

    def remaining_s(self, tasks: Tasks) -> float:
        """Forecast of the time to the end [s]."""
        # A job that outlives its forecast is told to be nearly done, never done.
        left = max(self.num_steps - self.done_steps, 0.01 * self.num_steps)
        return left * self.work_factor * step_s(self.forecast, tasks)

    def run(self, time_s: float) -> None:
        """Lets it train for a time, after the rest of its restart."""
        paused_s = min(self.pause_s, time_s)
        self.pause_s -= paused_s
        self.done_steps += (time_s - paused_s) / step_s(self.actual, self.tasks)
        self.worker_s += time_s * self.tasks.workers


Rule = Callable[[Sequence[ServerJob], Floats, Floats], dict[ServerJob, Tasks]]
"""Tasks of each job: the jobs in the order of arrival, what is free, changed in place, and all there is."""


def _started(jobs: Sequence[ServerJob], free: Floats) -> dict[ServerJob, Tasks]:
    """One worker and one server for each in turn, while there is room."""
    given = {}
    for job in jobs:
        if np.all(PAIR.need <= free):
            free -= PAIR.need
            given[job] = PAIR
    return given


def _grown(
    jobs: Sequence[ServerJob], free: Floats, capacity: Floats, scale: Callable[[ServerJob], float]
) -> dict[ServerJob, Tasks]:
    """Each task where it saves most of the remaining time, scaled, per dominant share.

    Source: Peng et al. 2018, "Optimus", EuroSys, section 4.1.
    """
    given = _started(jobs, free)
    shares = {task: float(np.max(task.need / capacity)) for task in (Tasks(0, 1), Tasks(1, 0))}

    def gains(job: ServerJob) -> dict[Tasks, float]:
        now_s = job.remaining_s(given[job])
        return {
            task: scale(job) * (now_s - job.remaining_s(given[job].plus(task))) / share
            for task, share in shares.items()
        }

    # Only the gains of a job that got a task change.
    offers = {job: gains(job) for job in given}
    while True:
        fitting = [task for task in shares if np.all(task.need <= free)]
        found = [(job, task) for job in offers for task in fitting if offers[job][task] > 0]
        if not found:
            return given
        job, task = max(found, key=lambda offer: offers[offer[0]][offer[1]])
        free -= task.need
        given[job] = given[job].plus(task)
        offers[job] = gains(job)


def _drf(jobs: Sequence[ServerJob], free: Floats, capacity: Floats) -> dict[ServerJob, Tasks]:
    """The smallest share grows first, whether it helps or not: as all tasks are alike, the fewest pairs."""
    given = _started(sorted(jobs, key=lambda job: job.worker_s), free)
    while given and np.all(PAIR.need <= free):
        free -= PAIR.need
        job = min(given, key=given.__getitem__)
        given[job] = given[job].plus(PAIR)
    return given


def _tetris(jobs: Sequence[ServerJob], free: Floats, capacity: Floats) -> dict[ServerJob, Tasks]:
    """As much of each request as fits, short jobs first: requests that are all alike are aligned alike."""
    given = _started(sorted(jobs, key=lambda job: job.remaining_s(REQUEST)), free)
    for job in given:
        while given[job] < REQUEST and np.all(PAIR.need <= free):
            free -= PAIR.need
            given[job] = given[job].plus(PAIR)
    return given


RULES: dict[str, Rule] = {
    "optimus": partial(
        _grown, scale=lambda job: YOUNG_FACTOR if job.done_steps < YOUNG_PROGRESS * job.num_steps else 1.0
    ),
    "tetris": _tetris,
    "drf": _drf,
    "normalised": partial(_grown, scale=lambda job: 1 / job.remaining_s(PAIR)),
}


def run_jobs(jobs: Sequence[ServerJob], capacity: Floats, rule: Rule) -> None:
    """Lets all jobs run to their ends, which stand in them.

    All are shared out anew in each interval, between which only those that wait are given what is free. Tasks are
    counted over all nodes, not placed.
    """
    now_s = round_s = 0.0
    while waiting_s := [job.arrival_s for job in jobs if job.end_s == inf]:
        now_s = max(now_s, min(waiting_s))
        active = [job for job in jobs if job.arrival_s <= now_s and job.end_s == inf]
        is_round = now_s >= round_s
        if is_round:
            round_s = (now_s // INTERVAL_S + 1) * INTERVAL_S
        asked = [job for job in active if is_round or job.tasks == NONE]
        free = capacity - sum((job.tasks.need for job in active if job not in asked), start=np.zeros(3))
        given = rule(asked, free, capacity)
        for job in asked:
            tasks = given.get(job, NONE)
            if tasks != job.tasks:
                job.tasks, job.pause_s = tasks, RESTART_S
        running = [job for job in active if job.tasks != NONE]
        ends_s = {
            job: now_s + job.pause_s + (job.num_steps - job.done_steps) * step_s(job.actual, job.tasks)
            for job in running
        }
        coming_s = [job.arrival_s for job in jobs if job.arrival_s > now_s]
        next_s = min(round_s, *coming_s, *ends_s.values())
        for job in running:
            job.run(next_s - now_s)
            if ends_s[job] <= next_s:
                job.end_s = next_s
        now_s = next_s


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerStudyRow:
    """One rule, means over the draws.

    Attributes:
        policy: Its name.
        average_completion_s: From arrival to end [s].
        makespan_s: From the first arrival to the last end [s].
    """

    policy: str
    average_completion_s: float
    makespan_s: float


def read_server_models(folder: Path) -> list[ServerJob]:
    """One epoch of each of the eight models of the authors' speed records.

    Raises:
        RecordError: A table is missing or lacks a column.
    """
    sizes = ["n_workers", "n_parameter_servers"]
    speeds = public_table(folder, "optimus_dl2_speed", [*sizes, "model", "seconds_per_step", "failed_run"])
    models = public_table(folder, "optimus_dl2_models", ["model", "steps_per_epoch"])
    found = []
    for number, row in enumerate(models.itertuples()):
        own = speeds[(speeds.model == row.model) & ~speeds.failed_run]
        few = own.iloc[np.random.default_rng(number).choice(len(own), NUM_FORECAST_POINTS, replace=False)]
        actual, forecast = (
            relative_coefficients(
                np.array([synchronous_terms(*tasks) for tasks in some[sizes].itertuples(index=False)]),
                some.seconds_per_step.to_numpy(),
            )
            for some in (own, few)
        )
        found.append(ServerJob(actual=actual, forecast=forecast, num_steps=float(str(row.steps_per_epoch))))
    return found


def draw_server_jobs(models: Sequence[ServerJob], seed: int) -> list[ServerJob]:
    """Jobs by arrival: models and epochs uniform, arrivals uniform over the span of the paper."""
    chance = np.random.default_rng(seed)
    drawn = []
    for _ in range(NUM_JOBS):
        model = models[int(chance.integers(len(models)))]
        num_steps = float(chance.uniform(*EPOCHS)) * model.num_steps
        drawn.append(replace(model, num_steps=num_steps, arrival_s=float(chance.uniform(0, ARRIVALS_S))))
    drawn.sort(key=lambda job: job.arrival_s)
    for number, job in enumerate(drawn):
        job.work_factor = float(np.exp(WORK_ERROR * np.random.default_rng([seed, number]).standard_normal()))
    return drawn


def server_study(folder: Path, num_nodes: int = 13, num_draws: int = 8) -> list[ServerStudyRow]:
    """Each rule on the same draws of 60 jobs; forecast speeds come from ten measurements.

    Args:
        folder: Folder of the public tables.
        num_nodes: Machines; 13 in the paper.
        num_draws: Draws.
    """
    models = read_server_models(folder)
    rows = []
    for name, rule in RULES.items():
        draws = [draw_server_jobs(models, seed) for seed in range(num_draws)]
        for jobs in draws:
            run_jobs(jobs, num_nodes * NODE, rule)
        rows.append(
            ServerStudyRow(
                policy=name,
                average_completion_s=float(np.mean([j.end_s - j.arrival_s for jobs in draws for j in jobs])),
                makespan_s=float(np.mean([max(j.end_s for j in jobs) - jobs[0].arrival_s for jobs in draws])),
            )
        )
    return rows


def ratios(rows: Sequence[ServerStudyRow]) -> Mapping[str, tuple[float, float]]:
    """Average completion and makespan of each policy over those of Optimus, the first."""
    first = rows[0]
    return {
        row.policy: (row.average_completion_s / first.average_completion_s, row.makespan_s / first.makespan_s)
        for row in rows
    }


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
    placers = {"fewest nodes, even spread": even_spread, "first fit": first_fit}
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


def _placed(placer: Callable[[Floats, Tasks], dict[int, Tasks]]) -> tuple[float, float]:
    """Mean transfer time and nodes of the jobs of all draws: six jobs of 2 to 5 workers and servers on 13 nodes."""
    chance = np.random.default_rng(0)
    times, nodes = [], []
    for _ in range(_NUM_DRAWS):
        # Memory is left out: only GPUs and cores are short on nodes with few tasks.
        free = np.tile(NODE * (1.0, 1.0, inf), (13, 1))
        jobs = [Tasks(int(w), int(p)) for w, p in chance.integers(2, 6, size=(6, 2))]
        # Small jobs first, as in the paper; first fit takes them as they come.
        for tasks in sorted(jobs, key=sum) if placer is even_spread else jobs:
            if shares := placer(free, tasks):
                for node, share in shares.items():
                    free[node] -= share.need
                times.append(transfer_time_s(list(shares.values()), _MODEL_BYTES, _LINK_BYTES_PER_S))
                nodes.append(len(shares))
    return float(np.mean(times)), float(np.mean(nodes))


def even_spread(free: Floats, tasks: Tasks) -> dict[int, Tasks]:
    """The fewest nodes, those with most free cores, that hold an even split; without room for one, first fit.

    With equal nodes the time to exchange parameters is then shortest: each task has the most partners on its own node,
    where nothing crosses the network.

    Source: Peng et al. 2018, "Optimus", EuroSys, theorem 1 and section 4.2.
    """
    emptiest = np.argsort(-free[:, 1], kind="stable").tolist()
    for k in range(1, 1 + min(max(tasks), len(emptiest))):
        shares = {
            node: Tasks(
                tasks.workers // k + (i < tasks.workers % k),
                # Servers left over go where workers are fewer.
                tasks.servers // k + (k - 1 - i < tasks.servers % k),
            )
            for i, node in enumerate(emptiest[:k])
        }
        if all(np.all(share.need <= free[node]) for node, share in shares.items()):
            return shares
    return first_fit(free, tasks)


def first_fit(free: Floats, tasks: Tasks) -> dict[int, Tasks]:
    """Each task on the first node with room, workers first; by node, empty where one has none."""
    shares: dict[int, Tasks] = {}
    for one, number in ((Tasks(1, 0), tasks.workers), (Tasks(0, 1), tasks.servers)):
        for _ in range(number):
            for node, room in enumerate(free):
                more = shares.get(node, NONE).plus(one)
                if np.all(more.need <= room):
                    shares[node] = more
                    break
            else:
                return {}
    return shares


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


def transfer_time_s(placement: Sequence[Tasks], model_bytes: float, bandwidth_bytes_per_s: float) -> float:
    """Time to exchange all parameters once between servers and workers on different nodes [s].

    Node i holds w_i of w workers and p_i of p servers, each server S / p of the model. Its servers send to the
    workers elsewhere, its workers receive from the servers elsewhere, and the slowest node decides:

        t = max_i max( p_i * S / p * (w - w_i), w_i * S / p * (p - p_i) ) / bandwidth

    The way back takes as long and is left out, and so are collisions inside the network.

    Args:
        placement: Workers and servers of each node.
        model_bytes: Size of the model S [bytes].
        bandwidth_bytes_per_s: Bandwidth of a node's link, each way [bytes/s].

    Source: Peng et al. 2018, "Optimus", EuroSys, proof of theorem 1, with the link shared by the tasks of a node.
    """
    w, p = sum(share.workers for share in placement), sum(share.servers for share in placement)
    part = model_bytes / p
    most = max(max(s.servers * part * (w - s.workers), s.workers * part * (p - s.servers)) for s in placement)
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

    Source: Peng et al. 2018, "Optimus", EuroSys, section 5.3.
    """
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
