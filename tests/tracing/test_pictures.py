"""Vision-language models from their configuration, and models whose attention PyTorch's own kernel does not know."""

import json

import numpy as np
import pytest
import torch

import forerun
from forerun.base.errors import InvalidSetupError
from forerun.graph.shards import Shards
from forerun.prediction.step import prepare
from forerun.prediction.units import DividedModel
from forerun.question.model import ModelRequest
from forerun.question.setup import Precision, TrainingSetup
from forerun.tracing.models.transformers_models import attention_by_length
from forerun.tracing.trace import trace

TEXT = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 1000,
}  # fmt: skip
VISION = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 56,
    "patch_size": 14,
}  # fmt: skip
CONFIGS = {
    "LlavaForConditionalGeneration": {
        "model_type": "llava",
        "text_config": {"model_type": "llama", **TEXT},
        "vision_config": {"model_type": "clip_vision_model", "projection_dim": 32, **VISION},
    },
    "Gemma3ForConditionalGeneration": {
        "model_type": "gemma3",
        "mm_tokens_per_image": 4,
        "text_config": {"model_type": "gemma3_text", "head_dim": 16, **TEXT},
        "vision_config": {"model_type": "siglip_vision_model", **VISION},
    },
    "Qwen3VLForConditionalGeneration": {
        "model_type": "qwen3_vl",
        "text_config": {"model_type": "qwen3_vl_text", "head_dim": 16, **TEXT},
        "vision_config": {
            "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64,
            "patch_size": 14, "spatial_merge_size": 2, "deepstack_visual_indexes": [0, 1],
        },
    },
    "Qwen2_5_VLForConditionalGeneration": {
        "model_type": "qwen2_5_vl",
        "text_config": {
            "model_type": "qwen2_5_vl_text",
            "rope_scaling": {"rope_type": "default", "mrope_section": [2, 3, 3]},
            **TEXT,
        },
        "vision_config": {
            "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64,
            "patch_size": 14, "spatial_merge_size": 2, "window_size": 112, "fullatt_block_indexes": [1],
        },
    },
}  # fmt: skip


@pytest.fixture
def ask(tmp_path):
    def asked(name, config, **settings):
        path = tmp_path / "config.json"
        path.write_text(json.dumps({"architectures": [name], **config}), encoding="utf-8")
        return forerun.predict(f"hf:{path}", device="l40s", batch_size=2, precision="bf16", **settings)

    return asked


@pytest.mark.parametrize("name", CONFIGS)
def test_an_image_costs_its_encoder_and_its_places(ask, name):
    found = ask(name, CONFIGS[name], sequence_length=128, **({"image_size": 112} if "Qwen" in name else {}))
    text = 6 * 128 * 2 * (4 * 64 * 64 * 0.75 + 3 * 64 * 128 + 1000 * 64 / 2)
    assert found.flops_per_sample > text
    assert found.unsupported_ops == ()
    again = ask(
        name,
        CONFIGS[name],
        sequence_length=128,
        recompute="full",
        **({"image_size": 112} if "Qwen" in name else {}),
    )
    assert again.flops_per_sample > found.flops_per_sample  # an encoder's answers hold in the repetition too
    assert found.num_trainable_parameters == found.num_parameters


def test_a_larger_image_needs_more_places_and_work(ask):
    name = "Qwen2_5_VLForConditionalGeneration"
    small, large = (
        ask(name, CONFIGS[name], sequence_length=256, image_size=size).flops_per_sample for size in (112, 224)
    )
    assert large > small
    with pytest.raises(InvalidSetupError, match="16 places"):
        ask(name, CONFIGS[name], sequence_length=16, image_size=112)
    # A written token has no image of its own; the prompt has.
    written = ask(name, CONFIGS[name], image_size=112, sequence_length=256, algorithm="grpo", new_tokens=64)
    assert written.generation.time_per_token_s.value > 0
    with pytest.raises(InvalidSetupError, match="multiple of 28"):
        ask(name, CONFIGS[name], image_size=100)


