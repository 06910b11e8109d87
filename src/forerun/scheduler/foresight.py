"""Our own policy: relative gain in goodput, short jobs somewhat first, and no change that does not pay its restart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from forerun.scheduler.cluster import SharedCluster
from forerun.scheduler.greedy import grow, start_all
from forerun.scheduler.job import Allocation
from forerun.scheduler.marginal_gain import minus_slowness, speedup_reason
from forerun.scheduler.policy import FreeResources, JobView, register

__all__ = ["Foresight"]


@register
@dataclass(frozen=True, slots=True)
class Foresight:
    """Goodput's relative gain, weighted by the forecast of what is left, and steadied.

    The utility of n devices is -(f(1) / f(n)) / T ** a, with T the forecast time left on the least the job runs with.
    a = 0 is ``pollux``; a = -1 is Optimus' gain in seconds. An error of the forecast enters only by its root.

    Then each change is weighed: a running job keeps what it has unless the new allocation brings its end forward by
    more than ``restarts_to_save`` restarts, or others need the devices. What is left over goes to jobs that start
    or change anyway.

    Attributes:
        shortness: a.
        restarts_to_save: Restart times that a change must save.
    """

    name: str = "foresight"
    title: str = "goodput, short jobs somewhat first, no change that does not pay its restart (ours)"
    adapts_batch: bool = True
    is_stable: bool = True
    shortness: float = 0.5
    restarts_to_save: float = 4.0

    def allocate(
        self, jobs: Sequence[JobView], cluster: SharedCluster, now_s: float
    ) -> dict[str, Allocation]:
        """By weighted relative gain, then steadied."""
        free = FreeResources(cluster)
        least_first = sorted(jobs, key=lambda v: (v.attained_device_s, v.order))
        given = start_all(least_first, cluster, free)
        grow(jobs, cluster, free, given, self._utility, one_at_a_time=False)
        changed = self._keep_what_does_not_pay(jobs, free, given)
        grow(changed, cluster, free, given, self._utility, one_at_a_time=False)
        return given

    def _utility(self, view: JobView, given: Allocation) -> float:
        least = view.smallest(given.device)
        if least is None:
            return -inf
        return float(minus_slowness(view, given) / view.remaining_s(least) ** self.shortness)

    def _keep_what_does_not_pay(
        self, jobs: Sequence[JobView], free: FreeResources, given: dict[str, Allocation]
    ) -> list[JobView]:
        """Gives jobs back what they had where the change does not pay and there is room; returns the others."""
        changed = []
        for view in jobs:
            name, present = view.job.name, view.current
            wanted = given.get(name)
            if wanted is None or present is None:
                changed.append(view)
                continue
            if wanted == present:
                continue
            free.take(view.job, wanted, sign=-1)
            if not self._pays(view, present, wanted) and free.fits(view.job, present):
                wanted = given[name] = present
            else:
                changed.append(view)
            free.take(view.job, wanted)
        return changed

    def _pays(self, view: JobView, present: Allocation, wanted: Allocation) -> bool:
        saved_s = view.remaining_s(present) - view.remaining_s(wanted)
        return saved_s > self.restarts_to_save * view.job.restart_s

    def reason(self, view: JobView, given: Allocation | None) -> str:
        """Its speedup."""
        return speedup_reason(view, given)
