"""Epochs and steps of the job, read from the script's arguments, its variables, its trainer and its loops."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import functools
import linecache
import math
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import torch

from forerun.script.patching import follow_arguments

__all__ = ["argument_options", "job_of", "loops_around", "remember_arguments", "repetitions"]

_EPOCHS = ("num_train_epochs", "epochs", "num_epochs", "n_epochs", "max_epochs", "nepochs", "niter", "max_epoch",
           "total_epochs")  # fmt: skip
_STEPS = ("max_steps", "max_iters", "num_iterations", "max_train_steps", "train_iters", "total_steps", "num_steps",
          "train_steps", "num_train_steps", "iterations")  # fmt: skip
_HOLDERS = ("args", "opt", "opts", "cfg", "config", "conf", "hparams", "hp", "flags", "FLAGS", "training_args",
            "params", "parsed_args")  # fmt: skip

_options: list[dict[str, Any]] = []


def remember_arguments(module: Any) -> None:
    """Follows ``argparse``, so that the options a script knows can be found."""
    follow_arguments(module, lambda options: _options.extend(o for o in options if o["value"] is not None))


def argument_options() -> list[dict[str, Any]]:
    """Options of the script's parsers with their values."""
    return _options


def job_of(frame: FrameType | None) -> dict[str, float]:
    """Epochs and steps that are in force where a step ends; keys ``epochs`` and ``max_steps``, as far as known.

    Where no argument and no variable says them, the script's loops do; their iterations are ``iterations``.
    """
    found: dict[str, float] = {}
    for scope in _scopes(frame):
        for key, names in (("max_steps", _STEPS), ("epochs", _EPOCHS)):
            if key not in found and (value := _number(scope, names)) is not None:
                found[key] = value
    if not found:
        epochs, iterations = repetitions(frame)
        counts = {"epochs": epochs, "iterations": iterations}
        found = {key: float(value) for key, value in counts.items() if value is not None}
    return found


def _scopes(frame: FrameType | None) -> Iterator[Mapping[str, Any]]:
    """Variables of the script's frames, those of trainers before all others."""
    inside = (str(Path(torch.__file__).parent), str(Path(__file__).parents[3]))
    plain: list[Mapping[str, Any]] = []
    while frame is not None:
        if not frame.f_code.co_filename.startswith(inside):
            variables: Mapping[str, Any] = dict(frame.f_locals)
            yield from _trainer(variables.get("self"))
            plain.append(variables)
            plain.append({k: v for k, v in frame.f_globals.items() if k in (*_EPOCHS, *_STEPS, *_HOLDERS)})
        frame = frame.f_back
    plain.append(vars(sys.modules["__main__"]))
    for variables in plain:
        yield {name: value for name, value in variables.items() if name in (*_EPOCHS, *_STEPS)}
        for name in _HOLDERS:
            holder = variables.get(name)
            if isinstance(holder, (argparse.Namespace, SimpleNamespace)) or dataclasses.is_dataclass(holder):
                yield vars(holder)
            elif isinstance(holder, dict):
                yield holder
    yield {option["name"]: option["value"] for option in _options}


def _trainer(thing: Any) -> Iterator[Mapping[str, Any]]:
    """Figures of a trainer of Transformers or Lightning."""
    if thing is None or "Trainer" not in type(thing).__name__:
        return
    state: Any = getattr(thing, "state", None)
    if hasattr(state, "max_steps") and hasattr(state, "num_train_epochs"):
        yield {"max_steps": state.max_steps, "num_train_epochs": state.num_train_epochs}
    names = ("max_epochs", "max_steps", "epochs")
    yield {
        name: getattr(thing, name) for name in names if isinstance(getattr(type(thing), name, None), property)
    }
    yield {name: vars(thing)[name] for name in names if name in vars(thing)}


def _number(scope: Mapping[str, Any], names: tuple[str, ...]) -> float | None:
    for name in names:
        value = scope.get(name)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < 1e12:
            return float(value)
    return None


_SAFE = (
    ast.Expression, ast.Constant, ast.Name, ast.Attribute, ast.Subscript, ast.BinOp, ast.UnaryOp, ast.Load, ast.Add,
    ast.Sub, ast.Mult, ast.FloorDiv, ast.USub,
)  # fmt: skip
_RANGES = ("range", "trange")
_AROUND = ("tqdm", "track", "progress_bar", "master_bar")


def repetitions(frame: FrameType | None) -> tuple[int | None, int | None]:
    """Epochs, if an outer loop counts and an inner one goes through data; else iterations, if all loops count.

    The loops of a function that is called within a loop are inside it. Loops of libraries are left out.

    >>> import sys
    >>> for epoch in range(3):
    ...     for batch in [0, 0]:
    ...         found = repetitions(sys._getframe())
    """
    counts = loops_around(frame)
    if not counts:
        return None, None
    outer = counts[: counts.index(None)] if None in counts else counts
    number = math.prod(count for count in outer if count is not None)
    if not outer or not number:
        return None, None
    return (number, None) if None in counts else (None, number)


def loops_around(frame: FrameType | None) -> list[int | None]:
    """Number of rounds of each loop around a frame, the outermost first; None for a loop that does not count."""
    found: list[int | None] = []
    # PyTorch may lie elsewhere than this environment's own libraries, on a path that is added to them.
    beside_torch = str(Path(torch.__file__).parents[1])
    libraries = tuple({sysconfig.get_path("purelib"), sysconfig.get_path("stdlib"), beside_torch})
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(libraries) and not name.startswith("<"):
            found = [_rounds(loop, frame) for loop in _enclosing(frame)] + found
        frame = frame.f_back
    return found


def _enclosing(frame: FrameType) -> list[ast.For | ast.While]:
    """The loops of the frame's own function around its line."""
    tree = _parsed(frame.f_code.co_filename)
    loops: list[ast.For | ast.While] = []
    node: ast.AST | None = tree
    while node is not None:
        inner = next((child for child in ast.iter_child_nodes(node) if _holds(child, frame.f_lineno)), None)
        if isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            loops = []
        elif isinstance(inner, (ast.For, ast.While)):
            loops.append(inner)
        node = inner
    return loops


def _holds(node: ast.AST, line: int) -> bool:
    first, last = getattr(node, "lineno", None), getattr(node, "end_lineno", None)
    return first is not None and last is not None and first <= line <= last


@functools.cache
def _parsed(path: str) -> ast.AST | None:
    try:
        return ast.parse("".join(linecache.getlines(path)))
    except (SyntaxError, ValueError):
        return None


def _rounds(loop: ast.For | ast.While, frame: FrameType) -> int | None:
    if isinstance(loop, ast.While):
        return None
    found = loop.iter
    while isinstance(found, ast.Call) and _name(found.func) in _AROUND and found.args:
        found = found.args[0]
    if not isinstance(found, ast.Call) or _name(found.func) not in _RANGES:
        return None
    values = [_value(argument, frame) for argument in found.args]
    if not values or not all(isinstance(value, int) for value in values):
        return None
    return len(range(*values))


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _value(expression: ast.expr, frame: FrameType) -> Any:
    """The value of names, attributes, items and sums of them; None for anything that would run code of the script."""
    if not all(isinstance(node, _SAFE) for node in ast.walk(expression)):
        return None
    try:
        code = compile(ast.Expression(expression), "<loop>", "eval")
        value = eval(code, frame.f_globals, frame.f_locals)  # noqa: S307 - the script's own names, nothing that calls
    except Exception:  # an attribute may run any code
        return None
    return None if isinstance(value, (bool, torch.Tensor)) else value
