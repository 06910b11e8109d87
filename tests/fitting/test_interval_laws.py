"""Interval laws: coverage on groups they have not seen."""

import numpy as np
import pytest

from forerun.fitting.interval_laws import fit_law


def test_quantile_of_known_residuals():
    residuals = np.linspace(0.0, 1.0, 999)
    law = fit_law(residuals, np.zeros(999), ["a"] * 999)
    assert law.quantile * law.base == pytest.approx(0.9, abs=0.01)


def test_spread_is_used_when_it_tells_the_error():
    random = np.random.default_rng(0)
    spread = random.uniform(0.0, 0.5, 4000)
    residuals = random.normal(size=4000) * (0.02 + spread)
    law = fit_law(residuals, spread, ["a"] * 4000)
    assert law.slope > 0
    inside = np.abs(residuals) <= law.half_widths(spread)
    assert inside.mean() == pytest.approx(0.9, abs=0.01)
