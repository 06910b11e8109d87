"""Time, restarts and errors inside the simulator."""

import time
from dataclasses import replace

import numpy as np
import pytest
from scheduler_cases import job, speed

from forerun.base.errors import FailureError, InvalidSetupError
from forerun.jobs.scheduling.job import parse_cluster
from forerun.jobs.scheduling.policy import find_policy, policy_names
from forerun.jobs.scheduling.simulation import _Simulation, simulate
from forerun.jobs.scheduling.speed import BatchEfficiency

FOUR = parse_cluster("1x4xt4")


def run(jobs, policy="fifo", cluster=FOUR, **options):
    return simulate(jobs, cluster, find_policy(policy), **options)


def test_one_job_takes_its_work_over_its_speed_and_one_restart():
    of = job(work=64_000, num_workers=2, restart_s=40.0)
    rate = speed()(2, 1, 64)
    assert run([of]).outcomes[0].end_s == pytest.approx(40.0 + 64_000 / rate)


@pytest.mark.parametrize("policy", [*policy_names(), "pollux:raw", "gavel:raw"])
def test_a_job_starts_when_it_comes_or_devices_come_free(policy):
    fixed = {"is_elastic": False, "restart_s": 10.0}
    jobs = [
        job("first", work=1e4, num_workers=2, **fixed),
        job("comes", work=1e5, num_workers=2, arrival_s=7.0, **fixed),
        job("waits", work=1e5, num_workers=2, arrival_s=11.0, **fixed),  # too long to have waited too long
    ]
    first, comes, waits = run(jobs, policy, round_s=300.0).outcomes
    assert comes.start_s == 7.0
    assert waits.start_s == pytest.approx(first.end_s)
    assert first.end_s < 300  # until the round, nobody who runs is moved
    assert first.num_restarts == 0


def test_a_job_shorter_than_the_clock_can_tell_ends():
    jobs = [job("a", work=1e-9, restart_s=1.0, arrival_s=1e4), job("b", work=1e-9, restart_s=1.0)]
    found = simulate(jobs, parse_cluster("1x1xt4"), find_policy("foresight"))
    assert [outcome.end_s for outcome in found.outcomes] == pytest.approx([1.0, 10_001.0])


@pytest.mark.parametrize("arrival_s", [1e-300, 1e-8, 300 + 1e-7, 3e5 + 2e-7])
def test_a_job_a_moment_after_a_round_is_let_in(arrival_s):
    outcome = run([job(arrival_s=arrival_s)], round_s=300.0).outcomes[0]
    assert outcome.start_s == pytest.approx(arrival_s, abs=1e-6)


def test_stretches_tell_the_story():
    jobs = [job("a", num_workers=4, work=1e5), job("b", num_workers=4, work=1e3, arrival_s=30.0)]
    found = run(jobs, "srtf")
    first, between, last = found.stretches
    # The shorter one stops the longer one at the next round, and it goes on from there.
    assert [one.job for one in found.stretches] == ["a", "b", "a"]
    assert (first.start_s, first.end_s) == (0.0, between.start_s)
    assert between.end_s <= last.start_s
    assert last.end_s == found.outcomes[0].end_s


def test_passing_over_quiet_rounds_changes_nothing():
    """A stable policy is asked at events only; asked in each round it must come to the same end."""
    jobs = [
        job(f"j{i}", work=3e4 * (i + 1), arrival_s=400.0 * i, num_workers=2, restart_s=20) for i in range(5)
    ]
    stable = find_policy("normalised")
    asked_always = simulate(jobs, FOUR, replace(stable, is_stable=False))
    asked_at_events = simulate(jobs, FOUR, stable)
    for often, seldom in zip(asked_always.outcomes, asked_at_events.outcomes, strict=True):
        assert often.end_s == pytest.approx(seldom.end_s)


def test_devices_on_more_nodes_run_at_the_speed_of_more_nodes():
    cluster = parse_cluster("2x2xt4")
    of = job(num_workers=4, work=64_000)
    assert run([of], cluster=cluster).outcomes[0].end_s == pytest.approx(64_000 / speed()(4, 2, 64))


def test_what_a_policy_believes_does_not_change_what_is_true():
    believed = job(work=64_000, num_workers=2)
    true = job(work=128_000, num_workers=2, sample_s=0.02)
    outcome = simulate([believed], FOUR, find_policy("fifo"), actual={"a": true}).outcomes[0]
    assert outcome.end_s == pytest.approx(128_000 / speed(0.02)(2, 1, 64))


