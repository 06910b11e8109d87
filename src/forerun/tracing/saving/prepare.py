"""A built model with all ways to save memory of its setup, adapters (LoRA) by peft's own modules among them."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import nn
from torch.nn.utils.parametrize import register_parametrization

from forerun.base.errors import InvalidSetupError, ModelBuildError, near_matches
from forerun.base.extras import needing
from forerun.question.saving import FusedKernel, Loss, MasterWeights, Saving
from forerun.question.setup import Phase, Precision, TrainingSetup
from forerun.tracing.models.built_model import BuiltModel
from forerun.tracing.models.meta_build import first_line
from forerun.tracing.saving.blocks import block_names, recompute_blocks
from forerun.tracing.saving.fused_kernels import fuse_kernels, fuse_loss
from forerun.tracing.saving.quantized import QuantizedLinear, QuantizedStack, multiply_in_fp8, stacked_experts

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def is_linear(layer: nn.Module) -> bool:
    """True for a linear layer, or one of Transformers' ``Conv1D``, which is a linear layer too."""
    return isinstance(layer, nn.Linear) or type(layer).__name__ == "Conv1D"


def quantize_linears(module: nn.Module, heads: set[nn.Module], saving: Saving, name: str) -> None:
    """Replaces the linear layers but the heads by quantized ones, in place.

    Raises:
        InvalidSetupError: There are none.
    """
    found = [
        (path, layer) for path, layer in module.named_modules() if is_linear(layer) and layer not in heads
    ]
    if not found:
        layers = (
            "convolutions" if any(isinstance(x, _CONVOLUTIONS) for x in module.modules()) else "other layers"
        )
        raise InvalidSetupError(
            f"{name} has no linear layers besides its head, but {layers}, which {saving.quantize} does not hold: leave "
            "--quantize out"
        )
    assert saving.quantize is not None
    for path, layer in found:
        parent, _, key = path.rpartition(".")
        quantized = QuantizedLinear(layer, saving.quantize, keeps_input=saving.keep_inputs)
        setattr(module.get_submodule(parent), key, quantized)


def _quantize_experts(module: nn.Module, saving: Saving, name: str) -> list[str]:
    """Quantizes experts that are held as one tensor where asked, in place, and says so where they stay.

    Raises:
        InvalidSetupError: There are none.
    """
    found = stacked_experts(module)
    if not saving.quantize_experts:
        note = (
            f"experts are one tensor in each block, which {saving.quantize} leaves in half precision "
            "(Transformers 5; --quantize-experts quantizes them too)"
        )
        return [note] if found else []
    if not found:
        raise InvalidSetupError(
            f"{name} has no experts that a block holds as one tensor: leave --quantize-experts out"
        )
    assert saving.quantize is not None
    for part, key in found:
        weight = getattr(part, key).requires_grad_(False)
        register_parametrization(part, key, QuantizedStack(weight, saving.quantize), unsafe=True)
    return []


def add_adapters(module: nn.Module, heads: set[nn.Module], saving: Saving, name: str) -> None:
    """Adds adapters to the linear layers named, or to all but the heads, and freezes the rest, in place.

    Raises:
        InvalidSetupError: No layer has one of the names, or layers of that name cannot have adapters.
        MissingExtraError: peft is not installed.
    """
    targets = _targets(module, heads, saving, name)
    with needing("LoRA"):
        from peft import LoraConfig, inject_adapter_in_model

        from forerun.tracing.saving.quantized_adapters import AdaptedQuantizedLinear
    assert saving.lora_rank is not None
    config = LoraConfig(
        r=saving.lora_rank,
        lora_alpha=saving.lora_rank,
        target_modules=targets,
        lora_dropout=saving.lora_dropout,
    )
    config._register_custom_module({QuantizedLinear: AdaptedQuantizedLinear})
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it says that Conv1D is transposed, and sets that itself
            inject_adapter_in_model(config, module, low_cpu_mem_usage=True)
    except Exception as error:  # peft raises errors of many kinds
        raise ModelBuildError(f"peft could not add adapters to {name}: {first_line(error)}") from error


_TOGETHER = ("qkv_proj", "query_key_value", "c_attn", "Wqkv")
_OTHER_NAMES = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), _TOGETHER),
    **dict.fromkeys(("gate_proj", "up_proj"), ("gate_up_proj", "dense_h_to_4h", "fc1", "c_fc")),
    "o_proj": ("dense", "out_proj"),
    "down_proj": ("dense_4h_to_h", "fc2"),
}
"""Names of layers in other models, of which some hold several as one: an adapter of its parts is one of the whole."""