@pytest.mark.parametrize("name", CONFIGS)
def test_few_blocks_of_two_lists_say_as_much_as_all(name, tmp_path):
    deep = {part: dict(CONFIGS[name][part]) for part in ("text_config", "vision_config")}
    text, vision = deep.values()
    text |= {"num_hidden_layers": 7}
    vision |= {"depth" if "depth" in vision else "num_hidden_layers": 8}
    numbered = {"deepstack_visual_indexes": [2, 4], "fullatt_block_indexes": [3, 7]}
    vision |= {key: numbers for key, numbers in numbered.items() if key in vision}
    if name.startswith("Gemma"):  # two layers of seven attend to all tokens
        text |= {"sliding_window_pattern": 3, "sliding_window": 64}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"architectures": [name], **CONFIGS[name], **deep}), encoding="utf-8")
    setup = TrainingSetup(precision=Precision.BF16, optimizer="adamw")
    few, whole = (
        trace(ModelRequest(model=f"hf:{path}"), setup, use_cache=False, few_blocks=few)
        for few in (True, False)
    )
    for figure in ("num_parameters", "num_trainable_parameters", "model_flops", "recomputed_flops"):
        assert getattr(few, figure) == pytest.approx(getattr(whole, figure), rel=1e-9), figure
    assert few.only_batch_size is None
    assert len(few.ops) < 0.8 * len(whole.ops)
    units = [DividedModel.of(prepare(graph)) for graph in (few, whole)]
    assert len(units[0].traced.names) < len(units[0].blocks.names) == len(units[1].traced.names)
    memory = [model.memory(Shards(), 2) for model in units]
    np.testing.assert_allclose(memory[0].weights, memory[1].weights)
    assert memory[0].kept.sum() == pytest.approx(memory[1].kept.sum(), rel=0.01)


def test_windows_of_an_image_are_attended_to_at_once():
    part, lengths = torch.nn.Module(), torch.tensor([0, 4, 8, 12, 14])
    states = [torch.randn(1, 2, 14, 8) for _ in range(3)]

    def attention(_part, query, key, value, **_):
        return torch.nn.functional.scaled_dot_product_attention(query, key, value).transpose(1, 2), None

    found, _ = attention_by_length(attention)(part, *states, cu_seq_lens_q=lengths)
    windows = zip(*(one.split(lengths.diff().tolist(), dim=2) for one in states), strict=True)
    torch.testing.assert_close(found, torch.cat([attention(part, *one)[0] for one in windows], dim=1))
    torch.testing.assert_close(attention_by_length(attention)(part, *states)[0], attention(part, *states)[0])


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("GptOssForCausalLM", {"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2}),
        ("Gemma2ForCausalLM", {"model_type": "gemma2", "attn_logit_softcapping": 50.0}),
    ],
)
def test_attention_with_sinks_or_capped_scores_is_one_kernel(ask, name, config):
    one, parts = (
        ask(name, {**config, **TEXT, "head_dim": 16}, sequence_length=512, fused_attention=fused)
        for fused in (True, False)
    )
    assert "FlexAttention" in " ".join(one.notes)
    assert one.peak_memory_bytes.value < parts.peak_memory_bytes.value
    assert one.step_time_s.value < parts.step_time_s.value


def test_rotary_positions_have_no_end(ask):
    config = {"model_type": "llama", "max_position_embeddings": 1024, **TEXT}
    found = ask("LlamaForCausalLM", config, sequence_length=262_144, recompute="full")
    assert found.tokens_per_s.value * found.step_time_s.value == pytest.approx(2 * 262_144)
    with pytest.raises(InvalidSetupError, match="at most 64 tokens"):
        ask("GPT2LMHeadModel", {"model_type": "gpt2", "n_positions": 64}, sequence_length=128)
