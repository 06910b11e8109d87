"""The cache of traced graphs: a second question loads no framework, and no fault of it costs an answer."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from forerun.base.errors import UnknownModelError
from forerun.base.kept import cache_folder
from forerun.graph.file import read_graph, write_graph
from forerun.question.model import ModelRequest
from forerun.question.setup import Layout, OptimizerImplementation, Phase, Precision, TrainingSetup
from forerun.tracing.trace import trace

torch.set_num_threads(1)
SOURCE = Path(__file__).parents[2] / "src"
REQUEST = ModelRequest(model="cnn:depth=1,base_filters=4")
SETUP = TrainingSetup()
QUESTION = """
import sys
from forerun.question.model import ModelRequest
from forerun.tracing.trace import trace
from forerun.graph.file import read_graph, write_graph
from forerun.question.setup import TrainingSetup
graph = trace(ModelRequest(model="cnn:depth=1,base_filters=4"), TrainingSetup(batch_size_per_device=77))
print(len(graph.ops), "torch" in sys.modules)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path))
    return tmp_path


def files(folder):
    return sorted((folder / "traces").glob("*.npz")) if (folder / "traces").exists() else []


def same(left, right):
    return left.ops.kernel_names == right.ops.kernel_names and np.array_equal(left.ops.flops, right.ops.flops)


def test_a_second_question_loads_no_framework(folder):
    graph = trace(REQUEST, SETUP)
    assert len(files(folder)) == 1
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "FORERUN_CACHE": str(folder)}
    answer = subprocess.run(
        [sys.executable, "-c", QUESTION], capture_output=True, text=True, env=environment, check=True
    )
    assert answer.stdout.split() == [str(len(graph.ops)), "False"]


def test_a_cached_graph_equals_the_traced_one():
    assert same(trace(REQUEST, SETUP), trace(REQUEST, SETUP))


def test_without_the_cache_nothing_is_written(folder):
    trace(REQUEST, SETUP, use_cache=False)
    assert files(folder) == []


@pytest.mark.parametrize("damage", ["empty", "text", "half", "flipped", "other archive"])
def test_a_damaged_file_is_traced_again(folder, damage):
    graph = trace(REQUEST, SETUP)
    path = files(folder)[0]
    content = path.read_bytes()
    if damage == "other archive":
        np.savez(path, something=np.zeros(3))
    else:
        middle = len(content) // 2
        flipped = (
            content[:middle] + bytes(255 - b for b in content[middle : middle + 40]) + content[middle + 40 :]
        )
        path.write_bytes(
            {"empty": b"", "text": b"no archive", "half": content[:middle], "flipped": flipped}[damage]
        )
    assert same(trace(REQUEST, SETUP), graph)
    assert same(read_graph(path), graph)


@pytest.mark.skipif(
    os.geteuid() == 0 and not Path("/proc/self").exists(), reason="needs /proc to deny a write"
)
def test_a_folder_that_cannot_be_written_costs_no_answer(monkeypatch):
    # Nobody can make a folder there, not even the superuser.
    monkeypatch.setenv("FORERUN_CACHE", "/proc/self/forerun")
    assert len(trace(REQUEST, SETUP).ops) > 0


def test_a_file_in_place_of_the_folder_costs_no_answer(folder, monkeypatch):
    (folder / "file").write_text("")
    monkeypatch.setenv("FORERUN_CACHE", str(folder / "file"))
    assert len(trace(REQUEST, SETUP).ops) > 0


@pytest.mark.parametrize(
    "change",
    [
        {"precision": Precision.AMP},
        {"precision": Precision.FP16},
        {"layout": Layout.NHWC},
        {"optimizer": "adam"},
        {"optimizer_implementation": OptimizerImplementation.FUSED},
        {"phase": Phase.INFERENCE, "optimizer": "none"},
        {"phase": Phase.FORWARD, "optimizer": "none"},
        {"fused_attention": False},
        {"zero_grad_to_none": False},
    ],
    ids=str,
)
def test_what_changes_the_graph_changes_the_key(folder, change):
    trace(REQUEST, SETUP)
    trace(REQUEST, replace(SETUP, **change))
    assert len(files(folder)) == 2


@pytest.mark.parametrize(
    "change",
    [
        {"batch_size_per_device": 99},
        {"precision": Precision.TF32},
        {"compile": True},
        {"autocast_backward": True},
    ],
    ids=str,
)
def test_what_leaves_the_graph_alone_leaves_the_key(folder, change):
    trace(REQUEST, SETUP)
    trace(REQUEST, replace(SETUP, **change))
    assert len(files(folder)) == 1


@pytest.mark.parametrize(
    "change", [{"image_size": 40}, {"num_classes": 7}, {"model": "cnn:depth=1,base_filters=8"}]
)
def test_the_request_is_part_of_the_key(folder, change):
    trace(REQUEST, SETUP)
    trace(replace(REQUEST, **change), SETUP)
    assert len(files(folder)) == 2


def test_a_module_of_the_users_own_is_never_cached(folder):
    trace(ModelRequest(model="Linear", input_shape=(4,)), SETUP, nn.Linear(4, 2))
    assert files(folder) == []


def test_an_unknown_model_leaves_nothing_behind(folder):
    with pytest.raises(UnknownModelError):
        trace(ModelRequest(model="torchvision:resnet51"), SETUP)
    assert files(folder) == []


def test_a_graph_of_one_batch_size_answers_no_other(folder, monkeypatch):
    # As a cached graph of a model whose work is not affine in the batch.
    real = trace(REQUEST, SETUP)
    path = files(folder)[0]
    write_graph(replace(real, only_batch_size=5), path)
    assert trace(REQUEST, replace(SETUP, batch_size_per_device=5)).only_batch_size == 5
    assert trace(REQUEST, replace(SETUP, batch_size_per_device=6)).only_batch_size is None


def test_the_folder_is_the_users_unless_chosen(folder, monkeypatch):
    assert cache_folder() == folder
    monkeypatch.delenv("FORERUN_CACHE")
    assert cache_folder().name == "forerun"
