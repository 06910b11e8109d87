"""Runs a user's command with hooks: passes its output on, watches its processes, and ends them with it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import IO, Any

import psutil

from forerun.base.errors import ScriptError
from forerun.base.isolation import in_worker
from forerun.base.kept import temporary_folder
from forerun.base.process_control import ProcessOption, set_process_option
from forerun.evidence import record_telemetry
from forerun.script.profiling.messages import STARTUP_VARIABLE, STOPPED_STATUS, HookSettings, write_settings
from forerun.script.profiling.recorded import ProcessRecord, read_processes, training_process

_SAMPLE_EVERY_S = 0.25
_KEPT_LINES = 4000
_TAIL_LINES = 3
_LONGEST_TAIL = 300
_LONGEST_LINE = 65_536
"""Progress bars that return to the begin of a line never end it."""
_ENDS = (signal.SIGTERM, signal.SIGHUP)
_STARTUP_FOLDER = Path(__file__).parent / "startup"


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputLine:
    """One line that the command printed.

    Attributes:
        time_s: Time of printing, monotonic clock [s].
        text: The line without its end.
    """

    time_s: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One run of a command.

    Attributes:
        command: Words of the command.
        processes: Records of the command's processes in which hooks were installed, in order of their start.
        outcome: ``done``, ``stopped`` (by the hooks, after the requested steps), ``crashed``, ``interrupted``,
            ``timeout``, ``out of memory`` (above the limit set) or ``ended`` (by the caller).
        status: Exit status; negative for a signal; None if forerun ended the command.
        begin_s: Start, monotonic clock [s].
        end_s: End [s].
        lines: Last lines of the command's output.
        samples: Memory and CPU time of the command's processes over time.
        telemetry: Figures of sensors, see ``measurement.telemetry``.
        gpu_busy: Times at which the GPU was sampled [s], with its busy share; empty without a GPU.
        num_killed: Number of processes that had to be killed at the end.
        interrupted_by: Name of the signal that ended the run, such as ``SIGTERM``; empty without one.
    """

    command: tuple[str, ...]
    processes: tuple[ProcessRecord, ...]
    outcome: str
    status: int | None
    begin_s: float
    end_s: float
    lines: tuple[OutputLine, ...]
    samples: tuple[TreeSample, ...]
    telemetry: dict[str, float]
    gpu_busy: tuple[tuple[float, float], ...] = ()
    num_killed: int = 0
    interrupted_by: str = ""

    @property
    def peak_memory_bytes(self) -> int:
        """Largest memory of all processes together [bytes]."""
        return max((sample.memory_bytes for sample in self.samples), default=0)

    @property
    def training_process(self) -> ProcessRecord | None:
        """The process whose steps represent the run; None without a training step."""
        return training_process(self.processes)

    @property
    def training(self) -> tuple[ProcessRecord, ...]:
        """The processes of a distributed job that trained."""
        return tuple(each for each in self.processes if len(each.steps) and each.rank is not None)

    @property
    def num_ranks(self) -> int:
        """Number of processes that trained."""
        return len(self.training) or 1

    @property
    def said(self) -> str:
        """The last lines of the output as one line."""
        tail = (line.text.strip()[:_LONGEST_TAIL] for line in self.lines[-_TAIL_LINES:])
        return " | ".join(filter(None, tail))


