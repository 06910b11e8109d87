"""The source of a captured script, read beside the values that its names have while a step runs."""

from __future__ import annotations

import ast
import bisect
import copy
import functools
import linecache
import traceback
from collections.abc import Callable, Iterator, Mapping
from types import FrameType, FunctionType, ModuleType
from typing import Any, TypeVar

from forerun.script.patching import capture_state, is_of_library, is_of_script

_Expression = TypeVar("_Expression", bound=ast.expr)

ENDLESS = 1e9
"""Batches of a loader, rounds of a loop, or a setting, that stand for no limit."""

_SAFE = (
    ast.Expression, ast.Constant, ast.Name, ast.Attribute, ast.Subscript, ast.BinOp, ast.UnaryOp, ast.Load, ast.Add,
    ast.Sub, ast.Mult, ast.FloorDiv, ast.USub, ast.Not, ast.Compare, ast.cmpop, ast.BoolOp, ast.And, ast.Or,
    ast.Tuple, ast.List,
)  # fmt: skip

_OF_NUMBERS = ("len", "int", "float", "min", "max", "round", "abs")

RANGES = ("range", "trange")


def frames_around(frame: FrameType | None) -> list[FrameType]:
    """Frames that may hold the loops of the steps, the innermost first.

    They are the script's; where none of those loops, it has handed over to a library's trainer, whose frames they are.
    """
    frames = [] if frame is None else [inner for inner, _ in traceback.walk_stack(frame)]
    own = [inner for inner in frames if is_of_script(inner.f_code.co_filename)]
    if any(enclosing_loops(inner) for inner in own):
        return own
    return [inner for inner in frames if inner in own or is_of_library(inner.f_code.co_filename)]


def loops_outwards(frame: FrameType | None) -> Iterator[tuple[FrameType, ast.For | ast.While]]:
    """The loops around a frame's line, each with its own frame, the innermost first."""
    for inner in frames_around(frame):
        for loop in reversed(enclosing_loops(inner)):
            yield inner, loop


def enclosing_loops(frame: FrameType) -> list[ast.For | ast.While]:
    """The loops of the frame's own function around its line, without those through optimizers or names of phases."""
    loops: list[ast.For | ast.While] = []
    for node in path_to(frame):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            loops = []
        elif isinstance(node, ast.While) or (
            isinstance(node, ast.For) and not (_is_of_optimizers(node, frame) or _is_of_phases(node, frame))
        ):
            loops.append(node)
    within = capture_state().within_steps
    return [loop for loop in loops if (frame.f_code.co_filename, loop.lineno) not in within]


def _is_of_optimizers(loop: ast.For, frame: FrameType) -> bool:
    """True if a loop's variable is an optimizer now, or a mapping with one: all its rounds are part of one step."""
    names = (node.id for node in ast.walk(loop.target) if isinstance(node, ast.Name))
    found = [frame.f_locals.get(name) for name in names]
    inside = [value for item in found if isinstance(item, Mapping) for value in item.values()]
    return any(
        hasattr(type(item), "param_groups") or "param_groups" in getattr(item, "__dict__", ())
        for item in (*found, *inside)
    )


def _is_of_phases(loop: ast.For, frame: FrameType) -> bool:
    """True for a loop through two or three words, such as ``["train", "val"]``: one of its rounds trains."""
    if isinstance(loop.iter, (ast.List, ast.Tuple)):
        found: Any = [getattr(word, "value", None) for word in loop.iter.elts]
    else:
        found = value_in(loop.iter, frame)
    return (
        isinstance(found, (list, tuple, dict))
        and 2 <= len(found) <= 3
        and all(isinstance(w, str) for w in found)
    )


def path_to(frame: FrameType) -> list[ast.AST]:
    """The nodes of a frame's source around its line, from the whole file inwards."""
    node: ast.AST | None = parsed(frame.f_code.co_filename)
    found: list[ast.AST] = []
    while node is not None:
        found.append(node)
        node = next((child for child in ast.iter_child_nodes(node) if _holds(child, frame.f_lineno)), None)
    return found


def _holds(node: ast.AST, line: int) -> bool:
    first, last = getattr(node, "lineno", None), getattr(node, "end_lineno", None)
    return first is not None and last is not None and first <= line <= last


@functools.cache
def parsed(path: str) -> ast.AST | None:
    """Syntax of a file; None if it has none."""
    try:
        return ast.parse("".join(linecache.getlines(path)))
    except (SyntaxError, ValueError):
        return None


