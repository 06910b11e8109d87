"""Public architectures by name, configurations of the hub, and a tokenizer's batch."""

from __future__ import annotations

import json
import re

import pytest

from forerun.base.errors import InvalidSetupError, UnknownModelError
from forerun.question.model import ModelRequest, architectures, find_architecture
from forerun.question.setup import Precision, TrainingSetup
from forerun.tracing.models.sources import build_model
from forerun.tracing.trace import trace

pytest.importorskip("transformers")


@pytest.mark.parametrize(
    "name", ["gpt2", "llama-3.2-1b", "bert-base", "t5-small", "whisper-tiny", "vit-base", "gemma-2b",
     "llama-4-scout", "deepseek-v3.2", "qwen3.5-9b", "qwen3.5-27b", "qwen3.5-35b-a3b", "qwen3.5-397b-a17b",
     "moonlight-16b-a3b", "qwen3-vl-30b-a3b", "exaone-4.0-1.2b", "ministral-3-3b", "granite-4.0-h-1b"],
)  # fmt: skip
def test_networks_have_the_published_number_of_parameters(name):
    module = build_model(name).module
    assert sum(p.numel() for p in module.parameters()) == architectures()[name].num_parameters


LLAMA_4 = {
    "model_type": "llama4_text", "architectures": ["Llama4ForCausalLM"], "hidden_size": 64, "head_dim": 16,
    "intermediate_size": 64, "intermediate_size_mlp": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 100, "num_experts_per_tok": 1,
}  # fmt: skip
DBRX = {
    "model_type": "dbrx", "architectures": ["DbrxForCausalLM"], "d_model": 64, "n_heads": 4, "n_layers": 2,
    "max_seq_len": 128, "vocab_size": 100, "attn_config": {"clip_qkv": 8, "kv_n_heads": 2, "rope_theta": 5e5},
}  # fmt: skip
DBRX_EXPERTS = {"hidden_size": 64, "ffn_hidden_size": 32, "moe_top_k": 2}


@pytest.mark.parametrize(
    "of_experts",
    [
        lambda n: {**LLAMA_4, "num_local_experts": n},
        lambda n: {**DBRX, "ffn_config": {**DBRX_EXPERTS, "moe_num_experts": n}},
    ],
)
def test_experts_that_a_token_chooses_are_computed(of_experts, tmp_path):
    flops = []
    for experts in (2, 8):
        path = tmp_path / f"{experts}.json"
        path.write_text(json.dumps(of_experts(experts)), encoding="utf-8")
        request = ModelRequest(model=f"hf:{path}", sequence_length=32)
        setup = TrainingSetup(batch_size_per_device=2, precision=Precision.BF16)
        flops.append(trace(request, setup).total_flops(2))
    # Eight experts beside two cost no more than their column in the router.
    assert flops[1] == pytest.approx(flops[0], rel=0.05)


def test_every_entry_has_a_source_and_its_own_names():
    words = [word.lower() for item in architectures().values() for word in {item.name, item.hub}]
    assert all(item.source and item.config and item.num_parameters for item in architectures().values())
    assert all(find_architecture(word) is not None for word in words)
    assert find_architecture("deepseek-ai/DeepSeek-V3.2").name == "deepseek-v3.2"
    assert find_architecture("hf:META-LLAMA/llama-3.1-8b") is find_architecture("llama-3.1-8b")


@pytest.mark.parametrize(
    ("hub", "name"),
    [
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", "qwen3-30b-a3b"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b-v0.3"),
        ("unsloth/Meta-Llama-3.1-8B-Instruct-bnb-4bit", "llama-3.1-8b"),
        ("meta-llama/Llama-2-7b-chat-hf", "llama-2-7b"),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", "qwen2.5-7b"),
        ("llama3_1_8b", "llama-3.1-8b"),
        ("gemma-31b", None),
        ("me/llama-3.1-8b", None),
    ],
)
def test_models_trained_further_have_the_architecture_of_their_base(hub, name):
    assert getattr(find_architecture(hub), "name", None) == name


def test_an_unknown_name_lists_near_ones():
    with pytest.raises(UnknownModelError, match=r"did you mean .*llama-3.1-8b"):
        build_model("llama-3.1-8")


