"""Keras models: traced in a child process, one graph as from PyTorch; every bad input has one clear error."""

import json
import subprocess
import sys
from importlib import util
from pathlib import Path

import numpy as np
import pytest

from forerun.adapters.keras import source as keras_source
from forerun.adapters.keras.source import keras_request, trace_keras_requests
from forerun.base.errors import (
    InvalidSetupError,
    MissingExtraError,
    ModelBuildError,
    UnknownModelError,
    UsageError,
)
from forerun.graph.graph import OpClass, StepPart
from forerun.question.model import ModelRequest, is_keras, own_settings
from forerun.question.setup import Layout, Phase, Precision, TrainingSetup
from forerun.tracing.trace import trace

needs_keras = pytest.mark.skipif(util.find_spec("keras") is None, reason="the extra 'keras' is not installed")
KERAS = TrainingSetup(layout=Layout.NHWC)

MODELS_PY = """
import keras

def small():
    return keras.Sequential([
        keras.Input((8, 8, 3)),
        keras.layers.Conv2D(4, 3, padding="same", use_bias=False),
        keras.layers.BatchNormalization(),
        keras.layers.ReLU(),
        keras.layers.Dropout(0.5),
        keras.layers.GlobalAveragePooling2D(),
        keras.layers.Dense(2, activation="softmax"),
    ])

def unbuilt():
    return keras.Sequential([keras.layers.Conv2D(4, 3), keras.layers.Flatten(), keras.layers.Dense(2)])

def open_axes():
    return keras.Sequential([keras.Input((None, None, 3)), keras.layers.Conv2D(4, 3)])

class Own(keras.Model):
    def __init__(self):
        super().__init__()
        self.inner = keras.layers.Dense(3)

    def call(self, x, training=None):
        return self.inner(x)

def subclassed():
    return Own()

def broken():
    raise RuntimeError("no such thing")

def nothing():
    return 3
"""


def graph_of(model, setup=KERAS, **inputs):
    return trace(ModelRequest(model=model, **inputs), setup, use_cache=False)


@pytest.fixture(scope="module")
def models_py(tmp_path_factory):
    path = tmp_path_factory.mktemp("keras") / "models.py"
    path.write_text(MODELS_PY, encoding="utf-8")
    return path


@needs_keras
def test_a_factory_traces_to_forward_backward_and_optimizer(models_py):
    graph = graph_of(f"{models_py}:small")
    ops = graph.ops
    convs = ops.op_class == OpClass.CONV
    # 8x8 pixels, 3x3 window, 3 to 4 channels, two operations a multiply-add
    forward = convs & (ops.step_part == StepPart.FORWARD)
    assert ops.flops[forward].tolist() == [[0.0, 2 * 64 * 9 * 3 * 4]]
    assert {int(part) for part in ops.step_part} == set(map(int, StepPart))
    assert graph.num_trainable_parameters == 4 * 3 * 9 + 2 * 4 + 4 * 2 + 2
    assert graph.input_shape == (8, 8, 3)
    assert graph.only_batch_size is None
    assert not graph.unsupported_ops
    assert any("moments" in note for note in graph.notes)
    assert not (ops.op_class == OpClass.BATCH_NORM).any()
    assert "conv2d" in ops.module_names


@needs_keras
def test_xla_makes_batch_norm_one_kernel_and_moves_fewer_bytes(models_py):
    plain = graph_of(f"{models_py}:small")
    fused = graph_of(f"{models_py}:small", TrainingSetup(layout=Layout.NHWC, compile=True))
    assert (fused.ops.op_class == OpClass.BATCH_NORM).sum() == 2
    assert any("as XLA fuses them" in note for note in fused.notes)
    assert fused.total_bytes(64) < plain.total_bytes(64)
    products = [OpClass.CONV, OpClass.LINEAR]
    for graph in (plain, fused):
        assert (
            np.isin(graph.ops.op_class, products).sum() == 5
        )  # conv has no input gradient, dense has all three


@needs_keras
def test_mixed_precision_is_the_policy_of_the_layers(models_py):
    graph = graph_of(f"{models_py}:small", TrainingSetup(layout=Layout.NHWC, precision=Precision.AMP))
    convs = graph.ops.op_class == OpClass.CONV
    assert set(graph.ops.element_bytes[convs]) == {2.0}
    assert (graph.ops.op_class == OpClass.CAST).any()


