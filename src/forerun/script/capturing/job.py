"""The length of a captured script's job: what its trainer, its loops, its arguments and its schedule say of it.

The loops around a step are read from the source, with the values that their bounds have while the step runs. Where two
sources disagree, the one that ends the script counts, and a note says both.
"""

from __future__ import annotations

import ast
import functools
import gc
import itertools
import math
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType, FunctionType, ModuleType
from typing import Any

from forerun.script.capturing import source
from forerun.script.patching import capture_state, is_of_script, length_of, tables


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """A script at the moment when its steps have been recorded.

    Attributes:
        num_steps: Steps so far.
        num_micro_steps: Micro-steps of a step.
        num_fetches: Batches of the loader that a step takes; 0 without a loader.
        num_batches, num_samples: Length of that loader and of its data set; None if they have none.
        trainer: ``num_steps``, ``num_epochs`` and ``steps_per_epoch`` as a framework's trainer says them.
        keeps_last: Whether a step of fewer micro-steps ends an epoch, as far as a framework says it.
    """

    num_steps: int
    num_micro_steps: int = 1
    num_fetches: int = 0
    num_batches: int | None = None
    num_samples: int | None = None
    trainer: Mapping[str, Any] | None = None
    keeps_last: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Length of a job; None where it is not known.

    Attributes:
        epochs: Passes over the data.
        steps_per_epoch: Steps of a pass.
        max_steps: Steps of the whole job, if they are not those of its epochs.
        notes: Sources that disagree, in words.
    """

    epochs: float | None = None
    steps_per_epoch: int | None = None
    max_steps: int | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """One loop of the script around a step.

    Attributes:
        rounds: Number of its rounds; None if they are not counted.
        is_cut: Whether it is left before what it goes through has ended.
        is_data: Whether it goes through data, and not through numbers.
        is_of_argument: Whether its rounds are the length of what it gives to a function, which may be a data set whose
            loader is made there.
        most_steps: Steps of the whole job, by a limit at which the loop is left; None without one.
        begins_anew: Whether that limit is one of each round of a loop around it, where its counter begins anew.
        seen_steps: Steps in a loop through numbers, by the rounds between those that were seen.
        is_update_skipped: Whether some of its rounds leave the update out.
        keeps_rest: Whether the last of its rounds never does.
        names_epochs: Whether its counter is called after epochs.
        place: File and line.
    """

    rounds: int | None = None
    is_cut: bool = False
    is_data: bool = False
    is_of_argument: bool = False
    most_steps: int | None = None
    begins_anew: bool = False
    seen_steps: int | None = None
    is_update_skipped: bool = False
    keeps_rest: bool = False
    names_epochs: bool = False
    place: str = ""


class Counters:
    """Numbers that the loops around the steps count, as they were at the end of each step.

    What a step adds to them is seen, not read: batches, samples, rounds of which few make a step, or what another
    function raises. A loop that is in the same round at the end of each step is a part of a step.
    """

    def __init__(self) -> None:
        self._seen: dict[tuple[str, int, str], list[int]] = {}
        self._rounds: dict[tuple[str, int], list[Any]] = {}
        self._num_late = 0

    def note(self, frame: FrameType | None) -> None:
        """Takes their values at the end of a step."""
        # Commands that read what a script says of its job need no framework.
        from forerun.script.capturing.steps import first_tensor

        for inner, loop in source.loops_outwards(frame):
            place = inner.f_code.co_filename, loop.lineno
            values: dict[str, Any] = {limit.counter: limit.value for limit in _limits(loop, inner)}
            raised = (node.target for node in ast.walk(loop) if isinstance(node, ast.AugAssign))
            for written in map(ast.unparse, raised):  # the target as an expression that can be asked
                values[written] = source.value_in(ast.parse(written, mode="eval").body, inner)
            if isinstance(loop, ast.For):
                names = [node.id for node in ast.walk(loop.target) if isinstance(node, ast.Name)]
                items = [inner.f_locals.get(name) for name in names]
                # A round of data is another one, and its tensors are not kept alive.
                plain = [i for i in items if isinstance(i, (int, str, Mapping)) and first_tensor(i) is None]
                self._rounds.setdefault(place, []).append(plain or object())
                values |= dict(zip(names, items, strict=True))
            for counter, value in values.items():
                if type(value) is int:
                    self._seen.setdefault((*place, counter), []).append(value)

    def in_whole_rounds(self, frame: FrameType | None, num_steps: int, *, is_step: bool) -> int | None:
        """Steps of the job, once the outermost loop has begun its second round; None before.

        Args:
            frame: Innermost frame, after the recorded steps.
            num_steps: Steps up to the recorded ones.
            is_step: Whether a step ends now; else it is a pass before one, such as that of a rollout.
        """
        self._num_late += is_step
        around = list(source.loops_outwards(frame))
        # Rounds of which values decide how long they are, such as episodes, say nothing of one another.
        if len(around) < 2 or any(_is_open(loop, inner) for inner, loop in around[:-1]):
            return None
        inner, loop = around[-1]
        ends: list[tuple[str, Any, int]] = []
        if isinstance(loop, ast.While):
            ends += [(limit.counter, limit.value, limit.bound) for limit in _limits(loop, inner)]
        elif isinstance(loop.target, ast.Name):
            rounds, is_data, _ = _rounds(loop.iter, inner)
            if rounds and not is_data:
                ends.append((loop.target.id, inner.f_locals.get(loop.target.id), rounds))
        for counter, value, bound in ends:
            seen = self._seen.get((inner.f_code.co_filename, loop.lineno, counter), ())
            if seen and isinstance(value, int) and seen[0] == seen[-1] < value:
                added = value - seen[0] if is_step else seen[0]  # it begins at 0
                return math.ceil(bound / added) * (num_steps + self._num_late - is_step) if added else None
        return None

    def of(self, loop: ast.For | ast.While, frame: FrameType, counter: str) -> tuple[int, float]:
        """A counter's first value, and the mean of what a step adds; 0 if it was not seen to grow."""
        place = frame.f_code.co_filename, loop.lineno, counter
        return self._seen.get(place, [0])[0], self._added(*place)

    def _added(self, *place: Any) -> float:
        added = [b - a for a, b in itertools.pairwise(self._seen.get(place, ())) if b >= a]
        return sum(added) / len(added) if added else 0.0

    def close(self, frame: FrameType | None) -> None:
        """Leaves out loops that are parts of a step: inner ones, of two rounds or more."""
        for inner, loop in list(source.loops_outwards(frame))[:-1]:
            place = inner.f_code.co_filename, loop.lineno
            first, *more = self._rounds.pop(place, [None])
            is_same = bool(more) and all(_are_same(first, items) for items in more)
            if not is_same or not isinstance(loop, ast.For) or _rounds(loop.iter, inner)[0] == 1:
                break
            capture_state().within_steps.add(place)
        self._rounds.clear()
        for path, line, counter in self._seen:
            capture_state().per_step[path, counter] = self._added(path, line, counter)


