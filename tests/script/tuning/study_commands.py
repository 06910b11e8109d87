"""Runs ``python -m forerun`` in a folder, as a user would."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).parents[3] / "src"


def environment(**own: str) -> dict[str, str]:
    """The environment with this checkout on the import path; one thread, so that two cores are enough."""
    path = os.pathsep.join([str(SOURCE), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "100", **own}


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "forerun", *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment())


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    return done.stderr.strip().splitlines()[-1]
