"""Runners without a framework: each does one thing, well or badly."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from forerun.evidence.measurement.jobs import MeasurementJob, Protocol, RunResult
from forerun.evidence.measurement.measured_job import report_progress
from forerun.evidence.records.measurement import JobKind

RUN = "tiny_runners:run_tiny"
QUICK = Protocol(num_repetitions=6, timeout_s=120.0, anchor_every=0, num_threads=1, telemetry_every_s=0.02)


def tiny_job(do: str, **parameters) -> MeasurementJob:
    return MeasurementJob(
        kind=JobKind.LAYER, subject="tiny", family="tiny", parameters={"do": do, **parameters}
    )


def run_tiny(job: MeasurementJob, device_index: str, protocol: Protocol) -> RunResult:
    parameters = job.parameters
    if "started" in parameters:
        with Path(parameters["started"]).open("a") as file:
            # Ray tells its workers which node they belong to.
            file.write(f"{os.getpid()} {os.environ.get('RAY_RAYLET_PID', '')}\n")
    return _DEEDS[str(parameters.get("do", "nothing"))](job, protocol)


def _times(job: MeasurementJob, protocol: Protocol) -> RunResult:
    return RunResult(repetitions_s=(0.1,) * protocol.num_repetitions, warm_up_s=(0.2, 0.1))


def _sleep(job: MeasurementJob, protocol: Protocol) -> RunResult:
    time.sleep(job.parameters["sleep_s"])
    return _times(job, protocol)


def _hang(job: MeasurementJob, protocol: Protocol) -> RunResult:
    while True:
        time.sleep(60)


def _hang_with_a_child_of_its_own(job: MeasurementJob, protocol: Protocol) -> RunResult:
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    Path(job.parameters["grandchild"]).write_text(str(subprocess.Popen(command).pid))
    return _hang(job, protocol)


def _die_before_a_forked_child(job: MeasurementJob, protocol: Protocol) -> RunResult:
    pid = os.fork()
    if pid == 0:
        time.sleep(600)
    Path(job.parameters["grandchild"]).write_text(str(pid))
    return _end_by_signal(job, protocol)


def _progress(job: MeasurementJob, protocol: Protocol) -> RunResult:
    for fraction in (0.25, 0.5, 1.0):
        report_progress(fraction)
    return _times(job, protocol)


def _tell(job: MeasurementJob, protocol: Protocol) -> RunResult:
    """What the child sees of its surroundings."""
    print("a runner that prints")
    return RunResult(
        repetitions_s=(0.1,) * 6,
        results={
            "pid": os.getpid(),
            "num_threads": protocol.num_threads,
            "OMP_NUM_THREADS": os.environ["OMP_NUM_THREADS"],
            "word": os.environ.get("FORERUN_TEST_WORD"),
            "has_torch": "torch" in sys.modules,
        },
    )


def _raise(job: MeasurementJob, protocol: Protocol) -> RunResult:
    raise ValueError("7 is not a batch size")


def _fill_memory(job: MeasurementJob, protocol: Protocol) -> RunResult:
    block = bytearray(job.parameters["size_bytes"])
    return RunResult(repetitions_s=(0.1,) * 6, results={"size_bytes": len(block)})


def _fill_device_memory(job: MeasurementJob, protocol: Protocol) -> RunResult:
    from forerun.evidence.measurement.runners.table import OutOfMemory

    raise OutOfMemory("no room for 3 GiB")


def _end_by_signal(job: MeasurementJob, protocol: Protocol) -> RunResult:
    os.kill(os.getpid(), job.parameters["signal"])
    time.sleep(60)
    raise AssertionError("the signal did not end this process")


def _drifting(job: MeasurementJob, protocol: Protocol) -> RunResult:
    """Times that grow with the number of times this was asked, kept in a file."""
    counter = Path(job.parameters["counter"])
    count = len(counter.read_text()) if counter.exists() else 0
    counter.write_text("x" * (count + 1))
    return RunResult(repetitions_s=(0.1 * (1 + job.parameters["growth"] * count),) * 6)


_DEEDS = {
    "nothing": _times,
    "times": _times,
    "sleep": _sleep,
    "hang": _hang,
    "hang with a child": _hang_with_a_child_of_its_own,
    "die before a forked child": _die_before_a_forked_child,
    "progress": _progress,
    "tell": _tell,
    "raise": _raise,
    "fill memory": _fill_memory,
    "fill device memory": _fill_device_memory,
    "exit": lambda job, protocol: os._exit(3),
    "signal": _end_by_signal,
    "drift": _drifting,
}

KILL = int(signal.SIGKILL)