def test_the_hub_is_not_asked_where_that_is_forbidden(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path))
    with pytest.raises(UnknownModelError, match=re.escape("give its config.json as hf:FILE")):
        build_model("hf:some-org/some-model")


def test_a_kept_configuration_needs_no_hub(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path))
    (tmp_path / "configurations").mkdir()
    config = {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_embd": 64,
        "n_layer": 1,
        "n_head": 2,
    }
    (tmp_path / "configurations" / "some-org--tiny.json").write_text(json.dumps(config))
    assert build_model("hf:some-org/Tiny", sequence_length=8).tokens_per_sample == 8


def test_a_sequence_longer_than_the_positions_is_refused():
    with pytest.raises(InvalidSetupError, match="give --sequence-length 1024 or less"):
        build_model("gpt2", sequence_length=1025)


TOKENIZED = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM

def made():
    config = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2)
    words = torch.zeros((3, 32), dtype=torch.int64)
    return LlamaForCausalLM(config), {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": words}
"""


def test_a_batch_of_a_tokenizer_is_taken_without_padding(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(TOKENIZED)
    setup = TrainingSetup(precision=Precision.BF16, batch_size_per_device=2)
    graph = trace(ModelRequest(model=f"{path}:made"), setup)
    assert graph.tokens_per_sample == 32
    assert any("without padding" in note for note in graph.notes)


PARTS = """
import torch
from torch import nn

class Encoder(nn.Module):
    def __init__(self):
        from transformers import BertConfig, BertModel
        super().__init__()
        config = BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64)
        self.encoder = BertModel(config)

    def forward(self, input_ids, attention_mask):
        words = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        return (words * attention_mask[..., None]).sum(1) / attention_mask.sum(1, keepdim=True)

def encoder():
    words = torch.zeros((3, 32), dtype=torch.int64)
    return Encoder(), {"input_ids": words, "attention_mask": torch.ones_like(words)}

class Graphs(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.add_self_loops = nn.Linear(8, 4), True

    def forward(self, x, edge_index):
        edge_index, _ = layers.remove_self_loops(edge_index)
        (source, target), _ = layers.add_remaining_self_loops(edge_index, None, 1.0, len(x))
        x = self.linear(x)
        return torch.zeros_like(x).index_add(0, target, x[source])

def graphs():
    return Graphs(), {"x": torch.zeros(6, 8), "edge_index": torch.zeros((2, 10), dtype=torch.int64)}
"""


GEOMETRIC = """
import torch

def remove_self_loops(edge_index, edge_attr=None):
    return edge_index[:, edge_index[0] != edge_index[1]], edge_attr

def add_self_loops(edge_index, edge_attr=None, fill_value=None, num_nodes=None):
    loops = torch.arange(num_nodes, device=edge_index.device).expand(2, -1)
    return torch.cat([edge_index, loops], 1), edge_attr

def add_remaining_self_loops(edge_index, *more):
    return add_self_loops(remove_self_loops(edge_index)[0], *more)
"""


def test_a_model_of_transformers_inside_another_has_no_padding(tmp_path):
    (tmp_path / "net.py").write_text(PARTS)
    graph = trace(
        ModelRequest(model=f"{tmp_path / 'net.py'}:encoder"), TrainingSetup(batch_size_per_device=2)
    )
    assert any("without padding" in note for note in graph.notes)


def test_layers_over_graphs_find_no_loops_in_the_edges(tmp_path):
    """Functions of PyTorch Geometric, under its names, look for loops by the values of the edges."""
    for name, text in {
        "__init__": "",
        "utils": GEOMETRIC,
        "nn": "from torch_geometric.utils import *",
    }.items():
        (tmp_path / "torch_geometric").mkdir(exist_ok=True)
        (tmp_path / "torch_geometric" / f"{name}.py").write_text(text)
    (tmp_path / "net.py").write_text(f"from torch_geometric import nn as layers\n{PARTS}")
    graph = trace(ModelRequest(model=f"{tmp_path / 'net.py'}:graphs"), TrainingSetup(batch_size_per_device=6))
    assert any("from a node to itself are not known" in note for note in graph.notes)
