"""Real scripts in real processes, profiled."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from command_line_of_tests import child_environment, run_forerun, run_here

LOOP = """
import sys, time, torch
from torch.utils.data import DataLoader, Dataset
class Slow(Dataset):
    def __len__(self): return 40
    def __getitem__(self, index):
        time.sleep(0.005)
        return torch.zeros(4), 0
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
waited = []
begin = time.monotonic()
for epoch in range(int(sys.argv[1])):
    iterator, asked = iter(DataLoader(Slow(), batch_size=4)), time.monotonic()
    for images, labels in iterator:
        waited.append(time.monotonic() - asked)
        model(images).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.02)
        asked = time.monotonic()
print("WAITED", sum(waited[1:]) / len(waited[1:]))
"""


def test_a_command_that_starts_a_script_loads_no_framework_itself():
    names = "profile", "tune", "compare", "capture_script", "diagnosis.diagnose"
    code = f"import sys, {', '.join(f'forerun.script.{name}' for name in names)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=child_environment(), check=False).returncode == 0


def script(tmp_path: Path, text: str) -> str:
    path = tmp_path / "train.py"
    path.write_text(text)
    return str(path)


def processes_with(word: str) -> list[psutil.Process]:
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if word in " ".join(process.info["cmdline"] or []) and process.pid != os.getpid()
    ]


def test_the_parts_are_those_of_a_hand_instrumented_loop(tmp_path):
    done = run_here("profile", "--json", "--window", "0", "--", sys.executable, script(tmp_path, LOOP), "3")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    by_hand_s = float(done.stderr.split("WAITED")[1].split()[0])
    assert answer["num_steps"] == 30
    assert answer["batch_size"] == 4
    assert answer["loader_wait_s"] == pytest.approx(by_hand_s, rel=0.1)
    # Where other programs kept it from the processors for longer, it says that first.
    is_busy = (answer["busy_machine_fraction"] or 0.0) > answer["parts"]["input_wait_s"] / answer[
        "step_time_s"
    ]
    assert answer["advice"]["bottleneck"] == ("machine" if is_busy else "input")
    assert sum(answer["phases_s"].values()) == pytest.approx(answer["wall_s"], rel=0.03)
    parts = answer["parts"]
    assert sum(parts[name] for name in parts if name != "step_s") == pytest.approx(answer["step_time_s"])


def test_a_window_tells_kernels_from_host_and_steps_can_be_limited(tmp_path):
    done = run_here("profile", "--json", "--steps", "12", "--", sys.executable, script(tmp_path, LOOP), "100")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["outcome"] == "stopped"
    assert answer["num_steps"] == 12
    assert answer["has_window"]
    # The loop sleeps 20 ms a step outside of any operator.
    assert answer["parts"]["host_s"] > 0.015


def test_a_crash_keeps_what_was_seen(tmp_path):
    text = LOOP.replace('print("WAITED"', 'raise ValueError("the disk is full")\nprint("WAITED"')
    done = run_here("profile", "--json", "--", sys.executable, script(tmp_path, text), "1")
    assert done.returncode == 1
    assert json.loads(done.stdout)["outcome"] == "crashed"
    assert "the disk is full" in done.stderr
    assert done.stderr.strip().splitlines()[-1].startswith("error: the script crashed after 10 steps")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("print('hello')", "without a second training step"),
        ("raise SystemExit(1)", "ended with status 1 before its second training step; it said: nothing"),
        ("import argparse; argparse.ArgumentParser().parse_args(['--x'])", "unrecognized arguments"),
    ],
)
def test_a_script_that_never_trains_is_one_clear_line(tmp_path, text, message):
    done = run_here("profile", "--json", "--", sys.executable, script(tmp_path, text))
    assert done.returncode == 1
    assert done.stdout == ""
    assert message in done.stderr.strip().splitlines()[-1]


def test_a_script_that_does_not_exist_is_a_usage_error():
    done = run_here("profile", "--", sys.executable, "nowhere.py")
    assert done.returncode == 2
    assert "no file 'nowhere.py'" in done.stderr


@pytest.mark.parametrize(
    ("more", "last", "status"),
    [
        ("", "", 1),
        (", env={}", "import os, signal, time; os.kill(os.getppid(), signal.SIGTERM); time.sleep(60)", 143),
    ],
)
def test_a_daemon_does_not_outlive_the_run_however_it_ends(tmp_path, more, last, status):
    word = f"daemon-of-{os.getpid()}"
    text = (
        "import subprocess, sys\n"
        f"code = 'import time; time.sleep(600)  # {word}'\n"
        f"subprocess.Popen([sys.executable, '-c', code], start_new_session=True{more})\n{last}"
    )
    done = run_forerun("profile", "--", sys.executable, script(tmp_path, text))
    assert done.returncode == status
    assert processes_with(word) == []


def steps_kept(folder: Path) -> int:
    """Steps that the watched processes have written so far; the last line may be in the writing."""
    lines = [
        line for file in folder.glob("process-*.jsonl") for line in file.read_text().splitlines(keepends=True)
    ]
    found = [json.loads(line) for line in lines if line.endswith("\n")]
    return sum(len(record["rows"]) for record in found if record["kind"] == "steps")


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_keeps_what_was_seen_and_ends_everything(tmp_path, end):
    text = LOOP.replace("optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n", "")
    update = "optimizer.step()\n        optimizer.zero_grad()"
    path = script(tmp_path, text.replace(update, "for weight in model.parameters(): weight.grad = None"))
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "forerun",
            "profile",
            "--json",
            "--window",
            "0",
            "--records",
            str(tmp_path / "r"),
            "--",
            sys.executable,
            path,
            "1000",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=child_environment(),
        # A shell's background job ignores interrupts, and so do its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 400
    while (num_kept := steps_kept(tmp_path / "r")) <= 3 and time.monotonic() < deadline:
        time.sleep(0.3)
    process.send_signal(end)
    stdout, stderr = process.communicate(timeout=240)
    assert process.returncode == 128 + end, stderr
    answer = json.loads(stdout)
    assert answer["outcome"] == "interrupted"
    assert answer["num_steps"] >= num_kept > 3
    assert processes_with(path) == []


def test_a_script_that_ends_inside_the_traced_window_ends_well(tmp_path):
    # Ten steps of an epoch: the window begins after the third and is open for twenty.
    done = run_here("profile", "--json", "--window", "20", "--", sys.executable, script(tmp_path, LOOP), "1")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["outcome"] == "done"
    assert answer["num_steps"] == 10
    assert answer["has_window"]
    assert answer["parts"]["host_s"] > 0.015


def test_what_runs_between_epochs_is_no_kernel_of_a_step(tmp_path):
    # Two steps an epoch, each 20 ms of sleep and next to no operators; then operators alone.
    between = "    for _ in range(4): torch.randn(500, 500) @ torch.randn(500, 500)\n"
    text = LOOP.replace("return 40", "return 8").replace("print(", f"{between}print(", 1)
    done = run_here("profile", "--json", "--", sys.executable, script(tmp_path, text), "7")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["num_steps"] == 14
    assert answer["has_window"]
    assert answer["parts"]["host_s"] > 0.015
    assert answer["parts"]["kernels_s"] < 0.01


OWN_LOADER = """
import argparse, torch
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset
parser = argparse.ArgumentParser()
parser.add_argument("--max_steps", type=int, default=90)
parser.parse_args()
class Repeated(BatchSampler):
    def __iter__(self):
        while True: yield from super().__iter__()
