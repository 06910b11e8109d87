"""Ways to save memory: recomputation, adapters, quantized and frozen weights, fused losses, offload."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any, TypedDict

from forerun.base.errors import InvalidSetupError
from forerun.question.settings import check_numbers, from_settings, setting

_EVERY = re.compile(r"every-([1-9][0-9]{0,4})")


class Quantization(StrEnum):
    """Format in which frozen weights of linear layers are held (bitsandbytes)."""

    NF4 = "nf4"
    NF4_DQ = "nf4-dq"
    """The same with its scales in 8 bits (double quantization)."""
    INT8 = "int8"


class Unquantized(StrEnum):
    """Format of the weights that stay as they are beside quantized ones: norms, embeddings, head."""

    FP32 = "fp32"
    """That of peft's ``prepare_model_for_kbit_training``; what flows between the layers is fp32 then."""
    HALF = "half"


class Loss(StrEnum):
    """Cross entropy of a language model."""

    PLAIN = "plain"
    """All logits at once, as the model writes it."""
    CHUNKED = "chunked"
    """The head and the loss in pieces of the tokens, each piece computed again in the backward pass."""
    LIGER = "liger"
    """Head and loss in one function that computes the gradients in the forward pass (Liger-Kernel)."""
    FUSED = "fused"
    """All logits at once, with one kernel a pass for the loss, whose gradient overwrites them."""


class FusedKernel(StrEnum):
    """Part of a network that a library runs as one kernel a pass."""

    NORM = "norm"
    """RMSNorm."""
    ROPE = "rope"
    """Rotary embeddings of queries and keys, in place."""
    MLP = "mlp"
    """Activation and product of a gated MLP, or of experts with the weights of their tokens."""
    LORA = "lora"
    """A linear layer with its adapters, as one function."""
    EXPERTS = "experts"
    """Grouped products of experts in MXFP8 with the activation between them and the casts of both passes."""


_LIBRARIES: dict[str, tuple[FusedKernel, ...]] = {
    "liger": (FusedKernel.NORM, FusedKernel.ROPE, FusedKernel.MLP),
    "unsloth": (FusedKernel.NORM, FusedKernel.ROPE, FusedKernel.MLP, FusedKernel.LORA),
}


class Fp8Recipe(StrEnum):
    """Scales of the operands of products in fp8, and the kernels that write these operands."""

    DYNAMIC = "dynamic"
    """torchao: a scale a tensor, from its own largest value; weights are cast in every pass."""
    DELAYED = "delayed"
    """Transformer Engine: a scale a tensor, from earlier steps, so that one kernel casts; weights are held in fp8."""
    CURRENT = "current"
    """Transformer Engine: a scale a tensor, from its own largest value; weights are held in fp8."""
    MX = "mx"
    """Transformer Engine: a scale for each 32 values (MXFP8), in one kernel; weights are held in fp8."""


class Offload(StrEnum):
    """Contents that are held in the memory of the host."""

    NONE = "none"
    OPTIMIZER = "optimizer"
    PARAMETERS = "parameters"
    """Weights as well as the state of the optimizer."""


class MasterWeights(StrEnum):
    """Format of the weights that the optimizer updates."""

    FP32 = "fp32"
    BF16 = "bf16"


def listed_names(given: str | Sequence[str]) -> tuple[str, ...]:
    """The names of a list, or of one text with commas."""
    names = given.split(",") if isinstance(given, str) else given
    return tuple(str(name).strip() for name in names if str(name).strip())


def fused_kernels_of(words: str | Sequence[str]) -> tuple[FusedKernel, ...]:
    """Parts of a network by their names, or by those of the libraries that fuse them.

    >>> [str(part) for part in fused_kernels_of("liger")]
    ['norm', 'rope', 'mlp']

    Raises:
        InvalidSetupError: A name is not known.
    """
    chosen: set[FusedKernel] = set()
    for word in map(str.lower, listed_names(words)):
        if word in _LIBRARIES:
            chosen.update(_LIBRARIES[word])
        elif word in set(FusedKernel):
            chosen.add(FusedKernel(word))
        elif word != "none":
            raise InvalidSetupError(
                f"unknown fused kernels '{word}'; expected {', '.join(_LIBRARIES)}, none, or parts: "
                f"{', '.join(FusedKernel)}, such as norm,rope"
            )
    return tuple(part for part in FusedKernel if part in chosen)


def own_loss_of(words: str | Sequence[str]) -> Loss:
    """The loss that a library of fused kernels brings along.

    >>> str(own_loss_of("liger")), str(own_loss_of("norm,rope"))
    ('liger', 'plain')
    """
    return Loss.LIGER if any(word.lower() in _LIBRARIES for word in listed_names(words)) else Loss.PLAIN


def recomputed_blocks(recompute: str) -> int:
    """Distance of the blocks that are computed again: 1 for all of them, K for every K-th, 0 for none.

    >>> [recomputed_blocks(word) for word in ("none", "full", "every-4", "selective")]
    [0, 1, 4, 1]

    Raises:
        InvalidSetupError: The word is not known.
    """
    known = {"none": 0, "full": 1, "offload": 1, "selective": 1}
    if recompute in known:
        return known[recompute]
    match = _EVERY.fullmatch(recompute)
    if match is None:
        raise InvalidSetupError(
            f"unknown recomputation '{recompute}'; expected none, selective, full, offload or every-K, such as every-2"
        )
    return int(match[1])


def _word(given: str) -> str:
    return str(given).strip().lower().replace("_", "-")


