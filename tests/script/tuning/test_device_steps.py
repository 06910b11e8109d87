"""What a study tries first where the steps of the script's model are predicted."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.script.tuning.laws import (
    DevicePoint,
    DeviceSteps,
    device_points,
    expected_rate,
    first_guesses,
    script_point,
)
from forerun.script.tuning.options import parse_budget, parse_objectives
from forerun.script.tuning.space import space_of
from forerun.script.tuning.study import TrialStore
from forerun.script.tuning.trial import TrialOrder
from forerun.script.tuning.tuner import Task, Tuner
from made_profiles import made_profile

SPACE = space_of(
    {
        "parameters": {
            "batch_size": {"values": [8, 32], "map": "--batch-size"},
            "num_workers": {"values": [0, 3]},
            "amp": {"values": ["off", "bf16"]},
            "channels_last": {"values": [False, True]},
            "image_size": {"values": [32, 64], "map": "--size"},
            "optimizer_implementation": {"values": ["foreach", "fused"]},
        }
    }
)
BASE = {
    "batch_size": 8,
    "num_workers": 0,
    "amp": "off",
    "channels_last": False,
    "image_size": 64,
    "optimizer_implementation": "foreach",
}
OWN = DevicePoint(batch_size=8, image_size=64)
COMPUTING = {"wait_s": 0.0, "kernels_s": 0.075}
FACTORS = {"bf16": 0.5, "channels_last": 1.2, "small": 0.3}


def predicted(factors=FACTORS, *, memory_bytes=None, lacking=()):
    """Steps that grow with the batch; half precision and small images are faster, the other memory order slower."""
    axes = device_points(SPACE, OWN)
    points = [DevicePoint(**dict(zip(axes, row, strict=True))) for row in itertools.product(*axes.values())]
    steps = {
        point: 0.001
        * point.batch_size
        * (factors["bf16"] if point.amp == "bf16" else 1.0)
        * (factors["channels_last"] if point.channels_last else 1.0)
        * (factors["small"] if point.image_size == 32 else 1.0)
        for point in points
    }
    return DeviceSteps(
        source="a network on a device",
        own=OWN,
        step_s={point: step_s for point, step_s in steps.items() if point.amp not in lacking},
        peak_bytes={point: 1e9 * point.batch_size for point in points},
        memory_bytes=memory_bytes,
    )


@given(
    wait_s=st.floats(0, 0.1),
    kernels_s=st.floats(1e-4, 0.1),
    host_s=st.floats(0, 0.1),
    device=st.sampled_from(["cpu", "cuda:0"]),
)
def test_the_script_as_it_is_has_the_rate_of_its_profile(wait_s, kernels_s, host_s, device):
    profile = made_profile(device, wait_s=wait_s, kernels_s=kernels_s, host_s=host_s)
    for values in ({}, BASE):
        rate = expected_rate(profile, values, BASE, predicted())
        assert rate == pytest.approx(8 / profile.step_time_s, rel=1e-6)


def test_the_device_part_moves_by_the_predicted_ratio_and_the_loader_stays():
    profile = made_profile("cuda:0")
    # 60 ms of loading and 20 of computing, which bf16 halves.
    assert expected_rate(profile, {"amp": "bf16"}, BASE, predicted()) == pytest.approx(8 / 0.07)
    # Three workers prepare a batch in 20 ms; then nothing is left to gain on the device.
    fed = {"num_workers": 3}
    assert expected_rate(profile, fed, BASE, predicted()) == pytest.approx(8 / 0.02)
    assert expected_rate(profile, {**fed, "amp": "bf16"}, BASE, predicted()) == pytest.approx(8 / 0.02)


def test_a_batch_of_several_of_the_loader_grows_with_the_knob():
    profile = made_profile("cuda:0", batch_size=32.0)  # four batches of eight make a step
    assert expected_rate(profile, BASE, BASE, predicted()) == pytest.approx(32 / 0.08)
    assert expected_rate(profile, {"batch_size": 32}, BASE, predicted()) == pytest.approx(128 / 0.32)


def test_kernels_that_ran_while_the_loader_was_waited_for_are_counted_with_workers():
    hidden = made_profile("cuda:0", wait_s=0.0, kernels_s=0.06, host_s=0.005, loader_wait_s=0.055)
    with_workers = expected_rate(hidden, {"num_workers": 3}, BASE, predicted())
    assert with_workers == pytest.approx(8 / 0.06)


def test_precision_order_and_size_are_ranked_by_what_is_predicted_of_them():
    best, unhelped, *others = first_guesses(SPACE, made_profile("cuda:0", **COMPUTING), BASE, predicted())
    assert (best["amp"], best["channels_last"], best["image_size"]) == ("bf16", False, 32)
    assert best["optimizer_implementation"] == "fused"
    assert unhelped == {**best, "optimizer_implementation": "foreach"}
    assert best not in others
    turned = predicted({"bf16": 2.0, "channels_last": 0.8, "small": 1.0})
    best = first_guesses(SPACE, made_profile("cuda:0", **COMPUTING), BASE, turned)[0]
    assert (best["amp"], best["channels_last"], best["image_size"]) == ("off", True, 64)


def test_of_equally_fast_ones_the_one_that_changes_least_comes_first():
    # However fast the device is, it waits for three workers.
    waiting = made_profile("cuda:0", wait_s=0.5)
    best = first_guesses(SPACE, waiting, BASE, predicted())[0]
    assert best == {**BASE, "num_workers": 3, "optimizer_implementation": "fused"}


def test_what_would_not_fit_or_is_not_predicted_is_no_guess():
    profile = made_profile("cuda:0", **COMPUTING)
    for steps in (predicted(memory_bytes=20e9), predicted(lacking=("bf16",))):
        guesses = first_guesses(SPACE, profile, BASE, steps, num_guesses=100)
        assert guesses
        assert {guess["batch_size"] for guess in guesses} == ({8} if steps.memory_bytes else {8, 32})
        assert {guess["amp"] for guess in guesses} == ({"off", "bf16"} if steps.memory_bytes else {"off"})
    # The script as it is runs, whatever is predicted.
    assert predicted(memory_bytes=1.0).fits(BASE)


def test_the_point_of_the_script_is_read_from_its_values_or_its_loader():
    profile = made_profile("cpu", loader={"num_workers": 0, "batch_size": 4})
    assert script_point(profile, BASE, None) == OWN
    assert script_point(profile, {"amp": False, "channels_last": True}, 48) == DevicePoint(
        batch_size=4, channels_last=True, image_size=48
    )
    assert script_point(made_profile("cpu", batch_size=None), {}, None) is None


@pytest.mark.parametrize("is_planned", [True, False])
def test_the_source_of_a_trial_tells_where_it_is_from(tmp_path, is_planned):
    said = []
    objectives = parse_objectives("speed")
    task = Task(
        space=SPACE,
        order=TrialOrder(command=("train.py",)),
        objectives=objectives,
        budget=parse_budget("5 trials"),
        base=BASE,
    )
    store = TrialStore(tmp_path, objectives, {}, seed=0)
    tuner = Tuner(task=task, store=store, say=said.append)
    tuner.seed(made_profile("cuda:0", **COMPUTING), predicted() if is_planned else None)
    sources = [store.ask().user_attrs["source"] for _ in range(5)]
    assert sources == ["script", *["plan" if is_planned else "cost model"] * 4]
    # Half precision and small images: 75 ms of kernels and 5 of the host shrink to 0.15 of themselves.
    assert said == (
        [
            "first trials by the predicted steps of a network on a device: the best is expected to be 6.7 times as "
            "fast as the script"
        ]
        if is_planned
        else []
    )
