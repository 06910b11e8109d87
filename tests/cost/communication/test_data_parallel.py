"""Buckets, overlap, accumulation, stragglers, sharding.

MirroredStrategy: one host, several devices.
"""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.cost.communication.data_parallel import (
    Gradient,
    HostAndDevice,
    Pass,
    bucket_schedule,
    data_parallel_step,
    expected_normal_maximum,
    gradient_buckets,
    mirrored_step_s,
    straggler_factor,
)

MIB = 1024**2


def uniform_gradients(total_bytes):
    return [Gradient(size_bytes=total_bytes / 100, ready_share=(i + 1) / 100) for i in range(100)]


ONE = Pass(forward_s=0.1, backward_s=0.2, optimizer_s=0.01)


def test_the_first_bucket_holds_one_mebibyte_and_the_others_their_capacity():
    gradients = [Gradient(size_bytes=MIB, ready_share=(i + 1) / 10) for i in range(10)]
    buckets = gradient_buckets(gradients, bucket_bytes=4 * MIB)
    assert [b.size_bytes / MIB for b in buckets] == [1, 4, 4, 1]
    assert [b.ready_share for b in buckets] == [0.1, 0.5, 0.9, 1.0]


@given(st.floats(1, 1e9), st.floats(1e5, 1e9))
def test_no_gradient_is_lost(total, capacity):
    buckets = gradient_buckets(uniform_gradients(total), capacity)
    assert math.isclose(sum(b.size_bytes for b in buckets), total, rel_tol=1e-9)
    assert buckets[-1].ready_share == 1.0


def test_schedule_by_hand():
    # Buckets ready at 0.1 and 0.2 s take 0.15 s each: the second waits for the first and ends at 0.4 s.
    gradients = [Gradient(size_bytes=2 * MIB, ready_share=share) for share in (0.5, 1.0)]
    found = bucket_schedule(gradient_buckets(gradients, 2 * MIB), 0.2, lambda size: 0.15)
    assert found.end_s == pytest.approx(0.4)
    assert found.exposed_s == pytest.approx(0.2)
    assert found.busy_s == pytest.approx(0.3)


@given(st.floats(1e-9, 0.5), st.integers(2, 64), st.integers(1, 8))
def test_parts_add_up_and_the_last_bucket_is_always_exposed(time_s, number, accumulation):
    buckets = gradient_buckets(uniform_gradients(100 * MIB))
    found = data_parallel_step(
        ONE,
        buckets,
        lambda size: time_s,
        number,
        num_accumulation_steps=accumulation,
        slowdown=0.5,
        coefficient_of_variation=0.05,
        overhead_s=0.001,
    )
    alone_s = accumulation * (ONE.forward_s + ONE.backward_s) + ONE.optimizer_s
    assert found.exposed_s >= time_s * (1 - 1e-5)
    assert found.step_s >= alone_s
    assert math.isclose(found.compute_s, alone_s)
    # Communication that is exposed or slows down is never more than all of it.
    assert found.exposed_s + found.contention_s <= found.communication_s * (1 + 1e-9)


def test_one_device_pays_nothing():
    found = data_parallel_step(
        ONE, gradient_buckets(uniform_gradients(1e8)), lambda size: 9.9, 1, overhead_s=1
    )
    assert found.step_s == pytest.approx(ONE.total_s)


def test_overlap_hides_and_accumulation_divides():
    buckets = gradient_buckets(uniform_gradients(100 * MIB))

    once, four_times = (
        data_parallel_step(ONE, buckets, lambda size: 0.02, 8, num_accumulation_steps=n) for n in (1, 4)
    )
    assert once.exposed_s < once.communication_s
    assert four_times.step_s < 4 * once.step_s


def test_synchronised_batch_norms_cost_two_collectives_each():
    plain, synced = (
        data_parallel_step(ONE, (), lambda size: 1e-3, 8, num_batch_norms=n, batch_norm_bytes=1024).step_s
        for n in (0, 50)
    )
    assert synced - plain == pytest.approx(2 * 50 * 1e-3)


@pytest.mark.parametrize(
    ("number", "expected"), [(1, 0.0), (2, 0.56419), (3, 0.84628), (5, 1.16296), (10, 1.53875)]
)
def test_expected_maximum_of_normals_published(number, expected):
    # Tippett 1925, table of the mean range and extremes.
    assert expected_normal_maximum(number) == pytest.approx(expected, abs=2e-5)


@given(st.integers(1, 2000), st.floats(0, 0.5))
def test_more_devices_wait_longer(number, variation):
    assert straggler_factor(number + 1, variation) >= straggler_factor(number, variation) - 1e-12 >= 1 - 1e-9


MIRRORED = HostAndDevice(host_s=0.002, device_fixed_s=0.001, device_per_sample_s=1e-4)


def test_a_job_bound_by_its_host_takes_twice_as_long_on_two_devices():
    small = HostAndDevice(host_s=0.002, device_fixed_s=1e-6, device_per_sample_s=1e-9)
    assert mirrored_step_s(small, 8, 2, 0.0) == pytest.approx(2 * small.step_s(8), rel=1e-6)


def test_a_job_bound_by_its_device_waits_for_the_all_reduce():
    large = HostAndDevice(host_s=1e-6, device_fixed_s=0.0, device_per_sample_s=1e-3)
    assert mirrored_step_s(large, 100, 2, 0.03) == pytest.approx(0.13, rel=1e-6)


@given(st.integers(1, 16), st.floats(1, 1e4), st.floats(0, 1))
def test_more_replicas_are_never_faster_a_step_nor_more_than_n_fold(number, batch, reduce_s):
    step_s = mirrored_step_s(MIRRORED, batch, number, reduce_s)
    assert step_s >= MIRRORED.step_s(batch) * (1 - 1e-12)
    assert mirrored_step_s(MIRRORED, batch, number + 1, reduce_s) >= step_s * (1 - 1e-12)
