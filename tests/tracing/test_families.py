import pytest
import torch

from forerun.base.errors import InvalidSetupError, UnknownModelError
from forerun.question.model import ModelRequest
from forerun.question.setup import TrainingSetup
from forerun.tracing.models.families import FAMILIES, FamilyKey, family
from forerun.tracing.models.sources import build_model
from forerun.tracing.trace import cache_path


def num_parameters(spec, **options):
    return sum(p.numel() for p in build_model(spec, **options).module.parameters())


def run_step(built, batch_size=2):
    batch = built.make_batch(batch_size)
    output = built.module(*batch.get("args", ()), **batch.get("kwargs", {}))
    loss = built.loss(output, batch)
    loss.backward()
    assert loss.shape == ()
    return output


@pytest.mark.parametrize(("depth", "millions"), [(20, 0.27), (32, 0.46), (44, 0.66), (56, 0.85), (110, 1.7)])
def test_cifar_resnets_have_the_published_sizes(depth, millions):
    # He et al. 2016, CVPR, table 6.
    digits = 1 if millions > 1 else 2
    assert round(num_parameters(f"cifar-resnet:{depth}") / 1e6, digits) == millions


def test_cifar_resnet_shortcuts_hold_no_parameters():
    # Option A: only the stem, the 3x3 pairs, their norms and the head. Idelbayev's reimplementation
    # (github.com/akamaster/pytorch_resnet_cifar10) prints the same 269,722.
    assert num_parameters("cifar-resnet:20") == 269_722


@pytest.mark.parametrize(("name", "count"), [("cifar-resnet18", 11_173_962), ("cifar-resnet50", 23_520_842)])
def test_resnets_with_cifar_stem(name, count):
    # Counts of github.com/kuangliu/pytorch-cifar.
    assert num_parameters(name) == count


def test_the_printed_mnist_network_has_24_330_parameters():
    assert num_parameters("mnist-cnn:depth=3") == 24_330


def test_pcam_cnn_has_19_9_million_parameters():
    assert round(num_parameters("pcam-cnn") / 1e6, 1) == 19.9


@pytest.mark.parametrize(
    ("spec", "widths"), [("mnist-cnn", [800, 128]), ("cifar10-cnn", [128, 512, 256, 128])]
)
def test_dense_inputs_match_the_layers_that_were_timed(spec, widths):
    # The unpadded convolutions leave 5x5x32 and 2x2x32 values, the sizes of the layers timed in the source.
    layers = [m for m in build_model(spec).module.modules() if isinstance(m, torch.nn.Linear)]
    assert [layer.in_features for layer in layers] == widths


def test_cnn_doubles_its_filters_per_block():
    convolutions = [
        m
        for m in build_model("cnn:depth=3,base_filters=32").module.modules()
        if isinstance(m, torch.nn.Conv2d)
    ]
    assert [c.out_channels for c in convolutions] == [32, 32, 64, 64, 128, 128]


def test_cnn_parameter_count_by_hand():
    # depth 2, 32 filters: 3*3 convolutions 3-32-32-64-64, dense 8*8*64 -> 128 -> 10.
    by_hand = 9 * (3 * 32 + 32 * 32 + 32 * 64 + 64 * 64) + 32 + 32 + 64 + 64
    by_hand += 8 * 8 * 64 * 128 + 128 + 128 * 10 + 10
    assert num_parameters("cnn:depth=2,base_filters=32") == by_hand


@pytest.mark.parametrize(
    "name", ["cnn", "mnist-cnn", "cifar10-cnn", "pcam-cnn", "cifar-resnet", "cifar-resnet34"]
)
def test_every_network_runs_forward_and_backward_on_meta(name):
    built = build_model(name)
    output = run_step(built)
    assert output.shape == (2, 1 if name == "pcam-cnn" else 10)
    assert all(p.is_meta and p.grad is not None for p in built.module.parameters())


def test_first_key_may_go_unnamed():
    assert num_parameters("cnn:2") == num_parameters("cnn:depth=2")


def test_classes_by_key_and_by_option_agree():
    assert num_parameters("cnn:num_classes=100") == num_parameters("cnn", num_classes=100)
    with pytest.raises(InvalidSetupError, match="given twice"):
        build_model("cnn:num_classes=100", num_classes=10)


def test_image_size_changes_the_dense_layer():
    assert build_model("cnn", image_size=64).input_shape == (3, 64, 64)
    assert num_parameters("cnn", image_size=64) > num_parameters("cnn")


def test_the_place_of_a_kept_graph_holds_what_changes_the_network():
    keys = {
        cache_path(ModelRequest(model=spec, image_size=size), TrainingSetup())
        for spec in ("cnn", "cnn:depth=3", "cnn:depth=3,num_classes=4", "torchvision:resnet18")
        for size in (None, 48)
    }
    assert len(keys) == 8


@pytest.mark.parametrize(
    ("spec", "error", "text"),
    [
        ("cnn:deph=3", UnknownModelError, r"its keys are depth, base_filters.*did you mean depth\?"),
        ("cnn:depth=three", InvalidSetupError, "must be 1 to 10, got 'three'"),
        ("cnn:depth=0", InvalidSetupError, "must be 1 to 10, got '0'"),
        ("cnn:depth=2,depth=3", InvalidSetupError, "given twice"),
        ("cifar-resnet:21", InvalidSetupError, r"must be 8, 14, 20, \.\.\."),
        ("cnn:depth=8", InvalidSetupError, "too small for this many pooling layers"),
    ],
)
def test_bad_keys_are_refused(spec, error, text):
    with pytest.raises(error, match=text):
        build_model(spec)


def test_a_name_cannot_be_registered_twice():
    with pytest.raises(ValueError, match="registered twice"):
        family("cnn", input_shape=(3, 32, 32))(lambda shape: None)


def test_every_family_documents_its_keys():
    for found in FAMILIES.values():
        assert all(isinstance(rule, FamilyKey) and rule.meaning for rule in found.keys.values())


def test_gpt_has_the_published_size():
    # The released weights of GPT-2 small hold 124,439,808 values (Radford et al. 2019; "117M" there is a misprint).
    assert num_parameters("gpt") == 124_439_808


def test_gpt_reads_tokens_and_predicts_the_next():
    built = build_model("gpt:depth=2,width=64,vocabulary=50", sequence_length=16)
    assert run_step(built).shape == (2, 16, 50)
    real = build_model("gpt:depth=2,width=64,vocabulary=50", sequence_length=16, device="cpu")
    batch = real.make_batch(3)
    assert batch["args"][0].max() < 50
    assert real.loss(real.module(*batch["args"]), batch).isfinite()


def test_gpt_does_not_look_ahead():
    torch.manual_seed(0)
    network = build_model("gpt:depth=1,width=64,vocabulary=20", device="cpu").module.eval()
    tokens = torch.randint(20, (1, 8))
    changed = tokens.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 20
    with torch.no_grad():
        before, after = network(tokens), network(changed)
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"image_size": 32}, "reads tokens, not images"),
        ({"num_classes": 3}, "predicts tokens, not classes"),
        ({"sequence_length": 2048}, "up to 1024 tokens"),
    ],
)
def test_gpt_refuses_what_it_cannot_read(options, told):
    with pytest.raises(InvalidSetupError, match=told):
        build_model("gpt", **options)
    with pytest.raises(InvalidSetupError, match="64, 128, 192"):
        build_model("gpt:width=100")
