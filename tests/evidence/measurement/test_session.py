"""Sessions resume, keep the device to themselves, and mark what a drifting machine measured."""

import multiprocessing
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from jsonl_sink import JsonlSink
from tiny_runners import QUICK, RUN, tiny_job

from forerun.base.errors import DeviceBusyError, RecordError
from forerun.evidence.measurement import session
from forerun.evidence.measurement.measured_job import key_of
from forerun.evidence.measurement.session import run_jobs
from forerun.evidence.records.measurement import Circumstances, JobKind, Outcome
from forerun.evidence.records.record_store import RecordStore
from forerun.question.devices.local import lock_device

HERE = Path(__file__).parent
PLACE = Circumstances(device="cpu", device_title="a test", host="here", framework_version="0")


@pytest.fixture(autouse=True)
def _own_lock_folder(tmp_path, monkeypatch):
    # The sessions of these tests must not wait for a real one on this machine.
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


@pytest.fixture
def sink(tmp_path):
    return JsonlSink(tmp_path / "records.jsonl")


def measure(jobs, sink, *, protocol=QUICK, anchor=None, **options):
    return run_jobs(jobs, sink, protocol=protocol, circumstances=PLACE, anchor=anchor, run=RUN, **options)


def jobs_of(sink):
    return [line for line in sink.lines() if line["kind"] == "layer"]


def test_jobs_end_each_in_its_own_way_and_all_are_written(sink):
    jobs = [tiny_job("times"), tiny_job("raise"), tiny_job("exit"), tiny_job("times", size=2)]
    report = measure([*jobs, jobs[0]], sink)
    assert report.outcomes == {Outcome.DONE: 2, Outcome.FAILED: 2}
    assert [line["outcome"] for line in jobs_of(sink)] == ["done", "failed", "failed", "done"]
    assert report.null_step_s == 0.1
    assert all(line["results"]["null_step_s"] == 0.1 for line in jobs_of(sink))
    assert sink.lines()[0]["kind"] == "null"


def test_a_second_session_skips_what_is_done_and_repeats_what_failed(sink):
    jobs = [tiny_job("times"), tiny_job("raise")]
    measure(jobs, sink)
    report = measure([*jobs, tiny_job("times", size=2)], sink)
    assert report.num_skipped == 1
    assert report.outcomes == {Outcome.DONE: 1, Outcome.FAILED: 1}
    assert measure(jobs[:1], sink).outcomes == {}
    assert measure(jobs[:1], sink, occasion="another day").outcomes == {Outcome.DONE: 1}


def test_events_tell_of_every_job_with_the_remaining_time(sink):
    events = []
    jobs = [tiny_job("times", size=size) for size in range(3)] + [tiny_job("progress")]
    measure(jobs, sink, on_event=events.append, expected_s=lambda job: 2.0)
    assert isinstance(events[0], session.SessionStarted)
    assert events[0].num_jobs == 4
    assert isinstance(events[-1], session.SessionFinished)
    started = [event for event in events if isinstance(event, session.JobStarted)]
    finished = [event for event in events if isinstance(event, session.JobFinished)]
    assert [event.job for event in started] == [event.job for event in finished] == jobs
    assert started[0].remaining_time_s == 8.0
    assert finished[-1].remaining_time_s == 0.0
    assert [e.fraction for e in events if isinstance(e, session.JobProgressed)] == [0.25, 0.5, 1.0]


def test_without_expectations_nothing_is_said_before_the_first_job(sink):
    events = []
    measure([tiny_job("times"), tiny_job("times", size=2)], sink, on_event=events.append)
    remaining = [e.remaining_time_s for e in events if isinstance(e, session.JobStarted)]
    assert remaining[0] is None
    assert remaining[1] > 0


def test_jobs_between_two_anchors_that_differ_are_marked(sink, tmp_path):
    anchor = tiny_job("drift", counter=str(tmp_path / "count"), growth=0.04)
    jobs = [tiny_job("times", size=size) for size in range(5)]
    events = []
    protocol = replace(QUICK, anchor_every=2, anchor_tolerance=0.0379)
    report = measure(jobs, sink, protocol=protocol, anchor=anchor, on_event=events.append)
    # The anchor takes 100, 104, 108 and 112 ms: +4.0 %, +3.8 %, +3.7 %. Only the last block is quiet enough.
    drifts = [event.drift for event in events if isinstance(event, session.AnchorMeasured)]
    assert drifts == [None, *(pytest.approx(drift, abs=1e-6) for drift in (0.04, 0.0384615, 0.0370370))]
    assert set(sink.marked) == {key_of(job, PLACE) for job in jobs[:4]}
    assert set(sink.marked.values()) == {
        "the anchor changed by +4.0% meanwhile",
        "the anchor changed by +3.8% meanwhile",
    }
    assert report.num_unstable == 4
    assert report.outcomes == {Outcome.DONE: 5}
    anchors = [line for line in sink.lines() if line["parameters"].get("do") == "drift"]
    assert len({line["key"] for line in anchors}) == 4


