"""A study whose first trials come from predictions of the model that the script trains."""

import json
import sys

import pytest
from study_commands import BY_HAND, last_line, run_here

from forerun.cost.time.correction import CALIBRATIONS_VARIABLE, calibration_path
from forerun.cost.time.weights import save_weights
from forerun.question.devices.catalogue import device_at
from made_calibrations import made_calibration

NETWORK = """
import torch
def make():
    layers = torch.nn.Conv2d(3, 16, 3), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()
    return torch.nn.Sequential(*layers, torch.nn.Linear(16, 2))
"""
SCRIPT = f"""
import argparse
import torch
from network import make
parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=4)
parser.add_argument("--size", type=int, default=32)
args = parser.parse_args()
class Data(torch.utils.data.Dataset):
    def __len__(self): return 64
    def __getitem__(self, index): return torch.ones(3, args.size, args.size), index % 2
model = make()
for epoch in range(50):
    for images, labels in torch.utils.data.DataLoader(Data(), batch_size=args.batch_size):
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        {BY_HAND}
"""
SPACE = """
parameters:
  batch_size: {values: [4, 16], map: --batch-size}
  image_size: {values: [24, 32], map: --size}
  amp: {values: ["off", bf16]}
  channels_last: {values: [false, true]}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "network.py").write_text(NETWORK)
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "space.yaml").write_text(SPACE)
    monkeypatch.setenv(CALIBRATIONS_VARIABLE, str(tmp_path / "calibrations"))
    return tmp_path


def tune(folder, *words):
    options = ("--trial-time", "0.2s", "--no-check", "--json", "--seed", "0", "--device", "cpu")
    return run_here(folder, "tune", "space.yaml", *options, *words, "--", sys.executable, "train.py")


def test_first_trials_are_planned_and_a_study_resumes_with_or_without_the_model(folder):
    here = device_at(None)
    (folder / "calibrations").mkdir()
    save_weights(made_calibration(here), calibration_path(here))
    done = tune(folder, "--model", "network.py:make", "--image-size", "32", "--budget", "3 trials")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert [trial["source"] for trial in answer["trials"]] == ["script", "plan", "plan"]
    assert {trial["outcome"] for trial in answer["trials"]} == {"done"}
    # Only full precision was calibrated, and fewer pixels are less work.
    assert answer["trials"][1]["values"]["amp"] == "off"
    assert answer["trials"][1]["values"]["image_size"] == 24
    assert "first trials by the predicted steps of network.py:make" in done.stderr
    again = tune(folder, "--budget", "4 trials")
    assert again.returncode == 0, again.stderr
    resumed = json.loads(again.stdout)
    assert resumed["is_resumed"]
    assert resumed["trials"][:3] == answer["trials"]
    assert resumed["trials"][3]["source"] == "plan"


def test_without_a_calibration_a_processor_says_that_the_profile_is_used_alone(folder):
    done = tune(folder, "--model", "network.py:make", "--budget", "2 trials")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    (note,) = [note for note in answer["notes"] if "profile alone" in note]
    assert "has no calibration; make one with: forerun calibrate" in note
    assert done.stderr.count(note) == 1
    assert [trial["source"] for trial in answer["trials"]] == ["script", "cost model"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--model", "torchvision:resnet19"), "no model 'resnet19'"),
        (("--model", "network.py:nothing"), "nothing"),
        (("--model", "keras:ResNet50"), "hooks reach PyTorch scripts only"),
        (("--model", "network.py:make", "--no-priors"), "which --no-priors turns off"),
        (("--model", "network.py:make", "--input-shape", "3,32"), "--input-shape"),
        (("--input-shape", "3,32,32"), "the input of a model was given without the model"),
        (("--model", "network.py:make", "--input-shape", "3x"), "an input shape must be whole numbers"),
    ],
)
def test_a_model_that_cannot_be_meant_is_one_line_and_nothing_runs(folder, words, message):
    done = tune(folder, *words)
    assert done.returncode == 2
    assert message in last_line(done)
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.stdout == ""
    assert not (folder / "forerun-study").exists()
