"""Regressors fitted to records made by a known law: accuracy on held-out configurations, and questions to the model."""

from dataclasses import replace

import numpy as np
import pytest

import forerun
from forerun.adapters.classics.trained_models import (
    load_trained_model,
    predict_step_time,
    predict_time,
    save_trained_model,
)
from forerun.base.errors import CostModelError, ForerunError, InvalidSetupError, RecordError, UsageError
from forerun.evidence.fit import fit_regressor
from forerun.evidence.records.step_record import StepRecord
from forerun.question.devices import find_device
from forerun.question.model import ModelRequest
from forerun.question.setup import Phase, Precision, TrainingSetup
from forerun.tracing.trace import trace
from made_tables import write_records

CONFIG = {"depth": 3, "base_filters": 32, "batch_size": 64}
REPETITIONS = 2


def law_s(graph, batch):
    """A slow processor: 60 GFLOP/s, 10 GB/s and 2 ms of its own."""
    return 2e-3 + graph.total_flops(batch) / 6e10 + graph.total_bytes(batch) / 1e10


@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    """The 18 configurations of the CNN predictor of old on two occasions, with 2 % noise."""
    noise = np.random.default_rng(0)
    records = []
    for depth in (2, 3, 4):
        for filters in (32, 64):
            name = f"cnn:depth={depth},base_filters={filters}"
            graph = trace(ModelRequest(model=name, image_size=32), TrainingSetup(optimizer="adam"))
            records += [
                StepRecord(
                    source=f"occasion {occasion}",
                    row_id=f"{depth} {filters} {batch}",
                    model=name,
                    family="cnn",
                    device="cpu",
                    batch_size_per_device=batch,
                    step_time_s=law_s(graph, batch) * np.exp(noise.normal(0, 0.02)),
                    precision=Precision.FP32,
                    phase=Phase.TRAIN,
                    optimizer="adam",
                    includes_optimizer=True,
                    image_size=32,
                    framework_version="2.15.0",
                )
                for batch in (32, 64, 128)
                for occasion in range(REPETITIONS)
            ]
    path = tmp_path_factory.mktemp("grid") / "grid.csv"
    write_records(records, path)
    return path


