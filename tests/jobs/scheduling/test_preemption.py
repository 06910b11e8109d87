"""Finish-time fairness, its bound, and the price of preemption."""

from dataclasses import replace

import numpy as np
import pytest
from scheduler_cases import job, speed, view

from forerun.base.errors import InvalidSetupError, UsageError
from forerun.jobs.schedule import schedule
from forerun.jobs.scheduling.job import Allocation, DataParallelTraining, ScheduledJob, parse_cluster
from forerun.jobs.scheduling.marginal_gain import foresight_within
from forerun.jobs.scheduling.policy import find_policy, policy_names
from forerun.jobs.scheduling.preemption import decide, finish_time_fairness, urgent_in_s
from forerun.jobs.scheduling.simulation import simulate
from forerun.jobs.scheduling.speed import MeasuredSpeed
from forerun.jobs.scheduling.unlike_devices import max_min_shares

FOUR = parse_cluster("1x4xt4")


def test_a_job_served_with_its_share_keeps_its_fairness():
    waiting = view(job(arrival_s=0.0), FOUR)
    share = waiting.fair_share(FOUR, num_jobs=4)
    assert share is not None
    whole_s = waiting.remaining_s(share)
    assert finish_time_fairness(waiting, FOUR, 4, now_s=2 * whole_s) == pytest.approx((3.0, 2.0, whole_s))
    assert urgent_in_s(waiting, FOUR, 4, 0.0, bound=10.0) == pytest.approx(whole_s / 2)
    assert urgent_in_s(waiting, FOUR, 4, 9 * whole_s, bound=10.0) == 0


def test_a_bound_keeps_a_long_job_from_starving():
    # Nine tenths of the time go to short jobs: by time left alone, the long one waits for all of them.
    long = job("long", work=3e4, is_elastic=False, num_workers=4, restart_s=10.0)
    short = [
        job(f"s{i}", work=9e3, is_elastic=False, num_workers=4, arrival_s=42.0 * i, restart_s=10.0)
        for i in range(100)
    ]
    jobs = [*short, long]
    free, bounded = (simulate(jobs, FOUR, foresight_within(f), 5.0).metrics for f in (np.inf, 10.0))
    assert bounded.worst_fairness <= 10.0 < free.worst_fairness
    with pytest.raises(InvalidSetupError, match=r"must be above 1, got 0\.5"):
        foresight_within(0.5)


def test_a_bound_moves_a_job_off_devices_that_are_far_too_slow():
    long = job("long", work=3e6, kinds=("v100",), restart_s=10.0, weight=100.0)
    short = job("short", work=1e4, arrival_s=7.0, restart_s=10.0)
    speeds = {"t4": speed(0.5), "v100": speed()}
    short = replace(short, training=replace(short.training, speeds=speeds))
    cluster = parse_cluster("1x1xt4+1x1xv100")
    free, bounded = (simulate([long, short], cluster, foresight_within(f)).outcomes for f in (np.inf, 10.0))
    # It starts at once on the kind that is free, and gets the other when decisions are made.
    assert bounded[1].start_s == 7.0
    assert bounded[1].end_s - 7.0 <= 10.0 * bounded[1].fair_share_s < free[1].end_s - 7.0


def test_a_job_that_waited_too_long_does_not_wait_for_the_round():
    long = job("long", work=3e6, is_elastic=False, num_workers=4, restart_s=10.0)
    short = job("short", work=1e4, is_elastic=False, num_workers=4, arrival_s=7.0, restart_s=10.0)
    free, bounded = (
        simulate([long, short], FOUR, foresight_within(f), 3600.0).outcomes[1] for f in (np.inf, 10.0)
    )
    assert bounded.end_s - 7.0 < 10.0 * bounded.fair_share_s < free.end_s - 7.0
    assert bounded.start_s < 3600.0 <= free.start_s


SHORT_BESIDE_LONG = (
    "1x1xt4",
    job("a", work=24_815, sample_s=0.0179, restart_s=10),
    job("b", work=80_694, sample_s=0.0161, restart_s=10, is_elastic=False, is_preemptible=False),
    job("c", work=4_573, sample_s=0.0014),
)
ONE_KIND_BESIDE_ANY = (
    "1x2xt4+1x2xv100",
    job("a", work=276_592, sample_s=0.0027, restart_s=10, is_elastic=False, kinds=("t4", "v100")),
    job("b", work=14_689, sample_s=0.0182, restart_s=10, is_elastic=False, num_workers=2),
)


