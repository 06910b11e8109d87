"""Batches of Transformers models: texts, images beside them, sounds, and the labels that a model takes."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from forerun.base.errors import InvalidSetupError, ModelBuildError
from forerun.question.model import POSITIONS
from forerun.tracing.models.built_model import BatchMaker, InputOptions

_DEFAULT_TOKENS = 512
_PER_SAMPLE = ("SequenceClassification", "ImageClassification", "NextSentencePrediction", "MultipleChoice")
_NUM_CHOICES = 4  # number of answers to one question, as in SWAG


@dataclass(frozen=True, slots=True)
class ModelInputs:
    """Inputs of a model.

    Attributes:
        shape: Shape of one sample.
        make_batch: As in ``BuiltModel``.
        num_tokens: Tokens of one sample; those that its decoder writes for sound, None for images.
        notes: Sizes that nobody gave.
    """

    shape: tuple[int, ...]
    make_batch: BatchMaker
    num_tokens: int | None = None
    notes: tuple[str, ...] = ()


def transformers_inputs(module: torch.nn.Module, options: InputOptions, name: str) -> ModelInputs:
    """Inputs of a Transformers model; labels are included if it takes any."""
    main_input = getattr(module, "main_input_name", "input_ids")
    if main_input == "pixel_values":
        return _image_inputs(module, options, name)
    if main_input == "input_features":
        return _sound_inputs(module, options, name)
    if main_input == "input_values":
        return _wave_inputs(module, options, name)
    if main_input != "input_ids":
        raise ModelBuildError(
            f"{name} reads {main_input!r}; text (input_ids), image (pixel_values) and sound (input_features, "
            "input_values) models are supported: give a factory (file.py:factory) that returns (module, example_batch)"
        )
    return _text_inputs(module, options, name)


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


_WAVE_SAMPLES = 160_000
"""Ten seconds at 16 kHz."""


def _wave_inputs(module: torch.nn.Module, options: InputOptions, name: str) -> ModelInputs:
    """A sound as it was recorded, or the spectrum of a model that has a number of mel bins, and the labels."""
    config: Any = module.config
    spectrum = (getattr(config, "max_length", 0), getattr(config, "num_mel_bins", 0))
    channels = getattr(config, "audio_channels", None)
    own = spectrum if all(spectrum) else (channels, _WAVE_SAMPLES) if channels else (_WAVE_SAMPLES,)
    is_open = options.input_shape is None and own[-1] == _WAVE_SAMPLES
    if options.image_size is not None or options.sequence_length is not None:
        raise InvalidSetupError(
            f"{name} reads sound: give the length of a sample as --input-shape, such as 160000"
        )
    shape = options.image_shape(own)
    # What is masked or left out by chance in training is a small share of the work.
    config.apply_spec_augment, config.layerdrop = False, 0.0
    takes_labels = "labels" in inspect.signature(module.forward).parameters
    is_classifier = type(module).__name__.endswith("Classification")

    def make_batch(batch_size: int) -> Mapping[str, Any]:
        inputs = {"input_values": torch.empty((batch_size, *shape), device="meta")}
        if takes_labels:
            inputs["labels"] = _integers(batch_size, *(() if is_classifier else (_CHARACTERS,)))
        return {"kwargs": inputs}

    note = f"sounds of {_WAVE_SAMPLES:,} values (ten seconds) are assumed; --input-shape N asks for others"
    return ModelInputs(shape, make_batch, notes=(note,) * is_open)


_CHARACTERS = 128
"""Characters of ten seconds of speech."""


def _too_long(name: str, limit: int, length: int) -> InvalidSetupError:
    return InvalidSetupError(
        f"{name} takes at most {limit} tokens, got {length}; give --sequence-length {limit} or less"
    )


def are_lists(labels: inspect.Parameter) -> bool:
    """True for labels whose number differs from image to image, such as boxes, which a loss pairs by their values."""
    return "list" in str(labels.annotation).lower()


def _image_inputs(module: torch.nn.Module, options: InputOptions, name: str) -> ModelInputs:
    config: Any = module.config
    parts = ("vision_config", "encoder")  # which may have the size of images
    vision = next((part for key in parts if (part := getattr(config, key, None)) is not None), config)
    own = getattr(config, "image_size", None) or getattr(vision, "image_size", None)
    is_open = own is None and options.image_size is None and options.input_shape is None
    size = own or 224
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    frames = (config.num_frames,) if hasattr(config, "num_frames") else ()
    shape = options.image_shape((*frames, getattr(config, "num_channels", 3), height, width))
    parameters = inspect.signature(module.forward).parameters
    dense = "Segmentation" in type(module).__name__
    has_text = "input_ids" in parameters or hasattr(config, "decoder")
    if not has_text:
        options.refuse_sequence(name)
    words = _num_tokens(config.get_text_config(decoder=True), options, name) if has_text else None
    usual = "the configuration names no size of images: 224 x 224 are assumed, where detectors have 800 and more; "
    notes = (usual + "--image-size N asks for another",) * is_open
    if has_text and options.sequence_length is None:
        notes += (f"a text of {words} tokens is assumed with each image; --sequence-length says otherwise",)

    def make_batch(batch_size: int) -> Mapping[str, Any]:
        inputs = {"pixel_values": torch.empty((batch_size, *shape), device="meta")}
        if words is not None:  # a text beside the image, such as its caption
            inputs |= {
                key: _integers(batch_size, words) for key in ("input_ids", "labels") if key in parameters
            }
        elif "labels" in parameters and not are_lists(parameters["labels"]):
            inputs["labels"] = _integers(batch_size, *(shape[-2:] if dense else ()))
        return {"kwargs": inputs}

    return ModelInputs(shape, make_batch, notes=notes)


@dataclass(frozen=True, slots=True)
class _Pictures:
    """One image in each text of a vision-language model.

    Attributes:
        num_tokens: Places of the text that its parts take.
        inputs: Further inputs of the model, of a batch of texts of so many tokens.
        notes: Sizes that nobody gave.
    """

    num_tokens: int
    inputs: Callable[[int, int], dict[str, Any]]
    notes: tuple[str, ...] = ()


def _pictures(config: Any, options: InputOptions, name: str) -> _Pictures:
    """Images of a vision-language model, square, of the size that the model says unless the user names one.

    Qwen's cut an image of any size into patches, of which ``spatial_merge_size`` squared make a place of the text;
    others scale it to one size, and have ``mm_tokens_per_image`` places or one for each patch.
    """
    vision = config.vision_config
    merged = getattr(vision, "spatial_merge_size", None)
    patch = vision.patch_size
    if merged is None:
        size = int(vision.image_size)
        if options.image_size not in (None, size) or options.input_shape is not None:
            raise InvalidSetupError(
                f"{name} scales every image to {size} pixels; leave the size of the image out"
            )
        places = getattr(config, "mm_tokens_per_image", None) or (size // patch) ** 2
        has_kinds = hasattr(config, "mm_tokens_per_image")

        def scaled(batch: int, tokens: int) -> dict[str, Any]:
            kinds = {"token_type_ids": _integers(batch, tokens)} if has_kinds else {}
            return {"pixel_values": torch.empty((batch, 3, size, size), device="meta"), **kinds}

        return _Pictures(places, scaled)
    size = options.image_size or _IMAGE_SIDE // (patch * merged) * (patch * merged)
    if size % (patch * merged) or options.input_shape is not None:
        raise InvalidSetupError(
            f"{name} takes images whose side is a multiple of {patch * merged} pixels, got "
            f"{options.image_size or options.input_shape}; give --image-size {patch * merged * 16}"
        )
    side = size // patch
    width = 3 * getattr(vision, "temporal_patch_size", 1) * patch**2

    def cut(batch: int, tokens: int) -> dict[str, Any]:
        return {
            "pixel_values": torch.empty((batch * side**2, width), device="meta"),
            # Sizes are read by the model, so that they have values.
            "image_grid_thw": torch.tensor([[1, side, side]] * batch, device="cpu"),
            "position_ids": _integers(3, batch, tokens),
        }

    places = (side // merged) ** 2
    note = f"images of {size} x {size} pixels, {places:,} tokens each, are assumed; --image-size N asks for others"
    return _Pictures(places, cut, () if options.image_size else (note,))


def _beside_texts(vision: Any, parameters: Mapping[str, Any]) -> _Pictures:
    def scaled(batch: int, tokens: int) -> dict[str, Any]:
        size = vision.image_size
        images = torch.empty((batch, vision.num_channels, size, size), device="meta")
        return {"pixel_values": images, **({"return_loss": True} if "return_loss" in parameters else {})}

    return _Pictures(0, scaled)


_IMAGE_SIDE = 1024
"""Side of an image for models that take any size, at most [pixels]."""


def _text_inputs(module: torch.nn.Module, options: InputOptions, name: str) -> ModelInputs:
    parameters = inspect.signature(module.forward).parameters
    config: Any = module.config
    pictures = None
    # Images beside texts have an encoder of their own, and a loss of pairs.
    is_dual = "return_loss" in parameters or hasattr(config, "projection_dim")
    is_dual = is_dual and hasattr(config, "vision_config") and "pixel_values" in parameters
    if is_dual:
        pictures = _beside_texts(config.vision_config, parameters)
        config = config.text_config
    elif hasattr(config, "vision_config") and "pixel_values" in parameters:
        # A single token is one that follows an image when an answer is written, and has none of its own.
        pictures = None if options.sequence_length == 1 else _pictures(config, options, name)
        if pictures is not None and options.sequence_length is None:
            options = replace(options, sequence_length=pictures.num_tokens + _DEFAULT_TOKENS)
        config = config.get_text_config()
    else:
        options.refuse_image(name)
    num_tokens = _num_tokens(config, options, name)
    if pictures is not None and not is_dual and num_tokens <= pictures.num_tokens:
        raise InvalidSetupError(
            f"an image of {name} takes {pictures.num_tokens:,} places of a text, got {num_tokens:,} tokens; give a "
            "longer --sequence-length"
        )
    class_name = type(module).__name__
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
        if pictures is not None:
            inputs |= pictures.inputs(batch_size, num_tokens)
        return {"kwargs": inputs}

    return ModelInputs(shape, make_batch, math.prod(shape), () if pictures is None else pictures.notes)


def _num_tokens(config: Any, options: InputOptions, name: str) -> int:
    limits = [getattr(config, key, None) for key in POSITIONS]
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
    # Rotary positions have no table that ends: longer texts are trained with other angles, at the same cost.
    is_rotary = bool(getattr(config, "rope_parameters", None))
    if limit is not None and options.sequence_length > limit and not is_rotary:
        raise _too_long(name, limit, options.sequence_length)
    return options.sequence_length


def _integers(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int64, device="meta")
