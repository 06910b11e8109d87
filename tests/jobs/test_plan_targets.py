"""Epochs to a target: intervals from ranks and from finished runs, and what the batch size makes of them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.base.errors import ForecastError
from forerun.jobs.forecasting.convergence import BatchScaling, fit_batch_scaling
from forerun.jobs.plan_targets import (
    EpochsToTarget,
    LearningRun,
    epochs_of_finished_runs,
    epochs_of_law,
    epochs_of_ranks,
)
from forerun.prediction.estimate import Interval
from forerun.search.choice import product


def test_ranks_of_a_log_normal_become_its_90_per_cent_interval():
    ranks = tuple(20 * math.exp(0.1 * rank) for rank in (-1.2816, 0, 1.2816))
    found = epochs_of_ranks(ranks, 100.0)
    assert found.value == 20
    assert found.low == pytest.approx(20 * math.exp(-0.16449))
    assert found.high == pytest.approx(20 * math.exp(0.16449))


@given(st.floats(0, 50), st.floats(0, 50), st.one_of(st.floats(0, 50), st.just(math.inf)), st.floats(0, 100))
def test_an_interval_holds_its_value_and_ends_with_the_run(early, later, latest, rest):
    middle = 1 + early + later
    ranks = (1 + early, middle, middle + latest)
    end = (middle if math.isinf(latest) else ranks[2]) + rest
    found = epochs_of_ranks(ranks, end)
    assert 0 < found.low <= found.value == middle <= found.high <= end * (1 + 1e-12)


def test_a_target_that_was_reached_has_no_interval():
    assert epochs_of_ranks((24.0, 24.0, 24.0), 60.0) == Interval(24.0, 24.0, 24.0)


def test_finished_runs_scatter_by_student():
    # Two logarithms a distance 2 d apart: s = sqrt(2) d, t(0.95, 1) = 6.3138, width t s sqrt(3 / 2).
    found = epochs_of_finished_runs([20 * math.exp(0.01), 20 * math.exp(-0.01)])
    assert found.value == pytest.approx(20)
    assert math.log(found.high / found.value) == pytest.approx(6.3138 * 0.01 * math.sqrt(3), rel=1e-4)
    alone = epochs_of_finished_runs([24.0])
    assert alone.low == alone.value == alone.high == pytest.approx(24.0)
    assert epochs_of_finished_runs([24.0, math.inf]).value == pytest.approx(24.0)
    with pytest.raises(ForecastError, match="no finished run reached the target"):
        epochs_of_finished_runs([math.inf])


def test_epochs_grow_with_the_batch_by_the_law():
    law = BatchScaling(least_steps=1.0, least_samples=128.0, worst_error=0.0)
    asked = EpochsToTarget(
        runs={"cnn": LearningRun(epochs=Interval(10.0, 8.0, 14.0), batch_size=128)}, law=law
    )
    found = asked("cnn", np.asarray([128, 384]))
    assert found[:, 0] == pytest.approx([10, 8, 14])
    assert found[:, 1] == pytest.approx(np.asarray([10, 8, 14]) * (128 + 384) / 256)
    without = EpochsToTarget(runs={"cnn": LearningRun(epochs=Interval(10.0, 8.0, 14.0))})
    assert np.all(without("cnn", np.asarray([1, 4096])) == found[:, :1])


@given(st.floats(1, 1e4), st.floats(1, 1e5), st.integers(1, 4096))
def test_the_law_alone_gives_its_own_epochs(least_steps, critical, size):
    sizes = np.asarray([32, 256])
    law = fit_batch_scaling(sizes, least_steps * (critical + sizes) / sizes)
    run = epochs_of_law(law, 64, 50_000)
    found = EpochsToTarget(runs={"cnn": run}, law=law)("cnn", np.asarray([size]))
    assert found[0, 0] == pytest.approx(law.epochs([size], 50_000)[0], rel=1e-9)


def test_independent_intervals_add_in_squares():
    epochs = np.asarray([[10.0], [7.0], [14.0]])
    epoch_s = np.asarray([[5.0], [3.5], [6.5]])
    value, low, high = product(epochs, epoch_s)[:, 0]
    assert value == 50
    assert low == pytest.approx(50 * (1 - math.hypot(0.3, 0.3)))
    assert high == pytest.approx(50 * (1 + math.hypot(0.4, 0.3)))
