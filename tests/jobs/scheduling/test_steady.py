"""The price of preemption, in cases one can work out by hand."""

import pytest
from scheduler_cases import view

from forerun.base.errors import InvalidSetupError
from forerun.jobs.scheduling.cluster import parse_cluster
from forerun.jobs.scheduling.job import Allocation, DataParallelTraining, ScheduledJob
from forerun.jobs.scheduling.policy import find_policy, policy_names
from forerun.jobs.scheduling.simulation import simulate
from forerun.jobs.scheduling.speed import MeasuredSpeed
from forerun.jobs.scheduling.steady import decide

ONE = parse_cluster("1x1xt4")
POLICIES = sorted(policy_names())


def timed(name, seconds, *, kinds=("t4",), factors=(1.0,), sizes=(1,), **given):
    """A job that takes so many seconds on the least it was measured with, on the first kind."""
    speeds = {kind: MeasuredSpeed({n: f * n for n in sizes}) for kind, f in zip(kinds, factors, strict=True)}
    training = DataParallelTraining(speeds=speeds, batch_size=64.0)
    return ScheduledJob(name=name, training=training, work_samples=seconds, **given)


def given_to(policy, views, cluster=ONE, **more):
    return {
        name: a.num_workers for name, a in decide(find_policy(policy), views, cluster, 0.0, **more).items()
    }


def running(of, cluster=ONE, device="t4", number=1, order=0):
    return view(of, cluster, order, current=Allocation(device, number))


@pytest.mark.parametrize(("left_s", "taker"), [(10_000.0, "short"), (1_150.0, "long")])
def test_a_short_job_takes_the_device_only_if_it_pays_both_restarts(left_s, taker):
    # The short one takes 1,000 s and either restart 100 s: 1,200 s must be left of the long one.
    views = [
        running(timed("long", left_s, restart_s=100.0)),
        view(timed("short", 1000.0, restart_s=100.0), ONE, 1),
    ]
    assert given_to("srtf", views) == {taker: 1}
    views[0].is_held = False
    assert given_to("foresight", views) == {taker: 1}


def test_nobody_is_stopped_for_a_device_that_comes_free_soon():
    two = parse_cluster("1x2xt4")
    views = [
        running(timed("long", 10_000.0, restart_s=10.0), two),
        running(timed("ends", 20.0, restart_s=10.0), two, order=1),
        view(timed("short", 500.0, restart_s=10.0), two, 2),
    ]
    assert given_to("srtf", views, two) == {"long": 1, "ends": 1}


@pytest.mark.parametrize("policy", POLICIES)
def test_fifty_like_jobs_run_one_after_another_without_a_restart(policy):
    jobs = [timed(f"j{i}", 3600.0, restart_s=60.0) for i in range(50)]
    metrics = simulate(jobs, parse_cluster("1x4xt4"), find_policy(policy)).metrics
    assert metrics.restarts_per_job == 0.0
    assert metrics.average_completion_s / 3600 == pytest.approx(6.87, abs=0.02)


MOVING = [name for name in POLICIES if name not in ("fifo", "srtf", "las", "themis")]


@pytest.mark.parametrize("policy", MOVING)
def test_a_job_moves_to_a_free_faster_device(policy):
    mixed = parse_cluster("1x1xk80+1x1xv100")
    both = {"kinds": ("k80", "v100"), "factors": (1.0, 10.0), "is_elastic": False, "restart_s": 60.0}
    jobs = [timed("first", 36_000.0, **both), timed("long", 360_000.0, **both)]
    # The first holds the V100 for an hour; the other one then moves and is done after 11 h, not 100.
    found = {o.job: o.end_s / 3600 for o in simulate(jobs, mixed, find_policy(policy)).outcomes}
    assert max(found.values()) < 12


@pytest.mark.parametrize("policy", MOVING)
def test_a_move_that_does_not_pay_its_restart_is_not_made(policy):
    mixed = parse_cluster("1x1xk80+1x1xv100")
    of = timed("a", 1000.0, kinds=("k80", "v100"), factors=(1.0, 1.2), is_elastic=False, restart_s=200.0)
    views = [running(of, mixed, "k80")]
    assert decide(find_policy(policy), views, mixed, 0.0)["a"].device == "k80"


@pytest.mark.parametrize("policy", POLICIES)
def test_what_may_not_be_preempted_keeps_what_it_has_to_the_end(policy):
    jobs = [
        timed("stays", 50_000.0, is_preemptible=False, num_workers=2, sizes=(1, 2), restart_s=1.0),
        *(timed(f"short-{i}", 300.0, arrival_s=600.0 * i + 60, restart_s=1.0) for i in range(5)),
    ]
    outcome = simulate(jobs, parse_cluster("1x2xt4"), find_policy(policy))
    assert [s.allocation.num_workers for s in outcome.stretches if s.job == "stays"] == [2]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_minimum_run_time_is_honoured(policy):
    jobs = [
        timed("long", 90_000.0, min_run_s=7200.0, restart_s=1.0),
        timed("short", 300.0, arrival_s=60.0, restart_s=1.0),
    ]
    outcome = simulate(jobs, ONE, find_policy(policy))
    first = next(s for s in outcome.stretches if s.job == "long")
    assert first.end_s - first.start_s >= 7200.0
    if policy in ("srtf", "foresight"):
        assert first.end_s == pytest.approx(7200.0, abs=60.0)


def test_a_minimum_run_time_below_zero_is_refused():
    with pytest.raises(
        InvalidSetupError, match=r"minimum run time must be zero seconds or more, got -1\.0 s"
    ):
        timed("a", 10.0, min_run_s=-1.0)
