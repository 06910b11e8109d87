"""Pauses between the steps of a script: validation and checkpoints, how often, and on how many samples.

Some of it is seen: once the steps are recorded the script goes on for some seconds of a processor with an epoch that is
over, so that what follows it happens. The rest is read from the loops around the step: calls that evaluate or save
under a condition such as ``step % 500 == 0``.
"""

from __future__ import annotations

import ast
import copy
import functools
import inspect
import json
import math
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

from forerun.base.kept import write_whole
from forerun.graph.captured import CapturedPause
from forerun.script.capturing import source
from forerun.script.capturing.job import added_per_step
from forerun.script.patching import is_of_library, is_of_script

PAUSES_FILE = "pauses.json"

_CPU_S, _LIBRARY_CPU_S, _OPEN_CPU_S, _WALL_S, _POLL_S = 4.0, 10.0, 15.0, 60.0, 0.05
"""Longest time until an epoch has ended; more where a library may go through the rest of it, or to count steps [s]."""
_EVALUATES = re.compile(
    r"^_?(run_|do_|log_)?(eval|evaluate|evaluation|valid|validate|validation|test|val)(_|$)|^estimate_loss$"
)
_OTHER_DATA = re.compile(r"(^|_)(eval|valid|validate|validation|test|val|dev)(_|$)")
SAVES = re.compile(
    r"^_?(maybe_)?save(_(checkpoint|ckpt|model|state|weights|pretrained|on_master|file|training)|$)|"
    r"^(write|make)_checkpoint|^checkpoint$"
)
_SAMPLES = re.compile(r"(^|_)(generate|sample|samples|sampling|rollouts?)(_|$)")
_UPDATES = re.compile(r"(^|_)(ema|update|copy|lerp|mul|add|average)(_|$)")
_RANK = re.compile(r"(^|[._])rank$")
_OTHER_SAVERS = ("np", "numpy", "plt", "fig", "img", "imgs", "image", "images", "vutils", "grid", "fromarray")
_OF_OTHERS = re.compile(rf"(^|[._])({'|'.join(_OTHER_SAVERS)})(\(.*\)|\[.*\])?$")
_OTHER_FILES = re.compile(r"\.(png|jpe?g|gif|webp|svg|pdf|mp4|wav|csv|txt)['\"]")
_FIGURES = re.compile(r"^\w*(acc|accuracy|loss|losses|metrics?|results?|scores?|history|predictions)$")
_DEEPEST, _FEW, _MOST_HOOKS, _MOST_WORDS = 4, 2, 32, 64
_ONE_STEP = ("", 0, 0)
"""Stands for the loop through an epoch of one step, which a script does without."""

Place = tuple[str, int, int]
"""File and line of a loop, and its frame: what evaluates may run the loops of what trains."""