def _targets(module: nn.Module, heads: set[nn.Module], saving: Saving, name: str) -> list[str]:
    linears = {
        path: layer for path, layer in module.named_modules() if is_linear(layer) and layer not in heads
    }
    # peft's all-linear leaves out the head, whose output is not a feature of the next layer.
    if not saving.lora_targets or saving.lora_targets == ("all-linear",):
        if not linears:
            raise InvalidSetupError(
                f"{name} has no linear layers besides its head: name layers for adapters with --lora-targets"
            )
        return list(linears)
    known = sorted({path.rpartition(".")[2] for path in linears})
    layers = dict(module.named_modules())
    ends: dict[str, nn.Module] = {}
    for path, layer in layers.items():
        # peft matches the ends of paths: "q_proj" names the layers of all blocks at once.
        if not any(True for _ in layer.children()):
            ends.setdefault(path.rpartition(".")[2], layer)
    found: list[str] = []
    for named in saving.lora_targets:
        others = () if named in ends else _OTHER_NAMES.get(named, ())
        target = next((other for other in others if other in ends), named)
        if _PATTERN.search(target):
            found += _matching(target, list(linears), name)
            continue
        found.append(target)
        layer = layers.get(target) or ends.get(target)
        if layer is None and "." in target:  # such as to_out.0, which peft takes as the end of a path
            layer = next((layers[path] for path in layers if path.endswith("." + target)), None)
        if layer is None:
            raise InvalidSetupError(
                f"{name} has no layer '{target}' for adapters{near_matches(target, known)}; its linear layers are "
                f"{_listed(known)}"
            )
        if saving.quantize is not None and isinstance(layer, _CONVOLUTIONS):
            raise InvalidSetupError(
                f"'{target}' of {name} is a convolution, which {saving.quantize} does not hold; give --lora-targets of "
                f"linear layers, such as {_listed(known)}, or leave --quantize out"
            )
        if not (is_linear(layer) or isinstance(layer, (*_CONVOLUTIONS, nn.Embedding))):
            raise InvalidSetupError(
                f"'{target}' of {name} is a {type(layer).__name__}, which cannot have adapters; its linear layers are "
                f"{_listed(known)}"
            )
    return found


_PATTERN = re.compile(r"[\\\[(*+|^$]")
"""Characters of a pattern of paths that no name of a layer has."""


def _matching(pattern: str, paths: list[str], name: str) -> list[str]:
    """Linear layers whose whole path matches a pattern, as peft has it.

    Raises:
        InvalidSetupError: It is no pattern, or no path matches.
    """
    try:
        found = [path for path in paths if re.fullmatch(pattern, path)]
    except re.error as error:
        raise InvalidSetupError(f"expected names of layers or a pattern, got {pattern!r}: {error}") from None
    if not found:
        raise InvalidSetupError(
            f"no linear layer of {name} matches {pattern!r}; their paths are {paths[0]}, ..., {paths[-1]}: give "
            "--lora-targets with names, such as q_proj,v_proj, or a pattern of these paths"
        )
    return found


def _listed(names: Iterable[str]) -> str:
    known = list(names)
    return ", ".join(known[:12]) + (" ..." if len(known) > 12 else "") if known else "none"


def freeze_modules(module: nn.Module, names: Iterable[str], name: str) -> None:
    """Freezes the weights of the modules with these names or ends of names, in place.

    Raises:
        InvalidSetupError: No module has one of the names, or nothing is left to train.
    """
    known = [path for path, _ in module.named_modules() if path]
    for wanted in names:
        found = [path for path in known if path == wanted or path.endswith("." + wanted)]
        if not found:
            short = {path.rpartition(".")[2] for path in known} | {
                path for path in known if path.count(".") < 2
            }
            raise InvalidSetupError(
                f"{name} has no module '{wanted}' to freeze{near_matches(wanted, short)}; its parts are "
                f"{_listed(key for key, _ in module.named_children())}"
            )
        for path in found:
            module.get_submodule(path).requires_grad_(False)
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise InvalidSetupError(f"every weight of {name} is frozen: leave one of the names of --freeze out")