def _is_open(loop: ast.For | ast.While, frame: FrameType) -> bool:
    """True for a loop that no counter ends, such as one through ``itertools.count()``."""
    if isinstance(loop, ast.While):
        return not any(True for _ in _limits(loop, frame))
    return isinstance(loop.iter, ast.Call) and source.called_name(loop.iter.func) == "count"


def added_per_step(counted: ast.expr, frame: FrameType) -> float:
    """Number that a step adds to a counter in an expression, such as 4 batches; 1 if it is not known."""
    for node in ast.walk(counted):
        if isinstance(node, (ast.Name, ast.Attribute)):
            found = capture_state().per_step.get((frame.f_code.co_filename, ast.unparse(node)), 0.0)
            if found > 1:
                return found
    return 1.0


def _are_same(*rounds: Any) -> bool:
    return all(isinstance(items, list) for items in rounds) and all(
        a is b or (isinstance(a, (int, str)) and a == b) for a, b in zip(*rounds, strict=False)
    )


def job_of(frame: FrameType | None, progress: Progress, counters: Counters | None = None) -> Job:
    """The job of the script that a frame belongs to.

    A trainer of a framework knows its job. Else the loops count: the epochs are the rounds of the loops around the one
    that goes through the data; a loop that is left at a number of steps ends the job there. Arguments and variables
    with usual names (``epochs``, ``max_iters``) count where no loop says it.
    """
    trainer = progress.trainer or {}
    loops = _without_other_lists(loops_around(frame, progress.num_steps, counters), progress)
    named_epochs = named_length(frame, EPOCH_NAMES, capture_state().options)
    counted = next((loop.rounds for loop in loops if loop.names_epochs and loop.rounds), None)
    named_epochs = named_epochs or (None if counted is None else NamedLength(name="epochs", value=counted))
    named_steps = named_length(frame, STEP_NAMES, capture_state().options)
    # Rounds within an epoch that are counted go through a loader as often as they need it.
    of_ranges = _of_ranges(loops, named_epochs.value, progress) if named_epochs is not None else None
    per_epoch = trainer.get("steps_per_epoch") or (of_ranges if len(loops) > 1 else None)
    anew = next((loop.most_steps for loop in loops[1:] if loop.begins_anew), None)
    per_epoch = per_epoch or anew or _steps_per_epoch(loops, progress) or of_ranges
    of_loops, limit = _counted(loops, per_epoch)
    if len(loops) == 1 and per_epoch == 1 and limit == (named_epochs and named_epochs.value):
        limit = None
    limit_place = next((loop.place for loop in loops if loop.most_steps is not None), "")
    given = trainer.get("num_epochs")
    epochs = (float(given) if given else None) or of_loops or (named_epochs.value if named_epochs else None)
    if trainer.get("num_steps"):
        limit = int(trainer["num_steps"])
    elif limit is None and named_steps is not None and (of_loops is None or per_epoch is None):
        limit = round(named_steps.value)
    notes: list[str] = []
    if named_epochs is not None and of_loops not in (None, named_epochs.value) and not trainer:
        notes.append(
            f"the epochs: {named_epochs.name} is {named_epochs.value:g}, the loop around the step makes {of_loops:g}, "
            "which count"
        )
    # 0.1 epochs of 10 steps is one step, not two by the last bit of a product.
    whole = None if epochs is None or per_epoch is None else math.ceil(epochs * per_epoch - 1e-9)
    if whole and limit and of_loops is None and not trainer and limit > whole and not limit % whole:
        whole, epochs = None, None  # a job made several times, such as once for each setting of a list
    batches, fetches = _batches_of_pass(loops, progress)
    if whole is not None and batches is not None and epochs and not trainer and _carries_rest(frame):
        whole = max(whole, math.floor(epochs * batches / fetches + 1e-9))
    total = min((number for number in (limit, whole) if number is not None), default=None)
    planned = _planned_steps(progress.num_steps)
    if total is None and planned is not None:
        total = limit = planned
        notes.append(
            "the length of the job: nothing but the schedule of the learning rate says it, which counts"
        )
    elif total is not None and planned is not None and planned != total:
        notes.append(
            f"the length of the job: the schedule of the learning rate plans {planned:,} steps, the script makes "
            f"{total:,}, which count"
        )
    # What the loops do counts before what a setting is called: both are said where they disagree.
    is_other = named_steps is not None and named_steps.is_sure and round(named_steps.value) != total
    if named_steps is not None and is_other and total is not None and not trainer:
        why = f"it ends at {limit_place}" if limit_place else f"{epochs or 0:g} epochs have no more"
        notes.append(
            f"the length of the job: {named_steps.name} is {named_steps.value:,.0f}, the script makes {total:,} steps, "
            f"because {why}"
        )
    is_of_epochs = bool(epochs and per_epoch) and total == math.ceil((epochs or 0) * (per_epoch or 0) - 1e-9)
    # A step may begin in one epoch and end in the next: the epochs stay those of the script.
    if total is not None and total != whole:
        epochs = total / per_epoch if per_epoch else None
    total = None if is_of_epochs else total
    return Job(epochs=epochs, steps_per_epoch=per_epoch, max_steps=total, notes=tuple(notes))


