"""Patches of a running script: put in place after an import, around a function, with the script's line for messages.

The hooks of a profile, a capture and a callback say here what they want to know; nothing is imported that the script
does not import itself.
"""

from __future__ import annotations

import argparse
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import math
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import FunctionType, ModuleType, TracebackType
from typing import Any

from forerun.base.tables import own_table

Patch = Callable[[ModuleType], None]


def tables(folder: str = "capturing") -> dict[str, Any]:
    """The facts in ``tables.toml`` of a folder: those of a captured script, of ``diagnosis`` or of ``tuning``."""
    return own_table(__file__, f"{folder}/tables.toml")


class RefusedError(RuntimeError):
    """The script does something that cannot be captured."""


@dataclass(slots=True)
class CaptureState:
    """Findings of one capture in its script; the next one in the same process begins with its own.

    Attributes:
        options: Options of the script's parsers with their values.
        refusals: Words of refusals, which the script may have caught.
        within_steps: File and line of loops that are parts of a step.
        per_step: Added by a step to a counter of a file.
        computes: True while PyTorch's own kernels for meta tensors run, which must see the true device.
        asks: True while ``is_pretended`` asks: a function mode of the script sends its question through the patched
            attribute.
        places: Of each ``torch.load`` that is going on: the device of a storage that lay on one in the file.
    """

    options: list[dict[str, Any]] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    within_steps: set[tuple[str, int]] = field(default_factory=set)
    per_step: dict[tuple[str, str], float] = field(default_factory=dict)
    computes: bool = False
    asks: bool = False
    places: list[Callable[[Any, str], str]] = field(default_factory=list)


_state = CaptureState()


def capture_state() -> CaptureState:
    """The state of the capture that runs now: patches of PyTorch are those of the whole process, so there is one."""
    return _state


def begin_capture() -> CaptureState:
    """Begins a capture: what earlier ones saw is left to whoever holds it."""
    global _state
    _state = CaptureState()
    return _state


class _PatchingLoader(importlib.abc.Loader):
    """The module's own loader, which applies a patch after loading."""

    def __init__(self, loader: importlib.abc.Loader, patch: Patch) -> None:
        self._loader = loader
        self._patch = patch

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # The module keeps its own loader: it may read source or data through it.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._patch(module)


class _Finder(importlib.abc.MetaPathFinder):
    """First on the list of finders; asks the others and adds the patch to the module they find."""

    def __init__(self, patches: dict[str, Patch]) -> None:
        self._patches = patches

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self._patches:
            return None
        patch = self._patches.pop(fullname)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _PatchingLoader(spec.loader, patch)
        return spec


def after_import(patches: dict[str, Patch]) -> None:
    """Registers patches by the full name of a module; a loaded module is patched at once."""
    waiting = dict(patches)
    for name in [name for name in waiting if name in sys.modules]:
        waiting.pop(name)(sys.modules[name])
    sys.meta_path.insert(0, _Finder(waiting))


Around = Callable[..., Any]
"""A function that is called in place of another: with the other one first, then with what that one would get."""


def surround(owner: Any, name: str) -> Callable[[Around], None]:
    """Wraps a function of a class or a module in another one.

    >>> class Loader:
    ...     def batch(self): return 3
    >>> @surround(Loader, "batch")
    ... def doubled(batch, loader): return 2 * batch(loader)
    >>> Loader().batch()
    6
    """
    original = getattr(owner, name)

    def put(around: Around) -> None:
        @functools.wraps(original)
        def called(*args: Any, **kwargs: Any) -> Any:
            return around(original, *args, **kwargs)

        setattr(owner, name, called)

    return put


def between(owner: Any, name: str, *, begins: Around, ends: Around) -> None:
    """Calls one function before and one after a function of a class or a module, also where that raises."""

    @surround(owner, name)
    def called(run: Around, /, *args: Any, **kwargs: Any) -> Any:
        begins(*args, **kwargs)
        try:
            return run(*args, **kwargs)
        finally:
            ends(*args, **kwargs)


Options = list[dict[str, Any]]


