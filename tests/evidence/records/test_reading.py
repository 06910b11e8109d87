"""Records from where users have them: a store, the CSV of the CNN predictor of old, several at once."""

import pytest

from forerun.adapters.classics.csv_formats import write_cnn_csv
from forerun.base.errors import UsageError
from forerun.evidence.fit import fit_regressor
from forerun.evidence.pages.measured_plots import accuracy_over_time, curves
from forerun.evidence.records.measurement import JobKind
from forerun.evidence.records.reading import read_all, read_measured_steps
from forerun.evidence.records.record_store import RecordStore
from made_measurements import TRAINING_BATCH_SIZES, measurement, small_trainings


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    path = tmp_path_factory.mktemp("store") / "records.sqlite"
    with RecordStore.open(path) as opened:
        opened.add_many(small_trainings())
    return path


def test_a_store_is_fitted(store):
    metrics = fit_regressor(store, "linear").metrics["linear"]
    assert metrics.n == len(TRAINING_BATCH_SIZES)
    assert metrics.mape < 0.02


def test_the_csv_of_old_needs_its_device_and_says_the_same(store, tmp_path):
    path = tmp_path / "cnn.csv"
    write_cnn_csv(small_trainings(), path)
    with pytest.raises(UsageError, match="--on DEVICE"):
        fit_regressor(path, "linear")
    metrics = fit_regressor(path, "linear", device="cpu").metrics["linear"]
    assert metrics.mape == pytest.approx(fit_regressor(store, "linear").metrics["linear"].mape)


def test_repetitions_in_two_sources_are_left_out_together(store, tmp_path):
    path = tmp_path / "second.sqlite"
    with RecordStore.open(path) as opened:
        opened.add_many(small_trainings())
    result = fit_regressor([store, path], "linear")
    assert result.metrics["linear"].n == 2 * len(TRAINING_BATCH_SIZES)
    assert result.split.startswith(f"leave one of {len(TRAINING_BATCH_SIZES)} configurations out")


def test_throughput_and_curves(store):
    for record in read_measured_steps([store]):
        size = record.batch_size_per_device
        assert record.throughput_samples_per_s == pytest.approx(size / (2e-3 + 1e-4 * size))
    accuracy, loss = curves(read_all([store], None))
    name = "cnn:depth=2,base_filters=32, batch 16"
    assert accuracy[name].tolist() == [0.3, 0.5]
    assert loss[name].tolist() == [2.1]
    time_s, reached = accuracy_over_time(read_all([store], None))[name]
    assert time_s.tolist() == [2.0, 3.0]
    assert reached.tolist() == [0.3, 0.5]


def test_runs_without_accuracy_or_times_have_no_trade_off(tmp_path):
    path = tmp_path / "records.sqlite"
    with RecordStore.open(path) as opened:
        opened.add(measurement(1, kind=JobKind.TRAINING, results={"accuracy_1": 0.3}))
        opened.add(measurement(2))
    assert accuracy_over_time(read_all([path], None)) == {}
