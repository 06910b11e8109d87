"""The same sources of models, built where they can run."""

import json

import pytest
import torch
from torch import nn

from forerun.question.setup import Layout, Precision, TrainingSetup
from forerun.tracing.models.meta_build import building_on, is_building_on_meta, meta_copy
from forerun.tracing.models.sources import build_model
from forerun.tracing.step import prepared_batch

torch.set_num_threads(1)

BERT = {
    "model_type": "bert",
    "architectures": ["BertForSequenceClassification"],
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 100,
    "max_position_embeddings": 64,
}

USER_FILE = """
import torch

def make():
    layers = torch.nn.Embedding(7, 8), torch.nn.Flatten(), torch.nn.Linear(8 * 5, 3)
    tokens = torch.tensor([[0, 1, 2, 3, 4], [6, 5, 4, 3, 2]])
    return {"module": torch.nn.Sequential(*layers), "example_batch": tokens, "target": torch.tensor([2, 0]),
            "loss": torch.nn.CrossEntropyLoss(weight=torch.ones(3))}
"""


@pytest.fixture
def specs(tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(BERT))
    user = tmp_path / "net.py"
    user.write_text(USER_FILE)
    return {
        "family": "cnn:depth=2,base_filters=4",
        "single output": "cnn:depth=1,base_filters=4,num_classes=1",
        "torchvision": "torchvision:squeezenet1_1",
        "segmentation": "torchvision:lraspp_mobilenet_v3_large",
        "timm": "timm:mixnet_s",
        "transformers": f"hf:{config}",
        "user": f"{user}:make",
    }


SIZES = {"single output": 64, "torchvision": 64, "segmentation": 64, "timm": 64}


def losses_of_training(built, num_steps, learning_rate=0.02):
    batch = built.make_batch(4)
    optimizer = torch.optim.SGD(built.module.parameters(), lr=learning_rate)
    losses = []
    for _ in range(num_steps):
        optimizer.zero_grad()
        output = built.module(*batch.get("args", ()), **batch.get("kwargs", {}))
        loss = built.loss(output, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    "source", ["family", "single output", "torchvision", "segmentation", "timm", "transformers", "user"]
)
def test_every_source_gives_a_network_that_trains(source, specs):
    if source == "timm":
        pytest.importorskip("timm")
    if source == "transformers":
        pytest.importorskip("transformers")
    torch.manual_seed(0)
    built = build_model(specs[source], image_size=SIZES.get(source), device="cpu")
    tensors = [*built.module.parameters(), *built.module.buffers()]
    assert {tensor.device.type for tensor in tensors} == {"cpu"}
    losses = losses_of_training(built, 5)
    assert all(torch.isfinite(torch.tensor(losses)))
    assert min(losses[1:]) < losses[0]


@pytest.mark.parametrize("source", ["family", "torchvision", "user"])
def test_both_devices_give_the_same_shapes(source, specs):
    on_meta = build_model(specs[source], image_size=SIZES.get(source))
    real = build_model(specs[source], image_size=SIZES.get(source), device="cpu")
    shapes = [{name: p.shape for name, p in b.module.named_parameters()} for b in (on_meta, real)]
    assert shapes[0] == shapes[1]
    assert on_meta.input_shape == real.input_shape
    assert on_meta.make_batch(3)["args"][0].shape == real.make_batch(3)["args"][0].shape
    assert on_meta.make_batch(3)["args"][0].is_meta


def test_the_example_batch_of_a_user_keeps_its_values_and_is_repeated(specs):
    batch = build_model(specs["user"], device="cpu").make_batch(3)
    assert batch["args"][0].tolist() == [[0, 1, 2, 3, 4], [6, 5, 4, 3, 2], [0, 1, 2, 3, 4]]
    assert batch["target"].tolist() == [2, 0, 2]


def test_tokens_fill_the_vocabulary_and_labels_stay_in_range():
    network = nn.Sequential(nn.Embedding(1000, 4), nn.Flatten(), nn.Linear(64 * 4, 2))
    tokens = build_model(network, input_shape=(64,), device="cpu").make_batch(32)["args"][0]
    assert tokens.min() >= 0
    assert 900 < tokens.max() < 1000
    labels = build_model("cnn:depth=1,base_filters=2", device="cpu").make_batch(64)["target"]
    assert set(labels.tolist()) == {0, 1}


def test_a_module_that_is_handed_over_is_copied_with_its_values():
    network = nn.Linear(3, 2)
    built = build_model(network, device="cpu")
    assert torch.equal(built.module.weight, network.weight)
    assert built.module.weight is not network.weight


def test_an_onnx_file_runs_with_its_own_weights(tmp_path):
    onnx = pytest.importorskip("onnx")
    weight = torch.arange(6.0).reshape(3, 2)
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("MatMul", ["x", "w"], ["y"])],
        "product",
        [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["n", 3])],
        [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["n", 2])],
        [onnx.numpy_helper.from_array(weight.numpy(), "w")],
    )
    path = tmp_path / "product.onnx"
    onnx.save(onnx.helper.make_model(graph), str(path))
    built = build_model(f"onnx:{path}", device="cpu")
    (given,) = built.make_batch(4)["args"]
    assert torch.allclose(built.module(given), given @ weight)


def test_a_batch_is_converted_as_the_traced_one_is():
    built = build_model("cnn:depth=1,base_filters=4", device="cpu")
    setup = TrainingSetup(precision=Precision.BF16, layout=Layout.NHWC)
    images = prepared_batch(built, setup, 2)["args"][0]
    assert images.dtype is torch.bfloat16
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert next(built.module.parameters()).dtype is torch.bfloat16


def test_building_on_a_device_ends_with_its_context():
    with building_on(torch.device("cpu")):
        assert not is_building_on_meta()
        assert not meta_copy(nn.Linear(2, 2)).weight.is_meta
    assert is_building_on_meta()
    assert meta_copy(nn.Linear(2, 2)).weight.is_meta
