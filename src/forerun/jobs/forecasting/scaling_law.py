"""Loss of a language model over its parameters N and training tokens D, from a few finished runs.

    L(N, D) = E + ((A / N^alpha)^p + (B / D^beta)^p)^(1/p)

p is 1 for Hoffmann et al. 2022 (arXiv 2203.15556, equation 2). A larger p lets the best size be sharp though the best
loss falls slowly; with p = 1 one exponent has to serve both, and runs to come turn out better than the law says.
Kaplan et al. 2020 (arXiv 2001.08361, equation 1.5) is p = 1 / alpha_D = 10 without E. Training takes C = 6 N D FLOP.
At a budget C the loss is least for

    N = G (C / 6)^(beta / (alpha + beta)),   D = C / (6 N),   G = ((alpha / beta)^(1/p) A / B)^(1 / (alpha + beta))

The law is fitted to log L with Huber's loss, so that a run that went badly counts little. A handful of runs does not
determine six numbers: small networks say little of E. So the most probable values under priors are taken. Published
fits of text have alpha .34 and beta .28 (Hoffmann) or .35 and .37 (Besiroglu et al. 2024, arXiv 2404.10102, on the same
runs): the prior of either exponent is 0.35 +- 0.1. E is two to four fifths of the least loss, A and B are free within
factors of ten, and p is 1.6 within a factor of 1.5: public tables of four origins have 1.2 to 2.1.

Learning rate and batch: with z = (log rate, log batch), runs of one size and number of tokens follow

    log L = c + g(N, D) . z + z' H z / 2,   g linear in log N and log D,   best z = -H^-1 g

so both are power laws of N and D. A quadratic holds near the best only: a run whose log L is r above the best of its
size weighs 1 / (1 + r / 0.006), and beyond r = 0.018 only the best six count. The prior of the exponents is that of Bi
et al. 2024 (arXiv 2401.02954, equation 1): rate ~ C^-.125, batch ~ C^.327, each +- 0.3. The weights were set on the
dense runs of Step Law (arXiv 2503.04715), its mixtures of experts not seen.

Intervals are those of many fits to the same runs with losses and priors moved by draws of their own spread (randomise,
then optimise: Bardsley et al. 2014), which holds for five runs as for fifty, where a resampling of five does not. No
table follows the law to the end of its sizes: all spreads are stretched by how far each run lies from the law of the
others (``_stretch``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from forerun.base.errors import InvalidSetupError
from forerun.jobs.forecasting.curve import Floats
from forerun.prediction.estimate import Interval

FLOP_PER_TOKEN = 6.0
"""FLOP of a training step per parameter and token."""

FEWEST_RUNS = 4

_EXPONENT, _EXPONENT_SPREAD = 0.35, 0.1
_POWER, _POWER_SPREAD = 1.6, 0.4
"""p, and the spread of its logarithm."""

_FLOOR_SHARE, _FLOOR_SPREAD = 0.6, 0.3
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
        learning_rate, batch_size: Highest rate, and batch in any unit that all runs share; None where unknown.
    """

    parameters: float
    tokens: float
    loss: float
    learning_rate: float | None = None
    batch_size: float | None = None

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
        learning_rate, batch_size: The best there, in the units of the runs; None where these do not tell.
    """

    flop: Interval
    parameters: Interval
    tokens: Interval
    loss: Interval
    learning_rate: Interval | None = None
    batch_size: Interval | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScalingLaw:
    """A law of scaling, fitted.

    Attributes:
        draws: (log E, log A', log B', alpha, beta, log p) of the fit and of each draw, (1 + draws, 6); A' and B' are
            what the two falls have at the middle of the runs.
        middle: log N and log D of the middle of the runs.
        log_spread: Spread of the logarithm of single losses about the law.
        num_runs: Runs behind it.
    """

    draws: Floats
    middle: tuple[float, float]
    log_spread: float
    num_runs: int

    def coefficients(self) -> dict[str, Interval]:
        """E [nats], A, B, alpha, beta and p."""
        log_e, log_a, log_b, alpha, beta, log_p = self.draws.T
        log_n, log_d = self.middle
        values = {"E": np.exp(log_e), "A": np.exp(log_a + alpha * log_n), "B": np.exp(log_b + beta * log_d)}
        values |= {"alpha": alpha, "beta": beta, "p": np.exp(log_p)}
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
        x, y = log_n - self.middle[0], log_d - self.middle[1]
        return np.asarray(x, dtype=float), np.asarray(y, dtype=float)

    def _best_size(self, log_flop: Floats) -> tuple[Floats, Floats]:
        """Log N and log D where the loss is least, from the middle of the runs, by draw."""
        _, log_a, log_b, alpha, beta, log_p = self.draws.T
        total = log_flop - np.log(FLOP_PER_TOKEN) - sum(self.middle)
        x = (np.log(alpha / beta) / np.exp(log_p) + log_a - log_b + beta * total) / (alpha + beta)
        return x, total - x

    def _best_losses(self, log_flop: Floats) -> Floats:
        return np.exp(_log_losses(self.draws, *self._best_size(log_flop)))

    def _frontier(self, log_flop: Floats) -> Frontier:
        x, y = self._best_size(log_flop)
        sizes = [np.exp(place[0] + middle) for place, middle in zip((x, y), self.middle, strict=True)]
        return Frontier(
            flop=_interval(np.exp(log_flop)),
            parameters=_interval(np.exp(x + self.middle[0])),
            tokens=_interval(np.exp(y + self.middle[1])),
            # Of that size and no other: what each draw thinks best elsewhere is not what is trained.
            loss=self.loss(*sizes),
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
    of_budget = {name: getattr(found, name) for name in ("flop", "parameters", "tokens")}
    return replace(found, **{name: Interval(i.value, i.low, float("inf")) for name, i in of_budget.items()})


def _log_losses(theta: Floats, x: Floats, y: Floats) -> Floats:
    """Log L by draw; x and y are log N and log D from the middle of the runs, one for each or for all."""
    log_e, log_a, log_b, alpha, beta, log_p = theta.T
    power = np.exp(log_p)
    falls = np.logaddexp(power * (log_a - alpha * x), power * (log_b - beta * y)) / power
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
    weight = _trusted(log_n + log_d, log_loss)
    # Two rounds, for the weight of the priors depends on how far the runs are from the law.
    spread, theta = _NOISE, prior
    for _ in range(2):
        theta = _most_probable(x, y, log_loss, prior, spread / weight, theta)[0]
        residuals = (_log_losses(theta[None], x, y) - log_loss) * weight
        free = max(1.0, float(np.sum(weight**2)) - 3.0)
        spread = max(_NOISE, float(np.sqrt(np.sum(residuals**2) / free)))
    stretch = _stretch(x, y, log_loss, prior, spread / weight, theta)
    chance = np.random.default_rng(seed)
    draws = [theta]
    for _ in range(_NUM_DRAWS):
        # Randomise, then optimise: data and priors move by their own spread, and each fit is a draw of the law.
        moved = log_loss + stretch * spread / weight * chance.standard_normal(len(log_loss))
        centre = prior + stretch * _PRIOR_SPREAD * chance.standard_normal(len(prior))
        draws.append(_most_probable(x, y, moved, centre, spread / weight, theta)[0])
    return ScalingLaw(draws=np.asarray(draws), middle=middle, log_spread=stretch * spread, num_runs=len(best))


def _stretch(x: Floats, y: Floats, log_loss: Floats, prior: Floats, spread: Floats, theta: Floats) -> float:
    """Factor of all spreads by the law of the other runs at each run.

        2 sqrt((2 + sum z^2) / (2 + runs)),    z = (log L - law of the others) / its own spread there

    Runs, left out one by one, of nine tables of mlfoundations/scaling (C4, RedPajama; 10M to 6.9B) and Step Law's two
    were inside of 71 % of the 90 % intervals without it, and are in 86 %; sizes left out 61 and 82 %, larger runs from
    smaller ones 65 and 84 %. The factor of 2 was chosen on these.
    """
    squares = 0.0
    for index in range(len(x)):
        others, own = np.arange(len(x)) != index, slice(index, index + 1)
        found, jacobian = _most_probable(x[others], y[others], log_loss[others], prior, spread[others], theta)
        steps = found + _STEP * np.vstack([np.zeros(len(found)), np.eye(len(found))])
        expected, *moved = _log_losses(steps, x[own], y[own])
        gradient = (np.asarray(moved) - expected) / _STEP
        variance = gradient @ np.linalg.solve(jacobian.T @ jacobian, gradient) + spread[index] ** 2
        squares += float((log_loss[index] - expected) ** 2 / variance)
    return float(2 * np.sqrt((2 + squares) / (2 + len(x))))


def _prior(log_loss: Floats) -> Floats:
    floor = float(log_loss.min()) + np.log(_FLOOR_SHARE)
    fall = float(log_loss.mean()) + np.log(_FALL_SHARE)
    return np.asarray([floor, fall, fall, _EXPONENT, _EXPONENT, np.log(_POWER)])


_PRIOR_SPREAD = np.asarray([_FLOOR_SPREAD, *[_FALL_SPREAD] * 2, *[_EXPONENT_SPREAD] * 2, _POWER_SPREAD])

_BEHIND, _STEP = 0.1, 1e-4


def _trusted(log_work: Floats, log_loss: Floats) -> Floats:
    """Weight of each run: one that a cheaper run beats by r in log L is off the recipe, and counts 1 / (1 + 10 r)."""
    cheaper = log_work[None, :] <= log_work[:, None]
    least = np.where(cheaper, log_loss[None, :], np.inf).min(axis=1)
    return np.asarray(1 / (1 + (log_loss - least) / _BEHIND), dtype=float)


def _most_probable(
    x: Floats, y: Floats, log_loss: Floats, prior: Floats, spread: Floats, start: Floats
) -> tuple[Floats, Floats]:
    """The six numbers with the least Huber loss under a prior, and the derivative of the misses there."""
    from scipy.optimize import least_squares  # slow to import, and few questions fit a law

    def residuals(theta: Floats) -> Floats:
        misses = (_log_losses(theta[None], x, y) - log_loss) / spread
        return np.concatenate([misses, (theta - prior) / _PRIOR_SPREAD])

    lowest = np.asarray([-np.inf, -np.inf, -np.inf, 0.02, 0.02, -3.0])
    found = least_squares(
        residuals,
        np.maximum(start, lowest),
        bounds=(lowest, np.inf),
        loss="huber",
        x_scale=_PRIOR_SPREAD,
        max_nfev=60,
    )
    return np.asarray(found.x, dtype=float), np.asarray(found.jac, dtype=float)


_FEWEST_OF_SIZE = 3
_NEAR = 0.006
_PUBLISHED = np.asarray([[-0.125, -0.125], [0.327, 0.327]])
"""Exponents of rate and batch, rows, over N and D."""

_PUBLISHED_SPREAD = 0.3
_CURVATURE = np.asarray([0.03, 0.01])
"""Second derivative of log L by log rate and log batch before any run, and its spread: that of Step Law's smallest."""

