"""The part of the accuracy page about learning curves."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from forerun.jobs.forecasting.backtest_table import shipped_table
from forerun.jobs.forecasting.convergence import fit_batch_scaling
from forerun.jobs.forecasting.curve import Curve, Target, parse_target
from forerun.jobs.forecasting.curve_files import read_curve
from forerun.jobs.forecasting.forecast import CurveForecast, forecast_curve
from forerun.jobs.forecasting.forecast_answer import RunOutcome, outcome_of
from forerun.jobs.forecasting.forecaster import Tier
from forerun.jobs.forecasting.schedule import parse_schedule
from studies.forecast.batch_study import BatchRow, BatchStudy, SystemCStudy
from studies.forecast.study import ForecastStudy
from studies.forecast.sweeps import BUDGETS, OURS, SweepScore
from studies.markdown import markdown_table

_SHOWN = ("annealing 20%", "power law", "optimus", "last value")
"""Forecasters alone that stand beside ours; ``forerun forecast backtest`` prints all of them."""

_TARGET_CUTS = (0.1, 0.3, 0.5, 0.7)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastFigures:
    """The studies behind the section."""

    curves: ForecastStudy
    batches: BatchStudy
    system_c: SystemCStudy
    own: OwnCurves


def forecast_section(figures: ForecastFigures) -> str:
    """The section, Markdown."""
    study = figures.curves
    parts = [
        _intro(study),
        _origins_left_out(study),
        _coverage(study),
        _targets(study),
        _sweeps(study),
        _batches(figures.batches),
        _system_c(figures.system_c),
        _own(figures.own),
    ]
    return "\n".join(parts)


def forecast_summary_row(figures: ForecastFigures) -> tuple[str, str, str]:
    """A row of the README: the value at the end of a run, forecast at 30 %."""
    study = figures.curves.known
    ours = study.mixture_errors
    given, withheld = ours[str(Tier.SCHEDULE)][0.3], ours[str(Tier.CURVE)][0.3]
    return (
        "accuracy at the end of a run, after 30 % of it",
        f"mean error {given:.3f} with the schedule, {withheld:.3f} without",
        f"public curves, origins never seen; Optimus' law has {study.errors['optimus'][0.3]:.3f}",
    )


def _intro(study: ForecastStudy) -> str:
    return (
        "## Forecasts of learning curves\n\n"
        f"{sum(study.num_runs.values())} public runs of {study.everything.num_origins} origins, cut at a "
        "share of their length.\n"
    )


def _origins_left_out(study: ForecastStudy) -> str:
    tables = []
    views = (
        ("Schedules withheld", study.everything, {Tier.CURVE: "curve alone"}),
        ("Schedules known", study.known, {Tier.SCHEDULE: "schedule given", Tier.CURVE: "schedule withheld"}),
    )
    for words, found, tiers in views:
        alone = [name for name in _SHOWN if name in found.errors]
        names = [name for name in alone if Tier.SCHEDULE in tiers or not name.startswith("annealing")]
        ours = [
            (f"**forerun**, {known}", *(_three(found.mixture_errors[str(tier)].get(c)) for c in found.cuts))
            for tier, known in tiers.items()
        ]
        rows = [(name, *(_three(found.errors[name].get(c)) for c in found.cuts)) for name in names]
        tables.append(
            f"{words}, {found.num_runs} runs:\n\n"
            + markdown_table(("forecaster", *(f"{c:.0%}" for c in found.cuts)), [*ours, *rows])
        )
    return "### Error of the final value, origins left out\n\n" + "\n".join(tables)


def _coverage(study: ForecastStudy) -> str:
    found = study.everything
    cuts = found.cuts
    rows = []
    for tier in found.coverage_90:
        rows.append((tier, "coverage", *(_percent(found.coverage_90[tier].get(c)) for c in cuts)))
        rows.append(("", "width", *(_three(found.width_90[tier].get(c)) for c in cuts)))
        if tier == Tier.HISTORY:  # those of the others stand above
            rows.append(("", "error", *(_three(found.mixture_errors[tier].get(c)) for c in cuts)))
    return "### Coverage of 90 % intervals\n\n" + markdown_table(
        ("what is known", "", *(f"{c:.0%}" for c in cuts)), rows
    )


def _targets(study: ForecastStudy) -> str:
    rows = [
        (
            f"**forerun**, {name.removeprefix('mixture, ')}" if name.startswith("mixture") else name,
            *(f"{found[cut]:.2f}".lstrip("0") if cut in found else "-" for cut in _TARGET_CUTS),
        )
        for name, found in study.epochs_to_target.items()
    ]
    inside = [
        (tier, *(_percent(found.get(cut)) for cut in _TARGET_CUTS))
        for tier, found in study.target_coverage.items()
    ]
    heads = [f"{cut:.0%}" for cut in _TARGET_CUTS]
    return (
        "### Epochs to a target\n\n`adaptdl_validation_curves`, 98 % of the whole fall, mean relative error.\n\n"
        + markdown_table(("forecaster", *heads), rows)
        + "\nAll origins: reached between the epochs at 10 and 90 %.\n\n"
        + markdown_table(("what is known", *heads), inside)
    )


def _sweeps(study: ForecastStudy) -> str:
    groups = list(study.sweeps)
    policies = list(next(iter(study.sweeps.values())))
    rows = [
        (name, *(_by_budget(s.regret for s in study.sweeps[g][name].values()) for g in groups))
        for name in policies
    ]
    for name in ("no stopping", "ASHA", "Hyperband"):
        ends = [zip(*(s.ahead_90 for s in study.sweeps[g][name].values()), strict=True) for g in groups]
        rows.append((f"{name} above it", *("~".join(map(_by_budget, pair)) for pair in ends)))
    found, better = study.divergence, [_better(group, scores) for group, scores in study.sweeps.items()]
    return (
        "### Searches among sixteen trials\n\nRegret for the work of "
        + "/".join(f"{budget:g}" for budget in BUDGETS)
        + " whole trials; last, 90 % intervals of rivals' regret above ours, pausing. Settings were chosen on AlgoPerf "
        f"too; *held out* was seen once before. Less regret: {'; '.join(filter(None, better))}.\n\n"
        + markdown_table(("policy", *groups), rows)
        + f"\nChance that a trial diverges later: Brier score {found.ours:.4f} (base rate: {found.base:.4f}; "
        f"{found.num_diverged} of {found.num_looks:,} looks). That it ends best: {study.winning[0]:.3f} "
        f"(1/(n+1): {study.winning[1]:.3f}).\n"
    )


def _better(group: str, scores: Mapping[str, Mapping[float, SweepScore]]) -> str:
    """Budgets at which pausing has more regret than the least of others, by .005 or more, and whose it is."""
    least = {budget: min(scores, key=lambda name: scores[name][budget].regret) for budget in BUDGETS}
    found = [
        f"{budget:g} ({name})"
        for budget, name in least.items()
        if scores[OURS][budget].regret - scores[name][budget].regret >= 0.005
    ]
    return f"{group} {', '.join(found)}" if found else ""


def _by_budget(values: Iterable[float]) -> str:
    return "/".join(f"{value:.2f}".replace("0.", ".") for value in values)


def _batches(study: BatchStudy) -> str:
    rows = [
        (
            f"{r.batch_size:,}",
            f"{r.actual:.0f}",
            f"{r.predicted:.1f}",
            _percent(r.error),
            _percent(r.constant_error),
        )
        for r in study.mlperf
    ]
    jobs: dict[str, list[BatchRow]] = {}
    for row in study.others:
        jobs.setdefault(row.job, []).append(row)
    others = [
        (
            job,
            f"{found[0].batch_size:,} to {found[-1].batch_size:,}",
            _percent(float(np.median([r.error for r in found]))),
            _percent(float(np.median([r.constant_error for r in found]))),
        )
        for job, found in jobs.items()
    ]
    return (
        "### Epochs against the batch\n\nMLPerf's ResNet-50, fitted to batches up to 8,192:\n\n"
        + markdown_table(("global batch", "epochs", "predicted", "error", "error of constant epochs"), rows)
        + "\nOther jobs, fitted to the smaller half of their batches:\n\n"
        + markdown_table(("job", "batches predicted", "error", "error of constant epochs"), others)
    )


def _system_c(study: SystemCStudy) -> str:
    rows = []
    for name, found in study.predictions.items():
        actual = study.actual[name]
        others = float(np.mean([value for other, value in study.actual.items() if other != name]))
        rows.append(
            (
                name,
                f"{actual:.1f}",
                f"{found.value:.1f} ({found.low:.0f} to {found.high:.0f})",
                _percent(abs(found.value - actual) / actual),
                _percent(abs(others - actual) / actual),
            )
        )
    return (
        "### System C: epochs to 92 % of a network never trained\n\nEach of its [six ResNets](lineage.md) "
        f"from the other five; single runs differ by {_percent(study.spread)}.\n\n"
        + markdown_table(
            ("network", "mean of its runs", "predicted (90 %)", "error", "mean of the others"), rows
        )
    )


def _own(own: OwnCurves) -> str:
    num_inside = sum(outcome.is_inside_90 for _, outcome in own.rows)
    return (
        f"### Own runs\n\n{num_inside} of {len(own.rows)} ends of a small ResNet came inside their "
        f"interval, forecast at {_percent(CUT)}. {_own_batches(own.batches)}\n"
    )


def _own_batches(batches: OwnBatches) -> str:
    return (
        f"Steps to a target at batch {batches.batch_size}: {batches.predicted_steps:.0f} predicted, "
        f"{batches.actual_steps:.0f} taken."
    )


def _three(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}".lstrip("0")


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f} %"


CUT = 0.3
TARGET = "val_accuracy>=0.97"
BATCH_TARGET = "val_accuracy>=0.95"


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnBatches:
    """Steps to a target at the largest batch, from the smaller ones.

    Attributes:
        batch_size: The largest.
        predicted_steps, actual_steps: To ``BATCH_TARGET``.
        critical_batch_size: By the law.
        noise_batch_sizes: Gradient noise scales of single runs.
    """

    batch_size: int
    predicted_steps: float
    actual_steps: float
    critical_batch_size: float
    noise_batch_sizes: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnCurves:
    """Figures of the section.

    Attributes:
        rows: Forecasts and outcomes, once by the schedule and once with the other runs as history.
        batches: The law of batch sizes on them.
    """

    rows: tuple[tuple[CurveForecast, RunOutcome], ...]
    batches: OwnBatches


def own_curves_folder() -> Path:
    """Folder of the curves."""
    return Path(__file__).parent / "curves"


def own_curves() -> OwnCurves:
    """All shipped curves forecast, to which nothing was fitted; a second."""
    document = json.loads((own_curves_folder() / "curves.json").read_text(encoding="utf-8"))
    target = parse_target(TARGET)
    runs = [
        read_curve(own_curves_folder() / run["file"], target.metric, target.is_rising)
        for run in document["runs"]
    ]
    rows = [_row(run, [], document["schedule"], target) for run in runs]
    rows += [_row(run, [r for r in runs if r is not run], document["schedule"], target) for run in runs]
    return OwnCurves(rows=tuple(rows), batches=_law_of_batches(document["runs"], runs))


def _row(
    run: Curve, siblings: Sequence[Curve], schedule: str, target: Target
) -> tuple[CurveForecast, RunOutcome]:
    found = forecast_curve(
        run.first(round(CUT * len(run))),
        shipped_table(),
        target=target,
        end_epoch=float(run.epochs[-1]),
        schedule=parse_schedule(schedule),
        siblings=siblings,
    )
    return found, outcome_of(run, found)


def _law_of_batches(described: Sequence[dict[str, float]], runs: Sequence[Curve]) -> OwnBatches:
    target = parse_target(BATCH_TARGET)
    points = [(int(d["batch_size"]), _steps_to(run, target)) for d, run in zip(described, runs, strict=True)]
    largest = max(size for size, _ in points)
    fitted = [(size, steps) for size, steps in points if size < largest]
    law = fit_batch_scaling([s for s, _ in fitted], [n for _, n in fitted])
    noise = [d["gradient_noise_batch_size"] for d in described]
    return OwnBatches(
        batch_size=largest,
        predicted_steps=float(law.steps([largest])[0]),
        actual_steps=float(np.mean([n for s, n in points if s == largest])),
        critical_batch_size=law.critical_batch_size,
        noise_batch_sizes=tuple(n for n in noise if n is not None),
    )


def _steps_to(run: Curve, target: Target) -> float:
    assert run.steps is not None
    hits = [target.is_reached_by(float(value)) for value in run.values]
    return float(run.steps[hits.index(True)])
