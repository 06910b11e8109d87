"""Back-tests as figures: quantiles by tier and share of the run, and the futures of a curve by them.

The figures are a small JSON file. The one that comes with the package was made from the public curve tables by the
back-test of the studies; ``forerun forecast backtest DIR --save FILE`` makes one from a user's own finished runs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from forerun.base.answers import fields_of, from_plain
from forerun.base.errors import CostModelError
from forerun.base.received import DAMAGE, check_array, in_a_line, json_file, read_json, refuse_row
from forerun.jobs.forecasting.curve import Floats, MetricKind
from forerun.jobs.forecasting.forecaster import Prefix, Tier
from forerun.jobs.forecasting.prior import CUTS, HORIZONS, SURER, Mixture, held_rate, schedule_features

LEVELS = (0.025, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.975)
"""Levels of the stored quantiles."""

FEWEST_RUNS = 20
"""With fewer runs behind them, intervals are called uncalibrated."""

_SCHEMA = 5
_MOST = 1e6

_DRAWS_OF_AN_ORIGIN = 5
"""Independent draws that the runs of one origin stand for: with origins left out in turn, 90 % intervals of as many
covered 90 %; with every run a draw, 86 %."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CutSummary:
    """Back-tests of one tier at one share of the run.

    Attributes:
        num_runs, num_origins: Behind the figures.
        quantiles: Of (actual - forecast) / scale, by the scale of its side, (horizons, levels).
    """

    num_runs: int
    num_origins: int
    quantiles: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class BacktestTable:
    """Figures of back-tests by tier and share of the run.

    Attributes:
        summaries: By tier and cut; a tier may be absent.
        provenance: Tables, rows and date behind it.
        most_kept: As ``MOST_KEPT``; 0 where the runs are of the jobs that are asked about.
    """

    summaries: Mapping[tuple[Tier, float], CutSummary]
    provenance: Mapping[str, object]
    most_kept: float = 0.0

    def kept(self, tier: Tier, prefix: Prefix) -> float:
        """The share for a forecast: finished runs show how runs fall, and a loss may turn where it hopes for most."""
        if tier is Tier.HISTORY or not self.most_kept:
            return 0.0
        if prefix.kind is not MetricKind.LOSS:
            return self.most_kept
        _, now, then, *_ = schedule_features(prefix)  # zeros without a schedule
        held = float(held_rate(now, then)[-1]) if tier is Tier.SCHEDULE else 0.0
        return max(_KEPT_OF_LOSSES, 1 - prefix.progress) * (1 - SURER * held)

    def has(self, tier: Tier) -> bool:
        """True if there are back-tests of the tier."""
        return bool(self._cuts(tier))

    def num_runs(self, tier: Tier, progress: float) -> int:
        """Runs behind the interval at the nearest share of the run."""
        cuts = self._cuts(tier)
        return self.summaries[tier, min(cuts, key=lambda cut: abs(cut - progress))].num_runs if cuts else 0

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


def weighted_quantiles(scores: Floats, places: Sequence[tuple[str, str]], levels: Sequence[float]) -> Floats:
    """Quantiles with one more, unknown draw on either side, (horizons, levels).

    Runs of a job weigh alike, jobs of an origin, and origins. The unknown draw is what makes the quantiles conformal:
    below 0.5 the level is taken of n + 1 draws with one at minus infinity, above it with one at plus infinity. The next
    run comes from an origin that is not among them, and runs of one origin are not as many draws: n is
    ``_DRAWS_OF_AN_ORIGIN`` times the number of origins. Where so few cannot reach a level, the outermost score is
    given.

    Args:
        scores: (runs, horizons).
        places: Origin and job of each run, (runs,).
        levels: Ascending.
    """
    runs_of, jobs_of = Counter(places), Counter(origin for origin, _ in set(places))
    mass = np.asarray([1.0 / (runs_of[place] * jobs_of[place[0]]) for place in places])
    # Runs of one origin are alike: counted one by one they would make the tails too narrow for the next origin.
    num_draws = min(len(places), _DRAWS_OF_AN_ORIGIN * len(jobs_of))
    mass = mass * num_draws / mass.sum()
    asked = np.asarray(levels)
    # The unknown draw comes first below one half and last above it; the middle has none.
    wanted = asked * num_draws + np.where(asked < 0.5, asked - 1, np.where(asked > 0.5, asked, 0.0))
    found = np.empty((scores.shape[1], len(levels)))
    for horizon in range(scores.shape[1]):
        order = np.argsort(scores[:, horizon], kind="stable")
        ranked, below = scores[order, horizon], np.cumsum(mass[order])
        centre = below - 0.5 * mass[order]
        found[horizon] = np.interp(wanted, centre, ranked)
    return np.maximum.accumulate(found, axis=1)


