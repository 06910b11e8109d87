"""Settings of large models in a run."""

from __future__ import annotations

import pytest

from forerun.base.errors import InvalidSetupError
from forerun.question.job import parse_count
from forerun.question.run import Run
from forerun.question.saving import Saving


def run_of(model="llama-3.1-8b", device="h100-sxm", **settings):
    return Run.of(model, device=device, **settings)


def test_a_catalogued_language_model_has_its_own_settings():
    setup = run_of().setup
    assert (setup.precision, setup.optimizer, setup.batch_size_per_device) == ("bf16", "adamw", 1)
    assert run_of("vit-base").setup.precision == "fp32"
    assert run_of(precision="fp8", batch_size=4).setup.batch_size_per_device == 4


def test_settings_come_back_from_their_json():
    given = {
        "lora": 16, "lora_targets": ["q_proj", "v_proj"], "quantize": "nf4", "recompute": "every-2", "loss": "liger",
        "freeze": "embed_tokens", "offload": "optimizer", "master_weights": "fp32", "sequence_length": 4096,
        "tokens": "15B", "lora_dropout": 0.05, "unquantized": "half", "fused_kernels": ["norm", "lora"],
        "attention_kernel": "flash-2",
    }  # fmt: skip
    run = run_of(**given)
    again = run.json_fields()
    assert again["lora_targets"] == "q_proj,v_proj"
    assert Run.of(again.pop("model"), device=again.pop("device"), **again) == run


def test_a_library_of_kernels_brings_its_loss():
    saving = run_of(fused_kernels="Liger").setup.saving
    assert (saving.fused_kernels, saving.loss) == (("norm", "rope", "mlp"), "liger")
    assert run_of(fused_kernels="unsloth", loss="plain").setup.saving.loss == "plain"
    assert run_of(fused_kernels="rope,norm").setup.saving == Saving(fused_kernels=("norm", "rope"))
    assert run_of(fused_kernels="none").setup.saving == Saving()


def test_tokens_are_samples_and_steps():
    run = run_of(sequence_length=4096, tokens="15B")
    assert run.job.num_samples == -(-15_000_000_000 // 4096)
    assert parse_count("1.5T") == 1.5e12
    for wrong in ("15G", "many", 0, "-3M"):
        with pytest.raises(InvalidSetupError, match="300M, 15B"):
            parse_count(wrong)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"precision": "fp8", "device": "a100-sxm4-80gb"}, "give --precision bf16, or a device with fp8"),
        ({"fp8_recipe": "delayed"}, "give --precision fp8"),
        (
            {"attention_kernel": "flash-3", "device": "a100-sxm4-80gb"},
            "is for Hopper; give --attention-kernel flash-2",
        ),
        ({"attention_kernel": "flash-2", "fused_attention": False}, "leave --no-fused-attention out"),
        ({"tokens": "15B"}, "--sequence-length"),
        ({"tokens": "15B", "sequence_length": 128, "epochs": 2}, "--epochs cannot be used here"),
        ({"lora_targets": "q_proj"}, "give the rank"),
        ({"lora_dropout": 0.1}, "give the rank"),
        ({"lora": 8, "lora_dropout": 1}, "at most 0.9"),
        ({"fused_kernels": "apex"}, "liger, unsloth, none, or parts: norm, rope, mlp, lora"),
        ({"fused_kernels": "lora"}, "give the rank"),
        ({"fused_kernels": "unsloth", "lora": 8, "precision": "fp8"}, "--fused-kernels liger"),
        ({"quantize": "int8"}, "--lora 16"),
        ({"unquantized": "fp32"}, "without --quantize"),
        (
            {
                "lora": 8,
                "quantize": "nf4",
                "unquantized": "fp32",
                "precision": "amp-bf16",
                "device": "8xh100-sxm",
                "strategy": "fsdp",
            },
            "leave it out",
        ),
        ({"master_weights": "bf16", "precision": "fp32"}, "no bf16 weights"),
        ({"offload": "optimizer", "device": "cpu"}, "leave --offload out"),
        ({"phase": "inference", "recompute": "full"}, "--phase train"),
        ({"model": "keras:ResNet50", "recompute": "full"}, "PyTorch"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(settings, words):
    with pytest.raises(InvalidSetupError, match=words) as caught:
        run_of(**settings)
    assert "\n" not in str(caught.value)


def test_inference_of_a_catalogued_model_has_no_optimizer():
    assert run_of(phase="inference").setup.optimizer == "none"
