"""Models of Transformers: ``hf:config.json``, ``hf:ORG/NAME`` and catalogued architectures such as ``llama-3.1-8b``.

The file is the ``config.json`` that Transformers writes beside weights. A name on the hub that is not in the catalogue
is looked up there once and its configuration kept in the cache folder; weights are never read, and code that a
configuration points to is not run.
Their batches, and changes that let the models run without values, stand here too.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import math
import os
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from forerun.base.errors import (
    ForerunError,
    InvalidSetupError,
    MissingExtraError,
    ModelBuildError,
    UnknownModelError,
    near_matches,
)
from forerun.question.model import POSITIONS, Architecture, find_architecture
from forerun.tracing.models.built_model import (
    INFERRED_LOSS_NOTE,
    OTHER_LOSS_NOTE,
    BatchMaker,
    BuiltModel,
    InputOptions,
    inferred_loss,
)
from forerun.tracing.models.hub import config_path
from forerun.tracing.models.linear_attention import take_linear_attention_kernels
from forerun.tracing.models.meta_build import answered, build_on_meta, first_line, move_to_meta


def build_transformers(text: str, options: InputOptions) -> BuiltModel:
    """Builds the architecture of a Transformers configuration, in fp32 and without weights.

    Without ``architectures`` in the file the model is a sequence classifier, an image classifier or a causal
    language model, the first of these that its ``model_type`` has.

    Args:
        text: Path of a JSON file or of a folder with ``config.json``, or a name on the hub, ``ORG/NAME``.
        options: Options of inputs and head.
    """
    name = f"hf:{text}"
    known = find_architecture(text)
    if known is not None and not Path(text).expanduser().exists():
        return build_catalogued(known, options, name)
    path = config_path(text)
    return _build(_read_config(path), options, name, path)


def build_catalogued(architecture: Architecture, options: InputOptions, name: str) -> BuiltModel:
    """Builds an architecture of the catalogue, in fp32 and without weights.

    Args:
        architecture: The facts.
        options: Options of inputs and head.
        name: The model as the user named it.
    """
    values = {**architecture.config, "architectures": [architecture.model_class]}
    return _build(values, options, name, None)


def _build(values: dict[str, Any], options: InputOptions, name: str, path: Path | None) -> BuiltModel:
    try:
        with _offline():
            import transformers
    except ImportError as error:
        raise MissingExtraError(name, "hf") from error
    with _offline():
        config = _config(transformers, values, str(path or name))
        model_class = _model_class(transformers, values, config)
        if options.num_classes is not None:
            model_class = _classifier(transformers, model_class, config)
        _set_head(config, model_class.__name__, options)
        module, notes = _construct(model_class, config, options)
        head = getattr(module, "lm_head", None)
        if values.get("tie_word_embeddings") is False and isinstance(head, torch.nn.Linear):
            # T5's classes share this matrix whatever the file says; published weights hold two, and loading keeps both.
            head.weight = torch.nn.Parameter(torch.empty_like(head.weight))
        try:
            inputs = transformers_inputs(module, options, name)
        except AttributeError as error:  # a configuration without what those of its kind have
            raise ModelBuildError(
                f"the inputs of {name} are not known ({first_line(error)}): give a factory (file.py:factory) that "
                "returns (module, example_batch)"
            ) from error
        notes += inputs.notes
        parameters = inspect.signature(module.forward).parameters
        if parameters.keys().isdisjoint(("labels", "return_loss")):
            notes = (*notes, INFERRED_LOSS_NOTE)
        elif "labels" in parameters and _are_lists(parameters["labels"]):
            notes = (*notes, OTHER_LOSS_NOTE)
        notes += tuple(
            kernel["says"]
            for kernel in _plain_kernels()
            if config.model_type.startswith(tuple(kernel["types"]))
        )
    definition = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
    return BuiltModel(
        name=name,
        module=prepare_for_trace(move_to_meta(module), options.training).train(options.training),
        input_shape=inputs.shape,
        make_batch=inputs.make_batch,
        loss=inferred_loss,
        notes=notes,
        tokens_per_sample=inputs.num_tokens,
        cache_key=f"hf {definition} {options.key()}",
    )


@functools.cache
def _plain_kernels() -> list[dict[str, Any]]:
    """Notes on parts that libraries compute with kernels of their own, by the beginning of the model's type."""
    text = Path(__file__).with_name("plain_kernels.toml").read_text(encoding="utf-8")
    kernels: list[dict[str, Any]] = tomllib.loads(text)["kernel"]
    return kernels


