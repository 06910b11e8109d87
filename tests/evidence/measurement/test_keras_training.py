"""Keras on TensorFlow, for real: a job of a grid, the callback of any fit, replicas; bad questions are refused."""

import json
import os
import subprocess
import sys
from importlib import util

import pytest

import forerun
from forerun.adapters.keras.runner import KERAS_OPTIMIZERS
from forerun.base.errors import InvalidSetupError
from forerun.evidence.measurement.layer_design import grid_jobs
from forerun.evidence.measurement.settings import Grid
from forerun.evidence.records.measurement import JobKind
from forerun.evidence.records.record_store import RecordStore
from forerun.evidence.records.step_record import as_step_record
from forerun.tracing.optimizers import OPTIMIZERS, STAND_INS

needs_tensorflow = pytest.mark.skipif(
    util.find_spec("tensorflow") is None, reason="the extra 'keras' is not installed"
)

FIT = """
import sys
import keras, numpy as np
from forerun.keras import StepTimer
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
model.compile(optimizer="adam", loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
timer = StepTimer(sys.argv[1], subject="keras:dense", batch_size=8)
model.fit(np.ones((40, 4)), np.zeros(40, int), batch_size=8, epochs=3, callbacks=[timer], verbose=0)
assert len(timer.step_times_s) == 3 * 4 and len(timer.warm_up_s) == 3 and len(timer.epoch_times_s) == 3
"""

# Replicas first: TensorFlow divides the processor for them when it begins.
REPLICAS = """
import json
from forerun.evidence.measurement.jobs import MeasurementJob
from forerun.adapters.keras.runner import run_keras_job
from forerun.evidence.measurement.jobs import Protocol
protocol = Protocol(min_warm_up=1, max_warm_up=3, window=3, num_repetitions=3, num_threads=1)
result = run_keras_job(MeasurementJob.from_json(JOB), "cpu", protocol)
print(json.dumps([len(result.repetitions_s), result.results]))
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """What replicas told, and the records of a fit, of one process that loads TensorFlow."""
    grid = Grid(
        sizes={"depth": (1,), "base_filters": (2,)}, batch_sizes=(4,), dataset="synthetic", num_epochs=1,
        num_steps=2, framework="keras", num_replicas=2,
    )  # fmt: skip
    (job,) = grid_jobs(grid)
    assert job.parameters["strategy"] == "mirrored"
    path = tmp_path_factory.mktemp("keras") / "runs.sqlite"
    code = REPLICAS.replace("JOB", repr(job.to_json())) + FIT
    environment = {**os.environ, "KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1]), path


@needs_tensorflow
def test_the_callback_writes_what_fit_did(trained):
    _, path = trained
    with RecordStore.open(path) as store:
        (m,) = store.measurements(kind=JobKind.TRAINING)
    assert m.circumstances.framework == "keras"
    assert m.parameters["batch_size"] == 8
    assert m.parameters["dataset_size"] == 40
    assert m.parameters["optimizer"] == "adam"
    assert m.results["steps_per_epoch"] == 5
    assert m.results["num_parameters"] == 15
    assert 0 < m.results["epoch_start_s"] < m.results["epoch_time_s"]
    assert len(m.repetitions_s) == 12
    assert m.results["loss_3"] > 0
    assert m.results["epoch_time_1_s"] > m.results["epoch_time_3_s"]  # the first holds tracing
    record = as_step_record(m)
    assert record.framework == "keras"
    assert record.step_time_s == m.results["step_time_s"]


@needs_tensorflow
def test_replicas_of_a_mirrored_strategy_train_for_real(trained):
    (num_repetitions, results), _ = trained
    assert num_repetitions == 3
    assert results["steps_per_epoch"] == 50_000 / 8  # each replica has a batch of its own
    assert results["loss_1"] > 0


def test_jobs_of_pytorch_keep_their_identity_and_those_of_keras_have_another():
    pytorch, keras = (grid_jobs(Grid(framework=name))[0] for name in ("pytorch", "keras"))
    assert pytorch.subject == "cnn:depth=2,base_filters=32"
    assert keras.subject == f"keras:{pytorch.subject}"
    assert "framework" not in pytorch.parameters
    assert "num_replicas" not in pytorch.parameters


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"framework": "jax"}, "expected framework pytorch or keras"),
        ({"num_replicas": 2}, "expected one replica, or more with framework keras"),
        ({"framework": "keras", "num_replicas": 0}, "expected one replica"),
    ],
)
def test_grids_that_cannot_be_are_refused(options, message):
    with pytest.raises(InvalidSetupError, match=message):
        Grid(**options)


@needs_tensorflow
@pytest.mark.parametrize(
    ("options", "ray", "message"),
    [
        ({"network": "cifar-resnet", "sizes": {}}, None, "expected one of the networks cnn"),
        ({"optimizer": "lamb"}, None, "expected an optimizer of sgd"),
        ({}, "auto", "leave --ray out"),
    ],
)
def test_what_keras_cannot_measure_is_refused(options, ray, message, tmp_path):
    grid = Grid(framework="keras", dataset="synthetic", **options)
    with pytest.raises(InvalidSetupError, match=message):
        forerun.measure_grid(grid, records=tmp_path / "r.sqlite", ray=ray)


def test_every_optimizer_that_can_train_has_one_in_keras():
    assert set(KERAS_OPTIMIZERS) == set(OPTIMIZERS) - set(STAND_INS)
