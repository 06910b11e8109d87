"""A cluster of parameter servers in local processes: a real one, and numbers that cannot be."""

from importlib import util

import pytest

from forerun.errors import InvalidSetupError, MeasurementError
from forerun.measurement.keras_parameter_server import measure_parameter_server

needs_tensorflow = pytest.mark.skipif(
    util.find_spec("tensorflow") is None, reason="the extra 'keras' is not installed"
)


@needs_tensorflow
def test_one_worker_and_one_server_make_steps():
    step_s = measure_parameter_server(
        "cnn:depth=1,base_filters=2", num_workers=1, num_servers=1, batch_size=2, num_steps=3
    )
    assert 0 < step_s < 60


@needs_tensorflow
def test_a_cluster_without_an_answer_is_ended():
    with pytest.raises(MeasurementError, match=r"gave no answer in 0\.5 s"):
        measure_parameter_server(num_steps=1, timeout_s=0.5)


@pytest.mark.parametrize("name", ["num_workers", "num_servers", "num_steps"])
def test_there_is_at_least_one_of_each(name):
    with pytest.raises(InvalidSetupError, match="expected at least one"):
        measure_parameter_server(**{name: 0})
