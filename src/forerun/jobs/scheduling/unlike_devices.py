"""Policies for unlike devices: Sia's integer program, Gavel's shares of time, and Themis' auctions to the worst off."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np

from forerun.base.numerics import Floats
from forerun.jobs.scheduling.job import Allocation, SharedCluster
from forerun.jobs.scheduling.marginal_gain import speedup_reason
from forerun.jobs.scheduling.plain_policies import admit_in_order
from forerun.jobs.scheduling.policy import FreeDevices, JobView, Policy, hold, policy, register
from forerun.jobs.scheduling.preemption import finish_time_fairness

_TIME_LIMIT_S = 20.0
_POWER, _WAITING_COST = -0.5, 1.1


@policy(
    "sia",
    title="Sia-like: integer program over configurations, batch chosen with the devices",
    reason=speedup_reason,
    adapts_batch=True,
    is_stable=False,
)
def sia(jobs: Sequence[JobView], cluster: SharedCluster, now_s: float) -> dict[str, Allocation]:
    """Gives each job one configuration, so that the sum of normalised goodputs to the power p is best.

    Configurations are a kind of device and 1, 2, 4 ... devices within a node or whole nodes. Goodputs of a job are
    divided by its smallest; one that changes what the job has is multiplied by the restart factor
    (T - N S) / (T + S), T the age, N the restarts so far (one per configuration held) and S the restart time. A job
    starts on one device (the least it runs with) and at most doubles in a round. Minimised is
    sum_j (goodput ** p, or 1.1 if the job gets nothing); p = -0.5.

    Source: Subramanya et al. 2023, "Sia", SOSP, section 3; solved by HiGHS through scipy.
    """
    free = FreeDevices(cluster)
    given = hold(jobs, free)
    others = [view for view in jobs if view.job.name not in given]
    columns = [(view, option, cost) for view in others for option, cost in _options(view, cluster, now_s)]
    if columns:
        chosen = _solve(columns, others, cluster, free)
        given |= {columns[i][0].job.name: columns[i][1] for i in chosen}
    return given


def _options(view: JobView, cluster: SharedCluster, now_s: float) -> list[tuple[Allocation, float]]:
    """Configurations of one job, each with its cost less that of waiting, which is below zero."""
    options = [(a, view.rate(a)) for a in configurations(view, cluster)]
    options = [(a, rate) for a, rate in options if rate > 0]
    if not options:
        return []
    smallest = min(rate for _, rate in options)
    factor = _restart_factor(view, now_s)
    found = []
    for option, rate in options:
        value = rate / smallest * (1.0 if option == view.current else factor)
        cost = view.job.weight * (value**_POWER - _WAITING_COST)
        # Running slowly is always better than waiting, however costly the last restarts were.
        found.append((option, min(cost, -1e-3)))
    return found


def _restart_factor(view: JobView, now_s: float) -> float:
    age_s = now_s - view.job.arrival_s
    restart_s = view.job.restart_s
    if view.current is None or restart_s <= 0:
        return 1.0
    # The factor of a job younger than its restart is below zero, and a power of it no number.
    return max(0.05, (age_s - restart_s) / (age_s + restart_s))


def configurations(view: JobView, cluster: SharedCluster) -> list[Allocation]:
    """Sizes that a job may get now: powers of two within a node, or whole nodes, at most twice what it has."""
    if not view.job.is_elastic:
        return [view.asked(kind) for kind in cluster.kinds if kind in view.curves]
    found = []
    for group in cluster.groups:
        curve = view.curves.get(group.device)
        smallest = None if curve is None else view.smallest(group.device)
        if curve is None or smallest is None:
            continue
        least = smallest.num_workers
        # At most doubled in one round, as Sia has it: speeds further away are extrapolated.
        limit = max(least, 2 * view.current.num_workers if view.current else least)
        limit = min(limit, view.job.max_workers)
        per_node = group.devices_per_node
        within = {1 << k for k in range(per_node.bit_length()) if 1 << k < per_node} | {least}
        whole = range(per_node, group.num_devices + 1, per_node)
        found += [Allocation(group.device, n) for n in sorted({*within, *whole}) if least <= n <= limit]
    return found


def _solve(
    columns: Sequence[tuple[JobView, Allocation, float]],
    jobs: Sequence[JobView],
    cluster: SharedCluster,
    free: FreeDevices,
) -> tuple[int, ...]:
    """Columns that the integer program chooses: at most one a job, no more than there is."""
    row_of = {view.job.name: i for i, view in enumerate(jobs)}
    row_of_kind = {kind: i for i, kind in enumerate(free.left, start=len(jobs))}
    entries: list[tuple[int, int, float]] = []
    for j, (view, option, _) in enumerate(columns):
        entries += [(row_of[view.job.name], j, 1.0), (row_of_kind[option.device], j, option.num_workers)]
    limits = (*([1.0] * len(jobs)), *free.left.values())
    # The solver itself stops at a gap ten times this, and what rises for years by less is one question.
    return _cheapest(tuple(round(cost, 4) for _, _, cost in columns), tuple(entries), limits)


# Draws of one schedule differ in what is true, not in what is believed: most of their rounds ask the same again.
@lru_cache(maxsize=256)
def _cheapest(
    costs: tuple[float, ...], entries: tuple[tuple[int, int, float], ...], limits: tuple[float, ...]
) -> tuple[int, ...]:
    """Columns at the least cost within the limits, each taken whole or not at all."""
    with _quiet_solver():
        found = _solution(
            costs,
            entries,
            limits,
            1.0,
            integrality=np.ones(len(costs), dtype=np.int64),
            options={"time_limit": _TIME_LIMIT_S, "mip_rel_gap": 1e-3},
        )
    # The solver gives zero and one within its tolerance only.
    return () if found is None else tuple(np.flatnonzero(found > 0.5).tolist())


def _solution(
    costs: Sequence[float] | Floats,
    entries: Iterable[tuple[int, int, float]],
    limits: Sequence[float] | Floats,
    highest: float,
    **settings: Any,
) -> Floats | None:
    """Unknowns of 0 to ``highest`` at the least cost within the limits, (unknowns,); None where none was found.

    Entries are row, column and value of the matrix whose product with the unknowns is limited; ``settings`` are those
    of ``scipy.optimize.milp``.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import coo_array

    rows, columns, values = zip(*entries, strict=True)
    matrix = coo_array((values, (rows, columns)), shape=(len(limits), len(costs)))
    within = LinearConstraint(matrix.tocsr(), ub=limits)
    found: Floats | None = milp(
        c=np.asarray(costs), constraints=within, bounds=Bounds(0, highest), **settings
    ).x
    return found