def test_an_anchor_that_fails_marks_nothing(sink):
    report = measure(
        [tiny_job("times")], sink, protocol=replace(QUICK, anchor_every=1), anchor=tiny_job("raise")
    )
    assert report.outcomes == {Outcome.DONE: 1}
    assert sink.marked == {}


def test_a_locked_device_names_the_process_that_holds_it(sink, tmp_path):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD_SCRIPT, str(tmp_path)],
        env=script_environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(DeviceBusyError, match=rf"device cpu to be free, but process {holder.pid} \(user"):
            measure([tiny_job("times")], sink)
        assert sink.lines() == []
    finally:
        holder.kill()
        holder.wait()
    # The lock dies with its holder, though nobody cleaned up.
    assert measure([tiny_job("times")], sink).outcomes == {Outcome.DONE: 1}


HOLD_SCRIPT = """
import sys, time
from pathlib import Path
from forerun.question.devices.local import lock_device
with lock_device("cpu", folder=Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def script_environment():
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, sys.path)])}


SESSION_SCRIPT = """
import sys, tempfile
tempfile.tempdir = sys.argv[1]
from tiny_runners import QUICK, RUN, tiny_job
from forerun.evidence.measurement.session import run_jobs
from forerun.evidence.records.measurement import Circumstances
from forerun.evidence.records.record_store import RecordStore
jobs = [tiny_job("sleep", sleep_s=0.3, size=size, started=sys.argv[3]) for size in range(6)]
place = Circumstances(device="cpu", device_title="a test", host="here", framework_version="0")
with RecordStore.open(sys.argv[2]) as store:
    run_jobs(jobs, store, protocol=QUICK, circumstances=place, anchor=None, run=RUN)
"""


def test_after_kill_9_the_rerun_finishes_the_rest_and_nothing_is_lost(tmp_path):
    started, records = tmp_path / "started", tmp_path / "records.sqlite"
    command = [sys.executable, "-c", SESSION_SCRIPT, str(tmp_path), str(records), str(started)]
    session = subprocess.Popen(command, env=script_environment())
    deadline_s = time.monotonic() + 240
    while time.monotonic() < deadline_s and not (started.exists() and started.read_text().count("\n") >= 3):
        time.sleep(0.02)
    session.kill()
    session.wait()
    first = jobs_in(records)
    # Two had ended when the third began; each that had ended is there, with its circumstances.
    assert 2 <= len(first) < 6
    assert all(measurement.outcome is Outcome.DONE for measurement in first)
    subprocess.run(command, env=script_environment(), check=True, timeout=240)
    last = jobs_in(records)
    assert sorted(m.parameters["size"] for m in last) == list(range(6))
    assert [measurement for measurement in last if measurement in first] == first
    # At most the job that was running is run twice.
    assert started.read_text().count("\n") <= 7


def jobs_in(records):
    with RecordStore.open(records, create=False) as store:
        return list(store.measurements(kind="layer"))


def test_ctrl_c_keeps_what_was_measured_and_says_so(sink):
    events = []
    others = multiprocessing.active_children()  # such as the process that traces models

    def interrupt_in_the_middle_of_the_second(event):
        events.append(event)
        if isinstance(event, session.JobProgressed):
            raise KeyboardInterrupt

    jobs = [tiny_job("times"), tiny_job("progress"), tiny_job("times", size=2)]
    with pytest.raises(KeyboardInterrupt):
        measure(jobs, sink, on_event=interrupt_in_the_middle_of_the_second)
    assert len(jobs_of(sink)) == 1
    assert events[-1].report.is_interrupted
    assert events[-1].report.outcomes == {Outcome.DONE: 1}
    assert [child for child in multiprocessing.active_children() if child not in others] == []
    with lock_device("cpu"):
        pass


def test_a_store_that_cannot_write_ends_the_session_with_its_error(sink):
    class FullSink(JsonlSink):
        def add(self, measurement):
            if measurement.kind is JobKind.LAYER and measurement.parameters["size"] == 1:
                raise RecordError("expected room on the disk, got none")
            return super().add(measurement)

    with pytest.raises(RecordError, match="room on the disk"):
        measure([tiny_job("times", size=size) for size in range(3)], FullSink(sink.path))
    assert [line["parameters"]["size"] for line in jobs_of(sink)] == [0]
