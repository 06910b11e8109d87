"""Policies by marginal gain: the engine that gives each device to the job that gains most by it, and those built on it.

Optimus as published, its gain normalised, goodput as in Pollux, our own, and deadlines first.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import permutations
from math import inf
from typing import NamedTuple

from forerun.base.errors import InvalidSetupError
from forerun.base.units import format_duration_s
from forerun.jobs.scheduling.job import Allocation, SharedCluster
from forerun.jobs.scheduling.policy import FreeDevices, JobView, Policy, hold, policy, register
from forerun.jobs.scheduling.preemption import serve_urgent

Utility = Callable[[JobView, Allocation], float]
"""Worth of an allocation to a job; only differences count."""

_MOST_EXCHANGES = 4
"""Times all jobs are asked again in one decision because some changed the kind of their devices."""

_LEAST_SHARE = 1e-9


def start_all(jobs: Iterable[JobView], cluster: SharedCluster, free: FreeDevices) -> dict[str, Allocation]:
    """Gives each job in turn the least it can run with, on the kind of devices where it would be done first.

    A running job weighs its restart in before it changes the kind; pairs of jobs that are better off with each other's
    kind exchange them. Jobs that are held come first, with what they have.
    """
    jobs = list(jobs)
    given = hold(jobs, free)
    for view in jobs:
        if view.job.name in given or not free.has_room():
            continue
        options = [least for kind in view.kinds(cluster) if (least := view.smallest(kind)) is not None]
        if len(options) > 1:
            options.sort(key=lambda least: view.remaining_s(least) + view.move_s(least.device))
        found = next((least for least in options if free.fits(least)), None)
        if found is not None:
            free.take(found)
            given[view.job.name] = found
    if len(cluster.groups) > 1:
        exchange_kinds(jobs, given)
    return given


def grow(
    jobs: Sequence[JobView],
    free: FreeDevices,
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
        free: What is left, changed in place.
        given: What each job has, changed in place.
        utility: What an allocation is worth.
        one_at_a_time: The next number of devices in each step, as Optimus does.
    """
    engine = _Engine(free, given, utility, one_at_a_time)
    views = [
        view
        for view in jobs
        if view.job.name in given and not view.is_held and (view.job.is_elastic or len(view.curves) > 1)
    ]
    for _ in range(_MOST_EXCHANGES):
        if not engine.hand_out(views):
            break


class _Offer(NamedTuple):
    """The next step of one job: its devices then, those added and given back, and the worth of all then and now."""

    view: JobView
    wanted: Allocation
    more: Allocation
    back: Allocation | None
    worth: float
    worth_now: float


@dataclass(slots=True)
class _Engine:
    """Takes the best next step of any job, again and again."""

    _free: FreeDevices
    _given: dict[str, Allocation]
    _utility: Utility
    _one_at_a_time: bool
    _heap: list[tuple[float, int, _Offer]] = field(default_factory=list)

    def hand_out(self, views: Sequence[JobView]) -> bool:
        """Takes offers until none is left; True if a job changed the kind of its devices."""
        for view in views:
            self._push(view, self._utility(view, self._given[view.job.name]))
        has_exchanged = False
        while self._heap:
            _, _, offer = heapq.heappop(self._heap)
            view, worth = offer.view, offer.worth_now
            # Others may have taken what this offer needed: then a smaller one may still fit.
            if self._free.fits(offer.more):
                self._free.take(offer.more)
                if offer.back is not None:
                    self._free.take(offer.back, sign=-1)
                    has_exchanged = True
                self._given[view.job.name], worth = offer.wanted, offer.worth
            self._push(view, worth)
        return has_exchanged

    def _push(self, view: JobView, worth: float) -> None:
        """Enters the offer with the most gain per share of those that fit, if any helps."""
        best: _Offer | None = None
        most = 0.0
        for wanted, more, back in self._steps(view, self._given[view.job.name]):
            value = self._utility(view, wanted)
            gained = value - worth
            if gained > 0:
                share = self._free.share(more)
                if back is not None:
                    # What takes no larger share than it gives back is taken at once, the largest gain first.
                    share = max(share - self._free.share(back), _LEAST_SHARE)
                per_share = gained / share
                if per_share > most:
                    best, most = _Offer(view, wanted, more, back, value, worth), per_share
        if best is not None:
            # Of equal offers the job that came first has precedence; offers themselves are never compared.
            heapq.heappush(self._heap, (-most, view.order, best))

    def _steps(
        self, view: JobView, present: Allocation
    ) -> Iterator[tuple[Allocation, Allocation, Allocation | None]]:
        """Allocations that a job could have next, what each adds and gives back, as far as they fit."""
        device, w = present.device, present.num_workers
        if view.job.is_elastic:
            n = self._next_size(view, present)
            if n > w and self._free.fits(more := Allocation(device, n - w)):
                yield Allocation(device, n), more, None
        for kind in view.curves:
            other = self._elsewhere(view, kind, present) if kind != device else None
            if other is not None and self._free.fits(other):
                yield other, other, present

    def _elsewhere(self, view: JobView, kind: str, present: Allocation) -> Allocation | None:
        """The least on another kind of devices that is faster than what the job has."""
        if not (view.job.is_elastic and view.job.is_preemptible):
            return view.asked(kind)
        curve = view.curves[kind]
        most = min(view.job.max_workers, self._free.left[kind])
        if most < 1:
            return None
        rate = view.rate(present)
        n = next((n for n in (curve.fewest, *curve.hull) if 0 < n <= most and curve.rate(n) > rate), None)
        return None if n is None else Allocation(kind, n)

    def _next_size(self, view: JobView, present: Allocation) -> int:
        """Devices to offer next; as many as it has if none."""
        curve, w = view.curves[present.device], present.num_workers
        most = min(view.job.max_workers, w + self._free.left[present.device])
        if most <= w:
            return w
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
    """Optimus: each device where it saves most of the remaining time.

    Every job gets one device; then, while any is left, the job with the largest gain Q / f(now) - Q / f(with one more)
    gets the next, Q the remaining work and f the speed.

    Source: Peng et al. 2018, "Optimus", EuroSys, section 4.1; workers and parameter servers as there are a study's.
    """
    free = FreeDevices(cluster)
    given = start_all(jobs, cluster, free)
    grow(jobs, free, given, _minus_remaining_s, one_at_a_time=True)
    return given