class Pauses:
    """Follows what a script does between its steps.

    Args:
        folder: Where what is found is written.
        leave: Ends the process.
    """

    def __init__(self, folder: Path, leave: Callable[[], None]) -> None:
        self._file, self._leave = folder / PAUSES_FILE, leave
        self._seen: dict[str, tuple[list[tuple[bool, list[Place | int]]], int | None]] = {}
        self._found: dict[str, CapturedPause] = {}
        self._only_read: dict[str, bool] = {}  # and whether under a condition that is not known
        self._loops: list[Place] = []
        self._kept: list[FrameType] = []
        self._is_of_library = self._is_counted = False
        self.is_after = self._is_told = self._has_ended = False
        self._num_late = 0
        self.interval: tuple[Any, int] | None = None
        """Unit and number of a framework's handler that runs now, if that comes every so many."""

    def saw(self, kind: str, num_samples: int | None = None) -> None:
        """The script evaluates (``validation``) or saves (``checkpoints``) now.

        Args:
            kind: ``validation`` or ``checkpoints``.
            num_samples: Samples that it evaluates, if they are known.
        """
        if kind in self._seen and not self.is_after:
            return
        if kind in self._found and kind not in self._only_read:
            return
        around = list(_all_around(sys._getframe(1)))
        if kind == "validation" and _samples(sys._getframe(1), self._loops):
            return
        if self.interval is not None:
            unit, every = self.interval
            self._keep(kind, CapturedPause(unit=unit, every=every, num_samples=num_samples))
        elif self.is_after:
            pause = _pause_of(self._chosen(around), self._loops, num_samples, is_after=True)
            # The end of the job comes early here: what was read of its steps stays.
            reads_steps = kind in self._only_read and self._found[kind].unit == "steps"
            if pause is not None and not (pause.unit == "job" and reads_steps):
                self._only_read.pop(kind, None)
                self._keep(kind, pause)
        else:  # which loops are those of the steps is known at their end
            self._seen[kind] = (around, num_samples)

    def told(self, **known: tuple[str, int, int | None] | None) -> None:
        """Takes pauses that a framework's trainer names: unit, number of units and samples; None for never."""
        for kind, pause in known.items():
            if pause is not None:
                self._keep(kind, CapturedPause(unit=pause[0], every=pause[1], num_samples=pause[2]))
        self._is_told = True

    def steps_recorded(
        self,
        frame: FrameType | None,
        steps_per_epoch: int | None = None,
        *,
        goes_on: bool,
        counts: bool = False,
    ) -> bool:
        """Reads the loops around the step; true if the script is to go on until its epoch has ended."""
        frames = source.frames_around(frame)
        self._kept = frames  # else another one may get their place in memory
        self._is_of_library = not all(is_of_script(inner.f_code.co_filename) for inner in frames)
        inner = next((loop for own in frames for loop in reversed(source.enclosing_loops(own))), None)
        nodes = ast.walk(inner.iter) if isinstance(inner, ast.For) else ()
        self._is_counted = any(getattr(node, "id", "") in source.RANGES for node in nodes)
        self._loops = [place for inner in reversed(frames) for place in _places(inner)]
        if len(self._loops) == 1 and steps_per_epoch == 1:
            self._loops.append(_ONE_STEP)
        for kind, (around, samples) in self._seen.items():
            self._keep(kind, _pause_of(self._chosen(around), self._loops, samples, is_after=False))
        self._seen.clear()
        if not self._is_told:
            for kind, pause, has_condition in _read(frames, int(_ONE_STEP in self._loops)):
                if kind not in self._found:
                    self._only_read[kind] = has_condition
                    self._keep(kind, pause)
        self.is_after = goes_on and not self._is_told
        if self.is_after:
            threading.Thread(target=self._wait, args=(counts,), daemon=True).start()
        return self.is_after

    def _chosen(self, around: Sequence[tuple[bool, list[Place | int]]]) -> list[list[Place | int]]:
        """Places around a line in the script alone, or in the library too whose loops are those of the steps."""
        return [places for is_own, places in around if is_own or self._is_of_library]

    def _wait(self, counts: bool) -> None:
        is_installed = any(is_of_library(name) for name, *_ in self._loops)
        longest_s = _LIBRARY_CPU_S if is_installed or not self._loops else _CPU_S
        cpu_s = time.process_time() + (_OPEN_CPU_S if counts else longest_s)
        wall_s = time.monotonic() + (2 if counts else 1) * _WALL_S
        # By the processor, so that a busy machine changes nothing; by the clock, for a script that sleeps.
        while time.process_time() < cpu_s and time.monotonic() < wall_s:
            time.sleep(_POLL_S)
        self._leave()

    def epoch_ended(self) -> None:
        """A loader of the training data has ended."""
        self._has_ended = True

    def epoch_began(self) -> None:
        """The training data are gone through anew."""
        self._num_late += self._has_ended

    def stepped(self) -> None:
        """The script makes a step after the recorded ones; the process ends once that is one of the next epoch.

        One step may come after the end of a loader that is read ahead. Without a loop of its own, a library may fill
        the epoch from a new iterator; its time is limited.
        """
        if not self._has_ended or (self._is_of_library and not self._found):
            return
        self._num_late += 1
        if self._num_late == 1:
            return
        for kind, has_condition in self._only_read.items():
            # A whole end of an epoch went by without it: its condition does not hold. Counted rounds may go on.
            is_each = replace(self._found[kind], num_samples=None) == CapturedPause(unit="epochs")
            if has_condition and is_each and not self._is_counted:
                del self._found[kind]
        self._write()
        self._leave()

    def _keep(self, kind: str, pause: CapturedPause | None) -> None:
        if pause is not None:
            self._found[kind] = pause
            self._write()

    def _write(self) -> None:
        write_whole(self._file, json.dumps({name: asdict(one) for name, one in self._found.items()}).encode())


