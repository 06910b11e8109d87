"""Traces of clusters, one row per job, under FIFO, SRTF and LAS: jobs of a known size and time.

The rounds of the simulator are left out: decisions are made at every event, so that a hundred thousand jobs take
seconds. Devices are counted, not placed, and a job that is stopped loses nothing.
"""

from __future__ import annotations

import heapq
import json
import re
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, nan
from pathlib import Path
from typing import TYPE_CHECKING

from forerun.base.errors import InvalidSetupError, RecordError
from forerun.base.extras import needing
from forerun.base.tables import encoding_of, own_table, read_table
from forerun.jobs.scheduling.outcome import JobOutcome, ScheduleMetrics, schedule_metrics
from forerun.jobs.scheduling.plain_policies import LAS_THRESHOLDS_DEVICE_S

if TYPE_CHECKING:
    import pandas as pd

_NAMES: dict[str, list[str]] = own_table(__file__, "../tables.toml")["trace"]
"""Names under which the columns are known, in small letters and without underscores.

Ours, and those of Philly, Helios (Saturn, Venus and others), Acme (Seren, Kalos), Alibaba's GPU traces of 2020
(``plan_gpu`` in hundredths of a GPU of each instance), 2023 (pods) and 2026, PM100, Tiresias' simulator, the tables of
the Pollux artifact, and Slurm's ``sacct --parsable2 --format=JobID,Submit,Start,End,AllocTRES``.
"""

_EMPTY = ("", "nan", "NaT", "None", "Unknown")
"""Cells without a value, as text."""

_GPUS_OF_TRES = re.compile(r"gres/gpu(?::[^=,]*)?=(\d+)")


