"""What goes wrong in scripts and spaces: one clear line, nothing lost, no process left behind."""

import json
import os
import sys

import psutil
import pytest
from PIL import Image
from study_commands import BY_HAND, last_line, run_here
from typer.testing import CliRunner

from forerun.surface.cli.main import app

TRAINING = """
import argparse, subprocess, sys, time
parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=2)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--ceiling", type=float, default=0.9)
parser.add_argument("--images", default=None)
args = parser.parse_args()
import torch
from PIL import Image
class Data(torch.utils.data.Dataset):
    def __len__(self): return 6
    def __getitem__(self, index):
        if args.images:
            with open(f"{args.images}/{index}.jpg", "rb") as file:
                Image.open(file).convert("RGB")
        return torch.ones(4), index % 2
model = torch.nn.Linear(4, 2)
BEFORE
loader = torch.utils.data.DataLoader(Data(), batch_size=args.batch_size, shuffle=True, num_workers=WORKERS)
for epoch in range(args.epochs):
    for images, labels in loader:
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        UPDATE
        time.sleep(0.004)
    print(f"LINE")
"""
SPACE = "parameters: {batch_size: {values: [2, 3, 6], map: --batch-size}}"
METRIC_SPACE = """
metric: {name: val_acc}
parameters: {ceiling: {values: [0.2, 0.22, 0.24, 0.26, 0.28, 0.9], map: --ceiling}}
"""
ACCURACY = "val_acc={args.ceiling * (1 - 0.6 ** (epoch + 1)):.4f}"


def training(before: str = "", line: str = ACCURACY, workers: int = 0, update: str = BY_HAND) -> str:
    text = TRAINING.replace("BEFORE", before).replace("UPDATE", update).replace("LINE", line)
    return text.replace("WORKERS", str(workers))


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "space.yaml").write_text(SPACE)
    (tmp_path / "train.py").write_text(training())
    return tmp_path


def tune(folder, *words, trials=1, script=()):
    options = ("--budget", f"{trials} trials", "--trial-time", "0.2s", "--json", "--seed", "0", *words)
    return run_here(folder, "tune", "space.yaml", *options, "--", sys.executable, "train.py", *script)


BAD_REQUESTS = {
    "no script": (
        SPACE,
        ("tune", "space.yaml", "--", "python", "nowhere.py"),
        "there is no file 'nowhere.py'",
    ),
    "no program": (
        SPACE,
        ("tune", "space.yaml", "--", "no-such-program", "train.py"),
        "there is no program 'no-such-program'",
    ),
    "no command": (SPACE, ("tune", "space.yaml"), "expected a command after --"),
    "no space": (
        SPACE,
        ("tune", "absent.yaml", "--", "python", "train.py"),
        "expected a space at 'absent.yaml'",
    ),
    "unknown knob": (
        "parameters: {num_wokers: {values: [0, 1]}}",
        ("tune", "space.yaml", "--", "python", "train.py"),
        "did you mean num_workers",
    ),
    "knob of a trained model": (
        "parameters: {static_quantization: {values: [true, false]}}",
        ("tune", "space.yaml", "--", "python", "train.py"),
        "quantise the model that the best configuration saves",
    ),
    "empty range": (
        "parameters: {batch_size: {min: 64, max: 8, map: --batch-size}}",
        ("tune", "space.yaml", "--", "python", "train.py"),
        "the range is empty",
    ),
    "empty list": (
        "parameters: {num_workers: {values: []}}",
        ("tune", "space.yaml", "--", "python", "train.py"),
        "expected a list of one value or more for 'num_workers'",
    ),
    "unknown objective": (
        SPACE,
        ("tune", "space.yaml", "--objective", "sped", "--", "python", "train.py"),
        "did you mean speed",
    ),
    "metric needed": (
        SPACE,
        ("tune", "space.yaml", "--objective", "accuracy", "--", "python", "train.py"),
        "needs the name of a printed figure",
    ),
    "pruned for speed": (
        SPACE,
        ("tune", "space.yaml", "--prune", "--", "python", "train.py"),
        "give --objective accuracy as well",
    ),
    "bad budget": (
        SPACE,
        ("tune", "space.yaml", "--budget", "0 trials", "--", "python", "train.py"),
        "expected a budget above zero",
    ),
    "compare nothing": (
        SPACE,
        ("compare", "script", "absent.yaml", "--", "python", "train.py"),
        "expected a configuration at 'absent.yaml'",
    ),
    "compare no script": (
        SPACE,
        ("compare", "script", "script", "--", "python", "nowhere.py"),
        "there is no file 'nowhere.py'",
    ),
    "compare no runs": (
        SPACE,
        ("compare", "script", "script", "--repetitions", "0", "--", "python", "train.py"),
        "expected one repetition or more",
    ),
    "apply a space": (
        SPACE,
        ("apply", "space.yaml", "--", "python", "train.py"),
        "expected 'arguments' and 'hooks'",
    ),
    "apply no script": (
        "hooks: {num_workers: 1}",
        ("apply", "space.yaml", "--", "python", "nowhere.py"),
        "there is no file 'nowhere.py'",
    ),
}