def _samples(frame: FrameType, loops: Sequence[Place]) -> bool:
    """True within a function that draws samples from a network, as a text that is shown now and then."""
    for inner, _ in traceback.walk_stack(frame):
        if _SAMPLES.search(inner.f_code.co_name):
            return True
        if any(place in loops for place in _places(inner)):
            return False
    return False


def _all_around(frame: FrameType) -> Iterator[tuple[bool, list[Place | int]]]:
    """Frames from the innermost: true for one of the script itself, and what is around its line."""
    for inner, _ in traceback.walk_stack(frame):
        is_own = is_of_script(inner.f_code.co_filename)
        if is_own or is_of_library(inner.f_code.co_filename):
            yield is_own, _around(inner)


def _places(frame: FrameType) -> list[Place]:
    return [(frame.f_code.co_filename, loop.lineno, id(frame)) for loop in source.enclosing_loops(frame)]


def _around(frame: FrameType) -> list[Place | int]:
    """Loops around a line of a frame, as places, and conditions with a remainder, as divisors; the outermost first.

    The frame itself is not kept: it would hold its tensors.
    """
    found: list[Place | int] = []
    path = source.path_to(frame)
    raised: Mapping[str, int] = {}
    for node, inner in zip(path, [*path[1:], None], strict=True):
        if isinstance(node, (ast.For, ast.While)):
            found.append((frame.f_code.co_filename, node.lineno, id(frame)))
            raised = _raised(node.body, frame)
        body = getattr(node, "body", ())
        # That of a lambda is an expression.
        before = body[: body.index(inner)] if isinstance(body, list) and inner in body else ()
        tests = [test for one in before if (test := _left_over(one)) is not None]
        tests += [node.test] if isinstance(node, ast.If) else []
        found += [every for test in tests if (every := _interval(test, frame, raised))]
    return found


def _left_over(node: ast.AST) -> ast.expr | None:
    """The condition of an ``if`` that ends the round, or the function, and leaves out the rest of it."""
    is_one = (
        isinstance(node, ast.If) and not node.orelse and isinstance(node.body[-1], (ast.Continue, ast.Return))
    )
    return node.test if is_one else None  # type: ignore[attr-defined]


def _raised(body: Sequence[ast.stmt], frame: FrameType) -> dict[str, int]:
    """Counters that a loop raises now and then, such as ticks of many steps, with the rounds between."""
    found = {}
    for node, tests, _ in _statements(body, ()):
        if isinstance(node, ast.AugAssign):
            intervals = [every for test in tests if (every := _interval(test, frame))]
            # Nested conditions hold together in every least common multiple.
            found[ast.unparse(node.target)] = math.lcm(*intervals)
    return found


def _unit(depth: int) -> str:
    """Unit of a loop of the script: the innermost counts steps, the next one epochs."""
    return ("steps", "epochs", "job")[min(depth, 2)]


