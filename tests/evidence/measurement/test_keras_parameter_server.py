"""A cluster of parameter servers in local processes: a real one, one that fails, and how its processes end."""

import os
import signal
import subprocess
import sys
import time
from importlib import util

import psutil
import pytest

from forerun.adapters.keras.parameter_server import check_servers, run_keras_servers
from forerun.base.errors import InvalidSetupError, MeasurementError
from forerun.evidence.measurement.jobs import MeasurementJob, Protocol
from forerun.evidence.records.measurement import JobKind

needs_tensorflow = pytest.mark.skipif(
    util.find_spec("tensorflow") is None, reason="the extra 'keras' is not installed"
)

QUICK = Protocol(min_warm_up=1, max_warm_up=2, window=3, num_repetitions=3, max_seconds=1, num_threads=1)
ENDED_S = 120.0

CLUSTER = """
from forerun.evidence.measurement.jobs import MeasurementJob
from forerun.adapters.keras.parameter_server import run_keras_servers
from forerun.evidence.measurement.jobs import Protocol
from forerun.evidence.records.measurement import JobKind
parameters = {"batch_size": 2, "optimizer": "sgd-plain", "num_workers": 1, "num_servers": 1}
job = MeasurementJob(kind=JobKind.DATA_PARALLEL, subject="keras:mlp", family="mlp", parameters=parameters)
run_keras_servers(job, "cpu", Protocol(num_threads=1))
"""


def server_job(subject="keras:mlp:depth=1,width=4", **changed):
    parameters = {
        "batch_size": 2,
        "layout": "nhwc",
        "optimizer": "sgd-plain",
        "phase": "train",
        "strategy": "parameter-server",
        "num_workers": 1,
        "num_servers": 1,
        **changed,
    }
    return MeasurementJob(kind=JobKind.DATA_PARALLEL, subject=subject, family="mlp", parameters=parameters)


@needs_tensorflow
def test_one_worker_and_one_server_make_steps():
    result = run_keras_servers(server_job(), "cpu", QUICK)
    assert len(result.repetitions_s) == 3
    assert 0 < min(result.repetitions_s) < 60
    assert result.results["num_parameters"] == (28 * 28 + 1) * 4 + 5 * 10
    assert result.results["gradient_bytes"] == 4 * result.results["num_parameters"]
    assert (result.results["world_size"], result.results["num_servers"]) == (1, 1)
    assert result.results["first_step_s"] > min(result.repetitions_s)  # it traces


@needs_tensorflow
def test_a_cluster_without_an_answer_is_ended():
    protocol = Protocol(num_threads=1, timeout_s=0.5)
    with pytest.raises(MeasurementError, match=r"gave no answer in 0\.5 s"):
        run_keras_servers(server_job(), "cpu", protocol)


def members_of(parent):
    """Processes of a cluster below a process, at any depth."""
    try:
        below = psutil.Process(parent).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    return [process for process in below if is_member(process)]


def is_member(process):
    try:
        return any("spawn_main" in word for word in process.cmdline())
    except psutil.Error:
        return False


def wait_for(condition, seconds=120.0):
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.1)
    return found


@needs_tensorflow
def test_no_process_is_left_when_the_one_that_measures_is_killed():
    started = subprocess.Popen([sys.executable, "-c", CLUSTER])
    try:
        members = wait_for(lambda: len(found := members_of(started.pid)) == 3 and found)
        started.send_signal(signal.SIGKILL)
        started.wait()
        _, alive = psutil.wait_procs(members, ENDED_S)
        assert not alive
    finally:
        started.kill()
        started.wait()


@needs_tensorflow
def test_no_process_is_left_when_the_command_is_interrupted(tmp_path):
    command = (
        *(
            sys.executable,
            "-m",
            "forerun",
            "measure",
            "model",
            "keras:mlp:depth=1,width=4",
            "--batch-sizes",
            "2",
        ),
        *(
            "--parameter-servers",
            "1",
            "--workers",
            "2",
            "--threads",
            "1",
            "--records",
            str(tmp_path / "r.sqlite"),
        ),
    )
    started = subprocess.Popen(
        command,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stderr=subprocess.PIPE,
        text=True,
        # A shell that starts the tests in the background has them ignore Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        members = wait_for(lambda: len(found := members_of(started.pid)) == 4 and found)
        started.send_signal(signal.SIGINT)
        _, told = started.communicate(timeout=ENDED_S)
        assert started.returncode not in (0, None)
        assert "Traceback" not in told
        _, alive = psutil.wait_procs(members, ENDED_S)
        assert not alive
    finally:
        started.kill()
        started.wait()


@needs_tensorflow
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_workers": 0}, "at least one worker"),
        ({"num_servers": 0}, "at least one parameter server"),
        ({"phase": "inference"}, "with phase train only"),
        ({"optimizer": "adam"}, "with optimizer sgd-plain only"),
        ({"device": "cuda:0"}, "with device cpu only"),
    ],
)
def test_what_no_cluster_can_do_is_refused(changed, message):
    asked = {"num_workers": 1, "num_servers": 1, "phase": "train", "optimizer": "sgd-plain", "device": "cpu"}
    with pytest.raises(InvalidSetupError, match=message):
        check_servers(**(asked | changed))