def _minus_remaining_s(view: JobView, given: Allocation) -> float:
    seconds = view.remaining_s(given) + view.move_s(given.device)
    return -seconds * (YOUNG_FACTOR if view.progress < YOUNG_PROGRESS else 1.0)


def least_attained_first(jobs: Sequence[JobView]) -> list[JobView]:
    """Jobs that had least first: where jobs outnumber devices, nobody starves."""
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
    free = FreeDevices(cluster)
    given = start_all(least_attained_first(jobs), cluster, free)
    grow(jobs, free, given, minus_slowness, one_at_a_time=False)
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

    Each job in the order of its forecast time left (or in another, see ``_in_best_order``) gets the least it runs with
    (what was asked for if it has one size) on the devices where it would be done first. Then devices go where they
    raise the utility most: that of n devices is
    -(f(1) / f(n)) / T ** a, with f(1) the rate and T the forecast time left on the least the job runs with. a = 0 is
    ``pollux``; a = -1 is Optimus' gain in seconds. An error of the forecast enters only by its root.

    Then each change is weighed: a running job keeps what it has unless the new allocation brings its end forward by
    more than ``restarts_to_save`` restarts, or others need the devices. What is left over goes to jobs that start
    or change anyway.

    Before all that, jobs that are about to exceed the worst fairness get their fair share, see ``preemption``.

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

    free = FreeDevices(cluster)
    urgent = serve_urgent(jobs, cluster, now_s, worst_fairness, free)
    others = [view for view in jobs if view.job.name not in urgent] if urgent else jobs
    given = urgent | start_all(_in_best_order(others, free), cluster, free)
    grow(jobs, free, given, utility, one_at_a_time=False)
    # What those that stay give back would lie idle: those that change anyway pay no further restart for it.
    changed = _keep_what_does_not_pay(others, free, given, pays)
    grow(changed, free, given, utility, one_at_a_time=False)
    return given


_MOST_FORESEEN = 24
"""Jobs up to which orders are compared by what follows from them."""


def _in_best_order(jobs: Sequence[JobView], free: FreeDevices) -> list[JobView]:
    """Jobs in the order of their time left; where some that wait need several devices at once, in the best of three.

    A job of many devices is short by its time and long by what others could do meanwhile, and small ones may pass it
    for ever. So three orders are followed to the end of all jobs, and the one with the least weighted sum of
    completions counts: time left, time left times the root of the devices, and arrival, where nobody passes another.
    """
    power: float | None = 0.0
    if len(jobs) <= _MOST_FORESEEN and any(view.current is None and _width(view) > 1 for view in jobs):
        orders = {one: _foreseen(jobs, one, free) for one in (0.0, 0.5, None)}
        power = min(orders, key=lambda one: orders[one][0])
        if power is None:
            return orders[None][1]
    return sorted(jobs, key=lambda v: _place(v, power, v.least_remaining_s, is_running=True))


def _width(view: JobView) -> int:
    return 1 if view.job.is_elastic and view.job.is_preemptible else view.job.num_workers


def _place(view: JobView, power: float | None, left_s: float, *, is_running: bool) -> tuple[float, int]:
    """Place in a queue by the time left times a power of the devices; by arrival without one, those that run first."""
    first = not is_running if power is None else left_s * _width(view) ** power / view.job.weight
    return first, view.order


