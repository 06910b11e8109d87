"""A device known from a few steps: Bayes' rule on planted truths."""

from __future__ import annotations

from dataclasses import astuple, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.cost.time.correction import PriorScales
from forerun.cost.time.evidence import REPEAT_NOISE
from forerun.graph.graph import OpClass
from studies.optime.studies import condition, fit_scales, information_order

NUM_COLUMNS = 6 + len(OpClass)


SCALES = PriorScales()
VARIANCES = SCALES.variances()[:NUM_COLUMNS]


def random_rows(num_steps, seed=0):
    """Rows as ``sensitivities`` makes them: shares between zero and one."""
    random = np.random.default_rng(seed)
    device = random.uniform(0.2, 1, num_steps)
    compute = random.uniform(0, 1, num_steps)
    classes = random.dirichlet(np.full(len(OpClass), 0.2), num_steps)
    added, short = random.uniform(0, 0.5, (2, num_steps))
    shared = [np.ones(num_steps), device * compute, device * (1 - compute), 1 - device, added, device * short]
    return np.column_stack([*shared, device[:, None] * classes])


def draw(rows, scales, seed):
    """Residuals of one device: corrections from the prior, and noise."""
    random = np.random.default_rng(seed)
    corrections = random.normal(0, np.sqrt(scales.variances()[: rows.shape[1]]))
    return rows @ corrections + random.normal(0, scales.noise, len(rows))


def choose_steps(rows, candidates, num_steps, scales):
    """The greedy choice by its definition: each next step lowers the summed posterior variance over all rows most."""
    chosen = []
    for _ in range(min(num_steps, len(candidates))):
        open_ones = [i for i in candidates if i not in chosen]
        nothing = np.zeros(len(chosen) + 1)
        sums = [(condition(rows, [*chosen, i], nothing, scales).deviation ** 2).sum() for i in open_ones]
        chosen.append(open_ones[int(np.argmin(sums))])
    return chosen


def test_nothing_measured_leaves_the_prior():
    rows = random_rows(20)
    posterior = condition(rows, [], np.array([]), SCALES)
    assert not posterior.mean.any()
    variance = (rows**2) @ VARIANCES + SCALES.noise**2
    np.testing.assert_allclose(posterior.deviation, np.sqrt(variance))


def test_many_exact_measurements_recover_what_was_planted():
    rows = random_rows(400)
    truth = np.random.default_rng(1).normal(0, np.sqrt(VARIANCES))
    measured = list(range(350))
    exact = replace(SCALES, noise=1e-3)
    posterior = condition(rows, measured, rows[:350] @ truth, exact)
    np.testing.assert_allclose(posterior.mean[350:], rows[350:] @ truth, atol=0.01)
    assert (posterior.deviation[350:] < 0.02).all()


def test_one_measurement_of_an_overall_factor_moves_all_steps():
    rows = np.zeros((3, NUM_COLUMNS))
    rows[:, 0] = 1.0
    scales = PriorScales(overall=0.2, noise=0.1)
    posterior = condition(rows, [0], np.array([0.3]), scales)
    np.testing.assert_allclose(posterior.mean[1:], 0.3 * 0.04 / (0.04 + 0.01))
    np.testing.assert_allclose(posterior.deviation[1:] ** 2, 0.04 - 0.04**2 / 0.05 + 0.01)


def test_the_run_that_was_measured_is_predicted_as_it_was_measured_and_more_surely():
    rows = random_rows(12, 5)
    residuals = draw(rows, SCALES, 5)
    before = condition(rows, [], np.array([]), SCALES)
    after = condition(rows, [4], residuals[4:5], SCALES)
    assert abs(residuals[4] - after.mean[4]) < 0.03
    assert after.deviation[4] < 0.25 * before.deviation[4]


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 1000), st.integers(0, 12))
def test_a_measurement_never_adds_uncertainty(seed, num_measured):
    rows = random_rows(15, seed)
    residuals = draw(rows, SCALES, seed)
    prior = condition(rows, [], np.array([]), SCALES).deviation
    measured = list(range(num_measured))
    posterior = condition(rows, measured, residuals[:num_measured], SCALES)
    assert (posterior.deviation <= prior + 1e-9).all()
    assert (posterior.deviation[num_measured:] >= SCALES.noise - 1e-9).all()
    assert (posterior.deviation >= REPEAT_NOISE - 1e-9).all()
    more = condition(rows, [*measured, 13], residuals[[*measured, 13]], SCALES)
    assert (more.deviation <= posterior.deviation + 1e-9).all()


