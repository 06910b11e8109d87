"""Faults of record stores and of the journal of a study: killed writers, full disks, restarts, flipped bits.

A writer tells each record or trial that the store or journal has acknowledged. After the fault it must open, hold
all of these once, as they were written, and take another.
"""

from __future__ import annotations

import os
import pwd
import random
import resource
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from forerun.base.errors import FailureError, RecordError, StoreWarning
from forerun.evidence.records import record_store
from forerun.evidence.records.measurement import Circumstances, JobKind, Measurement, Outcome, Summary
from forerun.evidence.records.reading import export_measurements, import_measurements
from forerun.evidence.records.record_store import RecordStore
from forerun.script.tuning.options import parse_objectives
from forerun.script.tuning.space import space_of
from forerun.script.tuning.study import TrialStore, suggest
from forerun.script.tuning.trial import TrialResult

_MOST = 100_000


def made_measurement(number: int) -> Measurement:
    """A measurement with a key of its own."""
    time_s = 0.1 + 1e-6 * number
    return Measurement(
        key=f"{number:032x}",
        kind=JobKind.STEP,
        subject="cnn:depth=2,base_filters=32",
        family=f"cnn-{number % 7}",
        parameters={"batch_size": 32, "precision": "fp32", "number": number},
        outcome=Outcome.DONE,
        repetitions_s=(time_s, 2 * time_s, 1.5 * time_s),
        summary=Summary(median_s=1.5 * time_s, low_s=time_s, high_s=2 * time_s, is_stable=True),
        circumstances=Circumstances(device="cpu", device_title="made up", occasion="faults"),
    )


@contextmanager
def forked(work: Callable[[int], None]) -> Iterator[tuple[int, int]]:
    """A copy of this process that does some work; yields its number and the pipe of what it tells."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(reader)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        try:
            work(writer)
        except BaseException:
            os._exit(1)
        os._exit(0)
    os.close(writer)
    try:
        yield pid, reader
    finally:
        os.close(reader)


def _write_on(store: str, first: int, number: int = _MOST, pause_s: float = 0.0) -> Callable[[int], None]:
    def work(pipe: int) -> None:
        with RecordStore.open(store) as opened:
            _add_all(opened, pipe, range(first, first + number), pause_s)

    return work


def _add_all(opened: RecordStore, pipe: int, numbers: Iterable[int], pause_s: float = 0.0) -> None:
    for number in numbers:
        opened.add(made_measurement(number))
        os.write(pipe, b"%d\n" % number)
        time.sleep(pause_s)


def _limit_files(limit_bytes: int) -> None:
    """Lets the disk of this process be full: a file that would grow beyond the limit cannot be written."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, resource.RLIM_INFINITY))


def _told_to_the_end(work: Callable[[int], None]) -> set[int]:
    with forked(work) as (pid, pipe):
        told = told_numbers(pipe)
        os.waitpid(pid, 0)
    return told


