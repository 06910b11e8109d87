"""Real commands killed at random moments: ``measure grid`` and ``tune``, run again until they are done.

The head of a Ray cluster is killed under ``measure grid --ray`` and ``tune --ray`` too.

Acknowledged is what others could see before the kill: a record that another reader of the store has read, a trial whose
line was printed. After each kill the store or the journal must open and hold all of it, unchanged and once; no process
of the command may live on for 3 s.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import psutil

from forerun.base.errors import ForerunError
from forerun.base.isolation import patched_environment
from forerun.evidence.records.measurement import Measurement
from forerun.evidence.records.record_store import RecordStore

GRID = (
    "measure", "grid", "--network", "cnn", "--sizes", "depth=1", "--sizes", "base_filters=4", "--batch-sizes",
    "4,8,16,32", "--dataset", "synthetic", "--steps", "3", "--epochs", "1", "--repetitions", "3", "--max-seconds",
    "0.05", "--threads", "1", "--json",
)  # fmt: skip
"""A grid of four trainings, as small as they can be."""
_NUM_JOBS = 4
_STUDY = (
    "tune", "space.yaml", "--budget", "6 trials", "--trial-time", "0.1s", "--no-check", "--json", "--seed",
    "0",
)  # fmt: skip
_NUM_TRIALS = 6
_SPACE = "parameters:\n  batch_size: {values: [2, 3, 4, 6, 8, 12], map: --batch-size}\n"
_SCRIPT = """
import argparse, os, time
with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "started"), "a") as file:
    file.write(f"{os.getpid()}\\n")
import torch
parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=2)
args = parser.parse_args()
data = torch.utils.data.TensorDataset(torch.ones(240, 4), torch.arange(240) % 2)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for images, labels in torch.utils.data.DataLoader(data, batch_size=args.batch_size, shuffle=True):
    torch.nn.functional.cross_entropy(model(images), labels).backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.005)
"""
_LIVES_ON_S = 3.0
_FIRST_GUESS_S = 60.0
"""Time of a whole command [s]; made smaller by ``_NARROWER`` for each command that ends before its kill."""
_NARROWER = 0.8
_LOOK_S = 0.5
"""Time between two looks of the other reader at the store [s]."""
_MOMENT_S = 0.02
_LONGEST_S = 600.0


class _Command:
    """A running command whose stderr is read as it comes."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.began_s = time.monotonic()
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.lines.extend(line for line in self.process.stderr)

    @property
    def age_s(self) -> float:
        """Time since its start [s]."""
        return time.monotonic() - self.began_s

    def ended(self) -> bool:
        """True if it has ended by itself."""
        return self.process.poll() is not None

    def moments(self, end_s: float, pause_s: float) -> Iterator[None]:
        """Yields again and again until it has ended or has an age [s], with pauses [s]."""
        while not self.ended() and self.age_s < end_s:
            yield
            time.sleep(pause_s)

    def read_to_end(self) -> None:
        """Waits for its last lines."""
        self._reader.join(timeout=_LIVES_ON_S)

    def kill(self) -> int:
        """Kills it; returns the number of its processes that still live after 3 s."""
        family = psutil.Process(self.process.pid).children(recursive=True)
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        _, living = psutil.wait_procs(family, timeout=_LIVES_ON_S)
        self.read_to_end()
        return sum(process.status() != psutil.STATUS_ZOMBIE for process in living if process.is_running())


@contextlib.contextmanager
def running(words: tuple[str, ...], folder: Path) -> Iterator[_Command]:
    """``forerun WORDS`` in a folder, with a folder of its own for locks and temporary files."""
    own = folder / "tmp"
    own.mkdir(exist_ok=True)
    environment = {**os.environ, "TMPDIR": str(own), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "forerun", *words], cwd=folder, env=environment, text=True,
        stdin=subprocess.DEVNULL, stdout=(folder / "answer.json").open("w"), stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        yield _Command(process)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def keys_of(store: str) -> dict[str, Measurement]:
    """The measurements of a store by their keys; none if there is no store yet."""
    try:
        with RecordStore.open(store, create=False) as opened:
            return {measurement.key: measurement for measurement in opened.measurements()}
    except ForerunError:
        return {}


