"""Speeds of jobs, their fits, and the worth of more devices."""

import itertools
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduler_cases import speed

from forerun.jobs.scheduling.speed import (
    BatchEfficiency,
    DataParallelSpeed,
    MeasuredSpeed,
    RateCurve,
    ScaledSpeed,
    StepPoint,
    ask_together,
    fit_data_parallel,
    offered_sizes,
    rate_curve,
    speeds_on_grid,
    upper_hull,
)


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


RATES = st.lists(st.floats(0, 1e3), min_size=1, max_size=30).map(lambda values: dict(enumerate(values, 1)))


@given(rates=RATES)
def test_a_hull_is_concave_and_above_all_rates(rates):
    corners = upper_hull(rates)
    assert corners[0] == 0
    assert rates[corners[-1]] == max(rates.values())
    rates = {0: 0.0, **rates}
    slopes = [(rates[b] - rates[a]) / (b - a) for a, b in itertools.pairwise(corners)]
    assert slopes == sorted(slopes, reverse=True)
    for a, b in itertools.pairwise(corners):
        for n in range(a, b):
            line = rates[a] + (rates[b] - rates[a]) * (n - a) / (b - a)
            assert rates[n] <= line + 1e-9


def test_efficiency_is_one_at_the_base_and_halves_where_noise_runs_out():
    worth = BatchEfficiency(noise_scale=1000.0, base_batch_size=100.0)
    assert worth(100.0, 0.0) == 1.0
    assert worth(1200.0, 0.5) == pytest.approx(1100 / 2200)


def test_a_range_of_batches_never_makes_it_slower():
    worth = BatchEfficiency(noise_scale=500.0, base_batch_size=64.0)
    sizes = offered_sizes(4, 16)
    fixed = rate_curve(speed(), None, (64.0, 64.0), 4, sizes, 0.0)
    free = rate_curve(speed(), worth, (64.0, 2048.0), 4, sizes, 0.0)
    assert all(free.rate(n) >= fixed.rate(n) - 1e-9 for n in sizes)
    assert (batches := [free.batch_size(n) for n in free.rates]) == sorted(batches)


@pytest.mark.parametrize("first", [1, 8, 9, 24, 32])
def test_a_curve_is_the_same_whatever_is_asked_first(first):
    def made() -> RateCurve:
        return rate_curve.__wrapped__(speed(), None, (64.0, 64.0), 4, offered_sizes(4, 32), 0.0)

    rates, curve = made().rates, made()
    assert curve.best_within(first) == max((n for n in rates if n <= first), key=lambda n: (rates[n], -n))
    assert made().rate(first) == curve.rate(first) == rates[first]
    assert (curve.rates, curve.hull) == (rates, made().hull)
    together, beside = made(), rate_curve.__wrapped__(speed(0.03), None, (64.0, 64.0), 4, (1, 2), 0.0)
    ask_together([together, together, beside])
    assert (together.rates, beside.rate(1)) == (rates, speed(0.03)(1, 1, 64.0))


def test_a_grid_of_sizes_and_batches_is_the_law_at_each():
    sizes, batches = np.asarray(offered_sizes(4, 300, asked=77)), np.asarray([4.0, 64.0, 1000.0])
    nodes = -(-sizes // 4)
    for model in (speed(), MeasuredSpeed({1: 10.0, 4: 30.0, 9: 40.0})):
        alone = [
            [model(n, m, b) for b in batches.tolist()]
            for n, m in zip(sizes.tolist(), nodes.tolist(), strict=True)
        ]
        np.testing.assert_allclose(speeds_on_grid(model, sizes, nodes, batches), alone, rtol=1e-12)


@given(per_node=st.integers(1, 72), most=st.integers(1, 5000), asked=st.integers(1, 5000))
def test_sizes_offered_are_few_and_hold_what_is_asked_for(per_node, most, asked):
    sizes = offered_sizes(per_node, most, asked)
    assert len(sizes) <= 64
    assert list(sizes) == sorted(set(sizes))
    assert {n for n in (*range(1, 17), per_node, asked, most) if n <= most} <= set(sizes)


def test_the_fewest_and_the_best():
    curve = rate_curve(speed(sync_s=5.0), None, (64.0, 64.0), 4, offered_sizes(4, 8), 0.0)
    assert (curve.fewest, curve.hull[-1], curve.best_within(8)) == (1, 1, 1)
    scaled = rate_curve(
        ScaledSpeed(speed(sync_s=5.0), (1.0, 1.0, 99.0, 1.0)), None, (64.0, 64.0), 4, (1, 2, 8), 0.0
    )
    assert scaled.hull[-1] == 2
    assert scaled.rate(8) == curve.rate(8)
    assert (curve.after(3, 8), curve.after(8, 8), curve.rate(99)) == (4, None, 0.0)
