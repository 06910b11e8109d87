"""The training setup: everything that a prediction depends on besides the model and the device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any, TypedDict, TypeVar

from forerun.base.errors import InvalidSetupError
from forerun.question.post_training import PLAIN, Algorithm, PostTraining, PostTrainingOptions
from forerun.question.saving import NO_SAVING, FusedKernel, MasterWeights, Offload, Saving, Unquantized
from forerun.question.settings import check_numbers, setting

MAX_BATCH_SIZE = 10_000_000


class Precision(StrEnum):
    """Precision of the step.

    ``AMP`` is autocast to fp16 over forward and backward with fp32 weights, ``AMP_BF16`` the same to bf16;
    ``BF16`` and ``FP16`` hold weights and activations in that format; ``TF32`` is fp32 storage with TF32
    matrix products; ``FP8`` is BF16 with the products of linear layers in fp8; ``FP64`` is double precision throughout.
    """

    FP32 = "fp32"
    TF32 = "tf32"
    AMP = "amp"
    AMP_BF16 = "amp-bf16"
    BF16 = "bf16"
    FP16 = "fp16"
    FP8 = "fp8"
    FP64 = "fp64"

    @property
    def is_autocast(self) -> bool:
        """True if weights stay fp32 and single operations are cast."""
        return self in (Precision.AMP, Precision.AMP_BF16)

    @property
    def is_half(self) -> bool:
        """True if matrix products read 2-byte operands."""
        return self not in (Precision.FP32, Precision.TF32, Precision.FP64)


PURE_OF = {Precision.AMP: Precision.FP16, Precision.AMP_BF16: Precision.BF16}
"""Half precision throughout in place of autocast to it."""


class Layout(StrEnum):
    """Memory order of image tensors."""

    NCHW = "nchw"
    NHWC = "nhwc"


class Phase(StrEnum):
    """Part of the step: a training step, its forward pass alone, inference without gradients, or writing tokens."""

    TRAIN = "train"
    FORWARD = "forward"
    INFERENCE = "inference"
    GENERATE = "generate"


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


class Recipe(StrEnum):
    """Training tool whose defaults a run takes; ``recipes.toml`` has the settings of each."""

    MEGATRON = "megatron"
    TORCHTITAN = "torchtitan"
    NEMO = "nemo"
    TRL = "trl"
    AXOLOTL = "axolotl"
    UNSLOTH = "unsloth"
    LITGPT = "litgpt"
    LLAMA_FACTORY = "llama-factory"
    TORCHTUNE = "torchtune"
    NANOTRON = "nanotron"


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


_step = partial(setting, group="run")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSetup:
    """The training configuration of one device.

    Choices may be given as words, such as ``precision="amp"``.

    Attributes:
        zero_grad_to_none: Whether gradients are freed between steps (PyTorch's default since 2.0).
        autocast_backward: Whether the autocast region also spans the backward pass.
        keeps_gradients: Whether gradients are summed over several micro-steps, and so live through all of them.
        saving: Ways to save memory.
        post: Algorithm of the step and its generation.
    """

    batch_size_per_device: int = _step(
        32,
        name="batch_size",
        help="Batch size of one device; with accumulation, of one micro-step.",
        default="32; 1 for a catalogued language model",
        low=1,
        high=MAX_BATCH_SIZE,
        http_high=65_536,
    )
    precision: Precision = _step(
        Precision.FP32,
        help="Precision: fp32, tf32, amp (autocast to fp16), amp-bf16, bf16, fp16, fp64 or fp8 (products of linear "
        "layers, the rest bf16).",
        default="fp32; bf16 for a catalogued language model",
    )
    convolution_precision: Precision | None = _step(
        None,
        help="Arithmetic of convolutions in fp32, a flag of its own in PyTorch: fp32 or tf32.",
        default="PyTorch's own: tf32 on GPUs that have it",
        words="convolution precision",
        only_changed=True,
    )
    layout: Layout = _step(
        Layout.NCHW,
        help="Memory order of images: nchw (PyTorch's own) or nhwc (Keras' own).",
        default="the framework's own",
    )
    compile: bool = _step(False, help="Run the step under torch.compile.")
    compile_loss: bool = _step(
        True,
        help="Compile the loss with the model; without, its logits lie in memory in fp32, as in torchtitan before "
        "April 2025.",
        words="compiling the loss",
        only_changed=True,
    )
    optimizer: str = _step(
        "sgd",
        help="Optimizer: sgd, adam, adamw, adamw-8bit, adafactor, lion, muon, nesterov, rmsprop ... or none.",
        default="sgd; adamw for a catalogued language model",
        metavar="NAME",
        read=str.lower,
    )
    optimizer_implementation: OptimizerImplementation = _step(
        OptimizerImplementation.FOREACH,
        help="Kernels of the optimizer's update: foreach, for-loop or fused.",
        needs="training",
    )
    phase: Phase = _step(
        Phase.TRAIN,
        help="Part of the step: train (the whole step), forward, inference (without gradients), or generate (a batch "
        "of answers of a language model).",
    )
    fused_attention: bool = _step(
        True,
        help="Run attention (scaled_dot_product_attention) as one kernel.",
    )
    attention_kernel: AttentionKernel = _step(
        AttentionKernel.PLAIN,
        help="Library of fused attention: plain (a causal mask saves no time, as in FlashAttention-1), "
        "flash-2 (it saves half) or flash-3 (and 1.7 times as fast, on Hopper only; cuDNN's as well).",
        words="attention kernel",
        only_changed=True,
    )
    expert_load: str = _step(
        "even",
        help="Spread of the tokens over a model's experts: even, zipf:1.2 (the n-th has n^-1.2 times as many as the "
        "first), or a .csv or .json file with the tokens of each.",
        metavar="LAW",
        only_changed=True,
    )
    expert_capacity: float | None = _step(
        None,
        help="Most tokens that an expert takes, as a multiple of the mean, such as 1.25; the others are dropped.",
        default="no token is dropped",
        above=0,
        high=1e6,
    )
    host_slowdown: float = _step(
        1.0,
        help="Factor by which launches take longer than usual, such as beside a busy Python thread: about 3.7 "
        "with the memory metrics of Transformers' Trainer (skip_memory_metrics=False).",
        words="slowdown of the host",
        only_changed=True,
        low=0.1,
        high=100,
    )
    zero_grad_to_none: bool = True
    autocast_backward: bool = False
    keeps_gradients: bool = False
    saving: Saving = NO_SAVING
    post: PostTraining = PLAIN

    def __post_init__(self) -> None:
        for name, kind in _CHOICES.items():
            object.__setattr__(self, name, choice(kind, getattr(self, name), name.replace("_", " ")))
        if self.convolution_precision is not None:
            asked = choice(Precision, self.convolution_precision, "convolution precision")
            if asked not in (Precision.FP32, Precision.TF32) or self.precision is Precision.FP64:
                raise InvalidSetupError(
                    f"convolutions of fp32 operands are computed in fp32 or tf32, got {asked} beside precision "
                    f"{self.precision}; give other formats with --precision alone"
                )
            # Two words for one question; fp32 is not what PyTorch does by itself.
            own = None if asked is self.precision is Precision.TF32 else asked
            object.__setattr__(self, "convolution_precision", own)
        check_numbers(self)
        if not self.fused_attention and self.attention_kernel is not AttentionKernel.PLAIN:
            raise InvalidSetupError(
                f"--attention-kernel {self.attention_kernel} needs fused attention, got attention in parts; leave "
                "--no-fused-attention out"
            )
        # Plain training has no contradictions; a search makes thousands of setups.
        if self.saving != NO_SAVING or not self.compile_loss:
            self._check_saving()
        if self.post != PLAIN or self.phase is Phase.GENERATE:
            self._check_post_training()

    @property
    def of_convolutions(self) -> Precision:
        """Arithmetic of convolutions of fp32 operands, ``FP32`` or ``TF32``; that of the products if not set."""
        return self.convolution_precision or (
            Precision.TF32 if self.precision is Precision.TF32 else Precision.FP32
        )

    @property
    def generates(self) -> bool:
        """True if the step writes tokens of its own."""
        return self.phase is Phase.GENERATE or self.post.algorithm.is_online

    def _check_post_training(self) -> None:
        post, trains = self.post, self.phase is Phase.TRAIN
        if self.precision is Precision.FP64 and (self.generates or post.algorithm is not Algorithm.SFT):
            raise InvalidSetupError(
                "post-training and generation are not answered in fp64, which nobody measured; give --precision bf16"
            )
        if post.algorithm is not Algorithm.SFT and not trains:
            raise InvalidSetupError(
                f"--algorithm {post.algorithm} trains a model, got phase {self.phase}; leave one of the two out"
            )
        if not self.generates and post != PostTraining(algorithm=post.algorithm):
            raise InvalidSetupError(
                "--new-tokens, --answer-lengths and --engine belong to a step that generates; ask for --phase "
                "generate, or for --algorithm grpo or ppo"
            )

    def with_half_weights(self) -> TrainingSetup:
        """This setup with weights in half precision throughout under mixed precision."""
        precision = PURE_OF.get(self.precision, self.precision)
        return replace(self, precision=precision, keeps_gradients=False)

    def for_inference(self) -> TrainingSetup:
        """This setup without gradients: nothing is updated, and nothing computed again for a backward pass."""
        saving = replace(self.saving, recompute="none", offload=Offload.NONE, master_weights=None)
        return replace(self, phase=Phase.INFERENCE, optimizer="none", saving=saving)

    @property
    def widens_unquantized(self) -> bool:
        """True if the weights beside quantized ones are fp32."""
        if self.saving.quantize is None:
            return False
        chosen = self.saving.unquantized
        return self.precision.is_autocast if chosen is None else chosen is Unquantized.FP32

    def _check_saving(self) -> None:
        saving, trains = self.saving, self.phase is Phase.TRAIN
        if not self.compile_loss and not (self.compile and trains):
            raise InvalidSetupError(
                "--no-compile-loss belongs to a compiled training step; give --compile as well, or leave it out"
            )
        if saving.quantize is not None and trains and saving.lora_rank is None:
            raise InvalidSetupError(
                f"weights in {saving.quantize} cannot be trained themselves; give adapters as well, such as --lora 16"
            )
        if saving.quantize is not None and (not self.precision.is_half or self.precision is Precision.FP8):
            raise InvalidSetupError(
                f"weights in {saving.quantize} are computed in half precision, got precision {self.precision}; "
                "give --precision bf16, amp-bf16, fp16 or amp"
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


_NEWEST_RELEASE = (2, 99)


def parse_release(torch_version: str | None) -> tuple[int, int] | None:
    """Major and minor version of a PyTorch version, None for none.

    >>> parse_release("2.4.1")
    (2, 4)

    Raises:
        InvalidSetupError: The text is not a version of PyTorch.
    """
    if torch_version is None:
        return None
    # Builds have their own mark behind the version, such as +cu121.
    parts = str(torch_version).strip().partition("+")[0].split(".")
    try:
        release = (int(parts[0]), int(parts[1]))
    except (ValueError, IndexError):
        raise InvalidSetupError(f"a PyTorch version looks like 2.4 or 2.4.1, got '{torch_version}'") from None
    if not (1, 0) <= release <= _NEWEST_RELEASE or min(release) < 0:
        raise InvalidSetupError(f"PyTorch has versions 1.0 to 2.x, got '{torch_version}'; give one of them")
    return release


def settings_of_release(given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that PyTorch 1.x chooses by itself and 2.x does not; none for 2.x, and none that are given.

    It has no attention in one kernel, updates one parameter after another, and keeps gradients between steps.

    >>> settings_of_release({"torch_version": "1.12"})["fused_attention"]
    False
    """
    release = parse_release(given.get("torch_version"))
    if release is None or release >= (2, 0):
        return {}
    # FlashAttention is a library of its own, which works with 1.x too.
    found: dict[str, Any] = {
        "fused_attention": given.get("attention_kernel") not in (None, AttentionKernel.PLAIN)
    }
    found |= {"optimizer_implementation": OptimizerImplementation.FOR_LOOP, "zero_grad_to_none": False}
    return {name: value for name, value in found.items() if given.get(name) is None}


_software = partial(setting, group="software")


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """Software of a run; the calibration ``here`` is this machine's own, if there is one."""

    recipe: Recipe | None = setting(
        None,
        help="Tool whose defaults apply to every setting that you do not give: megatron, torchtitan, nemo, trl, "
        "axolotl, unsloth, litgpt, llama-factory, torchtune or nanotron.",
        group="run",
        metavar="TOOL",
        tell=lambda _: (
            None
        ),  # its settings are told one by one: a run that was told takes no default of the tool anew
    )
    config: str | None = setting(
        None,
        help="Configuration file of axolotl, torchtune, litgpt, torchtitan, LLaMA-Factory, TRL, Automodel, NeMo RL, "
        "verl, DeepSpeed or accelerate, or several, whose settings apply unless you give them; it may name the model.",
        group="run",
        metavar="FILE",
        flag="from",
        is_local=True,
        is_repeated=True,
        read=str,
        tell=lambda _: None,
    )
    torch_version: str | None = _software(
        None, help="PyTorch version of the run.", default="the newest known", metavar="2.4"
    )
    calibration: str | None = _software(
        None,
        help="Calibration of the device: a file that 'forerun calibrate' or 'forerun fit' wrote.",
        default="with --on here, that of this machine",
        metavar="FILE",
        is_local=True,
        read=lambda path: str(Path(path)),
    )
    memory_overhead_bytes: float | None = _software(
        None,
        help="Memory of an idle process on the device [bytes].",
        words="memory overhead [bytes]",
        default="as measured on such devices",
        low=0,
        high=1e15,
    )

    def __post_init__(self) -> None:
        parse_release(self.torch_version)


class SetupOptions(PostTrainingOptions, total=False):
    """Settings of a step that every question may have."""

    convolution_precision: str | None
    compile: bool | None
    compile_loss: bool | None
    optimizer: str | None
    optimizer_implementation: str | None
    phase: str | None
    fused_attention: bool | None
    attention_kernel: str | None
    expert_load: str | None
    expert_capacity: float | None
    host_slowdown: float | None


class SoftwareOptions(TypedDict, total=False):
    """Versions, tools and calibration by name."""

    recipe: str | None
    config: str | Path | None
    torch_version: str | None
    calibration: str | Path | None
    memory_overhead_bytes: float | None
