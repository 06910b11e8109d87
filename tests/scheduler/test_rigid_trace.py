"""The fast simulator of traces against the other one, by hand, and against a slow replay."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.errors import InvalidSetupError, UsageError
from forerun.scheduler.ordered_load import OrderedLoad
from forerun.scheduler.rigid_trace import RigidJob, RigidPolicy, rigid_policy, simulate_rigid


def jobs_of(*rows):
    return [RigidJob(f"j{i}", *row) for i, row in enumerate(rows)]


def test_by_hand():
    jobs = jobs_of((0, 2, 100), (10, 2, 10), (20, 1, 5))
    assert simulate_rigid(jobs, 2, RigidPolicy.FIFO).end_s == (100, 110, 115)
    # At 10 s the second has less left and stops the first, at 20 s the third runs, at 25 s the first goes on.
    assert simulate_rigid(jobs, 2, RigidPolicy.SRTF).end_s == (115, 20, 25)


def test_las_stops_a_job_at_its_threshold():
    jobs = jobs_of((0, 1, 100), (10, 1, 20))
    # The first sinks at 40 s with the second still in the first queue, which runs to its end.
    found = simulate_rigid(jobs, 1, RigidPolicy.LAS, thresholds_device_s=(40.0,))
    assert found.end_s == pytest.approx((120, 60))


def slow(jobs, num_devices, policy, thresholds):
    """The same rules by sorting all jobs at every event."""
    left = {i: j.duration_s for i, j in enumerate(jobs)}
    end, now, running = {}, 0.0, set()

    def had(i):
        return (jobs[i].duration_s - left[i]) * jobs[i].num_devices

    def queue(i):
        return sum(had(i) >= t - 1e-6 for t in thresholds)

    def key(i):
        a = jobs[i].arrival_s
        return {"fifo": (i not in running, a, i), "srtf": (left[i], a, i), "las": (queue(i), a, i)}[policy]

    while len(end) < len(jobs):
        here = sorted((i for i in left if jobs[i].arrival_s <= now + 1e-9), key=key)
        free, chosen = num_devices, set()
        for i in here:
            if jobs[i].num_devices <= free:
                chosen.add(i)
                free -= jobs[i].num_devices
            elif policy == "fifo":
                break
        running = chosen
        times = [j.arrival_s - now for i, j in enumerate(jobs) if i in left and j.arrival_s > now + 1e-9]
        times += [left[i] for i in running]
        if policy == "las":
            times += [
                (t - had(i)) / jobs[i].num_devices for i in running for t in thresholds if t - had(i) > 1e-6
            ]
        step = min(times)
        now += step
        for i in list(running):
            left[i] -= step
            if left[i] <= 1e-6:
                end[i] = now
                del left[i]
    return tuple(end[i] for i in range(len(jobs)))


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(
        st.tuples(st.integers(0, 500), st.integers(1, 6), st.integers(1, 300)),
        min_size=1,
        max_size=14,
        unique_by=lambda r: r[0],
    ),
    policy=st.sampled_from(list(RigidPolicy)),
)
def test_it_agrees_with_a_slow_replay(rows, policy):
    jobs = jobs_of(*((float(a), n, float(d) + a / 7919) for a, n, d in rows))
    found = simulate_rigid(jobs, 6, policy, thresholds_device_s=(100.5, 700.5))
    assert found.end_s == pytest.approx(slow(jobs, 6, str(policy), (100.5, 700.5)), abs=1e-3)


@given(keys=st.lists(st.integers(0, 10**6), unique=True, max_size=400), asked=st.integers(0, 10**6))
def test_an_ordered_load_adds_up_what_lies_above(keys, asked):
    load = OrderedLoad()
    for k in keys:
        load.add((float(k), 0.0, k), 1 + k % 7)
    for k in keys[::3]:
        load.remove((float(k), 0.0, k))
    kept = [k for i, k in enumerate(keys) if i % 3]
    assert load.above((float(asked), 0.0, asked)) == sum(1 + k % 7 for k in kept if k > asked)
    assert [k for _, _, k in reversed(load)] == sorted(kept, reverse=True)
    assert len(load) == len(kept)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "at least one job in the trace"),
        ([(0, 3, 10)], "job 'j0' of the trace asks for 3 devices, the cluster has 2"),
        ([(-1, 1, 10)], "an arrival of zero or later"),
        ([(0, 0, 10)], "devices and a duration above"),
        ([(0, 1, 0)], "devices and a duration above"),
    ],
)
def test_traces_that_cannot_be_replayed(rows, message):
    with pytest.raises(InvalidSetupError, match=message):
        simulate_rigid(jobs_of(*rows), 2, RigidPolicy.FIFO)


def test_a_policy_that_needs_more_than_a_trace_says():
    with pytest.raises(UsageError, match="with --trace choose among fifo, srtf, las"):
        rigid_policy("optimus")
