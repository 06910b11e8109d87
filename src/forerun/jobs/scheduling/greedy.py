"""The engine of the elastic policies: it gives one device after another to the job that gains most by it."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import permutations
from typing import NamedTuple

from forerun.jobs.scheduling.job import Allocation, ServerTraining, SharedCluster
from forerun.jobs.scheduling.policy import FreeResources, JobView, hold

__all__ = [
    "Utility",
    "exchange_kinds",
    "grow",
    "start_all",
]

Utility = Callable[[JobView, Allocation], float]
"""Worth of an allocation to a job; only differences count."""

_MOST_EXCHANGES = 4
"""Times all jobs are asked again in one decision because some changed the kind of their devices."""

_LEAST_SHARE = 1e-9


def start_all(jobs: Iterable[JobView], cluster: SharedCluster, free: FreeResources) -> dict[str, Allocation]:
    """Gives each job in turn the least it can run with, on the kind of devices where it would be done first.

    A running job weighs its restart in before it changes the kind; pairs of jobs that are better off with each other's
    kind exchange them. Jobs that are held come first, with what they have.
    """
    jobs = list(jobs)
    given = hold(jobs, free)
    for view in jobs:
        if view.job.name in given or not free.has_room(view.job):
            continue
        options = [least for kind in view.kinds(cluster) if (least := view.smallest(kind)) is not None]
        if len(options) > 1:
            options.sort(key=lambda least: view.remaining_s(least) + view.move_s(least.device))
        found = next((least for least in options if free.fits(view.job, least)), None)
        if found is not None:
            free.take(view.job, found)
            given[view.job.name] = found
    if len(cluster.groups) > 1:
        exchange_kinds(jobs, given)
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

    Where there are several kinds of devices, each job is also offered what makes it faster on another kind in
    exchange for what it has; a job of one size is offered only that. An exchange leaves room behind, so that all are
    asked again.

    Args:
        jobs: Jobs that may grow; those not in ``given`` are left alone.
        cluster: What there is.
        free: What is left, changed in place.
        given: What each job has, changed in place.
        utility: What an allocation is worth.
        one_at_a_time: One worker or one server in each step, as Optimus does.
    """
    engine = _Engine(cluster, free, utility, one_at_a_time)
    views = {
        view.job.name: view
        for view in jobs
        if view.job.name in given and not view.is_held and (view.job.is_elastic or engine.may_exchange(view))
    }
    for _ in range(_MOST_EXCHANGES):
        if not _hand_out(engine, views, free, given, utility):
            break


def _hand_out(
    engine: _Engine,
    views: Mapping[str, JobView],
    free: FreeResources,
    given: dict[str, Allocation],
    utility: Utility,
) -> bool:
    """Takes offers until none is left; whether a job changed the kind of its devices."""
    worth = {name: utility(view, given[name]) for name, view in views.items()}
    heap: list[tuple[float, int, _Offer]] = []
    for name, view in views.items():
        engine.push(heap, view, given[name], worth[name])
    has_exchanged = False
    while heap:
        _, _, offer = heapq.heappop(heap)
        view = offer.view
        name = view.job.name
        # Others may have taken what this offer needed: then a smaller one may still fit.
        if free.fits(view.job, offer.more):
            free.take(view.job, offer.more)
            if offer.back is not None:
                free.take(view.job, offer.back, sign=-1)
                has_exchanged = True
            given[name], worth[name] = offer.wanted, offer.worth
        engine.push(heap, view, given[name], worth[name])
    return has_exchanged


class _Offer(NamedTuple):
    """The next step of one job: what it would have, what is added and given back, what it would be worth."""

    view: JobView
    wanted: Allocation
    more: Allocation
    back: Allocation | None
    worth: float


