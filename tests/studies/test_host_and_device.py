"""Host and device of a step, from steps at several batch sizes."""

import math

import pytest

from forerun.base.errors import InvalidSetupError
from forerun.cost.communication.data_parallel import HostAndDevice
from studies.keras.mirrored_study import split_host_and_device

ONE = HostAndDevice(host_s=0.002, device_fixed_s=0.001, device_per_sample_s=1e-4)


def test_host_and_device_are_found_again_in_spite_of_one_disturbed_run():
    batches = [2, 4, 8, 16, 32, 64, 128, 256]
    steps = [ONE.step_s(b) for b in batches]
    steps[1] *= 3
    found = split_host_and_device(batches, steps)
    for batch in batches:
        assert math.isclose(found.step_s(batch), ONE.step_s(batch), rel_tol=0.05)


@pytest.mark.parametrize(
    ("batches", "steps", "message"),
    [
        ([8, 16], [1, 2], "three batch sizes or more, got 2"),
        ([8, 8, 8], [1, 1, 1], "got 1"),
        ([8, 16, 32], [1, -2, 3], "above zero seconds and finite, got -2"),
    ],
)
def test_runs_that_do_not_suffice(batches, steps, message):
    with pytest.raises(InvalidSetupError, match=message):
        split_host_and_device(batches, steps)
