"""Reasons to take devices from a running job: a change that pays its restarts, and a job that waited too long.

Finish-time fairness is a job's completion over that with its own share of the cluster:

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

from forerun.jobs.scheduling.job import Allocation, SharedCluster
from forerun.jobs.scheduling.policy import FreeDevices, JobView, Policy

_ROOM = 1 / 18
"""Share of the room under a bound at which a waiting job is served first: rounds and restarts are long beside a job of
half a minute, and its work may be forecast ten times too long before its first epoch. At the usual bound of 10 a job
may wait for half of its own length. A share of the bound itself would call every job of a bound below 5 urgent before
it has waited."""

_SLOW = 2 / 3
"""The same for the end that is foreseen of a job that runs on slow devices: two speeds, each off by a quarter, are left
room for."""


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
    share = view.fair_share(cluster, num_jobs)
    if share is None:
        return Fairness(0.0, 0.0, inf)
    # What is left over what is to do is the whole; near the end both are almost nothing.
    left_s, done = view.remaining_s(_served_with(view, share)), max(1.0 - view.progress, 1e-3)
    whole_s = view.remaining_s(share) / done
    restart_s = 0.0 if view.current is not None else view.job.restart_s
    rho = (now_s - view.job.arrival_s + restart_s + left_s) / whole_s
    return Fairness(rho, rho - (view.job.restart_s + left_s / done) / whole_s, whole_s)


def serve_urgent(
    jobs: Sequence[JobView], cluster: SharedCluster, now_s: float, bound: float, free: FreeDevices
) -> dict[str, Allocation]:
    """Shares of jobs that are about to exceed a bound, the worst first, taken out of what is free.

    They are marked as urgent. Running ones keep what they have, also those that are no better off than one that waits.
    """
    given: dict[str, Allocation] = {}
    if bound == inf:
        return given
    for view in jobs:
        view.is_urgent = False
    rated = [
        (finish_time_fairness(view, cluster, len(jobs), now_s), view) for view in jobs if not view.is_held
    ]

    def is_wanting(found: Fairness, view: JobView) -> bool:
        if view.current is None:
            return found.is_late(bound)
        end_s = now_s - view.job.arrival_s + view.remaining_s(view.current)
        return end_s > (1 + _SLOW * (bound - 1)) * found.whole_s

    # A job that waited too long wants its share, and so does one that runs so slowly that it would end near the bound.
    wanting = {view.job.name: (found, view) for found, view in rated if is_wanting(found, view)}
    worst, first = max(wanting.values(), key=lambda item: item[0].rho, default=(None, None))
    shortest_s = min((view.least_remaining_s for view in jobs if view.current is None), default=0.0)
    served = list(wanting.values())
    for found, view in rated:
        if view.current is None or view.job.name in wanting:
            continue
        held_s = shortest_s if first is None else first.least_remaining_s
        lost = (held_s + view.job.restart_s) / found.whole_s
        if worst is None:
            # Stopped for the shortest that waits, it would be past the bound by the time that one is done.
            goes_on = found.is_late(bound) and found.rho + lost >= bound
        else:
            # A running job that would be later than the worst that waits, were it stopped for it, goes on, and so does
            # one that would lose more than the other by waiting for its end: to take turns makes all of them later.
            left = view.remaining_s(view.current) / worst.whole_s
            goes_on = found.rho + lost >= worst.rho or lost >= left
        if goes_on:
            served.append((found, view))
    if not served:
        return given
    held = [view for view in jobs if view.is_held]
    free.take_all(held)
    for _, view in sorted(served, key=lambda item: (item[1].current is None, -item[0].rho, item[1].order)):
        wanted = view.current
        if view.job.name in wanting:
            share = view.fair_share(cluster, len(jobs))
            wanted = None if share is None else _served_with(view, share)
        if wanted is not None and free.fits(wanted):
            view.is_urgent = True
            free.take(wanted)
            given[view.job.name] = wanted
    # The policy itself takes held shares out of what is free, and must not find them gone already.
    free.take_all(held, sign=-1)
    return given


def urgent_in_s(view: JobView, cluster: SharedCluster, num_jobs: int, now_s: float, bound: float) -> float:
    """Time after which a job that waits becomes urgent [s]; zero if it is so already."""
    found = finish_time_fairness(view, cluster, num_jobs, now_s)
    return max(0.0, (_ROOM * (bound - 1) - found.waited) * found.whole_s)


_MOST_QUESTIONS = 4
"""Times a policy is asked in one decision; what then still does not pay is left as it is."""


def decide(
    policy: Policy, jobs: Sequence[JobView], cluster: SharedCluster, now_s: float, round_s: float = 0.0
) -> dict[str, Allocation]:
    """The shares that a policy gives, with every job kept as it is whose change does not pay.

    The policy is asked; running jobs whose change does not pay are held, and it is asked again about the rest. A change
    pays in seconds of completion, weighted, by the forecasts S of restarts and r of the time left:

    - A job that wants to change by itself gains r before - r after, and pays its own restart twice, for what it
      gets may soon be wanted by another. One that ends before the next decision changes nothing.
    - A job that takes devices from a running one gains as above, or its wait if it does not run: the time until the
      others would be done, or until all that wait could have started anyway. It pays, for each job that it
      stops, the restart and the time it holds the devices; for each that it moves to a slower kind, two restarts and
      the time lost; for each that it only makes smaller, the restart, for how to share is the policy's own idea.
    - A job that the policy marks as urgent takes devices at any price, and nobody takes its own.

    Args:
        policy: The policy that decides.
        jobs: As for ``Policy.allocate``; those that are to stay as they are get marked as held.
        cluster: The cluster.
        now_s: Time [s].
        round_s: Time until the next decision [s].
    """
    given = policy.allocate(jobs, cluster, now_s)
    if policy.is_raw:
        return given
    yielding: set[str] = set()
    for question in range(_MOST_QUESTIONS):
        changes = _Changes(jobs, cluster, given, round_s)
        kept = changes.unpaid()
        yielding = changes.yielding or yielding
        if not kept:
            break
        # Each answer may call for other jobs to be held, without end: the last question holds all that run, but for
        # those that make room for urgent ones.
        if question == _MOST_QUESTIONS - 2:
            kept = [view for view in changes.running if view.job.name not in yielding]
        for view in kept:
            view.is_held = True
        given = policy.allocate(jobs, cluster, now_s)
    return given


class _Changes:
    """The changes that a policy wants, beside what jobs have."""

    def __init__(
        self, jobs: Sequence[JobView], cluster: SharedCluster, given: dict[str, Allocation], round_s: float
    ) -> None:
        self.jobs, self.cluster, self.given, self.round_s = jobs, cluster, given, round_s
        self.running = [view for view in jobs if view.current is not None]
        self.yielding: set[str] = set()
        self.changed = [
            view for view in self.running if not view.is_held and given.get(view.job.name) != view.current
        ]

    def unpaid(self) -> list[JobView]:
        """Running jobs that had better keep what they have."""
        if not self.changed:
            return []
        free = FreeDevices(self.cluster)
        free.take_all(self.running)
        gain_s = {view.job.name: self._own_gain_s(view) for view in self.changed}
        paid: set[str] = set()
        # Who is better off anyway gives nothing up for others: only the worse off can be paid for.
        worse_off = [view for view in self.changed if not view.is_urgent and self._is_worse_off(view)]
        self.victims = sorted(worse_off, key=lambda v: -self._left_s(v))
        self.waits: dict[str, float] = {}
        for view in self._takers(gain_s):
            wanted = self.given[view.job.name]
            stopped = self._enough(view, wanted, free)
            if stopped is None:
                continue
            if view.is_urgent:
                self.yielding.update((view.job.name, *(victim.job.name for victim in stopped)))
            elif stopped:
                gain = gain_s[view.job.name] if view.current is not None else self._wait_s(wanted, stopped)
                held_s = view.remaining_s(wanted) + view.job.restart_s
                cost = sum(victim.job.weight * self._loss_s(victim, held_s) for victim in stopped)
                if view.job.weight * gain <= cost:
                    continue
            for victim in stopped:
                self._swap(victim, free)
                self.victims.remove(victim)
                paid.add(victim.job.name)
            if view.current is not None:
                paid.add(view.job.name)
            free.take_all([view], sign=-1)
            free.take(wanted)
        return [view for view in self.changed if view.job.name not in paid]

    def _takers(self, gain_s: dict[str, float]) -> list[JobView]:
        """Jobs that gain, in the order in which the policy served them."""
        by_name = {view.job.name: view for view in self.jobs}
        return [
            by_name[name] for name in self.given if by_name[name].current is None or gain_s.get(name, 0.0) > 0
        ]

    def _is_worse_off(self, view: JobView) -> bool:
        """True if a running job would be slower, so that it changes for others."""
        wanted = self.given.get(view.job.name)
        return wanted is None or view.remaining_s(wanted) > self._left_s(view)

    def _own_gain_s(self, view: JobView) -> float:
        """Time that a running job saves by its change, its restart paid twice [s]."""
        wanted, left_s = self.given.get(view.job.name), self._left_s(view)
        # A job that ends before the next decision would lose more by a restart than it could win.
        if wanted is None or left_s <= self.round_s:
            return -inf
        return left_s - view.remaining_s(wanted) - 2 * view.job.restart_s

    @staticmethod
    def _left_s(view: JobView) -> float:
        assert view.current is not None
        return view.remaining_s(view.current)

    def _enough(self, view: JobView, wanted: Allocation, free: FreeDevices) -> list[JobView] | None:
        """Running jobs whose devices this one needs, the longest first; None if even all of them are not enough."""
        taken: list[JobView] = []
        free.take_all([view], sign=-1)
        for victim in self.victims:
            if free.fits(wanted):
                break
            assert victim.current is not None
            if victim.current.device == wanted.device:
                self._swap(victim, free)
                taken.append(victim)
        fits = free.fits(wanted)
        # Only a trial so far: whether the change pays is asked later, so that all is put back.
        for victim in taken:
            self._swap(victim, free, sign=-1)
        free.take_all([view])
        return taken if fits else None

    def _swap(self, victim: JobView, free: FreeDevices, sign: int = 1) -> None:
        """Gives a job what the policy wants for it instead of what it has, or back with sign -1."""
        free.take_all([victim], sign=-sign)
        wanted = self.given.get(victim.job.name)
        if wanted is not None:
            free.take(wanted, sign=sign)

    def _loss_s(self, victim: JobView, held_s: float) -> float:
        """Time that a job loses whose devices are held by another for so long [s]."""
        assert victim.current is not None
        wanted, restart_s = self.given.get(victim.job.name), victim.job.restart_s
        if wanted is None:
            return restart_s + held_s
        if wanted.device == victim.current.device:
            return restart_s
        slower_s = victim.remaining_s(wanted) - self._left_s(victim)
        return 2 * restart_s + min(held_s, max(0.0, slower_s))

    def _wait_s(self, wanted: Allocation, stopped: Sequence[JobView]) -> float:
        """Time until the devices come free if nobody is stopped [s]."""
        until_s = max(self._left_s(victim) for victim in stopped)
        kind = wanted.device
        if kind not in self.waits:
            self.waits[kind] = self._all_started_s(kind)
        return min(until_s, self.waits[kind])

    def _all_started_s(self, kind: str) -> float:
        """Time until ends of running jobs have left room for all that wait [s]; infinite if they never do."""
        needed = sum(view.job.num_workers for view in self.jobs if view.current is None)
        ends = sorted(
            (self._left_s(view), view.current.num_workers)
            for view in self.running
            if view.current is not None and view.current.device == kind
        )
        needed -= self.cluster.group(kind).num_devices - sum(number for _, number in ends)
        for time_s, number in ends:
            needed -= number
            if needed <= 0:
                return time_s
        return inf
