"""Summary of repetitions: the median, its interval, and the verdict on stability."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from forerun.measurement.jobs import RunResult
from forerun.measurement.protocol import Protocol
from forerun.measurement.stationarity import relative_shift, windows_agree
from forerun.records.measurement import Summary

__all__ = ["median_interval_ranks", "median_interval_s", "summarise"]

_LEAST_WINDOW = 3


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