def _pause_of(
    around: Sequence[Sequence[Place | int]],
    loops: Sequence[Place],
    num_samples: int | None,
    *,
    is_after: bool,
) -> CapturedPause | None:
    """Frequency of what happens now, by the loop of the steps around it and the conditions within that loop.

    What comes before the first step without a condition happens once, and is no pause.
    """
    intervals: list[int] = []
    for of_frame in around:
        for one in reversed(of_frame):
            if isinstance(one, int):
                intervals.append(one)
            elif one in loops:
                unit = _unit(len(loops) - 1 - loops.index(one))
                if unit == "steps" and not intervals:
                    return None  # part of each step, as a teacher's forward pass is
                return CapturedPause(unit=unit, every=math.lcm(*intervals), num_samples=num_samples)
    if is_after:  # without a loop of the script it is a library that goes through the epochs
        return CapturedPause(unit="job" if loops else "epochs", num_samples=num_samples)
    # Called by a library's loop, or before the first step: a condition says how often it comes back.
    if not intervals:
        return None
    return CapturedPause(unit="steps", every=math.lcm(*intervals), num_samples=num_samples)


def _interval(
    test: ast.expr, frame: FrameType, raised: Mapping[str, int] | None = None, depth: int = 0
) -> int | None:
    """Steps between those in which a condition holds, by the divisor of a remainder or the distance to a mark.

    0 if the script has switched that off. ``raised`` has the rounds in which a counter is raised once.
    """
    for node in ast.walk(source.written_out(test, frame)):
        if isinstance(node, ast.Compare) and (found := _from_mark(node, frame)):
            return found
        divisor = node.right if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod) else None
        counted = node.left if isinstance(node, ast.BinOp) else None
        if isinstance(node, ast.Call) and depth < _DEEPEST:
            asked = (_interval(inner, frame, raised, depth + 1) for inner in _asked_inside(node, frame))
            if (every := next((one for one in asked if one is not None), None)) is not None:
                return every
        value = None if divisor is None else source.value_in(divisor, frame)
        names = [] if counted is None else [ast.unparse(part) for part in ast.walk(counted)]
        if any(map(_RANK.search, names)):
            continue  # which process does it, not when
        if isinstance(value, (int, float)) and 0 <= value == int(value):
            value = int(value)  # such as 5e3
            added = 1.0 if counted is None else added_per_step(counted, frame)
            rounds = math.prod((raised or {}).get(name, 1) for name in names)
            return rounds * (value if value % added else round(value / added))
    return None


_NAMED = (ast.Name, ast.Attribute)


def _from_mark(test: ast.Compare, frame: FrameType) -> int | None:
    """Steps until a comparison of a counter with an earlier value of it, such as ``step >= saved + 500``, turns."""
    changed = source.changed_around(frame)
    kept = {
        ast.unparse(part): ast.unparse(value)
        for part, node in changed.items()
        if isinstance(part, _NAMED) and isinstance(value := getattr(node, "value", None), _NAMED)
    }
    names = source.parts_in(test) & (kept.keys() | set(map(ast.unparse, changed)))
    for mark in names & kept.keys():
        counter = kept[mark]
        counted = ast.parse(counter, mode="eval").body
        # A better loss or score has an earlier value, too.
        if counter in names and isinstance(source.value_in(counted, frame), int):
            turned = source.first_number(
                functools.partial(_has_turned, source.with_number(test, mark, 0), counter, frame)
            )
            if turned:
                return math.ceil(turned / added_per_step(counted, frame))
    return None


def _has_turned(test: ast.expr, counter: str, frame: FrameType, number: int) -> bool:
    """True if a comparison is no longer what it is at 0."""
    begins, now = (source.evaluated(source.with_number(test, counter, one), frame) for one in (0, number))
    return begins is not None and now is not begins


def _function(call: ast.Call, frame: FrameType) -> FunctionType | None:
    """The function of the script or of a library that is called, without what decorators put around it."""
    known = source.value_in(call.func, frame)
    known = inspect.unwrap(getattr(known, "__func__", known))  # of a bound method
    return known if isinstance(known, FunctionType) and _is_followed(known.__code__) else None


