"""Studies of a real script in real processes."""

import hashlib
import json
import signal
import subprocess
import sys
import time

import pytest
from study_commands import BY_HAND, environment, run_here

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
OPTIMIZER
for epoch in range(2):
    for images, labels in torch.utils.data.DataLoader(Data(), batch_size=args.batch_size, shuffle=True):
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        UPDATE
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
    (tmp_path / "train.py").write_text(SCRIPT.replace("OPTIMIZER\n", "").replace("UPDATE", BY_HAND))
    (tmp_path / "space.yaml").write_text(SPACE)
    return tmp_path


def test_a_study_finds_the_larger_batch_checks_it_and_applies(folder):
    script = SCRIPT.replace("OPTIMIZER", "optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)")
    (folder / "train.py").write_text(script.replace("UPDATE", "optimizer.step(); optimizer.zero_grad()"))
    digest = hashlib.sha256((folder / "train.py").read_bytes()).hexdigest()
    tuned = run_here(
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
    shown = run_here(
        folder, "apply", "forerun-study/best.yaml", "--dry-run", "--", sys.executable, "train.py"
    )
    assert "--batch-size 16 --lr 0.4" in shown.stdout


def test_a_killed_study_resumes_with_every_finished_trial(folder):
    words = (
        "tune",
        "space.yaml",
        "--budget",
        "2 trials",
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
    again = run_here(folder, *words, sys.executable, "train.py")
    assert again.returncode == 0, again.stderr
    answer = json.loads(again.stdout)
    assert answer["is_resumed"]
    assert len(answer["trials"]) == 2
    assert answer["trials"][0]["number"] == 0
    assert "profiling the script" not in again.stderr


def test_an_argument_that_the_script_lacks_is_one_clear_line(folder):
    (folder / "space.yaml").write_text(SPACE.replace("--lr", "--rate"))
    done = run_here(
        folder, "tune", "space.yaml", "--budget", "2 trials", "--json", "--", sys.executable, "train.py"
    )
    assert done.returncode == 2
    assert "no argument '--rate'" in done.stderr.strip().splitlines()[-1]
    assert done.stdout == ""


WITHOUT_LOADER = """
import sys, time, torch
batch_size, max_iters = 4, 40
for word in sys.argv[1:]:
    name, value = word.removeprefix("--").split("=")
    globals()[name] = int(value)
model = torch.nn.Linear(6, 2)
for step in range(max_iters):
    loss = model(torch.randn(batch_size, 6)).sum()
    loss.backward()
    UPDATE
    time.sleep(0.01)
print("val loss 1.5")
"""


def test_a_script_without_a_loader_that_reads_its_own_arguments_is_tuned(folder):
    (folder / "train.py").write_text(WITHOUT_LOADER.replace("UPDATE", BY_HAND))
    space = "{batch_size: {values: [4, 8, 16], map: --batch_size=}}"
    (folder / "space.yaml").write_text(f"metric: val loss\nparameters: {space}")
    words = ("--budget", "3 trials", "--trial-time", "0.3s", "--json", "--seed", "1", "--")
    tuned = run_here(folder, "tune", "space.yaml", *words, sys.executable, "train.py", "--batch_size=4")
    assert tuned.returncode == 0, tuned.stderr
    answer = json.loads(tuned.stdout)
    assert [trial["outcome"] for trial in answer["trials"]] == ["done"] * 3
    assert answer["best_values"]["batch_size"] == 16
    assert answer["command"].endswith("--batch_size=16")
    # Three trials leave no room to show it.
    assert answer["verdict"]["verdict"] == "not repeated"
    assert answer["checked"]["metric"] == "val loss"
