"""The learned prior of ``jobs.forecasting.prior``, fitted without each origin in turn, and over all.

Minimises |actual - forecast| / scale + log scale + 20 |actual - forecast| (Laplace's law, and the error that is judged)
over runs drawn so that origins weigh alike, jobs of an origin, and runs of a job; AlgoPerf's trials of five workloads
count as three origins. Whether schedule and finished runs are told is drawn anew each time, so that one network knows
all tiers. All networks are fitted at once, a product of stacked matrices each step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from forerun.jobs.forecasting.backtest import CutResult, mean_of_origins
from forerun.jobs.forecasting.forecaster import Tier
from forerun.jobs.forecasting.prior import (
    CUTS,
    IS_CORE,
    MEMBERS,
    NUM_OF_SCHEDULE,
    NUM_OF_SIBLINGS,
    SCALE_REACH,
    Evidence,
    LearnedPrior,
    members_of,
    scale_base,
    stacked,
    told,
)

_HIDDEN = 24
_NETWORKS = 2
_DRAWN = 1200
_RATE, _DECAY, _DROPOUT, _JITTER = 4e-3, 3e-3, 0.2, 0.1
_ORIGINS_OF = {"algoperf": 3.0}
_ERROR_COUNTS = 20.0
_TOLD = (0.6, 0.5)
"""Chance that the schedule, and the finished runs, are told."""

_SHARES = np.linspace(0, 1, 6)
_LOSS_COUNTS = 3.0
"""Shares of the schedule that are tried, and what a loss counts beside the error itself."""

_KNOWN = ((False, False), (True, False), (False, True), (True, True))
"""Whether the schedule is told, and finished runs; no tier has both, and to have seen both helps either."""

_FIRST = {"last value": 1.0, "power law": 4.0, "optimus": 1.5, "siblings": 3.0, "scaled siblings": 3.0}
_FIRST |= {"annealing 5%": 2.0, "annealing 20%": 2.0, "annealing 50%": 1.0}
_OTHER_FIRST = 0.3
"""Weights of the members before any step."""


def fit_priors(results: Sequence[CutResult], *, steps: int = 500, seed: int = 0) -> dict[str, LearnedPrior]:
    """The prior without each origin, by its name, and that of all runs under an empty name.

    Args:
        results: Runs at cuts.
        steps: Optimizer steps.
        seed: Of first weights and draws.
    """
    torch.manual_seed(seed)
    names = [*dict.fromkeys(r.run.origin for r in results), ""]
    evidence = stacked([r.evidence for r in results])
    middle, spread = _units(evidence.features)
    begin = len(middle) - NUM_OF_SCHEDULE - NUM_OF_SIBLINGS
    data = _Data(results, evidence, names)
    net = _Networks(len(names) * _NETWORKS, len(middle))
    rates = [
        {"params": net.matrices, "weight_decay": _DECAY / _RATE},
        {"params": net.biases, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(rates, lr=_RATE, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=_RATE, total_steps=steps, pct_start=0.1)
    generator = np.random.default_rng(seed)
    for _ in range(steps):
        rows, known = data.draw(generator, begin)
        features = np.choose(known[:, None], [told(data.features[rows], *facts) for facts in _KNOWN])
        features = np.clip((features - middle) / spread, -4.0, 4.0)
        jittered = features + _JITTER * generator.standard_normal(features.shape)
        loss = _loss(net(_tensor(jittered)), data, rows, known)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    layers = [
        layer.detach().numpy().astype(float)
        for pair in zip(net.matrices, net.biases, strict=True)
        for layer in pair
    ]
    priors = {
        name: LearnedPrior(
            middle=middle,
            spread=spread,
            layers=tuple(layer[index * _NETWORKS : (index + 1) * _NETWORKS] for layer in layers),
            shares=np.zeros(len(CUTS)),
        )
        for index, name in enumerate(names)
    }
    return with_shares(results, priors)


def with_shares(results: Sequence[CutResult], priors: Mapping[str, LearnedPrior]) -> dict[str, LearnedPrior]:
    """The priors with the weight of the schedule at each cut, by the gains of the other origins.

    With r the error of a mixture over that without the schedule, both by a prior that had not seen the origin: the
    share with the least mean over origins of r + 3 max(r - 1, 0).
    """
    costs, none = _costs(results, priors), np.zeros((len(CUTS), len(_SHARES)))
    return {
        name: replace(
            prior, shares=_SHARES[sum((c for o, c in costs.items() if o != name), start=none).argmin(axis=1)]
        )
        for name, prior in priors.items()
    }


def _costs(results: Sequence[CutResult], priors: Mapping[str, LearnedPrior]) -> dict[str, np.ndarray]:
    """Cost of each share on each origin that has schedules, (cuts, shares); 0 at a cut without any."""
    found = {}
    for origin in dict.fromkeys(r.run.origin for r in results if r.run.rates is not None):
        of_origin = [r for r in results if r.run.origin == origin and r.run.rates is not None]
        costs = found[origin] = np.zeros((len(CUTS), len(_SHARES)))
        evidence = stacked([r.evidence for r in of_origin])
        ends = [priors[origin].weigh_alone(evidence, of)[0][:, -1] for of in (Tier.SCHEDULE, Tier.CURVE)]
        mixed = _SHARES[:, None] * ends[0] + (1 - _SHARES[:, None]) * ends[1]
        misses = np.abs(mixed - np.asarray([r.actual[-1] for r in of_origin]))
        for row_of_cut, cut in enumerate(CUTS):
            at = [(row, r.run) for row, r in enumerate(of_origin) if r.cut == cut]
            if at:
                mean = [mean_of_origins((run, miss[row]) for row, run in at) for miss in misses]
                ratio = np.asarray(mean) / max(mean[0], 1e-12)
                costs[row_of_cut] = ratio + _LOSS_COUNTS * np.maximum(ratio - 1, 0)
    return found


def _tensor(array: np.ndarray) -> torch.Tensor:
    return torch.tensor(array, dtype=torch.float32)


def _units(features: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Middle and spread of each feature; those that are told or not have their middle at what says nothing, 0."""
    flat = features.reshape(-1, features.shape[-1])
    middle, spread = flat.mean(axis=0), flat.std(axis=0) + 1e-3
    middle[flat.shape[1] - NUM_OF_SCHEDULE - NUM_OF_SIBLINGS :] = 0.0
    return middle, spread


