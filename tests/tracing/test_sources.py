"""Models from every source: sizes against published ones, one step on meta, and what is refused."""

import json
import os
import sys
import textwrap
from dataclasses import replace

import pytest
import torch
from torch import nn

from forerun.base.errors import (
    InvalidSetupError,
    MissingExtraError,
    ModelBuildError,
    TraceError,
    UnknownModelError,
    UsageError,
)
from forerun.question.model import ModelRequest
from forerun.question.saving import Saving
from forerun.question.setup import Precision, TrainingSetup
from forerun.tracing.models.meta_build import build_on_meta, explain_failure, meta_copy, move_to_meta
from forerun.tracing.models.sources import build_model
from forerun.tracing.models.vision_models import torchvision_names
from forerun.tracing.trace import trace, trace_built, without_torch

torch.set_num_threads(1)

BERT = {
    "model_type": "bert",
    "architectures": ["BertForPreTraining"],
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 100,
    "max_position_embeddings": 128,
}


def num_parameters(built):
    return sum(p.numel() for p in built.module.parameters())


def forward(built, batch_size=2):
    batch = built.make_batch(batch_size)
    return built.module(*batch.get("args", ()), **batch.get("kwargs", {})), batch


def run_step(built, batch_size=2):
    output, batch = forward(built, batch_size)
    loss = built.loss(output, batch)
    assert loss.is_meta
    assert loss.shape == ()
    loss.backward()
    assert all(t.is_meta for t in (*built.module.parameters(), *built.module.buffers()))
    return output


def failure(built, batch_size=2):
    with pytest.raises(Exception) as caught:  # noqa: PT011 - whatever the framework raises is the input here
        run_step(built, batch_size)
    return explain_failure(caught.value, built)


# Named models


@pytest.mark.parametrize(
    ("spec", "count"),
    [
        # torchvision's documentation of weights, "Number of params".
        ("torchvision:resnet50", 25_557_032),
        ("torchvision:vit_b_16", 86_567_656),
        ("torchvision:squeezenet1_1", 1_235_496),
        ("torchvision:inception_v3", 27_161_264),
        ("torchvision:r3d_18", 33_371_472),
        ("torchvision:mobilenet_v2", 3_504_872),
        # timm/results/results-imagenet.csv, in millions: 28.59, 5.72, 5.29.
        ("timm:convnext_tiny", 28_589_128),
        ("timm:vit_tiny_patch16_224", 5_717_416),
        ("timm:efficientnet_b0", 5_288_548),
    ],
)
def test_published_sizes_and_a_step_with_every_gradient(spec, count):
    built = build_model(spec)
    assert num_parameters(built) == count
    run_step(built)
    assert all(p.grad is not None for p in built.module.parameters())


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("googlenet", (3, 224, 224)),
        ("fcn_resnet50", (3, 480, 480)),
        ("lraspp_mobilenet_v3_large", (3, 480, 480)),
        ("s3d", (3, 64, 224, 224)),
        ("swin_v2_t", (3, 256, 256)),
        ("raft_small", (3, 368, 496)),
        ("efficientnet_b3", (3, 300, 300)),
    ],
)
def test_other_kinds_of_torchvision_models(name, shape):
    built = build_model(f"torchvision:{name}")
    assert built.input_shape == shape
    run_step(built, 1 if len(shape) == 4 else 2)
    assert all(p.grad is not None for p in built.module.parameters())


def test_inference_has_no_auxiliary_heads_and_is_in_evaluation_mode():
    built = build_model("torchvision:inception_v3", training=False)
    assert not built.module.training
    assert isinstance(forward(built)[0], torch.Tensor)


def test_linear_attention_is_a_kernel_a_pass(tmp_path):
    sizes = {
        "model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"], "hidden_size": 64, "vocab_size": 128,
        "num_hidden_layers": 4, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1,
        "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
        "linear_value_head_dim": 32,
    }  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(sizes))
    setup = TrainingSetup(batch_size_per_device=2, optimizer="adamw", precision=Precision.BF16)
    request = ModelRequest(model=f"hf:{path}", sequence_length=256)
    graph = trace(request, setup)
    ops, names = graph.ops, graph.ops.kernel_names

    def flops(name):
        rows = ops.kernel == names.index(name)
        assert ops.count[rows].sum() == 3  # one layer of four attends in full
        return float((ops.flops[rows] @ [1.0, 2.0] * ops.count[rows]).sum())

    # 6 C d + 4 C e + 6 d e for each of 2 x 256 tokens, 4 heads and 3 layers, with C = 64, d = 16, e = 32.
    once = 3 * 4 * 2 * 256 * (6 * 64 * 16 + 4 * 64 * 32 + 6 * 16 * 32)
    assert flops("delta_rule") == pytest.approx(once)
    assert flops("delta_rule_backward") == pytest.approx(3 * once)
    assert {"causal_convolution", "causal_convolution_backward"} <= set(names)
    again = trace(request, replace(setup, saving=Saving(recompute="full")))
    rows = again.ops.kernel == again.ops.kernel_names.index("delta_rule")
    assert again.ops.count[rows].sum() == 2 * 3
    assert any("flash-linear-attention" in note for note in graph.notes)