@contextmanager
def _quiet_solver() -> Iterator[None]:
    """Keeps lines that HiGHS prints past its own log off the process's stdout."""
    sys.stdout.flush()
    try:
        kept = os.dup(1)
    except OSError:  # no stdout at all, as in a daemon
        yield
        return
    with Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        try:
            yield
        finally:
            os.dup2(kept, 1)
            os.close(kept)


def max_min_shares(rates: Floats, sizes: Floats, num_devices: Floats, weights: Floats) -> Floats:
    """Share of time of each job on each kind of devices, (jobs, kinds), so that the worst off job is best off.

    Maximised is the least of

        sum_k rate_jk X_jk size_j / (weight_j sum_k rate_jk N_k / sum N)

    with X_jk >= 0, sum_k X_jk <= 1 and sum_j size_j X_jk <= N_k: the speed of a job relative to that with the same part
    of each kind.

    Args:
        rates: Samples per second with what each asks for, zero where it cannot run, (jobs, kinds).
        sizes: Devices that each asks for, (jobs,).
        num_devices: N, (kinds,).
        weights: Of the jobs, (jobs,).

    Source: Narayanan et al. 2020, "Gavel", OSDI, section 4.1; ``MaxMinFairnessPolicyWithPerf`` of its artifact.
    """
    jobs, kinds = rates.shape
    equal = rates @ (num_devices / num_devices.sum())
    worth = rates * (sizes / (weights * np.maximum(equal, 1e-12)))[:, None]
    cells = np.arange(jobs * kinds)
    job_of, kind_of = np.divmod(cells, kinds)
    least = jobs * kinds
    # Rows: the worth of each job is at least the last variable; a job's time; the devices of each kind.
    rows = np.concatenate([job_of, np.arange(jobs), jobs + job_of, 2 * jobs + kind_of])
    columns = np.concatenate([cells, np.full(jobs, least), cells, cells])
    values = np.concatenate([-worth.ravel(), np.ones(jobs), np.ones(least), sizes[job_of]])
    limits = np.concatenate([np.zeros(jobs), np.ones(jobs), num_devices])
    entries = zip(rows, columns, values, strict=True)
    found = _solution(np.append(np.zeros(least), -1.0), entries, limits, np.inf)
    assert found is not None  # X = 0 always satisfies the constraints
    return np.asarray(found[:least].reshape(jobs, kinds), dtype=float)


LEASE_S = 360.0
"""Time for which a job keeps what it was given; new jobs get what is free. Source: Gavel, section 7.1."""


