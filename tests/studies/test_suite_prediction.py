"""Predictions of a suite: complete, in a telling order, and the same after a file."""

from dataclasses import replace

import pytest
from suite_cases import DEVICE, MODELS, predicted

from forerun.base.errors import RecordError
from forerun.cost.time.correction import PriorScales
from forerun.evidence.measurement.jobs import MeasurementJob
from forerun.question.devices import find_device
from studies.suite.models import SuiteModel
from studies.suite.prediction import read_predictions, with_positions, write_predictions


@pytest.fixture(scope="module")
def predictions():
    return predicted()


def test_every_step_has_time_memory_and_what_a_calibration_needs(predictions):
    steps = [p for p in predictions if not p.is_search]
    assert len(steps) == 6
    for p in steps:
        assert p.low_s < p.step_time_s < p.high_s
        assert p.step_time_s >= 0.99 * max(p.device_s, p.host_s)
        assert p.roofline_s < p.step_time_s
        assert 0 < p.live_peak_bytes <= p.allocator_bytes < p.allocator_high_bytes
        assert p.fits == "yes"
        assert p.energy_j > 0
        assert len(p.row) == 4 + 20 or len(p.row) > 4
        assert p.device == DEVICE.name
        assert "weights of" in p.predictor
    (search,) = [p for p in predictions if p.is_search]
    assert search.max_batch_size_low <= search.max_batch_size <= search.max_batch_size_high
    assert search.step_time_s is None


def test_a_search_without_a_limit_is_about_the_card(predictions):
    from studies.suite.models import WHOLE_CARD_GIB, Search

    model = MODELS[-1]
    whole = replace(model, settings=(), searches=(Search(model.searches[0].setting, WHOLE_CARD_GIB),))
    (found,) = predicted(models=(whole,))
    (limited,) = [p for p in predictions if p.is_search]
    share = DEVICE.memory_bytes / (model.searches[0].limit_gib * 1024**3)
    assert 0.7 * share < found.max_batch_size / limited.max_batch_size < share


def test_the_order_has_the_core_first_and_the_cheap_before_the_dear(predictions):
    free = with_positions(predictions, lambda p: 1.0, PriorScales())
    assert [p.position for p in free] == list(range(len(predictions)))
    assert [p.is_core for p in free] == sorted([p.is_core for p in free], reverse=True)
    assert {p.job for p in free} == {p.job for p in predictions}
    last = free[2].job
    dear = with_positions(predictions, lambda p: 1e-3 if p.job == last else 1.0, PriorScales())
    assert dear[0].job == last


def test_predictions_are_the_same_after_a_file(predictions, tmp_path):
    path = tmp_path / "predictions.csv"
    write_predictions(predictions, path)
    assert read_predictions(path) == predictions


def test_a_model_that_cannot_be_built_says_why():
    wrong = SuiteModel(subject="cnn:dept=3", model_class="none", settings=MODELS[0].settings)
    for p in predicted(models=(wrong,)):
        assert "did you mean depth" in p.reason
        assert p.step_time_s is None
        assert MeasurementJob.from_json(p.job).subject == "cnn:dept=3"


def test_a_processor_is_predicted_as_well():
    found = predicted(device=find_device("cpu"), models=MODELS[:1])
    assert all(p.step_time_s > 0 and p.energy_j is None for p in found)


def test_damaged_files_are_told(tmp_path, predictions):
    path = tmp_path / "predictions.csv"
    with pytest.raises(RecordError, match="cannot be read"):
        read_predictions(path)
    path.write_text("job,device\n{},x\n")
    with pytest.raises(RecordError, match="expected the predictions of a suite"):
        read_predictions(path)
    write_predictions(predictions, path)
    path.write_text(path.read_text().replace("position", "place", 1))
    with pytest.raises(RecordError, match="--stages predict"):
        read_predictions(path)
    with pytest.raises(RecordError, match="cannot be written"):
        write_predictions(predictions, tmp_path / "no" / "predictions.csv")
