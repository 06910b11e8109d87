"""Reads a trace of PyTorch's profiler, Chrome's format as Kineto writes it, into plain arrays.

Sets of points in time are sorted, disjoint stretches in arrays as well; a trace has millions of them.
"""

from __future__ import annotations

import gzip
import io
import itertools
import json
import math
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from forerun.base.errors import UsageError
from forerun.script.patching import tables
from forerun.script.profiling.messages import ORIGIN_MARK

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Spans:
    """Stretches of time, sorted and disjoint.

    Attributes:
        begin, end: Ends of the stretches, (n,) [s].

    Examples:
        >>> busy = Spans.of(np.array([2.0, 0.0, 0.5]), np.array([3.0, 1.0, 1.5]))
        >>> busy.begin.tolist(), busy.length_s
        ([0.0, 2.0], 2.5)
        >>> busy.minus(Spans.of(np.array([1.0]), np.array([2.5]))).length_s
        1.5
    """

    begin: Floats
    end: Floats

    @classmethod
    def of(cls, begin: Floats, end: Floats) -> Spans:
        """The union of stretches in any order; touching ones become one."""
        order = np.argsort(begin, kind="stable")
        begin, end = begin[order], end[order]
        reached = np.maximum.accumulate(end) if len(end) else end
        is_first = np.ones(len(begin), dtype=bool)
        is_first[1:] = begin[1:] > reached[:-1]
        last = np.flatnonzero(np.append(is_first[1:], True)) if len(begin) else np.zeros(0, dtype=int)
        return cls(begin[is_first], reached[last])

    @property
    def length_s(self) -> float:
        """Length of all stretches together [s]."""
        return float((self.end - self.begin).sum())

    def covers(self, times_s: Floats) -> Bools:
        """True for each time that lies in a stretch."""
        index = np.searchsorted(self.begin, times_s, side="right") - 1
        found: Bools = index >= 0
        if len(self.end):
            found &= times_s <= self.end[index]
        return found

    def minus(self, other: Spans) -> Spans:
        """The points that are not in another set."""
        return self._where(other, lambda own, others: own & ~others)

    def common(self, other: Spans) -> Spans:
        """The points that are in another set as well."""
        return self._where(other, lambda own, others: own & others)

    def _where(self, other: Spans, keep: Callable[[Bools, Bools], Bools]) -> Spans:
        edges = np.unique(np.concatenate([self.begin, self.end, other.begin, other.end]))
        middle = (edges[:-1] + edges[1:]) / 2
        kept = keep(self.covers(middle), other.covers(middle))
        return Spans.of(edges[:-1][kept], edges[1:][kept])


_MOST_CHARS = 2 * 2**30
"""Longest trace that is read, unpacked; ten steps of a large model take some hundred megabytes."""
_BREAK = 0.1
"""Share of a step from which on a gap before the next one is other work."""
_US = 1e-6

