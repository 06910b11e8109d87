"""Configuration files of training tools as they are published, cut to the keys that say something."""

import pytest

from forerun.base.errors import UsageError
from forerun.question.recipes import read_config, recipe_notes
from forerun.question.run import Run
from forerun.question.setup import Software

AXOLOTL = """
base_model: NousResearch/Meta-Llama-3-8B
load_in_8bit: false
load_in_4bit: true
adapter: qlora
datasets: [{path: tatsu-lab/alpaca, type: alpaca}]
sequence_len: 512
lora_r: 8
lora_alpha: 16
lora_dropout: 0.05
lora_target_modules:
gradient_accumulation_steps: 4
micro_batch_size: 1
optimizer: adamw_torch
bf16: auto
gradient_checkpointing: true
flash_attention: true
neftune_noise_alpha: 5
fsdp: [full_shard, auto_wrap]
fsdp_config: {fsdp_offload_params: true, fsdp_state_dict_type: FULL_STATE_DICT}
"""
TORCHTUNE = """
model: {_component_: torchtune.models.llama3_1.qlora_llama3_1_8b, lora_rank: 16, lora_dropout: 0.0,
  lora_attn_modules: [q_proj, v_proj, output_proj],
  apply_lora_to_mlp: true, apply_lora_to_output: false, lora_alpha: 32}
tokenizer: {_component_: torchtune.models.llama3.llama3_tokenizer, max_seq_len: 2048}
batch_size: 2
optimizer: {_component_: torch.optim.AdamW, fused: true, lr: 1e-4}
gradient_accumulation_steps: 16
compile: false
dtype: bf16
enable_activation_checkpointing: true
"""
LITGPT = """
checkpoint_dir: checkpoints/meta-llama/Meta-Llama-3-8B
precision: bf16-true
quantize: bnb.nf4
lora_r: 32
lora_dropout: 0.05
lora_query: true
lora_key: false
lora_value: true
lora_mlp: false
train: {global_batch_size: 8, micro_batch_size: 2, max_seq_length: 512, epochs: 2}
optimizer: {class_path: torch.optim.AdamW, init_args: {lr: 0.0002}}
"""
TORCHTITAN = """
[model]
name = "llama3"
flavor = "70B"
[optimizer]
name = "AdamW"
[training]
local_batch_size = 8
seq_len = 8192
compile = true
[parallelism]
data_parallel_shard_degree = -1
tensor_parallel_degree = 8
[activation_checkpoint]
mode = "full"
"""
FACTORY = """
model_name_or_path: meta-llama/Meta-Llama-3-8B-Instruct
stage: sft
finetuning_type: lora
lora_rank: 8
lora_target: all
cutoff_len: 2048
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
bf16: true
"""
DEEPSPEED = """{"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}, "bf16": {"enabled": true},
 "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": "auto"}"""
ACCELERATE = """
distributed_type: FSDP
mixed_precision: bf16
num_processes: 8
fsdp_config: {fsdp_version: 2, fsdp_activation_checkpointing: true}
"""


def _written(tmp_path, text, name="run.yml"):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("text", "name", "model", "expected"),
    [
        (AXOLOTL, "a.yml", "llama-3-8b", {"recipe": "axolotl", "quantize": "nf4", "lora": 8, "batch_size": 1,
          "accumulation": 4, "strategy": "fsdp", "offload": "parameters", "sequence_length": 512, "recompute": "full"}),
        (TORCHTUNE, "b.yaml", "llama-3.1-8b", {"quantize": "nf4-dq", "lora": 16, "precision": "bf16",
          "accumulation": 16,
          "lora_targets": "q_proj,v_proj,o_proj,gate_proj,up_proj,down_proj", "sequence_length": 2048}),
        (LITGPT, "c.yaml", "llama-3-8b", {"quantize": "nf4", "lora_targets": "q_proj,v_proj", "accumulation": 4}),
        (TORCHTITAN, "d.toml", "llama-3-70b",
          {"parallel": "tp=8", "batch_size": 8, "compile": True, "recompute": "full"}),
        (FACTORY, "e.yaml", "llama-3-8b", {"lora": 8, "sequence_length": 2048, "accumulation": 8}),
        (DEEPSPEED, "f.json", None,
          {"strategy": "zero3", "offload": "optimizer", "precision": "bf16", "batch_size": 4}),
        (ACCELERATE, "g.yaml", None, {"strategy": "fsdp", "fsdp_version": "fsdp2", "recompute": "full"}),
    ],
)  # fmt: skip
def test_files_are_read_as_they_are(tmp_path, text, name, model, expected):
    found = read_config(_written(tmp_path, text, name))
    assert found.model == model
    assert expected.items() <= found.settings.items()
    assert found.not_understood == (("neftune_noise_alpha: 5",) if name == "a.yml" else ())
    run = Run.of(None if model else "llama-3.2-1b", device="8xa100-sxm4-80gb", config=found.path)
    assert run.batch_size_per_device == expected.get(
        "batch_size", run.setup.batch_size_per_device
    ) * expected.get("accumulation", 1)


def test_keys_without_a_meaning_here_are_named(tmp_path):
    path = _written(tmp_path, AXOLOTL)
    assert "neftune_noise_alpha: 5" in " ".join(recipe_notes(Software(config=path)))
    assert (
        Run.of(None, device="l40s", config=path, sequence_length=64, strategy=None).model.sequence_length
        == 64
    )


def test_adapters_that_are_not_used_say_nothing(tmp_path):
    path = _written(
        tmp_path, AXOLOTL.replace("adapter: qlora", "adapter:").replace("4bit: true", "4bit: false")
    )
    assert Run.of(None, device="l40s", config=path).setup.saving.lora_rank is None


@pytest.mark.parametrize("text", ["hello: 1", "- a list", "a: [unclosed"])
def test_other_files_are_refused(tmp_path, text):
    with pytest.raises(UsageError, match="give"):
        read_config(_written(tmp_path, text))
    with pytest.raises(UsageError, match="expected a model"):
        Run.of(None, device="t4")
