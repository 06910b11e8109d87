"""One device after another to whom it helps most: the engine of the elastic policies."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from forerun.scheduler.cluster import SharedCluster
from forerun.scheduler.job import Allocation, ServerTraining
from forerun.scheduler.policy import FreeResources, JobView

__all__ = ["Utility", "grow", "start_all"]

Utility = Callable[[JobView, Allocation], float]
"""Worth of an allocation to a job; only differences count."""


def start_all(jobs: Iterable[JobView], cluster: SharedCluster, free: FreeResources) -> dict[str, Allocation]:
    """Gives each job in turn the least it can run with, so that nobody starves."""
    given: dict[str, Allocation] = {}
    for view in jobs:
        for kind in view.kinds(cluster):
            least = view.smallest(kind)
            if least is not None and free.fits(view.job, least):
                free.take(view.job, least)
                given[view.job.name] = least
                break
    return given


def grow(
    jobs: Sequence[JobView],
    cluster: SharedCluster,
    free: FreeResources,
    given: dict[str, Allocation],
    utility: Utility,
    *,
    one_at_a_time: bool,
) -> None:
    """Hands out what is left, each time where it raises the utility most per share of the cluster.

    A job that would gain only with several devices more (the next one alone is on another node, say) is offered all
    of them at once, unless ``one_at_a_time``. Tasks are counted by their dominant share, the largest share of any
    resource of the cluster they occupy. A heap holds the best offer of each job, so that n tasks for m jobs take
    O(n log m).

    Args:
        jobs: Jobs that may grow; those not in ``given`` are left alone.
        cluster: What there is.
        free: What is left, changed in place.
        given: What each job has, changed in place.
        utility: What an allocation is worth.
        one_at_a_time: One worker or one server in each step, as Optimus does.
    """
    engine = _Engine(cluster, free, utility, one_at_a_time)
    views = {view.job.name: view for view in jobs if view.job.name in given and view.job.is_elastic}
    worth = {name: utility(view, given[name]) for name, view in views.items()}
    heap: list[tuple[float, int, _Offer]] = []
    for name, view in views.items():
        engine.push(heap, view, given[name], worth[name])
    while heap:
        _, _, offer = heapq.heappop(heap)
        view = offer.view
        name = view.job.name
        # Others may have taken what this offer needed: then a smaller one may still fit.
        if free.fits(view.job, offer.more):
            free.take(view.job, offer.more)
            given[name], worth[name] = offer.wanted, offer.worth
        engine.push(heap, view, given[name], worth[name])


class _Offer(NamedTuple):
    """The next step of one job: what it would have, what is added, what it would be worth."""

    view: JobView
    wanted: Allocation
    more: Allocation
    worth: float


class _Engine:
    """Finds the best next step of a job."""

    def __init__(
        self, cluster: SharedCluster, free: FreeResources, utility: Utility, one_at_a_time: bool
    ) -> None:
        self._free, self._utility, self._one_at_a_time = free, utility, one_at_a_time
        self._capacity = cluster.capacity
        self._index = {kind: i for i, kind in enumerate(cluster.kinds)}

    def push(
        self, heap: list[tuple[float, int, _Offer]], view: JobView, present: Allocation, worth: float
    ) -> None:
        """Enters the offer with the most gain per share of those that fit, if any helps."""
        best: _Offer | None = None
        most = 0.0
        for wanted, more in self._steps(view, present):
            value = self._utility(view, wanted)
            gained = value - worth
            if gained > 0:
                per_share = gained / self._share(view, more)
                if per_share > most:
                    best, most = _Offer(view, wanted, more, value), per_share
        if best is not None:
            heapq.heappush(heap, (-most, view.order, best))

    def _share(self, view: JobView, more: Allocation) -> float:
        """Share of the cluster that a step occupies, by its scarcest resource."""
        devices, cores, memory = self._free.demand(view.job, more)
        capacity = self._capacity
        return max(devices / capacity[self._index[more.device]], cores / capacity[-2], memory / capacity[-1])

    def _steps(self, view: JobView, present: Allocation) -> Iterator[tuple[Allocation, Allocation]]:
        """Allocations that a job could grow to next and what each adds, as far as they fit."""
        device, w, p = present.device, present.num_workers, present.num_servers
        if isinstance(view.job.training, ServerTraining):
            server, worker = Allocation(device, 0, 1), Allocation(device, 1, 0)
            if self._free.fits(view.job, server):
                yield Allocation(device, w, p + 1), server
            if w < view.job.max_workers and self._free.fits(view.job, worker):
                yield Allocation(device, w + 1, p), worker
            return
        n = self._next_size(view, present)
        if n > w and self._free.fits(view.job, more := Allocation(device, n - w)):
            yield Allocation(device, n), more

    def _next_size(self, view: JobView, present: Allocation) -> int:
        """Devices to offer next; as many as it has if none."""
        curve, w = view.curves[present.device], present.num_workers
        most = min(
            view.job.max_workers, len(curve.rates) - 1, w + int(self._free.num_devices(present.device))
        )
        if self._one_at_a_time:
            return min(w + 1, most)
        corner = next((n for n in curve.hull if w < n <= most), None)
        # The next corner may not fit: then the best that does.
        return corner if corner is not None else max(w, curve.best_within(most))
