"""Runs commands in a folder, as a user would."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

from typer.testing import CliRunner

from forerun.surface.cli.main import app

SOURCE = Path(__file__).parents[3] / "src"


BY_HAND = "for weight in model.parameters(): weight.data, weight.grad = weight - 0.1 * weight.grad, None"
"""An update for scripts of which no optimizer is asked: PyTorch's first takes as long to start as half of the rest."""


def environment(**own: str) -> dict[str, str]:
    """The environment with this checkout on the import path; one thread, so that two cores are enough."""
    path = os.pathsep.join([str(SOURCE), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "100", **own}


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "forerun", *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment())


def run_here(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """As ``run``, without a process of its own for the command; the scripts that it starts have theirs."""
    with contextlib.chdir(folder):
        done = CliRunner(env={"COLUMNS": "100"}).invoke(app, words)
    return subprocess.CompletedProcess(words, done.exit_code, done.stdout, done.stderr)


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    return done.stderr.strip().splitlines()[-1]


SCRIPT = """
import argparse, os, time
import torch
parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=4)
args = parser.parse_args()
with open({started!r}, "a") as file:
    file.write(f"{{os.getpid()}}\\n")
time.sleep({start_s})
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


def write_study(folder: Path, *, pause_s: float, start_s: float = 0.0) -> list[str]:
    """A script that notes its processes in ``started`` and begins after ``start_s``, and the command that tunes it."""
    script = SCRIPT.format(started=str(folder / "started"), pause_s=pause_s, start_s=start_s, by_hand=BY_HAND)
    (folder / "train.py").write_text(script)
    (folder / "space.yaml").write_text(SPACE)
    words = ["tune", "space.yaml", "--trial-time", "0.3s", "--no-check", "--json", "--seed", "0"]
    return [sys.executable, "-m", "forerun", *words]