@needs_keras
def test_inference_has_no_backward_pass(models_py):
    setup = TrainingSetup(layout=Layout.NHWC, phase=Phase.INFERENCE, optimizer="none")
    graph = graph_of(f"{models_py}:small", setup)
    assert set(graph.ops.step_part) == {StepPart.FORWARD}


@needs_keras
def test_a_file_a_folder_away_gives_the_graph_of_its_model(models_py, tmp_path):
    path = tmp_path / "small.keras"
    code = (
        f"import sys; sys.path.insert(0, {str(models_py.parent)!r}); import models; "
        f"models.small().save({str(path)!r})"
    )
    subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        env={"KERAS_BACKEND": "torch", "PATH": ""},
        capture_output=True,
    )
    from_file, from_code = graph_of(f"keras:{path}"), graph_of(f"{models_py}:small")
    assert from_file.total_flops(8) == from_code.total_flops(8)
    assert from_file.num_parameters == from_code.num_parameters


@needs_keras
def test_a_subclassed_or_unbuilt_model_is_built_for_the_input_shape(models_py):
    graph = graph_of(f"{models_py}:subclassed", input_shape=(5,))
    assert graph.num_trainable_parameters == 5 * 3 + 3
    assert (
        graph_of(f"{models_py}:unbuilt", input_shape=(6, 6, 1)).num_trainable_parameters
        == 40 + 4 * 16 * 2 + 2
    )


@needs_keras
@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("unbuilt", InvalidSetupError, "is not built.*give --input-shape"),
        ("open_axes", InvalidSetupError, "leaves axes of its input open.*give --input-shape"),
        ("broken", ModelBuildError, "raised RuntimeError.*no such thing"),
        ("nothing", ModelBuildError, "it is a int"),
        ("missing", UnknownModelError, "has no 'missing'"),
    ],
)
def test_models_that_cannot_be_traced_say_why(models_py, name, error, message):
    with pytest.raises(error, match=message):
        graph_of(f"{models_py}:{name}")


@needs_keras
def test_a_damaged_file_is_no_keras_model(tmp_path):
    path = tmp_path / "broken.keras"
    path.write_bytes(b"PK\x03\x04 not a zip")
    with pytest.raises(ModelBuildError, match="cannot be read as a Keras model"):
        graph_of(f"keras:{path}")


@needs_keras
def test_unknown_names_list_near_ones():
    with pytest.raises(UnknownModelError, match="did you mean resnet50"):
        graph_of("keras:ResNet5")


@needs_keras
def test_a_layer_of_the_users_own_in_a_configuration_asks_for_a_factory():
    config = {
        "class_name": "Sequential",
        "module": "keras",
        "registered_name": None,
        "config": {
            "name": "s",
            "layers": [
                {
                    "module": "mine",
                    "class_name": "Swirl",
                    "config": {"name": "swirl"},
                    "registered_name": "mine>Swirl",
                }
            ],
        },
    }

    class Model:
        __module__ = "keras.models"

        def to_json(self):
            return json.dumps(config)

    with pytest.raises(ModelBuildError, match=r"a custom layer.*path/to/file\.py:factory"):
        trace(ModelRequest(model="mine"), KERAS, Model())


def test_without_keras_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(keras_source.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"pip install 'forerun\[keras\]'"):
        trace_keras_requests([keras_request(ModelRequest(model="keras:ResNet50"), KERAS)])


def test_what_is_keras_is_told_without_importing_it(tmp_path):
    both = tmp_path / "both.py"
    both.write_text("import keras\nimport torch\n", encoding="utf-8")
    mine = tmp_path / "mine.py"
    mine.write_text("from tensorflow import keras\n", encoding="utf-8")
    assert is_keras("keras:ResNet50")
    assert is_keras(f"{mine}:make")
    assert not is_keras(f"{both}:make")
    assert not is_keras("missing.py:make")
    assert not is_keras("cnn:depth=2")
    assert own_settings("keras:cnn")["layout"] is Layout.NHWC
    assert own_settings("cnn")["layout"] is Layout.NCHW


def test_a_keras_model_is_no_module_to_measure():
    from forerun.tracing.models.sources import build_model

    with pytest.raises(UsageError, match="--framework keras"):
        build_model("keras:ResNet50")


def test_the_parts_that_the_core_imports_name_no_framework():
    folder = Path(keras_source.__file__).parent
    for name in ("source.py", "networks.py"):
        text = (folder / name).read_text(encoding="utf-8")
        assert "\nimport keras" not in text
        assert "\nimport torch" not in text