def _without_other_lists(loops: Sequence[Loop], progress: Progress) -> list[Loop]:
    """Loops of which those around another one go through the loader's batches, or else through no data."""
    if progress.num_batches is None:
        return [*loops]
    kept = (None, progress.num_batches)
    return [
        replace(o, is_data=o.is_data and (o is loops[-1] or o.is_of_argument or o.rounds in kept))
        for o in loops
    ]


def _steps_per_epoch(loops: Sequence[Loop], progress: Progress) -> int | None:
    """Steps of a pass over the data."""
    batches, fetches = _batches_of_pass(loops, progress)
    if batches is None:
        return None
    keeps_rest = progress.keeps_last or any(loop.keeps_rest for loop in loops if loop.is_data and loop.rounds)
    return max(1, math.ceil(batches / fetches) if keeps_rest else batches // fetches)


def _batches_of_pass(loops: Sequence[Loop], progress: Progress) -> tuple[int | None, int]:
    """Batches of a pass over the data, by the loop that goes through it or the loader; and those that a step takes."""
    data = next((loop for loop in loops if loop.is_data and loop.rounds), None)
    batches = data.rounds if data is not None else progress.num_batches
    # An object around the loader may say how many samples it has.
    is_other = data is not None and (
        data.is_of_argument or (progress.num_fetches and batches == progress.num_samples)
    )
    if is_other and progress.num_batches is not None:
        batches = progress.num_batches
    is_whole = not progress.num_fetches and batches == progress.num_batches
    if data is not None and batches is not None and is_whole:
        # A batch of the loader is a list of batches, through which an inner loop goes.
        batches *= math.prod(o.rounds or 1 for o in loops[loops.index(data) + 1 :] if o.is_data)
    fetches = progress.num_fetches or progress.num_micro_steps
    if data is not None and not data.is_update_skipped and not progress.num_fetches:
        fetches = 1  # micro-steps are inside the loop's rounds
    if data is not None and fetches > 1 and not data.is_cut and progress.num_batches not in (None, batches):
        fetches = 1  # a loop over something else than the loader's batches
    return (batches if batches is not None and batches < source.ENDLESS else None), fetches


def _of_ranges(loops: Sequence[Loop], epochs: float, progress: Progress) -> int | None:
    """Steps of a pass where all loops go through numbers, the outer ones through as many as there are epochs.

    A single loop of as many rounds goes through the whole data in each, if no loader gives it a part.
    """
    counts = [loop.rounds for loop in loops]
    if any(loop.is_data for loop in loops) or None in counts:
        return None
    if len(loops) < 2:
        return 1 if counts == [epochs] and not progress.num_fetches else None
    *outer, inner = (count or 0 for count in counts)
    return max(1, inner) if math.prod(outer) == epochs else None


def _counted(loops: Sequence[Loop], per_epoch: int | None) -> tuple[float | None, int | None]:
    """Epochs, and steps of the job, as far as the loops count them.

    An inner loop that is left after as many steps as an epoch has ends the epoch, and not the job.
    """
    limits = [
        loop.most_steps
        for place, loop in enumerate(loops)
        if loop.most_steps is not None and not (place and (loop.begins_anew or loop.most_steps == per_epoch))
    ]
    place = next((i for i, loop in enumerate(loops) if loop.is_data or (i and loop.begins_anew)), None)
    outer = loops if place is None else loops[:place]
    counts = [loop.rounds for loop in outer]
    rounds = math.prod(count for count in counts if count is not None)
    is_counted = bool(counts) and None not in counts and 0 < rounds < source.ENDLESS
    if place is not None:
        return (float(rounds) if is_counted else None), min(limits, default=None)
    if is_counted:
        limits += [rounds, *(loop.seen_steps for loop in loops[:-1] if loop.seen_steps is not None)]
    return None, min(limits, default=None)


def _planned_steps(num_steps: int) -> int | None:
    """Steps for which a schedule of the learning rate is made that follows every step; None without one."""
    from torch.optim.lr_scheduler import LRScheduler

    for thing in gc.get_objects():
        # By its type: asking an object for its class runs the code of proxies and lazy modules.
        if issubclass(type(thing), LRScheduler) and thing.last_epoch >= num_steps - 1:
            functions = getattr(thing, "lr_lambdas", ())
            given = [getattr(function, "keywords", {}).get("num_training_steps") for function in functions]
            for total in (getattr(thing, "total_steps", None), getattr(thing, "T_max", None), *given):
                if isinstance(total, (int, float)) and 0 < total < source.ENDLESS:
                    return round(total)
    return None


_AROUND = ("tqdm", "track", "progress_bar", "master_bar", "enumerate", "iter", "list", "reversed")


def loops_around(frame: FrameType | None, num_steps: int = 1, counters: Counters | None = None) -> list[Loop]:
    """The loops around a frame, the outermost first; those of a library where the script has none.

    Args:
        frame: Innermost frame.
        num_steps: Steps so far.
        counters: What these steps added to the counters of the loops.
    """
    around = enumerate(source.loops_outwards(frame))
    counters = counters or Counters()
    return [_read(loop, inner, num_steps, counters, is_outer=i > 0) for i, (inner, loop) in around][::-1]


def _read(
    loop: ast.For | ast.While, frame: FrameType, num_steps: int, counters: Counters, *, is_outer: bool
) -> Loop:
    rounds, is_data, is_of_argument = (
        (None, False, False) if isinstance(loop, ast.While) else _rounds(loop.iter, frame)
    )
    own = set() if isinstance(loop, ast.While) else {ast.unparse(n) for n in ast.walk(loop.target)}
    most_steps, begins_anew, is_cut = None, False, False
    for limit in _limits(loop, frame):
        first, added = counters.of(loop, frame, limit.counter)
        if limit.counter in own:
            # A round that is left behind the step has made it.
            most = limit.bound - _first_of(loop, frame) + (limit.line > frame.f_lineno)
            is_cut |= rounds is None or most < rounds
            rounds = most if rounds is None else min(rounds, most)
        elif added:
            steps = _until(limit, loop, frame, first, added)
            is_anew = _begins_anew(limit.counter, loop, frame)
            # Else it is no limit of this loop: there were as many.
            if (steps >= num_steps or is_anew) and (most_steps is None or steps < most_steps):
                most_steps, begins_anew = steps, is_anew
        elif is_outer and isinstance(loop, ast.While) and rounds is None and limit.is_raised:
            rounds = limit.bound - limit.value  # it counts epochs
    seen_steps = None
    if isinstance(loop, ast.For) and rounds is not None and not is_data:
        seen_steps = _seen_steps(loop, frame, rounds, counters)
        rounds = rounds if is_outer or seen_steps is None else seen_steps
    skipping = _tests_with_remainder(loop, frame)
    return Loop(
        rounds=rounds, is_cut=is_cut, is_data=is_data, is_of_argument=is_of_argument, most_steps=most_steps,
        begins_anew=begins_anew, seen_steps=seen_steps, is_update_skipped=bool(skipping),
        keeps_rest=any(isinstance(part, ast.Or) for test in skipping for part in ast.walk(test)),
        names_epochs=any("epoch" in name for name in own),
        place=f"{Path(frame.f_code.co_filename).name}, line {loop.lineno}",
    )  # fmt: skip


def _begins_anew(counter: str, loop: ast.For | ast.While, frame: FrameType) -> bool:
    """True if a counter is set outside of its loop in each round of the next one, or in each call of its function."""
    around = source.enclosing_loops(frame)
    if around[0] is loop:
        return counter in frame.f_code.co_varnames
    inside = set(ast.walk(loop))
    sets = source.parts_set(around[around.index(loop) - 1])
    return any(
        isinstance(node, ast.Assign) and node not in inside and ast.unparse(part) == counter
        for part, node in sets
    )


def _tests_with_remainder(loop: ast.For | ast.While, frame: FrameType) -> list[ast.expr]:
    """Conditions within a loop around a frame's line that hold every so many rounds."""
    inside = source.path_to(frame)
    tests = [
        source.written_out(node.test, frame)
        for node in inside[inside.index(loop) + 1 :]
        if isinstance(node, ast.If)
    ]
    return [test for test in tests if any(isinstance(part, ast.Mod) for part in ast.walk(test))]


def _carries_rest(frame: FrameType | None) -> bool:
    """True if rounds without an update are counted on from epoch to epoch: a step may begin in one and end in the next.

    Their counter is raised in the innermost loop, and none of the loops sets it anew.
    """
    frames = source.frames_around(frame)
    around = [(inner, loops) for inner in frames if (loops := source.enclosing_loops(inner))]
    for inner, loops in around[:1]:
        nodes = [node for test in _tests_with_remainder(loops[-1], inner) for node in ast.walk(test)]
        divided = [n.left for n in nodes if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Mod)]
        raised: set[str] = set()
        others: set[str] = set()
        for part, node in source.changed_around(inner).items():
            (raised if isinstance(node, ast.AugAssign) else others).add(ast.unparse(part))
        kept = set().union(*map(source.parts_in, divided)) & raised - others
        # A function's own variable begins anew with each call.
        kept -= set(inner.f_code.co_varnames) if len(around) > 1 else set()
        return bool(kept) and not any(isinstance(node, ast.Or) for node in nodes)
    return False


