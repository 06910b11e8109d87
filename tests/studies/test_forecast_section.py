"""Own curves beside their outcome, and the section that prints the studies of forecasts."""

import re

import numpy as np
import pytest
from scipy.stats import f as f_distribution

from forerun.jobs.forecasting.backtest import StoredRun, cut_results, summary_of
from forerun.jobs.forecasting.curve import Curve
from studies.forecast.batch_study import SYSTEM_C_EPOCHS, BatchRow, BatchStudy, system_c_study
from studies.forecast.section import ForecastFigures, forecast_section, forecast_summary_row, own_curves
from studies.forecast.study import ForecastStudy
from studies.forecast.sweeps import (
    BUDGETS,
    OURS,
    DivergenceScore,
    divergence_score,
    sweep_scores,
)
from studies.tables.public import reference_folder


@pytest.fixture(scope="module")
def made_runs():
    chance = np.random.default_rng(0)
    found = []
    for job in range(3):
        for name in range(3):
            epochs = np.arange(1.0, 41.0)
            errors = (0.05 + 0.05 * job + epochs**-0.6) * (1 + chance.normal(0, 0.01, 40))
            rates = np.linspace(1, 0.1, 40)
            run = StoredRun(
                table="made", job=f"{job}", name=f"{name}", epochs=epochs, errors=errors, rates=rates
            )
            found.append(run)
    return found


@pytest.fixture(scope="module")
def own():
    return own_curves()


def test_own_curves_are_forecast_without_what_came(own):
    assert len(own.rows) == 8
    for forecast, outcome in own.rows:
        assert forecast.curve.epochs[-1] == 18
        assert outcome.epochs[0] == 19
        assert outcome.epochs[-1] == 60
        assert abs(forecast.final.value - outcome.final_value) < 0.05
    assert [str(forecast.tier) for forecast, _ in own.rows] == ["schedule"] * 4 + ["history"] * 4


def test_the_law_of_batches_and_the_noise_scale_agree_on_own_runs(own):
    batches = own.batches
    assert batches.predicted_steps == pytest.approx(batches.actual_steps, rel=0.25)
    for size in batches.noise_batch_sizes:
        assert size == pytest.approx(batches.critical_batch_size, rel=0.3)


def test_resnet_50_of_system_c_is_predicted_within_a_fifth():
    study = system_c_study()
    for name, runs in SYSTEM_C_EPOCHS.items():
        assert study.actual[name] == pytest.approx(sum(runs) / len(runs))
    found = study.predictions["ResNet-50"]
    assert abs(found.value - study.actual["ResNet-50"]) / study.actual["ResNet-50"] < 0.2
    assert found.low < study.actual["ResNet-50"] < found.high
    # Two-way analysis of variance without repetitions: epochs do not depend on the device.
    table = np.log(list(SYSTEM_C_EPOCHS.values()))
    of_device = table.mean(axis=0) - table.mean()
    residuals = table - table.mean(axis=1, keepdims=True) - of_device
    freedom = (table.shape[1] - 1, (len(table) - 1) * (table.shape[1] - 1))
    f_value = len(table) * (of_device**2).sum() / freedom[0] / ((residuals**2).sum() / freedom[1])
    assert f_value < f_distribution.ppf(0.95, *freedom)


def test_a_batch_row_knows_its_errors():
    row = BatchRow(job="j", batch_size=64, actual=10.0, predicted=12.0, constant=5.0)
    assert row.error == pytest.approx(0.2)
    assert row.constant_error == pytest.approx(0.5)


def made_trials(workloads=("a", "b")):
    """Trials that keep their order: who is ahead early ends ahead."""
    epochs = np.arange(1.0, 31.0)
    return [
        StoredRun(
            table="trials/algoperf",
            job=f"trials: {workload} jax {trial}",
            name=f"{trial}",
            epochs=epochs,
            errors=0.02 * (1 + trial) + epochs**-0.8,
        )
        for workload in workloads
        for trial in range(20)
    ]