def follow_arguments(
    module: Any, parsed: Callable[[Options], None], known: Callable[[Options], None] | None = None
) -> None:
    """Tells the options of ``argparse`` with their values; every way of parsing calls ``parse_known_args``.

    Args:
        module: ``argparse``.
        parsed: Called with the options and their values.
        known: Called with the options and their defaults before parsing, because a wrong argument ends the script
            there.
    """

    @surround(module.ArgumentParser, "parse_known_args")
    def parse(original: Any, parser: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> Any:
        if known is not None:
            known([_option(action, None) for action in _actions(parser)])
        found = original(parser, *args, **kwargs)
        parsed([_option(action, found[0]) for action in _actions(parser)])
        return found


def _actions(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return [action for action in parser._actions if action.option_strings and action.dest != "help"]


def _option(action: argparse.Action, values: argparse.Namespace | None) -> dict[str, Any]:
    value = action.default if values is None else getattr(values, action.dest, None)
    plain = value if isinstance(value, (int, float, str, bool, type(None))) else str(value)
    return {
        "flags": list(action.option_strings),
        "name": action.dest,
        "value": plain,
        "help": str(action.help or ""),
    }


def trainer_patches(
    tell: Callable[..., None], tell_pauses: Callable[..., None] = lambda **known: None
) -> dict[str, Any]:
    """Patch by name of the module that it is for.

    Args:
        tell: Called with ``num_steps``, ``num_epochs`` and ``steps_per_epoch``, each None if it is not known, and with
            ``num_micro_steps`` where a trainer makes more of them than its first steps show.
        tell_pauses: Called with ``validation`` and ``checkpoints``: unit, number of units between two, and samples;
            None for never.
    """
    return {
        "transformers.trainer_callback": functools.partial(_transformers, tell, tell_pauses),
        "lightning.pytorch.loops.fit_loop": functools.partial(_lightning, tell, tell_pauses),
        "pytorch_lightning.loops.fit_loop": functools.partial(_lightning, tell, tell_pauses),
        "ultralytics.engine.trainer": functools.partial(_ultralytics, tell, tell_pauses),
    }


def _transformers(tell: Callable[..., None], tell_pauses: Callable[..., None], module: Any) -> None:
    @surround(module.CallbackHandler, "on_train_begin")
    def told(begin: Any, handler: Any, args: Any, state: Any, control: Any) -> Any:
        num_steps, num_epochs = _positive(state.max_steps), _positive(state.num_train_epochs)
        batches = length_of(getattr(handler, "train_dataloader", None))
        per_epoch = math.ceil(batches / args.gradient_accumulation_steps) if batches else None
        tell(num_steps=num_steps, num_epochs=num_epochs, steps_per_epoch=per_epoch)
        frame, samples = sys._getframe(), None
        while frame is not None and samples is None:  # the trainer is told to no callback
            samples = length_of(getattr(frame.f_locals.get("self"), "eval_dataset", None))
            frame = frame.f_back  # type: ignore[assignment]
        tell_pauses(
            validation=_pause(str(getattr(args.eval_strategy, "value", "no")), state.eval_steps, samples),
            checkpoints=_pause(str(getattr(args.save_strategy, "value", "no")), state.save_steps, None),
        )
        return begin(handler, args, state, control)


def _pause(strategy: str, steps: Any, samples: int | None) -> tuple[str, int, int | None] | None:
    """A strategy of a trainer, ``no``, ``epoch`` or ``steps``; the best model is known at each evaluation only."""
    if strategy == "steps":
        return "steps", max(1, int(steps)), samples
    return ("epochs", 1, samples) if strategy == "epoch" else None


def length_of(data: Any) -> int | None:
    """Length of a loader or a data set; None for a stream, which has none, and for None."""
    try:
        return len(data)
    except Exception:  # a stream may say so in any way
        return None


def _lightning(tell: Callable[..., None], tell_pauses: Callable[..., None], module: Any) -> None:
    is_told: list[bool] = []

    @surround(module._FitLoop, "on_advance_start")
    def told(begin: Any, loop: Any) -> None:
        begin(loop)
        if is_told:
            return
        is_told.append(True)
        accumulated = getattr(loop.trainer, "accumulate_grad_batches", 1) or 1
        per_epoch = math.ceil(loop.max_batches / accumulated) if math.isfinite(loop.max_batches) else None
        num_epochs, num_steps = _positive(loop.max_epochs), _positive(loop.max_steps)
        if per_epoch is not None and num_epochs is not None:
            num_steps = min(num_steps or math.inf, per_epoch * num_epochs)
        tell(num_steps=num_steps, num_epochs=num_epochs, steps_per_epoch=per_epoch)
        tell_pauses(
            validation=_lightning_validation(loop, accumulated), checkpoints=_lightning_saves(loop.trainer)
        )


def _lightning_validation(loop: Any, accumulated: int) -> tuple[str, int, int | None] | None:
    trainer = loop.trainer
    if not trainer.enable_validation:
        return None
    loaders = trainer.val_dataloaders
    loaders = loaders if isinstance(loaders, (list, tuple)) else [loaders]
    samples = [length_of(getattr(loader, "dataset", None)) for loader in loaders]
    whole = None if None in samples else sum(number for number in samples if number)
    if (trainer.val_check_batch or math.inf) < loop.max_batches:
        return "steps", max(1, trainer.val_check_batch // accumulated), whole
    return "epochs", trainer.check_val_every_n_epoch or 1, whole


def _lightning_saves(trainer: Any) -> tuple[str, int, int | None] | None:
    for callback in trainer.checkpoint_callbacks:
        if steps := getattr(callback, "_every_n_train_steps", 0):
            return "steps", steps, None
        if epochs := getattr(callback, "_every_n_epochs", 0):
            return "epochs", epochs, None
    return None


def _ultralytics(tell: Callable[..., None], tell_pauses: Callable[..., None], module: Any) -> None:
    is_told: list[bool] = []

    @surround(module.BaseTrainer, "optimizer_step")
    def told(update: Any, trainer: Any) -> None:
        if not is_told:
            is_told.append(True)
            batches = len(trainer.train_loader)
            # Its warm-up begins with single batches and ends with as many as make up the nominal batch size.
            accumulated = min(max(round(trainer.args.nbs / trainer.batch_size), 1), batches * trainer.epochs)
            tell(
                num_steps=None,
                num_epochs=_positive(trainer.epochs),
                steps_per_epoch=max(1, batches // accumulated),
                num_micro_steps=accumulated,
            )
            samples = length_of(getattr(trainer.test_loader, "dataset", None))
            tell_pauses(
                validation=("epochs", 1, samples) if trainer.args.val else None,
                checkpoints=("epochs", 1, None) if trainer.args.save else None,
            )
        update(trainer)


def _positive(value: Any) -> Any:
    """A number above zero; None for the other ways to say that there is no limit."""
    return value if isinstance(value, (int, float)) and value > 0 and math.isfinite(value) else None


_MOST_WORDS = 400
_MOST_CAUSES = 8


def is_of_script(filename: str) -> bool:
    """True for a file of the user, and for the package of a module or a command that is run as the script."""
    main = sys.modules["__main__"]
    if filename == getattr(main, "__file__", None):
        return True
    if filename.startswith(_own_package(main)):
        return True
    return not filename.startswith(_libraries()) and not filename.startswith("<")


def is_of_library(filename: str) -> bool:
    """True for a file of an installed package, other than PyTorch's own, which may hold the loop of a trainer."""
    folder = next((found for found in _packages() if filename.startswith(found)), None)
    return folder is not None and not filename[len(folder) :].startswith(
        (f"torch{os.sep}", f"forerun{os.sep}")
    )


@cache
def _packages() -> tuple[str, ...]:
    found = {path for path in sys.path if path and any(Path(path).glob("*.dist-info"))}
    return tuple(f"{path.rstrip(os.sep)}{os.sep}" for path in found | {sysconfig.get_path("purelib")})


def _own_package(main: ModuleType) -> tuple[str, ...]:
    """Folder of the package that ``-m`` runs, or that a command such as ``yolo`` hands over to; none for a file."""
    name = getattr(main, "__package__", None) or ""
    if not name and not Path(getattr(main, "__file__", None) or ".py").suffix:
        name = next((v.__module__ for v in vars(main).values() if isinstance(v, FunctionType)), "").partition(
            "."
        )[0]
    found = getattr(sys.modules.get(name), "__path__", None)
    return tuple(f"{folder}{os.sep}" for folder in found or ())


@cache
def _libraries() -> tuple[str, ...]:
    """Folders of forerun, of Python and of installed packages, wherever on Python's path those lie."""
    return (*_packages(), str(Path(__file__).parents[1]), sysconfig.get_path("stdlib"))


def place_in_script() -> str:
    """``file.py, line 12`` of the innermost frame of the user's code now."""
    for frame, line in traceback.walk_stack(sys._getframe(1)):
        if is_of_script(frame.f_code.co_filename):
            return f"{Path(frame.f_code.co_filename).name}, line {line}"
    return "the script"


def place_of(trace: TracebackType | None) -> str:
    """``file.py, line 12`` of the user's innermost frame of an error; empty if there is none."""
    for frame in reversed(traceback.extract_tb(trace)):
        if is_of_script(frame.filename):
            return f"{Path(frame.filename).name}, line {frame.lineno}"
    return ""


def error_words(error: BaseException) -> str:
    """An error in one line, with the first cause of a chain of failed imports.

    >>> try:
    ...     try:
    ...         raise ModuleNotFoundError("No module named 'sentencepiece'")
    ...     except ImportError as cause:
    ...         raise ImportError("cannot import the tokenizer") from cause
    ... except ImportError as found:
    ...     print(error_words(found))
    ImportError: cannot import the tokenizer; its cause was ModuleNotFoundError: No module named 'sentencepiece'
    """
    cause, causes = error, 0
    while causes < _MOST_CAUSES and (
        inner := cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    ):
        cause, causes = inner, causes + 1
    words = _words(error)
    if isinstance(error, ImportError) and cause is not error and _words(cause) not in words:
        words += f"; its cause was {_words(cause)}"
    return words


def _words(error: BaseException) -> str:
    text = " ".join(str(error).split())
    text = text if len(text) <= _MOST_WORDS else text[: _MOST_WORDS - 3] + "..."
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
