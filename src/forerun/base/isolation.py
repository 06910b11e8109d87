"""Work in a process of its own: code that exits, crashes, hangs or prints cannot harm the process that asks for it.

The child has its own standard output (its output goes to stderr), a time limit and a memory limit. It stays for the
next call; a child that ended is replaced. Where this process is small and has one thread, the child is forked from
it, which costs nothing; otherwise it is forked from a server that has loaded the libraries (``forkserver``).
"""

from __future__ import annotations

import atexit
import contextlib
import gc

# Before the exit function below: it must end the children before the library's own, which runs later, waits for them.
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from forerun.base import errors, process_control
from forerun.base.errors import ForerunError, IsolationError
from forerun.base.process_control import ProcessOption, set_process_option

_EXIT_TIMEOUT_S = 2.0
_CPU_LOOK_S = 0.5
"""Shortest time between two looks at what a child has spent on processors [s]."""
MOST_TIMES_THE_LIMIT = 10.0
"""Longest time of a limit that counts processors, over the limit, by the clock on the wall."""
_LEAST_CPU_S = 0.01
"""Work that spends less between two looks waits, for a network or a lock, and is not slow [s]: a tick of the clock."""

_parent: Connection | None = None
"""Inside a child: the pipe to the process that asks."""


def in_worker() -> bool:
    """True inside a ``Child``."""
    return _parent is not None


def tell(message: Any) -> None:
    """Sends a message to the process that waits for the work of this child; does nothing outside a child."""
    if _parent is not None:
        _parent.send(_Message(message))


class EndedError(Exception):
    """A child ended before its answer.

    Attributes:
        exit_code: Exit status, negative for a signal; None if the child closed its connection and lives on.
        number: Position of the child among those that were waited for.
    """

    def __init__(self, exit_code: int | None, number: int = 0) -> None:
        super().__init__(f"the process ended with exit status {exit_code}")
        self.exit_code, self.number = exit_code, number

    @property
    def signal_name(self) -> str:
        """The signal that ended it, such as ``SIGKILL``; empty if it left by itself."""
        if self.exit_code is None or self.exit_code >= 0:
            return ""
        try:
            return signal.Signals(-self.exit_code).name
        except ValueError:
            return f"signal {-self.exit_code}"


class LateError(Exception):
    """No answer came in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The answer of a child.

    Attributes:
        result: Result of the work; None if it raised an error.
        error: Class of the error that the work raised; empty without one.
        text: Text of that error.
        trace: Its traceback.
    """

    result: Any = None
    error: str = ""
    text: str = ""
    trace: str = ""


@dataclass(frozen=True, slots=True)
class _Message:
    """Something that the work says before it is done."""

    content: Any


class Child:
    """A process that works on request, and of which nothing stays after ``close``.

    Args:
        context: Way to start it, from ``multiprocessing``.
        environment: Its environment variables; None for those of the process from which it is made.
        memory_limit_bytes: Memory that it may take beyond what it has at its start [bytes].
        niceness: Steps by which it gives way to other processes, 0 to 19.
        name: Its name in lists of processes.
    """

    def __init__(
        self,
        context: Any,
        *,
        environment: Mapping[str, str] | None = None,
        memory_limit_bytes: float | None = None,
        niceness: int = 0,
        name: str = "forerun-worker",
    ) -> None:
        self._end, other = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(other, memory_limit_bytes, environment, niceness), name=name
        )
        with _without_main(), warnings.catch_warnings():
            # The threads of NumPy's library survive a fork.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._process.start()
        other.close()

    @property
    def pid(self) -> int:
        """Number of the process."""
        return int(self._process.pid)

    @property
    def is_alive(self) -> bool:
        """True until it has ended."""
        return bool(self._process.is_alive())

    def begin(self, work: Callable[..., Any], *arguments: Any) -> None:
        """Hands over a function of a module with plain arguments; ``replies`` waits for the answer."""
        with contextlib.suppress(OSError):  # its end is reported by ``received``
            self._end.send((_folder(), work, arguments))

    def ask(
        self,
        work: Callable[..., Any],
        *arguments: Any,
        timeout_s: float,
        on_message: Callable[[Any], None] | None = None,
        counts_cpu: bool = False,
    ) -> Reply:
        """The answer to a function of a module with plain arguments.

        Raises:
            EndedError, LateError: There is none; see ``replies``.
        """
        self.begin(work, *arguments)
        found = replies([self], timeout_s=timeout_s, on_message=on_message, counts_cpu=counts_cpu)
        return next(reply for _, reply in found)

    def cpu_s(self) -> float:
        """Time that it and the processes it started have spent on processors [s]; 0 where it has ended."""
        import psutil

        total_s = 0.0
        with contextlib.suppress(psutil.Error):
            own = psutil.Process(self.pid)
            for process in (own, *own.children(recursive=True)):
                times = process.cpu_times()
                total_s += times.user + times.system
        return total_s

    def signs(self) -> tuple[Any, ...]:
        """The object that becomes ready when the child has said something or has ended."""
        return self._end, self._process.sentinel

    def received(self) -> Any:
        """The next thing that it said.

        Raises:
            EndedError: It ended, or what it sent cannot be read.
        """
        try:
            # What it said before its end is still in the pipe; but a process that it left behind may hold the other
            # end open, so that reading an empty pipe would wait for that one.
            if self._end.poll():
                return self._end.recv()
        except (EOFError, OSError):
            pass
        except Exception:  # the code may have written into the pipe: whatever came cannot be read
            raise EndedError(None) from None
        self._process.join(_EXIT_TIMEOUT_S)
        raise EndedError(self._process.exitcode)

    def close(self) -> None:
        """Ends it with all processes that it started."""
        _end_all(self._process)
        self._end.close()


