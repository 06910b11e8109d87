"""Configuration files of training tools as they are published, cut to the keys that say something."""

import json

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
PPO = """
policy_model: {_component_: torchtune.models.mistral.mistral_7b}
batch_size: 64
ppo_epochs: 2
ppo_batch_size: 16
gradient_accumulation_steps: 1
max_generated_tokens: 58
loss: {_component_: torchtune.rlhf.loss.PPOLoss}
"""
LOSS_ALONE = """
[model]
name = "llama3"
flavor = "405B"
[training]
local_batch_size = 2
[compile]
enable = true
components = ["loss"]
"""
AUTOMODEL = """
step_scheduler: {global_batch_size: 128, local_batch_size: 4, max_steps: 100}
model: {_target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained,
  pretrained_model_name_or_path: Qwen/Qwen2.5-7B}
peft: {_target_: nemo_automodel.components._peft.lora.PeftConfig, match_all_linear: true, dim: 8}
distributed: {strategy: fsdp2, dp_size: none, tp_size: 2, cp_size: 1}
packed_sequence: {packed_sequence_size: 0}
optimizer: {_target_: torch.optim.Adam, lr: 1.0e-5}
"""
NEMO_RL = """
grpo: {num_prompts_per_step: 32, num_generations_per_prompt: 16}
policy:
  model_name: Qwen/Qwen2.5-1.5B
  train_global_batch_size: 512
  train_micro_batch_size: 4
  max_total_sequence_length: 512
  precision: bfloat16
  dtensor_cfg: {enabled: true, tensor_parallel_size: 2, activation_checkpointing: true}
  megatron_cfg: {enabled: false, tensor_model_parallel_size: 8}
  sequence_packing: {enabled: true}
  generation: {backend: vllm, vllm_cfg: {tensor_parallel_size: 4}}
"""
VERL = """
data: {max_prompt_length: 512, max_response_length: 1024, train_batch_size: 256}
actor_rollout_ref:
  model: {path: ~/models/Qwen2.5-3B-Instruct, use_remove_padding: true, enable_gradient_checkpointing: true}
  actor: {strategy: fsdp2, use_dynamic_bsz: true, ppo_max_token_len_per_gpu: 6144, ulysses_sequence_parallel_size: 2}
  ref: {ulysses_sequence_parallel_size: "${actor_rollout_ref.actor.ulysses_sequence_parallel_size}"}
  rollout: {name: vllm, n: 4, response_length: "${data.max_response_length}"}
algorithm: {adv_estimator: grpo}
"""
DEEPSPEED = """{"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}, "bf16": {"enabled": true},
 "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": "auto"}"""
