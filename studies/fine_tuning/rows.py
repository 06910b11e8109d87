"""Measured rows of fine-tuning as questions of a user, and the rows that are left out with their reasons."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import pandas as pd

from studies.tables.public import public_table

_GIB, _GB = 2**30, 10**9

ATTENTION = "q_proj,k_proj,v_proj,o_proj"
QUERY_VALUE = "q_proj,v_proj"


class MemoryKind(StrEnum):
    """Memory that a source prints."""

    ALLOCATED = "torch peak allocated"
    RESERVED = "torch peak reserved"
    HELD = "torch allocated between steps"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredTuning:
    """One measured row with its question.

    Attributes:
        source: Name of the group in the table of the study.
        row: Index in its table.
        question: Settings of ``forerun.predict``, the model and the device among them.
        tokens: Tokens of a sample of the measured time; None where time was not published or its tokens are not known.
        lengths: Law of the samples' lengths, where they differ; None where tokens say it.
        batching: Batches of samples with such a law.
        step_s: Measured step of the optimizer, None where there is none [s].
        memory_bytes: Measured memory, None where there is none [bytes].
        memory_kind: Kind of that memory.
        longest_tokens: Tokens of the longest sample, which makes the peak of memory; None for those of all.
        is_uneven: True if batches of unequal samples come in no order, and memory is what the allocator held at most.
        fits: False if the source says out of memory, True if it ran, None if it failed without a word.
    """

    source: str = ""
    row: int = 0
    question: dict[str, Any]
    tokens: int | None
    longest_tokens: int | None = None
    lengths: str | None = None
    batching: str = "padded"
    step_s: float | None = None
    memory_bytes: float | None = None
    memory_kind: MemoryKind | None = None
    is_uneven: bool = False
    fits: bool | None = True


@dataclass(slots=True)
class ReadRows:
    """Rows of one source.

    Attributes:
        rows: Rows with a question.
        left_out: Number of rows left out by reason.
    """

    rows: list[MeasuredTuning] = field(default_factory=list)
    left_out: dict[str, int] = field(default_factory=dict)


class _LeftOutError(Exception):
    """The row is left out for the reason in its text."""


def _gpus(number: int, name: str) -> str:
    return name if number == 1 else f"{number}x{name}"


def _has(value: Any) -> bool:
    return bool(pd.notna(value))


def _peak_bytes(row: Any, unit_bytes: int) -> float | None:
    """Published memory of a row; None without one [bytes]."""
    return float(row.peak_mem_gib) * unit_bytes if _has(row.peak_mem_gib) else None


def _packed_step_s(row: Any) -> float:
    """Step of a row whose samples are packed to its length [s]."""
    return int(row.micro_batch) * int(row.seq_len) / float(row.tokens_per_s_per_gpu)


def _peft(row: Any) -> MeasuredTuning:
    # Between steps the script still holds gradients (they are set to none before the next forward pass), and logits and
    # keys and values of the last output, which no setting names.
    name = str(row.experiment)
    question: dict[str, Any] = {
        "model": "llama-3.2-3b",
        "device": "l40s",
        "batch_size": int(row.batch_size),
        "precision": "bf16",
    }
    if row.method == "FULL_FT":
        question["master_weights"] = "bf16"
    elif row.method == "LORA" and not any(word in name for word in ("dora", "lorafa", "mica", "bdlora")):
        question["lora"] = int(row["rank"])
        question["lora_targets"] = ",".join(sorted(_words(row.target_modules)))
    else:
        raise _LeftOutError("another adapter than LoRA")
    step_s = float(row.s_per_step_median_of_intervals)
    tokens = float(row.tokens_per_s_median) * step_s / int(row.batch_size)
    return MeasuredTuning(
        question=question,
        tokens=round(tokens),
        longest_tokens=int(row.max_seq_length),
        step_s=step_s,
        memory_bytes=float(row.memory_allocated_avg_bytes),
        memory_kind=MemoryKind.HELD,
    )


def _words(text: Any) -> list[str]:
    return [word.strip(' "[]') for word in str(text).split(",")]


_FMS_MODELS = {
    "mistralai/Mistral-7B-v0.1": "mistral-7b",
    "bigcode/gpt_bigcode-santacoder": "santacoder",
    "ibm/PowerLM-3b": "powerlm-3b",
}


_FMS_SLOWDOWN = 3.7
"""Times that launching takes longer beside the thread of memory metrics, from which all its memory comes: fitted on the
packed rows of santacoder on two devices (19 % off without it, 6 % with it), which launching bounds."""
_ORCA_LENGTHS = "lognormal:median=259,p95=561"
"""The lognormal law with the mean tokens that the rows print, 289, and of batches filled up to the longest of 2, 4 and
8: 369, 444, 524 (365, 443, 525 by the law); from token counts alone, no time took part."""


def _fms_fused(model: str, *, quantized: bool, liger: bool) -> dict[str, Any]:
    """Kernels of fms-acceleration's plugin for a model: those of adapters for quantized weights alone.

    Source: its ``framework_plugin_fast_kernels.py`` and the rules of ``models``; santacoder has a fast loss only.
    """
    if model == "santacoder":
        return {} if liger else {"loss": "fused"}
    parts = "norm,rope,lora" if quantized else "norm,rope"
    return {"fused_kernels": parts, "loss": "liger" if liger else "fused"}


def _fms(row: Any) -> MeasuredTuning:
    # Files of the scenarios: 16-bit weights under autocast (bf16: True), gradient checkpointing and flash attention on,
    # packed to 4,096 tokens (santacoder 2,048), double quantization, dropout of adapters 0.1. Rows of QLoRA that are
    # called baseline have peft's own preparation; the plugin of the others has a copy of it that leaves norms and
    # embeddings in half precision (framework_plugin_bnb.py). Full tuning of bf16 weights under autocast is that in
    # bf16. accelerate makes trained weights of FSDP fp32 in the tables of liger: 16 allocated bytes a weight.
    # Rows of Orca-Math (scenarios-orca.yaml) have one model and two micro-steps, as samples/s times the step show;
    # multipack gives all devices as many tokens, so its samples count as equally long.
    unpacked = "orca" in str(row.source_path)
    model = _FMS_MODELS.get("mistralai/Mistral-7B-v0.1" if unpacked else str(row.model))
    if row.quantization == "gptq":
        raise _LeftOutError("GPTQ")
    if model is None:
        raise _LeftOutError("mixture of experts" if _has(row.model) else "model not named")
    number, liger = int(row.num_gpus), "liger" in str(row.framework)
    fused = "foak" in str(row.framework)
    question: dict[str, Any] = {
        "model": model,
        "device": _gpus(number, "a100-sxm4-80gb"),
        "batch_size": int(row.micro_batch),
        "accumulation": 2 if unpacked else int(row.grad_accum),
        "recompute": "full",
        "precision": "bf16",
        "host_slowdown": _FMS_SLOWDOWN,
    }
    if number > 1:
        question |= {"strategy": "fsdp", "fsdp_version": "fsdp1"}
        if unpacked:
            question["reduce_once"] = True
    if fused:
        question |= _fms_fused(model, quantized=row.task == "qlora", liger=liger)
    if row.task == "full":
        if number > 1 and "a100_80gb_liger" in str(row.source_path):
            question["precision"] = "amp-bf16"
        else:
            question["master_weights"] = "bf16"
    else:
        question["lora"] = 16
        if number > 1 and not fused:  # the plugin of fused kernels takes them out of FSDP
            question["wrap_adapters"] = True
        if number > 1:
            question["reentrant"] = True  # Transformers of 2024
        question["lora_targets"] = "c_attn" if model == "santacoder" else ATTENTION
        question["lora_dropout"] = 0.1
        question["precision"] = "amp-bf16"
        if row.task == "qlora":
            question["quantize"] = "nf4-dq"
            if "accelerated" in str(row.framework):
                question["unquantized"] = "half"
    usual = 2048 if model == "santacoder" else 4096
    tokens = round(float(row.derived_tokens_per_sample) / 2) if unpacked else usual
    ran = row.failed is not True
    source = "fms, fused kernels" if fused else "fms"
    kind = next((each for each in ("multipack", "padding-free") if each in str(row.framework)), "padded")
    return MeasuredTuning(
        source=f"{source}, {kind}" if unpacked else source,
        question=question,
        tokens=tokens,
        lengths=_ORCA_LENGTHS if unpacked and kind != "multipack" else None,
        batching=kind if kind == "padding-free" else "padded",
        step_s=float(row.derived_step_time_s) if _has(row.derived_step_time_s) else None,
        memory_bytes=None if unpacked else _peak_bytes(row, _GIB),
        memory_kind=MemoryKind.ALLOCATED,
        fits=True if ran else None,
    )


_LITGPT_MODELS = {
    "1.3 B phi-1.5": ("phi-1.5", QUERY_VALUE, 1044),
    "3 B StableLM Alpha": ("stablelm-alpha-3b", "query_key_value", 1034),
    "7 B Llama 2": ("llama-2-7b", QUERY_VALUE, 1304),
    "13 B Llama 2": ("llama-2-13b", QUERY_VALUE, 1304),
    "40 B Falcon": ("falcon-40b", "query_key_value", 1079),
}
_LITGPT_SLOWDOWN = 3.0
"""Times that launching takes longer on the machine of the table, from its rows of generation, which launching bounds:
42.6, 49.0, 31.0 and 24.8 tokens/s of four models in 16 bits ask for 3.0, 4.6, 2.5 and 2.4. No row of training took
part. The code of that time also made a tensor of some thousand indices in each layer and pass."""
_ALPACA_TOKENS = 125
"""Mean length of a sample of Alpaca: about 545 characters with the words around it (the hub's card: 47.8 MB of 52,002
rows that hold every text twice), at 4.4 characters a token."""
_ALPACA_LENGTHS = "lognormal:median=105,p95=277"
"""The lognormal law with this mean whose longest of 52,002 samples is litgpt's, 1,304 tokens with Llama 2: a spread of
0.59; from lengths alone, no time took part."""


def _litgpt(row: Any) -> MeasuredTuning:
    # bf16-true, so adapters are bf16 too, with litgpt's own dropout of 0.05; FSDP with checkpoints on several devices;
    # the first batch has the longest sample; an optimizer step for 128 samples of a device. Memory is printed in 1e9
    # bytes.
    if row.task not in ("lora", "qlora"):
        raise _LeftOutError("another adapter than LoRA")
    model, targets, longest = _LITGPT_MODELS[str(row.model)]
    number, micro = int(row.num_gpus), int(row.micro_batch)
    oom = row.oom is True
    if not oom and not _has(row.s_per_micro_step):
        raise _LeftOutError("no result")
    question: dict[str, Any] = {
        "model": model,
        "device": _gpus(number, "a100-sxm4-40gb"),
        "batch_size": micro,
        "accumulation": 128 // micro,
        "precision": "bf16",
        "master_weights": "bf16",
        "lora": 8,
        "lora_targets": targets,
        "lora_dropout": 0.05,
        "torch_version": "2.1",
        "host_slowdown": _LITGPT_SLOWDOWN,
    }
    if number > 1:
        question |= {"strategy": "fsdp", "recompute": "full", "fsdp_version": "fsdp1", "load_whole": True}
        question["reduce_once"] = True
    if row.task == "qlora":
        question["quantize"] = "nf4-dq" if str(row.quantization).endswith("dq") else "nf4"
        question["keep_inputs"] = True  # bitsandbytes 0.41.1, as the page of the table says
    return MeasuredTuning(
        question=question,
        tokens=_ALPACA_TOKENS,
        longest_tokens=longest,
        lengths=f"{_ALPACA_LENGTHS},max={longest}",
        step_s=float(row.s_per_micro_step) * (128 // micro) if _has(row.s_per_micro_step) else None,
        memory_bytes=_peak_bytes(row, _GB),
        memory_kind=MemoryKind.RESERVED,
        fits=not oom,
    )


_SWIFT_MODELS = {
    "qwen-1_8b-chat": "qwen1.5-1.8b",
    "qwen-7b-chat": "qwen1.5-7b",
    "qwen-14b-chat": "qwen1.5-14b",
    "qwen-72b-chat": "qwen1.5-72b",
    "openbuddy-zephyr-7b-chat": "mistral-7b",
}


def _swift(row: Any) -> MeasuredTuning:
    # Lengths vary; at the mean that the source states, cut at seq_len, some rows would run above the device's peak, so
    # their times say nothing. Memory is that of samples of seq_len tokens. Qwen and Qwen 1.5 have the same sizes. The
    # dropout of adapters is ms-swift's own, 0.05.
    model = _SWIFT_MODELS.get(str(row.model))
    if model is None:
        raise _LeftOutError("model outside of Transformers, or a quantization that forerun has not")
    if not _has(row.seq_len):
        raise _LeftOutError("length of samples not stated")
    if row.task not in ("lora", "qlora", "full"):
        raise _LeftOutError("another adapter than LoRA")
    if "gptq" in str(row.quantization):
        raise _LeftOutError("GPTQ")
    if int(row.num_gpus) > 1:
        raise _LeftOutError("model split by layers over devices without a pipeline")
    question: dict[str, Any] = {
        "model": model,
        "device": "a100-sxm4-80gb",
        "batch_size": int(row.micro_batch),
        "accumulation": int(row.grad_accum),
        "recompute": str(row.act_ckpt),
        "torch_version": "2.1",
    }
    if row.attention == "eager":
        question["fused_attention"] = False
    if row.task == "full":
        question |= {"precision": "bf16", "master_weights": "bf16"}
    else:
        question |= {
            "precision": "amp-bf16",
            "lora": int(row.lora_rank),
            "lora_dropout": 0.05,
            "lora_targets": "all-linear" if "ALL (all" in str(row.lora_targets) else "q_proj,k_proj,v_proj",
        }
        if row.task == "qlora":
            question["quantize"] = "nf4-dq"
    return MeasuredTuning(
        is_uneven=True,
        question=question,
        tokens=None,
        longest_tokens=int(row.seq_len),
        memory_bytes=_peak_bytes(row, _GIB),
        memory_kind=MemoryKind.RESERVED,
        fits=row.oom is not True,
    )


def _torchtune(row: Any) -> MeasuredTuning:
    # The table of one device: batch 2, 4,096 tokens, bf16, each row adds a technique; its files
    # of full tuning have fused AdamW. That of eight: batch 2, packed to
    # 2,048 tokens, compiled.
    if row.model == "Llama 3.2 3B":
        step = int(row.ablation_step)
        if step == 1:
            raise _LeftOutError("length of samples not stated")
        if step > 5:
            raise _LeftOutError("update in the backward pass or offload of activations")
        question: dict[str, Any] = {
            "model": "llama-3.2-3b",
            "device": "a100-sxm4-80gb",
            "master_weights": "bf16",
            "optimizer_implementation": "fused",
        }
        if step >= 3:
            question["compile"] = True
        if step >= 4:
            question["loss"] = "chunked"
        if step >= 5:
            question["recompute"] = "full"
        tokens = 4096
    elif row.task == "lora" and row.model == "Llama 3.1 70B":
        question = {
            "model": "llama-3.1-70b",
            "device": "8xa100-sxm4-80gb",
            "strategy": "fsdp",
            "compile": True,
            "recompute": "full",
            "master_weights": "bf16",
            "lora": 16,
            "lora_targets": "q_proj,v_proj,lm_head",
        }
        tokens = 2048
    else:
        raise _LeftOutError("length of samples or offload not stated")
    question |= {"batch_size": 2, "precision": "bf16"}
    number = int(row.num_gpus)
    return MeasuredTuning(
        question=question,
        tokens=tokens,
        step_s=2 * tokens * number / float(row.tokens_per_s),
        memory_bytes=_peak_bytes(row, _GIB),
        memory_kind=MemoryKind.ALLOCATED,
    )


_AUTOMODEL_MODELS = {
    "Llama3 8B": "llama-3-8b",
    "Qwen2.5 7B": "qwen2.5-7b",
    "Llama3 70B": "llama-3-70b",
    "Qwen2.5 32B": "qwen2.5-32b",
    "Llama3 70B 2-node": "llama-3-70b",
    "Qwen2.5 32B 2-node": "qwen2.5-32b",
}


def _automodel(row: Any) -> MeasuredTuning:
    # Its files of the benchmark (``examples/llm_benchmark``): all linear layers have adapters of rank 16, on one device
    # with a dropout of 0.1; Triton's functions for them, and Liger's kernels but for the loss, which its class loads by
    # itself; no checkpoints on one device, where the file names none. The files of several devices say checkpoints,
    # torch.compile (enable_compile) and bf16 weights, that of pre-training a fused optimizer.
    model = _AUTOMODEL_MODELS.get(str(row.model))
    if model is None:
        raise _LeftOutError("mixture of experts")
    number = int(row.num_gpus)
    question: dict[str, Any] = {
        "model": model,
        "device": "h100-sxm" if number == 1 else f"{-(-number // 8)}x8xh100-sxm",
        "batch_size": int(row.micro_batch),
        "accumulation": int(row.grad_accum),
        "precision": "bf16",
        "recompute": "none" if number == 1 else "full",
        "master_weights": "bf16",
    }
    if row.task == "lora":
        question["lora"] = 16
    else:
        question["optimizer_implementation"] = "fused"
    if number == 1:
        question |= {"lora_dropout": 0.1, "fused_kernels": "norm,rope,mlp,lora"}
    else:
        question["compile"] = True
        axes = {"tp": int(row.tp), "cp": int(row.cp), "dp": number // int(row.tp * row.cp)}
        question |= {
            "strategy": "fsdp",
            "parallel": ",".join(f"{name}={size}" for name, size in axes.items() if size > 1),
        }
        if number > 8:
            question["inter"] = "8xinfiniband-ndr"
    return MeasuredTuning(
        source="Automodel", question=question, tokens=int(row.seq_len), step_s=float(row.step_time_s)
    )


_FMS_FSDP_MODELS = {"llama2-7b": "llama-2-7b", "llama2-13b": "llama-2-13b", "llama2-70b": "llama-2-70b"}


def _fms_fsdp(row: Any) -> MeasuredTuning:
    model = _FMS_FSDP_MODELS.get(str(row.model))
    if model is None:
        raise _LeftOutError("sizes of the model not published")
    number, hopper = int(row.num_gpus), str(row.gpu).startswith("H100")
    question = {
        "model": model,
        "device": f"{number // 8}x8x{'h100-sxm' if hopper else 'a100-sxm4-80gb'}",
        "inter": "8xinfiniband-ndr" if hopper else "8xinfiniband-hdr",
        "batch_size": int(row.micro_batch),
        "precision": "amp-bf16",
        "compile": True,
        "strategy": str(row.sharding),
        "recompute": str(row.act_ckpt),
    }
    return MeasuredTuning(question=question, tokens=int(row.seq_len), step_s=_packed_step_s(row))


def _ao(row: Any) -> MeasuredTuning:
    # torchtitan's selective checkpoints and compiled blocks, with a loss that its train.py did not compile before April
    # 2025; scales of a tensor are what forerun's fp8 has.
    if not str(row.gpu).startswith("H100"):
        raise _LeftOutError("device outside of the calibrated ones")
    if "rowwise" in str(row.precision):
        raise _LeftOutError("scales of a row in fp8")
    question = {
        "model": "llama-3-8b",
        "device": "8xh100-sxm",
        "batch_size": int(row.micro_batch),
        "precision": "amp-bf16" if row.precision == "bf16" else "fp8",
        "compile": True,
        "compile_loss": False,
        "strategy": "fsdp",
        "recompute": "selective",
    }
    if row.precision != "bf16":
        question["master_weights"] = "fp32"
    return MeasuredTuning(
        question=question,
        tokens=int(row.seq_len),
        step_s=_packed_step_s(row),
        memory_bytes=_peak_bytes(row, _GIB),
        memory_kind=MemoryKind.RESERVED,
    )


_Reader = Callable[[Any], MeasuredTuning]
SOURCES: dict[str, tuple[str, _Reader]] = {
    "peft": ("huggingface/peft", _peft),
    "fms": ("foundation-model-stack/fms-acceleration", _fms),
    "litgpt": ("Lightning-AI/litgpt", _litgpt),
    "ms-swift": ("modelscope/ms-swift", _swift),
    "torchtune": ("pytorch/torchtune", _torchtune),
    "automodel": ("NVIDIA-NeMo/Automodel", _automodel),
    "fms-fsdp": ("foundation-model-stack/fms-fsdp", _fms_fsdp),
    "torchao": ("pytorch/ao", _ao),
}
"""Names of the study's sources, their repositories and their readers."""


def read_rows(folder: Path, source: str) -> ReadRows:
    """Rows of one source of ``SOURCES`` from the tables in ``llm`` of a folder."""
    repository, reader = SOURCES[source]
    table = public_table(folder, "llm/peft_runs" if source == "peft" else "llm/llm_training")
    found = ReadRows()
    for index, row in table[table.source == repository].iterrows():
        try:
            found.rows.append(_completed(reader(row), source, int(str(index))))
        except _LeftOutError as reason:
            found.left_out[str(reason)] = found.left_out.get(str(reason), 0) + 1
    return found


def _completed(found: MeasuredTuning, source: str, row: int) -> MeasuredTuning:
    """A row with its place and what all sources do: AdamW, and samples that are as long as most unless told."""
    return replace(
        found,
        source=found.source or source,
        row=row,
        question={"optimizer": "adamw", **found.question},
        longest_tokens=found.longest_tokens or found.tokens,
    )
