"""Remaining epochs from a curve: published coefficients, and forecasts that get better."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.jobs.forecasting.laws import fit_optimus
from studies.schedule.applications import CurveForecast


def losses(b0, b1, b2, epochs):
    return [1 / (b0 * k + b1) + b2 for k in range(1, epochs + 1)]


def test_the_published_fit_of_seq2seq():
    # Optimus, section 3.1: b0 = 0.21, b1 = 1.07, b2 = 0.07.
    curve = fit_optimus(np.arange(1.0, 41), np.asarray(losses(0.21, 1.07, 0.07, 40)))
    assert (curve.b0, curve.b1, curve.b2) == pytest.approx((0.21, 1.07, 0.07), rel=1e-3)
    assert curve.steps_to(1 / (0.21 * 60 + 1.07) + 0.07) == pytest.approx(60, rel=1e-3)
    assert curve.steps_to(0.07) == pytest.approx(float("inf"))


@given(b0=st.floats(0.05, 0.5), b1=st.floats(0.8, 1.5), share=st.floats(0.0, 0.8))
def test_a_fit_finds_the_curve_it_was_made_from(b0, b1, share):
    seen = losses(b0, b1, 0.0, 20)
    b2 = share * seen[-1] / (1 - share)
    values = [value + b2 for value in seen]
    found = fit_optimus(np.arange(1.0, 21), np.asarray(values))
    ahead = 1 / (b0 * 40 + b1) + b2
    assert found.losses(np.asarray([40.0]))[0] == pytest.approx(ahead, rel=0.05)


def test_a_forecast_starts_from_what_was_stated_and_comes_to_the_truth():
    curve = losses(0.2, 1.0, 0.05, 30)
    forecast = CurveForecast.from_curve(curve, curve[-1], stated_epochs=60, samples_per_epoch=100.0)
    assert forecast(0.0) == pytest.approx(6000.0)
    assert forecast(1000.0) == pytest.approx(2000.0, rel=0.2)
    assert 0 < forecast(3000.0) <= 100.0
    assert forecast(99_999.0) > 0