_KINDS = {word: kind for kind, words in tables("diagnosis")["kinds"].items() for word in words}
_ELEMENT_BYTES = tables("diagnosis")["element_bytes"]
_COLUMNS = ("begin_s", "end_s", "name", "lane", "link", "size_bytes", "element", "ranks")
_FRACTIONS = ("begin_s", "end_s", "size_bytes")
WHOLE_TRACE = "no"
_STEP_MARKS = (
    re.compile(r"ProfilerStep#\d+"),
    re.compile(r"Optimizer\.step#"),
    re.compile(r"enumerate\(DataLoader\)#.*__next__"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Events:
    """Events of one kind in the order of their begin.

    Attributes:
        begin_s, end_s: Their times, on one clock [s].
        name: Index of the name in ``names``.
        lane: Stream of a device, or thread of the host.
        link: Number that joins a kernel or copy with the call that launched it; -1 without one.
        size_bytes: Bytes of a copy or of a collective; 0 where they are not told.
        element: Index in ``names`` of the element type of an operator.
        ranks: Number of ranks of a collective; 0 of other events.
        names: Names that the indices mean.
    """

    begin_s: Floats
    end_s: Floats
    name: Ints
    lane: Ints
    link: Ints
    size_bytes: Floats
    element: Ints
    ranks: Ints
    names: tuple[str, ...] = field(repr=False)

    def __len__(self) -> int:
        return len(self.begin_s)

    @property
    def spans(self) -> Spans:
        """The time that they cover."""
        return Spans.of(self.begin_s, self.end_s)

    @property
    def durations_s(self) -> Floats:
        """Duration of each [s]."""
        return self.end_s - self.begin_s

    def where(self, chosen: Bools | Ints) -> Events:
        """The chosen events."""
        return Events(**{column: getattr(self, column)[chosen] for column in _COLUMNS}, names=self.names)

    def named(self, pattern: re.Pattern[str]) -> Events:
        """The events whose names match a pattern."""
        fits = np.array([pattern.search(name) is not None for name in self.names], dtype=bool)
        return self.where(fits[self.name] if len(self) else np.zeros(0, dtype=bool))

    def inside(self, begin_s: float, end_s: float) -> Events:
        """The events that overlap a stretch, cut at its ends."""
        found = self.where((self.end_s > begin_s) & (self.begin_s < end_s))
        np.clip(found.begin_s, begin_s, end_s, out=found.begin_s)
        np.clip(found.end_s, begin_s, end_s, out=found.end_s)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """One process's trace.

    Attributes:
        label: Its rank and host, or the name of its file.
        rank: Its rank; None outside a distributed job.
        device_name: Driver's name of the device; empty where it is not told.
        kernels, copies: Events of the device.
        calls: Calls of the device's runtime, such as ``cudaLaunchKernel``.
        operators: Operators of the host.
        marks: Annotations: steps, loaders, optimizers, compilations.
        steps: Begin and end of each step, (n, 2) [s].
        steps_from: Marks that the steps were found by.
    """

    label: str
    rank: int | None
    device_name: str
    kernels: Events
    copies: Events
    calls: Events
    operators: Events
    marks: Events
    steps: Floats
    steps_from: str

    @property
    def is_on_gpu(self) -> bool:
        """True if a device ran kernels."""
        return len(self.kernels) > 0


def read_trace(path: Path, steps: Floats | None = None) -> Trace:
    """Reads a trace, packed with gzip or not.

    Args:
        path: The file.
        steps: Begin and end of each step by the clock of the mark of ``forerun profile``, (n, 2) [s]; None to find the
            steps by marks that profilers and optimizers leave.

    Raises:
        UsageError: It is no trace, is cut off or too large, or has no events.
    """
    kinds, names = _Table(), _Names()
    try:
        header = _read(path, lambda event, number: kinds.add(event, number, path, names))
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"expected a trace of PyTorch's profiler in '{path}', got: {reason}") from None
    found = {kind: kinds.events(kind, names) for kind in sorted(set(_KINDS.values()))}
    if not len(found["kernels"]) and not len(found["operators"]):
        raise UsageError(
            f"expected kernels or operators in '{path}', got none; export it with prof.export_chrome_trace"
        )
    if steps is None or not len(steps):
        steps, steps_from = _steps(found)
    else:
        origins = found["marks"].named(re.compile(ORIGIN_MARK))
        origin_s = float(origins.names[origins.name[0]].removeprefix(ORIGIN_MARK))
        steps, steps_from = steps - origin_s + origins.begin_s[0], "the profile's"
    rank = _field(header.get("distributedInfo"), "rank")
    host = f" on {header['host_name']}" if header.get("host_name") else ""
    # The first releases have another word.
    devices = header.get("deviceProperties") or header.get("computeProperties")
    return Trace(
        label=path.name if rank is None else f"rank {rank}{host}",
        rank=rank if isinstance(rank, int) else None,
        device_name=str(_field(devices, "name") or ""),
        steps=_in_a_row(steps),
        steps_from=steps_from,
        **found,
    )


def _field(value: Any, name: str) -> Any:
    """A field of a table, or of the first of several; None where there is none."""
    first = value[0] if isinstance(value, list) and value else value
    return first.get(name) if isinstance(first, dict) else None


def _opened(path: Path) -> io.TextIOBase:
    with path.open("rb") as file:
        is_packed = file.read(2) == b"\x1f\x8b"
    opener: Any = gzip.open if is_packed else open
    file_of_text: io.TextIOBase = opener(path, "rt", encoding="utf-8-sig", errors="replace")
    return file_of_text


def is_trace(path: Path) -> bool:
    """True for JSON, packed or not, and for what cannot be read at all."""
    try:
        with _opened(path) as file:
            return file.read(64).lstrip()[:1] in ("{", "[", "")
    except (OSError, EOFError, zlib.error):
        return True


def _read(path: Path, add: Callable[[Mapping[str, Any], int], None]) -> Mapping[str, Any]:
    """The fields of a trace before its events, each of which is handed on with its number.

    Raises:
        UsageError: The file is no trace, is cut off, or too long.
    """
    num_events = itertools.count()

    # An event is dropped as soon as it is read: as objects of Python they take ten times the memory of their text.
    def take(part: dict[str, Any]) -> dict[str, Any] | None:
        if "ph" not in part:
            return part
        add(part, next(num_events))
        return None

    with _opened(path) as file:
        text = file.read(_MOST_CHARS + 1)
    if len(text) > _MOST_CHARS:
        raise UsageError(
            f"expected a trace of at most {_MOST_CHARS / 2**30:g} GiB, got more in '{path}'; profile fewer "
            "steps, without with_stack"
        )
    mark = re.search(r'(?:\A|"traceEvents"\s*:)\s*\[', text)
    if mark is None:
        raise UsageError(
            f"expected a trace of PyTorch's profiler in '{path}', got a file without 'traceEvents'"
        )
    try:
        # The rest of the file is not read: unescaped Windows paths in it would not be valid JSON.
        events, _ = json.JSONDecoder(object_hook=take).raw_decode(text, mark.end() - 1)
    except (ValueError, RecursionError):
        raise UsageError(
            f"expected a whole trace in '{path}', got one that is cut off or damaged after {next(num_events):,} "
            "events; export or copy it again"
        ) from None
    for number, event in enumerate(events):
        if not isinstance(event, dict | None):
            raise UsageError(f"expected events in '{path}', got {type(event).__name__} as number {number:,}")
    try:
        header = json.loads(text[: mark.start()].rstrip().rstrip(",") + "}")
    except (ValueError, RecursionError):
        return {}
    return header if isinstance(header, dict) else {}


class _Names(dict[str, int]):
    """Numbers of names, in the order in which they were met."""

    def __missing__(self, name: str) -> int:
        self[name] = len(self)
        return self[name]


class _Table:
    """Rows of events by their kind."""

    def __init__(self) -> None:
        self._rows: dict[str, list[tuple[float, ...]]] = {kind: [] for kind in _KINDS.values()}

    def add(self, event: Mapping[str, Any], number: int, path: Path, names: _Names) -> None:
        """Adds an event, if it is of a kind that is kept."""
        category, name = str(event.get("cat", "")).lower(), str(event.get("name", ""))
        kind = _KINDS.get(category, "operators" if not category and "::" in name else None)
        if kind is None or event.get("ph") != "X":
            return
        begin: Any = event.get("ts")
        took: Any = event.get("dur", 0)
        if not (_is_finite(begin) and _is_finite(took)):
            raise UsageError(
                f"expected times of event {number:,} in '{path}' ({name[:60]}), got ts {begin} and dur {took}"
            )
        if took < 0:
            return
        arguments = event.get("args")
        arguments = arguments if isinstance(arguments, dict) else {}
        lane = arguments.get("stream", event.get("tid", 0))
        size_bytes, ranks = _size(arguments)
        types = arguments.get("Input type")
        self._rows[kind].append(
            (
                begin * _US,
                (begin + took) * _US,
                names[name],
                lane if isinstance(lane, int) else names[f"lane {lane}"],
                _whole(arguments.get("correlation"), -1),
                size_bytes,
                names[str(types[0]) if isinstance(types, list) and types else ""],
                ranks,
            )
        )

    def events(self, kind: str, names: _Names) -> Events:
        """The events of a kind."""
        table = np.asarray(self._rows[kind], dtype=float).reshape(-1, len(_COLUMNS))
        table = table[np.argsort(table[:, 0], kind="stable")]
        columns = zip(_COLUMNS, table.T.copy(), strict=True)
        # Times and bytes stay what they are, all else are whole numbers.
        found = {name: column if name in _FRACTIONS else column.astype(int) for name, column in columns}
        return Events(**found, names=tuple(names))


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _whole(value: Any, otherwise: int) -> int:
    return int(value) if _is_finite(value) else otherwise


def _size(arguments: Mapping[str, Any]) -> tuple[float, int]:
    """Bytes of a copy or a collective, and the ranks of a collective."""
    if "In msg nelems" not in arguments:
        return float(_whole(arguments.get("bytes"), 0)), 0
    element = str(arguments.get("dtype", "float")).lower().removeprefix("c10::")
    number = max(_whole(arguments.get(f"{side} msg nelems"), 0) for side in ("In", "Out"))
    return float(number * _ELEMENT_BYTES.get(element, 4)), _whole(arguments.get("Group size"), 0)


def _steps(found: Mapping[str, Events]) -> tuple[Floats, str]:
    """The steps by the best marks there are: the profiler's, those of the first optimizer, or of the loader.

    A trace without any two of them is one step as a whole.
    """
    for pattern in _STEP_MARKS:
        # Early releases write annotations as operators.
        marks = max((found[kind].named(pattern) for kind in ("marks", "operators")), key=len)
        steps = _between(marks, pattern)
        if len(steps):
            # Profilers start and fill their buffers in the first step.
            return (steps[1:] if len(steps) >= 3 else steps), marks.names[marks.name[0]].split("#")[0]
    work = [events for kind, events in found.items() if kind != "calls" and len(events)]
    whole = [[min(events.begin_s.min() for events in work), max(events.end_s.max() for events in work)]]
    return np.array(whole), WHOLE_TRACE


def _in_a_row(steps: Floats) -> Floats:
    """The most steps that follow each other at once: between others lies a validation, or saving."""
    gaps_s = steps[1:, 0] - steps[:-1, 1]
    rows = np.split(steps, 1 + np.flatnonzero(gaps_s > _BREAK * np.median(steps[:, 1] - steps[:, 0])))
    return max(rows, key=len)


def _between(marks: Events, pattern: re.Pattern[str]) -> Floats:
    """Steps from marks: themselves, or what lies between the ends of updates or the begins of waits, (n, 2) [s]."""
    if not len(marks) or pattern is _STEP_MARKS[0]:
        return np.stack([marks.begin_s, marks.end_s], axis=1)
    first = marks.where(marks.name == marks.name[0])
    edges = first.end_s if pattern is _STEP_MARKS[1] else first.begin_s
    return np.stack([edges[:-1], edges[1:]], axis=1)
