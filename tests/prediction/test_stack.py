"""The stack's effect: parts still add up, the interval is wider, its loop hides no gradients, PyTorch is left alone."""

import math
from dataclasses import replace

import pytest

from forerun.cost.time.weights import load_weights, shipped_weights_path
from forerun.prediction.estimate_run import estimate_run
from forerun.prediction.replica_step import gradients_of, pass_of
from forerun.prediction.stack import KERAS_ON_TENSORFLOW, stack_note, stack_of
from forerun.prediction.step import predict_steps, prepare, timed_steps
from forerun.question.devices import find_device
from forerun.question.devices.cluster import cluster_of
from forerun.question.job import Job
from forerun.question.model import ModelRequest
from forerun.question.run import Run
from forerun.question.setup import Phase, TrainingSetup
from forerun.tracing.trace import trace

WEIGHTS = load_weights(shipped_weights_path())
SETUP = TrainingSetup(batch_size_per_device=64)


@pytest.fixture(scope="module")
def graph():
    return trace(ModelRequest(model="mnist-cnn"), SETUP)


def run_on(device):
    cluster = cluster_of(find_device(device), 1, 1)
    return Run(model=ModelRequest(model="mnist-cnn"), setup=SETUP, cluster=cluster)


def estimate(graph, run):
    return estimate_run(prepare(graph), None, run, WEIGHTS).estimate


def of_keras(graph):
    return replace(graph, versions=(*graph.versions, ("keras", "3.15.1")))


def both_steps(graph, device="t4", setup=SETUP):
    """The step in PyTorch and that of the same graph in Keras."""
    found = find_device(device)
    return [predict_steps(prepare(g), found, [setup], WEIGHTS)[0] for g in (graph, of_keras(graph))]


def test_parts_add_up_and_the_interval_is_wider(graph):
    plain, keras = both_steps(graph)
    effect = KERAS_ON_TENSORFLOW
    assert keras.step_s.value == pytest.approx(plain.step_s.value + effect.step_cost_s)
    assert sum(part.time_s for part in keras.breakdown) == pytest.approx(keras.step_s.value)
    assert [part.time_s for part in keras.breakdown] == sorted(
        (p.time_s for p in keras.breakdown), reverse=True
    )
    width, own = (math.log(step.step_s.high / step.step_s.value) for step in (keras, plain))
    assert width == pytest.approx(math.hypot(own, effect.log_spread))
    assert keras.step_s.value / keras.step_s.low == pytest.approx(keras.step_s.high / keras.step_s.value)
    assert keras.bound_by == plain.bound_by


def test_inference_has_no_training_loop(graph):
    inference = replace(SETUP, phase=Phase.INFERENCE, optimizer="none")
    plain, keras = both_steps(graph, setup=inference)
    assert keras.step_s.value == pytest.approx(plain.step_s.value)
    assert keras.loop_s == 0
    assert [part.name for part in keras.breakdown] == [part.name for part in plain.breakdown]


def test_no_gradients_are_sent_in_the_loop(graph):
    plain, keras = both_steps(graph)
    effect, model = KERAS_ON_TENSORFLOW, prepare(graph)
    own, whole = pass_of(model, plain), pass_of(model, keras)
    assert whole.total_s == pytest.approx(keras.step_s.value)
    assert whole.forward_s == pytest.approx(own.forward_s + effect.step_cost_s)
    assert whole.backward_s == pytest.approx(own.backward_s)
    assert whole.optimizer_s == pytest.approx(own.optimizer_s)
    ready = [[g.ready_share for g in gradients_of(model, step)] for step in (keras, plain)]
    assert ready[0] == pytest.approx(ready[1])


def test_points_of_several_devices_have_each_their_effect(graph):
    devices = [find_device(name) for name in ("t4", "cpu", "v100-sxm2-16gb")]
    found = timed_steps(prepare(of_keras(graph)), devices, [SETUP] * 3, WEIGHTS)
    assert found.loop_s.tolist() == [KERAS_ON_TENSORFLOW.step_cost_s, 0, KERAS_ON_TENSORFLOW.step_cost_s]
    for index, device in enumerate(devices):
        (alone,) = predict_steps(prepare(of_keras(graph)), device, [SETUP], WEIGHTS)
        assert found.step_s[index] == pytest.approx(alone.step_s.value)
        assert found.log_width[index] == pytest.approx(math.log(alone.step_s.high / alone.step_s.value))


def test_pytorch_and_processors_have_no_such_effect(graph):
    gpu, cpu = find_device("t4"), find_device("cpu")
    assert stack_of(graph, gpu, WEIGHTS) is None
    assert stack_of(of_keras(graph), cpu, WEIGHTS) is None
    assert stack_of(of_keras(graph), gpu, WEIGHTS) is KERAS_ON_TENSORFLOW
    provenance = {**WEIGHTS.provenance, "calibrated_device": "t4", "framework": "pytorch 2.15"}
    assert stack_of(of_keras(graph), gpu, replace(WEIGHTS, provenance=provenance)) is KERAS_ON_TENSORFLOW


def test_an_estimate_names_its_stack_and_says_where_there_is_no_measurement(graph):
    run = run_on("t4")
    notes = estimate(of_keras(graph), run).notes
    assert any("no step of Keras on TensorFlow was measured on t4" in note for note in notes)
    assert not any("software stack" in note for note in estimate(graph, run).notes)
    assert "no step" not in stack_note(KERAS_ON_TENSORFLOW, "v100-sxm2-16gb")
    on_cpu = estimate(of_keras(graph), run_on("cpu")).notes
    assert any("measured on a cpu" in note for note in on_cpu)


def test_an_epoch_of_keras_says_that_it_is_of_steps_alone(graph):
    run = run_on("t4")
    with_epochs = replace(run, job=Job(num_samples=640))

    def says(graph, asked):
        return any("sum of its steps" in note for note in estimate(graph, asked).notes)

    assert says(of_keras(graph), with_epochs)
    assert not says(of_keras(graph), run)
    assert not says(graph, with_epochs)
