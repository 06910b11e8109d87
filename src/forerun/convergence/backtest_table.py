"""Results of back-tests: errors and quantiles per tier and share of the run, as a small JSON file.

The file that comes with the package was made from the public curve tables by the back-test of the studies;
``forerun forecast --evaluate DIR --save FILE`` makes one from a user's own finished runs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from forerun.convergence.curve import Floats
from forerun.convergence.mixture import Tier
from forerun.convergence.stored_falls import CUTS
from forerun.errors import CostModelError

__all__ = [
    "FEWEST_RUNS",
    "HORIZONS",
    "LEVELS",
    "BacktestTable",
    "CutSummary",
    "load_table",
    "save_table",
    "shipped_table_path",
    "weighted_quantiles",
]

HORIZONS = (0.25, 0.5, 1.0)
"""Shares of the rest of a run at which forecasts are compared with what came."""

LEVELS = (0.025, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.975)
"""Levels of the stored quantiles."""

FEWEST_RUNS = 20
"""With fewer runs behind them, intervals are called uncalibrated."""

_SCHEMA = 1

_JOB_POWER = 0.5
"""A job of n runs weighs n to this power: 0 is every job alike, 1 every run alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CutSummary:
    """Back-tests of one tier at one share of the run.

    Attributes:
        num_runs, num_jobs: Behind the figures.
        errors: Mean absolute error of the final value of each forecaster.
        quantiles: Of (actual - forecast) / scale, (horizons, levels).
    """

    num_runs: int
    num_jobs: int
    errors: Mapping[str, float]
    quantiles: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class BacktestTable:
    """All summaries.

    Attributes:
        summaries: By tier and cut; a tier may be absent.
        fall_coefficients: For the regression on stored falls, (cuts, features), or None.
        provenance: Tables, rows and date behind it.
    """

    summaries: Mapping[tuple[Tier, float], CutSummary]
    fall_coefficients: Floats | None
    provenance: Mapping[str, object]

    def has(self, tier: Tier) -> bool:
        """True if there are back-tests of the tier."""
        return any(found is tier for found, _ in self.summaries)

    def errors(self, tier: Tier, progress: float) -> Mapping[str, float]:
        """Errors at the nearest share of the run."""
        cuts = self._cuts(tier)
        return {} if not cuts else self._nearest(tier, progress).errors

    def num_runs(self, tier: Tier, progress: float) -> int:
        """Runs behind the interval at the nearest share of the run."""
        return 0 if not self._cuts(tier) else self._nearest(tier, progress).num_runs

    def quantiles(self, tier: Tier, progress: float) -> Floats:
        """Quantiles of the scaled residual, interpolated between shares of the run, (horizons, levels)."""
        cuts = self._cuts(tier)
        stacked = np.stack([self.summaries[tier, cut].quantiles for cut in cuts])
        where = float(np.interp(progress, cuts, np.arange(len(cuts))))
        low, high = int(np.floor(where)), int(np.ceil(where))
        share = where - low
        return np.asarray((1 - share) * stacked[low] + share * stacked[high], dtype=float)

    def _cuts(self, tier: Tier) -> list[float]:
        return sorted(cut for found, cut in self.summaries if found is tier)

    def _nearest(self, tier: Tier, progress: float) -> CutSummary:
        return self.summaries[tier, min(self._cuts(tier), key=lambda cut: abs(cut - progress))]


def weighted_quantiles(
    scores: Floats,
    jobs: Sequence[str],
    levels: Sequence[float],
    job_weights: Mapping[str, float] | None = None,
) -> Floats:
    """Quantiles with one more, unknown run on either side, (horizons, levels).

    A job of n runs weighs as much as the root of n: with every run alike the largest job would speak for all, with
    every job alike the jobs of one or two runs would, and neither is what the next run will be drawn from.

    The unknown run is what makes them conformal: below 0.5 the level is taken of n + 1 runs with one at minus
    infinity, above it with one at plus infinity, n being the number of runs. Where so few runs cannot reach a level,
    the outermost score is given.

    Args:
        scores: (runs, horizons).
        jobs: Job of each run, (runs,).
        levels: Ascending.
        job_weights: A factor for the weight of each job; alike if None.
    """
    names, index, sizes = np.unique(np.asarray(jobs), return_inverse=True, return_counts=True)
    of_job = np.asarray([1.0 if job_weights is None else job_weights[str(name)] for name in names])
    mass = (of_job * sizes ** (_JOB_POWER - 1))[index]
    mass = mass * len(jobs) / mass.sum()
    found = np.empty((scores.shape[1], len(levels)))
    for horizon in range(scores.shape[1]):
        order = np.argsort(scores[:, horizon], kind="stable")
        ranked, below = scores[order, horizon], np.cumsum(mass[order])
        centre = below - 0.5 * mass[order]
        for column, level in enumerate(levels):
            wanted = level * len(jobs)
            if level < 0.5:
                wanted = level * (len(jobs) + 1) - 1
            elif level > 0.5:
                wanted = level * (len(jobs) + 1)
            found[horizon, column] = np.interp(wanted, centre, ranked)
    return np.maximum.accumulate(found, axis=1)


def shipped_table_path() -> Path:
    """The table that comes with the package."""
    return Path(__file__).parent / "tables" / "backtest.json"


def save_table(table: BacktestTable, path: Path) -> None:
    """Writes a table as JSON."""
    falls = table.fall_coefficients
    document = {
        "schema": _SCHEMA,
        "provenance": dict(table.provenance),
        "horizons": HORIZONS,
        "levels": LEVELS,
        "fall_coefficients": None if falls is None else np.round(falls, 5).tolist(),
        "summaries": [
            {
                "tier": str(tier),
                "cut": cut,
                "num_runs": found.num_runs,
                "num_jobs": found.num_jobs,
                "errors": {name: round(value, 5) for name, value in found.errors.items()},
                "quantiles": np.round(found.quantiles, 4).tolist(),
            }
            for (tier, cut), found in table.summaries.items()
        ],
    }
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def load_table(path: Path) -> BacktestTable:
    """Reads a table.

    Raises:
        CostModelError: The file is missing, damaged or of another version.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["schema"] != _SCHEMA or tuple(document["levels"]) != LEVELS:
            raise CostModelError(
                f"{path}: expected back-test figures of schema {_SCHEMA}, got {document['schema']}; make them anew "
                "with 'forerun forecast --evaluate DIR --save FILE'"
            )
        return _table_from(document)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CostModelError(
            f"{path}: expected back-test figures as JSON, got {type(error).__name__}: {error}; make them anew with "
            "'forerun forecast --evaluate DIR --save FILE'"
        ) from error


def _table_from(document: Mapping[str, Any]) -> BacktestTable:
    falls = document["fall_coefficients"]
    summaries = {
        (Tier(row["tier"]), float(row["cut"])): CutSummary(
            num_runs=int(row["num_runs"]),
            num_jobs=int(row["num_jobs"]),
            errors={str(name): float(value) for name, value in row["errors"].items()},
            quantiles=np.asarray(row["quantiles"], dtype=float),
        )
        for row in document["summaries"]
    }
    if any(cut not in CUTS for _, cut in summaries):
        raise ValueError("a share of the run that is not one of the known cuts")
    return BacktestTable(
        summaries=summaries,
        fall_coefficients=None if falls is None else np.asarray(falls, dtype=float),
        provenance=document["provenance"],
    )