def test_torchvision_names_leave_detection_and_quantized_models_out():
    names = torchvision_names()
    assert "resnet50" in names
    assert not any("rcnn" in name or "quantized" in name for name in names)


def test_sizes_and_classes_are_passed_on():
    built = build_model("torchvision:vit_b_16", image_size=384, num_classes=7)
    assert built.module.encoder.pos_embedding.shape[1] == 24 * 24 + 1
    assert run_step(built).shape == (2, 7)
    built = build_model("timm:vit_tiny_patch16_224", input_shape=(3, 96, 128), num_classes=5)
    assert run_step(built).shape == (2, 5)
    built = build_model("timm:resnet18", input_shape=(1, 64, 64))
    assert built.module.conv1.in_channels == 1
    assert run_step(built).shape == (2, 1000)


def test_timm_takes_old_names_and_the_size_of_the_models_configuration():
    assert build_model("timm:tf_efficientnet_b0_ns").input_shape == (3, 224, 224)
    assert build_model("timm:tf_efficientnet_b3").input_shape == (3, 300, 300)


# Transformers


def config_file(tmp_path, **values):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(values))
    return f"hf:{path}"


def test_bert_large_for_pretraining_has_336_million_parameters(tmp_path):
    # Devlin et al. 2019, section 3: 340 M in round numbers; google-research/bert's checkpoint with both heads
    # has 336,226,108.
    large = {**BERT, "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16}
    large |= {"intermediate_size": 4096, "vocab_size": 30522, "max_position_embeddings": 512}
    built = build_model(config_file(tmp_path, **large, torch_dtype="bfloat16"))
    assert num_parameters(built) == 336_226_108
    assert built.input_shape == (512,)
    assert {p.dtype for p in built.module.parameters()} == {torch.float32}


_SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
_TOWER = {**_SMALL, "image_size": 32, "patch_size": 16, "max_position_embeddings": 16, "vocab_size": 100}
_WAVES = {"conv_dim": [8, 8], "conv_stride": [5, 4], "conv_kernel": [10, 3], "num_feat_extract_layers": 2,
          "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}  # fmt: skip
_OTHERS = {
    "wav2vec2": ("Wav2Vec2ForCTC", {**_SMALL, **_WAVES}, "labels", (160_000,)),
    "audio-spectrogram-transformer": ("ASTForAudioClassification", _SMALL, None, (1024, 128)),
    "clip": (
        "CLIPModel",
        {"text_config": _TOWER, "vision_config": _TOWER, "projection_dim": 8},
        "batch size",
        (16,),
    ),
    "siglip": ("SiglipModel", {"text_config": _TOWER, "vision_config": _TOWER}, "batch size", (16,)),
    "deberta-v2": ("DebertaV2ForSequenceClassification", {**_SMALL, "vocab_size": 100}, "labels", (512,)),
    "videomae": ("VideoMAEForVideoClassification", {**_SMALL, "image_size": 32}, None, (16, 3, 32, 32)),
    "table-transformer": (
        "TableTransformerForObjectDetection",
        {
            "use_timm_backbone": False,
            "d_model": 32,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 64,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "num_queries": 5,
            "backbone_config": {
                "model_type": "resnet",
                "embedding_size": 8,
                "hidden_sizes": [8, 8, 8, 8],
                "depths": [1, 1, 1, 1],
                "layer_type": "basic",
                "out_features": ["stage4"],
            },
        },
        None,
        (3, 224, 224),
    ),
    "vision-encoder-decoder": (
        "VisionEncoderDecoderModel",
        {
            "encoder": {"model_type": "vit", **_SMALL, "image_size": 32},
            "decoder": {
                "model_type": "trocr",
                "d_model": 32,
                "decoder_layers": 2,
                "decoder_attention_heads": 2,
                "decoder_ffn_dim": 64,
                "vocab_size": 100,
            },
        },
        None,
        (3, 32, 32),
    ),
    "layoutlmv3": (
        "LayoutLMv3ForTokenClassification",
        {**_SMALL, "vocab_size": 100, "coordinate_size": 6, "shape_size": 4},
        None,
        (512,),
    ),
}


@pytest.mark.parametrize("kind", _OTHERS)
def test_waves_pairs_clips_and_losses_that_read_labels_are_traced(kind, tmp_path):
    architecture, sizes, note, shape = _OTHERS[kind]
    built = build_model(config_file(tmp_path, model_type=kind, architectures=[architecture], **sizes))
    assert built.input_shape == shape
    graph = trace_built(built, TrainingSetup(batch_size_per_device=2))
    assert graph.unsupported_ops == ()
    assert (note in " ".join(graph.notes)) if note else graph.notes == built.notes
    # A pair of encoders is as good as its two losses; all others are lines in the batch.
    assert graph.total_flops(2) > 6 * graph.num_parameters


def test_a_configuration_that_says_eager_has_attention_in_single_operations(tmp_path):
    said = build_model(config_file(tmp_path, **BERT, _attn_implementation="eager"))
    asked = build_model(config_file(tmp_path, **BERT), attn_implementation="eager")
    assert said.module.config._attn_implementation == asked.module.config._attn_implementation == "eager"
    assert any("single operations" in note for note in said.notes)
    assert not asked.notes


@pytest.mark.parametrize(
    ("architecture", "labels"),
    [
        ("BertForPreTraining", {"labels": (2, 128), "next_sentence_label": (2,)}),
        ("BertForMaskedLM", {"labels": (2, 128)}),
        ("BertForSequenceClassification", {"labels": (2,)}),
        ("BertForQuestionAnswering", {"start_positions": (2,), "end_positions": (2,)}),
        ("BertForMultipleChoice", {"labels": (2,)}),
        ("BertModel", {}),
    ],
)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_heads_get_their_labels_and_give_their_own_loss(architecture, labels, attention, tmp_path):
    spec = config_file(tmp_path, **{**BERT, "architectures": [architecture]})
    built = build_model(spec, attn_implementation=attention)
    assert type(built.module).__name__ == architecture
    assert built.module.config._attn_implementation == attention
    inputs = dict(built.make_batch(2)["kwargs"])
    del inputs["input_ids"]
    assert {name: tuple(tensor.shape) for name, tensor in inputs.items()} == labels
    output = run_step(built)
    if labels:
        assert built.loss(output, {}).grad_fn is not None
        torch.testing.assert_close(built.loss(output, {}).shape, output.loss.shape)
    assert all(p.grad is not None for p in built.module.parameters() if p.requires_grad)


SMALL = {key: value for key, value in BERT.items() if key not in ("model_type", "architectures")}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (
            {
                "model_type": "gpt2",
                "architectures": ["GPT2LMHeadModel"],
                "n_embd": 32,
                "n_layer": 2,
                "n_head": 2,
            },
            "",
        ),
        ({"model_type": "gpt2", "architectures": ["GPT2ForSequenceClassification"], "n_layer": 1}, ""),
        (
            {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_key_value_heads": 1, **SMALL},
            "",
        ),
        (
            {
                "model_type": "t5",
                "architectures": ["T5ForConditionalGeneration"],
                "d_model": 32,
                "num_layers": 1,
            },
            "",
        ),
        ({"model_type": "bart", "architectures": ["BartForConditionalGeneration"], "d_model": 32}, ""),
        ({"model_type": "roberta", **SMALL}, "RobertaForSequenceClassification"),
        (
            {"model_type": "codegen", "n_embd": 32, "n_layer": 1, "n_head": 4, "rotary_dim": 8},
            "CodeGenForCausalLM",
        ),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else value,
)
def test_text_models_of_other_kinds(values, expected, tmp_path):
    built = build_model(config_file(tmp_path, **values), sequence_length=16)
    assert type(built.module).__name__ == (expected or values["architectures"][0])
    run_step(built)


def test_image_models_get_pixels(tmp_path):
    values = {
        "model_type": "vit",
        "image_size": 32,
        "patch_size": 8,
        "hidden_size": 32,
        "num_hidden_layers": 1,
    }
    values |= {"num_attention_heads": 2, "intermediate_size": 64}
    built = build_model(config_file(tmp_path, **values), num_classes=6)
    assert built.input_shape == (3, 32, 32)
    assert run_step(built).logits.shape == (2, 6)
    assert built.notes == ()
    with pytest.raises(InvalidSetupError, match="reads images, not tokens"):
        build_model(config_file(tmp_path, **values), sequence_length=16)
    values = {"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8], "depths": [1]}
    values["architectures"] = ["ResNetForImageClassification"]
    said, silent = (build_model(config_file(tmp_path, **values), image_size=size) for size in (None, 64))
    assert "names no size of images: 224 x 224 are assumed" in " ".join(said.notes)
    assert "assumed" not in " ".join(silent.notes)


def test_a_text_beside_an_image_has_the_length_that_is_asked_for(tmp_path):
    kind, said = "vision-encoder-decoder", "tokens is assumed with each image"
    spec = config_file(tmp_path, model_type=kind, architectures=[_OTHERS[kind][0]], **_OTHERS[kind][1])
    built = build_model(spec, sequence_length=8)
    assert built.make_batch(2)["kwargs"]["labels"].shape == (2, 8)
    assert said not in " ".join(built.notes)
    assert said in " ".join(build_model(spec).notes)


def test_that_state_spaces_have_faster_kernels_elsewhere_is_said(tmp_path):
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "state_size": 4, "vocab_size": 64}
    assert "mamba-ssm" in " ".join(build_model(config_file(tmp_path, model_type="mamba", **sizes)).notes)


def test_text_models_refuse_image_options_and_long_sequences(tmp_path):
    spec = config_file(tmp_path, **BERT)
    with pytest.raises(InvalidSetupError, match="give a sequence length instead of an image size"):
        build_model(spec, image_size=224)
    with pytest.raises(InvalidSetupError, match="at most 128 tokens, got 129"):
        build_model(spec, sequence_length=129)
    with pytest.raises(InvalidSetupError, match="num_classes is for classification heads"):
        build_model(spec, num_classes=3)


def test_no_hub_is_asked_and_the_environment_is_restored(tmp_path, monkeypatch):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    build_model(config_file(tmp_path, **BERT))
    assert "HF_HUB_OFFLINE" not in os.environ
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UnknownModelError, match="HF_HUB_OFFLINE forbids the hub"):
        build_model("hf:nobody/bert-base-uncased")


def test_patches_of_the_library_end_with_the_forward_pass(tmp_path):
    from transformers import masking_utils

    before = masking_utils.find_packed_sequence_indices
    forward(build_model(config_file(tmp_path, **BERT)))
    assert masking_utils.find_packed_sequence_indices is before


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("{", ModelBuildError, "not a readable JSON file"),
        ("[]", ModelBuildError, "is no Transformers configuration"),
        ('{"hidden_size": 3}', ModelBuildError, "is no Transformers configuration"),
        ('{"model_type": "bret"}', UnknownModelError, r"no model_type 'bret'.*did you mean bert"),
        (
            '{"model_type": "bert", "architectures": ["BertForNothing"]}',
            UnknownModelError,
            "did you mean BertFor",
        ),
        ('{"model_type": "bert", "hidden_size": 33}', ModelBuildError, "could not be built|not accepted"),
        (
            '{"model_type": "patchtst", "architectures": ["PatchTSTForPrediction"]}',
            ModelBuildError,
            "reads 'past_values'",
        ),
    ],
)
def test_damaged_configurations(text, error, message, tmp_path):
    path = tmp_path / "c.json"
    path.write_text(text)
    with pytest.raises(error, match=message):
        build_model(f"hf:{path}")


