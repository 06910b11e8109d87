"""The server under load: many clients while models are traced, many requests, and slow connections."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import psutil

from forerun.base.errors import UsageError
from forerun.surface.web.reach import MOST_CONFIGS, config_file

_ADDRESS = re.compile(r"forerun at (http://\S+)/ ")
_MODEL = "cnn:depth=2,base_filters=32"
_EXPENSIVE = ("torchvision:densenet201", "torchvision:efficientnet_v2_l", "torchvision:swin_v2_b")
_DEVICES = ("t4", "l4", "a100-sxm4-40gb")
_PAGE_MIX = (
    ("GET", "/", None),
    ("GET", "/hardware", None),
    ("GET", "/models", None),
    ("GET", "/datasets", None),
    ("GET", "/healthz", None),
    *(("POST", "/predict", {"model": _MODEL, "device": name, "batch_size": 64}) for name in _DEVICES),
    ("POST", "/scale", {"model": _MODEL, "device": "t4", "num_devices": [1, 2, 4, 8]}),
    ("POST", "/plan", {"models": [_MODEL], "devices": ["t4", "l4"], "batch_sizes": [32, 64, 128]}),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A running server: its address and its process."""

    host: str
    port: int
    process: subprocess.Popen[bytes]

    @property
    def memory_bytes(self) -> int:
        """Resident memory of the server alone [bytes]."""
        return int(psutil.Process(self.process.pid).memory_info().rss)

    @property
    def cpu_s(self) -> float:
        """CPU time of the server alone so far [s]."""
        times = psutil.Process(self.process.pid).cpu_times()
        return float(times.user + times.system)


@contextlib.contextmanager
def serving(log: Path, *words: str) -> Iterator[Served]:
    """``forerun serve`` on a free port; ended by SIGTERM."""
    with log.open("w", encoding="utf-8") as errors:
        command = [sys.executable, "-m", "forerun", "serve", "--port", "0", *words]
        process = subprocess.Popen(command, stderr=errors, stdout=subprocess.DEVNULL)
        try:
            found = None
            while found is None and process.poll() is None:
                time.sleep(0.05)
                found = _ADDRESS.search(log.read_text(encoding="utf-8"))
            if found is None:
                raise RuntimeError(f"the server ended: {log.read_text(encoding='utf-8')}")
            address = urlsplit(found[1])
            yield Served(host=str(address.hostname), port=int(address.port or 0), process=process)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            process.wait(timeout=60)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadResult:
    """Result of a load.

    Attributes:
        times_s: Time of each answer to a cheap question [s].
        statuses: Number of answers by status; 0 for a connection that failed.
        expensive: Statuses of the expensive questions that ran meanwhile.
        growth_bytes: Growth of the server's resident memory [bytes].
        total_s: Time of the load [s].
        cpu_s: CPU time of the server alone, without the processes that trace [s].
    """

    times_s: np.ndarray
    statuses: Counter[int]
    expensive: tuple[int, ...]
    growth_bytes: int
    total_s: float
    cpu_s: float

    def p95_s(self) -> float:
        """Time within which 95 % of the cheap questions were answered [s]."""
        return float(np.quantile(self.times_s, 0.95))


def under_load(served: Served, *, num_clients: int, num_requests: int, with_traces: bool) -> LoadResult:
    """Lets clients ask the page's mix of questions, each client one after the other.

    Args:
        served: The server.
        num_clients: Clients at once.
        num_requests: Requests of each client.
        with_traces: True asks about three models meanwhile that must be traced first.
    """
    for question in _PAGE_MIX:  # the page's own questions were asked before
        _ask(served, *question, timeout_s=300.0)
    before_bytes, before_cpu_s = served.memory_bytes, served.cpu_s
    times: list[float] = []
    statuses: Counter[int] = Counter()
    expensive: list[int] = []
    is_over = threading.Event()

    def trace_on(index: int) -> None:
        while not is_over.is_set():
            size = random.randrange(160, 400)
            body = {"model": _EXPENSIVE[index], "device": "t4", "image_size": size}
            expensive.append(_ask(served, "POST", "/predict", body, timeout_s=300.0)[0])

    def client(seed: int) -> None:
        draw = random.Random(seed)
        for _ in range(num_requests):
            status, time_s = _ask(served, *draw.choice(_PAGE_MIX), timeout_s=60.0)
            times.append(time_s)
            statuses[status] += 1

    tracers = [threading.Thread(target=trace_on, args=(index,)) for index in range(3 if with_traces else 0)]
    clients = [threading.Thread(target=client, args=(seed,)) for seed in range(num_clients)]
    began_s = time.monotonic()
    for thread in (*tracers, *clients):
        thread.start()
    for thread in clients:
        thread.join()
    total_s = time.monotonic() - began_s
    is_over.set()
    for thread in tracers:
        thread.join()
    return LoadResult(
        times_s=np.asarray(times),
        statuses=statuses,
        expensive=tuple(expensive),
        growth_bytes=served.memory_bytes - before_bytes,
        total_s=total_s,
        cpu_s=served.cpu_s - before_cpu_s,
    )