class _Engine:
    """Finds the best next step of a job."""

    def __init__(
        self, cluster: SharedCluster, free: FreeResources, utility: Utility, one_at_a_time: bool
    ) -> None:
        self._free, self._utility, self._one_at_a_time = free, utility, one_at_a_time
        self._capacity = cluster.capacity
        self._index = {kind: i for i, kind in enumerate(cluster.kinds)}

    def may_exchange(self, view: JobView) -> bool:
        """True if a job could run on several kinds of devices."""
        return len(view.curves) > 1

    def push(
        self, heap: list[tuple[float, int, _Offer]], view: JobView, present: Allocation, worth: float
    ) -> None:
        """Enters the offer with the most gain per share of those that fit, if any helps."""
        best: _Offer | None = None
        most = 0.0
        for wanted, more, back in self._steps(view, present):
            value = self._utility(view, wanted)
            gained = value - worth
            if gained > 0:
                share = self._share(view, more)
                if back is not None:
                    # What takes no larger share than it gives back is taken at once, the largest gain first.
                    share = max(share - self._share(view, back), _LEAST_SHARE)
                per_share = gained / share
                if per_share > most:
                    best, most = _Offer(view, wanted, more, back, value), per_share
        if best is not None:
            # Of equal offers the job that came first has precedence; offers themselves are never compared.
            heapq.heappush(heap, (-most, view.order, best))

    def _share(self, view: JobView, more: Allocation) -> float:
        """Share of the cluster that a step occupies, by its scarcest resource."""
        devices, cores, memory = self._free.demand(view.job, more)
        capacity = self._capacity
        return max(devices / capacity[self._index[more.device]], cores / capacity[-2], memory / capacity[-1])

    def _steps(
        self, view: JobView, present: Allocation
    ) -> Iterator[tuple[Allocation, Allocation, Allocation | None]]:
        """Allocations that a job could have next, what each adds and gives back, as far as they fit."""
        device, w, p = present.device, present.num_workers, present.num_servers
        if isinstance(view.job.training, ServerTraining):
            server, worker = Allocation(device, 0, 1), Allocation(device, 1, 0)
            if self._free.fits(view.job, server):
                yield Allocation(device, w, p + 1), server, None
            if w < view.job.max_workers and self._free.fits(view.job, worker):
                yield Allocation(device, w + 1, p), worker, None
            return
        if view.job.is_elastic:
            n = self._next_size(view, present)
            if n > w and self._free.fits(view.job, more := Allocation(device, n - w)):
                yield Allocation(device, n), more, None
        for kind in view.curves:
            other = self._elsewhere(view, kind, present) if kind != device else None
            if other is not None and self._free.fits(view.job, other):
                yield other, other, present

    def _elsewhere(self, view: JobView, kind: str, present: Allocation) -> Allocation | None:
        """The least on another kind of devices that is faster than what the job has."""
        if not (view.job.is_elastic and view.job.is_preemptible):
            return view.asked(kind)
        curve = view.curves[kind]
        most = min(view.job.max_workers, int(self._free.num_devices(kind)))
        rate = view.rate(present)
        n = next((n for n in (curve.fewest, *curve.hull) if 0 < n <= most and curve.rate(n) > rate), None)
        return None if n is None else Allocation(kind, n)

    def _next_size(self, view: JobView, present: Allocation) -> int:
        """Devices to offer next; as many as it has if none."""
        curve, w = view.curves[present.device], present.num_workers
        most = min(view.job.max_workers, w + int(self._free.num_devices(present.device)))
        if self._one_at_a_time:
            return curve.after(w, most) or w
        corner = next((n for n in curve.hull if w < n <= most), None)
        # The next corner may not fit: then the best that does.
        return corner if corner is not None else max(w, curve.best_within(most))


_MOST_COMPARED = 40
"""Jobs of one kind and size that are compared with those of another, so that large clusters stay cheap."""


def exchange_kinds(jobs: Sequence[JobView], given: dict[str, Allocation]) -> None:
    """Lets pairs of jobs with equally many devices change their kinds where that pays, in place.

    The job that would come to the faster kind gains no more than what it loses until the other is done, for then it
    could move there by itself: with r the time left on its own and on the other kind, t the other job's time on the
    kind in question and S the restart of a move,

        gain = min(r_slow - r_fast, t * (1 - r_fast / r_slow) + S)

    and the other loses likewise. Restarts of jobs that run already are part of r.

    Args:
        jobs: Jobs; those that are held or not in ``given`` are left alone.
        given: What each has, changed in place.
    """
    groups: dict[int, dict[str, list[JobView]]] = {}
    for view in jobs:
        present = given.get(view.job.name)
        if present is not None and not view.is_held and len(view.curves) > 1:
            groups.setdefault(present.num_workers, {}).setdefault(present.device, []).append(view)
    for number, kinds in groups.items():
        for slow, fast in permutations(kinds, 2):
            _exchange(kinds[slow], kinds[fast], Allocation(slow, number), Allocation(fast, number), given)


def _exchange(
    on_slow: list[JobView],
    on_fast: list[JobView],
    slow: Allocation,
    fast: Allocation,
    given: dict[str, Allocation],
) -> None:
    """Best exchanges first, each job at most once."""
    up = [view for view in on_slow if _left_s(view, fast) < _left_s(view, slow)]
    down = [view for view in on_fast if view.rate(slow) > 0]
    pairs = []
    for riser in up[:_MOST_COMPARED]:
        for giver in down[:_MOST_COMPARED]:
            # A giver that is faster on the other kind anyway loses nothing.
            gain_s = _later_s(riser, slow, fast, until_s=_left_s(giver, fast)) * riser.job.weight
            loss_s = _later_s(giver, slow, fast, until_s=_left_s(riser, fast)) * giver.job.weight
            if gain_s > loss_s:
                pairs.append((loss_s - gain_s, riser.order, giver.order, riser, giver))
    done: set[str] = set()
    for _, _, _, riser, giver in sorted(pairs, key=lambda pair: pair[:3]):
        if not done & {riser.job.name, giver.job.name}:
            done |= {riser.job.name, giver.job.name}
            given[riser.job.name], given[giver.job.name] = fast, slow
            on_slow.remove(riser)
            on_fast.remove(giver)
            on_slow.append(giver)
            on_fast.append(riser)


def _left_s(view: JobView, given: Allocation) -> float:
    return view.remaining_s(given) + view.move_s(given.device)


def _later_s(view: JobView, slow: Allocation, fast: Allocation, until_s: float) -> float:
    """Time that a job is done later with the slow kind, when it could move to the fast one after a time [s]."""
    slow_s, fast_s = _left_s(view, slow), _left_s(view, fast)
    if slow_s <= fast_s:
        return slow_s - fast_s
    return min(slow_s - fast_s, until_s * (1 - fast_s / slow_s) + view.job.restart_s)
