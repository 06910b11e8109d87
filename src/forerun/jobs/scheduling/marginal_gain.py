"""Policies by marginal gain: Optimus as published, normalised, goodput as in Pollux, our own, and deadlines first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import inf

from forerun.base.errors import InvalidSetupError
from forerun.base.units import format_duration_s
from forerun.jobs.scheduling.greedy import grow, start_all
from forerun.jobs.scheduling.job import Allocation, ServerTraining, SharedCluster
from forerun.jobs.scheduling.policy import FreeResources, JobView, NamedPolicy, hold, policy, register
from forerun.jobs.scheduling.preemption import serve_urgent

__all__ = [
    "USUAL_WORST_FAIRNESS",
    "YOUNG_FACTOR",
    "YOUNG_PROGRESS",
    "foresight_within",
    "minus_slowness",
    "speedup_reason",
]

USUAL_WORST_FAIRNESS = 10.0
"""Finish-time fairness that our policy keeps every job within unless told otherwise."""

YOUNG_FACTOR = 0.95
"""Factor on the gain of a job whose forecasts are young. Source: Peng et al. 2018, section 4.1."""

YOUNG_PROGRESS = 0.1
"""Share of the work below which a job counts as young; the paper gives no figure."""


def _left_with(view: JobView, given: Allocation | None) -> str:
    if given is None:
        return "waits: every device is the only one of a job that came earlier"
    return (
        f"{format_duration_s(view.remaining_s(given))} left; one more would save fewer seconds than elsewhere"
    )


@policy(
    "optimus",
    title="Optimus: most remaining seconds saved per device",
    reason=_left_with,
    is_stable=False,
)
def optimus(jobs: Sequence[JobView], cluster: SharedCluster, now_s: float) -> dict[str, Allocation]:
    """Optimus: each task where it saves most of the remaining time per dominant resource.

    Every job gets one worker (and one server); then, while anything is left, the job and the kind of task with the
    largest gain (Q / f(now) - Q / f(with one more)) / dominant share, Q the remaining work and f the speed.

    Source: Peng et al. 2018, "Optimus", EuroSys, section 4.1.
    """
    free = FreeResources(cluster)
    given = start_all(jobs, cluster, free)
    grow(jobs, cluster, free, given, _minus_remaining_s, one_at_a_time=True)
    return given


def _minus_remaining_s(view: JobView, given: Allocation) -> float:
    seconds = view.remaining_s(given) + view.move_s(given.device)
    return -seconds * (YOUNG_FACTOR if view.progress < YOUNG_PROGRESS else 1.0)


def _least_attained_first(jobs: Sequence[JobView]) -> list[JobView]:
    """Where jobs outnumber devices, those that had least come first, so that nobody starves."""
    return sorted(jobs, key=lambda v: (v.attained_device_s, v.order))


def minus_slowness(view: JobView, given: Allocation) -> float:
    """-f(1) / f(n), f(1) the rate with the least the job runs with on its fastest kind of devices.

    A running job that would change the kind counts the restart into the time of f(n).
    """
    rate, least = view.rate(given), view.least_rate
    if rate <= 0 or least <= 0:
        return -inf
    price = view.move_s(given.device) * least / view.remaining_samples
    return -view.job.weight * (least / rate + price)


def speedup_reason(view: JobView, given: Allocation | None) -> str:
    """The speedup that the devices bring."""
    if given is None:
        return "waits: every device is the only one of another job"
    least = view.smallest(given.device)
    if least is None or least == given:
        return "the least it runs with; more would help less here than elsewhere"
    speedup = view.rate(given) / view.rate(least)
    return f"{speedup:.1f} times as fast as with the least; more would help less than elsewhere"


@policy("normalised", title="gain relative to the job's own single-device time", reason=speedup_reason)
def normalised_gain(jobs: Sequence[JobView], cluster: SharedCluster, now_s: float) -> dict[str, Allocation]:
    """Optimus' gain divided by the job's own time on the least it runs with: no job is favoured for being long.

    The gain of n to m devices is f(1) / f(n) - f(1) / f(m); no remaining work enters.
    """
    free = FreeResources(cluster)
    given = start_all(_least_attained_first(jobs), cluster, free)
    grow(jobs, cluster, free, given, minus_slowness, one_at_a_time=False)
    return given


@policy(
    "pollux",
    title="relative gain in goodput, batch chosen with the devices (Pollux-like)",
    reason=speedup_reason,
    adapts_batch=True,
)
def goodput(jobs: Sequence[JobView], cluster: SharedCluster, now_s: float) -> dict[str, Allocation]:
    """The same on goodput: the batch is chosen anew for each number of devices.

    This is the objective of Pollux with fairness p = -1, maximised greedily instead of by a genetic algorithm.

    Source: Qiao et al. 2021, "Pollux", OSDI, section 4.2.
    """
    return normalised_gain(jobs, cluster, now_s)


def foresight(
    jobs: Sequence[JobView],
    cluster: SharedCluster,
    now_s: float,
    *,
    worst_fairness: float = inf,
    shortness: float = 0.5,
    restarts_to_save: float = 6.0,
) -> dict[str, Allocation]:
    """Least remaining time starts first; what is left goes by goodput's relative gain, weighted by what is left.

    Each job in the order of its forecast time left gets the least it runs with (what was asked for if it has one size)
    on the devices where it would be done first. Then devices go where they raise the utility most: that of n devices is
    -(f(1) / f(n)) / T ** a, with f(1) the rate and T the forecast time left on the least the job runs with. a = 0 is
    ``pollux``; a = -1 is Optimus' gain in seconds. An error of the forecast enters only by its root.

    Then each change is weighed: a running job keeps what it has unless the new allocation brings its end forward by
    more than ``restarts_to_save`` restarts, or others need the devices. What is left over goes to jobs that start
    or change anyway.

    Before all that, jobs that are about to exceed the worst fairness get their fair share, see ``fairness``.

    Args:
        jobs: As in ``Policy.allocate``, like the cluster and the time.
        cluster: What there is.
        now_s: Time [s].
        worst_fairness: Finish-time fairness that no job is to exceed.
        shortness: a.
        restarts_to_save: Restart times that a change must save.
    """

    def utility(view: JobView, given: Allocation) -> float:
        least_s = view.least_remaining_s
        return -inf if least_s == inf else float(minus_slowness(view, given) / least_s**shortness)

    def pays(view: JobView, present: Allocation, wanted: Allocation) -> bool:
        saved_s = view.remaining_s(present) - view.remaining_s(wanted)
        # Another kind of device is a gain for good, another number of them is soon up for change again.
        num_restarts = restarts_to_save if wanted.device == present.device else 1.0
        return saved_s > num_restarts * view.job.restart_s

    free = FreeResources(cluster)
    urgent = serve_urgent(jobs, cluster, now_s, worst_fairness, free)
    others = [view for view in jobs if view.job.name not in urgent] if urgent else jobs
    shortest_first = sorted(others, key=lambda v: (v.least_remaining_s / v.job.weight, v.order))
    given = urgent | start_all(shortest_first, cluster, free)
    grow(jobs, cluster, free, given, utility, one_at_a_time=False)
    changed = _keep_what_does_not_pay(others, free, given, pays)
    grow(changed, cluster, free, given, utility, one_at_a_time=False)
    return given


def _keep_what_does_not_pay(
    jobs: Sequence[JobView],
    free: FreeResources,
    given: dict[str, Allocation],
    pays: Callable[[JobView, Allocation, Allocation], bool],
) -> list[JobView]:
    """Gives jobs back what they had where the change does not pay and there is room; returns the others.

    Jobs that would grow come first, for that makes room. Of those that would shrink, the ones whose restart frees
    the fewest devices for its time come next: one job gives many rather than many jobs one each.
    """
    changed = []
    kept: list[tuple[float, JobView, Allocation, Allocation]] = []
    for view in jobs:
        present, wanted = view.current, given.get(view.job.name)
        if wanted is None or present is None or (wanted != present and pays(view, present, wanted)):
            changed.append(view)
        elif wanted != present:
            more = wanted.num_workers - present.num_workers
            dear = -1e9 if more > 0 else -view.job.restart_s * view.job.weight / max(1, -more)
            kept.append((dear, view, present, wanted))
    for _, view, present, wanted in sorted(kept, key=lambda item: (item[0], item[1].order)):
        free.take(view.job, wanted, sign=-1)
        if free.fits(view.job, present):
            wanted = given[view.job.name] = present
        else:
            changed.append(view)
        free.take(view.job, wanted)
    return changed


def foresight_within(worst_fairness: float) -> NamedPolicy:
    """Our policy with a bound on finish-time fairness; infinite for none.

    Raises:
        InvalidSetupError: The bound is not above 1, what equal shares give.
    """
    if not worst_fairness > 1:
        raise InvalidSetupError(
            f"--fair bounds the completion of each job relative to that with an equal share, and must be above 1, got "
            f"{worst_fairness:g}"
        )
    return NamedPolicy(
        name="foresight",
        title="short jobs first, then goodput; no change that does not pay its restarts (ours)",
        allocate=partial(foresight, worst_fairness=worst_fairness),
        reason=speedup_reason,
        adapts_batch=True,
        worst_fairness=worst_fairness,
    )


register("foresight", lambda: foresight_within(USUAL_WORST_FAIRNESS))


def _meets_deadline(view: JobView, given: Allocation | None) -> str:
    if given is None:
        return "waits for jobs with deadlines"
    if view.job.deadline_s == inf:
        return "no deadline: shares what deadlines leave"
    return f"done in {format_duration_s(view.remaining_s(given))} by forecast"


@policy(
    "deadline",
    title="least devices that meet each deadline, the rest by relative gain",
    reason=_meets_deadline,
    adapts_batch=True,
    is_stable=False,
)
def deadline_aware(jobs: Sequence[JobView], cluster: SharedCluster, now_s: float) -> dict[str, Allocation]:
    """Earliest deadline first, each with the fewest devices that meet it; the rest by relative gain.

    A deadline that nothing can meet any more gives no precedence: its job is served with those that have none.
    The idea of minimum satisfactory shares is that of Gu et al. 2023, "ElasticFlow", ASPLOS; admission control, which
    refuses jobs there, is left out.
    """
    free = FreeResources(cluster)
    given = hold(jobs, free)
    for view in sorted(jobs, key=lambda v: (v.job.deadline_s, v.order)):
        if view.job.deadline_s == inf:
            break
        if view.job.name in given:
            continue
        wanted = _enough(view, cluster, free, view.job.deadline_s - now_s)
        if wanted is not None:
            free.take(view.job, wanted)
            given[view.job.name] = wanted
    others = [view for view in jobs if view.job.name not in given]
    given |= start_all(sorted(others, key=lambda v: (v.attained_device_s, v.order)), cluster, free)
    grow(jobs, cluster, free, given, minus_slowness, one_at_a_time=False)
    return given


def _enough(view: JobView, cluster: SharedCluster, free: FreeResources, time_s: float) -> Allocation | None:
    """The fewest devices with which the job is done in time; None if none that fit are enough."""
    for kind in view.kinds(cluster):
        for allocation in _sizes(view, kind, free):
            restart_s = 0.0 if allocation == view.current else view.job.restart_s
            if view.remaining_s(allocation) + restart_s <= time_s and free.fits(view.job, allocation):
                return allocation
    return None


def _sizes(view: JobView, kind: str, free: FreeResources) -> list[Allocation]:
    """Allocations from small to large."""
    most = min(view.job.max_workers, int(free.num_devices(kind)))
    if not view.job.is_elastic:
        return [view.asked(kind)]
    if isinstance(view.job.training, ServerTraining):
        return [Allocation(kind, n, n) for n in range(1, most + 1)]
    curve, least = view.curves[kind], view.smallest(kind)
    if least is None:
        return []
    return [Allocation(kind, n) for n in curve.rates if least.num_workers <= n <= most]
