"""Builds the Keras model of a request, in a process whose Keras runs on PyTorch."""

from __future__ import annotations

import json
import zipfile
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keras

from forerun.adapters.keras.networks import (
    FORMATS,
    KERAS_FAMILIES,
    POLICIES,
    build_keras_family,
    channels_axis,
    in_present_format,
    keras_image_shape,
    set_policy_and_format,
)
from forerun.base.answers import fields_of
from forerun.base.errors import (
    ForerunError,
    InvalidSetupError,
    ModelBuildError,
    UnknownModelError,
    near_matches,
)
from forerun.evidence.measurement.runners.table import causes
from forerun.question.setup import TrainingSetup
from forerun.tracing.models.built_model import InputOptions
from forerun.tracing.models.meta_build import first_line, place_of
from forerun.tracing.models.user_code import factory_of

if TYPE_CHECKING:
    from forerun.adapters.keras.source import KerasRequest

_UNKNOWN_CLASS = (
    "Could not locate class",
    "Unknown layer",
    "register_keras_serializable",
    "No module named",
    "cannot be imported",
    "Could not deserialize class",
)
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KerasModel:
    """A built model and its inputs.

    Attributes:
        name: The model as the user named it.
        model: The ``keras.Model``.
        input_shapes: Shape of one sample of each input.
        input_dtypes: Types of the inputs, as Keras names them.
        notes: Remarks for the user.
        is_layer: True for a layer alone, see ``KerasRequest``.
    """

    name: str
    model: Any
    input_shapes: tuple[Shape, ...]
    input_dtypes: tuple[str, ...]
    notes: tuple[str, ...]
    is_layer: bool = False


def build_keras(request: KerasRequest, setup: TrainingSetup) -> KerasModel:
    """The model of a request, in the setup's dtype policy and image format.

    Raises:
        UnknownModelError: There is no such network, file or function.
        InvalidSetupError: An input is not known, or contradicts the model.
        ModelBuildError: The model could not be read or built.
    """
    inputs = fields_of(request.model)
    name, options = inputs.pop("model"), InputOptions(**inputs)
    set_policy_and_format(setup)
    model, is_fixed = _model(request, options, POLICIES[setup.precision])
    if not isinstance(model, keras.Model):
        raise ModelBuildError(f"{name} must be a keras.Model or return one; it is a {type(model).__name__}")
    shapes, dtypes = _inputs(model, options, name)
    notes = _format_notes(model, setup) if is_fixed else []
    return KerasModel(
        name=name,
        model=model,
        input_shapes=shapes,
        input_dtypes=dtypes,
        notes=tuple(notes),
        is_layer=request.is_layer,
    )


def _model(request: KerasRequest, options: InputOptions, policy: str) -> tuple[Any, bool]:
    """The model, and True if its image format came with it."""
    name = request.model.model
    if request.builder is not None:
        module, _, function = request.builder.partition(":")
        return getattr(import_module(module), function)(**request.arguments), False
    if request.config is not None:
        return _from_config(request.config, name, policy), True
    if ".py:" in name:
        return _from_factory(name), False
    rest = name.removeprefix("keras:")
    if rest.endswith((".keras", ".h5", ".hdf5")):
        return _from_config(_read_file(rest), name, policy), True
    if rest.partition(":")[0] in KERAS_FAMILIES:
        shape = _channels_first(options, keras_image_shape(rest)[0])
        return build_keras_family(rest, shape, options.num_classes), False
    return _application(rest, options), False


def _read_file(path_text: str) -> str:
    path = Path(path_text).expanduser()
    if not path.is_file():
        raise UnknownModelError(f"there is no file {path_text!r}; save one with model.save('name.keras')")
    if path.suffix == ".keras" and not zipfile.is_zipfile(path):
        raise ModelBuildError(
            f"{path_text} cannot be read as a Keras model, expected a file of model.save('name.keras'): it is not a "
            "zip archive, or was cut short; save or copy it again"
        )
    try:
        model = keras.saving.load_model(path, compile=False)
        text: str = model.to_json()
    except Exception as error:  # zip, HDF5, JSON and the classes of the file have no common base of errors
        raise ModelBuildError(_why_unreadable(path_text, error)) from error
    return text


def _why_unreadable(name: str, error: BaseException) -> str:
    text = first_line(error)
    # Keras wraps the cause.
    whole = "\n".join(map(str, causes(error)))
    if any(phrase in whole for phrase in _UNKNOWN_CLASS):
        return (
            f"{name} holds a custom layer, whose operations are not known from the file ({text}); name the "
            "function that makes the model as path/to/file.py:factory"
        )
    if "Lambda" in whole or "unsafe" in whole.lower():
        return (
            f"{name} holds a Lambda layer, whose code is not run from a file; name the function that makes the "
            "model as path/to/file.py:factory"
        )
    return f"{name} cannot be read as a Keras model, expected a file of model.save('name.keras'): {text}"


def _from_config(text: str, name: str, policy: str) -> Any:
    try:
        return keras.models.model_from_json(json.dumps(_with_policy(json.loads(text), policy)))
    except Exception as error:  # the model's own classes may raise anything
        raise ModelBuildError(_why_unreadable(name, error)) from error


def _with_policy(value: Any, policy: str) -> Any:
    """A configuration with every dtype policy of the floating kind replaced."""
    if isinstance(value, list):
        return [_with_policy(item, policy) for item in value]
    if not isinstance(value, dict):
        return value
    if value.get("class_name") == "DTypePolicy":
        return {**value, "config": {**value.get("config", {}), "name": policy}}
    return {key: _with_policy(item, policy) for key, item in value.items()}


