"""A built model, as every source of models hands it to the tracer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from forerun.base.errors import InvalidSetupError

BatchMaker = Callable[[int], Mapping[str, Any]]
LossFunction = Callable[[Any, Mapping[str, Any]], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class BuiltModel:
    """A module, on the meta device unless it was built to be run, with everything for one training step.

    Attributes:
        name: The model as the user named it.
        module: The network; its parameters and buffers are meta tensors unless it was built to be run.
        input_shape: Shape of one sample without the batch axis, for display and cache keys.
        make_batch: Function from a batch size to the keyword arguments of ``loss`` and, under the keys ``"args"``
            and ``"kwargs"``, those of the module; tensors are on the module's device.
        loss: Function from the module's output and the batch to a scalar.
        only_batch_size: The only batch size of the model, if its file fixes one; None for any.
        notes: Remarks for the user.
        tokens_per_sample: Tokens of one sample of a model that reads tokens, None of others.
        blocks: Names of the modules that repeat, in order.
        num_left_out: Blocks equal to the middle one that the module lacks.
        cache_key: Text that identifies the model's definition beyond its name (file digest, options), or
            None if the trace must not be cached (a module object handed over in Python).
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
    num_left_out: int = 0
    cache_key: str | None = None


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
                raise InvalidSetupError(
                    "input_shape must name at least one axis, such as 3,224,224; got none"
                )
            for size in self.input_shape:
                _check_size("every size of input_shape", size)
        if self.image_size is not None and self.input_shape is not None:
            raise InvalidSetupError(
                f"give image_size or input_shape, not both; got {self.image_size} and {self.input_shape}"
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
                f"got input_shape {_text(self.input_shape)} (leave the batch axis out)"
            )
        return self.input_shape

    def refuse_image(self, name: str) -> None:
        """Refuse image options for a model that reads tokens."""
        if self.image_size is not None or self.input_shape is not None:
            raise InvalidSetupError(
                f"{name} reads tokens, not images: use sequence_length instead of image_size or input_shape"
            )

    def refuse_sequence(self, name: str) -> None:
        """Refuse a sequence length for a model that reads images."""
        if self.sequence_length is not None:
            raise InvalidSetupError(
                f"{name} reads images, not tokens: use image_size or input_shape instead of sequence_length"
            )

    def key(self) -> str:
        """The options that change the traced graph, for cache keys."""
        return (
            f"image={self.image_size} shape={self.input_shape} sequence={self.sequence_length} "
            f"classes={self.num_classes} training={self.training} attention={self.attn_implementation}"
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
