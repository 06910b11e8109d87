"""A run is one question, whole: what it is made from, what it refuses, and what it says of itself."""

import json
import subprocess
import sys

import pytest

from forerun.base.errors import InvalidSetupError, UnknownDeviceError, UsageError
from forerun.question.devices import find_device
from forerun.question.devices.cluster import cluster_of
from forerun.question.options import RunOptions
from forerun.question.run import Run
from forerun.question.saving import Saving
from forerun.question.settings import declared
from forerun.question.setup import Layout, Phase, Precision, parse_release
from forerun.question.sharing import Strategy
from forerun.search.search import changes_of

MODEL = "torchvision:resnet18"


def test_a_run_has_the_defaults_of_its_declaration():
    run = Run.of(MODEL, device="t4")
    assert (run.setup.batch_size_per_device, run.setup.precision, run.setup.optimizer) == (
        32,
        Precision.FP32,
        "sgd",
    )
    assert (run.cluster.num_devices, run.job, run.loader, run.price_usd_per_hour) == (1, None, None, None)


def test_the_layout_is_the_framework_s_own_unless_given():
    assert Run.of(MODEL, device="t4").setup.layout is Layout.NCHW
    assert Run.of("keras:ResNet50", device="t4").setup.layout is Layout.NHWC
    assert Run.of("keras:ResNet50", device="t4", layout="nchw").setup.layout is Layout.NCHW


@pytest.mark.parametrize(
    ("device", "options", "nodes", "each"),
    [
        ("t4", {}, 1, 1),
        ("4xt4", {}, 1, 4),
        ("t4x4", {}, 1, 4),
        ("2x8xh100-sxm", {}, 2, 8),
        ("t4", {"num_devices": 4}, 1, 4),
        ("t4", {"num_devices": 4, "num_nodes": 2}, 2, 2),
        ("2x8xh100-sxm", {"num_devices": 16}, 2, 8),
    ],
)
def test_devices_have_one_grammar(device, options, nodes, each):
    cluster = Run.of(MODEL, device=device, **options).cluster
    assert (cluster.num_nodes, cluster.num_devices_per_node) == (nodes, each)


def test_a_cluster_is_written_as_it_is_read():
    for text in ("t4", "8xt4", "4x8xh100-sxm"):
        assert Run.of(MODEL, device=text).cluster.spec == text


def test_batches_of_a_step_count_devices_and_micro_steps():
    run = Run.of(MODEL, device="2x4xt4", batch_size=16, accumulation=3, inter="ethernet-25g")
    assert (run.batch_size_per_device, run.batch_size_global) == (48, 384)


def test_a_run_is_changed_by_the_names_of_its_settings():
    run = Run.of(MODEL, device="t4", batch_size=16)
    changed = run.with_(
        device="2x4xt4", inter="ethernet-25g", precision="amp", strategy="fsdp", fsdp_version="fsdp1", lora=8
    )
    asked = {"batch_size": 16, "inter": "ethernet-25g", "precision": "amp", "strategy": "fsdp"}
    assert changed == Run.of(MODEL, device="2x4xt4", fsdp_version="fsdp1", lora=8, **asked)
    assert changed.with_(device="t4", precision=None, strategy=None, fsdp_version=None, lora=None) == run


def test_what_stands_together_changes_together():
    run = Run.of(MODEL, device="8xt4", dataset="cifar10", epochs=3, sequence_length=128)
    assert run.with_(tokens="1M").job == Run.of(MODEL, device="t4", sequence_length=128, tokens="1M").job
    assert run.with_(dataset=None, dataset_size=None, epochs=None).job is None
    assert run.with_(accumulation=4).setup.keeps_gradients
    assert run.with_(loader_ms=5, sample_kb=100).loader.sample_bytes == 1e5
    assert run.with_(parallel="tp=2").layout.text == "tp=2,dp=4"
    assert run.with_(num_devices=4, parallel="tp=2", keep_gathered=True).sharing.layout.keep_gathered
    with pytest.raises(InvalidSetupError, match="unknown setting 'acumulation'; did you mean accumulation"):
        run.with_(acumulation=2)
    with pytest.raises(InvalidSetupError, match="cannot be trained themselves"):
        run.with_(quantize="nf4", precision="bf16")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch_sise": 3}, "unknown setting 'batch_sise'; did you mean batch_size"),
        ({"batch_size": -1}, "batch size must be at least 1, got -1"),
        ({"batch_size": 2.5}, "batch size must be a whole number, got 2.5"),
        ({"batch_size": True}, "batch size must be a whole number"),
        ({"epochs": float("nan"), "dataset": "cifar10"}, "number of epochs must be a finite number"),
        ({"precision": "fp8x"}, "unknown precision 'fp8x'"),
        ({"compile": "yes"}, "compile is either true or false"),
        ({"torch_version": "99.9"}, "PyTorch has versions 1.0 to 2.x"),
        ({"torch_version": "newest"}, "a PyTorch version looks like 2.4"),
        ({"strategy": "zero1"}, "--strategy cannot be used here: there is one device"),
        ({"intra": "nvlink-3"}, "--intra cannot be used here: there is one device"),
        ({"num_devices": 4, "inter": "ethernet-25g"}, "--inter cannot be used here: there is one node"),
        ({"num_nodes": 0}, "the number of nodes must be at least 1"),
        ({"num_devices": 4, "phase": "inference"}, "several devices are predicted in training only"),
        ({"phase": "inference", "optimizer": "adam"}, "--optimizer cannot be used here"),
        ({"phase": "forward", "accumulation": 4}, "--accumulation cannot be used here"),
        ({"loader_workers": 4}, "the input pipeline needs --loader-ms"),
        ({"epochs": 3}, "epochs: expected a dataset as well"),
        ({"dataset": "cifar10", "dataset_size": 3}, "either a dataset or a dataset size"),
        ({"dataset": "cifar1"}, "unknown dataset 'cifar1'"),
        ({"dataset_size": 100, "validate": True}, "no validation split"),
        ({"price_usd_per_hour": -1.0}, "price of a device [USD/h] must be zero or more"),
    ],
)
def test_what_says_nothing_or_is_impossible_is_refused_in_one_line(options, words):
    with pytest.raises(UsageError) as refused:
        Run.of(MODEL, device="t4", **options)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("device", ["0xt4", "t4x0", "-1x4xt4", "4x8xfoo", "2xt4+2xl4"])
