"""The networks of ``tracing.models.families`` and torchvision's ResNet-50, written in Keras.

A network is written once for any backend of Keras: the tracer builds it on PyTorch, a measurement on TensorFlow.
Keras is imported when a network is built.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from forerun.base.errors import InvalidSetupError, UnknownModelError, near_matches
from forerun.question.setup import Layout, Precision, TrainingSetup

Shape = tuple[int, ...]

POLICIES = {
    Precision.FP32: "float32",
    Precision.TF32: "float32",
    Precision.AMP: "mixed_float16",
    Precision.AMP_BF16: "mixed_bfloat16",
    Precision.FP16: "float16",
    Precision.BF16: "bfloat16",
    Precision.FP64: "float64",
}
FORMATS = {Layout.NCHW: "channels_first", Layout.NHWC: "channels_last"}


def set_policy_and_format(setup: TrainingSetup) -> None:
    """Sets the dtype policy and the image format of all that Keras builds from now on."""
    config = import_module("keras").config
    config.set_dtype_policy(POLICIES[setup.precision])
    config.set_image_data_format(FORMATS[setup.layout])


@dataclass(frozen=True, slots=True)
class _Family:
    """A family of networks.

    Attributes:
        image: (channels, height, width) of its images.
        defaults: Its keys, each with the value that a specification may leave out.
        build: Function of the images' shape and the keys that makes the ``keras.Model``.
    """

    image: Shape
    defaults: dict[str, int]
    build: Callable[..., Any]


def channels_axis() -> int:
    """Index of the channel axis in the present image format, with the batch axis counted."""
    return -1 if import_module("keras").config.image_data_format() == "channels_last" else 1


def in_present_format(shape: Shape) -> Shape:
    """A shape (channels, height, width) in the present image format; others as they are."""
    return (*shape[1:], shape[0]) if len(shape) == 3 and channels_axis() == -1 else shape


def keras_image_shape(spec: str) -> Shape:
    """(channels, height, width) of the images of a family."""
    return KERAS_FAMILIES[spec.partition(":")[0]].image


def check_keras_name(model: str) -> None:
    """Refuse a misspelt family or file without loading Keras; other names are checked when the model is built.

    Args:
        model: Model as ``predict`` takes it.

    Raises:
        UnknownModelError: There is no such file, or no such key of a family.
        InvalidSetupError: The value of a key is not a whole number above zero.
    """
    rest = model.removeprefix("keras:")
    path = rest.rpartition(":")[0] if ".py:" in rest else rest
    if ".py:" in rest or rest.endswith((".keras", ".h5", ".hdf5")):
        if not Path(path).expanduser().is_file():
            raise UnknownModelError(
                f"there is no file {path!r}; give a .keras file or path/to/file.py:factory"
            )
        return
    name, _, text = rest.partition(":")
    if name in KERAS_FAMILIES:
        _given(name, text)


def build_keras_family(spec: str, shape: Shape | None = None, num_classes: int | None = None) -> Any:
    """A ``keras.Model`` of a family, in the present image format and dtype policy.

    Args:
        spec: Text of the family and its keys, such as ``cnn:depth=2,base_filters=32``; keys as in ``families``.
        shape: Shape of an image, (channels, height, width); None for the family's own.
        num_classes: Number of outputs of the head; None for the family's own.

    Raises:
        UnknownModelError: There is no such family or key.
        InvalidSetupError: A value is not a whole number above zero, or images are too small for the network.
    """
    name, _, text = spec.partition(":")
    if name not in KERAS_FAMILIES:
        raise UnknownModelError(f"no Keras network {name!r}{near_matches(name, KERAS_FAMILIES)}")
    family = KERAS_FAMILIES[name]
    values = family.defaults | _given(name, text)
    if num_classes is not None:
        values["num_classes"] = num_classes
    try:
        return family.build(shape or family.image, **values)
    except ValueError as error:
        if "egative dimension" in str(error) or "must be greater than 0" in str(error):
            size = "x".join(map(str, shape or family.image))
            raise InvalidSetupError(
                f"images of {size} are too small for keras:{spec}; give a larger image size or fewer layers"
            ) from error
        raise


def _given(name: str, text: str) -> dict[str, int]:
    found, keys = {}, KERAS_FAMILIES[name].defaults
    for part in filter(None, text.split(",")):
        key, _, value = part.partition("=")
        if key not in keys:
            raise UnknownModelError(
                f"keras:{name} has no key {key!r}; its keys are {', '.join(keys)}{near_matches(key, keys)}"
            )
        if not value.isdecimal() or int(value) < 1:
            raise InvalidSetupError(f"{key} of keras:{name} must be a whole number above zero, got {value!r}")
        found[key] = int(value)
    return found


def _input(shape: Shape) -> Any:
    return import_module("keras").Input(in_present_format(shape))


def _dense_head(x: Any, widths: Sequence[int], num_classes: int) -> Any:
    layers = import_module("keras").layers
    x = layers.Flatten()(x)
    for width in widths:
        x = layers.Dense(width, activation="relu")(x)
    return layers.Dense(num_classes)(x)


def _pooled(
    shape: Shape, filters: Sequence[int], padding: str, widths: Sequence[int], num_classes: int
) -> Any:
    keras = import_module("keras")
    x = inputs = _input(shape)
    for width in filters:
        x = keras.layers.Conv2D(width, 3, padding=padding, activation="relu")(x)
        x = keras.layers.MaxPooling2D()(x)
    return keras.Model(inputs, _dense_head(x, widths, num_classes))


def _cnn(shape: Shape, *, depth: int, base_filters: int, dense_units: int, num_classes: int) -> Any:
    keras = import_module("keras")
    x = inputs = _input(shape)
    for block in range(depth):
        for _ in range(2):
            x = keras.layers.Conv2D(base_filters * 2**block, 3, padding="same", activation="relu")(x)
        x = keras.layers.MaxPooling2D()(x)
    return keras.Model(inputs, _dense_head(x, [dense_units], num_classes))


def _convolved(x: Any, filters: int, kernel: int, stride: int = 1, *, relu: bool = True) -> Any:
    """Convolution without bias, symmetric padding as in PyTorch, batch norm, ReLU."""
    layers = import_module("keras").layers
    if kernel > 1:
        x = layers.ZeroPadding2D(kernel // 2)(x)
    x = layers.Conv2D(filters, kernel, stride, use_bias=False)(x)
    x = layers.BatchNormalization(channels_axis(), momentum=0.9, epsilon=1e-5)(x)
    return layers.ReLU()(x) if relu else x


def _resnet50(shape: Shape, *, num_classes: int) -> Any:
    """ResNet-50 v1.5 as torchvision has it: no biases, the stride in the 3x3 convolution."""
    keras = import_module("keras")
    inputs = _input(shape)
    x = _convolved(inputs, 64, 7, 2)
    x = keras.layers.MaxPooling2D(3, 2)(keras.layers.ZeroPadding2D(1)(x))
    for stage, num_blocks in enumerate((3, 4, 6, 3)):
        for block in range(num_blocks):
            width, stride = 64 * 2**stage, 2 if stage and not block else 1
            shortcut = x if block else _convolved(x, 4 * width, 1, stride, relu=False)
            y = _convolved(_convolved(x, width, 1), width, 3, stride)
            y = _convolved(y, 4 * width, 1, relu=False)
            x = keras.layers.ReLU()(keras.layers.Add()([y, shortcut]))
    x = keras.layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, keras.layers.Dense(num_classes)(x))


KERAS_FAMILIES: dict[str, _Family] = {
    "cnn": _Family(
        (3, 32, 32), {"depth": 4, "base_filters": 64, "dense_units": 128, "num_classes": 10}, _cnn
    ),
    "mnist-cnn": _Family(
        (1, 28, 28),
        {"depth": 2, "num_classes": 10},
        lambda shape, *, depth, num_classes: _pooled(shape, [32] * depth, "valid", [128], num_classes),
    ),
    "cifar10-cnn": _Family(
        (3, 32, 32),
        {"num_classes": 10},
        lambda shape, *, num_classes: _pooled(shape, [64, 64, 32], "valid", [512, 256, 128], num_classes),
    ),
    "pcam-cnn": _Family(
        (3, 96, 96),
        {"num_classes": 1},
        partial(_pooled, filters=[256, 256, 512, 512, 1024, 1024], padding="same", widths=[1028, 512, 128]),
    ),
    "resnet50-v1.5": _Family((3, 224, 224), {"num_classes": 1000}, _resnet50),
    "mlp": _Family(
        (1, 28, 28),
        {"depth": 3, "width": 1024, "num_classes": 10},
        lambda shape, *, depth, width, num_classes: _pooled(shape, [], "", [width] * depth, num_classes),
    ),
}