@pytest.fixture(scope="module")
def epochs_csv(grid, tmp_path_factory):
    """One occasion of the grid as the CSV of old: seconds per epoch, no column for the memory of a GPU."""
    import pandas as pd

    lines = ["depth,base_filters,batch_size,num_params,dataset_size,epochs,time_per_epoch,images_per_second"]
    for row in pd.read_csv(grid).iloc[::REPETITIONS].itertuples():
        sizes, batch = row.model.partition(":")[2], row.batch_size_per_device
        depth, filters = (part.partition("=")[2] for part in sizes.split(","))
        epoch_s = -(-50_000 // batch) * row.step_time_s
        lines.append(f"{depth},{filters},{batch},1,50000,3,{epoch_s!r},{50_000 / epoch_s}")
    path = tmp_path_factory.mktemp("epochs") / "times.csv"
    path.write_text("\n".join(lines))
    return path


@pytest.fixture(scope="module")
def linear(grid):
    return fit_regressor(grid, "linear")


@pytest.fixture(scope="module")
def stored(linear, tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "linear.safetensors"
    save_trained_model(linear.model, path)
    return load_trained_model(path)


@pytest.mark.parametrize(
    ("kind", "options", "least_r2", "most_mape"),
    [
        ("linear", {}, 0.99, 0.04),
        ("ann", {"seeds": (0,), "max_epochs": 150}, 0.95, 0.15),
        ("grey-box", {}, 0.95, 0.15),
        ("boosting", {}, 0.5, 0.4),
        ("op", {}, 0.95, 0.15),
    ],
)
def test_held_out_configurations_follow_the_law(grid, kind, options, least_r2, most_mape):
    result = fit_regressor(grid, kind, **options)
    assert result.metrics[kind].n == 18 * REPETITIONS
    assert result.metrics[kind].r2 > least_r2
    assert result.metrics[kind].mape < most_mape
    assert "linear on FLOPs" in result.metrics or kind == "linear"
    assert bool(result.summary) == (kind == "ann")
    if kind == "grey-box":
        apart = result.metrics["grey-box, whole networks left out"]
        assert apart.r2 > result.metrics["linear on FLOPs, whole networks left out"].r2 - 0.02


def test_the_offset_helps_a_device_that_is_far_from_its_datasheet(grid):
    metrics = fit_regressor(grid, "op").metrics
    assert metrics["op"].mape < 0.3 * metrics["op, nothing measured"].mape


def test_repetitions_of_a_configuration_are_left_out_together(linear):
    assert linear.split == "leave one of 18 configurations out, up to 2 repetitions of it together"


def test_the_file_says_where_the_model_came_from(stored):
    facts = stored.provenance
    assert (facts["records"], facts["num_rows"], facts["num_configurations"]) == (["grid.csv"], 36, 18)
    assert facts["devices"] == ["cpu"]
    assert facts["software"] == ["pytorch 2.15.0"]
    assert facts["shared"]["optimizer"] == "adam"
    assert facts["held_out_errors"]["linear"]["n"] == 36


def test_a_configuration_is_asked_about_as_of_old(stored):
    graph = trace(
        ModelRequest(model="cnn:depth=3,base_filters=32", image_size=32), TrainingSetup(optimizer="adam")
    )
    assert predict_step_time(stored, CONFIG) == pytest.approx(law_s(graph, 64), rel=0.05)


def test_a_whole_row_of_the_old_records_is_answered_in_seconds_per_epoch(stored):
    row = {**CONFIG, "num_params": 1, "dataset_size": 50_000, "epochs": 3, "time_per_epoch": 9.0}
    assert predict_step_time(stored, row) == predict_step_time(stored, CONFIG)
    assert predict_time(stored, row) == pytest.approx(782 * predict_step_time(stored, CONFIG))


def test_an_epoch_takes_the_dataset_of_the_rows_that_were_fitted(epochs_csv, tmp_path):
    result = fit_regressor(epochs_csv, "linear", device="cpu")
    save_trained_model(result.model, tmp_path / "linear.safetensors")
    model = load_trained_model(tmp_path / "linear.safetensors")
    assert predict_time(model, CONFIG) == pytest.approx(782 * predict_step_time(model, CONFIG))
    assert predict_time(model, {**CONFIG, "dataset_size": 64}) == predict_step_time(model, CONFIG)


@pytest.mark.parametrize("kind", ["linear", "op"])
def test_a_csv_of_epochs_is_judged_in_seconds_per_epoch(epochs_csv, kind):
    result = fit_regressor(epochs_csv, kind, device="cpu")
    assert result.target == "epoch"
    rows = [line.split(",") for line in epochs_csv.read_text().splitlines()[1:]]
    np.testing.assert_allclose(sorted(result.actual_s), sorted(float(row[6]) for row in rows))
    assert result.metrics[kind].mae == pytest.approx(np.abs(result.predicted_s - result.actual_s).mean())


def test_a_size_outside_of_the_grid_is_answered_with_a_warning_and_its_range(stored):
    with pytest.warns(UserWarning, match=r"batch_size 256 \(fitted: 32 to 128\)"):
        predict_step_time(stored, {**CONFIG, "batch_size": 256})
    with pytest.warns(UserWarning, match=r"base_filters 128 \(fitted: 32 to 64\)"):
        predict_step_time(stored, {**CONFIG, "base_filters": 128})


def test_networks_fitted_together_are_those_fitted_alone():
    from forerun.adapters.classics.network_regressors import DenseSettings, fit_networks

    rng = np.random.default_rng(0)
    x = rng.normal(size=(50, 3))
    y, settings = x[:, 0] - x[:, 1] ** 2, DenseSettings(seeds=(0, 1), max_epochs=30, patience_epochs=3)
    tables = [(x, y), (x[:17], y[:17])]
    for table, networks in zip(tables, fit_networks(tables, settings), strict=True):
        for seed, together in enumerate(networks(x)):
            [alone] = fit_networks([table], replace(settings, seeds=(seed,)))
            np.testing.assert_allclose(together, alone(x)[0], atol=1e-4)


def test_a_name_with_a_setup_is_the_same_question(stored):
    setup = TrainingSetup(batch_size_per_device=64, optimizer="adam")
    assert predict_step_time(stored, "cnn:depth=3,base_filters=32", setup) == predict_step_time(
        stored, CONFIG
    )


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ({**CONFIG, "base_filter": 3}, UsageError, "did you mean base_filters"),
        ({"batch_size": 3}, InvalidSetupError, "expected a model or depth"),
        ({**CONFIG, "model": "cnn"}, InvalidSetupError, "not both"),
        ({**CONFIG, "batch_size": -1}, InvalidSetupError, "batch.size.*-1"),
        ({**CONFIG, "batch_size": float("nan")}, InvalidSetupError, "whole number as batch_size"),
        ({**CONFIG, "depth": -3}, UsageError, "depth"),
        ({**CONFIG, "precision": "fp12"}, InvalidSetupError, "unknown precision"),
        ({"layer": "dense"}, UsageError, "knows whole models"),
        ({**CONFIG, "device": "no-such-gpu"}, UsageError, "no-such-gpu"),
    ],
)
def test_questions_that_cannot_be_meant(stored, config, error, message):
    with pytest.raises(error, match=message):
        predict_step_time(stored, config)


