"""``forerun calibrate``: what is refused, in one line each."""

import os
import subprocess
import sys
import tempfile

import pytest
from command_line import invoke

from forerun.evidence.measurement.telemetry import device_load, load_warning


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--framework", "jax"), "expected framework pytorch or keras, got 'jax'"),
        (("--minutes", "0.1"), "half a minute or more"),
        (("--minutes", "nan"), "half a minute or more"),
        (("--precision", "fp7"), "fp7"),
        (("--device", "cuda:9"), "this machine's"),
        (("--device", "gpu"), "expected device cpu or cuda:N"),
        (("--out", "/dev/null/file"), "that can be written, got '/dev/null/file'"),
        (("--wait", "soon"), "soon"),
        (("--from", "nothing.sqlite", "--minutes", "2"), "--minutes is for measuring"),
        (("--framework", "keras", "--from", "nothing.sqlite", "--device", "rtx-4070"), "nothing.sqlite"),
    ],
)
def test_mistakes_are_one_line_each(words, told):
    failed = invoke("calibrate", *words, "--json")
    assert failed.exit_code in (1, 2)
    assert failed.stdout == ""
    assert len(failed.stderr.strip().splitlines()) == 1
    assert told in failed.stderr


def test_a_device_in_use_is_waited_for_only_if_asked(tmp_path, monkeypatch):
    # Locks of its own, whatever else this machine measures.
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    # Held by another process, as a measurement would.
    hold = (
        "import sys, time; from forerun.question.devices.local import lock_device\n"
        "with lock_device('cpu'):\n    print('held', flush=True)\n    time.sleep(float(sys.argv[1]))"
    )
    with subprocess.Popen([sys.executable, "-c", hold, "30"], stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout.readline() == "held\n"
            failed = invoke("calibrate", "--minutes", "0.5", "--records", str(tmp_path / "r.sqlite"))
            assert failed.exit_code == 1
            assert f"process {holder.pid}" in failed.stderr
            failed = invoke("calibrate", "--wait", "0.3s", "--records", str(tmp_path / "r.sqlite"))
            assert failed.exit_code == 1
            assert failed.stderr.splitlines()[0].startswith("waiting for device cpu")
        finally:
            holder.kill()


def test_a_busy_processor_is_called_busy():
    code = "while True: pass"
    busy = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(os.cpu_count() or 1)]
    try:
        load = device_load("cpu")
    finally:
        for process in busy:
            process.kill()
            process.wait()
    assert load is not None
    assert load > 0.5
    assert "other processes use" in load_warning("cpu", load)
    assert load_warning("cpu", 0.01) == ""