def test_posterior_intervals_cover_what_they_claim():
    hits = []
    for seed in range(60):
        rows = random_rows(25, seed)
        residuals = draw(rows, SCALES, 1000 + seed)
        posterior = condition(rows, [0, 1, 2, 3, 4], residuals[:5], SCALES)
        hits.extend(np.abs(residuals - posterior.mean)[5:] <= 1.645 * posterior.deviation[5:])
    assert np.mean(hits) == pytest.approx(0.9, abs=0.04)


def test_the_chosen_steps_are_the_telling_ones():
    # Ten copies of one step, and one step of another kind.
    rows = np.zeros((11, NUM_COLUMNS))
    rows[:10, 1] = 1.0
    rows[10, 2] = 1.0
    scales = PriorScales(compute=0.3, memory=0.3, noise=0.02)
    chosen = choose_steps(rows, list(range(11)), 2, scales)
    assert chosen[0] in range(10)
    assert chosen[1] == 10


def test_chosen_steps_beat_the_worst_ones():
    rows = random_rows(30, 3)
    candidates = list(range(30))
    chosen = choose_steps(rows, candidates, 4, SCALES)
    assert len(set(chosen)) == 4

    def remaining(steps):
        return (condition(rows, steps, np.zeros(len(steps)), SCALES).deviation ** 2).sum()

    random = np.random.default_rng(0)
    others = [remaining(list(random.choice(30, 4, replace=False))) for _ in range(40)]
    assert remaining(chosen) <= min(others) * 1.02


@pytest.mark.parametrize("num_steps", [0, 2, 5])
def test_no_more_steps_are_chosen_than_there_are(num_steps):
    chosen = choose_steps(random_rows(5), [1, 3], num_steps, SCALES)
    assert len(chosen) == min(num_steps, 2)
    assert set(chosen) <= {1, 3}


def test_scales_are_recovered_roughly():
    planted = PriorScales(overall=0.3, compute=0.1, memory=0.1, host=0.3, op_class=0.1, noise=0.05)
    groups = [(random_rows(40, seed), None) for seed in range(25)]
    groups = [(rows, draw(rows, planted, 100 + seed)) for seed, (rows, _) in enumerate(groups)]
    found = fit_scales(groups)
    assert found.noise == pytest.approx(planted.noise, rel=0.3)
    assert 0.18 < found.overall < 0.45
    for ours, theirs in zip(astuple(found), astuple(planted), strict=True):
        assert theirs / 4 < ours < theirs * 4


@pytest.mark.parametrize("seed", range(4))
def test_the_order_of_information_is_that_of_the_greedy_choice(seed):
    rows = random_rows(15, seed)
    order = information_order(rows, np.ones(15), SCALES)
    assert order[:8] == choose_steps(rows, range(15), 8, SCALES)
    assert sorted(order) == list(range(15))


def test_what_takes_little_time_is_measured_earlier():
    rows = random_rows(12)
    last = information_order(rows, np.ones(12), SCALES)[-1]
    cost_s = np.where(np.arange(12) == last, 1e-6, 1.0)
    assert information_order(rows, cost_s, SCALES)[0] == last


def test_a_step_that_repeats_another_comes_last():
    rows = random_rows(6)
    rows = np.vstack([rows, rows[:1]])
    order = information_order(rows, np.ones(7), replace(SCALES, noise=1e-3))
    assert order.index(6) == 6 or order.index(0) == 6
