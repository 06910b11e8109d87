"""A built model, as every source of models hands it to the tracer, with losses and targets for models without any."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.nn import functional

from forerun.base.errors import InvalidSetupError
from forerun.tracing.meta_results import nested_tensors

BatchMaker = Callable[[int], Mapping[str, Any]]
LossFunction = Callable[[Any, Mapping[str, Any]], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class BuiltModel:
    """A module, on the meta device unless it was built to be run, with everything for one training step.

    Attributes:
        name: The model as the user named it.
        module: The network; its parameters and buffers are meta tensors unless it was built to be run.
        input_shape: Shape of one sample without the batch axis, for display.
        make_batch: Function from a batch size to the keyword arguments of ``loss`` and, under the keys ``"args"``
            and ``"kwargs"``, those of the module; tensors are on the module's device.
        loss: Function from the module's output and the batch to a scalar.
        only_batch_size: The only batch size of the model, if its file fixes one; None for any.
        notes: Remarks for the user.
        tokens_per_sample: Tokens of one sample of a model that reads tokens, None of others.
        blocks: Names of the modules that repeat, in order.
        all_blocks: For each block of the model the one of the module that stands for it, where it lacks any.
        may_be_kept: Whether its name and files say all of it, so that its graph may be kept in the cache.
    """

    name: str
    module: torch.nn.Module
    input_shape: tuple[int, ...]
    make_batch: BatchMaker
    loss: LossFunction
    only_batch_size: int | None = None
    notes: tuple[str, ...] = field(default=())
    tokens_per_sample: int | None = None
    blocks: tuple[str, ...] = ()
    all_blocks: tuple[str, ...] = ()
    may_be_kept: bool = False


_MAX_SIZE = 1_000_000
_ATTENTION = ("sdpa", "eager")


@dataclass(frozen=True, slots=True, kw_only=True)
class InputOptions:
    """Options of inputs and head; None keeps the model's own value.

    Attributes:
        image_size: Height and width of square images [pixels].
        input_shape: Shape of one sample without the batch axis; excludes ``image_size``.
        sequence_length: Number of tokens in one sample of a text model.
        num_classes: Number of outputs of the head.
        training: True puts the module in training mode.
        attn_implementation: Attention of Transformers models: ``sdpa`` (one kernel) or ``eager``.
    """

    image_size: int | None = None
    input_shape: tuple[int, ...] | None = None
    sequence_length: int | None = None
    num_classes: int | None = None
    training: bool = True
    attn_implementation: str = "sdpa"

    def __post_init__(self) -> None:
        for name in ("image_size", "sequence_length", "num_classes"):
            _check_size(name, getattr(self, name))
        if self.input_shape is not None:
            if not self.input_shape:
                raise InvalidSetupError("an input shape names at least one axis, such as 3,224,224; got none")
            for size in self.input_shape:
                _check_size("every size of input_shape", size)
        if self.image_size is not None and self.input_shape is not None:
            raise InvalidSetupError(
                f"give an image size or an input shape, not both; got {self.image_size} and {self.input_shape}"
            )
        if self.attn_implementation not in _ATTENTION:
            raise InvalidSetupError(
                f"attn_implementation must be {' or '.join(_ATTENTION)}, got {self.attn_implementation!r}"
            )

    def image_shape(self, default: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of one image or clip: ``default`` with the user's sizes.

        Args:
            default: The model's own shape: (channels, height, width), or with frames in second place.

        Raises:
            InvalidSetupError: If the number of axes differs.
        """
        if self.image_size is not None:
            return (*default[:-2], self.image_size, self.image_size)
        if self.input_shape is None:
            return default
        if len(self.input_shape) != len(default):
            raise InvalidSetupError(
                f"the model takes samples with {len(default)} axes, such as {_text(default)}; "
                f"got the input shape {_text(self.input_shape)} (leave the batch axis out)"
            )
        return self.input_shape

    def refuse_image(self, name: str) -> None:
        """Refuse image options for a model that reads tokens."""
        if self.image_size is not None or self.input_shape is not None:
            raise InvalidSetupError(
                f"{name} reads tokens, not images: give a sequence length instead of an image size or input shape"
            )

    def refuse_sequence(self, name: str) -> None:
        """Refuse a sequence length for a model that reads images."""
        if self.sequence_length is not None:
            raise InvalidSetupError(
                f"{name} reads images, not tokens: give an image size or input shape instead of a sequence length"
            )


def _check_size(name: str, size: int | None) -> None:
    if size is None:
        return
    if isinstance(size, bool) or not isinstance(size, int):
        raise InvalidSetupError(f"{name} must be a whole number, got {size!r}")
    if not 1 <= size <= _MAX_SIZE:
        raise InvalidSetupError(f"{name} must be between 1 and {_MAX_SIZE:,}, got {size}")


def _text(shape: tuple[int, ...]) -> str:
    return ",".join(map(str, shape))


