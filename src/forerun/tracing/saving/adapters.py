"""Adapters (LoRA) by peft's own modules, over frozen weights that may be quantized."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

from torch import nn

from forerun.base.errors import InvalidSetupError, MissingExtraError, ModelBuildError, near_matches
from forerun.question.saving import Saving
from forerun.tracing.models.meta_build import first_line
from forerun.tracing.saving.quantized import QuantizedLinear

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


def add_adapters(module: nn.Module, heads: set[nn.Module], saving: Saving, name: str) -> None:
    """Adds adapters to the linear layers named, or to all but the heads, and freezes the rest, in place.

    Raises:
        InvalidSetupError: No layer has one of the names, or layers of that name cannot have adapters.
        MissingExtraError: peft is not installed.
    """
    targets = _targets(module, heads, saving, name)
    try:
        from peft import LoraConfig, inject_adapter_in_model

        from forerun.tracing.saving.quantized_adapters import AdaptedQuantizedLinear
    except ImportError as error:
        raise MissingExtraError("LoRA", "peft") from error
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
    layers = dict(module.named_modules())
    ends: dict[str, nn.Module] = {}
    for path, layer in layers.items():
        # peft matches the ends of paths: "q_proj" names the layers of all blocks at once.
        if not any(True for _ in layer.children()):
            ends.setdefault(path.rpartition(".")[2], layer)
    for target in saving.lora_targets:
        layer = layers.get(target) or ends.get(target)
        if layer is None and "." in target:  # such as to_out.0, which peft takes as the end of a path
            layer = next((layers[path] for path in layers if path.endswith("." + target)), None)
        if layer is None:
            known = sorted({path.rpartition(".")[2] for path in linears})
            raise InvalidSetupError(
                f"{name} has no layer '{target}' for adapters{near_matches(target, known)}; its linear layers are "
                f"{_listed(known)}"
            )
        if saving.quantize is not None and isinstance(layer, _CONVOLUTIONS):
            known = sorted({path.rpartition(".")[2] for path in linears})
            raise InvalidSetupError(
                f"'{target}' of {name} is a convolution, which {saving.quantize} does not hold; give --lora-targets of "
                f"linear layers, such as {_listed(known)}, or leave --quantize out"
            )
        if not (is_linear(layer) or isinstance(layer, (*_CONVOLUTIONS, nn.Embedding))):
            raise InvalidSetupError(
                f"'{target}' of {name} is a {type(layer).__name__}, which cannot have adapters; its linear layers are "
                f"{_listed(sorted({path.rpartition('.')[2] for path in linears}))}"
            )
    return list(saving.lora_targets)


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
