"""The mixture that answers: forecasters weighed by a prior that was learned over finished runs of many origins.

A small network reads the run so far (level, fall, shape in logarithmic time, noise, kind of metric, size of a loss),
the point that is asked about, and what is known beside the curve, and gives each forecaster a weight and the whole a
scale. So the prior of a task and metric is that of runs like it: an accuracy that begins at chance and has hardly left
it, or the loss of a language model, whose first value tells it from others, are weighed as their like were.

    forecast = sum of weight_i member_i,        weights = softmax(network)
    scale = base e^tanh(network),               base as in ``scale_base``, the two sides as in ``scale_sides``

With nothing beside the curve, a run whose training loss goes on falling while its validation does not stays where it
is, with the weight of ``overfitting``. Finished runs that agree with each other and with this run are followed
(``_followed``); where they fell by different amounts from here, the scale has a part of that scatter.

Weights are convex: no forecast lies outside of what its members say, and no scale is beyond e times its base. It is
amortised as in LC-PFN and ifBO (Adriaensen et al. 2023, arXiv 2310.20447; Rakotoarison et al. 2024, arXiv 2404.16795),
with laws in place of their transformer, for two thousand real curves do not determine one. Fitted by
``studies.forecast.fit_prior``; the mean of several networks.

A schedule may only help. Its effect is learnt from few origins and differs among them, so that the answer without the
schedule keeps a share of the weight, by how much of the run is done: at each cut the share is the one by which origins
gained most in the mean, where what an origin loses counts four times what another gains. The scale is the mean of both.
Finished runs show the drops themselves: beside them no schedule is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from forerun.base.errors import CostModelError
from forerun.base.received import DAMAGE, check_array, in_a_line, read_json
from forerun.jobs.forecasting.curve import FINAL_SHARE, Floats, MetricKind, relative_noise
from forerun.jobs.forecasting.forecaster import Prefix, Tier, can_answer, path_of, sibling_trust, spread_of
from forerun.jobs.forecasting.laws import DROP_SHARES, MEAN_SPAN, annealing_name, felt_rates

HORIZONS = (0.25, 0.5, 1.0)
"""Shares of the rest of a run at which forecasts are compared with what came."""

_LAWS = ("last value", "best so far", "power law", "optimus", "pow3", "exp3", "mmf4")
_ANNEALING = tuple(annealing_name(share) for share in DROP_SHARES)
_SIBLINGS = ("siblings", "scaled siblings")
MEMBERS = (*_LAWS, *_ANNEALING, *_SIBLINGS)

CUTS = (0.1, 0.2, 0.3, 0.5, 0.7, 0.85)
"""Shares of a run at which forecasters are tested and stored figures are kept."""

_LAW_SHARE = 0.5
"""Weight of the power law where nothing is known beside the curve: there, networks learn little more."""

NUM_OF_SCHEDULE = NUM_OF_SIBLINGS = 5
"""Features of either, the last of all."""

_CORE = ("last value", "power law", *_ANNEALING, *_SIBLINGS)
"""Members whose distance from the forecast counts in the scale, whatever their weights."""

_IS_POWER_LAW = np.asarray([float(name == "power law") for name in MEMBERS])
_DROP_OF_LOSSES = MEMBERS.index(_ANNEALING[0])
_IS_DROP_OF_LOSSES = np.asarray([name == _ANNEALING[0] for name in MEMBERS])
IS_CORE = np.asarray([name in _CORE for name in MEMBERS])
_IS_SIBLING = np.asarray([name in _SIBLINGS for name in MEMBERS])
_AGREEMENT, _SHARPNESS = 4.0, 4.0
"""Spreads of its siblings that a forecast may be off before they are followed, and how sharply they are."""

_SCATTER_SHARE, _FALL_SHARE = 0.8, 0.6
"""Part of the siblings' scatter that the scale has, and its bound as a share of the forecast fall. The scatter is that
of what each sibling still fell from this point: runs that drop by different amounts do not tell this one's drop."""

_FLOORS = {True: (0.002, 0.005), False: (0.006, 0.01)}
"""Least scale, and its share of the level, of a loss and of anything else: a loss follows its law to a part in a
thousand where an accuracy, counted on a finite test, scatters by parts in a hundred."""

