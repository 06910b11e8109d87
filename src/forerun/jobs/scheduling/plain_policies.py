"""Policies without a forecast of more devices: orders (FIFO, SRTF, LAS), equal shares, dominant resources, packing."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from forerun.base.units import format_duration_s
from forerun.jobs.scheduling.cluster import SharedCluster
from forerun.jobs.scheduling.greedy import start_all
from forerun.jobs.scheduling.job import Allocation, ServerTraining
from forerun.jobs.scheduling.policy import FreeResources, JobView, hold, register

__all__ = [
    "LAS_THRESHOLDS_DEVICE_S",
    "DominantResourceFairness",
    "EqualShare",
    "Fifo",
    "LeastAttainedService",
    "ShortestRemaining",
    "Tetris",
    "admit_in_order",
]

LAS_THRESHOLDS_DEVICE_S = (3200.0,)
"""Device-seconds after which a job sinks to the next queue.

Source: Gu et al. 2019, "Tiresias", NSDI, whose two-queue setting this is.
"""


def admit_in_order(
    jobs: Sequence[JobView], cluster: SharedCluster, may_overtake: bool
) -> dict[str, Allocation]:
    """Gives each job in turn what it asked for.

    Args:
        jobs: In the order in which they are served.
        cluster: What there is.
        may_overtake: Whether a job that fits may pass one that does not.
    """
    free = FreeResources(cluster)
    given = hold(jobs, free)
    for view in jobs:
        if view.job.name in given:
            continue
        choices = _choices(view, cluster) if free.has_room(view.job) else []
        chosen = next((a for a in choices if free.fits(view.job, a)), None)
        if chosen is not None:
            free.take(view.job, chosen)
            given[view.job.name] = chosen
        elif not may_overtake:
            break
    return given


def _choices(view: JobView, cluster: SharedCluster) -> list[Allocation]:
    """The requested devices, on each kind where the job runs with them."""
    asked = [view.asked(kind) for kind in view.kinds(cluster)]
    return [allocation for allocation in asked if view.rate(allocation) > 0]


@register
@dataclass(frozen=True, slots=True)
class Fifo:
    """First come, first served; nobody overtakes and nobody is stopped."""

    name: str = "fifo"
    title: str = "first come, first served, devices as asked for"
    adapts_batch: bool = False
    is_stable: bool = True

    def allocate(
        self, jobs: Sequence[JobView], cluster: SharedCluster, now_s: float
    ) -> dict[str, Allocation]:
        """In the order of arrival; what runs keeps its place."""
        running_first = sorted(jobs, key=lambda v: (v.current is None, v.order))
        return admit_in_order(running_first, cluster, may_overtake=False)

    def reason(self, view: JobView, given: Allocation | None) -> str:
        """Its place in the queue."""
        return "first in the queue" if given else "waits for those who came before it"


@register
@dataclass(frozen=True, slots=True)
class ShortestRemaining:
    """The job with the least time left first, by forecast; longer ones are stopped for it."""

    name: str = "srtf"
    title: str = "least remaining time first, devices as asked for"
    adapts_batch: bool = False
    is_stable: bool = True

    def allocate(
        self, jobs: Sequence[JobView], cluster: SharedCluster, now_s: float
    ) -> dict[str, Allocation]:
        """By forecast time to the end with what was asked for."""
        order = sorted(jobs, key=lambda v: (self._left_s(v, cluster), v.order))
        return admit_in_order(order, cluster, may_overtake=True)

    @staticmethod
    def _left_s(view: JobView, cluster: SharedCluster) -> float:
        return view.asked_remaining_s(cluster) / view.job.weight

    def reason(self, view: JobView, given: Allocation | None) -> str:
        """Its remaining time."""
        if given:
            return f"{format_duration_s(view.remaining_s(given))} left, less than those that wait"
        return "waits for jobs with less time left"


@register
@dataclass(frozen=True, slots=True)
class LeastAttainedService:
    """Tiresias-L: queues by what a job has had so far, first come first served within each.

    Attributes:
        thresholds_device_s: Device-seconds after which a job sinks to the next queue.
    """

    name: str = "las"
    title: str = (
        f"least attained service (Tiresias), queue ends at {LAS_THRESHOLDS_DEVICE_S[0]:.0f} device-seconds"
    )
    adapts_batch: bool = False
    is_stable: bool = False
    thresholds_device_s: tuple[float, ...] = LAS_THRESHOLDS_DEVICE_S

    def queue(self, attained_device_s: float) -> int:
        """Number of the queue, 0 is served first."""
        return sum(attained_device_s >= end for end in self.thresholds_device_s)

    def allocate(
        self, jobs: Sequence[JobView], cluster: SharedCluster, now_s: float
    ) -> dict[str, Allocation]:
        """By queue, then by arrival."""
        order = sorted(jobs, key=lambda v: (self.queue(v.attained_device_s), v.order))
        return admit_in_order(order, cluster, may_overtake=True)

    def reason(self, view: JobView, given: Allocation | None) -> str:
        """Its queue."""
        queue = self.queue(view.attained_device_s) + 1
        return f"queue {queue}" if given else f"queue {queue}, waits for higher queues and earlier jobs"


@register
@dataclass(frozen=True, slots=True)
class EqualShare:
    """The same number of devices for all, never more than help."""

    name: str = "equal"
    title: str = "equal share, elastic, stops where more devices no longer help"
    adapts_batch: bool = False
    is_stable: bool = True

    def allocate(
        self, jobs: Sequence[JobView], cluster: SharedCluster, now_s: float
    ) -> dict[str, Allocation]:
        """Rounds of one more for each job that gains by it, the smallest share first."""
        return _progressive_filling(jobs, cluster, until_best=True)

    def reason(self, view: JobView, given: Allocation | None) -> str:
        """Its share."""
        return "its share of the devices" if given else "waits: more jobs than devices, it had most so far"


@register
@dataclass(frozen=True, slots=True)
class DominantResourceFairness:
    """The smallest dominant share grows first, whether it helps or not; one server with each worker.

    Source: Ghodsi et al. 2011, "Dominant Resource Fairness", NSDI; as the baseline of Optimus, section 6.1.
    """

    name: str = "drf"
    title: str = "dominant resource fairness"
    adapts_batch: bool = False
    is_stable: bool = True

    def allocate(
        self, jobs: Sequence[JobView], cluster: SharedCluster, now_s: float
    ) -> dict[str, Allocation]:
        """Progressive filling."""
        return _progressive_filling(jobs, cluster, until_best=False)

    def reason(self, view: JobView, given: Allocation | None) -> str:
        """Its share."""
        return "its fair dominant share" if given else "waits: more jobs than the cluster can start"


def _progressive_filling(
    jobs: Sequence[JobView], cluster: SharedCluster, *, until_best: bool
) -> dict[str, Allocation]:
    """Every job started, who had least first, then one unit after another to the smallest share."""
    free = FreeResources(cluster)
    waiting_first = sorted(jobs, key=lambda v: (v.attained_device_s, v.order))
    given = start_all(waiting_first, cluster, free)
    _fill(jobs, free, given, cluster, until_best=until_best)
    return given


def _fill(
    jobs: Sequence[JobView],
    free: FreeResources,
    given: dict[str, Allocation],
    cluster: SharedCluster,
    *,
    until_best: bool,
) -> None:
    """One unit after another to the smallest dominant share, weights considered."""
    views = {
        view.job.name: view
        for view in jobs
        if view.job.name in given and view.job.is_elastic and not view.is_held
    }
    heap = [(_share(view, given[name], cluster, free), view.order, name) for name, view in views.items()]
    heapq.heapify(heap)
    while heap:
        _, order, name = heapq.heappop(heap)
        view, present = views[name], given[name]
        wanted = _next_unit(view, present, free, until_best)
        if wanted is None:
            continue
        unit = Allocation(
            present.device, wanted.num_workers - present.num_workers, wanted.num_servers - present.num_servers
        )
        if free.fits(view.job, unit):
            free.take(view.job, unit)
            given[name] = wanted
            heapq.heappush(heap, (_share(view, wanted, cluster, free), order, name))


def _next_unit(
    view: JobView, present: Allocation, free: FreeResources, until_best: bool
) -> Allocation | None:
    """The next larger allocation that the job can use."""
    if isinstance(view.job.training, ServerTraining):
        wanted = Allocation(present.device, present.num_workers + 1, present.num_servers + 1)
        helps = not until_best or view.rate(wanted) > view.rate(present)
        return wanted if helps and wanted.num_workers <= view.job.max_workers else None
    curve, now = view.curves[present.device], present.num_workers
    most = min(view.job.max_workers, now + int(free.num_devices(present.device)))
    larger = (n for n in curve.rates if now < n <= most)
    if until_best:
        larger = (n for n in larger if curve.rate(n) > curve.rate(now))
    n = next(larger, None)
    return None if n is None else Allocation(present.device, n)


def _share(view: JobView, given: Allocation, cluster: SharedCluster, free: FreeResources) -> float:
    devices, cores, memory = free.demand(view.job, given)
    capacity = cluster.capacity
    owned = devices / capacity[cluster.kinds.index(given.device)]
    return max(owned, cores / capacity[-2], memory / capacity[-1]) / view.job.weight


@register
@dataclass(frozen=True, slots=True)
class Tetris:
    """Packing: a job's requests go where they align best with what is free, short jobs first.

    Score = demand . free (each as a share of the cluster) + the rank of the remaining time, both in 0 to 1. Each
    job first gets the least it runs with; then requests are filled in the order of the score.

    Source: Grandl et al. 2014, "Multi-resource packing for cluster schedulers", SIGCOMM; tasks of a training job
    are not given in advance, so what its owner asks for stands for them.
    """

    name: str = "tetris"
    title: str = "Tetris: alignment with what is free, short jobs first"
    adapts_batch: bool = False
    is_stable: bool = True

    def allocate(
        self, jobs: Sequence[JobView], cluster: SharedCluster, now_s: float
    ) -> dict[str, Allocation]:
        """By score, each what was asked for."""
        free = FreeResources(cluster)
        shortest_first = sorted(jobs, key=lambda v: (self._left_s(v, cluster), v.order))
        given = start_all(shortest_first, cluster, free)
        rank = {view.job.name: 1 - i / len(jobs) for i, view in enumerate(shortest_first)}
        open_views = [view for view in jobs if view.job.name in given and not view.is_held]
        while open_views:
            best = max(
                open_views, key=lambda v: (rank[v.job.name] + _alignment(v, given, cluster, free), -v.order)
            )
            open_views.remove(best)
            self._fill_request(best, given, free)
        return given

    @staticmethod
    def _fill_request(view: JobView, given: dict[str, Allocation], free: FreeResources) -> None:
        """As much of the request as fits."""
        present = given[view.job.name]
        wanted = view.asked(present.device)
        free.take(view.job, present, sign=-1)
        while wanted.num_workers > present.num_workers and not free.fits(view.job, wanted):
            smaller = min(wanted.num_servers, wanted.num_workers - 1)
            wanted = Allocation(present.device, wanted.num_workers - 1, smaller)
        chosen = wanted if wanted.num_workers > present.num_workers and view.rate(wanted) > 0 else present
        free.take(view.job, chosen)
        given[view.job.name] = chosen

    @staticmethod
    def _left_s(view: JobView, cluster: SharedCluster) -> float:
        return view.asked_remaining_s(cluster)

    def reason(self, view: JobView, given: Allocation | None) -> str:
        """Where it came in the order."""
        return "its request fits what was free" if given else "waits: nothing left for the least it runs with"


def _alignment(
    view: JobView, given: dict[str, Allocation], cluster: SharedCluster, free: FreeResources
) -> float:
    """Dot product of the request and what is free, as shares of the cluster."""
    device = given[view.job.name].device
    index = cluster.kinds.index(device)
    capacity = cluster.capacity
    demand = free.demand(view.job, view.asked(device))
    pairs = zip(demand, (index, -2, -1), strict=True)
    shares = [
        (need / capacity[i]) * (free.left[i] / capacity[i])
        for need, i in pairs
        if capacity[i] != float("inf")
    ]
    return sum(shares) / max(len(shares), 1)