def launch(
    command: Sequence[str],
    settings: HookSettings,
    *,
    echo: IO[str] | None = None,
    timeout_s: float | None = None,
    memory_limit_bytes: float | None = None,
    device_index: str = "cpu",
    environment: dict[str, str] | None = None,
    on_line: Callable[[OutputLine], bool] | None = None,
) -> Launch:
    """Runs a command until it ends or must be ended.

    Args:
        command: Words of the command, from ``check_command``.
        settings: Settings of the hooks; a folder that they name must exist.
        echo: Stream that receives a copy of the output; None for no copy.
        timeout_s: Longest time of the run [s].
        memory_limit_bytes: Largest memory of all processes together, above which they are ended [bytes].
        device_index: Device whose sensors are read.
        environment: Environment variables to set for the command.
        on_line: Called with each line of the output; returns True to end the run.

    Raises:
        ScriptError: The command cannot be started.
    """
    begin_s = time.monotonic()
    with (
        temporary_folder() as scratch,
        record_telemetry(device_index, _SAMPLE_EVERY_S) as recorder,
    ):
        folder = Path(settings.folder or scratch)
        settings_file = write_settings(replace(settings, folder=str(folder), parent_pid=os.getpid()))
        own = dict(environment or {})
        if (
            "num_threads" in settings.knobs
        ):  # the processor's libraries read it when they load, before any hook
            own.setdefault("OMP_NUM_THREADS", str(settings.knobs["num_threads"]))
        process = start_with_hooks(command, settings_file, own)
        run = _Run(process, echo, on_line)
        interrupted_by = ""
        try:
            # A signal that asks to end interrupts as Ctrl-C does, unless the caller's program handles it.
            free = [number for number in _ENDS if signal.getsignal(number) is signal.SIG_DFL]
            with _handling(dict.fromkeys(free, _interrupt)):
                outcome = run.watch(begin_s, timeout_s, memory_limit_bytes)
        except KeyboardInterrupt as stop:
            outcome, interrupted_by = "interrupted", str(stop) or "SIGINT"
        first = signal.SIGINT if outcome == "interrupted" else signal.SIGTERM
        # Nothing, such as a second signal, may stop forerun before the command's last process has ended.
        with _handling(dict.fromkeys((signal.SIGINT, *_ENDS), signal.SIG_IGN)):
            num_killed = end_tree(process.pid, settings_file, first=first)
            status = process.wait()
            run.join()
        end_s = time.monotonic() if outcome else run.end_s
        processes = read_processes(folder)
    return Launch(
        command=tuple(command),
        processes=processes,
        outcome=outcome or _outcome(status, processes),
        status=status if not outcome else None,
        begin_s=begin_s,
        end_s=end_s,
        lines=tuple(run.lines[-_KEPT_LINES:]),
        samples=tuple(run.samples),
        telemetry=recorder.figures,
        gpu_busy=recorder.series("gpu_busy_fraction"),
        num_killed=num_killed,
        interrupted_by=interrupted_by,
    )


def start_with_hooks(
    command: Sequence[str],
    settings_file: Path,
    own: Mapping[str, str],
    output: IO[bytes] | int = subprocess.PIPE,
) -> subprocess.Popen[str]:
    """Starts a command in a session of its own, whose Python processes install hooks at their start.

    Args:
        command: Words of the command.
        settings_file: Settings of the hooks, which also mark the command's processes for ``end_tree``.
        own: Environment variables beside those of this process.
        output: Receiver of all output.

    Raises:
        ScriptError: The command cannot be started.
    """
    path = os.pathsep.join([str(_STARTUP_FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])])
    variables = {**os.environ, **own, "PYTHONPATH": path, STARTUP_VARIABLE: str(settings_file)}
    variables.setdefault("PYTHONUNBUFFERED", "1")
    variables.setdefault("KINETO_LOG_LEVEL", "99")  # the tracer's own remarks are not the script's output
    _children_before[settings_file] = {child.pid for child in psutil.Process().children()}
    # A process whose parent ends, such as a worker of a crashed launcher, comes to this one and not to init, where
    # nothing would find and end it. A terminal sends Ctrl-C to its own session alone, so the command gets it from here.
    set_process_option(ProcessOption.CHILD_SUBREAPER, 1)
    try:
        return subprocess.Popen(
            list(command),
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        raise ScriptError(f"expected to start '{command[0]}', got: {error.strerror}") from error


class _Run:
    """A started command: a thread reads its output while its processes are sampled."""

    def __init__(
        self,
        process: subprocess.Popen[str],
        echo: IO[str] | None,
        on_line: Callable[[OutputLine], bool] | None,
    ) -> None:
        self._process = process
        self._echo, self._on_line = echo, on_line
        self._is_enough = threading.Event()
        self.lines: list[OutputLine] = []
        self.samples: list[TreeSample] = []
        self.end_s = time.monotonic()
        self._reader = threading.Thread(target=self._read, name="output", daemon=True)
        self._reader.start()

    def watch(self, begin_s: float, timeout_s: float | None, limit_bytes: float | None) -> str:
        """Waits for the end; returns the reason to end the command, or nothing if it ended by itself."""
        tree = TreeWatch(self._process.pid)
        while True:
            self.samples.append(tree.sample())
            if limit_bytes is not None and self.samples[-1].memory_bytes > limit_bytes:
                return "out of memory"
            if self._is_enough.is_set():
                return "ended"
            if timeout_s is not None and time.monotonic() - begin_s > timeout_s:
                return "timeout"
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_SAMPLE_EVERY_S)
                self.end_s = time.monotonic()
                return ""

    def join(self) -> None:
        """Waits for the last lines of output."""
        # A daemon that could not be ended might hold the pipe open.
        self._reader.join(timeout=5.0)

    def _read(self) -> None:
        assert self._process.stdout is not None
        # Whoever prints without an end of line gets one.
        for text in iter(partial(self._process.stdout.readline, _LONGEST_LINE), ""):
            line = OutputLine(time_s=time.monotonic(), text=text.rstrip("\n"))
            self.lines.append(line)
            if len(self.lines) > 2 * _KEPT_LINES:
                del self.lines[:_KEPT_LINES]
            if self._echo is not None:
                self._echo.write(f"{line.text}\n")
                self._echo.flush()
            if self._on_line is not None and self._on_line(line):
                self._is_enough.set()


