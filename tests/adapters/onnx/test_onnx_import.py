"""ONNX files: the interpreter's values against the exported module's own, and traces of what it builds."""

import logging

import pytest
import torch
from torch import nn
from torch.nn import functional

from forerun.adapters.onnx.graph import OPERATORS, onnx_op
from forerun.adapters.onnx.model import load_onnx_module
from forerun.base.errors import (
    InvalidSetupError,
    MissingExtraError,
    ModelBuildError,
    TraceError,
    UnknownModelError,
)
from forerun.question.model import ModelRequest
from forerun.question.setup import TrainingSetup
from forerun.tracing.models.sources import build_model
from forerun.tracing.trace import cache_path

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
torch.set_num_threads(1)


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(20, 32),
            nn.LayerNorm(32),
            nn.GELU(),
            nn.Linear(32, 32, bias=False),
            nn.SiLU(),
            nn.Linear(32, 3),
        )

    def forward(self, x):
        return functional.log_softmax(self.layers(x), -1) * x.std() + x.abs().sum(1, keepdim=True) ** 0.5


class Recurrent(nn.Module):
    def __init__(self, kind, bidirectional):
        super().__init__()
        self.embedding = nn.Embedding(50, 8)
        self.layers = kind(8, 6, 2, bidirectional=bidirectional, batch_first=True)
        self.head = nn.Linear(12 if bidirectional else 6, 3)

    def forward(self, x):
        return self.head(self.layers(self.embedding(x))[0][:, -1])


class Decoder(nn.Module):
    """Group and instance norms, transposed convolution, resizing and padding."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.down = nn.Conv2d(8, 8, 3, stride=2, padding=1)
        self.group_norm = nn.GroupNorm(2, 8)
        self.up = nn.ConvTranspose2d(8, 8, 2, 2)
        self.instance_norm = nn.InstanceNorm2d(8, affine=True)
        self.out = nn.Conv2d(16, 4, 1)
        for norm in (self.group_norm, self.instance_norm):
            nn.init.uniform_(norm.weight)
            nn.init.uniform_(norm.bias)

    def forward(self, x):
        high = functional.leaky_relu(self.first(x))
        low = self.group_norm(self.down(high))
        up = self.instance_norm(self.up(low))
        resized = functional.interpolate(low, scale_factor=2, mode="bilinear")
        pooled = functional.avg_pool2d(functional.pad(up, (1, 0, 1, 0)), 2, 1)
        return self.out(torch.cat([high + resized, pooled], 1))


class Attention(nn.Module):
    """A transformer block with a class token and position embeddings, as in ViT and BERT."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.positions = nn.Parameter(torch.randn(1, 9, 16))
        self.token = nn.Parameter(torch.randn(1, 1, 16))
        self.qkv = nn.Linear(16, 48)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 5)

    def forward(self, ids):
        x = torch.cat([self.token.expand(ids.shape[0], -1, -1), self.embedding(ids)], 1) + self.positions
        query, key, value = self.qkv(self.norm(x)).reshape(ids.shape[0], 9, 3, 2, 8).permute(2, 0, 3, 1, 4)
        mask = torch.ones(9, 9, dtype=torch.bool).tril()
        mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        x = x + mixed.transpose(1, 2).reshape(x.shape)
        return self.head(x[:, 0])


def resnet():
    from torchvision.models.resnet import BasicBlock, ResNet

    return ResNet(BasicBlock, [1, 1, 1, 1], num_classes=5)


def small_mobilenet():
    from torchvision.models import MobileNetV2

    setting = [[1, 16, 1, 1], [6, 24, 1, 2]]
    return MobileNetV2(num_classes=5, inverted_residual_setting=setting)


def small_densenet():
    from torchvision.models import DenseNet

    return DenseNet(8, (2, 2), 16, num_classes=5)


def vit():
    from torchvision.models import VisionTransformer

    model = VisionTransformer(32, 8, 2, 2, 32, 64, num_classes=5)
    nn.init.normal_(model.heads.head.weight)
    return model


def images(size):
    return lambda: torch.randn(3, 3, size, size)


def tokens(length):
    return lambda: torch.randint(0, 50, (3, length))


