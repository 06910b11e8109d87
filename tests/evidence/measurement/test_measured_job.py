"""Whatever a job does, a report comes back and nothing is left running."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from tiny_runners import KILL, QUICK, RUN, tiny_job

from forerun.evidence.measurement.measured_job import run_in_child
from forerun.evidence.records.measurement import Outcome

HERE = Path(__file__).parent


def report_of(do, protocol=QUICK, on_progress=None, **parameters):
    return run_in_child(tiny_job(do, **parameters), "cpu", protocol, on_progress, run=RUN)


def wait_until(condition, timeout_s=120.0):
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        if condition():
            return True
        time.sleep(0.05)
    return False


def test_a_result_comes_back_whole():
    report = report_of("times")
    assert report.outcome is Outcome.DONE
    assert report.reason == ""
    assert report.result.repetitions_s == (0.1,) * 6
    assert report.result.warm_up_s == (0.2, 0.1)


def test_each_job_has_a_process_with_the_threads_and_the_environment_of_now(monkeypatch, capfd):
    monkeypatch.setenv("FORERUN_TEST_WORD", "first")
    first = report_of("tell").result.results
    monkeypatch.setenv("FORERUN_TEST_WORD", "second")
    second = report_of("tell", replace(QUICK, num_threads=2)).result.results
    assert (first["word"], second["word"]) == ("first", "second")
    assert (first["OMP_NUM_THREADS"], second["OMP_NUM_THREADS"]) == ("1", "2")
    assert (first["num_threads"], second["num_threads"]) == (1, 2)
    assert len({first["pid"], second["pid"], os.getpid()}) == 3
    assert capfd.readouterr().out == ""


def test_progress_reaches_the_session():
    seen = []
    assert report_of("progress", on_progress=seen.append).outcome is Outcome.DONE
    assert seen == [0.25, 0.5, 1.0]


def test_an_exception_is_a_failure_with_its_message():
    report = report_of("raise")
    assert report.outcome is Outcome.FAILED
    assert report.reason == "ValueError: 7 is not a batch size"
    assert report.result is None


def test_a_job_that_leaves_without_a_result_is_a_failure():
    report = report_of("exit")
    assert report.outcome is Outcome.FAILED
    assert "exit status 3" in report.reason


@pytest.mark.parametrize(("number", "name"), [(KILL, "SIGKILL"), (int(signal.SIGSEGV), "SIGSEGV")])
def test_death_by_a_signal_names_it(number, name):
    report = report_of("signal", signal=number)
    assert report.outcome is Outcome.KILLED
    assert name in report.reason
    assert ("out of memory" in report.reason) == (name == "SIGKILL")


def test_a_worker_left_behind_does_not_keep_the_session_waiting(tmp_path):
    # A forked worker holds the child's end of the pipe open.
    grandchild = tmp_path / "grandchild"
    report = report_of("die before a forked child", signal=KILL, grandchild=str(grandchild))
    assert report.outcome is Outcome.KILLED
    assert wait_until(lambda: not is_running(int(grandchild.read_text())))


def test_a_hanging_job_and_what_it_started_are_ended(tmp_path):
    grandchild = tmp_path / "grandchild"
    began_s = time.monotonic()
    report = report_of(
        "hang with a child",
        replace(QUICK, timeout_s=6.0),
        grandchild=str(grandchild),
        started=str(tmp_path / "started"),
    )
    assert report.outcome is Outcome.TIMED_OUT
    assert report.reason == "not finished after 6 s"
    assert time.monotonic() - began_s < 120
    pids = [int(grandchild.read_text()), int((tmp_path / "started").read_text().split()[0])]
    assert wait_until(lambda: not any(is_running(pid) for pid in pids))


def is_running(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_memory_that_the_machine_has_not_is_out_of_memory():
    report = report_of("fill memory", size_bytes=1 << 60)
    assert report.outcome is Outcome.OUT_OF_MEMORY
    assert "MemoryError" in report.reason


def test_the_runners_own_error_for_full_memory_is_out_of_memory():
    pytest.importorskip("forerun.evidence.measurement.runners.table")
    report = report_of("fill device memory")
    assert report.outcome is Outcome.OUT_OF_MEMORY
    assert "no room for 3 GiB" in report.reason


def test_an_unknown_function_is_a_failure_that_names_it():
    report = run_in_child(tiny_job("times"), "cpu", QUICK, run="tiny_runners:no_such")
    assert report.outcome is Outcome.FAILED
    assert "tiny_runners:no_such" in report.reason


def test_a_script_without_a_main_guard_is_not_run_again_in_the_child(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "print('the script runs')\n"
        "from tiny_runners import QUICK, RUN, tiny_job\n"
        "from forerun.evidence.measurement.measured_job import run_in_child\n"
        "print(run_in_child(tiny_job('times'), 'cpu', QUICK, run=RUN).outcome)\n"
    )
    done = subprocess.run(
        [sys.executable, script], env=script_environment(), capture_output=True, text=True, timeout=120
    )
    assert done.stdout.splitlines() == ["the script runs", "done"], done.stderr


def script_environment():
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, sys.path)])}


def test_children_do_not_outlive_a_session_killed_by_force(tmp_path):
    started = tmp_path / "started"
    script = (
        "from tiny_runners import QUICK, RUN, tiny_job\n"
        "from forerun.evidence.measurement.measured_job import run_in_child\n"
        f"run_in_child(tiny_job('hang', started={str(started)!r}), 'cpu', QUICK, run=RUN)\n"
    )
    session = subprocess.Popen([sys.executable, "-c", script], env=script_environment())
    assert wait_until(lambda: started.exists() and started.read_text().strip(), 60)
    family = psutil.Process(session.pid).children(recursive=True)
    child = int(started.read_text().split()[0])
    assert child in {process.pid for process in family}
    session.kill()
    session.wait()
    assert wait_until(lambda: not any(is_running(pid) for pid in [child, *(p.pid for p in family)]))
