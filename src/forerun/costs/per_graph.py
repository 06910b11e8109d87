"""Answers remembered for a graph, for callers that ask about one graph again and again, as a server does."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from forerun.workload.graph import Graph

__all__ = ["PerGraph"]

Answer = TypeVar("Answer")


class PerGraph(Generic[Answer]):
    """Answers by graph and key; all are forgotten when there are too many.

    Args:
        capacity: Most answers kept.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._kept: dict[tuple[int, Hashable], tuple[Graph, Answer]] = {}

    def get(self, graph: Graph, key: Hashable, find: Callable[[], Answer]) -> Answer:
        """The answer of ``find``, which is called the first time only."""
        place = (id(graph), key)
        kept = self._kept.get(place)
        # The graph itself is kept beside its answer, so that its identity cannot pass to another.
        if kept is None or kept[0] is not graph:
            if len(self._kept) >= self._capacity:
                self._kept.clear()
            kept = (graph, find())
            self._kept[place] = kept
        return kept[1]
