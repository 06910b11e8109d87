"""Denoisers of diffusers: published sizes, and laws of their steps on small ones."""

import json

import pytest

import forerun
from forerun.base.errors import ForerunError

pytest.importorskip("diffusers")

SMALL = {
    "FluxTransformer2DModel": {
        "num_layers": 1, "num_single_layers": 1, "num_attention_heads": 2, "attention_head_dim": 32,
        "joint_attention_dim": 64, "pooled_projection_dim": 32, "guidance_embeds": True, "axes_dims_rope": [8, 12, 12],
    },
    "WanTransformer3DModel": {
        "num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 32, "ffn_dim": 128, "text_dim": 64,
    },
    "LTXVideoTransformer3DModel": {
        "num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 32, "cross_attention_dim": 64,
        "caption_channels": 64,
    },
    "SD3Transformer2DModel": {
        "num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 32, "caption_projection_dim": 64,
        "joint_attention_dim": 64, "pooled_projection_dim": 32,
    },
}  # fmt: skip


def _names():
    from forerun.adapters.diffusion.step import catalogue

    return sorted(catalogue()["networks"])


@pytest.mark.parametrize("name", _names())
def test_a_network_has_its_published_parameters(name):
    import torch

    from forerun.adapters.diffusion.step import build_diffusion, catalogue
    from forerun.tracing.models.built_model import InputOptions
    from forerun.tracing.models.meta_build import building_on

    with building_on(torch.device("meta")):
        built = build_diffusion(name, InputOptions())
    assert (
        sum(p.numel() for p in built.module.parameters()) == catalogue()["networks"][name]["num_parameters"]
    )


@pytest.fixture
def small(tmp_path):
    def write(kind):
        path = tmp_path / f"{kind}.json"
        path.write_text(json.dumps({"_class_name": kind, **SMALL[kind]}), encoding="utf-8")
        return f"diffusers:{path}"

    return write


def _ask(model, **settings):
    return forerun.predict(model, device="l40s", **{"image_size": 256, **settings})


@pytest.mark.parametrize("kind", SMALL)
def test_the_work_of_a_denoiser_grows_with_its_image(small, kind):
    first, second = (_ask(small(kind), image_size=size) for size in (256, 512))
    assert 2 < second.flops_per_sample / first.flops_per_sample < 17
    assert second.peak_memory_bytes.value > first.peak_memory_bytes.value


def test_adapters_train_named_layers_alone(small):
    whole = _ask(small("FluxTransformer2DModel"))
    adapted = _ask(small("FluxTransformer2DModel"), lora=4, lora_targets="to_q,to_k,to_v,to_out.0")
    # Two blocks of four and three such layers of 64 x 64, with two matrices of rank 4 each.
    assert adapted.num_trainable_parameters == 7 * 2 * 4 * 64
    assert adapted.num_parameters == whole.num_parameters + adapted.num_trainable_parameters


def test_a_clip_costs_at_least_its_frames(small):
    one, five = (_ask(small("WanTransformer3DModel") + f",frames={n}") for n in (1, 17))
    assert five.flops_per_sample > 4 * one.flops_per_sample


def test_the_autoencoder_in_the_step_is_frozen():
    import torch

    from forerun.adapters.diffusion.step import build_diffusion
    from forerun.tracing.models.built_model import InputOptions
    from forerun.tracing.models.meta_build import building_on

    with building_on(torch.device("meta")):
        built = build_diffusion("sd-1.5,with=vae", InputOptions(image_size=256))
    trained = sum(p.numel() for p in built.module.parameters() if p.requires_grad)
    assert trained == 859_520_964
    assert set(built.make_batch(2)["kwargs"]) == {"latents", "noise", "conditions", "pixels"}


@pytest.mark.parametrize(
    ("model", "settings", "words"),
    [
        ("diffusers:flux", {}, "did you mean"),
        ("diffusers:sdxl,with=audio", {}, "text or vae"),
        ("diffusers:sdxl,size=4", {}, "with=text"),
        ("diffusers:wan-2.1-14b,frames=80", {}, "multiple of 4"),
        ("diffusers:sdxl", {"image_size": 100}, "multiples of 8"),
        ("diffusers:missing.json", {}, "no configuration of diffusers"),
        ("flux", {}, "diffusers:flux.1-dev"),
    ],
)
def test_a_wrong_question_is_told_what_to_ask(model, settings, words):
    with pytest.raises(ForerunError, match=words):
        forerun.predict(model, device="l40s", **settings)
