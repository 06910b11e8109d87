"""Two configurations side by side: interleaved runs, paired statistics, and the winner of a study beside the script."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from forerun.base.errors import UsageError

__all__ = [
    "LEAST_PAIRS",
    "MOST_PAIRS",
    "NonInferiority",
    "PairedRatio",
    "Verdict",
    "non_inferiority",
    "num_reserved_runs",
    "paired_difference",
    "paired_ratio",
    "screened",
    "show_winner",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class _PairedMean:
    """Mean of what the second of each pair has more than the first; all comparisons here rest on it.

    Attributes:
        mean: Mean over the pairs.
        error: Standard error of the mean, from their scatter with n - 1 degrees of freedom; 0 with one pair.
        num_pairs: n, number of pairs.
    """

    mean: float
    error: float
    num_pairs: int

    def half_width(self, share: float) -> float:
        """Distance from the mean below which a share of Student's t distribution lies."""
        from scipy.stats import t

        return float(t.ppf(share, self.num_pairs - 1)) * self.error

    def chance_beyond(self, distance: float) -> float:
        """Probability that chance alone brings a mean as far as this on one side."""
        from scipy.stats import t

        return float(t.sf(distance / self.error, self.num_pairs - 1))


def _paired_mean(gains: npt.NDArray[np.float64]) -> _PairedMean:
    num_pairs = len(gains)
    # Equal runs have no scatter, and a ratio to no scatter is none.
    error = max(float(gains.std(ddof=1)) / num_pairs**0.5, 1e-12) if num_pairs > 1 else 0.0
    return _PairedMean(mean=float(gains.mean()), error=error, num_pairs=num_pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedRatio:
    """Speed of B relative to A, from pairs of runs.

    Attributes:
        ratio: Geometric mean of B over A.
        low: Low end of the ratio's 95 % interval; None with one pair.
        high: High end of that interval; None with one pair.
        p_value: Probability of such pairs if A and B are equal, two-sided t-test on log ratios; None with one pair.
        num_pairs: Number of pairs.
    """

    ratio: float
    low: float | None
    high: float | None
    p_value: float | None
    num_pairs: int


def paired_ratio(first: Sequence[float], second: Sequence[float]) -> PairedRatio:
    """Ratio of second to first from runs made in turns, so that a drift of the machine is in both.

    Raises:
        UsageError: The values are not pairs of positive numbers.
    """
    a, b = np.asarray(first, dtype=float), np.asarray(second, dtype=float)
    if a.shape != b.shape or not a.size or not np.all((a > 0) & (b > 0)):
        raise UsageError("expected pairs of values above zero")
    found = _paired_mean(np.log(b / a))
    if found.num_pairs < 2:
        return PairedRatio(ratio=float(np.exp(found.mean)), low=None, high=None, p_value=None, num_pairs=1)
    half = found.half_width(0.975)
    return PairedRatio(
        ratio=float(np.exp(found.mean)),
        low=float(np.exp(found.mean - half)),
        high=float(np.exp(found.mean + half)),
        p_value=2 * found.chance_beyond(abs(found.mean)),
        num_pairs=found.num_pairs,
    )


def paired_difference(first: Sequence[float], second: Sequence[float]) -> tuple[float, float, float]:
    """Mean of second less first over pairs, two or more, with the ends of its 95 % t interval."""
    found = _paired_mean(np.asarray(second, dtype=float) - np.asarray(first, dtype=float))
    half = found.half_width(0.975)
    return found.mean, found.mean - half, found.mean + half


@dataclass(frozen=True, slots=True, kw_only=True)
class NonInferiority:
    """Result of the test that the metric of B is worse than the metric of A by less than a margin.

    Attributes:
        difference: Mean paired difference in the direction of better.
        low: Low end of its one-sided 95 % interval; None with one pair.
        p_value: Of the hypothesis that B is worse by the margin; None with one pair.
        margin: Loss that is accepted.
        is_not_inferior: Whether ``low``, or the difference without it, is above -margin.
        num_pairs: Pairs of runs.
    """

    difference: float
    low: float | None
    p_value: float | None
    margin: float
    is_not_inferior: bool
    num_pairs: int


def non_inferiority(
    first: Sequence[float], second: Sequence[float], *, margin: float, is_rising: bool = True
) -> NonInferiority:
    """Test that the metric of B is worse than the metric of A by less than a margin.

    Takes the mean paired difference, positive if B is better, with the low end of its one-sided 95 % interval; B is not
    inferior if that end is above -margin. With one pair the difference itself is compared, without a claim about
    chance.

    Args:
        first: Metric of the runs of A.
        second: Metric of the runs of B.
        margin: Accepted loss of the metric.
        is_rising: True if a larger metric is better.
    """
    a, b = np.asarray(first, dtype=float), np.asarray(second, dtype=float)
    found = _paired_mean((b - a) if is_rising else (a - b))
    is_judged = found.num_pairs > 1
    low = found.mean - found.half_width(0.95) if is_judged else None
    decided = found.mean if low is None else low
    return NonInferiority(
        difference=found.mean,
        low=low,
        p_value=found.chance_beyond(found.mean + margin) if is_judged else None,
        margin=margin,
        is_not_inferior=bool(decided >= -margin),
        num_pairs=found.num_pairs,
    )


LEAST_PAIRS = 3
"""Fewest pairs that can show anything: of two pairs a t interval is 12.7 standard errors to either side."""
MOST_PAIRS = 8
_NUM_CANDIDATES = 3
_RESERVED = 0.3
_FEWEST_RUNS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The winner of a study beside the script as it is.

    Attributes:
        verdict: ``better``, ``no difference``, ``worse``, or ``not repeated``.
        number: Number of the trial; None if no trial was a candidate.
        ratio: Mean ratio of the objective, above one if the winner is better; None for an objective that has
            differences, or if it was not repeated.
        difference: Mean difference of the objective, above zero if the winner is better; None for one with ratios.
        low: Low end of the 95 % interval of either.
        high: High end of that interval.
        num_pairs: Number of pairs of runs.
        wall_s: Time of all runs behind the verdict [s].
        num_runs: Number of these runs.
        words: The verdict in a sentence.
    """

    verdict: str
    number: int | None = None
    ratio: float | None = None
    difference: float | None = None
    low: float | None = None
    high: float | None = None
    num_pairs: int = 0
    wall_s: float = 0.0
    num_runs: int = 0
    words: str = ""


def num_reserved_runs(num_runs: float) -> int:
    """Runs that a budget keeps back for repeats, of all that fit into it; 0 if there is no room for three pairs.

    >>> num_reserved_runs(40), num_reserved_runs(12), num_reserved_runs(1000)
    (12, 0, 19)
    """
    if num_runs < _FEWEST_RUNS:
        return 0
    return min(max(int(_RESERVED * num_runs), 2 * LEAST_PAIRS), _NUM_CANDIDATES + 2 * MOST_PAIRS)


def screened(
    candidates: Sequence[Any], run: Callable[[Any], float | None], num_runs: int, *, is_rising: bool
) -> list[Any]:
    """The candidates in the order of a second run each; unchanged if that leaves too few runs for pairs.

    The first of many noisy trials is often the luckiest: a fresh run of the first three costs little beside that.
    """
    first = list(candidates[:_NUM_CANDIDATES])
    if len(first) < 2 or num_runs < len(first) + 2 * LEAST_PAIRS:
        return list(candidates)
    again = [(run(candidate), index) for index, candidate in enumerate(first)]
    sign = -1.0 if is_rising else 1.0
    told = sorted((sign * value, index) for value, index in again if value is not None)
    return [*(first[index] for _, index in told), *candidates[len(first) :]]


def show_winner(
    run_script: Callable[[], float | None],
    run_winner: Callable[[], float | None],
    *,
    num_pairs: int,
    is_rising: bool,
    has_ratios: bool = True,
) -> Verdict:
    """Runs the script as it is and the winner in turns, A-B-B-A, and compares them in pairs.

    The runs are none of those by which the winner was chosen, and their number is fixed before the first: if no setting
    matters, the interval lies above one in 2.5 of 100 studies.

    Args:
        run_script: Runs the script as it is; returns its objective, None if the run failed.
        run_winner: Runs the winner.
        num_pairs: Number of pairs.
        is_rising: True if a larger objective is better.
        has_ratios: True compares ratios of objectives above zero; False compares differences.
    """
    if num_pairs < LEAST_PAIRS:
        return Verdict(
            verdict="not repeated",
            words="the winner was not repeated: the budget left no room for "
            f"{LEAST_PAIRS} pairs of runs beside the search",
        )
    script: list[float] = []
    winner: list[float] = []
    for index in range(num_pairs):
        # The first of a pair changes from pair to pair.
        values: dict[str, float | None] = {}
        for which in ("AB", "BA")[index % 2]:
            values[which] = run_script() if which == "A" else run_winner()
        first, second = values["A"], values["B"]
        if (first is None or second is None) and len(script) >= LEAST_PAIRS:
            break  # the budget ended a run
        if first is None or second is None:
            failed = "the script as it is" if first is None else "the winner"
            return Verdict(verdict="not repeated", words=f"{failed} failed when it was repeated")
        script.append(first)
        winner.append(second)
    worse, better = (script, winner) if is_rising else (winner, script)
    if has_ratios:
        ratio = paired_ratio(worse, better)
        mean, low, high, neutral = ratio.ratio, ratio.low, ratio.high, 1.0
    else:
        mean, low, high = paired_difference(worse, better)
        neutral = 0.0
    assert low is not None
    assert high is not None
    verdict = "better" if low > neutral else "worse" if high < neutral else "no difference"
    form = (
        "{:.2f} times the script as it is (95 %: {:.2f} to {:.2f})"
        if has_ratios
        else "{:+.4g} (95 %: {:+.4g} to {:+.4g})"
    )
    told = form.format(mean, low, high)
    sentence = {
        "better": f"repeated in {len(script)} pairs of runs in turns, the winner is better: {told}",
        "worse": f"repeated in {len(script)} pairs of runs in turns, the winner is worse: {told}",
        "no difference": f"no difference could be shown in {len(script)} pairs of runs in turns: {told}",
    }[verdict]
    return Verdict(
        verdict=verdict,
        ratio=mean if has_ratios else None,
        difference=None if has_ratios else mean,
        low=low,
        high=high,
        num_pairs=len(script),
        words=sentence,
    )
