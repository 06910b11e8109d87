"""Results that are kept for repeated questions, by the objects and the values of the question."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

__all__ = ["Kept"]

Result = TypeVar("Result")


class Kept(Generic[Result]):
    """A bounded memory of results.

    Traced models and cost models are distinguished by identity, because comparing their arrays would take longer than
    the computation.
    They are kept beside the result, so that no other object can get their identity.

    Args:
        most: Largest number of results; one more drops them all.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._results: dict[tuple[Hashable, ...], tuple[tuple[object, ...], Result]] = {}

    def find(self, parts: tuple[object, ...], values: tuple[Hashable, ...]) -> Result | None:
        """The result for these objects and values, None if there is none."""
        found = self._results.get((*map(id, parts), *values))
        return None if found is None else found[1]

    def keep(self, parts: tuple[object, ...], values: tuple[Hashable, ...], result: Result) -> None:
        """Keeps a result."""
        if len(self._results) >= self._most:
            self.clear()
        self._results[(*map(id, parts), *values)] = (parts, result)

    def get(
        self, parts: tuple[object, ...], values: tuple[Hashable, ...], make: Callable[[], Result]
    ) -> Result:
        """The result for these objects and values, made if there is none."""
        found = self.find(parts, values)
        if found is None:
            found = make()
            self.keep(parts, values, found)
        return found

    def clear(self) -> None:
        """Forgets all."""
        self._results.clear()
