"""Models of Transformers from a local configuration file: ``hf:config.json``.

The file is the ``config.json`` that Transformers writes beside weights. Nothing is read from a hub, and code
that a configuration points to is not run.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from forerun.errors import (
    ForerunError,
    InvalidSetupError,
    MissingExtraError,
    ModelBuildError,
    UnknownModelError,
    near_matches,
)
from forerun.tracing.built_model import BatchMaker, BuiltModel
from forerun.tracing.failures import first_line
from forerun.tracing.input_options import InputOptions
from forerun.tracing.losses import INFERRED_LOSS_NOTE, inferred_loss
from forerun.tracing.meta_build import build_on_meta, move_to_meta

__all__ = ["build_transformers", "transformers_inputs"]

_DEFAULT_TOKENS = 512
_MAX_TOKENS_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length")
_PER_SAMPLE = ("SequenceClassification", "ImageClassification", "NextSentencePrediction", "MultipleChoice")
_NUM_CHOICES = 4  # answers of one question, as in SWAG


def build_transformers(path_text: str, options: InputOptions) -> BuiltModel:
    """Builds the architecture a Transformers configuration names, in fp32 and without weights.

    Without ``architectures`` in the file the model is a sequence classifier, an image classifier or a causal
    language model, whichever its ``model_type`` has first.

    Args:
        path_text: A JSON file, or a folder with ``config.json``.
        options: Inputs and head.
    """
    path = _config_path(path_text)
    values = _read_config(path)
    try:
        with _offline():
            import transformers
    except ImportError as error:
        raise MissingExtraError(f"hf:{path_text}", "hf") from error
    with _offline():
        config = _config(transformers, values, path)
        model_class = _model_class(transformers, values, config)
        _set_head(config, model_class.__name__, options)
        module, notes = _construct(model_class, config, options)
        shape, make_batch = transformers_inputs(module, options, f"hf:{path_text}")
        if "labels" not in inspect.signature(module.forward).parameters:
            notes = (*notes, INFERRED_LOSS_NOTE)
    return BuiltModel(
        name=f"hf:{path_text}",
        module=move_to_meta(module).train(options.training),
        input_shape=shape,
        make_batch=make_batch,
        loss=inferred_loss,
        notes=notes,
        cache_key=f"hf {hashlib.sha256(path.read_bytes()).hexdigest()} {options.key()}",
    )


def transformers_inputs(
    module: torch.nn.Module, options: InputOptions, name: str
) -> tuple[tuple[int, ...], BatchMaker]:
    """Sample shape and batch maker of a Transformers model; labels are included if it takes any."""
    main_input = getattr(module, "main_input_name", "input_ids")
    if main_input == "pixel_values":
        return _image_inputs(module, options, name)
    if main_input != "input_ids":
        raise ModelBuildError(
            f"{name} reads {main_input!r}; text (input_ids) and image (pixel_values) models are supported: "
            "give a factory (file.py:factory) that returns (module, example_batch)"
        )
    return _text_inputs(module, options, name)


@contextmanager
def _offline() -> Iterator[None]:
    names = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _config_path(path_text: str) -> Path:
    path = Path(path_text).expanduser()
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise UnknownModelError(
            f"there is no file {path_text!r}; hf: takes a local Transformers configuration (config.json) and never "
            "contacts a hub: download the file first"
        )
    return path


def _read_config(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelBuildError(f"{path} is not a readable JSON file: {error}") from error
    if not isinstance(values, dict) or not isinstance(values.get("model_type"), str):
        raise ModelBuildError(
            f"{path} is no Transformers configuration: a JSON object with a text 'model_type' was expected"
        )
    return values


def _config(transformers: Any, values: dict[str, Any], path: Path) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    settings = dict(values)
    model_type = settings.pop("model_type")
    settings.pop("auto_map", None)
    if model_type not in CONFIG_MAPPING:
        raise UnknownModelError(
            f"Transformers {transformers.__version__} has no model_type {model_type!r} ({path})"
            f"{near_matches(model_type, list(CONFIG_MAPPING.keys()))}"
        )
    try:
        return transformers.AutoConfig.for_model(model_type, **settings)
    except Exception as error:  # configurations validate themselves with errors of many kinds
        raise ModelBuildError(f"{path} is not accepted by Transformers: {first_line(error)}") from error


def _model_class(transformers: Any, values: dict[str, Any], config: Any) -> Any:
    named = values.get("architectures") or []
    if named:
        found = getattr(transformers, str(named[0]), None)
        if found is None:
            raise UnknownModelError(
                f"Transformers {transformers.__version__} has no architecture {named[0]!r}"
                f"{near_matches(str(named[0]), [n for n in dir(transformers) if '_' not in n and 'For' in n])}"
            )
        return found
    autos = ("AutoModelForSequenceClassification", "AutoModelForImageClassification", "AutoModelForCausalLM", "AutoModel")
    for auto in autos:
        found = getattr(transformers, auto)._model_mapping.get(type(config), None)
        if found is not None:
            return found[0] if isinstance(found, tuple) else found
    raise UnknownModelError(f"Transformers has no model for model_type {values['model_type']!r}; name one in 'architectures'")


def _set_head(config: Any, class_name: str, options: InputOptions) -> None:
    if options.num_classes is not None:
        if "Classification" not in class_name:
            raise InvalidSetupError(f"{class_name} has no classes to set: num_classes is for classification heads")
        config.num_labels = options.num_classes
    if class_name.endswith("SequenceClassification") and getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = 0  # decoders look for the last token before the padding
    if getattr(config, "use_cache", False):
        config.use_cache = False  # a cache of keys and values is for generation


def _construct(model_class: Any, config: Any, options: InputOptions) -> tuple[torch.nn.Module, tuple[str, ...]]:
    """The module and notes; attention is eager where the architecture has no other."""

    def construct(attention: str) -> torch.nn.Module:
        module: torch.nn.Module = build_on_meta(
            lambda: model_class._from_config(config, attn_implementation=attention, dtype=torch.float32)
        )
        return module

    wanted = options.attn_implementation
    try:
        try:
            return construct(wanted), ()
        except ValueError:
            if wanted == "eager":
                raise
            return construct("eager"), (f"{model_class.__name__} has no {wanted} attention: eager attention is used",)
    except ForerunError:
        raise
    except Exception as error:  # model code raises anything on a contradictory configuration
        raise ModelBuildError(
            f"{model_class.__name__} could not be built from this configuration: {first_line(error)}"
        ) from error


def _image_inputs(
    module: torch.nn.Module, options: InputOptions, name: str
) -> tuple[tuple[int, ...], BatchMaker]:
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

    return shape, make_batch


def _text_inputs(module: torch.nn.Module, options: InputOptions, name: str) -> tuple[tuple[int, ...], BatchMaker]:
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

    return shape, make_batch


def _num_tokens(config: Any, options: InputOptions, name: str) -> int:
    limits = [getattr(config, key, None) for key in _MAX_TOKENS_KEYS]
    limit = next((value for value in limits if isinstance(value, int) and value > 0), None)
    # RoBERTa and its kin count positions from the padding index on.
    if limit is not None and getattr(config, "model_type", "") in ("roberta", "xlm-roberta", "camembert", "longformer"):
        limit -= getattr(config, "pad_token_id", 1) + 1
    if options.sequence_length is None:
        return min(_DEFAULT_TOKENS, limit or _DEFAULT_TOKENS)
    if limit is not None and options.sequence_length > limit:
        raise InvalidSetupError(f"{name} takes at most {limit} tokens, got sequence_length {options.sequence_length}")
    return options.sequence_length


def _integers(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int64, device="meta")