# User code


def factory_file(tmp_path, code, name="net.py"):
    path = tmp_path / name
    path.write_text("import torch\nfrom torch import nn\n" + textwrap.dedent(code))
    return path


def test_a_factory_may_return_a_module(tmp_path):
    path = factory_file(
        tmp_path,
        "def make(num_classes=10): return nn.Sequential(nn.Linear(12, 8), nn.Linear(8, num_classes))",
    )
    built = build_model(f"{path}:make", num_classes=3)
    assert built.input_shape == (12,)
    assert not built.may_be_kept
    assert run_step(built, 5).shape == (5, 3)


def test_a_factory_may_be_a_class_or_use_its_neighbours(tmp_path):
    factory_file(tmp_path, "WIDTH = 6", name="neighbour_of_net.py")
    code = """
        from neighbour_of_net import WIDTH
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = nn.Conv2d(3, WIDTH, 3)
            def forward(self, x):
                return self.layer(x).mean((2, 3))
    """
    path_before = list(sys.path)
    built = build_model(f"{factory_file(tmp_path, code)}:Net", image_size=16)
    assert sys.path == path_before
    assert built.input_shape == (3, 16, 16)
    assert run_step(built).shape == (2, 6)


def test_an_example_batch_gives_the_inputs(tmp_path):
    code = """
        class Two(nn.Module):
            def __init__(self):
                super().__init__()
                self.a, self.b = nn.Linear(4, 8), nn.Embedding(9, 8)
            def forward(self, x, ids, scale=1.0):
                return self.a(x) + self.b(ids) * scale
        def tuple_batch(): return Two(), (torch.randn(3, 4), torch.zeros(3, dtype=torch.long), 2.0)
        def dict_batch(): return Two(), {"x": torch.randn(3, 4), "ids": torch.zeros(3, dtype=torch.long)}
        def alone(): return Two()
    """
    path = factory_file(tmp_path, code)
    assert run_step(build_model(f"{path}:tuple_batch"), 7).shape == (7, 8)
    assert run_step(build_model(f"{path}:dict_batch"), 7).shape == (7, 8)
    error = failure(build_model(f"{path}:alone"))
    assert isinstance(error, ModelBuildError)
    assert "takes 2 inputs" in str(error)
    assert "(module, example_batch)" in str(error)


