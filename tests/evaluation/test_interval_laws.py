"""Interval laws: coverage on groups they have not seen."""

import numpy as np
import pytest

from forerun.fitting.interval_laws import fit_law
from studies.optime.interval_check import check_law


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


def test_coverage_of_unseen_groups():
    random = np.random.default_rng(1)
    groups = np.repeat(["a", "b", "c", "d", "e"], 400)
    residuals = random.normal(scale=0.1, size=2000)
    check = check_law(residuals, np.zeros(2000), groups.tolist())
    assert check.coverage == pytest.approx(0.9, abs=0.03)
    assert check.worst_coverage <= check.coverage


def test_an_odd_group_is_undercovered_and_said_so():
    groups = np.repeat(["a", "b", "c", "odd"], 300)
    residuals = np.where(groups == "odd", 1.0, 0.05) * np.tile([1.0, -1.0], 600)
    check = check_law(residuals, np.zeros(1200), groups.tolist())
    assert check.worst_coverage == 0.0