def round_of(frame: FrameType | None) -> tuple[Any, ...]:
    """The innermost loop around a frame's line, and what tells its rounds apart; empty without one.

    They are told apart by what the loop goes through, or by the counters that end it.
    """
    for inner, loop in source.loops_outwards(frame):
        place = inner.f_code.co_filename, loop.lineno
        if isinstance(loop, ast.While):
            return place, *(limit.value for limit in _limits(loop, inner))
        names = (node.id for node in ast.walk(loop.target) if isinstance(node, ast.Name))
        found = map(inner.f_locals.get, names)
        return place, *(item if isinstance(item, int) else id(item) for item in found)
    return ()


def _first_of(loop: ast.For | ast.While, frame: FrameType) -> int:
    """First number that ``range`` or ``enumerate`` gives to a loop."""
    nodes = ast.walk(loop.iter) if isinstance(loop, ast.For) else ()
    for call in (node for node in nodes if isinstance(node, ast.Call)):
        name = source.called_name(call.func)
        given = [*call.args, *(word.value for word in call.keywords if word.arg == "start")]
        if name in ("enumerate", *source.RANGES) and len(given) > 1:
            first = source.value_in(given[name == "enumerate"], frame)
            return first if isinstance(first, int) else 0
    return 0


def _until(limit: _Limit, loop: ast.For | ast.While, frame: FrameType, first: int, added: float) -> int:
    """Steps until a limit is met, by the lines at which the counter is raised and compared around the step."""
    sets = (node for part, node in source.parts_set(loop) if ast.unparse(part) == limit.counter)
    raised = next((node.lineno for node in sets if isinstance(node, (ast.AugAssign, ast.Assign))), limit.line)
    if limit.line <= frame.f_lineno:  # compared before the step
        compared = first - added * (limit.line < raised <= frame.f_lineno)
        return math.floor((limit.bound - 1 - compared) / added + 1e-9) + 1
    compared = first + added * (frame.f_lineno < raised < limit.line)
    return math.ceil((limit.bound - compared) / added - 1e-9) + 1