_saving = partial(setting, group="saving", only_changed=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """Ways to save memory in a step; every one changes the traced step."""

    recompute: str = _saving(
        "none",
        help="Activations computed again in the backward pass: none, selective (all but attention and every "
        "second product), full, offload (full, with the inputs of the blocks held by the host, as unsloth does), or "
        "every-K (every K-th block).",
        metavar="NAME",
        read=_word,
    )
    lora_rank: int | None = _saving(
        None,
        name="lora",
        help="Rank of LoRA adapters; the model's own weights are then frozen.",
        words="the rank of LoRA",
        metavar="RANK",
        low=1,
        high=65_536,
    )
    lora_targets: tuple[str, ...] = _saving(
        (),
        help="Linear layers that get adapters, by the last part of their names, or a pattern of their paths.",
        default="all linear layers but the head",
        metavar="q_proj,v_proj",
        read=listed_names,
    )
    lora_dropout: float = _saving(
        0.0,
        help="Share of the adapters' inputs that every step leaves out, such as 0.05.",
        words="the dropout of adapters",
        default="0, as in peft",
        metavar="SHARE",
        low=0,
        high=0.9,
    )
    quantize: Quantization | None = _saving(
        None,
        help="Format of the frozen weights of linear layers beside adapters: nf4, nf4-dq (its scales in 8 bits, "
        "as QLoRA has them) or int8.",
        words="quantization",
    )
    unquantized: Unquantized | None = _saving(
        None,
        help="Format of the weights that --quantize leaves as they are, such as norms and embeddings: fp32, as peft's "
        "prepare_model_for_kbit_training makes them, or half.",
        default="fp32 under autocast on each device alone, else half",
    )
    quantize_experts: bool = _saving(
        False,
        help="With --quantize nf4 or nf4-dq: experts that a block holds as one tensor are quantized too (axolotl's "
        "quantize_moe_experts; Transformers before 5, which held each as a layer).",
    )
    keep_inputs: bool = _saving(
        False,
        help="With --quantize nf4 or nf4-dq: products keep their inputs for the backward pass (bitsandbytes before "
        "0.43.2).",
    )
    freeze: tuple[str, ...] = _saving(
        (),
        help="Modules whose weights are not trained, by name, separated by commas, such as model.embed_tokens.",
        metavar="NAMES",
        read=listed_names,
    )
    loss: Loss = _saving(
        Loss.PLAIN,
        help="Cross entropy of a language model: plain, chunked (in pieces of the tokens), liger (one function "
        "with the head) or fused (one kernel a pass on all logits).",
        default="plain; liger with --fused-kernels liger or unsloth",
    )
    fused_kernels: tuple[FusedKernel, ...] = _saving(
        (),
        help="Kernels of a library in place of the model's own: liger (as use_liger_kernel), unsloth, or parts: "
        "norm, rope, mlp, lora, experts (Transformer Engine's with --fp8-recipe mx), separated by commas.",
        default="none",
        metavar="liger",
        read=fused_kernels_of,
    )
    offload: Offload = _saving(
        Offload.NONE,
        help="Contents held in the host's memory: none, optimizer (its state), or parameters (weights as well).",
    )
    master_weights: MasterWeights | None = _saving(
        None,
        help="Format of the weights that the optimizer updates: fp32 or bf16.",
        default="the precision's own; fp32 for adapters, zero2 and zero3",
    )
    fp8_recipe: Fp8Recipe | None = _saving(
        None,
        help="With precision fp8: scales and kernels: dynamic (torchao), or delayed, current or mx (Transformer "
        "Engine, whose weights are held in fp8).",
        words="fp8 recipe",
        default="dynamic",
    )

    def __post_init__(self) -> None:
        recomputed_blocks(self.recompute)
        check_numbers(self)
        fuses = self.fused_kernels == (FusedKernel.LORA,)
        of_adapters = (("targets", self.lora_targets), ("dropout", self.lora_dropout), ("", fuses))
        for name, given in of_adapters if self.lora_rank is None else ():
            if given:
                option = f"--lora-{name}" if name else "--fused-kernels lora"
                raise InvalidSetupError(
                    f"{option} has no meaning without --lora; give the rank, such as --lora 16"
                )
        if self.unquantized is not None and self.quantize is None:
            raise InvalidSetupError(
                "--unquantized has no meaning without --quantize; give the format, such as --quantize nf4"
            )
        for name in ("keep_inputs", "quantize_experts"):
            if getattr(self, name) and self.quantize not in (Quantization.NF4, Quantization.NF4_DQ):
                raise InvalidSetupError(
                    f"--{name.replace('_', '-')} is for weights in 4 bits, got {self.quantize or 'none'}; give "
                    "--quantize nf4 or nf4-dq"
                )


NO_SAVING = Saving()
"""Plain training."""


class SavingOptions(TypedDict, total=False):
    """Ways to save memory by name."""

    recompute: str | None
    lora: int | None
    lora_targets: str | Sequence[str] | None
    lora_dropout: float | None
    quantize: str | None
    unquantized: str | None
    quantize_experts: bool | None
    keep_inputs: bool | None
    freeze: str | Sequence[str] | None
    loss: str | None
    fused_kernels: str | Sequence[str] | None
    offload: str | None
    master_weights: str | None
    fp8_recipe: str | None


def saving_from(given: Mapping[str, Any]) -> Saving:
    """Ways to save memory from settings by name; a library of fused kernels brings its loss along."""
    own = {"loss": own_loss_of(given["fused_kernels"])} if "fused_kernels" in given else {}
    return Saving(**{**own, **from_settings(Saving, given)})