@dataclass(slots=True)
class _Gavel:
    """Shares by the linear program, and the time that each job has had on each kind; one object a schedule."""

    shares: dict[str, Mapping[str, float]] = field(default_factory=dict)
    had_s: dict[tuple[str, str], float] = field(default_factory=dict)
    last_s: float = 0.0
    lease_end_s: float = 0.0

    def allocate(
        self, jobs: Sequence[JobView], cluster: SharedCluster, now_s: float
    ) -> dict[str, Allocation]:
        """Rounds go to the job and kind that are furthest behind their share of time."""
        for view in jobs:
            if view.current is not None:
                key = (view.job.name, view.current.device)
                self.had_s[key] = self.had_s.get(key, 0.0) + now_s - self.last_s
        self.last_s = now_s
        able = [view for view in jobs if any(view.rate(view.asked(kind)) > 0 for kind in cluster.kinds)]
        if {view.job.name for view in able} != set(self.shares):
            self.shares = self._solved(able, cluster)
        free = FreeDevices(cluster)
        # One decision may ask several times.
        is_leased = now_s < self.lease_end_s and now_s > self.lease_end_s - LEASE_S
        # Inside a lease nothing is taken away from a job that runs.
        given = hold(jobs, free, all_that_run=is_leased)
        self.lease_end_s = (now_s // LEASE_S + 1) * LEASE_S
        wanted = [
            (-self._priority(view, kind, share, now_s), view.order, kind, view)
            for view in able
            for kind, share in self.shares[view.job.name].items()
        ]
        for _, _, kind, view in sorted(wanted, key=lambda item: item[:3]):
            asked = view.asked(kind)
            if view.job.name not in given and free.fits(asked):
                free.take(asked)
                given[view.job.name] = asked
        return given

    def _priority(self, view: JobView, kind: str, share: float, now_s: float) -> float:
        """Share of time that the job should have over the share that it has had."""
        had = self.had_s.get((view.job.name, kind), 0.0) / max(now_s - view.job.arrival_s, 1e-9)
        return share / max(had, 1e-6)

    @staticmethod
    def _solved(jobs: Sequence[JobView], cluster: SharedCluster) -> dict[str, Mapping[str, float]]:
        if not jobs:
            return {}
        kinds = cluster.kinds
        found = max_min_shares(
            np.asarray([[view.rate(view.asked(kind)) for kind in kinds] for view in jobs]),
            np.asarray([float(view.job.num_workers) for view in jobs]),
            np.asarray([float(group.num_devices) for group in cluster.groups]),
            np.asarray([view.job.weight for view in jobs]),
        )
        # A kind without a share is the last resort: an idle device helps nobody.
        return {
            view.job.name: {
                kind: max(share, 1e-9)
                for kind, share in zip(kinds, row.tolist(), strict=True)
                if view.rate(view.asked(kind)) > 0
            }
            for view, row in zip(jobs, found, strict=True)
        }


def _its_share(view: JobView, given: Allocation | None) -> str:
    return "behind its share of time" if given else "waits: others are further behind their share of time"


register(
    "gavel",
    lambda: Policy(
        name="gavel",
        title="Gavel: shares of time by max-min fairness over unlike devices, devices as asked for",
        allocate=_Gavel().allocate,
        reason=_its_share,
        is_stable=False,
    ),
)

_OFFERED_SHARE = 0.2
"""1 - f, the share of the jobs that are offered free devices. Source: Themis, section 8.1, f = 0.8."""


@dataclass(slots=True)
class _Themis:
    """Leases end together, and all devices are offered to the fifth of the jobs with the worst fairness first.

    Inside the offer, and for what it leaves, jobs with the least time left come first, which a bid that is worth most
    for its devices is. Hidden payments of the auction, which keep bids honest, are left out.

    Source: Mahajan et al. 2020, "Themis", NSDI, sections 3 and 5.
    """

    lease_end_s: float = 0.0

    def allocate(
        self, jobs: Sequence[JobView], cluster: SharedCluster, now_s: float
    ) -> dict[str, Allocation]:
        """Serves the worst off first; inside a lease it gives away free devices only."""
        rho = {v.job.name: finish_time_fairness(v, cluster, len(jobs), now_s)[0] for v in jobs}
        worst = sorted(jobs, key=lambda v: (-rho[v.job.name], v.order))
        offered = ceil(_OFFERED_SHARE * len(jobs))
        is_leased = self.lease_end_s - LEASE_S < now_s < self.lease_end_s
        self.lease_end_s = (now_s // LEASE_S + 1) * LEASE_S

        def place(item: tuple[int, JobView]) -> tuple[bool, bool, float, int]:
            rank, view = item
            is_kept = is_leased and view.current is not None
            return not is_kept, rank >= offered, view.asked_remaining_s, view.order

        order = [view for _, view in sorted(enumerate(worst), key=place)]
        return admit_in_order(order, cluster, may_overtake=True)


register(
    "themis",
    lambda: Policy(
        name="themis",
        title="Themis-like: the worst fifth by finish-time fairness first, devices as asked for",
        allocate=_Themis().allocate,
        reason=lambda view, given: "worst off so far" if given else "waits for jobs that are worse off",
        is_stable=False,
    ),
)
