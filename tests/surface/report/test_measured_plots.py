import re

import numpy as np
import pytest

from forerun.base.errors import FailureError, UsageError
from forerun.evidence.pages.measured_plots import (
    accuracy_against_time,
    accuracy_curves,
    batch_size_against_throughput,
    best_so_far,
    residuals_against_time,
)
from forerun.evidence.records.step_record import StepRecord
from forerun.question.setup import Phase, Precision

STEPS = [
    StepRecord(
        source="made",
        row_id=f"{model} {size}",
        model=model,
        family="cnn",
        device="cpu",
        batch_size_per_device=size,
        step_time_s=size / rate,
        precision=Precision.FP32,
        phase=Phase.TRAIN,
    )
    for model, rates in (("depth=2", (100.0, 180.0, 250.0)), ("depth=10", (50.0, 90.0, 120.0)))
    for size, rate in zip((8, 16, 32), rates, strict=True)
]


def texts_of(path):
    return set(re.findall(r"<!-- (.*?) -->", path.read_text()))


def test_throughput_names_axes_and_groups(tmp_path):
    batch_size_against_throughput(tmp_path / "a.svg", STEPS)
    assert {"batch size", "images/s", "Measured throughput", "depth=2", "depth=10", "32"} <= texts_of(
        tmp_path / "a.svg"
    )


def test_curves_have_an_axis_for_accuracy_and_one_for_loss(tmp_path):
    accuracy_curves(tmp_path / "a.svg", {"a": np.array([0.3, 0.5])}, {"a": np.array([2.0, 1.5])})
    assert {"accuracy [%]", "loss", "epoch", "a", "1", "2"} <= texts_of(tmp_path / "a.svg")


def test_the_front_holds_what_nothing_beats_sooner():
    time_s = np.array([4.0, 1.0, 2.0, 3.0, 2.0])
    accuracy = np.array([0.9, 0.5, 0.4, 0.9, 0.7])
    front_s, front = best_so_far(time_s, accuracy)
    assert front_s.tolist() == [1.0, 2.0, 3.0]
    assert front.tolist() == [0.5, 0.7, 0.9]


def test_accuracy_against_time_shows_runs_and_their_front(tmp_path):
    runs = {"a": (np.array([1.0, 2.0]), np.array([0.3, 0.5])), "b": (np.array([3.0]), np.array([0.4]))}
    accuracy_against_time(tmp_path / "a.svg", runs)
    assert {"time in training [s]", "accuracy [%]", "a", "b", "best so far"} <= texts_of(tmp_path / "a.svg")
    with pytest.raises(FailureError, match="at least one run"):
        accuracy_against_time(tmp_path / "b.svg", {})


def test_residuals_name_their_median(tmp_path):
    actual = np.asarray([0.01, 0.02, 0.04])
    residuals_against_time(
        tmp_path / "a.svg", title="ann", predicted_s=1.1 * actual, actual_s=actual, groups=["cpu"] * 3
    )
    assert {"median +10.0 %", "actual step time [ms]", "cpu (3)"} <= texts_of(tmp_path / "a.svg")


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan")])
def test_impossible_values_are_refused(tmp_path, bad):
    with pytest.raises(FailureError, match="above zero"):
        residuals_against_time(
            tmp_path / "a.png", title="", predicted_s=np.array([bad]), actual_s=np.array([1.0]), groups=["a"]
        )


def test_nothing_to_plot_and_no_place_for_it(tmp_path):
    with pytest.raises(FailureError, match="at least one run"):
        accuracy_curves(tmp_path / "a.png", {}, {})
    with pytest.raises(UsageError, match="must end in one of"):
        accuracy_curves(tmp_path / "a.txt", {}, {})
