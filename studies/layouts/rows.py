"""Measured rows of ``llm_training`` as questions: sizes, devices and layout of each source."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from forerun.question.devices.cluster import Cluster, parse_cluster
from forerun.question.model import ModelRequest
from forerun.question.run import Run
from forerun.question.saving import Fp8Recipe, MasterWeights, Saving
from forerun.question.setup import AttentionKernel, OptimizerImplementation, Precision, TrainingSetup
from forerun.question.sharing import (
    DeviceLayout,
    FsdpVersion,
    Handover,
    PipelineSchedule,
    Sharing,
    StageSplit,
    Strategy,
)
from studies.layouts.networks import Sizes
from studies.tables.public import public_table

SOURCES = {
    "llm-foundry": ("mosaicml/llm-foundry",),
    "vTrain": ("VIA-Research/vTrain",),
    "nanotron": ("vinjn/nanotron-ultrascale-playbook",),
    "calculon": ("calculon-ai/calculon",),
    "Megatron-Bridge": ("NVIDIA-NeMo/Megatron-Bridge",),
    "NeMo": ("NVIDIA/NeMo", "NVIDIA/NeMo-Framework-Launcher"),
    "Automodel": ("NVIDIA-NeMo/Automodel",),
    "fms-fsdp": ("foundation-model-stack/fms-fsdp",),
}
"""Sources whose rows name sizes, devices and layout."""

_MEGATRON = ("Megatron-Bridge", "NeMo")
# Transformer Engine calls cuDNN's attention, Automodel PyTorch's. llm-foundry's tables are of 2023 and PyTorch 1.13,
# before FlashAttention-2.
_KERNELS = {
    ("Megatron-Bridge", "h100"): AttentionKernel.FLASH_3,
    ("Megatron-Bridge", "gb200"): AttentionKernel.FLASH_2,
    ("Megatron-Bridge", "gb300"): AttentionKernel.FLASH_2,
    ("NeMo", "h100"): AttentionKernel.FLASH_3,
    ("Automodel", "h100"): AttentionKernel.FLASH_2,
}
_VERSIONS = {
    "llm-foundry": FsdpVersion.FSDP1,
    "fms-fsdp": FsdpVersion.FSDP1,
    "Megatron-Bridge": FsdpVersion.ZERO_COPY,
}
_HANDOVERS = {"nanotron": Handover.BLOCKING} | dict.fromkeys(
    ("vTrain", "calculon", "Megatron-Bridge", "NeMo"), Handover.AHEAD
)
_FP8 = ("fp8", "fp8-cs", "fp8-cs (fp8-mx)", "mxfp8")
_PRECISIONS = {"bf16": Precision.AMP_BF16, "fp16": Precision.AMP, "fp8": Precision.FP8}
_HALF = {Precision.AMP: Precision.FP16, Precision.AMP_BF16: Precision.BF16}

_OF_GPT = ("llm-foundry", "vTrain", "calculon")
_BEFORE_FUSED_ATTENTION = ("vTrain", "calculon")
"""Megatron-LM of 2022: its attention is two products, a softmax kernel and a dropout."""

_DEVICES = {
    "A100-80GB": "a100-sxm4-80gb",
    "A100": "a100-sxm4-80gb",
    "A100-40GB": "a100-sxm4-40gb",
    "H100-80GB": "h100-sxm",
    "H100": "h100-sxm",
    "H100-96GB": "h100-sxm",
    "GB200": "gb200",
    "GB300": "gb300",
}
_DOMAIN_DEVICES = 64
"""Devices of an NVLink domain of GB200 and GB300 that jobs use: 64 of the 72 (performance guide of Megatron-Bridge)."""
# Networks of the clusters. llm-foundry states 1,600 Gb/s per node of A100 and 3,200 of H100; the playbook ran on EFA
# with 3,200; Selene and Eos have eight HDR and NDR links; fms-fsdp states 400 and 800 Gb/s per node; GB200 and GB300
# have one NDR or XDR link each.
_NETWORKS = {
    ("llm-foundry", "a100"): "8xinfiniband-hdr",
    ("llm-foundry", "h100"): "8xinfiniband-ndr",
    ("nanotron", "h100"): "8xinfiniband-ndr",
    ("vTrain", "a100"): "8xinfiniband-hdr",
    ("calculon", "a100"): "8xinfiniband-hdr",
    ("fms-fsdp", "a100"): "2xinfiniband-hdr",
    ("fms-fsdp", "h100"): "2xinfiniband-ndr",
    ("Megatron-Bridge", "h100"): "8xinfiniband-ndr",
    ("Megatron-Bridge", "gb200"): "64xinfiniband-ndr",
    ("Megatron-Bridge", "gb300"): "64xinfiniband-xdr",
    ("NeMo", "h100"): "8xinfiniband-ndr",
    ("Automodel", "h100"): "8xinfiniband-ndr",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredLayout:
    """One measured step with its question.

    Attributes:
        source: Short name of the source.
        row: Index in the table.
        sizes: Sizes of the model.
        run: The question.
        step_s: Measured step; None for a row that failed [s].
        oom: True if the source says out of memory.
        model: Name of the model in the source.
    """

    source: str
    row: int
    sizes: Sizes
    run: Run
    step_s: float | None
    oom: bool
    model: str


def whole_table(folder: Path) -> pd.DataFrame:
    """All rows of ``llm_training``."""
    return public_table(folder, "llm/llm_training")


def measured_layouts(table: pd.DataFrame, source: str) -> Iterator[MeasuredLayout]:
    """Rows of one source that the study can ask about.

    Left out: mixtures of experts, fp4 and offload, devices outside of the catalogue, adapters of
    NeMo, whose rank is not stated, rows that contradict themselves, and rows that failed for a reason that is not told.
    """
    chosen = table[table.source.isin(SOURCES[source])]
    for index, row in chosen.iterrows():
        if pd.notna(row.suspect) or (row.failed is True and row.oom is not True):
            continue
        found = _question(source, row)
        if found is None:
            continue
        sizes, run = found
        yield MeasuredLayout(
            source=source,
            row=int(str(index)),
            sizes=sizes,
            run=run,
            step_s=step_of(row),
            oom=row.oom is True,
            model=str(row.model),
        )


def whole_or_usual(value: Any, usual: int = 1) -> int:
    """The whole number of a cell, or what an empty one means."""
    return usual if pd.isna(value) else int(value)


def step_of(row: Any) -> float | None:
    """Measured step of a row, None where it failed [s]."""
    if pd.notna(row.derived_step_time_s):
        return float(row.derived_step_time_s)
    samples = row.global_batch / row.num_gpus if pd.notna(row.global_batch) else row.micro_batch
    found = samples * row.seq_len / row.tokens_per_s_per_gpu
    return float(found) if pd.notna(found) else None


def _question(source: str, row: Any) -> tuple[Sizes, Run] | None:
    device = _DEVICES.get(str(row.gpu))
    needed = (row.num_layers, row.hidden_size, row.num_heads, row.seq_len, row.num_gpus, row.micro_batch)
    if device is None or any(pd.isna(value) for value in needed) or whole_or_usual(row.ep) > 1:
        return None
    precision = "fp16" if source == "vTrain" else "fp8" if row.precision in _FP8 else row.precision
    if precision not in _PRECISIONS or row.family == "moe" or row.activation_cpu_offload is True:
        return None
    if row.task == "lora" and source in _MEGATRON:
        return None  # rank and targets are not stated
    gated = not str(row.model).startswith(("GPT", "gpt", "MPT", "mpt")) and source not in _OF_GPT
    sizes = Sizes(
        layers=int(row.num_layers),
        hidden=int(row.hidden_size),
        heads=int(row.num_heads),
        kv_heads=whole_or_usual(row.num_kv_heads, int(row.num_heads)),
        feed_forward=whole_or_usual(row.ffn_size, 4 * int(row.hidden_size)),
        vocabulary=whole_or_usual(row.vocab_size, 51200),
        tokens=int(row.seq_len),
        gated=gated,
        attention=_attention(source, row),
        fused_gate=source in _MEGATRON,
        fused_loss=source in ("llm-foundry", *_MEGATRON),
        tied=bool(row.tied_embeddings) if pd.notna(row.tied_embeddings) else not gated,
    )
    tensor, pipeline, context = whole_or_usual(row.tp), whole_or_usual(row.pp), whole_or_usual(row.cp)
    total = int(row.num_gpus)
    if total % (tensor * pipeline * context) or total < 2:
        return None
    groups = whole_or_usual(row.vpp)
    layout = DeviceLayout(
        tensor=tensor,
        pipeline=pipeline,
        context=context,
        data=total // (tensor * pipeline * context),
        sequence_parallel=_sequence_parallel(source, row),
        schedule=PipelineSchedule.INTERLEAVED if groups > 1 and pipeline > 1 else PipelineSchedule("1f1b"),
        virtual_stages=groups if pipeline > 1 else 1,
        handover=_HANDOVERS.get(source, Handover.UNKNOWN),
        stage_split=_stage_split(source, sizes.layers, pipeline * groups),
    )
    micro = int(row.micro_batch)
    steps = _micro_steps(row, layout, micro)
    asked, saving = _PRECISIONS[precision], _saving(source, row, precision, sizes)
    if source == "Automodel":
        asked = Precision.BF16
    elif _strategy(source, row) is Strategy.DDP and not layout.divides_model and asked in _HALF:
        # Replicas of Megatron-LM and nanotron hold weights in half precision, where those of PyTorch cast them.
        asked, saving = _HALF[asked], replace(saving, master_weights=MasterWeights.FP32)
    run = Run(
        model=ModelRequest(model="decoder"),
        setup=TrainingSetup(
            batch_size_per_device=micro,
            precision=asked,
            optimizer="adamw",
            # Composer's DecoupledAdamW goes through the tensors one by one.
            optimizer_implementation=OptimizerImplementation.FOR_LOOP
            if source == "llm-foundry"
            else OptimizerImplementation.FUSED,
            compile=row.compile is True or source == "Automodel",
            attention_kernel=_KERNELS.get((source, device.partition("-")[0]), AttentionKernel.PLAIN),
            saving=saving,
        ),
        cluster=_cluster(source, row),
        sharing=Sharing(
            strategy=_strategy(source, row),
            layout=layout,
            num_accumulation_steps=steps,
            reduce_half=source == "fms-fsdp",
            fsdp_version=_VERSIONS.get(source, FsdpVersion.FSDP2),
            overlap_tensor=source in ("Automodel", *_MEGATRON) and tensor > 1,
            overlap_update=source in _MEGATRON and _strategy(source, row) is Strategy.ZERO1,
            slice_tensors=source == "nanotron" and _strategy(source, row) is Strategy.ZERO1,
        ),
    )
    return sizes, run


def _saving(source: str, row: Any, precision: str, sizes: Sizes) -> Saving:
    recompute = row.act_ckpt if row.act_ckpt in ("full", "selective") else "none"
    if source in (
        "vTrain",
        "Automodel",
    ):  # Automodel's recipes have activation checkpointing, and are compiled
        recompute = "full"
    if sizes.attention == "again":
        recompute = "none"  # but attention
    if source == "fms-fsdp" and recompute == "selective":
        recompute = "every-2"  # its "selective" leaves blocks out
    if row.task == "lora":
        # Automodel's recipes: rank 16 on all linear layers of the blocks; adapters are bf16 like the rest.
        return Saving(recompute=recompute, lora_rank=16, master_weights=MasterWeights.BF16)
    if precision != "fp8":
        return Saving(recompute=recompute)
    # The fp8 of llm-foundry and NeMo was that of delayed scales; Megatron-Bridge has current scales ("cs") and blocks
    # of 32 ("mx").
    recipe = Fp8Recipe.CURRENT if source == "Megatron-Bridge" else Fp8Recipe.DELAYED
    if row.precision == "mxfp8" or (pd.notna(row.note) and row.precision.endswith("(fp8-mx)")):
        recipe = Fp8Recipe.MX
    return Saving(recompute=recompute, master_weights=MasterWeights.FP32, fp8_recipe=recipe)


def _stage_split(source: str, num_blocks: int, num_groups: int) -> StageSplit:
    if source == "nanotron":
        return StageSplit.BALANCED
    # Llama 3.1 405B has 126 blocks for stages of 128: Megatron-Bridge counts input and head.
    return (
        StageSplit.ENDS if num_blocks % num_groups and (num_blocks + 2) % num_groups == 0 else StageSplit.EVEN
    )


def _attention(source: str, row: Any) -> str:
    if source not in _BEFORE_FUSED_ATTENTION:
        return "fused"
    return "again" if row.act_ckpt == "selective" else "written"


def _sequence_parallel(source: str, row: Any) -> bool:
    if pd.notna(row.sequence_parallel):
        return bool(row.sequence_parallel)
    return source in ("nanotron", *_MEGATRON)


def _micro_steps(row: Any, layout: DeviceLayout, micro: int) -> int:
    if pd.notna(row.global_batch):
        return max(1, round(float(row.global_batch) / (layout.data * micro)))
    return whole_or_usual(row.grad_accum)


def _strategy(source: str, row: Any) -> Strategy:
    words = str(row.sharding)
    if "sdp" in words or "full_shard" in words:
        return Strategy.HSDP if "hsdp" in words else Strategy.FSDP
    if "zero1" in words or "distributed" in words or source in _MEGATRON:
        return Strategy.ZERO1  # Megatron-Bridge and NeMo divide the optimizer unless told otherwise
    return Strategy.DDP


def network_of(source: str, row: Any) -> tuple[str, dict[str, Any]] | None:
    """Devices of a row in words, and its network as a setting where there are several nodes; None if not known."""
    device, total = _DEVICES.get(str(row.gpu)), int(row.num_gpus)
    if device is None:
        return None
    per_node = _DOMAIN_DEVICES if device in ("gb200", "gb300") else whole_or_usual(row.gpus_per_node, 8)
    nodes = -(-total // per_node)
    network: dict[str, Any] = {"inter": _NETWORKS[source, device.partition("-")[0]]} if nodes > 1 else {}
    return f"{nodes}x{total // nodes}x{device}", network


def _cluster(source: str, row: Any) -> Cluster:
    found = network_of(source, row)
    assert found is not None
    return parse_cluster(found[0], **found[1])