def _foreseen(jobs: Sequence[JobView], power: float | None, free: FreeDevices) -> tuple[float, list[JobView]]:
    """Weighted sum of the times to the ends of jobs [s], at each end served anew in this order, and who is served now.

    Each gets the least that it runs with; jobs that urgent ones leave no room do not end.
    """
    options: dict[int, list[tuple[float, Allocation]]] = {}
    for view in jobs:
        least = [view.current] if view.is_held else [view.smallest(kind) for kind in view.curves]
        timed = [(view.remaining_s(one), one) for one in least if one is not None]
        options[view.order] = sorted(timed, key=lambda item: item[0])
    runs = {view.order: view.current for view in jobs}
    share_left, now_s, total_s = dict.fromkeys(options, 1.0), 0.0, 0.0
    first: list[JobView] = []
    left = [view for view in jobs if options[view.order]]
    while left:
        room, served = dict(free.left), dict[int, tuple[float, float, Allocation]]()

        def place(view: JobView) -> tuple[bool, tuple[float, int]]:
            left_s = share_left[view.order] * options[view.order][0][0]
            is_running = runs[view.order] is not None
            return not view.is_held, _place(view, power, left_s, is_running=is_running)

        for view in sorted(left, key=place):
            i = view.order
            found = next(((s, a) for s, a in options[i] if a.num_workers <= room[a.device]), None)
            if found is not None:
                whole_s, given = found
                room[given.device] -= given.num_workers
                restart_s = 0.0 if runs[i] == given else view.job.restart_s
                served[i] = (share_left[i] * whole_s + restart_s, whole_s, given)
                first += [view] if now_s == 0 else []
            elif power is None:
                break
        if not served:
            return inf, first
        step_s = min(spent_s for spent_s, _, _ in served.values())
        now_s += step_s
        for view in left:
            if (found_now := served.get(view.order)) is None:
                runs[view.order] = None
                continue
            spent_s, whole_s, runs[view.order] = found_now
            share_left[view.order] = (spent_s - step_s) / whole_s
            total_s += view.job.weight * now_s if spent_s == step_s else 0.0
        left = [view for view in left if share_left[view.order] > 0]
    return total_s, first


def _keep_what_does_not_pay(
    jobs: Sequence[JobView],
    free: FreeDevices,
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
            # A job that keeps its size instead of growing frees devices, so all of those come before the
            # others.
            dear = -1e9 if more > 0 else -view.job.restart_s * view.job.weight / max(1, -more)
            kept.append((dear, view, present, wanted))
    for _, view, present, wanted in sorted(kept, key=lambda item: (item[0], item[1].order)):
        free.take(wanted, sign=-1)
        if free.fits(present):
            wanted = given[view.job.name] = present
        else:
            changed.append(view)
        free.take(wanted)
    return changed


def foresight_within(worst_fairness: float) -> Policy:
    """Our policy with a bound on finish-time fairness; infinite for none.

    Raises:
        InvalidSetupError: The bound is not above 1, what equal shares give.
    """
    if not worst_fairness > 1:
        raise InvalidSetupError(
            f"--fair bounds the completion of each job relative to that with an equal share, and must be above 1, got "
            f"{worst_fairness:g}"
        )
    return Policy(
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
    free = FreeDevices(cluster)
    given = hold(jobs, free)
    # By deadline: a later one must not take the devices that an earlier one needs.
    for view in sorted(jobs, key=lambda v: (v.job.deadline_s, v.order)):
        if view.job.deadline_s == inf:
            break
        if view.job.name in given:
            continue
        wanted = _enough(view, cluster, free, view.job.deadline_s - now_s)
        if wanted is not None:
            free.take(wanted)
            given[view.job.name] = wanted
    others = [view for view in jobs if view.job.name not in given]
    given |= start_all(least_attained_first(others), cluster, free)
    grow(jobs, free, given, minus_slowness, one_at_a_time=False)
    return given


def _enough(view: JobView, cluster: SharedCluster, free: FreeDevices, time_s: float) -> Allocation | None:
    """The fewest devices with which the job is done in time; None if none that fit are enough."""
    for kind in view.kinds(cluster):
        sizes = [view.job.num_workers]
        if view.job.is_elastic:
            least, most = view.smallest(kind), min(view.job.max_workers, free.left[kind])
            able = () if least is None else range(least.num_workers, most + 1)
            sizes = [n for n in view.curves[kind].rates if n in able]
        for allocation in (Allocation(kind, n) for n in sizes):
            restart_s = 0.0 if allocation == view.current else view.job.restart_s
            if view.remaining_s(allocation) + restart_s <= time_s and free.fits(allocation):
                return allocation
    return None
