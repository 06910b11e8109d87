"""Finished runs of the same job as a forecast: the same network and data at another batch size, seed or rate.

    final = mean sibling's final + beta * (this run - mean sibling, lately)

beta is the regression, over the siblings themselves, of how far each ended from the mean on how far it was from the
mean at the same share of the run, with a ridge where few siblings or small differences say little: towards 1 for the
points next to come and, with a time constant of a tenth of the run, towards 0 for those far off. Early on a run
inherits its siblings' end; a run that is different, and whose siblings show that differences last, keeps its distance.

``scaled siblings`` is the simpler rule, scale and offset of the mean sibling by a ridge to (1, 0), as the baseline.
"""

from __future__ import annotations

import numpy as np

from forerun.convergence.curve import Floats
from forerun.convergence.forecaster import Prefix, forecaster

__all__ = ["scaled_sibling_path", "sibling_path"]

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