ACCELERATE = """
distributed_type: FSDP
mixed_precision: bf16
num_processes: 8
fsdp_config: {fsdp_version: 2, fsdp_activation_checkpointing: true}
"""
PARALLEL = """
base_model: Qwen/Qwen3-30B-A3B-Instruct-2507
plugins: [axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin]
dp_shard_size: 2
context_parallel_size: 2
tensor_parallel_size: 2
sequence_len: 8192
attn_implementation: flash_attention_2
micro_batch_size: 1
optimizer: adamw_torch_8bit
activation_offloading: true
num_epochs: 2
rl: dpo
deepspeed: deepspeed_configs/zero3_bf16_cpuoffload_all.json
"""
GRPO = """
model: {_component_: torchtune.models.qwen2_5.qwen2_5_3b}
tokenizer: {_component_: torchtune.models.qwen2_5.qwen2_5_tokenizer, max_seq_len: 1024}
batch_size: 1
grpo_samples: 16
max_generated_tokens: 512
loss: {_component_: torchtune.dev.grpo.loss.GRPOSimpleLoss, kl_coeff: 0.01}
dtype: bf16
"""
TRL = """
model_name_or_path: HuggingFaceTB/SmolLM3-3B-checkpoints
torch_dtype: bfloat16
attn_implementation: flash_attention_2
gradient_accumulation_steps: 2
gradient_checkpointing: true
max_length: 65536
per_device_train_batch_size: 1
use_liger_kernel: true
lora_r: 16
num_train_epochs: 5
"""
PREFERENCES = """
model_name_or_path: alignment-handbook/zephyr-7b-sft-qlora
use_peft: true
load_in_4bit: true
lora_r: 16
lora_target_modules: [q_proj, k_proj]
beta: 0.01
max_length: 1024
max_prompt_length: 512
optim: paged_adamw_32bit
per_device_train_batch_size: 4
deepspeed: ds_z3_offload_config.json
"""
PRETRAIN = """
model_name: Llama-3.2-1B
train: {global_batch_size: 512, micro_batch_size: 4, max_seq_length: 2048, max_tokens: 3000000000}
devices: auto
"""
REPLICAS = """
[model]
name = "deepseek_v3"
flavor = "16B"
[training]
local_batch_size = 2
global_batch_size = 64
dtype = "bfloat16"
mixed_precision_reduce = "bfloat16"
[parallelism]
data_parallel_replicate_degree = 2
data_parallel_shard_degree = 4
pipeline_parallel_degree = 1
"""
FACTORY_SHELL = """
M=/models/Qwen3-8B
DEVICES=${DEVICES:-4} deepspeed --num_gpus 8 src/train_bash.py --deepspeed ds_stage2.json \\
  --model_name_or_path ${M} --finetuning_type lora --lora_target q_proj,v_proj --stage sft --cutoff_len 2048 \\
  --per_device_train_batch_size $DEVICES --gradient_accumulation_steps 2 --learning_rate 1e-5 --bf16  # as it was
"""
OPENRLHF = """
ray job submit --runtime-env-json='{"working_dir": "/a"}' -- python3 -m openrlhf.cli.train_ppo_ray \\
   --actor_num_gpus_per_node 8 --pretrain meta-llama/Meta-Llama-3-8B --micro_train_batch_size 4 \\
   --train_batch_size 128 --prompt_max_len 1024 --generate_max_len 512 --zero_stage 3 --bf16 --save_steps -1 \\
   --advantage_estimator rloo \\
   --adam_offload --gradient_checkpointing --lora_rank 0
"""
VERL_SHELL = """
python -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_batch_size=64 data.max_prompt_length=512 \\
  data.max_response_length=1024 actor_rollout_ref.model.path="/w/Qwen3-14B" actor_rollout_ref.model.lora_rank=32 \\
  actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 actor_rollout_ref.rollout.n=5 \\
  ++actor_rollout_ref.actor.strategy=megatron actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2
"""
HSDP = """
base_model: meta-llama/Llama-3.1-8B
dp_shard_size: 4
dp_replicate_size: 2
fsdp_version: 2
fsdp: [auto_wrap, full_shard]
micro_batch_size: 2
batch_size: 8
"""