def _seen_steps(loop: ast.For, frame: FrameType, rounds: int, counters: Counters) -> int | None:
    """Steps in a loop through numbers from its first step on, by the rounds between those seen; None in one round."""
    if not isinstance(loop.target, ast.Name) or not isinstance(loop.iter, ast.Call):
        return None
    first, added = counters.of(loop, frame, loop.target.id)
    values = [source.value_in(argument, frame) for argument in loop.iter.args]
    if not added or not all(isinstance(value, int) for value in values) or not values:
        return None
    numbers = range(*values)
    if first not in numbers:
        return None
    share, start = added / abs(numbers.step), numbers.index(first)
    # Without an optimizer a step ends where the next one begins, in the second round.
    return math.ceil((rounds - (start if start > 1 or share > 1 else 0)) / share - 1e-9)


def _rounds(found: ast.expr, frame: FrameType) -> tuple[int | None, bool, bool]:
    """Number of items that a loop goes through, None if not known; whether they are data; ``Loop.is_of_argument``."""
    while isinstance(found, ast.Call) and source.called_name(found.func) in _AROUND and found.args:
        found = found.args[0]
    if isinstance(found, (ast.List, ast.Tuple)):  # written out, such as the lengths of phases
        return len(found.elts), False, False
    if (splits := _splits(found, frame)) is not None:
        return splits, False, False
    if not isinstance(found, ast.Call):
        value = source.value_in(found, frame)
        value = getattr(value, "__dict__", {}).get("iterable", value)  # of a bar of progress
        return _length(value), not isinstance(value, range), False
    values = [source.value_in(argument, frame) for argument in found.args]
    if source.called_name(found.func) in source.RANGES:
        is_known = bool(values) and all(isinstance(value, int) for value in values)
        if is_known and (phases := _phases(found.args[-1], frame)):
            return sum(phases) // len(phases), False, False
        return (len(range(*values)) if is_known else None), False, False
    lengths = [length for value in values if (length := _length(value)) is not None]
    is_cut = source.called_name(found.func) == "islice" and len(values) > 1 and isinstance(values[1], int)
    if is_cut:
        lengths.append(values[1])
    # Another function goes through what it is given, as torchvision's log_every does.
    return min(lengths, default=None), True, not is_cut