def test_a_factory_may_bring_its_loss_and_target(tmp_path):
    code = """
        def make():
            target = torch.randn(3, 2)
            return {"module": nn.Linear(4, 2), "input_shape": (4,), "target": target, "loss": nn.MSELoss()}
        def alone():
            return {"module": nn.Linear(4, 2), "input_shape": [4], "loss": lambda y: y.square().sum()}
        def unknown(): return {"module": nn.Linear(4, 2), "shape": (4,)}
    """
    path = factory_file(tmp_path, code)
    built = build_model(f"{path}:make")
    assert built.make_batch(6)["target"].shape == (6, 2)
    assert not built.notes
    output = run_step(built, 6)
    assert "MseLoss" in type(built.loss(output, built.make_batch(6)).grad_fn).__name__
    run_step(build_model(f"{path}:alone"))
    with pytest.raises(ModelBuildError, match="unknown key 'shape'; known are module, input_shape"):
        build_model(f"{path}:unknown")


@pytest.mark.parametrize(
    ("code", "error", "message"),
    [
        (
            "def make(): raise KeyError('layers')",
            ModelBuildError,
            r"raised KeyError \(net.py, line 3\).*layers",
        ),
        ("def make(): return 3", ModelBuildError, "must return an nn.Module.*returned int"),
        ("def make(width): return nn.Linear(width, 1)", ModelBuildError, "without arguments"),
        ("def maker(): return nn.Linear(1, 1)", UnknownModelError, r"has no 'make'; did you mean maker\?"),
        ("def other(): pass", UnknownModelError, "has no 'make'; it defines other"),
        ("make = 3", ModelBuildError, "is of type int; name a model, or a function or class"),
        (
            "import not_there_at_all",
            ModelBuildError,
            r"raised ModuleNotFoundError \(net.py, line 3\).*; install not_there_at_all, or put it beside the file",
        ),
        ("def broken(:", ModelBuildError, "raised SyntaxError"),
        ("raise SystemExit", ModelBuildError, "raised SystemExit"),
        ("class make(nn.Module): pass", ModelBuildError, r"defines no forward\(\)"),
    ],
)
def test_bad_factories(code, error, message, tmp_path):
    with pytest.raises(error, match=message):
        build_model(f"{factory_file(tmp_path, code)}:make")


