"""Installs the hooks of a capture in the script's process, and ends the process when the capture is done."""

from __future__ import annotations

import atexit
import collections
import contextlib
import faulthandler
import functools
import gc
import importlib
import io
import json
import os
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from forerun.base.kept import write_whole
from forerun.base.process_control import die_with_parent
from forerun.script.capturing.isolation import isolate
from forerun.script.patching import (
    after_import,
    begin_capture,
    capture_state,
    error_words,
    follow_arguments,
    length_of,
    place_in_script,
    place_of,
    surround,
    trainer_patches,
)
from forerun.script.profiling.messages import CaptureSettings, read_settings

if TYPE_CHECKING:
    from forerun.script.capturing.job import Counters

CAPTURED_STATUS = 78
"""Exit status of a script whose steps were captured."""

_WAIT_S = 0.02

LATE_FILE = "late"
"""File with the frames of a script whose time was nearly over, as ``faulthandler`` writes them."""

END_FILE = "end.json"
"""File that says in what way the script ended without a capture."""


def install(settings_file: Path) -> None:
    """Makes this process one that waits for requests, and returns in a copy of it for each request.

    The start of Python and the import of PyTorch are most of a capture; copies share them. A copy goes on as the
    script's own process, from its first line.
    """
    if captured := os.environ.get("FORERUN_CAPTURED_BY"):
        _refuse_training(Path(captured))
        return
    folder, server = settings_file.parent, os.getpid()
    die_with_parent(int(os.environ.pop("FORERUN_CAPTURED_FOR")))
    _load()
    request = _next_request(folder)
    os.environ["FORERUN_CAPTURED_BY"] = str(request)
    settings = read_settings(request / "settings.json", CaptureSettings)
    sys.argv[1:] = settings.arguments if settings.arguments is not None else sys.argv[1:]
    isolate(request, settings.files)
    die_with_parent(server)  # a copy is not asked to by itself, nor within new namespaces
    # Just before its time is over the process says where it is.
    faulthandler.dump_traceback_later(0.98 * settings.timeout_s, file=(request / LATE_FILE).open("w"))
    begin_capture()
    end = _End(request)
    end.cover()
    session = Session(settings, end)
    arguments = functools.partial(follow_arguments, parsed=_remember)
    after_import({"argparse": arguments, "torch": session.torch, "triton.runtime.jit": session.triton,
                  "keras.src.backend.config": session.keras, "tensorflow.python.eager.backprop": session.tensorflow,
                  "jax": session.jax})  # fmt: skip


def _remember(options: list[dict[str, Any]]) -> None:
    """Keeps the options that a script's parser knows, for the length of its job and its batch size."""
    capture_state().options.extend(option for option in options if option["value"] is not None)


def _refuse_training(request: Path) -> None:
    """Ends this process, which the captured one has started, when it begins to train: its steps are not seen."""

    def cover(torch: Any) -> None:
        def refuse(*args: Any, **kwargs: Any) -> None:
            why = (
                "it trains in a process that it starts itself, whose steps are not seen; name the command of one "
                "process, or call what that process runs in the script itself"
            )
            _End(request).note("refused", refusal=why, place=place_in_script())
            os._exit(1)

        torch.autograd.backward = refuse

    after_import({"torch": cover})


def _load() -> None:
    """Loads what nearly every capture needs, and keeps TensorBoard from TensorFlow, which would write its logs."""
    sys.modules.setdefault("tensorboard.compat.notf", ModuleType("tensorboard.compat.notf"))
    own = (f"{__package__}.{name}" for name in ("patches", "result", "stand_ins"))
    for name in ("torch", "torch.utils.data", "torch._dynamo", *own):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.freeze()


