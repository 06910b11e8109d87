"""All forecasters under one contract, and what each is for."""

import numpy as np
import pytest
from forecaster_contract import ForecasterContract, power_curve
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.base.errors import UsageError
from forerun.jobs.forecasting import forecaster as forecasters
from forerun.jobs.forecasting.forecaster import (
    FORECASTERS,
    Prefix,
    can_answer,
    forecaster,
    forecaster_names,
    last_value_path,
    path_of,
)
from forerun.jobs.forecasting.laws import felt_rates, fit_optimus, nonnegative_fit

_TESTED = {}


def contract(name, **attributes):
    made = type(f"Test_{name.replace(' ', '_')}", (ForecasterContract,), {"name": name, **attributes})
    _TESTED[name] = made
    return made


TestOptimus = contract("optimus")
TestPow3 = contract("pow3")
TestExp3 = contract("exp3")
TestMmf4 = contract("mmf4")
TestPowerLaw = contract("power law")
TestSmallDrop = contract("annealing 5%")
TestDrop = contract("annealing 20%")
TestLargeDrop = contract("annealing 50%")
TestLogLine = contract("log line")
TestSiblings = contract("siblings", scale_tolerance=0.2)  # its smallest spread is an error of its own
TestScaledSiblings = contract("scaled siblings", scale_tolerance=0.2)  # the ridge is to a scale of one
TestBestSoFar = contract("best so far")
TestLastValue = contract("last value")


def test_every_registered_forecaster_is_under_the_contract():
    assert set(_TESTED) == set(FORECASTERS)


def test_a_name_is_taken_once():
    with pytest.raises(ValueError, match="registered twice"):
        forecaster("optimus")(lambda question: question.epochs)


def test_another_package_can_add_a_forecaster(monkeypatch):
    monkeypatch.setattr(
        forecasters, "plugin_names", lambda group: ["flat"] if group == forecasters.GROUP else []
    )
    monkeypatch.setattr(
        forecasters, "plugin", lambda group, name: last_value_path if name == "flat" else None
    )
    monkeypatch.setattr(forecasters, "FORECASTERS", dict(FORECASTERS))
    assert forecaster_names()[-1] == "flat"
    prefix = Prefix(epochs=np.arange(1.0, 11), errors=np.linspace(1, 0.5, 5))
    assert can_answer("flat", prefix)
    assert path_of("flat", prefix) == pytest.approx(path_of("last value", prefix))
    with pytest.raises(UsageError, match=r"unknown forecaster 'round'; known: .*flat"):
        can_answer("round", prefix)


def test_what_is_missing_is_known_beforehand():
    bare = Prefix(epochs=np.arange(1.0, 11), errors=np.linspace(1, 0.5, 5))
    able = {name for name in FORECASTERS if can_answer(name, bare)}
    unable = set(FORECASTERS) - able
    assert unable == {"annealing 5%", "annealing 20%", "annealing 50%", "siblings", "scaled siblings"}


@settings(max_examples=25, deadline=None)
@given(
    b0=st.floats(0.02, 2.0),
    b1=st.floats(0.8, 3.0),
    b2=st.floats(0.0, 0.4),
)
def test_optimus_is_found_again_from_its_own_curve(b0, b1, b2):
    steps = np.arange(1.0, 41)
    losses = 1 / (b0 * steps + b1) + b2
    fit = fit_optimus(steps, losses)
    later = np.arange(41.0, 81)
    np.testing.assert_allclose(fit.losses(later), 1 / (b0 * later + b1) + b2, atol=0.02 * losses[0])


def test_optimus_published_seq2seq_fit_is_reproduced():
    """Peng et al. 2018, figure 5: b0 = 0.21, b1 = 1.07, b2 = 0.07."""
    steps = np.arange(0.0, 100)
    fit = fit_optimus(steps, 1 / (0.21 * steps + 1.07) + 0.07)
    assert (fit.b0, fit.b1, fit.b2) == pytest.approx((0.21, 1.07, 0.07), rel=1e-3)
    assert fit.steps_to(0.17) == pytest.approx((1 / 0.1 - 1.07) / 0.21, rel=1e-2)
    assert fit.steps_to(0.01) == float("inf")
    assert fit.steps_to(2.0) == 0.0


