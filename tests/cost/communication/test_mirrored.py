"""MirroredStrategy: one host, several devices."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.base.errors import InvalidSetupError
from forerun.cost.communication.mirrored import HostAndDevice, mirrored_step_s

ONE = HostAndDevice(host_s=0.002, device_fixed_s=0.001, device_per_sample_s=1e-4)


def test_a_job_bound_by_its_host_takes_twice_as_long_on_two_devices():
    small = HostAndDevice(host_s=0.002, device_fixed_s=1e-6, device_per_sample_s=1e-9)
    assert mirrored_step_s(small, 8, 2, 0.0) == pytest.approx(2 * small.step_s(8), rel=1e-6)


def test_a_job_bound_by_its_device_waits_for_the_all_reduce():
    large = HostAndDevice(host_s=1e-6, device_fixed_s=0.0, device_per_sample_s=1e-3)
    assert mirrored_step_s(large, 100, 2, 0.03) == pytest.approx(0.13, rel=1e-6)


@given(st.integers(1, 16), st.floats(1, 1e4), st.floats(0, 1))
def test_more_replicas_are_never_faster_a_step_nor_more_than_n_fold(number, batch, reduce_s):
    step_s = mirrored_step_s(ONE, batch, number, reduce_s)
    assert step_s >= ONE.step_s(batch) * (1 - 1e-12)
    assert mirrored_step_s(ONE, batch, number + 1, reduce_s) >= step_s * (1 - 1e-12)


def test_no_replica_is_refused():
    with pytest.raises(InvalidSetupError, match="at least 1, got 0"):
        mirrored_step_s(ONE, 8, 0, 0.0)