INFERRED_LOSS_NOTE = (
    "no loss was given: cross entropy is used for outputs (batch, classes), (batch, classes, height, width) "
    "and per token, binary cross entropy for a single output, the model's own loss if it returns one, and "
    "the mean of all outputs otherwise"
)


OTHER_LOSS_NOTE = (
    "the model's own loss depends on the values of its labels, which are not known: cross entropy of its logits, or "
    "the mean of all outputs, is taken in its place"
)


def without_own_loss(built: BuiltModel) -> BuiltModel | None:
    """The same model without labels, so that its loss is inferred; None if it has no labels."""
    if "labels" not in built.make_batch(1).get("kwargs", {}):
        return None

    def make_batch(batch_size: int) -> Mapping[str, Any]:
        batch = built.make_batch(batch_size)
        inputs = {name: value for name, value in batch["kwargs"].items() if name != "labels"}
        return {**batch, "kwargs": inputs}

    return replace(built, make_batch=make_batch, notes=(*built.notes, OTHER_LOSS_NOTE))


def image_batch(batch_size: int, shape: tuple[int, ...]) -> dict[str, Any]:
    """A batch of images (or clips) with class labels, on meta."""
    return {
        "args": (torch.empty((batch_size, *shape), device="meta"),),
        "target": torch.empty(batch_size, dtype=torch.int64, device="meta"),
    }


def token_batch(batch_size: int, shape: tuple[int, ...]) -> dict[str, Any]:
    """A batch of texts with the token after each token, on meta."""
    return {
        "args": (torch.empty((batch_size, *shape), dtype=torch.int64, device="meta"),),
        "target": torch.empty((batch_size, *shape), dtype=torch.int64, device="meta"),
    }


def next_token_loss(output: Any, batch: Mapping[str, Any]) -> torch.Tensor:
    """Cross entropy of logits (batch, tokens, vocabulary) with the tokens that follow."""
    return functional.cross_entropy(output.flatten(0, 1), batch["target"].flatten())


def classification_loss(output: Any, batch: Mapping[str, Any]) -> torch.Tensor:
    """Cross entropy of logits (batch, classes) with class labels; of several outputs, the first one counts."""
    logits = output[0] if isinstance(output, (tuple, list)) else output
    return _tensor_loss(logits, batch)


def inferred_loss(output: Any, batch: Mapping[str, Any]) -> torch.Tensor:
    """The loss for the form of the output, see ``INFERRED_LOSS_NOTE``."""
    own = _own_loss(output)
    if own is not None:
        return own
    tensors = list(_float_tensors(output))
    if len(tensors) == 1:
        return _tensor_loss(tensors[0], batch)
    return sum_of_means(output, batch)


def sum_of_means(output: Any, batch: Mapping[str, Any]) -> torch.Tensor:
    """Sum of the means of all floating-point outputs in fp32, so that every output gets a gradient."""
    means = [tensor.float().mean() for tensor in _float_tensors(output)]
    if not means:
        raise TypeError(f"the model returned no floating-point tensor but {type(output).__name__}")
    total = means[0]
    for mean in means[1:]:
        total = total + mean
    return total


def _own_loss(output: Any) -> torch.Tensor | None:
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    return loss.mean() if isinstance(loss, torch.Tensor) and loss.is_floating_point() else None


def _tensor_loss(output: torch.Tensor, batch: Mapping[str, Any]) -> torch.Tensor:
    if output.dim() < 2:
        return output.float().mean()
    if _is_per_token(output, batch):
        output = output.flatten(0, 1)
    elif output.dim() == 3:
        return output.float().mean()
    if output.shape[1] == 1:
        return functional.binary_cross_entropy_with_logits(
            output, _stand_in(output.shape, output.dtype, output)
        )
    shape = (output.shape[0], *output.shape[2:])
    target = batch.get("target")
    if target is None or tuple(target.shape) != shape:
        target = _stand_in(shape, torch.int64, output)
    return functional.cross_entropy(output, target)


def _stand_in(shape: tuple[int, ...], dtype: torch.dtype, output: torch.Tensor) -> torch.Tensor:
    """A target for an output without one: zeros, or on meta a tensor that no kernel fills."""
    make = torch.empty if output.is_meta else torch.zeros
    return make(shape, dtype=dtype, device=output.device)


def _is_per_token(output: torch.Tensor, batch: Mapping[str, Any]) -> bool:
    """True if the output is (batch, tokens, classes) for integer inputs (batch, tokens)."""
    inputs = [*batch.get("args", ()), *batch.get("kwargs", {}).values()]
    tokens = [x for x in inputs if isinstance(x, torch.Tensor) and not x.is_floating_point() and x.dim() == 2]
    return output.dim() == 3 and any(output.shape[:2] == x.shape for x in tokens)


def _float_tensors(value: Any) -> Iterator[torch.Tensor]:
    return (tensor for tensor in nested_tensors(value) if tensor.is_floating_point())