def test_optimus_is_recovered_from_noisy_step_logs_as_by_curve_fit():
    """Hundred logs with noise of 0.02 around (0.0065, 0.6, 0.53): as near to the truth, and to the points, as scipy."""
    from scipy.optimize import curve_fit

    truth, steps = np.asarray([0.0065, 0.6, 0.53]), np.arange(1.0, 501)

    def law(k, b0, b1, b2):
        return 1 / (b0 * k + b1) + b2

    ours, theirs, stated = [], [], []
    for seed in range(100):
        losses = law(steps, *truth) + np.random.default_rng(seed).normal(0, 0.02, len(steps))
        fit = fit_optimus(steps, losses)
        found, covariance = curve_fit(law, steps, losses, p0=(0.01, 1.0, 0.1), bounds=(0, np.inf))
        residuals = [np.sum((values - losses) ** 2) for values in (fit.losses(steps), law(steps, *found))]
        assert residuals[0] <= residuals[1] * (1 + 1e-4)
        ours.append((fit.b0, fit.b1, fit.b2))
        theirs.append(found)
        stated.append(fit.deviations / np.sqrt(np.diag(covariance)))
    misses = [np.abs(np.asarray(found) / truth - 1).mean(axis=0) for found in (ours, theirs)]
    assert np.all(misses[0] <= misses[1] * 1.01)
    np.testing.assert_allclose(np.mean(ours, axis=0), truth, rtol=0.02)
    np.testing.assert_allclose(stated, 1.0, rtol=0.05)


def test_the_floor_of_optimus_may_lie_above_the_lowest_of_noisy_points():
    steps = np.arange(1.0, 2001)
    losses = 1 / (0.05 * steps + 0.6) + 0.5 + np.random.default_rng(3).normal(0, 0.05, len(steps))
    fit = fit_optimus(steps, losses)
    assert fit.b2 > losses.min()
    assert fit.b2 == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize("losses", [[0.4] * 10, np.linspace(1, 2, 10), [3.0, 1.0]])
def test_optimus_answers_where_nothing_falls_or_little_is_known(losses):
    losses = np.asarray(losses, dtype=float)
    fit = fit_optimus(np.arange(1.0, len(losses) + 1), losses)
    assert np.all(np.isfinite(fit.losses(np.arange(1.0, 30))))
    assert min(fit.b0, fit.b1, fit.b2) >= 0
    if len(losses) > 2:
        assert fit.losses(np.asarray([50.0]))[0] == pytest.approx(losses.mean(), rel=1e-6)


def test_pow3_is_exact_on_a_power_law():
    epochs, errors = power_curve(80, 0.12, 0.5)
    path = path_of("pow3", Prefix(epochs=epochs, errors=errors[:20]))
    np.testing.assert_allclose(path, errors, rtol=1e-3)


def test_a_line_in_logarithmic_time_is_exact_on_one():
    epochs = np.arange(1.0, 41)
    errors = 0.9 - 0.1 * np.log(epochs)
    path = path_of("log line", Prefix(epochs=epochs, errors=errors[:10]))
    np.testing.assert_allclose(path, errors, rtol=1e-9)


def test_annealing_sees_a_drop_of_the_rate_that_others_do_not():
    num, milestone = 90, 30
    epochs = np.arange(1.0, num + 1)
    rates = np.where(epochs <= milestone, 1.0, 0.1)
    errors = 0.2 + 0.6 * np.cumsum(rates) ** -0.5 + 0.2 * rates
    question = Prefix(epochs=epochs, errors=errors[:25], rates=rates)
    assert abs(path_of("annealing 50%", question)[-1] - errors[-1]) < 0.06
    assert path_of("optimus", question)[-1] - errors[-1] > 0.06


