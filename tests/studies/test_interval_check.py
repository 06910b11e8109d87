"""Coverage of intervals on groups their law has not seen."""

import numpy as np
import pytest

from studies.optime.interval_check import check_law


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
