"""Simulated searches among public trials at equal budgets, and the chance that a trial diverges.

Trials of one pool are drawn in a random order, sixteen at a time; a policy says which trial runs on, and how far, until
the budget is spent; any may pause a trial. It looks at each at the cuts of the back-tests. Pools are AlgoPerf's
workloads by framework, and jobs of other origins with six runs or more that do not end at a target. Settings of
``next_trial``, on which ``chance_to_win`` rests, were chosen on AlgoPerf and ``CHOSEN_ON``.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from forerun.jobs.forecasting.backtest import StoredRun
from forerun.jobs.forecasting.curve import Curve, MetricKind, clean, error_scale, final_error
from forerun.jobs.forecasting.forecast_answer import HOPELESS, chance_to_diverge
from forerun.jobs.forecasting.next_trial import STAGES, chance_to_win, chosen, stage_logs, standings_of
from forerun.jobs.forecasting.prior import CUTS

_NUM_TRIALS, _FEWEST_OF_WORKLOAD, _FEWEST_OF_POOL = 16, 20, 6
_TRIALS, _OTHERS = "trials/algoperf", ("adaptdl_validation_curves", "dawnbench", "gluoncv")
CHOSEN_ON = ("adaptdl_validation_curves", "gluoncv-detection", "gluoncv-pose")
"""Origins beside AlgoPerf on which settings of ``next_trial`` were chosen: every other one, in alphabetical order."""

OURS = "**forerun**, pausing"
_DRAWS = 2000
"""Draws behind an interval."""
_RUNGS, _ETA, _FEWEST_FINISHED = (0.1, 0.3, 1.0), 3, 4
BUDGETS = (2.0, 4.0, 8.0, 12.0)
"""Work of a search, in whole trials."""

Trials = Sequence[Curve]
Policy = Callable[[Trials], Iterator[tuple[int, float]]]
"""Yields a trial and the share up to which it runs next."""

Stops = Callable[[Curve, float, Trials], bool]
"""True to stop a trial: its curve so far, the share done, finished trials."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepScore:
    """Means over searches of one policy and budget.

    Attributes:
        regret: Best value that was seen above the best end of all trials, in distances of that from the median end.
        found: Share of searches whose best trial was run to its end.
        ahead_90: 90 % interval of its regret above that of ``OURS``, pools and their searches drawn anew.
    """

    regret: float
    found: float
    ahead_90: tuple[float, float]


def winning_score(runs: Sequence[StoredRun], num_searches: int = 6) -> tuple[float, float]:
    """Brier scores of ``chance_to_win`` at cuts of trials in searches that stop none, and of 1 / (n + 1) after n."""
    pools = {name: trials for of_group in trial_pools(runs).values() for name, trials in of_group.items()}
    misses = []
    for _, trials in _searches(pools, num_searches):
        for index in range(1, len(trials)):
            won = _end(trials[index]) < min(map(_end, trials[:index]))
            for cut in CUTS:
                chance = chance_to_win(_at(trials[index], cut), trials[:index], cut)
                misses.append(((chance or 0.0) - won, 1 / (index + 1) - won))
    ours, usual = np.mean(np.square(misses), axis=0).tolist()
    return ours, usual


