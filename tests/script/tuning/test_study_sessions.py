"""Studies that several processes share."""

import json
import os
import subprocess
import sys
import threading
import time

from study_commands import environment, write_study

from forerun.question.devices.local import lock_device
from forerun.script.tuning.study import StudyJournal


def test_two_sessions_share_a_study_and_stop_at_its_budget(tmp_path):
    command = [*write_study(tmp_path, pause_s=0.02), "--workers", "2", "--budget", "4 trials"]
    command += ["--", sys.executable, "train.py"]
    # A folder of its own for the device's lock, so that only these sessions wait for each other.
    own = environment(TMPDIR=str(tmp_path))
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=own)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert len(answer["trials"]) == 4
    assert {trial["outcome"] for trial in answer["trials"]} == {"done"}
    journal = StudyJournal(tmp_path / "forerun-study" / "journal.sqlite")
    pids = {
        record["user_attr"]["worker"]["pid"]
        for record in journal.read_logs(0)
        if "worker" in record.get("user_attr", {})
    }
    assert len(pids) == 2
    # While one session has the processor, the other says what it waits for.
    assert "waiting for device cpu: process" in done.stderr


def test_who_has_the_device_is_said_once(tmp_path):
    said = []

    def wait() -> None:
        with lock_device("cpu", wait_s=30.0, folder=tmp_path, on_wait=said.append):
            pass

    with lock_device("cpu", folder=tmp_path):
        waiting = threading.Thread(target=wait)
        waiting.start()
        time.sleep(0.7)
    waiting.join()
    assert len(said) == 1
    assert f"process {os.getpid()}" in said[0]