CASES = {
    "mlp": (Mlp, lambda: torch.randn(3, 20)),
    "lstm": (lambda: Recurrent(nn.LSTM, True), tokens(7)),
    "gru": (lambda: Recurrent(nn.GRU, False), tokens(7)),
    "decoder": (Decoder, images(16)),
    "attention": (Attention, tokens(8)),
    "resnet": (resnet, images(32)),
    "mobilenet": (small_mobilenet, images(32)),
    "densenet": (small_densenet, images(32)),
    "vit": (vit, images(32)),
}


def varied(module):
    """Gives norms values of their own: exporters store equal tensors once."""
    for child in module.modules():
        if isinstance(child, nn.BatchNorm2d):
            nn.init.normal_(child.running_mean)
            nn.init.uniform_(child.running_var, 0.5, 2.0)
        if isinstance(child, (nn.BatchNorm2d, nn.LayerNorm)):
            nn.init.uniform_(child.weight, 0.5, 1.5)
            nn.init.normal_(child.bias)
        if isinstance(child, (nn.Conv2d, nn.Linear)) and child.bias is not None:
            nn.init.normal_(child.bias)
    return module


def export(name, path, *, dynamo=False, is_batch_open=True):
    torch.manual_seed(0)
    make, sample = CASES[name]
    module, x = varied(make()).eval(), sample()
    logging.disable(logging.WARNING)
    try:
        if dynamo:
            axes = ({0: torch.export.Dim.DYNAMIC},) if is_batch_open else None
            torch.onnx.export(module, (x,), str(path), dynamo=True, dynamic_shapes=axes, verbose=False)
        else:
            axes = {"x": {0: "batch"}} if is_batch_open else None
            torch.onnx.export(module, (x,), str(path), dynamo=False, input_names=["x"], dynamic_axes=axes)
    finally:
        logging.disable(logging.NOTSET)
    return module, x


def run_step(built, batch_size):
    batch = built.make_batch(batch_size)
    output = built.module(*batch["args"])
    built.loss(output, batch).backward()
    return output


CALLS = [(name, False) for name in CASES] + [(name, True) for name in ("attention", "resnet", "vit", "lstm")]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "dynamo"), CALLS)
def test_values_equal_those_of_the_exported_module(name, dynamo, tmp_path):
    path = tmp_path / "model.onnx"
    module, x = export(name, path, dynamo=dynamo)
    loaded = load_onnx_module(path, with_values=True).eval()
    more = torch.cat([x, x[:2]])
    with torch.no_grad():
        torch.testing.assert_close(loaded(x), module(x), rtol=1e-4, atol=1e-4)
        if name != "mlp":  # its spread is taken over the whole batch
            torch.testing.assert_close(loaded(more)[:3], module(x), rtol=1e-4, atol=1e-4)

    built = build_model(f"onnx:{path}")
    output = run_step(built, 7)
    assert output.is_meta
    assert output.shape == (7, *module(x).shape[1:])
    assert built.only_batch_size is None
    assert all(p.is_meta and p.grad is not None for p in built.module.parameters())
    original = sum(p.numel() for p in module.parameters())
    assert sum(p.numel() for p in built.module.parameters()) == pytest.approx(original, rel=0.1)


@pytest.mark.filterwarnings("ignore")
def test_a_bert_like_model(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, vocab_size=50
    )
    CASES["bert"] = (lambda: transformers.BertForSequenceClassification(config), tokens(12))
    path = tmp_path / "bert.onnx"
    module, x = export("bert", path)
    loaded = load_onnx_module(path, with_values=True).eval()
    with torch.no_grad():
        torch.testing.assert_close(loaded(x), module(x).logits, rtol=1e-4, atol=1e-4)
    assert run_step(build_model(f"onnx:{path}"), 4).shape == (4, 2)


@pytest.mark.filterwarnings("ignore")
def test_gradients_equal_those_of_the_exported_module(tmp_path):
    path = tmp_path / "model.onnx"
    module, x = export("decoder", path)
    loaded = load_onnx_module(path, with_values=True).eval()
    loaded(x).square().mean().backward()
    module(x).square().mean().backward()
    norms = sorted(p.grad.norm().item() for p in loaded.parameters())
    assert norms == pytest.approx(
        sorted(p.grad.norm().item() for p in module.parameters()), rel=1e-2, abs=1e-5
    )


