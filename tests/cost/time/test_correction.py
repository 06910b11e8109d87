"""Sensitivities: shares of a step, and its derivatives."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest

from forerun.cost.time.correction import corrected, sensitivities, step_figures
from forerun.cost.time.features import Point
from forerun.cost.time.rows import DistinctOps
from forerun.cost.time.step_times import step_times
from forerun.cost.time.weights import load_weights, shipped_weights_path
from forerun.graph.graph import OpClass
from forerun.question.devices import find_device
from forerun.question.setup import TrainingSetup
from op_models import no_offsets, ops_named, random_weights

NUM_COLUMNS = 6 + len(OpClass)
SHIPPED = load_weights(shipped_weights_path())


@dataclass(frozen=True)
class MadeStep:
    ops: DistinctOps
    point: Point
    system: str = "made|t4|fp32|nchw|eager|2.0|train"


def made_steps(*batch_sizes):
    setups = [TrainingSetup(batch_size_per_device=size) for size in batch_sizes]
    return [MadeStep(ops_named("cnn"), Point(device=find_device("t4"), setup=setup)) for setup in setups]


def test_sensitivities_are_shares_of_the_step():
    weights = random_weights()
    points = [
        Point(device=find_device("t4"), setup=TrainingSetup(batch_size_per_device=n)) for n in (1, 64, 512)
    ]
    times = step_times(ops_named("cnn"), points, weights, no_offsets(weights), with_kernels=True)
    rows = sensitivities(ops_named("cnn"), times)
    assert rows.shape == (3, NUM_COLUMNS)
    assert (rows >= 0).all()
    assert (rows <= 1 + 1e-6).all()
    np.testing.assert_array_equal(rows[:, 0], 1.0)
    by_class = rows[:, 6:].sum(axis=1)
    np.testing.assert_allclose(by_class + rows[:, 3] + times.loop_s / times.step_s, 1.0)
    # More work per launch: the device matters more, the host less.
    assert (np.diff(by_class) > 0).all()


def test_a_sensitivity_is_the_derivative_of_the_log_step():
    weights = random_weights(1)
    points = [Point(device=find_device("t4"), setup=TrainingSetup(batch_size_per_device=64))]

    def log_step(host):
        offsets = np.zeros((1, 1, 4))
        offsets[..., 2] = host
        return np.log(step_times(ops_named("cnn"), points, weights, offsets, with_kernels=True).step_s[0])

    times = step_times(ops_named("cnn"), points, weights, no_offsets(weights), with_kernels=True)
    row = sensitivities(ops_named("cnn"), times)[0]
    slope = (log_step(0.01) - log_step(-0.01)) / 0.02
    # The host's constant does not scale with its launches, so the share is an upper bound.
    assert 0 < slope <= row[3] * 1.01
    logs = [
        float(np.log(step_times(ops_named("cnn"), points, moved, no_offsets(weights)).step_s[0]))
        for moved in (replace(weights, short_offset=short) for short in (-0.01, 0.01))
    ]
    assert (logs[1] - logs[0]) / 0.02 == pytest.approx(row[5], rel=0.02)


def test_a_device_slow_in_its_short_kernels_is_found():
    steps = made_steps(16, 64, 256, 1024, 4096, 16384)
    true_s = np.exp(step_figures(steps, replace(SHIPPED, short_offset=0.4)).log_time_s)
    found = corrected(steps, true_s, SHIPPED)
    assert found.short_offset > 0
    np.testing.assert_allclose(np.exp(step_figures(steps, found).log_time_s), true_s, rtol=0.05)


def test_a_measured_step_moves_the_prediction_towards_it_and_not_beyond():
    steps = made_steps(64)
    before = step_figures(steps, SHIPPED).log_time_s
    after = step_figures(steps, corrected(steps, 2 * np.exp(before), SHIPPED)).log_time_s
    assert before[0] < after[0] < before[0] + np.log(2)


def test_a_device_slower_with_the_size_of_the_step_is_found():
    steps = made_steps(64, 128, 256, 512, 1024, 2048, 4096, 8192)
    figures = step_figures(steps, SHIPPED)
    true_s = 2 * np.exp(figures.log_time_s + 0.2 * (figures.log_sizes[:, 0] - figures.log_sizes[0, 0]))
    found = corrected(steps, true_s, SHIPPED)
    np.testing.assert_allclose(np.exp(step_figures(steps, found).log_time_s), true_s, rtol=0.08)
    assert sum(found.size_law.exponents) == pytest.approx(0.2, abs=0.1)


def test_beyond_the_measured_sizes_the_exponents_act_no_further():
    steps = made_steps(64, 128, 256, 512, 1024, 2048, 4096, 8192)
    figures = step_figures(steps, SHIPPED)
    law = corrected(steps, np.exp(1.2 * figures.log_time_s), SHIPPED).size_law
    highest, beyond = law.log_factors(np.asarray([law.highs, (99.0, 99.0)]))
    assert beyond == highest
