"""Steps of post-training and generation: published figures, laws of their parts, and what is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest

import forerun
from forerun.base.errors import InvalidSetupError
from forerun.cost.memory.replay import replay_plan
from forerun.prediction.models import TracedModels
from forerun.question.devices import find_device
from forerun.question.run import Run

DEVICE = "a100-sxm4-80gb"
SMALL = "gpt:depth=2"
LENGTHS = {"sequence_length": 256, "batch_size": 4, "precision": "bf16", "optimizer": "adamw"}

PUBLISHED = [
    # batch, prompt, new tokens, measured [s], largest ratio to it
    (384, 128, 128, 384 * 128 / 5586, 1.1),
    (60, 128, 2048, 60 * 2048 / 1928, 1.1),
    (52, 2048, 128, 52 * 128 / 591, 1.15),
    (1, 2048, 1, 0.133, 1.1),
    (1, 128, 1, 0.016, 1.2),
]
"""LLaMA 7B in fp16 on one A100: NVIDIA/TensorRT-LLM 138f96d4, ``docs/source/performance.md``, A100 GPUs (FP16)."""


def ask(**options):
    return forerun.predict(SMALL, device=DEVICE, **{**LENGTHS, **options})


def value(estimate):
    return estimate.step_time_s.value


@pytest.mark.parametrize(("batch", "prompt", "new", "measured_s", "largest"), PUBLISHED)
def test_published_generation(batch, prompt, new, measured_s, largest):
    found = forerun.predict(
        "llama-2-7b",
        device=DEVICE,
        phase="generate",
        batch_size=batch,
        sequence_length=prompt + new,
        new_tokens=new,
        precision="fp16",
    )
    assert 1 / largest < value(found) / measured_s < largest
    # The pass over the prompt gives the first token.
    of_token = found.generation.time_per_token_s
    assert (of_token is None) == (new == 1)
    further_s = (new - 1) * of_token.value if of_token else 0.0
    assert value(found) == pytest.approx(found.generation.time_to_first_token_s.value + further_s)
    # 2 x 32 layers x 32 heads x 128 values of two bytes for each token.
    assert found.generation.cache_bytes == batch * (prompt + new) * 2 * 32 * 32 * 128 * 2
    assert found.peak_memory_bytes.value > found.generation.cache_bytes + 2 * found.num_parameters


def test_heads_that_share_keys_keep_a_small_cache():
    found = forerun.predict(
        "llama-3.2-1b", device=DEVICE, phase="generate", batch_size=2, sequence_length=512
    )
    assert found.generation.cache_bytes == 2 * 512 * 2 * 16 * 8 * 64 * 2
    assert (found.generation.prompt_tokens, found.generation.new_tokens) == (256, 256)


@pytest.mark.parametrize("device", ["a100-sxm4-80gb", "h100-sxm", "rtx-4090", "l4", "t4"])
@pytest.mark.parametrize("engine", ["vllm", "transformers"])
def test_no_token_is_written_before_the_weights_are_read(device, engine):
    found = forerun.predict(
        "llama-3.2-1b", device=device, phase="generate", sequence_length=512, engine=engine, precision="fp16"
    )
    weights_bytes = 2 * found.num_parameters
    bandwidth = find_device(device).memory_bandwidth_bytes_per_s
    assert found.generation.time_per_token_s.value > weights_bytes / bandwidth


def test_embeddings_of_pairs_are_twice_the_encoder_without_its_vocabulary(tmp_path):
    path = tmp_path / "encoder.json"
    path.write_text(
        '{"model_type": "bert", "architectures": ["BertForMaskedLM"], "hidden_size": 128, "num_hidden_layers": 2, '
        '"num_attention_heads": 2, "intermediate_size": 512, "vocab_size": 20000}'
    )
    asked = {"device": "a100-sxm4-80gb", "batch_size": 16, "sequence_length": 64, "precision": "bf16"}
    pairs = forerun.predict(f"hf:{path}", algorithm="contrastive", **asked)
    plain = forerun.predict(f"hf:{path}", **asked)
    layers = (
        6 * 64 * 2 * (4 * 128**2 + 2 * 128 * 512)
    )  # products with weights; attention has a twelfth of them
    assert pairs.flops_per_sample == pytest.approx(2 * layers * 13 / 12, rel=0.05)
    assert plain.flops_per_sample > layers + 6 * 64 * 128 * 20000
    assert any("similarities" in note for note in pairs.notes)


def test_attention_that_is_written_out_costs_an_engine_what_fused_attention_does():
    asked = {"phase": "generate", "optimizer": None, "new_tokens": 64}
    fused, apart = ask(**asked), ask(**asked, fused_attention=False)
    assert value(apart) == pytest.approx(value(fused), rel=0.05)
    assert apart.generation.cache_bytes == fused.generation.cache_bytes
    slow = ask(**asked, fused_attention=False, engine="transformers")
    assert value(slow) > value(ask(**asked, engine="transformers"))


def test_models_that_write_attention_out_generate(tmp_path):
    sizes = {
        "n_embd": 256,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 512,
        "vocab_size": 1000,
        "rotary_dim": 64,
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "gptj", "architectures": ["GPTJForCausalLM"], **sizes}))
    found = forerun.predict(
        f"hf:{path}", device=DEVICE, phase="generate", precision="bf16", sequence_length=256
    )
    # 2 layers x 4 heads x 64 values of keys and of values, two bytes each.
    assert found.generation.cache_bytes == 32 * 256 * 2 * 2 * 4 * 64 * 2


def test_prompts_and_answers_have_the_positions_of_the_model(tmp_path):
    found = forerun.predict("gpt2", device=DEVICE, phase="generate").generation
    assert (found.prompt_tokens, found.new_tokens) == (512, 512)
    path = tmp_path / "config.json"
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 100, "max_position_embeddings": 64}
    path.write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"], **sizes}))
    asked = {"device": DEVICE, "phase": "generate", "precision": "bf16"}
    assert forerun.predict(f"hf:{path}", **asked).generation.prompt_tokens == 32
    assert forerun.predict(f"hf:{path}", **asked, sequence_length=256).generation.prompt_tokens == 128


def test_a_step_without_a_penalty_has_no_reference():
    found = {value: ask(algorithm="grpo", new_tokens=8, reference=value) for value in (True, False)}
    names = {value: [one.name for one in answer.passes] for value, answer in found.items()}
    assert [name for name in names[True] if name not in names[False]] == ["reference"]
    assert found[False].step_time_s.value < found[True].step_time_s.value
    assert found[False].peak_memory_bytes.value < found[True].peak_memory_bytes.value
    with pytest.raises(InvalidSetupError, match="--no-reference is for ppo and grpo"):
        ask(algorithm="dpo", reference=False)


def test_unequal_answers_last_as_long_as_the_longest(tmp_path):
    asked = {"phase": "generate", "optimizer": None, "new_tokens": 128}
    longest = ask(**asked)
    path = tmp_path / "answers.csv"
    path.write_text("128\n" * 4)
    assert value(ask(**asked, answer_lengths=str(path))) == pytest.approx(value(longest), rel=1e-9)
    law = "lognormal:median=30,p95=100"
    found = {engine: ask(**asked, answer_lengths=law, engine=engine) for engine in ("vllm", "transformers")}
    drawn = np.random.default_rng(0).lognormal(np.log(30), np.log(100 / 30) / 1.645, (100_000, 4))
    tokens = np.minimum(drawn, 128)
    for each in found.values():
        assert each.generation.new_tokens == pytest.approx(tokens.max(axis=1).mean(), abs=1)
        written = each.generation.new_tokens_per_s.value * each.generation.time_per_token_s.value
        assert written == pytest.approx(4 * tokens.mean() / each.generation.new_tokens, rel=0.02)
    assert value(found["vllm"]) < value(longest)
    shorter, padded = (
        ask(algorithm="grpo", new_tokens=128, answer_lengths=law),
        ask(algorithm="grpo", new_tokens=128),
    )
    assert value(shorter) < value(padded)
    assert "the longest of a batch" in " ".join(shorter.notes)


def test_answers_without_padding_are_trained_at_their_mean_length():
    equal = {"algorithm": "grpo", "sequence_length": 1024, "new_tokens": 768, "batch_size": 32}
    asked = {**equal, "batching": "padding-free"}
    assert value(ask(**asked)) == pytest.approx(value(ask(**equal)), rel=1e-9)
    law = {"answer_lengths": "mean:256"}
    padded, free = ({part.name: part.time_s for part in ask(**each, **law).passes} for each in (equal, asked))
    mean = ask(sequence_length=256 + 256, batch_size=32)
    assert free["forward, backward and update"] == pytest.approx(value(mean), rel=0.01)
    for name in ("log-probabilities", "reference", "forward, backward and update"):
        assert free[name] < padded[name]
    assert free["decode"] == pytest.approx(padded["decode"], rel=0.03)  # by the shares of the host


def test_few_tokens_read_few_experts():
    options = {"device": "h100-sxm", "phase": "generate", "sequence_length": 64, "new_tokens": 32}
    one, many = (forerun.predict("deepseek-v2-lite", batch_size=size, **options) for size in (1, 64))
    # 6 of 64 experts are read for one token, nearly all for 64.
    assert one.generation.time_per_token_s.value < 0.5 * many.generation.time_per_token_s.value
    assert "batch size 1 only" in " ".join(one.notes)


def test_passes_add_up_and_longer_answers_take_longer():
    short, long = (ask(phase="generate", optimizer=None, new_tokens=new) for new in (64, 128))
    assert value(long) > 1.8 * value(short)
    for found in (short, long, ask(algorithm="dpo"), ask(algorithm="grpo")):
        assert sum(part.time_s for part in found.passes) == pytest.approx(value(found))
        assert sum(part.time_s for part in found.breakdown) == pytest.approx(value(found))
    figures = short.generation
    assert value(short) == pytest.approx(
        figures.time_to_first_token_s.value + 63 * figures.time_per_token_s.value
    )
    assert figures.new_tokens_per_s.value == pytest.approx(4 / figures.time_per_token_s.value)


def test_a_pair_is_two_samples():
    pairs, samples = ask(algorithm="orpo"), ask(batch_size=8)
    assert value(pairs) == pytest.approx(value(samples), rel=1e-6)
    assert pairs.peak_memory_bytes.value == pytest.approx(samples.peak_memory_bytes.value, rel=1e-6)
    assert pairs.throughput_samples_per_s.value == pytest.approx(samples.throughput_samples_per_s.value / 2)


def test_a_reference_costs_a_forward_pass_and_its_weights():
    plain, dpo = ask(algorithm="orpo"), ask(algorithm="dpo")
    forward = ask(phase="inference", optimizer=None, batch_size=8)
    reference = next(part.time_s for part in dpo.passes if part.name == "reference")
    assert 0.5 * value(forward) < reference < value(forward)  # which has a training loop around it as well
    assert value(dpo) > value(plain)
    weights_bytes = [
        next(part.size_bytes for part in each.memory_parts if part.name == "weights") for each in (plain, dpo)
    ]
    assert weights_bytes[1] - weights_bytes[0] == pytest.approx(2 * plain.num_parameters, rel=0.01)
    assert dpo.peak_memory_bytes.value > plain.peak_memory_bytes.value
    # Adapters switched off are the reference.
    adapted, alone = (
        forerun.predict("llama-3.2-1b", device=DEVICE, lora=16, sequence_length=256, algorithm=name)
        for name in ("dpo", "orpo")
    )
    assert adapted.peak_memory_bytes.value - alone.peak_memory_bytes.value < adapted.num_parameters / 2


def test_engines_write_with_merged_adapters():
    asked = {"device": DEVICE, "sequence_length": 128, "algorithm": "grpo", "lora": 8, "precision": "bf16"}
    few = forerun.predict("llama-3.2-1b", **asked, lora_targets="q_proj,v_proj", lora_dropout=0.1)
    every = forerun.predict("llama-3.2-1b", **asked)
    decode = [next(part.time_s for part in each.passes if part.name == "decode") for each in (few, every)]
    assert decode[0] == pytest.approx(decode[1], rel=0.05)
    assert few.num_trainable_parameters < every.num_trainable_parameters


def test_algorithms_in_the_order_of_their_passes():
    names = {name: [part.name for part in ask(algorithm=name).passes] for name in ("kto", "grpo")}
    assert names["kto"] == ["mismatched answers", "reference", "forward, backward and update"]
    assert names["grpo"] == [
        "prefill",
        "decode",
        "log-probabilities",
        "reference",
        "forward, backward and update",
    ]
    reward, pairs, grpo, ppo = (
        forerun.predict("llama-3.2-1b", device=DEVICE, sequence_length=256, algorithm=name)
        for name in ("reward", "orpo", "grpo", "ppo")
    )
    assert value(reward) < value(pairs)  # no vocabulary behind its head
    assert value(grpo) < value(ppo)
    assert grpo.peak_memory_bytes.value < ppo.peak_memory_bytes.value


@pytest.mark.parametrize("algorithm", ["dpo", "kto", "grpo"])
def test_streams_of_passes_are_sound(algorithm):
    run = Run.of(SMALL, device=DEVICE, **{**LENGTHS, "algorithm": algorithm})
    graph = TracedModels().of(run).graph
    replay_plan(graph.memory)  # every free has its allocation
    assert len(graph.memory.row) in (0, len(graph.memory))


def test_several_devices_and_verbs_agree():
    one = ask(algorithm="grpo")
    curve = forerun.scale(SMALL, device=DEVICE, num_devices=[1, 4], algorithm="grpo", **LENGTHS)
    assert curve.points[0].step_time_s.value == pytest.approx(value(one))
    four = forerun.predict(SMALL, device=f"4x{DEVICE}", algorithm="grpo", **LENGTHS)
    assert curve.points[1].step_time_s.value == pytest.approx(value(four))
    assert value(four) > value(one)


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (SMALL, {"algorithm": "dpo", "phase": "inference"}, "--algorithm cannot be used here"),
        (SMALL, {"new_tokens": 5}, "--answer-lengths and --engine belong to a step that generates"),
        (SMALL, {"phase": "generate", "new_tokens": 256, "sequence_length": 256}, "leave no prompt"),
        (SMALL, {"phase": "generate", "answer_lengths": "uniform:3"}, "lognormal:median=300"),
        (SMALL, {"algorithm": "rlhf"}, "unknown algorithm 'rlhf'; expected one of sft, dpo"),
        ("torchvision:resnet50", {"algorithm": "dpo"}, "reads no tokens"),
        ("torchvision:resnet50", {"phase": "generate"}, "reads no tokens"),
        ("gpt2", {"phase": "generate", "sequence_length": 2000}, "at most 1024 tokens"),
        (SMALL, {"algorithm": "grpo", "batching": "packed"}, "--batching padded or padding-free, got packed"),
        (SMALL, {"algorithm": "grpo", "lengths": "9,60"}, "--answer-lengths instead of --lengths"),
        (SMALL, {"phase": "generate", "batching": "padding-free"}, "--batching padded, got padding-free"),
        (
            "gpt2",
            {"algorithm": "grpo", "sequence_length": 2000, "num_devices": 4, "strategy": "fsdp"},
            "at most 1024",
        ),
    ],
)
def test_what_has_no_meaning_is_refused(model, options, message):
    with pytest.raises(InvalidSetupError, match=message):
        forerun.predict(model, device=DEVICE, **options)


PARALLEL = {"strategy": "fsdp"}, {"parallel": "tp=2,pp=2", "accumulation": 4}, {"parallel": "cp=2,dp=2"}


def on_four(model=SMALL, **options):
    return forerun.predict(model, device=f"4x{DEVICE}", **{**LENGTHS, **options})


@pytest.mark.parametrize("layout", PARALLEL)
@pytest.mark.parametrize("algorithm", ["dpo", "orpo", "kto", "reward", "ppo", "grpo"])
def test_layouts_divide_every_pass(algorithm, layout):
    model = "llama-3.2-1b" if algorithm in ("reward", "ppo") else SMALL  # gpt has no head of one value
    found, plain = on_four(model, algorithm=algorithm, **layout), on_four(model, **layout)
    assert value(found) == pytest.approx(sum(part.time_s for part in found.passes))
    assert value(found) == pytest.approx(sum(part.time_s for part in found.breakdown))
    own = found.passes[-1].time_s
    pairs = 2 if algorithm in ("dpo", "orpo", "reward") else 1
    doubled = value(on_four(model, **{**layout, "batch_size": 4 * pairs}))
    assert own == pytest.approx(doubled, rel=0.3 if algorithm == "reward" else 1e-3)  # which has another head
    if algorithm in ("dpo", "kto", "ppo", "grpo"):
        forward = next(part.time_s for part in found.passes if part.name == "reference")
        assert forward < 0.6 * own * (2 if algorithm == "kto" else 1)
        assert found.peak_memory_bytes.value > plain.peak_memory_bytes.value


def test_engines_that_write_beside_the_training_are_waited_for():
    options = {"algorithm": "grpo", "parallel": "dp=4"}
    turns = on_four(**options)
    few, many = (on_four(**options, generation_on=number) for number in (1, 8))
    writing = [sum(part.time_s for part in found.passes[:2]) for found in (turns, few, many)]
    assert turns.passes[3].name == "moves of states to the host and back"
    training = sum(part.time_s for part in turns.passes[4:])
    assert value(turns) == pytest.approx(
        writing[0] + sum(part.time_s for part in turns.passes[2:4]) + training
    )
    for found, own in ((few, writing[1]), (many, writing[2])):
        assert value(found) == pytest.approx(max(own, training) + found.passes[2].time_s)
    assert writing[2] < writing[1]
    # What wastes least device time is no worse than any number that is named.
    auto, price = on_four(**options, generation_on="auto", price_usd_per_hour=1.0, dataset_size=1600), []
    for number in (1, 2, 4, 8):
        priced = on_four(**options, generation_on=number, price_usd_per_hour=1.0, dataset_size=1600)
        price.append(priced.cost_usd.value)
    assert auto.cost_usd.value <= min(price) * (1 + 1e-9)
    assert "devices more write" in " ".join(auto.notes)


def test_the_longest_answer_sets_the_pace():
    options = {"algorithm": "grpo", "parallel": "dp=4", "batch_size": 4}
    alike = on_four(**options, sequence_length=200, new_tokens=100)
    uneven = on_four(**options, sequence_length=300, new_tokens=200, answer_lengths="mean:100")
    assert alike.passes[1].time_s < uneven.passes[1].time_s <= 2 * alike.passes[1].time_s * 1.001
    assert uneven.generation.cache_bytes == alike.generation.cache_bytes


def test_engines_divide_weights_and_keys():
    one, two = (on_four(algorithm="grpo", parallel="dp=4", generation_tensor=number) for number in (1, 2))
    assert two.passes[2].time_s == one.passes[2].time_s  # every device gathers all weights to hand them over
    assert two.generation.cache_bytes == pytest.approx(
        one.generation.cache_bytes
    )  # half the heads, twice the samples


def test_a_host_handles_each_token_and_exports_each_tensor():
    options = {"algorithm": "grpo", "parallel": "dp=4", "sequence_length": 200, "new_tokens": 100}
    few, many = (on_four(**options, batch_size=number) for number in (4, 8))
    # 99 tokens behind the first of 4 answers more, 0.12 ms each; a pass over more answers is no faster.
    assert many.passes[1].time_s - few.passes[1].time_s > 4 * 99 * 0.12e-3
    assert few.passes[2].time_s > 20 * 0.51e-3
    (state,) = (part.size_bytes for part in few.memory_parts if part.name == "optimizer state")
    assert few.passes[3].time_s == pytest.approx(2 * state / 2.6e9)  # no master weights in pure bf16


def test_verbs_agree_on_a_layout():
    options = {"algorithm": "grpo", "strategy": "fsdp", **LENGTHS}
    curve = forerun.scale(SMALL, device=DEVICE, num_devices=[4], **options)
    assert curve.points[0].step_time_s.value == pytest.approx(value(on_four(**options)))
    plan = forerun.plan(
        SMALL,
        devices=[f"4x{DEVICE}"],
        batch_sizes=[4],
        precisions=["bf16"],
        dataset_size=1600,
        **{k: v for k, v in options.items() if k not in ("batch_size", "precision")},
    )
    assert plan.chosen.step_time_s.value == pytest.approx(value(on_four(**options)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"algorithm": "dpo", "generation_on": 4, "parallel": "dp=4"}, "belong to a step that generates"),
        ({"algorithm": "grpo", "generation_on": "some", "parallel": "dp=4"}, "number of devices from 1"),
        (
            {"algorithm": "grpo", "generation_on": 3, "generation_tensor": 2, "parallel": "dp=4"},
            "cannot be divided into engines",
        ),
        ({"algorithm": "grpo", "generation_tensor": 16, "parallel": "dp=4"}, "does not divide the"),
        ({"algorithm": "grpo", "answer_lengths": "mean:9999", "parallel": "dp=4"}, "must be at most the"),
    ],
)
def test_generation_that_no_engine_offers_is_refused(options, message):
    with pytest.raises(InvalidSetupError, match=message):
        on_four(**options)


def test_engines_are_those_of_any_several_devices():
    options = {"algorithm": "grpo", "generation_on": 4}
    assert on_four(**options) == on_four(**options, parallel="dp=4")
    with pytest.raises(InvalidSetupError, match="need several devices"):
        forerun.predict(SMALL, device=DEVICE, **LENGTHS, **options)