def test_efficiency_falls_with_the_batch_and_is_paid_for():
    of = job(work=64_000, most=1024.0, num_workers=4)
    found = simulate([of], FOUR, find_policy("pollux"))
    batch = found.first_decisions[0].batch_size
    worth = BatchEfficiency(noise_scale=500.0, base_batch_size=64.0)(batch, 0.0)
    given = found.first_decisions[0].allocation.num_workers
    assert found.outcomes[0].end_s == pytest.approx(64_000 / (speed()(given, 1, batch) * worth))


def test_metrics_of_a_case_by_hand():
    # Two jobs of one device each on one device, one after the other.
    rate = speed()(1, 1, 64)
    jobs = [job("a", work=600 * rate), job("b", work=1200 * rate)]
    m = run(jobs, cluster=parse_cluster("1x1xt4")).metrics
    assert m.average_completion_s == pytest.approx((600 + 1800) / 2)
    assert m.makespan_s == pytest.approx(1800)
    assert m.device_hours == pytest.approx(0.5)
    assert m.utilisation == pytest.approx(1.0)
    assert m.restarts_per_job == 0.0
    # a shared with one other all its life, b a third of it.
    assert m.worst_fairness == pytest.approx(1800 / 1200)


def test_deadlines_are_counted():
    rate = speed()(1, 1, 64)
    jobs = [job("a", work=600 * rate, deadline_s=700.0), job("b", work=600 * rate, deadline_s=700.0)]
    assert run(jobs, cluster=parse_cluster("1x1xt4")).metrics.deadlines_met == 0.5


@pytest.mark.parametrize(
    ("jobs", "message"),
    [
        ([], "expected at least one job, got none"),
        ([job("a"), job("a")], "two jobs are called 'a'"),
        ([job("a", num_workers=5)], "job 'a' asks for 5 devices of one kind, the cluster has 4"),
        ([job("a", kinds=("v100",))], "job 'a': its speed is known on v100, the cluster has t4"),
    ],
)
def test_sets_of_jobs_that_cannot_be_scheduled(jobs, message):
    with pytest.raises(InvalidSetupError, match=message):
        run(jobs)


def test_a_job_that_fits_no_node_is_a_failure_with_a_reason():
    with pytest.raises(FailureError, match=r"gave nothing to any of 1 jobs.*asks for on one node"):
        simulate([job(num_workers=4, part=4)], parse_cluster("2x2xt4"), find_policy("fifo"))


@pytest.mark.parametrize(
    ("field", "value"),
    [("arrival_s", -1.0), ("work_samples", 0.0), ("num_workers", 0), ("weight", 0.0), ("restart_s", -1.0)],
)
def test_jobs_that_cannot_be_meant(field, value):
    with pytest.raises(AssertionError):
        replace(job(), **{field: value})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"round_s": 0.0}, "a round must last at least .* got 0"),
        ({"round_s": float("nan")}, "a round must last at least"),
    ],
)
def test_options_that_cannot_be_meant(options, message):
    with pytest.raises(InvalidSetupError, match=message):
        run([job()], **options)


def test_a_decision_about_ten_thousand_jobs_takes_seconds():
    # Curves of speed, the policy and the nodes, all of it: what ``scheduler_ms`` counts.
    chance = np.random.default_rng(0)
    cluster = parse_cluster("170x8xk80+171x8xt4+171x8xv100")
    jobs = []
    for i, n in enumerate(chance.choice([1, 2, 4, 8], 10_000)):
        one = job(f"j{i}", batch=256.0, most=4096.0, num_workers=int(n))
        speeds = {kind: speed(float(chance.uniform(1e-4, 1e-2))) for kind in cluster.kinds}
        jobs.append(replace(one, training=replace(one.training, speeds=speeds)))
    begin = time.process_time()
    state = _Simulation(jobs, cluster, find_policy("foresight"), 60.0, {}, {})
    state._admit(0.0)
    state._decide(0.0)
    assert time.process_time() - begin < 5.0
    assert state.decision_s[0] > 0
    assert sum(s.current.num_workers for s in state.active if s.current is not None) == 4096


@pytest.mark.parametrize("policy", policy_names())
def test_a_job_of_years_takes_hardly_more_questions_than_one_of_months(policy):
    found = {}
    for years in (0.1, 10, 1000):
        jobs = [job("a", work=1e9 * years, restart_s=1.0), job("b", work=1.0, restart_s=1.0)]
        state = _Simulation(jobs, parse_cluster("1x2xt4"), find_policy(policy), 60.0, {}, {})
        state.run(None)
        found[years] = len(state.decision_s)
    assert found[1000] - found[10] <= found[10] - found[0.1] + 20
    assert found[1000] < 1500
