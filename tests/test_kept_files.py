"""Files as earlier versions wrote them: each later version reads them, or refuses them with the command that helps.

A folder of ``kept_files`` is never changed. A version that writes another form adds a folder of its own.
"""

import shutil
from pathlib import Path

import pytest

import forerun
from forerun.base.errors import ForerunError
from forerun.cost.communication.constants import load_measured_layouts
from forerun.evidence.records.record_store import RecordStore

KEPT = sorted((Path(__file__).parent / "kept_files").iterdir())


def capture(folder):
    found = forerun.predict(f"capture:{folder / 'capture.forerun'}", device="t4", use_cache=False)
    return (
        found.batch_size_per_device == 8 and found.precision == "amp" and 1e-4 < found.step_time_s.value < 1
    )


def calibration(folder):
    file = folder / "calibration.safetensors"
    found = forerun.predict("torchvision:resnet18", device="t4", calibration=file)
    return found.provenance == "calibrated"


def fitted_model(folder):
    model = forerun.load_trained_model(folder / "linear.safetensors")
    step_s = forerun.predict_step_time(model, {"model": "cnn:depth=2,base_filters=32", "batch_size": 64})
    return step_s == pytest.approx(0.2, rel=0.01)


def store(folder):
    with RecordStore.open(folder / "store.sqlite") as records:
        return sorted(record.parameters["batch_size"] for record in records.measurements()) == [
            8,
            16,
            32,
            64,
            128,
            256,
        ]


def measured_layouts(folder):
    return len(load_measured_layouts(folder / "layouts.json", "t4").logs) == 4


@pytest.mark.parametrize("folder", KEPT, ids=lambda folder: folder.name)
@pytest.mark.parametrize("read", [capture, calibration, fitted_model, store, measured_layouts])
def test_a_file_of_an_earlier_version_is_read_or_refused_with_a_command(folder, read, tmp_path):
    own = tmp_path / "files"
    shutil.copytree(folder, own)  # opening a store may write beside it
    try:
        is_right = read(own)
    except ForerunError:
        is_right = refused(read, own)
    assert is_right


def refused(read, folder):
    """True if a file is refused in one line that names a command."""
    with pytest.raises(ForerunError, match="forerun ") as refusal:
        read(folder)
    return len(str(refusal.value).splitlines()) == 1
