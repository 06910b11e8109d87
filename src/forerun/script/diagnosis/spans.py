"""Sets of points in time as sorted, disjoint stretches in arrays; a trace has millions of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

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
