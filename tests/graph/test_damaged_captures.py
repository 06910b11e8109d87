"""Files from strangers: any damage is one line or an answer in plain numbers, and never more."""

import io
import json
import tracemalloc
import zipfile

import numpy as np
import pytest

import forerun
from forerun.adapters.classics.trained_models import load_trained_model
from forerun.base.errors import CostModelError, UsageError
from forerun.base.received import json_file
from forerun.cost.communication.constants import load_measured_layouts
from forerun.cost.time.weights import load_weights
from forerun.graph.captured import read_capture
from forerun.jobs.forecasting.backtest_table import load_table
from studies.faults.damaged_files import damage_table, file_kinds, sound_capture


def test_a_thousand_damaged_files_are_refused_in_a_line_or_answered(tmp_path):
    lines, faults = damage_table(tmp_path, 1000, seed=50_000)
    assert faults == []
    assert len(lines) == 2 + len(file_kinds())


@pytest.mark.parametrize(
    ("column", "row", "value", "said"),
    [
        ("memory.kind", 3, 99, "memory.kind, row 3: expected -1 to 6, got 99"),
        ("memory.block", 4, 2**40, "memory.block, row 4: expected"),
        ("memory.size_bytes", 2, np.nan, "memory.size_bytes, row 2: expected"),
        ("ops.kernel", 0, -1, "ops.kernel, row 0: expected 0 to"),
    ],
)
def test_the_column_and_the_row_are_named(tmp_path, column, row, value, said):
    path = sound_capture(tmp_path / "sound.forerun")
    with zipfile.ZipFile(path) as archive:
        facts, graph = archive.read("capture.json"), archive.read("graph.npz")
    with np.load(io.BytesIO(graph)) as kept:
        arrays = {name: kept[name] for name in kept.files}
    arrays[column][row] = value
    packed = io.BytesIO()
    np.savez_compressed(packed, **arrays)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("capture.json", facts)
        archive.writestr("graph.npz", packed.getvalue())
    with pytest.raises(UsageError, match="is damaged") as refused:
        read_capture(path)
    assert said in str(refused.value)


def test_a_bomb_is_refused_before_it_is_unpacked(tmp_path):
    path = sound_capture(tmp_path / "sound.forerun")
    with zipfile.ZipFile(path) as archive:
        facts = archive.read("capture.json")
    inner = io.BytesIO()
    with (
        zipfile.ZipFile(inner, "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open("ops.flops.npy", "w") as member,
    ):
        for _ in range(200):
            member.write(bytes(1024**2))
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("capture.json", facts)
        archive.writestr("graph.npz", inner.getvalue())
    tracemalloc.start()
    with pytest.raises(UsageError, match="more than"):
        forerun.predict(f"capture:{path}", device="t4")
    assert tracemalloc.get_traced_memory()[1] < 50e6
    tracemalloc.stop()


@pytest.mark.parametrize(
    ("read", "most_bytes"),
    [
        (load_weights, 32 * 1024**2),
        (load_trained_model, 32 * 1024**2),
        (lambda path: load_measured_layouts(path, "t4"), 4 * 1024**2),
        (load_table, 4 * 1024**2),
    ],
)
def test_a_file_that_is_too_large_is_not_read(tmp_path, read, most_bytes):
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(most_bytes + 1)
    tracemalloc.start()
    with pytest.raises(CostModelError, match="more than"):
        read(path)
    assert tracemalloc.get_traced_memory()[1] < 1e6
    tracemalloc.stop()


def test_a_table_that_is_still_json_but_another_is_known_by_its_checksum(tmp_path):
    for kind in (kind for kind in file_kinds() if kind.name in ("measured layouts", "back-tests")):
        path = tmp_path / "table.json"
        kind.make(path)
        document = kind.part(path.read_bytes()).documents["document"]
        path.write_text(json_file(document))
        answer = kind.ask(path)
        text = path.read_text()
        place = text.rindex("0.1")
        path.write_text(f"{text[:place]}0.2{text[place + 3 :]}")
        with pytest.raises(CostModelError, match="do not have the checksum"):
            kind.ask(path)
        path.write_text(json.dumps(json.loads(text)))  # without its indents it is the same
        assert kind.ask(path) == answer
        path.write_text(json.dumps(document))  # files of earlier versions have none
        assert kind.ask(path) == answer


def test_measured_layouts_of_a_later_version_are_refused(tmp_path):
    path = tmp_path / "table.json"
    path.write_text('{"kind": "forerun layouts measured", "version": 2}')
    with pytest.raises(CostModelError, match="its version is 2, not 1; make them with: forerun calibrate"):
        load_measured_layouts(path, "t4")


def test_brackets_without_end_are_refused(tmp_path):
    path = tmp_path / "deep.json"
    path.write_text("[" * 100_000)
    with pytest.raises(CostModelError, match="nested too deeply"):
        load_table(path)


def test_figures_that_make_no_time_are_refused(tmp_path):
    kind = next(kind for kind in file_kinds() if kind.name == "calibration")
    kind.make(tmp_path / "sound")
    parts = kind.part((tmp_path / "sound").read_bytes())
    parts.arrays["0.host"][:] = 50.0
    parts.arrays["1.host"][:] = 50.0
    (tmp_path / "wild").write_bytes(kind.join(parts))
    with pytest.raises(CostModelError, match="no time that a step could take"):
        kind.ask(tmp_path / "wild")