@pytest.mark.filterwarnings("ignore")
def test_folded_batch_norms_are_said(tmp_path):
    export("resnet", tmp_path / "model.onnx")
    notes = " ".join(build_model(f"onnx:{tmp_path / 'model.onnx'}").notes)
    assert "batch norms were folded" in notes
    export("decoder", tmp_path / "other.onnx")
    assert "batch norms" not in " ".join(build_model(f"onnx:{tmp_path / 'other.onnx'}").notes)


@pytest.mark.filterwarnings("ignore")
def test_a_fixed_batch_is_kept_and_said(tmp_path):
    export("attention", tmp_path / "model.onnx", is_batch_open=False)
    built = build_model(f"onnx:{tmp_path / 'model.onnx'}")
    assert built.only_batch_size == 3
    assert "fixed to batch size 3" in " ".join(built.notes)
    assert run_step(built, 3).shape == (3, 5)


@pytest.mark.filterwarnings("ignore")
def test_values_are_dropped_after_their_last_use(tmp_path):
    export("resnet", tmp_path / "model.onnx")
    module = load_onnx_module(tmp_path / "model.onnx")
    dropped = [name for names in module._dead_after for name in names]
    assert len(dropped) == len(set(dropped))
    made = {name for node in module.graph.nodes for name in node.outputs} - set(module.graph.outputs)
    assert made <= set(dropped)


def model_of(nodes, inputs, initializers=(), opset=18, outputs=("y",)):
    helper, number = onnx.helper, onnx.TensorProto.FLOAT
    given = [helper.make_tensor_value_info(name, number, shape) for name, shape in inputs.items()]
    made = [helper.make_tensor_value_info(name, number, None) for name in outputs]
    graph = helper.make_graph(list(nodes), "test", given, made, list(initializers))
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])


def saved(model, tmp_path):
    path = tmp_path / "made.onnx"
    onnx.save(model, str(path))
    return path


def reference(model, feeds):
    from onnx.reference import ReferenceEvaluator

    results = ReferenceEvaluator(model).run(None, {name: tensor.numpy() for name, tensor in feeds.items()})
    return [torch.from_numpy(result.copy()) for result in results]


def integers(name, *values):
    return onnx.helper.make_tensor(name, onnx.TensorProto.INT64, [len(values)], values)


def floats(name, *values):
    return onnx.helper.make_tensor(name, onnx.TensorProto.FLOAT, [len(values)], values)


N = onnx.helper.make_node
NODES = {
    "clip": (N("Clip", ["x", "low"], ["y"]), [onnx.helper.make_tensor("low", 1, [], [0.1])]),
    "hard_sigmoid": (N("HardSigmoid", ["x"], ["y"], alpha=0.3), []),
    "softmax_all_axes": (N("Softmax", ["x"], ["y"], axis=2), []),
    "transpose": (N("Transpose", ["x"], ["y"], perm=[0, 2, 3, 1]), []),
    "flatten": (N("Flatten", ["x"], ["y"], axis=2), []),
    "reshape_zero": (N("Reshape", ["x", "s"], ["y"]), [integers("s", 0, -1, 2)]),
    "slice_backwards": (
        N("Slice", ["x", "a", "b", "c", "d"], ["y"]),
        [integers("a", -1), integers("b", -100), integers("c", 3), integers("d", -2)],
    ),
    "gather_negative": (N("Gather", ["x", "i"], ["y"], axis=2), [integers("i", -1, 0)]),
    "expand": (N("Expand", ["x", "s"], ["y"]), [integers("s", 2, 1, 1, 1, 1)]),
    "tile": (N("Tile", ["x", "s"], ["y"]), [integers("s", 1, 2, 1, 3)]),
    "pad": (N("Pad", ["x", "p"], ["y"], mode="reflect"), [integers("p", 0, 0, 1, 2, 0, 0, 1, 0)]),
    "reduce_max": (N("ReduceMax", ["x", "a"], ["y"], keepdims=0), [integers("a", 1, -1)]),
    "reduce_l2": (N("ReduceL2", ["x", "a"], ["y"]), [integers("a", 2)]),
    "cumulative_sum": (N("CumSum", ["x", "a"], ["y"]), [onnx.helper.make_tensor("a", 7, [], [3])]),
    "einsum": (N("Einsum", ["x", "x"], ["y"], equation="bchw,bcow->bho"), []),
    "average_pool_same": (
        N("AveragePool", ["x"], ["y"], kernel_shape=[2, 2], auto_pad="SAME_UPPER", strides=[1, 1]),
        [],
    ),
    "max_pool_ceil": (N("MaxPool", ["x"], ["y"], kernel_shape=[3, 3], strides=[2, 2], ceil_mode=1), []),
    "resize_nearest": (
        N(
            "Resize",
            ["x", "", "s"],
            ["y"],
            mode="nearest",
            coordinate_transformation_mode="asymmetric",
            nearest_mode="floor",
        ),
        [floats("s", 1, 1, 2, 2)],
    ),
    "depth_to_space": (N("DepthToSpace", ["x"], ["y"], blocksize=2), []),
    "trilu": (N("Trilu", ["x"], ["y"], upper=0), []),
    "space_to_depth": (N("SpaceToDepth", ["x"], ["y"], blocksize=2), []),
    "mean_of_several": (N("Mean", ["x", "x", "x"], ["y"]), []),
    "arg_max": (N("ArgMax", ["x"], ["y"], axis=1), []),
    "conv_same_lower": (
        N("Conv", ["x", "w"], ["y"], auto_pad="SAME_LOWER", kernel_shape=[2, 2]),
        [onnx.helper.make_tensor("w", 1, [2, 4, 2, 2], [i / 10 for i in range(32)])],
    ),
}