def _splits(found: ast.expr, frame: FrameType) -> int | None:
    """Number of folds, each of which trains anew, where a loop goes through scikit-learn's splits; else None."""
    function = found.func if isinstance(found, ast.Call) else None
    if isinstance(function, ast.Attribute):
        owner = source.evaluated(function.value, frame)
    else:
        owner = getattr(getattr(source.value_in(found, frame), "gi_frame", None), "f_locals", {}).get("self")
    number = getattr(owner, "n_splits", None) if hasattr(type(owner), "get_n_splits") else None
    return number if isinstance(number, int) else None


def _phases(bound: ast.expr, frame: FrameType) -> list[int]:
    """The numbers of a list around a loop, if each is the bound of that loop in its turn; else none."""
    for node in source.path_to(frame):
        if not isinstance(node, ast.For) or not isinstance(bound, ast.Name):
            continue
        if all(getattr(inner, "id", "") != bound.id for inner in ast.walk(node.target)):
            continue
        listed = [inner for inner in ast.walk(node.iter) if isinstance(inner, (ast.List, ast.Tuple))]
        numbers = [source.value_in(number, frame) for inner in listed for number in inner.elts]
        return numbers if all(isinstance(number, int) for number in numbers) else []
    return []


def _length(value: Any) -> int | None:
    length = None if isinstance(value, (str, bytes)) else length_of(value)
    return None if length is None or length >= source.ENDLESS else length