def _words_of(call: ast.Call, frame: FrameType) -> list[ast.stmt]:
    """Statements of a function of the script or a library, with what its caller gives in place of its names."""
    function = _function(call, frame)
    written = None if function is None else source.source_of(function)
    if function is None or not isinstance(written, ast.FunctionDef):
        return []
    names = [argument.arg for argument in written.args.args]
    owner = [call.func.value] if isinstance(call.func, ast.Attribute) and names[:1] == ["self"] else []
    given = dict(zip(reversed(names), reversed(written.args.defaults), strict=False))
    given |= dict(zip(names, [*owner, *call.args], strict=False))
    given |= {word.arg: word.value for word in call.keywords if word.arg}
    known = function.__globals__

    class Writer(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.AST:
            value = known.get(node.id)
            if isinstance(node.ctx, ast.Store):
                return node
            plain = ast.Constant(value) if isinstance(value, (int, float)) else node
            return given.get(node.id, ast.copy_location(plain, node))

        def visit_Assign(self, node: ast.Assign) -> ast.AST:
            self.generic_visit(node)
            if isinstance(node.targets[0], ast.Name):
                # Else a name that is set anew from itself several times, as in a network, grows exponentially.
                is_short = sum(1 for _ in ast.walk(node.value)) <= _MOST_WORDS
                unknown = ast.copy_location(ast.Name("?", ast.Load()), node)
                given[node.targets[0].id] = node.value if is_short else unknown
            return node

    return [Writer().visit(copy.deepcopy(node)) for node in written.body]


def _asked_inside(call: ast.Call, frame: FrameType, *, saves: bool = False) -> Iterator[ast.expr]:
    """Conditions that a function asks and its answers, or those before it saves, in the words of its caller."""
    for node, tests, _ in _statements(_words_of(call, frame), ()):
        if saves and any(
            "save" in source.called_name(one.func) for one in ast.walk(node) if isinstance(one, ast.Call)
        ):
            yield from tests
            return
        if not saves and isinstance(node, ast.Return) and node.value is not None:
            yield from (*tests, node.value)


def _hooks(body: Iterable[ast.AST], frame: FrameType) -> Iterator[ast.Call]:
    """Calls of a method of each of several objects, such as the hooks of a trainer, that a loop goes through."""
    for loop in (node for top in body for node in ast.walk(top) if isinstance(node, ast.For)):
        several = source.value_in(loop.iter, frame)
        for call in (node for top in loop.body for node in ast.walk(top) if isinstance(node, ast.Call)):
            if not isinstance(call.func, ast.Attribute) or not isinstance(several, (list, tuple)):
                continue
            if ast.unparse(call.func.value) == ast.unparse(loop.target):
                for index in range(min(len(several), _MOST_HOOKS)):
                    item = ast.Subscript(loop.iter, ast.Constant(index), ast.Load())
                    method = ast.Attribute(item, call.func.attr, ast.Load())
                    found = ast.Call(method, call.args, call.keywords)
                    yield ast.fix_missing_locations(ast.copy_location(found, call))


def _is_false(test: ast.expr, frame: FrameType) -> bool:
    """True if a condition without a remainder, or a part that all others wait for, does not hold for this script."""
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        return any(_is_false(part, frame) for part in test.values)
    names = source.parts_in(test)
    if any(isinstance(node, (ast.Mod, ast.Call)) for node in ast.walk(test)) or not names:
        return False
    if names & {part.id for part in source.changed_around(frame) if isinstance(part, ast.Name)}:
        return False
    return source.evaluated(ast.fix_missing_locations(ast.UnaryOp(ast.Not(), test)), frame) is True


def _is_last(test: ast.expr, frame: FrameType) -> bool:
    """True for a condition that holds in one late round of a loop, such as ``epoch + 1 == epochs``."""
    changed = set(map(ast.unparse, source.changed_around(frame)))
    for node in ast.walk(source.written_out(test, frame)):
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Eq):
            for one, other in ((node.left, node.comparators[0]), (node.comparators[0], node.left)):
                counters = set() if isinstance(one, ast.Call) else source.parts_in(one) & changed
                bound = source.value_in(other, frame)
                if counters and isinstance(bound, int) and bound > _FEW:
                    return not source.parts_in(other) & changed
    return False


