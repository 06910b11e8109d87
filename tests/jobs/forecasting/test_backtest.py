"""Back-tests on made runs: nobody is judged by what it has seen, and figures survive a file."""

import numpy as np
import pytest
from forecaster_contract import power_curve

from forerun.base.errors import CostModelError
from forerun.jobs.forecasting.backtest import (
    StoredRun,
    cut_results,
    leave_origins_out,
    mean_of_origins,
    summarise,
    summary_of,
    tier_results,
)
from forerun.jobs.forecasting.backtest_table import (
    LEVELS,
    load_table,
    save_table,
    shipped_table_path,
    weighted_quantiles,
)
from forerun.jobs.forecasting.curve import without_outliers
from forerun.jobs.forecasting.forecaster import Prefix, Tier, sibling_trust
from forerun.jobs.forecasting.prior import CUTS, mixture, shipped_prior


def told(results):
    """Results in every tier, by the prior that comes with the package."""
    return tier_results(results, lambda origin: shipped_prior())


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
        seen = round(60 * result.cut)
        assert result.prefix.num_seen == seen
        np.testing.assert_array_equal(result.prefix.errors, without_outliers(result.run.errors[:seen])[0])


def test_what_comes_after_the_cut_changes_no_forecast_of_the_run_itself():
    runs = made_runs(num_jobs=1)
    other = made_runs(num_jobs=1)
    changed = fields(other[0])
    changed["errors"] = np.concatenate([runs[0].errors[:30], runs[0].errors[30:] * 0.5])
    other[0] = StoredRun(**changed)
    before = {(r.cut): r for r in cut_results(runs) if r.run.name == runs[0].name}
    after = {(r.cut): r for r in cut_results(other) if r.run.name == runs[0].name}
    for cut in (0.1, 0.2, 0.3, 0.5):
        for name in before[cut].paths:
            np.testing.assert_allclose(before[cut].paths[name], after[cut].paths[name])
        np.testing.assert_array_equal(before[cut].evidence.features, after[cut].evidence.features)
    assert before[0.5].actual[-1] != pytest.approx(after[0.5].actual[-1])


def test_an_origin_left_out_leaves_no_trace_in_the_table(results):
    spoiled = [
        StoredRun(**{**fields(run), "errors": run.errors[::-1].copy()}) if run.job == "job 1" else run
        for run in made_runs()
    ]
    tables = [summarise(told(these), {}, without_origin="job 1") for these in (results, cut_results(spoiled))]
    assert tables[0].summaries.keys() == tables[1].summaries.keys()
    for key, summary in tables[0].summaries.items():
        other = tables[1].summaries[key]
        assert summary.num_origins == other.num_origins
        np.testing.assert_allclose(summary.quantiles, other.quantiles)


def test_origins_weigh_alike_whatever_the_number_of_their_runs():
    runs = made_runs(num_jobs=3, num_runs=2)
    values = [(run, 1.0 if run.job == "job 0" else 0.0) for run in [runs[0]] * 50 + runs]
    assert mean_of_origins(values) == pytest.approx(1 / 3)


def test_every_run_is_held_out_in_every_tier_it_has_the_data_for(results):
    held = leave_origins_out(results)
    with_rates = sum(r.run.rates is not None for r in results)
    assert sum(h.tier is Tier.SCHEDULE for h in held) == with_rates
    assert sum(h.tier is Tier.HISTORY for h in held) == len(results)
    assert sum(h.tier is Tier.CURVE for h in held) == len(results)
    assert all(h.ends[0] <= h.ends[2] <= h.ends[3] <= h.ends[1] for h in held)


def test_siblings_beat_everything_on_jobs_whose_runs_are_alike(results):
    found = summary_of(results)
    for cut in (0.1, 0.2, 0.3):
        assert found.errors["siblings"][cut] < found.errors["best so far"][cut] / 2
        assert found.mixture_errors["history"][cut] < found.errors["best so far"][cut]
    assert set(found.coverage_90) == {"history", "schedule", "curve alone"}


def test_a_table_survives_its_file(results, tmp_path):
    table = summarise(told(results), {"source": "made"})
    path = tmp_path / "table.json"
    save_table(table, path)
    again = load_table(path)
    assert again.summaries.keys() == table.summaries.keys()
    np.testing.assert_allclose(again.quantiles(Tier.CURVE, 0.4), table.quantiles(Tier.CURVE, 0.4), atol=1e-3)
    assert again.provenance == {"source": "made"}
    assert again.summaries[Tier.CURVE, 0.3].num_origins == 5


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
    assert table.provenance["num_runs"] >= 600
    assert table.provenance["num_origins"] >= 14
    assert "date" in table.provenance
    for tier in Tier:
        for cut in CUTS:
            quantiles = table.quantiles(tier, cut)
            assert np.all(np.diff(quantiles, axis=1) >= 0)
    assert shipped_table_path().stat().st_size < 100_000


def test_quantiles_of_many_origins_are_those_of_their_scores():
    scores = np.linspace(-1, 1, 200)[:, None]
    found = weighted_quantiles(scores, [(f"{i % 20}", "a") for i in range(200)], LEVELS)
    np.testing.assert_allclose(found[0], 2 * np.asarray(LEVELS) - 1, atol=0.05)


def test_origins_and_their_jobs_weigh_alike_in_quantiles():
    scores = np.concatenate([np.zeros(900), np.ones(100)])[:, None] + np.linspace(0, 1e-3, 1000)[:, None]
    places = [("many", "a")] * 900 + [("few", "b")] * 50 + [("few", "c")] * 50
    found = dict(zip(LEVELS, weighted_quantiles(scores, places, LEVELS)[0], strict=True))
    assert found[0.4] < 0.1
    assert found[0.6] > 0.9


def test_the_unknown_next_run_widens_both_tails_where_origins_are_few():
    scores = np.linspace(-1, 1, 1000)[:, None]
    wide = weighted_quantiles(scores, [(f"{i % 4}", "a") for i in range(1000)], LEVELS)[0]
    narrow = weighted_quantiles(scores, [(f"{i % 100}", "a") for i in range(1000)], LEVELS)[0]
    assert wide[1] < narrow[1]
    assert wide[-2] > narrow[-2]


def test_finished_runs_that_are_unlike_lose_their_say():
    epochs, errors = power_curve(60, 0.2, noise=0.01)
    alike, unlike = (
        Prefix(epochs=epochs, errors=errors[:20], siblings=np.stack([errors + shift]))
        for shift in (0.005, 0.6)
    )
    assert sibling_trust(alike) > 0.95
    assert sibling_trust(unlike) < 0.25
    found = mixture(unlike, Tier.HISTORY, shipped_prior())
    assert found.errors[-1] == pytest.approx(errors[-5:].mean(), abs=0.15)
    assert np.all(found.scale[-1] > mixture(alike, Tier.HISTORY, shipped_prior()).scale[-1])


def test_shipped_intervals_held_on_origins_left_out():
    coverage = load_table(shipped_table_path()).provenance["coverage_90"]
    assert set(coverage) == {str(tier) for tier in Tier}
    for of_tier in coverage.values():
        assert set(of_tier) == {f"{cut:g}" for cut in CUTS}
        assert all(0.85 <= covered <= 0.97 for covered in of_tier.values())
