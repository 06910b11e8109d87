"""The training setup: everything that a prediction depends on besides the model and the device."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeVar

from forerun.errors import InvalidSetupError
from forerun.run.saving import FusedKernel, MasterWeights, Offload, Saving, Unquantized

__all__ = [
    "FLASH_3_GAIN",
    "MAX_BATCH_SIZE",
    "AttentionKernel",
    "Layout",
    "OptimizerImplementation",
    "Phase",
    "Precision",
    "TrainingSetup",
    "choice",
]

MAX_BATCH_SIZE = 10_000_000


class Precision(StrEnum):
    """Precision of the step.

    ``AMP`` is autocast to fp16 over forward and backward with fp32 weights, ``AMP_BF16`` the same to bf16;
    ``BF16`` and ``FP16`` hold weights and activations in that format; ``TF32`` is fp32 storage with TF32
    matrix products; ``FP8`` is BF16 with the products of linear layers in fp8.
    """

    FP32 = "fp32"
    TF32 = "tf32"
    AMP = "amp"
    AMP_BF16 = "amp-bf16"
    BF16 = "bf16"
    FP16 = "fp16"
    FP8 = "fp8"

    @property
    def is_autocast(self) -> bool:
        """True if weights stay fp32 and single operations are cast."""
        return self in (Precision.AMP, Precision.AMP_BF16)

    @property
    def is_half(self) -> bool:
        """True if matrix products read 2-byte operands."""
        return self not in (Precision.FP32, Precision.TF32)


class Layout(StrEnum):
    """Memory order of image tensors."""

    NCHW = "nchw"
    NHWC = "nhwc"


class Phase(StrEnum):
    """Part of the step: a training step, its forward pass alone, or inference without gradients."""

    TRAIN = "train"
    FORWARD = "forward"
    INFERENCE = "inference"


class AttentionKernel(StrEnum):
    """Library of fused attention: what a causal mask saves, and how fast it is on Hopper."""

    PLAIN = "plain"
    """As long with a causal mask as without: FlashAttention-1 and kernels of its time."""
    FLASH_2 = "flash-2"
    """Masked tiles are left out, so that causal attention takes half as long."""
    FLASH_3 = "flash-3"
    """The same with kernels for Hopper: FlashAttention-3, cuDNN's in Transformer Engine."""


FLASH_3_GAIN = 1.7
"""Time of FlashAttention-2 on Hopper over that of FlashAttention-3: 1.5 to 2.0 forward and 1.5 to 1.75 backward (Shah
et al. 2024, arXiv 2407.08608)."""


class OptimizerImplementation(StrEnum):
    """Kernels of the optimizer's update: one per tensor, multi-tensor, or one fused kernel."""

    FOR_LOOP = "for-loop"
    FOREACH = "foreach"
    FUSED = "fused"


_CHOICES: dict[str, type[StrEnum]] = {
    "precision": Precision,
    "layout": Layout,
    "optimizer_implementation": OptimizerImplementation,
    "phase": Phase,
    "attention_kernel": AttentionKernel,
}


_Choice = TypeVar("_Choice", bound=StrEnum)


