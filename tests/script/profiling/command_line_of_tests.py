"""Runs ``forerun`` here; the scripts that it starts have processes of their own."""

from __future__ import annotations

import contextlib
import os
import subprocess
from pathlib import Path

from typer.testing import CliRunner

from forerun.surface.cli.main import app

SOURCE = Path(__file__).parents[3] / "src"


def run_forerun(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    with contextlib.chdir(cwd or Path.cwd()):
        done = CliRunner(env={"COLUMNS": "100"}).invoke(app, words)
    return subprocess.CompletedProcess(words, done.exit_code, done.stdout, done.stderr)


def child_environment() -> dict[str, str]:
    """The environment with this checkout on the import path; one thread, so that two cores are enough."""
    path = os.pathsep.join([str(SOURCE), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
