"""Public transformer measurements (NeuSight) with the Transformers configuration of each model."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.base.errors import RecordError
from forerun.base.kept import cache_folder
from forerun.base.tables import check_positive, check_unique
from forerun.evidence.records.step_record import StepRecord
from forerun.prediction.step import PreparedModel, prepare
from forerun.question.devices import find_device
from forerun.question.model import ModelRequest
from forerun.question.setup import Phase, Precision, TrainingSetup
from forerun.tracing.trace import trace
from studies.tables.public import integer_or_none, public_table

_TABLE = "neusight_e2e"
_PREDICTORS = ("neusight", "habitat", "roofline", "micro")
_SIZES = ("num_layers", "hidden_size", "num_heads", "ffn_size", "vocab_size")
_KEY = ("model", "mode", "gpu", "compiler", "batch_size", "seq_len")
_COLUMNS = (
    "model", "arch", *_SIZES, "num_experts", "expert_capacity", "mode", "gpu", "n_gpus", "compiler", "dtype",
    "torch_version", "batch_size", "seq_len", "measured_ms_e2e", "measured_ms_forward",
    "measured_ms_backward",
    *(f"pred_{name}_ms_e2e" for name in _PREDICTORS),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerRow:
    """One measured transformer step with the sizes of its model.

    Attributes:
        record: The measurement: forward, or forward plus backward; no loss, no update, no data loading.
        arch: bert, gpt2, opt or switch_transformers.
        num_layers: Layers; encoder and decoder together where there are both.
        hidden_size: Width of the residual stream.
        num_heads: Attention heads.
        ffn_size: Width of the feed-forward layers.
        vocab_size: Tokens of the vocabulary.
        num_experts: Experts of a sparse layer, None if there are none.
        expert_capacity: Tokens an expert accepts.
        forward_time_s: Forward pass, timed on its own [s].
        backward_time_s: Backward pass, timed on its own [s]; None in inference.
        published_time_s: Step time [s] others predicted: neusight, habitat, roofline, micro; gaps left out.
    """

    record: StepRecord
    arch: str
    num_layers: int
    hidden_size: int
    num_heads: int
    ffn_size: int
    vocab_size: int
    num_experts: int | None
    expert_capacity: int | None
    forward_time_s: float
    backward_time_s: float | None
    published_time_s: Mapping[str, float]


def read_neusight_e2e(folder: Path) -> list[TransformerRow]:
    """Transformer steps on one GPU, fp32 without TF32, eager attention.

    Every step pays cudaMalloc (the script empties the caching allocator first), and gradients accumulate.
    Source: Lee, Phanishayee and Mahajan, ASPLOS 2025; github.com/sitar-lab/NeuSight.
    """
    frame = public_table(folder, _TABLE, _COLUMNS)
    frame = frame[frame["n_gpus"] == 1].reset_index(drop=True)
    check_positive(frame, _TABLE, ["measured_ms_e2e", "measured_ms_forward", "batch_size", "seq_len"])
    check_unique(frame, _TABLE, _KEY)
    return [_transformer_row(row) for row in frame.to_dict("records")]


def _transformer_row(row: Mapping[Any, Any]) -> TransformerRow:
    if row["dtype"] != "fp32":
        raise RecordError(f"{_TABLE}, column 'dtype': expected fp32, got '{row['dtype']}'")
    published = {name: float(row[f"pred_{name}_ms_e2e"]) / 1e3 for name in _PREDICTORS}
    backward_ms = float(row["measured_ms_backward"])
    return TransformerRow(
        record=_record(row),
        arch=row["arch"],
        **{name: int(row[name]) for name in _SIZES},
        num_experts=integer_or_none(row["num_experts"]),
        expert_capacity=integer_or_none(row["expert_capacity"]),
        forward_time_s=float(row["measured_ms_forward"]) / 1e3,
        backward_time_s=backward_ms / 1e3 if backward_ms == backward_ms else None,
        # A predictor that skipped a row left NaN, the only value unequal to itself.
        published_time_s={name: time_s for name, time_s in published.items() if time_s == time_s},
    )


def _record(row: Mapping[Any, Any]) -> StepRecord:
    return StepRecord(
        source=_TABLE,
        row_id=" ".join(str(row[name]) for name in _KEY),
        model=f"hf:{row['model']}",
        family=row["arch"],
        device=find_device(row["gpu"]).name,
        batch_size_per_device=int(row["batch_size"]),
        sequence_length=int(row["seq_len"]),
        step_time_s=float(row["measured_ms_e2e"]) / 1e3,
        precision=Precision.FP32,
        phase=Phase.TRAIN if row["mode"] == "train" else Phase.INFERENCE,
        compile=row["compiler"] != "eager",
        fused_attention=False,
        framework_version=str(row["torch_version"]),
        note="no loss, no optimizer; the caching allocator is emptied before every step",
    )


def transformer_config(row: TransformerRow) -> dict[str, object]:
    """The Transformers configuration of a row's model, as its ``config.json`` would say.

    BERT has the pre-training heads in training and a classification head in inference; the others have a
    language-model head. ``_attn_implementation`` is eager, as measured.
    """
    builders = {"bert": _bert, "gpt2": _gpt2, "opt": _opt, "switch_transformers": _switch}
    if row.arch not in builders:
        raise RecordError(f"expected an architecture of {', '.join(builders)}, got '{row.arch}'")
    common = {"model_type": row.arch, "vocab_size": row.vocab_size, "_attn_implementation": "eager"}
    return common | builders[row.arch](row)


def _longest_input(row: TransformerRow, usual: int) -> int:
    return max(usual, row.record.sequence_length or 0)


def _bert(row: TransformerRow) -> dict[str, object]:
    is_train = row.record.phase is Phase.TRAIN
    return {
        "architectures": ["BertForPreTraining" if is_train else "BertForSequenceClassification"],
        "hidden_size": row.hidden_size,
        "num_hidden_layers": row.num_layers,
        "num_attention_heads": row.num_heads,
        "intermediate_size": row.ffn_size,
        "max_position_embeddings": _longest_input(row, 512),
        "type_vocab_size": 2,
    }


def _gpt2(row: TransformerRow) -> dict[str, object]:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "n_embd": row.hidden_size,
        "n_layer": row.num_layers,
        "n_head": row.num_heads,
        "n_inner": row.ffn_size,
        "n_positions": _longest_input(row, 1024),
    }


def _opt(row: TransformerRow) -> dict[str, object]:
    return {
        "architectures": ["OPTForCausalLM"],
        "hidden_size": row.hidden_size,
        "word_embed_proj_dim": row.hidden_size,
        "num_hidden_layers": row.num_layers,
        "num_attention_heads": row.num_heads,
        "ffn_dim": row.ffn_size,
        "max_position_embeddings": _longest_input(row, 2048),
        "do_layer_norm_before": True,
    }


def _switch(row: TransformerRow) -> dict[str, object]:
    # As configured by the source: 24 + 24 layers, every second one sparse, heads of 128 (the T5-3B shape).
    layers = row.num_layers // 2
    return {
        "architectures": ["SwitchTransformersForConditionalGeneration"],
        "is_encoder_decoder": True,
        "d_model": row.hidden_size,
        "d_kv": 128,
        "d_ff": row.ffn_size,
        "num_layers": layers,
        "num_decoder_layers": layers,
        "num_sparse_encoder_layers": layers // 2,
        "num_sparse_decoder_layers": layers // 2,
        "num_heads": row.num_heads,
        "num_experts": row.num_experts,
        "expert_capacity": row.expert_capacity,
        "feed_forward_proj": "relu",
        "dense_act_fn": "relu",
        "pad_token_id": 0,
        "decoder_start_token_id": 0,
    }


def transformer_requests(rows: Sequence[TransformerRow]) -> list[ModelRequest]:
    """Writes the configuration of each row's model to the cache folder and asks for that."""
    requests = []
    for row in rows:
        text = json.dumps(transformer_config(row), sort_keys=True, indent=1)
        name = row.record.model.removeprefix("hf:")
        path = cache_folder() / "configs" / f"{name}-{row.record.phase}-{row.record.sequence_length}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
        requests.append(ModelRequest(model=f"hf:{path}", sequence_length=row.record.sequence_length))
    return requests


def prepared_bert(
    setup: TrainingSetup,
    num_tokens: int,
    *,
    hidden_size: int = 768,
    num_layers: int = 12,
    head: str = "BertForQuestionAnswering",
) -> PreparedModel:
    """A BERT by its sizes (Devlin et al. 2019), base unless told otherwise, with the head of a task."""
    config = {
        "model_type": "bert",
        "architectures": [head],
        "hidden_size": hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": hidden_size // 64,
        "intermediate_size": 4 * hidden_size,
        "vocab_size": 30522,
        "max_position_embeddings": 512,
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(config), encoding="utf-8")
        return prepare(trace(ModelRequest(model=f"hf:{path}", sequence_length=num_tokens), setup))
