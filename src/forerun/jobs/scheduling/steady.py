"""The price of preemption, the same for every policy: taking devices from a running job must pay the restarts."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from forerun.jobs.scheduling.cluster import SharedCluster
from forerun.jobs.scheduling.job import Allocation
from forerun.jobs.scheduling.policy import FreeResources, JobView, Policy

__all__ = ["decide"]

_MOST_QUESTIONS = 4
"""Times a policy is asked in one decision; what then still does not pay is left as it is."""


def decide(
    policy: Policy, jobs: Sequence[JobView], cluster: SharedCluster, now_s: float, round_s: float = 0.0
) -> dict[str, Allocation]:
    """The shares that a policy gives, with every job kept where it is whose change does not pay.

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
        policy: Who decides.
        jobs: As for ``Policy.allocate``; those that are to stay as they are get marked as held.
        cluster: What there is.
        now_s: Time [s].
        round_s: Time until the next decision [s].
    """
    given = policy.allocate(jobs, cluster, now_s)
    if getattr(policy, "is_raw", False):
        return given
    for question in range(_MOST_QUESTIONS):
        changes = _Changes(jobs, cluster, given, round_s)
        kept = changes.unpaid()
        if not kept:
            break
        # Each answer may call for other jobs to be held, without end: the last question holds all that run, but for
        # those that make room for urgent ones.
        if question == _MOST_QUESTIONS - 2:
            kept = [view for view in changes.running if view.job.name not in changes.yielding]
        for view in kept:
            view.is_held = True
        given = policy.allocate(jobs, cluster, now_s)
    return given


class _Changes:
    """The changes that a policy wants, beside what is."""

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
        free = FreeResources(self.cluster)
        for view in self.running:
            assert view.current is not None
            free.take(view.job, view.current)
        gain_s = {view.job.name: self._own_gain_s(view) for view in self.changed}
        paid: set[str] = set()
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
                free.take(view.job, view.current, sign=-1)
                paid.add(view.job.name)
            free.take(view.job, wanted)
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
        if wanted is None or left_s <= self.round_s:
            return -inf
        return left_s - view.remaining_s(wanted) - 2 * view.job.restart_s

    @staticmethod
    def _left_s(view: JobView) -> float:
        assert view.current is not None
        return view.remaining_s(view.current)

    def _enough(self, view: JobView, wanted: Allocation, free: FreeResources) -> list[JobView] | None:
        """Running jobs whose devices this one needs, the longest first; None if even all of them are not enough."""
        taken: list[JobView] = []
        if view.current is not None:
            free.take(view.job, view.current, sign=-1)
        for victim in self.victims:
            if free.fits(view.job, wanted):
                break
            assert victim.current is not None
            if victim.current.device == wanted.device:
                self._swap(victim, free)
                taken.append(victim)
        fits = free.fits(view.job, wanted)
        for victim in taken:
            self._swap(victim, free, sign=-1)
        if view.current is not None:
            free.take(view.job, view.current)
        return taken if fits else None

    def _swap(self, victim: JobView, free: FreeResources, sign: int = 1) -> None:
        """Gives a job what the policy wants for it instead of what it has, or back with sign -1."""
        assert victim.current is not None
        free.take(victim.job, victim.current, sign=-sign)
        wanted = self.given.get(victim.job.name)
        if wanted is not None:
            free.take(victim.job, wanted, sign=sign)

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
