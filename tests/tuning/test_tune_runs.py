"""Studies of a real script in real processes."""

import hashlib
import json
import signal
import subprocess
import sys
import time

import pytest
from study_commands import environment, run

SCRIPT = """
import argparse, time
import torch
parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=4)
parser.add_argument("--lr", type=float, default=0.1)
args = parser.parse_args()
class Data(torch.utils.data.Dataset):
    def __len__(self): return 64
    def __getitem__(self, index): return torch.ones(4), index % 2
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
for epoch in range(2):
    for images, labels in torch.utils.data.DataLoader(Data(), batch_size=args.batch_size, shuffle=True):
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.01)
    print(f"val_acc=0.{epoch + 5}")
"""
SPACE = """
metric: {name: val_acc}
parameters:
  batch_size: {values: [4, 8, 16], map: --batch-size}
  lr: {scale_with: batch_size, rule: linear, map: --lr}
  channels_last: {values: [false, true]}
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "space.yaml").write_text(SPACE)
    return tmp_path


def test_a_study_finds_the_larger_batch_checks_it_and_applies(folder):
    digest = hashlib.sha256((folder / "train.py").read_bytes()).hexdigest()
    tuned = run(
        folder, "tune", "space.yaml", "--budget", "3 trials", "--trial-time", "0.3s", "--json", "--seed", "1", "--",
        sys.executable, "train.py",
    )  # fmt: skip
    assert tuned.returncode == 0, tuned.stderr
    answer = json.loads(tuned.stdout)
    # A sleep per step makes the largest batch the fastest.
    assert answer["best_values"]["batch_size"] == 16
    assert answer["best"]["arguments"]["--lr"] == pytest.approx(0.4)
    assert answer["checked"]["speedup"] > 2
    assert [trial["source"] for trial in answer["trials"]][:2] == ["script", "cost model"]
    assert hashlib.sha256((folder / "train.py").read_bytes()).hexdigest() == digest
    shown = run(folder, "apply", "forerun-study/best.yaml", "--dry-run", "--", sys.executable, "train.py")
    assert "--batch-size 16 --lr 0.4" in shown.stdout


def test_a_killed_study_resumes_with_every_finished_trial(folder):
    words = (
        "tune",
        "space.yaml",
        "--budget",
        "4 trials",
        "--trial-time",
        "0.3s",
        "--no-check",
        "--json",
        "--",
    )
    command = [sys.executable, "-m", "forerun", *words, sys.executable, "train.py"]
    process = subprocess.Popen(
        command, cwd=folder, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    for line in process.stderr:
        if line.startswith("trial 0"):
            time.sleep(0.5)  # into the middle of the next
            break
    process.send_signal(signal.SIGKILL)
    process.wait()
    again = run(folder, *words, sys.executable, "train.py")
    assert again.returncode == 0, again.stderr
    answer = json.loads(again.stdout)
    assert answer["is_resumed"]
    assert len(answer["trials"]) == 4
    assert answer["trials"][0]["number"] == 0
    assert "profiling the script" not in again.stderr


@pytest.mark.parametrize(
    ("space", "script", "status", "message"),
    [
        (SPACE.replace("--lr", "--rate"), SCRIPT, 2, "no argument '--rate'"),
        (SPACE, "raise SystemExit(1)", 1, "status 1"),
    ],
)
def test_bad_input_is_one_clear_line(folder, space, script, status, message):
    (folder / "train.py").write_text(script)
    (folder / "space.yaml").write_text(space)
    done = run(
        folder, "tune", "space.yaml", "--budget", "2 trials", "--json", "--", sys.executable, "train.py"
    )
    assert done.returncode == status
    assert message in done.stderr.strip().splitlines()[-1]
    assert done.stdout == ""