def _next_request(folder: Path) -> Path:
    """Waits for requests; returns the folder of one, in a copy of this process. Ends with the process that asks."""
    parent, number = os.getppid(), 0
    while True:
        request = folder / str(number)
        if not (request / "settings.json").exists():
            if os.getppid() != parent:
                os._exit(0)
            time.sleep(_WAIT_S)
            continue
        pid = os.fork()
        if not pid:
            output = os.open(request / "output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            return request
        _, status = os.waitpid(pid, 0)
        write_whole(request / "status", str(os.waitstatus_to_exitcode(status)).encode())
        number += 1


class _End:
    """Notes how the process ends."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / END_FILE
        self._pid = os.getpid()
        self.steps: Any = None

    def cover(self) -> None:
        """Watches the ways to end."""
        self.leave = os._exit

        @surround(os, "_exit")
        def left(leave: Any, status: int = 0) -> None:
            if os.getpid() == self._pid:
                self.note("os._exit", status=status, place=place_in_script())
            leave(status)

        @surround(os, "fork")
        def forked(fork: Any) -> int:
            found: int = fork()
            if found:
                self.note("fork")
            return found

        hook = sys.excepthook

        def failed(kind: Any, error: BaseException, trace: Any) -> None:
            refusal, needs_values = _refusal(error)
            where = place_of(trace)
            self.note(
                "error", text=error_words(error), refusal=refusal, place=where, needs_values=needs_values
            )
            hook(kind, error, trace)

        sys.excepthook = failed
        self._cover_input()
        atexit.register(lambda: self.note("end", **_caught()) if os.getpid() == self._pid else None)

    def _cover_input(self) -> None:
        """Notes that the script read its standard input, which is empty; ``input`` reads a line of it."""
        end = self

        class Empty(io.TextIOWrapper):
            def readline(self, *args: Any) -> str:  # type: ignore[override]
                end.note("input", place=place_in_script())
                return ""

            read = readline

        sys.stdin = Empty(sys.stdin.buffer)

    def note(self, way: str, **more: Any) -> None:
        """Adds a line on an end, or on what may have caused it."""
        steps = self.steps
        names = ("num_steps", "num_backwards")
        line = {"way": way, **{name: getattr(steps, name, 0) for name in names}, **more}
        handle = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(handle, (json.dumps(line) + "\n").encode())
        os.close(handle)


def _caught() -> dict[str, Any]:
    """The last refusal that the script itself caught."""
    texts = capture_state().refusals
    return {"refusal": texts[-1], "place": "", "needs_values": True} if texts else {}


def _refusal(error: BaseException | None) -> tuple[str, bool]:
    """Words of the refusal behind an error, empty for an error of the script; True if the processor has the values."""
    depth = 0
    while error is not None and depth < 8:
        if type(error).__name__ in ("ValueNeededError", "RefusedError"):
            return str(error), type(error).__name__ == "ValueNeededError"
        error, depth = error.__cause__ or error.__context__, depth + 1
    return "", False


class Session:
    """One capture, from the import of PyTorch on."""

    def __init__(self, settings: CaptureSettings, end: _End) -> None:
        self.settings, self._end = settings, end
        self._counts = False

    def keras(self, module: Any) -> None:
        """Lets Keras compute on PyTorch, whatever the script asks for: its layers and its trainer are the same."""
        if module._BACKEND != "torch":
            self._end.note("keras")
            self.flags["notes"].setdefault(
                f"Keras on {module._BACKEND}: recorded on Keras' PyTorch backend, which has the same operations, and "
                "predicted without XLA"
            )
            module._BACKEND = "torch"

    def tensorflow(self, module: Any) -> None:
        """Gradients of TensorFlow in a step of Keras are PyTorch's; others are refused, unlike data and logs."""
        why = "it takes gradients of TensorFlow itself; hand its model to forerun.keras, or name it as keras:FILE.keras"

        def begun(tape: Any) -> Any:
            if self._end.steps is None or not self._end.steps.depth:
                self.refuse(why)
            return tape

        def gradient(tape: Any, target: Any, sources: Any, *args: Any, **kwargs: Any) -> list[Any]:
            from torch import autograd  # several tapes may go through one pass

            values = [variable.value for variable in sources]
            return [*autograd.grad(target, values, retain_graph=True, allow_unused=True)]

        kind = module.GradientTape
        kind.__enter__, kind.__exit__, kind.gradient = begun, lambda *args: None, gradient

    def jax(self, module: Any) -> None:
        """Refuses gradients of JAX."""
        why = "it takes gradients of JAX itself, and a capture needs PyTorch; hand a model of Keras to forerun.keras"
        module.grad = module.value_and_grad = lambda *args, **kwargs: self.refuse(why)

    def triton(self, module: Any) -> None:
        """Charges the launch of a Triton kernel by its traffic; its results have their shapes already."""

        def run(kernel: Any, *args: Any, **kwargs: Any) -> None:
            name = getattr(getattr(kernel, "fn", None), "__name__", "kernel")
            self.steps.recorder.note_kernel(name, [*args, *kwargs.values()])

        module.JITFunction.run = run

    def refuse(self, why: str) -> None:
        """Ends the process because the script cannot be captured."""
        self._end.note("refused", refusal=why, place=place_in_script())
        sys.stdout.flush()
        self._end.leave(1)

    def torch(self, torch: Any) -> None:
        """Patches PyTorch as soon as it is loaded."""
        from forerun.script.capturing import pretend
        from forerun.script.capturing.checkpoints import Checkpoints
        from forerun.script.capturing.job import Counters, round_of
        from forerun.script.capturing.patches import Loaders, cover_ignite, cover_keras, cover_torch
        from forerun.script.capturing.pauses import Pauses
        from forerun.script.capturing.script_recorder import ScriptRecorder
        from forerun.script.capturing.stand_ins import FlexibleAttention, Parallelism, Repeats
        from forerun.script.capturing.steps import Steps
        from forerun.tracing.cuda_semantics import follow_autocast

        settings = self.settings
        self.pretence: Any = pretend.Pretence() if settings.pretends else None
        recorder = ScriptRecorder(pretends=settings.pretends)
        steps = self.steps = self._end.steps = Steps(recorder, self.finish, self.first_step_ended)
        self.flags: dict[str, Any] = {"compile": False, "compiled": {}, "fused": set(), "notes": {}}
        self.flags["autocast"] = follow_autocast(pretend.is_pretended) if settings.pretends else set()
        # The second run asks for another batch size alone, and a script that changes its files is not let go on.
        self._goes_on = settings.is_first and settings.files != "unsafe"
        self.pauses = Pauses(Path(settings.folder), self._leave)
        self.loaders = Loaders(settings, steps, self.pauses)
        steps.goes_on = self._stepped
        self._by_optimizer: dict[int, Counters] = collections.defaultdict(Counters)
        steps.ends = lambda key: self._by_optimizer[key].note(sys._getframe(1))
        steps.round_now = lambda: round_of(sys._getframe(1))
        steps.has_other_data = self.loaders.evaluates
        steps.evaluates = self._evaluates
        self.parallel = Parallelism(settings, steps)
        known = self.pretence.known if self.pretence is not None else None
        if known is not None:
            Repeats(steps, known.forget).cover()
        cover_torch(steps, self.flags, pretends=settings.pretends)
        flexible = FlexibleAttention(recorder, known, self.flags["notes"])
        after_import({"torch.nn.attention.flex_attention": flexible.cover})
        self.loaders.cover()
        self.parallel.cover()
        Checkpoints(settings, self.pretence, self.flags["notes"].setdefault, self._saved).cover()
        trainers = trainer_patches(self._job_seen, self.pauses.told)
        told = steps, self.pauses, self._job_seen
        after_import({**cover_keras(*told), **cover_ignite(*told), **trainers})
        recorder.__enter__()  # type: ignore[no-untyped-call]
        if self.pretence is not None:
            self.pretence.recorder = recorder
            pretend.pretend_cuda()
            pretend.cover_attributes()
            pretend.skip_initial_values()
            self.pretence.__enter__()  # type: ignore[no-untyped-call]

    def _saved(self, to_memory: bool) -> None:
        if not to_memory or self.pauses.is_after:
            self.pauses.saw("checkpoints")

    def _job_seen(self, **known: Any) -> None:
        """Keeps what a framework's trainer says about its job."""
        self.flags["job"] = {name: value for name, value in known.items() if value is not None}

    def first_step_ended(self) -> None:
        """Ends the process if the script does not use the pretended device."""
        if self.pretence is None:
            return
        parameters = self.steps.parameters()
        if parameters and any(self.steps.recorder.is_traced(p) for p in parameters):
            self.pretence.notes_guesses = True
            return
        self._end.note("no device")  # the caller records it on the processor
        self._end.leave(1)

    @property
    def counters(self) -> Counters:
        """Counters of the loops, as they were at each end of a step."""
        return self._by_optimizer[self.steps.last or 0]

    def finish(self) -> None:
        """Writes the result; ends the process, or lets the script go on to what it does after an epoch."""
        from forerun.script.capturing.result import write_result

        recorder = self.steps.recorder
        recorder.records_ops = False
        recorder.is_paused = True
        self.flags["options"] = capture_state().options
        self.flags["configurator"] = _names_of_main()
        self.counters.close(sys._getframe())
        job = write_result(self, sys._getframe())
        self._counts = job.max_steps is None and None in (job.epochs, job.steps_per_epoch)
        if self.pauses.steps_recorded(
            sys._getframe(), job.steps_per_epoch, goes_on=self._goes_on, counts=self._counts
        ):
            gc.enable()
        else:
            self._leave()

    def _stepped(self) -> None:
        self._count(is_step=True)
        self.pauses.stepped()

    def _evaluates(self) -> None:
        self._count(is_step=False)
        self.loaders.give_back()
        is_other = self.loaders.evaluates()
        self.pauses.saw("validation", length_of(self.loaders.evaluated.dataset) if is_other else None)

    def _count(self, *, is_step: bool) -> None:
        """Counts the steps of whole rounds after the recorded ones, where nothing else says the length of the job."""
        from forerun.script.capturing.result import close_job

        if self._counts:
            total = self.counters.in_whole_rounds(sys._getframe(2), self.steps.num_steps, is_step=is_step)
            if total is not None:
                close_job(Path(self.settings.folder), total)
                self._leave()

    def _leave(self) -> None:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        self._end.leave(CAPTURED_STATUS)


def _names_of_main() -> dict[str, int]:
    """Whole numbers among the variables of a script that reads ``--name=value`` into its variables."""
    main = vars(sys.modules["__main__"])
    source = Path(str(main.get("__file__", "")))
    try:
        reads_words = "configurator" in source.read_text(encoding="utf-8")
    except OSError:
        return {}
    return {k: v for k, v in main.items() if type(v) is int} if reads_words else {}
