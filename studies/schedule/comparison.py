"""Rivals as published and under our price of changes beside ours: five workloads, errors on all that policies know.

Every schedule is one row of a file, so that a study that was stopped goes on where it was.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from math import isnan, sqrt
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.stats import t as student_t

from forerun.base.errors import RecordError
from forerun.jobs.scheduling.job import ScheduledJob, SharedCluster, parse_cluster
from forerun.jobs.scheduling.policy import find_policy
from forerun.jobs.scheduling.simulation import simulate
from studies.markdown import markdown_table
from studies.schedule.applications import Application, read_applications
from studies.schedule.workloads import (
    GAVEL_CLUSTER,
    GAVEL_ROUND_S,
    HELIOS_SHARES,
    ForecastError,
    GavelSpeed,
    draw_mixed_jobs,
    draw_pai_jobs,
    draw_workload,
    read_gavel_speeds,
    read_philly,
)

OURS = "foresight"
_RIVALS = ("fifo", "srtf", "las", "optimus", "pollux", "sia", "gavel", "themis")
_OF_ONE_KIND = ("optimus",)
"""Rivals whose papers have devices of one kind only."""

SCORED_SEEDS = range(100, 108)
"""Draws on which no constant of a policy was chosen; tuning takes seeds from 0."""

_ERROR = ForecastError(speed=0.2, work=0.3)
"""Errors of speeds and of the work left, on top of those of the fitted speeds and curves."""

EVEN_CLUSTER = "16x4xt4"
_MIXED_CLUSTER = "6x4xt4+3x8xrtx-2080-ti+2x8xa100-sxm4-40gb"
"""64 GPUs of three kinds, the shares of Sia's heterogeneous cluster, all measured in the Sia artifact."""

MEASURED = {"t4": "aws", "rtx-2080-ti": "rtx", "a100-sxm4-40gb": "dgx-ext"}
_NUM_GAVEL_JOBS = 100
_DEADLINE = (0.5, 1.5)
"""Deadlines are this times a job's own time on what its owner asks for. Source: Gu et al. 2023, "ElasticFlow", ASPLOS,
section 6.1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Drawn:
    """Jobs of one draw, as a scheduler knows them and as they are; their cluster; time between decisions [s]."""

    known: Sequence[ScheduledJob]
    actual: Mapping[str, ScheduledJob]
    cluster: SharedCluster
    round_s: float


class _Workloads:
    """The public tables, read once, and the draws of each workload."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.by_name: Mapping[str, Callable[[int], _Drawn]] = {
            "philly": lambda seed: self._of_applications(seed, EVEN_CLUSTER),
            "sia": lambda seed: self._of_applications(seed, _MIXED_CLUSTER),
            "helios": lambda seed: self._of_applications(seed, _MIXED_CLUSTER, HELIOS_SHARES),
            "gavel": lambda seed: _of_one_size(draw_mixed_jobs(self._speeds, seed, _NUM_GAVEL_JOBS), seed),
            "pai": lambda seed: _of_one_size(draw_pai_jobs(self._speeds, seed, _NUM_GAVEL_JOBS), seed),
        }

    @cached_property
    def _applications(self) -> Mapping[str, Application]:
        return read_applications(self._folder, MEASURED)

    @cached_property
    def _philly(self) -> pd.DataFrame:
        return read_philly(self._folder)

    @cached_property
    def _speeds(self) -> Mapping[tuple[str, int], Mapping[str, GavelSpeed]]:
        return read_gavel_speeds(self._folder)

    def _of_applications(self, seed: int, cluster: str, shares: Mapping[str, float] | None = None) -> _Drawn:
        found = draw_workload(
            self._philly, self._applications, seed, kind="t4", devices_per_node=4, shares=shares
        )
        return _due(list(found.forecast.values()), found.actual, parse_cluster(cluster), 60.0, seed)


def _of_one_size(jobs: Sequence[ScheduledJob], seed: int) -> _Drawn:
    return _due(jobs, {job.name: job for job in jobs}, parse_cluster(GAVEL_CLUSTER), GAVEL_ROUND_S, seed)