def test_a_budget_buys_more_where_lost_trials_are_stopped():
    scores = sweep_scores(made_trials(), num_searches=2)["AlgoPerf"]
    for policy, by_budget in scores.items():
        assert list(by_budget) == list(BUDGETS), policy
        regrets = [score.regret for score in by_budget.values()]
        assert min(regrets) >= 0, policy
        assert regrets == sorted(regrets, reverse=True), policy
    # Who is ahead early ends ahead: all of sixteen have run a tenth for less than two whole trials.
    assert scores["ASHA"][4.0].found == scores["Hyperband"][12.0].found == scores[OURS][8.0].found == 1
    assert scores["no stopping"][4.0].found < 1
    assert scores["forerun, stopping"][8.0].regret <= scores["no stopping"][8.0].regret
    assert scores[OURS][4.0].ahead_90 == (0, 0)
    assert scores["no stopping"][4.0].ahead_90[1] > 0


def test_halving_promotes_the_best_third_and_pauses_the_rest():
    from studies.forecast.sweeps import _asha

    epochs = np.arange(1.0, 11.0)
    trials = [
        Curve(name=f"{i}", metric="error", epochs=epochs, values=(1 + i) / epochs, is_rising=False)
        for i in (2, 0, 1)
    ]
    steps = list(_asha(trials))
    assert steps[:4] == [(0, 0.1), (1, 0.1), (2, 0.1), (1, 0.3)]
    assert sorted(steps) == sorted((i, rung) for i in range(3) for rung in (0.1, 0.3, 1.0))


def test_jobs_whose_trials_diverge_tell_of_the_next():
    epochs = np.arange(1.0, 41.0)
    good = 1 / epochs
    bad = np.where(epochs > 30, np.nan, good)
    jobs = {
        f"{family} jax {kind}": [
            Curve(name=f"{i}", metric="loss", epochs=epochs, values=values, is_rising=False) for i in range(6)
        ]
        for family in ("a", "b")
        for kind, values in (("good", good), ("bad", bad))
    }
    score = divergence_score(jobs)
    assert score.ours < 0.5 * score.base
    assert (score.num_looks, score.num_diverged) == (2 * 6 * (6 + 5), 2 * 6 * 5)


def test_the_section_has_every_study_as_a_table(own, made_runs):
    results = cut_results(made_runs)
    summary = summary_of(results)
    cuts = {0.1: 0.5, 0.3: 0.4, 0.5: 0.3, 0.7: 0.2}
    study = ForecastStudy(
        everything=summary,
        known=summary,
        epochs_to_target={"optimus": cuts},
        target_coverage={"curve alone": cuts},
        num_runs={"made": len(made_runs)},
        sweeps=sweep_scores(made_trials(), num_searches=1),
        divergence=DivergenceScore(ours=0.01, base=0.02, num_looks=100, num_diverged=2),
        winning=(0.1, 0.2),
    )
    rows = (BatchRow(job="r", batch_size=16384, actual=47.0, predicted=46.0, constant=35.0),)
    figures = ForecastFigures(
        curves=study, batches=BatchStudy(mlperf=rows, others=rows), system_c=system_c_study(), own=own
    )
    page = forecast_section(figures)
    assert "Optimus" in forecast_summary_row(figures)[2]
    headings = re.findall(r"^### (.*)$", page, re.MULTILINE)
    assert len(headings) == 7
    assert headings[:2] == ["Error of the final value, origins left out", "Coverage of 90 % intervals"]
    for table in re.findall(r"(?:^\|.*\n)+", page, re.MULTILINE):
        assert len({line.count("|") for line in table.splitlines()}) == 1
    assert "nan" not in page


@pytest.mark.reference
def test_mlperf_epochs_at_large_batches():
    folder = reference_folder()
    if folder is None:
        pytest.skip("the public tables were not found")
    from studies.forecast.batch_study import mlperf_rows

    errors = {row.batch_size: row.error for row in mlperf_rows(folder)}
    assert errors[16384] < 0.1
    assert max(errors.values()) < 0.25
    assert all(row.error < row.constant_error for row in mlperf_rows(folder))
