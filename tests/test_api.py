"""The calls a user makes: answers that agree with each other, and clear refusals."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan

import numpy as np
import pytest
import torch
from torch import nn

import forerun
from forerun.base.errors import InvalidSetupError, UnknownDeviceError, UnknownModelError
from forerun.prediction.estimate import Estimate
from forerun.question.devices import find_device

MODEL = "cnn:depth=1,base_filters=8"


def predict(model=MODEL, device="rtx-3090", **options) -> Estimate:
    return forerun.predict(model, device=device, **options)


class PairsOfSamples(nn.Module):
    """More operations for a larger batch."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x):
        return torch.cat([self.layer(part) for part in x.split(2)])


# ---------------------------------------------------------------------------------------------------------
# answers


def test_every_value_has_its_interval():
    estimate = predict(dataset="cifar10", epochs=3, price_usd_per_hour=1.5)
    for name in (
        "step_time_s",
        "throughput_samples_per_s",
        "epoch_time_s",
        "job_time_s",
        "peak_memory_bytes",
        "cost_usd",
        "energy_j",
        "max_batch_size",
    ):
        interval = getattr(estimate, name)
        assert 0 < interval.value < inf, name
        assert interval.low <= interval.value <= interval.high, name
    assert estimate.fits == "yes"
    assert estimate.num_steps_per_epoch == 1563
    assert estimate.throughput_samples_per_s.value == pytest.approx(32 / estimate.step_time_s.value)
    assert sum(part.time_s for part in estimate.breakdown) == pytest.approx(estimate.step_time_s.value)
    assert sum(part.size_bytes for part in estimate.memory_parts) == pytest.approx(
        estimate.peak_memory_bytes.value
    )


def test_epoch_job_and_cost_follow_from_the_step():
    estimate = predict(dataset_size=3200, epochs=4, startup_s=10, checkpoint_s=2, price_usd_per_hour=3.6)
    epoch_s = 100 * estimate.step_time_s.value + 2
    assert estimate.epoch_time_s.value == pytest.approx(epoch_s)
    assert estimate.job_time_s.value == pytest.approx(4 * epoch_s + 10)
    assert estimate.cost_usd.value == pytest.approx(estimate.job_time_s.value * 1e-3)


def test_the_last_partial_batch_is_predicted_at_its_own_size():
    full, partial = predict(dataset_size=3200), predict(dataset_size=3205)
    five = predict(batch_size=5).step_time_s.value
    assert partial.epoch_time_s.value - full.epoch_time_s.value == pytest.approx(five, rel=1e-4)
    assert partial.num_steps_per_epoch == 101


def test_validation_costs_an_inference_pass():
    plain, validated = (predict(dataset_size=3200, validation_size=n) for n in (None, 64))
    inference = predict(phase="inference").step_time_s.value
    gain = validated.epoch_time_s.value - plain.epoch_time_s.value
    assert gain == pytest.approx(2 * inference, rel=1e-4)


def test_what_was_not_asked_for_is_none_with_a_reason():
    estimate = predict()
    assert estimate.epoch_time_s is estimate.job_time_s is estimate.cost_usd is None
    assert any("--dataset" in note for note in estimate.notes)
    epoch = predict(dataset="mnist")
    assert epoch.job_time_s is None
    assert any("--epochs" in note for note in epoch.notes)
    assert any("--price" in note for note in epoch.notes)


def test_a_module_and_a_device_object_are_taken():
    module = nn.Sequential(nn.Flatten(), nn.Linear(12, 3))
    estimate = predict(module, replace(find_device("t4"), name="my-card"), input_shape=(3, 2, 2))
    assert estimate.device == "my-card"
    assert estimate.num_parameters == 39
    assert all(parameter.device.type == "cpu" for parameter in module.parameters())


def test_a_device_that_is_no_gpu_is_answered_with_a_warning():
    estimate = predict(device="cpu")
    assert estimate.energy_j is None
    assert any("order of magnitude" in note for note in estimate.notes)


