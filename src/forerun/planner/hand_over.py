"""The chosen layout in the words of training frameworks: commands, and files that they read."""

from __future__ import annotations

import json
from collections.abc import Callable

from forerun.errors import InvalidSetupError
from forerun.run.parallel import PipelineSchedule, StageSplit
from forerun.run.run import Run
from forerun.run.setup import Precision
from forerun.run.sharing import FsdpVersion, Strategy

__all__ = ["FRAMEWORKS", "hand_over"]

_SCHEDULES = {
    PipelineSchedule.GPIPE: "GPipe",
    PipelineSchedule.ONE_FORWARD_ONE_BACKWARD: "1F1B",
    PipelineSchedule.INTERLEAVED: "Interleaved1F1B",
    PipelineSchedule.ZERO_BUBBLE: "ZBVZeroBubble",
}


def hand_over(run: Run, framework: str) -> str:
    """Arguments or a configuration file with which a framework trains in the layout of a run.

    Args:
        run: The run.
        framework: torchrun, fsdp (Python), accelerate (YAML), deepspeed (JSON), torchtitan (TOML) or megatron
            (arguments).

    Raises:
        InvalidSetupError: The framework is not known, or has no such layout.
    """
    if framework not in FRAMEWORKS:
        raise InvalidSetupError(f"unknown framework '{framework}'; expected one of {', '.join(FRAMEWORKS)}")
    return FRAMEWORKS[framework](run)


def _torchrun(run: Run) -> str:
    cluster = run.cluster
    several = (
        " --rdzv-backend=c10d --rdzv-endpoint=$HEAD_NODE:29500" if cluster.num_nodes > 1 else " --standalone"
    )
    return f"torchrun --nnodes={cluster.num_nodes} --nproc-per-node={cluster.num_devices_per_node}{several} train.py\n"


def _only_data(run: Run, framework: str, instead: str) -> None:
    layout = run.layout
    if layout.tensor * layout.pipeline * layout.context * layout.expert > 1:
        raise InvalidSetupError(
            f"{framework} divides samples and weights only, but the layout is {layout.text}; take {instead}"
        )


def _half(run: Run) -> str | None:
    names = {Precision.AMP: "float16", Precision.FP16: "float16", Precision.FP32: None, Precision.TF32: None}
    return names.get(run.setup.precision, "bfloat16")


def _fsdp(run: Run) -> str:
    _only_data(run, "FSDP by itself", "torchtitan")
    sharing, half = run.sharing, _half(run)
    _needs_shards(run, "fsdp")
    mesh = "(world_size,), mesh_dim_names=('shard',)"
    if sharing.strategy is Strategy.HSDP:
        size = sharing.shard_size or run.cluster.num_devices_per_node
        mesh = f"(world_size // {size}, {size}), mesh_dim_names=('replicate', 'shard')"
    reduce = "torch.float32" if not sharing.reduce_half else f"torch.{half}"
    policy = (
        ""
        if half is None
        else f", mp_policy=MixedPrecisionPolicy(param_dtype=torch.{half}, reduce_dtype={reduce})"
    )
    return (
        "import torch\n"
        "from torch.distributed import get_world_size\n"
        "from torch.distributed.device_mesh import init_device_mesh\n"
        "from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard\n\n"
        "world_size = get_world_size()\n"
        f"mesh = init_device_mesh('cuda', {mesh})\n"
        f"options = dict(mesh=mesh, reshard_after_forward={sharing.reshard}{policy})\n"
        "for block in blocks:  # the repeated blocks of the model\n"
        "    fully_shard(block, **options)\n"
        "fully_shard(model, **options)\n"
    )


def _needs_shards(run: Run, framework: str) -> None:
    if run.sharing.strategy.stage != 3:
        raise InvalidSetupError(
            f"{framework} divides the weights, but the strategy is {run.sharing.strategy}; take torchrun or deepspeed"
        )


def _accelerate(run: Run) -> str:
    _only_data(run, "accelerate", "torchtitan or megatron")
    cluster, sharing = run.cluster, run.sharing
    half = {"bfloat16": "bf16", "float16": "fp16"}.get(_half(run) or "", "no")
    lines = [
        "compute_environment: LOCAL_MACHINE",
        f"distributed_type: {'FSDP' if sharing.strategy.stage == 3 else 'MULTI_GPU'}",
        f"mixed_precision: '{half}'",
        f"num_machines: {cluster.num_nodes}",
        f"num_processes: {cluster.num_devices}",
    ]
    if sharing.strategy.stage == 3:
        lines += [
            "fsdp_config:",
            f"  fsdp_version: {1 if sharing.fsdp_version is FsdpVersion.FSDP1 else 2}",
            "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP",
            f"  fsdp_reshard_after_forward: {str(sharing.reshard).lower()}",
            f"  fsdp_activation_checkpointing: {str(run.setup.saving.recompute == 'full').lower()}",
        ]
    elif sharing.strategy.stage:
        raise InvalidSetupError(f"accelerate leaves {sharing.strategy} to DeepSpeed; take deepspeed")
    return "\n".join(lines) + "\n"