@dataclass(frozen=True, slots=True, kw_only=True)
class _Limit:
    """A comparison that ends a loop: the counter as it is written, its value now, the first beyond, and its line.

    ``is_raised`` tells whether the loop raises the counter itself, or by one in a function of its file that it calls.
    """

    counter: str
    value: int
    bound: int
    line: int
    is_raised: bool = True


def _limits(loop: ast.For | ast.While, frame: FrameType) -> Iterator[_Limit]:
    stored = [
        (p, node) for p, node in source.parts_set(loop) if isinstance(getattr(p, "ctx", None), ast.Store)
    ]
    changed = {ast.unparse(part) for part, _ in stored}
    if isinstance(loop, ast.While):
        kinds, test = (ast.Lt, ast.LtE, ast.NotEq), _asked(loop.test, frame)
        yield from _compared(test, kinds, changed, frame)
        others = {ast.unparse(node) for node in ast.walk(test) if isinstance(node, ast.Attribute)} - changed
        raised = _counters(frame.f_code.co_filename)
        for limit in _compared(test, kinds, others & raised.keys() or others, frame):
            yield replace(limit, is_raised=raised.get(limit.counter) == "1")  # epochs; others count samples
    # What is set back now and then, such as the rounds without a better loss, counts no steps.
    changed -= {ast.unparse(p) for p, node in stored if isinstance(getattr(node, "value", None), ast.Constant)
                and isinstance(node, ast.Assign)}  # fmt: skip
    for test in _tests_to_leave(loop.body):
        yield from _compared(source.written_out(test, frame), (ast.GtE, ast.Gt, ast.Eq), changed, frame)


def _asked(test: ast.expr, frame: FrameType) -> ast.expr:
    """A condition, or what a method of the same object gives back for it, as in ``while self.goes_on():``."""
    if not isinstance(test, ast.Call) or test.args or test.keywords:
        return test
    known = getattr(type(frame.f_locals.get("self")), ast.unparse(test.func).removeprefix("self."), None)
    body = source.source_of(known).body if isinstance(known, FunctionType) else []
    returned = getattr(body[-1], "value", None) if body and isinstance(body[-1], ast.Return) else None
    return returned if returned and all(isinstance(node, ast.Expr) for node in body[:-1]) else test


def _tests_to_leave(body: Iterable[ast.stmt], *, is_inner: bool = False) -> Iterator[ast.expr]:
    """Conditions under which a loop is left; out of an inner loop only ``return`` leads."""
    for node in body:
        if isinstance(node, ast.If) and node.body:
            ends = (ast.Return, ast.Raise) if is_inner else (ast.Break, ast.Return, ast.Raise)
            if isinstance(node.body[-1], ends):
                yield node.test
            yield from _tests_to_leave([*node.body, *node.orelse], is_inner=is_inner)
        elif isinstance(node, (ast.With, ast.Try)):
            yield from _tests_to_leave(node.body, is_inner=is_inner)
        elif isinstance(node, (ast.For, ast.While)):
            yield from _tests_to_leave(node.body, is_inner=True)


def _compared(
    test: ast.expr, kinds: tuple[type[ast.cmpop], ...], changed: set[str], frame: FrameType
) -> Iterator[_Limit]:
    """Comparisons in a condition of something that the loop changes with something that it does not."""
    turned = {ast.Gt: ast.Lt, ast.Lt: ast.Gt, ast.GtE: ast.LtE, ast.LtE: ast.GtE}
    for node in ast.walk(test):
        if not isinstance(node, ast.Compare) or len(node.ops) != 1:
            continue
        left, kind, right = node.left, type(node.ops[0]), node.comparators[0]
        if source.parts_in(right) & changed:
            left, right, kind = right, left, turned.get(kind, kind)
        counters = source.parts_in(left) & changed
        # A comparison of two things that both change has no bound that could be read.
        if kind not in kinds or len(counters) != 1 or source.parts_in(right) & changed:
            continue
        (counter,) = counters
        value = source.value_in(ast.parse(counter, mode="eval").body, frame)
        bound = source.value_in(right, frame)
        if isinstance(value, int) and isinstance(bound, (int, float)) and 0 < bound < source.ENDLESS:
            beyond = math.floor(bound) + 1 if kind in (ast.Gt, ast.LtE) else math.ceil(bound)
            meets = functools.partial(_reaches, left, counter, beyond, frame)
            if (first := source.first_number(meets)) is not None:
                yield _Limit(counter=counter, value=value, bound=first, line=node.lineno)


