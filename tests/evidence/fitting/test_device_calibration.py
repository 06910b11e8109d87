"""Calibration on a device whose true speed is known, because it was made up from the shipped model."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from forerun.base.errors import RecordError, UsageError
from forerun.cost.time.correction import (
    CALIBRATIONS_VARIABLE,
    calibration_path,
    find_calibration,
    load_calibration,
)
from forerun.cost.time.step_times import step_times
from forerun.cost.time.weights import load_weights, network_key, save_weights, shipped_weights_path
from forerun.evidence.calibrate import calibration_layers, calibration_models
from forerun.evidence.fitting.device_calibration import REFINE_SETTINGS, WORSE_BY, calibrate, log_predictions
from forerun.evidence.fitting.measured_steps import device_samples, layer_graph
from forerun.evidence.records.measurement import ANCHOR_FAMILY, JobKind, Outcome, Summary
from forerun.graph.graph import OpClass, StepPart
from forerun.prediction.estimate import Provenance
from forerun.prediction.step import prepare, provenance_of, timed_steps
from forerun.question.devices import find_device
from made_measurements import measurement
from op_models import graph_named

torch.set_num_threads(1)

DEVICE = find_device("rtx-4070")
MODELS = ("cnn:depth=2,base_filters=32", "cifar-resnet:20", "mnist-cnn", "torchvision:squeezenet1_1")


def made(job, number):
    parameters = {name: value for name, value in job.parameters.items() if name != "precision"}
    return measurement(
        number,
        kind=job.kind,
        subject=job.subject,
        family=job.family,
        parameters=parameters,
        device="rtx-4070",
    )


def true_times(samples, weights, factor=3.0, conv_factor=1.8):
    """A device three times slower than the model thinks, and convolutions slower still."""
    logs = []
    for sample in samples:
        times = step_times(
            sample.ops, [sample.point], weights, np.zeros((len(weights.networks), 1, 4)), with_kernels=True
        )
        is_conv = np.isin(sample.ops.op_class, [OpClass.CONV, OpClass.DEPTHWISE_CONV])
        share = (times.kernel_s[0] * is_conv).sum() / times.kernel_s[0].sum()
        logs.append(np.log(times.step_s[0] * factor * (1 + share * (conv_factor - 1))))
    return np.asarray(logs)


@pytest.fixture(scope="module")
def weights():
    return load_weights(shipped_weights_path())


@pytest.fixture(scope="module")
def samples(weights):
    layers = calibration_layers(48, is_gpu=False, precision="fp32")
    models = [
        replace(
            job,
            parameters={**job.parameters, "batch_size": size},
            subject=model,
            family=model.partition(",")[0],
        )
        for model in MODELS
        for job in calibration_models(is_gpu=True, precision="fp32")[:1]
        for size in (16, 64)
    ]
    models = [
        replace(job, parameters={k: v for k, v in job.parameters.items() if k != "image_size"})
        for job in models
    ]
    found, reasons = device_samples([made(job, i) for i, job in enumerate([*layers, *models])], DEVICE)
    assert not reasons
    times = np.exp(true_times(found, weights))
    return [
        replace(sample, step_time_s=float(t), relative_noise=0.01)
        for sample, t in zip(found, times, strict=True)
    ]


def test_refining_finds_a_device_that_is_unlike_its_datasheet(samples, weights):
    quick = replace(REFINE_SETTINGS, num_iterations=140)  # as exact here as 250, in half the time
    result = calibrate(samples, DEVICE, weights, num_folds=2, settings=quick)
    assert (result.method, result.num_models) == ("refined", 8)
    before, after = np.abs(result.log_before), np.abs(result.log_after)
    assert before.mean() > 0.9
    assert after.mean() < 0.25
    assert (
        provenance_of(DEVICE, samples[0].point.setup, result.weights, samples[0].ops) is Provenance.CALIBRATED
    )
    assert (
        provenance_of(find_device("rtx-3090"), samples[0].point.setup, result.weights, samples[0].ops)
        is not Provenance.CALIBRATED
    )
    residuals = np.log([s.step_time_s for s in samples]) - log_predictions(samples, result.weights)
    assert np.abs(residuals).mean() < 0.4 * np.abs(result.log_before).mean()


def test_a_few_steps_give_offsets(samples, weights):
    whole = [sample for sample in samples if sample.is_whole_model]
    result = calibrate(whole, DEVICE, weights)
    assert result.method == "offset"
    assert np.abs(result.log_after).mean() < 0.4 * np.abs(result.log_before).mean()
    assert len(result.weights.class_offsets) == len(OpClass)


def test_one_odd_step_among_many_is_left_out_and_told(samples, weights):
    whole = [sample for sample in samples if sample.is_whole_model]
    odd = replace(whole[0], step_time_s=9.0 * whole[0].step_time_s)
    result, clean = (calibrate(rows, DEVICE, weights) for rows in ([odd, *whole[1:]], whole[1:]))
    (told,) = result.refused
    assert whole[0].measurement.subject in told
    assert clean.refused == ()
    assert (result.num_models, clean.num_models) == (7, 7)
    assert result.weights.class_offsets == pytest.approx(clean.weights.class_offsets)


def by_turns(samples, weights, *factors):
    """Whole models with the times that the model gives, times a factor by turns of the families."""
    whole = [sample for sample in samples if sample.is_whole_model]
    families = sorted({sample.group for sample in whole})
    return [
        replace(sample, step_time_s=float(t) * factors[families.index(sample.group) % len(factors)])
        for sample, t in zip(whole, np.exp(log_predictions(whole, weights)), strict=True)
    ]


def test_measurements_that_contradict_each_other_are_refused(samples, weights):
    with pytest.raises(RecordError, match=r"left out .* after the calibration"):
        calibrate(by_turns(samples, weights, 0.5, 2.0), DEVICE, weights)


def test_a_few_models_left_out_that_are_predicted_a_little_worse_are_no_reason_to_refuse(samples, weights):
    result = calibrate(by_turns(samples, weights, 1.03, 1.1), DEVICE, weights)
    before, after = (np.abs(np.expm1(-logs)).mean() for logs in (result.log_before, result.log_after))
    assert before < after < WORSE_BY * before


def test_a_measured_step_is_predicted_as_it_was_measured_and_more_surely(samples, weights):
    one = next(sample for sample in samples if sample.is_whole_model)
    result = calibrate([one], DEVICE, weights)
    was, said = log_predictions([one], weights)[0], log_predictions([one], result.weights)[0]
    assert was < said < np.log(one.step_time_s) + 0.03
    assert said > np.log(one.step_time_s) - 0.03
    model = prepare(graph_named("cnn"))
    setup = one.point.setup

    def width(model_weights):
        _, low, high = timed_steps(model, [DEVICE], [setup], model_weights).ends_s()
        return float(high[0] / low[0])

    measured = replace(
        result.weights,
        runs=tuple(replace(run, network=network_key(model.ops)) for run in result.weights.runs),
    )
    assert width(measured) < 1.1 < width(weights)


def test_a_calibration_is_found_for_its_device_only(samples, weights, tmp_path, monkeypatch):
    monkeypatch.setenv(CALIBRATIONS_VARIABLE, str(tmp_path))
    assert find_calibration(DEVICE) is None
    result = calibrate([s for s in samples if s.is_whole_model], DEVICE, weights)
    save_weights(result.weights, calibration_path(DEVICE))
    found = find_calibration(DEVICE)
    assert found is not None
    assert found.class_offsets == pytest.approx(result.weights.class_offsets)
    assert log_predictions(samples[:5], found) == pytest.approx(
        log_predictions(samples[:5], result.weights), abs=1e-6
    )
    with pytest.raises(UsageError, match="is a calibration of"):
        load_calibration(calibration_path(DEVICE), find_device("rtx-3090"))
    with pytest.raises(UsageError, match="no single device"):
        load_calibration(shipped_weights_path(), DEVICE)
    with pytest.raises(UsageError, match="forerun calibrate"):
        load_calibration(tmp_path / "none.safetensors", DEVICE)


def test_nothing_measured_is_an_error(weights):
    failed = measurement(1, outcome=Outcome.FAILED, repetitions_s=(), summary=None, reason="x")
    null = measurement(2, kind=JobKind.NULL, subject="null")
    assert device_samples([failed, null], DEVICE) == ([], [])
    with pytest.raises(RecordError, match="forerun measure model"):
        calibrate([], DEVICE, weights)


def test_what_cannot_be_traced_is_told(weights):
    unknown = measurement(3, subject="torchvision:resnet_of_the_future")
    found, reasons = device_samples([unknown], DEVICE)
    assert not found
    assert "resnet_of_the_future" in reasons[0]


def test_a_layer_holds_its_own_kernels_and_no_loss():
    graph, setup = layer_graph(
        "conv2d",
        {
            "batch_size": 4, "in_size": 16, "in_features": 8, "out_features": 8, "kernel": 3, "use_bias": True,
            "mode": "train_step", "optimizer": "sgd-plain", "activation": "none",
        },
    )  # fmt: skip
    found = sorted(
        (OpClass(c).name, StepPart(p).name)
        for c, p in zip(graph.ops.op_class, graph.ops.step_part, strict=True)
    )
    assert found == [
        ("CONV", "BACKWARD"),
        ("CONV", "FORWARD"),
        ("CONV", "WEIGHT_GRADIENT"),
        ("OPTIMIZER", "OPTIMIZER"),
        ("REDUCE", "BACKWARD"),
    ]
    assert setup.batch_size_per_device == 4


def test_copies_of_a_layer_hold_each_kernel_as_often():
    asked = {
        "batch_size": 4, "in_size": 16, "in_features": 8, "out_features": 8, "kernel": 3, "use_bias": True,
        "mode": "train_step", "optimizer": "none", "activation": "relu",
    }  # fmt: skip
    one, _ = layer_graph("conv2d", asked)
    three, _ = layer_graph("conv2d", {**asked, "copies": 3})
    assert len(three.ops.op_class) == 3 * len(one.ops.op_class)
    assert three.num_parameters == 3 * one.num_parameters


def test_noise_is_half_the_interval_of_the_median():
    summary = Summary(median_s=2.0, low_s=1.9, high_s=2.3, is_stable=True)
    (found,), _ = device_samples([measurement(1, summary=summary)], DEVICE)
    assert found.step_time_s == 2.0
    assert found.relative_noise == pytest.approx(0.1)


def test_anchors_are_no_samples():
    anchor = measurement(1, family=ANCHOR_FAMILY, device="rtx-4070")
    assert device_samples([anchor], DEVICE) == ([], [])