_CLEAR, _SHARES_FALL, _STAYS_BELOW = 2.0, 0.9, 0.6
_STARTS_AT, _IS_CERTAIN_BEHIND, _NOISE_COUNTS, _MOST_STAYING, _STALLED = 0.1, 0.3, 0.5, 0.8, 0.7
"""Of ``overfitting``, chosen on AlgoPerf's trials: two of its four families with training losses overfit. The last
keeps it off runs whose validation still halves, as small networks' do early on. Strangers' logs gave losses'."""

_DROP, _HIDDEN_SCATTER, _FALL_OF_LOSSES, _STOPS_SHORT = 0.04, 0.5, 0.02, 0.5
"""Of ``scale_sides``, by the interval score and the coverage of each origin, left out of the quantiles in turn."""

_AT_PEAK, SURER = 0.95, 0.7
"""Of ``held_rate``: share of the peak below which a rate falls, and what the interval loses at the weight of one."""

_KINDS = tuple(MetricKind)
SCALE_REACH = 1.0
_HIGHEST, _SHOWN, _MOST = 1.5, 0.005, 1e4
PRIOR_SCHEMA = 2
_LARGEST_LOSS, _LEAST_LOSS = 30.0, 0.05
_EARLIER = (0.0625, 0.125, 0.25, 0.5)
"""Shares of the points seen at which the shape of the run is read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """The weighted mean of some forecasters.

    Attributes:
        errors: Errors at all points, (n,).
        scale: Uncertainty of each before calibration, below and above it, (n, 2).
        weights: Weight of each member that counts at the end of the run, "plateau" for staying; they add up to 1.
        members: Errors of each member, (n,) each.
    """

    errors: Floats
    scale: Floats
    weights: Mapping[str, float]
    members: Mapping[str, Floats]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """All that the network reads of a run at each of ``HORIZONS``; several runs are stacked in front.

    Attributes:
        features: (horizons, features); those of schedule and finished runs are the last.
        ends: Errors by each of ``MEMBERS``, NaN where one cannot answer, (horizons, members).
        figures: Level, noise, misfit, spread of finished runs, least scale, scatter of their falls, share of the run
            done, weight of ``overfitting``, and number of the kind of metric, (horizons, 9).
    """

    features: Floats
    ends: Floats
    figures: Floats


def horizon_values(epochs: Floats, path: Floats, num_seen: int) -> Floats:
    """Values at shares ``HORIZONS`` of the rest of the run, each a mean over 5 % of the points."""
    width = max(1, round(FINAL_SHARE * len(epochs)))
    now, last = epochs[num_seen - 1], epochs[-1]
    found = []
    for share in HORIZONS:
        # A point at the horizon itself must not be left out by rounding.
        end = int(np.searchsorted(epochs, now + share * (last - now) * (1 + 1e-9), side="right"))
        end = min(max(end, num_seen + 1), len(epochs))
        found.append(float(np.mean(path[min(max(num_seen, end - width), end - 1) : end])))
    return np.asarray(found)


def member_paths(prefix: Prefix) -> dict[str, Floats]:
    """Errors at all points by each member that can answer, (n,) each."""
    return {name: path_of(name, prefix) for name in MEMBERS if can_answer(name, prefix)}


def misfit_of(prefix: Prefix, power_law: Floats) -> float:
    """Root mean squared distance of the power law from the second half of what was seen."""
    late = slice(prefix.num_seen // 2, prefix.num_seen)
    return float(np.sqrt(np.mean((power_law[late] - prefix.errors[late]) ** 2)))


def evidence_of(prefix: Prefix, paths: Mapping[str, Floats]) -> Evidence:
    """The evidence of a run whose members' paths are known."""
    missing = np.full(len(HORIZONS), np.nan)
    level, misfit = max(prefix.level, 1e-6), misfit_of(prefix, paths["power law"])
    at = {
        name: horizon_values(prefix.epochs, paths[name], prefix.num_seen) if name in paths else missing
        for name in MEMBERS
    }
    spread, scatter = np.zeros(len(HORIZONS)), np.zeros(len(HORIZONS))
    if prefix.siblings is not None and len(prefix.siblings):
        spread = horizon_values(prefix.epochs, spread_of(prefix), prefix.num_seen)
        scatter = _scatter(prefix)
    own = _shape_features(prefix, level, misfit)
    now, last = float(prefix.epochs[prefix.num_seen - 1]), float(prefix.epochs[-1])
    falls = [5 * (level - at[name]) / level for name in ("power law", "optimus")]
    kinds = [float(prefix.kind is kind) for kind in MetricKind]
    columns: list[Floats | float] = [*own, np.log((now + np.asarray(HORIZONS) * (last - now)) / now)]
    columns += [prefix.progress, np.asarray(HORIZONS), *falls, *kinds]
    columns += [*schedule_features(prefix), *_sibling_features(prefix, level, spread, at)]
    const, share = _FLOORS[prefix.kind is MetricKind.LOSS]
    figures: list[Floats | float] = [level, prefix.noise, misfit, spread, const + share * level]
    figures += [scatter, prefix.progress, overfitting(prefix), _KINDS.index(prefix.kind)]
    # A law that runs off upwards is no forecast of a curve that falls.
    ends = [np.minimum(of, _HIGHEST * level) for of in at.values()]
    return Evidence(
        features=_at_horizons(columns), ends=np.stack(ends, axis=1), figures=_at_horizons(figures)
    )


