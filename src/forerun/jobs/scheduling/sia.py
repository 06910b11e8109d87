"""Sia-like: an integer program over jobs and configurations, for clusters of unlike devices."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import inf
from pathlib import Path

import numpy as np

from forerun.jobs.scheduling.cluster import SharedCluster
from forerun.jobs.scheduling.job import Allocation, ServerTraining
from forerun.jobs.scheduling.marginal_gain import speedup_reason
from forerun.jobs.scheduling.policy import FreeResources, JobView, hold, policy

__all__ = ["configurations"]

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
    """Each job one configuration, so that the sum of normalised goodputs to the power p is best.

    Configurations are a kind of device and 1, 2, 4 ... devices within a node or whole nodes. Goodputs of a job are
    divided by its smallest; one that changes what the job has is multiplied by the restart factor
    (T - N S) / (T + S), T the age, N the restarts so far (one per configuration held) and S the restart time. A job
    starts on one device (the least it runs with) and at most doubles in a round. Minimised is
    sum_j (goodput ** p, or 1.1 if the job gets nothing); p = -0.5.

    Source: Subramanya et al. 2023, "Sia", SOSP, section 3; solved by HiGHS through scipy.
    """
    free = FreeResources(cluster)
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
    if isinstance(view.job.training, ServerTraining):
        sizes = range(1, 1 + 2 * (view.current.num_workers if view.current else 1))
        return [Allocation(kind, n, n) for kind in cluster.kinds for n in sizes if n <= view.job.max_workers]
    if not view.job.is_elastic:
        return [view.asked(kind) for kind in cluster.kinds if kind in view.curves]
    found = []
    for group in cluster.groups:
        curve = view.curves.get(group.device)
        smallest = None if curve is None else view.smallest(group.device)
        if curve is None or smallest is None:
            continue
        least = smallest.num_workers
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
    free: FreeResources,
) -> list[int]:
    """Columns that the integer program chooses: at most one a job, no more than there is."""
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import coo_array

    row_of = {view.job.name: i for i, view in enumerate(jobs)}
    kinds, capacity = cluster.kinds, cluster.capacity
    entries: list[tuple[int, int, float]] = []
    for j, (view, option, _) in enumerate(columns):
        entries.append((row_of[view.job.name], j, 1.0))
        devices, cores, memory = free.demand(view.job, option)
        needs = ((kinds.index(option.device), devices), (len(kinds), cores), (len(kinds) + 1, memory))
        entries += [(len(jobs) + i, j, need) for i, need in needs if need and capacity[i] != inf]
    rows, places, values = zip(*entries, strict=True)
    limits = np.asarray([*([1.0] * len(jobs)), *free.left])
    matrix = coo_array((values, (rows, places)), shape=(len(limits), len(columns)))
    with _quiet_solver():
        result = milp(
            c=np.asarray([cost for _, _, cost in columns]),
            constraints=LinearConstraint(matrix.tocsr(), ub=limits),
            integrality=np.ones(len(columns), dtype=np.int64),
            bounds=Bounds(0, 1),
            options={"time_limit": _TIME_LIMIT_S, "mip_rel_gap": 1e-3},
        )
    return [] if result.x is None else np.flatnonzero(result.x > 0.5).tolist()


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