def _deepspeed(run: Run) -> str:
    layout, sharing = run.layout, run.sharing
    if layout.tensor * layout.pipeline * layout.expert > 1:
        raise InvalidSetupError(
            f"a DeepSpeed file holds no tp or pp, but the layout is {layout.text}; take megatron"
        )
    if layout.context > 1:
        raise InvalidSetupError(
            f"a DeepSpeed file holds no cp, but the layout is {layout.text}; take torchtitan"
        )
    half = _half(run)
    found: dict[str, object] = {
        "train_batch_size": run.batch_size_global,
        "train_micro_batch_size_per_gpu": run.setup.batch_size_per_device,
        "gradient_accumulation_steps": sharing.num_accumulation_steps,
        "zero_optimization": {
            "stage": sharing.strategy.stage,
            "overlap_comm": True,
            "contiguous_gradients": True,
        },
        "bf16": {"enabled": half == "bfloat16"},
        "fp16": {"enabled": half == "float16"},
        "gradient_clipping": 1.0,
    }
    if sharing.strategy is Strategy.HSDP:
        size = sharing.shard_size or run.cluster.num_devices_per_node
        found["zero_optimization"] = {"stage": 3, "overlap_comm": True, "zero_hpz_partition_size": size}
    return json.dumps(found, indent=2) + "\n"


def _torchtitan(run: Run) -> str:
    layout, sharing = run.layout, run.sharing
    shards = layout.data if sharing.strategy.stage else 1
    if sharing.strategy is Strategy.HSDP:
        shards = sharing.shard_size or max(1, run.cluster.num_devices_per_node // layout.tensor)
    mode = {"none": "none", "selective": "selective", "full": "full"}.get(
        run.setup.saving.recompute, "selective"
    )
    length = run.model.sequence_length
    # A pipeline of torchtitan divides its local batch into micro-batches; otherwise steps are accumulated.
    own = run.batch_size_per_device if layout.pipeline > 1 else run.setup.batch_size_per_device
    lines = [
        "[training]",
        f"local_batch_size = {own}",
        f"global_batch_size = {run.batch_size_global}",
        *([f"seq_len = {length}"] if length else []),
        f'mixed_precision_param = "{_half(run) or "float32"}"',
        f'mixed_precision_reduce = "{_half(run) if sharing.reduce_half and _half(run) else "float32"}"',
        "",
        "[parallelism]",
        f"data_parallel_replicate_degree = {layout.data // shards}",
        f"data_parallel_shard_degree = {shards}",
        f'fsdp_reshard_after_forward = "{"default" if sharing.reshard else "never"}"',
        f"tensor_parallel_degree = {layout.tensor}",
        f"context_parallel_degree = {layout.context}",
        *([f"expert_parallel_degree = {layout.expert}"] if layout.expert > 1 else []),
        f"pipeline_parallel_degree = {layout.pipeline}",
        f'pipeline_parallel_schedule = "{_SCHEDULES[layout.schedule]}"',
        f"pipeline_parallel_microbatch_size = {run.setup.batch_size_per_device}",
        "",
        "[activation_checkpoint]",
        f'mode = "{mode}"',
    ]
    return "\n".join(lines) + "\n"


def _megatron(run: Run) -> str:
    layout, sharing = run.layout, run.sharing
    words = [
        f"--tensor-model-parallel-size {layout.tensor}",
        f"--pipeline-model-parallel-size {layout.pipeline}",
        f"--context-parallel-size {layout.context}",
        f"--micro-batch-size {run.setup.batch_size_per_device}",
        f"--global-batch-size {run.batch_size_global}",
    ]
    if layout.schedule is PipelineSchedule.ZERO_BUBBLE or layout.schedule is PipelineSchedule.GPIPE:
        raise InvalidSetupError(f"Megatron-LM has no schedule {layout.schedule}; take torchtitan")
    if layout.expert > 1:
        words.append(f"--expert-model-parallel-size {layout.expert}")
    if layout.virtual_stages > 1:
        words.append(f"--num-virtual-stages-per-pipeline-rank {layout.virtual_stages}")
    if layout.tensor > 1 and layout.sequence_parallel:
        words.append("--sequence-parallel")
    if sharing.strategy.stage in (1, 2):
        words.append("--use-distributed-optimizer --overlap-grad-reduce")
    elif sharing.strategy.stage == 3:
        is_own = sharing.fsdp_version is FsdpVersion.ZERO_COPY
        words.append(
            f"{'--use-megatron-fsdp' if is_own else '--use-torch-fsdp2'} --no-gradient-accumulation-fusion"
        )
    else:
        words.append("--overlap-grad-reduce")
    if sharing.overlap_tensor:
        words.append("--tp-comm-overlap")
    if sharing.overlap_update:
        words.append("--overlap-param-gather")
    if layout.stage_split is StageSplit.ENDS:
        words.append("--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split")
    recompute = run.setup.saving.recompute
    if recompute == "full":
        words.append("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1")
    elif recompute == "selective":
        words.append("--recompute-granularity selective")
    half = _half(run)
    if half is not None:
        words.append("--bf16" if half == "bfloat16" else "--fp16")
    return " \\\n  ".join(words) + "\n"


FRAMEWORKS: dict[str, Callable[[Run], str]] = {
    "torchrun": _torchrun,
    "fsdp": _fsdp,
    "accelerate": _accelerate,
    "deepspeed": _deepspeed,
    "torchtitan": _torchtitan,
    "megatron": _megatron,
}
"""Frameworks with the function that writes a layout in their words."""