def _from_factory(spec: str) -> Any:
    path_text, _, factory_name = spec.rpartition(":")
    with factory_of(path_text, factory_name) as factory:
        if not callable(factory) or isinstance(factory, keras.Model):
            return factory
        try:
            return factory()
        except ForerunError:
            raise
        except (Exception, SystemExit) as error:  # the user's code may raise anything
            raise ModelBuildError(
                f"{spec} raised {type(error).__name__}{place_of(error)}: {first_line(error)}; it is run with Keras on "
                "PyTorch, so layers must be written with keras.ops instead of functions of TensorFlow"
            ) from error


def _application(name: str, options: InputOptions) -> Any:
    makers = {
        key: value for key, value in vars(keras.applications).items() if key[:1].isupper() and callable(value)
    }
    names = {key.lower(): key for key in makers}
    maker = makers.get(names.get(name.lower(), ""))
    if maker is None:
        hint = near_matches(name, names)
        raise UnknownModelError(
            f"no Keras network {name!r}{hint}; known are {', '.join(sorted(makers))}, "
            f"{', '.join(KERAS_FAMILIES)}, and files that end in .keras"
        )
    arguments: dict[str, Any] = {"weights": None}
    shape = _channels_first(options, 3)
    if shape is not None:
        arguments["input_shape"] = in_present_format(shape)
    if options.num_classes is not None:
        arguments["classes"] = options.num_classes
    try:
        return maker(**arguments)
    except ValueError as error:
        raise InvalidSetupError(f"keras:{name} cannot be built so: {first_line(error)}") from error


def _channels_first(options: InputOptions, channels: int) -> Shape | None:
    """(channels, height, width) of the options; both orders are accepted, because users write either."""
    if options.image_size is not None:
        return (channels, options.image_size, options.image_size)
    shape = options.input_shape
    if shape is None:
        return None
    if len(shape) != 3:
        raise InvalidSetupError(
            f"an image has three axes, such as 224,224,3; got {','.join(map(str, shape))}"
        )
    # The odd one out is the axis of the channels, which are fewer than pixels.
    is_last = shape[-1] < min(shape[0], shape[1]) or shape[0] == shape[1]
    return (shape[-1], *shape[:-1]) if is_last else shape


def _inputs(model: Any, options: InputOptions, name: str) -> tuple[tuple[Shape, ...], tuple[str, ...]]:
    """Shapes and types of one sample of each input; an unbuilt model is built for the option's shape."""
    if not getattr(model, "inputs", None):
        return _build_for(model, options, name)
    shapes = []
    for index, given in enumerate(model.inputs):
        axes = tuple(given.shape[1:])
        shapes.append(_filled(axes, options, index, name, is_text="int" in str(given.dtype)))
    return tuple(shapes), tuple(str(given.dtype) for given in model.inputs)


def _build_for(model: Any, options: InputOptions, name: str) -> tuple[tuple[Shape, ...], tuple[str, ...]]:
    shape = options.input_shape
    if shape is None and options.image_size is not None:
        shape = in_present_format((3, options.image_size, options.image_size))
    if shape is None:
        raise InvalidSetupError(
            f"{name} is not built and the shape of its input is not known: give --input-shape, such as "
            "224,224,3 (one sample without the batch axis), or begin the model with keras.Input"
        )
    try:
        model(keras.ops.zeros((2, *shape)), training=False)
    except Exception as error:  # the model's own code may raise anything
        raise ModelBuildError(
            f"{name} cannot be built for samples of {','.join(map(str, shape))}: {first_line(error)}{place_of(error)}"
        ) from error
    return (shape,), (keras.config.floatx(),)


def _filled(
    axes: tuple[int | None, ...], options: InputOptions, index: int, name: str, *, is_text: bool
) -> Shape:
    given = options.input_shape if index == 0 else None
    if given is None and options.image_size is not None and len(axes) == 3:
        channels = axes[min(channels_axis(), 0)] or 3  # these axes are without the batch
        given = in_present_format((channels, options.image_size, options.image_size))
    if given is None and is_text and options.sequence_length is not None and axes:
        given = (options.sequence_length, *(n for n in axes[1:] if n is not None))
    if given is not None:
        fits = len(given) == len(axes) and all(n is None or n == m for n, m in zip(axes, given, strict=True))
        # Users write images as 3,224,224 by habit; a network of the other order is asked with its own axes.
        is_other_order = len(given) == 3 and tuple(sorted(given)) == tuple(sorted(n or 0 for n in axes))
        if not fits and not is_other_order:
            raise InvalidSetupError(
                f"{name} takes samples of {','.join(str(n or 'any') for n in axes)}, got {','.join(map(str, given))}"
            )
        if fits:
            return given
    sizes = tuple(n for n in axes if n is not None)
    if len(sizes) != len(axes):
        raise InvalidSetupError(
            f"{name} leaves axes of its input open ({','.join(str(n or 'any') for n in axes)}): give --input-shape "
            "(one sample without the batch axis), --image-size or --sequence-length"
        )
    return sizes


def _format_notes(model: Any, setup: TrainingSetup) -> list[str]:
    formats = {
        layer.data_format
        for layer in model._flatten_layers()
        if isinstance(getattr(layer, "data_format", None), str)
    }
    other = formats - {FORMATS[setup.layout]}
    if not other:
        return []
    return [f"the model has images {other.pop()}, whatever the requested layout"]