@pytest.mark.parametrize(
    ("precision", "note"), [("tf32", "no TF32"), ("bf16", "no bf16"), ("amp-bf16", "no bf16")]
)
def test_a_precision_the_device_lacks_is_answered_with_its_fallback(precision, note):
    assert any(note in text for text in predict(device="t4", precision=precision).notes)
    assert not any(note in text for text in predict(device="a100-sxm4-40gb", precision=precision).notes)


@pytest.mark.parametrize("phase", ["forward", "inference"])
def test_without_training_there_is_no_optimizer(phase):
    with pytest.raises(
        InvalidSetupError, match=f"--optimizer cannot be used here: phase {phase} updates no weights"
    ):
        predict(phase=phase, optimizer="adam")
    estimate = predict(phase=phase)
    assert estimate.optimizer == "none"
    assert estimate.step_time_s.value > 0


def test_names_are_read_without_case_and_with_underscores():
    assert predict(precision="AMP_BF16", layout="NHWC", optimizer="AdamW").precision == "amp-bf16"


def test_a_model_that_is_not_affine_is_traced_at_its_batch_size():
    estimates = [predict(PairsOfSamples(), batch_size=n, input_shape=(8,)) for n in (4, 64)]
    assert estimates[1].flops_per_sample == pytest.approx(estimates[0].flops_per_sample, rel=0.2)
    assert estimates[0].max_batch_size is None
    assert any("batch size" in note for note in estimates[0].notes)


# ---------------------------------------------------------------------------------------------------------
# sweeps


def test_a_sweep_says_what_single_predictions_say():
    devices, sizes, precisions = ("rtx-3090", "t4"), (1, 17, 256), ("fp32", "amp")
    found = forerun.sweep(MODEL, devices=devices, batch_sizes=sizes, precisions=precisions)
    assert found.step_time_s.shape == (2, 2, 3)
    for i, device in enumerate(devices):
        for j, precision in enumerate(precisions):
            for k, size in enumerate(sizes):
                one = predict(device=device, batch_size=size, precision=precision)
                swept = (found.step_time_s, found.step_time_low_s, found.step_time_high_s)
                expected = (one.step_time_s.value, one.step_time_s.low, one.step_time_s.high)
                assert [float(values[i, j, k]) for values in swept] == pytest.approx(expected, rel=1e-6)
                rate = float(found.throughput_samples_per_s[i, j, k])
                assert rate == pytest.approx(one.throughput_samples_per_s.value, rel=1e-6)
    np.testing.assert_allclose(found.throughput_low_samples_per_s * found.step_time_high_s, [[sizes] * 2] * 2)
    np.testing.assert_allclose(found.throughput_high_samples_per_s * found.step_time_low_s, [[sizes] * 2] * 2)
    assert (found.step_time_low_s <= found.step_time_s).all()
    assert (found.step_time_s <= found.step_time_high_s).all()


def test_memory_of_a_sweep_grows_with_the_batch_and_shrinks_with_precision():
    found = forerun.sweep(
        MODEL, devices=["rtx-3090"], batch_sizes=[64, 1024, 8192], precisions=["fp32", "fp16"]
    )
    assert (np.diff(found.peak_memory_bytes, axis=2) > 0).all()
    assert found.peak_memory_bytes[0, 1, 2] < found.peak_memory_bytes[0, 0, 2]
    one = predict(batch_size=8192)
    assert found.peak_memory_bytes[0, 0, 2] == pytest.approx(one.peak_memory_bytes.value, rel=0.25)
    assert found.device_memory_bytes.shape == (1,)


def test_a_sweep_of_a_model_that_is_not_affine_equals_predictions():
    module, sizes = PairsOfSamples(), (2, 10, 40)
    found = forerun.sweep(module, devices=["t4", "l4"], batch_sizes=sizes, input_shape=(8,))
    for i, device in enumerate(("t4", "l4")):
        expected = [predict(module, device, batch_size=n, input_shape=(8,)).step_time_s.value for n in sizes]
        assert found.step_time_s[i, 0].tolist() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("empty", ["devices", "batch_sizes", "precisions"])
