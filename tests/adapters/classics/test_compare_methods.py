"""The practicum's table of whole runs, and the comparison of its methods."""

import math

import pytest

from forerun.adapters.classics.compare_methods import (
    METHODS,
    MethodRow,
    MethodsComparison,
    is_practicum_table,
    methods_plot,
    read_practicum_runs,
)
from forerun.base.errors import RecordError

HEADER = (
    "model,gpu,n_gpus,strategy,optimizer,batch_size_per_gpu,time_ms_step,"
    "pred_ms_step_iit_method2,pred_ms_step_iit_method3\n"
)
ROWS = (
    "mnist_cnn,P100-PCIE,1,single,adam,64,2.0,,\n"
    "patch_camelyon_cnn,P100-PCIE,2,MirroredStrategy,adam,8,40.0,50,36\n"
    "patch_camelyon_cnn[l1_l5],P100-PCIE,1,single,adam,8,12.0,,\n"
    "mnist_cnn,P100-PCIE,1,single,sgd,64,,,\n"
)


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "runs.csv"
    path.write_text(HEADER + ROWS)
    return path


def test_whole_networks_are_read_with_what_was_published_of_them(table):
    assert is_practicum_table(table)
    rows, notes = read_practicum_runs(table)
    assert [row.run.model for row in rows] == ["keras:mnist-cnn", "keras:pcam-cnn"]
    assert rows[0].predicted_s == {}
    assert rows[1].predicted_s == {"last layer apart": 0.05, "with the factor 1.5": 0.036}
    assert (rows[1].run.device, rows[1].run.num_devices, rows[1].run.step_time_s) == (
        "p100-pcie-16gb",
        2,
        0.04,
    )
    assert "1 rows are of parts of a network" in notes[0]
    assert "1 rows have no time" in notes[1]


def test_a_gpu_that_is_not_known_is_named(table):
    table.write_text(HEADER + ROWS.replace("P100-PCIE", "V100"))
    with pytest.raises(RecordError, match="row 1: expected a gpu of P100-PCIE, P100-SXM2, got 'V100'"):
        read_practicum_runs(table)


def test_errors_are_those_of_the_runs_that_a_method_can_predict(table, tmp_path):
    read, notes = read_practicum_runs(table)
    rows = tuple(
        MethodRow(run=row.run, predicted_s={**row.predicted_s, "forerun": 1.1 * row.run.step_time_s})
        for row in read
    )
    found = MethodsComparison(table="runs.csv", rows=rows, notes=tuple(notes))
    assert found.metrics("forerun").mape == pytest.approx(0.1)
    assert found.metrics("with the factor 1.5", 2).mape == pytest.approx(0.1)
    assert found.metrics("sum of layers") is None
    assert rows[1].error("last layer apart") == pytest.approx(0.25)
    told = found.as_dict()
    assert set(told["metrics"]["2"]) == {*METHODS} - {"sum of layers"}
    assert math.isclose(told["rows"][1]["errors"]["with the factor 1.5"], -0.1)
    methods_plot(tmp_path / "methods.png", found)
    assert (tmp_path / "methods.png").stat().st_size > 10_000
