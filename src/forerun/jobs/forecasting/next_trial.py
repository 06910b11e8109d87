"""Choice of the trial that runs on next, where trials can be paused: freeze-thaw on the errors of all trials so far.

With z_k the logarithm of a trial's error at cut k of its length, trials of one search follow a chain

    z_(k+1) = a_k + b_k z_k + noise_k            b_k ~ Normal(0.9, 0.3), noise_k about 0.3 to 0.45 of the spread at k

whose figures are learned from the trials that went on; a trial far worse than the middle counts as one just worse. The
chain gives each trial a mean of its end, and what each further stretch of work will reveal of it. A trial is then a box
to be opened in stages (Weitzman 1979): it is worth opening as long as something better than

    index = mean of the end - g_k

has not been found, where g_k solves the stopping problem of the rest, what is gained at its end against the cost of its
work. The trial of the least index runs on, up to the next cut; a trial that waits to begin has the mean and the spread
of those begun. Work costs 1.5 of the spread of ends over the work left, or, without a budget, over one trial more than
is done: a search that may go on for long explores the more.

Freeze-thaw: Swersky et al. 2014, arXiv 1406.3896; steps of work as boxes: Xie et al. 2024, arXiv 2406.20062; the same
task with networks in place of the chain: DyHPO (Wistuba et al. 2022), ifBO (Rakotoarison et al. 2024).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from forerun.base.answers import Answer
from forerun.base.errors import ForecastError
from forerun.jobs.forecasting.curve import (
    FINAL_SHARE,
    Curve,
    ErrorScale,
    Floats,
    error_scale,
    final_error,
    is_share_metric,
)
from forerun.jobs.forecasting.prior import CUTS

STAGES = (*CUTS, 1.0)
"""Shares of a trial at which it may pause."""

_WORK = np.diff((0.0, *STAGES))
_SLOPE, _SLOPE_SPREAD, _COST = 0.9, 0.3, 1.5
_NOISE = (0.45, 0.35, 0.35, 0.35, 0.3, 0.3)
"""Noise of each stretch, in spreads of the trials at its beginning."""

_FIRST_SPREAD, _NUM_PRIOR = 0.3, 2.0
"""Spread of log errors before trials are known, and how many of them it is worth."""

_LEAST_ERROR, _LEAST_SPREAD, _FARTHEST = 1e-4, 0.02, 8.0
_GRID = np.linspace(-6.0, 6.0, 121)
_NODES, _WEIGHTS = np.polynomial.hermite_e.hermegauss(9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing(Answer):
    """One trial in a search.

    Attributes:
        name: Of the trial; None for one that waits to begin.
        done: Share of it that is done.
        expected_end: Value expected at its end.
        low_90, high_90: Ends of its 90 % interval.
        index: What something better than would make it not worth going on; None if it is finished.
    """

    name: str | None
    done: float
    expected_end: float
    low_90: float
    high_90: float
    index: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class NextTrial(Answer):
    """The step of work that comes next in a search.

    Attributes:
        metric: Metric of the trials.
        trial: Name of the trial that runs on; None for a new one, and where nothing is left to run.
        until: Share of it up to which it runs; None where nothing is left.
        standings: Trials by index, the next first; finished ones last.
    """

    metric: str
    trial: str | None
    until: float | None
    standings: tuple[Standing, ...]


def next_trial(
    trials: Sequence[Curve], ends: Sequence[float], *, num_new: int = 0, budget: float | None = None
) -> NextTrial:
    """The trial that should run next.

    Args:
        trials: Each so far, of one metric; at least one.
        ends: Length of each whole trial, in its epochs, (trials,).
        num_new: Trials that wait to begin.
        budget: Work that is left, in whole trials, or None.

    Raises:
        ForecastError: No trial.
    """
    if not trials:
        raise ForecastError("a choice among trials needs one that has begun, got none; start one")
    scale = error_scale(np.concatenate([t.values for t in trials]), trials[0].is_rising, trials[0].kind)
    done = np.asarray([min(1.0, float(t.epochs[-1]) / end) for t, end in zip(trials, ends, strict=True)])
    logs = np.stack([stage_logs(t, scale, end) for t, end in zip(trials, ends, strict=True)])
    if num_new:
        logs, done = np.vstack([logs, np.full(len(STAGES), np.nan)]), np.append(done, 0.0)
    found = standings_of(logs, done, budget)
    most = 1.0 if is_share_metric(trials[0].metric) else np.inf
    order, standings = np.argsort(found.index, kind="stable"), []
    for place in order.tolist():
        mean, spread = found.mean[place], 1.645 * found.spread[place]
        errors = np.exp([mean - spread, mean, mean + spread, found.index[place]])
        values = scale.values(np.minimum(errors, most)).tolist()
        standings.append(
            Standing(
                name=trials[place].name if place < len(trials) else None,
                done=float(done[place]),
                expected_end=values[1],
                low_90=min(values[0], values[2]),
                high_90=max(values[0], values[2]),
                index=values[3] if np.isfinite(found.index[place]) else None,
            )
        )
    place = chosen(found.index, done, budget)
    return NextTrial(
        metric=trials[0].metric,
        trial=None if place is None or place == len(trials) else trials[place].name,
        until=None if place is None else next_stage(float(done[place])),
        standings=tuple(standings),
    )


def chance_to_win(curve: Curve, finished: Sequence[Curve], progress: float) -> float | None:
    """Probability that a run ends better than the best of n finished ones; None without any.

        odds = sqrt(odds by the chain * 1 / n)

    The chain alone is too hopeful, since the best end is an extreme, and 1 / (n + 1) knows nothing of the run: half of
    each has a Brier score of .109 over searches of 27 pools of trials, the two have .134 and .122.

    Args:
        curve: The run so far.
        finished: Finished runs of its job.
        progress: Share of the run that is done.
    """
    from scipy.special import log_ndtr  # slow to import

    known = [run for run in finished if np.isfinite(final_error(run.values))]
    if not known:
        return None
    runs, ends = [curve, *known], [float(curve.epochs[-1]) / progress, *(float(r.epochs[-1]) for r in known)]
    scale = error_scale(np.concatenate([run.values for run in runs]), curve.is_rising, curve.kind)
    logs = np.stack([stage_logs(run, scale, end) for run, end in zip(runs, ends, strict=True)])
    found = standings_of(logs, np.append(progress, np.ones(len(known))))
    best = float(np.log(max(float(scale.errors([final_error(r.values) for r in known]).min()), _LEAST_ERROR)))
    ahead = np.clip((best - found.mean[0]) / max(float(found.spread[0]), 1e-9), -_FARTHEST, _FARTHEST)
    log_odds = 0.5 * float(log_ndtr(ahead) - log_ndtr(-ahead)) - 0.5 * np.log(len(known))
    return float(1 / (1 + np.exp(-log_odds)))


def next_stage(done: float) -> float:
    """The next of ``STAGES`` after a share that is done."""
    return next(stage for stage in (*STAGES, 1.0) if stage > done * (1 + 1e-9) or stage == 1.0)


def stage_logs(curve: Curve, scale: ErrorScale, end: float) -> Floats:
    """Logarithm of the error at each of ``STAGES``, the median over 5 % of the run before; NaN if not reached."""
    errors = scale.errors(curve.values)
    # A trial in NaN is as bad as the worst that it was, and no better than any before.
    errors = np.where(np.isfinite(errors), errors, np.max(errors, where=np.isfinite(errors), initial=1.0))
    found = np.full(len(STAGES), np.nan)
    width = max(1, round(FINAL_SHARE * len(curve) * end / float(curve.epochs[-1])))
    for stage, share in enumerate(STAGES):
        # A trial that was first looked at later had that error, as far as anybody knows.
        seen = max(1, int(np.searchsorted(curve.epochs, share * end * (1 + 1e-9), "right")))
        if curve.epochs[-1] >= share * end * (1 - 1e-9):
            found[stage] = np.log(max(float(np.median(errors[max(0, seen - width) : seen])), _LEAST_ERROR))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Standings:
    """Mean and spread of the log error at the end of each trial, and its index, infinite if finished, (trials,)."""

    mean: Floats
    spread: Floats
    index: Floats


def standings_of(logs: Floats, done: Floats, budget: float | None = None) -> Standings:
    """The standing of each trial.

    Args:
        logs: As by ``stage_logs``, (trials, stages).
        done: Share of each that is done, (trials,).
        budget: Work that is left, in whole trials, or None.
    """
    reached = np.isfinite(logs).sum(axis=1) - 1
    chain = _fitted(logs)
    # What is known of the end at each stage, as the chain carries it there.
    carried = np.append(np.cumprod(chain.slopes[::-1])[::-1], 1.0)
    revealed = np.append(chain.first[1], chain.noises) * np.abs(carried)
    ahead = np.sqrt(np.append(np.cumsum(revealed[::-1] ** 2)[::-1], 0.0))
    left = 1.0 + done.sum() if budget is None else max(budget, float(_WORK[0]))
    gains = np.append(_gains(revealed, _COST * ahead[0] / left), -np.inf)
    means = np.empty(len(logs))
    for trial, stage in enumerate(reached.tolist()):
        value = chain.first[0] if stage < 0 else float(logs[trial, stage])
        if stage < len(STAGES) - 1:
            value = min(value, chain.caps[max(stage, 0)])
        for step in range(max(stage, 0), len(STAGES) - 1):
            value = chain.offsets[step] + chain.slopes[step] * value
        means[trial] = value
    return Standings(mean=means, spread=ahead[reached + 1], index=means - gains[reached + 1])


def chosen(index: Floats, done: Floats, budget: float | None = None) -> int | None:
    """The trial of the least index; with a budget among those that it finishes, if any."""
    fits = np.isfinite(index) & (1.0 - done <= (np.inf if budget is None else budget) + 1e-9)
    among = np.flatnonzero(fits if fits.any() else np.isfinite(index))
    return int(among[np.argmin(index[among])]) if len(among) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chain:
    """Mean and spread at the first cut; offset, slope and noise of each stretch; log errors that count as worst."""

    first: tuple[float, float]
    offsets: Floats
    slopes: Floats
    noises: Floats
    caps: Floats


def _fitted(logs: Floats) -> _Chain:
    """Each stretch by a regression with the prior, noise of all stretches shrunk to one multiple of it."""
    caps = np.full(len(STAGES), np.inf)
    for stage, column in enumerate(logs.T):
        known = column[np.isfinite(column)]
        if len(known) > 2:
            middle = float(np.median(known))
            caps[stage] = middle + max(middle - float(known.min()), _LEAST_SPREAD)
    capped = np.minimum(logs, caps)
    first = capped[np.isfinite(logs[:, 0]), 0]
    mean = float(first.mean()) if len(first) else 0.0
    squares = float(np.sum((first - mean) ** 2))
    variance = (_NUM_PRIOR * _FIRST_SPREAD**2 + squares) / (_NUM_PRIOR + max(len(first) - 1, 0))
    start, spread, figures = mean, variance, []
    for stage, noise in enumerate(_NOISE):
        on = np.isfinite(logs[:, stage + 1])
        before, after = capped[on, stage], capped[on, stage + 1]
        usual = noise**2 * spread
        pull = usual / _SLOPE_SPREAD**2
        slope, offset, misfit, freedom = _SLOPE, mean * (1 - _SLOPE), 0.0, 0
        if len(before):
            apart = before - before.mean()
            slope = float((apart @ after + pull * _SLOPE) / (apart @ apart + pull))
            offset = float(after.mean() - slope * before.mean())
            residuals = after - after.mean() - slope * apart
            misfit = float(residuals @ residuals + pull * (slope - _SLOPE) ** 2)
            freedom = len(before) - 1
        figures.append((offset, slope, usual, misfit, freedom))
        mean, spread = offset + slope * mean, slope**2 * spread + usual
    offsets, slopes, usuals, misfits, freedoms = np.asarray(figures).T
    multiple = (_NUM_PRIOR + np.sum(misfits / usuals)) / (_NUM_PRIOR + freedoms.sum())
    variances = (_NUM_PRIOR * multiple * usuals + misfits) / (_NUM_PRIOR + freedoms)
    return _Chain(
        first=(start, float(np.sqrt(variance))),
        offsets=offsets,
        slopes=slopes,
        noises=np.sqrt(variances),
        caps=caps,
    )


def _gains(revealed: Floats, cost: float) -> Floats:
    """Gain before each stretch, g: how far below the mean something found may be with the rest still worth its work.

        V_k(x) = max(0, E V_(k+1)(x + revealed_k N) - cost work_k),    V at the end = max(x, 0),    V_k(-g_k) = 0

    Args:
        revealed: Spread of what each stretch tells of the end, (stages,).
        cost: Of a whole trial, in log errors.
    """
    x = _GRID * max(float(np.sqrt(np.sum(revealed**2))), 1e-9)
    worth, found = np.maximum(x, 0.0), np.empty(len(STAGES))
    weights = _WEIGHTS / _WEIGHTS.sum()
    for stage in reversed(range(len(STAGES))):
        places = x[:, None] + revealed[stage] * _NODES
        # Beyond the grid all is won.
        going = np.where(places > x[-1], places, np.interp(places, x, worth)) @ weights - cost * _WORK[stage]
        found[stage] = (
            -float(np.interp(0.0, going, x)) if going[-1] > 0 else -cost * float(_WORK[stage:].sum())
        )
        worth = np.maximum(going, 0.0)
    return found