def _kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def _with_flipped_bits(data: bytes, number: int, seed: int) -> Iterator[bytes]:
    """The data again and again, each time with another bit flipped."""
    draw = random.Random(seed)
    for _ in range(number):
        changed = bytearray(data)
        changed[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        yield bytes(changed)


def told_numbers(pipe: int, least: int = _MOST) -> set[int]:
    """What a child tells until its end, or until it has told this many."""
    text = b""
    while text.count(b"\n") < least and (piece := os.read(pipe, 65_536)):
        text += piece
    return {int(word) for word in text.split(b"\n")[:-1]}


def _faults(store: str, told: set[int]) -> Counter[str]:
    """Counts of what must not happen after a fault."""
    found: Counter[str] = Counter()
    with RecordStore.open(store) as opened:
        read = list(opened.measurements())
        keys = Counter(measurement.key for measurement in read)
        found["acknowledged"] = len(told)
        found["lost"] = sum(f"{number:032x}" not in keys for number in told)
        found["twice"] = sum(count - 1 for count in keys.values())
        found["changed"] = sum(
            measurement != made_measurement(int(measurement.key, 16)) for measurement in read
        )
        found["not opened"] = 0
        found["damaged"] = len(opened.check())
        found["refused"] = int(not opened.add(made_measurement(10**9 + random.randrange(10**9))))
    return found


def killed_writers(store: Callable[[int], str], number: int) -> Counter[str]:
    """Kills writers with SIGKILL at random moments.

    Args:
        store: Name of the store of each writer.
        number: Number of writers.
    """
    draw, found = random.Random(1), Counter({"faults": number})
    told: dict[str, set[int]] = {}
    for index in range(number):
        name = store(index)
        with forked(_write_on(name, index * _MOST)) as (pid, pipe):
            begun = told_numbers(pipe, least=draw.randrange(0, 25))
            time.sleep(draw.uniform(0.0, 0.03))
            _kill(pid)
            told.setdefault(name, set()).update(begun | told_numbers(pipe))
        found += _faults(name, told[name]) if index == number - 1 or store(index + 1) != name else Counter()
    return _with_zeros(found)


def killed_imports(store: str, folder: Path, number: int) -> Counter[str]:
    """Kills imports of a file at random moments and imports it again.

    Args:
        store: Name of the store.
        folder: Folder for the file.
        number: Number of kills.
    """
    draw, found = random.Random(2), Counter({"faults": number})
    table = folder / "table.csv"
    export_measurements(map(made_measurement, range(6000)), table)

    def work(_: int) -> None:
        with RecordStore.open(store) as opened:
            opened.add_many(import_measurements(table))

    for _ in range(number):
        with forked(work) as (pid, _):
            time.sleep(draw.uniform(0.02, 3.0))
            _kill(pid)
    work(0)
    return _with_zeros(found + _faults(store, set(range(6000))))


def disk_full(folder: Path, number: int, seed: int = 3) -> Counter[str]:
    """Lets the disk be full at random byte positions of the store's files."""
    draw, found = random.Random(seed), Counter({"faults": number})
    for index in range(number):
        store, limit = str(folder / f"full-{index}.sqlite"), draw.randrange(1, 400_000)

        def work(pipe: int, store: str = store, limit: int = limit) -> None:
            _limit_files(limit)
            _write_on(store, 0)(pipe)

        found += _faults(store, _told_to_the_end(work))
    return _with_zeros(found)


def disk_full_while_away(server: PostgresServer, number: int) -> Counter[str]:
    """Lets the disk of the client be full at random byte positions while the server is away.

    Args:
        server: A running server; it runs again afterwards.
        number: Number of full disks.
    """
    draw, found = random.Random(7), Counter({"faults": number})
    told: set[int] = set()
    for index in range(number):
        limit = draw.randrange(1, 20_000)

        def work(pipe: int, index: int = index, limit: int = limit) -> None:
            with RecordStore.open(server.url) as opened:
                server.stop()
                _limit_files(limit)
                with patched_patience():
                    _add_all(opened, pipe, range(index * 1000, index * 1000 + 1000))

        told |= _told_to_the_end(work)
        server.start()
    return _with_zeros(found + _faults(server.url, told))


@contextmanager
def patched_patience() -> Iterator[None]:
    """Lets writers give up a server that is away at once, instead of after some seconds."""
    patience_s, record_store._PATIENCE_S = record_store._PATIENCE_S, 0.0
    try:
        yield
    finally:
        record_store._PATIENCE_S = patience_s


def restarted_server(server: PostgresServer, restarts: int, away_s: float = 1.0) -> Counter[str]:
    """Restarts a server under two writers."""
    found = Counter({"faults": restarts})
    num_each = 150 * restarts

    writers = [_write_on(server.url, first, num_each, pause_s=0.005) for first in (0, _MOST)]
    told: set[int] = set()
    with forked(writers[0]) as (one, first), forked(writers[1]) as (two, second):
        told.update(
            told_numbers(first, least=1) | told_numbers(second, least=1)
        )  # both have opened the store
        readers = [
            threading.Thread(target=lambda pipe=pipe: told.update(told_numbers(pipe)))
            for pipe in (first, second)
        ]
        for reader in readers:
            reader.start()
        for _ in range(restarts):
            time.sleep(1.0)
            server.stop()
            time.sleep(away_s)
            server.start()
        for pid in (one, two):
            os.waitpid(pid, 0)
        for reader in readers:
            reader.join()
    wanted = {*range(num_each), *range(_MOST, _MOST + num_each)}
    found["not written"] = len(wanted - told)
    return _with_zeros(found + _faults(server.url, told))


def flipped_bits(folder: Path, number: int) -> Counter[str]:
    """Flips one bit of a store's file at a time; each must be repaired, reported, or be outside all data."""
    found = Counter({"faults": number})
    whole, flipped = folder / "whole.sqlite", folder / "flipped.sqlite"
    wanted = [made_measurement(index) for index in range(200)]
    with RecordStore.open(whole) as store:
        store.add_many(wanted)
    for changed in _with_flipped_bits(whole.read_bytes(), number, seed=4):
        for name in folder.glob("flipped.sqlite*"):
            name.unlink()
        flipped.write_bytes(changed)
        found[_outcome_of_flip(flipped, wanted)] += 1
    shutil.rmtree(folder / "none", ignore_errors=True)
    return _with_zeros(found)


def _outcome_of_flip(path: Path, wanted: list[Measurement]) -> str:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with RecordStore.open(path, create=False) as store:
                read = list(store.measurements())
                counted = store.counts("device", "family")
        except RecordError:
            return "refused with an error"
        is_told = any(issubclass(found.category, StoreWarning) for found in caught)
    by_key = {measurement.key: measurement for measurement in wanted}
    if any(by_key.get(measurement.key) != measurement for measurement in read):
        return "read as another measurement"
    if is_told:
        text = str(next(found.message for found in caught if issubclass(found.category, StoreWarning)))
        return "index repaired and reported" if "made anew" in text else "left out and reported"
    if len(read) < len(wanted):
        return "lost silently"
    if sum(count for _, count in counted) != len(wanted) or len(counted) != 7:
        return "counted wrongly"
    return "outside the data"


def _with_zeros(found: Counter[str]) -> Counter[str]:
    """Keeps counts of nothing, which ``+`` of counters drops."""
    names = (
        ("acknowledged", "lost", "twice", "changed", "damaged", "refused") if "acknowledged" in found else ()
    )
    return Counter({**dict.fromkeys(names, 0), **found})


_SPEED = parse_objectives("speed")
_SPACE = space_of({"parameters": {"num_workers": {"min": 0, "max": 1000}}})
_RECORD = {"result": TrialResult(outcome="done").as_dict(), "is_feasible": True, "source": "sampler"}
_MOST_LOGS = 10_000
_TRIAL_BYTES = 1500


def _opened(folder: Path) -> TrialStore:
    return TrialStore(folder, _SPEED, {}, sampler="random", seed=0)


def _add(store: TrialStore) -> int:
    trial = store.ask()
    values = suggest(trial, _SPACE)
    store.tell(trial, [float(trial.number)], {**_RECORD, "values": values})
    return int(trial.number)


def _journal_faults(folder: Path, told: set[int]) -> Counter[str]:
    store = _opened(folder)
    values = {trial.number: trial.values for trial in store.trials()}
    return Counter(
        {
            "lost": len(told - values.keys()),
            "changed": sum(found != [float(number)] for number, found in values.items()),
            "refused": int(_add(store) in values),
        }
    )


def killed_journals(folder: Path, number: int) -> Counter[str]:
    """Kills writers of one journal at random moments."""
    draw, found, told = random.Random(8), Counter({"faults": number}), set[int]()

    def work(pipe: int) -> None:
        store = _opened(folder)
        for _ in range(_MOST_LOGS):
            os.write(pipe, b"%d\n" % _add(store))

    for _ in range(number):
        with forked(work) as (pid, pipe):
            told |= told_numbers(pipe, least=draw.randrange(0, 5))
            time.sleep(draw.uniform(0.0, 0.05))
            _kill(pid)
            told |= told_numbers(pipe)
        found += _journal_faults(folder, told)
    found["acknowledged"] = len(told)
    return found


def full_journals(folder: Path, number: int) -> Counter[str]:
    """Lets the disk be full at random byte positions of the next trials of one journal."""
    draw, found, told = random.Random(9), Counter({"faults": number}), set[int]()
    for _ in range(number):
        path = folder / "journal.sqlite"
        size = path.stat().st_size if path.exists() else 0
        limit = size + draw.randrange(1, 3 * _TRIAL_BYTES)

        def work(pipe: int, limit: int = limit) -> None:
            _limit_files(limit)
            store = _opened(folder)
            for _ in range(_MOST_LOGS):
                os.write(pipe, b"%d\n" % _add(store))

        told |= _told_to_the_end(work)
        found += _journal_faults(folder, told)
    found["acknowledged"] = len(told)
    return found


def flipped_journal_bits(folder: Path, number: int) -> Counter[str]:
    """Flips one bit of a journal at a time."""
    found = Counter({"faults": number})
    whole = _opened(folder / "whole")
    for _ in range(10):
        _add(whole)
    wanted = {trial.number: (trial.params, trial.values) for trial in whole.trials()}
    flipped = folder / "flipped"
    flipped.mkdir()
    for changed in _with_flipped_bits(whole.path.read_bytes(), number, seed=10):
        for path in flipped.iterdir():
            path.unlink()
        (flipped / "journal.sqlite").write_bytes(changed)
        found[_outcome_of_journal_flip(flipped, wanted)] += 1
    return found


def _outcome_of_journal_flip(folder: Path, wanted: dict[int, Any]) -> str:
    try:
        read = {trial.number: (trial.params, trial.values) for trial in _opened(folder).trials()}
    except (RecordError, FailureError):
        return "refused with an error"
    except Exception as error:
        return f"internal error {type(error).__name__}"
    return "outside the data" if read == wanted else "read as another trial"


class PostgresServer:
    """A server on this machine.

    Args:
        binaries: Folder of ``initdb`` and ``pg_ctl``.
        folder: Folder of its data.
    """

    def __init__(self, binaries: Path, folder: Path) -> None:
        self._binaries, self._folder = binaries, folder
        self._as_user: list[str] = []
        if os.geteuid() == 0:  # the server refuses to run as root
            pwd.getpwnam("postgres")
            shutil.chown(folder, "postgres")
            self._as_user = ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups"]
        self._data, self._port = folder / "data", _free_port()
        self._run("initdb", "-U", "forerun", "--auth=trust", "-E", "UTF8", "--locale=C", "--no-sync")

    @property
    def url(self) -> str:
        """URL of its database."""
        return f"postgresql://forerun@127.0.0.1:{self._port}/postgres"

    def start(self) -> None:
        """Starts the server and waits until it answers."""
        options = f"-p {self._port} -c listen_addresses=127.0.0.1 -c unix_socket_directories={self._folder}"
        self._run("pg_ctl", "-w", "-l", str(self._folder / "log"), "-o", f"{options} -c fsync=off", "start")

    def stop(self) -> None:
        """Stops the server at once, as a crash would."""
        self._run("pg_ctl", "-m", "immediate", "stop")

    def _run(self, program: str, *words: str) -> None:
        command = [*self._as_user, str(self._binaries / program), "-D", str(self._data), *words]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd="/", timeout=120)


@contextmanager
def running_server() -> Iterator[PostgresServer]:
    """A running server with an empty database.

    Raises:
        FailureError: PostgreSQL is not installed.
    """
    binaries = find_binaries()
    if binaries is None:
        raise FailureError("PostgreSQL is not installed; install it with: apt-get install postgresql")
    # Not in a folder that only its owner may enter: the server runs as a user of its own.
    folder = Path(tempfile.mkdtemp(prefix="forerun-postgres-", dir="/tmp"))
    try:
        server = PostgresServer(binaries, folder)
        server.start()
        try:
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def find_binaries() -> Path | None:
    """Folder of PostgreSQL's programs, None where it is not installed."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    if found:
        return found[-1].parent
    path = shutil.which("initdb")
    return Path(path).parent if path else None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
