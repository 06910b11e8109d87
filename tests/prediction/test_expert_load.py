"""Laws of unequal experts: the device with most of their tokens sets the pace of those that divide them."""

import json

import numpy as np
import pytest

import forerun
from forerun.base.errors import ForerunError, InvalidSetupError
from forerun.graph.blocks import blocks_of
from forerun.graph.graph import ExpertLoad
from forerun.graph.shards import Shards, sharded_ops
from forerun.prediction.models import TracedModels, with_experts
from forerun.question.job import read_expert_load
from forerun.question.run import Run

CONFIG = {
    "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "hidden_size": 256, "intermediate_size": 512,
    "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4, "num_local_experts": 8,
    "num_experts_per_tok": 2, "vocab_size": 1024, "max_position_embeddings": 2048,
}  # fmt: skip
SETTINGS = {"sequence_length": 2048, "batch_size": 8, "precision": "bf16", "optimizer": "adamw"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("load") / "config.json"
    path.write_text(json.dumps(CONFIG), encoding="utf-8")
    return f"hf:{path}"


@pytest.fixture(scope="module")
def graph(model):
    return TracedModels().of(Run.of(model, device="h100-sxm", **SETTINGS)).graph


def test_a_number_in_place_of_a_law_is_refused_in_words():
    with pytest.raises(InvalidSetupError, match=r"zipf:1\.2 .* got '1\.3'"):
        read_expert_load(1.3, 64, 6)


def test_no_expert_has_more_tokens_than_there_are():
    for words in ("zipf:0", "zipf:0.5", "zipf:1.2", "zipf:3"):
        parts = read_expert_load(words, 64, 6).parts
        assert np.mean(parts) == pytest.approx(1)
        assert max(parts) <= 64 / 6 * (1 + 1e-6)
        assert list(parts) == sorted(parts, reverse=True)


def test_the_fullest_device_has_at_least_the_mean_and_at_most_the_fullest_expert():
    load = read_expert_load("zipf:1.2", 64, 6)
    fullest = [load.fullest(devices) for devices in (1, 2, 4, 8, 16, 32, 64)]
    assert fullest[0] == 1
    assert fullest == sorted(fullest)
    assert fullest[-1] == pytest.approx(max(load.parts))


def test_only_products_of_experts_grow_on_the_fullest_device(graph):
    even, uneven = graph, with_experts(graph, "zipf:1.2", None)
    factor = uneven.expert_load.fullest(4)
    products = blocks_of(graph).expert_product
    sizes = [sharded_ops(each, blocks_of(each), Shards(expert=4)) for each in (even, uneven)]
    np.testing.assert_allclose(sizes[1].flops[products, 1], factor * sizes[0].flops[products, 1])
    outside = ~blocks_of(graph).is_expert
    np.testing.assert_array_equal(sizes[1].flops[outside], sizes[0].flops[outside])
    same = with_experts(graph, "zipf:0", None)
    ops = sharded_ops(same, blocks_of(same), Shards(expert=4))
    np.testing.assert_array_equal(ops.flops, sizes[0].flops)


def test_dropped_tokens_are_no_work(graph):
    cut = with_experts(graph, "zipf:1.2", 1.0)
    products = blocks_of(graph).expert_product
    kept = np.minimum(read_expert_load("zipf:1.2", 8, 2).parts, 1).mean()
    np.testing.assert_allclose(cut.ops.flops[products, 1], kept * graph.ops.flops[products, 1])
    assert "experts drop" in " ".join(cut.notes)
    assert with_experts(graph, "even", 1.0).ops.flops.sum() == pytest.approx(graph.ops.flops.sum())


def test_every_verb_and_file_says_the_same(model, tmp_path):
    asked = {"device": "8xh100-sxm", "parallel": "dp=8,ep=8", **SETTINGS}
    even, uneven, capped = (
        forerun.predict(model, **asked, **extra)
        for extra in ({}, {"expert_load": "zipf:1.2"}, {"expert_load": "zipf:1.2", "expert_capacity": 1.0})
    )
    assert uneven.step_time_s.value > even.step_time_s.value
    assert capped.step_time_s.value < uneven.step_time_s.value
    assert uneven.peak_memory_bytes.value > even.peak_memory_bytes.value
    assert "the fullest of 8 devices" in " ".join(uneven.notes)
    path = tmp_path / "load.csv"
    parts = read_expert_load("zipf:1.2", 8, 2).parts
    path.write_text("tokens\n" + "\n".join(str(round(1e6 * part)) for part in parts), encoding="utf-8")
    filed = forerun.predict(model, **asked, expert_load=str(path))
    assert filed.step_time_s.value == pytest.approx(uneven.step_time_s.value, rel=1e-5)
    assert forerun.predict(uneven.run).step_time_s == uneven.step_time_s


@pytest.mark.parametrize(
    ("load", "words"),
    [("poisson", "zipf:1.2"), ("zipf:99", "exponent"), ("missing.csv", "cannot read")],
)
def test_a_wrong_law_is_told_what_is_known(graph, load, words):
    with pytest.raises(ForerunError, match=words):
        with_experts(graph, load, None)


def test_a_model_without_experts_is_refused():
    with pytest.raises(ForerunError, match="has none"):
        forerun.predict("gpt:depth=2", device="l4", sequence_length=64, expert_load="zipf:1")


def test_places_are_those_of_the_file():
    assert ExpertLoad((4.0, 0.0, 0.0, 0.0), has_places=True).fullest(2) == 2
    assert ExpertLoad((1.0, 1.0, 1.0, 1.0), has_places=False).fullest(4) == 1
