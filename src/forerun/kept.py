"""Results that are kept for questions asked again: by what they are of, and by the values of the question."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

__all__ = ["Kept"]

Result = TypeVar("Result")


class Kept(Generic[Result]):
    """A bounded memory of results.

    Traced models and cost models are told apart by identity: comparing their arrays would cost more than the result.
    They are kept beside it, so that their identities cannot pass to others.

    Args:
        most: Results to keep; one more forgets them all.
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