STORAGE_DTYPE = {
    Precision.FP16: torch.float16,
    Precision.BF16: torch.bfloat16,
    Precision.FP8: torch.bfloat16,
    Precision.FP64: torch.float64,
}
AUTOCAST_DTYPE = {Precision.AMP: torch.float16, Precision.AMP_BF16: torch.bfloat16}


def with_saving(built: BuiltModel, setup: TrainingSetup) -> BuiltModel:
    """The model with frozen, quantized, adapted and fused layers, checkpoints and losses, changed in place."""
    saving, module, name = setup.saving, built.module, built.name
    heads = _heads(module)
    blocks = block_names(module)
    notes = list(built.notes)
    others = (FusedKernel.LORA, FusedKernel.EXPERTS)
    own_parts = [part for part in saving.fused_kernels if part not in others]
    if own_parts:
        # Liger-Kernel weights the tokens of experts behind them.
        notes.append(fuse_kernels(module, own_parts, name, weighs=saving.loss is not Loss.LIGER))
    if saving.freeze:
        freeze_modules(module, saving.freeze, name)
    if saving.loss is not Loss.PLAIN:
        fuse_loss(module, saving.loss, name)
    # Before the adapters, whose own linear layers are not quantized.
    if saving.quantize is not None:
        quantize_linears(module, heads, saving, name)
        notes += _quantize_experts(module, saving, name)
    if saving.lora_rank is not None:
        add_adapters(module, heads, saving, name)
        notes += _adapter_notes(setup)
        # Only now are there adapters to fuse.
        if FusedKernel.LORA in saving.fused_kernels:
            notes.append(fuse_kernels(module, [FusedKernel.LORA], name))
    fuses = FusedKernel.EXPERTS in saving.fused_kernels
    if setup.precision is Precision.FP8 and not multiply_in_fp8(
        module, heads, saving.fp8_recipe, fuses_experts=fuses
    ):
        raise InvalidSetupError(
            f"{name} has no linear layers that could multiply in fp8: give --precision bf16"
        )
    if setup.phase is Phase.TRAIN:
        recompute_blocks(module, blocks, saving.recompute, name)
    return replace(built, notes=tuple(notes), blocks=blocks)


def _heads(module: nn.Module) -> set[nn.Module]:
    """Layers that stay as they are: those that make the outputs, and all of parts that only make inputs.

    The first are that of a language model, and a last linear layer outside of all blocks.
    """
    found: set[nn.Module] = set()
    get = getattr(module, "get_output_embeddings", None)
    head = get() if get is not None else None
    if isinstance(head, nn.Module):
        found.add(head)
    blocks = tuple(name + "." for name in block_names(module))
    outside = [
        layer for path, layer in module.named_modules()
        if isinstance(layer, nn.Linear) and not path.startswith(blocks or ("\0",))
    ]  # fmt: skip
    if not found and outside:
        found.add(outside[-1])
    for part in getattr(module, "frozen_parts", ()):
        found.update(layer for layer in part.modules() if isinstance(layer, nn.Linear))
    return found


def _adapter_notes(setup: TrainingSetup) -> list[str]:
    half = setup.precision.is_half
    if setup.saving.master_weights is MasterWeights.BF16 or not half:
        return []
    where = "under autocast" if setup.precision.is_autocast else "in fp32, as peft does by itself"
    if FusedKernel.LORA in setup.saving.fused_kernels:
        where = "in half precision"
    frozen = "the frozen weights are held in half precision"
    if setup.saving.quantize is not None:
        is_wide = setup.widens_unquantized
        held = "in fp32 (peft's prepare_model_for_kbit_training)" if is_wide else "in half precision"
        frozen = f"norms, embeddings and head are held {held}"
    return [f"adapters are held in fp32 and computed {where}; {frozen}"]


def convert_weights(module: nn.Module, setup: TrainingSetup) -> None:
    """Converts the weights to the precision of the setup, in place.

    Adapters, and what is left beside quantized weights, may keep fp32.
    """
    dtype = STORAGE_DTYPE.get(setup.precision)
    has_adapters = setup.saving.lora_rank is not None
    if has_adapters and dtype is None:
        dtype = AUTOCAST_DTYPE.get(setup.precision)
    if dtype is None:
        return
    module.to(dtype)
    if has_adapters and dtype.itemsize == 2 and setup.saving.master_weights is not MasterWeights.BF16:
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
    if setup.widens_unquantized:
        for parameter in module.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.float()
