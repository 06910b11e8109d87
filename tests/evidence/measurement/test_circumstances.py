"""What is written about this machine, and what is not made up."""

import platform
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from importlib import metadata

import pytest

import forerun
from forerun.base.errors import InvalidSetupError, MeasurementError
from forerun.evidence.measurement.circumstances import at_job_start, describe_circumstances, software_version
from forerun.evidence.measurement.jobs import Protocol
from forerun.evidence.measurement.measured_job import NULL_JOB, key_of
from forerun.evidence.records.measurement import Circumstances
from forerun.question.devices import describe_host


def test_the_processor_of_this_machine():
    host = describe_host()
    found = describe_circumstances("cpu", protocol=Protocol(num_threads=1), occasion="now")
    assert (found.device, found.device_index, found.device_title) == ("cpu", "cpu", host.cpu.model)
    assert (found.host, found.occasion, found.num_threads) == (platform.node(), "now", 1)
    assert found.framework_version == metadata.version("torch")
    # Empty in a checkout that is only on the path.
    assert found.forerun_version in (forerun.__version__, "")
    assert found.python_version.split(".")[:2] == [str(part) for part in sys.version_info[:2]]
    assert found.memory_bytes == host.memory_usable_bytes
    assert found.accelerator_software == ""
    assert describe_circumstances("cpu").num_threads == found.num_cores >= 1


def test_no_framework_is_loaded():
    script = (
        "import sys; from forerun.evidence.measurement.circumstances import describe_circumstances; "
        "from forerun.evidence.measurement.session import run_jobs; describe_circumstances(); "
        "assert not {'torch', 'ray', 'numpy', 'pandas', 'tensorflow'} & set(sys.modules), 'loaded'"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=240)


def test_a_job_has_its_own_time_in_utc():
    began = at_job_start(Circumstances(device="cpu", device_title="x"))
    started_at = datetime.fromisoformat(began.started_at)
    assert abs(datetime.now(UTC) - started_at) < timedelta(minutes=1)
    assert began.load_before is None or began.load_before >= 0


@pytest.mark.parametrize("device_index", ["gpu", "cuda:x", "cuda:-1", ""])
def test_a_device_nobody_knows_is_refused(device_index):
    with pytest.raises(InvalidSetupError, match="expected device cpu or cuda:N, got"):
        describe_circumstances(device_index)


def test_a_gpu_that_is_not_here_says_how_many_are():
    with pytest.raises(MeasurementError, match=r"an NVIDIA GPU as cuda:999, but this process sees \d+"):
        describe_circumstances("cuda:999")


def test_an_unknown_framework_and_one_that_is_not_installed():
    with pytest.raises(InvalidSetupError, match="expected framework pytorch or keras, got 'caffe'"):
        software_version("caffe")
    try:
        version = metadata.version("keras")
    except metadata.PackageNotFoundError:
        with pytest.raises(MeasurementError, match="pip install keras"):
            software_version("keras")
    else:
        assert software_version("keras").split(", ")[0] == version


@pytest.mark.parametrize(
    "change",
    [
        {"device_title": "another processor"},
        {"num_threads": 2},
        {"num_cores": 2},
        {"framework_version": "2"},
        {"occasion": "another"},
        {"device": "a100-sxm4-40gb"},
    ],
)
def test_the_key_tells_processors_software_and_occasions_apart(change):
    place = Circumstances(device="cpu", device_title="a processor", framework_version="1")
    assert key_of(NULL_JOB, place) != key_of(NULL_JOB, replace(place, **change))


@pytest.mark.parametrize("change", [{"host": "b"}, {"started_at": "2026"}, {"load_before": 0.5}])
def test_the_key_is_the_same_on_equal_machines_at_any_time(change):
    place = Circumstances(device="cpu", device_title="a processor", framework_version="1")
    assert key_of(NULL_JOB, place) == key_of(NULL_JOB, replace(place, **change))