class Endless(DataLoader):
    # As timm's MultiEpochsDataLoader: one iterator of the loader serves all epochs.
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.own = super().__iter__()
    def __iter__(self):
        for _ in range(len(self)): yield next(self.own)
data = TensorDataset(torch.randn(80, 3, 4, 4))
loader = Endless(data, batch_sampler=Repeated(SequentialSampler(data), 4, False))
model = torch.nn.Conv2d(3, 2, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(3):
    for index, (images,) in enumerate(loader):
        model(images).sum().backward()
        if index % 2:
            optimizer.step()
            optimizer.zero_grad()
"""
BY_HAND = """
import torch
model = torch.nn.Linear(6, 6)
for step in range(30):
    if step == 20:
        with torch.no_grad(): model(torch.randn(64, 6))
    loss = model(torch.randn(12, 6)).sum()
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters(): parameter.add_(parameter.grad, alpha=-0.01); parameter.grad = None
"""


def test_a_loader_with_an_iteration_of_its_own_and_batches_that_are_accumulated(tmp_path):
    done = run_here("profile", "--json", "--window", "0", "--", sys.executable, script(tmp_path, OWN_LOADER))
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert (answer["num_steps"], answer["batches_per_step"], answer["batch_size"]) == (30, 2.0, 8.0)
    assert (answer["steps_per_epoch"], answer["num_steps_of_job"]) == (10, 90.0)
    assert answer["has_images"]
    assert answer["job_time_s"] == pytest.approx(
        answer["phases_s"]["start"] + 90 * answer["step_time_s"], rel=0.2
    )


def test_a_script_without_optimizer_and_loader_is_profiled(tmp_path):
    done = run_here("profile", "--json", "--window", "0", "--", sys.executable, script(tmp_path, BY_HAND))
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["num_steps"] == 29
    assert answer["batch_size"] == 12
    assert answer["has_images"] is False
    assert answer["optimizer"]["name"] is None
    assert any("each backward pass counts as a step" in note for note in answer["notes"])