def test_an_epoch_needs_a_dataset(stored):
    with pytest.raises(InvalidSetupError, match=r"dataset_size.*predict_step_time"):
        predict_time(stored, CONFIG)
    with pytest.raises(UsageError, match="has no epochs"):
        predict_time(stored, {"layer": "dense"})


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("tree", {}, "unknown model"),
        ("linear", {"loss": "mae"}, "takes no loss"),
        ("op", {"seeds": (0,)}, "takes no seeds"),
        ("ann", {"loss": "huber"}, "mse or mae"),
        ("ann", {"hidden_sizes": ()}, "hidden sizes"),
    ],
)
def test_fits_that_cannot_be_meant(grid, kind, options, message):
    with pytest.raises(UsageError, match=message):
        fit_regressor(grid, kind, **options)


def test_too_few_configurations(grid, tmp_path):
    import pandas as pd

    pd.read_csv(grid).head(4).to_csv(tmp_path / "few.csv", index=False)
    with pytest.raises(RecordError, match="at least 3 configurations"):
        fit_regressor(tmp_path / "few.csv", "linear")


def test_steps_are_no_layers(grid):
    with pytest.raises(RecordError, match="measure layers"):
        fit_regressor(grid, "layers")


def test_no_records():
    with pytest.raises(UsageError, match="at least one"):
        fit_regressor([], "linear")


def test_a_missing_table(tmp_path):
    with pytest.raises(ForerunError, match="no such file"):
        fit_regressor(tmp_path / "none.csv", "linear")


@pytest.fixture(scope="module")
def cost_model(grid, tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "op.safetensors"
    save_trained_model(fit_regressor(grid, "op").model, path)
    return path


def test_the_op_model_is_the_calibration_that_predict_takes(cost_model):
    loaded = load_trained_model(cost_model)
    assert isinstance(loaded, forerun.CostModel)
    assert loaded.calibrated_device == find_device("cpu").title
    run = forerun.Run.of(
        "cnn:depth=3,base_filters=32", device="cpu", batch_size=64, optimizer="adam", image_size=32,
        calibration=cost_model, torch_version="2.15.0",
    )  # fmt: skip
    found = forerun.predict(run)
    assert found.provenance == "calibrated"
    assert predict_step_time(loaded, CONFIG) == pytest.approx(found.step_time_s.value)
    graph = trace(run.model, run.setup)
    assert abs(np.log(predict_step_time(loaded, CONFIG) / law_s(graph, 64))) < 0.15


def test_a_cost_model_answers_for_its_device_only(cost_model):
    loaded = load_trained_model(cost_model)
    with pytest.raises(InvalidSetupError, match="expected the device that the cost model was fitted to"):
        predict_step_time(loaded, CONFIG, device="rtx-3090")
    with pytest.raises(UsageError, match=r"is a calibration of .Generic server CPU"):
        forerun.predict("mnist-cnn", device="rtx-3090", calibration=cost_model)


def test_records_of_two_devices_have_no_common_cost_model(grid, tmp_path):
    import pandas as pd

    table = pd.read_csv(grid)
    table.loc[:5, "device"] = "rtx-3090"
    table.to_csv(tmp_path / "two.csv", index=False)
    with pytest.raises(RecordError, match="of one device"):
        forerun.fit(tmp_path / "two.csv")
    assert forerun.fit(tmp_path / "two.csv", device="rtx-3090").calibrated_device == "NVIDIA GeForce RTX 3090"


def test_a_cost_model_that_cannot_be_written(cost_model, tmp_path):
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(CostModelError, match="cannot be written"):
        forerun.CostModel.load(cost_model).save(tmp_path / "taken" / "op.safetensors")
