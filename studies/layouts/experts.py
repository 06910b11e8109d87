"""Published steps of mixtures of experts in Megatron-Bridge, asked as a user would: by name, with the tool's recipe.

A row gives sizes of batches, layout and precision. Its tables force balanced routing, and its recipes send tokens by
DeepEP or HybridEP (``--merge-routes``). Rows that drop tokens are left out. What
is recomputed is not stated, and taken as nothing. Releases before 26.06 had neither fused experts nor exchanges beside
computation, which the recipe has with MXFP8: their rows are asked without.
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
