"""The data loader: rates, fed steps, and how many workers keep a device busy."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.base.errors import InvalidSetupError
from forerun.prediction.run_step import (
    LOADER_RANGE,
    fed_step_s,
    loader_rate_samples_per_s,
    workers_needed,
)
from forerun.question.job import InputPipeline

COSTS = st.floats(1e-5, 1.0)
WORKERS = st.integers(0, 64)


def pipeline(cost=0.01, workers=4, **changes):
    return InputPipeline(sample_cost_s=cost, num_workers=workers, **changes)


@pytest.mark.parametrize(
    ("loader", "rate"),
    [
        (pipeline(), 400.0),
        (pipeline(workers=0), 100.0),
        (pipeline(num_cores=2), 200.0),
        (pipeline(sample_bytes=1e5, storage_bytes_per_s=1e7), 100.0),
        (pipeline(sample_bytes=1e5, storage_bytes_per_s=1e9, network_bytes_per_s=5e6), 50.0),
        (pipeline(cost=0.0), math.inf),
    ],
)
def test_the_slowest_part_sets_the_rate(loader, rate):
    assert loader_rate_samples_per_s(loader) == rate


def test_a_loader_with_workers_hides_behind_the_device_and_one_without_does_not():
    step = np.asarray([[0.1, 0.1], [0.09, 0.09], [0.12, 0.12]])
    samples = np.asarray([20.0, 80.0])
    least, most = LOADER_RANGE
    hidden = fed_step_s(step, samples, pipeline())
    assert hidden[:, 0].tolist() == step[:, 0].tolist()
    assert hidden[:, 1] == pytest.approx([0.2, 0.2 * least, 0.2 * most])
    alone = fed_step_s(step, samples, pipeline(workers=0))
    assert alone[0] == pytest.approx([0.3, 0.9])
    assert alone[2, 0] == pytest.approx(0.3 + math.hypot(0.02, 0.2 * (most - 1)))


@given(cost=COSTS, rate=st.floats(0.1, 1e4))
def test_the_workers_that_are_needed_are_the_fewest_that_do(cost, rate):
    needed = workers_needed(pipeline(cost=cost), rate)
    assert loader_rate_samples_per_s(pipeline(cost, needed)) >= rate * (1 - 1e-6)
    if needed > 1:
        assert loader_rate_samples_per_s(pipeline(cost, needed - 1)) < rate


def test_where_cores_or_storage_forbid_it_no_number_of_workers_is_named():
    assert workers_needed(pipeline(num_cores=2), 300.0) is None
    assert workers_needed(pipeline(sample_bytes=1e6, storage_bytes_per_s=1e8), 300.0) is None


@given(cost=COSTS, few=WORKERS, more=WORKERS, samples=st.integers(1, 1000), step=st.floats(1e-4, 10.0))
def test_laws_of_the_fed_step(cost, few, more, samples, step):
    few, more = sorted((few, more))
    steps, counts = np.asarray([[step], [0.8 * step], [1.3 * step]]), np.asarray([float(samples)])
    fed = fed_step_s(steps, counts, pipeline(cost, few))
    assert (fed >= steps * (1 - 1e-12)).all()
    assert fed[1] <= fed[0] <= fed[2]
    assert (fed_step_s(steps, counts, pipeline(cost, more)) <= fed * (1 + 1e-12)).all()
    assert (fed_step_s(steps, 2 * counts, pipeline(cost, few)) >= fed).all()


@pytest.mark.parametrize(
    "changes",
    [
        {"cost": -0.1},
        {"cost": math.nan},
        {"workers": -1},
        {"num_cores": 0},
        {"sample_bytes": -1.0},
        {"storage_bytes_per_s": 0.0},
        {"network_bytes_per_s": math.nan},
    ],
)
def test_figures_that_cannot_be_meant_are_refused(changes):
    with pytest.raises(InvalidSetupError, match="must be"):
        pipeline(**changes)