def shipped_table_path() -> Path:
    """The file of the figures that come with the package."""
    return Path(__file__).parent / "tables" / "backtest.json"


def shipped_table() -> BacktestTable:
    """The figures that come with the package."""
    return load_table(shipped_table_path())


def save_table(table: BacktestTable, path: Path) -> None:
    """Writes a table as JSON."""
    document = {
        "schema": _SCHEMA,
        "provenance": dict(table.provenance),
        "horizons": HORIZONS,
        "levels": LEVELS,
        "most_kept": table.most_kept,
        "summaries": [
            {"tier": tier, "cut": cut, **fields_of(found), "quantiles": np.round(found.quantiles, 4)}
            for (tier, cut), found in table.summaries.items()
        ],
    }
    path.write_text(json_file(document), encoding="utf-8")


def load_table(path: Path) -> BacktestTable:
    """Reads a table.

    Raises:
        CostModelError: The file is missing, damaged or of another version.
    """
    try:
        document = read_json(path)
        if document["schema"] != _SCHEMA or document["levels"] != list(LEVELS):
            raise CostModelError(
                f"{path}: expected back-test figures of schema {_SCHEMA}, got {in_a_line(document['schema'])[:20]}; "
                "make them anew with 'forerun forecast backtest DIR --save FILE'"
            )
        provenance, most_kept = document["provenance"], float(document.get("most_kept", 0.0))
        from_plain(Mapping[str, Mapping[str, float | None]], provenance.get("coverage_90", {}), "coverage_90")
        check_array("most_kept", np.asarray([most_kept]), "float64", (1,), 0.0, 1.0)
        summaries = {}
        for number, row in enumerate(document["summaries"]):
            tier, cut = Tier(row.pop("tier")), row.pop("cut")
            if cut not in CUTS:
                raise ValueError(f"summaries {number} cut: expected one of {CUTS}, got {cut}")
            summaries[tier, cut] = _summary(f"summaries {number}", row)
        return BacktestTable(summaries=summaries, provenance=provenance, most_kept=most_kept)
    except DAMAGE as error:
        raise CostModelError(
            f"{path}: expected back-test figures as JSON, got {type(error).__name__}: {in_a_line(error)}; make them "
            "anew with 'forerun forecast backtest DIR --save FILE'"
        ) from error


def _summary(name: str, row: dict[str, Any]) -> CutSummary:
    """A summary of a file, looked at."""
    quantiles = np.asarray(row.pop("quantiles"), dtype=float)
    check_array(f"{name} quantiles", quantiles, "float64", (len(HORIZONS), len(LEVELS)), -_MOST, _MOST)
    refuse_row(
        f"{name} quantiles", quantiles, np.diff(quantiles, axis=1).min(axis=1) < 0, "ascending figures"
    )
    others = np.asarray(list(row.values()), dtype=float)
    check_array(f"{name} numbers", others, "float64", others.shape, 0.0, _MOST)
    return CutSummary(**row, quantiles=quantiles)


RANKS = np.linspace(0.025, 0.975, 191)
"""Ranks of the futures."""

_MEMORY = 0.36
"""Power of the correlation of scores between shares of the rest of a run. Back-tests at 30 to 70 % have .65 to .89 from
a quarter to a half and from a half to the end, .52 to .67 from a quarter to the end: 2 ** -.36 and 4 ** -.36. Times the
share of the run that is left: the later, the more a run stays where it is. Targets 5 to 50 % below the present error
have a Brier score of .101 then, and .104 without; at 70 % .083 and .089, where .29 and .31 are said and .22 came."""

