"""A built model with all ways to save memory of its setup."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from forerun.base.errors import InvalidSetupError
from forerun.question.saving import FusedKernel, Loss, MasterWeights
from forerun.question.setup import Phase, Precision, TrainingSetup
from forerun.tracing.models.built_model import BuiltModel
from forerun.tracing.saving.adapters import add_adapters, freeze_modules, quantize_linears
from forerun.tracing.saving.blocks import block_names, recompute_blocks
from forerun.tracing.saving.fused_kernels import fuse_kernels, fuse_loss
from forerun.tracing.saving.quantized import multiply_in_fp8

STORAGE_DTYPE = {
    Precision.FP16: torch.float16,
    Precision.BF16: torch.bfloat16,
    Precision.FP8: torch.bfloat16,
}
_AUTOCAST_STORAGE = {Precision.AMP: torch.float16, Precision.AMP_BF16: torch.bfloat16}


def with_saving(built: BuiltModel, setup: TrainingSetup) -> BuiltModel:
    """The model with frozen, quantized, adapted and fused layers, checkpoints and losses, changed in place."""
    saving, module, name = setup.saving, built.module, built.name
    heads = _heads(module)
    blocks = block_names(module)
    notes = list(built.notes)
    own_parts = [part for part in saving.fused_kernels if part is not FusedKernel.LORA]
    if own_parts:
        notes.append(fuse_kernels(module, own_parts, name))
    if saving.freeze:
        freeze_modules(module, saving.freeze, name)
    if saving.loss is not Loss.PLAIN:
        fuse_loss(module, saving.loss, name)
    if saving.quantize is not None:
        quantize_linears(module, heads, saving, name)
    if saving.lora_rank is not None:
        add_adapters(module, heads, saving, name)
        notes += _adapter_notes(setup)
        if FusedKernel.LORA in saving.fused_kernels:
            notes.append(fuse_kernels(module, [FusedKernel.LORA], name))
    if setup.precision is Precision.FP8 and not multiply_in_fp8(module, heads, saving.fp8_recipe):
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
        dtype = _AUTOCAST_STORAGE.get(setup.precision)
    if dtype is None:
        return
    module.to(dtype)
    if has_adapters and setup.saving.master_weights is not MasterWeights.BF16:
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
    if setup.widens_unquantized:
        for parameter in module.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.float()
