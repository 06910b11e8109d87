"""``forerun.capture``: the training step of a script that nobody edited."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from forerun.base.answers import from_plain
from forerun.base.errors import MissingExtraError, ScriptError, TraceError
from forerun.base.isolation import TimeLimit
from forerun.base.kept import cache_folder, temporary_folder
from forerun.graph.affine import join_graphs
from forerun.graph.captured import Capture, CaptureFacts
from forerun.graph.file import read_graph
from forerun.graph.graph import Graph
from forerun.question.model import CAPTURE_PREFIX
from forerun.script.capturing.isolation import GUARDED_FILE
from forerun.script.capturing.pauses import PAUSES_FILE
from forerun.script.capturing.start import LATE_FILE
from forerun.script.command_words import (
    PythonCommand,
    is_python,
    parse_command,
    script_place,
    with_batch_size,
)
from forerun.script.patching import is_of_script, tables
from forerun.script.profiling.launch import TreeWatch, end_tree, start_with_hooks
from forerun.script.profiling.messages import CAPTURE_HOOKS, CaptureSettings, FileAccess, write_settings

DEFAULT_TIMEOUT_S = 600.0

_POLL_S = 0.02
_ERROR_LINE = re.compile(
    r"^(?:[\w.]*\.)?(\w*(?:Error|Exception|Interrupt|Exit|Warning|Stop\w*|OutOfMemory\w*))(?::|$)"
)
_TAIL_BYTES = 200_000
_MOST_OUTPUT_BYTES = 1 << 28
"""Output of a run, which is kept on a disk until its end [bytes]."""
_UNKNOWN_OPERATION = re.compile(
    r"Could not run '([\w:.]+)'|([\w]+::[\w.]+): attempted to run this operator with Meta"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    """The end of one process.

    Attributes:
        graph: The captured graph; None if there is none.
        document: Facts and options of the script.
        failure: The reason in words; empty if a graph was captured.
        is_final: Whether another way of capturing would fail as well.
        guarded: Reason why the script had no copy-on-write view of files; empty if it had one, or none was wanted.
    """

    graph: Graph | None = None
    document: Any = None
    failure: str = ""
    is_final: bool = False
    guarded: str = ""


def capture(
    command: Sequence[str], *, timeout_s: float = DEFAULT_TIMEOUT_S, unsafe_files: bool = False
) -> Capture:
    """Captures the training step of a command, without a GPU and without an edit.

    The script's own code runs, in a process of its own, until its third step: without network, and over a
    copy-on-write view of all files, so that it changes none. Where the system has no such view, what would change a
    file is redirected or refused, and a note says so. See docs/methods/script-capture.md.

    Args:
        command: Words of the command, such as ``["python", "train.py", "--batch-size", "64"]``.
        timeout_s: Longest time of one process [s].
        unsafe_files: Whether the script sees, and may change, the files themselves.

    Raises:
        UsageError: There is no command, or no such script.
        FailureError: It is no command of Python, or the script failed, ended too early, or cannot be captured.

    Example:
        >>> import forerun
        >>> found = forerun.capture(["python", "train.py"])  # doctest: +SKIP
        >>> found.save("graph.forerun")  # doctest: +SKIP
        >>> forerun.predict("capture:graph.forerun", device="a100-sxm4-80gb")  # doctest: +SKIP
    """
    parsed = parse_command(command)
    files: FileAccess = "unsafe" if unsafe_files else "view"
    with temporary_folder() as folder, ScriptServer(parsed, Path(folder), timeout_s, files) as server:
        return captured_by(parsed, server)


def captured_model(
    command: Sequence[str], *, timeout_s: float = DEFAULT_TIMEOUT_S, unsafe_files: bool = False
) -> str:
    """Captures a command into the cache folder, and names the captured model as ``capture:FILE``.

    Raises:
        UsageError, FailureError: As in ``capture``.
    """
    found = capture(command, timeout_s=timeout_s, unsafe_files=unsafe_files)
    digest = hashlib.sha256(json.dumps([str(Path.cwd()), *command]).encode()).hexdigest()[:16]
    return f"{CAPTURE_PREFIX}{found.save(cache_folder() / 'captures' / f'{digest}.forerun')}"


def captured_by(parsed: PythonCommand, server: ScriptServer) -> Capture:
    """The capture of a command by a server that has started it; errors as in ``capture``.

    The process finds a GPU that computes nothing. If the script does not use it, or fails on it, the script is recorded
    on the processor, where it computes. A second process with another batch size makes the graph affine in the batch.
    """
    pretended = server.run(pretends=True)
    outcome = pretended
    if pretended.graph is None and not pretended.is_final:
        outcome = server.run(pretends=False)
    if "No module named 'torch'" in outcome.failure:
        raise MissingExtraError(f"the capture of {_short(parsed)}", "torch")
    if outcome.graph is None:
        kind = TraceError if outcome.is_final else ScriptError
        why = outcome.failure
        if outcome is not pretended and pretended.failure not in (_NO_DEVICE, why):
            needs_gpu = "NVIDIA" in why or "CUDA" in why
            why = pretended.failure + ("" if needs_gpu else f"; and on the processor {why}")
        if outcome.guarded and "denied" in why:
            why += f" ({_guarded_note(outcome.guarded)})"
        raise kind(f"{_short(parsed)} cannot be captured: {why}")
    facts = from_plain(CaptureFacts, {**outcome.document["facts"], "command": parsed.asked})
    notes = list(facts.not_captured)
    if facts.way == "recorded" and pretended.failure != _NO_DEVICE:
        notes.append(f"recorded on the processor, because on a pretended GPU it failed: {pretended.failure}")
    if outcome.guarded:
        notes.append(_guarded_note(outcome.guarded))
    graph, more = _for_any_batch(parsed, outcome, facts, server)
    if facts.loader is None:
        more = [*more, "the making of batches: there is no DataLoader whose cost could be measured"]
    if facts.optimizer_implementation == "fused":
        from forerun.tracing.optimizers import fuse_optimizer

        graph = fuse_optimizer(graph)
    return Capture(graph=graph, facts=replace(facts, not_captured=(*notes, *more)))


_NO_DEVICE = "it does not use a GPU"


def _guarded_note(reason: str) -> str:
    return (
        f"changes to the user's files: there is no copy-on-write view of them here ({reason}), so what the script "
        "writes through Python was redirected and other changes were refused; --unsafe-files lets it change them"
    )


def _for_any_batch(
    command: PythonCommand, outcome: _Outcome, facts: CaptureFacts, server: ScriptServer
) -> tuple[Graph, list[str]]:
    """The graph joined with that of a second capture at another batch size, if both hold the same operations."""
    assert outcome.graph is not None
    size = facts.batch_size
    # The smaller size costs less to record, but a batch of one takes other ways in a model, such as squeezed axes.
    other = size // 2 if size >= 4 else 2 * size
    changed = with_batch_size(command, size, other, outcome.document)
    pretends = facts.way == "pretended"
    again = None
    if changed is not None:
        again = server.run(pretends=pretends, words=changed.words)
    if (
        again is None or again.graph is None or again.graph.only_batch_size != other
    ) and facts.loader is not None:
        again = server.run(pretends=pretends, batch=(size, other))
    if again is None:
        return outcome.graph, [f"other batch sizes than {size}: its batch size has no argument and no loader"]
    if again.graph is None:
        return outcome.graph, [
            f"other batch sizes than {size}: a second capture at batch size {other} failed: {again.failure}"
        ]
    joined = join_graphs(outcome.graph, again.graph) if again.graph.only_batch_size == other else None
    if joined is not None:
        return joined, []
    return outcome.graph, [f"other batch sizes than {size}: its operations depend on the batch size"]


def _short(command: PythonCommand) -> str:
    text = " ".join(command.asked)
    return f"'{text if len(text) <= 60 else text[:57] + '...'}'"


class ScriptServer:
    """A process that has started the command's Python, and runs the script in a copy of itself for each request.

    Args:
        command: The command.
        folder: Scratch folder.
        timeout_s: Longest time of one run [s].
        files: Way in which the script sees files.
    """

    def __init__(
        self, command: PythonCommand, folder: Path, timeout_s: float, files: FileAccess = "view"
    ) -> None:
        self._command, self._folder, self._timeout_s, self._files = command, folder, timeout_s, files
        self._num_requests = 0
        self._settings_file = folder / "settings.json"

    def __enter__(self) -> ScriptServer:
        self._output = (self._folder / "output").open("wb")
        own = _variables(self._command, self._folder)
        self._process = start_with_hooks(self._command.words, self._settings_file, own, self._output)
        return self

    def __exit__(self, *args: object) -> None:
        end_tree(self._process.pid, self._settings_file, first=signal.SIGKILL)
        self._process.wait()
        self._output.close()

    def run(
        self, *, pretends: bool, words: Sequence[str] | None = None, batch: tuple[int, int] | None = None
    ) -> _Outcome:
        """One run of the script.

        Args:
            pretends: Whether a GPU is pretended.
            words: The command with other arguments; None for its own.
            batch: Batch size of loaders to replace, and its replacement.
        """
        folder = self._folder / str(self._num_requests)
        self._num_requests += 1
        folder.mkdir()
        same = self._command.words
        # Behind the script's name, or the module's.
        first = script_place(same) + 1 if is_python(same[0]) else 1
        settings = CaptureSettings(
            folder=str(folder),
            arguments=None if words is None else list(words[first:]),
            pretends=pretends,
            batch_from=batch[0] if batch else None,
            batch_to=batch[1] if batch else None,
            world_size=self._command.world_size,
            files=self._files,
            timeout_s=self._timeout_s,
        )
        write_settings(settings)
        status = self._wait(folder)
        if status is None:  # too late: nothing of it goes on
            end_tree(self._process.pid, self._settings_file, first=signal.SIGKILL)
        outcome = _outcome(folder, status, self._timeout_s, pretends=pretends)
        with contextlib.suppress(FileNotFoundError):
            return replace(outcome, guarded=(folder / GUARDED_FILE).read_text(encoding="utf-8"))
        return outcome

    def _wait(self, folder: Path) -> int | None:
        """Exit status of a run; None if it took too long, or printed too much."""
        tree = TreeWatch(self._process.pid)
        limit = TimeLimit(self._timeout_s, lambda: tree.sample().cpu_s)
        while not limit.is_over() and not _has_printed_too_much(folder):
            with contextlib.suppress(OSError, ValueError):
                return int((folder / "status").read_text(encoding="ascii"))
            status = self._process.poll()
            if status is not None:
                return status
            time.sleep(_POLL_S)
        return None


def _variables(command: PythonCommand, folder: Path) -> dict[str, str]:
    """Variables of the captured command: no network, no driver, its own scratch folder, the first of its processes."""
    scratch, programs = folder / "tmp", folder / "bin"
    scratch.mkdir()
    programs.mkdir()
    for name, answers in tables()["programs"].items():
        (programs / name).write_text(f"#!/bin/sh\n{answers}\n", encoding="utf-8")
        (programs / name).chmod(0o755)
    own = {
        **command.variables,
        **tables()["environment"],
        "PATH": os.pathsep.join([str(programs), os.environ.get("PATH", "")]),
        "FORERUN_HOOKS": CAPTURE_HOOKS,
        "FORERUN_CAPTURED_FOR": str(os.getpid()),
        "TMPDIR": str(scratch),
        "HF_DATASETS_CACHE": str(scratch / "datasets"),
    }
    if command.is_launched:
        own |= {
            **tables()["launched"],
            "WORLD_SIZE": str(command.world_size),
            "LOCAL_WORLD_SIZE": str(command.devices_per_node),
        }
    return own


def _outcome(folder: Path, status: int | None, timeout_s: float, *, pretends: bool) -> _Outcome:
    if (folder / "result.json").exists():
        document = json.loads((folder / "result.json").read_text(encoding="utf-8"))
        with contextlib.suppress(FileNotFoundError):
            document["facts"] |= json.loads((folder / PAUSES_FILE).read_text(encoding="utf-8"))
        graph = read_graph(folder / "graph.npz")
        if graph is not None:
            return _Outcome(graph=graph, document=document)
    if not (folder / "output").exists():
        return _for_good(
            "it ended without running Python's start-up (python -S, -I and -E cannot be captured), or started "
            "another program; name the Python command itself"
        )
    ends: list[dict[str, Any]] = []
    with contextlib.suppress(OSError):
        ends = [json.loads(line) for line in (folder / "end.json").read_text(encoding="utf-8").splitlines()]
    steps = max((end["num_steps"] for end in ends), default=0)
    errors = [end for end in ends if end["way"] == "error"]
    said = errors[-1]["text"] if errors else _last_error(folder)
    if errors and errors[-1]["place"]:
        said += f" ({errors[-1]['place']})"
    # A process that a signal ended or stopped did not say how far it had come.
    done = "" if not ends else f" after {steps} steps" if steps != 1 else " after 1 step"
    ways = {end["way"] for end in ends}
    for end in ends:
        if refusal := end.get("refusal"):
            place = end["place"]
            return _Outcome(
                failure=refusal + (f" ({place})" if place not in refusal else ""),
                is_final=not end.get("needs_values"),
            )
    if "no device" in ways:
        return _Outcome(failure=_NO_DEVICE)
    if status is None and _has_printed_too_much(folder):
        return _for_good(f"it printed more than {_MOST_OUTPUT_BYTES >> 20} MiB{done}; make it print less")
    if status is None:
        # The process is ended, and on the processor the script would take longer.
        where = _late_place(folder)
        return _for_good(
            f"it took more than {timeout_s:.0f} s{done}{where}; give a longer --timeout, or smaller sizes"
        )
    if "os._exit" in ways:
        end = next(end for end in ends if end["way"] == "os._exit")
        return _for_good(
            f"it left by os._exit({end['status']}){done} ({end['place']}); a capture needs three"
        )
    asked = next((end["place"] for end in ends if end["way"] == "input"), None)
    if asked is not None and (status or "EOFError" in said):
        return _for_good(f"it waits for input ({asked}), and gets none; give what it asks for as arguments")
    if unknown := _UNKNOWN_OPERATION.search(said):
        name = unknown[1] or unknown[2]
        if not name.startswith("aten::"):
            return _for_good(
                f"it calls the custom operation {name}, whose shapes are not known without the device"
            )
    if status and said:
        on_torch = "; Keras ran on its PyTorch backend here: use keras.ops, or name the model as keras:FILE"
        return _Outcome(failure=f"it crashed{done}: {said}{on_torch * ('keras' in ways)}")
    if status:
        how = signal.Signals(-status).name if status < 0 else f"exit status {status}"
        return _Outcome(failure=f"it ended with {how}{done}{_and_said(folder)}")
    if "fork" in ways and steps < 3:
        return _for_good(
            f"it trains in processes that it starts itself (fork), and {steps} steps were seen; name the "
            "command of one process"
        )
    if not steps and not any(end["num_backwards"] for end in ends):
        why = f"it ended without a training step of PyTorch{_and_said(folder)}; a model in it is named as FILE.py:NAME"
        return _Outcome(failure=why, is_final=not pretends)
    return _Outcome(
        failure=f"it ended{done}, and a capture needs three; give it more data or more epochs",
        is_final=steps > 0,
    )


def _for_good(failure: str) -> _Outcome:
    """A failure in words that another way of capturing would meet as well."""
    return _Outcome(failure=failure, is_final=True)


def _has_printed_too_much(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        return (folder / "output").stat().st_size > _MOST_OUTPUT_BYTES
    return False


def _late_place(folder: Path) -> str:
    """The user's line at which a script was when its time was nearly over; empty if it is not known."""
    with contextlib.suppress(OSError):
        frames = re.findall(r'File "([^"]+)", line (\d+)', (folder / LATE_FILE).read_text(encoding="utf-8"))
        for name, line in frames:
            if is_of_script(name):
                return f" (at {Path(name).name}, line {line})"
    return ""


def _lines(folder: Path) -> Iterator[str]:
    with (folder / "output").open("rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - _TAIL_BYTES))
        text = file.read().decode(errors="replace").partition("nanobind: leaked")[0]  # not the script's words
    yield from (line.strip() for line in text.splitlines())


def _last_error(folder: Path) -> str:
    """The last line of the script's own traceback, shortened; empty without one."""
    found = next((line for line in reversed([*_lines(folder)]) if _ERROR_LINE.match(line)), "")
    return found if len(found) <= 300 else found[:297] + "..."


def _and_said(folder: Path) -> str:
    last = [line for line in _lines(folder) if line][-1:]
    return f"; it said: {last[0][:200]}" if last else ""
