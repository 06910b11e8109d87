"""Runs ``python -m forerun`` as a user would."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).parents[3] / "src"


def run_forerun(*words: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "forerun", *words],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=child_environment(**environment),
    )


def child_environment(**environment: str) -> dict[str, str]:
    """The environment with this checkout on the import path; one thread, so that two cores are enough."""
    path = os.pathsep.join([str(SOURCE), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "100", **environment}
