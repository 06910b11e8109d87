"""Times a step: warm-up until the times have settled, then every repetition by a monotonic clock."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median

from forerun.evidence.measurement.jobs import Protocol, RunResult
from forerun.evidence.records.measurement import Summary

_LEAST_REPETITIONS = 3


def time_repetitions(
    step: Callable[[], object],
    synchronise: Callable[[], None],
    protocol: Protocol,
    clock: Callable[[], float] = time.perf_counter,
    at_both_ends: Callable[[], None] | None = None,
) -> RunResult:
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
    taken = Repetitions(protocol, clock)
    returned_s: list[float] = []

    def time_once_s() -> float:
        synchronise()
        began_s = clock()
        step()
        returned_s.append(clock() - began_s)
        synchronise()
        return clock() - began_s

    while not taken.is_warm():
        taken.add(time_once_s())
    returned_s.clear()
    if at_both_ends is not None:
        at_both_ends()
        taken.begin()  # reading a counter takes time that no repetition does
    while not taken.is_enough():
        taken.add(time_once_s())
    if at_both_ends is not None:
        at_both_ends()
    return RunResult(
        warm_up_s=tuple(taken.warm_up_s),
        repetitions_s=tuple(taken.repetitions_s),
        returned_s=tuple(returned_s),
        is_stationary=taken.is_stationary,
    )


class Repetitions:
    """The rules of ``time_repetitions``, also for a loop of another library, which adds each time until it is enough.

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
        self._is_warm = False
        self.begin()

    def begin(self) -> None:
        """Counts the time of the repetitions, or of the warm-up, from now on."""
        self._began_s = self._clock()

    def is_warm(self) -> bool:
        """True once the warm-up is over."""
        times_s, protocol = self.warm_up_s, self._protocol
        if not self._is_warm and len(times_s) >= min(protocol.min_warm_up, protocol.max_warm_up):
            self._is_warm = (
                len(times_s) >= protocol.max_warm_up
                or self._clock() - self._began_s >= protocol.max_seconds
                or has_settled(times_s, window=protocol.window, tolerance=protocol.tolerance)
            )
            if self._is_warm:
                self.begin()
        return self._is_warm

    def is_enough(self) -> bool:
        """True once no more repetitions are needed."""
        count = len(self.repetitions_s)
        is_over_time = self._clock() - self._began_s >= self._protocol.max_seconds
        return count >= self._protocol.num_repetitions or (is_over_time and count >= _LEAST_REPETITIONS)

    def add(self, time_s: float) -> bool:
        """Takes the time of a repetition that has just ended; True when no more are needed [s]."""
        if not self._is_warm:
            self.warm_up_s.append(time_s)
            self.is_warm()
            return False
        self.repetitions_s.append(time_s)
        return self.is_enough()

    @property
    def is_stationary(self) -> bool:
        """As in ``RunResult``."""
        # A step of several seconds leaves time for few repetitions of either kind: together they may show enough.
        both_s = [*self.warm_up_s, *self.repetitions_s]
        return has_settled_under(self.warm_up_s, self._protocol) or has_settled_under(both_s, self._protocol)