def killed_grids(
    store: str, folder: Path, number: int, is_over: Callable[[], bool] = lambda: False
) -> Counter[str]:
    """Kills ``measure grid`` at random moments, and runs it again until its grid is measured; then the next grid.

    Args:
        store: Store of the records.
        folder: Working folder.
        number: Number of kills.
        is_over: True if no further kill shall be begun.
    """
    draw, found, grid, whole_s = random.Random(5), Counter[str](), 0, _FIRST_GUESS_S
    kept: dict[str, Measurement] = {}
    while found["faults"] < number and not is_over():
        before = dict(kept)
        with running((*GRID, "--seed", str(grid), "--records", store), folder) as command:
            for _ in command.moments(draw.uniform(0.0, whole_s), _LOOK_S):
                kept |= keys_of(store)
            if command.ended():
                whole_s = max(command.age_s, _NARROWER * whole_s)
                found["unfinished"] += _unfinished_grid(command, folder, store, grid)
                grid += 1
            else:
                found["processes left"] += command.kill()
                found["faults"] += 1
        found += _faults_of_store(store, kept, before)
        kept |= keys_of(store)
    found["acknowledged"] = len(kept)
    return found


def _unfinished_grid(command: _Command, folder: Path, store: str, grid: int) -> int:
    """Trainings of a grid that the store does not have although the command is done."""
    done = [
        found
        for found in keys_of(store).values()
        if found.kind == "training" and found.parameters.get("seed", 0) == grid and found.outcome == "done"
    ]
    is_answered = command.process.returncode == 0 and json.loads((folder / "answer.json").read_text())
    return abs(_NUM_JOBS - len(done)) + (not is_answered)


def _faults_of_store(
    store: str, kept: Mapping[str, Measurement], before: Mapping[str, Measurement]
) -> Counter[str]:
    found: Counter[str] = Counter()
    if not kept:
        return found
    with RecordStore.open(store) as opened:
        read = list(opened.measurements())
        found["damaged"] = len(opened.check())
    by_key = {measurement.key: measurement for measurement in read}
    found["lost"] = sum(key not in by_key for key in kept)
    found["twice"] = len(read) - len(by_key)
    # A later session may only mark a record as unstable, after its anchor.
    found["changed"] = sum(
        by_key[key].repetitions_s != was.repetitions_s or by_key[key].outcome != was.outcome
        for key, was in before.items()
        if key in by_key and was.outcome == "done"
    )
    return found


