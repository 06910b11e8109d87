"""Runs a command line of forerun in a copy of this process, which has loaded the package but no framework."""

from __future__ import annotations

import io
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The end of a command.

    Attributes:
        words: The command line.
        status: Exit status; negative for a signal; None if it was ended because it took too long.
        out, err: Its output.
        time_s: Its time [s].
        cpu_s: Its CPU time, that of its ended processes included [s].
    """

    words: tuple[str, ...]
    status: int | None
    out: str
    err: str
    time_s: float
    cpu_s: float


def run_command(words: Sequence[str], folder: Path, timeout_s: float) -> Ended:
    """Runs ``forerun WORDS`` in a folder and waits for its end.

    Args:
        words: Words of the command line.
        folder: Working folder; the output goes to files in it.
        timeout_s: Longest time [s].
    """
    outputs = [folder / name for name in (".out", ".err")]
    began_s = time.monotonic()
    pid = os.fork()
    if not pid:
        _be_the_command(words, folder, outputs)
    status, cpu_s = None, timeout_s
    while time.monotonic() - began_s < timeout_s:
        found, state, used = os.wait4(pid, os.WNOHANG)
        if found:
            status, cpu_s = os.waitstatus_to_exitcode(state), used.ru_utime + used.ru_stime
            break
        time.sleep(0.01)
    else:
        os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in outputs]
    time_s = time.monotonic() - began_s
    return Ended(words=tuple(words), status=status, out=texts[0], err=texts[1], time_s=time_s, cpu_s=cpu_s)


def _be_the_command(words: Sequence[str], folder: Path, outputs: Sequence[Path]) -> None:
    os.setsid()
    os.chdir(folder)
    for number, path in enumerate(outputs, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    # What captured the output of this process has nothing to do with the command.
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(io.BufferedWriter(io.FileIO(number, "w")), encoding="utf-8", errors="replace")
        for number in (1, 2)
    )
    status: object = 0
    try:
        from forerun.surface.cli.main import run

        sys.argv = ["forerun", *words]
        run()
    except SystemExit as error:
        status = error.code
    except BaseException:
        traceback.print_exc()
        status = 70
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:  # this child must never go on as the process that it was forked from
        os._exit(status if isinstance(status, int) else 1)
