"""Published steps that no fit has read, asked as a user would, by the model's name: experts, reinforcement learning.

Mixtures of experts are of Megatron-Bridge, with its recipe. A row gives sizes of batches, layout and precision. Its
tables force balanced routing, its recipes send tokens by DeepEP or HybridEP (``--merge-routes``), and its performance
configurations reduce gradients in half precision (``grad_reduce_in_fp32 = False``). Rows that drop tokens are left
out. What is recomputed is not stated, and taken as nothing. Releases before 26.06 had neither fused experts nor
exchanges beside computation, which the recipe has with MXFP8: their rows are asked without.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

import forerun
from forerun.base.errors import UsageError
from forerun.evidence.fitting.evaluation import errors
from studies.layouts.rows import network_of, step_of, whole_table
from studies.markdown import markdown_table
from studies.tables.public import public_table

_SOURCE = "NVIDIA-NeMo/Megatron-Bridge"
_MODELS = {
    "GPT OSS 120B": "gpt-oss-120b",
    "Qwen3_235B_a22B": "qwen3-235b-a22b",
    "Qwen3_30B_a3B": "qwen3-30b-a3b",
}
_FUSED_SINCE = "26.06"
_PRECISIONS: dict[str, dict[str, Any]] = {
    "bf16": {"precision": "bf16"},
    "fp8": {"precision": "fp8", "fp8_recipe": "current"},
    "fp8-cs": {"precision": "fp8", "fp8_recipe": "current"},
    "mxfp8": {"precision": "fp8", "fp8_recipe": "mx"},
    "fp8-mx": {"precision": "fp8", "fp8_recipe": "mx"},
}


def expert_rows(folder: Path) -> pd.DataFrame:
    """Rows with the predicted step [s] and its interval; with the reason where a row cannot be asked."""
    table = whole_table(folder)
    chosen: Any = table[(table.source == _SOURCE) & table.model.isin(list(_MODELS))].itertuples()
    found = []
    for row in chosen:
        step, reason = _step(row)
        value, low, high = (step.value, step.low, step.high) if step else (np.nan,) * 3
        found.append(
            {
                "model": _MODELS[row.model],
                "device": f"{int(row.num_gpus)} {row.gpu}",
                "precision": row.precision,
                "measured_s": step_of(row),
                "predicted_s": value,
                "low_s": low,
                "high_s": high,
                "reason": reason,
            }
        )
    return pd.DataFrame(found)


def _step(row: Any) -> tuple[forerun.Interval | None, str]:
    if "tokendrop" in str(row.note):
        return None, "drops tokens"
    where = network_of(_SOURCE.partition("/")[2], row)
    if where is None:
        return None, f"the network of {row.gpu} is not stated"
    axes = {name: int(value) for name in ("tp", "pp", "cp", "ep") if (value := getattr(row, name)) == value}
    data = int(row.num_gpus) // (axes.get("tp", 1) * axes.get("pp", 1) * axes.get("cp", 1))
    groups: dict[str, Any] = {}
    if row.vpp == row.vpp and row.vpp > 1 and axes.get("pp", 1) > 1:
        groups = {"pipeline_schedule": "interleaved", "virtual_stages": int(row.vpp)}
    if str(row.framework_version) < _FUSED_SINCE:
        groups |= {"fused_kernels": "norm,rope,mlp", "overlap_experts": False}
    if row.model == "Qwen3_235B_a22B" and axes.get("pp", 1) > 1:
        groups["stage_split"] = "ends"  # 94 blocks, with input and head 96
    try:
        estimate = forerun.predict(
            _MODELS[row.model],
            device=where[0],
            recipe="megatron",
            parallel=",".join(f"{name}={value}" for name, value in axes.items()),
            sequence_length=int(row.seq_len),
            batch_size=int(row.micro_batch),
            accumulation=max(1, round(row.global_batch / (data * row.micro_batch))),
            merge_routes=True,
            reduce_precision="half",
            whole_experts=True,  # expert_tensor_parallel_size=1 in all of its performance configurations
            **_PRECISIONS[row.precision],
            **groups,
            **where[1],
        )
    except UsageError as error:
        return None, str(error)
    return estimate.step_time_s, ""


def experts_page(folder: Path) -> str:
    """Errors by model and device as a Markdown table, and the rows left out with their reasons."""
    rows: Any = expert_rows(folder)
    asked = rows.dropna(subset=["predicted_s"])
    groups = [*asked.groupby(["model", "device"]), (("all", ""), asked)]
    cells = []
    for names, own in groups:
        found = errors(own.predicted_s, own.measured_s, (own.low_s, own.high_s))
        bias = (own.predicted_s / own.measured_s).median() - 1
        cells.append((*names, str(found.n), f"{found.mape:.0%}", f"{bias:+.0%}", f"{found.coverage_90:.0%}"))
    reasons = rows.reason[rows.reason != ""].value_counts()
    table = markdown_table(("model", "devices", "rows", "MAPE", "bias", "in 90 % interval"), cells)
    left_out = [f"- {number} left out: {reason}" for reason, number in reasons.items()]
    return "\n".join([table, *left_out]) + "\n"


_GRPO_MODELS = {"DeepSeek V3": "deepseek-v3", "Qwen3-235B": "qwen3-235b-a22b", "Qwen3-30B3A": "qwen3-30b-a3b"}
_GRPO_DEVICES = {"h100": ("h100-sxm", 8), "gb200": ("gb200", 64)}
"""Boards, and how many of them share NVLink; of 72 a power of two."""
_KEEP_ACTIVATIONS = {"Qwen3-30B3A", "Qwen3-32B"}
_PROMPT = 128
_NUM_AXES = 4


def grpo_rows(folder: Path) -> pd.DataFrame:
    """All rows of GRPO with the predicted step [s], which is not a number where a row cannot be asked.

    Constants of writing, refit and moves come from other reports of the same tool (``prediction/layout_passes.py``).

    A row gives the whole step alone: writing, refit, log-probabilities, training. What it leaves open is taken so:
    prompts of 128 tokens. The recipes of the rows (NVIDIA-NeMo/RL: ``examples/configs/recipes/llm/performance``, over
    ``grpo_math_1B.yaml``) say the rest: Megatron, samples packed into micro-steps of one; where rows train one step
    behind, half of the devices write; the two large models repeat their forward passes. Every device of a DGX has a
    link of its own to other nodes. Experts are divided among all devices with own tokens where a row names more.
    """
    table: Any = public_table(folder, "steps/grpo_nemo_rl").itertuples()
    found = []
    for row in table:
        step_s, words = _grpo_step(row)
        found.append(
            {
                "model": row.model,
                "device": row.device,
                "devices": int(row.gpus),
                "policy": row.policy,
                "precision": "fp8" if "FP8" in row.table else "bf16",
                "measured_s": row.step_time_s,
                "predicted_s": step_s,
                "passes": words,
            }
        )
    return pd.DataFrame(found)


def _grpo_step(row: Any) -> tuple[float, str]:
    """Step of a row with its passes in words, or not a number with the reason."""
    if row.model not in _GRPO_MODELS:
        return np.nan, "no model of the catalogue"
    axes = [int(part) for part in row.training_tp_cp_ep_pp_vpp.strip("[]").split(",")[:_NUM_AXES]]
    engine = int(row.generation_tp_pp.strip("[]").split(",")[0])
    total = int(row.gpus)
    number = 0 if row.policy == "On policy" else total // 2
    if 0 < number < engine:
        return np.nan, "no devices are left to write"
    try:
        estimate = _estimate(row, axes, engine, total - number, number)
    except UsageError as error:
        return np.nan, str(error)
    words = ", ".join(f"{part.name} {part.time_s:.0f}" for part in estimate.passes)
    return estimate.step_time_s.value, f"{number} write; {words}" if number else words


def _estimate(row: Any, axes: list[int], engine: int, training: int, writing: int) -> forerun.Estimate:
    tensor, context, expert, pipeline = axes
    device, domain = _GRPO_DEVICES[row.device]
    nodes = -(-training // domain)
    data = training // (tensor * context * pipeline)
    expert = min(expert, context * data)
    mean, longest = int(row.mean_generated_sequence_tokens), int(row.max_sequence_tokens)
    several: dict[str, Any] = {"inter": f"{domain}xinfiniband-ndr"} if nodes > 1 else {}
    if row.model not in _KEEP_ACTIVATIONS:
        several["recompute"] = "full"
    beside: dict[str, Any] = {"generation_on": writing} if writing else {}
    return forerun.predict(
        _GRPO_MODELS[row.model],
        device=f"{nodes}x{training // nodes}x{device}",
        algorithm="grpo",
        parallel=f"tp={tensor},cp={context},ep={expert},pp={pipeline}",
        recipe="megatron",
        batching="padding-free",
        accumulation=max(1, round(row.generation_global_batch / data)),
        batch_size=1,
        sequence_length=longest,
        new_tokens=longest - _PROMPT,
        answer_lengths=f"mean:{mean - _PROMPT}",
        generation_tensor=engine,
        precision="fp8" if "FP8" in row.table else "bf16",
        **several,
        **beside,
    )


def grpo_page(folder: Path) -> str:
    """Every row as a line of a Markdown table, and the mean error."""
    rows: Any = grpo_rows(folder)
    header = ("model", "devices", "policy", "measured [s]", "predicted [s]", "error", "passes [s]")
    cells = []
    for row in rows.itertuples():
        error = f"{row.predicted_s / row.measured_s - 1:+.0%}" if row.predicted_s > 0 else "-"
        names = (f"{row.model}, {row.precision}", f"{row.devices} {row.device}", row.policy)
        cells.append((*names, f"{row.measured_s:.0f}", f"{row.predicted_s:.0f}", error, row.passes))
    errors = (rows.predicted_s / rows.measured_s - 1).abs().dropna()
    return (
        markdown_table(header, cells)
        + f"\n{len(errors)} of {len(rows)} rows can be asked; mean error {errors.mean():.0%}.\n"
    )
