"""Laws of a falling curve, with bounds: Optimus', power laws and their relatives, and one that takes the schedule.

Optimus' convergence model:

    loss(k) = 1 / (b0 k + b1) + b2,    b0, b1, b2 >= 0

With s = b1 / b0 it is B / (k + s) + b2, linear in B = 1 / b0 and b2: s alone is searched, on a grid that is refined
around its best, and B and b2 are solved by non-negative least squares on the losses themselves. So b2 goes wherever
the points want it, above the lowest of noisy ones too; there is no starting point and no fit that fails. The linear
form of the published code, 1 / (loss - b2) = b0 k + b1, needs b2 below every point, and turns noise around.

The published code weighs the residuals of each third of the history four times more than those of the third before.

Source: Peng, Bao, Chen, Wu and Guo 2018, EuroSys, section 3.1.

The power law is what a forecast without schedule rests on:

    power law   c + a (x + s)^-p      p = 1/4, 1/2, 1, 2; s >= 0

Points weigh as the square of their number, so that the latest decide: what they show of the rest of the fall is the
floor c, whatever the run did early. p is not chosen but averaged over, each with its best s, with weights

    exp(-(residual - least residual) / 2 sigma^2 - penalty / 2),   sigma^2 the least residual of one point

where no curve is explained better than to 3 % of its level, and steep powers pay a little. The others are baselines,
with every point alike, the best shape chosen:

    pow3      c + a x^-alpha                             c, a >= 0, alpha 0.1 to 2
    exp3      c + a exp(-alpha x)
    log line  c - a log x
    mmf4      c + a / (1 + (kappa x)^delta)

For fixed shape parameters each is linear in c and a: the shapes are scanned and c, a solved by non-negative least
squares. Source of the catalogue: Domhan, Springenberg and Hutter 2015, IJCAI, table 1; bounds are ours.

The annealing law takes the schedule:

    error(x) = c + a (C(x) + s)^-p + b r(x),      a, b, c, s >= 0

C is a clock: the epochs done, or the sum of relative learning rates so far, by which training moves. r is the relative
rate as the weights feel it, an exponential mean over the last few epochs: the noise of stochastic gradients holds the
error up by an amount that follows the rate, and goes when the rate goes. Before the rate has changed, b and c cannot be
told apart; a prior says that at the present rate the noise is one of ``DROP_SHARES`` of what will not go away by
itself: b r(now) = share / (1 - share) c. As soon as the rate moves, the data outweigh it.

How much a drop of the rate brings is a matter of the task: a third to a half of what remains of the error of an image
classifier, a twentieth of the loss of a language model. Each share is a forecaster; ``prior`` weighs them.

The answer is the mean over both clocks, and over exponents and weights as in the power law. Small networks on easy
data fall faster than any power once they begin to: exp(-k C / C_end) stands beside the powers, two deviations out. The
form is that of Tissue et al. 2024 (arXiv 2408.11029), with a noise floor instead of their annealing area; prior, clocks
and weights are ours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations

import numpy as np

from forerun.jobs.forecasting.curve import Floats
from forerun.jobs.forecasting.forecaster import Prefix, forecaster


def nonnegative_fit(columns: Floats, wanted: Floats) -> tuple[Floats, Floats]:
    """Non-negative least squares of many small problems at once: min |A x - b|^2, x >= 0.

    With at most three columns all subsets of active columns can be tried in closed form: exact, without a starting
    point, and without the cost of importing an optimizer.

    Args:
        columns: A of each problem, (problems, rows, columns), at most three columns.
        wanted: b, (rows,) for all or (problems, rows).

    Returns:
        x, (problems, columns), and |A x - b|^2, (problems,).
    """
    num_problems, _, num_columns = columns.shape
    targets = np.broadcast_to(wanted, columns.shape[:2])
    gram = np.einsum("pri,prj->pij", columns, columns)
    moment = np.einsum("pri,pr->pi", columns, targets)
    energy = np.einsum("pr,pr->p", targets, targets)
    best_x = np.zeros((num_problems, num_columns))
    best_loss = energy.copy()
    for size in range(1, num_columns + 1):
        for chosen in combinations(range(num_columns), size):
            index = np.asarray(chosen)
            part = gram[:, index[:, None], index]
            # A small ridge keeps equal columns from making the system singular; each column's own, so that its unit
            # is nothing to the answer.
            ridge = (1e-12 * np.diagonal(part, axis1=1, axis2=2)[:, None, :] + 1e-300) * np.eye(size)
            solved = np.linalg.solve(part + ridge, moment[:, index, None])[..., 0]
            loss = (
                energy
                - 2 * np.einsum("pi,pi->p", solved, moment[:, index])
                + np.einsum("pi,pij,pj->p", solved, part, solved)
            )
            better = np.all(solved >= 0, axis=1) & (loss < best_loss)
            best_loss = np.where(better, loss, best_loss)
            replacement = np.zeros((num_problems, num_columns))
            replacement[:, index] = solved
            best_x = np.where(better[:, None], replacement, best_x)
    return best_x, np.maximum(best_loss, 0.0)


_WEIGHT_OF_A_THIRD = 4.0
_NUM_SHIFTS = 24
_NUM_REFINED = 9
_REFINEMENTS = 9
_NEAREST_SHIFT = 1e-3  # of the first distance between points
_FARTHEST_SHIFT = 1e3  # of the last step: the curve is a straight line by then


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimusFit:
    """Coefficients of Optimus' model.

    Attributes:
        b0: Rate [1 / (loss x step)].
        b1: Inverse of the loss to lose at step 0 [1 / loss].
        b2: What is left in the end [loss].
        rmse: Root mean squared residual [loss].
        deviations: Standard errors of b0, b1 and b2 from the curvature of the fit; infinite where the points do not
            determine them.
    """

    b0: float
    b1: float
    b2: float
    rmse: float
    deviations: tuple[float, float, float]

    def losses(self, steps: Floats) -> Floats:
        """Loss after so many steps, (n,)."""
        return 1.0 / np.maximum(self.b0 * steps + self.b1, 1e-12) + self.b2

    def steps_to(self, loss: float) -> float:
        """Steps until the loss is reached; infinite if it never is."""
        if loss <= self.b2 or self.b0 <= 0:
            return 0.0 if loss >= 1.0 / max(self.b1, 1e-12) + self.b2 else float("inf")
        return max(0.0, (1.0 / (loss - self.b2) - self.b1) / self.b0)


def fit_optimus(steps: Floats, losses: Floats, *, with_published_weights: bool = False) -> OptimusFit:
    """Fits Optimus' model by least squares on the losses.

    Args:
        steps: Steps or epochs, ascending, not negative, (n,).
        losses: Not negative, (n,).
        with_published_weights: Whether residuals of later thirds of the history count four times more each.
    """
    top, last = float(np.max(losses)) or 1.0, float(steps[-1]) or 1.0
    places, scaled = steps / last, losses / top
    weights = _thirds(len(losses)) if with_published_weights else np.ones(len(losses))
    gap = float(places[1] - places[0]) if len(places) > 1 else 1.0
    nearest = 0.0 if places[0] > 0 else _NEAREST_SHIFT * gap
    shifts = np.concatenate([[nearest], np.geomspace(_NEAREST_SHIFT * gap, _FARTHEST_SHIFT, _NUM_SHIFTS)])
    for refinement in range(_REFINEMENTS):
        solved, loss = _solved(shifts, places, scaled, weights)
        best = int(np.argmin(loss))
        if refinement + 1 < _REFINEMENTS:
            low, high = shifts[max(best - 1, 0)], shifts[min(best + 1, len(shifts) - 1)]
            # The best so far stays among them, so that a refinement never makes the fit worse.
            shifts = np.unique(np.append(np.linspace(low, high, _NUM_REFINED), shifts[best]))
    slope, floor = float(solved[best, 0]), float(solved[best, 1])
    if slope <= 0:  # no fall at all: a constant
        return _fit_of(0.0, 1.0 / max(floor * top, 1e-12), 0.0, steps, losses, weights)
    b0 = 1.0 / (slope * top * last)
    return _fit_of(b0, float(shifts[best]) * last * b0, floor * top, steps, losses, weights)


def _solved(shifts: Floats, places: Floats, scaled: Floats, weights: Floats) -> tuple[Floats, Floats]:
    falls = 1.0 / (places + shifts[:, None])
    # Each fall on the scale of 1, or far shifts would give columns that differ by the rounding only.
    height = falls[:, :1]
    columns = np.stack([falls / height, np.ones_like(falls)], axis=2) * weights[:, None]
    solved, loss = nonnegative_fit(columns, scaled * weights)
    return solved / np.concatenate([height, np.ones_like(height)], axis=1), loss


def _fit_of(b0: float, b1: float, b2: float, steps: Floats, losses: Floats, weights: Floats) -> OptimusFit:
    fall = 1.0 / np.maximum(b0 * steps + b1, 1e-12)
    residuals = losses - fall - b2
    return OptimusFit(
        b0=b0,
        b1=b1,
        b2=b2,
        rmse=float(np.sqrt(np.mean(residuals**2))),
        deviations=_deviations(fall, steps, residuals, weights),
    )


def _deviations(
    fall: Floats, steps: Floats, residuals: Floats, weights: Floats
) -> tuple[float, float, float]:
    """Standard errors of (b0, b1, b2): the root of the diagonal of s^2 (J' W J)^-1, as ``curve_fit`` states them."""
    never = (float("inf"),) * 3
    if len(steps) <= len(never):
        return never
    columns = np.stack([-steps * fall**2, -(fall**2), np.ones_like(fall)], axis=1) * weights[:, None]
    scale = np.sqrt(np.sum(columns**2, axis=0))
    if np.any(scale <= 0):
        return never
    # Scaled columns: b0 is of the order of 1e-6 and b2 of 1, which would look singular.
    gram = (columns / scale).T @ (columns / scale)
    # Two coefficients that the points cannot tell apart have no error each.
    if np.linalg.cond(gram) > 1e14:
        return never
    variance = float(np.sum((weights * residuals) ** 2)) / (len(steps) - len(never))
    found = np.sqrt(variance * np.diag(np.linalg.inv(gram))) / scale
    return float(found[0]), float(found[1]), float(found[2])


def _thirds(num_points: int) -> Floats:
    third = np.minimum(2, np.arange(num_points) * 3 // max(num_points, 1))
    return np.asarray(_WEIGHT_OF_A_THIRD**third, dtype=float)


@forecaster("optimus")
def optimus_path(prefix: Prefix) -> Floats:
    """Optimus' model of the errors, with the published weights."""
    seen = prefix.epochs[: prefix.num_seen]
    return fit_optimus(seen, prefix.errors, with_published_weights=True).losses(prefix.epochs)


POWERS = (0.25, 0.5, 1.0, 2.0)
POWER_PENALTIES = (0.0, 0.0, 1.0, 2.0)
"""Price of each power, in squared standard deviations."""

_ALPHAS = np.linspace(0.1, 2.0, 39)
_DELTAS = np.asarray([0.25, 0.5, 0.75, 1.0, 1.5, 2.0])
_NUM_RATES = 24
_EXPLAINED = 0.03
_SHIFTS = np.concatenate([[0.0], np.geomspace(0.01, 3.0, 10)])  # of the epochs seen


def late_weights(num_points: int) -> Floats:
    """Weights of the residuals at each point: its place among all of them, 0 to 1, squared, (n,)."""
    return np.asarray((np.arange(1, num_points + 1) / num_points) ** 2, dtype=float)


def shifted_powers(clock: Floats, now: float, shifts: Floats = _SHIFTS) -> list[Floats]:
    """Falls (x + s)^-p from 1 for each of ``POWERS``, (shifts, n) each; shifts are shares of the present place."""
    shifted = np.maximum(clock + shifts[:, None] * now, 1e-9 * max(now, 1e-9))  # a clock may begin at 0
    return [np.asarray((shifted / shifted[:, :1]) ** -power, dtype=float) for power in POWERS]


def averaged_fit(
    prefix: Prefix,
    columns: Floats,
    sizes: Sequence[int],
    penalties: Sequence[float],
    prior: Floats | None = None,
) -> Floats:
    """The mean over families of laws that are linear but for a shape, each with its best shape, (n,).

    Args:
        prefix: The run so far.
        columns: Columns of the law for each shape, (shapes, n, columns), families after each other.
        sizes: Shapes of each family.
        penalties: What each family pays, in squared standard deviations.
        prior: A further row of the least squares, whose product with the coefficients is to be 0, (columns,).
    """
    seen = prefix.num_seen
    weights = late_weights(seen)
    rows, wanted = columns[:, :seen] * weights[:, None], prefix.errors * weights
    if prior is not None:
        rows = np.concatenate([rows, np.broadcast_to(prior, (len(rows), 1, len(prior)))], axis=1)
        wanted = np.append(wanted, 0.0)
    solved, loss = nonnegative_fit(rows, wanted)
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    best = [
        begin + int(np.argmin(loss[begin : begin + size])) for begin, size in zip(starts, sizes, strict=True)
    ]
    least = loss[best]
    of_a_point = float(least.min()) / float(weights @ weights)
    variance = max(of_a_point, (_EXPLAINED * prefix.level) ** 2, 1e-12)
    # No curve is its law to the last digit: below a spread of 3 % powers that fit alike count alike.
    log_weights = -0.5 * (least - least.min()) / variance - 0.5 * np.asarray(penalties)
    shares = np.exp(log_weights - log_weights.max())
    paths = np.einsum("anc,ac->an", columns[best], solved[best])
    return np.asarray(shares @ paths / shares.sum(), dtype=float)


@forecaster("power law")
def power_law_path(prefix: Prefix) -> Floats:
    """C + a (x + s)^-p, averaged over p."""
    falls = shifted_powers(prefix.epochs, float(prefix.epochs[prefix.num_seen - 1]))
    stacked = np.concatenate(falls)
    columns = np.stack([np.ones_like(stacked), stacked], axis=2)
    return averaged_fit(prefix, columns, [len(fall) for fall in falls], POWER_PENALTIES)


def _places(prefix: Prefix) -> Floats:
    """Epochs, one at 0 moved a little away from it, (n,)."""
    return np.maximum(prefix.epochs, 1e-3 * float(prefix.epochs[-1]) / len(prefix.epochs))


def _best_shape(prefix: Prefix, shapes_of: Callable[[Prefix], Floats]) -> Floats:
    """C + a * shape with the least squared residual; shapes are (candidates, n)."""
    shapes = shapes_of(prefix)
    seen = shapes[:, : prefix.num_seen]
    solved, loss = nonnegative_fit(np.stack([np.ones_like(seen), seen], axis=2), prefix.errors)
    best = int(np.argmin(loss))
    return np.asarray(solved[best, 0] + solved[best, 1] * shapes[best], dtype=float)


def _rates(prefix: Prefix) -> Floats:
    """Rates at which something happens between a tenth of the first epoch and ten times the epochs seen."""
    seen = prefix.epochs[: prefix.num_seen]
    return np.geomspace(0.1 / float(seen[-1]), 10.0 / float(_places(prefix)[0]), _NUM_RATES)


forecaster("pow3")(partial(_best_shape, shapes_of=lambda prefix: _places(prefix) ** -_ALPHAS[:, None]))


@forecaster("log line")
def log_line_path(prefix: Prefix) -> Floats:
    """A straight line in logarithmic time, through all points: a - b log x."""
    places = np.log(_places(prefix))
    slope, level = np.polyfit(places[: prefix.num_seen], prefix.errors, 1)
    return np.asarray(level + slope * places, dtype=float)


def _stretched(prefix: Prefix) -> Floats:
    rates, deltas = (grid.ravel()[:, None] for grid in np.meshgrid(_rates(prefix), _DELTAS))
    return np.asarray(1.0 / (1.0 + np.minimum((rates * prefix.epochs) ** deltas, 500.0)), dtype=float)


forecaster("exp3")(
    partial(_best_shape, shapes_of=lambda prefix: np.exp(-_rates(prefix)[:, None] * prefix.epochs))
)
forecaster("mmf4")(partial(_best_shape, shapes_of=_stretched))


DROP_SHARES = (0.05, 0.2, 0.5)
"""Shares of what remains that a falling rate may remove."""

MEAN_SPAN = 0.05
"""Time constant of the mean of the rate, in shares of the run."""

_PRIOR_WEIGHT = 0.03
_ANNEALING_SHIFTS = np.concatenate([[0.0], np.geomspace(0.01, 3.0, 8)])
_DECAYS = np.geomspace(2.0, 40.0, 6)
_PENALTIES = (*POWER_PENALTIES, 4.0)


def felt_rates(epochs: Floats, rates: Floats, span_epochs: float) -> Floats:
    """Exponential mean of the rates with a time constant in epochs, (n,)."""
    keep = np.exp(-np.diff(epochs, prepend=0.0) / span_epochs)
    felt = np.empty_like(rates)
    level = rates[0]
    for index, (share, rate) in enumerate(zip(keep, rates, strict=True)):
        level = share * level + (1 - share) * rate
        felt[index] = level
    return felt


def annealing_name(share: float) -> str:
    """Name of the annealing law whose drop removes a share."""
    return f"annealing {share:.0%}"


def annealing_path(prefix: Prefix, share: float) -> Floats:
    """The annealing law with a share that a drop removes until the run has shown it, (n,)."""
    assert prefix.rates is not None
    relative = prefix.rates / max(float(np.max(prefix.rates)), 1e-12)
    # A rate that only begins to rise has moved nothing yet; the small sum keeps C^-p finite.
    moved = np.cumsum(relative * np.diff(prefix.epochs, prepend=0.0)) + 1e-3 * float(prefix.epochs[0])
    felt = felt_rates(prefix.epochs, relative, max(MEAN_SPAN * float(prefix.epochs[-1]), 1e-9))
    # Which clock training goes by differs between tasks, and a run that is under way does not show it.
    by_clock = [_by_clock(prefix, clock, felt, share) for clock in (prefix.epochs, moved)]
    return np.asarray(np.mean(by_clock, axis=0), dtype=float)


for _share in DROP_SHARES:
    forecaster(annealing_name(_share), needs_rates=True)(partial(annealing_path, share=_share))


def _by_clock(prefix: Prefix, clock: Floats, felt: Floats, share: float) -> Floats:
    """Mean over the shapes by one clock, (n,)."""
    seen = prefix.num_seen
    now = float(clock[seen - 1])
    falls = [*shifted_powers(clock, now, _ANNEALING_SHIFTS), np.exp(-_DECAYS[:, None] * clock / clock[-1])]
    stacked = np.concatenate(falls)
    columns = np.stack([np.ones_like(stacked), stacked, np.broadcast_to(felt, stacked.shape)], axis=2)
    weights = late_weights(seen)
    strength = np.sqrt(_PRIOR_WEIGHT * float(weights @ weights))
    felt_now = max(float(felt[seen - 1]), 1e-3)
    prior = strength * np.asarray([-share, 0.0, (1 - share) * felt_now])
    return averaged_fit(prefix, columns, [len(fall) for fall in falls], _PENALTIES, prior)
