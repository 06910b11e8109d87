"""Which forecasters are asked, and how much each counts.

Three tiers, by what is known beside the curve: finished runs of the same job, the schedule, or neither. In each tier a
few members are asked; their weights come from their stored back-test errors at the same share of the run, held back
towards a prior:

    weight = (prior + prior / error, normalised) / 2,   each normalised first

Four jobs with known schedules are too few to trust their errors alone: with one left out, the weights of the other
three can be plainly wrong for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from forerun.convergence import best_so_far, optimus, power_laws, siblings
from forerun.convergence.annealing import annealing_path
from forerun.convergence.curve import Floats
from forerun.convergence.forecaster import Prefix, can_answer, path_of
from forerun.convergence.stored_falls import stored_falls_path

__all__ = ["PRIORS", "Mixture", "Tier", "member_weights", "mixture", "tier_of"]

# Importing them registers them.
REGISTERED = (best_so_far, optimus, power_laws, siblings, annealing_path, stored_falls_path)


class Tier(StrEnum):
    """Evidence of a forecast beside the curve."""

    HISTORY = "history"
    SCHEDULE = "schedule"
    CURVE = "curve alone"


PRIORS: dict[Tier, dict[str, float]] = {
    Tier.HISTORY: {"siblings": 4.0, "plateau": 0.5},
    Tier.SCHEDULE: {"annealing": 3.0, "plateau": 1.0, "stored falls": 1.0},
    Tier.CURVE: {"stored falls": 2.0, "optimus": 1.0, "plateau": 1.0},
}
"""Members of each tier and their weight before any back-test; without back-tests, these weights."""

_POWER = 1.0
_FALL_SHARE = 0.5
_LEVEL_SHARE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """The weighted mean of some forecasters.

    Attributes:
        errors: Errors at all points, (n,).
        scale: How uncertain each is believed to be before calibration, (n,).
        weights: Weight of each member.
        members: Errors of each member, (n,) each.
    """

    errors: Floats
    scale: Floats
    weights: Mapping[str, float]
    members: Mapping[str, Floats]


def tier_of(prefix: Prefix) -> Tier:
    """The most informed tier that the prefix has the data for."""
    if prefix.siblings is not None and len(prefix.siblings):
        return Tier.HISTORY
    return Tier.SCHEDULE if prefix.rates is not None else Tier.CURVE


def member_weights(names: list[str], tier: Tier, errors: Mapping[str, float]) -> dict[str, float]:
    """Weights of the members that can answer; they add up to 1.

    Args:
        names: Members.
        tier: Their tier.
        errors: Stored mean back-test error of each member at this progress; may lack some.
    """
    prior = np.asarray([PRIORS[tier][name] for name in names])
    prior = prior / prior.sum()
    if any(name not in errors for name in names):
        return dict(zip(names, prior.tolist(), strict=True))
    tested = prior * np.asarray([max(errors[name], 1e-4) for name in names]) ** -_POWER
    weights = 0.5 * prior + 0.5 * tested / tested.sum()
    return dict(zip(names, weights.tolist(), strict=True))


def mixture(prefix: Prefix, tier: Tier, errors: Mapping[str, float]) -> Mixture:
    """The forecast of a tier.

    The scale grows with how far the forecast falls, how far its members disagree, how noisy evaluations are, and a
    share of the level: scale = 0.05 best + 0.5 (best - forecast) + deviation of the members + noise * forecast.

    Args:
        prefix: The run so far.
        tier: Which members are asked.
        errors: Stored back-test errors, see ``member_weights``.
    """
    names = [name for name in PRIORS[tier] if can_answer(name, prefix)] or ["best so far"]
    paths = {name: path_of(name, prefix) for name in names}
    weights = member_weights(names, tier, errors) if names[0] in PRIORS[tier] else dict.fromkeys(names, 1.0)
    return combined(prefix, paths, weights)


def combined(prefix: Prefix, paths: Mapping[str, Floats], weights: Mapping[str, float]) -> Mixture:
    """Mean, scale and members."""
    stacked = np.stack([paths[name] for name in weights])
    shares = np.asarray(list(weights.values()))
    mean = shares @ stacked
    deviation = np.sqrt(np.maximum(shares @ (stacked - mean) ** 2, 0.0))
    scale = _LEVEL_SHARE * prefix.best + _FALL_SHARE * np.maximum(prefix.best - mean, 0.0) + deviation
    scale = scale + prefix.noise * mean
    return Mixture(errors=mean, scale=np.maximum(scale, 1e-6), weights=weights, members=paths)
