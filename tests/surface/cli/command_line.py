"""Runs commands, inside this process and as a user would."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from typer.testing import CliRunner, Result

from forerun.surface.cli.main import app

SOURCE = Path(__file__).parents[3] / "src"

TINY_MODEL = """
import warnings
import torch

print("text that a model file prints")
warnings.warn("a warning of a model file")


def make():
    print("more text")
    layers = torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()
    return torch.nn.Sequential(*layers, torch.nn.Linear(8, 10))


def broken():
    raise ValueError("layers must be positive\\nsecond line")
"""


def invoke(*words: str) -> Result:
    """Runs a command inside this process."""
    return CliRunner(env={"COLUMNS": "80"}).invoke(app, list(words))


def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs ``python -m forerun`` in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "forerun", *words],
        capture_output=True,
        text=True,
        env=child_environment(**environment),
    )


def child_environment(**environment: str) -> dict[str, str]:
    """The environment with this checkout on the import path."""
    path = os.pathsep.join([str(SOURCE), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    return {**os.environ, "PYTHONPATH": path, "COLUMNS": "80", **environment}
