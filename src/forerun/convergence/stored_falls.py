"""Remaining falls of the curves of other jobs: a regression on the run so far.

    log(final / best so far) = beta(progress) . features

Where the schedule is not known, a law fitted to the curve alone cannot see the drop of the rate that most runs have
ahead of them; other jobs can. One beta per progress, by ridge regression with each job weighing alike; between them it
is interpolated. In between now and the end the forecast falls by an equal share of the way at each point.

Source of the idea: Baker, Gupta, Raskar and Naik 2017 (arXiv 1705.10823): simple regressions on features of the prefix.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from forerun.convergence.curve import Floats, final_error
from forerun.convergence.forecaster import Prefix, forecaster

__all__ = ["CUTS", "fall_features", "fit_falls", "stored_falls_path"]

CUTS = (0.1, 0.2, 0.3, 0.5, 0.7, 0.85)
"""Shares of a run at which forecasters are tested and stored figures are kept."""

_NEIGHBOURS = (0.8, 1.0, 1.2)
_FEWEST_POINTS = 3
_RIDGE = 0.3


def fall_features(errors: Floats, progress: float, is_bounded: bool) -> Floats:
    """Features of a prefix, (8,): constant, progress, recent falls, whole fall, kind of metric.

    Args:
        errors: Errors so far, (k,).
        progress: Share of the run that is done.
        is_bounded: Whether the errors are 1 - accuracy or alike.
    """
    lowest = np.maximum(np.minimum.accumulate(errors), 1e-6)
    best, seen = float(lowest[-1]), len(errors)
    half = np.log(lowest[max(0, seen // 2 - 1)] / best)
    quarter = np.log(lowest[max(0, 3 * seen // 4 - 1)] / best)
    whole = np.log(max(float(errors[0]), 1e-6) / best)
    left = np.log(1 / progress)
    is_loss = 0.0 if is_bounded else 1.0
    return np.asarray([1.0, left, half, quarter, whole, left * half, is_loss, is_loss * left])


def fit_falls(runs: Sequence[tuple[str, Floats, Floats, bool]]) -> Floats:
    """Coefficients for each of ``CUTS``, (cuts, 8).

    Args:
        runs: Job, epochs (n,), errors (n,) and kind of whole runs.
    """
    sizes: dict[str, int] = {}
    for job, *_ in runs:
        sizes[job] = sizes.get(job, 0) + 1
    found = []
    for cut in CUTS:
        rows, wanted, weights = [], [], []
        for job, epochs, errors, is_bounded in runs:
            for share in _NEIGHBOURS:
                seen = int(np.searchsorted(epochs, share * cut * epochs[-1] * (1 + 1e-9), side="right"))
                if not _FEWEST_POINTS <= seen < len(errors):
                    continue
                rows.append(fall_features(errors[:seen], float(epochs[seen - 1] / epochs[-1]), is_bounded))
                fall = max(final_error(errors), 1e-6) / max(float(errors[:seen].min()), 1e-6)
                wanted.append(np.log(fall))
                weights.append(1 / sizes[job])
        found.append(_ridge(np.asarray(rows), np.asarray(wanted), np.asarray(weights)))
    return np.asarray(found)


def _ridge(rows: Floats, wanted: Floats, weights: Floats) -> Floats:
    pull = _RIDGE * np.eye(rows.shape[1])
    pull[0, 0] = 1e-3
    weighted = rows * weights[:, None]
    return np.asarray(np.linalg.solve(weighted.T @ rows + pull, weighted.T @ wanted), dtype=float)


@forecaster("stored falls", needs_stored_runs=True)
def stored_falls_path(prefix: Prefix) -> Floats:
    """The best so far, falling as stored runs of other jobs did from such a prefix."""
    assert prefix.fall_coefficients is not None
    features = fall_features(prefix.errors, prefix.progress, prefix.is_bounded)
    falls = prefix.fall_coefficients @ features
    fall = min(0.0, float(np.interp(prefix.progress, CUTS, falls)))
    if prefix.progress > CUTS[-1]:
        fall *= (1 - prefix.progress) / (1 - CUTS[-1])
    end = prefix.best * float(np.exp(fall))
    now, last = prefix.epochs[prefix.num_seen - 1], prefix.epochs[-1]
    share = (prefix.epochs[prefix.num_seen :] - now) / max(float(last - now), 1e-12)
    return np.concatenate([np.minimum.accumulate(prefix.errors), prefix.best + (end - prefix.best) * share])
