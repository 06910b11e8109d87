"""Test that a series of repetition times has settled, on numbers, without a clock or a framework."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import median

__all__ = ["has_settled", "noise_s", "relative_shift", "windows_agree"]

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
