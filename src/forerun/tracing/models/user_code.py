"""Models from the user's own code: ``path/to/file.py:factory`` or a module object.

The file is imported and the name in it called without arguments, except ``num_classes``, ``image_size``,
``input_shape`` or ``sequence_length`` if it has parameters of these names and the user gives values. It is
called with the meta device as default, so that large models need no memory. It returns one of

- a ``torch.nn.Module``; the input shape is the user's option, or follows from the module's first layer;
- ``(module, example_batch)``: the batch is a tensor, a tuple of positional or a dict of keyword arguments;
- a dict with ``module``, ``input_shape`` or ``example_batch``, and optionally ``target`` (an example tensor)
  and ``loss``, called as ``loss(output, target)``, or ``loss(output)`` without a target.

Tensors of an example batch that share the first axis of the first tensor are resized to every requested batch
size. Traces of user code are never cached, because the code may depend on anything.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from forerun.base.errors import (
    ForerunError,
    InvalidSetupError,
    ModelBuildError,
    UnknownModelError,
    near_matches,
)
from forerun.tracing.meta_results import mapped_tensors, nested_tensors
from forerun.tracing.models.built_model import (
    INFERRED_LOSS_NOTE,
    BuiltModel,
    InputOptions,
    LossFunction,
    inferred_loss,
)
from forerun.tracing.models.meta_build import (
    answered,
    build_on_meta,
    first_line,
    is_building_on_meta,
    meta_copy,
    place_of,
)
from forerun.tracing.models.training_objects import WithBatch
from forerun.tracing.models.transformers_inputs import ModelInputs, transformers_inputs
from forerun.tracing.models.transformers_models import NO_PADDING_NOTE, prepare_for_trace
from forerun.tracing.models.vision_models import timm_input_shape

_RETURNS = (
    "an nn.Module, (module, example_batch), or a dict with 'module' and 'input_shape' or 'example_batch'"
)
_KEYS = ("module", "input_shape", "example_batch", "target", "loss")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Returned:
    """Parts of the return value of a factory."""

    module: torch.nn.Module
    input_shape: tuple[int, ...] | None = None
    example_batch: Any = None
    target: torch.Tensor | None = None
    loss: Callable[..., torch.Tensor] | None = None


def build_from_module(module: torch.nn.Module, options: InputOptions, name: str | None = None) -> BuiltModel:
    """Copies a module to the meta device; the module itself stays as it is.

    Args:
        module: Module to copy. Wrappers for data parallelism and compilation are removed.
        options: Options of the inputs, needed unless they follow from the module's library or its first layer.
        name: Name to show; None for the class name.
    """
    example = module.batch if isinstance(module, WithBatch) else None
    inner = module.module if isinstance(module, WithBatch) else module
    name = name or type(inner).__name__
    _refuse_classes(options, name)
    called = module if isinstance(module, WithBatch) and module.method != "forward" else inner
    return _build(_Returned(module=called, example_batch=example), options, name)


def _refuse_classes(options: InputOptions, name: str) -> None:
    if options.num_classes is not None:
        raise InvalidSetupError(
            f"{name} is already built: num_classes cannot change its head; leave the option out"
        )


def build_from_file(path_text: str, factory_name: str, options: InputOptions) -> BuiltModel:
    """Runs a factory in a Python file and builds the model it returns.

    Raises:
        UnknownModelError: There is no such file, or no such name in it.
        ModelBuildError: The file or the factory raised an exception, or the factory returned something else.
    """
    spec = f"{path_text}:{factory_name}"
    with factory_of(path_text, factory_name) as factory:
        returned = _sorted(_call(factory, options, spec), spec)
        return _build(returned, options, spec)


@contextmanager
def factory_of(path_text: str, factory_name: str) -> Iterator[Any]:
    """Runs a Python file and yields the object with a name in it; meanwhile the file's neighbours can be imported.

    Raises:
        UnknownModelError: There is no such file, or no such name in it.
        ModelBuildError: The file raised an exception.
    """
    path = Path(path_text).expanduser().resolve()
    if not path.is_file():
        raise UnknownModelError(f"there is no file {path_text!r}; give path/to/file.py:factory")
    folder = str(path.parent)
    sys.path.insert(0, folder)  # as if it were run as a script
    try:
        yield _look_up(_run_file(path, path_text), factory_name, path_text)
    finally:
        if folder in sys.path:
            sys.path.remove(folder)


def _run_file(path: Path, path_text: str) -> ModuleType:
    name = f"forerun_user_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    namespace = importlib.util.module_from_spec(spec)
    sys.modules[name] = namespace  # dataclasses and pickle look up modules there
    try:
        spec.loader.exec_module(namespace)
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        raise _failure(f"importing {path_text}", error) from error
    return namespace


def _look_up(namespace: ModuleType, name: str, path_text: str) -> Any:
    if name and hasattr(namespace, name):
        return getattr(namespace, name)
    known = [key for key, value in vars(namespace).items() if callable(value) and not key.startswith("_")]
    own = [key for key in known if getattr(getattr(namespace, key), "__module__", "") == namespace.__name__]
    listed = f"; it defines {', '.join(own)}" if own else ""
    raise UnknownModelError(f"{path_text} has no {name!r}{near_matches(name, known) or listed}")


def _call(factory: Any, options: InputOptions, spec: str) -> Any:
    if isinstance(factory, torch.nn.Module):
        _refuse_classes(options, spec)
        return factory
    if not callable(factory):
        raise ModelBuildError(
            f"{spec} is of type {type(factory).__name__}; name a model, or a function or class that makes one"
        )
    arguments = _arguments(factory, options, spec)
    try:
        return build_on_meta(lambda: factory(**arguments))
    except ForerunError:
        raise
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        remedy = "; the factory must work without a GPU and without arguments, as one of your own that calls it can"
        raise _failure(spec, error, remedy) from error


def _failure(done: str, error: BaseException, remedy: str = "") -> ModelBuildError:
    if isinstance(error, ModuleNotFoundError) and error.name:
        remedy = f"; install {error.name.partition('.')[0]}, or put it beside the file"
    return ModelBuildError(
        f"{done} raised {type(error).__name__}{place_of(error)}: {first_line(error)}{remedy}"
    )


def _arguments(factory: Any, options: InputOptions, spec: str) -> dict[str, Any]:
    try:
        parameters = inspect.signature(factory).parameters
    except (TypeError, ValueError):
        parameters = {}  # type: ignore[assignment]
    named = ("num_classes", "image_size", "input_shape", "sequence_length")
    given = {name: getattr(options, name) for name in named if getattr(options, name) is not None}
    if "num_classes" in given and "num_classes" not in parameters:
        raise InvalidSetupError(
            f"{spec} has no parameter num_classes: add it to the factory, or leave the option out"
        )
    return {name: value for name, value in given.items() if name in parameters}


def _sorted(value: Any, spec: str) -> _Returned:
    if isinstance(value, torch.nn.Module):
        return _Returned(module=value)
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], torch.nn.Module):
        return _Returned(module=value[0], example_batch=value[1])
    if isinstance(value, Mapping) and isinstance(value.get("module"), torch.nn.Module):
        unknown = [str(key) for key in value if key not in _KEYS]
        if unknown:
            raise ModelBuildError(
                f"{spec} returned the unknown key {unknown[0]!r}; known are {', '.join(_KEYS)}"
            )
        shape = value.get("input_shape")
        return _Returned(**{**value, "input_shape": None if shape is None else tuple(shape)})
    raise ModelBuildError(f"{spec} must return {_RETURNS}; it returned {type(value).__name__}")


def _build(returned: _Returned, options: InputOptions, name: str) -> BuiltModel:
    original = _unwrapped(returned.module)
    module = _copied(original, name).train(options.training)
    inputs = _inputs(returned, module, options, name)
    loss: LossFunction = inferred_loss
    has_loss = returned.loss is not None or isinstance(returned.module, WithBatch)  # whose own step it runs
    notes: tuple[str, ...] = () if has_loss else (INFERRED_LOSS_NOTE,)
    if returned.loss is not None:
        loss = _user_loss(returned.loss, has_target=returned.target is not None)
    example = returned.example_batch
    if _of_transformers(module) and isinstance(example, Mapping) and "attention_mask" in example:
        notes = (*notes, NO_PADDING_NOTE)
    if _adds_loops(module):
        notes = (
            *notes,
            "edges of the graph from a node to itself are not known: none is counted beside those added",
        )
    return BuiltModel(
        name=name,
        module=module,
        input_shape=inputs.shape,
        make_batch=inputs.make_batch,
        loss=loss,
        notes=(*notes, *_unlike_axes(returned.example_batch)),
        tokens_per_sample=inputs.num_tokens,
    )


def _unlike_axes(example: Any) -> Iterator[str]:
    """Note on an example that may be one graph: its edges stay as many as they are at every number of nodes."""
    sizes = [len(tensor) for tensor in nested_tensors(example) if tensor.dim()]
    others = sorted({*sizes[1:]} - {*sizes[:1]})
    if others:
        yield (
            f"the batch size is the first axis of the example's first tensor, {sizes[0]} there; tensors with another "
            f"one ({', '.join(map(str, others[:3]))}) stay as they are; --batch-size {sizes[0]} is the example itself"
        )


def _unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """The network inside wrappers that other settings of a prediction replace."""
    inner: Any = module
    while True:
        if isinstance(inner, (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)):
            inner = inner.module
        elif hasattr(inner, "_orig_mod"):  # torch.compile
            inner = inner._orig_mod
        else:
            unwrapped: torch.nn.Module = inner
            return unwrapped


def _copied(module: torch.nn.Module, name: str) -> torch.nn.Module:
    if isinstance(module, torch.jit.ScriptModule):
        raise ModelBuildError(
            f"{name} is a TorchScript module, which cannot be traced; pass the module it was made from"
        )
    if type(module).forward is torch.nn.Module.forward and "forward" not in vars(module):
        raise ModelBuildError(
            f"{name} is not a complete model: its class {type(module).__name__} defines no forward()"
        )
    try:
        return meta_copy(module)
    except Exception as error:  # deepcopy runs the user's own code
        raise ModelBuildError(
            f"{name} could not be copied to the meta device ({first_line(error)}); give a factory "
            "(file.py:factory) that builds it instead"
        ) from error


def _inputs(returned: _Returned, module: torch.nn.Module, options: InputOptions, name: str) -> ModelInputs:
    if returned.example_batch is not None:
        for part in _of_transformers(module):
            prepare_for_trace(part, options.training)
        if _adds_loops(module):
            _without_loops(module)
        return _example_inputs(returned, name)
    shape = returned.input_shape
    if shape is not None and options.input_shape is None and options.image_size is None:
        options = InputOptions(
            input_shape=shape, sequence_length=options.sequence_length, training=options.training
        )
    inputs = guess_inputs(module, options, name)

    def make_batch(batch_size: int) -> Mapping[str, Any]:
        batch = dict(inputs.make_batch(batch_size))
        if returned.target is not None:
            batch["target"] = _resized(returned.target, len(returned.target), batch_size)
        return batch

    return replace(inputs, make_batch=make_batch)


def _example_inputs(returned: _Returned, name: str) -> ModelInputs:
    form, values = _call_with(returned.module, returned.example_batch)
    tensors = [x for x in nested_tensors(values) if x.dim()]
    if not tensors:
        raise ModelBuildError(
            f"the example batch of {name} holds no tensor with a batch axis; give tensors, alone or in tuples, lists "
            "or dicts"
        )
    size = tensors[0].shape[0]

    def make_batch(batch_size: int) -> Mapping[str, Any]:
        batch = {form: _resized(values, size, batch_size)}
        if returned.target is not None:
            batch["target"] = _resized(returned.target, size, batch_size)
        return batch

    shape = tuple(tensors[0].shape[1:])
    # One axis of whole numbers are tokens: their number is the sequence length of the question.
    is_text = len(shape) == 1 and tensors[0].dtype in (torch.int64, torch.int32)
    return ModelInputs(shape, make_batch, shape[0] if is_text else None)


def _call_with(module: torch.nn.Module, example: Any) -> tuple[str, Any]:
    """An example batch as arguments of a call: by name or position where these fit, else whole as the only one."""
    by_name = isinstance(example, Mapping) and all(isinstance(key, str) for key in example)
    if isinstance(module, WithBatch) or not (by_name or type(example) in (tuple, list)):
        return "args", (example,)
    form = "kwargs" if by_name else "args"
    values: Any = dict(example) if by_name else tuple(example)
    signature = inspect.signature(module.forward)
    try:
        signature.bind(**values) if by_name else signature.bind(*values)
    except TypeError:
        # A call with arguments that do not fit names those that are missing.
        return (form, values) if len(signature.parameters) > 1 else ("args", (example,))
    return form, values


def _resized(value: Any, example_size: int, batch_size: int) -> Any:
    """The same structure with tensors of another batch size: on meta, or with the example's values repeated."""

    def resized(tensor: torch.Tensor) -> torch.Tensor:
        is_batched = tensor.dim() > 0 and tensor.shape[0] == example_size
        if not is_building_on_meta() and not tensor.is_meta:
            return tensor[torch.arange(batch_size) % example_size] if is_batched else tensor
        shape = (batch_size, *tensor.shape[1:]) if is_batched else tensor.shape
        return torch.empty(shape, dtype=tensor.dtype, device="meta")

    return mapped_tensors(value, resized)


