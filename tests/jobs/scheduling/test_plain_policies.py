"""What each policy decides in cases one can work out by hand."""

import pytest
from scheduler_cases import job, view

from forerun.jobs.scheduling.job import Allocation, parse_cluster
from forerun.jobs.scheduling.policy import find_policy
from forerun.jobs.scheduling.simulation import simulate

EIGHT = parse_cluster("2x4xt4")


def numbers(policy, jobs, cluster=EIGHT, now_s=0.0, **given):
    views = [view(j, cluster, i, **given) for i, j in enumerate(jobs)]
    found = find_policy(policy).allocate(views, cluster, now_s)
    return {name: a.num_workers for name, a in found.items()}


def test_fifo_lets_nobody_overtake():
    jobs = [job("a", num_workers=6), job("b", num_workers=4), job("c", num_workers=1)]
    assert numbers("fifo", jobs) == {"a": 6}


def test_fifo_does_not_stop_what_runs():
    views = [view(job("a", num_workers=6), EIGHT, 0), view(job("b", num_workers=4), EIGHT, 1)]
    views[1].current = Allocation("t4", 4)
    assert list(find_policy("fifo").allocate(views, EIGHT, 0.0)) == ["b"]


def test_srtf_serves_the_shortest_and_fills_gaps():
    jobs = [job("long", work=1e6, num_workers=4), job("short", work=1e3, num_workers=6), job("one", work=1e5)]
    assert numbers("srtf", jobs) == {"short": 6, "one": 1}


def test_las_sinks_after_sixteen_device_hours():
    views = [view(job("old", num_workers=8), EIGHT, 0), view(job("new", num_workers=8), EIGHT, 1)]
    policy = find_policy("las")
    views[0].attained_device_s = 57_599.0
    assert list(policy.allocate(views, EIGHT, 0.0)) == ["old"]
    views[0].attained_device_s = 57_600.0
    assert list(policy.allocate(views, EIGHT, 0.0)) == ["new"]


def test_equal_share_stops_where_devices_no_longer_help():
    # Synchronisation takes a second: a second device only slows this job down.
    jobs = [job("stubborn", sync_s=20.0), job("a", sync_s=0.0), job("b", sync_s=0.0)]
    assert numbers("equal", jobs) == {"stubborn": 1, "a": 4, "b": 3}


def test_drf_gives_everything_away_even_where_it_hurts():
    assert numbers("drf", [job("stubborn", sync_s=20.0)]) == {"stubborn": 8}


def test_optimus_favours_the_long_job_and_normalised_does_not():
    jobs = [job("long", work=1e7, sync_s=0.01), job("short", work=1e4, sync_s=0.01)]
    by_optimus = numbers("optimus", jobs)
    by_normalised = numbers("normalised", jobs)
    assert by_optimus["long"] > by_optimus["short"] == 1
    assert by_normalised["long"] == by_normalised["short"] == 4


def test_optimus_gives_each_device_where_it_saves_most():
    """Every step of the greedy rule, replayed by trying all jobs."""
    cluster = parse_cluster("4x4xt4")
    jobs = [job("a", work=3e4), job("b", work=9e4, sample_s=0.03, sync_s=0.02)]
    views = [view(j, cluster, i, progress=0.5) for i, j in enumerate(jobs)]
    given = {v.job.name: Allocation("t4", 1) for v in views}

    def more(v):
        return Allocation("t4", given[v.job.name].num_workers + 1)

    def saved_s(v):
        return v.remaining_s(given[v.job.name]) - v.remaining_s(more(v))

    while sum(a.num_workers for a in given.values()) < 16 and saved_s(best := max(views, key=saved_s)) > 0:
        given[best.job.name] = more(best)
    assert find_policy("optimus").allocate(views, cluster, 0.0) == given


def test_young_jobs_gain_a_twentieth_less():
    from forerun.jobs.scheduling.marginal_gain import _minus_remaining_s

    young, grown = (view(job(), EIGHT, progress=p) for p in (0.0, 0.5))
    one = Allocation("t4", 1)
    assert _minus_remaining_s(young, one) == pytest.approx(0.95 * _minus_remaining_s(grown, one))


def test_a_job_jumps_over_a_number_that_does_not_help():
    # Five devices are on two nodes and slower than four, eight are faster again.
    of = job(sync_s=0.2, batch=512.0)
    rates = view(of, EIGHT).curves["t4"].rates
    assert rates[5] < rates[4] < rates[8]
    assert numbers("normalised", [of]) == {"a": 8}
    assert numbers("optimus", [of]) == {"a": 4}


def test_goodput_chooses_a_larger_batch_for_more_devices():
    jobs = [job("a", most=2048.0, num_workers=4)]
    fixed, adapted = (simulate(jobs, EIGHT, find_policy(name)) for name in ("normalised", "pollux"))
    assert adapted.first_decisions[0].batch_size > 64
    assert adapted.outcomes[0].end_s < fixed.outcomes[0].end_s


def test_sia_puts_each_job_on_the_devices_that_suit_it():
    cluster = parse_cluster("1x1xt4+1x1xv100")
    from dataclasses import replace

    from scheduler_cases import speed

    slow, fast = speed(0.04), speed(0.005)
    likes = job("likes", kinds=("t4", "v100"))
    likes = replace(likes, training=replace(likes.training, speeds={"t4": slow, "v100": fast}))
    same = job("same", kinds=("t4", "v100"))
    views = [view(likes, cluster, 0), view(same, cluster, 1)]
    found = find_policy("sia").allocate(views, cluster, 0.0)
    assert {name: a.device for name, a in found.items()} == {"likes": "v100", "same": "t4"}


def test_sia_at_most_doubles():
    from forerun.jobs.scheduling.unlike_devices import configurations

    of = view(job(sync_s=0.0), EIGHT)
    assert [a.num_workers for a in configurations(of, EIGHT)] == [1]
    of.current = Allocation("t4", 2)
    assert [a.num_workers for a in configurations(of, EIGHT)] == [1, 2, 4]
    of.current = Allocation("t4", 4)
    assert [a.num_workers for a in configurations(of, EIGHT)] == [1, 2, 4, 8]


def test_a_deadline_gets_as_much_as_it_needs_first():
    one = view(job("due", sync_s=0.0), EIGHT)
    alone_s, four_s = (one.remaining_s(Allocation("t4", n)) for n in (1, 4))
    due = job("due", sync_s=0.0, deadline_s=four_s * 1.001)
    others = [job(f"j{i}", sync_s=0.0) for i in range(4)]
    assert numbers("deadline", [*others, due])["due"] == 4
    late = job("due", sync_s=0.0, deadline_s=alone_s / 100)
    assert numbers("deadline", [*others, late])["due"] <= 2


def test_foresight_gives_short_jobs_more_than_their_share():
    jobs = [job("long", work=1e7, sync_s=0.01), job("short", work=1e4, sync_s=0.01)]
    found = numbers("foresight", jobs)
    assert found["short"] > found["long"] >= 1


def test_foresight_makes_no_change_that_does_not_pay_its_restart():
    def change(restart_s):
        of = view(job(restart_s=restart_s, sync_s=0.01, work=3e4), EIGHT)
        of.current = Allocation("t4", 7)
        return find_policy("foresight").allocate([of], EIGHT, 0.0)["a"].num_workers

    assert change(restart_s=0.0) == 8
    assert change(restart_s=600.0) == 7


def test_tetris_serves_requests_short_jobs_first():
    jobs = [job("long", work=1e7, num_workers=6), job("short", work=1e3, num_workers=6)]
    assert numbers("tetris", jobs) == {"long": 2, "short": 6}