def has_settled_under(times_s: Sequence[float], protocol: Protocol) -> bool:
    """The test with the protocol's windows, or with shorter ones if there are too few repetitions for two windows."""
    window = max(_LEAST_REPETITIONS, min(protocol.window, len(times_s) // 2))
    return has_settled(times_s, window=window, tolerance=protocol.tolerance)


# Standard normal: median of |x| is 1 / 1.4826.
_SIGMA_PER_MEDIAN_DEVIATION = 1.4826
# Standard error of the median of n normal values, times sqrt(n) / sigma: sqrt(pi / 2).
_MEDIAN_ERROR = math.sqrt(math.pi / 2)
# Quiet series (normal or exponential noise, windows of 3 to 20) are then refused in 2 to 3 % of the cases: the larger
# of two noise estimates makes the test milder than two standard errors sound.
_NUM_STANDARD_ERRORS = 2.0
_LEAST_WINDOW = 3


def noise_s(times_s: Sequence[float]) -> float:
    """Standard deviation of the noise of a series, insensitive to slow changes and to single outliers [s].

    sigma = 1.4826 * median |t(i+1) - t(i)| / sqrt(2). Differences of neighbours do not see a trend or a step,
    which a deviation from the mean would count as noise and so excuse. Zero for fewer than two values.

    Source: von Neumann et al. 1941, Ann. Math. Stat. 12(2) (successive differences), with the median for the mean.
    """
    steps_s = [abs(later - earlier) for earlier, later in pairwise(times_s)]
    return _SIGMA_PER_MEDIAN_DEVIATION * median(steps_s) / math.sqrt(2) if steps_s else 0.0


def relative_shift(earlier_s: Sequence[float], later_s: Sequence[float]) -> float:
    """Change of the median from one window to the next, relative to the earlier: +0.1 is 10 % slower."""
    before_s = median(earlier_s)
    return (median(later_s) - before_s) / before_s if before_s > 0 else 0.0


def windows_agree(earlier_s: Sequence[float], later_s: Sequence[float], *, tolerance: float) -> bool:
    """True if two neighbouring windows of repetition times have one median within their noise.

    They agree if |m2 - m1| <= max(tolerance * m1, 2 * sigma * sqrt(pi/2 * (1/n1 + 1/n2))), with m the medians,
    n the lengths and sigma the larger noise (``noise_s``) of the two. The floor keeps a clean series from being
    refused for a negligible difference.

    Args:
        earlier_s: First window [s], at least 3 values.
        later_s: The window after it [s], at least 3 values.
        tolerance: Relative difference that always passes.
    """
    if min(len(earlier_s), len(later_s)) < _LEAST_WINDOW:
        raise ValueError(
            f"expected windows of at least {_LEAST_WINDOW} values, got {len(earlier_s)} and {len(later_s)}"
        )
    before_s = median(earlier_s)
    sigma_s = max(noise_s(earlier_s), noise_s(later_s))
    error_s = _MEDIAN_ERROR * sigma_s * math.sqrt(1 / len(earlier_s) + 1 / len(later_s))
    return abs(median(later_s) - before_s) <= max(tolerance * before_s, _NUM_STANDARD_ERRORS * error_s)


def has_settled(times_s: Sequence[float], *, window: int, tolerance: float) -> bool:
    """The stationarity test: True if the last two windows of a series agree (``windows_agree``).

    With w = ``window`` the values t[-2w:-w] and t[-w:] are compared; a shorter series has not settled. Called after
    every repetition, it ends the warm-up at the first agreement: the rest of a decay then changes the median by less
    than the tolerance, or less than the noise can show, from one window to the next. A drift slower than
    tolerance per window is not seen; the two halves of the timed repetitions are compared for that afterwards.
    """
    if len(times_s) < 2 * window:
        return False
    return windows_agree(times_s[-2 * window : -window], times_s[-window:], tolerance=tolerance)


def median_interval_ranks(num_values: int) -> tuple[int, int]:
    """Ranks (from 1) of the order statistics that enclose the median with at least 95 %.

    The largest k with 2 * P(B <= k - 1) <= 0.05, where B is binomial (n, 1/2): the interval is [x(k), x(n+1-k)],
    whatever the distribution. Below 6 values not even the extremes reach 95 % (3 values: 75 %, 4: 87.5 %, 5: 93.75 %);
    the extremes are given all the same, and the reader has n.

    Source: Conover 1999, Practical Nonparametric Statistics, section 3.2 (interval of a quantile from the sign test).
    """
    if num_values < 1:
        raise ValueError(f"expected at least one value, got {num_values}")
    # In whole numbers, so that no rounding decides: 2 * sum of C(n, i) for i < k must be <= 2^n / 20.
    rank, combinations, below = 0, 1, 0
    while 40 * (below + combinations) <= 2**num_values:
        below += combinations
        rank += 1
        combinations = combinations * (num_values - rank + 1) // rank
    rank = max(rank, 1)
    return rank, num_values + 1 - rank


def median_interval_s(times_s: Sequence[float]) -> tuple[float, float]:
    """Interval of the median at 95 % from order statistics (``median_interval_ranks``) [s]."""
    low, high = median_interval_ranks(len(times_s))
    ordered = sorted(times_s)
    return ordered[low - 1], ordered[high - 1]


def summarise(result: RunResult, protocol: Protocol) -> Summary | None:
    """Median, interval and stability of a runner's result; None without repetitions.

    A run is unstable if its times had not settled, if its second half differs from the first (``windows_agree``), or
    if the interval of its median is too wide. Every reason is given.
    """
    if not result.repetitions_s:
        return None
    low_s, high_s = median_interval_s(result.repetitions_s)
    middle_s = median(result.repetitions_s)
    reasons = [] if result.is_stationary else ["the step time did not settle"]
    reasons += _drift_reasons(result.repetitions_s, protocol)
    half_width = (high_s - low_s) / (2 * middle_s) if middle_s > 0 else 0.0
    if half_width > protocol.max_relative_interval:
        reasons.append(
            f"the interval of the median is ±{half_width:.0%}, more than {protocol.max_relative_interval:.0%}"
        )
    return Summary(
        median_s=middle_s, low_s=low_s, high_s=high_s, is_stable=not reasons, reason="; ".join(reasons)
    )


def _drift_reasons(times_s: Sequence[float], protocol: Protocol) -> list[str]:
    half = len(times_s) // 2
    if half < _LEAST_WINDOW or windows_agree(times_s[:half], times_s[half:], tolerance=protocol.tolerance):
        return []
    shift = relative_shift(times_s[:half], times_s[half:])
    return [f"the second half of the repetitions is {abs(shift):.1%} {'slower' if shift > 0 else 'faster'}"]
