"""Scripts that do what no training should, under the verbs that run it: what is said, what is left."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from studies.faults.commands import trials_of
from studies.markdown import markdown_table

_LOOP = """
import argparse, os, sys, torch

def train(act=lambda step: None, steps=12):
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=2)
    size = parser.parse_args().batch_size
    data = torch.utils.data.TensorDataset(torch.ones(steps * size, 4), torch.arange(steps * size) % 2)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, (images, labels) in enumerate(torch.utils.data.DataLoader(data, batch_size=size)):
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        act(step)
"""
_IMPORTS = """
import atexit, ctypes, multiprocessing, os, resource, signal, subprocess, sys, tempfile, threading, time
from multiprocessing import shared_memory
from loop import train
def once(act): return lambda step: act() if step == 1 else None
def child(act):
    if not os.fork():
        act()
        os._exit(0)
def sleep(): time.sleep(600)
def compute(): [None for _ in iter(int, 1)]
def limit(what, size): resource.setrlimit(what, (size, size))
def log(step): open("log", "ab").write(b"x" * 4096)
"""
SCRIPTS = {
    "a fork that sleeps": "child(sleep); train()",
    "a fork in every step": "train(lambda step: child(sleep))",
    "a daemon in a session of its own": "child(lambda: (os.setsid(), child(sleep))); train()",
    "a child without its variables": "subprocess.Popen(['sleep', '600'], env={}, start_new_session=True); train()",
    "a child that ignores SIGTERM": "child(lambda: (signal.signal(15, signal.SIG_IGN), sleep())); train()",
    "a pool of processes that is not closed": "pool = multiprocessing.Pool(2); train()",
    "a thread that never ends": "threading.Thread(target=sleep).start(); train()",
    "a thread that computes": "threading.Thread(target=compute, daemon=True).start(); train()",
    "all descriptors closed": "os.closerange(3, 4096); train()",
    "stdout and stderr closed": "os.close(1); os.close(2); train()",
    "its output closed in a step": "train(once(lambda: (sys.stdout.close(), sys.stderr.close())))",
    "another working folder": "os.chdir('/'); train()",
    "its working folder removed": "d = tempfile.mkdtemp(); os.chdir(d); os.rmdir(d); train()",
    "all signals ignored": "[signal.signal(n, signal.SIG_IGN) for n in (1, 2, 3, 13, 14, 15, 17)]; train()",
    "a handler that raises": "signal.signal(14, lambda *a: 1 / 0); train(once(lambda: os.kill(os.getpid(), 14)))",
    "another excepthook, and an error": "sys.excepthook = lambda *a: print('mine'); train(once(lambda: 1 / 0))",
    "an excepthook that raises": "sys.excepthook = lambda *a: 1 / 0; train(once(lambda: {}['x']))",
    "os._exit in a step": "train(once(lambda: os._exit(3)))",
    "sys.exit at the end": "atexit.register(lambda: sys.exit(5)); train(steps=2)",
    "an end that never comes": "atexit.register(sleep); train(steps=2)",
    "an endless line": "while True: sys.stdout.write('x' * 65536)",
    "output without end": "while True: print('loss 0.1')",
    "a gigabyte of output in a step": "train(once(lambda: [os.write(1, b'y' * 2**20) for _ in range(1024)]))",
    "a disk that is full": "limit(resource.RLIMIT_FSIZE, 4096); train(log)",
    "SIGSTOP to itself": "train(once(lambda: os.kill(os.getpid(), 19)))",
    "SIGKILL to itself": "train(once(lambda: os.kill(os.getpid(), 9)))",
    "SIGKILL to its group": "train(once(lambda: os.killpg(0, 9)))",
    "SIGKILL to its parent": "train(once(lambda: os.kill(os.getppid(), 9)))",
    "a segmentation fault": "train(once(lambda: ctypes.string_at(0)))",
    "recursion without end": "sys.setrecursionlimit(10**6)\ndef f(): f()\ntrain(once(f))",
    "memory without end": "limit(resource.RLIMIT_AS, 8 << 30); train(once(lambda: b'x' * (16 << 30)))",
    "shared memory that is left": "m = shared_memory.SharedMemory(create=True, size=4096); train()",
    "temporary files that are left": "tempfile.mkdtemp(); train()",
    "no death with its parent": "ctypes.CDLL(None).prctl(1, 0); ctypes.CDLL(None).prctl(4, 0); train()",
    "no step at all": "pass",
    "a wait for input": "input(); train()",
    "a huge argument": "sys.argv += ['x' * 100_000]; train()",
}  # fmt: skip
"""Names of scripts and what they do."""
_VERBS = ("capture", "profile", "tune", "diagnose")
_KILLS_THE_COMMAND = "SIGKILL to its parent"
_LIMIT = "20s"
_LONGEST_S = 150.0
_LEFT_AFTER_S = 3.0
_MARK = "FORERUN_STUDY_OF"


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """The end of a command with a script.

    Attributes:
        verb, script: The command and the script.
        status: Its exit status; None if it had to be ended.
        words: Its last line of stderr.
        faults: What is wrong with it; empty if nothing is.
    """

    verb: str
    script: str
    status: int | None
    words: str
    time_s: float
    faults: tuple[str, ...]


def run_script(verb: str, name: str, folder: Path) -> Told:
    """Runs a script under a verb, in a new folder."""
    own, shared = folder / "tmp", folder / "shared"
    own.mkdir(parents=True)
    shared.mkdir()
    (folder / "loop.py").write_text(_LOOP)
    (folder / "train.py").write_text(_IMPORTS + SCRIPTS[name] + "\n")
    (folder / "space.yaml").write_text("parameters:\n  batch_size: {values: [2, 3], map: --batch-size}\n")
    words = {
        "capture": ("capture", "--out", "graph.forerun", "--timeout", _LIMIT),
        "profile": ("profile", "--steps", "6", "--timeout", _LIMIT),
        "tune": (
            "tune", "space.yaml", "--budget", "2 trials", "--trial-time", "0.1s", "--no-check", "--timeout", _LIMIT,
        ),
        "diagnose": ("diagnose", "--steps", "6", "--timeout", "4s"),  # a fifth of what its command may take
    }[verb]  # fmt: skip
    began_s = time.monotonic()
    status, errors = _ended([*words, "--", sys.executable, "train.py"], folder, own)
    time_s = time.monotonic() - began_s
    if name == _KILLS_THE_COMMAND and status == -signal.SIGKILL:
        status, _ = _ended(["hardware", "show", "t4"], folder, own)  # the next command removes what is left
    faults = [*_said_wrongly(status, errors), *_left(folder)]
    if verb == "tune" and status == 0 and name != _KILLS_THE_COMMAND and not trials_of(folder):
        faults.append("no trial is kept")
    last = errors.strip().splitlines()[-1:] or [""]
    return Told(verb=verb, script=name, status=status, words=last[0], time_s=time_s, faults=tuple(faults))


def _ended(words: Sequence[str], folder: Path, own: Path) -> tuple[int | None, str]:
    variables = {**os.environ, "TMPDIR": str(own), _MARK: str(own), "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
    with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
        command = [*_own_memory(folder / "shared"), sys.executable, "-m", "forerun", *words]
        process = subprocess.Popen(
            command, cwd=folder, env=variables, stdin=subprocess.DEVNULL, stdout=out, stderr=err
        )
        try:
            status: int | None = process.wait(_LONGEST_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            status = None
    with (folder / "err").open("rb") as file:
        return status, file.read()[-20_000:].decode(errors="replace")


def _own_memory(place: Path) -> list[str]:
    """Words that start a command whose shared memory is a folder, where the system lets this user do so."""
    words = [
        "unshare",
        "--mount",
        "sh",
        "-c",
        'mount --bind "$1" /dev/shm && shift && exec "$@"',
        "sh",
        str(place),
    ]
    can = shutil.which("unshare") and not subprocess.run([*words, "true"], capture_output=True).returncode
    return words if can else []


def _said_wrongly(status: int | None, errors: str) -> Iterator[str]:
    if status is None:
        yield "it did not end"
    elif status < 0:
        yield f"it was ended by {signal.Signals(-status).name}"
    elif status not in (0, 1):
        yield f"exit status {status}"
    if "internal error" in errors:
        yield "internal error"
    last = errors.strip().splitlines()[-1:] or [""]
    if status == 1 and not last[0].startswith("error: "):
        yield "no line says why"


def _left(folder: Path) -> Iterator[str]:
    """What a command left behind; processes are ended."""
    own = folder / "tmp"
    mark, end_s = f"{_MARK}={own}".encode(), time.monotonic() + _LEFT_AFTER_S
    while (
        living := [one for one in psutil.process_iter() if _is_of(one, mark, own)]
    ) and time.monotonic() < end_s:
        time.sleep(0.1)
    for process in living:
        yield f"process {' '.join(process.cmdline())[-60:]}"
        process.kill()
    yield from (f"/dev/shm/{path.name}" for path in sorted((folder / "shared").iterdir()))
    # Files of the script itself, and PyTorch's cache, are the user's.
    yield from (f"temporary {path.name}" for path in sorted(own.glob("forerun-of-*")))
    yield from (f"lock {path.name}" for path in sorted(own.glob("*.lock")) if _is_held(path))


def _is_held(lock: Path) -> bool:
    with lock.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


def _is_of(process: psutil.Process, mark: bytes, own: Path) -> bool:
    """True for a living process that a command started: by its variables, or by its folder where it has none."""
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        return mark in Path(f"/proc/{process.pid}/environ").read_bytes() or process.cwd().startswith(
            str(own.parent)
        )
    except (psutil.Error, OSError):
        return False


def script_table(folder: Path, scripts: Sequence[str]) -> tuple[list[str], list[Told]]:
    """A table of what became of scripts under each of the verbs, and all ends."""
    found = [run_script(verb, name, folder / verb / name) for verb in _VERBS for name in scripts]
    rows: list[tuple[object, ...]] = []
    for verb in _VERBS:
        own = [told for told in found if told.verb == verb]
        answered = sum(told.status == 0 for told in own)
        faulty = sum(bool(told.faults) for told in own)
        rows.append((f"`{verb}`", len(own), answered, len(own) - answered, faulty))
    header = ("command", "scripts", "answered", "one line says why", "faults")
    return markdown_table(header, rows).splitlines(), found
