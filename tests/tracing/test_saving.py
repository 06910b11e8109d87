"""Ways to save memory, on a small Llama: laws, counts of other packages, and what is refused."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from forerun.base.errors import InvalidSetupError
from forerun.cost.memory.stream import live_peak
from forerun.graph.blocks import blocks_of
from forerun.graph.graph import AllocationKind, MemoryEvent, OpClass, StepPart
from forerun.question.model import ModelRequest
from forerun.question.saving import (
    Fp8Recipe,
    FusedKernel,
    Loss,
    MasterWeights,
    Offload,
    Quantization,
    Saving,
    Unquantized,
)
from forerun.question.setup import FLASH_3_GAIN, Phase, Precision, TrainingSetup
from forerun.tracing.models.sources import build_model
from forerun.tracing.saving.blocks import block_names
from forerun.tracing.trace import trace

pytest.importorskip("transformers")

CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 128, "intermediate_size": 352,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 2048,
    "max_position_embeddings": 256, "tie_word_embeddings": False,
}  # fmt: skip
BATCH, TOKENS = 4, 128
SETUP = TrainingSetup(batch_size_per_device=BATCH, precision=Precision.BF16, optimizer="adamw")


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    """A function that traces the small model with ways to save memory, each once."""
    path = tmp_path_factory.mktemp("configs") / "config.json"
    path.write_text(json.dumps(CONFIG))
    known = {}

    def graph_of(setup=SETUP, **saving):
        setup = replace(setup, saving=Saving(**saving))
        key = setup
        if key not in known:
            request = ModelRequest(model=f"hf:{path}", sequence_length=TOKENS)
            known[key] = trace(request, setup, use_cache=False)
        return known[key]

    return graph_of


def peak_bytes(graph):
    return live_peak(graph.memory, BATCH).total_bytes


def held_bytes(graph, kind):
    stream = graph.memory
    chosen = (stream.kind == kind) & (stream.event == MemoryEvent.ALLOCATE)
    return stream.size_bytes[chosen, 0].sum()


@pytest.mark.parametrize("saving", [{"lora_rank": 8, "quantize": Quantization.NF4}, {}])
def test_what_training_needs_is_the_same_with_recomputation(traced, saving):
    # Quantized layers and those in fp8 are functions with gradients of their own, in which autograd is off.
    setup = SETUP if saving else replace(SETUP, precision=Precision.FP8)
    plain, full = (traced(setup, recompute=words, **saving) for words in ("none", "full"))
    assert full.model_flops == pytest.approx(plain.model_flops)
    assert full.recomputed_flops[1] > 0.2 * plain.model_flops[1]


def test_a_backward_pass_leaves_no_temporaries(traced):
    # Scales of nf4-dq, written out again for each product, must not add up over the blocks.
    stream = traced(lora_rank=8, quantize=Quantization.NF4_DQ, recompute="full").memory
    before = slice(np.flatnonzero(stream.event == MemoryEvent.OPTIMIZER_BEGINS)[-1])
    event, block, kind = stream.event[before], stream.block[before], stream.kind[before]
    made = block[(event == MemoryEvent.ALLOCATE) & (kind == AllocationKind.TEMPORARY)]
    assert set(made) <= set(block[event == MemoryEvent.FREE])


def test_a_loss_that_is_not_compiled_keeps_its_logits_in_fp32(traced):
    eager, whole, apart = (
        traced(replace(SETUP, **words))
        for words in ({}, {"compile": True}, {"compile": True, "compile_loss": False})
    )
    logits_bytes = 4 * BATCH * TOKENS * CONFIG["vocab_size"]
    assert peak_bytes(whole) + logits_bytes < peak_bytes(apart) < peak_bytes(eager)
    assert whole.ops.joined_bytes.sum() < apart.ops.joined_bytes.sum()
    with pytest.raises(InvalidSetupError, match="give --compile as well"):
        replace(SETUP, compile_loss=False)


@pytest.mark.parametrize("precision", [Precision.BF16, Precision.AMP_BF16])
def test_more_recomputation_needs_less_memory_and_more_work(traced, precision):
    setup = replace(SETUP, precision=precision)
    graphs = [traced(setup, recompute=words) for words in ("none", "every-2", "full")]
    peaks, work = [peak_bytes(g) for g in graphs], [g.total_flops(BATCH) for g in graphs]
    assert peaks[0] > peaks[1] > peaks[2]
    assert work[0] < work[1] < work[2]
    selective = traced(setup, recompute="selective")
    assert peaks[0] > peak_bytes(selective) > peaks[2]
    assert work[0] <= selective.total_flops(BATCH) < work[2]


def test_only_what_is_computed_again_differs(traced):
    plain, full = traced(), traced(recompute="full")
    assert full.model_flops == pytest.approx(plain.model_flops)
    again = [g.recomputed_flops[1] for g in (plain, full)]
    assert again[1] > again[0]
    assert not plain.ops.recomputed.any()
    # Every block once more, and its last product too.
    forward = plain.ops.flops[plain.ops.step_part == 0] * plain.ops.count[plain.ops.step_part == 0, None]
    repeated = full.ops.recomputed > 0
    names = [full.ops.module_names[i] for i in full.ops.module[repeated]]
    assert all(name.startswith("model.layers.") for name in names)
    assert 0.5 * forward[:, 1].sum() < (full.ops.flops[repeated, 1] * full.ops.count[repeated]).sum()


def test_recomputation_under_autocast_runs_in_half_precision(traced):
    graph = traced(replace(SETUP, precision=Precision.AMP_BF16), recompute="full")
    products = (graph.ops.recomputed > 0) & (graph.ops.gemm[:, 3, 0] + graph.ops.gemm[:, 3, 1] > 0)
    assert products.any()
    assert (graph.ops.element_bytes[products] == 2).all()


def test_adapters_have_the_number_of_weights_that_peft_counts():
    # huggingface/peft, method_comparison/MetaMathQA, lora/llama-3.2-3B-rank32: trainable_parameters.
    pytest.importorskip("peft")
    from forerun.tracing.saving.prepare import with_saving

    built = build_model("llama-3.2-3b", sequence_length=64)
    setup = replace(SETUP, saving=Saving(lora_rank=32, lora_targets=("q_proj", "v_proj")))
    module = with_saving(built, setup).module
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
    assert trained == 9_175_040
    built = build_model("llama-3.2-3b", sequence_length=64)
    pattern = r"model\.layers\.[\d]+\.self_attn\.(q|v)_proj"
    module = with_saving(built, replace(setup, saving=Saving(lora_rank=32, lora_targets=(pattern,)))).module
    assert sum(p.numel() for p in module.parameters() if p.requires_grad) == trained


def test_adapters_freeze_the_rest(traced):
    pytest.importorskip("peft")
    plain, adapted = traced(), traced(lora_rank=8)
    assert adapted.num_trainable_parameters < 0.2 * plain.num_trainable_parameters
    assert held_bytes(adapted, AllocationKind.OPTIMIZER_STATE) == pytest.approx(
        8 * adapted.num_trainable_parameters, rel=0.01
    )
    in_half = traced(lora_rank=8, master_weights=MasterWeights.BF16)
    assert held_bytes(in_half, AllocationKind.OPTIMIZER_STATE) == pytest.approx(
        4 * adapted.num_trainable_parameters, rel=0.01
    )


@pytest.mark.parametrize(
    ("kind", "bytes_each"),
    [
        (Quantization.NF4, 0.5 + 4 / 64),
        (Quantization.NF4_DQ, 0.5 + 1 / 64 + 4 / 64 / 256),
        (Quantization.INT8, 1 + 4 / 128),
    ],
)
def test_quantized_weights_take_their_bits(traced, kind, bytes_each):
    pytest.importorskip("peft")
    adapted, small = traced(lora_rank=8), traced(lora_rank=8, quantize=kind)
    assert small.num_parameters == adapted.num_parameters
    saved = sum(
        held_bytes(adapted, part) - held_bytes(small, part)
        for part in (AllocationKind.WEIGHT, AllocationKind.BUFFER)
    )
    head_and_table = 2 * 2048 * 128
    linear = adapted.num_parameters - adapted.num_trainable_parameters - head_and_table - 9 * 128
    assert saved == pytest.approx((2 - bytes_each) * linear, rel=0.02)
    assert "dequantize_weight" in small.ops.kernel_names


def test_products_in_8_bits_keep_their_inputs_and_those_in_4_once_did(traced):
    pytest.importorskip("peft")
    kept = []
    for kind, keeps in ((Quantization.INT8, False), (Quantization.NF4, False), (Quantization.NF4, True)):
        graph = traced(lora_rank=8, quantize=kind, keep_inputs=keeps)
        held = sum(held_bytes(graph, part) for part in (AllocationKind.WEIGHT, AllocationKind.BUFFER))
        kept.append(peak_bytes(graph) - held)
    # The inputs of the last products of attention and of the second layer, which nothing else keeps, of three blocks.
    assert kept[0] - kept[1] > 3 * 2 * BATCH * TOKENS * (128 + 352)
    assert kept[2] - kept[1] > 3 * 2 * BATCH * TOKENS * (128 + 352)


def test_gradients_of_inputs_in_fp32_are_products_in_fp32_beside_weights_in_8_bits(traced):
    pytest.importorskip("peft")
    autocast = replace(SETUP, precision=Precision.AMP_BF16)
    wide, half = (
        traced(autocast, lora_rank=8, quantize=Quantization.INT8, unquantized=format_)
        for format_ in (None, Unquantized.HALF)
    )
    for graph, element_bytes in ((wide, 4), (half, 2)):
        products = (graph.ops.op_class == OpClass.LINEAR) & (graph.ops.step_part == StepPart.BACKWARD)
        sizes = graph.ops.element_bytes[products].astype(int)
        assert np.bincount(sizes, graph.ops.flops[products, 1]).argmax() == element_bytes


def test_weights_beside_quantized_ones_are_fp32_under_autocast(traced):
    pytest.importorskip("peft")
    ways = {"lora_rank": 8, "quantize": Quantization.NF4, "recompute": "full"}
    autocast = replace(SETUP, precision=Precision.AMP_BF16)
    wide, half = traced(autocast, **ways), traced(autocast, **ways, unquantized=Unquantized.HALF)
    others = 2 * 2048 * 128 + 9 * 128
    weights = [held_bytes(graph, AllocationKind.WEIGHT) for graph in (wide, half)]
    assert weights[0] - weights[1] == 2 * others
    # What flows between the layers is fp32 as well, and with it the checkpoints of the four blocks.
    checkpoints = 4 * BATCH * TOKENS * 128
    assert peak_bytes(wide) - peak_bytes(half) > 2 * (others + checkpoints)
    assert wide.total_flops(BATCH) >= half.total_flops(BATCH)
    # So are they without a region, where peft's preparation is named.
    plain, half, pure = (traced(**ways, unquantized=form) for form in (None, *reversed(Unquantized)))
    assert peak_bytes(plain) == peak_bytes(half) < peak_bytes(pure) - 2 * (others + checkpoints)


def test_dropout_of_adapters_keeps_masks(traced):
    pytest.importorskip("peft")
    ways = {"lora_rank": 8, "lora_targets": ("q_proj", "v_proj"), "master_weights": MasterWeights.BF16}
    plain, dropping = traced(**ways), traced(**ways, lora_dropout=0.1)
    # For each of two adapters a mask of one byte and what is left of the input, in bf16, instead of one input of both;
    # the last of four blocks has freed some of it at the peak.
    block = (2 * 3 - 2) * BATCH * TOKENS * 128
    assert 3 * block < peak_bytes(dropping) - peak_bytes(plain) <= 4 * block
    assert "native_dropout" in dropping.ops.kernel_names


def test_frozen_parts_have_no_gradient(traced):
    frozen = traced(freeze=("embed_tokens", "lm_head"))
    assert frozen.num_trainable_parameters == frozen.num_parameters - 2 * 2048 * 128


@pytest.mark.parametrize("loss", [Loss.CHUNKED, Loss.LIGER])
def test_joined_losses_never_hold_all_logits(traced, loss):
    plain, joined = traced(), traced(loss=loss)
    largest = [g.memory.size_bytes[:, 1].max() for g in (plain, joined)]
    assert largest[0] == TOKENS * 2048 * 4
    assert largest[1] < largest[0] / 2
    assert peak_bytes(joined) < peak_bytes(plain)
    assert joined.model_flops[1] == pytest.approx(plain.model_flops[1], rel=0.01)


@pytest.mark.parametrize("loss", [Loss.FUSED, Loss.LIGER])
def test_losses_of_models_that_name_no_arguments_are_joined_too(tmp_path, loss):
    path = tmp_path / "gemma.json"
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 1, "head_dim": 32, "vocab_size": 256}
    path.write_text(
        json.dumps({"model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], **sizes})
    )
    setup = replace(SETUP, saving=Saving(loss=loss))
    graph = trace(ModelRequest(model=f"hf:{path}", sequence_length=16), setup, use_cache=False)
    assert ("cross_entropy" if loss is Loss.FUSED else "liger_cross_entropy_") in graph.ops.kernel_names


def test_a_fused_loss_holds_the_logits_once(traced):
    plain, fused = traced(), traced(loss=Loss.FUSED)
    logits = BATCH * TOKENS * 2048 * 4
    assert peak_bytes(plain) - peak_bytes(fused) >= logits
    assert fused.model_flops == pytest.approx(plain.model_flops)


FUSED_WAYS = [
    {},
    {"recompute": "full"},
    {"recompute": "selective"},
    {"lora_rank": 8, "master_weights": MasterWeights.BF16},
    {"lora_rank": 8, "lora_dropout": 0.1, "quantize": Quantization.NF4_DQ},
]


def moved_bytes(graph):
    ops = graph.ops
    return ((ops.read_bytes + ops.write_bytes) @ [1, BATCH] * ops.count).sum()


@pytest.mark.parametrize(
    ("ways", "part"),
    [
        (ways, part)
        for ways in FUSED_WAYS
        for part in FusedKernel
        if part != "experts" and (part != "lora" or "lora_rank" in ways)  # experts have a test of their own
    ],
)
def test_fused_kernels_do_the_same_work_with_less_traffic_and_memory(traced, ways, part):
    if "lora_rank" in ways:
        pytest.importorskip("peft")
    eager, fused = traced(**ways), traced(**ways, fused_kernels=(part,))
    assert moved_bytes(fused) < moved_bytes(eager)
    assert peak_bytes(fused) <= peak_bytes(eager)
    # The products of adapters with their inputs are computed again.
    assert fused.model_flops[1] == pytest.approx(
        eager.model_flops[1], rel=0.05 if part is FusedKernel.LORA else 1e-9
    )
    assert fused.num_trainable_parameters == eager.num_trainable_parameters
    assert not fused.unsupported_ops


def test_fused_kernels_keep_what_their_libraries_keep(traced):
    def kept(*parts):
        return peak_bytes(traced()) - peak_bytes(traced(fused_kernels=parts))

    # Per block: the activation of the gate; of two norms the input in fp32 and the normalised one in bf16, less the
    # input in bf16 where nothing else keeps it.
    assert kept(FusedKernel.MLP) == pytest.approx(4 * 2 * BATCH * TOKENS * 352, rel=0.3)
    assert kept(FusedKernel.NORM) == pytest.approx(9 * 4 * BATCH * TOKENS * 128, rel=0.3)
    names = traced(fused_kernels=(FusedKernel.ROPE,)).ops.kernel_names
    assert "rotate_" in names
    assert "neg" not in names


def test_models_without_such_parts_say_so(tmp_path):
    path = tmp_path / "gpt2.json"
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 64}
    path.write_text(json.dumps({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **sizes}))
    asked = replace(SETUP, saving=Saving(fused_kernels=(FusedKernel.NORM, FusedKernel.MLP)))
    graph = trace(ModelRequest(model=f"hf:{path}", sequence_length=16), asked, use_cache=False)
    assert "has no RMSNorms and gated MLPs as in Llama" in " ".join(graph.notes)


@pytest.mark.parametrize(
    ("optimizer", "bytes_each"),
    [("adamw", 4), ("adamw-8bit", 2 + 8 / 256), ("adafactor", 0.1), ("lion", 2), ("sgd", 2)],
)
def test_optimizers_hold_their_states(traced, optimizer, bytes_each):
    graph = traced(replace(SETUP, optimizer=optimizer))
    state = held_bytes(graph, AllocationKind.OPTIMIZER_STATE)
    assert state == pytest.approx(bytes_each * graph.num_parameters, rel=0.03 if bytes_each > 1 else 1)


def test_muon_holds_one_state_for_matrices_and_two_for_tables(traced):
    graph = traced(replace(SETUP, optimizer="muon"))
    tables = 2 * 2048 * 128 + 9 * 128
    wanted = 2 * (graph.num_parameters - tables) + 4 * tables
    assert held_bytes(graph, AllocationKind.OPTIMIZER_STATE) == pytest.approx(wanted, rel=0.02)
    assert "bmm" in graph.ops.kernel_names or "mm" in graph.ops.kernel_names


def test_fp32_copies_are_state(traced):
    graph = traced(master_weights=MasterWeights.FP32)
    assert held_bytes(graph, AllocationKind.OPTIMIZER_STATE) == pytest.approx(
        12 * graph.num_parameters, rel=0.01
    )


def test_offload_leaves_the_device_without_state(traced):
    plain, state_away, all_away = (
        traced(),
        traced(offload=Offload.OPTIMIZER),
        traced(offload=Offload.PARAMETERS),
    )
    assert held_bytes(state_away, AllocationKind.OPTIMIZER_STATE) == 0
    assert peak_bytes(all_away) < peak_bytes(state_away) < peak_bytes(plain)
    traffic = all_away.host_traffic
    # Adam on the host: weights, gradients and two states in fp32, read, and all but the gradient written.
    assert traffic.update_bytes == pytest.approx(28 * plain.num_parameters, rel=0.01)
    assert traffic.gradient_bytes == 2 * plain.num_parameters
    assert state_away.host_traffic.forward_bytes == 0 < traffic.forward_bytes < 2 * plain.num_parameters


def test_inputs_of_blocks_wait_at_the_host(traced):
    here, away = traced(recompute="full"), traced(recompute="offload")
    assert peak_bytes(away) < peak_bytes(here)
    assert away.total_flops(BATCH) == here.total_flops(BATCH)
    assert away.model_flops == here.model_flops


def test_fp8_products_are_half_as_deep_and_do_the_same_work(traced):
    plain, small = traced(), traced(replace(SETUP, precision=Precision.FP8))
    assert small.model_flops == pytest.approx(plain.model_flops)
    assert small.total_flops(BATCH) < plain.total_flops(BATCH)
    assert "eight_bit_product" in small.ops.kernel_names


def test_recipes_of_transformer_engine_cast_once(traced):
    setup = replace(SETUP, precision=Precision.FP8)
    graphs = {recipe: traced(setup, fp8_recipe=recipe) for recipe in Fp8Recipe}
    plain = traced(setup)

    def moved_bytes(graph):
        chosen = [index for index, name in enumerate(graph.ops.kernel_names) if "to_eight_bits" in name]
        rows = np.isin(graph.ops.kernel, chosen)
        return ((graph.ops.read_bytes + graph.ops.write_bytes)[rows] @ [1, BATCH]).sum()

    moved = {recipe: moved_bytes(graph) for recipe, graph in graphs.items()}
    assert moved["delayed"] == moved["mx"] < moved["current"] < moved["dynamic"] == moved_bytes(plain)
    assert len({graph.model_flops for graph in graphs.values()}) == 1


def test_experts_multiply_in_fp8_with_the_recipes_of_transformer_engine(tmp_path):
    config = {
        "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 64, "num_experts": 8,
        "moe_intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16, "num_experts_per_tok": 2, "vocab_size": 512,
    }  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))

    def graph(precision, **saving):
        setup = TrainingSetup(
            batch_size_per_device=1, optimizer="adamw", precision=precision, saving=Saving(**saving)
        )
        return trace(ModelRequest(model=f"hf:{path}", sequence_length=64), setup)

    plain, torchao = graph(Precision.BF16), graph(Precision.FP8)
    engine = graph(Precision.FP8, fp8_recipe=Fp8Recipe.MX)
    grouped = "grouped_eight_bit_product"
    assert grouped not in torchao.ops.kernel_names
    assert grouped in engine.ops.kernel_names
    assert engine.model_flops == pytest.approx(plain.model_flops)
    own = blocks_of(engine)
    assert own.expert_product.sum() == blocks_of(plain).expert_product.sum() == 2 * 2 * 3
    assert set(engine.ops.kernel[own.expert_product].tolist()) == {engine.ops.kernel_names.index(grouped)}
    fused = graph(Precision.FP8, fp8_recipe=Fp8Recipe.MX, fused_kernels=(FusedKernel.EXPERTS,))

    def number(found, name):
        names = found.ops.kernel_names
        return found.ops.count[found.ops.kernel == names.index(name)].sum() if name in names else 0

    # Of two layers' products a kernel before casts one source, and one behind one gradient.
    casts = [number(found, "to_eight_bits_twice") for found in (engine, fused)]
    assert casts[0] - casts[1] == 2 * 2
    assert number(engine, "silu") == 2
    assert number(fused, "silu") == 0
    assert fused.model_flops == pytest.approx(engine.model_flops)


def test_kernels_that_leave_masked_tiles_out_take_half_as_long(traced):
    plain, skips, hopper = (
        traced(replace(SETUP, attention_kernel=kernel)) for kernel in ("plain", "flash-2", "flash-3")
    )
    work = [
        graph.ops.flops[graph.ops.op_class == OpClass.ATTENTION].sum() for graph in (plain, skips, hopper)
    ]
    assert work[0] == pytest.approx(2 * work[1]) == pytest.approx(2 * FLASH_3_GAIN * work[2])
    assert skips.model_flops == pytest.approx(plain.model_flops)
    assert hopper.model_flops == pytest.approx(plain.model_flops)


def mixtral(folder, **saving):
    config = {
        "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "hidden_size": 64, "num_local_experts": 4,
        "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 128,
    }  # fmt: skip
    path = folder / "config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    request = ModelRequest(model=f"hf:{path}", sequence_length=64)
    return trace(request, replace(SETUP, precision=Precision.BF16, saving=Saving(**saving)))


def test_experts_keep_what_one_kernel_keeps_in_the_time_of_their_operations(tmp_path):
    norm, both = (FusedKernel.NORM,), (FusedKernel.NORM, FusedKernel.MLP)
    plain, fused = (mixtral(tmp_path, fused_kernels=parts) for parts in (norm, both))
    # Of a token and one of its two experts, in both blocks: the activation, and the result of the last product.
    left_out = 2 * 2 * BATCH * 64 * (64 + 64) * 2
    assert peak_bytes(plain) - peak_bytes(fused) == pytest.approx(left_out, rel=0.3)
    runs = [graph.ops.read_bytes.sum(axis=-1) > 0 for graph in (plain, fused)]
    for name in ("flops", "read_bytes", "write_bytes", "step_part"):
        left, right = (getattr(graph.ops, name)[own] for graph, own in zip((plain, fused), runs, strict=True))
        assert (left == right).all()


def test_experts_in_one_tensor_are_quantized_where_asked(tmp_path):
    pytest.importorskip("peft")
    ways = {"lora_rank": 4, "quantize": Quantization.NF4}
    left, asked = (mixtral(tmp_path, **ways, quantize_experts=value) for value in (False, True))
    assert asked.num_parameters == left.num_parameters
    assert asked.num_trainable_parameters == left.num_trainable_parameters
    experts = 2 * 4 * 3 * 64 * 64
    parts = (AllocationKind.WEIGHT, AllocationKind.BUFFER)
    saved = sum(held_bytes(left, part) - held_bytes(asked, part) for part in parts)
    assert saved == pytest.approx((2 - 0.5 - 4 / 64) * experts, rel=0.02)
    assert any("--quantize-experts" in note for note in left.notes)
    assert not any("--quantize-experts" in note for note in asked.notes)
    with pytest.raises(InvalidSetupError, match="give --quantize nf4 or nf4-dq"):
        Saving(lora_rank=4, quantize=Quantization.INT8, quantize_experts=True)


def test_selective_recomputation_computes_grouped_products_again(tmp_path):
    ops = mixtral(tmp_path, recompute="selective").ops
    assert ((ops.recomputed > 0) & (ops.kernel == ops.kernel_names.index("_grouped_mm"))).any()


@pytest.mark.parametrize(
    ("precision", "name"), [(Precision.BF16, "mm"), (Precision.FP8, "eight_bit_product")]
)
def test_selective_recomputation_keeps_every_second_product_of_a_block(traced, precision, name):
    ops = traced(replace(SETUP, precision=precision), recompute="selective").ops
    is_product = ops.kernel == ops.kernel_names.index(name)
    names = Counter(ops.module_names[i].rsplit(".", 1)[-1] for i in ops.module[is_product])
    assert {name for name, number in names.items() if number == 4 * CONFIG["num_hidden_layers"]} == {
        "k_proj",
        "o_proj",
        "up_proj",
    }  # forward, again, and both gradients


def test_kept_gradients_live_through_the_forward_pass(traced):
    plain, several = traced(), traced(replace(SETUP, keeps_gradients=True))
    assert peak_bytes(several) >= peak_bytes(plain)
    assert several.total_bytes(BATCH) > plain.total_bytes(BATCH)  # sums of gradients


@pytest.mark.parametrize(
    ("saving", "setup", "words"),
    [
        ({"lora_rank": 8, "lora_targets": ("qproj",)}, SETUP, "did you mean q_proj"),
        ({"freeze": ("embed_token",)}, SETUP, "no module 'embed_token'"),
        ({"freeze": ("model", "lm_head")}, SETUP, "every weight"),
        ({"lora_rank": 8, "lora_targets": ("input_layernorm",)}, SETUP, "cannot have adapters"),
        ({"lora_rank": 8, "lora_targets": (".*[qv]_prj",)}, SETUP, "no linear layer .* matches"),
        ({"lora_rank": 8, "lora_targets": ("(q_proj",)}, SETUP, "expected names of layers or a pattern"),
    ],
)  # fmt: skip
def test_names_that_do_not_exist_are_refused(traced, saving, setup, words):
    pytest.importorskip("peft")
    with pytest.raises(InvalidSetupError, match=words):
        traced(setup, **saving)


@pytest.mark.parametrize(
    ("saving", "words"),
    [
        ({"lora_targets": ("q_proj",)}, "needs|without --lora"),
        ({"recompute": "half"}, "every-K"),
        ({"recompute": "every-0"}, "every-K"),
        ({"lora_rank": 0}, "rank"),
    ],
)  # fmt: skip
def test_contradictions_are_refused(saving, words):
    with pytest.raises(InvalidSetupError, match=words):
        Saving(**saving)


def test_quantized_weights_need_adapters_and_half_precision():
    with pytest.raises(InvalidSetupError, match="--lora 16"):
        TrainingSetup(precision=Precision.BF16, saving=Saving(quantize=Quantization.NF4))
    with pytest.raises(InvalidSetupError, match="--precision bf16"):
        TrainingSetup(saving=Saving(quantize=Quantization.NF4, lora_rank=4))
    with pytest.raises(InvalidSetupError, match="give --quantize nf4"):
        Saving(keep_inputs=True)
    with pytest.raises(InvalidSetupError, match="updates no weights"):
        TrainingSetup(phase=Phase.INFERENCE, optimizer="none", saving=Saving(recompute="full"))


class _Convolutions(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Conv2d(8, 8, 3))
        self.fc = torch.nn.Linear(8, 10)

    def forward(self, x):
        return self.fc(self.body(x).mean((2, 3)))


@pytest.mark.parametrize("targets", [(), ("2",)])
def test_a_convolution_is_not_quantized(targets):
    pytest.importorskip("peft")
    saving = Saving(lora_rank=4, lora_targets=targets, quantize=Quantization.NF4)
    setup = replace(SETUP, saving=saving)
    with pytest.raises(InvalidSetupError, match="convolution"):
        trace(ModelRequest(model="convolutions", image_size=16), setup, _Convolutions())


def test_blocks_are_the_modules_that_repeat(traced):
    assert traced().blocks == tuple(f"model.layers.{i}" for i in range(4))
    assert block_names(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))) == ()
