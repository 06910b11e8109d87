"""Policies without a forecast of more devices: orders (FIFO, SRTF, LAS), equal shares, dominant resources, packing."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from forerun.base.units import format_duration_s
from forerun.jobs.scheduling.job import Allocation, SharedCluster
from forerun.jobs.scheduling.marginal_gain import least_attained_first, start_all
from forerun.jobs.scheduling.policy import FreeDevices, JobView, hold, policy

LAS_THRESHOLDS_DEVICE_S = (57_600.0,)
"""Device-seconds after which a job sinks to the next queue: 16 device-hours.

Source: the Tiresias of Pollux' artifact (petuum/adaptdl, OSDI 2021), for jobs of hours. Gu et al. 2019, "Tiresias",
NSDI, has 3,200 for jobs of minutes; with those the average completion of Pollux' workload is twice as long.
"""


def admit_in_order(
    jobs: Sequence[JobView], cluster: SharedCluster, may_overtake: bool
) -> dict[str, Allocation]:
    """Gives each job in turn what it asked for.

    Args:
        jobs: In the order in which they are served.
        cluster: The cluster.
        may_overtake: Whether a job that fits may pass one that does not.
    """
    free = FreeDevices(cluster)
    given = hold(jobs, free)
    for view in jobs:
        if view.job.name in given:
            continue
        asked = [view.asked(kind) for kind in view.kinds(cluster)] if free.has_room() else []
        chosen = next((one for one in asked if view.rate(one) > 0 and free.fits(one)), None)
        if chosen is not None:
            free.take(chosen)
            given[view.job.name] = chosen
        elif not may_overtake:
            break
    return given


@policy(
    "fifo",
    title="first come, first served, devices as asked for",
    reason=lambda view, given: "first in the queue" if given else "waits for those who came before it",
)
def fifo(jobs: Sequence[JobView], cluster: SharedCluster, now_s: float) -> dict[str, Allocation]:
    """First come, first served; nobody overtakes and nobody is stopped."""
    running_first = sorted(jobs, key=lambda v: (v.current is None, v.order))
    return admit_in_order(running_first, cluster, may_overtake=False)


def _time_left(view: JobView, given: Allocation | None) -> str:
    if given is None:
        return "waits for jobs with less time left"
    return f"{format_duration_s(view.remaining_s(given))} left, less than those that wait"


@policy("srtf", title="least remaining time first, devices as asked for", reason=_time_left)
def shortest_remaining(
    jobs: Sequence[JobView], cluster: SharedCluster, now_s: float
) -> dict[str, Allocation]:
    """The job with the least time left on what it asks for first, by forecast; longer ones are stopped for it."""
    order = sorted(jobs, key=lambda v: (v.asked_remaining_s / v.job.weight, v.order))
    return admit_in_order(order, cluster, may_overtake=True)


def _queue(view: JobView) -> int:
    """Number of the queue, 0 is served first."""
    return sum(view.attained_device_s >= end for end in LAS_THRESHOLDS_DEVICE_S)


def _its_queue(view: JobView, given: Allocation | None) -> str:
    number = _queue(view) + 1
    return f"queue {number}" if given else f"queue {number}, waits for higher queues and earlier jobs"


@policy(
    "las",
    title=f"least attained service (Tiresias), queue ends at {LAS_THRESHOLDS_DEVICE_S[0]:.0f} device-seconds",
    reason=_its_queue,
    is_stable=False,
)
def least_attained_service(
    jobs: Sequence[JobView], cluster: SharedCluster, now_s: float
) -> dict[str, Allocation]:
    """Tiresias-L: queues by what a job has had so far, first come first served within each."""
    return admit_in_order(sorted(jobs, key=lambda v: (_queue(v), v.order)), cluster, may_overtake=True)


@policy(
    "equal",
    title="equal share, elastic, stops where more devices no longer help",
    reason=lambda view, given: (
        "its share of the devices" if given else "waits: more jobs than devices, it had most so far"
    ),
)
def equal_share(jobs: Sequence[JobView], cluster: SharedCluster, now_s: float) -> dict[str, Allocation]:
    """Rounds of one more for each job that gains by it, the smallest share first."""
    return _progressive_filling(jobs, cluster, until_best=True)


@policy(
    "drf",
    title="dominant resource fairness",
    reason=lambda view, given: (
        "its fair dominant share" if given else "waits: more jobs than the cluster can start"
    ),
)
def dominant_resource_fairness(
    jobs: Sequence[JobView], cluster: SharedCluster, now_s: float
) -> dict[str, Allocation]:
    """The smallest dominant share grows first, whether it helps or not; each kind of devices is a resource.

    Source: Ghodsi et al. 2011, "Dominant Resource Fairness", NSDI; as the baseline of Optimus, section 6.1.
    """
    return _progressive_filling(jobs, cluster, until_best=False)


def _progressive_filling(
    jobs: Sequence[JobView], cluster: SharedCluster, *, until_best: bool
) -> dict[str, Allocation]:
    """Starts every job, those that had least first; then units go to the smallest dominant share, by weight."""
    free = FreeDevices(cluster)
    given = start_all(least_attained_first(jobs), cluster, free)

    def share(view: JobView) -> float:
        return free.share(given[view.job.name]) / view.job.weight

    views = {
        view.job.name: view
        for view in jobs
        if view.job.name in given and view.job.is_elastic and not view.is_held
    }
    heap = [(share(view), view.order, name) for name, view in views.items()]
    heapq.heapify(heap)
    while heap:
        _, order, name = heapq.heappop(heap)
        view, present = views[name], given[name]
        wanted = _next_unit(view, present, free, until_best)
        if wanted is None:
            continue
        unit = Allocation(present.device, wanted.num_workers - present.num_workers)
        # A job that finds no room is not asked again: what is free only becomes less.
        if free.fits(unit):
            free.take(unit)
            given[name] = wanted
            heapq.heappush(heap, (share(view), order, name))
    return given


def _next_unit(view: JobView, present: Allocation, free: FreeDevices, until_best: bool) -> Allocation | None:
    """The next larger allocation that the job can use."""
    curve, now = view.curves[present.device], present.num_workers
    most = min(view.job.max_workers, now + free.left[present.device])
    larger = (n for n in curve.rates if now < n <= most)
    if until_best:
        larger = (n for n in larger if curve.rate(n) > curve.rate(now))
    n = next(larger, None)
    return None if n is None else Allocation(present.device, n)


@policy(
    "tetris",
    title="Tetris: alignment with what is free, short jobs first",
    reason=lambda view, given: (
        "its request fits what was free" if given else "waits: nothing left for the least it runs with"
    ),
)
def tetris(jobs: Sequence[JobView], cluster: SharedCluster, now_s: float) -> dict[str, Allocation]:
    """Packing: a job's requests go where they align best with what is free, short jobs first.

    Score = demand . free (each as a share of the cluster) + the rank of the remaining time, both in 0 to 1. Each
    job first gets the least it runs with; then requests are filled in the order of the score.

    Source: Grandl et al. 2014, "Multi-resource packing for cluster schedulers", SIGCOMM; tasks of a training job
    are not given in advance, so what its owner asks for stands for them.
    """
    free = FreeDevices(cluster)
    shortest_first = sorted(jobs, key=lambda v: (v.asked_remaining_s, v.order))
    given = start_all(shortest_first, cluster, free)
    rank = {view.job.name: 1 - i / len(jobs) for i, view in enumerate(shortest_first)}
    open_views = [view for view in jobs if view.job.name in given and not view.is_held]
    while open_views:
        best = max(open_views, key=lambda v: (rank[v.job.name] + _alignment(v, given, free), -v.order))
        open_views.remove(best)
        _fill_request(best, given, free)
    return given


def _fill_request(view: JobView, given: dict[str, Allocation], free: FreeDevices) -> None:
    """As much of the request as fits."""
    present = given[view.job.name]
    wanted = view.asked(present.device)
    free.take(present, sign=-1)
    while wanted.num_workers > present.num_workers and not free.fits(wanted):
        wanted = Allocation(present.device, wanted.num_workers - 1)
    chosen = wanted if wanted.num_workers > present.num_workers and view.rate(wanted) > 0 else present
    free.take(chosen)
    given[view.job.name] = chosen


def _alignment(view: JobView, given: dict[str, Allocation], free: FreeDevices) -> float:
    """Product of the request and what is free of its kind of devices, as shares of all of the kind."""
    device = given[view.job.name].device
    return free.share(view.asked(device)) * free.share(Allocation(device, free.left[device]))
