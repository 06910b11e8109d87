"""All forecasters under one contract, and what each is for."""

import numpy as np
import pytest
from forecaster_contract import ForecasterContract, power_curve, prefix
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.convergence import mixture  # registers all of them
from forerun.convergence.annealing import felt_rates
from forerun.convergence.forecaster import FORECASTERS, Prefix, can_answer, forecaster, path_of
from forerun.convergence.nonnegative import nonnegative_fit
from forerun.convergence.optimus import fit_optimus

assert mixture.REGISTERED

_TESTED = {}


def contract(name, **attributes):
    made = type(f"Test_{name.replace(' ', '_')}", (ForecasterContract,), {"name": name, **attributes})
    _TESTED[name] = made
    return made


TestOptimus = contract("optimus", flat_floor=0.0)
TestPow3 = contract("pow3", flat_floor=0.0)
TestPow4 = contract("pow4", flat_floor=0.0)
TestExp3 = contract("exp3", flat_floor=0.0)
TestWeibull4 = contract("weibull4", flat_floor=0.0)
TestMmf4 = contract("mmf4", flat_floor=0.0)
TestAnnealing = contract("annealing", flat_floor=0.0, scale_tolerance=1e-3)
TestSiblings = contract("siblings", scale_tolerance=0.2)  # its smallest spread is an error of its own
TestScaledSiblings = contract("scaled siblings", scale_tolerance=0.2)  # the ridge is to a scale of one
TestStoredFalls = contract("stored falls")
TestBestSoFar = contract("best so far")
TestPlateau = contract("plateau")
TestLastValue = contract("last value")


def test_every_registered_forecaster_is_under_the_contract():
    assert set(_TESTED) == set(FORECASTERS)


def test_a_name_is_taken_once():
    with pytest.raises(ValueError, match="registered twice"):
        forecaster("optimus")(lambda question: question.epochs)


def test_what_is_missing_is_known_beforehand():
    bare = Prefix(epochs=np.arange(1.0, 11), errors=np.linspace(1, 0.5, 5))
    able = {name for name in FORECASTERS if can_answer(name, bare)}
    assert able == set(FORECASTERS) - {"annealing", "siblings", "scaled siblings", "stored falls"}


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
    fit = fit_optimus(steps, 1 / (0.21 * steps + 1.07) + 0.07, with_published_weights=False)
    assert (fit.b0, fit.b1, fit.b2) == pytest.approx((0.21, 1.07, 0.07), rel=0.05)
    assert fit.steps_to(0.17) == pytest.approx((1 / 0.1 - 1.07) / 0.21, rel=0.1)
    assert fit.steps_to(0.01) == float("inf")
    assert fit.steps_to(2.0) == 0.0


def test_pow3_is_exact_on_a_power_law():
    epochs, errors = power_curve(80, 0.12, 0.5)
    path = path_of("pow3", Prefix(epochs=epochs, errors=errors[:20]))
    np.testing.assert_allclose(path, errors, rtol=1e-3)


def test_annealing_sees_a_drop_of_the_rate_that_others_do_not():
    num, milestone = 90, 30
    epochs = np.arange(1.0, num + 1)
    rates = np.where(epochs <= milestone, 1.0, 0.1)
    errors = 0.2 + 0.6 * np.cumsum(rates) ** -0.5 + 0.2 * rates
    question = Prefix(epochs=epochs, errors=errors[:25], rates=rates)
    assert abs(path_of("annealing", question)[-1] - errors[-1]) < 0.06
    assert path_of("optimus", question)[-1] - errors[-1] > 0.06


def test_after_the_drop_the_annealing_law_needs_no_prior():
    epochs = np.arange(1.0, 91)
    rates = np.where(epochs <= 30, 1.0, np.where(epochs <= 60, 0.1, 0.01))
    errors = 0.1 + 0.6 * np.cumsum(rates) ** -0.5 + 0.05 * rates
    question = Prefix(epochs=epochs, errors=errors[:45], rates=rates)
    assert path_of("annealing", question)[-1] == pytest.approx(errors[-1], abs=0.03)


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


def test_stored_falls_promise_no_rise_and_end_where_the_run_ends():
    question = prefix(30)
    path = path_of("stored falls", question)
    assert np.all(np.diff(path[30:]) <= 1e-12)
    assert path[-1] <= question.plateau


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
