"""The learned prior: what its weights and scale must obey whatever was learned, its file, and its size."""

import json
import time
from dataclasses import replace

import numpy as np
import pytest
from forecaster_contract import prefix

from forerun.base.errors import CostModelError
from forerun.jobs.forecasting.forecaster import Tier
from forerun.jobs.forecasting.prior import (
    CUTS,
    MEMBERS,
    evidence_of,
    load_prior,
    member_paths,
    mixture,
    shipped_prior,
    shipped_prior_path,
    stacked,
)
from studies.forecast.study import prior_document


def evidence(**question):
    found = prefix(**question)
    return evidence_of(found, member_paths(found))


@pytest.mark.parametrize("tier", list(Tier))
@pytest.mark.parametrize("seen", [4, 20, 59])
def test_weights_add_up_and_no_forecast_lies_outside_of_its_members(tier, seen):
    known = evidence(seen=seen)
    forecast, scale, weights = shipped_prior().weigh(known, tier)
    np.testing.assert_allclose(weights.sum(axis=1), 1.0)
    used = np.where(weights > 0, known.ends, np.nan)
    assert np.all(forecast >= np.nanmin(used, axis=1) - 1e-9)
    assert np.all(forecast <= np.nanmax(used, axis=1) + 1e-9)
    assert np.all(scale > 0)


def test_what_a_tier_does_not_know_changes_nothing():
    bare, full = evidence(rates="none"), evidence(rates="cosine")
    for tier in (Tier.CURVE, Tier.HISTORY):
        for one, other in zip(*(shipped_prior().weigh(e, tier) for e in (bare, full)), strict=True):
            np.testing.assert_allclose(one, other)
    assert not np.allclose(*(shipped_prior().weigh(full, t)[0] for t in (Tier.CURVE, Tier.SCHEDULE)))


def test_stacked_runs_get_the_answers_of_each_alone():
    several = [evidence(seed=seed) for seed in range(3)]
    together = shipped_prior().weigh(stacked(several), Tier.HISTORY)
    for index, one in enumerate(several):
        for alone, of_all in zip(shipped_prior().weigh(one, Tier.HISTORY), together, strict=True):
            np.testing.assert_allclose(alone, of_all[index])


def test_a_schedule_has_its_share():
    known = evidence(rates="cosine")
    told, alone = (
        shipped_prior().weigh(known, Tier.SCHEDULE),
        shipped_prior().weigh_alone(known, Tier.SCHEDULE),
    )
    withheld = shipped_prior().weigh(known, Tier.CURVE)
    share = np.interp(known.figures[0, 6], CUTS, shipped_prior().shares)
    np.testing.assert_allclose(told[0], share * alone[0] + (1 - share) * withheld[0])
    mean = (alone[1] + shipped_prior().weigh_alone(known, Tier.CURVE)[1]) / 2
    np.testing.assert_allclose(told[1][:, 0], mean)
    # A schedule may bring less than it promises: the upper side grows with the fall.
    np.testing.assert_allclose(
        told[1][:, 1], np.hypot(mean, 0.5 * np.maximum(known.figures[:, 0] - told[0], 0))
    )


def test_finished_runs_that_agree_are_followed_and_those_that_fell_differently_widen():
    known = evidence(seen=20)
    level = known.figures[:, 0]
    ends = np.where([name.endswith("siblings") for name in MEMBERS], 0.5, 0.9) * level[:, None]

    def answer(spread, scatter):
        figures = known.figures.copy()
        figures[:, 3], figures[:, 5] = spread * level, scatter * level
        return shipped_prior().weigh(replace(known, ends=ends, figures=figures), Tier.HISTORY)

    near, apart = answer(0.001, 0.0), answer(0.5, 0.0)
    np.testing.assert_allclose(near[0], 0.5 * level, rtol=0.01)
    assert np.all(apart[0] > 1.01 * near[0])
    assert np.all(answer(0.001, 0.5)[1] > 2 * near[1])


def test_a_noisy_run_has_a_wider_scale():
    quiet, loud = (mixture(prefix(noise=n), Tier.CURVE, shipped_prior()).scale[-1] for n in (0.002, 0.1))
    assert np.all(loud > quiet)


def test_a_prior_survives_its_file_and_a_damaged_one_is_an_error(tmp_path):
    document = prior_document(shipped_prior(), "made")
    path = tmp_path / "prior.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    for one, other in zip(load_prior(path).layers, shipped_prior().layers, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-3)
    np.testing.assert_array_equal(load_prior(path).shares, shipped_prior().shares)
    for spoiled in (
        {**document, "schema": 9},
        {**document, "shares": [2.0] * 6},
        {**document, "layers": document["layers"][:3]},
        {},
        [],
    ):
        path.write_text(json.dumps(spoiled), encoding="utf-8")
        with pytest.raises(CostModelError, match="install forerun again"):
            load_prior(path)


def test_the_shipped_prior_is_small_and_fast():
    assert shipped_prior_path().stat().st_size < 3e6
    known, prior = evidence(), shipped_prior()
    taken_s = []
    for _ in range(5):
        begin_s = time.process_time()
        prior.weigh(known, Tier.HISTORY)
        taken_s.append(time.process_time() - begin_s)
    assert min(taken_s) < 0.02
    assert len(MEMBERS) == prior.layers[-1].shape[-1] - 1


def test_a_prior_without_an_origin_has_no_trace_of_how_its_runs_ended():
    from dataclasses import replace

    from forerun.jobs.forecasting.backtest import StoredRun, cut_results
    from studies.forecast.fit_prior import fit_priors

    runs = []
    for job in range(3):
        made = prefix(seen=60, seed=job, floor=0.1 + 0.1 * job)
        run = {"epochs": made.epochs, "errors": made.errors, "rates": made.rates}
        runs.append(StoredRun(table="made", job=f"job {job}", name="0", **run))
    results = cut_results(runs)
    spoiled = [replace(r, actual=r.actual / 3) if r.run.job == "job 1" else r for r in results]
    before, after = (fit_priors(these, steps=21) for these in (results, spoiled))
    assert set(before) == {"job 0", "job 1", "job 2", ""}
    np.testing.assert_array_equal(before["job 1"].layers[0], after["job 1"].layers[0])
    assert not np.array_equal(before[""].layers[0], after[""].layers[0])
