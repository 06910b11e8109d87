"""Graphs on disk: a round trip loses nothing, and what is no graph is no graph."""

from __future__ import annotations

import json
import pickle
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from forerun.graph import file as graph_file
from forerun.graph.file import read_graph, write_graph
from forerun.graph.graph import Graph, MemoryStream, OpTable, at_batch
from memory_streams import training_stream


def small_graph(num_rows=3):
    random = np.random.default_rng(0)
    pairs = ("flops", "read_bytes", "write_bytes", "elements", "joined_bytes")
    columns = {
        field.name: 0.5 + random.random(num_rows) / 2
        for field in fields(OpTable)
        if not field.name.endswith("names")
    }
    columns |= {name: random.random((num_rows, 2)) for name in pairs}
    columns["count"] = 1 + random.random(num_rows)
    columns |= {name: np.arange(num_rows) for name in ("kernel", "module", "joined")}
    columns |= {name: np.arange(num_rows) % 4 for name in ("op_class", "step_part")}
    columns["gemm"] = random.random((num_rows, 4, 2))
    names = tuple(f"kernel {i}" for i in range(num_rows))
    return Graph(
        model="örtlich:model",
        input_shape=(3, 8, 8),
        num_parameters=10,
        num_trainable_parameters=9,
        ops=OpTable(kernel_names=names, module_names=("", *names), **columns),
        memory=training_stream(),
        only_batch_size=4,
        uses_layer_norm=True,
        unsupported_ops=("strange",),
        notes=("a note",),
        versions=(("torch", "2.15"),),
    )


def assert_equal(left, right):
    for field in fields(left):
        ours, theirs = getattr(left, field.name), getattr(right, field.name)
        if isinstance(ours, np.ndarray):
            np.testing.assert_array_equal(ours, theirs)
            assert ours.dtype == theirs.dtype
        elif isinstance(ours, (OpTable, MemoryStream)):
            assert_equal(ours, theirs)
        else:
            assert ours == theirs
            assert type(ours) is type(theirs)


@pytest.mark.parametrize("num_rows", [0, 1, 50])
def test_a_round_trip_loses_nothing(tmp_path, num_rows):
    graph = small_graph(num_rows)
    write_graph(graph, tmp_path / "new folder" / "graph.npz")
    assert_equal(graph, read_graph(tmp_path / "new folder" / "graph.npz"))


def test_writing_again_replaces_and_leaves_nothing_else(tmp_path):
    path = tmp_path / "graph.npz"
    write_graph(small_graph(2), path)
    write_graph(small_graph(5), path)
    assert len(read_graph(path).ops) == 5
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "graph.npz"
    write_graph(small_graph(2), path)

    def fail(*_args, **_kwargs):
        raise OSError("no space left on device")

    monkeypatch.setattr(np, "savez_compressed", fail)
    with pytest.raises(OSError, match="no space"):
        write_graph(small_graph(5), path)
    assert len(read_graph(path).ops) == 2
    assert list(tmp_path.iterdir()) == [path]


def test_no_file_is_no_graph(tmp_path):
    assert read_graph(tmp_path / "absent.npz") is None
    assert read_graph(tmp_path) is None


def test_another_format_version_is_no_graph(tmp_path, monkeypatch):
    path = tmp_path / "graph.npz"
    monkeypatch.setattr(graph_file, "GRAPH_FORMAT_VERSION", -1)
    write_graph(small_graph(), path)
    monkeypatch.undo()
    assert read_graph(path) is None


def test_every_cut_and_every_damaged_byte_is_survived(tmp_path):
    path = tmp_path / "graph.npz"
    write_graph(small_graph(), path)
    content = path.read_bytes()
    for position in range(0, len(content), 97):
        path.write_bytes(content[:position])
        assert read_graph(path) is None
        path.write_bytes(content[:position] + bytes([content[position] ^ 0xFF]) + content[position + 1 :])
        found = read_graph(path)  # a byte nobody reads may change
        assert found is None or len(found.ops) == 3


@pytest.mark.parametrize("header", [b"", b"{", b"[]", b"{}", b"3"])
def test_a_damaged_header_is_no_graph(tmp_path, header):
    np.savez(tmp_path / "graph.npz", header=np.frombuffer(header, dtype=np.uint8))
    assert read_graph(tmp_path / "graph.npz") is None


def test_a_missing_column_is_no_graph(tmp_path):
    write_graph(small_graph(), tmp_path / "graph.npz")
    with np.load(tmp_path / "graph.npz") as archive:
        arrays = {name: archive[name] for name in archive.files if name != "ops.flops"}
    np.savez(tmp_path / "graph.npz", **arrays)
    assert read_graph(tmp_path / "graph.npz") is None


def test_pickled_content_is_never_loaded(tmp_path):
    class Trap:
        def __reduce__(self):
            return Path.touch, (tmp_path / "sprung",)

    header = np.frombuffer(json.dumps({"format_version": 3}).encode(), dtype=np.uint8)
    np.savez(tmp_path / "graph.npz", header=header, trap=np.array([Trap()], dtype=object))
    (tmp_path / "sprung").unlink(missing_ok=True)  # saving may have run it
    assert read_graph(tmp_path / "graph.npz") is None
    path = tmp_path / "bare.npz"
    path.write_bytes(pickle.dumps(Trap()))
    assert read_graph(path) is None
    assert not (tmp_path / "sprung").exists()


def test_sizes_are_affine_in_the_batch():
    affine = np.array([[1.0, 2.0], [0.0, 5.0]])
    assert at_batch(affine, 10).tolist() == [21.0, 50.0]
    graph = small_graph()
    work = (graph.ops.flops[:, 0] + 7 * graph.ops.flops[:, 1]) @ graph.ops.count
    assert graph.total_flops(7) == pytest.approx(work)
    moved = graph.ops.read_bytes + graph.ops.write_bytes
    assert graph.total_bytes(7) == pytest.approx((moved @ (1, 7)) @ graph.ops.count)
    assert replace(graph, ops=graph.ops).total_flops(0) == pytest.approx(
        graph.ops.flops[:, 0] @ graph.ops.count
    )