@pytest.mark.parametrize("case", NODES)
def test_single_operators_equal_onnx_own_reference(case, tmp_path):
    node, initializers = NODES[case]
    model = model_of([node], {"x": [2, 4, 6, 6]}, initializers)
    torch.manual_seed(1)
    x = torch.randn(2, 4, 6, 6)
    path = saved(model, tmp_path)
    result = load_onnx_module(path, with_values=True)(x)
    torch.testing.assert_close(result, reference(model, {"x": x})[0], rtol=1e-4, atol=1e-5)
    assert load_onnx_module(path)(x.to("meta")).shape == result.shape


@pytest.mark.parametrize("branch", [True, False])
def test_a_branch_on_shapes_is_taken(branch, tmp_path):
    def body(name, op):
        output = onnx.helper.make_tensor_value_info(name, 1, None)
        return onnx.helper.make_graph([N(op, ["x"], [name])], name, [], [output])

    condition = onnx.helper.make_tensor("c", onnx.TensorProto.BOOL, [], [branch])
    node = N("If", ["c"], ["y"], then_branch=body("a", "Relu"), else_branch=body("b", "Neg"))
    path = saved(model_of([node], {"x": [2, 3]}, [condition]), tmp_path)
    x = torch.tensor([[1.0, -2.0, 3.0]])
    expected = x.relu() if branch else -x
    assert torch.equal(load_onnx_module(path, with_values=True)(x), expected)


def test_scales_and_bounds_are_no_weights(tmp_path):
    nodes = [N("Resize", ["x", "", "s"], ["z"]), N("Mul", ["z", "w"], ["y"])]
    path = saved(
        model_of(nodes, {"x": [1, 2, 4, 4]}, [floats("s", 1, 1, 2, 2), floats("w", *range(8))]), tmp_path
    )
    assert [p.shape for p in load_onnx_module(path).parameters()] == [(8,)]


def test_all_missing_operators_are_named_at_once(tmp_path):
    nodes = [
        N("NonZero", ["x"], ["a"], name="find"),
        N("Relu", ["x"], ["z"]),
        N("Strange", ["z"], ["y"], name="odd", domain="own.domain"),
    ]
    path = saved(model_of(nodes, {"x": [2, 3]}), tmp_path)
    with pytest.raises(TraceError, match=r"NonZero \(node 'find'\), own\.domain\.Strange \(node 'odd'\)"):
        build_model(f"onnx:{path}")


def test_sizes_that_depend_on_data_are_refused(tmp_path):
    nodes = [N("Cast", ["x"], ["s"], to=7), N("Reshape", ["x", "s"], ["y"], name="bad")]
    built = build_model(f"onnx:{saved(model_of(nodes, {'x': [2]}), tmp_path)}")
    with pytest.raises(TraceError, match=r"'bad' \(Reshape\) reads a size"):
        built.module(*built.make_batch(2)["args"])