class TimeLimit:
    """A time limit of work, which other programs may keep from the processors.

    Args:
        limit_s: The limit [s].
        spent_s: Gives the time that the work has spent on processors. Work gets more time until it has spent the limit
            on them, waits for something else, or has had ten times the limit; None counts the time of the clock.
    """

    def __init__(self, limit_s: float, spent_s: Callable[[], float] | None = None) -> None:
        now_s = time.monotonic()
        self._spent_s = spent_s
        self._look_s, self._end_s = now_s + limit_s, now_s + MOST_TIMES_THE_LIMIT * limit_s
        self._last_s = spent_s() if spent_s is not None else 0.0
        self._most_s = self._last_s + limit_s

    @property
    def left_s(self) -> float:
        """Time until ``is_over`` can be true [s]."""
        return max(0.0, self._look_s - time.monotonic())

    def is_over(self) -> bool:
        """True if the work may go on no longer."""
        now_s = time.monotonic()
        if now_s < self._look_s:
            return False
        if self._spent_s is None or now_s >= self._end_s:
            return True
        spent_s = self._spent_s()
        if spent_s >= self._most_s or spent_s - self._last_s < _LEAST_CPU_S:
            return True
        self._last_s = spent_s
        self._look_s = min(self._end_s, now_s + max(_CPU_LOOK_S, self._most_s - spent_s))
        return False


def replies(
    children: Sequence[Child],
    *,
    timeout_s: float | None = None,
    on_message: Callable[[Any], None] | None = None,
    counts_cpu: bool = False,
) -> Iterator[tuple[int, Reply]]:
    """Answers to work that has begun, each with the number of its child, in the order in which they come.

    Args:
        children: Children that work.
        timeout_s: Longest time until all have answered [s]; None without a limit.
        on_message: Called with what the work gives to ``tell``.
        counts_cpu: Whether work that other programs keep from the processors gets more time, until it has spent
            ``timeout_s`` on them or waits for something else.

    Raises:
        EndedError: A child ended before its answer.
        LateError: The time is over.
    """
    waiting = dict(enumerate(children))
    limit = None
    if timeout_s is not None:
        # Child.begin may have let it run already; what that spends is next to nothing.
        limit = TimeLimit(
            timeout_s, (lambda: sum(child.cpu_s() for child in children)) if counts_cpu else None
        )
    while waiting:
        left_s = None if limit is None else limit.left_s
        ready = wait([sign for child in waiting.values() for sign in child.signs()], timeout=left_s)
        if not ready:
            if limit is not None and limit.is_over():
                raise LateError(f"not finished after {timeout_s:g} s")
            continue
        for number, child in list(waiting.items()):
            if not any(sign in ready for sign in child.signs()):
                continue
            try:
                said = child.received()
            except EndedError as ended:
                raise EndedError(ended.exit_code, number) from None
            if not isinstance(said, _Message):
                del waiting[number]
                yield number, said
            elif on_message is not None:
                on_message(said.content)


