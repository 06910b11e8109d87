from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.interpolate import PchipInterpolator

from forerun.base.errors import InvalidSetupError
from forerun.base.numerics import fit_relative, monotone_cubic, relative_coefficients


@given(st.integers(0, 2**32 - 1), st.integers(3, 16))
def test_monotone_cubics_are_those_of_scipy(seed, num_nodes):
    numbers = np.random.default_rng(seed)
    x = np.cumsum(numbers.uniform(0.05, 1.0, num_nodes))
    y = np.cumsum(
        np.round(numbers.normal(size=(3, num_nodes)), 1), axis=1
    )  # rounded, so that some pieces are flat
    at = np.concatenate([np.linspace(x[0], x[-1], 40), x])
    assert monotone_cubic(x, y, at) == pytest.approx(PchipInterpolator(x, y, axis=1)(at), abs=1e-12)


def test_coefficients_are_never_negative_and_zero_columns_get_none():
    columns = np.asarray([[1.0, 1.0, 0.0], [1.0, 2.0, 0.0], [1.0, 3.0, 0.0]])
    found = relative_coefficients(columns, np.asarray([1.0, 0.9, 0.8]))
    assert found[1] == found[2] == 0.0
    assert found[0] > 0.0


def test_a_fit_tells_which_coefficients_are_not_identifiable():
    columns = np.asarray([[1.0, 2.0], [2.0, 4.0], [3.0, 6.0]])
    with pytest.raises(InvalidSetupError, match="do not tell a, b apart"):
        fit_relative(columns, np.ones(3), ("a", "b"))