def _written(tmp_path, text, name="run.yml"):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("text", "name", "model", "expected"),
    [
        (AXOLOTL, "a.yml", "llama-3-8b", {"recipe": "axolotl", "quantize": "nf4-dq", "lora": 8, "batch_size": 1,
          "accumulation": 4, "strategy": "fsdp", "offload": "parameters", "sequence_length": 512, "recompute": "full"}),
        (TORCHTUNE, "b.yaml", "llama-3.1-8b", {"quantize": "nf4-dq", "lora": 16, "precision": "bf16",
          "accumulation": 16,
          "lora_targets": "q_proj,v_proj,o_proj,gate_proj,up_proj,down_proj", "sequence_length": 2048}),
        (LITGPT, "c.yaml", "llama-3-8b", {"quantize": "nf4", "lora_targets": "q_proj,v_proj"}),
        (TORCHTITAN, "d.toml", "llama-3-70b",
          {"parallel": "tp=8", "batch_size": 8, "compile": True, "recompute": "full"}),
        (FACTORY, "e.yaml", "llama-3-8b", {"lora": 8, "sequence_length": 2048, "accumulation": 8}),
        (FACTORY.replace("lora_rank: 8", ""), "e.yaml", "llama-3-8b", {"lora": 8}),
        (FACTORY.replace("lora_rank: 8", "lora_rank: 64"), "e.yaml", "llama-3-8b", {"lora": 64}),
        (DEEPSPEED, "f.json", None,
          {"strategy": "zero3", "offload": "optimizer", "precision": "bf16", "batch_size": 4}),
        ('{"zero_optimization": {"stage": 2}, "tensor_parallel": {"autotp_size": 4}}', "f.json", None,
          {"strategy": "zero2", "parallel": "tp=4", "sequence_parallel": False}),
        (ACCELERATE, "g.yaml", None, {"strategy": "fsdp", "fsdp_version": "fsdp2", "recompute": "full"}),
        (PARALLEL, "h.yaml", "qwen3-30b-a3b", {"strategy": "zero3", "offload": "parameters", "parallel": "cp=2,tp=2",
          "loss": "chunked", "optimizer": "adamw-8bit", "attention_kernel": "flash-2", "algorithm": "dpo"}),
        (GRPO, "i.yaml", "qwen2.5-3b",
          {"algorithm": "grpo", "batch_size": 16, "sequence_length": 1536, "new_tokens": 512}),
        (TRL, "j.yaml", "smollm3-3b", {"recipe": "trl", "precision": "bf16", "master_weights": "bf16",
          "fused_kernels": "liger", "sequence_length": 65536, "accumulation": 2, "recompute": "full"}),
        (PREFERENCES, "k.yaml", "mistral-7b", {"algorithm": "dpo", "lora": 16, "lora_targets": "q_proj,k_proj",
          "quantize": "nf4", "optimizer": "adamw", "strategy": "zero3", "offload": "parameters"}),
        (PREFERENCES + "output_dir: data/zephyr-orpo-qlora", "k.yaml", "mistral-7b", {"algorithm": "orpo"}),
        (TRL + "num_generations: 8\nbeta: 0.04\n", "j.yaml", "smollm3-3b", {"algorithm": "grpo", "reference": True}),
        (TRL + "num_generations: 8\nbeta: 0.0\n", "j.yaml", "smollm3-3b", {"algorithm": "grpo", "reference": False}),
        (PRETRAIN, "l.yaml", "llama-3.2-1b", {"batch_size": 4, "sequence_length": 2048, "tokens": 3_000_000_000,
          "compile": True, "recompute": "none"}),
        (REPLICAS.replace('flavor = "16B"', 'flavor = "own"\nhf_assets_path = "./assets/hf/Qwen3-30B-A3B"'), "m.toml",
          "qwen3-30b-a3b", {"strategy": "hsdp"}),
        (REPLICAS, "m.toml", "deepseek-v2-lite", {"strategy": "hsdp", "shard_size": 4, "precision": "bf16",
          "reduce_precision": "half"}),
        (PPO, "n.yaml", "mistral-7b", {"algorithm": "ppo", "batch_size": 16, "accumulation": 4, "new_tokens": 58}),
        (LOSS_ALONE, "o.toml", "llama-3.1-405b", {"recipe": "torchtitan", "batch_size": 2}),
        (LOSS_ALONE.replace('"loss"', '"model"'), "p.toml", "llama-3.1-405b", {"compile": True, "compile_loss": False}),
        (AUTOMODEL, "p.yaml", "qwen2.5-7b", {"strategy": "fsdp", "precision": "bf16", "lora": 8,
          "master_weights": "bf16", "parallel": "tp=2", "optimizer": "adam"}),
        (NEMO_RL, "q.yaml", "qwen2.5-1.5b", {"algorithm": "grpo", "strategy": "fsdp", "precision": "amp-bf16",
          "parallel": "tp=2", "recompute": "full", "generation_tensor": 4, "batching": "padding-free"}),
        (VERL, "r.yaml", "qwen2.5-3b", {"algorithm": "grpo", "sequence_length": 1536, "new_tokens": 1024,
          "batch_size": 8, "batching": "padding-free", "context_parallel": "ulysses", "recompute": "full",
          "reference": False}),
        (FACTORY_SHELL, "s.sh", "qwen3-8b", {"lora_targets": "q_proj,v_proj", "strategy": "zero2", "batch_size": 4,
          "accumulation": 2, "sequence_length": 2048}),
        (OPENRLHF, "t.sh", "llama-3-8b", {"algorithm": "grpo", "strategy": "zero3", "offload": "optimizer",
          "batch_size": 4, "sequence_length": 1536, "master_weights": "fp32", "recompute": "full"}),
        (VERL_SHELL, "u.sh", "qwen3-14b", {"recipe": "megatron", "parallel": "tp=2", "lora": 32, "batch_size": 4}),
        (HSDP, "v.yml", "llama-3.1-8b", {"strategy": "hsdp", "shard_size": 4, "accumulation": 4}),
        (TORCHTUNE.replace("llama3_1.qlora_llama3_1_8b", "phi4.lora_phi4_14b"), "w.yaml", "phi-4", {"lora": 16}),
    ],
)  # fmt: skip
def test_files_are_read_as_they_are(tmp_path, text, name, model, expected):
    found = read_config(_written(tmp_path, text, name))
    assert found.model == model
    assert expected.items() <= found.settings.items()
    assert name != "o.toml" or "compile" not in found.settings  # it compiles the loss alone
    strange = {
        "a.yml": ("neftune_noise_alpha: 5",),
        "h.yaml": ("activation_offloading: true",),
        "n.yaml": ("ppo_epochs: 2",),
    }
    assert found.not_understood == strange.get(name, ())
    number = 1 if name == "c.yaml" else 8  # litgpt quantizes on one device only
    run = Run.of(None if model else "llama-3.2-1b", device=f"{number}xa100-sxm4-80gb", config=found.path)
    assert run.setup.batch_size_per_device == expected.get("batch_size", run.setup.batch_size_per_device)
    assert run.sharing.num_accumulation_steps == found.settings_on(number, {}).get("accumulation", 1)


