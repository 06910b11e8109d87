"""Every command of docs/lineage.md does what the page says, in a folder with the files that it names."""

import json
import re
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.main import get_command
from typer.testing import CliRunner

from forerun.adapters.classics.csv_formats import write_cnn_csv
from forerun.evidence.measurement.layer_design import layer_job
from forerun.evidence.records.measurement import JobKind, Outcome
from forerun.evidence.records.reading import export_measurements, import_measurements
from forerun.evidence.records.record_store import RecordStore
from forerun.surface.cli.main import app
from made_measurements import measurement
from optimus_networks import NETWORKS

PAGE = (Path(__file__).parents[1] / "docs" / "lineage.md").read_text(encoding="utf-8")
SHORT = [
    command
    for row in re.findall(r"^\|.*\|$", PAGE, re.MULTILINE)
    for command in re.findall(r"`(forerun [^`]*)`", row)
]
LONGER = [
    " ".join(command.split())
    for text in re.findall(r"^Longer: (.*?)(?=\n\n|\Z)", PAGE, re.MULTILINE | re.DOTALL)
    for command in re.findall(r"`(forerun [^`]*)`", text)
]

GRID = Path(__file__).parents[1] / "studies/own/data/cpu-epyc-2-cores/grid.parquet"

LENET = {
    "input": {"dimension": 1, "size": 28},
    "layers": {
        "1": {"name": "conv1", "type": "Convolution", "kernelsize": 5, "channels_out": 6, "padding": "SAME",
              "strides": 1, "use_bias": 1, "activation": "tanh"},
        "2": {"name": "pool1", "type": "Max_pool", "pool_size": 2, "strides": 2, "padding": "VALID"},
        "3": {"name": "fc1", "type": "Convolution", "kernelsize": 14, "channels_out": 84, "padding": "VALID",
              "strides": 1, "use_bias": 1, "activation": "relu"},
        "4": {"name": "out", "type": "Fully_connected", "neurons": "10", "activation": "softmax"},
    },
}  # fmt: skip

TRAIN = """
import torch
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(12):
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""

TIMM = "model,train_samples_per_sec,train_step_time,train_batch_size,train_img_size,param_count\n"


def make_files(folder: Path) -> None:
    (folder / "plots").mkdir()
    (folder / "lenet.json").write_text(json.dumps(LENET))
    (folder / "train.py").write_text(TRAIN)
    # The eighteen jobs of system A as measured for docs/lineage.md; of two measurements the second.
    trained = [m for m in import_measurements(GRID) if m.kind is JobKind.TRAINING]
    rows = {(m.subject, m.parameters["batch_size"]): m for m in trained}
    assert write_cnn_csv(rows.values(), folder / "grid.csv") == 18
    rng, steps = np.random.default_rng(0), np.arange(200)
    losses = 1 / (0.02 * (steps + 1) + 0.6) + 0.5 + 0.01 * rng.normal(size=200)
    rows = [f"{k // 50},{k % 50},{loss},{1 - loss / 3}" for k, loss in zip(steps, losses, strict=True)]
    (folder / "log.csv").write_text("\n".join(["epoch,step,loss,acc", *rows]))
    printed = [line.split(",") for line in NETWORKS.splitlines()[1:]]
    epochs = ["depth,gpu,epochs", *(f"{row[0]},{row[1]},{row[5]}" for row in printed)]
    (folder / "epochs.csv").write_text("\n".join(epochs))
    (folder / "networks.csv").write_text(NETWORKS)
    curve = ["epoch,val_accuracy", *(f"{n},{0.95 - 0.6 * n**-0.7:.4f}" for n in range(1, 16))]
    (folder / "curve-of-a-run.csv").write_text("\n".join(curve))
    (folder / "jobs.csv").write_text(
        "name,points,batch_size,steps,num_devices\na,1:100 2:190 4:340,32,20000,2\nb,1:50 2:95 4:180,64,4000,4\n"
    )
    rows = "resnet18,222.2,288,64,224,11.69\nresnet34,117.6,544,64,224,21.8\n"
    (folder / "timm.csv").write_text(TIMM + rows)
    layers = []
    for number in range(12):
        sizes = {
            "batch_size": 8,
            "in_features": 2 ** (3 + number % 6),
            "out_features": 2 ** (4 + number % 5),
            "use_bias": True,
        }
        job = layer_job(
            "dense",
            {**sizes, "mode": "train_step", "optimizer": "sgd", "activation": ("none", "relu")[number % 2]},
            precision="fp32",
            layout="nchw",
        )
        times = tuple(1e-4 * (number + 1) * (1 + k / 50) for k in range(3))
        layers.append(
            measurement(
                number,
                kind=job.kind,
                subject="dense",
                family="dense",
                parameters=job.parameters,
                repetitions_s=times,
            )
        )
    export_measurements(layers, folder / "layers-records.csv")
    with RecordStore.open(folder / "steps.sqlite") as store:
        asked = {"batch_size": 8, "precision": "fp32", "optimizer": "sgd"}
        step = measurement(
            1, subject="mlp:depth=1,width=32", family="mlp", parameters=asked, outcome=Outcome.DONE
        )
        store.add_many([step])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("lineage")
    make_files(path)
    return path


def words_of(command: str) -> list[str]:
    return [sys.executable if word == "PYTHON" else word for word in shlex.split(command)[1:]]


@pytest.mark.parametrize("command", SHORT, ids=lambda command: " ".join(command.split()[1:4]))
def test_a_command_of_the_tables_runs(command, folder, monkeypatch):
    monkeypatch.chdir(folder)
    done = CliRunner(env={"COLUMNS": "160"}).invoke(app, words_of(command))
    assert done.exit_code == 0, done.output
    assert done.stdout
    for name in re.findall(r"--(?:csv|out|plot|trace|steps-out) (\S+)", command):
        assert (folder / name).stat().st_size > 0
    if "mlpredict:" in command:
        assert "unsupported" not in done.stdout


@pytest.mark.parametrize("command", LONGER)
def test_the_words_of_a_longer_command_are_known(command):
    words = words_of(command)
    found = get_command(app)
    path = []
    while hasattr(found, "commands") and words and words[0] in found.commands:
        path.append(words.pop(0))
        found = found.commands[path[-1]]
    found.make_context(
        " ".join(path), words[: words.index("--")] if "--" in words else words, resilient_parsing=True
    )


def test_each_workflow_is_three_commands_or_fewer():
    assert len(SHORT) > 15
    assert len(re.findall(r"Its workflow is (?:two|three) commands here", PAGE)) == 4