def trial_pools(runs: Sequence[StoredRun]) -> dict[str, dict[str, list[Curve]]]:
    """Pools of trials of each group: AlgoPerf, and other origins by whether settings were chosen on them."""
    found: dict[str, dict[str, list[Curve]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        is_trial = run.table == _TRIALS
        if not (is_trial or run.origin.startswith(_OTHERS)):
            continue
        words = run.job.split(": ")[1].split(" ")
        group = "AlgoPerf" if is_trial else "settings chosen" if run.origin in CHOSEN_ON else "held out"
        pool = " ".join(
            words[:2] if is_trial else [run.origin, words[0] if run.origin == "dawnbench" else words[-1]]
        )
        # One scale for the pool: a loss is not divided by the first value of its own run.
        scale = run.span if run.kind in (MetricKind.LOSS, MetricKind.ERROR_RATE) else 1.0
        found[group][pool].append(
            Curve(
                name=run.name, metric="error", epochs=run.epochs, values=run.errors * scale, is_rising=False
            )
        )
    return {
        group: {
            name: trials
            for name, trials in pools.items()
            if len(trials) >= (_FEWEST_OF_WORKLOAD if group == "AlgoPerf" else _FEWEST_OF_POOL)
        }
        for group, pools in found.items()
    }


def sweep_scores(
    runs: Sequence[StoredRun], num_searches: int = 4
) -> dict[str, dict[str, dict[float, SweepScore]]]:
    """Score of each policy by budget in each group of pools; pools weigh alike.

    Args:
        runs: All runs.
        num_searches: Of each pool.
    """
    return {group: _scores_of(pools, num_searches) for group, pools in trial_pools(runs).items()}


def _scores_of(pools: Mapping[str, Trials], num_searches: int) -> dict[str, dict[float, SweepScore]]:
    found: dict[str, list[dict[float, tuple[float, float]]]] = defaultdict(list)
    for _, trials in _searches(pools, num_searches):
        policies: dict[str, Policy] = {
            "no stopping": _one_by_one(lambda *_: False),
            "median stopping": _one_by_one(_median),
            "ASHA": _asha,
            "Hyperband": _hyperband,
            "forerun, stopping": _one_by_one(_by_chance),
            OURS: _next_trials,
        }
        for policy, proposes in policies.items():
            found[policy].append(_spend(trials, proposes(trials)))
    # (policies, pools, searches, budgets, two figures)
    rows = {
        policy: np.asarray([[of[budget] for budget in BUDGETS] for of in scores]).reshape(
            len(pools), num_searches, len(BUDGETS), 2
        )
        for policy, scores in found.items()
    }
    chance = np.random.default_rng(0)
    drawn = chance.integers(len(pools), size=(_DRAWS, len(pools), 1))
    of_pool = chance.integers(num_searches, size=(_DRAWS, len(pools), num_searches))
    means: dict[str, dict[float, SweepScore]] = {}
    for policy, scores in rows.items():
        ahead = (scores - rows[OURS])[..., 0][drawn, of_pool].mean(axis=(1, 2))
        lows, highs = np.quantile(ahead, (0.05, 0.95), axis=0).tolist()
        regrets, shares = scores.mean(axis=(0, 1)).T.tolist()
        means[policy] = {
            budget: SweepScore(regret=regret, found=share, ahead_90=(low, high))
            for budget, regret, share, low, high in zip(BUDGETS, regrets, shares, lows, highs, strict=True)
        }
    return means


def _next_trials(trials: Trials) -> Iterator[tuple[int, float]]:
    """Each step of work to the trial that ``next_trial`` says, the next of the pool being the one that waits."""
    scale = error_scale(np.concatenate([trial.values for trial in trials]), False)
    logs = np.stack([stage_logs(trial, scale, float(trial.epochs[-1])) for trial in trials])
    shares, at, begun = np.asarray((0.0, *STAGES)), np.zeros(len(trials), dtype=int), 0
    while True:
        known = slice(min(begun + 1, len(trials)))
        seen = np.where(np.arange(len(STAGES)) < at[known, None], logs[known], np.nan)
        index = chosen(standings_of(seen, shares[at[known]]).index, shares[at[known]])
        if index is None:
            return
        at[index] += 1
        begun = max(begun, index + 1)
        yield index, float(shares[at[index]])


def _searches(pools: Mapping[str, Trials], number: int) -> Iterator[tuple[str, list[Curve]]]:
    for name, trials in pools.items():
        for search in range(number):
            order = np.random.default_rng([search, sum(map(ord, name))]).permutation(len(trials))
            yield name, [trials[index] for index in order[:_NUM_TRIALS]]


def _spend(trials: Trials, proposed: Iterator[tuple[int, float]]) -> dict[float, tuple[float, float]]:
    """Regret at each budget, and whether the best trial was finished; a step that the budget ends is not seen."""
    ends = [_end(trial) for trial in trials]
    best, unit = min(ends), max(float(np.median(ends)) - min(ends), 1e-9)
    done, seen, spent, scores = [0.0] * len(trials), float(np.median(ends)), 0.0, {}
    for index, share in proposed:
        spent += share - done[index]
        for budget in BUDGETS:
            if spent > budget * (1 + 1e-9) and budget not in scores:
                scores[budget] = (seen, done)
        done = [*done[:index], share, *done[index + 1 :]]
        seen = min(seen, ends[index] if share == 1 else float(np.nanmin(_at(trials[index], share).values)))
    return {
        budget: (max(0.0, (low - best) / unit), float(shares[ends.index(best)] == 1))
        for budget, (low, shares) in {**dict.fromkeys(BUDGETS, (seen, done)), **scores}.items()
    }


def _one_by_one(stops: Stops) -> Policy:
    """One trial after the other, each to its end unless it is stopped."""

    def proposes(trials: Trials) -> Iterator[tuple[int, float]]:
        finished: list[Curve] = []
        for index, trial in enumerate(trials):
            for cut in CUTS:
                yield index, cut
                if stops(_at(trial, cut), cut, finished):
                    break
            else:
                yield index, 1.0
                finished.append(trial)

    return proposes


def _at(trial: Curve, cut: float) -> Curve:
    return trial.first(max(1, round(cut * len(trial))))


def _end(trial: Curve) -> float:
    return float(final_error(trial.values))


def _by_chance(trial: Curve, cut: float, finished: Trials) -> bool:
    """The rule of ``ForecastPruner``."""
    chance = chance_to_win(trial, finished, cut)
    return chance is not None and chance <= HOPELESS * (1 - cut)


def _median(trial: Curve, cut: float, finished: Trials) -> bool:
    """Best so far behind the median of running means (Golovin et al. 2017)."""
    means = [float(np.mean(_at(other, cut).values)) for other in finished]
    return len(means) >= _FEWEST_FINISHED and float(trial.values.min()) > float(np.median(means))


def _asha(trials: Trials) -> Iterator[tuple[int, float]]:
    """Asynchronous successive halving: the best third of a rung runs on from where it paused (Li et al. 2020)."""
    return _halving(trials, iter(range(len(trials))), _RUNGS)


def _halving(trials: Trials, coming: Iterator[int], rungs: Sequence[float]) -> Iterator[tuple[int, float]]:
    at: dict[float, dict[int, float]] = {rung: {} for rung in rungs}
    while True:
        chosen = _promoted(at, rungs, 1 / _ETA)
        if chosen is None and (new := next(coming, None)) is not None:
            chosen = new, rungs[0]
        # Without further trials the best of those that pause run on.
        chosen = chosen or _promoted(at, rungs, 1.0)
        if chosen is None:
            return
        yield chosen
        index, rung = chosen
        at[rung][index] = float(_at(trials[index], rung).values[-1])


def _promoted(
    at: Mapping[float, Mapping[int, float]], rungs: Sequence[float], share: float
) -> tuple[int, float] | None:
    """The best trial among the best share of a rung that has not run on, at the highest rung that has one."""
    for low, high in reversed(list(pairwise(rungs))):
        ranked = sorted(at[low], key=at[low].__getitem__)
        for index in ranked[: int(len(ranked) * share + 1e-9)]:
            if index not in at[high]:
                return index, high
    return None


def _hyperband(trials: Trials) -> Iterator[tuple[int, float]]:
    """Brackets that begin at each rung and get the same work (Li et al. 2018), each by asynchronous halving."""
    coming = iter(range(len(trials)))
    brackets = [_halving(trials, coming, _RUNGS[first:]) for first in range(len(_RUNGS))]
    spent, done = [0.0] * len(brackets), [0.0] * len(trials)
    while brackets:
        which = int(np.argmin(spent))
        step = next(brackets[which], None)
        if step is None:
            del brackets[which], spent[which]
            continue
        spent[which] += step[1] - done[step[0]]
        done[step[0]] = step[1]
        yield step


@dataclass(frozen=True, slots=True, kw_only=True)
class DivergenceScore:
    """Brier scores of the chance that a trial diverges later, its family of workloads left out.

    Attributes:
        ours: Of ``chance_to_diverge``, the other trials of a job being finished.
        base: Of the share of other families' trials that diverge after the cut.
        num_looks, num_diverged: Trials at cuts, and those of them that diverged later.
    """

    ours: float
    base: float
    num_looks: int
    num_diverged: int


def divergence_score(jobs: Mapping[str, Trials]) -> DivergenceScore:
    """Looks at trials that have not diverged and have four points.

    Args:
        jobs: Trials of each job as logged, NaN included, by its workload and further words.
    """
    looks: list[tuple[str, int, bool, list[bool]]] = []
    for name, trials in jobs.items():
        ends = [_has_diverged(trial) for trial in trials]
        for number, cut in enumerate(CUTS):
            early = [_at(trial, cut) for trial in trials]
            came = [
                end
                for end, then in zip(ends, early, strict=True)
                if len(then) > 3 and not _has_diverged(then)
            ]
            for index, one in enumerate(came):
                # By the first word: variants of a workload are left out together.
                looks.append((re.split("[_ ]", name)[0], number, one, came[:index] + came[index + 1 :]))
    families, numbers = np.asarray([look[0] for look in looks]), np.asarray([look[1] for look in looks])
    later = np.asarray([look[2] for look in looks], dtype=float)
    usual = {
        family: [
            float((later[at].sum() + later[families != family].mean()) / (at.sum() + 1))
            for at in ((families != family) & (numbers == number) for number in range(len(CUTS)))
        ]
        for family in dict.fromkeys(families.tolist())
    }
    ours = [chance_to_diverge(rest, CUTS[n], usual[family]).probability for family, n, _, rest in looks]
    base = [usual[family][number] for family, number, _, _ in looks]
    return DivergenceScore(
        ours=float(np.mean((np.asarray(ours) - later) ** 2)),
        base=float(np.mean((np.asarray(base) - later) ** 2)),
        num_looks=len(looks),
        num_diverged=int(later.sum()),
    )


def _has_diverged(trial: Curve) -> bool:
    found = clean(trial)
    return found is None or found.has_diverged
