"""Published steps of reinforcement learning (GRPO) asked plainly: no step of the table is in a fit.

Constants of writing, refit and moves come from other reports of the same tool (``prediction/layout_passes.py``).

A row gives the whole step alone: writing, refit, log-probabilities, training. What it leaves open is taken as follows:
prompts of 128 tokens, one sample in a micro-step, a distributed optimizer. The recipes of the rows (NVIDIA-NeMo/RL:
``examples/configs/recipes/llm/performance``) say the rest: where rows train one step behind, half of the devices write;
the two large models repeat their forward passes. Every device of a DGX has a link of its own to other nodes. Experts
are divided among all devices that have tokens of their own where a row names more.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

import forerun
from forerun.base.errors import UsageError
from studies.markdown import markdown_table
from studies.tables.public import public_table

_MODELS = {"DeepSeek V3": "deepseek-v3", "Qwen3-235B": "qwen3-235b-a22b", "Qwen3-30B3A": "qwen3-30b-a3b"}
_DEVICES = {"h100": ("h100-sxm", 8), "gb200": ("gb200", 64)}
"""Boards, and how many of them share NVLink; of 72 a power of two."""
_PROMPT = 128
_NUM_AXES = 4


def grpo_rows(folder: Path) -> pd.DataFrame:
    """All rows of the table with the predicted step [s], which is not a number where a row cannot be asked."""
    table: Any = public_table(folder, "steps/grpo_nemo_rl").itertuples()
    found = []
    for row in table:
        step_s, words = _step(row)
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


def _step(row: Any) -> tuple[float, str]:
    """Step of a row with its passes in words, or not a number with the reason."""
    if row.model not in _MODELS:
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
    device, domain = _DEVICES[row.device]
    nodes = -(-training // domain)
    data = training // (tensor * context * pipeline)
    expert = min(expert, context * data)
    mean, longest = int(row.mean_generated_sequence_tokens), int(row.max_sequence_tokens)
    several: dict[str, Any] = {"inter": f"{domain}xinfiniband-ndr"} if nodes > 1 else {}
    if row.model != "Qwen3-30B3A":
        several["recompute"] = "full"
    beside: dict[str, Any] = {"generation_on": writing} if writing else {}
    return forerun.predict(
        _MODELS[row.model],
        device=f"{nodes}x{training // nodes}x{device}",
        algorithm="grpo",
        parallel=f"tp={tensor},cp={context},ep={expert},pp={pipeline}",
        strategy="zero1",
        accumulation=max(1, round(row.generation_global_batch / data)),
        batch_size=1,
        sequence_length=longest,
        new_tokens=longest - _PROMPT,
        answer_lengths=f"mean:{mean - _PROMPT}",
        generation_tensor=engine,
        precision="fp8" if "FP8" in row.table else "amp-bf16",
        optimizer="adamw",
        attention_kernel="flash-2",
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