def test_impossible_devices_are_refused(device):
    with pytest.raises((InvalidSetupError, UnknownDeviceError)):
        Run.of(MODEL, device=device)


def test_one_device_that_was_asked_for_as_such_may_name_a_strategy():
    run = Run.of(MODEL, device="t4", num_devices=1, strategy="fsdp")
    assert run.sharing.strategy is Strategy.FSDP


def test_many_runs_of_one():
    run = Run.of(MODEL, device="t4", batch_size=8)
    many = run.over(devices=["t4", "2xl4"], precisions=["fp32", "amp"], batch_sizes=[8, 16])
    assert len(many) == 8
    assert many[0] == run
    assert [each.setup.batch_size_per_device for each in many[:3]] == [8, 16, 8]
    assert many[-1].cluster.spec == "2xl4"
    assert many[-1].setup.precision is Precision.AMP
    with pytest.raises(InvalidSetupError, match="batch size"):
        run.over(batch_sizes=[0])


def test_a_run_tells_itself_as_flat_settings_that_make_it_again():
    run = Run.of(
        MODEL,
        device="2x4xv100-sxm2-16gb",
        inter="infiniband-edr",
        batch_size=64,
        precision="amp",
        strategy="zero2",
        accumulation=2,
        dataset="imagenet",
        epochs=90,
        loader_ms=5.0,
        loader_workers=6,
        sample_kb=110.0,
        price_usd_per_hour=2.5,
        torch_version="2.4",
    )
    told = json.loads(json.dumps(run.as_dict()))
    assert set(told) - {"model", "device"} <= set(declared(RunOptions))
    model, device = told.pop("model"), told.pop("device")
    assert Run.of(model, device=device, **told) == run


def test_a_device_object_and_a_cluster_are_devices_too():
    device = find_device("t4")
    assert Run.of(MODEL, device=device) == Run.of(MODEL, device="t4")
    assert Run.of(MODEL, device=cluster_of(device, 1, 4)) == Run.of(MODEL, device="4xt4")


def test_inference_updates_nothing():
    run = Run.of(MODEL, device="t4", phase="inference")
    assert (run.setup.phase, run.setup.optimizer) == (Phase.INFERENCE, "none")


@pytest.mark.parametrize(("text", "release"), [("2.4", (2, 4)), ("1.13.1+cu117", (1, 13)), (None, None)])
def test_versions_are_read(text, release):
    assert parse_release(text) == release


def test_a_run_needs_neither_numpy_nor_a_framework():
    code = (
        "import sys; from forerun.question.run import Run; Run.of('torchvision:resnet18', device='t4');"
        "print([name for name in ('numpy', 'torch', 'keras', 'pydantic') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_validation_has_nothing_of_an_update():
    settings = {"recompute": "full", "dataset_size": 100, "validation_size": 10, "epochs": 1}
    run = Run.of("llama-3.2-1b", device="rtx-4090", master_weights="fp32", **settings)
    assert run.setup.saving.recompute == "full"
    assert run.validation_setup.saving == Saving()


def test_a_release_before_2_has_its_own_settings_unless_they_are_given():
    old = Run.of("torchvision:resnet18", device="t4", torch_version="1.12").setup
    assert (old.fused_attention, old.optimizer_implementation, old.zero_grad_to_none) == (
        False,
        "for-loop",
        False,
    )
    given = Run.of(
        "torchvision:resnet18", device="a100-sxm4-40gb", torch_version="1.13", attention_kernel="flash-2",
        optimizer_implementation="fused", optimizer="adam",
    ).setup  # fmt: skip
    assert (given.fused_attention, given.optimizer_implementation) == (True, "fused")
    new = Run.of("torchvision:resnet18", device="t4", torch_version="2.0").setup
    assert new == Run.of("torchvision:resnet18", device="t4").setup


@pytest.mark.parametrize(
    ("model", "settings", "size"),
    [
        ("resnet18", {"dataset": "cifar10"}, 32),
        ("torchvision:densenet121", {"dataset": "PatchCamelyon"}, 96),
        ("timm:resnet26d", {"dataset": "mnist"}, 28),
        ("resnet18", {"dataset": "cifar10", "image_size": 224}, 224),
        ("resnet18", {"dataset": "imagenet-1k"}, None),
        ("resnet18", {"dataset_size": 50_000}, None),
        # Networks with positions are trained on resized images, and 28 pixels are too few for others.
        ("vit_b_16", {"dataset": "cifar10"}, None),
        ("vgg16", {"dataset": "mnist"}, None),
        ("cifar-resnet:8", {"dataset": "stl10"}, None),
    ],
)
def test_images_of_a_dataset_have_its_size_where_the_network_takes_any(model, settings, size):
    run = Run.of(model, device="t4", **settings)
    assert run.model.image_size == size
    assert Run.of(model, device="t4").with_(**settings) == run
    own = {change["model"]: change.get("image_size") for change in changes_of([model, "mnist-cnn"], settings)}
    assert own == {model: None if "image_size" in settings else size, "mnist-cnn": None}
