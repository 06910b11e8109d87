"""Two jobs that are better off with each other's kind of device."""

from scheduler_cases import view
from test_preemption import timed

from forerun.jobs.scheduling.job import Allocation, parse_cluster
from forerun.jobs.scheduling.marginal_gain import exchange_kinds

MIXED = parse_cluster("1x1xk80+1x1xv100")
BOTH = ("k80", "v100")


def after(jobs, kinds):
    views = [view(j, MIXED, i) for i, j in enumerate(jobs)]
    given = {j.name: Allocation(kind, 1) for j, kind in zip(jobs, kinds, strict=True)}
    exchange_kinds(views, given)
    return {name: a.device for name, a in given.items()}


def test_the_job_that_gains_more_comes_to_the_faster_device():
    jobs = [
        timed("likes", 1000.0, kinds=BOTH, factors=(1.0, 10.0)),
        timed("same", 1000.0, kinds=BOTH, factors=(1.0, 1.1)),
    ]
    assert after(jobs, ("k80", "v100")) == {"likes": "v100", "same": "k80"}
    assert after(jobs, ("v100", "k80")) == {"likes": "v100", "same": "k80"}


def test_a_long_job_does_not_push_a_short_one_off():
    # In seconds the long one would gain more, but it can have the device once the short one is done.
    jobs = [
        timed("long", 360_000.0, kinds=BOTH, factors=(1.0, 2.0)),
        timed("short", 3600.0, kinds=BOTH, factors=(1.0, 10.0)),
    ]
    assert after(jobs, ("k80", "v100")) == {"long": "k80", "short": "v100"}


def test_what_is_held_stays():
    jobs = [
        timed("likes", 1000.0, kinds=BOTH, factors=(1.0, 10.0)),
        timed("same", 1000.0, kinds=BOTH, factors=(1.0, 1.1)),
    ]
    views = [view(j, MIXED, i) for i, j in enumerate(jobs)]
    views[1].is_held = True
    given = {"likes": Allocation("k80", 1), "same": Allocation("v100", 1)}
    exchange_kinds(views, given)
    assert given["same"].device == "v100"
