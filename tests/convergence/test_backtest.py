"""Back-tests on made runs: nobody is judged by what it has seen, and figures survive a file."""

import numpy as np
import pytest
from forecaster_contract import power_curve

from forerun.convergence.backtest import (
    StoredRun,
    cut_results,
    mean_errors,
    points_seen,
    summarise,
)
from forerun.convergence.backtest_summary import summary_of
from forerun.convergence.backtest_table import (
    LEVELS,
    load_table,
    save_table,
    shipped_table_path,
    weighted_quantiles,
)
from forerun.convergence.held_out import leave_jobs_out
from forerun.convergence.mixture import PRIORS, Tier, member_weights
from forerun.convergence.stored_falls import CUTS
from forerun.errors import CostModelError


def made_runs(num_jobs=5, num_runs=3, num=60):
    found = []
    for job in range(num_jobs):
        for seed in range(num_runs):
            epochs, errors = power_curve(num, 0.05 + 0.05 * job, 0.4 + 0.08 * job, 0.02, seed + 100 * job)
            rates = np.linspace(1, 0.02, num) if job < 3 else None
            run = StoredRun(
                table="made", job=f"job {job}", name=f"{job}-{seed}", epochs=epochs, errors=errors
            )
            found.append(run if rates is None else StoredRun(**{**fields(run), "rates": rates}))
    return found


def fields(run):
    return {name: getattr(run, name) for name in run.__slots__}


@pytest.fixture(scope="module")
def results():
    return cut_results(made_runs())


def test_a_forecaster_sees_only_what_came_before_the_cut(results):
    for result in results:
        seen = points_seen(60, result.cut)
        assert result.prefix.num_seen == seen
        np.testing.assert_array_equal(result.prefix.errors, result.run.errors[:seen])


def test_what_comes_after_the_cut_changes_no_forecast_of_the_run_itself():
    runs = made_runs()
    other = made_runs()
    changed = fields(other[0])
    changed["errors"] = np.concatenate([runs[0].errors[:30], runs[0].errors[30:] * 0.5])
    other[0] = StoredRun(**changed)
    before = {(r.cut): r for r in cut_results(runs) if r.run.name == runs[0].name}
    after = {(r.cut): r for r in cut_results(other) if r.run.name == runs[0].name}
    for cut in (0.1, 0.2, 0.3, 0.5):
        for name in before[cut].paths:
            np.testing.assert_allclose(before[cut].paths[name], after[cut].paths[name])
    assert before[0.5].actual[-1] != pytest.approx(after[0.5].actual[-1])


def test_a_job_left_out_leaves_no_trace_in_the_table():
    runs = made_runs()
    spoiled = [
        StoredRun(**{**fields(run), "errors": run.errors * 3}) if run.job == "job 1" else run for run in runs
    ]
    tables = []
    for these in (runs, spoiled):
        kept = cut_results(these)
        tables.append(summarise(kept, mean_errors(kept), {}, without_job="job 1"))
    for key, summary in tables[0].summaries.items():
        for name in PRIORS[key[0]]:
            if name in summary.errors and name != "stored falls":  # its fit for other jobs has seen job 1
                assert tables[1].summaries[key].errors[name] == pytest.approx(summary.errors[name])
    np.testing.assert_allclose(tables[0].fall_coefficients, tables[1].fall_coefficients)


def test_every_run_is_held_out_in_every_tier_it_has_the_data_for(results):
    held = leave_jobs_out(results)
    with_rates = sum(r.run.rates is not None for r in results)
    assert sum(h.tier is Tier.SCHEDULE for h in held) == with_rates
    assert sum(h.tier is Tier.HISTORY for h in held) == len(results)
    assert sum(h.tier is Tier.CURVE for h in held) == len(results)
    assert all(h.low_90 <= h.low_80 <= h.high_80 <= h.high_90 for h in held)


def test_siblings_beat_everything_on_jobs_whose_runs_are_alike(results):
    found = summary_of(results)
    for cut in (0.1, 0.2, 0.3):
        assert found.errors["siblings"][cut] < found.errors["best so far"][cut] / 2
        assert found.mixture_errors["history"][cut] < found.errors["best so far"][cut]
    assert set(found.coverage_90) == {"history", "schedule", "curve alone"}


def test_a_table_survives_its_file(results, tmp_path):
    table = summarise(results, mean_errors(results), {"source": "made"})
    path = tmp_path / "table.json"
    save_table(table, path)
    again = load_table(path)
    assert again.summaries.keys() == table.summaries.keys()
    np.testing.assert_allclose(again.quantiles(Tier.CURVE, 0.4), table.quantiles(Tier.CURVE, 0.4), atol=1e-3)
    assert again.provenance == {"source": "made"}


@pytest.mark.parametrize("content", ["", "{}", '{"schema": 99, "levels": []}', "[1]"])
def test_a_damaged_table_is_an_error(tmp_path, content):
    path = tmp_path / "table.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(CostModelError, match="--save FILE"):
        load_table(path)
    with pytest.raises(CostModelError, match="back-test figures"):
        load_table(tmp_path / "none.json")


def test_the_shipped_table_says_where_it_comes_from():
    table = load_table(shipped_table_path())
    assert table.provenance["num_runs"] >= 200
    assert table.provenance["num_jobs"] >= 30
    assert "date" in table.provenance
    for tier in Tier:
        for cut in CUTS:
            quantiles = table.quantiles(tier, cut)
            assert np.all(np.diff(quantiles, axis=1) >= 0)
    assert shipped_table_path().stat().st_size < 100_000


def test_quantiles_of_one_job_are_those_of_its_scores():
    scores = np.linspace(-1, 1, 201)[:, None]
    found = weighted_quantiles(scores, ["a"] * 201, LEVELS)
    np.testing.assert_allclose(found[0], 2 * np.asarray(LEVELS) - 1, atol=0.02)


def test_a_job_of_nine_times_the_runs_weighs_three_times_as_much():
    scores = np.concatenate([np.zeros(900), np.ones(100)])[:, None] + np.linspace(0, 1e-3, 1000)[:, None]
    found = weighted_quantiles(scores, ["many"] * 900 + ["few"] * 100, LEVELS)
    by_level = dict(zip(LEVELS, found[0], strict=True))
    assert by_level[0.7] < 0.1
    assert by_level[0.8] > 0.9


def test_the_unknown_next_run_widens_both_tails():
    few, many = np.linspace(-1, 1, 11)[:, None], np.linspace(-1, 1, 1001)[:, None]
    wide = weighted_quantiles(few, ["a"] * 11, LEVELS)[0]
    narrow = weighted_quantiles(many, ["a"] * 1001, LEVELS)[0]
    assert wide[1] < narrow[1]
    assert wide[-2] > narrow[-2]


def test_weights_add_up_and_follow_the_errors():
    names = list(PRIORS[Tier.SCHEDULE])
    good = member_weights(names, Tier.SCHEDULE, {"annealing": 0.01, "plateau": 0.1, "stored falls": 0.1})
    bad = member_weights(names, Tier.SCHEDULE, {"annealing": 0.2, "plateau": 0.1, "stored falls": 0.1})
    assert sum(good.values()) == pytest.approx(1)
    assert good["annealing"] > bad["annealing"]
    unknown = member_weights(names, Tier.SCHEDULE, {})
    assert unknown["annealing"] == pytest.approx(0.6)
