"""Finish-time fairness: its measure, the bound of our policy, and rivals that share time."""

import numpy as np
import pytest
from scheduler_cases import job, view

from forerun.base.errors import InvalidSetupError, UsageError
from forerun.jobs.schedule import schedule
from forerun.jobs.scheduling.cluster import parse_cluster
from forerun.jobs.scheduling.fairness import fair_share, finish_time_fairness, urgent_in_s
from forerun.jobs.scheduling.marginal_gain import foresight_within
from forerun.jobs.scheduling.policy import find_policy
from forerun.jobs.scheduling.shares_of_time import max_min_shares
from forerun.jobs.scheduling.simulation import SimulationOptions, simulate

FOUR = parse_cluster("1x4xt4")


def test_a_job_served_with_its_share_keeps_its_fairness():
    waiting = view(job(arrival_s=0.0), FOUR)
    share = fair_share(waiting, FOUR, num_jobs=4)
    assert share is not None
    whole_s = waiting.remaining_s(share)
    assert finish_time_fairness(waiting, FOUR, 4, now_s=2 * whole_s) == pytest.approx((3.0, 2.0, whole_s))
    assert urgent_in_s(waiting, FOUR, 4, 0.0, bound=10.0) == pytest.approx(whole_s)
    assert urgent_in_s(waiting, FOUR, 4, 9 * whole_s, bound=10.0) == float("inf")


def test_a_bound_keeps_a_long_job_from_starving():
    # Nine tenths of the time go to short jobs: by time left alone, the long one waits for all of them.
    long = job("long", work=3e4, is_elastic=False, num_workers=4, restart_s=10.0)
    short = [
        job(f"s{i}", work=9e3, is_elastic=False, num_workers=4, arrival_s=42.0 * i, restart_s=10.0)
        for i in range(100)
    ]
    one, all_jobs = SimulationOptions(round_s=5), [*short, long]
    free, bounded = (simulate(all_jobs, FOUR, foresight_within(f), one).metrics for f in (np.inf, 10.0))
    assert bounded.worst_fairness <= 10.0 < free.worst_fairness
    with pytest.raises(InvalidSetupError, match=r"must be above 1, got 0\.5"):
        foresight_within(0.5)


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
