"""Steps of a script's model over a space: what ``predict`` says of each point, and where nothing is said."""

import pytest

import forerun
from forerun.base.errors import ForerunError, InvalidSetupError, UnknownModelError, UsageError
from forerun.cost.time.correction import CALIBRATIONS_VARIABLE, calibration_path
from forerun.cost.time.weights import save_weights
from forerun.question.devices import find_device
from forerun.question.devices.catalogue import device_at
from forerun.script.tune import check_model, planned_steps, predictable_device
from forerun.script.tuning.laws import DevicePoint
from forerun.script.tuning.options import TuneSettings
from forerun.script.tuning.space import space_of
from made_calibrations import made_calibration
from made_profiles import made_profile

SPACE = space_of(
    {
        "parameters": {
            "batch_size": {"values": [16, 64], "map": "--batch-size"},
            "amp": {"values": ["off", "bf16", "fp16"]},
            "channels_last": {"values": [False, True]},
            "image_size": {"values": [32, 48], "map": "--size"},
        }
    }
)
BASE = {"batch_size": 8, "amp": "off", "channels_last": False, "image_size": 32}
MODEL = TuneSettings(model="cnn:depth=2,base_filters=32")
ADAM = {"name": "Adam"}


def test_each_point_of_a_space_is_what_predict_says_of_it():
    found = planned_steps(
        MODEL, find_device("t4"), SPACE, BASE, made_profile("cuda:0", optimizer=ADAM), memory_bytes=15e9
    )
    assert found.own == DevicePoint(batch_size=8, image_size=32)
    assert len(found.step_s) == 3 * 3 * 2 * 2
    for point, words in (
        (found.own, {}),
        (
            DevicePoint(batch_size=64, amp="fp16", channels_last=True, image_size=48),
            {"precision": "amp", "layout": "nhwc"},
        ),
        (DevicePoint(batch_size=16, amp="bf16", image_size=48), {"precision": "amp-bf16"}),
    ):
        asked = {"batch_size": point.batch_size, "image_size": point.image_size, "optimizer": "adam", **words}
        alone = forerun.predict(MODEL.model, device="t4", **asked)
        assert found.step_s[point] == pytest.approx(alone.step_time_s.value, rel=1e-6)
        assert found.peak_bytes[point] == pytest.approx(alone.peak_memory_bytes.high, rel=0.05)
    values = {"batch_size": 64, "amp": "fp16"}
    ratio = found.step_s[DevicePoint(batch_size=64, amp="fp16", image_size=32)] / found.step_s[found.own]
    assert found.relative_time(values) == ratio
    assert found.memory_bytes == 15e9
    assert found.source == "cnn:depth=2,base_filters=32 on NVIDIA T4 (datasheet only)"


def test_a_processor_needs_a_calibration_and_says_what_that_measured(tmp_path, monkeypatch):
    monkeypatch.setenv(CALIBRATIONS_VARIABLE, str(tmp_path))
    profile = made_profile("cpu", optimizer=ADAM)
    with pytest.raises(InvalidSetupError, match="this processor has no calibration; make one with"):
        predictable_device("cpu")
    here = device_at(None)
    asked = (MODEL, here, SPACE)
    save_weights(made_calibration(here), calibration_path(here))
    assert predictable_device("cpu") == here
    found = planned_steps(*asked, BASE, profile, memory_bytes=1e9)
    assert {point.amp for point in found.step_s} == {"off"}
    assert found.source.endswith("(calibrated)")
    # The memory of processes is another matter than that of a GPU.
    assert found.memory_bytes is None
    with pytest.raises(InvalidSetupError, match="says nothing of bf16, in which the script runs"):
        planned_steps(*asked, {**BASE, "amp": "bf16"}, profile, memory_bytes=None)
    with pytest.raises(InvalidSetupError, match="nothing tells the samples of a step"):
        planned_steps(*asked, {}, made_profile("cpu", batch_size=None), memory_bytes=None)


def test_a_gpu_that_is_not_there_is_a_reason():
    with pytest.raises(ForerunError, match="GPUs, got cuda:99"):
        predictable_device("cuda:99")


@pytest.mark.parametrize(
    ("given", "size"), [({}, 96), ({"image_size": 64}, 64), ({"input_shape": (3, 80, 80)}, None)]
)
def test_sizes_of_images_are_the_users_or_the_scripts(given, size):
    settings = TuneSettings(model=MODEL.model, **given)
    space = space_of({"parameters": {"amp": {"values": ["off"]}}})
    profile = made_profile("cuda:0", optimizer=ADAM)
    found = planned_steps(
        settings, find_device("t4"), space, {"batch_size": 8}, profile, image_size=96, memory_bytes=None
    )
    assert found.own.image_size == size


@pytest.mark.parametrize(
    ("model", "kind", "message"),
    [
        (TuneSettings(model="torchvision:resnet19"), UnknownModelError, "did you mean"),
        (
            TuneSettings(model="keras:ResNet50"),
            UsageError,
            "expected a model of PyTorch, got 'keras:ResNet50'",
        ),
        (TuneSettings(model="cnn:depth=2", input_shape=(3, 32, 32)), UsageError, "leave --input-shape out"),
        (TuneSettings(model="nowhere.py:net"), UnknownModelError, "nowhere.py"),
        (TuneSettings(model="cnn:depth=2", image_size=1), InvalidSetupError, "image"),
    ],
)
def test_a_model_that_cannot_be_meant_is_told_before_anything_runs(model, kind, message):
    with pytest.raises(kind, match=message):
        check_model(model, SPACE)