def _ask(served: Served, method: str, path: str, body: object, *, timeout_s: float) -> tuple[int, float]:
    """The status of an answer and its time [s]."""
    began_s = time.monotonic()
    try:
        status, _ = _answer(served, method, path, body, timeout_s)
    except (OSError, HTTPException):
        status = 0
    return status, time.monotonic() - began_s


def _answer(
    served: Served, method: str, path: str, body: object, timeout_s: float = 300.0
) -> tuple[int, bytes]:
    """The status and the content of an answer."""
    with contextlib.closing(HTTPConnection(served.host, served.port, timeout=timeout_s)) as connection:
        text = None if body is None else json.dumps(body)
        connection.request(method, path, text, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read()


@contextlib.contextmanager
def busy_processes(number: int) -> Iterator[None]:
    """Other programs that keep the processors busy."""
    found = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for process in found:
            process.kill()
            process.wait()


def killed_servers(folder: Path, number: int) -> Counter[str]:
    """Kills servers at random moments while they are asked; acknowledged is a configuration that has a name.

    Those that may still be kept must be, as they were told, and a new server answers about the last of them.

    Args:
        folder: Working folder; the cache of the servers is in it.
        number: Number of kills.
    """
    draw, found = random.Random(9), Counter[str]()
    names: list[str] = []
    os.environ["FORERUN_CACHE"] = str(folder / "cache")
    for kill in range(number):
        with serving(folder / "log", "--quiet") as served:
            for name in names[-1:]:
                status, _ = _answer(served, "POST", "/predict", {"model": name, "device": "t4"})
                found["lost"] += status == 400
            moment_s = time.monotonic() + draw.uniform(0.0, 3.0)
            while time.monotonic() < moment_s:
                config = {
                    "model_type": "gpt2",
                    "n_layer": 2,
                    "n_embd": 64,
                    "n_head": 2,
                    "vocab_size": 1000 + len(names),
                }
                status, answer = _answer(served, "POST", "/configs", config)
                names += [json.loads(answer)["model"]] * (status == 200)
            family = psutil.Process(served.process.pid).children(recursive=True)
            served.process.kill()
            _, living = psutil.wait_procs(family, timeout=20.0)  # on a full machine their ends take seconds
            found["processes left"] += len(living)
            found["faults"] = kill + 1
            found["lost"] += sum(not _is_kept(name) for name in names[-MOST_CONFIGS:])
    found["acknowledged"] = len(names)
    return found


def _is_kept(name: str) -> bool:
    try:
        content = Path(config_file(name).removeprefix("hf:")).read_bytes()
    except UsageError:
        return False
    return name == f"config:{hashlib.sha256(content).hexdigest()[:16]}"


_BEGINNINGS: Sequence[bytes] = (
    b"",
    b"GET /hea",
    b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 500\r\n\r\n{",
)


_LONGEST_S = 40.0  # any server has given up on half a request by then


def slow_sockets(served: Served, number: int) -> tuple[int, float, float]:
    """Opens connections that begin a request and never finish it.

    Returns:
        Connections that are still open at the end, the time after which the last was closed [s], and the time of a
        cheap question while all were open [s].
    """
    _allow_files(number)
    left = {}
    began_s = time.monotonic()
    for index in range(number):
        opened = socket.create_connection((served.host, served.port), timeout=30)
        opened.sendall(_BEGINNINGS[index % len(_BEGINNINGS)])
        left[opened.fileno()] = opened
    _, cheap_s = _ask(served, "GET", "/healthz", None, timeout_s=60.0)
    poll = select.poll()
    for number_of_file in left:
        poll.register(number_of_file, select.POLLIN | select.POLLHUP)
    last_s = 0.0
    while left and time.monotonic() - began_s < _LONGEST_S:
        for number_of_file, _ in poll.poll(500):
            with contextlib.suppress(OSError):
                if left[number_of_file].recv(65_536):
                    continue
            poll.unregister(number_of_file)
            left.pop(number_of_file).close()
            last_s = time.monotonic() - began_s
    num_left = len(left)
    for opened in left.values():
        opened.close()
    return num_left, last_s, cheap_s


def _allow_files(number: int) -> None:
    if os.name == "posix":
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, number + 1024), hard))
