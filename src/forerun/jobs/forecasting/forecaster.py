"""The interface of all forecasters, the table of them, and those that need no law.

A forecaster sees errors (see ``curve``) at the points of a run so far and returns the errors at all its points:
those it has seen, as its law smooths them, and those to come.

Best so far and last value are the baselines that everything must beat. Finished runs of the same job, the same network
and data at another batch size, seed or rate, are a forecast too:

    final = mean sibling's final + beta * (this run - mean sibling, lately)

beta is the regression, over the siblings themselves, of how far each ended from the mean on how far it was from the
mean at the same share of the run, with a ridge where few siblings or small differences say little: towards 1 for the
points next to come and, with a time constant of a tenth of the run, towards 0 for those far off. Early on a run
inherits its siblings' end; a run that is different, and whose siblings show that differences last, keeps its distance.

``scaled siblings`` is the simpler rule, scale and offset of the mean sibling by a ridge to (1, 0), as the baseline.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from importlib import import_module

import numpy as np

from forerun.base.errors import UsageError
from forerun.base.extras import plugin, plugin_names
from forerun.jobs.forecasting.curve import Floats, MetricKind, relative_noise


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefix:
    """A run so far, and the points at which its errors are wanted.

    Attributes:
        epochs: All points of the run, past and to come, ascending, above zero, (n,).
        errors: Errors at the first of them, (k,), k <= n.
        rates: Relative learning rate in the stretch that ends at each point, (n,), or None if unknown.
        siblings: Errors of finished runs of the same job at the same shares of their length, (m, n); m may be 0.
        kind: What the metric is.
        span: Value of a metric of one error; for a loss its first value, see ``curve.error_scale``.
        training_losses: Beside errors of validation, (k,), or None.
        noise: Relative spread of single evaluations.
    """

    epochs: Floats
    errors: Floats
    rates: Floats | None = None
    siblings: Floats | None = None
    kind: MetricKind = MetricKind.ACCURACY
    span: float = 1.0
    training_losses: Floats | None = None
    noise: float = field(init=False)

    def __post_init__(self) -> None:
        # Asked for at every mixture of a back-test: worked out once.
        object.__setattr__(self, "noise", relative_noise(self.errors))

    @property
    def num_seen(self) -> int:
        """Points seen, k."""
        return len(self.errors)

    @property
    def progress(self) -> float:
        """Share of the run that is done, 0 to 1."""
        return float(self.epochs[self.num_seen - 1] / self.epochs[-1])

    @property
    def best(self) -> float:
        """Smallest error seen."""
        return float(np.min(self.errors))

    @property
    def level(self) -> float:
        """Present error of the run: the median of the last tenth of the errors."""
        return float(np.median(self.errors[-max(1, round(0.1 * self.num_seen)) :]))


MOST_SIBLINGS = 12
"""Finished runs that a forecast looks at."""

Forecaster = Callable[[Prefix], Floats]
"""From a run so far to errors at all its points, (n,), finite and not negative."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    path: Forecaster
    needs_rates: bool
    needs_siblings: bool


FORECASTERS: dict[str, _Entry] = {}

GROUP = "forerun.forecasters"
"""Entry points that name a forecaster; one that needs a schedule or siblings is decorated with ``forecaster``."""


def forecaster(
    name: str, *, needs_rates: bool = False, needs_siblings: bool = False
) -> Callable[[Forecaster], Forecaster]:
    """Registers the decorated forecaster under a name; a name cannot be taken twice."""

    def register(path: Forecaster) -> Forecaster:
        if name in FORECASTERS:
            raise ValueError(f"the forecaster {name!r} is registered twice")
        FORECASTERS[name] = _Entry(path=path, needs_rates=needs_rates, needs_siblings=needs_siblings)
        return path

    return register


def forecaster_names() -> list[str]:
    """Names of all forecasters, our own first, then those of other packages."""
    _register_laws()
    return list(dict.fromkeys([*FORECASTERS, *plugin_names(GROUP)]))


def _register_laws() -> None:
    # The laws import this module, so that it can import them only once it is there.
    import_module("forerun.jobs.forecasting.laws")


def _entry(name: str) -> _Entry:
    _register_laws()
    if name not in FORECASTERS:
        found = plugin(GROUP, name)
        if found is None:
            raise UsageError(f"unknown forecaster '{name}'; known: {', '.join(forecaster_names())}")
        # Loading it registers one that is decorated; any other needs nothing but the curve.
        FORECASTERS.setdefault(name, _Entry(path=found, needs_rates=False, needs_siblings=False))
    return FORECASTERS[name]


def can_answer(name: str, prefix: Prefix) -> bool:
    """True if the forecaster has what it needs: a schedule, siblings."""
    entry = _entry(name)
    has_siblings = prefix.siblings is not None and len(prefix.siblings) > 0
    return (prefix.rates is not None or not entry.needs_rates) and (has_siblings or not entry.needs_siblings)


def path_of(name: str, prefix: Prefix) -> Floats:
    """Errors at all points by one forecaster, (n,), never below zero."""
    return np.asarray(np.maximum(_entry(name).path(prefix), 0.0), dtype=float)


