"""Studies that several processes share, here and on a cluster whose node dies."""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from study_commands import BY_HAND, environment

from forerun.question.devices.local import lock_device
from small_clusters import node_of, small_cluster

SCRIPT = """
import argparse, os, time
import torch
parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=4)
args = parser.parse_args()
with open({started!r}, "a") as file:
    file.write(f"{{os.getpid()}}\\n")
class Data(torch.utils.data.Dataset):
    def __len__(self): return 64
    def __getitem__(self, index): return torch.ones(4), index % 2
model = torch.nn.Linear(4, 2)
for images, labels in torch.utils.data.DataLoader(Data(), batch_size=args.batch_size, shuffle=True):
    torch.nn.functional.cross_entropy(model(images), labels).backward()
    {by_hand}
    time.sleep({pause_s})
"""
SPACE = "parameters: {batch_size: {values: [2, 4, 8, 16, 32], map: --batch-size}}"


def write_study(folder: Path, *, pause_s: float) -> list[str]:
    script = SCRIPT.format(started=str(folder / "started"), pause_s=pause_s, by_hand=BY_HAND)
    (folder / "train.py").write_text(script)
    (folder / "space.yaml").write_text(SPACE)
    words = ["tune", "space.yaml", "--trial-time", "0.3s", "--no-check", "--json", "--seed", "0"]
    return [sys.executable, "-m", "forerun", *words]


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
    journal = (tmp_path / "forerun-study" / "journal.log").read_text()
    pids = {
        line["user_attr"]["worker"]["pid"]
        for line in map(json.loads, journal.splitlines())
        if "worker" in line.get("user_attr", {})
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


@pytest.fixture
def cluster():
    with small_cluster(environment()) as found:
        yield found


def test_a_node_killed_in_the_middle_of_a_trial_loses_no_trial(cluster, tmp_path):
    command = [*write_study(tmp_path, pause_s=0.2), "--ray", cluster.address, "--budget", "2 trials"]
    # Nodes do not share the folder that the command is started in.
    command += ["--", sys.executable, str(tmp_path / "train.py")]
    with (tmp_path / "said").open("w") as said:
        study = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=said, text=True, cwd=tmp_path)
        # The first is the profile, here; the second a trial, on a node.
        pid = wait_for_start(tmp_path / "started", 2, study, tmp_path / "said")
        cluster.remove_node(node_of(cluster, pid), allow_graceful=False)
        output, _ = study.communicate(timeout=400)
    assert study.returncode == 0, (tmp_path / "said").read_text()
    answer = json.loads(output)
    assert [trial["outcome"] for trial in answer["trials"]] == ["done"] * 2
    # The profile, two trials, and the one that died with its node, whose process died too.
    assert len((tmp_path / "started").read_text().splitlines()) == 4
    assert not psutil.pid_exists(pid)


def wait_for_start(started: Path, number: int, study: subprocess.Popen[str], said: Path) -> int:
    deadline_s = time.monotonic() + 400
    while time.monotonic() < deadline_s and study.poll() is None:
        lines = started.read_text().splitlines() if started.exists() else []
        if len(lines) >= number:
            return int(lines[number - 1])
        time.sleep(0.05)
    raise AssertionError(f"no trial was begun: {said.read_text()}")
