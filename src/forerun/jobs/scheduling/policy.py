"""The interface of every policy: a job as it sees it, the devices that are free, and all policies by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import import_module
from math import inf
from typing import TypeVar

from forerun.base.errors import UsageError, near_matches
from forerun.base.extras import plugin, plugin_names
from forerun.jobs.scheduling.job import Allocation, ScheduledJob, SharedCluster
from forerun.jobs.scheduling.speed import RateCurve


@dataclass(kw_only=True)
class JobView:
    """A job as a policy sees it at one moment; speeds and remaining work are forecasts.

    Attributes:
        job: The job.
        order: Number in the order of arrival.
        remaining_samples: Work left.
        progress: Share of the work that is done, 0 to 1.
        attained_device_s: Devices times time it has had [s].
        curves: Rate against devices, by kind of device.
        current: What it has now; None while it waits.
        is_held: Whether it keeps what it has now, whatever a policy would like.
        is_urgent: Whether a policy serves it first because its finish-time fairness would else exceed a bound.
    """

    job: ScheduledJob
    order: int
    remaining_samples: float
    progress: float = 0.0
    attained_device_s: float = 0.0
    curves: Mapping[str, RateCurve] = field(default_factory=dict)
    current: Allocation | None = None
    is_held: bool = False
    is_urgent: bool = False
    _fair_shares: dict[int, Allocation | None] = field(default_factory=dict, repr=False)

    # Policies ask for it at every comparison of a decision.
    @cached_property
    def least_rate(self) -> float:
        """Rate with the least it runs with, on the kind of devices where that is highest; 0 if it runs nowhere."""
        least = [self.smallest(kind) for kind in self.curves]
        return max((self.rate(one) for one in least if one is not None), default=0.0)

    @property
    def least_remaining_s(self) -> float:
        """Time to the end with the least it runs with, on the kind where that is fastest [s]; infinite if nowhere."""
        return self.remaining_samples / self.least_rate if self.least_rate > 0 else inf

    def rate(self, given: Allocation) -> float:
        """Useful samples per second with this allocation, packed; zero on a kind of device where it cannot run."""
        # Exchanges ask each job of a pair about the other's kind, which need not be one of its own.
        curve = self.curves.get(given.device)
        return 0.0 if curve is None else curve.rate(given.num_workers)

    def remaining_s(self, given: Allocation) -> float:
        """Time to the end with this allocation [s]; infinite if it does not run."""
        rate = self.rate(given)
        return self.remaining_samples / rate if rate > 0 else inf

    def move_s(self, device: str) -> float:
        """Price of running on this kind of device: the restart of a job that runs on another [s]."""
        return self.job.restart_s if self.current is not None and self.current.device != device else 0.0

    def asked(self, device: str) -> Allocation:
        """Devices that the owner of the job asks for."""
        return Allocation(device, self.job.num_workers)

    @cached_property
    def asked_remaining_s(self) -> float:
        """Time to the end with what its owner asks for, on the kind of devices where that is shortest [s]."""
        return min(self.remaining_s(self.asked(kind)) for kind in self.curves)

    def fair_share(self, cluster: SharedCluster, num_jobs: int) -> Allocation | None:
        """The fastest share that has 1/n of each kind of devices; None where no speed is known."""
        # Each question of a decision asks for it again.
        if num_jobs not in self._fair_shares:
            options = [
                Allocation(
                    group.device, max(curve.best_within(max(1, group.num_devices // num_jobs)), curve.fewest)
                )
                for group in cluster.groups
                if (curve := self.curves.get(group.device)) is not None and curve.fewest
            ]
            self._fair_shares[num_jobs] = max(options, key=self.rate, default=None)
        return self._fair_shares[num_jobs]

    def smallest(self, device: str) -> Allocation | None:
        """The least it can run with on this kind; None where it cannot run."""
        if not (self.job.is_elastic and self.job.is_preemptible):
            return self.asked(device) if self.rate(self.asked(device)) > 0 else None
        fewest = self.curves[device].fewest
        return Allocation(device, fewest) if 0 < fewest <= self.job.max_workers else None

    def kinds(self, cluster: SharedCluster) -> list[str]:
        """Kinds of devices it can run on, the present one first, then the fastest."""
        present = self.current.device if self.current is not None else None
        known = [kind for kind in cluster.kinds if kind in self.curves]
        if len(known) == 1:
            return known
        return sorted(known, key=lambda kind: (kind != present, -self.curves[kind].rate(1)))


class FreeDevices:
    """Devices of each kind that are left while a policy shares a cluster out."""

    def __init__(self, cluster: SharedCluster) -> None:
        self._capacity = {group.device: group.num_devices for group in cluster.groups}
        self.left = dict(self._capacity)

    def has_room(self) -> bool:
        """True if there is a device left at all; quick, and true wherever something fits."""
        return any(number > 0 for number in self.left.values())

    def fits(self, given: Allocation) -> bool:
        """True if an allocation fits into what is left."""
        return given.num_workers <= self.left[given.device]

    def take(self, given: Allocation, sign: int = 1) -> None:
        """Takes an allocation out of what is left, or gives it back with sign -1."""
        self.left[given.device] -= sign * given.num_workers

    def take_all(self, views: Iterable[JobView], sign: int = 1) -> None:
        """Takes what these jobs have now, or gives it back with sign -1."""
        for view in views:
            if view.current is not None:
                self.take(view.current, sign)

    def share(self, given: Allocation) -> float:
        """Share of all devices of its kind that an allocation occupies."""
        return given.num_workers / self._capacity[given.device]


def hold(jobs: Sequence[JobView], free: FreeDevices, *, all_that_run: bool = False) -> dict[str, Allocation]:
    """Shares that a policy may not touch, those that are held or all, taken out of what is free."""
    kept = [view for view in jobs if view.is_held or all_that_run]
    free.take_all(kept)
    return {view.job.name: view.current for view in kept if view.current is not None}


Allocate = Callable[[Sequence[JobView], SharedCluster, float], dict[str, Allocation]]
"""Allocation of each job from now on, a job that is absent waiting: of the jobs that have come and are not done, in the
order of arrival (those held keep what they have), the cluster, and the time [s]."""

Reason = Callable[[JobView, Allocation | None], str]
"""Reason for the share of a job, in a few words."""


@dataclass(frozen=True, slots=True)
class Policy:
    """A rule that gives devices to jobs.

    Attributes:
        name: Name on the command line.
        title: Its rule, in a few words.
        allocate, reason: The rule, and what it says of a job.
        adapts_batch: Whether it may choose the batch within a job's range.
        is_stable: Whether its answer stays the same until a job comes, ends or enters another phase, so that it
            need not be asked in each round.
        is_raw: Whether its answer is carried out as it is, without the question whether each change pays its restarts.
        worst_fairness: Finish-time fairness that no job is to exceed, see ``preemption``; infinite without a bound.
    """

    name: str
    title: str
    allocate: Allocate
    reason: Reason
    adapts_batch: bool = False
    is_stable: bool = True
    is_raw: bool = False
    worst_fairness: float = inf


POLICIES: dict[str, Callable[[], Policy]] = {}
"""Makers of policies by name; a module of policies registers its own on import."""

GROUP = "forerun.policies"
"""Entry points that name what makes a ``Policy``: a function without arguments."""

_MODULES = ("plain_policies", "marginal_gain", "unlike_devices")
_RAW = ":raw"
_Function = TypeVar("_Function", bound=Allocate)


def policy(
    name: str, *, title: str, reason: Reason, adapts_batch: bool = False, is_stable: bool = True
) -> Callable[[_Function], _Function]:
    """Registers the decorated function as a policy under a name; a name can be given once."""

    def decorate(allocate: _Function) -> _Function:
        made = Policy(name, title, allocate, reason, adapts_batch, is_stable)
        register(name, lambda: made)
        return allocate

    return decorate


def register(name: str, make: Callable[[], Policy]) -> None:
    """Adds a maker of policies to those that are found by name.

    Raises:
        ValueError: The name is taken.
    """
    if name in POLICIES:
        raise ValueError(f"two policies are called '{name}'")
    POLICIES[name] = make


def policy_names() -> list[str]:
    """Names of all policies, our own first, then those of other packages."""
    _register_own()
    return list(dict.fromkeys([*POLICIES, *plugin_names(GROUP)]))


def find_policy(name: str) -> Policy:
    """A new policy by name: one of our own, or an entry point of ``forerun.policies``.

    ``NAME:raw`` is the policy as it was published: what it wants is done, without our question whether a change pays.

    Raises:
        UsageError: The name is not known.
    """
    _register_own()
    asked = name.strip().lower()
    plain = asked.removesuffix(_RAW)
    make = POLICIES.get(plain) or plugin(GROUP, plain)
    if make is None:
        known = policy_names()
        raise UsageError(f"unknown policy '{name}'{near_matches(name, known)}; known: {', '.join(known)}")
    found: Policy = make()
    if plain == asked:
        return found
    return replace(found, name=asked, title=f"{found.title}, as published", is_raw=True, worst_fairness=inf)


def _register_own() -> None:
    # They import this module, so that it can import them only once it is there.
    for module in _MODULES:
        import_module(f"forerun.jobs.scheduling.{module}")