@pytest.mark.parametrize("name", BAD_REQUESTS)
def test_a_request_that_cannot_be_meant_starts_nothing(folder, monkeypatch, name):
    space, words, message = BAD_REQUESTS[name]
    (folder / "space.yaml").write_text(space)
    monkeypatch.chdir(folder)
    found = CliRunner(env={"COLUMNS": "200"}).invoke(app, list(words))
    assert found.exit_code == 2
    assert message in found.stderr
    assert len(found.stderr.splitlines()) == 1
    assert not (folder / "forerun-study").exists()


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("print('no training here')", "without a second training step"),
        (
            "import sys; print('disk full'); sys.exit(1)",
            "ended with status 1 before its second training step",
        ),
    ],
)
def test_a_script_that_never_trains_ends_a_study_at_once(folder, script, message):
    (folder / "train.py").write_text(script)
    done = tune(folder)
    assert (done.returncode, done.stdout) == (1, "")
    assert message in last_line(done)


def test_a_metric_that_is_never_printed_ends_a_study_at_its_first_run(folder):
    (folder / "train.py").write_text(training(line="epoch {epoch} valid_acc=0.5 loss: 0.25"))
    done = tune(folder, "--objective", "accuracy", "--metric", "val_acc", trials=20)
    assert (done.returncode, done.stdout) == (1, "")
    assert "printed no 'val_acc=VALUE'; it printed valid_acc, loss" in last_line(done)
    assert "did you mean valid_acc" in last_line(done)
    assert done.stderr.count("trial ") == 1


def corrupt(folder):
    path = folder / "images" / "4.jpg"
    path.write_bytes(path.read_bytes()[:700])


@pytest.fixture
def images(folder):
    (folder / "images").mkdir()
    for index in range(6):
        Image.effect_noise((64, 64), 90).convert("RGB").save(folder / "images" / f"{index}.jpg")
    return folder