class _Data:
    """Rows of one horizon each, with the chance of each to be drawn."""

    def __init__(self, results: Sequence[CutResult], evidence: Evidence, names: Sequence[str]) -> None:
        num = evidence.features.shape[1]
        self.features = evidence.features.reshape(-1, evidence.features.shape[-1])
        self.ends = evidence.ends.reshape(-1, len(MEMBERS))
        self.figures = evidence.figures.reshape(-1, evidence.figures.shape[-1])
        self.actual = np.stack([r.actual for r in results]).reshape(-1)
        runs = [r.run for r in results]
        of_run = Counter(id(run) for run in runs)
        runs_of = Counter((run.origin, run.job) for run in {id(run): run for run in runs}.values())
        jobs_of = Counter(origin for origin, _ in runs_of)
        chance = [
            _ORIGINS_OF.get(run.origin, 1.0)
            / (of_run[id(run)] * runs_of[run.origin, run.job] * jobs_of[run.origin])
            for run in runs
        ]
        self.chance = np.repeat(chance, num) / (num * np.sum(chance))
        left_out = np.asarray([[run.origin != name for run in runs] for name in names], dtype=float)
        self.counts = np.repeat(np.repeat(left_out, num, axis=1), _NETWORKS, axis=0)

    def draw(self, generator: np.random.Generator, begin: int) -> tuple[np.ndarray, np.ndarray]:
        """Rows, and what each is told by its number in ``_KNOWN``."""
        rows = generator.choice(len(self.chance), _DRAWN, p=self.chance)
        has = self.features[rows][:, [begin, begin + NUM_OF_SCHEDULE]] > 0
        schedule, siblings = (has & (generator.random((_DRAWN, 2)) < _TOLD)).T
        return rows, schedule + 2 * siblings


class _Networks(torch.nn.Module):
    """Stacked networks of two hidden layers."""

    def __init__(self, num: int, width: int) -> None:
        super().__init__()
        sizes = (width, _HIDDEN, _HIDDEN, len(MEMBERS) + 1)
        scales = (width**-0.5, _HIDDEN**-0.5, 0.05)
        self.matrices = torch.nn.ParameterList(
            [torch.randn(num, a, b) * s for a, b, s in zip(sizes[:-1], sizes[1:], scales, strict=True)]
        )
        self.biases = torch.nn.ParameterList([torch.zeros(num, 1, b) for b in sizes[1:]])
        first = [np.log(_FIRST.get(name, _OTHER_FIRST)) for name in MEMBERS]
        self.biases[-1].data[..., : len(MEMBERS)] = torch.tensor(first, dtype=torch.float32)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Outputs, (networks, rows, outputs), with hidden units left out at random."""
        hidden = features.expand(len(self.matrices[0]), *features.shape)
        for index, (matrix, bias) in enumerate(zip(self.matrices, self.biases, strict=True)):
            hidden = torch.baddbmm(bias, hidden, matrix)
            if index + 1 < len(self.matrices):
                hidden = torch.nn.functional.dropout(torch.nn.functional.silu(hidden), _DROPOUT)
        return hidden


def _loss(given: torch.Tensor, data: _Data, rows: np.ndarray, known: np.ndarray) -> torch.Tensor:
    ends = data.ends[rows]
    is_used = np.isfinite(ends) & np.stack([members_of(*facts) for facts in _KNOWN])[known]
    members = _tensor(np.where(is_used, ends, 0.0))
    logits = given[..., :-1].masked_fill(~torch.tensor(is_used), -30.0)
    forecast = (torch.softmax(logits, dim=-1) * members).sum(dim=-1)
    figures, siblings = _tensor(data.figures[rows]), _tensor(known >= 2)
    base = scale_base(forecast.detach(), members, _tensor(is_used & IS_CORE), figures, siblings)
    log_scale = torch.log(base) + SCALE_REACH * torch.tanh(given[..., -1] / SCALE_REACH)
    miss = (_tensor(data.actual[rows]) - forecast).abs()
    counts = _tensor(data.counts[:, rows])
    each = miss / torch.exp(log_scale) + log_scale + _ERROR_COUNTS * miss
    return (each * counts).sum() / counts.sum(dim=1).mean()
