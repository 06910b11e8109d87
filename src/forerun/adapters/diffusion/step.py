"""A training step of a denoiser of diffusers: ``diffusers:sdxl``, ``diffusers:flux.1-dev,with=text+vae``.

The loss is the mean squared error between the network's answer and what was added to the latents, as in diffusers'
own scripts (``examples/text_to_image/train_text_to_image_sdxl.py``, ``examples/dreambooth/train_dreambooth_flux.py``).
Latents and embeddings of the text are inputs, as where they are cached; ``with=vae`` and ``with=text`` run the frozen
networks that make them in every step. What these return is dropped at once: inputs of the same size stand in for it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from forerun.base.errors import (
    ForerunError,
    InvalidSetupError,
    ModelBuildError,
    UnknownModelError,
    near_matches,
)
from forerun.base.extras import needing
from forerun.base.tables import own_table
from forerun.tracing.models.built_model import BuiltModel, InputOptions
from forerun.tracing.models.meta_build import build_on_meta, first_line, move_to_meta

_PARTS = {"text": "text", "vae": "autoencoder"}
_KEYS = ("with", "frames")


def catalogue() -> Mapping[str, Mapping[str, Any]]:
    """Networks, autoencoders and encoders of text by their names."""
    return own_table(__file__, "networks.toml")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    """Sizes of a sample: those of the clip [pixels, frames] and of its text [tokens]."""

    height: int
    width: int
    frames: int
    text_tokens: int


def _empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _of_config(config: Any, known: Mapping[str, Any], words: Any) -> Any:
    """An input of a network as its class describes it in ``networks.toml``: a tensor of named sizes, or parts of these.

    Args:
        config: Configuration of the network, whose keys are sizes as well.
        known: Values by name: batch, tokens, frames, height, width, places and patches of the latents.
        words: Names of sizes, behind ``int`` or ``true`` for what its values are; a single name is the value itself.
    """
    if isinstance(words, Mapping):
        return {name: _of_config(config, known, part) for name, part in words.items()}
    if isinstance(words, str):
        return known[words]
    if isinstance(words[0], list):
        return tuple(_of_config(config, known, part) for part in words)
    dtype = {"int": torch.int64, "true": torch.bool}.get(words[0])
    found = [
        known.get(word) or getattr(config, str(word), word) for word in words if word not in ("int", "true")
    ]
    sizes = (len(size) if isinstance(size, (list, tuple)) else int(size) for size in found)
    return _empty(*sizes, dtype=dtype or torch.float32)


class DenoisingStep(nn.Module):
    """A denoiser, with the frozen networks that run in its step.

    Returns the answer of the network and what it should be: the noise less the latents, as flow matching has it; for
    the noise alone it costs the same.
    """

    def __init__(self, denoiser: nn.Module, autoencoder: nn.Module | None, encoders: list[nn.Module]) -> None:
        super().__init__()
        self.denoiser = denoiser
        self.autoencoder = autoencoder
        self.encoders = nn.ModuleList(encoders)
        for part in self.frozen_parts:
            part.requires_grad_(False)

    @property
    def frozen_parts(self) -> list[nn.Module]:
        """Networks that only make inputs: no adapter, quantization or product in fp8 is meant for them."""
        return [part for part in (self.autoencoder, *self.encoders) if part is not None]

    def forward(
        self,
        latents: torch.Tensor,
        noise: torch.Tensor,
        conditions: dict[str, Any],
        pixels: torch.Tensor | None = None,
        tokens: tuple[torch.Tensor, ...] = (),
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The answer and its target, (batch, ...) as the latents."""
        with torch.no_grad():
            if self.autoencoder is not None:
                encode: Any = self.autoencoder.encode
                encode(pixels)
            for encoder, ids in zip(self.encoders, tokens, strict=True):
                encoder(input_ids=ids)
        # Any mixture costs the same; its share is drawn anew in each real step.
        noisy = torch.lerp(latents, noise, 0.5)
        answer = self.denoiser(noisy, **conditions, return_dict=False)[0]
        if answer.numel() == 2 * noise.numel():  # PixArt answers a variance too, which is not trained
            answer = answer.chunk(2, dim=1)[0]
        return answer, noise - latents


def _loss(output: Any, batch: Mapping[str, Any]) -> torch.Tensor:
    answer, target = output
    return functional.mse_loss(answer.float(), target.float())