def test_samples_of_an_update_are_those_of_all_devices(tmp_path):
    path = _written(tmp_path, PRETRAIN)
    for device, steps in (("a100-sxm4-40gb", 128), ("8xa100-sxm4-40gb", 16)):
        assert Run.of(None, device=device, config=path).sharing.num_accumulation_steps == steps
    divided = Run.of(None, device="8xa100-sxm4-40gb", config=path, parallel="tp=4", batch_size=8)
    assert divided.sharing.num_accumulation_steps == 512 // (8 * 2)


def test_epochs_and_tokens_need_what_they_count(tmp_path):
    path = _written(tmp_path, TRL)
    assert Run.of(None, device="h100-sxm", config=path).job is None
    assert Run.of(None, device="h100-sxm", config=path, dataset_size=1000).job.num_epochs == 5
    assert Run.of(None, device="h100-sxm", config=_written(tmp_path, PRETRAIN, "p.yaml")).job is not None


def test_a_file_that_is_named_is_read_as_well(tmp_path):
    (tmp_path / "ds_z3_offload_config.json").write_text(
        '{"zero_optimization": {"stage": 2}, "bf16": {"enabled": "auto"}, "aio": {}}', encoding="utf-8"
    )
    found = read_config(_written(tmp_path, PREFERENCES))
    assert (found.settings["strategy"], found.settings["recipe"], found.not_understood) == (
        "zero2",
        "trl",
        (),
    )
    assert "offload" not in found.settings


def test_several_files_are_one_question(tmp_path):
    launcher = _written(tmp_path, ACCELERATE, "fsdp2.yaml")
    found = read_config(f"{_written(tmp_path, TRL)},{launcher}")
    assert (found.tool, found.model) == ("trl and accelerate", "smollm3-3b")
    # Under mixed precision accelerate's FSDP trains fp32 weights, whatever format they were loaded in.
    assert (found.settings["precision"], found.settings["master_weights"]) == ("amp-bf16", None)
    assert (found.settings["strategy"], found.settings["fsdp_version"]) == ("fsdp", "fsdp2")
    with pytest.raises(UsageError, match=r"files that agree, got strategy zero3 .* fsdp"):
        read_config(f"{_written(tmp_path, PREFERENCES)},{launcher}")


