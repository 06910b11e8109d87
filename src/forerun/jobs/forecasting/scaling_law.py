"""Loss of a language model over its parameters N and training tokens D, from a few finished runs.

    L(N, D) = E + A / N^alpha + B / D^beta

Training takes C = 6 N D FLOP. At a budget C the loss is least for

    N = G (C / 6)^(beta / (alpha + beta)),   D = C / (6 N),   G = (alpha A / (beta B))^(1 / (alpha + beta))

Source: Hoffmann et al. 2022 (arXiv 2203.15556), equations 2, 4 and 10; 6 N D: Kaplan et al. 2020 (arXiv 2001.08361).

The law is fitted to log L with Huber's loss, so that a run that went badly counts little. A handful of runs does not
determine five numbers: small networks say little of E. So the most probable values under priors are taken. Published
fits of text have alpha .34 and beta .28 (Hoffmann) or .35 and .37 (Besiroglu et al. 2024, arXiv 2404.10102, on the same
runs): the prior of either exponent is 0.35 +- 0.05. E is half to nine tenths of the least loss, and A and B are free
within factors of ten.

Intervals are those of many fits to the same runs with losses and priors moved by draws of their own spread (randomise,
then optimise: Bardsley et al. 2014), which holds for five runs as for fifty, where a resampling of five does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from forerun.base.errors import InvalidSetupError
from forerun.jobs.forecasting.curve import Floats
from forerun.prediction.estimate import Interval

FLOP_PER_TOKEN = 6.0
"""FLOP of a training step per parameter and token."""

FEWEST_RUNS = 4

_EXPONENT, _EXPONENT_SPREAD = 0.35, 0.05
_FLOOR_SHARE, _FLOOR_SPREAD = 0.7, 0.3
_FALL_SHARE, _FALL_SPREAD = 0.12, 2.3
"""Share of the mean loss that either fall has at the middle of the runs, and its spread in logarithm."""

_NOISE = 0.005
"""Least spread of the logarithm of a loss about the law: .002 to .004 on the tuned runs of the Step Law grid."""

_NUM_DRAWS = 100
_FARTHEST = np.log(1e8)
"""Budgets are looked for up to so far from the middle of the runs, in logarithm of FLOP."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRun:
    """A finished run of a language model.

    Attributes:
        parameters: N.
        tokens: D.
        loss: At the end, above zero [nats].
    """

    parameters: float
    tokens: float
    loss: float

    @property
    def flop(self) -> float:
        """C = 6 N D."""
        return FLOP_PER_TOKEN * self.parameters * self.tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Frontier:
    """The best that a budget buys.

    Attributes:
        flop: The budget, C.
        parameters, tokens: The best size and number of tokens.
        loss: The loss there, the scatter of single runs included [nats].
    """

    flop: Interval
    parameters: Interval
    tokens: Interval
    loss: Interval


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScalingLaw:
    """A law of scaling, fitted.

    Attributes:
        draws: (log E, log A', log B', alpha, beta) of the fit and of each draw, (1 + draws, 5); A' and B' are what the
            two falls have at the middle of the runs.
        middle: log N and log D of the middle of the runs.
        log_spread: Spread of the logarithm of single losses about the law.
        num_runs: Runs behind it.
    """

    draws: Floats
    middle: tuple[float, float]
    log_spread: float
    num_runs: int

    def coefficients(self) -> dict[str, Interval]:
        """E [nats], A, B, alpha and beta."""
        log_e, log_a, log_b, alpha, beta = self.draws.T
        log_n, log_d = self.middle
        values = {
            "E": np.exp(log_e),
            "A": np.exp(log_a + alpha * log_n),
            "B": np.exp(log_b + beta * log_d),
            "alpha": alpha,
            "beta": beta,
        }
        return {name: _interval(value) for name, value in values.items()}

    def loss(self, parameters: float, tokens: float) -> Interval:
        """Loss of a run of this size [nats]."""
        found = np.exp(_log_losses(self.draws, *self._places(np.log(parameters), np.log(tokens))))
        return _interval(found * self._scatter())

    def at_budget(self, flop: float) -> Frontier:
        """The best size for a budget.

        Args:
            flop: C, above zero.
        """
        return self._frontier(np.full(len(self.draws), np.log(flop)))

    def at_target(self, loss: float) -> Frontier | None:
        """The least budget that reaches a loss; None where no budget does.

        Args:
            loss: The target [nats].
        """
        low, high = (np.full(len(self.draws), sum(self.middle) + way * _FARTHEST) for way in (-1, 1))
        reached = self._best_losses(high) <= loss
        if not reached[0]:
            return None
        for _ in range(60):
            half = 0.5 * (low + high)
            enough = self._best_losses(half) <= loss
            low, high = np.where(enough, low, half), np.where(enough, half, high)
        found = self._frontier(high)
        # Draws whose floor lies above the target say that nothing is enough.
        return found if reached.mean() >= 0.95 else _open_ended(found)

    def _places(self, log_n: Floats | float, log_d: Floats | float) -> tuple[Floats, Floats]:
        return np.asarray(log_n - self.middle[0], dtype=float), np.asarray(
            log_d - self.middle[1], dtype=float
        )

    def _best_size(self, log_flop: Floats) -> tuple[Floats, Floats]:
        """Log N and log D where the loss is least, from the middle of the runs, by draw."""
        _, log_a, log_b, alpha, beta = self.draws.T
        total = log_flop - np.log(FLOP_PER_TOKEN) - sum(self.middle)
        x = (np.log(alpha) + log_a - np.log(beta) - log_b + beta * total) / (alpha + beta)
        return x, total - x

    def _best_losses(self, log_flop: Floats) -> Floats:
        return np.exp(_log_losses(self.draws, *self._best_size(log_flop)))

    def _frontier(self, log_flop: Floats) -> Frontier:
        x, y = self._best_size(log_flop)
        losses = np.exp(_log_losses(self.draws, x, y))
        return Frontier(
            flop=_interval(np.exp(log_flop)),
            parameters=_interval(np.exp(x + self.middle[0])),
            tokens=_interval(np.exp(y + self.middle[1])),
            loss=_interval(losses * self._scatter()),
        )

    def _scatter(self) -> Floats:
        """A single run's own factor, one for each draw and none for the fit itself."""
        chance = np.random.default_rng(1)
        own = self.log_spread * chance.standard_normal(len(self.draws) - 1)
        return np.asarray(np.exp(np.append(0.0, own)), dtype=float)