def test_an_empty_sweep_is_refused(empty):
    axes = {"devices": ["t4"], "batch_sizes": [1], "precisions": ["fp32"]} | {empty: []}
    with pytest.raises(InvalidSetupError, match="at least one device, one batch size and one precision"):
        forerun.sweep(MODEL, **axes)


# ---------------------------------------------------------------------------------------------------------
# refusals


@pytest.mark.parametrize("size", [0, -1, 10**9])
def test_batch_sizes_out_of_range(size):
    with pytest.raises(InvalidSetupError, match=r"batch size must be (at least 1|at most 10,000,000), got"):
        predict(batch_size=size)
    with pytest.raises(InvalidSetupError, match=r"batch size must be (at least 1|at most 10,000,000), got"):
        forerun.sweep(MODEL, devices=["t4"], batch_sizes=[4, size])


@pytest.mark.parametrize("size", [True, 2.5, nan, inf, "many", "32", [32]])
def test_batch_sizes_that_are_no_whole_numbers(size):
    with pytest.raises(InvalidSetupError, match="batch size must be a whole number"):
        predict(batch_size=size)


def test_a_whole_number_of_another_type_is_taken():
    assert (
        predict(batch_size=np.int64(8)).batch_size_per_device == predict(batch_size=8.0).batch_size_per_device
    )


@pytest.mark.parametrize(
    ("device", "is_assumed"), [("16xa100-sxm4-40gb", False), ("32xh100-sxm", True), ("72xgb200", False)]
)
def test_more_devices_than_a_node_holds_are_said_to_be_assumed_in_one(device, is_assumed):
    notes = " ".join(predict(device=device).notes)
    assert ("assumed to be in one node" in notes) is is_assumed
    assert "largest batch is for one device" in notes
    assert "largest batch is for one device" not in " ".join(predict(device=device, strategy="fsdp").notes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "fp4"}, r"unknown precision 'fp4'; expected one of fp32, tf32, amp.*fp8"),
        ({"precision": "fp8"}, r"3090 has no fp8; give --precision bf16, or a device with fp8"),
        ({"layout": "nhcw"}, r"unknown layout 'nhcw'; expected one of nchw, nhwc"),
        ({"phase": "backward"}, r"unknown phase 'backward'; expected one of train, forward, inference"),
        ({"optimizer_implementation": "apex"}, r"unknown optimizer implementation 'apex'"),
        ({"optimizer": "adma"}, r"unknown optimizer 'adma'; did you mean ada.*known: none, sgd"),
        ({"num_devices": 3, "num_nodes": 2}, r"3 devices cannot be spread evenly over 2 nodes"),
        ({"num_nodes": 3}, r"1 devices cannot be spread evenly over 3 nodes"),
        ({"num_devices": 0}, r"devices must be at least 1, got 0"),
        ({"num_devices": -2}, r"devices must be at least 1, got -2"),
        ({"num_devices": 2, "strategy": "dpp"}, r"unknown strategy 'dpp'; expected one of ddp, zero1"),
        ({"num_devices": 2, "phase": "inference"}, r"several devices are predicted in training only"),
        ({"epochs": 3}, r"epochs: expected a dataset"),
        ({"validate": True, "startup_s": 5.0}, r"validate, start-up time: expected a dataset"),
        ({"dataset": "digits", "validate": True}, r"digits has no validation split.*--validation-size"),
        ({"dataset": "mnist", "dataset_size": 5}, r"either a dataset or a dataset size, not both"),
        ({"dataset": "cifar11"}, r"unknown dataset 'cifar11'; did you mean cifar10"),
        ({"dataset_size": 0}, r"dataset size must be at least 1"),
        ({"dataset_size": 2.5}, r"dataset size must be a whole number"),
        ({"dataset": "mnist", "epochs": 0}, r"number of epochs must be above zero"),
        ({"dataset": "mnist", "epochs": nan}, r"number of epochs must be a finite number"),
        ({"dataset": "mnist", "validation_size": -1}, r"validation size must be zero or more"),
        ({"dataset": "mnist", "startup_s": -1.0}, r"start-up time must be zero or more"),
        ({"price_usd_per_hour": nan}, r"price of a device \[USD/h\] must be a finite number, got nan"),
        ({"price_usd_per_hour": -1.0}, r"price of a device \[USD/h\] must be zero or more"),
        ({"price_usd_per_hour": inf}, r"price of a device \[USD/h\] must be a finite number"),
        ({"torch_version": "newest"}, r"a PyTorch version looks like 2.4 or 2.4.1, got 'newest'"),
    ],
    ids=str,
)
def test_questions_that_cannot_be_asked(options, message):
    with pytest.raises(InvalidSetupError, match=message):
        predict(**options)