def read_trace(path: str | Path, notes: list[str] | None = None) -> list[RigidJob]:
    """Jobs of a trace, in the order of submission, the first at 0 s.

    Columns: the job's name (optional: rows are numbered, and so are names that occur twice), its submission (a date, or
    seconds), its devices, and its duration in seconds or its start and end. Parts of a GPU are rounded up to whole
    ones. Rows of the steps of a job, and jobs that had no GPU, no submission, no end or no time, are left out, and
    ``notes`` are told how many.

    Args:
        path: A table as CSV (or with semicolons, tabs or bars) or Parquet, Philly's ``cluster_job_log``, or what
            ``sacct --json`` prints.
        notes: Takes the remarks.

    Raises:
        RecordError: The file cannot be read, a column is missing, a cell is damaged, or no job is left.
    """
    table = _Trace(Path(path))
    devices, submitted = table.devices(), table.seconds(table.needed("submission"))
    durations, names = table.durations(), table.job_names()
    is_step = names.str.fullmatch(r"\d+(_\d+)?\.(\d+|batch|extern|interactive)")
    kept = (devices > 0) & submitted.notna() & (durations > 0) & ~is_step
    told = [] if notes is None else notes
    if left_out := int((~kept & ~is_step).sum()):
        told.append(f"jobs left out, as they had no GPU, no submission, no end or no time: {left_out:,}")
    if not kept.any():
        raise RecordError(f"{table.name}: expected jobs that had GPUs and ended, got none of {len(kept):,}")
    if parts := int((devices[kept] % 1 != 0).sum()):
        told.append(f"jobs with parts of a GPU, counted as whole ones: {parts:,}")
    names, arrivals = names[kept], (submitted - submitted[kept].min())[kept]
    # A job of several kinds of tasks has a row for each, and each runs on devices of its own.
    nth = names.groupby(names).cumcount()
    names = names.where(nth == 0, names + "#" + (nth + 1).astype(str))
    rows = zip(names, arrivals, (-(-devices[kept] // 1)).astype(int), durations[kept], strict=True)
    return sorted((RigidJob(*row) for row in rows), key=lambda job: job.arrival_s)


def _frame(path: Path) -> pd.DataFrame:
    """The table of a file; cells of text stay text."""
    if path.suffix == ".parquet" or not path.is_file():
        return read_table(path)
    if path.suffix == ".trace":
        raise RecordError(f"{path.name} tells steps and no times: ask 'forerun schedule {path.name}'")
    with needing("reading a trace"):
        import pandas as pd

    with path.open(encoding=encoding_of(path), errors="replace") as file:
        first = file.readline()
    try:
        if first.lstrip()[:1] in ("[", "{"):
            return pd.DataFrame(_jobs_of_document(path))
        mark = max(",;\t|", key=first.count)
        frame = pd.read_csv(
            path,
            sep=mark,
            dtype=str,
            keep_default_na=False,
            skipinitialspace=True,
            encoding=encoding_of(path),
        )
    except ValueError as error:
        said = " ".join(str(error).split())
        raise RecordError(f"{path.name}: expected a table of jobs, but {said}; correct the file") from error
    if frame.empty:
        raise RecordError(f"{path.name}: expected at least one row, got none")
    return frame


def _jobs_of_document(path: Path) -> list[dict[str, object]]:
    """Rows of Philly's log of jobs, whose attempts are joined, or of ``sacct --json``."""
    document = json.loads(path.read_text(encoding=encoding_of(path)))
    jobs = document.get("jobs") if isinstance(document, dict) else document
    found: list[dict[str, object]] = []
    for job in jobs if isinstance(jobs, list) else []:
        if "attempts" in job:
            ran = [
                one for one in job["attempts"] if one["start_time"] and one["end_time"] not in (None, "None")
            ]
            gpus = sum(len(host["gpus"]) for host in ran[0]["detail"]) if ran else 0
            times = {"start": ran[0]["start_time"], "end": ran[-1]["end_time"]} if ran else {}
            found.append({"job": job["jobid"], "submit": job["submitted_time"], "gpus": gpus, **times})
        elif "tres" in job and "time" in job:
            gpus = sum(
                one["count"]
                for one in job["tres"]["allocated"]
                if (one["type"], one["name"]) == ("gres", "gpu")
            )
            spent = job["time"]
            times = {"submit": spent["submission"], "start": spent["start"], "end": spent["end"] or None}
            found.append({"job": str(job["job_id"]), "gpus": gpus, **times})
    if not found:
        raise RecordError(
            f"{path.name}: expected jobs that have ended, as a table, Philly's cluster_job_log or sacct --json prints "
            "them, got other JSON; jobs that wait or run are for forerun schedule live"
        )
    return found


class _Trace:
    """A trace as a table: its columns by what they hold, and refusals that name table, column and row."""

    def __init__(self, path: Path) -> None:
        self.name, self.frame = path.name, _frame(path)
        known = {re.sub(r"[\W_]", "", str(column).lower()): str(column) for column in self.frame.columns}
        self.columns = {
            what: next((known[name] for name in (n.replace("_", "") for n in names) if name in known), "")
            for what, names in _NAMES.items()
        }

    def empty(self, column: str) -> pd.Series[bool]:
        """True where a cell has no value."""
        cells = self.frame[column]
        return cells.isna() | cells.astype(str).str.strip().isin(_EMPTY)

    def refuse(self, bad: pd.Series[bool], column: str, wanted: str) -> None:
        """Raises for the first row that is marked."""
        if bad.any():
            row = int(bad.to_numpy().argmax())
            raise RecordError(
                f"{self.name}, column '{column}', row {row + 1}: expected {wanted}, got "
                f"'{self.frame[column].iloc[row]}' ({int(bad.sum())} such row(s)); correct or drop them"
            )

    def needed(self, *choices: str) -> str:
        """Name of the column that holds the first of these that there is."""
        found = next((self.columns[what] for what in choices if self.columns[what]), "")
        if not found:
            words = ", or ".join(f"for the {what}, one of {', '.join(_NAMES[what])}" for what in choices)
            came = ", ".join(map(str, self.frame.columns))
            raise RecordError(
                f"{self.name}: expected a column {words}; got {came}; name it so in the first line (of Slurm: sacct "
                "--parsable2 --format=JobID,Submit,Start,End,AllocTRES)"
            )
        return found

    def devices(self) -> pd.Series[float]:
        """Devices of each job, also parts of one; none where nothing is said."""
        column, instances = self.needed("devices"), self.columns["instances"]
        if column.lower() == "alloctres":
            return self.frame[column].str.extract(_GPUS_OF_TRES, expand=False).astype(float)
        found = self.numbers(column) / (100.0 if column.strip().lower() == "plan_gpu" else 1.0)
        return found * self.numbers(instances) if instances else found

    def durations(self) -> pd.Series[float]:
        """Durations [s], as they are written or from start to end; of a job without an end none."""
        written = self.needed("duration", "end")
        if self.columns["duration"]:
            found = self.numbers(written)
        else:
            # A column of dates and one of seconds begin at different moments, so that both must be of one kind.
            found = self.seconds(written, since=self.needed("start", "submission"))
        self.refuse(found < 0, written, "a duration above zero seconds")
        ended = self.columns["end"]
        return found.mask(self.empty(ended)) if ended else found

    def numbers(self, column: str) -> pd.Series[float]:
        """A column as numbers."""
        import pandas as pd

        values = pd.to_numeric(self.frame[column], errors="coerce").astype(float)
        self.refuse(values.isna() & ~self.empty(column), column, "a number")
        return values

    def seconds(self, column: str, since: str = "") -> pd.Series[float]:
        """A column of seconds or dates [s]; dates count from the first, or from those in the column ``since``."""
        import pandas as pd

        cells = self.frame[column]
        is_date = pd.api.types.is_datetime64_any_dtype(cells)
        if not is_date and pd.to_numeric(cells, errors="coerce").notna().any():
            return self.numbers(column) - (self.numbers(since) if since else 0.0)
        begin = self._dates(since) if since else self._dates(column).min()
        return (self._dates(column) - begin).dt.total_seconds()

    def _dates(self, column: str) -> pd.Series[pd.Timestamp]:
        import pandas as pd

        dates = pd.to_datetime(self.frame[column], errors="coerce", utc=True, format="ISO8601")
        self.refuse(dates.isna() & ~self.empty(column), column, "a date or seconds")
        return dates

    def job_names(self) -> pd.Series[str]:
        """Names of the jobs, or numbers of their rows."""
        import pandas as pd

        column = self.columns["name"]
        numbered = pd.Series([f"job-{number}" for number in range(1, len(self.frame) + 1)], self.frame.index)
        return numbered if not column else self.frame[column].astype(str).mask(self.empty(column), numbered)


@dataclass(frozen=True, slots=True)
class RigidJob:
    """A job of a trace.

    Attributes:
        name: Unlike every other's.
        arrival_s: When it came [s].
        num_devices: Devices it runs on.
        duration_s: Time it runs on them [s].
    """

    name: str
    arrival_s: float
    num_devices: int
    duration_s: float


_LEAST_S = 1e-6


RIGID_POLICIES = ("fifo", "srtf", "las")
"""Policies that need no more of a job than a trace says."""


def simulate_rigid(
    jobs: Sequence[RigidJob],
    num_devices: int,
    policy: str,
    thresholds_device_s: Sequence[float] = LAS_THRESHOLDS_DEVICE_S,
) -> tuple[tuple[float, ...], ScheduleMetrics]:
    """Ends of the jobs of a trace under one policy, in the order given [s], and the figures; fairness is not known.

    FIFO serves strictly in the order of arrival. SRTF and LAS go through the jobs in their order and start each that
    fits, stopping jobs that come later in it; LAS moves a job to the next queue when its device-seconds pass a
    threshold. Cost: a few list operations per event, whatever the queue.

    Raises:
        InvalidSetupError: A job is larger than the cluster.
    """
    for job in jobs:
        if job.num_devices > num_devices:
            raise InvalidSetupError(
                f"job '{job.name}' of the trace asks for {job.num_devices} devices, the cluster has {num_devices}; "
                "enlarge the cluster or drop the job"
            )
    ends, starts = _Queue(jobs, num_devices, policy, tuple(thresholds_device_s)).run()
    outcomes = [
        JobOutcome(
            job=job.name,
            arrival_s=job.arrival_s,
            start_s=nan,
            end_s=end_s,
            device_s=job.num_devices * job.duration_s,
            num_restarts=number - 1,
        )
        for job, end_s, number in zip(jobs, ends, starts, strict=True)
    ]
    return tuple(ends), schedule_metrics(outcomes, num_devices)


_Key = tuple[float, float, int]


class _Queue:
    """State of one run. A key orders jobs, the smallest first; it ends in the job's number, so that none are equal.

    The key of a waiting job does not change. That of a running one does under SRTF, all by the same amount in the same
    time, so that running jobs are kept in the order of key + now, and under LAS at a threshold, which is an event.
    """

    def __init__(
        self, jobs: Sequence[RigidJob], num_devices: int, policy: str, thresholds: tuple[float, ...]
    ) -> None:
        self.jobs, self.free, self.policy, self.thresholds = jobs, num_devices, policy, thresholds
        self.order = sorted(range(len(jobs)), key=lambda i: jobs[i].arrival_s)
        self.left_s = [job.duration_s for job in jobs]
        self.since_s = [0.0] * len(jobs)
        self.version = [0] * len(jobs)
        self.num_starts = [0] * len(jobs)
        self.end_s = [inf] * len(jobs)
        # Waiting jobs by size: only the first of each size can be next.
        self.waiting: dict[int, list[_Key]] = {}
        # A job has a device at least: as many run as there are devices at most, in order.
        self.running: list[_Key] = []
        self.running_key: dict[int, _Key] = {}
        self.events: list[tuple[float, int, int]] = []

    def run(self) -> tuple[list[float], list[int]]:
        """All events in order; ends and numbers of starts."""
        coming, number = self.order, 0
        while number < len(coming) or self.running:
            arrival_s = self.jobs[coming[number]].arrival_s if number < len(coming) else inf
            event_s = self.events[0][0] if self.events else inf
            now_s = min(arrival_s, event_s)
            while number < len(coming) and self.jobs[coming[number]].arrival_s <= now_s:
                self._wait(coming[number])
                number += 1
            while self.events and self.events[0][0] <= now_s:
                _, i, version = heapq.heappop(self.events)
                # An event of an earlier allocation is void: it is left in the heap, since taking it out costs
                # more.
                if version == self.version[i]:
                    self._happen(i, now_s)
            self._serve(now_s)
        return self.end_s, self.num_starts

    def _had_device_s(self, i: int) -> float:
        job = self.jobs[i]
        return (job.duration_s - self.left_s[i]) * job.num_devices

    def _queue(self, i: int) -> int:
        had = self._had_device_s(i) + _LEAST_S * self.jobs[i].num_devices
        return sum(had >= end for end in self.thresholds)

    def _key(self, i: int) -> _Key:
        """Place of a job that does not run."""
        arrival_s = self.jobs[i].arrival_s
        if self.policy == "srtf":
            return (self.left_s[i], arrival_s, i)
        if self.policy == "las":
            return (float(self._queue(i)), arrival_s, i)
        return (arrival_s, 0.0, i)

    def _wait(self, i: int) -> None:
        heapq.heappush(self.waiting.setdefault(self.jobs[i].num_devices, []), self._key(i))

    def _run_on(self, i: int, now_s: float) -> None:
        """Enters a running job in its place, with its next event: its end, or a threshold before."""
        self.since_s[i] = now_s
        key = self._key(i)
        if self.policy == "srtf":
            key = (key[0] + now_s, key[1], i)
        insort(self.running, key)
        self.running_key[i] = key
        next_s = self.left_s[i]
        if self.policy == "las" and (queue := self._queue(i)) < len(self.thresholds):
            next_s = min(next_s, (self.thresholds[queue] - self._had_device_s(i)) / self.jobs[i].num_devices)
        # An event that was entered under an earlier version is of a run that was stopped since, and is passed over.
        self.version[i] += 1
        heapq.heappush(self.events, (now_s + next_s, i, self.version[i]))

    def _leave(self, i: int, now_s: float) -> None:
        """Takes a running job out, its work up to now done."""
        key = self.running_key.pop(i)
        # By the key under which it was entered: that of now may be another.
        del self.running[bisect_left(self.running, key)]
        self.left_s[i] = max(0.0, self.left_s[i] - (now_s - self.since_s[i]))
        self.version[i] += 1

    def _happen(self, i: int, now_s: float) -> None:
        self._leave(i, now_s)
        # Above the rounding of a time of years, so that an event always moves the clock.
        if self.left_s[i] <= _LEAST_S:
            self.end_s[i] = now_s
            self.free += self.jobs[i].num_devices
        else:
            self._run_on(i, now_s)

    def _serve(self, now_s: float) -> None:
        """Starts waiting jobs as long as the policy lets one start."""
        while (size := self._next_size(now_s)) is not None:
            key = heapq.heappop(self.waiting[size])
            # The last of the order stop first: they would be stopped for any other job, too.
            while self.free < size:
                self._stop(self.running[-1][2], now_s)
            self.free -= size
            self.num_starts[key[2]] += 1
            self._run_on(key[2], now_s)

    def _next_size(self, now_s: float) -> int | None:
        """Size of the waiting job to start next: the first in order that fits once later ones are stopped."""
        heads = sorted((heap[0], size) for size, heap in self.waiting.items() if heap)
        if self.policy == "fifo":
            return heads[0][1] if heads and heads[0][1] <= self.free else None
        # Running jobs are ordered by their end, those that wait by the time left.
        shift = now_s if self.policy == "srtf" else 0.0
        for key, size in heads:
            if self._room((key[0] + shift, key[1], key[2]), size):
                return size
        return None

    def _room(self, key: _Key, size: int) -> bool:
        """True if enough devices are free or held by jobs later in the order."""
        missing = size - self.free
        for later in reversed(self.running):
            if missing <= 0 or later < key:
                break
            missing -= self.jobs[later[2]].num_devices
        return missing <= 0

    def _stop(self, i: int, now_s: float) -> None:
        self._leave(i, now_s)
        self.free += self.jobs[i].num_devices
        self._wait(i)
