"""A cluster of a head and two nodes on this machine: every job is recorded once, though a node dies."""

import builtins
import os
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from jsonl_sink import JsonlSink
from tiny_runners import KILL, QUICK, RUN, tiny_job

from forerun.adapters.clusters.ray import RAY, run_jobs_on_ray
from forerun.base.errors import MeasurementError, MissingExtraError
from forerun.evidence.measurement import session
from forerun.evidence.records.measurement import Outcome
from forerun.question.devices.local import lock_device
from small_clusters import PATIENCE_S, raylet_pid, small_cluster

ray = pytest.importorskip("ray", reason="needs the extra 'ray'")


@pytest.fixture(scope="module")
def cluster():
    # The workers take it from their node: where the runner of these tests is.
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    with small_cluster({"PYTHONPATH": path}) as found:
        # As they take the folder where the device's lock is.
        found.locks = Path(os.environ["TMPDIR"])
        yield found
        ray.shutdown()


def measure(cluster, jobs, sink, protocol=QUICK, **options):
    return RAY.measure(jobs, sink, address=cluster.address, protocol=protocol, run=RUN, **options)


def kernels(sink):
    return [line for line in sink.lines() if line["kind"] == "layer"]


def test_each_job_is_recorded_once_with_its_outcome_and_stdout_stays_clean(cluster, tmp_path, capfd):
    sink = JsonlSink(tmp_path / "records.jsonl")
    jobs = [tiny_job("times"), tiny_job("raise"), tiny_job("signal", signal=KILL), tiny_job("tell")]
    events = []
    report = measure(cluster, [*jobs, jobs[0]], sink, on_event=events.append, expected_s=lambda job: 1.0)
    assert report.outcomes == {Outcome.DONE: 2, Outcome.FAILED: 1, Outcome.KILLED: 1}
    assert report.null_step_s == 0.1
    assert len(kernels(sink)) == len({line["key"] for line in kernels(sink)}) == 4
    finished = [event for event in events if isinstance(event, session.JobFinished)]
    assert [event.index for event in finished] == [0, 1, 2, 3]
    assert finished[-1].remaining_time_s == 0.0
    assert capfd.readouterr().out == ""

    again = measure(cluster, jobs, sink)
    assert again.num_skipped == 2
    assert again.outcomes == {Outcome.FAILED: 1, Outcome.KILLED: 1}


def test_a_device_that_stays_locked_loses_the_job_and_names_the_holder(cluster, tmp_path):
    sink = JsonlSink(tmp_path / "records.jsonl")
    events = []
    with lock_device("cpu", folder=cluster.locks):
        report = measure(
            cluster, [tiny_job("times")], sink, replace(QUICK, timeout_s=0.1), on_event=events.append
        )
    assert (report.num_lost, report.outcomes) == (1, {})
    (lost,) = [event for event in events if isinstance(event, session.JobLost)]
    assert f"process {os.getpid()}" in lost.reason
    assert sink.lines() == []


def test_a_custom_resource_nobody_has_is_one_clear_error(cluster, tmp_path):
    with pytest.raises(
        MeasurementError, match="a node of the Ray cluster with 1 CPU, 1 a100, found none among 3"
    ):
        measure(cluster, [tiny_job("times")], JsonlSink(tmp_path / "x"), resources={"a100": 1})


def test_ctrl_c_keeps_what_was_measured_and_the_rerun_finishes(cluster, tmp_path):
    sink = JsonlSink(tmp_path / "records.jsonl")
    jobs = [tiny_job("sleep", sleep_s=0.3, size=size) for size in range(3)]
    reports = []

    def interrupt_at_the_first(event):
        if isinstance(event, session.JobFinished):
            raise KeyboardInterrupt
        if isinstance(event, session.SessionFinished):
            reports.append(event.report)

    with pytest.raises(KeyboardInterrupt):
        measure(cluster, jobs, sink, on_event=interrupt_at_the_first)
    assert reports[0].is_interrupted
    assert len(kernels(sink)) == 1
    assert measure(cluster, jobs, sink).num_skipped == 1
    assert len(kernels(sink)) == len({line["key"] for line in kernels(sink)}) == 3


def test_a_node_killed_in_the_middle_of_a_job_loses_nothing(cluster, tmp_path):
    """Last in this file: the cluster has one node less afterwards."""
    sink = JsonlSink(tmp_path / "records.jsonl")
    started = tmp_path / "started"
    # Long enough that a slow machine kills the node before its job is done.
    jobs = [tiny_job("sleep", sleep_s=4.0, size=size, started=str(started)) for size in range(4)]
    victims = []

    def kill_the_node_of_the_running_job(event):
        if isinstance(event, session.JobFinished) and not victims:
            victims.append(_running_child(started, event.index + 2))
            node = next(node for node in cluster.worker_nodes if raylet_pid(node) == victims[0][1])
            cluster.remove_node(node, allow_graceful=False)

    report = measure(cluster, jobs, sink, on_event=kill_the_node_of_the_running_job)
    assert report.outcomes == {Outcome.DONE: 4}
    assert report.num_lost == 0
    assert len(kernels(sink)) == len({line["key"] for line in kernels(sink)}) == 4
    # One job more was begun than recorded: the one that died with its node, and its process with it.
    assert len(started.read_text().splitlines()) == 5
    assert not psutil.pid_exists(victims[0][0])


def _running_child(started, num_lines):
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s:
        lines = started.read_text().splitlines()
        if len(lines) >= num_lines:
            pid, parent_pid = lines[num_lines - 1].split()
            return int(pid), int(parent_pid)
        time.sleep(0.02)
    raise AssertionError("no second job was begun")


@pytest.mark.parametrize("address", ["127.0.0.1:1", "no-port"])
def test_an_address_without_a_cluster_is_refused_at_once(address, tmp_path):
    assert not ray.is_initialized()
    with pytest.raises(MeasurementError, match=f"a Ray cluster at '{address}'.*ray start"):
        run_jobs_on_ray([tiny_job("times")], JsonlSink(tmp_path / "x"), address=address)


def test_without_ray_the_extra_is_named(monkeypatch, tmp_path):
    real_import = builtins.__import__

    def refuse_ray(name, *arguments, **options):
        if name == "ray":
            raise ImportError(name)
        return real_import(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", refuse_ray)
    with pytest.raises(MissingExtraError, match=r"measuring on a Ray cluster.*forerun\[ray\]"):
        run_jobs_on_ray([tiny_job("times")], JsonlSink(tmp_path / "x"))
