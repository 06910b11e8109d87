"""Finish-time fairness: a job's completion over that with its own share of the cluster, and jobs near a bound.

    rho = (time it waited and ran + time left on its share) / time of the whole job on its share

The share of a job is 1/n of each kind of devices, n the jobs that are there, at least the least it runs with. Served
with its share from now on, a job keeps its rho; waiting raises it, by w beyond what a restart and devices of one size
cost it anyway. A job whose w has come to ``_ROOM`` of what a bound leaves, bound - 1, gets its share before all others.

Source of the measure: Mahajan et al. 2020, "Themis", NSDI, section 2.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from forerun.jobs.scheduling.cluster import SharedCluster
from forerun.jobs.scheduling.job import Allocation
from forerun.jobs.scheduling.policy import FreeResources, JobView

__all__ = ["Fairness", "fair_share", "finish_time_fairness", "serve_urgent", "urgent_in_s"]

_ROOM = 1 / 9
"""Share of the room under a bound at which a waiting job is served first: rounds and restarts are long beside a job of
half a minute, and forecasts of its work are off. At the usual bound of 10 a job may wait for its own length. A share of
the bound itself would call every job of a bound below 5 urgent before it has waited."""


def fair_share(view: JobView, cluster: SharedCluster, num_jobs: int) -> Allocation | None:
    """The fastest share of a job that has 1/n of each kind of devices; None where no speed is known."""
    options = []
    for group in cluster.groups:
        curve = view.curves.get(group.device)
        if curve is None or not curve.fewest:
            continue
        n = max(curve.best_within(max(1, group.num_devices // num_jobs)), curve.fewest)
        options.append(Allocation(group.device, n))
    return max(options, key=view.rate, default=None)


def _served_with(view: JobView, share: Allocation) -> Allocation:
    """Devices that a job on its share would be given: those asked for, if it has one size."""
    asked = view.asked(share.device)
    has_one_size = not (view.job.is_elastic and view.job.is_preemptible)
    return asked if has_one_size and view.rate(asked) > 0 else share


class Fairness(NamedTuple):
    """Finish-time fairness of a job that is served with its share from now on.

    Attributes:
        rho: Its completion over ``whole_s``.
        waited: Part of it beyond the least that the job could have had.
        whole_s: Time of the whole job on its share [s].
    """

    rho: float
    waited: float
    whole_s: float

    def is_late(self, bound: float) -> bool:
        """True if the job is to be served before those that are not."""
        return self.waited >= _ROOM * (bound - 1)


def finish_time_fairness(view: JobView, cluster: SharedCluster, num_jobs: int, now_s: float) -> Fairness:
    """Rho of a job; zero where no speed is known, so that no bound is ever exceeded."""
    share = fair_share(view, cluster, num_jobs)
    if share is None:
        return Fairness(0.0, 0.0, inf)
    left_s, done = view.remaining_s(_served_with(view, share)), max(1.0 - view.progress, 1e-3)
    whole_s = view.remaining_s(share) / done
    restart_s = 0.0 if view.current is not None else view.job.restart_s
    rho = (now_s - view.job.arrival_s + restart_s + left_s) / whole_s
    return Fairness(rho, rho - (view.job.restart_s + left_s / done) / whole_s, whole_s)


def serve_urgent(
    jobs: Sequence[JobView], cluster: SharedCluster, now_s: float, bound: float, free: FreeResources
) -> dict[str, Allocation]:
    """Shares of waiting jobs that are about to exceed a bound, the worst first, taken out of what is free.

    They are marked as urgent, and so are running jobs that are no better off, which keep what they have.
    """
    given: dict[str, Allocation] = {}
    if bound == inf:
        return given
    for view in jobs:
        view.is_urgent = False
    rated = [
        (finish_time_fairness(view, cluster, len(jobs), now_s), view) for view in jobs if not view.is_held
    ]
    late = [(found, view) for found, view in rated if view.current is None and found.is_late(bound)]
    if not late:
        return given
    worst, waiting = max(late, key=lambda item: item[0].rho)
    # A running job that would be later than the worst that waits, were it stopped for it, goes on, and so does one that
    # would lose more than the other by waiting for its end: to take turns makes all of them later.
    held_s = waiting.least_remaining_s
    served = []
    for found, view in rated:
        if view.current is None:
            is_served = found.is_late(bound)
        else:
            lost = (held_s + view.job.restart_s) / found.whole_s
            is_served = (
                found.rho + lost >= worst.rho or lost >= view.remaining_s(view.current) / worst.whole_s
            )
        if is_served:
            served.append((view.current is None, -found.rho, view.order, view))
    held = [view for view in jobs if view.is_held and view.current is not None]
    for view in held:
        assert view.current is not None
        free.take(view.job, view.current)
    for _, _, _, view in sorted(served, key=lambda item: item[:3]):
        share = fair_share(view, cluster, len(jobs))
        wanted = view.current or (None if share is None else _served_with(view, share))
        if wanted is not None and free.fits(view.job, wanted):
            view.is_urgent = True
            free.take(view.job, wanted)
            given[view.job.name] = wanted
    for view in held:
        assert view.current is not None
        free.take(view.job, view.current, sign=-1)
    return given


def urgent_in_s(view: JobView, cluster: SharedCluster, num_jobs: int, now_s: float, bound: float) -> float:
    """Time after which a job that waits becomes urgent [s]; infinite if it never does, or is so already."""
    found = finish_time_fairness(view, cluster, num_jobs, now_s)
    wait_s = (_ROOM * (bound - 1) - found.waited) * found.whole_s
    return wait_s if wait_s > 0 else inf
