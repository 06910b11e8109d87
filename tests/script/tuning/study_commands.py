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