def test_classes_need_a_parameter_of_the_factory(tmp_path):
    path = factory_file(tmp_path, "def make(): return nn.Linear(2, 2)")
    with pytest.raises(InvalidSetupError, match="has no parameter num_classes"):
        build_model(f"{path}:make", num_classes=3)


# Modules


class Tied(nn.Module):
    """Shared weights, a buffer, a plain tensor, a tensor in a list, and a non-leaf attribute."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(30, 8)
        self.recurrent = nn.LSTM(8, 8, batch_first=True)
        self.head = nn.Linear(8, 30, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.ones(8))
        self.plain = torch.ones(8)
        self.listed = [torch.ones(8)]
        self.computed = self.head.weight.sum(0)

    def forward(self, ids):
        x = self.recurrent(self.embedding(ids))[0]
        return self.head(x * self.scale + self.plain + self.listed[0])


def test_a_module_is_copied_and_stays_as_it_was():
    module = Tied().eval()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    built = build_model(module, sequence_length=5)
    assert run_step(built).shape == (2, 5, 30)
    assert built.name == "Tied"
    assert built.module.head.weight is built.module.embedding.weight
    assert num_parameters(built) == sum(p.numel() for p in module.parameters())
    assert not module.training
    assert built.module.training
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())
    assert all(p.grad is None and p.device.type == "cpu" for p in module.parameters())
    assert module.plain.device.type == module.listed[0].device.type == "cpu"


def test_frozen_parameters_stay_frozen():
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    module[0].requires_grad_(False)
    built = build_model(module)
    assert [p.requires_grad for p in built.module.parameters()] == [False, False, True, True]


def test_wrappers_are_taken_off():
    inner = nn.Linear(4, 2)
    assert type(build_model(nn.DataParallel(inner)).module) is nn.Linear
    assert type(build_model(torch.compile(inner)).module) is nn.Linear


def test_inputs_follow_from_the_library_or_the_first_layer():
    import timm

    assert build_model(nn.Linear(7, 2)).input_shape == (7,)
    assert build_model(nn.Conv2d(5, 2, 3), image_size=9).input_shape == (5, 9, 9)
    assert build_model(timm.create_model("test_vit")).input_shape == (3, 160, 160)
    with pytest.raises(InvalidSetupError, match=r"give --input-shape 5,224,224"):
        build_model(nn.Conv2d(5, 2, 3))


def test_a_transformers_module_tells_its_inputs():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=50, n_positions=32)
    module = transformers.GPT2LMHeadModel(config)
    built = build_model(module)
    assert built.input_shape == (32,)
    run_step(built)
    assert module.config.use_cache
    assert not built.module.config.use_cache


def test_modules_that_cannot_be_traced():
    with pytest.raises(ModelBuildError, match=r"defines no forward\(\)"):
        build_model(nn.ModuleList([nn.Linear(2, 2)]))
    with pytest.raises(ModelBuildError, match="TorchScript"):
        build_model(torch.jit.script(nn.Linear(2, 2)))
    with pytest.raises(ModelBuildError, match="call the module once with data"):
        build_model(nn.LazyLinear(3), input_shape=(4,))
    with pytest.raises(InvalidSetupError, match="already built"):
        build_model(nn.Linear(2, 2), num_classes=3)


# Losses


class Returns(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.layer = nn.Linear(4, 6)
        self.function = function

    def forward(self, x):
        return self.function(self.layer(x))


@pytest.mark.parametrize(
    ("function", "gradient"),
    [
        (lambda y: y, "NllLoss"),
        (lambda y: y[:, :1], "BinaryCrossEntropy"),
        (lambda y: y.reshape(-1, 2, 1, 3), "NllLoss2D"),
        (lambda y: {"loss": y.square().mean(), "logits": y}, "Mean"),
        (lambda y: (y, [y * 2], {"z": y * 3}), "Add"),
        (lambda y: y.reshape(-1, 2, 3), "Mean"),
        (lambda y: (y, torch.ones(2, dtype=torch.long)), "NllLoss"),
    ],
)
def test_the_loss_follows_the_output(function, gradient):
    built = build_model(Returns(function))
    output, batch = forward(built)
    assert type(built.loss(output, batch).grad_fn).__name__.startswith(gradient)
    assert "no loss was given" in built.notes[0]


# Failures


@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        ("torchvision:alexnet", {"image_size": 16}, "3x16x16 are too small for torchvision:alexnet"),
        ("torchvision:inception_v3", {"image_size": 32}, "3x32x32 are too small"),
        ("timm:efficientnet_b0", {"input_shape": (3, 1, 1)}, "3x1x1 are too small"),
    ],
)
def test_images_that_are_too_small(spec, options, message):
    error = failure(build_model(spec, **options), 1)
    assert isinstance(error, InvalidSetupError)
    assert message in str(error)
    assert "give a larger image size" in str(error)


def test_wrong_shapes_are_said():
    error = failure(
        build_model(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(9, 2)), image_size=16)
    )
    assert isinstance(error, InvalidSetupError)
    assert "cannot take inputs of 3x16x16" in str(error)
    assert "[2, 784] X [9, 2]" in str(error)
    error = failure(build_model(nn.Linear(4, 2), input_shape=(5,)))
    assert isinstance(error, InvalidSetupError)


@pytest.mark.parametrize(
    "function",
    [
        lambda y: y * 2 if y.sum() > 0 else y,
        lambda y: y[y.nonzero()[:, 0]],
        lambda y: y * float(y.max().item()),
        lambda y: y[y > 0],
        lambda y: y.detach().numpy(),
    ],
)
def test_steps_that_depend_on_values_are_explained(function):
    error = failure(build_model(Returns(function)))
    assert isinstance(error, TraceError)
    assert "by the values of a tensor (test_sources.py, line" in str(error)


def test_numbers_count_as_finite_where_a_step_asks():
    def guarded(y):
        is_bad = torch.isnan(y) | torch.isinf(y)
        if (
            is_bad.any()
            or not torch.isfinite(y).all()
            or y.isnan().sum() > 0
            or (~is_bad).all().item() is False
        ):
            raise FloatingPointError
        return torch.where(is_bad | (y > 3), 0.0, y)

    built = build_model(Returns(guarded))
    graph = trace_built(built, TrainingSetup(batch_size_per_device=2))
    assert {"isnan", "where"} <= set(graph.ops.kernel_names)


def test_steps_that_train_nothing_or_mix_devices_are_explained():
    frozen = failure(build_model(nn.Linear(4, 2).requires_grad_(requires_grad=False), input_shape=(4,)))
    assert "no weight of Linear is trained" in str(frozen)
    mixed = failure(build_model(Returns(lambda y: y + torch.ones(1, 6, device="cpu"))))
    assert "on the CPU and on the device" in str(mixed)
    assert "device=x.device" in str(mixed)


def test_the_temporal_classification_of_sequences_is_traced():
    def paths(y):
        scores = y.reshape(1, y.shape[0], -1).expand(30, -1, -1).log_softmax(-1)
        texts = torch.zeros(y.shape[0], 5, dtype=torch.long, device=y.device)
        lengths = [torch.full((y.shape[0],), n, device=y.device) for n in (30, 5)]
        return nn.functional.ctc_loss(scores, texts, *lengths)

    graph = trace_built(build_model(Returns(paths)), TrainingSetup(batch_size_per_device=2))
    assert {"_ctc_loss", "_ctc_loss_backward"} <= set(graph.ops.kernel_names)


def test_anything_else_names_what_was_raised_and_where():
    error = failure(build_model(Returns(lambda y: {}["missing"])))
    assert isinstance(error, TraceError)
    assert "raised KeyError (test_sources.py, line" in str(error)


def test_our_own_errors_pass_through():
    own = InvalidSetupError("as it is")
    assert explain_failure(own, build_model(nn.Linear(2, 2))) is own


@pytest.mark.parametrize(
    ("spec", "error", "message"),
    [
        ("resnet26", UnknownModelError, r"did you mean timm:resnet26\?"),
        ("convnext_nano", UnknownModelError, r"did you mean timm:convnext_nano\?"),
        ("resnet5o", UnknownModelError, "did you mean torchvision:resnet50"),
        ("llama3.1:8b", UnknownModelError, r"did you mean llama-3\.1-8b\?"),
        ("yolo11x", UnknownModelError, r"DetectionModel\('yolo11x.yaml'\)"),
        ("fasterrcnn_resnet50_fpn", UnknownModelError, "ask for its backbone, such as torchvision:resnet50"),
        ("THUDM/CogVideoX-5b", UnknownModelError, r"did you mean diffusers:cogvideox-5b\?"),
        ("lstm", UnknownModelError, "forerun predict mine.py:make"),
        ("google/gemma-3n-E4B", UnknownModelError, "gemma-3-4b .*; hf:google/gemma-3n-E4B"),
        ("torchvision:resnet51", UnknownModelError, "did you mean resnet50"),
        ("timm:resnet51", UnknownModelError, "did you mean resnet51q|resnet50"),
        ("timm:hf-hub:org/name", UnknownModelError, "timm has no model"),
        ("cifar-resnt:20", UnknownModelError, "did you mean cifar-resnet"),
        ("torchvision:fasterrcnn_resnet50_fpn", TraceError, "depends on the boxes"),
        ("torchvision:quantized_resnet18", UnknownModelError, "use torchvision:resnet18"),
        ("keras:ResNet50", UsageError, "is a Keras model"),
        ("", UnknownModelError, "no model was named"),
        ("net.py", UnknownModelError, "net.py:factory"),
        ("net.onnx", UnknownModelError, "onnx:net.onnx"),
        ("folder/missing.py:make", UnknownModelError, "there is no file"),
        ("torchvision:", UnknownModelError, "torchvision has no model ''"),
    ],
)
def test_unknown_names(spec, error, message):
    with pytest.raises(error, match=message):
        build_model(spec)


def test_what_is_no_model_is_refused():
    with pytest.raises(UsageError, match=r"got builtins\.int"):
        build_model(3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"image_size": 0}, "image_size must be between 1 and"),
        ({"image_size": 2.5}, "image_size must be a whole number, got 2.5"),
        ({"input_shape": ()}, "at least one axis"),
        ({"input_shape": (3, -1, 3)}, "every size of input_shape must be between"),
        ({"input_shape": (3, 32)}, "samples with 3 axes, such as 3,224,224; got the input shape 3,32"),
        ({"input_shape": (4, 32, 32)}, "takes 3 channels, got 4"),
        ({"input_shape": (3, 32, 32), "image_size": 32}, "not both"),
        ({"sequence_length": 8}, "reads images, not tokens"),
        ({"num_classes": 0}, "num_classes must be between"),
        ({"attn_implementation": "flash"}, "must be sdpa or eager, got 'flash'"),
    ],
)
def test_options_that_cannot_be_meant(options, message):
    with pytest.raises(InvalidSetupError, match=message):
        build_model("torchvision:resnet18", **options)


@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        ("torchvision:vit_b_16", {"image_size": 225}, "indivisible by patch size"),
        ("torchvision:vit_b_16", {"input_shape": (3, 224, 256)}, "takes square images"),
        ("torchvision:mvit_v1_b", {"image_size": 192}, "takes clips of"),
        ("torchvision:raft_small", {"image_size": 100}, "divisible by 8"),
    ],
)
def test_sizes_a_network_cannot_take(spec, options, message):
    with pytest.raises(InvalidSetupError, match=message):
        explain_first_failure(spec, options)


def explain_first_failure(spec, options):
    """Some networks refuse a size while they are built, others when they run."""
    raise failure(build_model(spec, **options))


@pytest.mark.parametrize(
    ("model", "extra"),
    [("timm:resnet26d", "timm"), ("config.json", "hf"), ("net.onnx", "onnx"), ("diffusers:sd-1.5", "diffusers"),
     ("torchvision:resnet18", "torchvision"), ("mlp:depth=2", "torch")],
)  # fmt: skip
def test_where_pytorch_is_missing_the_extra_of_the_models_library_is_named(model, extra):
    assert f"pip install 'forerun[{extra}]'" in without_torch(model, MissingExtraError(model, "torch"))


def test_missing_libraries_name_their_extra(tmp_path, monkeypatch):
    spec = config_file(tmp_path, **BERT)
    for name in ("timm", "transformers"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtraError, match=r"forerun\[timm\]"):
        build_model("timm:resnet18")
    with pytest.raises(MissingExtraError, match=r"forerun\[hf\]"):
        build_model(spec)
    with pytest.raises(UnknownModelError, match=r"did you mean torchvision:resnet50\?"):
        build_model("resnet50")


# Building on meta


def test_a_constructor_that_reads_values_is_built_without_writing_weights():
    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, int(width)) for width in torch.arange(1, 4)])
            self.rates = [rate.item() for rate in torch.linspace(0, 1, 3)]

        def forward(self, x):
            return self.layers[2](x)

    module = move_to_meta(build_on_meta(Reads))
    assert [layer.out_features for layer in module.layers] == [1, 2, 3]
    assert module.rates == [0.0, 0.5, 1.0]
    assert all(p.is_meta for p in module.parameters())


def test_linspace_alone_does_not_send_a_constructor_to_the_cpu():
    class Rates(nn.Linear):
        def __init__(self):
            super().__init__(2, 2)
            self.rates = [rate.item() for rate in torch.linspace(0, 1, 3)]

    assert build_on_meta(Rates).weight.is_meta


def test_a_meta_copy_keeps_names_types_and_strides():
    module = nn.Sequential(
        nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last), nn.BatchNorm2d(4)
    ).double()
    copied = meta_copy(module)
    for (name, old), (new_name, new) in zip(
        module.state_dict(keep_vars=True).items(), copied.state_dict(keep_vars=True).items(), strict=True
    ):
        assert (name, old.shape, old.dtype, old.stride()) == (new_name, new.shape, new.dtype, new.stride())
        assert new.is_meta
        assert isinstance(new, nn.Parameter) == isinstance(old, nn.Parameter)