def write_study(folder: Path) -> tuple[str, ...]:
    """Writes a script and a space into a folder; returns the words of the command that tunes it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train.py").write_text(_SCRIPT)
    (folder / "space.yaml").write_text(_SPACE)
    return (*_STUDY, "--", sys.executable, "train.py")


def killed_studies(folder: Path, number: int, is_over: Callable[[], bool] = lambda: False) -> Counter[str]:
    """Kills ``tune`` at random moments, every second time inside a trial, and runs it again until its budget is used.

    Args:
        folder: Working folder.
        number: Number of kills.
        is_over: True if no further kill shall be begun.
    """
    draw, found, study, whole_s = random.Random(6), Counter[str](), 0, _FIRST_GUESS_S
    told: dict[int, Any] = {}
    is_profiled = False
    while found["faults"] < number and not is_over():
        place = folder / f"study-{study}"
        words = write_study(place)
        with running(words, place) as command:
            if found["faults"] % 2:
                _wait_for_a_trial(command, place, draw)
                found["inside a trial"] += not command.ended() and _runs_a_trial(place)
            else:
                for _ in command.moments(draw.uniform(0.0, whole_s), _MOMENT_S):
                    pass
            if is_whole := command.ended():
                whole_s = max(command.age_s, _NARROWER * whole_s)
                found["unfinished"] += _unfinished_study(command, place)
            else:
                found["processes left"] += command.kill()
                found["faults"] += 1
            printed = {
                int(line.split()[1].rstrip(":")) for line in command.lines if line.startswith("trial ")
            }
            found["profiled again"] += is_profiled and any("profiling" in line for line in command.lines)
            is_profiled = is_profiled or bool(printed)
        trials = trials_of(place)
        found["acknowledged"] += len(printed - told.keys())
        found["lost"] += len((printed | told.keys()) - trials.keys())
        found["changed"] += sum(trials[key] != was for key, was in told.items() if key in trials)
        told = trials
        if is_whole:
            study, told, is_profiled = study + 1, {}, False
    return found


def _wait_for_a_trial(command: _Command, place: Path, draw: random.Random) -> None:
    """Waits for the start of a random one of the next scripts, and into its middle."""
    begun = _num_started(place)
    wanted = begun + draw.randint(1, 2)
    for _ in command.moments(_LONGEST_S, _MOMENT_S):
        if _num_started(place) >= wanted:
            break
    time.sleep(draw.uniform(0.0, 1.0))


def _num_started(place: Path) -> int:
    path = place / "started"
    return len(path.read_text().splitlines()) if path.exists() else 0


def _runs_a_trial(place: Path) -> bool:
    path = place / "started"
    return path.exists() and psutil.pid_exists(int(path.read_text().splitlines()[-1]))


def _unfinished_study(command: _Command, place: Path) -> int:
    """Trials of a study that are missing, or too many, although the command is done."""
    if command.process.returncode:
        return _NUM_TRIALS
    answer = json.loads((place / "answer.json").read_text())
    return abs(_NUM_TRIALS - len(answer["trials"]))


def trials_of(place: Path) -> dict[int, Any]:
    """Values of the finished trials of a study by number; none if there is no study yet."""
    import optuna
    from optuna.storages import JournalStorage

    from forerun.script.tuning.study import StudyJournal

    path = place / "forerun-study" / "journal.sqlite"
    if not path.exists():
        return {}
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    storage = JournalStorage(StudyJournal(path))
    if not storage.get_all_studies():
        return {}
    study = optuna.load_study(study_name="forerun", storage=storage)
    return {
        trial.number: (trial.params, trial.values)
        for trial in study.get_trials()
        if trial.state.name == "COMPLETE"
    }


_LONGEST_CLUSTER_S = 300.0
_LOOK_CLUSTER_S = 0.2
"""Time between two looks at a command and its records [s]."""
_STORE_BYTES = 80 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class KilledHead:
    """What a command did whose cluster lost its head.

    Attributes:
        status: Exit status.
        last_line: Last line on stderr.
        time_s: Time from the kill to the end of the command [s].
        num_acknowledged: Records or trials that were finished before the kill.
        num_lost: Those among them that were gone afterwards.
        is_finished: True if the same command did the rest on a new cluster.
    """

    status: int | None
    last_line: str
    time_s: float
    num_acknowledged: int
    num_lost: int
    is_finished: bool


def killed_heads(what: Literal["grid", "tune"], folder: Path) -> KilledHead:
    """Kills the head, with all its processes, after the first records of a command; runs it again on a new cluster."""
    store = str(folder / "records.sqlite")
    words: tuple[str, ...] = (*GRID, "--records", store)
    finished: Callable[[], Any] = partial(keys_of, store)
    if what == "tune":
        words = (*write_study(folder)[:-1], str(folder / "train.py"))
        finished = partial(trials_of, folder)
    with _cluster() as cluster, running(_on(words, cluster), folder) as command:
        for _ in command.moments(_LONGEST_CLUSTER_S, _LOOK_CLUSTER_S):
            if len(finished()) >= 2:
                break
        before, killed_s = finished(), time.monotonic()
        cluster.head_node.kill_all_processes(check_alive=False, allow_graceful=False)
        for _ in command.moments(command.age_s + _LONGEST_CLUSTER_S, _LOOK_CLUSTER_S):
            pass
        time_s, status = time.monotonic() - killed_s, command.process.poll()
        command.read_to_end()
        last_line = (command.lines or [""])[-1].strip()
    after = finished()
    with _cluster() as cluster, running(_on(words, cluster), folder) as command:
        for _ in command.moments(_LONGEST_CLUSTER_S, _LOOK_CLUSTER_S):
            pass
        again = command.process.poll()
    last = finished()
    return KilledHead(
        status=status,
        last_line=last_line,
        time_s=time_s,
        num_acknowledged=len(before),
        num_lost=sum(after.get(key) != was or key not in last for key, was in before.items()),
        is_finished=again == 0,
    )


def _on(words: tuple[str, ...], cluster: Any) -> tuple[str, ...]:
    """The command with the address of a cluster, before a script's own words."""
    place = words.index("--") if "--" in words else len(words)
    return (*words[:place], "--ray", cluster.address, *words[place:])


@contextlib.contextmanager
def _cluster() -> Iterator[Any]:
    """A head that runs no task and a node, in folders of their own."""
    from ray.cluster_utils import Cluster

    # Ray's sockets lie below it, and the path of a socket is at most 107 characters long.
    folder = Path(tempfile.mkdtemp(prefix="fr-", dir="/tmp"))
    variables = {
        "TMPDIR": str(folder),
        "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONPATH": os.pathsep.join([str(Path.cwd()), *filter(None, sys.path)]),
    }
    with patched_environment(variables):
        head = {"num_cpus": 0, "object_store_memory": _STORE_BYTES, "include_dashboard": False}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        cluster.add_node(num_cpus=1, object_store_memory=_STORE_BYTES)
        cluster.wait_for_nodes()
        yield cluster
        with contextlib.suppress(Exception):  # its head may be gone
            cluster.shutdown()  # type: ignore[no-untyped-call]
    shutil.rmtree(folder, ignore_errors=True)
