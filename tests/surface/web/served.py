"""The server in a process of its own, as a user starts it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[3] / "src"
ADDRESS = re.compile(r"forerun at (http://\S+)/ ")


@contextlib.contextmanager
def serving(log: Path, *words: str) -> Iterator[str]:
    """The address of ``forerun serve`` on a free port; ended like by Ctrl-C."""
    path = os.pathsep.join([str(SOURCE), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "forerun", "serve", "--port", "0", *words],
            stderr=errors,
            stdout=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path},
        )
        try:
            yield _address(process, log)
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(timeout=120)


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    while process.poll() is None:
        found = ADDRESS.search(log.read_text())
        if found:
            return found[1]
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=0.05)
    raise AssertionError(f"the server ended: {log.read_text()}")