def test_open_axes_need_a_size(tmp_path):
    path = saved(model_of([N("Relu", ["x"], ["y"])], {"x": ["batch", 3, "height", "width"]}), tmp_path)
    with pytest.raises(
        InvalidSetupError, match=r"leaves axis 2 of its input 'x' open \(height\): give input_shape"
    ):
        build_model(f"onnx:{path}")
    assert build_model(f"onnx:{path}", image_size=24).input_shape == (3, 24, 24)
    assert build_model(f"onnx:{path}", input_shape=(3, 8, 9)).input_shape == (3, 8, 9)
    with pytest.raises(InvalidSetupError, match="has the fixed shape 3,height,width, got 4,8,9"):
        build_model(f"onnx:{path}", input_shape=(4, 8, 9))


def test_external_weights_must_be_there(tmp_path):
    model = model_of(
        [N("Gemm", ["x", "w"], ["y"])],
        {"x": ["b", 64]},
        [onnx.numpy_helper.from_array(torch.ones(64, 64).numpy(), "w")],
    )
    onnx.save(model, str(tmp_path / "e.onnx"), save_as_external_data=True, location="e.bin", size_threshold=0)
    assert run_step(build_model(f"onnx:{tmp_path / 'e.onnx'}"), 3).shape == (3, 64)
    (tmp_path / "e.bin").unlink()
    with pytest.raises(ModelBuildError, match=r"'w' is kept in the file 'e.bin' beside the ONNX file"):
        build_model(f"onnx:{tmp_path / 'e.onnx'}")


def test_a_graph_with_a_circle_is_refused(tmp_path):
    nodes = [N("Add", ["x", "b"], ["a"], name="first"), N("Relu", ["a"], ["b"]), N("Relu", ["b"], ["y"])]
    path = saved(model_of(nodes, {"x": [2, 3]}), tmp_path)
    with pytest.raises(ModelBuildError, match="the node 'first' reads 'b', which no node before it makes"):
        build_model(f"onnx:{path}")


@pytest.mark.parametrize("content", [b"", b"this is no ONNX file at all", b"\x08\x07\x12\x00\xff\xff\xff"])
def test_a_damaged_file_is_refused(content, tmp_path):
    path = tmp_path / "bad.onnx"
    path.write_bytes(content)
    with pytest.raises(ModelBuildError, match=r"cannot be read as an ONNX file|is no ONNX model"):
        build_model(f"onnx:{path}")


def test_a_missing_file_and_a_head_are_refused(tmp_path):
    with pytest.raises(UnknownModelError, match="there is no file"):
        build_model(f"onnx:{tmp_path / 'none.onnx'}")
    path = saved(model_of([N("Relu", ["x"], ["y"])], {"x": ["b", 3]}), tmp_path)
    with pytest.raises(InvalidSetupError, match="num_classes cannot change its head"):
        build_model(f"onnx:{path}", num_classes=3)


def test_a_missing_package_is_named_with_its_extra(tmp_path, monkeypatch):
    path = saved(model_of([N("Relu", ["x"], ["y"])], {"x": ["b", 3]}), tmp_path)
    monkeypatch.setitem(__import__("sys").modules, "onnx", None)
    with pytest.raises(MissingExtraError, match=r"forerun\[onnx\]"):
        build_model(f"onnx:{path}")


def test_the_place_of_a_kept_graph_follows_the_content(tmp_path):
    path = saved(model_of([N("Relu", ["x"], ["y"])], {"x": ["b", 3]}), tmp_path)
    before = cache_path(ModelRequest(model=f"onnx:{path}"), TrainingSetup())
    saved(model_of([N("Neg", ["x"], ["y"])], {"x": ["b", 3]}), tmp_path)
    assert before != cache_path(ModelRequest(model=f"onnx:{path}"), TrainingSetup())


def test_an_operator_cannot_be_registered_twice():
    with pytest.raises(ValueError, match="registered twice"):
        onnx_op("Relu")(lambda node, x: x)
    assert "Relu" in OPERATORS
