"""Ways to save memory: recomputation, adapters, quantized and frozen weights, fused losses, offload."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from forerun.errors import InvalidSetupError

__all__ = [
    "LARGEST_DROPOUT",
    "LORA_RANKS",
    "Fp8Recipe",
    "FusedKernel",
    "Loss",
    "MasterWeights",
    "Offload",
    "Quantization",
    "Saving",
    "Unquantized",
    "fused_kernels_of",
    "listed_names",
    "own_loss_of",
    "recomputed_blocks",
]

LORA_RANKS = (1, 65_536)
LARGEST_DROPOUT = 0.9

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
    """Activation and product of a gated MLP."""
    LORA = "lora"
    """A linear layer with its adapters, as one function."""


_LIBRARIES: dict[str, tuple[FusedKernel, ...]] = {
    "liger": (FusedKernel.NORM, FusedKernel.ROPE, FusedKernel.MLP),
    "unsloth": tuple(FusedKernel),
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """Ways to save memory in a step; every one changes the traced step.

    Attributes:
        recompute: Activations computed again in the backward pass: none, selective (all but products and attention),
            full (all of every block) or every-K (all of every K-th block).
        lora_rank: Rank of the adapters (LoRA), None without adapters.
        lora_targets: Names of the linear layers that get adapters; empty for all linear layers but the head.
        lora_dropout: Share of the adapters' inputs that a step leaves out.
        quantize: Format of the frozen weights, None for the precision's own.
        unquantized: Format of the weights beside quantized ones, None for fp32 under autocast and half otherwise.
        freeze: Names of modules whose weights are not trained.
        loss: Cross entropy of a language model.
        offload: Contents that are held in the memory of the host.
        master_weights: Format of the weights that the optimizer updates, None for the precision's own.
        fused_kernels: Parts of the network that run as one kernel a pass.
        fp8_recipe: Scales of products in fp8, None for torchao's dynamic ones.
    """

    recompute: str = "none"
    lora_rank: int | None = None
    lora_targets: tuple[str, ...] = ()
    lora_dropout: float = 0.0
    quantize: Quantization | None = None
    unquantized: Unquantized | None = None
    freeze: tuple[str, ...] = ()
    loss: Loss = Loss.PLAIN
    offload: Offload = Offload.NONE
    master_weights: MasterWeights | None = None
    fused_kernels: tuple[FusedKernel, ...] = ()
    fp8_recipe: Fp8Recipe | None = None

    def __post_init__(self) -> None:
        recomputed_blocks(self.recompute)
        if self.lora_targets and self.lora_rank is None:
            raise InvalidSetupError(
                "--lora-targets has no meaning without --lora; give the rank, such as --lora 16"
            )
        low, high = LORA_RANKS
        if self.lora_rank is not None and not low <= self.lora_rank <= high:
            raise InvalidSetupError(f"the rank of LoRA must be {low} to {high:,}, got {self.lora_rank}")
        if not 0 <= self.lora_dropout <= LARGEST_DROPOUT:
            raise InvalidSetupError(
                f"the dropout of adapters must be 0 to {LARGEST_DROPOUT}, got {self.lora_dropout}; give, for example, "
                "--lora-dropout 0.05"
            )
        if self.lora_dropout and self.lora_rank is None:
            raise InvalidSetupError(
                "--lora-dropout has no meaning without --lora; give the rank, such as --lora 16"
            )
        if self.fused_kernels == (FusedKernel.LORA,) and self.lora_rank is None:
            raise InvalidSetupError(
                "--fused-kernels lora has no meaning without --lora; give the rank, such as --lora 16"
            )
        if self.unquantized is not None and self.quantize is None:
            raise InvalidSetupError(
                "--unquantized has no meaning without --quantize; give the format, such as --quantize nf4"
            )


def recomputed_blocks(recompute: str) -> int:
    """Distance of the blocks that are computed again: 1 for all of them, K for every K-th, 0 for none.

    >>> [recomputed_blocks(word) for word in ("none", "full", "every-4", "selective")]
    [0, 1, 4, 1]

    Raises:
        InvalidSetupError: The word is not known.
    """
    known = {"none": 0, "full": 1, "selective": 1}
    if recompute in known:
        return known[recompute]
    match = _EVERY.fullmatch(recompute)
    if match is None:
        raise InvalidSetupError(
            f"unknown recomputation '{recompute}'; expected none, selective, full or every-K, such as every-2"
        )
    return int(match[1])


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


def listed_names(given: str | Sequence[str]) -> tuple[str, ...]:
    """The names of a list, or of one text with commas."""
    names = given.split(",") if isinstance(given, str) else given
    return tuple(str(name).strip() for name in names if str(name).strip())