def choice(kind: type[_Choice], value: str, name: str) -> _Choice:
    """A member of a choice by its word, whatever the case and the dashes.

    Raises:
        InvalidSetupError: There is no such member.
    """
    try:
        return kind(str(value).lower().replace("_", "-"))
    except ValueError:
        raise InvalidSetupError(f"unknown {name} {str(value)!r}; expected one of {', '.join(kind)}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSetup:
    """The training configuration of one device.

    The four choices may be given as words, such as ``precision="amp"``.

    Attributes:
        batch_size_per_device: Samples that one device processes in one step.
        precision: Precision of the step.
        layout: Memory order of images.
        compile: Whether the step runs under torch.compile (inductor).
        optimizer: sgd, sgd-plain, nesterov, adam, adamw, rmsprop, adagrad, lamb or none.
        optimizer_implementation: Kernel granularity of the update.
        phase: Training step, forward, or inference.
        fused_attention: Whether scaled_dot_product_attention runs as one kernel.
        attention_kernel: Library of fused attention.
        zero_grad_to_none: Whether gradients are freed between steps (PyTorch's default since 2.0).
        autocast_backward: Whether the autocast region also spans the backward pass.
        keeps_gradients: Whether gradients are summed over several micro-steps, and so live through all of them.
        saving: Ways to save memory.
    """

    batch_size_per_device: int = 32
    precision: Precision = Precision.FP32
    layout: Layout = Layout.NCHW
    compile: bool = False
    optimizer: str = "sgd"
    optimizer_implementation: OptimizerImplementation = OptimizerImplementation.FOREACH
    phase: Phase = Phase.TRAIN
    fused_attention: bool = True
    attention_kernel: AttentionKernel = AttentionKernel.PLAIN
    zero_grad_to_none: bool = True
    autocast_backward: bool = False
    keeps_gradients: bool = False
    saving: Saving = field(default_factory=Saving)

    def __post_init__(self) -> None:
        for name, kind in _CHOICES.items():
            object.__setattr__(self, name, choice(kind, getattr(self, name), name.replace("_", " ")))
        if not 1 <= self.batch_size_per_device <= MAX_BATCH_SIZE:
            raise InvalidSetupError(
                f"batch size must be between 1 and {MAX_BATCH_SIZE:,}, got {self.batch_size_per_device}"
            )
        if not self.fused_attention and self.attention_kernel is not AttentionKernel.PLAIN:
            raise InvalidSetupError(
                f"--attention-kernel {self.attention_kernel} is fused attention, got attention in parts; leave "
                "--no-fused-attention out"
            )
        self._check_saving()

    @property
    def widens_unquantized(self) -> bool:
        """True if the weights beside quantized ones are fp32."""
        if self.saving.quantize is None:
            return False
        chosen = self.saving.unquantized
        return self.precision.is_autocast if chosen is None else chosen is Unquantized.FP32

    def _check_saving(self) -> None:
        saving, trains = self.saving, self.phase is Phase.TRAIN
        if saving.quantize is not None and trains and saving.lora_rank is None:
            raise InvalidSetupError(
                f"weights in {saving.quantize} cannot be trained themselves; give adapters as well, such as --lora 16"
            )
        if saving.quantize is not None and not self.precision.is_half:
            raise InvalidSetupError(
                f"weights in {saving.quantize} are computed in half precision, got precision {self.precision}; "
                "give --precision bf16, amp-bf16, fp16 or amp"
            )
        if saving.quantize is not None and self.precision is Precision.FP8:
            raise InvalidSetupError(
                f"weights in {saving.quantize} are not computed in fp8; give --precision bf16"
            )
        fuses_adapters = FusedKernel.LORA in saving.fused_kernels and saving.lora_rank is not None
        if fuses_adapters and self.precision is Precision.FP8:
            raise InvalidSetupError(
                "fused layers with adapters are not computed in fp8; give --precision bf16, or --fused-kernels liger"
            )
        if saving.fp8_recipe is not None and self.precision is not Precision.FP8:
            raise InvalidSetupError(
                f"--fp8-recipe belongs to precision fp8, got {self.precision}; give --precision fp8, or leave it out"
            )
        if saving.unquantized is Unquantized.FP32 and not self.precision.is_autocast:
            raise InvalidSetupError(
                f"weights in fp32 beside those in {saving.quantize} need autocast, got precision {self.precision}; "
                "give --precision amp-bf16, or leave --unquantized out"
            )
        holds_bf16 = self.precision in (Precision.BF16, Precision.FP8)
        in_adapters = saving.lora_rank is not None and self.precision.is_half
        if saving.master_weights is MasterWeights.BF16 and not (holds_bf16 or in_adapters):
            raise InvalidSetupError(
                f"precision {self.precision} has no bf16 weights to update; give --precision bf16, or leave "
                "--master-weights out"
            )
        useless = [
            flag
            for flag, is_given in (
                ("--recompute", saving.recompute != "none"),
                ("--offload", saving.offload is not Offload.NONE),
                ("--master-weights", saving.master_weights is not None),
            )
            if is_given and not trains
        ]
        if useless:
            raise InvalidSetupError(
                f"{', '.join(useless)} cannot be used here: phase {self.phase} updates no weights; leave it out, or "
                "ask for --phase train"
            )