def _interval(values: Floats) -> Interval:
    """The first value between the 5 and 95 % quantiles of all."""
    value = float(values[0])
    low, high = (float(end) for end in np.quantile(values, (0.05, 0.95)))
    return Interval(value, min(low, value), max(high, value))


def _open_ended(found: Frontier) -> Frontier:
    def opened(interval: Interval) -> Interval:
        return Interval(interval.value, interval.low, float("inf"))

    return Frontier(
        flop=opened(found.flop),
        parameters=opened(found.parameters),
        tokens=opened(found.tokens),
        loss=found.loss,
    )


def _log_losses(theta: Floats, x: Floats, y: Floats) -> Floats:
    """Log L by draw; x and y are log N and log D from the middle of the runs, one for each or for all."""
    log_e, log_a, log_b, alpha, beta = theta.T
    falls = np.logaddexp(log_a - alpha * x, log_b - beta * y)
    return np.asarray(np.logaddexp(log_e, falls), dtype=float)


def fit_scaling_law(runs: Sequence[FinishedRun], *, seed: int = 0) -> ScalingLaw:
    """The law of some runs; of several with the same size and tokens only the best counts.

    A grid of learning rates and batch sizes at each size is a search for the tuned run, and the law is that of tuned
    runs.

    Args:
        runs: Finished runs.
        seed: Of the draws behind the intervals.

    Raises:
        InvalidSetupError: Fewer than four sizes, all of one N or of one D, or numbers that are not above zero.
    """
    best: dict[tuple[float, float], float] = {}
    for run in runs:
        if not all(0 < value < np.inf for value in (run.parameters, run.tokens, run.loss)):
            raise InvalidSetupError(f"a run needs parameters, tokens and a loss above zero, got {run}")
        key = (run.parameters, run.tokens)
        best[key] = min(run.loss, best.get(key, np.inf))
    log_n, log_d = (np.log([key[i] for key in best]) for i in (0, 1))
    log_loss = np.log(list(best.values()))
    if len(best) < FEWEST_RUNS or np.ptp(log_n) < 0.1 or np.ptp(log_d) < 0.1:
        raise InvalidSetupError(
            f"a law of scaling needs {FEWEST_RUNS} or more runs that differ in parameters and in tokens, got "
            f"{len(best)} of {len(set(log_n))} sizes and {len(set(log_d))} numbers of tokens; add small runs"
        )
    middle = (float(log_n.mean()), float(log_d.mean()))
    x, y = log_n - middle[0], log_d - middle[1]
    prior = _prior(log_loss)
    # Two rounds, for the weight of the priors depends on how far the runs are from the law.
    spread, theta = _NOISE, prior
    for _ in range(2):
        theta = _most_probable(x, y, log_loss, prior, spread, theta)
        residuals = _log_losses(theta[None], x, y) - log_loss
        free = max(1.0, len(best) - 3.0)
        spread = max(_NOISE, float(np.sqrt(np.sum(residuals**2) / free)))
    chance = np.random.default_rng(seed)
    draws = [theta]
    for _ in range(_NUM_DRAWS):
        # Randomise, then optimise: data and priors move by their own spread, and each fit is a draw of the law.
        moved = log_loss + spread * chance.standard_normal(len(log_loss))
        centre = prior + _prior_spread() * chance.standard_normal(len(prior))
        draws.append(_most_probable(x, y, moved, centre, spread, theta))
    return ScalingLaw(draws=np.asarray(draws), middle=middle, log_spread=spread, num_runs=len(best))


def _prior(log_loss: Floats) -> Floats:
    floor = float(log_loss.min()) + np.log(_FLOOR_SHARE)
    fall = float(log_loss.mean()) + np.log(_FALL_SHARE)
    return np.asarray([floor, fall, fall, _EXPONENT, _EXPONENT])


def _prior_spread() -> Floats:
    falls = (_FALL_SPREAD, _FALL_SPREAD)
    return np.asarray([_FLOOR_SPREAD, *falls, _EXPONENT_SPREAD, _EXPONENT_SPREAD])


def _most_probable(
    x: Floats, y: Floats, log_loss: Floats, prior: Floats, spread: float, start: Floats
) -> Floats:
    """The five numbers with the least Huber loss under a prior."""
    from scipy.optimize import least_squares  # slow to import, and few questions fit a law

    width = _prior_spread()

    def residuals(theta: Floats) -> Floats:
        misses = (_log_losses(theta[None], x, y) - log_loss) / spread
        return np.concatenate([misses, (theta - prior) / width])

    lowest = np.asarray([-np.inf, -np.inf, -np.inf, 0.02, 0.02])
    found = least_squares(
        residuals,
        np.maximum(start, lowest),
        bounds=(lowest, np.inf),
        loss="huber",
        x_scale=width,
        max_nfev=60,
    )
    return np.asarray(found.x, dtype=float)