_RUN_NOISE, _HUBER, _ROUNDS = 0.004, 1.5, 4
_FARTHEST_BEHIND, _ALWAYS_KEPT = 3 * _NEAR, 6
"""Runs that count: so near the best of their size in log L, and as many of each size in any case."""

_SCATTER = 0.3
"""Deviation of a size's best log rate and log batch from the law before any run: a step of a usual grid."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TuningLaw:
    """The best learning rate and batch size over parameters and tokens, fitted.

    Attributes:
        draws: Coefficients (constant, log N, log D) of log rate and log batch from ``middle``, of the fit and of each
            draw, (1 + draws, 2, 3).
        middle: log N, log D, log rate and log batch of the middle of the runs.
        num_runs, num_sizes: Runs behind it, and pairs of parameters and tokens.
    """

    draws: Floats
    middle: Floats
    num_runs: int
    num_sizes: int

    def best(self, parameters: float, tokens: float) -> tuple[Interval, Interval]:
        """Learning rate, and batch size in the unit of the runs, with the least loss."""
        place = np.asarray([1.0, np.log(parameters) - self.middle[0], np.log(tokens) - self.middle[1]])
        found = np.exp(self.draws @ place + self.middle[2:])
        return _interval(found[:, 0]), _interval(found[:, 1])


def fit_tuning_law(runs: Sequence[FinishedRun], *, seed: int = 0) -> TuningLaw | None:
    """The law of the runs whose rate and batch are known; None where they do not tell a best one.

    Args:
        runs: Finished runs; those of sizes with fewer than three count for nothing.
        seed: Of the draws behind the intervals.

    Raises:
        InvalidSetupError: A rate or batch is not above zero.
    """
    rows = [
        (r.parameters, r.tokens, r.learning_rate, r.batch_size, r.loss)
        for r in runs
        if r.learning_rate is not None and r.batch_size is not None
    ]
    if not all(0 < value < np.inf for row in rows for value in row):
        raise InvalidSetupError(
            "a run needs parameters, tokens, rate, batch and a loss above zero and finite"
        )
    logs = np.log(np.asarray(rows, dtype=float).reshape(-1, 5))
    size, counts = np.unique(logs[:, :2], axis=0, return_inverse=True, return_counts=True)[1:]
    kept = counts[size] >= _FEWEST_OF_SIZE
    logs, size = logs[kept], np.unique(size[kept], return_inverse=True)[1]
    if not len(logs) or np.ptp(logs[:, 2]) < 0.1 or np.ptp(logs[:, 3]) < 0.1:
        return None
    behind = logs[:, 4] - _least_of(size, logs[:, 4])[size]
    near = (behind < _FARTHEST_BEHIND) | (_places(size, behind) < _ALWAYS_KEPT)
    num_runs, logs, size, behind = len(logs), logs[near], size[near], behind[near]
    middle, chance = logs[:, :4].mean(axis=0), np.random.default_rng(seed)
    trusted = 1 / (1 + behind / _NEAR)
    found = _settings_of(logs, size, middle, trusted, np.zeros(6), rounds=_ROUNDS)
    if found is None:
        return None
    draws = [found[0]]
    num_sizes = int(size.max()) + 1
    for _ in range(_NUM_DRAWS):
        # Each size counts by chance (Rubin's bootstrap), and the priors move by their spread.
        weight = np.sqrt(chance.exponential(size=num_sizes))[size]
        draw = _settings_of(logs, size, middle, found[1] * weight, chance.standard_normal(6), rounds=1)
        draws += [draw[0]] if draw is not None else []
    coefficients = np.asarray(draws)
    # The best run of a size lies off the law by the scatter of one size, as that of the next one will.
    best = logs[behind == 0][np.unique(size[behind == 0], return_index=True)[1]]
    off = best[:, 2:4] - _at(coefficients[0], best[:, 0] - middle[0], best[:, 1] - middle[1]) - middle[2:]
    scatter = np.sqrt((np.sum(off**2, axis=0) + 2 * _SCATTER**2) / (num_sizes + 2))
    coefficients[1:, :, 0] += scatter * chance.standard_normal((len(coefficients) - 1, 2))
    return TuningLaw(draws=coefficients, middle=middle, num_runs=num_runs, num_sizes=num_sizes)


def _least_of(size: npt.NDArray[np.intp], values: Floats) -> Floats:
    """Least value of each size, (sizes,)."""
    least = np.full(int(size.max()) + 1, np.inf)
    np.minimum.at(least, size, values)
    return least


def _places(size: npt.NDArray[np.intp], values: Floats) -> npt.NDArray[np.intp]:
    """Place of each run among those of its size, the least first, (runs,)."""
    return np.asarray(
        [np.sum((size == of) & (values < value)) for of, value in zip(size, values, strict=True)]
    )


def _at(coefficients: Floats, n: Floats, d: Floats) -> Floats:
    """Best log rate and log batch from the middle, (runs, 2)."""
    return np.stack([np.ones_like(n), n, d], axis=1) @ coefficients.T


def _settings_of(
    logs: Floats, size: npt.NDArray[np.intp], middle: Floats, trusted: Floats, moved: Floats, *, rounds: int
) -> tuple[Floats, Floats] | None:
    """Coefficients of the best log rate and log batch, (2, 3), and weights of the runs; None without a least loss.

    Args:
        logs: Logarithms of N, D, rate, batch and loss, (runs, 5).
        size: Number of the size of each run, (runs,).
        middle: As in ``TuningLaw``.
        trusted: Weight of each run, (runs,).
        moved: Of the priors of four exponents and two curvatures, in units of their spread, (6,).
        rounds: Of weights against outliers (Huber).
    """
    n, d, x, y = (logs[:, :4] - middle).T
    columns = [x, n * x, d * x, y, n * y, d * y, x * x / 2, y * y / 2, x * y]
    rows = np.concatenate([np.stack(columns, axis=1), np.eye(int(size.max()) + 1)[size]], axis=1)
    curvature, weights = _CURVATURE, trusted
    for _ in range(rounds):
        prior = np.zeros((7, rows.shape[1]))
        # The gradient at the published best is zero, over N and over D: g + H exponent.
        for place, (axis, over) in enumerate(np.ndindex(2, 2)):
            of_axis = [3 * axis + 1 + over, 6 + axis, 8]
            prior[place, of_axis] = [1.0, _PUBLISHED[axis, over], _PUBLISHED[1 - axis, over]]
            prior[place] /= _PUBLISHED_SPREAD * curvature[axis]
        prior[[4, 5, 6], [6, 7, 8]] = 1 / np.append(_CURVATURE, _CURVATURE[1])
        wanted = np.append(moved + np.asarray([0, 0, 0, 0, 1, 1]), 0.0)
        scaled = (weights / _RUN_NOISE)[:, None] * np.column_stack([rows, logs[:, 4]])
        found = np.linalg.lstsq(
            np.concatenate([scaled[:, :-1], prior]), np.append(scaled[:, -1], wanted), rcond=None
        )[0]
        misses = np.abs(rows @ found - logs[:, 4]) / _RUN_NOISE
        weights = trusted * np.sqrt(1 / np.maximum(1.0, misses / _HUBER))
        curvature = np.maximum(found[6:8], 0.1 * _CURVATURE)
    bowl = found[[6, 8, 8, 7]].reshape(2, 2)
    if np.linalg.eigvalsh(bowl)[0] <= 0.02 * _CURVATURE[1]:
        return None
    return np.asarray(-np.linalg.solve(bowl, found[:6].reshape(2, 3)), dtype=float), weights