@pytest.mark.parametrize(("options", "got"), [({}, "none"), ({"on": "t4"}, "the unknown setting 'on'")])
def test_a_question_without_a_device(options, got):
    with pytest.raises(InvalidSetupError, match=f"expected the device of the run, got {got}"):
        forerun.predict(MODEL, **options)


@pytest.mark.parametrize(("name", "value"), [("precision", "fp16"), ("batch_size", 8)])
def test_a_sweep_takes_lists_of_what_it_is_over(name, value):
    with pytest.raises(InvalidSetupError, match=rf"give {name}e?s=\[{value!r}\]"):
        forerun.sweep("mnist-cnn", devices=["t4"], batch_sizes=[8], **{name: value})


def test_a_torch_version_no_sweep_can_read():
    with pytest.raises(InvalidSetupError, match="a PyTorch version looks like"):
        forerun.sweep(MODEL, devices=["t4"], batch_sizes=[1], torch_version="newest")


@pytest.mark.parametrize("overhead", [-1.0, nan, inf])
def test_memory_overheads_that_cannot_be_meant(overhead):
    with pytest.raises(InvalidSetupError, match="overhead"):
        predict(memory_overhead_bytes=overhead)


def test_an_unknown_device_lists_near_matches():
    with pytest.raises(UnknownDeviceError, match="rtx-3090"):
        predict(device="rtx-3091")


def test_an_unknown_model_lists_near_matches():
    with pytest.raises(UnknownModelError, match="resnet50"):
        predict("torchvision:resnet51")


def test_evaluation_is_loaded_on_first_use_and_nothing_else_is_there():
    assert forerun.Evaluation.__name__ == "Evaluation"
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = forerun.nothing


def test_the_validation_split_of_a_named_dataset_is_evaluated_on_request():
    asked = {"device": "rtx-3090", "batch_size": 64, "image_size": 32, "epochs": 2}
    without = forerun.predict("torchvision:resnet18", dataset="cifar10", **asked)
    with_split = forerun.predict("torchvision:resnet18", dataset="cifar10", validate=True, **asked)
    by_hand = forerun.predict("torchvision:resnet18", dataset="cifar10", validation_size=10_000, **asked)
    assert without.epoch_time_s.value < with_split.epoch_time_s.value == by_hand.epoch_time_s.value
    with pytest.raises(InvalidSetupError, match="--validation-size"):
        forerun.predict("torchvision:resnet18", dataset_size=1000, validate=True, **asked)


@pytest.mark.parametrize("model", ["torchvision:resnet18", "cnn:depth=2,base_filters=16"])
def test_a_long_sweep_is_interpolated_close_to_single_answers(model):
    sizes = list(range(8, 808, 8))
    swept = forerun.sweep(model, devices=["rtx-3090", "t4"], batch_sizes=sizes, precisions=["amp"])
    assert (np.diff(swept.step_time_s, axis=-1) >= 0).all()
    for index in (3, 41, 97):
        for row, device in enumerate(("rtx-3090", "t4")):
            single = forerun.predict(
                model, device=device, batch_size=sizes[index], precision="amp"
            ).step_time_s
            assert swept.step_time_s[row, 0, index] == pytest.approx(single.value, rel=0.04)


def test_what_is_not_given_has_one_default_in_every_verb():
    left_out = predict()
    said = predict(
        batch_size=32,
        precision="fp32",
        layout="nchw",
        optimizer="sgd",
        phase="train",
        accumulation=1,
        compile=None,
    )
    assert left_out.run == said.run
    swept = forerun.sweep(MODEL, devices=["rtx-3090"], batch_sizes=[32])
    assert swept.run == left_out.run
