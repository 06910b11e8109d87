"""Traces: their files, and their jobs under FIFO, SRTF and LAS."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.base.errors import InvalidSetupError, RecordError, UsageError
from forerun.jobs.schedule import schedule_trace
from forerun.jobs.scheduling.trace import (
    RIGID_POLICIES,
    RigidJob,
    read_trace,
    simulate_rigid,
)


def jobs_of(*rows):
    return [RigidJob(f"j{i}", *row) for i, row in enumerate(rows)]


def test_by_hand():
    jobs = jobs_of((0, 2, 100), (10, 2, 10), (20, 1, 5))
    assert simulate_rigid(jobs, 2, "fifo")[0] == (100, 110, 115)
    # At 10 s the second has less left and stops the first, at 20 s the third runs, at 25 s the first goes on.
    assert simulate_rigid(jobs, 2, "srtf")[0] == (115, 20, 25)


def test_las_stops_a_job_at_its_threshold():
    jobs = jobs_of((0, 1, 100), (10, 1, 20))
    # The first sinks at 40 s with the second still in the first queue, which runs to its end.
    end_s, _ = simulate_rigid(jobs, 1, "las", thresholds_device_s=(40.0,))
    assert end_s == pytest.approx((120, 60))


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
    policy=st.sampled_from(RIGID_POLICIES),
)
def test_it_agrees_with_a_slow_replay(rows, policy):
    jobs = jobs_of(*((float(a), n, float(d) + a / 7919) for a, n, d in rows))
    end_s, _ = simulate_rigid(jobs, 6, policy, thresholds_device_s=(100.5, 700.5))
    assert end_s == pytest.approx(slow(jobs, 6, str(policy), (100.5, 700.5)), abs=1e-3)


def test_a_job_larger_than_the_cluster():
    with pytest.raises(
        InvalidSetupError, match="job 'j0' of the trace asks for 3 devices, the cluster has 2"
    ):
        simulate_rigid(jobs_of((0, 3, 10)), 2, "fifo")


def test_a_policy_that_needs_more_than_a_trace_says():
    with pytest.raises(UsageError, match="of a trace choose among fifo, srtf, las"):
        schedule_trace("none.csv", cluster="1x1xt4", policies=["optimus"])


GOOD = "job,submit_time,num_gpus,duration\nb,2017-10-09 07:02:00,8,66\na,2017-10-09 07:01:00,1,10.5\n"


def trace(tmp_path, text):
    path = tmp_path / "trace.csv"
    path.write_text(text, encoding="utf-8")
    return read_trace(path)


def test_rows_become_jobs_from_the_first_submission_on(tmp_path):
    first, second = trace(tmp_path, GOOD)
    assert (first.name, first.arrival_s, first.num_devices, first.duration_s) == ("a", 0.0, 1, 10.5)
    assert (second.name, second.arrival_s, second.num_devices) == ("b", 60.0, 8)


def test_seconds_and_other_names_do_as_well(tmp_path):
    found = trace(tmp_path, "Timestamp,GPUs,run_time\n100,1,5\n160,2,6\n")
    assert [(j.name, j.arrival_s) for j in found] == [("job-1", 0.0), ("job-2", 60.0)]


@pytest.mark.parametrize(
    ("text", "devices", "duration_s"),
    [
        # Tiresias' simulator.
        (
            "job_id,num_gpu,submit_time,iterations,model_name,duration,interval\n1,4,0,100,vgg16,1200,0\n",
            4,
            1200.0,
        ),
        # Philly, flattened.
        (
            "jobid,vc,submitted_time,start_time,end_time,num_gpus,status\n"
            "application_1,a,2017-10-09 07:00:00,2017-10-09 07:05:00,2017-10-09 08:05:00,8,Pass\n",
            8,
            3600.0,
        ),
        # Helios.
        (
            "job_id,user,vc,gpu_num,cpu_num,node_num,state,submit_time,start_time,end_time,duration,queue\n"
            "7,u,v,2,8,1,COMPLETED,2020-04-01 00:00:00,2020-04-01 00:01:00,2020-04-01 00:11:00,600,60\n",
            2,
            600.0,
        ),
        # Alibaba, 2020: a hundred of plan_gpu is a GPU.
        (
            "job_name,task_name,inst_num,status,start_time,end_time,plan_cpu,plan_mem,plan_gpu,gpu_type\n"
            "j,worker,4,Terminated,1000.0,1500.0,600,29,50,T4\n",
            2,
            500.0,
        ),
        # Its simulator, and its pods of 2023.
        ("job_id,submit_time,duration,num_cpu,num_gpu,num_inst\n0,0,1500,6,0.5,1\n", 1, 1500.0),
        (
            "name,cpu_milli,num_gpu,gpu_milli,pod_phase,creation_time,deletion_time,scheduled_time\n"
            "p,4152,2,1000,Failed,10019860,10024488,10019861\n",
            2,
            4627.0,
        ),
        # Acme's Kalos, a spreadsheet, Philly's own log, and sacct --json.
        (
            "job_id,user,node_num,gpu_num,type,state,submit_time,start_time,end_time,fail_time,duration,queue\n"
            "d,u,8,64,Other,FAILED,2023-05-17 11:00:58+00:00,2023-05-17 11:01:08+00:00,2023-05-17 11:01:16,,18,1\n",
            64,
            18.0,
        ),
        ("job;submit;duration;gpus\na;0;60;1\n", 1, 60.0),
        (
            '[{"jobid": "a", "submitted_time": "2017-10-09 07:01:50", "attempts": [{"start_time": "2017-10-09 07:02:00"'
            ', "end_time": "2017-10-09 07:55:00", "detail": [{"gpus": ["gpu0", "gpu1"]}, {"gpus": ["gpu0"]}]}]},'
            '{"jobid": "b", "submitted_time": "2017-10-09 07:01:50", "attempts": []}]',
            3,
            3180.0,
        ),
        (
            '{"jobs": [{"job_id": 5, "time": {"submission": 17, "start": 20, "end": 80}, "tres": {"allocated": '
            '[{"type": "cpu", "name": "", "count": 8}, {"type": "gres", "name": "gpu", "count": 4}]}}]}',
            4,
            60.0,
        ),
    ],
    ids=[
        "tiresias",
        "philly",
        "helios",
        "alibaba",
        "pai",
        "pods",
        "acme",
        "sheet",
        "philly-log",
        "sacct-json",
    ],
)
def test_published_traces_are_read_by_their_own_names(tmp_path, text, devices, duration_s):
    (found,) = trace(tmp_path, text)
    assert (found.num_devices, found.duration_s, found.arrival_s) == (devices, duration_s, 0.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "job,submit_time,num_gpus\na,0,1\n",
            "expected a column for the duration, one of duration_s, .* or for the end, one of end_time",
        ),
        (GOOD.replace(",66", ",x"), r"column 'duration', row 1: expected a number, got 'x' \(1 such"),
        (
            GOOD.replace("2017-10-09 07:01:00", "9 Oct"),
            "column 'submit_time', row 2: expected a date or seconds",
        ),
        (GOOD.replace("10.5", "-1"), "row 2: expected a duration above zero seconds, got '-1'"),
        (GOOD.replace("num_gpus", "cards"), "expected a column for the devices, one of num_gpus, n_gpus"),
        ("job,submit_time,num_gpus,duration\n", "expected at least one row"),
        (
            "job,submit_time,num_gpus,duration\na,0,0,1\n",
            "expected jobs that had GPUs and ended, got none of 1",
        ),
        ('{"jobs": [{"job_id": 5, "job_state": "PENDING"}]}', "are for forerun schedule live"),
        ("[", "expected a table of jobs, but Expecting value"),
    ],
)
def test_a_damaged_trace_is_refused_with_its_row(tmp_path, text, message):
    with pytest.raises(RecordError, match=message):
        trace(tmp_path, text)


def test_jobs_without_a_gpu_an_end_or_a_time_are_left_out_and_named(tmp_path):
    path, notes = tmp_path / "t.csv", []
    path.write_text(
        "job,submit_time,start_time,end_time,num_gpus\na,0,1,5,2\na,0,1,5,.5\nb,0,1,,1\nc,0,1,9,0\nd,0,3,3,1\n,,1,2,1\n"
    )
    assert read_trace(path, notes) == [RigidJob("a", 0.0, 2, 4.0), RigidJob("a#2", 0.0, 1, 4.0)]
    assert notes == [
        "jobs left out, as they had no GPU, no submission, no end or no time: 4",
        "jobs with parts of a GPU, counted as whole ones: 1",
    ]


def test_no_such_file(tmp_path):
    with pytest.raises(RecordError, match="there is no such file"):
        read_trace(tmp_path / "none.csv")


def test_slurms_accounting_is_a_trace(tmp_path):
    path = tmp_path / "sacct.txt"
    path.write_text(
        "JobID|Submit|Start|End|AllocTRES|State|\n"
        "7|2024-01-01T00:00:00|2024-01-01T00:01:00|2024-01-01T01:01:00|billing=8,gres/gpu:a100=2,gres/gpu=2|COMPLETED|\n"
        "7.batch|2024-01-01T00:00:00|2024-01-01T00:01:00|2024-01-01T01:01:00|cpu=8,gres/gpu=2|COMPLETED|\n"
        "8_3|2024-01-01T00:00:30|2024-01-01T02:00:00|2024-01-01T02:00:10|cpu=1,gres/gpu=1|CANCELLED by 1000|\n"
        "9|2024-01-01T00:00:00|2024-01-01T00:01:00|Unknown|gres/gpu=1|RUNNING|\n"
        "10|2024-01-01T00:00:00|2024-01-01T00:01:00|2024-01-01T00:02:00|cpu=4|COMPLETED|\n"
        "11|2024-01-01T00:00:00|2024-01-01T00:01:00|2024-01-01T00:01:00|gres/gpu=1|FAILED|\n"
    )
    notes = []
    assert read_trace(path, notes) == [RigidJob("7", 0.0, 2, 3600.0), RigidJob("8_3", 30.0, 1, 10.0)]
    assert notes == ["jobs left out, as they had no GPU, no submission, no end or no time: 3"]
    path.write_text("JobID|Submit|AllocTRES\n7|2024-01-01T00:00:00|gres/gpu=1\n")
    with pytest.raises(RecordError, match=r"sacct --parsable2 --format=JobID,Submit,Start,End,AllocTRES"):
        read_trace(path)
