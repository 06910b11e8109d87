"""A window of steps under ``torch.profiler``, summed to four parts in the process itself."""

from __future__ import annotations

import contextlib
import math
import re
import sys
import time
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

__all__ = ["Window", "covered", "minus", "timeline_sums"]

Spans = list[tuple[float, float]]

_WAIT_MARK = "forerun::wait"
_ORIGIN_MARK = "forerun::origin"
# Marks and nodes of the autograd engine enclose operators and the Python between them; all other events are operators.
_OPERATOR = re.compile(r"(?!autograd::|forerun::|profiler::)[\w.]+::")
_US = 1e-6


class Window:
    """Traces a number of steps after a warm-up; with a file, the trace is kept in Chrome's format."""

    def __init__(self, warmup_steps: int, num_steps: int, trace: Path | None = None) -> None:
        self._trace = trace
        self._first, self._last = warmup_steps, warmup_steps + num_steps
        self._profiler: Any = None
        self._sums: dict[str, Any] | None = None
        self._steps: Spans = []
        self._origin_s = 0.0

    @property
    def is_open(self) -> bool:
        """True while steps are traced."""
        return self._profiler is not None

    def turn(self, num_steps: int, begin_s: float, end_s: float) -> bool:
        """Opens or closes the window after a step; True if that took time.

        Args:
            num_steps: Number of steps so far.
            begin_s: Begin of the last step, monotonic clock [s].
            end_s: End of the last step [s].
        """
        if self.is_open:
            self._steps.append((begin_s, end_s))
        if num_steps == self._first and self._last > self._first:
            self._open()
            return True
        if self.is_open and num_steps >= self._last:
            self.close()
            return True
        return False

    @contextlib.contextmanager
    def mark_wait(self) -> Iterator[None]:
        """Marks a wait for a loader on the traced timeline."""
        if not self.is_open:
            yield
            return
        with sys.modules["torch"].autograd.profiler.record_function(_WAIT_MARK):
            yield

    def close(self) -> None:
        """Ends the window and sums its parts."""
        if self._profiler is None:
            return
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        if self._trace is not None:
            profiler.export_chrome_trace(str(self._trace))
        if not self._steps:
            return
        events = profiler.events()
        # Traced times count from another moment than the clock of the steps; the first mark links the two.
        origin = next((e.time_range.start * _US for e in events if e.name == _ORIGIN_MARK), None)
        if origin is None:
            return
        steps = [
            (begin - self._origin_s + origin, end - self._origin_s + origin) for begin, end in self._steps
        ]
        self._sums = {
            "wall_s": _length(steps),
            "num_steps": len(steps),
            **timeline_sums([event for event in events if _starts_in(event, steps)]),
        }

    def take_sums(self) -> dict[str, Any] | None:
        """Sums of a window that has closed since the last call."""
        sums, self._sums = self._sums, None
        return sums

    def _open(self) -> None:
        from torch.profiler import (  # the script has imported torch before its first step
            ProfilerActivity,
            profile,
        )

        torch = sys.modules["torch"]
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            activities.append(ProfilerActivity.CUDA)
        try:
            profiler = profile(activities=activities, acc_events=True, record_shapes=self._trace is not None)
            profiler.start()
        except RuntimeError:  # the script traces itself; two tracers exclude each other
            return
        self._profiler = profiler
        self._origin_s = time.monotonic()
        with torch.autograd.profiler.record_function(_ORIGIN_MARK):
            pass


def _starts_in(event: Any, steps: Spans) -> bool:
    """True if an event belongs to a step, and not to the validation or the saving between two epochs."""
    start_s = event.time_range.start * _US
    index = bisect_right(steps, (start_s, math.inf)) - 1
    return index >= 0 and start_s < steps[index][1]


def timeline_sums(events: Iterable[Any]) -> dict[str, Any]:
    """Seconds of a traced timeline: kernels, copies to the device, waits not hidden behind either.

    On a processor a kernel is an operator outside the loader. On a GPU it is a kernel the device ran, and a wait
    counts only while the device had nothing to run.
    """
    kernels: Spans = []
    copies: Spans = []
    operators: Spans = []
    waits: Spans = []
    totals: dict[str, float] = {}
    for event in events:
        span = (event.time_range.start * _US, event.time_range.end * _US)
        name = event.name
        if event.device_type.name == "CPU":
            if name == _WAIT_MARK:
                waits.append(span)
            elif _OPERATOR.match(name):
                operators.append(span)
                totals[name] = totals.get(name, 0.0) + event.self_cpu_time_total * _US
        elif not getattr(event, "is_user_annotation", False):
            (copies if "HtoD" in name else kernels).append(span)
            totals[name] = totals.get(name, 0.0) + span[1] - span[0]
    on_device = bool(kernels)
    busy = kernels if on_device else minus(covered(operators), covered(waits))
    busy, copied = covered(busy), covered(copies)
    copied_alone = minus(copied, busy)
    waited = minus(minus(covered(waits), busy), copied_alone) if on_device else covered(waits)
    return {
        "kernels_s": _length(busy),
        "copy_s": _length(copied_alone),
        "wait_s": _length(waited),
        "on_device": on_device,
        "top": sorted(totals.items(), key=lambda item: -item[1])[:8],
    }


def covered(spans: Sequence[tuple[float, float]]) -> Spans:
    """The union of spans, sorted and disjoint.

    >>> covered([(2.0, 3.0), (0.0, 1.0), (0.5, 1.5)])
    [(0.0, 1.5), (2.0, 3.0)]
    """
    union: Spans = []
    for begin, end in sorted(spans):
        if union and begin <= union[-1][1]:
            union[-1] = (union[-1][0], max(union[-1][1], end))
        else:
            union.append((begin, end))
    return union


def minus(spans: Spans, holes: Spans) -> Spans:
    """Parts of spans outside holes; spans and holes are sorted and disjoint, as from ``covered``.

    >>> minus([(0.0, 4.0)], [(1.0, 2.0), (3.0, 5.0)])
    [(0.0, 1.0), (2.0, 3.0)]
    """
    left: Spans = []
    first = 0
    for begin, end in spans:
        while first < len(holes) and holes[first][1] <= begin:
            first += 1
        at, index = begin, first
        while index < len(holes) and holes[index][0] < end:
            if holes[index][0] > at:
                left.append((at, holes[index][0]))
            at = max(at, holes[index][1])
            index += 1
        if at < end:
            left.append((at, end))
    return left


def _length(spans: Spans) -> float:
    return sum(end - begin for begin, end in spans)
