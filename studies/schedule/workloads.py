"""Workloads of 160 jobs: arrivals and sizes of the Philly trace, applications, requests and speeds of Pollux' jobs.

And jobs of one size on unlike devices, with speeds that Gavel measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd

from forerun.jobs.scheduling.job import DataParallelTraining, ScheduledJob
from forerun.jobs.scheduling.speed import ScaledSpeed, SpeedModel
from studies.schedule.applications import RESTART_S, Application, RecordedEfficiency
from studies.tables.public import public_table

NUM_WORKLOAD_JOBS = 160
WINDOW_HOURS = 8
_HOUR_S = 3600.0
_DAY_S = 24 * _HOUR_S
_LONGEST_DEVICE_H = 1000.0
_SHORTEST_S = 60.0

_CLASSES_H = (1.0, 10.0, 100.0)
_CLASS_APPLICATIONS = (("cifar10", "ncf"), ("deepspeech2", "bert"), ("yolov3",), ("imagenet",))
"""Small, medium, large, extra large by GPU hours.

Source: Qiao et al. 2021, "Pollux", table 1; the halves of medium as in Sia's artifact.
"""

HELIOS_SHARES = {"cifar10": 1314, "yolov3": 70, "deepspeech2": 100, "bert": 70, "imagenet": 46}
"""Jobs of each application among 1,600 of Helios' cluster Saturn. Source: siasosp23/artifacts, sia-simulator."""

_REQUEST_EFFICIENCY = (0.5, 0.8)
_LONGEST_ASKED_S = 12 * 3600.0
_MOST_ASKED = 24
"""Requests are drawn among even numbers of devices with this share of the ideal speedup that end in time. Source:
Pollux, section 5.1, "tuned jobs"; the limits are those of Sia's artifact."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Jobs of one draw.

    Attributes:
        seed: Seed of the draw.
        actual: The true jobs by name, which only an oracle knows.
        forecast: The jobs as a scheduler knows them from a few measurements and the curves so far.
    """

    seed: int
    actual: Mapping[str, ScheduledJob]
    forecast: Mapping[str, ScheduledJob]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastError:
    """Spread of lognormal factors on what a policy is told.

    Attributes:
        speed: Standard deviation of the logarithm of the factor on speeds. Half of its variance is one draw per job,
            the other half a draw for each number of devices, so that both the level and the gains are wrong.
        work: The same for the remaining work, one draw per job that stays to its end.
    """

    speed: float = 0.0
    work: float = 0.0

    def told(self, jobs: Sequence[ScheduledJob], seed: int) -> list[ScheduledJob]:
        """The jobs as a policy is told; the same for the same seed, so that every policy meets the same errors."""
        ordered = sorted(jobs, key=lambda job: job.arrival_s)
        return [self._told(job, [seed, number]) for number, job in enumerate(ordered)]

    def _told(self, job: ScheduledJob, seed: list[int]) -> ScheduledJob:
        work, level = np.random.default_rng(seed).standard_normal(2)
        speeds: dict[str, SpeedModel] = {}
        for i, (kind, model) in enumerate(job.training.speeds.items(), start=1):
            # Clusters of the studies have fewer devices of a kind; the last factor holds beyond.
            draws = level + np.random.default_rng([*seed, i]).standard_normal(257)
            speeds[kind] = ScaledSpeed(model, tuple(np.exp(self.speed / np.sqrt(2) * draws).tolist()))
        factor, left = float(np.exp(self.work * work)), job.forecast or (lambda done: job.work_samples - done)

        def told(done: float) -> float:
            # A job that outlives its forecast is told to be nearly done, never done.
            return factor * max(left(done), 0.01 * job.work_samples)

        training = replace(job.training, speeds=speeds) if self.speed else job.training
        return replace(job, training=training, forecast=told if self.work else job.forecast)


