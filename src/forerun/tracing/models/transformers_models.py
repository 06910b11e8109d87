"""Models of Transformers: ``hf:config.json``, ``hf:ORG/NAME`` and catalogued architectures such as ``llama-3.1-8b``.

The file is the ``config.json`` that Transformers writes beside weights. A name on the hub that is not in the catalogue
is looked up there once and its configuration kept in the cache folder; weights are never read, and code that a
configuration points to is not run.
Changes that let the models run without values stand here too.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from forerun.base.errors import (
    ForerunError,
    InvalidSetupError,
    ModelBuildError,
    UnknownModelError,
    near_matches,
)
from forerun.base.extras import needing
from forerun.base.tables import own_table
from forerun.question.model import Architecture, find_architecture
from forerun.tracing.models.built_model import (
    INFERRED_LOSS_NOTE,
    OTHER_LOSS_NOTE,
    BuiltModel,
    InputOptions,
    inferred_loss,
)
from forerun.tracing.models.hub import config_path
from forerun.tracing.models.linear_attention import take_linear_attention_kernels
from forerun.tracing.models.meta_build import answered, build_on_meta, first_line, move_to_meta
from forerun.tracing.models.transformers_inputs import are_lists, transformers_inputs


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
    with needing(name), _offline():
        import transformers
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
        elif "labels" in parameters and are_lists(parameters["labels"]):
            notes = (*notes, OTHER_LOSS_NOTE)
        # Of parts that libraries compute with kernels of their own.
        notes += tuple(
            kernel["says"]
            for kernel in own_table(__file__, "plain_kernels.toml")["kernel"]
            if config.model_type.startswith(tuple(kernel["types"]))
        )
    return BuiltModel(
        name=name,
        module=prepare_for_trace(move_to_meta(module), options.training).train(options.training),
        input_shape=inputs.shape,
        make_batch=inputs.make_batch,
        loss=inferred_loss,
        notes=notes,
        tokens_per_sample=inputs.num_tokens,
        may_be_kept=True,
    )


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
            interface = functions.get_interface
            by_length = SimpleNamespace(
                get_interface=lambda *of, get=interface: attention_by_length(get(*of))
            )
            yield own, "ALL_ATTENTION_FUNCTIONS", by_length


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
