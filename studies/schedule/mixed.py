"""Jobs of one size on unlike devices: speeds that Gavel measured, sizes and durations as its simulator draws them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from forerun.base.tables import check_columns, read_table
from forerun.jobs.scheduling.job import DataParallelTraining, ScheduledJob

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
    frame = read_table(folder / "gavel_throughputs.parquet")
    columns = ["source_file", "gpu", "placement", "model", "batch_size_per_gpu", "n_gpus", "steps_per_second"]
    check_columns(frame, "gavel_throughputs.parquet", columns)
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