def read_philly(folder: Path) -> pd.DataFrame:
    """Submissions of at least a minute and less than 1,000 GPU hours, with seconds since the first.

    Raises:
        RecordError: The table is missing or lacks a column.
    """
    frame = public_table(folder, "cluster_traces", ["submit_or_start_time", "duration_s", "gpu_seconds"])
    kept = frame[(frame.duration_s >= _SHORTEST_S) & (frame.gpu_seconds < _LONGEST_DEVICE_H * _HOUR_S)]
    kept = kept.sort_values("submit_or_start_time", kind="stable").reset_index(drop=True)
    since = kept.submit_or_start_time - kept.submit_or_start_time.iloc[0].normalize()
    return kept.assign(time_s=since.dt.total_seconds())


def draw_workload(
    philly: pd.DataFrame,
    applications: Mapping[str, Application],
    seed: int,
    *,
    kind: str,
    devices_per_node: int,
    num_jobs: int = NUM_WORKLOAD_JOBS,
    shares: Mapping[str, float] | None = None,
) -> Workload:
    """One workload.

    Arrivals are times of day drawn from the busiest eight hours of all days together. Sizes are drawn from the whole
    trace, whose shares of small to extra large jobs (75, 19, 5 and 2 %) are close to those that Pollux publishes. The
    size class gives the application, unless ``shares`` of applications are given; the application's own scaling the
    request.
    """
    chance = np.random.default_rng([seed, num_jobs])
    arrivals = _arrivals(philly, chance, num_jobs)
    hours = chance.choice(philly.gpu_seconds.to_numpy() / _HOUR_S, num_jobs, replace=False)
    weights = np.asarray(list((shares or {}).values()), dtype=float)
    weights /= weights.sum() if shares else 1.0
    actual, forecast = {}, {}
    for number, (arrival_s, device_h) in enumerate(zip(arrivals, hours, strict=True)):
        names = _CLASS_APPLICATIONS[int(np.digitize(device_h, _CLASSES_H))]
        chosen = chance.choice(list(shares), p=weights) if shares else names[chance.integers(len(names))]
        application = applications[chosen]
        requests = _requests(application, kind, devices_per_node)
        num_devices, batch = requests[int(chance.integers(len(requests)))]
        name = f"{application.name}-{number}"
        actual[name], forecast[name] = _jobs(application, name, arrival_s, num_devices, batch)
    return Workload(seed=seed, actual=actual, forecast=forecast)


def _arrivals(philly: pd.DataFrame, chance: np.random.Generator, num_jobs: int) -> list[float]:
    """Arrivals from the busiest hours, ascending from 0 [s]."""
    window = _busiest(philly.time_s.to_numpy() % _DAY_S)
    drawn = np.sort(chance.choice(window, num_jobs, replace=False))
    return [float(time_s) for time_s in drawn - drawn[0]]


def _busiest(clock_s: np.ndarray) -> np.ndarray:
    """Times of day within the eight hours, beginning on a full hour, with most submissions."""
    begins = _HOUR_S * np.arange(0, 25 - WINDOW_HOURS)
    windows = [clock_s[(clock_s >= b) & (clock_s < b + WINDOW_HOURS * _HOUR_S)] for b in begins]
    return max(windows, key=len)


@cache
def _requests(application: Application, kind: str, devices_per_node: int) -> Sequence[tuple[int, float]]:
    """Numbers of devices with a fitting share of the ideal speedup that end within twelve hours, and their best batch.

    Where none is, the most devices if all scale better than that, or else one.
    """
    low, high = _REQUEST_EFFICIENCY
    alone_s, batch = _fastest(application, kind, 1, devices_per_node)
    found: list[tuple[int, float]] = []
    shares = []
    for n in range(2, _MOST_ASKED + 1, 2):
        time_s, batch_of_n = _fastest(application, kind, n, devices_per_node)
        shares.append(alone_s / time_s / n)
        if low < shares[-1] < high and time_s < _LONGEST_ASKED_S:
            found.append((n, batch_of_n))
    if not found and min(shares) >= high:
        return [(_MOST_ASKED, _fastest(application, kind, _MOST_ASKED, devices_per_node)[1])]
    return found or [(1, batch)]