def _due(
    jobs: Sequence[ScheduledJob],
    actual: Mapping[str, ScheduledJob],
    cluster: SharedCluster,
    round_s: float,
    seed: int,
) -> _Drawn:
    """The same jobs with deadlines."""
    chance = np.random.default_rng([seed, len(jobs), 2])
    ends = {}
    for job in jobs:
        training = actual[job.name].training
        n = job.num_workers
        speed = max(
            model(n, -(-n // cluster.group(kind).devices_per_node), training.batch_size)
            for kind, model in training.speeds.items()
            if kind in cluster.kinds
        )
        alone_s = job.work_samples / speed if speed > 0 else 3600.0
        ends[job.name] = job.arrival_s + float(chance.uniform(*_DEADLINE)) * alone_s + job.restart_s
    return _Drawn(
        known=[replace(job, deadline_s=ends[job.name]) for job in jobs],
        actual={name: replace(job, deadline_s=ends[name]) for name, job in actual.items()},
        cluster=cluster,
        round_s=round_s,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One schedule.

    Attributes:
        workload: Name of the workload.
        seed: Of its draw.
        policy: Policy, ``NAME:raw`` as published.
        metrics: Its figures, as in ``ScheduleMetrics``.
    """

    workload: str
    seed: int
    policy: str
    metrics: Mapping[str, float]


def _policies() -> list[str]:
    """Ours and the rivals raw first: what the aims are about is there before the rest."""
    raw = [f"{name}:raw" for name in _RIVALS if name != "fifo"]
    return [OURS, "fifo", *raw, *(name for name in _RIVALS if name != "fifo")]


def compare(
    folder: Path,
    kept: Path,
    say: Callable[[str], None],
    *,
    workloads: Sequence[str] = (),
    seeds: Iterable[int] = SCORED_SEEDS,
    policies: Sequence[str] = (),
) -> list[Row]:
    """Runs the schedules that a file does not have yet, and adds each to it.

    Args:
        folder: Folder of the public tables.
        kept: JSON lines, one a schedule.
        say: Told of each schedule.
        workloads: philly, sia, helios, gavel or pai; none: all.
        seeds: Of the draws.
        policies: Names; none: ours, the rivals as published, and the rivals under our price of changes.
    """
    draws = _Workloads(folder).by_name
    done = {(row.workload, row.seed, row.policy) for row in read_rows(kept)}
    for policy in policies or _policies():
        for seed in seeds:
            for name in workloads or draws:
                if (name, seed, policy) in done:
                    continue
                drawn = draws[name](seed)
                if policy.removesuffix(":raw") in _OF_ONE_KIND and len(drawn.cluster.kinds) > 1:
                    continue
                told, rule = _ERROR.told(drawn.known, seed), find_policy(policy)
                found = simulate(told, drawn.cluster, rule, drawn.round_s, drawn.actual)
                row = Row(workload=name, seed=seed, policy=policy, metrics=found.metrics.to_dict())
                with kept.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(row)) + "\n")
                say(f"{policy} on {name} {seed}: {found.metrics.average_completion_s / 3600:.3f} h")
    return read_rows(kept)


def read_rows(kept: Path) -> list[Row]:
    """The schedules of a file; none where there is no file.

    Raises:
        RecordError: A line is no schedule.
    """
    if not kept.exists():
        return []
    rows = []
    for number, line in enumerate(kept.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            rows.append(Row(**json.loads(line)))
        except (TypeError, ValueError) as error:
            raise RecordError(
                f"{kept.name}, line {number}: expected a schedule of this study, got {line[:40]!r} ({error}); remove "
                "the line"
            ) from error
    return rows


_COLUMNS: Mapping[str, tuple[str, Callable[[float], str]]] = {
    "p95 h": ("p95_completion_s", lambda value: f"{value / 3600:.1f}"),
    "makespan h": ("makespan_s", lambda value: f"{value / 3600:.1f}"),
    "restarts a job": ("restarts_per_job", lambda value: f"{value:.1f}"),
    "in use": ("utilisation", lambda value: f"{100 * value:.0f} %"),
    "deadlines met": ("deadlines_met", lambda value: f"{100 * value:.0f} %"),
}
"""Columns of means: their figure and its words."""


def _half_width(values: np.ndarray) -> float:
    """Half of the 95 % interval of a mean, by Student's distribution; 0 for one value."""
    if values.size < 2:
        return 0.0
    return float(student_t.ppf(0.975, values.size - 1) * np.std(values, ddof=1) / sqrt(values.size))


class _Figures:
    """Figures of a workload by policy, over the seeds that all of its policies have."""

    def __init__(self, rows: Sequence[Row]) -> None:
        by_policy: dict[str, dict[int, Mapping[str, float]]] = {}
        for row in rows:
            by_policy.setdefault(row.policy, {})[row.seed] = row.metrics
        most = max(len(found) for found in by_policy.values())
        # A policy that was not finished would be compared over other draws.
        self.by_policy = {name: found for name, found in by_policy.items() if len(found) == most}
        self.seeds = sorted(next(iter(self.by_policy.values())))

    def values(self, policy: str, name: str) -> np.ndarray:
        return np.asarray([self.by_policy[policy][seed][name] for seed in self.seeds], dtype=float)

    def mean(self, policy: str, name: str = "average_completion_s") -> float:
        return float(np.mean(self.values(policy, name)))

    def best(self, is_rival: Callable[[str], bool]) -> str:
        """Rival with the lowest average completion."""
        return min((name for name in self.by_policy if is_rival(name)), key=self.mean)

    def ratio(self, policy: str) -> tuple[float, float]:
        """Ours over another policy's average completion, mean over the draws, and half of its 95 % interval."""
        found = self.values(OURS, "average_completion_s") / self.values(policy, "average_completion_s")
        return float(found.mean()), _half_width(found)


def comparison_section(rows: Sequence[Row]) -> str:
    """Markdown: the aims by workload, every figure by policy, and the rivals beside their own papers."""
    by_workload: dict[str, list[Row]] = {}
    for row in rows:
        by_workload.setdefault(row.workload, []).append(row)
    figures = {name: _Figures(found) for name, found in by_workload.items()}
    return "\n".join(
        [
            "Average completion under errors of all forecasts; intervals are 95 % over the draws.\n",
            markdown_table(
                ("workload", "draws", "ours h", "best raw rival", "ours over it", "best of both", "ours over it",
                 "over FIFO", "worst fairness"),
                [_aims(name, found) for name, found in figures.items()],
            ),
            *(f"#### {name}\n\n{_table(found)}" for name, found in figures.items()),
            "### Rivals beside their own papers\n\nRatios of average completion.\n",
            markdown_table(("figure", "published", "here", "source"), list(_published(figures))),
        ]
    )  # fmt: skip


def _aims(name: str, found: _Figures) -> tuple[str, ...]:
    raw = found.best(lambda policy: policy == "fifo" or policy.endswith(":raw"))
    either = found.best(lambda policy: policy != OURS)
    return (
        name,
        str(len(found.seeds)),
        f"{found.mean(OURS) / 3600:.3f}",
        raw,
        _interval(found.ratio(raw)),
        either,
        _interval(found.ratio(either)),
        _interval(found.ratio("fifo")) if "fifo" in found.by_policy else "",
        f"{found.values(OURS, 'worst_fairness').max():.1f}",
    )


def _interval(found: tuple[float, float]) -> str:
    return f"{found[0]:.3f} +- {found[1]:.3f}"


def _table(found: _Figures) -> str:
    lines = []
    for policy in sorted(found.by_policy, key=found.mean):
        hours = found.values(policy, "average_completion_s") / 3600
        cells = [words(found.mean(policy, name)) for name, words in _COLUMNS.values()]
        fairness = found.values(policy, "worst_fairness")
        worst = "" if isnan(fairness.max()) else f"{fairness.max():.1f}"
        lines.append((policy, f"{hours.mean():.3f} +- {_half_width(hours):.3f}", *cells, worst))
    return markdown_table(("policy", "average h", *_COLUMNS, "worst fairness"), lines)


_PUBLISHED = (
    ("philly", "las:raw", "pollux:raw", 1.2 / 0.76,
     "Pollux, table 2: Tiresias with tuned jobs 1.2 h, Pollux 0.76 h, which knows its speeds; on workload 1 of its "
     "artifact Tiresias takes 2,421 s here, 2,474 s there"),
    ("philly", "optimus:raw", "pollux:raw", 1.5 / 0.76, "the same: Optimus with oracle and tuned jobs 1.5 h"),
    ("philly", "gavel:raw", "sia:raw", 4.3 / 1.9, "Sia, table 4: Gavel 4.3 h, Sia 1.9 h"),
    ("philly", "themis:raw", "sia:raw", 5.4 / 1.9,
     "the same: Themis 5.4 h, as shares of time in Gavel, without auctions"),
    ("philly", "pollux:raw", "sia:raw", 2.0 / 1.9, "the same: Pollux 2.0 h"),
    ("sia", "pollux:raw", "sia:raw", 1.0 / 0.6, "Sia, table 3, Philly: Pollux 1.0 h, Sia 0.6 h"),
    ("sia", "gavel:raw", "sia:raw", 1.9 / 0.6, "the same: Gavel 1.9 h"),
    ("helios", "pollux:raw", "sia:raw", 1.0 / 0.7, "Sia, table 3, Helios: Pollux 1.0 h, Sia 0.7 h"),
    ("helios", "gavel:raw", "sia:raw", 2.5 / 0.7, "the same: Gavel 2.5 h"),
)  # fmt: skip
"""Published ratios of two policies' average completion: workload, policies, ratio, source."""


def _published(figures: Mapping[str, _Figures]) -> Iterator[tuple[str, ...]]:
    for workload, first, second, ratio, source in _PUBLISHED:
        found = figures.get(workload)
        if found is None or not {first, second} <= found.by_policy.keys():
            continue
        here = found.mean(first) / found.mean(second)
        yield f"{first} over {second} on {workload}", f"{ratio:.2f}", f"{here:.2f}", source
