"""Simulated searches among AlgoPerf's trials: which are stopped, at what cost, and whether the best is found.

Trials of one workload and framework are drawn in a random order, sixteen at a time, and run one after the other; a
policy looks at each at the cuts of the back-tests. Coefficients of ``chance_to_win`` are fitted without the workload.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from forerun.jobs.forecasting.backtest import StoredRun
from forerun.jobs.forecasting.curve import Curve, final_error
from forerun.jobs.forecasting.forecast_answer import chance_to_win, winning_features
from forerun.jobs.forecasting.prior import CUTS

__all__ = ["Looks", "SweepScore", "fit_chance", "looks_of", "sweep_scores"]

_NUM_TRIALS, _FEWEST_OF_POOL = 16, 20
_RUNGS, _FEWEST_FINISHED = (0.1, 0.3), 4
_BOUNDS = (0.02, 0.05, 0.28)

Trials = Sequence[Curve]
Policy = Callable[[Curve, float, Trials, dict[float, list[float]]], bool]
"""True to stop a trial: its curve so far, the share done, finished trials, and values at each cut of those before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepScore:
    """Means over searches.

    Attributes:
        cost: Share of the work of all trials that was done.
        regret: End of the best finished trial above the best of all, in distances of that from the median.
        found: Share of searches whose best trial was finished.
    """

    cost: float
    regret: float
    found: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Looks:
    """Trials at cuts in searches that stop none: features of ``chance_to_win``, (looks, 5), and what came of each.

    Attributes:
        workloads: First word of the workload of each, (looks,).
        features: (looks, 5).
        won: 1 where the trial ended better than all before it, (looks,).
    """

    workloads: np.ndarray
    features: np.ndarray
    won: np.ndarray


def looks_of(pools: Mapping[str, Trials], num_searches: int = 6) -> Looks:
    """Looks at the trials of some searches of each pool."""
    words, rows, won = [], [], []
    for name, trials in _searches(pools, num_searches):
        for index in range(1, len(trials)):
            finished, best = trials[:index], min(_end(t) for t in trials[:index])
            for cut in CUTS:
                words.append(_workload(name))
                rows.append(winning_features(_at(trials[index], cut), finished, cut))
                won.append(_end(trials[index]) < best)
    return Looks(
        workloads=np.asarray(words), features=np.asarray(rows, dtype=float), won=np.asarray(won, dtype=float)
    )


def fit_chance(looks: Looks, without: str = "") -> list[float]:
    """Constant and coefficients of ``chance_to_win``, by logistic regression with a ridge of 1.

    Args:
        looks: The looks.
        without: Workload that is left out.
    """
    kept = looks.workloads != without
    features, won = looks.features[kept], looks.won[kept]
    middle, spread = features.mean(axis=0), features.std(axis=0) + 1e-9
    design = np.column_stack([np.ones(len(won)), (features - middle) / spread])
    ridge = np.diag([0.0, *np.ones(features.shape[1])])
    found = np.zeros(design.shape[1])
    for _ in range(20):  # Newton's steps
        chance = 1 / (1 + np.exp(-design @ found))
        bent = design.T @ (design * (chance * (1 - chance))[:, None]) + ridge
        found += np.linalg.solve(bent, design.T @ (won - chance) - ridge @ found)
    slopes = found[1:] / spread
    return [float(found[0] - slopes @ middle), *map(float, slopes)]


def sweep_scores(runs: Sequence[StoredRun], num_searches: int = 4) -> dict[str, SweepScore]:
    """Score of each policy; pools weigh alike.

    Args:
        runs: AlgoPerf's trials.
        num_searches: Of each pool of twenty trials or more.
    """
    pools: dict[str, list[Curve]] = defaultdict(list)
    for run in runs:
        pools[" ".join(run.job.split(": ")[1].split(" ")[:2])].append(
            Curve(name=run.name, metric="error", epochs=run.epochs, values=run.errors, is_rising=False)
        )
    large = {name: trials for name, trials in pools.items() if len(trials) >= _FEWEST_OF_POOL}
    looks = looks_of(large)
    weights = {workload: fit_chance(looks, workload) for workload in map(_workload, large)}
    found: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
    for name, trials in _searches(large, num_searches):
        known = weights[_workload(name)]
        policies: dict[str, Policy] = {"none": lambda *_: False, "median stopping": _median, "ASHA": _asha}
        for bound in _BOUNDS:
            policies[f"forerun, {bound:g}"] = _by_chance(known, bound)
        ends = [_end(trial) for trial in trials]
        for policy, stops in policies.items():
            cost, best = _search(trials, stops)
            worst = max(float(np.median(ends)) - min(ends), 1e-9)
            found[policy].append((cost / len(trials), (best - min(ends)) / worst, float(best <= min(ends))))
    means = {policy: np.mean(rows, axis=0) for policy, rows in found.items()}
    return {policy: SweepScore(cost=m[0], regret=m[1], found=m[2]) for policy, m in means.items()}


def _workload(pool: str) -> str:
    """The first word: variants of a workload are left out together."""
    return pool.split("_")[0].split(" ")[0]


def _searches(pools: Mapping[str, Trials], number: int) -> Iterator[tuple[str, list[Curve]]]:
    for name, trials in pools.items():
        for search in range(number):
            order = np.random.default_rng([search, sum(map(ord, name))]).permutation(len(trials))
            yield name, [trials[index] for index in order[:_NUM_TRIALS]]


def _search(trials: Trials, stops: Policy) -> tuple[float, float]:
    """Work done, in trials, and the end of the best finished one."""
    finished: list[Curve] = []
    rungs: dict[float, list[float]] = defaultdict(list)
    cost = 0.0
    for trial in trials:
        stopped = next((cut for cut in CUTS if stops(_at(trial, cut), cut, finished, rungs)), None)
        cost += stopped or 1.0
        finished += [trial] if stopped is None else []
    return cost, min((_end(trial) for trial in finished), default=np.inf)


def _at(trial: Curve, cut: float) -> Curve:
    return trial.first(max(1, round(cut * len(trial))))


def _end(trial: Curve) -> float:
    return float(final_error(trial.values))


def _by_chance(weights: Sequence[float], bound: float) -> Policy:
    def stops(trial: Curve, cut: float, finished: Trials, rungs: dict[float, list[float]]) -> bool:
        chance = chance_to_win(trial, finished, cut, weights)
        return chance is not None and chance <= bound * (1 - cut)

    return stops


def _median(trial: Curve, cut: float, finished: Trials, rungs: dict[float, list[float]]) -> bool:
    """Best so far behind the median of running means (Golovin et al. 2017)."""
    means = [float(np.mean(_at(other, cut).values)) for other in finished]
    return len(means) >= _FEWEST_FINISHED and float(trial.values.min()) > float(np.median(means))


def _asha(trial: Curve, cut: float, finished: Trials, rungs: dict[float, list[float]], eta: int = 3) -> bool:
    """Not among the best third at a rung (Li et al. 2020)."""
    if cut not in _RUNGS:
        return False
    value = float(trial.values[-1])
    rungs[cut].append(value)
    return len(rungs[cut]) >= eta and value > sorted(rungs[cut])[max(0, len(rungs[cut]) // eta - 1)]
