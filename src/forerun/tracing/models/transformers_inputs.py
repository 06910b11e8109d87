"""Batches of Transformers models, and changes that let the models run without values."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from forerun.base.errors import InvalidSetupError, ModelBuildError
from forerun.tracing.models.built_model import BatchMaker, InputOptions

__all__ = ["NO_PADDING_NOTE", "ModelInputs", "prepare_for_trace", "transformers_inputs"]

NO_PADDING_NOTE = (
    "the values of the mask are not known: every sample counts as full, with one sequence and without padding"
)

_DEFAULT_TOKENS = 512
_MAX_TOKENS_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length")
_PER_SAMPLE = ("SequenceClassification", "ImageClassification", "NextSentencePrediction", "MultipleChoice")
_NUM_CHOICES = 4  # number of answers to one question, as in SWAG


@dataclass(frozen=True, slots=True)
class ModelInputs:
    """Inputs of a model.

    Attributes:
        shape: Shape of one sample.
        make_batch: As in ``BuiltModel``.
        num_tokens: Tokens of one sample; those that its decoder writes for sound, None for images.
    """

    shape: tuple[int, ...]
    make_batch: BatchMaker
    num_tokens: int | None = None


def transformers_inputs(module: torch.nn.Module, options: InputOptions, name: str) -> ModelInputs:
    """Inputs of a Transformers model; labels are included if it takes any."""
    main_input = getattr(module, "main_input_name", "input_ids")
    if main_input == "pixel_values":
        return _image_inputs(module, options, name)
    if main_input == "input_features":
        return _sound_inputs(module, options, name)
    if main_input != "input_ids":
        raise ModelBuildError(
            f"{name} reads {main_input!r}; text (input_ids), image (pixel_values) and sound (input_features) models "
            "are supported: "
            "give a factory (file.py:factory) that returns (module, example_batch)"
        )
    return _text_inputs(module, options, name)


def prepare_for_trace(module: torch.nn.Module, training: bool) -> torch.nn.Module:
    """Makes a Transformers model run on meta as it does in a training step or an evaluation, in place.

    The cache of keys and values is switched off for training; an evaluation returns it by default, and it
    fills memory. Questions of the library about values of masks are answered while the model runs: nothing is
    padded, one sequence per sample.
    """
    config: Any = module.config
    if training and getattr(config, "use_cache", False):
        config.use_cache = False
    forward = module.forward

    @functools.wraps(forward)
    def with_full_sequences(*args: Any, **kwargs: Any) -> Any:
        import transformers
        from transformers import masking_utils

        answers = (
            (masking_utils, "find_packed_sequence_indices", lambda position_ids: None),
            (masking_utils, "fast_all", lambda mask: True),
            (transformers.PreTrainedModel, "warn_if_padding_and_no_attention_mask", lambda *_: None),
        )
        known = [(o, name, getattr(o, name), new) for o, name, new in answers if hasattr(o, name)]
        for owner, name, _, new in known:
            setattr(owner, name, new)
        try:
            return forward(*args, **kwargs)
        finally:
            for owner, name, old, _ in known:
                setattr(owner, name, old)

    module.forward = with_full_sequences
    return module


def _sound_inputs(module: torch.nn.Module, options: InputOptions, name: str) -> ModelInputs:
    """A spectrum for the encoder and as many words as the decoder takes, or ``sequence_length``."""
    options.refuse_image(name)
    config: Any = module.config
    shape = (config.num_mel_bins, 2 * config.max_source_positions)
    most = config.max_target_positions
    words = min(options.sequence_length or most, most)
    if options.sequence_length is not None and options.sequence_length > most:
        raise _too_long(name, most, options.sequence_length)
    config.decoder_start_token_id = config.decoder_start_token_id or 0

    def make_batch(batch_size: int) -> Mapping[str, Any]:
        spectrum = torch.empty((batch_size, *shape), device="meta")
        return {"kwargs": {"input_features": spectrum, "labels": _integers(batch_size, words)}}

    return ModelInputs(shape, make_batch, words)


def _too_long(name: str, limit: int, length: int) -> InvalidSetupError:
    return InvalidSetupError(
        f"{name} takes at most {limit} tokens, got sequence_length {length}; give --sequence-length {limit} or less"
    )


def _image_inputs(module: torch.nn.Module, options: InputOptions, name: str) -> ModelInputs:
    options.refuse_sequence(name)
    config: Any = module.config
    size = getattr(config, "image_size", 224)
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    shape = options.image_shape((getattr(config, "num_channels", 3), height, width))
    takes_labels = "labels" in inspect.signature(module.forward).parameters
    dense = "Segmentation" in type(module).__name__

    def make_batch(batch_size: int) -> Mapping[str, Any]:
        inputs = {"pixel_values": torch.empty((batch_size, *shape), device="meta")}
        if takes_labels:
            inputs["labels"] = _integers(batch_size, *(shape[-2:] if dense else ()))
        return {"kwargs": inputs}

    return ModelInputs(shape, make_batch)


def _text_inputs(module: torch.nn.Module, options: InputOptions, name: str) -> ModelInputs:
    options.refuse_image(name)
    num_tokens = _num_tokens(module.config, options, name)
    class_name = type(module).__name__
    parameters = inspect.signature(module.forward).parameters
    shape = (_NUM_CHOICES, num_tokens) if class_name.endswith("MultipleChoice") else (num_tokens,)

    def make_batch(batch_size: int) -> Mapping[str, Any]:
        inputs = {"input_ids": _integers(batch_size, *shape)}
        if "labels" in parameters:
            inputs["labels"] = _integers(batch_size, *(() if class_name.endswith(_PER_SAMPLE) else shape))
        elif getattr(module.config, "is_encoder_decoder", False) and "decoder_input_ids" in parameters:
            inputs["decoder_input_ids"] = _integers(batch_size, *shape)
        for per_sample in ("next_sentence_label", "sentence_order_label", "start_positions", "end_positions"):
            if per_sample in parameters:
                inputs[per_sample] = _integers(batch_size)
        return {"kwargs": inputs}

    return ModelInputs(shape, make_batch, math.prod(shape))


def _num_tokens(config: Any, options: InputOptions, name: str) -> int:
    limits = [getattr(config, key, None) for key in _MAX_TOKENS_KEYS]
    limit = next((value for value in limits if isinstance(value, int) and value > 0), None)
    # RoBERTa and similar models count positions from the padding index on.
    if limit is not None and getattr(config, "model_type", "") in (
        "roberta",
        "xlm-roberta",
        "camembert",
        "longformer",
    ):
        limit -= getattr(config, "pad_token_id", 1) + 1
    if options.sequence_length is None:
        return min(_DEFAULT_TOKENS, limit or _DEFAULT_TOKENS)
    if limit is not None and options.sequence_length > limit:
        raise _too_long(name, limit, options.sequence_length)
    return options.sequence_length


def _integers(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int64, device="meta")