def test_deepspeed_has_fp32_weights_beside_a_model_in_half_precision(tmp_path):
    zero = _written(tmp_path, DEEPSPEED, "zero.json")
    found = read_config(f"{_written(tmp_path, TRL.replace('batch_size: 1', 'batch_size: 4'))},{zero}")
    assert (found.settings["precision"], found.settings["master_weights"]) == ("bf16", "fp32")
    config = "distributed_type: DEEPSPEED\nmixed_precision: bf16\ndeepspeed_config: {zero_stage: 3, "
    found = read_config(_written(tmp_path, config + "offload_param_device: cpu}"))
    assert (found.settings["precision"], found.settings["master_weights"]) == ("bf16", "fp32")
    # No layout here holds weights in the host's memory and the optimizer's state in the device's.
    assert "offload" not in found.settings
    assert found.not_understood == ("deepspeed_config.offload_param_device: cpu",)
    found = read_config(
        _written(tmp_path, config + "offload_param_device: cpu, offload_optimizer_device: cpu}")
    )
    assert found.settings["offload"] == "parameters"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (FACTORY.replace("finetuning_type: lora", "finetuning_type: oft"), "finetuning_type: oft.*expected lora, full"),
        (FACTORY + "use_galore: true", "use_galore: true"),
        (AXOLOTL.replace("adapter: qlora", "adapter: ia3"), "adapter: ia3.*expected lora, qlora"),
        (PRETRAIN + "model_config: {n_layer: 3}", "model_config.n_layer: 3"),
        (LITGPT + "longlora: {use_longlora: true}", "longlora.use_longlora"),
        (VERL.replace("grpo", "remax"), "adv_estimator: remax.*expected gae, grpo"),
        (TORCHTUNE + "teacher_model: {_component_: torchtune.models.llama3.llama3_8b}", "teacher_model"),
    ],
)  # fmt: skip
def test_what_decides_a_step_and_is_not_known_is_refused(tmp_path, text, line):
    with pytest.raises(UsageError, match=line):
        read_config(_written(tmp_path, text))


def test_what_a_tool_refuses_on_several_devices_is_refused(tmp_path):
    path = _written(tmp_path, LITGPT)
    assert Run.of(None, device="l4", config=path).setup.saving.quantize == "nf4"
    with pytest.raises(UsageError, match="litgpt quantizes weights on one device only, got 2"):
        Run.of(None, device="2xl4", config=path)


def test_deepspeed_without_a_precision_takes_that_of_the_question(tmp_path):
    path = _written(tmp_path, DEEPSPEED.replace("true", '"auto"'), "zero.json")
    asked = {"device": "8xa100-sxm4-80gb", "config": path}
    weights = [
        Run.of("llama-3.2-1b", **asked, **more).setup.saving.master_weights
        for more in ({}, {"precision": "fp16"}, {"precision": "fp32"}, {"lora": 8})
    ]
    assert weights == ["fp32", "fp32", None, None]


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


def test_a_file_may_stand_on_another_one(tmp_path):
    base = {
        "policy": {"train_micro_batch_size": 4, "max_total_sequence_length": 512},
        "grpo": {"num_prompts_per_step": 8},
    }
    own = {
        "defaults": "base.yaml",
        "grpo": {"num_generations_per_prompt": 16},
        "policy": {"model_name": "gpt2"},
    }
    (tmp_path / "own.yaml").write_text(json.dumps(own))
    with pytest.raises(UsageError, match=r"defaults in 'base.yaml', which is not there; put that file there"):
        read_config(tmp_path / "own.yaml")
    (tmp_path / "base.yaml").write_text(json.dumps(base))
    found = read_config(tmp_path / "own.yaml")
    assert (found.settings["batch_size"], found.settings["sequence_length"]) == (4, 512)
    assert found.global_batch == 8 * 16
