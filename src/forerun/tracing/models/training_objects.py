"""Models as people have them: a module with a batch, a LightningModule, or a Trainer of Transformers.

``as_module`` makes a module of each, which knows its example batch, and reads what the object says of its run. The
training step of a LightningModule is its own ``training_step``, so its loss and its several networks count.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from forerun.base.errors import InvalidSetupError
from forerun.tracing.meta_results import nested_tensors
from forerun.tracing.models.meta_build import first_line

_OPTIMIZERS = {
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw",
    "adamw_hf": "adamw",
    "adamw_bnb_8bit": "adamw-8bit",
}
_WHOLE_STEP = "training_step"


class WithBatch(torch.nn.Module):
    """A module with an example batch, and the method of it that a step calls."""

    def __init__(self, module: torch.nn.Module, batch: Any, method: str = "forward") -> None:
        super().__init__()
        self.module = module
        self.method = method
        self.batch = batch

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Output of the module, or the loss of its own training step."""
        if self.method == _WHOLE_STEP:
            return getattr(self.module, self.method)(args[0], 0)
        return self.module(*args, **kwargs)


def as_module(model: Any, inputs: Any, options: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The module behind a model object, and the settings that it says of its run.

    Args:
        model: A module, a LightningModule, a ``Trainer`` of Transformers, or a Keras model, which stays as it is.
        inputs: One batch of any structure, a ``DataLoader`` whose first batch counts, or None.
        options: Settings of the run that the user gave; they win.

    Raises:
        InvalidSetupError: The inputs are missing, or the first batch cannot be made.
    """
    found: dict[str, Any] = {}
    if _is_a(model, "Trainer") and hasattr(model, "get_train_dataloader"):
        found, inputs = _of_trainer(model), inputs if inputs is not None else model.get_train_dataloader()
        model = model.model
    if isinstance(inputs, torch.utils.data.DataLoader):
        inputs = _first_batch(inputs)
    if not isinstance(model, torch.nn.Module):
        if inputs is not None:
            raise InvalidSetupError(
                f"inputs belong to a module of PyTorch, got a {type(model).__name__}; give input_shape instead"
            )
        return model, found
    if _is_a(model, "LightningModule"):
        found |= _of_lightning(model)
        model = _with_training_step(model, inputs, options)
    elif inputs is not None:
        model = WithBatch(model, inputs)
    batch = model.batch if isinstance(model, WithBatch) else None
    # The first axis of the first tensor that has one.
    size = next((tensor.shape[0] for tensor in nested_tensors(batch) if tensor.dim() and len(tensor)), None)
    if size is not None:
        found = {"batch_size": size, **found}
    return model, {name: value for name, value in found.items() if options.get(name) is None}


def _with_training_step(module: torch.nn.Module, inputs: Any, options: Mapping[str, Any]) -> torch.nn.Module:
    """A LightningModule with its batch; without one, its example input or a shape of the user calls ``forward``."""
    example = vars(module).get("_example_input_array")
    if inputs is not None or example is not None:
        return WithBatch(module, example) if inputs is None else WithBatch(module, inputs, _WHOLE_STEP)
    if any(options.get(name) for name in ("input_shape", "image_size", "sequence_length")):
        return module
    raise InvalidSetupError(
        f"{type(module).__name__} is a LightningModule, whose batch is not known; give "
        "inputs=next(iter(train_loader)), or inputs=train_loader"
    )


def _is_a(model: Any, name: str) -> bool:
    return any(base.__name__ == name for base in type(model).__mro__)


def _first_batch(loader: Any) -> Any:
    try:
        return next(iter(loader))
    except Exception as error:  # a user's data set may raise anything
        raise InvalidSetupError(
            f"expected a first batch of the loader, but {type(error).__name__}: {first_line(error)}; "
            "give one batch as inputs"
        ) from error


def _of_lightning(module: Any) -> dict[str, Any]:
    """The optimizer that ``configure_optimizers`` makes; nothing where it needs a trainer."""
    try:
        made = module.configure_optimizers()
    except Exception:  # without a trainer it may raise anything
        return {}
    if isinstance(made, Mapping):
        made = made.get("optimizer")
    while isinstance(made, (list, tuple)) and made:
        made = made[0]
    name = type(made).__name__.lower()
    return {"optimizer": name} if re.fullmatch(r"sgd|adam|adamw|adafactor|rmsprop|adagrad", name) else {}


def _of_trainer(trainer: Any) -> dict[str, Any]:
    """The settings of a ``Trainer``'s arguments under forerun's names."""
    asked = trainer.args
    optimizer = str(getattr(asked.optim, "value", asked.optim))
    found = {
        "batch_size": asked.per_device_train_batch_size,
        "accumulation": asked.gradient_accumulation_steps if asked.gradient_accumulation_steps > 1 else None,
        "precision": "amp-bf16" if asked.bf16 else "amp" if asked.fp16 else None,
        "optimizer": _OPTIMIZERS.get(optimizer, optimizer if optimizer in ("sgd", "adafactor") else None),
        "recompute": "full" if asked.gradient_checkpointing else None,
        "compile": True if asked.torch_compile else None,
        "epochs": asked.num_train_epochs if asked.max_steps <= 0 else None,
        "dataset_size": len(trainer.train_dataset) if hasattr(trainer.train_dataset, "__len__") else None,
    }
    return {name: value for name, value in found.items() if value is not None}