def build_diffusion(text: str, options: InputOptions) -> BuiltModel:
    """Builds a step of a denoiser from its published configuration, without weights.

    Args:
        text: Name in the catalogue, or the path of a ``config.json`` of diffusers; behind it ``with=text+vae`` and
            ``frames=N``, separated by commas.
        options: Options of inputs: the size of the image, and with ``sequence_length`` the tokens of its text.
    """
    model = f"diffusers:{text}"
    name, given = _parsed(text)
    with needing(model):
        import diffusers
    entry = _entry(name, model)
    kinds = catalogue()["classes"]
    kind = kinds.get(entry["class"], {}) | ({"scale": entry["scale"]} if "scale" in entry else {})
    if entry["class"] not in kinds:
        raise UnknownModelError(
            f"{model} is a {entry['class']}; known here are {', '.join(kinds)}: put it into a file, mine.py, that "
            "returns it with an example batch, and ask for mine.py:make"
        )
    sizes = _sizes(entry, kind, given, options, model)
    parts = _chosen(given, entry, model)
    denoiser = _made(getattr(diffusers, entry["class"]), entry["config"], model)
    autoencoder = _autoencoder(diffusers, entry, model) if "vae" in parts else None
    encoders = [_encoder(each, model) for each in entry["text"]] if "text" in parts else []
    module = DenoisingStep(denoiser, autoencoder, encoders)
    return BuiltModel(
        name=model,
        module=move_to_meta(module).train(options.training),
        input_shape=(3, *((sizes.frames,) if "frames" in entry else ()), sizes.height, sizes.width),
        make_batch=_batch_maker(denoiser, kind, sizes, entry, parts),
        loss=_loss,
        notes=(_note(sizes, parts, entry),),
        may_be_kept=not name.endswith(".json"),
    )


def _parsed(text: str) -> tuple[str, dict[str, str]]:
    name, *words = (word.strip() for word in text.split(","))
    given = dict(word.split("=", 1) for word in words if word.count("=") == 1)
    if len(given) < len(words) or not given.keys() <= set(_KEYS):
        raise InvalidSetupError(
            f"a network of diffusers is NAME, with=text+vae and frames=N behind it if wanted; got 'diffusers:{text}'"
        )
    return name, given