def _user_loss(loss: Callable[..., torch.Tensor], *, has_target: bool) -> LossFunction:
    if isinstance(loss, torch.nn.Module):
        loss = meta_copy(loss)  # class weights and other buffers

    def call(output: Any, batch: Mapping[str, Any]) -> torch.Tensor:
        return loss(output, batch["target"]) if has_target else loss(output)

    return call


_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def guess_inputs(module: nn.Module, options: InputOptions, name: str) -> ModelInputs:
    """Find the sample shape and the batch maker of a module.

    In this order: Transformers models have their own inputs (and are made ready for training), timm models
    have an image size; ``input_shape`` is taken as given, as integers if the first layer is an embedding;
    ``image_size`` takes its channels from the first convolution; a first dense layer has its width.

    Raises:
        InvalidSetupError: None of these applies.
    """
    if is_transformers(module):
        prepare_for_trace(module, options.training)
        return transformers_inputs(module, options, name)
    layers = (part for part in module.modules() if any(True for _ in part.parameters(recurse=False)))
    first = next(layers, None)  # in order of definition
    reads_tokens = isinstance(first, (nn.Embedding, nn.EmbeddingBag))
    shape = _sample_shape(module, first, options, name)

    def make_batch(batch_size: int) -> Mapping[str, Any]:
        dtype = torch.int64 if reads_tokens and len(shape) == 1 else torch.get_default_dtype()
        return {"args": (torch.empty((batch_size, *shape), dtype=dtype, device="meta"),)}

    return ModelInputs(shape, make_batch, shape[0] if reads_tokens and len(shape) == 1 else None)