def test_a_corrupt_image_of_a_study_is_named_nothing_is_lost_and_no_daemon_outlives_its_trial(images):
    word = f"daemon-of-{os.getpid()}"
    code = f"import time; time.sleep(600)  # {word}"
    start = f"subprocess.Popen([sys.executable, '-c', {code!r}], start_new_session=True)"
    (images / "train.py").write_text(training(before=start))
    script = ("--images", "images", "--epochs", "40")
    first = tune(images, "--no-check", script=script)
    assert first.returncode == 0, first.stderr
    corrupt(images)
    again = tune(images, "--no-check", trials=2, script=script)
    assert again.returncode == 0, again.stderr
    answer = json.loads(again.stdout)
    assert [trial["outcome"] for trial in answer["trials"]] == ["done", "crashed"]
    assert answer["trials"][0] == json.loads(first.stdout)["trials"][0]
    assert answer["best_values"] == answer["trials"][0]["values"]
    for told in (answer["trials"][1]["reason"], again.stderr):
        assert "in the image 'images/4.jpg'" in told
    living = [p.info["cmdline"] for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"]]
    assert not [words for words in living if word in " ".join(words)]


def test_a_corrupt_image_in_a_worker_is_named_by_profile_and_by_a_new_study(images):
    corrupt(images)
    (images / "train.py").write_text(training(workers=1))
    words = ("--", sys.executable, "train.py", "--images", "images", "--epochs", "40")
    done = run_here(images, "profile", "--window", "0", *words)
    assert done.returncode == 1
    assert "in the image 'images/4.jpg'" in last_line(done)


def test_runs_whose_forecast_cannot_win_are_ended(folder):
    (folder / "space.yaml").write_text(METRIC_SPACE)
    # Time for a forecast, also on a busy machine: half of the epochs are long.
    (folder / "train.py").write_text(training().replace("print(", "time.sleep(epoch // 8 * 1.0); print("))
    words = ("--objective", "accuracy", "--prune", "--sampler", "random")
    done = tune(folder, *words, trials=4, script=("--epochs", "16"))
    assert done.returncode == 0, done.stderr
    trials = json.loads(done.stdout)["trials"]
    for trial in trials:
        assert (len(trial["curve"]) < 16) == (trial["outcome"] == "pruned")
    # The script's own ceiling is tried first, a whole run with which the others are compared.
    assert [trial["outcome"] for trial in trials] == ["done"] + ["pruned"] * 3
    assert json.loads(done.stdout)["best_values"]["ceiling"] == 0.9


def test_compare_runs_in_turns_and_tells_speed_and_accuracy(folder):
    (folder / "large.yaml").write_text("arguments: {--batch-size: 6}\nhooks: {channels_last: true}")
    words = ("large.yaml", "--repetitions", "2", "--", sys.executable, "train.py", "--epochs", "12")
    done = run_here(folder, "compare", "--json", "script", *words)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert [line[0] for line in done.stderr.splitlines()] == ["A", "B", "B", "A"]
    # A sleep a step: three times the samples a step are nearly three times as many a second.
    assert answer["speed"]["ratio"] > 2
    assert answer["speed"]["num_pairs"] == 2
    assert answer["accuracy"]["difference"] == pytest.approx(0.0, abs=1e-9)
    assert answer["accuracy"]["is_not_inferior"]
    assert answer["metric"] == "val_acc"


def test_compare_tells_which_configuration_failed(folder):
    (folder / "bad.yaml").write_text("arguments: {--ceiling: high}\nhooks: {}")
    done = run_here(folder, "compare", "bad.yaml", "script", "--", sys.executable, "train.py")
    assert done.returncode == 1
    assert "expected A to run to its end, but it crashed" in last_line(done)
    assert "invalid float value: 'high'" in last_line(done)


def test_apply_runs_the_winner_and_lists_its_hooks(folder):
    made = "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)"
    (folder / "train.py").write_text(training(made, update="optimizer.step(); optimizer.zero_grad()"))
    (folder / "best.yaml").write_text(
        "arguments: {--batch-size: 3}\nhooks: {optimizer_implementation: foreach, cosine_epochs: 3, compile: 'off'}"
    )
    words = ("--", sys.executable, "train.py", "--batch-size", "2")
    done = run_here(folder, "apply", "--json", "best.yaml", *words)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["command"] == f"{sys.executable} train.py --batch-size 3"
    assert answer["wall_s"] > 0
    assert done.stderr.count("val_acc=") == 3
    assert "hook: optimizer_implementation: SGD(foreach=True)" in done.stderr
    assert "hook: cosine_epochs: learning rate follows a cosine over 6 steps" in done.stderr
    assert "hook: compile: not applied" in done.stderr


def test_apply_fails_as_its_command_does(folder):
    (folder / "best.yaml").write_text("arguments: {--ceiling: high}\nhooks: {}")
    done = run_here(folder, "apply", "best.yaml", "--", sys.executable, "train.py")
    assert done.returncode == 1
    assert last_line(done) == "error: the command crashed with status 2"
    assert "invalid float value: 'high'" in done.stdout
