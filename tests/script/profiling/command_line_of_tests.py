"""Runs ``forerun``, in this process and as a user would."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

from typer.testing import CliRunner

from forerun.surface.cli.main import app

SOURCE = Path(__file__).parents[3] / "src"


def run_forerun(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "forerun", *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=child_environment())


def run_here(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """As ``run_forerun``, without a process of its own for the command; the scripts that it starts have theirs."""
    with contextlib.chdir(cwd or Path.cwd()):
        done = CliRunner(env={"COLUMNS": "100"}).invoke(app, words)
    return subprocess.CompletedProcess(words, done.exit_code, done.stdout, done.stderr)


def child_environment() -> dict[str, str]:
    """The environment with this checkout on the import path; one thread, so that two cores are enough."""
    path = os.pathsep.join([str(SOURCE), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