def _entry(name: str, model: str) -> dict[str, Any]:
    known = catalogue()["networks"]
    if name.lower() in known:
        return dict(known[name.lower()])
    if not name.endswith(".json"):
        raise UnknownModelError(
            f"{model} is not in the catalogue{near_matches(name.lower(), list(known))}; it has {', '.join(known)}, and "
            "takes a config.json of diffusers"
        )
    try:
        values = json.loads(Path(name).expanduser().read_text(encoding="utf-8"))
        class_name = values["_class_name"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelBuildError(
            f"{name} is no configuration of diffusers, a JSON object with a '_class_name': {first_line(error)}"
        ) from error
    config = {key: value for key, value in values.items() if not key.startswith("_")}
    return {"class": str(class_name), "config": config, "image_size": 1024, "text_tokens": 77, "text": []}


def _sizes(
    entry: Mapping[str, Any],
    kind: Mapping[str, Any],
    given: Mapping[str, str],
    options: InputOptions,
    model: str,
) -> _Sizes:
    default = (3, entry["image_size"], entry.get("width", entry["image_size"]))
    channels, height, width = options.image_shape(default)
    side, step = kind["scale"]
    words = given.get("frames", str(entry.get("frames", 1)))
    frames = int(words) if words.isascii() and words.isdigit() and len(words) < 6 else 0
    is_video = step > 1
    are_frames = frames >= 1 and (frames - 1) % step == 0 and (is_video or frames == 1)
    if channels != 3 or height % side or width % side or not are_frames:
        raise InvalidSetupError(
            f"{model} takes 3 channels, sides that are multiples of {side} pixels and "
            f"{f'1 frame more than a multiple of {step}' if is_video else 'a single frame'}; got {channels} channels, "
            f"{height} x {width} pixels, {words} frames"
        )
    return _Sizes(
        height=height,
        width=width,
        frames=frames,
        text_tokens=max(options.sequence_length or entry["text_tokens"], entry.get("joined_tokens", 0) + 1),
    )


def _has(entry: Mapping[str, Any]) -> list[str]:
    """The frozen parts whose sizes are known."""
    return [part for part, key in _PARTS.items() if entry.get(key)]


def _chosen(given: Mapping[str, str], entry: Mapping[str, Any], model: str) -> tuple[str, ...]:
    parts = tuple(filter(None, given.get("with", "").split("+")))
    has = _has(entry)
    if not set(parts) <= set(has):
        raise InvalidSetupError(
            f"{model}: with= names {' or '.join(has) or 'nothing here'}, the frozen networks that run in each step; "
            f"got {given['with']}"
        )
    return parts


def _made(make: Any, config: Mapping[str, Any], model: str) -> nn.Module:
    try:
        module: nn.Module = build_on_meta(lambda: make.from_config(dict(config)))
    except ForerunError:
        raise
    except Exception as error:  # constructors refuse sizes with errors of many kinds
        raise ModelBuildError(f"{model} could not be built: {first_line(error)}") from error
    return module


def _autoencoder(diffusers: Any, entry: Mapping[str, Any], model: str) -> nn.Module:
    found = catalogue()["autoencoders"][entry["autoencoder"]]
    module = _made(getattr(diffusers, found["class"]), found["config"], model)
    # Training encodes only; the decoder is not loaded by scripts that mind their memory, and is dropped here.
    del module.decoder
    module.register_module("decoder", None)
    return module


def _encoder(name: str, model: str) -> nn.Module:
    with needing(f"{model} with its text encoders"):
        import transformers
    found = catalogue()["encoders"][name]
    values = dict(found["config"])
    config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    config.use_cache = False
    module: nn.Module = build_on_meta(lambda: getattr(transformers, found["class"])._from_config(config))
    return module.float()


def _batch_maker(
    denoiser: Any, kind: Mapping[str, Any], sizes: _Sizes, entry: Mapping[str, Any], parts: tuple[str, ...]
) -> Callable[[int], dict[str, Any]]:
    side, step = kind["scale"]
    grid = ((sizes.frames - 1) // step + 1, sizes.height // side, sizes.width // side)
    config, places = denoiser.config, math.prod(grid)
    clip = (3, sizes.frames, sizes.height, sizes.width) if step > 1 else (3, sizes.height, sizes.width)
    longest = sizes.text_tokens - entry.get("joined_tokens", 0)
    lengths = [catalogue()["encoders"][name].get("tokens", longest) for name in entry["text"]]

    def make_batch(batch_size: int) -> dict[str, Any]:
        known = dict(zip(("frames", "height", "width"), grid, strict=True)) | {
            "batch": batch_size,
            "tokens": sizes.text_tokens,
            "places": places,
            "patches": places // 4,  # CogVideoX cuts latents into pieces of 2 x 2
            "grids": [[grid]] * batch_size,
            "none": None,
        }
        needs = kind.get("needs", {})
        inputs = {
            name: words
            for name, words in kind["inputs"].items()
            if getattr(config, needs.get(name, ""), not needs.get(name))
        }
        found: dict[str, Any] = {
            "latents": _of_config(config, known, kind["latents"]),
            "noise": _of_config(config, known, kind["latents"]),
            "conditions": _of_config(config, known, inputs),
        }
        if "vae" in parts:
            found["pixels"] = _empty(batch_size, *clip)
        if "text" in parts:
            found["tokens"] = tuple(_empty(batch_size, own, dtype=torch.int64) for own in lengths)
        return {"kwargs": found}

    return make_batch


def _note(sizes: _Sizes, parts: tuple[str, ...], entry: Mapping[str, Any]) -> str:
    names = {"text": "the text encoders", "vae": "the autoencoder"}
    runs = " and ".join(names[part] for part in parts) or "none of the frozen networks"
    cached = " and ".join(
        words for part, words in (("vae", "latents"), ("text", "embeddings of the text")) if part not in parts
    )
    clip = f"{sizes.frames} frames of " if "frames" in entry else ""
    others = "+".join(part for part in _has(entry) if part not in parts)
    runs_them = f" (with={others} runs their networks)" if others else ""
    rest = f"; {cached} are taken from a cache{runs_them}" if cached else ""
    return f"a sample is {clip}{sizes.height} x {sizes.width} pixels; a step runs {runs} beside the denoiser{rest}"
