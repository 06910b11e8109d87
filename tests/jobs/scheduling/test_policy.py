"""What every policy owes, whatever its idea: the same tests for all."""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scheduler_cases import clusters, job, job_sets

from forerun.base.errors import UsageError
from forerun.jobs.scheduling import policy as policies
from forerun.jobs.scheduling.job import parse_cluster
from forerun.jobs.scheduling.outcome import SimulatedSchedule
from forerun.jobs.scheduling.policy import find_policy, policy_names, register
from forerun.jobs.scheduling.simulation import simulate

POLICIES = sorted(policy_names())
FEW = settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def devices_in_use(outcome: SimulatedSchedule) -> dict[int, list[tuple[float, float, int]]]:
    """Stretches by node: from, to, devices."""
    found: dict[int, list[tuple[float, float, int]]] = {}
    for stretch in outcome.stretches:
        for share in stretch.placement:
            found.setdefault(share.node, []).append((stretch.start_s, stretch.end_s, share.num_workers))
    return found


def assert_within_capacity(outcome: SimulatedSchedule, devices_by_node: list[int]) -> None:
    for node, parts in devices_in_use(outcome).items():
        for moment in {start for start, _, _ in parts}:
            used = sum(number for start, end, number in parts if start <= moment < end)
            assert used <= devices_by_node[node], f"node {node} at {moment} s"


@pytest.mark.parametrize("name", POLICIES)
class TestContract:
    @FEW
    @given(data=st.data())
    def test_capacity_work_and_nobody_starves(self, name, data):
        cluster = data.draw(clusters())
        jobs = data.draw(job_sets(cluster))
        outcome = simulate(jobs, cluster, find_policy(name), 300)
        assert_within_capacity(
            outcome, [g.devices_per_node for g in cluster.groups for _ in range(g.num_nodes)]
        )
        by_name = {j.name: j for j in jobs}
        for found in outcome.outcomes:
            # Everybody gets to its end. A round begins at most a rounding before an arrival in it.
            assert by_name[found.job].arrival_s - 1e-6 <= found.start_s < found.end_s < float("inf")
        assert outcome.metrics.utilisation <= 1 + 1e-9

    @FEW
    @given(data=st.data())
    def test_the_same_question_gives_the_same_schedule(self, name, data):
        cluster = data.draw(clusters())
        jobs = data.draw(job_sets(cluster))
        first, second = (simulate(jobs, cluster, find_policy(name), 300) for _ in range(2))
        assert first.outcomes == second.outcomes
        assert first.stretches == second.stretches

    @FEW
    @given(data=st.data())
    def test_a_device_is_busy_while_somebody_is_there(self, name, data):
        cluster = data.draw(clusters())
        jobs = data.draw(job_sets(cluster))
        outcome = simulate(jobs, cluster, find_policy(name), 300)
        for found in outcome.outcomes:
            # From the round after its arrival until its end, something runs.
            moments = [found.arrival_s + 301, (found.arrival_s + found.end_s) / 2]
            for moment in (m for m in moments if moments[0] <= m < found.end_s):
                in_round = (moment - 301, moment)
                assert any(s.start_s <= in_round[1] and s.end_s >= in_round[0] for s in outcome.stretches)

    def test_a_job_of_one_size_gets_that_size(self, name):
        cluster = parse_cluster("2x4xt4")
        jobs = [job(f"j{i}", num_workers=3, is_elastic=False, work=1e5 * (i + 1)) for i in range(4)]
        outcome = simulate(jobs, cluster, find_policy(name))
        assert {stretch.allocation.num_workers for stretch in outcome.stretches} == {3}

    def test_no_more_than_the_limit_of_a_job(self, name):
        outcome = simulate([job(max_workers=2, num_workers=2)], parse_cluster("2x4xt4"), find_policy(name))
        assert max(stretch.allocation.num_workers for stretch in outcome.stretches) <= 2

    @pytest.mark.parametrize("way", ["", ":raw"])
    def test_a_job_is_asked_only_about_kinds_that_it_can_run_on(self, name, way):
        # The smallest such case: each of two jobs knows a kind of device that the other does not.
        cluster = parse_cluster("1x1xk80+1x1xp100+1x1xv100")
        jobs = [job("a", kinds=("k80", "p100")), job("b", kinds=("p100", "v100"), sample_s=0.02)]
        known = {j.name: set(j.training.speeds) for j in jobs}
        outcome = simulate(jobs, cluster, find_policy(name + way))
        assert len(outcome.outcomes) == 2
        assert all(stretch.allocation.device in known[stretch.job] for stretch in outcome.stretches)

    @FEW
    @given(data=st.data())
    def test_jobs_with_speeds_on_some_kinds_are_all_done(self, name, data):
        cluster = parse_cluster("2x2xk80+1x2xp100+1x4xv100")
        kinds = st.sets(st.sampled_from(cluster.kinds), min_size=1).map(sorted).map(tuple)
        jobs = [
            job(f"j{i}", kinds=data.draw(kinds), is_elastic=data.draw(st.booleans()), work=1e4 * (i + 1))
            for i in range(data.draw(st.integers(2, 6)))
        ]
        outcome = simulate(jobs, cluster, find_policy(name), 300)
        known = {j.name: set(j.training.speeds) for j in jobs}
        assert {found.job for found in outcome.outcomes} == set(known)
        assert all(stretch.allocation.device in known[stretch.job] for stretch in outcome.stretches)

    def test_it_says_why(self, name):
        jobs = [job(f"j{i}", num_workers=4) for i in range(12)]
        outcome = simulate(jobs, parse_cluster("1x4xt4"), find_policy(name))
        assert len(outcome.first_decisions) == 12
        assert all(decision.reason for decision in outcome.first_decisions)


def test_an_unknown_policy_lists_near_matches():
    with pytest.raises(UsageError, match=r"unknown policy 'optimos'; did you mean optimus\?; known: "):
        find_policy("optimos")


def test_another_package_can_add_a_policy(monkeypatch):
    fifo = find_policy("fifo")
    monkeypatch.setattr(policies, "plugin_names", lambda group: ["newest"] if group == policies.GROUP else [])
    monkeypatch.setattr(
        policies,
        "plugin",
        lambda group, name: (lambda: replace(fifo, name="newest")) if name == "newest" else None,
    )
    assert find_policy(" Newest ").name == "newest"
    assert policy_names()[-1] == "newest"
    outcome = simulate([job("a"), job("b")], parse_cluster("1x2xt4"), find_policy("newest"))
    assert outcome.metrics.utilisation > 0


def test_a_name_is_registered_once():
    with pytest.raises(ValueError, match="two policies are called 'fifo'"):
        register("fifo", lambda: find_policy("fifo"))


def test_all_policies_of_the_field_are_there():
    wanted = [
        "fifo",
        "srtf",
        "las",
        "drf",
        "equal",
        "tetris",
        "optimus",
        "normalised",
        "pollux",
        "sia",
        "gavel",
        "themis",
        "deadline",
        "foresight",
    ]
    assert sorted(wanted) == POLICIES