_offline = functools.partial(
    patch.dict, os.environ, {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
)  # a name on the hub inside of a configuration is never asked for


EAGER_NOTE = "attention is in single operations, as the model's configuration says (eager)"

_LAYER_COUNTS = {
    "num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers",
    "num_encoder_layers", "num_decoder_layers",
}  # fmt: skip
_MOST_LAYERS = 2000
"""Largest number of layers that is traced, more than ten times that of the deepest models."""


def _read_config(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        raise ModelBuildError(f"{path} is not a readable JSON file: {error}") from error
    except RecursionError:
        raise ModelBuildError(
            f"{path} is nested too deeply for a configuration; give the file of a model"
        ) from None
    if not isinstance(values, dict) or not isinstance(values.get("model_type"), str):
        raise ModelBuildError(
            f"{path} is no Transformers configuration: a JSON object with a text 'model_type' was expected"
        )
    for name in _LAYER_COUNTS & values.keys():
        count = values[name]
        if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count <= _MOST_LAYERS:
            raise ModelBuildError(
                f"{path}: {name} must be a whole number from 0 to {_MOST_LAYERS:,}, got {count!r}; correct the file"
            )
    return values


def _config(transformers: Any, values: dict[str, Any], where: str) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    settings = dict(values)
    model_type = settings.pop("model_type")
    settings.pop("auto_map", None)
    if model_type not in CONFIG_MAPPING:
        raise UnknownModelError(
            f"Transformers {transformers.__version__} has no model_type {model_type!r} ({where})"
            f"{near_matches(model_type, list(CONFIG_MAPPING.keys()))}"
        )
    try:
        return transformers.AutoConfig.for_model(model_type, **settings)
    except Exception as error:  # configurations validate themselves with errors of many kinds
        raise ModelBuildError(f"{where} is not accepted by Transformers: {first_line(error)}") from error


def _model_class(transformers: Any, values: dict[str, Any], config: Any) -> Any:
    named = values.get("architectures") or []
    if named:
        found = getattr(transformers, str(named[0]), None)
        if found is None:
            known = [name for name in dir(transformers) if "For" in name and "_" not in name]
            raise UnknownModelError(
                f"Transformers {transformers.__version__} has no architecture {named[0]!r}"
                f"{_near_classes(str(named[0]), known)}"
            )
        return found
    # The first head that the kind of model has is taken as the task: classifiers before language models, as
    # an encoder has both.
    autos = (
        "AutoModelForSequenceClassification",
        "AutoModelForImageClassification",
        "AutoModelForCausalLM",
        "AutoModel",
    )
    for auto in autos:
        found = getattr(transformers, auto)._model_mapping.get(type(config), None)
        if found is not None:
            return found[0] if isinstance(found, tuple) else found
    raise UnknownModelError(
        f"Transformers has no model for model_type {values['model_type']!r}; name one in 'architectures'"
    )


def _classifier(transformers: Any, model_class: Any, config: Any) -> Any:
    """The same network with a head for classes, such as the one value of a reward model; itself if it has none."""
    if not model_class.__name__.endswith(("CausalLM", "MaskedLM", "Model")):
        return model_class
    mapping = transformers.AutoModelForSequenceClassification._model_mapping
    return mapping.get(type(config), None) or model_class


def _near_classes(name: str, known: list[str]) -> str:
    """Near matches of a class name, those of the same network first."""
    network = name.partition("For")[0]
    return near_matches(name, [k for k in known if k.startswith(network)]) or near_matches(name, known)


def _set_head(config: Any, class_name: str, options: InputOptions) -> None:
    if options.num_classes is not None:
        if "Classification" not in class_name:
            raise InvalidSetupError(
                f"{class_name} has no classes to set: num_classes is for classification heads"
            )
        config.num_labels = options.num_classes
    if class_name.endswith("SequenceClassification") and getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = 0  # decoders look for the last token before the padding
    if getattr(config, "is_encoder_decoder", False):  # the inputs of a decoder are its labels, moved by one
        config.pad_token_id = getattr(config, "pad_token_id", None) or 0
        if getattr(config, "decoder_start_token_id", None) is None:
            config.decoder_start_token_id = config.pad_token_id


def _construct(
    model_class: Any, config: Any, options: InputOptions
) -> tuple[torch.nn.Module, tuple[str, ...]]:
    """The module and notes; attention is eager if the configuration says so or the architecture has no other."""

    def construct(attention: str) -> torch.nn.Module:
        module: torch.nn.Module = build_on_meta(
            lambda: model_class._from_config(config, attn_implementation=attention, dtype=torch.float32)
        )
        return module

    wanted, name = options.attn_implementation, model_class.__name__
    if wanted != "eager" and getattr(config, "_attn_implementation", None) == "eager":
        return construct("eager"), (EAGER_NOTE,)
    taken = (
        f"{name} has attention in one kernel by FlashAttention or FlexAttention, and not by PyTorch's own: it is taken "
        "to last as long"
    )
    try:
        try:
            if wanted == "sdpa" and getattr(config, "attn_logit_softcapping", None) is not None:
                config.attn_logit_softcapping = None  # a tanh of scores that stay inside the kernel
                return construct(wanted), (taken,)
            return construct(wanted), ()
        except ValueError:
            if wanted == "eager":
                raise
            module = construct("eager")
            if not _has_other_kernels(model_class):
                return module, (f"{name} has no {wanted} attention: eager attention is used",)
            # Its own kernels cost what PyTorch's do, but for a column of scores.
            config._attn_implementation = wanted
            return module, (taken,)
    except ForerunError:
        raise
    except Exception as error:  # model code raises anything on a contradictory configuration
        raise ModelBuildError(
            f"{name} could not be built from this configuration: {first_line(error)}"
        ) from error


def _take_chosen_experts(module: torch.nn.Module) -> None:
    """Makes Llama 4 and DBRX compute for each token the experts that it chooses, in products of groups; in place.

    The classes of Transformers multiply every token with all experts, or ask the values of the choice.
    """
    for part in module.modules():
        kind, experts = type(part).__name__, getattr(part, "experts", None)
        if kind not in ("Llama4TextMoe", "DbrxFFN") or experts is None or hasattr(experts, "has_gate"):
            continue
        experts.has_gate, experts.is_transposed = True, kind == "Llama4TextMoe"
        experts.has_bias = experts.has_post_expert_norm = experts._is_expert_parallel = False
        experts._apply_gate = functools.partial(_gated, experts)
        if kind == "Llama4TextMoe":
            part.forward = functools.partial(_chosen_experts, part)
            continue
        own, sizes = experts.mlp, (experts.num_experts, -1, experts.hidden_size)
        experts.gate_up_proj = torch.nn.Parameter(torch.cat([own.w1.view(sizes), own.v1.view(sizes)], 1))
        experts.down_proj = torch.nn.Parameter(own.w2.view(sizes).mT.contiguous())
        experts.act_fn, experts.mlp = own.activation_fn, None
        experts.forward = functools.partial(_experts_of_rows, experts)


def _with_images(hidden: torch.Tensor, _places: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
    """Features of images added to the states at their places, of which the number is known: the first take theirs."""
    hidden = hidden.clone()
    states, count = hidden.flatten(0, 1), images.shape[0]
    states[:count] = states[:count] + images.to(hidden.dtype)
    return hidden


def _gated(experts: Any, both: torch.Tensor) -> torch.Tensor:
    gate, up = both.chunk(2, dim=-1)
    found: torch.Tensor = up * experts.act_fn(gate)
    return found


def _experts_of_rows(experts: Any, hidden: torch.Tensor, *chosen: torch.Tensor) -> torch.Tensor:
    from transformers.integrations.moe import grouped_mm_experts_forward

    found: torch.Tensor = grouped_mm_experts_forward(experts, hidden.flatten(0, -2), *chosen)
    return found.view_as(hidden)


def _chosen_experts(part: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    hidden = hidden_states.reshape(-1, part.hidden_dim)
    scores, logits = part.router(hidden)
    chosen = logits.topk(part.top_k, dim=-1).indices
    routed = _experts_of_rows(part.experts, hidden, chosen, scores.gather(1, chosen))
    return part.shared_expert(hidden).add_(routed), logits


def _has_other_kernels(model_class: Any) -> bool:
    """True if attention is a function that the library exchanges, and one of FlashAttention or FlexAttention does it.

    So it is in gpt-oss, whose scores have a column of their own (a sink), which PyTorch's kernel does not know.
    """
    own = sys.modules[model_class.__module__]
    is_known = any(getattr(model_class, f"_supports_{kind}", False) for kind in ("flash_attn", "flex_attn"))
    return is_known and hasattr(own, "ALL_ATTENTION_FUNCTIONS")


NO_PADDING_NOTE = (
    "the values of the mask are not known: every sample counts as full, with one sequence and without padding"
)

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


def prepare_for_trace(module: torch.nn.Module, training: bool) -> torch.nn.Module:
    """Makes a Transformers model run on meta as it does in a training step or an evaluation, in place.

    The cache of keys and values is switched off for training; an evaluation returns it by default, and it
    fills memory. Questions of the library about values of masks are answered while the model runs: nothing is
    padded, one sequence per sample.
    """
    config: Any = module.config
    _take_chosen_experts(module)
    take_linear_attention_kernels(module)
    for part in module.modules():
        if hasattr(part, "_deepstack_process"):
            vars(part)["_deepstack_process"] = _with_images
    for part in (config, config.get_text_config()) if training else ():
        if getattr(part, "use_cache", False):
            part.use_cache = False
    forward = module.forward

    @functools.wraps(forward)
    def with_full_sequences(*args: Any, **kwargs: Any) -> Any:
        import transformers
        from transformers import masking_utils

        own: Any = sys.modules[type(module).__module__]
        places: Any = module.device
        is_whole: Any = getattr(masking_utils, "_ignore_bidirectional_mask_sdpa", None)
        answers = (
            (
                own,
                "torch_compilable_check",
                lambda *_: None,
            ),  # that a text has a place for each part of its images
            *((own, name, _moved_to(places, getattr(own, name))) for name in _OF_SIZES if hasattr(own, name)),
            (masking_utils, "find_packed_sequence_indices", lambda position_ids: None),
            (masking_utils, "fast_all", lambda mask: True),
            (
                masking_utils,
                "_ignore_bidirectional_mask_sdpa",
                lambda _mask, *of, **more: is_whole(None, *of, **more),
            ),
            (transformers.PreTrainedModel, "warn_if_padding_and_no_attention_mask", lambda *_: None),
            *_one_kernel_for_all_lengths(module),
        )
        with answered(answers):
            return forward(*args, **kwargs)

    module.forward = with_full_sequences
    return module


def _one_kernel_for_all_lengths(module: torch.nn.Module) -> Iterator[tuple[Any, str, Any]]:
    """Answers that make encoders of images attend within each window or image at once, as FlashAttention's kernel does.

    With PyTorch's attention the library calls it for every window of every block: 100,000 operations of Qwen2.5-VL.
    """
    parts = [part for part in module.modules() if "cu_seqlens" in inspect.signature(part.forward).parameters]
    configs = [part.config for part in parts if hasattr(part, "config")]
    for own in {sys.modules[type(part).__module__] for part in parts}:
        functions: Any = getattr(own, "ALL_ATTENTION_FUNCTIONS", None)
        if hasattr(functions, "get_interface") and hasattr(own, "is_flash_attention_requested"):
            yield (
                own,
                "is_flash_attention_requested",
                lambda config=None, **_: any(config is c for c in configs),
            )
            by_length = functools.partial(_interface_by_length, functions.get_interface)
            yield own, "ALL_ATTENTION_FUNCTIONS", SimpleNamespace(get_interface=by_length)


def _interface_by_length(interface: Callable[..., Any], *of: Any) -> Callable[..., Any]:
    return attention_by_length(interface(*of))


def attention_by_length(attention: Callable[..., Any]) -> Callable[..., Any]:
    """Attention of sequences that stand one after the other in (1, heads, tokens, width): equal lengths in one call."""

    def attend(
        part: Any, *states: torch.Tensor, cu_seq_lens_q: torch.Tensor | None = None, **more: Any
    ) -> Any:
        if cu_seq_lens_q is None:
            return attention(part, *states, **more)
        lengths = Counter((cu_seq_lens_q[1:] - cu_seq_lens_q[:-1]).tolist())
        tokens = [length * number for length, number in lengths.items()]
        found = []
        for length, *own in zip(lengths, *(one[0].split(tokens, dim=1) for one in states), strict=True):
            each = (one.unflatten(1, (-1, length)).transpose(0, 1) for one in own)
            found.append(attention(part, *each, **more)[0].flatten(0, 1))
        return (torch.cat(found) if len(found) > 1 else found[0]).unsqueeze(0), None

    return attend


_OF_SIZES = ("get_vision_position_ids", "get_vision_interpolation_indices_and_weights")
"""Functions of the sizes of images, which have values and so lie on the host, with their results."""


def _moved_to(device: torch.device, function: Callable[..., Any]) -> Callable[..., Any]:
    def moved(*of: Any, **more: Any) -> Any:
        found = function(*of, **more)
        return (
            found.to(device) if isinstance(found, torch.Tensor) else tuple(part.to(device) for part in found)
        )

    return moved


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


def _are_lists(labels: inspect.Parameter) -> bool:
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
        elif "labels" in parameters and not _are_lists(parameters["labels"]):
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
    """Images of a vision-language model, square and of its own size unless the user names one.

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
