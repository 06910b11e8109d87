"""Sensitivities: shares of a step, and its derivatives."""

from __future__ import annotations

import numpy as np

from forerun.graph.graph import OpClass
from forerun.hardware import find_device
from forerun.optime.correction import sensitivities
from forerun.optime.features import Point
from forerun.optime.step_times import step_times
from forerun.run.setup import TrainingSetup
from op_models import no_offsets, ops_named, random_weights

NUM_COLUMNS = 4 + len(OpClass)


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
    np.testing.assert_allclose(rows[:, 0] + rows[:, 3], 1.0)
    np.testing.assert_allclose(rows[:, 4:].sum(axis=1), rows[:, 0])
    # More work per launch: the device matters more, the host less.
    assert (np.diff(rows[:, 0]) > 0).all()


def test_a_sensitivity_is_the_derivative_of_the_log_step():
    weights = random_weights(1)
    points = [Point(device=find_device("t4"), setup=TrainingSetup(batch_size_per_device=64))]

    def log_step(host):
        offsets = np.zeros((1, 1, 3))
        offsets[..., 2] = host
        return np.log(step_times(ops_named("cnn"), points, weights, offsets, with_kernels=True).step_s[0])

    times = step_times(ops_named("cnn"), points, weights, no_offsets(weights), with_kernels=True)
    row = sensitivities(ops_named("cnn"), times)[0]
    slope = (log_step(0.01) - log_step(-0.01)) / 0.02
    # The host's constant does not scale with its launches, so the share is an upper bound.
    assert 0 < slope <= row[3] * 1.01
