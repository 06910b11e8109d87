"""A device of this machine by its name, and a script that sees no other."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from forerun.base.errors import DeviceBusyError, InvalidSetupError, MeasurementError, UsageError
from forerun.question.devices import here
from forerun.question.devices.local import (
    check_device,
    device_identity,
    first_device,
    gpu_index,
    lock_device,
    lock_path,
    only_device,
)

GPUS = tuple(
    here.HostGpu(
        index=index,
        uuid=f"GPU-{index}",
        name="NVIDIA T4",
        memory_bytes=16 * 10**9,
        memory_used_bytes=0,
        driver_version=None,
        cuda_version=None,
        power_limit_w=None,
        max_sm_clock_hz=None,
        max_memory_clock_hz=None,
        compute_capability=None,
    )
    for index in range(4)
)


@pytest.fixture(params=[0, 4])
def num_gpus(request, monkeypatch):
    """This machine without GPUs, and with four."""
    monkeypatch.setattr(here, "list_gpus", lambda: GPUS[: request.param])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return request.param


def test_a_name_is_a_device_that_is_there(num_gpus):
    assert check_device("cpu") == "cpu"
    if num_gpus:
        assert [check_device(name) for name in ("cuda", "cuda:3")] == ["cuda:0", "cuda:3"]
    with pytest.raises(UsageError, match=f"one of this machine's {num_gpus} GPUs, got 'cuda:4'"):
        check_device("cuda:4")
    with pytest.raises(InvalidSetupError, match="expected device cpu or cuda:N"):
        check_device("tpu")


def test_a_script_that_is_to_use_the_processor_sees_no_gpu(num_gpus):
    assert only_device("cpu") == ({"CUDA_VISIBLE_DEVICES": ""} if num_gpus else {})
    assert first_device() == ("cuda:0" if num_gpus else "cpu")


@pytest.mark.parametrize(
    ("known", "expected"), [(None, "2"), ("", "2"), ("3,1,0", "0"), ("GPU-1, GPU-0, GPU-3", "GPU-3")]
)
def test_a_number_counts_among_the_gpus_that_are_seen(monkeypatch, known, expected):
    if known is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", known)
    else:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpu_index("cuda:2") == 2
    assert only_device("cuda:2") == {"CUDA_VISIBLE_DEVICES": expected}
    assert only_device("cuda") == {}


pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX file locks")


def acquire(folder, wait_s=0.0):
    """Asks for the lock from another thread, which does not hold what this one holds."""

    def ask():
        with lock_device("cpu", folder=folder, wait_s=wait_s):
            raise AssertionError("two hold the lock")

    with ThreadPoolExecutor(1) as pool:
        pool.submit(ask).result()


def test_the_holder_may_ask_again_and_lets_go_once(tmp_path):
    with lock_device("cpu", folder=tmp_path) as path:
        with lock_device("cpu", folder=tmp_path) as again:
            assert again == path
        with pytest.raises(DeviceBusyError):
            acquire(tmp_path)
    with pytest.raises(AssertionError, match="two hold"):
        acquire(tmp_path)  # nobody holds it any more


def test_a_second_holder_is_refused_and_told_who_has_it(tmp_path):
    with (
        lock_device("cpu", folder=tmp_path) as path,
        pytest.raises(DeviceBusyError, match=rf"process {os.getpid()} \(user .+, since 20\d\d-.*{path.name}"),
    ):
        acquire(tmp_path)
    with lock_device("cpu", folder=tmp_path):
        pass


def test_different_devices_do_not_wait_for_each_other(tmp_path):
    with lock_device("cpu", folder=tmp_path) as first, lock_device("cuda:0", folder=tmp_path) as second:
        assert first != second


def test_waiting_ends_when_the_time_is_up(tmp_path):
    with lock_device("cpu", folder=tmp_path), pytest.raises(DeviceBusyError):
        acquire(tmp_path, wait_s=0.3)


def test_an_error_inside_lets_go_of_the_lock(tmp_path):
    with pytest.raises(ZeroDivisionError), lock_device("cpu", folder=tmp_path):
        raise ZeroDivisionError
    with lock_device("cpu", folder=tmp_path):
        pass


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": 5}', "\xff"])
def test_a_damaged_note_about_the_holder_does_not_hide_that_the_device_is_busy(tmp_path, text):
    with lock_device("cpu", folder=tmp_path) as path:
        path.write_bytes(text.encode("latin-1"))
        with pytest.raises(DeviceBusyError, match="but another process is measuring on it"):
            acquire(tmp_path)


def test_the_note_of_a_dead_holder_is_no_lock(tmp_path):
    lock_path("cpu", tmp_path).write_text('{"pid": 1, "user": "gone", "since": "1999"}')
    with lock_device("cpu", folder=tmp_path) as path:
        assert f'"pid": {os.getpid()}' in path.read_text()


def test_other_users_may_use_the_lock_whatever_the_mask(tmp_path):
    mask = os.umask(0o077)
    try:
        with lock_device("cpu", folder=tmp_path) as path:
            assert stat.S_IMODE(path.stat().st_mode) == 0o666
    finally:
        os.umask(mask)


def test_a_folder_that_cannot_be_used_is_one_clear_error(tmp_path):
    (tmp_path / "no").write_text("a file")
    with (
        pytest.raises(MeasurementError, match=r"expected to open and lock the file .*set TMPDIR"),
        lock_device("cpu", folder=tmp_path / "no"),
    ):
        pass


def test_a_killed_holder_holds_nothing(tmp_path):
    script = (
        "import sys, time; from pathlib import Path; from forerun.question.devices.local import lock_device\n"
        "with lock_device('cpu', folder=Path(sys.argv[1])): print('held', flush=True); time.sleep(600)"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout.readline() == "held\n"
    told = []
    with (
        pytest.raises(DeviceBusyError, match=f"process {holder.pid} "),
        lock_device("cpu", folder=tmp_path, wait_s=0.3, on_wait=told.append),
    ):
        pass
    assert [f"process {holder.pid} " in words for words in told] == [True]
    holder.kill()
    holder.wait(60)
    with lock_device("cpu", folder=tmp_path) as path:
        assert f'"pid": {os.getpid()}' in path.read_text()


def test_a_planted_link_is_not_followed(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    lock_path("cpu", tmp_path).symlink_to(victim)
    with pytest.raises(MeasurementError, match="the file of the device"), lock_device("cpu", folder=tmp_path):
        pass
    assert victim.read_text() == "precious"


def test_the_name_is_a_plain_file_name_that_tells_the_device():
    path = lock_path("cuda:0", Path("/somewhere"))
    assert path.parent == Path("/somewhere")
    assert re.fullmatch(r"forerun-[A-Za-z0-9.-]+\.lock", path.name)
    assert lock_path("cuda") == lock_path("cuda:0")
    assert lock_path("cuda:1") != lock_path("cuda:0")


def test_a_gpu_the_driver_does_not_show_keeps_its_index():
    assert device_identity("cpu") == "cpu"
    assert device_identity("cuda:999") == "cuda:999"