def _at_horizons(columns: Sequence[Floats | float]) -> Floats:
    """Columns of one value, or of one for each of ``HORIZONS``, (horizons, columns)."""
    return np.stack([np.broadcast_to(column, len(HORIZONS)) for column in columns], axis=1)


def overfitting(prefix: Prefix) -> float:
    """Weight of staying at the present level, 0 to 0.8, by training and validation in the last third of what was seen.

        gap = log fall of the training loss - log fall of the validation error, from the third before
        weight = (gap - 0.1 - 0.5 noise of the gap) / 0.3 * (1 - fall of the validation error / 0.7)      accuracies
        weight = (0.9 - fall of the validation loss / fall of the training loss) / 0.6     losses, gap > 2 noise
        weight = 0                                                                         rates of errors

    Where a model goes on learning its training data and less that of validation, laws of the curve hope for a fall
    that does not come: errors of AlgoPerf's ImageNet trials are 3 to 7 % smaller with it, those of strangers' language
    models a quarter at half of the run. Rates of word errors go on falling while both losses stand still.
    """
    if prefix.training_losses is None or prefix.kind is MetricKind.ERROR_RATE:
        return 0.0
    size, falls, variance = max(2, prefix.num_seen // 3), [], 0.0
    for values in (prefix.training_losses, prefix.errors):
        before, late = values[-2 * size : -size], values[-size:]
        falls.append(_log(float(np.median(before))) - _log(float(np.median(late))))
        variance += relative_noise(values) ** 2 * (1 / len(before) + 1 / len(late))
    gap, noise = falls[0] - falls[1], variance**0.5
    if prefix.kind is MetricKind.LOSS:
        share = falls[1] / falls[0] if falls[0] > 0 and gap > _CLEAR * noise else _SHARES_FALL
        return float(np.clip((_SHARES_FALL - share) / _STAYS_BELOW, 0.0, _MOST_STAYING))
    weight = (gap - _STARTS_AT - _NOISE_COUNTS * noise) / _IS_CERTAIN_BEHIND
    return float(np.clip(weight, 0.0, _MOST_STAYING) * np.clip(1 - falls[1] / _STALLED, 0.0, 1.0))


def _scatter(prefix: Prefix) -> Floats:
    """Deviation among finished runs of their fall from here, in units of this run's present error, (horizons,)."""
    assert prefix.siblings is not None
    seen = prefix.num_seen
    recent = slice(seen - max(1, seen // 5), seen)
    left = [
        horizon_values(prefix.epochs, sibling, seen) / max(float(np.mean(sibling[recent])), 1e-6)
        for sibling in prefix.siblings
    ]
    return np.asarray(np.std(left, axis=0) * np.mean(prefix.errors[recent]), dtype=float)


def _log(value: float) -> float:
    return float(np.log(max(value, 1e-6)))


def _shape_features(prefix: Prefix, level: float, misfit: float) -> list[float]:
    """Size of a loss, level, fall so far, noise, misfit, length and shape of the run, in units of the level."""
    errors, seen = prefix.errors, prefix.num_seen
    first = float(np.median(errors[: max(1, seen // 50)]))
    is_loss = prefix.kind is MetricKind.LOSS
    earlier = [_median_about(prefix, share) / level - 1 for share in _EARLIER]
    return [
        float(np.log(np.clip(prefix.span, _LEAST_LOSS, _LARGEST_LOSS))) if is_loss else 0.0,
        _log(level),
        float(np.arcsinh(first / level - 1)),
        _log(prefix.noise),
        _log(misfit / level),
        float(np.log(seen)),
        _log(prefix.best / level),
        *(float(np.arcsinh(5 * fall)) for fall in earlier),
        float(np.arcsinh(20 * earlier[-1])),
    ]


def _median_about(prefix: Prefix, share: float) -> float:
    """Median error within a fifth of a share of the points seen, or between the points beside it."""
    seen = prefix.epochs[: prefix.num_seen]
    place = share * float(seen[-1])
    near = (seen >= 0.8 * place) & (seen <= 1.2 * place)
    return float(np.median(prefix.errors[near]) if near.any() else np.interp(place, seen, prefix.errors))


def schedule_features(prefix: Prefix) -> list[Floats]:
    """The rate felt now and then, and how far training moves by the clock of the rate; zeros without a schedule."""
    if prefix.rates is None:
        return [np.zeros(len(HORIZONS))] * NUM_OF_SCHEDULE
    epochs, seen = prefix.epochs, prefix.num_seen
    relative = prefix.rates / max(float(prefix.rates.max()), 1e-12)
    felt = felt_rates(epochs, relative, max(MEAN_SPAN * float(epochs[-1]), 1e-9))
    moved = np.cumsum(relative * np.diff(epochs, prepend=0.0))
    now = float(felt[seen - 1])
    then = np.minimum(horizon_values(epochs, felt, seen) / max(now, 1e-3), 3.0)
    far = horizon_values(epochs, moved, seen) / max(float(moved[seen - 1]), 1e-9)
    ones = np.ones(len(HORIZONS))
    return [ones, min(now, 1.0) * ones, np.arcsinh(then), np.log(then + 0.01), np.log(np.maximum(far, 1e-3))]


def _sibling_features(prefix: Prefix, level: float, spread: Floats, at: Mapping[str, Floats]) -> list[Floats]:
    """Trust, spread and number of finished runs, and how far they fall; zeros without any."""
    if prefix.siblings is None or not len(prefix.siblings):
        return [np.zeros(len(HORIZONS))] * NUM_OF_SIBLINGS
    ones = np.ones(len(HORIZONS))
    return [
        ones,
        sibling_trust(prefix) * ones,
        np.log(np.maximum(spread / level, 1e-6)),
        np.log(len(prefix.siblings)) * ones,
        np.arcsinh(5 * (level - at["siblings"]) / level),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedPrior:
    """Networks of two hidden layers, whose answers are averaged.

    Attributes:
        middle, spread: Of each feature, (features,).
        layers: Weights and biases of each layer, (networks, in, out) and (networks, 1, out).
        shares: Weight at each of ``CUTS`` of what knows the schedule, without finished runs, (cuts,).
    """

    middle: Floats
    spread: Floats
    layers: tuple[Floats, ...]
    shares: Floats

    def weigh(self, evidence: Evidence, tier: Tier) -> tuple[Floats, Floats, Floats]:
        """Forecast, (..., horizons), its scales below and above, (..., 2), and weights of the members, (..., members).

        Weight that the members leave is that of the present level.

        Args:
            evidence: Of one run, or of several stacked.
            tier: What may be used.
        """
        forecast, scale, weights = self.weigh_alone(evidence, tier)
        held = np.zeros(forecast.shape)
        if tier is Tier.SCHEDULE:
            rest = self.weigh_alone(evidence, Tier.CURVE)
            share = np.interp(evidence.figures[..., 6], CUTS, self.shares)
            forecast, scale = share * forecast + (1 - share) * rest[0], 0.5 * (scale + rest[1])
            weights = share[..., None] * weights + (1 - share[..., None]) * rest[2]
            place = evidence.features.shape[-1] - NUM_OF_SCHEDULE - NUM_OF_SIBLINGS
            now, then = evidence.features[..., place + 1], evidence.features[..., place + 2]
            held = held_rate(now, then) * (evidence.figures[..., 8] == _KINDS.index(MetricKind.LOSS))
            forecast = forecast + held * (np.nan_to_num(evidence.ends[..., _DROP_OF_LOSSES]) - forecast)
            weights = (1 - held[..., None]) * weights + held[..., None] * _IS_DROP_OF_LOSSES
        elif tier is Tier.CURVE:
            # The weight of overfitting goes to the present level, where the forecast lies below it.
            level = evidence.figures[..., 0]
            stays = evidence.figures[..., 7] * (forecast < level)
            forecast, weights = forecast + stays * (level - forecast), (1 - stays[..., None]) * weights
        sides = scale_sides(forecast, scale, evidence.figures, tier) * (1 - SURER * held[..., None])
        return forecast, sides, weights

    def weigh_alone(self, evidence: Evidence, tier: Tier) -> tuple[Floats, Floats, Floats]:
        """As ``weigh`` with one scale, and without a share for what does not know the schedule."""
        ends, figures = evidence.ends, evidence.figures
        has_schedule, has_siblings = tier is Tier.SCHEDULE, tier is Tier.HISTORY
        is_used = members_of(has_schedule, has_siblings) & np.isfinite(ends)
        features = told(evidence.features, has_schedule, has_siblings)
        # As in the fit: the networks have never seen a larger number.
        given = self.outputs(np.clip((features - self.middle) / self.spread, -4.0, 4.0))
        logits = np.where(is_used, given[..., : len(MEMBERS)], -np.inf)
        # The largest is taken off, so that no exponential overflows.
        weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        if tier is Tier.CURVE:
            weights = (1 - _LAW_SHARE) * weights + _LAW_SHARE * _IS_POWER_LAW
        # Zero, since a weight of zero does not hide a NaN.
        members = np.where(is_used, ends, 0.0)
        if has_siblings:
            answer = is_used[..., _IS_SIBLING].all(axis=-1, keepdims=True)
            weights = np.where(answer, _followed(weights, members, figures[..., 3]), weights)
        means = np.sum(weights * members, axis=-1)
        base = scale_base(means, members, is_used & IS_CORE, figures, has_siblings)
        log_scale = np.log(base) + SCALE_REACH * np.tanh(given[..., -1] / SCALE_REACH)
        forecast, scale = means.mean(axis=0), np.exp(log_scale.mean(axis=0))
        if has_siblings:
            fall = np.maximum(figures[..., 0] - forecast, 0.0)
            scale = np.hypot(scale, np.minimum(_SCATTER_SHARE * figures[..., 5], _FALL_SHARE * fall))
        return forecast, scale, weights.mean(axis=0)

    def outputs(self, features: Floats) -> Floats:
        """Outputs of each network to features in units of their spread, (networks, ..., outputs)."""
        flat = features.reshape(-1, features.shape[-1])
        hidden: Floats = flat[None]
        for index in range(0, len(self.layers), 2):
            hidden = hidden @ self.layers[index] + self.layers[index + 1]
            if index + 2 < len(self.layers):
                hidden = hidden / (1 + np.exp(-hidden))
        return hidden.reshape(len(hidden), *features.shape[:-1], -1)


def held_rate(now: Floats | float, then: Floats) -> Floats:
    """Weight of the annealing law alone for a loss whose rate has stayed at its peak and is to fall, (..., horizons).

        weight = (1 - rate then / rate now) * (rate now / peak - 0.95) / 0.05,    between 0 and 1

    What the fall brings the run cannot have shown, so that nothing else knows of it, and of losses the smallest share
    is what language models lose: errors of modded-nanogpt's runs are 9 to 41 % smaller, the interval is 0.7 of the
    weight narrower. Cosines, whose fall the run shows, are the networks' matter.

    Args:
        now: Rate felt, of its peak.
        then: Inverse hyperbolic sine of the rate felt then over that now.
    """
    at_peak = np.clip((np.asarray(now) - _AT_PEAK) / (1 - _AT_PEAK), 0.0, 1.0)
    return np.asarray(at_peak * np.clip(1 - np.sinh(then), 0.0, 1.0), dtype=float)


def _followed(weights: Floats, members: Floats, spread: Floats) -> Floats:
    """Weights moved to the finished runs where these agree with each other and with this one, but not with the mixture.

    A law that is off by many times the spread of the siblings was off on each of them as well. With m the mean of both
    forecasts by siblings: r = |mixture - m| / 4 (spread + their difference), and a share r^4 / (1 + r^4) goes to them.
    """
    both = members[..., _IS_SIBLING]
    apart = spread + np.abs(both[..., 0] - both[..., 1])
    ratio = np.abs(np.sum(weights * members, axis=-1) - both.mean(axis=-1)) / (_AGREEMENT * apart + 1e-9)
    # Zero has no negative power.
    share = 1 / (1 + np.clip(ratio, 1e-6, 1e6) ** -_SHARPNESS)
    moved = share[..., None] * _IS_SIBLING / len(_SIBLINGS)
    return np.asarray((1 - share[..., None]) * weights + moved, dtype=float)


def members_of(has_schedule: bool, has_siblings: bool) -> npt.NDArray[np.bool_]:
    """True for each member that may be used with what is told, (members,)."""
    allowed = {**dict.fromkeys(_ANNEALING, has_schedule), **dict.fromkeys(_SIBLINGS, has_siblings)}
    return np.asarray([allowed.get(name, True) for name in MEMBERS])


def told(features: Floats, has_schedule: bool, has_siblings: bool) -> Floats:
    """Features with zeros in place of what is not told."""
    found, begin = features.copy(), features.shape[-1] - NUM_OF_SCHEDULE - NUM_OF_SIBLINGS
    found[..., begin : begin + NUM_OF_SCHEDULE] *= has_schedule
    found[..., begin + NUM_OF_SCHEDULE :] *= has_siblings
    return found


def scale_base(forecast: Any, members: Any, counted: Any, figures: Any, has_siblings: Any) -> Any:
    """Uncertainty of a forecast before it is learned, arrays of NumPy or PyTorch.

        base = least + 0.3 distance + 0.3 misfit + 0.5 noise forecast + 0.1 fall + 0.15 spread

    It grows with the distance of the laws from the forecast, whatever their weights, with how irregular the run was,
    how noisy evaluations are, how far the forecast falls, and how unlike finished runs of the job are.

    Args:
        forecast: (...).
        members: Errors of each member, finite, (..., members).
        counted: Which count, those of ``IS_CORE`` that are used, (..., members).
        figures: As in ``Evidence``, (..., 9).
        has_siblings: Whether finished runs are known, 0 or 1, (...).
    """
    distance = ((members - forecast[..., None]) ** 2 * counted).sum(-1) / counted.sum(-1)
    level, noise, misfit, spread, least = (figures[..., index] for index in range(5))
    # The larger of the difference and zero, written so that arrays of NumPy and PyTorch can do it.
    fall = 0.5 * (level - forecast + abs(level - forecast))
    base = least + 0.3 * (distance + 1e-12) ** 0.5 + 0.3 * misfit + 0.5 * noise * forecast
    return base + 0.1 * fall + 0.15 * spread * has_siblings


def scale_sides(forecast: Floats, scale: Floats, figures: Floats, tier: Tier) -> Floats:
    """Scale of what may come below a forecast, and of what above it, (..., horizons, 2).

        below^2 = scale^2 + (0.04 level left)^2                            curve alone, accuracies
        below^2 = scale^2 + (0.5 scatter)^2 + (0.02 level left)^2          finished runs, the last term losses
        above^2 = scale^2 + (0.5 fall)^2                                   schedule

    left is the share of the run from now to the point. A rate that falls unseen takes a part of what is left of the
    error of a classifier, whatever its curve looked like, so that a scale of the curve's own noise is too small below;
    finished runs that drop by different amounts hide one that drops by more. What a schedule promises may not come.

    Args:
        forecast: Errors, (..., horizons).
        scale: Of both sides so far, (..., horizons).
        figures: As in ``Evidence``, (..., horizons, 9).
        tier: What was used.
    """
    level, scatter, done, kind = (figures[..., index] for index in (0, 5, 6, 8))
    ahead = level * (1 - done) * np.asarray(HORIZONS)
    below = above = scale
    if tier is Tier.CURVE:
        below = np.hypot(scale, _DROP * ahead * (kind == _KINDS.index(MetricKind.ACCURACY)))
    elif tier is Tier.SCHEDULE:
        above = np.hypot(scale, _STOPS_SHORT * np.maximum(level - forecast, 0.0))
    else:
        of_losses = _FALL_OF_LOSSES * ahead * (kind == _KINDS.index(MetricKind.LOSS))
        below = np.sqrt(scale**2 + (_HIDDEN_SCATTER * scatter) ** 2 + of_losses**2)
    return np.stack([below, above], axis=-1)


def mixture(prefix: Prefix, tier: Tier, prior: LearnedPrior) -> Mixture:
    """The forecast of a tier.

    Args:
        prefix: The run so far.
        tier: What may be used.
        prior: Learned weights.
    """
    paths = member_paths(prefix)
    return mixed_paths(prefix, paths, *prior.weigh(evidence_of(prefix, paths), tier)[1:])


def mixed_paths(prefix: Prefix, paths: Mapping[str, Floats], scale: Floats, weights: Floats) -> Mixture:
    """The weighted mean of paths at all points; between horizons, weights and scale lie on a line.

    Args:
        prefix: The run so far.
        paths: Of each member, (n,) each.
        scale: At each horizon, below and above, (horizons, 2).
        weights: Of each member, (horizons, members).
    """
    now, last = float(prefix.epochs[prefix.num_seen - 1]), float(prefix.epochs[-1])
    share = np.clip((prefix.epochs - now) / max(last - now, 1e-12), 0.0, 1.0)
    at = dict(zip(MEMBERS, weights.T, strict=True))
    highest = _HIGHEST * max(prefix.level, 1e-6)
    members = {name: np.minimum(paths[name], highest) for name in MEMBERS if name in paths}
    members["plateau"] = np.full(len(prefix.epochs), prefix.level)
    at["plateau"] = 1 - weights.sum(axis=-1)
    parts = [np.interp(share, HORIZONS, at[name]) * path for name, path in members.items()]
    shown = {name: float(at[name][-1]) for name in members if at[name][-1] >= _SHOWN}
    order, total = sorted(shown, key=lambda name: -shown[name]), sum(shown.values())
    return Mixture(
        errors=np.asarray(np.sum(parts, axis=0), dtype=float),
        scale=np.stack([np.interp(share, HORIZONS, side) for side in scale.T], axis=1),
        weights={name: shown[name] / total for name in order},
        members={name: members[name] for name in order},
    )


def stacked(evidence: Sequence[Evidence]) -> Evidence:
    """The evidence of several runs, (runs, ...)."""
    return Evidence(
        features=np.stack([e.features for e in evidence]),
        ends=np.stack([e.ends for e in evidence]),
        figures=np.stack([e.figures for e in evidence]),
    )


@cache
def shipped_prior() -> LearnedPrior:
    """The prior that comes with the package, learned over all public curves of the study."""
    return load_prior(shipped_prior_path())


def shipped_prior_path() -> Path:
    """The file of the shipped prior."""
    return Path(__file__).parent / "tables" / "prior.json"


def load_prior(path: Path) -> LearnedPrior:
    """Reads a prior.

    Raises:
        CostModelError: The file is missing, damaged or of another version.
    """
    try:
        document = read_json(path)
        if document["schema"] != PRIOR_SCHEMA:
            raise ValueError(f"expected schema {PRIOR_SCHEMA}, got {document['schema']}")
        tables = {name: np.asarray(document[name], dtype=float) for name in ("middle", "spread", "shares")}
        prior = LearnedPrior(
            **tables, layers=tuple(np.asarray(layer, dtype=float) for layer in document["layers"])
        )
        check_array("shares", prior.shares, "float64", (len(CUTS),), 0.0, 1.0)
        check_array("spread", prior.spread, "float64", prior.middle.shape, 1e-9, _MOST)
        # Tables that do not fit each other, or hold no numbers, show in an answer to the extreme features.
        for feature in (-4.0, 0.0, 4.0):
            given = prior.outputs(np.full(prior.middle.shape, feature))
            check_array("layers", given, "float64", (len(prior.layers[0]), len(MEMBERS) + 1), -_MOST, _MOST)
    except DAMAGE as error:
        raise CostModelError(
            f"{path}: expected a learned prior of curves as JSON, got {type(error).__name__}: {in_a_line(error)}; "
            "install forerun again"
        ) from error
    return prior
