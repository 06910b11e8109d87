"""The interface of all forecasters: question, answer, and the table of them.

A forecaster sees errors (see ``curve``) at the points of a run so far and returns the errors at all its points:
those it has seen, as its law smooths them, and those to come.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from forerun.convergence.cleaning import relative_noise
from forerun.convergence.curve import Floats

__all__ = ["FORECASTERS", "Forecaster", "Prefix", "can_answer", "forecaster", "path_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefix:
    """A run so far, and where it will be looked at.

    Attributes:
        epochs: All points of the run, past and to come, ascending, above zero, (n,).
        errors: Errors at the first of them, (k,), k <= n.
        rates: Relative learning rate in the stretch that ends at each point, (n,), or None if unknown.
        siblings: Errors of finished runs of the same job at the same shares of their length, (m, n); m may be 0.
        drop_share: Share of what remains that a falling rate removes on this kind of task, see ``annealing``.
        noise: Relative spread of single evaluations.
    """

    epochs: Floats
    errors: Floats
    rates: Floats | None = None
    siblings: Floats | None = None
    drop_share: float = 0.1
    noise: float = field(init=False)

    def __post_init__(self) -> None:
        # Asked for at every mixture of a back-test: worked out once.
        object.__setattr__(self, "noise", relative_noise(self.errors))

    @property
    def num_seen(self) -> int:
        """Points seen, k."""
        return len(self.errors)

    @property
    def progress(self) -> float:
        """Share of the run that is done, 0 to 1."""
        return float(self.epochs[self.num_seen - 1] / self.epochs[-1])

    @property
    def best(self) -> float:
        """Smallest error seen."""
        return float(np.min(self.errors))

    @property
    def level(self) -> float:
        """Where the run stands: the median of the last tenth of the errors."""
        return float(np.median(self.errors[-max(1, round(0.1 * self.num_seen)) :]))


Forecaster = Callable[[Prefix], Floats]
"""From a run so far to errors at all its points, (n,), finite and not negative."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    path: Forecaster
    needs_rates: bool
    needs_siblings: bool


FORECASTERS: dict[str, _Entry] = {}


def forecaster(
    name: str, *, needs_rates: bool = False, needs_siblings: bool = False
) -> Callable[[Forecaster], Forecaster]:
    """Registers the decorated forecaster under a name; a name cannot be taken twice."""

    def register(path: Forecaster) -> Forecaster:
        if name in FORECASTERS:
            raise ValueError(f"the forecaster {name!r} is registered twice")
        FORECASTERS[name] = _Entry(path=path, needs_rates=needs_rates, needs_siblings=needs_siblings)
        return path

    return register


def can_answer(name: str, prefix: Prefix) -> bool:
    """True if the forecaster has what it needs: a schedule, siblings."""
    entry = FORECASTERS[name]
    has_siblings = prefix.siblings is not None and len(prefix.siblings) > 0
    return (prefix.rates is not None or not entry.needs_rates) and (has_siblings or not entry.needs_siblings)


def path_of(name: str, prefix: Prefix) -> Floats:
    """Errors at all points by one forecaster, (n,), never below zero."""
    return np.asarray(np.maximum(FORECASTERS[name].path(prefix), 0.0), dtype=float)