@forecaster("best so far")
def best_so_far_path(prefix: Prefix) -> Floats:
    """The smallest error so far, at every later point as well."""
    return _held(prefix, np.minimum.accumulate(prefix.errors))


@forecaster("last value")
def last_value_path(prefix: Prefix) -> Floats:
    """The last error, at every later point as well."""
    return _held(prefix, prefix.errors)


def _held(prefix: Prefix, seen: Floats) -> Floats:
    return np.concatenate([seen, np.full(len(prefix.epochs) - len(seen), seen[-1])])


_RECENT_SHARE = 0.2
_FEWEST_RECENT = 3
_RIDGE = 2.0
_SPREAD_FLOOR = 0.01
_FADE_SHARE = 0.1
_SCALE_RIDGE = 0.05


@forecaster("siblings", needs_siblings=True)
def sibling_path(prefix: Prefix) -> Floats:
    """The mean sibling, moved by the part of the present distance that lasts."""
    assert prefix.siblings is not None
    siblings, seen = prefix.siblings, prefix.num_seen
    mean = siblings.mean(axis=0)
    recent = slice(max(0, seen - max(_FEWEST_RECENT, int(_RECENT_SHARE * seen))), seen)
    distance = float(np.mean(prefix.errors[recent] - mean[recent]))
    earlier = np.mean(siblings[:, recent] - mean[recent], axis=1)
    later = siblings - mean
    # One coefficient per point to come; a single sibling has no spread and says nothing of differences.
    spread = later.std(axis=0) + _SPREAD_FLOOR
    pull = _RIDGE * spread**2
    since = (prefix.epochs - prefix.epochs[seen - 1]) / (_FADE_SHARE * prefix.epochs[-1])
    fading = np.exp(-np.maximum(since, 0.0))
    lasting = np.clip((earlier @ later + pull * fading) / (earlier @ earlier + pull), -0.5, 1.0)
    path: Floats = mean + lasting * distance
    path[:seen] = prefix.errors
    return path


@forecaster("scaled siblings", needs_siblings=True)
def scaled_sibling_path(prefix: Prefix) -> Floats:
    """Scale * mean sibling + offset, both by ridge regression towards 1 and 0."""
    assert prefix.siblings is not None
    mean = prefix.siblings.mean(axis=0)
    seen = prefix.num_seen
    pull = np.sqrt(_SCALE_RIDGE * seen) * np.eye(2)
    rows = np.concatenate([np.stack([mean[:seen], np.ones(seen)], axis=1), pull])
    wanted = np.concatenate([prefix.errors, pull @ np.asarray([1.0, 0.0])])
    scale, offset = np.linalg.lstsq(rows, wanted, rcond=None)[0]
    return np.asarray(scale * mean + offset, dtype=float)


class Tier(StrEnum):
    """Evidence of a forecast beside the curve; finished runs show the drops of their schedule themselves."""

    HISTORY = "history"
    SCHEDULE = "schedule"
    CURVE = "curve alone"


_UNLIKE = 0.8


def tiers_of(prefix: Prefix) -> tuple[Tier, ...]:
    """Tiers that the prefix has the data for, the most informed first."""
    has_siblings = prefix.siblings is not None and len(prefix.siblings) > 0
    has = {Tier.HISTORY: has_siblings, Tier.SCHEDULE: prefix.rates is not None, Tier.CURVE: True}
    return tuple(tier for tier in Tier if has[tier])


def sibling_trust(prefix: Prefix) -> float:
    """Weight that forecasts by finished runs keep, 0 to 1, by how far this run has been from their mean.

    With d the root mean squared distance in the second half of what was seen: 1 / (1 + (d / 0.8 level)^2). Runs that
    share a folder need not be alike.
    """
    if prefix.siblings is None or not len(prefix.siblings):
        return 1.0
    return 1.0 / (1.0 + _squared_distance(prefix) / max(_UNLIKE * prefix.level, 1e-9) ** 2)


def _squared_distance(prefix: Prefix) -> float:
    """Mean squared distance of a run from the mean of finished ones, in the second half of what was seen."""
    assert prefix.siblings is not None
    late = slice(prefix.num_seen // 2, prefix.num_seen)
    return float(np.mean((prefix.errors[late] - prefix.siblings.mean(axis=0)[late]) ** 2))


def spread_of(prefix: Prefix) -> Floats:
    """Distance between the runs of the job at each point, (n,); 0 without finished ones.

    The standard deviation of m finished runs, joined by the distance d of this run from their mean in the second half
    of what was seen: sqrt((m deviation^2 + d^2) / (m + 1)). One finished run alone has no deviation, and may be unlike.
    """
    if prefix.siblings is None:
        return np.zeros(len(prefix.epochs))
    squares = len(prefix.siblings) * prefix.siblings.var(axis=0) + _squared_distance(prefix)
    return np.asarray(np.sqrt(squares / (len(prefix.siblings) + 1)), dtype=float)