def _reaches(expression: ast.expr, counter: str, beyond: int, frame: FrameType, number: int) -> bool:
    """True if an expression of a counter, such as ``(step + 1) // 4``, reaches a bound at a number."""
    value = source.value_in(source.with_number(expression, counter, number), frame)
    return isinstance(value, (int, float)) and value >= beyond


EPOCH_NAMES, STEP_NAMES, SURE_STEP_NAMES, _HOLDERS = tables()["lengths"].values()
_DEEPEST = 3
_SURE = ("max_", "total_", "train_", "num_train_")


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedLength:
    """A number that a script has under a usual name, such as ``config.trainer.max_iters``."""

    name: str
    value: float

    @property
    def is_sure(self) -> bool:
        """True for a name that hardly means anything else, unlike ``num_steps``."""
        return self.name.rpartition(".")[2].lower().startswith(_SURE)


def named_length(
    frame: FrameType | None, names: Sequence[str], options: Sequence[Mapping[str, Any]] = ()
) -> NamedLength | None:
    """The number under one of some names: in the frames of the script, inside first, then in its main module.

    Args:
        frame: Innermost frame; None for the main module alone.
        names: Names in the order of preference.
        options: Options of the script's parsers, ``name`` and ``value``, which come last.
    """
    for scope in _scopes(frame):
        for place, known in _levels(scope):
            if (found := _first(known, names, place)) is not None:
                return found
    return _first({option["name"]: option["value"] for option in options}, names, "")


def _scopes(frame: FrameType | None) -> Iterator[Mapping[str, Any]]:
    for inner, _ in () if frame is None else traceback.walk_stack(frame):
        own, path = inner.f_locals.get("self"), inner.f_code.co_filename
        if is_of_script(path):
            yield _settings(inner.f_locals, path)
            yield _settings(inner.f_globals, path)
        elif "Trainer" in type(own).__name__:  # of a library
            yield {"self": own}
    main = sys.modules["__main__"]
    yield _settings(vars(main), getattr(main, "__file__", None) or "")


def _settings(known: Mapping[str, Any], path: str) -> Mapping[str, Any]:
    """The variables of a file without those that count something up, such as ``total_iters``."""
    return {name: value for name, value in known.items() if name not in _counters(path)}


@functools.cache
def _counters(path: str) -> dict[str, str]:
    """Counters that a file raises somewhere, each with what it is raised by."""
    tree = source.parsed(path)
    added = [node for node in ast.walk(tree) if isinstance(node, ast.AugAssign)] if tree else []
    return {ast.unparse(node.target): ast.unparse(node.value) for node in added}


def _levels(scope: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Variables, and what the usual holders of configurations hold among them, the outer levels first."""
    level: list[tuple[str, Mapping[str, Any]]] = [("", scope)]
    for _ in range(_DEEPEST + 1):
        yield from level
        level = [
            (f"{place}{name}.", inner)
            for place, known in level
            for name, value in list(known.items())
            if str(name).lower() in _HOLDERS and (inner := _held(value))
        ]


def _held(value: Any) -> Mapping[str, Any]:
    """The values of a configuration: a mapping, a namespace, a dataclass or any object with attributes of its own."""
    if isinstance(value, Mapping):
        return value
    library = (value.__name__ if isinstance(value, ModuleType) else type(value).__module__).split(".")[0]
    found = getattr(value, "__dict__", {})
    return found if isinstance(found, dict) and library not in ("torch", "numpy") else {}


def _first(known: Mapping[str, Any], names: Sequence[str], place: str) -> NamedLength | None:
    folded = {str(name).lower().replace("-", "_"): (name, value) for name, value in list(known.items())}
    for name in names:
        written, value = folded.get(name, (name, None))
        if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < source.ENDLESS:
            return NamedLength(name=f"{place}{written}".removeprefix("self."), value=float(value))
    return None
