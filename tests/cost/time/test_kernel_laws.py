"""Laws of kernels: registered once, found in other packages, and heard where they hold."""

from __future__ import annotations

import numpy as np
import pytest

from forerun.cost.time import kernel_laws as laws
from forerun.cost.time.features import Point, point_arrays
from forerun.graph.graph import OpClass
from forerun.question.devices import find_device
from forerun.question.setup import TrainingSetup
from op_models import ops_named

ARRAYS = point_arrays([Point(device=find_device("t4"), setup=TrainingSetup(batch_size_per_device=8))] * 2)
OPS = ops_named("resnet18")
KERNELS = laws.Kernels.at(OPS, ARRAYS)


@pytest.fixture
def outside(monkeypatch):
    """Laws that another package declares; the caches know nothing of them before and after."""
    found = {}
    monkeypatch.setattr(laws, "plugin_names", lambda group: list(found))
    monkeypatch.setattr(laws, "plugin", lambda group, name: found[name])
    forget_laws()
    yield found
    forget_laws()


def forget_laws():
    laws.kernel_laws.cache_clear()
    laws._laws_that.cache_clear()


def test_every_law_says_its_equation_and_its_evidence():
    assert len(laws.kernel_laws()) >= 7
    for law in laws.kernel_laws():
        assert "Evidence:" in law.time_s.__doc__, law.name
        assert "[s]" in law.time_s.__doc__, law.name
        assert law.op_classes


def test_a_name_is_registered_once():
    with pytest.raises(AssertionError, match="registered already"):
        laws.kernel_law(laws.Gives.LEAST, OpClass.COPY)(laws.products)


@pytest.mark.parametrize("gives", list(laws.Gives))
def test_a_law_of_another_package_is_heard(outside, gives):
    def time_s(kernels, rows):
        return np.full((len(kernels.points), len(rows)), 1e-9 if gives is laws.Gives.MOST else 7.0)

    outside["norms"] = laws.KernelLaw(
        name="norms", gives=gives, op_classes=(OpClass.BATCH_NORM,), time_s=time_s
    )
    terms, most_s = laws.kernel_terms(KERNELS), laws.longest_times_s(KERNELS)
    is_norm = OPS.op_class == OpClass.BATCH_NORM
    assert is_norm.any()
    heard = {
        laws.Gives.WORK: (terms.compute == 7.0) & (terms.is_law == 1),
        laws.Gives.LEAST: terms.least_compute == 7.0,
        laws.Gives.MOST: most_s == 1e-9,
    }[gives]
    assert heard[:, is_norm].all()
    assert not heard[:, ~is_norm].any()


def test_where_a_law_does_not_hold_nothing_changes(outside):
    before = laws.kernel_terms(KERNELS)
    outside["nothing"] = laws.KernelLaw(
        name="nothing",
        gives=laws.Gives.WORK,
        op_classes=tuple(OpClass),
        time_s=lambda kernels, rows: np.full((len(kernels.points), len(rows)), np.nan),
    )
    forget_laws()
    after = laws.kernel_terms(KERNELS)
    np.testing.assert_array_equal(before.compute, after.compute)
    np.testing.assert_array_equal(before.is_law, after.is_law)
