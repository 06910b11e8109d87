"""Model files of ``mlpredict`` (Justus et al. 2018), the JSON that its ``dnn.save`` writes.

``{"input": {"size": 28, "dimension": 1}, "layers": {"1": {"type": "Convolution", ...}, "2": ...}}``: a chain of

- ``Convolution``: ``kernelsize``, ``channels_out``, ``padding`` (SAME or VALID), ``strides``, ``use_bias``,
  ``activation``;
- ``Max_pool``: ``pool_size``, ``strides``, ``padding``;
- ``Fully_connected``: ``neurons`` (or ``channels_out``), ``use_bias``, ``activation``.

Files write dense layers as convolutions too, with a kernel as large as the image; they are built as they are written.

Source: github.com/CDECatapult/mlpredict, src/mlpredict/api.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from forerun.base.errors import ModelBuildError, UnknownModelError, near_matches
from forerun.tracing.models.built_model import BuiltModel, InputOptions, classification_loss, image_batch
from forerun.tracing.models.meta_build import build_on_meta, move_to_meta

Layer = Mapping[str, Any]

_ACTIVATIONS: Mapping[str, Callable[[], nn.Module] | None] = {
    "relu": nn.ReLU, "tanh": nn.Tanh, "sigmoid": nn.Sigmoid, "softmax": None, "linear": None, "none": None, "": None,
}  # fmt: skip


def build_mlpredict(path_text: str, options: InputOptions) -> BuiltModel:
    """The network of a file, on the meta device.

    Raises:
        UnknownModelError: There is no such file.
        ModelBuildError: The file is no description of a network, or has a layer that is not known.
    """
    path = Path(path_text).expanduser()
    options.refuse_sequence(f"mlpredict:{path_text}")
    if not path.is_file():
        raise UnknownModelError(
            f"there is no file '{path_text}'; give the JSON file that mlpredict's dnn.save wrote"
        )
    text = path.read_bytes()
    try:
        found = json.loads(text)
        channels, size = int(found["input"]["dimension"]), int(found["input"]["size"])
        layers = [layer for _, layer in sorted(found["layers"].items(), key=lambda item: int(item[0]))]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelBuildError(
            f"{path.name}: expected a model file of mlpredict with 'input' (dimension, size) and numbered 'layers', "
            f"and it cannot be read: {type(error).__name__}: {error}"
        ) from error
    shape = options.image_shape((channels, size, size))
    module = move_to_meta(build_on_meta(lambda: _network(layers, shape, path.name))).train(options.training)
    ignored = "the head of an mlpredict file is fixed: num_classes is ignored"
    notes = () if options.num_classes is None else (ignored,)
    return BuiltModel(
        name=f"mlpredict:{path_text}",
        module=module,
        input_shape=shape,
        make_batch=lambda batch_size: image_batch(batch_size, shape),
        loss=classification_loss,
        notes=notes,
        may_be_kept=True,
    )


def _network(layers: list[Layer], shape: tuple[int, ...], name: str) -> nn.Module:
    parts: list[nn.Module] = []
    # Sizes follow from an image that goes through the layers as they are made.
    image = torch.empty((1, *shape))
    for number, layer in enumerate(layers, start=1):
        kind = str(layer.get("type", "")).lower()
        if kind not in _LAYERS:
            raise ModelBuildError(
                f"{name}, layer {number}: unknown type '{layer.get('type')}'{near_matches(kind, _LAYERS)}; "
                "expected Convolution, Max_pool or Fully_connected"
            )
        try:
            made = [*_LAYERS[kind](layer, image), *_activation(layer, name)]
        except (KeyError, ValueError, TypeError) as error:
            raise ModelBuildError(
                f"{name}, layer {number} ({layer.get('type')}): expected its sizes as mlpredict writes them, and "
                f"{error} is missing or impossible"
            ) from error
        try:
            image = nn.Sequential(*made)(image)
        except RuntimeError as error:
            raise ModelBuildError(
                f"{name}, layer {number}: images are smaller than its window; give a larger input"
            ) from error
        parts += made
    return nn.Sequential(*parts, *_flattened(image))


def _flattened(image: torch.Tensor) -> list[nn.Module]:
    return [] if image.dim() == 2 else [nn.Flatten()]


def _convolution(layer: Layer, image: torch.Tensor) -> list[nn.Module]:
    kernel, stride, width = int(layer["kernelsize"]), int(layer["strides"]), int(layer["channels_out"])
    has_bias = bool(int(layer.get("use_bias", 1)))
    pads = _padding(str(layer["padding"]), kernel, stride, image.shape[-1])
    return [*pads, nn.Conv2d(image.shape[1], width, kernel, stride, bias=has_bias)]


def _pooling(layer: Layer, image: torch.Tensor) -> list[nn.Module]:
    kernel, stride = int(layer["pool_size"]), int(layer["strides"])
    return [*_padding(str(layer["padding"]), kernel, stride, image.shape[-1]), nn.MaxPool2d(kernel, stride)]


def _dense(layer: Layer, image: torch.Tensor) -> list[nn.Module]:
    width = int(layer.get("neurons") or layer["channels_out"])
    return [*_flattened(image), nn.Linear(image.numel(), width)]


def _padding(word: str, kernel: int, stride: int, size: int) -> list[nn.Module]:
    """Zeros around an image so that the output has ceil(size / stride) pixels (SAME) or none (VALID)."""
    if word.lower() not in ("same", "valid"):
        raise ValueError(f"padding '{word}'")
    total = max((-(-size // stride) - 1) * stride + kernel - size, 0)
    if word.lower() == "valid" or not total:
        return []
    # TensorFlow puts the odd pixel at the end.
    low, high = total // 2, total - total // 2
    return [nn.ZeroPad2d((low, high, low, high))]


def _activation(layer: Layer, name: str) -> list[nn.Module]:
    word = str(layer.get("activation") or "").lower()
    if word not in _ACTIVATIONS:
        raise ModelBuildError(
            f"{name}: unknown activation '{word}'{near_matches(word, _ACTIVATIONS)}; expected "
            f"{', '.join(filter(None, _ACTIVATIONS))}"
        )
    make = _ACTIVATIONS[word]
    return [] if make is None else [make()]


_LAYERS: Mapping[str, Callable[[Layer, torch.Tensor], list[nn.Module]]] = {
    "convolution": _convolution,
    "max_pool": _pooling,
    "fully_connected": _dense,
}