class Worker:
    """Runs functions in a child process that stays for the next call; use it from one thread at a time.

    Args:
        memory_limit_bytes: Memory that the calls may take beyond the memory of the process at its start, asked whenever
            one starts [bytes].
        preload: Modules that a fork server loads before it forks.
        may_fork: False never forks this process, for one that has threads.
        niceness: Steps by which the child gives way to other processes, 0 to 19.
        environment: Variables that the child has beside those of this process; with some it is a new interpreter,
            because libraries read theirs once.
    """

    def __init__(
        self,
        *,
        memory_limit_bytes: Callable[[], float] | None = None,
        preload: Sequence[str] = (),
        may_fork: bool = True,
        niceness: int = 0,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._ask_limit_bytes = memory_limit_bytes
        self._limit_bytes: float | None = None
        self._preload = list(preload)
        self._may_fork = may_fork
        self._niceness = niceness
        self._environment = dict(environment or {})
        self._child: Child | None = None
        self._num_answered = 0
        atexit.register(self.close)

    @property
    def pid(self) -> int | None:
        """Number of the child's process, None while there is none."""
        return None if self._child is None else self._child.pid

    def call(self, work: Callable[..., Any], *arguments: Any, what: str, timeout_s: float) -> Any:
        """The result of ``work(*arguments)``, made in the child.

        Args:
            work: A function of a module.
            arguments: Plain values and dataclasses.
            what: The work in words, for messages.
            timeout_s: Longest time of the call [s].

        Raises:
            ForerunError: The work raised it.
            IsolationError: The child ended, took too long or needed too much memory, or the work raised an
                exception of another kind.
        """
        was_used = self._num_answered > 0
        try:
            try:
                reply = self._asked(work, arguments, what, timeout_s)
            except EndedError:
                if not was_used:
                    raise
                # The work before may have left something behind: ask a fresh process once.
                reply = self._asked(work, arguments, what, timeout_s)
        except EndedError as ended:
            words = _end_in_words(ended, self._limit_bytes)
            raise IsolationError(f"{what}: the process {words}") from None
        self._num_answered += 1
        if not reply.error:
            return reply.result
        is_strange = reply.error == IsolationError.__name__
        error = error_from(reply.error, f"{what}: {reply.text}" if is_strange else reply.text)
        error.add_note(reply.trace)
        raise error

    def _asked(
        self, work: Callable[..., Any], arguments: tuple[Any, ...], what: str, timeout_s: float
    ) -> Reply:
        try:
            return self._started().ask(work, *arguments, timeout_s=timeout_s, counts_cpu=True)
        except LateError:
            self.close()
            raise IsolationError(
                f"{what} took longer than {timeout_s:g} s, the time limit; give more with --timeout, or make the "
                "model smaller"
            ) from None
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends the child with all processes that it started."""
        child, self._child = self._child, None
        self._num_answered = 0
        if child is not None:
            child.close()

    def _started(self) -> Child:
        if self._child is not None and self._child.is_alive:
            return self._child
        self.close()
        context = self._context()
        is_copy = context.get_start_method() == "fork"
        self._limit_bytes = self._ask_limit_bytes() if self._ask_limit_bytes else None
        self._child = Child(
            context,
            environment=None if is_copy else {**os.environ, **self._environment},
            memory_limit_bytes=self._limit_bytes,
            niceness=self._niceness,
        )
        return self._child

    def _context(self) -> Any:
        if self._environment:
            return multiprocessing.get_context("spawn")
        # A fork copies one thread, and the locks that the others held; tensor libraries start threads.
        is_small = threading.active_count() == 1 and not sys.modules.keys() & {"torch", "tensorflow", "jax"}
        if "fork" in multiprocessing.get_all_start_methods() and self._may_fork and is_small:
            return multiprocessing.get_context("fork")
        return fork_server(self._preload)


def fork_server(preload: Iterable[str], variables: Mapping[str, str] | None = None) -> Any:
    """The context of a running fork server, or of new interpreters where the system has none.

    Args:
        preload: Modules that a new server loads before it forks.
        variables: Environment variables of a new server.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    from multiprocessing import forkserver

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([process_control.MODULE])
    # One thread for OpenBLAS, so that the server has no other thread when it forks.
    environment = {
        **(variables or {}),
        "OPENBLAS_NUM_THREADS": "1",
        **process_control.preload_variables(preload),
    }
    with patched_environment(environment), _without_main():
        forkserver.ensure_running()
    return context


def _folder() -> Path | None:
    """The working folder of now, to which paths of a question refer; None if it was removed."""
    try:
        return Path.cwd()
    except OSError:
        return None


def _end_in_words(ended: EndedError, memory_limit_bytes: float | None) -> str:
    hint = "run it with --in-process to see its own words"
    name = ended.signal_name
    if ended.exit_code is None:
        return f"closed its connection, or sent something that cannot be read; {hint}"
    if not name:
        return f"was ended by the model's own code, with exit status {ended.exit_code}; {hint}"
    if name in ("SIGKILL", "SIGABRT", "SIGSEGV", "SIGBUS") and memory_limit_bytes is not None:
        hint = f"it may have reached its memory limit of {memory_limit_bytes / 1e9:.1f} GB; {hint}"
    return f"was ended by {name}; {hint}"


def error_from(kind: str, message: str) -> ForerunError:
    """An error of this package that another process named; an ``IsolationError`` for any other name."""
    found = getattr(errors, kind, IsolationError)
    error: ForerunError = found.__new__(found)
    Exception.__init__(error, message)  # some kinds make their message from other arguments
    return error


def _end_all(child: Any) -> None:
    """Ends the child and its descendants, those that left its process group included."""
    import psutil

    found = []
    with contextlib.suppress(psutil.Error):
        # Before anything is ended: afterwards nobody could say whose children they were.
        found = psutil.Process(child.pid).children(recursive=True)
    if hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
    child.kill()
    for process in found:
        with contextlib.suppress(psutil.Error):
            process.kill()
    child.join()
    child.close()


def _serve(
    end: Connection, memory_limit_bytes: float | None, environment: Mapping[str, str] | None, niceness: int
) -> None:
    """The child's loop: calls arrive, answers go back; it ends with its parent."""
    global _parent
    _parent = end
    _leave_the_terminal()
    _end_with_parent()
    if environment is not None:
        os.environ.clear()
        os.environ.update(environment)
    if niceness and hasattr(os, "nice"):
        os.nice(niceness)
    limit_memory(memory_limit_bytes)
    gc.freeze()  # objects of the parent must not be finalised here
    own_pid = os.getpid()
    while True:
        try:
            folder, work, arguments = end.recv()
        except (EOFError, OSError):
            os._exit(0)
        if folder is not None:
            with contextlib.suppress(OSError):  # it may be gone by now
                os.chdir(folder)
        answer = _answer_of(work, arguments)
        if os.getpid() != own_pid:  # the code forked, and the copy has nothing to answer
            os._exit(0)
        try:
            with unlimited_memory():
                end.send(answer)
        except (OSError, ValueError):
            os._exit(1)


def _answer_of(work: Callable[..., Any], arguments: tuple[Any, ...]) -> Reply:
    try:
        result = work(*arguments)
        with unlimited_memory():
            return Reply(result=result)
    except BaseException as error:  # SystemExit and KeyboardInterrupt of the code included
        with unlimited_memory():
            name, text = _named(error)
            return Reply(error=name, text=text, trace=traceback.format_exc())


def _named(error: BaseException) -> tuple[str, str]:
    """Kind and text of the error that the parent raises."""
    if isinstance(error, ForerunError):
        return type(error).__name__, str(error)
    if isinstance(error, MemoryError):
        text = "the model needs more memory than the process that builds it may take; end other programs, or use less"
        return IsolationError.__name__, text
    lines = str(error).strip().splitlines() or [""]
    return IsolationError.__name__, f"{type(error).__name__}: {lines[0][:300]}"


def _leave_the_terminal() -> None:
    """Starts a process group without input, so that Ctrl-C reaches the parent alone; stdout is the parent's."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in ("SIGTERM", "SIGHUP"):
        if hasattr(signal, number):
            signal.signal(getattr(signal, number), signal.SIG_DFL)
    if hasattr(os, "setsid"):
        with contextlib.suppress(OSError):
            os.setsid()
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    # What the model's code prints must not get into the answer of the command.
    os.dup2(2, 1)
    with contextlib.suppress(Exception):
        sys.stdout = sys.stderr


def _end_with_parent() -> None:
    """Ends this process group when the parent ends, in whatever way, and adopts the group's orphans.

    The kernel's own signal (``PR_SET_PDEATHSIG``) reports the death of the fork server, which lives as long as any of
    its children; the pipe to the parent reports the death of the parent.
    """
    set_process_option(ProcessOption.PARENT_DEATH_SIGNAL, signal.SIGKILL)
    set_process_option(ProcessOption.CHILD_SUBREAPER, 1)
    parent = multiprocessing.parent_process()

    def watch() -> None:
        if parent is not None:
            parent.join()
        if hasattr(os, "killpg"):
            os.killpg(0, signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=watch, name="watchdog", daemon=True).start()


def limit_memory(limit_bytes: float | None) -> None:
    """Limits private memory (``RLIMIT_DATA``), counted on top of what this process has now.

    ``RLIMIT_AS`` would count the gigabytes of address space that a framework reserves and never touches.
    """
    if limit_bytes is None or sys.platform != "linux":
        return
    import resource

    status = Path("/proc/self/status").read_text(encoding="utf-8")
    (used_kib,) = (line.split()[1] for line in status.splitlines() if line.startswith("VmData:"))
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    wanted_bytes = int(used_kib) * 1024 + int(limit_bytes)
    soft = wanted_bytes if hard == resource.RLIM_INFINITY else min(wanted_bytes, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


@contextlib.contextmanager
def unlimited_memory() -> Iterator[None]:
    """Lifts the limit of ``limit_memory`` for a while, so that a process without memory can still report it."""
    if sys.platform != "linux":
        yield
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


@contextlib.contextmanager
def patched_environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets environment variables for a while."""
    saved = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in saved.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """Hides the user's script, which ``multiprocessing`` would import again in every child without need."""
    script = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = script
