"""The study of fine-tuning: its reading of a made table, and its figures."""

import numpy as np
import pandas as pd
import pytest

from forerun.question.run import Run
from studies.fine_tuning.rows import MeasuredTuning, MemoryKind, read_rows
from studies.fine_tuning.study import answers_of, left_out_table, summary_of, words_table

FMS = "foundation-model-stack/fms-acceleration"
USUAL = {
    "source": FMS, "source_path": "refs/a100_80gb.csv", "model": "mistralai/Mistral-7B-v0.1", "task": "lora",
    "num_gpus": 1.0, "micro_batch": 4.0, "grad_accum": 1.0, "quantization": None, "framework": "HF Trainer + none",
    "failed": False, "derived_step_time_s": 5.0, "derived_tokens_per_sample": 4094.0, "peak_mem_gib": 24.0,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    rows = [
        USUAL,
        {**USUAL, "task": "qlora", "quantization": "nf4", "num_gpus": 2.0},
        {**USUAL, "task": "qlora", "quantization": "gptq"},
        {**USUAL, "model": "mistralai/Mixtral-8x7B-Instruct-v0.1"},
        {**USUAL, "framework": "HF Trainer + foak-fast-kernels-liger", "task": "full", "failed": True,
         "derived_step_time_s": None, "peak_mem_gib": None},
        {**USUAL, "source": "another/source"},
    ]  # fmt: skip
    (tmp_path / "llm").mkdir()
    pd.DataFrame(rows).to_parquet(tmp_path / "llm" / "llm_training.parquet")
    return tmp_path


def test_rows_are_questions_of_a_user(folder):
    read = read_rows(folder, "fms")
    assert read.left_out == {"GPTQ": 1, "mixture of experts": 1}
    one, two, full = read.rows
    assert (one.step_s, one.memory_bytes, one.tokens) == (5.0, 24 * 2**30, 4096)
    assert (full.source, full.fits, full.step_s) == ("fms, fused kernels", None, None)
    assert (two.question["quantize"], two.question["strategy"]) == ("nf4-dq", "fsdp")
    for row in read.rows:  # every question is one that forerun takes
        options = dict(row.question)
        run = Run.of(options.pop("model"), sequence_length=row.tokens, **options)
        assert run.setup.saving.recompute == "full"
        assert run.cluster.num_devices == (2 if row is two else 1)


def test_rows_of_unequal_samples_have_two_micro_steps(tmp_path):
    orca = {
        **USUAL,
        "source_path": "refs_orca/a100_80gb_pf.csv",
        "derived_tokens_per_sample": 890.0,
        "num_gpus": 2.0,
    }
    rows = [
        orca,
        {**orca, "framework": "aadp-padding-free", "model": None},
        {**orca, "framework": "padding-free-multipack"},
    ]
    (tmp_path / "llm").mkdir()
    pd.DataFrame(rows).to_parquet(tmp_path / "llm" / "llm_training.parquet")
    read = read_rows(tmp_path, "fms").rows
    assert [row.source for row in read] == ["fms, padded", "fms, padding-free", "fms, multipack"]
    assert [row.batching for row in read] == ["padded", "padding-free", "padded"]
    assert [row.lengths is None for row in read] == [False, False, True]
    assert {(row.question["accumulation"], row.question["reduce_once"], row.tokens) for row in read} == {
        (2, True, 445)
    }


def test_a_row_is_answered_and_compared(tmp_path):
    config = tmp_path / "small.json"
    config.write_text(
        '{"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 256, "n_layer": 2, "n_head": 4, '
        '"vocab_size": 1000}'
    )
    row = MeasuredTuning(
        source="made", row=0, tokens=64, longest_tokens=64, step_s=0.1, memory_bytes=1e9,
        memory_kind=MemoryKind.ALLOCATED,
        question={"model": f"hf:{config}", "device": "a100-sxm4-80gb", "batch_size": 2, "precision": "bf16"},
    )  # fmt: skip
    answers = answers_of([row])
    assert answers.refused.isna().all()
    assert answers.predicted_fits.all()
    assert 0 < answers.low_s[0] < answers.predicted_s[0] < answers.high_s[0]
    # Weights, gradients and two states of 2.1 M parameters in bf16, and more; no context of the process.
    assert 8 * 2_097_664 < answers.predicted_bytes[0] < 1e8


def test_figures_of_a_source():
    answers = pd.DataFrame({
        "measured_s": [1.0, 2.0, 4.0], "predicted_s": [1.1, 1.8, 4.0], "low_s": [0.9, 1.0, 4.5],
        "high_s": [2.0, 3.0, 5.0], "at_peak_s": [0.5, 1.0, 4.0], "fits": [True, False, None],
        "predicted_fits": [True, True, False], "measured_bytes": [1.0, 2.0, np.nan],
        "predicted_bytes": [1.1, 2.0, 3.0], "low_share": [0.9] * 3, "high_share": [0.95, 1.1, 1.1],
        "refused": [None, None, None],
    })  # fmt: skip
    found = summary_of(answers)
    assert found["mape"] == pytest.approx(0.2 / 3)
    assert found["inside"] == pytest.approx(2 / 3)
    assert found["baseline"] == pytest.approx(1 / 3)  # twice the time at the peak: 1, 2 and 8 seconds
    assert found["memory_median"] == pytest.approx(0.05)
    assert found["memory_inside"] == 1.0
    assert (found["ran"], found["ran_fits"], found["oom"], found["oom_right"]) == (1, 1, 1, 0)
    assert (found["silent"], found["silent_no"]) == (1, 1)


def test_verdicts_are_counted_by_what_happened():
    answers = pd.DataFrame({
        "fits": [True, True, False, None], "verdict": ["yes", "close", "yes", "no"], "refused": [None] * 4,
    })  # fmt: skip
    ran, oom, silent = (line.split(" | ")[1:] for line in words_table(answers)[2:])
    assert ran == ["2", "1", "1", "0 |"]
    assert oom == ["1", "1", "0", "0 |"]
    assert silent == ["1", "0", "0", "1 |"]


def test_intervals_of_other_sources_hold_what_is_like_them():
    def rows(source, shares):
        return pd.DataFrame({
            "source": source, "memory_class": "full", "measured_bytes": shares, "predicted_bytes": 1.0,
            "low_share": 0.9, "high_share": 1.1,
        })  # fmt: skip

    answers = pd.concat(
        [rows("a", [0.95, 1.05]), rows("a, fused", [1.0]), rows("b", [1.0, 2.0])], ignore_index=True
    )
    *_, first, second, every = left_out_table(answers)
    # The tables of one origin are one source, and none is judged by its own runs.
    assert first == "| full | a | 3 | 1.00 to 2.00 | 0.67 | 1.00 |"
    assert second == "| full | b | 2 | 0.95 to 1.05 | 0.50 | 0.50 |"
    assert every == "| all | each source | 5 | | 0.60 | |"
