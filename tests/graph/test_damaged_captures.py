"""Captures from strangers: any damage is one line or an answer in plain numbers, and never more."""

import io
import tracemalloc
import zipfile

import numpy as np
import pytest

import forerun
from forerun.base.errors import UsageError
from forerun.graph.captured import read_capture
from studies.faults.damaged_files import damage_table, sound_capture


def test_a_thousand_damaged_captures_are_refused_in_a_line_or_answered(tmp_path):
    lines, faults = damage_table(tmp_path, 1000, seed=50_000)
    assert faults == []
    assert len(lines) > 5


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
