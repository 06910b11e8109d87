"""The stack's effect: parts still add up, the interval holds the value and is wider, PyTorch is left alone."""

from dataclasses import replace

import pytest

from forerun.hardware import find_device
from forerun.optime.software_stack import KERAS_ON_TENSORFLOW, stack_note
from forerun.optime.weights import load_weights, shipped_weights_path
from forerun.prediction.predictor import Question, estimate
from forerun.prediction.software_stack import stack_of, with_stack
from forerun.prediction.step import predict_steps, prepare
from forerun.run.job import Job
from forerun.run.model import ModelRequest
from forerun.run.setup import Phase, TrainingSetup
from forerun.tracing.trace import trace

WEIGHTS = load_weights(shipped_weights_path())
SETUP = TrainingSetup(batch_size_per_device=64)


@pytest.fixture(scope="module")
def graph():
    return trace(ModelRequest(model="mnist-cnn"), SETUP)


def of_keras(graph):
    return replace(graph, versions=(*graph.versions, ("keras", "3.15.1")))


def test_parts_add_up_and_the_interval_is_wider(graph):
    device = find_device("t4")
    step = predict_steps(prepare(graph), device, [SETUP], WEIGHTS)[0]
    changed = with_stack(step, KERAS_ON_TENSORFLOW, Phase.TRAIN)
    assert sum(part.time_s for part in changed.breakdown) == pytest.approx(changed.step_s.value)
    assert changed.step_s.value > step.step_s.value
    assert changed.step_s.high / changed.step_s.value > step.step_s.high / step.step_s.value
    inference = with_stack(step, KERAS_ON_TENSORFLOW, Phase.INFERENCE)
    assert inference.step_s.value == pytest.approx(KERAS_ON_TENSORFLOW.factor * step.step_s.value)


def test_pytorch_and_processors_have_no_such_effect(graph):
    gpu, cpu = find_device("t4"), find_device("cpu")
    assert stack_of(graph, gpu, WEIGHTS) is None
    assert stack_of(of_keras(graph), cpu, WEIGHTS) is None
    assert stack_of(of_keras(graph), gpu, WEIGHTS) is KERAS_ON_TENSORFLOW
    provenance = {**WEIGHTS.provenance, "calibrated_device": "t4", "framework": "pytorch 2.15"}
    assert stack_of(of_keras(graph), gpu, replace(WEIGHTS, provenance=provenance)) is KERAS_ON_TENSORFLOW


def test_an_estimate_names_its_stack_and_says_where_there_is_no_measurement(graph):
    question = Question(device=find_device("t4"), setup=SETUP, weights=WEIGHTS)
    notes = estimate(prepare(of_keras(graph)), None, question).notes
    assert any("no step of Keras on TensorFlow was measured on t4" in note for note in notes)
    assert not any("software stack" in note for note in estimate(prepare(graph), None, question).notes)
    assert "no step" not in stack_note(KERAS_ON_TENSORFLOW, "v100-sxm2-16gb")
    on_cpu = estimate(prepare(of_keras(graph)), None, replace(question, device=find_device("cpu"))).notes
    assert any("measured on a cpu" in note for note in on_cpu)


def test_an_epoch_of_keras_says_that_it_is_of_steps_alone(graph):
    question = Question(device=find_device("t4"), setup=SETUP, weights=WEIGHTS)
    with_epochs = replace(question, job=Job(num_samples=640))

    def says(graph, asked):
        return any("sum of its steps" in note for note in estimate(prepare(graph), None, asked).notes)

    assert says(of_keras(graph), with_epochs)
    assert not says(of_keras(graph), question)
    assert not says(graph, with_epochs)
