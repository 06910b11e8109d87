"""A run is measured, a cost model fitted to its record, the run predicted with it: for real, on the processor."""

from dataclasses import replace

import numpy as np
import pytest

import forerun
from forerun.base.errors import InvalidSetupError, RecordError
from forerun.evidence.measurement.jobs import Protocol
from forerun.evidence.records.measurement import JobKind, Outcome
from forerun.question.devices.catalogue import device_at
from made_measurements import measurement

QUICK = Protocol(min_warm_up=2, max_warm_up=6, window=3, num_repetitions=5, max_seconds=5, anchor_every=0)
MODEL = "cnn:depth=2,base_filters=32"


@pytest.fixture(scope="module")
def run():
    return forerun.Run.of(MODEL, device=device_at(None), batch_size=16, optimizer="adam", image_size=32)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return tmp_path_factory.mktemp("store") / "records.sqlite"


@pytest.fixture(scope="module")
def record(run, store):
    return forerun.measure(run, records=store, protocol=QUICK)


def distance(estimate, record):
    return abs(np.log(estimate.step_time_s.value / record.summary.median_s))


def test_a_measured_run_corrects_its_own_prediction(run, record):
    model = forerun.fit(record)
    before, after = forerun.predict(run), forerun.predict(run, cost_model=model)
    assert after.provenance == "calibrated"
    assert distance(after, record) < distance(before, record)


def test_a_record_knows_its_run(run, record):
    assert isinstance(record, forerun.Record)
    assert record.outcome is Outcome.DONE
    assert record.run.model == run.model
    assert record.run.setup == run.setup
    assert record.run.cluster == run.cluster


def test_a_run_that_was_measured_is_not_measured_again(run, record, store):
    assert forerun.measure(run, records=store, protocol=QUICK).repetitions_s == record.repetitions_s


def test_the_command_measures_the_same_job(run, record, store):
    found = forerun.measure_model(
        MODEL, batch_sizes=[16], optimizer="adam", image_size=32, records=store, protocol=QUICK
    )
    assert found.report.num_skipped == 1
    assert [m.key for m in found.measurements] == [record.key]


def test_a_fit_takes_records_and_stores_alike(record, store, tmp_path):
    from_store = forerun.fit(store)
    assert from_store.class_offsets == pytest.approx(forerun.fit([record]).class_offsets)
    from_store.save(tmp_path / "mine.safetensors")
    loaded = forerun.CostModel.load(tmp_path / "mine.safetensors")
    assert (loaded.size_law, loaded.calibrated_device) == (from_store.size_law, device_at(None).title)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "a100-sxm4-40gb"}, r"expected a device of this machine .*give device='here'"),
        ({"loader_ms": 3.0}, "an input pipeline"),
        ({"accumulation": 2}, "accumulation"),
        ({"torch_version": "1.8"}, "PyTorch 1.8"),
        ({"fused_attention": False}, "attention in parts"),
    ],
)
def test_what_cannot_be_measured_is_refused(options, message):
    with pytest.raises(InvalidSetupError, match=message):
        forerun.measure(forerun.Run.of(MODEL, **{"device": device_at(None), **options}))


def test_records_of_two_frameworks_have_no_common_cost_model():
    own = measurement(1)
    other = measurement(2, circumstances=replace(own.circumstances, framework="keras"))
    with pytest.raises(RecordError, match="keras and pytorch"):
        forerun.fit([own, other])


def test_a_record_without_a_step_fits_nothing():
    with pytest.raises(RecordError, match="expected finished steps"):
        forerun.fit(measurement(1, outcome=Outcome.FAILED))
    assert measurement(1, kind=JobKind.LAYER, subject="dense").run is None


def test_a_training_knows_its_job():
    parameters = {
        "batch_size": 64,
        "dataset_size": 50_000,
        "num_epochs": 3,
        "optimizer": "adam",
        "image_size": 32,
    }
    found = measurement(1, kind=JobKind.TRAINING, parameters=parameters).run
    assert (found.job.num_samples, found.job.num_epochs) == (50_000, 3)
    assert (found.setup.batch_size_per_device, found.setup.optimizer) == (64, "adam")


def test_steps_of_several_devices_know_them():
    parameters = {"batch_size": 8, "num_devices": 4, "strategy": "ddp", "optimizer": "sgd"}
    found = measurement(1, kind=JobKind.DATA_PARALLEL, parameters=parameters).run
    assert (found.cluster.num_devices, found.sharing.strategy) == (4, "ddp")
