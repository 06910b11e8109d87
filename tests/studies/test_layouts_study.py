"""The study of layouts: its reading of a made table, and its figures."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import forerun
from forerun.question.saving import Fp8Recipe
from forerun.question.sharing import StageSplit, Strategy
from studies.layouts import asked_by_name as experts
from studies.layouts.asked_by_name import grpo_page
from studies.layouts.rows import measured_layouts
from studies.layouts.study import choices, constant_mfu_error, fit_error_law

BRIDGE = {
    "source": "NVIDIA-NeMo/Megatron-Bridge", "model": "LLAMA3.1_405B", "family": None, "task": "pretrain",
    "num_layers": 126.0, "hidden_size": 16384.0, "num_heads": 128.0, "num_kv_heads": 8.0, "ffn_size": 53248.0,
    "vocab_size": 128256.0, "seq_len": 8192.0, "num_gpus": 256.0, "gpu": "GB300", "gpus_per_node": None,
    "precision": "fp8", "micro_batch": 1.0, "global_batch": 1536.0, "grad_accum": None, "tp": 4.0, "pp": 8.0,
    "cp": 1.0, "vpp": 4.0, "ep": None, "sharding": None, "act_ckpt": None, "activation_cpu_offload": None,
    "compile": None, "sequence_parallel": None, "tied_embeddings": None, "note": None, "suspect": None, "failed": None,
    "oom": None, "peak_mem_gib": None, "derived_step_time_s": 46.9, "tokens_per_s_per_gpu": 1048.0, "mfu_pct": None,
}  # fmt: skip


def test_rows_of_megatron_bridge_are_questions_with_its_own_settings() -> None:
    table = pd.DataFrame(
        [
            BRIDGE,
            {**BRIDGE, "precision": "mxfp8", "derived_step_time_s": None},
            {**BRIDGE, "precision": "nvfp4"},
            {**BRIDGE, "task": "lora"},
            {**BRIDGE, "suspect": "its product is another"},
        ]
    )
    current, mx = measured_layouts(table, "Megatron-Bridge")
    run = current.run
    assert (current.step_s, mx.step_s) == (46.9, pytest.approx(1536 * 8192 / 256 / 1048))
    assert (run.cluster.spec, run.sharing.num_accumulation_steps) == ("4x64xgb300", 192)
    assert (run.sharing.strategy, run.layout.stage_split) == (Strategy.ZERO1, StageSplit.ENDS)
    recipes = [one.run.setup.saving.fp8_recipe for one in (current, mx)]
    assert recipes == [Fp8Recipe.CURRENT, Fp8Recipe.MX]


def test_figures_of_a_choice_and_of_one_mfu() -> None:
    rows = pd.DataFrame(
        {
            "model": "m", "device": "d", "num_devices": 8, "precision": "p", "adapters": False, "global_batch": 4,
            "layout": list("abcde"), "measured_s": [5.0, 4.0, 3.0, 2.0, 1.0], "predicted_s": [1.0, 2.0, 3.0, 4.0, 5.0],
            "ideal_s": [2.5, 2.0, 1.5, 1.0, 0.25],
        }
    )  # fmt: skip
    assert choices(rows) == {"groups": 1.0, "in_first_three": 0.0, "loss": 4.0}
    assert choices(rows.head(3))["groups"] == 0.0
    assert constant_mfu_error(rows) == pytest.approx(0.1)  # an MFU of a half misses the last row by half


def test_the_law_of_errors_finds_what_shapes_have_in_common() -> None:
    from forerun.cost.communication.constants import StepShape

    rng = np.random.default_rng(0)
    shapes = [
        StepShape(hidden_size=size, block_s=0.01, exposed_share=0.0, waiting_share=0.0)
        for size in rng.choice([1024, 8192], 40)
    ]
    logs = [0.2 * (1 if shape.hidden_size > 2000 else -1) + 0.01 * rng.normal() for shape in shapes]
    law = fit_error_law({"one": pd.DataFrame({"shape": shapes, "log": logs})})
    assert law.noise == pytest.approx(0.01, rel=0.5)
    assert law.shape > 0.05


def test_a_row_of_reinforcement_learning_without_an_answer_says_why(tmp_path: Path) -> None:
    row = {
        "model": "Other", "device": "h100", "gpus": 8.0, "policy": "On policy", "table": "H100 BF16",
        "step_time_s": 9.0, "training_tp_cp_ep_pp_vpp": "[1,1,1,1,n/a]", "generation_tp_pp": "[1,1]",
        "max_sequence_tokens": 1024.0, "mean_generated_sequence_tokens": 512.0, "generation_global_batch": 8.0,
    }  # fmt: skip
    (tmp_path / "steps").mkdir()
    large = row | {"model": "DeepSeek V3", "generation_tp_pp": "[16,1]", "policy": "1-step Off"}
    pd.DataFrame([row, large]).to_parquet(tmp_path / "steps" / "grpo_nemo_rl.parquet")
    page = grpo_page(tmp_path)
    assert "no model of the catalogue" in page
    assert "no devices are left to write" in page
    assert "0 of 2 rows can be asked" in page


def test_rows_of_experts_are_asked_by_name_with_the_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {
        "source": "NVIDIA-NeMo/Megatron-Bridge", "model": "Qwen3_30B_a3B", "gpu": "H100-80GB", "num_gpus": 16.0,
        "gpus_per_node": None, "precision": "fp8-cs", "seq_len": 4096.0, "micro_batch": 2.0, "global_batch": 512.0,
        "tp": 1.0, "pp": 2.0, "cp": 1.0, "ep": 8.0, "vpp": 24.0, "note": None, "derived_step_time_s": 20.0,
        "framework_version": "26.06",
    }  # fmt: skip
    (tmp_path / "llm").mkdir()
    left = {**row, "note": "MoE tokendrop"}, {**row, "gpu": "B300"}
    pd.DataFrame([row, *left]).to_parquet(tmp_path / "llm" / "llm_training.parquet")
    asked = []

    def answer(model: str, **options: object) -> object:
        run = forerun.Run.of(model, **options)
        asked.append(run)
        return type("Answer", (), {"step_time_s": forerun.Interval(25.0, 19.0, 30.0)})

    monkeypatch.setattr(forerun, "predict", answer)
    page = experts.experts_page(tmp_path)
    assert "| all |  | 1 | 25% | +25% | 100% |" in page
    assert "1 left out: drops tokens" in page
    (run,) = asked
    assert (run.layout.expert, run.layout.virtual_stages, run.sharing.num_accumulation_steps) == (8, 24, 32)
    assert (run.cluster.num_nodes, run.setup.saving.fp8_recipe) == (2, "current")
