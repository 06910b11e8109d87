"""Times a step: warm-up until the times have settled, then every repetition by a monotonic clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from forerun.evidence.measurement.jobs import Protocol
from forerun.evidence.measurement.summary import has_settled

__all__ = ["Repetitions", "Timed", "time_repetitions"]

_LEAST_REPETITIONS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """All times of one measurement.

    Attributes:
        warm_up_s: Times of the repetitions before the times had settled [s].
        repetitions_s: Times of the repetitions after that, in order [s].
        returned_s: Time until the call of the step returned, for each timed repetition; the device may still be at
            work [s].
        is_stationary: True if the times had settled before the timed repetitions, or during them.
    """

    warm_up_s: tuple[float, ...]
    repetitions_s: tuple[float, ...]
    returned_s: tuple[float, ...]
    is_stationary: bool


def time_repetitions(
    step: Callable[[], None],
    synchronise: Callable[[], None],
    protocol: Protocol,
    clock: Callable[[], float] = time.perf_counter,
    at_both_ends: Callable[[], None] | None = None,
) -> Timed:
    """Repeats a step and times each repetition.

    Each repetition is synchronise, read the clock, step, synchronise, read the clock; the difference therefore
    holds one synchronisation and one call, which the null step measures. The warm-up ends as soon as the times have
    settled (``has_settled``) and ``min_warm_up`` repetitions are made, or when ``max_warm_up`` or ``max_seconds`` are
    used up. If the warm-up is used up, the timed repetitions count too: a step of several seconds leaves time for few
    repetitions of either kind, and is stationary if the last two windows of all repetitions agree.

    Args:
        step: Step to time; it may return before the device has finished.
        synchronise: Function that returns when the device has finished.
        protocol: Settings of the measurement.
        clock: Monotonic clock [s].
        at_both_ends: Called before the first and after the last timed repetition, such as to read a counter.
    """
    returned_s: list[float] = []

    def time_once_s() -> float:
        synchronise()
        began_s = clock()
        step()
        returned_s.append(clock() - began_s)
        synchronise()
        return clock() - began_s

    warm_up_s = _warm_up(time_once_s, protocol, clock)
    returned_s.clear()
    repetitions_s: list[float] = []
    if at_both_ends is not None:
        at_both_ends()
    began_s = clock()
    while not _is_enough(repetitions_s, clock() - began_s, protocol):
        repetitions_s.append(time_once_s())
    if at_both_ends is not None:
        at_both_ends()
    return Timed(
        warm_up_s=tuple(warm_up_s),
        repetitions_s=tuple(repetitions_s),
        returned_s=tuple(returned_s),
        is_stationary=_are_settled(warm_up_s, repetitions_s, protocol),
    )


class Repetitions:
    """The rules of ``time_repetitions`` for a loop of another library, which adds each time until no more are needed.

    Args:
        protocol: Settings of the measurement.
        clock: Monotonic clock [s].

    Attributes:
        warm_up_s, repetitions_s: Times added so far [s].
    """

    def __init__(self, protocol: Protocol, clock: Callable[[], float] = time.perf_counter) -> None:
        self._protocol, self._clock = protocol, clock
        self.warm_up_s: list[float] = []
        self.repetitions_s: list[float] = []
        self._began_s = clock()
        self._is_warm = False

    def add(self, time_s: float) -> bool:
        """Takes the time of a repetition that has just ended; True when no more are needed [s]."""
        if not self._is_warm:
            self.warm_up_s.append(time_s)
            if _is_warm(self.warm_up_s, self._clock() - self._began_s, self._protocol):
                self._is_warm, self._began_s = True, self._clock()
            return False
        self.repetitions_s.append(time_s)
        return _is_enough(self.repetitions_s, self._clock() - self._began_s, self._protocol)

    @property
    def is_stationary(self) -> bool:
        """As in ``Timed``."""
        return _are_settled(self.warm_up_s, self.repetitions_s, self._protocol)


def _is_warm(times_s: Sequence[float], taken_s: float, protocol: Protocol) -> bool:
    if len(times_s) >= protocol.max_warm_up:
        return True
    if len(times_s) < protocol.min_warm_up:
        return False
    return taken_s >= protocol.max_seconds or has_settled(
        times_s, window=protocol.window, tolerance=protocol.tolerance
    )


def _is_enough(times_s: Sequence[float], taken_s: float, protocol: Protocol) -> bool:
    is_over_time = len(times_s) >= _LEAST_REPETITIONS and taken_s >= protocol.max_seconds
    return is_over_time or len(times_s) >= protocol.num_repetitions


def _are_settled(warm_up_s: Sequence[float], repetitions_s: Sequence[float], protocol: Protocol) -> bool:
    return _has_settled(warm_up_s, protocol) or _has_settled([*warm_up_s, *repetitions_s], protocol)


def _warm_up(time_once_s: Callable[[], float], protocol: Protocol, clock: Callable[[], float]) -> list[float]:
    times_s: list[float] = []
    began_s = clock()
    while not _is_warm(times_s, clock() - began_s, protocol):
        times_s.append(time_once_s())
    return times_s


def _has_settled(times_s: Sequence[float], protocol: Protocol) -> bool:
    """The test with the protocol's windows, or with shorter ones if there are too few repetitions for two windows."""
    window = max(_LEAST_REPETITIONS, min(protocol.window, len(times_s) // 2))
    return has_settled(times_s, window=window, tolerance=protocol.tolerance)