def is_transformers(module: nn.Module) -> bool:
    """True for a model of Transformers."""
    return hasattr(module, "config") and hasattr(module, "main_input_name")


def _of_transformers(module: nn.Module) -> list[nn.Module]:
    """The module, or those in it, that are models of Transformers; none in another of them."""
    if is_transformers(module):
        return [module]
    return [part for child in module.children() for part in _of_transformers(child)]


def _adds_loops(module: nn.Module) -> bool:
    """True if a layer of PyTorch Geometric adds an edge from each node to itself."""
    return "torch_geometric" in sys.modules and any(
        getattr(part, "add_self_loops", False) for part in module.modules()
    )


def _without_loops(module: nn.Module) -> None:
    """Lets a network over graphs run, in place, as on edges none of which leads from a node to itself.

    Layers of PyTorch Geometric look for such edges by the values of the edges before they add their own.
    """
    utils: Any = importlib.import_module("torch_geometric.utils")
    forward = module.forward

    @functools.wraps(forward)
    def without_loops(*args: Any, **kwargs: Any) -> Any:
        layers = [part for name, part in list(sys.modules.items()) if name.startswith("torch_geometric.nn")]
        new = {
            "remove_self_loops": lambda edge_index, edge_attr=None: (edge_index, edge_attr),
            "add_remaining_self_loops": utils.add_self_loops,
        }
        with answered((layer, name, answer) for layer in layers for name, answer in new.items()):
            return forward(*args, **kwargs)

    module.forward = without_loops


def _sample_shape(
    module: nn.Module, first: nn.Module | None, options: InputOptions, name: str
) -> tuple[int, ...]:
    if hasattr(module, "pretrained_cfg") or hasattr(module, "default_cfg"):
        return options.image_shape(timm_input_shape(module))
    if options.input_shape is not None:
        return options.input_shape
    if options.sequence_length is not None:
        return (options.sequence_length,)
    # The first layer with a fixed input says how many channels there are, and how many axes.
    if isinstance(first, _CONVOLUTIONS) and options.image_size is not None:
        num_axes = len(first.kernel_size)
        return (first.in_channels, *[options.image_size] * num_axes)
    if isinstance(first, nn.Linear) and options.image_size is None:
        return (first.in_features,)
    if options.image_size is not None:
        return (3, options.image_size, options.image_size)
    example = f"{first.in_channels},224,224" if isinstance(first, nn.Conv2d) else "3,224,224"
    raise InvalidSetupError(
        f"the inputs of {name} are not known: give --input-shape {example} (one sample without the batch "
        "axis), --image-size 224 or --sequence-length 512"
    )
