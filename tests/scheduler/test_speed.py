"""Speed models: published forms, laws, and fits that find what made the points."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduler_cases import speed

from forerun.errors import InvalidSetupError
from forerun.scheduler.speed import DataParallelSpeed, MeasuredSpeed, SynchronousServerSpeed
from forerun.scheduler.speed_fit import StepPoint, fit_data_parallel

# Peng et al. 2018, table 2, synchronous training of ResNet-50.
OPTIMUS_SYNC = (1.02, 2.78, 4.92, 0.00, 0.02)


def server_speed(*theta):
    names = ("batch_s", "constant_s", "transfer_s", "per_worker_s", "per_server_s")
    return SynchronousServerSpeed(**dict(zip(names, theta, strict=True)))


def test_optimus_form_with_its_published_coefficients():
    f = server_speed(*OPTIMUS_SYNC)
    # 1.02 / 8 + 2.78 + 4.92 * 8 / 12 + 0.02 * 12 with eight workers and twelve servers.
    assert 1 / f(8, 12) == pytest.approx(0.1275 + 2.78 + 3.28 + 0.24)


def test_one_device_does_not_synchronise_and_batches_accumulate():
    of = speed()
    assert of.step_time_s(1, 1, 64) == pytest.approx(0.02 + 0.64)
    # 512 on one device that holds 256: two passes.
    assert of.step_time_s(1, 1, 512) == pytest.approx(2 * (0.02 + 2.56))
    assert of(8, 2, 4) == 0.0


@given(n=st.integers(2, 64), batch=st.integers(64, 4096), g=st.floats(1, 10))
def test_no_faster_than_n_fold_and_no_slower_than_without_overlap(n, batch, g):
    of = DataParallelSpeed(gradient_s=0.02, gradient_per_sample_s=0.001, local_sync_s=0.1, overlap=g)
    alone = DataParallelSpeed(gradient_s=0.02, gradient_per_sample_s=0.001, local_sync_s=0.1)
    assert of(n, 1, batch) <= n * of(1, 1, batch) * (1 + 1e-9)
    assert of(n, 1, batch) >= alone(n, 1, batch) * (1 - 1e-9)


def test_measured_points_are_kept_and_continued():
    of = MeasuredSpeed({1: 100.0, 2: 180.0, 4: 320.0})
    assert [of(n, 1, 32) for n in (1, 2, 4)] == [100.0, pytest.approx(180.0), pytest.approx(320.0)]
    assert 180 < of(3, 1, 32) < 320
    # Slope 320 / 180 per doubling goes on.
    assert of(8, 2, 32) == pytest.approx(320 * 320 / 180)
    assert MeasuredSpeed({4: 320.0})(2, 1, 32) == 160.0
    assert MeasuredSpeed({1: 100.0})(8, 1, 32) == 100.0
    # Falling speeds are not continued downwards.
    assert MeasuredSpeed({1: 100.0, 2: 90.0})(4, 1, 32) == 90.0


@pytest.mark.parametrize("points", [{}, {0: 1.0}, {1: 0.0}, {1: float("inf")}])
def test_points_that_cannot_be_meant(points):
    with pytest.raises(InvalidSetupError):
        MeasuredSpeed(points)


def test_a_fit_finds_the_form_that_made_the_points():
    true = DataParallelSpeed(
        gradient_s=0.03,
        gradient_per_sample_s=0.002,
        local_sync_s=0.02,
        local_sync_per_device_s=0.001,
        node_sync_s=0.1,
        node_sync_per_device_s=0.004,
        overlap=2.0,
    )
    places = [(1, 1), (2, 1), (4, 1), (8, 2), (16, 4)]
    points = [
        StepPoint(
            num_devices=n,
            num_nodes=nodes,
            batch_size_per_device=b,
            step_time_s=true.step_time_s(n, nodes, n * b),
            sync_time_s=true.step_time_s(n, nodes, n * b) - true.step_time_s(1, 1, b),
        )
        for (n, nodes), b in product(places, (8.0, 32.0, 128.0))
    ]
    found = fit_data_parallel(points)
    for n, nodes in [*places, (12, 3), (32, 8)]:
        for b in (16.0, 64.0):
            assert found.step_time_s(n, nodes, n * b) == pytest.approx(
                true.step_time_s(n, nodes, n * b), rel=0.05
            )


def test_without_points_on_several_nodes_they_cost_a_little_more_than_one():
    points = [
        StepPoint(num_devices=n, num_nodes=1, batch_size_per_device=8.0, step_time_s=0.1 + 0.01 * n)
        for n in (1, 2, 4)
    ]
    found = fit_data_parallel(points)
    assert found.node_sync_s == pytest.approx(1.1 * found.local_sync_s)


def test_fits_refuse_nothing_and_nonsense():
    with pytest.raises(InvalidSetupError):
        fit_data_parallel([])
