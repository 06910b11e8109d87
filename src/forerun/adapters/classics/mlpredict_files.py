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

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from forerun.base.errors import ModelBuildError, UnknownModelError, near_matches
from forerun.tracing.models.built_model import BuiltModel, InputOptions, classification_loss, image_batch
from forerun.tracing.models.meta_build import build_on_meta, move_to_meta

Layer = Mapping[str, Any]

_DENSE = "fully_connected"

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
        cache_key=f"mlpredict {hashlib.sha256(text).hexdigest()} {options.key()}",
    )


def _network(layers: list[Layer], shape: tuple[int, ...], name: str) -> nn.Module:
    parts: list[nn.Module] = []
    channels, size, is_flat = shape[0], shape[1], False
    for number, layer in enumerate(layers, start=1):
        kind = str(layer.get("type", "")).lower()
        if kind not in (*_LAYERS, _DENSE):
            raise ModelBuildError(
                f"{name}, layer {number}: unknown type '{layer.get('type')}'{near_matches(kind, (*_LAYERS, _DENSE))}; "
                "expected Convolution, Max_pool or Fully_connected"
            )
        try:
            if kind == _DENSE:
                inputs = channels if is_flat else channels * size * size
                width = int(layer.get("neurons") or layer["channels_out"])
                flat = [] if is_flat else [nn.Flatten()]
                parts += [*flat, nn.Linear(inputs, width), *_activation(layer, name)]
                channels, size, is_flat = width, 1, True
                continue
            made, channels, size = _LAYERS[kind](layer, channels, size)
            parts += [*made, *_activation(layer, name)]
        except (KeyError, ValueError, TypeError) as error:
            raise ModelBuildError(
                f"{name}, layer {number} ({layer.get('type')}): expected its sizes as mlpredict writes them, and "
                f"{error} is missing or impossible"
            ) from error
        if size < 1:
            raise ModelBuildError(
                f"{name}, layer {number}: images are smaller than its window; give a larger input"
            )
    return nn.Sequential(*parts, *([] if is_flat else [nn.Flatten()]))


def _convolution(layer: Layer, channels: int, size: int) -> tuple[list[nn.Module], int, int]:
    kernel, stride, width = int(layer["kernelsize"]), int(layer["strides"]), int(layer["channels_out"])
    pads, after = _padding(str(layer["padding"]), kernel, stride, size)
    has_bias = bool(int(layer.get("use_bias", 1)))
    made = [*pads, nn.Conv2d(channels, width, kernel, stride, bias=has_bias)]
    return made, width, after


def _pooling(layer: Layer, channels: int, size: int) -> tuple[list[nn.Module], int, int]:
    kernel, stride = int(layer["pool_size"]), int(layer["strides"])
    pads, after = _padding(str(layer["padding"]), kernel, stride, size)
    return [*pads, nn.MaxPool2d(kernel, stride)], channels, after


def _padding(word: str, kernel: int, stride: int, size: int) -> tuple[list[nn.Module], int]:
    """Zeros around an image so that the output has ceil(size / stride) pixels (SAME) or none (VALID), and its size."""
    if word.lower() not in ("same", "valid"):
        raise ValueError(f"padding '{word}'")
    if word.lower() == "valid":
        return [], (size - kernel) // stride + 1
    after = -(-size // stride)
    total = max((after - 1) * stride + kernel - size, 0)
    if not total:
        return [], after
    # TensorFlow puts the odd pixel at the end.
    low, high = total // 2, total - total // 2
    return [nn.ZeroPad2d((low, high, low, high))], after


def _activation(layer: Layer, name: str) -> list[nn.Module]:
    word = str(layer.get("activation") or "").lower()
    if word not in _ACTIVATIONS:
        raise ModelBuildError(
            f"{name}: unknown activation '{word}'{near_matches(word, _ACTIVATIONS)}; expected "
            f"{', '.join(filter(None, _ACTIVATIONS))}"
        )
    make = _ACTIVATIONS[word]
    return [] if make is None else [make()]


_LAYERS: Mapping[str, Callable[[Layer, int, int], tuple[list[nn.Module], int, int]]] = {
    "convolution": _convolution,
    "max_pool": _pooling,
}