def _read(frames: Sequence[FrameType], depth: int) -> Iterator[tuple[str, CapturedPause, bool]]:
    """Calls that evaluate or save in the loops around the step and after them, the innermost loops first.

    ``depth`` is that of the innermost loop. The last of each tells whether it stands under a condition that is no
    matter of values, such as a better loss.
    """
    num_loops = depth + sum(len(source.enclosing_loops(frame)) for frame in frames)
    for frame in frames:
        path, own = source.path_to(frame), source.enclosing_loops(frame)
        for loop in reversed(own):
            around = [node for node in own if node is not loop]
            yield from _read_calls(loop.body, around, frame, _unit(depth))
            depth += 1
        first = max((i for i, node in enumerate(path) if isinstance(
            node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Module))), default=0)  # fmt: skip
        line = (own[0].end_lineno if own else frame.f_lineno) or 0
        blocks = path[first : path.index(own[0]) if own else None]  # such as ``if __name__ == "__main__":``
        bodies = (getattr(node, "body", ()) for node in reversed(blocks))
        rest = [node for body in bodies if isinstance(body, list) for node in body if node.lineno > line]
        if depth:
            yield from _read_calls(rest, (), frame, "job" if depth >= num_loops else _unit(depth))


def _read_calls(
    body: Sequence[ast.stmt], leave_out: Sequence[ast.AST], frame: FrameType, unit: str
) -> Iterator[tuple[str, CapturedPause, bool]]:
    calls = list(_calls(body, leave_out))
    inside = [node for call, *_ in calls for node in _words_of(call, frame)]
    hooks = (_calls(_words_of(hook, frame), ()) for hook in _hooks([*body, *inside], frame))
    calls += [one for calls_of in hooks for one in calls_of if source.called_name(one[0].func) != "eval"]
    raised = _raised(body, frame)
    draws = {tests for call, tests, _ in calls if _SAMPLES.search(source.called_name(call.func))}
    found: list[tuple[bool, str, CapturedPause, bool]] = []
    others = _from_other_data(body)
    kinds = ((*one, kind) for one in calls for kind in _kinds_of(one[0], one[2], frame, others))
    for call, tests, _, kind in kinds:
        if source.called_name(call.func) == "eval" and (tests in draws or not _is_tried(call, body, frame)):
            continue  # it draws samples there, shows a few, or puts a network aside for a moment
        asked = tuple(_asked_inside(call, frame, saves=True)) if kind == "checkpoints" else ()
        if any(_is_false(test, frame) for test in (*tests, *asked)):
            continue
        intervals = [n for test in (*tests, *asked) if (n := _interval(test, frame, raised)) is not None]
        every = math.lcm(*intervals) if intervals else None  # all conditions around it hold
        is_last = every is None and any(_is_last(test, frame) for test in tests)
        if every == 0 and any(isinstance(part, ast.Or) for test in tests for part in ast.walk(test)):
            is_last = True  # otherwise never
        elif every == 0 or (unit == "steps" and every is None and not is_last):
            continue  # never; or part of each step, or under a condition that is not read
        samples = next((n for given in call.args if (n := _samples_in(given, frame))), None)
        parts = (part for test in (*tests, *asked) for part in ast.walk(test))
        is_of_values = any(isinstance(part, (ast.Lt, ast.LtE, ast.Gt, ast.GtE)) for part in parts)
        pause = CapturedPause(unit="job" if is_last else unit, every=every or 1, num_samples=samples)
        found.append((is_of_values and every is None, kind, pause, bool(tests) and not is_of_values))
    # What comes for certain is said before what a better loss brings.
    yield from (one[1:] for one in sorted(found, key=lambda one: one[0]))