def source_of(function: FunctionType) -> ast.FunctionDef | ast.Module:
    """Syntax of a function; an empty one if its source is not at hand."""
    line = function.__code__.co_firstlineno  # that of a decorator, if it has one
    for node in ast.walk(parsed(function.__code__.co_filename) or ast.Module([], [])):
        if isinstance(node, ast.FunctionDef) and line in {
            node.lineno,
            *(n.lineno for n in node.decorator_list),
        }:
            return node
    return ast.Module([], [])


def value_in(expression: ast.expr, frame: FrameType) -> Any:
    """The value of names, attributes, items, sums and lengths; None for anything that would run code of the script."""
    value = evaluated(expression, frame)
    return None if isinstance(value, bool) or type(value).__module__ == "torch" else value


def evaluated(expression: ast.expr, frame: FrameType) -> Any:
    """As ``value_in``, for tests and tensors too."""
    if not all(isinstance(node, _SAFE) or _is_harmless(node, frame) for node in ast.walk(expression)):
        return None
    try:
        code = compile(ast.Expression(expression), "<loop>", "eval")
        return eval(code, frame.f_globals, frame.f_locals)  # noqa: S307 - the script's own names, and lengths
    except Exception:  # an attribute may run any code
        return None


def _is_harmless(node: ast.AST, frame: FrameType) -> bool:
    """True for a call of a function of numbers, of ``len``, or of a tensor for its size."""
    if not isinstance(node, ast.Call) or node.keywords:
        return isinstance(node, ast.Div)
    function = node.func
    if isinstance(function, ast.Name):
        known = frame.f_locals.get(function.id, frame.f_globals.get(function.id))
        return function.id in _OF_NUMBERS and known is None
    if not isinstance(function, ast.Attribute):
        return False
    owner = evaluated(function.value, frame)
    if isinstance(owner, ModuleType):
        return owner.__name__ == "math"
    return function.attr in ("size", "dim", "numel") and type(owner).__module__.startswith("torch")


def called_name(function: ast.expr) -> str:
    """The last name of what is called; empty for anything but names and attributes."""
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def parts_in(expression: ast.AST) -> set[str]:
    """Names and attributes in an expression, as they are written."""
    return {ast.unparse(node) for node in ast.walk(expression) if isinstance(node, (ast.Name, ast.Attribute))}


def parts_set(loop: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    """Parts of what the statements of a loop set, each with its statement."""
    for node in ast.walk(loop):
        if isinstance(node, (ast.Assign, ast.AugAssign, ast.For, ast.AnnAssign)):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                yield from ((part, node) for part in ast.walk(target))


def substituted(tree: _Expression, instead: Callable[[ast.AST], ast.AST | None]) -> _Expression:
    """A copy of syntax in which a function gives other nodes in the place of some; None keeps a node."""

    class Writer(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> Any:
            new = instead(node)
            return super().visit(node) if new is None else new

    found: _Expression = ast.fix_missing_locations(Writer().visit(copy.deepcopy(tree)))
    return found


def with_number(expression: ast.expr, counter: str, number: int) -> ast.expr:
    """An expression with a number in the place of a counter."""
    return substituted(
        expression,
        lambda node: (
            ast.Constant(number)
            if isinstance(node, (ast.Name, ast.Attribute)) and ast.unparse(node) == counter
            else None
        ),
    )


def changed_around(frame: FrameType) -> dict[ast.AST, ast.AST]:
    """Parts of what the loops around a frame's line set, each with the statement that sets it."""
    return {part: node for loop in enclosing_loops(frame)[:1] for part, node in parts_set(loop)}


def written_out(test: ast.expr, frame: FrameType) -> ast.expr:
    """A condition with names such as ``last_step`` replaced by what the loop says they are."""
    names = [(part.id, node) for part, node in changed_around(frame).items() if isinstance(part, ast.Name)]
    said = {
        name: value
        for name, node in names
        if sum(name == other for other, _ in names) == 1
        and isinstance(value := getattr(node, "value", None), (ast.Compare, ast.BoolOp))
    }
    return substituted(test, lambda node: said.get(getattr(node, "id", "")))


def first_number(holds: Callable[[int], bool]) -> int | None:
    """The first whole number from which on a condition holds; None if there is none."""
    return bisect.bisect_left(range(int(ENDLESS)), True, key=holds) if holds(int(ENDLESS)) else None
