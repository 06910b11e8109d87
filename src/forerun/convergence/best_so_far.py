"""The baselines that everything must beat: nothing gets better any more, or nothing changes."""

from __future__ import annotations

import numpy as np

from forerun.convergence.curve import Floats
from forerun.convergence.forecaster import Prefix, forecaster

__all__ = ["best_so_far_path", "last_value_path"]


@forecaster("best so far")
def best_so_far_path(prefix: Prefix) -> Floats:
    """The running minimum, held."""
    return _held(prefix, np.minimum.accumulate(prefix.errors))


@forecaster("last value")
def last_value_path(prefix: Prefix) -> Floats:
    """The last error, held."""
    return _held(prefix, prefix.errors)


def _held(prefix: Prefix, seen: Floats) -> Floats:
    return np.concatenate([seen, np.full(len(prefix.epochs) - len(seen), seen[-1])])