def _fastest(
    application: Application, kind: str, num_devices: int, devices_per_node: int
) -> tuple[float, float]:
    """Time of the whole job at its best recorded batch [s], and this batch."""
    speed, worth = application.actual.speeds[kind], application.actual.efficiency
    assert isinstance(worth, RecordedEfficiency)
    num_nodes = -(-num_devices // devices_per_node)
    times = []
    for log_batch, row in zip(worth.log_batches, worth.worth, strict=True):
        batch = float(np.exp(log_batch))
        rate = speed(num_devices, num_nodes, batch)
        time_s = application.work_samples / rate * float(np.mean(1 / np.asarray(row))) if rate > 0 else np.inf
        times.append((time_s, batch))
    return min(times)


def _jobs(
    application: Application, name: str, arrival_s: float, num_devices: int, batch: float
) -> tuple[ScheduledJob, ScheduledJob]:
    """A job as it is and as a scheduler knows it."""
    actual = ScheduledJob(
        name=name,
        training=_actual_training(application, batch),
        work_samples=application.work_samples,
        num_workers=num_devices,
        arrival_s=arrival_s,
        restart_s=RESTART_S[application.name],
    )
    known = _known_training(application, batch)
    return actual, replace(actual, training=known, forecast=application.forecast)


# Jobs of one application at one batch share their training, so that what is computed for it is kept once.
_actual_training, _known_training = cache(Application.actual_training), cache(Application.forecast_training)

GAVEL_CLUSTER = "6x4xk80+6x4xp100+6x4xv100"
"""24 devices of each of the three kinds that the table knows, in nodes of four."""

GAVEL_ROUND_S = 360.0
"""Source: Narayanan et al. 2020, "Gavel", OSDI, section 7.1: rounds of six minutes."""

_KINDS = {"NVIDIA K80": "k80", "NVIDIA P100": "p100", "NVIDIA V100": "v100"}
_SIZES, _SHARES = (1, 2, 4, 8), (0.7, 0.1, 0.15, 0.05)
_SHORT_SHARE, _SHORT_MINUTES, _LONG_MINUTES = 0.8, (1.5, 3.0), (3.0, 4.0)
"""Sizes of jobs, and decimal logarithms of their minutes on V100.

Source: stanford-futuredata/gavel, scheduler/utils.py, ``_generate_scale_factor`` and ``_generate_duration``.
"""

_JOBS_PER_HOUR = 4.0
"""Enough that jobs queue: first come, first served, the median job takes forty hours instead of four."""

_PAI_MEDIAN_S, _PAI_MEAN_S = 23 * 60.0, 5039.0
"""Run times of jobs of Alibaba's PAI. Source of the mean: alibaba/clusterdata, cluster-trace-gpu-v2020/simulator, whose
log has completion less waiting; of the median: Weng et al. 2022, "MLaaS in the Wild", NSDI."""

_PAI_CONSTRAINED = 0.33
"""Share of the jobs that run on some kinds of devices only. Source: alibaba/clusterdata, cluster-trace-gpu-v2023."""

_PAI_JOBS_PER_HOUR = 40.0
"""Enough that jobs queue."""

_RESTART_S = 60.0


@dataclass(frozen=True, slots=True, eq=False)
class GavelSpeed:
    """Measured samples per second at one batch of a device.

    Attributes:
        packed: On as few nodes as possible, by number of devices [1/s].
        spread: On more nodes, where it was measured [1/s].
        devices_per_node: Devices of a node.
    """

    packed: Mapping[int, float]
    spread: Mapping[int, float]
    devices_per_node: int = 4

    def __call__(self, num_devices: int, num_nodes: int, batch_size: float) -> float:
        """Samples per second; zero on numbers of devices that were not measured."""
        is_packed = num_nodes <= -(-num_devices // self.devices_per_node)
        found = self.packed.get(num_devices, 0.0)
        return found if is_packed else self.spread.get(num_devices, found)


def read_gavel_speeds(folder: Path) -> dict[tuple[str, int], dict[str, GavelSpeed]]:
    """Speeds by model and batch of a device (0 where there is none), by kind of device.

    Raises:
        RecordError: The table is missing or lacks a column.
    """
    columns = ["source_file", "gpu", "placement", "model", "batch_size_per_gpu", "n_gpus", "steps_per_second"]
    frame = public_table(folder, "gavel_throughputs", columns)
    frame = frame[(frame.source_file == "simulation") & (frame.steps_per_second > 0)]
    frame = frame.assign(batch=frame.batch_size_per_gpu.fillna(0).astype(int))
    found: dict[tuple[str, int], dict[str, GavelSpeed]] = {}
    for (model, batch, gpu), rows in frame.groupby(["model", "batch", "gpu"]):
        packed, spread = (_by_devices(rows, name) for name in ("consolidated", "unconsolidated"))
        if packed:
            speed = GavelSpeed(packed, spread)
            found.setdefault((str(model), int(str(batch))), {})[_KINDS[str(gpu)]] = speed
    return {key: speeds for key, speeds in found.items() if len(speeds) == len(_KINDS)}


def _by_devices(rows: pd.DataFrame, placement: str) -> dict[int, float]:
    """Samples per second by number of devices; a model without a batch counts steps. One device is always packed."""
    chosen = rows[(rows.placement == placement) | (rows.n_gpus == 1)]
    batch = max(1, int(rows.batch.iloc[0]))
    return {
        int(str(n)): batch * float(v) for n, v in chosen.groupby("n_gpus").steps_per_second.mean().items()
    }


def draw_mixed_jobs(
    speeds: Mapping[tuple[str, int], Mapping[str, GavelSpeed]], seed: int, num_jobs: int = 200
) -> list[ScheduledJob]:
    """Jobs of one size each, arriving at random, that could run on every kind of device.

    A job's work is what a V100 does in its drawn duration, with as many devices as it asks for.
    """
    chance = np.random.default_rng([seed, num_jobs])

    def duration_s() -> float:
        minutes = _SHORT_MINUTES if chance.random() < _SHORT_SHARE else _LONG_MINUTES
        return float(60.0 * 10.0 ** chance.uniform(*minutes))

    return _drawn(speeds, chance, num_jobs, _JOBS_PER_HOUR, duration_s, 0.0)


def draw_pai_jobs(
    speeds: Mapping[tuple[str, int], Mapping[str, GavelSpeed]], seed: int, num_jobs: int = 200
) -> list[ScheduledJob]:
    """The same with lognormal durations as in PAI; a third of the jobs lacks one kind of device, or two."""
    chance = np.random.default_rng([seed, num_jobs, 1])
    spread = float(np.sqrt(2 * np.log(_PAI_MEAN_S / _PAI_MEDIAN_S)))

    def duration_s() -> float:
        return max(60.0, _PAI_MEDIAN_S * float(np.exp(spread * chance.standard_normal())))

    return _drawn(speeds, chance, num_jobs, _PAI_JOBS_PER_HOUR, duration_s, _PAI_CONSTRAINED)


def _drawn(
    speeds: Mapping[tuple[str, int], Mapping[str, GavelSpeed]],
    chance: np.random.Generator,
    num_jobs: int,
    jobs_per_hour: float,
    duration_s: Callable[[], float],
    constrained: float,
) -> list[ScheduledJob]:
    arrival_s = 0.0
    jobs = []
    for number in range(num_jobs):
        arrival_s += float(chance.exponential(3600.0 / jobs_per_hour))
        size = int(chance.choice(_SIZES, p=_SHARES))
        spent_s = duration_s()
        fitting = [key for key, kinds in speeds.items() if all(size in s.packed for s in kinds.values())]
        model, batch = fitting[int(chance.integers(len(fitting)))]
        kinds = speeds[model, batch]
        able = dict(kinds)
        if constrained and chance.random() < constrained:
            kept = chance.permutation(list(kinds))[: int(chance.integers(1, len(kinds)))]
            able = {kind: kinds[kind] for kind in kinds if kind in kept}
        jobs.append(
            ScheduledJob(
                name=f"{model}-{batch}-{number}",
                training=DataParallelTraining(speeds=able, batch_size=float(max(1, batch))),
                work_samples=spent_s * kinds["v100"].packed[size],
                num_workers=size,
                is_elastic=False,
                arrival_s=arrival_s if number else 0.0,
                restart_s=_RESTART_S,
            )
        )
    return jobs