_LATE_ODDS, _LATE_POWER = 2.0, 4
"""Logarithm by which the odds of a target fall at the end of a run, and the power of the share done: each origin left
out 1.6 to 2.5. Back-tests at 85 % said .17 and .08 came; now .09 is said, and the Brier score is .060, not .071."""

_NUM_KNOTS, _NUM_WANDERING = 20, 200


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetTimes:
    """Epochs at which a target is reached, and the probability that it is.

    Attributes:
        probability: Of having reached it by each point to come, (m,).
        epochs_to_target: Epoch by which it is reached with probability 0.1, 0.5 and 0.9; infinite if not by the end.
    """

    probability: Floats
    epochs_to_target: tuple[float, float, float]


def stored_quantiles(tier: Tier, table: BacktestTable, progress: float) -> Floats:
    """Quantiles of the scaled residual, (horizons, levels); without back-tests those of a normal spread."""
    if table.has(tier):
        return table.quantiles(tier, progress)
    normal = [-1.96, -1.645, -1.28, -0.84, -0.52, -0.25, 0, 0.25, 0.52, 0.84, 1.28, 1.645, 1.96]
    return np.tile(np.asarray(normal), (len(HORIZONS), 1))


MOST_KEPT, _KEPT_OF_LOSSES = 0.7, 0.75
"""Least share of the fall forecast that the 95 % rank takes back, without finished runs; of losses 1 less the share
done, and no less than the second. Where intervals lay below the present level, 6 to 20 % of back-tests ended above
them, and 2 to 5 % elsewhere. The share has the least interval score."""


def share_kept(ranks: npt.ArrayLike, most: float) -> Floats:
    """Least part of the fall forecast that a future of a rank takes back, same shape: a run may stay where it is.

    most (rank - 0.8) / 0.15      at ranks above 0.8; the middle of the futures stays as back-tests have it
    """
    return np.asarray(most * np.maximum(np.asarray(ranks, dtype=float) - 0.8, 0.0) / 0.15, dtype=float)


def futures_of(mix: Mixture, prefix: Prefix, stored: Floats, most_kept: float) -> Floats:
    """Errors of equally likely futures at the points to come, (ranks, m).

    Args:
        mix: The mixture.
        prefix: The run so far.
        stored: Quantiles of the scaled residual, (horizons, levels).
        most_kept: Share of the fall that the 95 % rank takes back at least.
    """
    seen = prefix.num_seen
    errors, moved = mix.errors[seen:], on_its_side(_quantile_curves(prefix, stored), mix.scale[seen:])
    kept = share_kept(RANKS, most_kept)[:, None] * np.maximum(prefix.level - errors, 0.0)
    moved = np.where(kept > 0, np.maximum(moved, kept), moved)
    return np.asarray(np.maximum(errors + moved, 0.0), dtype=float)


def on_its_side(scores: Floats, scale: Floats) -> Floats:
    """Scores times the scale of their side, those below zero by the first, same shape; scale is (..., 2)."""
    return np.asarray(scores * np.where(scores < 0, scale[..., 0], scale[..., 1]), dtype=float)


def _quantile_curves(prefix: Prefix, stored: Floats) -> Floats:
    """Scaled residual of each of ``RANKS`` at each point to come, (ranks, m)."""
    to_come = prefix.epochs[prefix.num_seen :]
    now = float(prefix.epochs[prefix.num_seen - 1])
    share = (to_come - now) / max(float(prefix.epochs[-1]) - now, 1e-12)
    at_levels = np.stack(
        [np.interp(share, (0.0, *HORIZONS), np.concatenate([[0.5 * c[0]], c])) for c in stored.T]
    )
    where = np.interp(RANKS, LEVELS, np.arange(len(LEVELS)))
    return between_rows(at_levels, where)