def _outcome(status: int, processes: Sequence[ProcessRecord]) -> str:
    if status == 0:
        return "done"
    # A launcher such as torchrun reports a stopped process as its own failure.
    is_stopped = status == STOPPED_STATUS or any(process.was_stopped for process in processes)
    return "stopped" if is_stopped else "crashed"


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt(signal.Signals(number).name)


@contextlib.contextmanager
def _handling(handlers: Mapping[signal.Signals, Any]) -> Iterator[None]:
    """Handles signals in the main thread, the only one that may set handlers."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: dict[signal.Signals, Any] = {
        number: signal.signal(number, handler) for number, handler in handlers.items()
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


_GRACE_S = 3.0
_children_before: dict[Path, set[int]] = {}
"""Children of this process at the start of a command; later ones in other sessions are orphans of the command."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeSample:
    """One sample of a tree of processes.

    Attributes:
        time_s: Time of the sample, monotonic clock [s].
        memory_bytes: Memory of all processes, with shared memory counted once [bytes].
        cpu_s: CPU time of all processes so far, ended ones included [s].
    """

    time_s: float
    memory_bytes: int
    cpu_s: float


@dataclass(slots=True)
class TreeWatch:
    """Samples a process and its descendants; keeps the CPU time of ended ones.

    Attributes:
        pid: Process at the root of the tree.
    """

    pid: int
    _cpu_s: dict[int, float] = field(default_factory=dict)

    def sample(self) -> TreeSample:
        """Samples all processes of the tree now."""
        memory_bytes = 0
        for process in _tree(self.pid):
            with contextlib.suppress(psutil.Error, OSError):
                times = process.cpu_times()
                self._cpu_s[process.pid] = times.user + times.system
                memory_bytes += _memory_bytes(process)
        return TreeSample(
            time_s=time.monotonic(),
            memory_bytes=memory_bytes,
            cpu_s=sum(self._cpu_s.values()),
        )


def _tree(pid: int) -> list[psutil.Process]:
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.Error:
        return []


def _memory_bytes(process: psutil.Process) -> int:
    """Proportional set size; resident size if the system does not report it."""
    try:
        text = Path(f"/proc/{process.pid}/smaps_rollup").read_text(encoding="ascii")
    except OSError:
        return int(process.memory_info().rss)
    return next((int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Pss:")), 0)


def started_by(settings_file: Path) -> list[psutil.Process]:
    """All processes of a run: those that inherited its settings, and orphans, which this process has adopted."""
    mark = f"{STARTUP_VARIABLE}={settings_file}".encode()
    found = _adopted(_children_before[settings_file]) if settings_file in _children_before else []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            variables = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
            if process.pid != os.getpid() and mark in variables:
                found.append(process)
    return found


def _adopted(before: set[int]) -> list[psutil.Process]:
    """Children of this process in other sessions, but for those that were there before, with their own children."""
    found: list[psutil.Process] = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error, OSError, AttributeError):  # other systems have no sessions
            if child.pid not in before and os.getsid(child.pid) != os.getsid(0):
                found += [child, *child.children(recursive=True)]
    return found


def end_tree(pid: int, settings_file: Path, *, first: signal.Signals = signal.SIGTERM) -> int:
    """Ends a command and all processes it started: a signal, some seconds, then SIGKILL; returns the number killed."""
    processes = {process.pid: process for process in (*_tree(pid), *started_by(settings_file))}
    for process in processes.values():
        with contextlib.suppress(psutil.Error):
            process.send_signal(first)
    _, alive = psutil.wait_procs(list(processes.values()), timeout=_GRACE_S)
    # Processes that started in the meantime, or ignored the signal.
    rest = {process.pid: process for process in (*alive, *started_by(settings_file))}
    for process in rest.values():
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(list(rest.values()), timeout=_GRACE_S)
    _children_before.pop(settings_file, None)
    if not _children_before and not in_worker():
        set_process_option(ProcessOption.CHILD_SUBREAPER, 0)
    return len(rest)