@pytest.mark.parametrize("bound", [2.0, 3.0, 10.0])
@pytest.mark.parametrize("case", [SHORT_BESIDE_LONG, ONE_KIND_BESIDE_ANY], ids=["short", "one kind"])
def test_a_bound_that_all_keep_anyway_changes_nothing(case, bound):
    # Nobody has waited yet: no job is urgent for what it takes by itself, however close the bound.
    cluster, *jobs = case
    free, bounded = (
        simulate(jobs, parse_cluster(cluster), foresight_within(f)).metrics for f in (np.inf, bound)
    )
    assert free.worst_fairness < 2
    assert bounded.worst_fairness == pytest.approx(free.worst_fairness)
    assert bounded.average_completion_s == pytest.approx(free.average_completion_s)


def test_the_price_of_fairness_is_told():
    row = {"points": "1:100 2:190", "batch_size": 32, "steps": 1000}
    rows = [{"name": f"j{i}", **row} for i in range(3)]
    notes = schedule(rows, cluster="1x2xt4", fair=3.0).notes
    assert any(note.startswith("foresight keeps finish-time fairness within 3") for note in notes)
    with pytest.raises(UsageError, match="add foresight"):
        schedule(rows, cluster="1x2xt4", policies=["fifo"], fair=3.0)


def test_a_raw_policy_is_asked_once_a_round():
    raw = find_policy("pollux:raw")
    assert (raw.name, raw.title.endswith("as published")) == ("pollux:raw", True)
    jobs = [job(f"j{i}", arrival_s=200.0 * i, restart_s=120.0) for i in range(6)]
    held, free = (simulate(jobs, FOUR, find_policy(name)).metrics for name in ("pollux", "pollux:raw"))
    assert free.restarts_per_job >= held.restarts_per_job


def test_max_min_shares_are_those_of_gavels_own_example():
    """Narayanan et al. 2020, OSDI, section 4.1: three jobs on a V100 and a K80, each ahead of an equal split."""
    rates = np.asarray([[40.0, 10.0], [12.0, 4.0], [100.0, 50.0]])
    shares = max_min_shares(rates, np.ones(3), np.ones(2), np.ones(3))
    assert shares == pytest.approx(np.asarray([[0.45, 0.0], [0.45, 0.09], [0.09, 0.91]]), abs=0.006)
    gain = (rates * shares).sum(axis=1) / (rates.mean(axis=1) * 2 / 3)
    assert gain == pytest.approx(np.full(3, 1.09), abs=0.005)


def test_max_min_shares_are_those_that_a_hand_finds():
    # Two jobs, one device of each of two kinds. Job a is 4 times as fast on the second kind, b as fast on both. Equal
    # shares of time are worth (1 + 4) / 2 = 2.5 and 1 to them. a takes x of the second kind, b the first and 1 - x:
    # 4 x / 2.5 = 1 at x = 0.625 already; a may have more, b no more than 1 of time, which gives it exactly 1. The least
    # is then 1 whatever a gets beyond, and a's 1.0 of the second kind leaves b the first.
    shares = max_min_shares(np.asarray([[1.0, 4.0], [1.0, 1.0]]), np.ones(2), np.ones(2), np.ones(2))
    worth = (shares * [[1.0, 4.0], [1.0, 1.0]]).sum(axis=1) / [2.5, 1.0]
    assert worth.min() == pytest.approx(1.0)
    assert (shares.sum(axis=0) <= 1 + 1e-9).all()
    assert (shares.sum(axis=1) <= 1 + 1e-9).all()


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


def test_a_bound_that_a_load_does_not_allow_makes_nobody_worse_off():
    # Once the long job is served, 97 % load never lets the short ones make up for it: each was late.
    rows = [{"name": "long", "points": {1: 1.0}, "batch_size": 1, "samples": 3600, "restart": 0}]
    rows += [rows[0] | {"name": f"s{i}", "samples": 290, "arrival": 300 * i} for i in range(12)]
    bounded, free = (
        schedule(rows, cluster="1xt4", policies=["foresight"], fair=fair).outcomes[0].metrics
        for fair in (1.2, 1000.0)
    )
    assert bounded.worst_fairness <= free.worst_fairness < 4
