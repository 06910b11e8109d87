"""Memory of the reference runs of Megatron-LM's own tests: bytes of tensors of the last stage at its peak."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from forerun.base.errors import InvalidSetupError
from forerun.cost.memory.peak import memory_constants
from forerun.prediction.memory import layout_memory
from forerun.question.devices.cluster import parse_cluster
from forerun.question.model import ModelRequest
from forerun.question.run import Run
from forerun.question.saving import Saving
from forerun.question.setup import OptimizerImplementation, Precision, TrainingSetup
from forerun.question.sharing import DeviceLayout, PipelineSchedule, Sharing, StageSplit, Strategy
from studies.layouts.networks import Sizes, traced_model
from studies.layouts.rows import whole_or_usual
from studies.markdown import markdown_table
from studies.tables.public import public_table

_DEVICES = {"A100": "a100-sxm4-80gb", "H100": "h100-sxm", "GB200": "gb200"}
_WORKSPACES_BYTES = 2 * 32 * 1024**2
"""Workspaces of cuBLAS of the threads of forward and backward pass, with CUBLAS_WORKSPACE_CONFIG=:4096:8, which
deterministic runs need and PyTorch takes on Hopper; PyTorch allocates them. A whole prediction has them in its
context."""
_VOCABULARY = 50257
"""Tokens of GPT-2, which the tests use unless they say otherwise."""
_SAME = 1.2
"""Ratio of two measured peaks of one question on one stack from which on they contradict each other."""
_LEFT_OUT = ("decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers", "export-kd-cfg", "fp8-format",
             "num-distributed-optimizer-instances")  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredMemory:
    """One reference run with its question.

    Attributes:
        row: Index in the table.
        sizes: Sizes of the model.
        run: The question.
        gpu: Kind of device.
        environment: Stack of software: ``dev``, or the older ``lts``.
        peak_bytes: Most bytes of tensors on the last rank [bytes].
    """

    row: int
    sizes: Sizes
    run: Run
    gpu: str
    environment: str
    peak_bytes: float


def measured_memory(folder: Path) -> Iterator[MeasuredMemory]:
    """Reference runs of dense GPT models in half precision.

    Left out: mixtures of experts, hybrid and multimodal models, fp8, stages of chosen sizes, distillation, offload, and
    optimizers divided among a part of the replicas.
    """
    table = public_table(folder, "llm/megatron_ci")
    dense = table.num_experts.isna() & table.hybrid_pattern.isna() & ~table.multi_latent_attention
    chosen = table[
        dense & (table.test_group == "gpt") & ~table.optimizer_cpu_offload & (table.bf16 | table.fp16)
    ]
    for index, row in chosen.iterrows():
        if pd.isna(row.global_batch) or any(name in row.args_json for name in _LEFT_OUT):
            continue
        sizes, run = _question(row)
        yield MeasuredMemory(
            row=int(str(index)),
            sizes=sizes,
            run=run,
            gpu=str(row.gpu),
            environment=str(row.environment),
            peak_bytes=float(row.peak_allocated_bytes_max),
        )


def _question(row: Any) -> tuple[Sizes, Run]:
    tensor, pipeline, context = int(row.tp), int(row.pp), int(row.cp)
    multiple = whole_or_usual(row.vocab_divisible_by, 128) * tensor
    has_dropout = '"hidden-dropout": 0.0' not in row.args_json
    is_unfused = row.attention_backend in ("unfused", "local") or row.transformer_impl == "local"
    sizes = Sizes(
        layers=int(row.num_layers),
        hidden=int(row.hidden_size),
        heads=int(row.num_heads),
        kv_heads=whole_or_usual(row.num_query_groups, int(row.num_heads)),
        feed_forward=whole_or_usual(row.ffn_size, 4 * int(row.hidden_size)),
        vocabulary=-(-whole_or_usual(row.vocab_size, _VOCABULARY) // multiple) * multiple,
        tokens=int(row.seq_len),
        gated=bool(row.swiglu),
        tied=not row.untied_embeddings,
        attention="written" if is_unfused else "fused",
        fused_gate=bool(row.swiglu),
        dropout=0.1 if has_dropout else 0.0,
        logit_copies=2 if "cross-entropy-loss-fusion" in row.args_json else 1,
    )
    total = max(whole_or_usual(row.num_gpus, 8), tensor * pipeline * context)
    data = total // (tensor * pipeline * context)
    groups = whole_or_usual(row.virtual_stages, 1)
    if not pd.isna(row.layers_per_virtual_stage):
        groups = sizes.layers // pipeline // int(row.layers_per_virtual_stage)
    is_interleaved = groups > 1 and pipeline > 1
    micro = int(row.micro_batch)
    strategy = Strategy.DDP
    if row.distributed_optimizer:
        strategy = Strategy.ZERO1
    if row.megatron_fsdp or row.torch_fsdp2:
        strategy = Strategy.FSDP
    run = Run(
        model=ModelRequest(model="decoder"),
        setup=TrainingSetup(
            batch_size_per_device=micro,
            precision=Precision.AMP_BF16 if row.bf16 else Precision.AMP,
            optimizer="adamw",
            optimizer_implementation=OptimizerImplementation.FUSED,
            saving=Saving(recompute="full" if row.recompute_granularity == "full" else "none"),
        ),
        cluster=parse_cluster(f"{total}x{_DEVICES[row.gpu]}"),
        sharing=Sharing(
            strategy=strategy,
            num_accumulation_steps=max(1, int(row.global_batch) // (micro * data)),
            layout=DeviceLayout(
                tensor=tensor,
                pipeline=pipeline,
                context=context,
                data=data,
                sequence_parallel=bool(row.sequence_parallel),
                schedule=PipelineSchedule.INTERLEAVED
                if is_interleaved
                else PipelineSchedule.ONE_FORWARD_ONE_BACKWARD,
                virtual_stages=groups if is_interleaved else 1,
                stage_split=StageSplit.ENDS if "account_for_embedding" in row.test_case else StageSplit.EVEN,
            ),
        ),
    )
    return sizes, run


def predicted_memory(folder: Path) -> pd.DataFrame:
    """Measured and predicted bytes of tensors of the last stage of every reference run."""
    found = []
    for row in measured_memory(folder):
        model = traced_model(row.sizes, row.run.setup.with_half_weights())
        try:
            last = layout_memory(model, row.run, memory_constants(row.run.cluster.device))[-1]
        except InvalidSetupError:
            continue
        found.append(
            {
                "row": row.row,
                "layout": row.run.layout.text,
                "gpu": row.gpu,
                "environment": row.environment,
                "strategy": str(row.run.sharing.strategy),
                "attention": row.sizes.attention,
                "measured_bytes": row.peak_bytes,
                "predicted_bytes": last.allocated_bytes + _WORKSPACES_BYTES,
            }
        )
    return pd.DataFrame(found)


def memory_page(folder: Path) -> str:
    """The figures of all reference runs as a Markdown table.

    A second line is without questions of which runs on the same device and stack measured peaks that differ by more
    than a fifth: tests were refreshed at different dates, with and without fused attention.
    """
    rows = predicted_memory(folder)
    of_question = rows.groupby(["predicted_bytes", "gpu", "environment"]).measured_bytes
    agrees = of_question.transform("max") <= _SAME * of_question.transform("min")
    cells = []
    for name, chosen in (("all", rows), ("asked alike and measured alike", rows[agrees])):
        ratio = chosen.predicted_bytes / chosen.measured_bytes
        ape = (ratio - 1).abs()
        figures = (ape.median(), ape.quantile(0.9), np.exp(np.median(np.log(ratio))) - 1)
        cells.append((name, str(len(chosen)), *(f"{100 * value:.1f}" for value in figures)))
    return markdown_table(("Megatron-LM's tests", "runs", "median %", "p90 %", "bias %"), cells)
