"""Optimus in its own setting: workers and parameter servers, the measured speeds of its authors, its baselines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

from forerun.adapters.classics.server_models import SynchronousServerSpeed
from forerun.base.errors import InvalidSetupError
from forerun.base.units import GIB
from forerun.jobs.scheduling.job import NodeGroup, ScheduledJob, ServerTraining, SharedCluster, TaskDemand
from forerun.jobs.scheduling.outcome import ScheduleMetrics
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