def _is_tried(call: ast.Call, body: Sequence[ast.stmt], frame: FrameType) -> bool:
    """True if a network whose mode a call changes meets a data set, or other data, before its mode changes again."""
    network = ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""
    lines = {node: getattr(node, "lineno", 0) for top in body for node in ast.walk(top)}
    modes = [
        node for node in lines if isinstance(node, ast.Call) and source.called_name(node.func) == "train"
    ]
    turns = [lines[node] for node in modes if ast.unparse(node.func).startswith(network)]
    end = min((line for line in turns if line > call.lineno), default=math.inf)
    rest = [node for node, line in lines.items() if call.lineno < line < end]
    calls = [
        node
        for node in rest
        if isinstance(node, ast.Call) and not SAVES.search(source.called_name(node.func))
    ]
    calls = [node for node in calls if source.called_name(node.func) != "eval"]
    if any(_EVALUATES.search(source.called_name(node.func)) for node in calls):
        return True
    given = [
        one for node in calls for one in (node.func, *node.args, *(word.value for word in node.keywords))
    ]
    if not any(f"{network}.".startswith(f"{ast.unparse(one)}.") for one in given):
        return False
    loops = (source.called_name(getattr(one.iter, "func", one.iter)) for one in _loops_in(rest, frame))
    words = {getattr(node, "id", getattr(node, "attr", "")) for node in rest} - {"eval"}
    return any(name not in source.RANGES for name in loops) or any(map(_OTHER_DATA.search, words))


def _calls(
    body: Sequence[ast.stmt], leave_out: Sequence[ast.AST]
) -> Iterator[tuple[ast.Call, tuple[ast.expr, ...], Sequence[ast.stmt]]]:
    """Calls in statements, conditions around them, and what a ``with`` encloses; inner loops are left out."""
    for node, tests, within in _statements(body, leave_out):
        for inner in ast.walk(node):
            if isinstance(inner, ast.Call):
                yield inner, tests, within


def _statements(
    body: Sequence[ast.stmt], leave_out: Sequence[ast.AST], tests: tuple[ast.expr, ...] = ()
) -> Iterator[tuple[ast.AST, tuple[ast.expr, ...], Sequence[ast.stmt]]]:
    """Plain statements and what a ``with`` opens, with the conditions around them."""
    for node in body:
        if isinstance(node, ast.If):
            yield from _statements(node.body, leave_out, (*tests, node.test))
            yield from _statements(node.orelse, leave_out, tests)
            if (left_over := _left_over(node)) is not None:
                tests = (*tests, ast.UnaryOp(ast.Not(), left_over))
        elif isinstance(node, (ast.With, ast.Try, ast.For, ast.While)):
            if node not in leave_out:
                for item in getattr(node, "items", ()):
                    yield item.context_expr, tests, node.body
                yield from _statements(node.body, leave_out, tests)
        elif not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node, tests, ()


