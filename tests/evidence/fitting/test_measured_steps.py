"""Measured Keras layers and models as samples of a fit: traced together in one process, loop and operations apart."""

from dataclasses import replace
from importlib import util

import numpy as np
import pytest

from forerun.base.errors import RecordError
from forerun.cost.time.weights import load_weights, shipped_weights_path
from forerun.evidence.calibrate import (
    LOOP_MODEL,
    calibration_layers,
    calibration_models,
    loop_cost_s,
)
from forerun.evidence.fitting.device_calibration import calibrate, log_predictions
from forerun.evidence.fitting.measured_steps import device_samples, layer_graph
from forerun.evidence.records.measurement import JobKind, Summary
from forerun.graph.graph import OpClass, StepPart, at_batch
from forerun.question.devices import find_device
from made_measurements import measurement

needs_keras = pytest.mark.skipif(util.find_spec("keras") is None, reason="the extra 'keras' is not installed")

DEVICE = find_device("cpu")
LAYER = {
    "batch_size": 4, "in_size": 16, "in_features": 8, "out_features": 8, "kernel": 3, "use_bias": True,
    "mode": "train_step", "optimizer": "sgd-plain", "activation": "none",
}  # fmt: skip


def of_keras(found):
    around = replace(found.circumstances, framework="keras", framework_version="3.15.1, tensorflow 2.21.0")
    return replace(found, circumstances=around)


def layer(number, kind="conv2d", **changed):
    parameters = {**LAYER, "layout": "nhwc", **changed}
    made = measurement(number, kind=JobKind.LAYER, subject=kind, family=kind, parameters=parameters)
    return of_keras(made)


def model(number, subject="keras:mlp:depth=1,width=8", step_s=0.02):
    parameters = {"batch_size": 8, "image_size": 4, "layout": "nhwc", "optimizer": "sgd", "phase": "train"}
    summary = Summary(median_s=step_s, low_s=step_s, high_s=step_s, is_stable=True)
    made = measurement(
        number,
        subject=subject,
        family="mlp",
        parameters=parameters,
        repetitions_s=(step_s,) * 3,
        summary=summary,
    )
    return of_keras(made)


@pytest.fixture(scope="module")
def samples():
    found, reasons = device_samples(
        [layer(1), layer(2, mode="forward"), layer(3, kernel=4), model(4), model(5, "keras:ResNet51")],
        DEVICE,
        loop_s=0.005,
    )
    return {sample.measurement.key: sample for sample in found}, reasons


@needs_keras
def test_a_layer_of_keras_does_the_work_of_the_same_layer_of_pytorch(samples):
    found, _ = samples
    graph, _ = layer_graph("conv2d", LAYER)
    sample = found[f"{1:032x}"]
    is_conv = sample.ops.op_class == OpClass.CONV
    ours = at_batch(sample.ops.flops, 4) * sample.ops.count
    theirs = at_batch(graph.ops.flops, 4) * graph.ops.count
    assert is_conv.sum() == 3  # forward, and the gradients of input and filter
    assert ours[is_conv].sum() == theirs[graph.ops.op_class == OpClass.CONV].sum()
    assert (sample.ops.step_part == StepPart.OPTIMIZER).any()
    assert not sample.is_whole_model


@needs_keras
def test_one_that_cannot_be_traced_leaves_the_others_alone(samples):
    found, reasons = samples
    assert set(found) == {f"{number:032x}" for number in (1, 2, 4)}
    assert any("choose an odd kernel" in reason for reason in reasons)
    assert any("no Keras network 'ResNet51'" in reason for reason in reasons)


@needs_keras
def test_the_loop_is_taken_from_models_and_given_back_in_predictions(samples):
    sample = samples[0][f"{4:032x}"]
    assert sample.step_time_s == 0.02
    assert sample.ops_time_s == pytest.approx(0.015)
    assert sample.fit_sample(1.0).step_time_s == pytest.approx(0.015)
    assert samples[0][f"{1:032x}"].loop_s == 0
    assert replace(sample, loop_s=0.0199).ops_time_s == pytest.approx(0.002)  # never nothing
    weights = load_weights(shipped_weights_path())
    without, with_loop = (
        np.exp(log_predictions([replace(sample, loop_s=loop_s)], weights)[0]) for loop_s in (0.0, 0.005)
    )
    assert with_loop == pytest.approx(without + 0.005)
    result = calibrate([sample], DEVICE, weights, loop_s=0.005)
    assert result.weights.calibrated_stack == "keras"
    assert result.weights.step_cost_s == 0.005


@needs_keras
def test_few_models_give_a_finite_interval_that_holds_the_worst_of_them(samples):
    sample = samples[0][f"{4:032x}"]
    steps = [replace(sample, step_time_s=0.5 * 1.3**i, group=f"family {i}") for i in range(5)]
    result = calibrate(steps, DEVICE, load_weights(shipped_weights_path()))
    law = result.weights.provenance["intervals"]["calibrated"]
    assert np.isfinite(law["quantile"])
    assert law["quantile"] * law["base"] >= np.abs(result.log_after).max() - 1e-9


def test_a_layer_without_operations_is_no_sample():
    null = layer(9, "null", in_features=1)
    assert device_samples([null, measurement(10, kind=JobKind.LAYER, subject="null")], DEVICE) == ([], [])


def test_the_cost_of_the_loop_is_a_step_of_next_to_no_work_less_a_call():
    def timed(number, time_s, **changed):
        return measurement(number, repetitions_s=(time_s,) * 3, **changed)

    loop = timed(1, 0.003, subject=LOOP_MODEL)
    null = timed(2, 0.001, kind=JobKind.LAYER, subject="null")
    assert loop_cost_s([loop, null, timed(3, 9.0)]) == pytest.approx(0.002)
    assert loop_cost_s([null]) == 0
    assert loop_cost_s([]) == 0


def test_a_calibration_of_keras_begins_with_its_calls_and_its_loop():
    shared = {"is_gpu": False, "precision": "fp32", "framework": "keras"}
    layers, models = calibration_layers(40, **shared), calibration_models(**shared)
    assert [job.subject for job in layers[:2]] == ["null", "null"]
    assert models[0].subject == LOOP_MODEL
    assert {job.parameters["layout"] for job in [*layers, *models]} == {"nhwc"}
    assert all(job.subject.startswith("keras:") for job in models)
    assert "grouped_conv2d" not in {job.subject for job in layers}


def test_nothing_of_keras_among_the_records_is_an_error(tmp_path):
    import forerun
    from forerun.evidence.records.record_store import RecordStore

    with RecordStore.open(tmp_path / "r.sqlite") as store:
        store.add(measurement(1))
    with pytest.raises(RecordError, match="expected measurements of keras"):
        forerun.calibrate("cpu", framework="keras", from_records=tmp_path / "r.sqlite")
