"""``forerun.layouts``: the best ways to divide a model among the devices of a cluster, in the words of frameworks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Unpack

from forerun.base.answers import Answer
from forerun.base.errors import InvalidSetupError
from forerun.cost.time.weights import CostModel
from forerun.prediction.models import TracedModels
from forerun.prediction.uneven_samples import UnevenEpoch, has_lengths
from forerun.question.devices.catalogue import load_catalog
from forerun.question.devices.cluster import Cluster
from forerun.question.devices.device import Device
from forerun.question.options import LayoutOptions, with_common_settings
from forerun.question.recipes import recipe_notes
from forerun.question.run import Run
from forerun.question.settings import checked
from forerun.question.setup import Precision
from forerun.question.sharing import FsdpVersion, PipelineSchedule, StageSplit, Strategy
from forerun.search.estimates import run_from
from forerun.search.layout_search import LayoutPoint, chosen_points, search_layouts
from forerun.tracing.trace import full_name

if TYPE_CHECKING:
    import torch

_RECOMPUTED = ("none", "selective", "full")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutPlan(Answer):
    """The best layouts of a model on a cluster.

    Attributes:
        model: The model.
        cluster: The devices.
        global_batch: Samples of one step.
        num_compared: Layouts that were predicted.
        num_fitting: Those that fit or are close to it.
        best: The fastest that fit, the best first.
        front: Layouts that no other beats in both time and memory.
        files: The best layout in the words of frameworks, by name; those that have no such layout are left out.
        change_first: What limits the best layout, and what would lift it.
        notes: What a reader must know.
    """

    model: str
    cluster: str
    global_batch: int
    num_compared: int
    num_fitting: int
    best: tuple[LayoutPoint, ...]
    front: tuple[LayoutPoint, ...]
    files: dict[str, str]
    change_first: str
    notes: tuple[str, ...]


@with_common_settings(LayoutOptions)
def layouts(
    model: str | torch.nn.Module | Run,
    *,
    device: str | Device | Cluster | None = None,
    cost_model: CostModel | None = None,
    use_cache: bool = True,
    **options: Unpack[LayoutOptions],
) -> LayoutPlan:
    """Compares all layouts of a model on a cluster: tensor, context, pipeline and data parallelism, ZeRO and FSDP.

    Every layout takes the same global batch. Micro-batches are powers of two. Without ``recompute`` none,
    selective and full recomputation are compared.

    Args:
        model: As in ``predict``.
        device: ``16x8xh100-sxm`` (nodes x devices x name), or a TOML file. None with a ``Run``.
        cost_model: As in ``predict``.
        use_cache: Whether to use the cache of traced graphs.
        options: The settings of the run, ``global_batch``, ``top`` and ``write``; see ``forerun.RunOptions``.

    Raises:
        UsageError: The question must be changed, or no layout fits.
        FailureError: The model could not be built or traced.
    """
    given = checked(options, LayoutOptions)
    own = {name: given.pop(name, None) for name in ("global_batch", "top", "write")}
    for name in ("parallel", "strategy", "accumulation"):
        if given.get(name) not in (None, "auto"):
            raise InvalidSetupError(
                f"--{name} is what the search finds: leave it out, or ask forerun predict about one layout"
            )
    given.pop("strategy", None)
    run = run_from(model, device, given)
    models = TracedModels(use_cache=use_cache)
    recomputed = (run.setup.saving.recompute,) if "recompute" in given else _RECOMPUTED
    points, total = search_layouts(run, models, cost_model, own["global_batch"], recomputed)
    best, front = chosen_points(points, own["top"] or 5)
    names = (own["write"],) if own["write"] else tuple(FRAMEWORKS)
    return LayoutPlan(
        model=full_name(run.model.model),
        cluster=run.cluster.spec,
        global_batch=total,
        num_compared=len(points),
        num_fitting=sum(point.fits != "no" for point in points),
        best=best,
        front=front,
        files=_files(best[0].run, names, must=own["write"] is not None),
        change_first=_change_first(best[0], points),
        notes=tuple(_notes(run)),
    )


def _files(run: Run, names: Sequence[str], *, must: bool) -> dict[str, str]:
    found = {}
    for name in names:
        try:
            found[name] = FRAMEWORKS[name](run)
        except InvalidSetupError:
            # A framework that was asked for must say why not; of all, those that can are written.
            if must:
                raise
    return found


_REMEDIES = {
    "pipeline bubble": "more micro-steps (a larger global batch) or fewer stages",
    "tensor parallelism": "a faster link inside the nodes, or larger micro-batches with less tensor parallelism",
    "context parallelism": "a faster link, or a shorter sequence",
    "gathering of weights": "larger micro-batches, so that gathering hides behind them",
    "gradient synchronisation": "a larger global batch, or a faster network",
    "handover of stages": "fewer stages, or a faster network",
    "optimizer": "a larger global batch, or a fused optimizer",
}


def _change_first(best: LayoutPoint, points: Sequence[LayoutPoint]) -> str:
    """The largest loss of the best layout with its remedy, and what more memory would bring."""
    lost = best.reason.partition("; ")[2].split(", ")[0]
    name = lost.rpartition(" %")[0].rpartition(" ")[0]
    words = f"{lost}: {_REMEDIES[name]}" if name in _REMEDIES else "computation takes nearly all of the step"
    # What more memory would bring is said only where it is worth a purchase, and there is a device that has it.
    most_bytes = max(device.memory_bytes for device in load_catalog().values() if device.kind == "gpu")
    buyable = [point for point in points if point.peak_memory_bytes.value <= most_bytes]
    fastest = min([best, *buyable], key=lambda point: point.step_time_s.value)
    if fastest.fits == "no" and fastest.step_time_s.value < 0.97 * best.step_time_s.value:
        gain = best.step_time_s.value / fastest.step_time_s.value - 1
        size = fastest.peak_memory_bytes.value / 1024**3
        words += (
            f"; with {size:.0f} GiB a device --parallel {fastest.parallel} --recompute {fastest.recompute} would be "
            f"{100 * gain:.0f} % faster"
        )
    return words


def _notes(run: Run) -> Iterator[str]:
    yield "tensor parallelism is tried inside a node only; every layout has the same global batch"
    yield "docs/methods/layouts.md lists the measurements that layouts were compared with"
    yield from recipe_notes(run.software)
    if has_lengths(run):
        yield UnevenEpoch.of(run).note(run)
    if run.setup.precision.is_autocast:
        yield "mixed precision: weights compute in half precision, the optimizer updates fp32 weights"


_SCHEDULES = {
    PipelineSchedule.GPIPE: "GPipe",
    PipelineSchedule.ONE_FORWARD_ONE_BACKWARD: "1F1B",
    PipelineSchedule.INTERLEAVED: "Interleaved1F1B",
    PipelineSchedule.ZERO_BUBBLE: "ZBVZeroBubble",
}


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
    names = {Precision.AMP: "float16", Precision.FP16: "float16", Precision.BF16: "bfloat16"}
    names |= {Precision.AMP_BF16: "bfloat16", Precision.FP8: "bfloat16"}
    return names.get(run.setup.precision)


def _fsdp(run: Run) -> str:
    _only_data(run, "FSDP by itself", "torchtitan")
    sharing, half = run.sharing, _half(run)
    if sharing.strategy.stage != 3:
        raise InvalidSetupError(
            f"fsdp divides the weights, but the strategy is {sharing.strategy}; take torchrun or deepspeed"
        )
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
    recompute = run.setup.saving.recompute
    mode = recompute if recompute in _RECOMPUTED else "selective"
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
    if layout.whole_experts:
        words.append("--expert-tensor-parallel-size 1")
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
    if sharing.overlap_experts:
        words.append("--overlap-moe-expert-parallel-comm")
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
"""Frameworks with the function that writes the layout of a run in their words: arguments of torchrun and Megatron-LM,
Python for FSDP, YAML, JSON and TOML. It raises ``InvalidSetupError`` where the framework has no such layout."""