def _from_other_data(body: Sequence[ast.stmt]) -> set[str]:
    """Names that are set in loops through other data, such as ``for images in dev_batches():``."""
    loops = (node for top in body for node in ast.walk(top) if isinstance(node, ast.For))
    inside = (node for loop in loops if _names_other_data(loop.iter) for node in ast.walk(loop))
    return {node.id for node in inside if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def _kinds_of(
    call: ast.Call, within: Sequence[ast.stmt], frame: FrameType, others: set[str]
) -> Iterator[str]:
    """Kinds of a call: a function that evaluates may save as well, such as the best weights so far."""
    if kind := _kind_of(call, within, frame, others):
        yield kind
    known = _function(call, frame) if kind == "validation" else None
    if known is not None and _saves(known.__code__, known.__globals__):
        yield "checkpoints"


def _kind_of(call: ast.Call, within: Sequence[ast.stmt], frame: FrameType, others: set[str]) -> str:
    """``validation``, ``checkpoints`` or nothing, by the name of what is called, and what a function itself calls.

    ``others`` has the names of batches of other data.
    """
    function, name = call.func, source.called_name(call.func)
    owner = ast.unparse(function.value) if isinstance(function, ast.Attribute) else ""
    if _EVALUATES.search(name) and (
        name != "eval" or (isinstance(function, ast.Attribute) and not call.args)
    ):
        return "validation"
    if SAVES.search(name) or (owner, name) == ("pickle", "dump"):
        is_other = _OF_OTHERS.search(owner) or _OTHER_FILES.search(ast.unparse(call))
        of_figures = call.args and _FIGURES.search(ast.unparse(call.args[0]))
        return "" if is_other or of_figures else "checkpoints"
    if name in ("no_grad", "inference_mode"):
        return "validation" if _goes_through(within, frame) else ""
    import torch  # commands that start a script read this module, and load no framework

    known = source.value_in(function, frame)
    is_network = isinstance(known, torch.nn.Module)
    if is_network and any(_names_other_data(given) or source.parts_in(given) & others for given in call.args):
        return "validation"  # with gradients, and without evaluation mode
    known = None if set(name.split("_")) & set(_OTHER_SAVERS) else _function(call, frame)
    return "checkpoints" if known is not None and _saves(known.__code__, known.__globals__) else ""


def _names_other_data(given: ast.expr) -> bool:
    return any(_OTHER_DATA.search(getattr(node, "id", getattr(node, "attr", ""))) for node in ast.walk(given))


def _goes_through(body: Sequence[ast.stmt], frame: FrameType) -> bool:
    """True if statements without gradients, or a function that they call, go through data, and draw no samples."""
    nodes = [node for top in body for node in ast.walk(top)]
    names = [source.called_name(node.func) for node in nodes if isinstance(node, ast.Call)]
    if any(_SAMPLES.search(name) or _UPDATES.search(name) for name in names):
        return False
    loops = _loops_in(nodes, frame)
    return any(isinstance(node, ast.Call) for loop in loops for top in loop.body for node in ast.walk(top))


def _loops_in(nodes: Sequence[ast.AST], frame: FrameType) -> list[ast.For]:
    """Loops, other than those through parameters, in nodes and in the functions that they call."""
    # Not methods: those of a network go through its layers.
    called = (source.value_in(node.func, frame) for node in nodes if isinstance(node, ast.Call))
    known = [one for one in called if isinstance(one, FunctionType) and _is_followed(one.__code__)]
    inside = [node for found in known for node in ast.walk(source.source_of(found))]
    every = (node for node in [*nodes, *inside] if isinstance(node, ast.For))
    return [loop for loop in every if "param" not in ast.unparse(loop.iter)]


def _is_followed(code: CodeType) -> bool:
    return is_of_script(code.co_filename) or is_of_library(code.co_filename)


def _saves(code: CodeType, names: dict[str, Any], depth: int = 0) -> bool:
    """True if a function, or one that it calls, saves."""
    if "save" in code.co_names and re.search(r"\btorch\b|checkpointer\b", " ".join(code.co_names)):
        return True
    if "save_pretrained" in code.co_names:
        return True
    inner = (names.get(name) for name in code.co_names)
    return depth < _DEEPEST and any(
        _saves(found.__code__, found.__globals__, depth + 1)
        for found in inner
        if isinstance(found, FunctionType) and _is_followed(found.__code__) and found.__code__ is not code
    )


def _samples_in(given: ast.expr, frame: FrameType) -> int | None:
    """Samples of a loader that a function gets."""
    try:
        return len(source.value_in(given, frame).dataset)
    except Exception:  # anything else than a loader
        return None