def between_rows(rows: Floats, where: Floats) -> Floats:
    """Rows at fractional row numbers, (len(where), columns)."""
    # The last row has none behind it.
    low = np.minimum(np.floor(where).astype(int), len(rows) - 2)
    share = (where - low)[:, None]
    return np.asarray((1 - share) * rows[low] + share * rows[low + 1], dtype=float)


def target_times(
    futures: Floats, to_come: Floats, wanted: float, last_epoch: float, noise: float
) -> TargetTimes:
    """Epochs at which a run first reaches an error: its trend wanders between equally likely futures.

    A run that is ahead of its forecast at one share of the rest need not be so at another. Its standard normal score z
    is a Markov chain with the correlation (s / t) ** (0.36 l) between shares s < t, l the share of the run that is
    left; the trend is the future of the rank Phi(z). An evaluation reaches the target with the probability
    Phi((wanted / trend - 1) / noise), each on its own. Late in a run the futures still hope for too much: with d the
    share that is done, the odds of having reached the target are exp(-2 d^4) times those of the futures.

    Args:
        futures: Errors of equally likely futures, (ranks, m).
        to_come: Epochs of the evaluations, (m,).
        wanted: The error to reach.
        last_epoch: The last epoch seen.
        noise: Relative spread of single evaluations.
    """
    if not len(to_come):
        return reached_at(float("inf"), 0)
    from scipy.special import ndtr

    end = float(to_come[-1])
    left = min(1.0, max(end - last_epoch, 1e-12) / max(end, 1e-12))
    trend = _wandering(futures, (to_come - last_epoch) / max(end - last_epoch, 1e-12), _MEMORY * left)
    luck = ndtr((wanted - trend) / np.maximum(noise * trend, 1e-12))
    reached = 1 - np.cumprod(1 - luck, axis=1).mean(axis=0)
    epochs = np.append(to_come, np.inf)
    p10, p50, p90 = (float(epochs[np.searchsorted(reached, share)]) for share in (0.1, 0.5, 0.9))
    # The ranks end at 2.5 and 97.5 %: what lies outside is said to be neither certain nor impossible.
    reached = 0.025 + 0.95 * reached
    odds = reached / (1 - reached) * math.exp(-_LATE_ODDS * (1 - left) ** _LATE_POWER)
    probability = odds / (1 + odds)
    # The earliest stays that of the futures, for the runs that do better than is said.
    p50, p90 = (at if probability[-1] >= share else math.inf for at, share in ((p50, 0.5), (p90, 0.9)))
    return TargetTimes(probability=probability, epochs_to_target=(p10, p50, p90))


def _wandering(futures: Floats, share: Floats, memory: float) -> Floats:
    """Futures whose rank changes on the way, ``_NUM_WANDERING`` of them at shares of the rest, (paths, m)."""
    from scipy.special import ndtr, ndtri

    knots = np.arange(1, _NUM_KNOTS + 1) / _NUM_KNOTS
    chance = np.random.default_rng(0)  # the same answer to the same question
    order = np.argsort(chance.random((_NUM_KNOTS, _NUM_WANDERING)), axis=1)
    z = ndtri((order + 0.5) / _NUM_WANDERING)
    for knot in range(_NUM_KNOTS - 2, -1, -1):
        correlation = (knots[knot] / knots[knot + 1]) ** memory
        z[knot] = correlation * z[knot + 1] + math.sqrt(1 - correlation**2) * z[knot]
    ranks = ndtr(np.stack([np.interp(share, knots, one) for one in z.T]))
    rows = np.interp(ranks, RANKS, np.arange(len(RANKS)))
    low = np.minimum(rows.astype(int), len(RANKS) - 2)
    part, column = rows - low, np.arange(len(share))
    return np.asarray((1 - part) * futures[low, column] + part * futures[low + 1, column], dtype=float)


def reached_at(epoch: float, num_points: int) -> TargetTimes:
    """Times of a target whose epoch is known: one that was reached already, or, with an infinite epoch, never is."""
    probability = np.full(num_points, 0.0 if math.isinf(epoch) else 1.0)
    return TargetTimes(probability=probability, epochs_to_target=(epoch,) * 3)
