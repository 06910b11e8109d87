"""Networks beside their layers: measured for real on this processor, and the published P100 tables."""

import os
from pathlib import Path

import pytest

from forerun.adapters.classics.composition import composition_jobs, measure_composition, measured_compositions
from forerun.base.errors import InvalidSetupError, MeasurementError
from forerun.evidence.measurement.jobs import Protocol
from forerun.evidence.records.measurement import JobKind
from forerun.question.model import ModelRequest

REFERENCE = Path(os.environ.get("FORERUN_REFERENCE_DATA", Path(__file__).parents[4] / "shared" / "data"))
QUICK = Protocol(min_warm_up=1, max_warm_up=3, num_repetitions=3, max_seconds=1.0, anchor_every=0)


@pytest.fixture(autouse=True)
def _own_lock_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def test_the_jobs_of_a_network():
    jobs = composition_jobs(ModelRequest(model="mnist-cnn"), 8)
    assert [layer.alone.subject for layer in jobs.layers] == [
        "conv2d", "max_pool", "conv2d", "max_pool", "dense", "dense",
    ]  # fmt: skip
    asked = [layer.alone.parameters for layer in jobs.layers]
    assert [parameters.get("input_gradient") for parameters in asked] == [False, *[None] * 5]
    assert [parameters["optimizer"] for parameters in asked][1] == "none"
    assert [layer.together.parameters["copies"] for layer in jobs.layers] == [8] * 6
    assert jobs.whole.kind is JobKind.STEP
    assert len(jobs.jobs) == 1 + 2 * 6 + 2 + 2
    assert not jobs.left_out


def test_a_network_is_measured_with_its_layers(tmp_path):
    # Two layers of one width: a job has a process of its own, and equal jobs are one.
    asked = {"batch_sizes": [4], "records": tmp_path / "r.sqlite", "occasion": "one", "protocol": QUICK}
    found = measure_composition(["mlp:depth=2,width=16"], **asked)
    [row] = found.compositions
    assert row.num_layers == 3
    assert row.measured_s > 0
    assert row.sum_of_layers_s > 0
    assert row.composed_s > 0
    again = measure_composition(["mlp:depth=2,width=16"], **asked)
    assert again.compositions == found.compositions
    assert again.run.report.num_skipped == len(found.run.measurements)
    assert again.run.report.outcomes == {}


def test_a_part_that_was_not_measured_is_named():
    jobs = composition_jobs(ModelRequest(model="mnist-cnn"), 8)
    with pytest.raises(MeasurementError, match="of mnist-cnn has no finished measurement"):
        measured_compositions([jobs], [], overlaps=False)


def test_huge_layers_have_fewer_copies_or_none():
    jobs = composition_jobs(ModelRequest(model="mlp:depth=2,width=9000"), 1)
    assert [layer.num_copies for layer in jobs.layers] == [8, 1, 8]
    assert jobs.layers[1].together is None


def test_a_network_without_known_layers_is_refused(tmp_path):
    file = tmp_path / "net.py"
    file.write_text(
        "import torch\n"
        "def make():\n"
        "    return torch.nn.Sequential(torch.nn.Conv1d(3, 4, 3), torch.nn.Flatten())\n"
    )
    with pytest.raises(InvalidSetupError, match="no layer of a kind that benchmarks know"):
        composition_jobs(ModelRequest(model=f"{file}:make", input_shape=(3, 8)), 2)