def test_after_the_drop_the_annealing_law_needs_no_prior():
    epochs = np.arange(1.0, 91)
    rates = np.where(epochs <= 30, 1.0, np.where(epochs <= 60, 0.1, 0.01))
    errors = 0.1 + 0.6 * np.cumsum(rates) ** -0.5 + 0.05 * rates
    question = Prefix(epochs=epochs, errors=errors[:45], rates=rates)
    assert path_of("annealing 20%", question)[-1] == pytest.approx(errors[-1], abs=0.03)


def test_a_drop_brings_what_its_kind_of_task_says_until_the_run_has_shown_it():
    epochs = np.arange(1.0, 91)
    rates = np.where(epochs <= 60, 1.0, 0.1)
    errors = 0.6 + 0.4 * epochs**-0.5
    ends = []
    for name in ("annealing 5%", "annealing 50%"):
        question = Prefix(epochs=epochs, errors=errors[:40], rates=rates)
        ends.append(path_of(name, question)[-1])
        after = Prefix(epochs=epochs, errors=errors[:85], rates=rates)
        assert path_of(name, after)[-1] == pytest.approx(errors[-1], abs=0.02)
    assert ends[0] == pytest.approx(errors[-1], abs=0.05)
    assert ends[1] < ends[0] - 0.15


def test_at_a_constant_rate_the_annealing_law_is_a_power_law():
    epochs, errors = power_curve(80, 0.12, 0.5, 0.01)
    question = Prefix(epochs=epochs, errors=errors[:30], rates=np.ones(80))
    assert path_of("annealing 20%", question)[-1] == pytest.approx(errors[-5:].mean(), abs=0.03)


def test_the_latest_points_decide_where_a_power_law_ends():
    epochs = np.arange(1.0, 101)
    errors = np.where(epochs < 20, 1.0, 0.3 + 0.5 * (epochs / 20) ** -0.5)  # a flat stretch first
    path = path_of("power law", Prefix(epochs=epochs, errors=errors[:60]))
    assert path[-1] == pytest.approx(errors[-1], abs=0.05)


def test_felt_rates_lag_and_arrive():
    rates = np.where(np.arange(100) < 50, 1.0, 0.0)
    felt = felt_rates(np.arange(1.0, 101), rates, 5.0)
    assert felt[49] == pytest.approx(1.0)
    assert felt[54] == pytest.approx(np.exp(-1), rel=1e-6)
    assert felt[-1] < 1e-4


def test_a_sibling_that_is_the_run_itself_is_followed():
    epochs, errors = power_curve(60, 0.1, noise=0.02)
    question = Prefix(epochs=epochs, errors=errors[:12], siblings=np.stack([errors]))
    assert path_of("siblings", question)[-1] == pytest.approx(errors[-1], abs=1e-9)


def test_siblings_keep_a_distance_that_siblings_show_to_last():
    epochs, errors = power_curve(60, 0.2)
    family = np.stack([errors + shift for shift in (-0.1, -0.05, 0.0, 0.05, 0.1)])
    question = Prefix(epochs=epochs, errors=errors[:30] + 0.08, siblings=family)
    assert path_of("siblings", question)[-1] - errors[-1] == pytest.approx(0.08, abs=0.03)


def test_siblings_forget_a_distance_that_siblings_show_to_vanish():
    epochs, errors = power_curve(60, 0.2)
    fade = np.exp(-epochs / 8)
    family = np.stack([errors + shift * fade for shift in (-0.1, -0.05, 0.0, 0.05, 0.1)])
    question = Prefix(epochs=epochs, errors=errors[:10] + 0.08 * fade[:10], siblings=family)
    assert path_of("siblings", question)[-1] - errors[-1] == pytest.approx(0.0, abs=0.01)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), columns=st.integers(1, 3))
def test_closed_form_agrees_with_scipy(seed, columns):
    from scipy.optimize import nnls

    rng = np.random.default_rng(seed)
    matrix, wanted = rng.normal(size=(12, columns)), rng.normal(size=12)
    solved, loss = nonnegative_fit(matrix[None], wanted)
    _, residual = nnls(matrix, wanted)
    assert np.all(solved >= 0)
    assert loss[0] == pytest.approx(residual**2, rel=1e-6, abs=1e-9)
