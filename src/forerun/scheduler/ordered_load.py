"""A sorted list of keys with weights that knows quickly how much weight lies above a key."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator

__all__ = ["Key", "OrderedLoad"]

Key = tuple[float, float, int]

_LONGEST_BLOCK = 128


class OrderedLoad:
    """Keys in order, in blocks of at most a hundred or so, each with the sum of its weights.

    Adding, removing and asking for the weight above a key cost about the square root of the number of keys.
    """

    def __init__(self) -> None:
        self._blocks: list[list[Key]] = []
        self._highest: list[Key] = []
        self._loads: list[int] = []
        self._weights: dict[Key, int] = {}

    def __len__(self) -> int:
        return len(self._weights)

    def __reversed__(self) -> Iterator[Key]:
        for block in reversed(self._blocks):
            yield from reversed(block)

    def last(self) -> Key:
        """The highest key."""
        return self._blocks[-1][-1]

    def add(self, key: Key, weight: int) -> None:
        """Enters a key, which must be new."""
        self._weights[key] = weight
        if not self._blocks:
            self._blocks, self._highest, self._loads = [[key]], [key], [weight]
            return
        i = min(bisect_left(self._highest, key), len(self._blocks) - 1)
        block = self._blocks[i]
        insort(block, key)
        self._highest[i] = block[-1]
        self._loads[i] += weight
        if len(block) > _LONGEST_BLOCK:
            self._split(i)

    def _split(self, i: int) -> None:
        block = self._blocks[i]
        half = len(block) // 2
        parts = [block[:half], block[half:]]
        self._blocks[i : i + 1] = parts
        self._highest[i : i + 1] = [part[-1] for part in parts]
        self._loads[i : i + 1] = [sum(self._weights[key] for key in part) for part in parts]

    def remove(self, key: Key) -> None:
        """Takes a key out, which must be there."""
        i = bisect_left(self._highest, key)
        block = self._blocks[i]
        del block[bisect_left(block, key)]
        self._loads[i] -= self._weights.pop(key)
        if block:
            self._highest[i] = block[-1]
        else:
            del self._blocks[i], self._highest[i], self._loads[i]

    def above(self, key: Key) -> int:
        """Sum of the weights of all higher keys."""
        i = bisect_right(self._highest, key)
        if i == len(self._blocks):
            return 0
        block = self._blocks[i]
        return sum(self._loads[i + 1 :]) + sum(self._weights[k] for k in block[bisect_right(block, key) :])
