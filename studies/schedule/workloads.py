"""Workloads of 160 jobs: arrivals and sizes of the Philly trace, applications, requests and speeds of Pollux' jobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd

from forerun.base.tables import check_columns, read_table
from forerun.jobs.scheduling.job import DataParallelTraining, ScheduledJob
from studies.schedule.applications import RESTART_S, Application, RecordedEfficiency

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


def read_philly(folder: Path) -> pd.DataFrame:
    """Submissions of at least a minute and less than 1,000 GPU hours, with seconds since the first.

    Raises:
        RecordError: The table is missing or lacks a column.
    """
    frame = read_table(folder / "cluster_traces.parquet")
    check_columns(frame, "cluster_traces.parquet", ["submit_or_start_time", "duration_s", "gpu_seconds"])
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


@cache
def _actual_training(application: Application, batch: float) -> DataParallelTraining:
    return application.actual_training(batch)


@cache
def _known_training(application: Application, batch: float) -> DataParallelTraining:
    return application.forecast_training(batch)
